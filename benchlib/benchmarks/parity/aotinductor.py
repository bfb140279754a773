"""The model through AOTInductor: exported, compiled ahead of time to a package that is loaded and run without Dynamo.

Letters: B rows, S tokens.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchlib.benchmarks.parity.config import Member
from benchlib.benchmarks.parity.executor import Inputs, Logits
from benchlib.benchmarks.parity.exporting import built, export, quiet, require_compiler, require_fp32
from benchlib.runtime import devices


class Packaged:
    """A loaded package; see ``benchlib.benchmarks.parity.executor.Executor``. The graph has no gradients and no hooks."""

    module = None
    hooks = False

    def __init__(self, package: Any, where: torch.device, description: dict[str, Any]) -> None:
        self._package, self._where, self.description = package, where, description

    def forward(self, inputs: Inputs) -> Logits:
        """Return (start, end), float32 (B, S) each, on the CPU."""
        start, end = self._run(self._placed(inputs))
        return start.float().cpu(), end.float().cpu()

    def timed(self, inputs: Inputs) -> Callable[[], None]:
        """Return a call that does one forward pass and waits for it."""
        placed = self._placed(inputs)

        def once() -> None:
            self._run(placed)
            devices.synchronize(self._where)

        return once

    def close(self) -> None:
        """Unload the package."""
        self._package = None

    def _placed(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self._where) for name, tensor in inputs.items()}

    def _run(self, placed: dict[str, torch.Tensor]) -> Logits:
        with torch.no_grad():
            start, end = self._package(**placed)
        return start, end


def make(model: Any, member: Member, where: torch.device, example: Inputs, folder: Path) -> Packaged:
    """Export and compile ``model`` for any B and S into ``folder/model.pt2``; see ``benchlib.benchmarks.parity.executor.Make``.

    Raises ``BackendUnavailable`` without a C++ compiler.
    """
    require_fp32(member)
    compiler = require_compiler()
    path = folder / "model.pt2"
    begin = time.monotonic()
    program = export(model.to(where), example, where)
    exported = time.monotonic()
    # torch._inductor is where torch's documentation has these two functions: there is no other name.
    with torch.no_grad(), quiet(), built():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    compiled = time.monotonic()
    package = torch._inductor.aoti_load_package(str(path), device_index=-1 if where.index is None else where.index)
    description = {
        "runtime": f"AOTInductor of torch {torch.__version__}",
        "precision": "fp32",
        "kernel": f"sdpa {member.kernel or 'of torch’s choice'}" if member.attention == "sdpa" else "eager attention",
        "dynamic": "batch and length",
        "compiler": compiler,
        "export_s": exported - begin,
        "compile_s": compiled - exported,
        "package_bytes": path.stat().st_size,
        "threads": torch.get_num_threads(),
        "built_for": {name: value for name, value in package.get_metadata().items() if value},
    }
    return Packaged(package, where, description)
