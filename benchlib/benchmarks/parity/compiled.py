"""The model through torch.compile: Dynamo's graph, Inductor's kernels. Gradients and training go through it too.

Sizes are dynamic, with one exception that is torch's own: a size of 1 is a constant to it, so that a batch of one row
gets a graph of its own. Letters: B rows, S tokens.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchlib.benchmarks.parity.config import Member
from benchlib.benchmarks.parity.executor import Inputs, Logits, Pair
from benchlib.benchmarks.parity.exporting import built, quiet, require_compiler, require_fp32, trace_inputs
from benchlib.runtime import devices

_XLA_BACKEND = "openxla"  # torch_xla's own name in torch.compile


class Compiled:
    """A compiled model; see ``benchlib.benchmarks.parity.executor.Executor``.

    Forward hooks would break the graph at every module, so that other code would be compared than what users run.
    """

    hooks = False

    def __init__(self, model: torch.nn.Module, where: torch.device, description: dict[str, Any]) -> None:
        self._where, self.description = where, description
        backend = _XLA_BACKEND if where.type == "xla" else "inductor"
        self.module: torch.nn.Module | None = Pair(model.to(where))
        with quiet():
            self.module.compile(dynamic=True, backend=backend)

    def forward(self, inputs: Inputs) -> Logits:
        """Return (start, end), float32 (B, S) each, on the CPU."""
        start, end = self._run(self._placed(inputs))
        self.description["graphs"] = _graphs()
        return start.float().cpu(), end.float().cpu()

    def timed(self, inputs: Inputs) -> Callable[[], None]:
        """Return a call that does one forward pass and waits for it."""
        placed = self._placed(inputs)

        def once() -> None:
            self._run(placed)
            devices.synchronize(self._where)

        return once

    def close(self) -> None:
        """Drop the compiled code."""
        self.module = None
        torch.compiler.reset()

    def _placed(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self._where) for name, tensor in inputs.items()}

    def _run(self, placed: dict[str, torch.Tensor]) -> Logits:
        assert self.module is not None, "closed"
        with torch.no_grad(), quiet(), built():
            return self.module(**placed)  # type: ignore[no-any-return]


def _graphs() -> int:
    # The counter that torch's own guide to recompilations reads; there is no public name for it.
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def make(model: Any, member: Member, where: torch.device, example: Inputs, folder: Path) -> Compiled:
    """Compile ``model`` for any B and S; see ``benchlib.benchmarks.parity.executor.Make``.

    ``description["graphs"]`` counts the graphs up to the last ``forward``: one for B > 1, one for B = 1, one for each mode
    of training before it, and more where the model's code breaks them.
    Raises ``BackendUnavailable`` without a C++ compiler.
    """
    require_fp32(member)
    description: dict[str, Any] = {
        "runtime": f"torch.compile of torch {torch.__version__}",
        "precision": "fp32",
        "kernel": f"sdpa {member.kernel or 'of torch’s choice'}" if member.attention == "sdpa" else "eager attention",
        "dynamic": "batch and length; batch 1 is compiled apart",
    }
    if where.type != "xla":
        description["compiler"] = require_compiler()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    executor = Compiled(model, where, description)
    begin = time.monotonic()
    executor.forward(trace_inputs(example))
    description |= {"compile_s": time.monotonic() - begin, "threads": torch.get_num_threads()}
    return executor
