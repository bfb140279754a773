"""What computes a model's outputs: the protocol of all executors, those of torch, and export for other runtimes.

Eager is torch call by call, compiled is torch.compile (Dynamo's graph, Inductor's kernels), aotinductor a package that was
exported and compiled ahead of time and runs without Dynamo. Sizes are dynamic, with one exception that is torch's own:
a size of 1 is a constant to torch.compile, so that a batch of one row gets a graph of its own.

Letters: B rows, S tokens.
"""

import contextlib
import importlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from benchlib.benchmarks.parity.config import Member
from benchlib.core.errors import BackendUnavailable, UserError
from benchlib.core.machine import cpu_model
from benchlib.runtime import devices
from benchlib.workloads.stablehlo.export import quiet, trace_inputs

_NO_KERNEL = ("No available kernel", "No viable backend")  # how scaled_dot_product_attention says that none fits
_XLA_BACKEND = "openxla"  # torch_xla's own name in torch.compile
# One input of a model: its keyword arguments (input_ids, attention_mask and, where the model takes them,
# token_type_ids), int64 (B, S) each, on the CPU.
Inputs = Mapping[str, torch.Tensor]
Logits = tuple[torch.Tensor, torch.Tensor]


class Executor(Protocol):
    """One way to compute, made by a function of the type ``Make``.

    ``module`` is called with an input's keyword arguments on the device and returns start and end logits with
    gradients (see ``logits``); None for a compiled graph that has none. ``model`` stays the owner of the parameters:
    gradients are read from it and an optimiser changes it in place, and ``module`` follows. ``hooks`` says whether
    forward hooks on the modules of ``model`` are called by ``forward``. ``description`` says what really ran, in plain
    JSON values: kernel, versions, actual precision.
    """

    module: torch.nn.Module | None
    hooks: bool
    description: dict[str, Any]

    def forward(self, inputs: Inputs) -> Logits:
        """Return (start, end), float32 or float64 (B, S) each, on the CPU and without gradients."""

    def timed(self, inputs: Inputs) -> Callable[[], None]:
        """Return a call that does one forward pass and waits for it; the inputs are placed before, once."""

    def close(self) -> None:
        """Free what the executor holds. The model is not used after it."""


class TorchExecutor:
    """What torch's own executors share: inputs on the device, logits back on the CPU, time until the device is done.

    See ``Executor``. ``run`` computes (start, end), (B, S) each, from inputs on the device, without gradients.
    """

    module: torch.nn.Module | None = None
    hooks = False

    def __init__(self, where: torch.device, description: dict[str, Any]) -> None:
        self.where, self.description = where, description

    def forward(self, inputs: Inputs) -> Logits:
        """Return (start, end), float32, or float64 of a model in double precision, (B, S) each, on the CPU."""
        start, end = (side.cpu() for side in self.run(self._placed(inputs)))
        return (start, end) if start.dtype == torch.float64 else (start.float(), end.float())

    def timed(self, inputs: Inputs) -> Callable[[], None]:
        """Return a call that does one forward pass and waits for the device."""
        placed = self._placed(inputs)

        def once() -> None:
            self.run(placed)
            devices.synchronize(self.where)

        return once

    def run(self, placed: Inputs) -> Logits:
        """Compute (start, end), (B, S) each, from inputs on the device, without gradients."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the model."""
        self.module = None

    def _placed(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self.where) for name, tensor in inputs.items()}


# ``model`` is the question answering model with the golden weights, in eval mode, in fp32, on the CPU, its attention
# as the member wants it; the executor may move and convert it in place. ``where`` is the device. ``example`` is one
# input with padding, to trace with and to warm up; batch and length change from call to call, so a compiled executor
# takes both as dynamic. ``folder`` is empty, for files of the executor's own.
Make = Callable[[Any, Member, torch.device, Inputs, Path], Executor]


class Pair(torch.nn.Module):
    """A question answering model as a function of tensors, which is what exporters take: logits as a plain pair."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> Logits:
        """Return start and end logits, (B, S) each."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        return logits(self.model(**inputs))


def logits(output: Any) -> Logits:
    """Return start and end logits of what a question answering model returned: its record, or a pair already."""
    return output if isinstance(output, tuple) else (output.start_logits, output.end_logits)


def autocast(member: Member, where: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which the member's matrix products run in bf16; nothing changes for fp32 and fp64."""
    return devices.autocast("bf16" if member.precision == "bf16" else "fp32", where)


def described(runtime: str, member: Member) -> dict[str, Any]:
    """Return the begin of a description: the runtime with torch's version, the kernel, the precision, the threads."""
    sdpa = f"scaled_dot_product_attention: {member.kernel or 'of torch’s choice'}"
    return {
        "runtime": runtime.format(f"torch {torch.__version__}"),
        "kernel": "matrix products and softmax" if member.attention == "eager" else sdpa,
        "precision": "bf16 products, fp32 weights (autocast)" if member.precision == "bf16" else member.precision,
        "threads": torch.get_num_threads(),
    }


class Eager(TorchExecutor):
    """See ``Executor``. In bf16 the weights stay fp32 and autocast chooses what is rounded."""

    hooks = True

    def __init__(self, model: Any, member: Member, where: torch.device) -> None:
        """Place the model; fp64 converts its weights, which were fp32 before, without rounding them."""
        super().__init__(where, described("{}, call by call", member) | {"attention": member.attention})
        self.member = member
        self.module = (model.double() if member.precision == "fp64" else model).to(where)

    def run(self, placed: Inputs) -> Logits:
        """Compute (start, end) call by call."""
        assert self.module is not None, "closed"
        with torch.no_grad(), autocast(self.member, self.where):
            return logits(self.module(**placed))


def eager(model: Any, member: Member, where: torch.device, example: Inputs, folder: Path) -> Eager:
    """Return the executor; see ``Make``.

    Raises ``BackendUnavailable`` where the device lacks the precision or the attention kernel.
    """
    _require_precision(member, where)
    executor = Eager(model, member, where)
    try:
        executor.forward(example)
    except RuntimeError as error:
        if member.kernel and any(text in str(error) for text in _NO_KERNEL):
            raise BackendUnavailable(
                f"the {member.kernel} attention kernel does not run this model on {device_name(where)} in {member.precision}: "
                "it is not built in, or takes no attention mask, which padded inputs need"
            ) from error
        raise
    return executor


def _require_precision(member: Member, where: torch.device) -> None:
    if member.precision == "bf16" and where.type != "cpu":  # a CPU without the instructions computes the same, slower
        has, reason = devices.supports("bf16", where)
        if not has:
            raise BackendUnavailable(reason)
    if member.precision == "fp64" and where.type == "xpu" and not torch.xpu.get_device_properties(where).has_fp64:
        raise BackendUnavailable(f"{device_name(where)} has no fp64 units")


def device_name(where: torch.device) -> str:
    """Return the name of a device as its driver gives it, of a CPU its model."""
    if where.type in ("cuda", "xpu"):
        return str(torch.get_device_module(where).get_device_name(where))
    if where.type == "xla":
        return str(importlib.import_module("torch_xla.runtime").device_type())
    return cpu_model() if where.type == "cpu" else str(where.type)


class Compiled(TorchExecutor):
    """A compiled model; see ``Executor``.

    Forward hooks would break the graph at every module, so that other code would be compared than what users run.
    """

    def __init__(self, model: torch.nn.Module, where: torch.device, description: dict[str, Any]) -> None:
        super().__init__(where, description)
        self.module = Pair(model.to(where))
        with quiet():
            self.module.compile(dynamic=True, backend=_XLA_BACKEND if where.type == "xla" else "inductor")

    def run(self, placed: Inputs) -> Logits:
        """Compute (start, end) by the compiled graph, which a new shape may add to."""
        assert self.module is not None, "closed"
        with torch.no_grad(), quiet(), built():
            pair: Logits = self.module(**placed)
        # The counter that torch's own guide to recompilations reads; there is no public name for it.
        self.description["graphs"] = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return pair

    def close(self) -> None:
        """Drop the compiled code."""
        super().close()
        torch.compiler.reset()


def compiled(model: Any, member: Member, where: torch.device, example: Inputs, folder: Path) -> Compiled:
    """Compile ``model`` for any B and S; see ``Make``.

    ``description["graphs"]`` counts the graphs up to the last ``forward``: one for B > 1, one for B = 1, one for each mode
    of training before it, and more where the model's code breaks them.
    Raises ``BackendUnavailable`` without a C++ compiler.
    """
    require_fp32(member)
    description = described("torch.compile of {}", member)
    description["dynamic"] = "batch and length; batch 1 is compiled apart"
    if where.type != "xla":
        description["compiler"] = require_compiler()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    executor = Compiled(model, where, description)
    begin = time.monotonic()
    executor.forward(trace_inputs(example))
    description["compile_s"] = time.monotonic() - begin
    return executor


def require_fp32(member: Member) -> None:
    """Raise ``UserError`` where the member asks for another precision: what was exported in fp32 would pass for it."""
    if member.precision != "fp32":
        raise UserError(
            f"member {member.name}: precision = {member.precision}, but {member.executor} takes the model in fp32: use fp32"
        )


def require_package(name: str) -> Any:
    """Import and return a package of the extra ``parity``; raise ``BackendUnavailable`` where it is lacking or broken."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BackendUnavailable(f"{name} cannot be imported ({error}): pip install 'benchlib[parity]'") from error


def require_compiler() -> str:
    """Return the C++ compiler that Inductor takes: CXX, else the system's own. Raise ``BackendUnavailable`` without one."""
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    compiler = shutil.which(name)
    if not compiler:
        raise BackendUnavailable(
            f"Inductor needs a C++ compiler and there is no {name}: install it (Debian: apt install g++; "
            "macOS: xcode-select --install), or name another one in CXX"
        )
    return compiler


@contextlib.contextmanager
def built() -> Iterator[None]:
    """Tell a compiler that lacks its headers apart from one that fails: the former is ``BackendUnavailable``."""
    try:
        yield
    except Exception as error:  # Inductor wraps the compiler's words in errors of several kinds
        if "Python.h" not in str(error):
            raise
        raise BackendUnavailable(
            f"the C++ compiler finds no Python.h: install the headers of Python {sys.version_info[0]}.{sys.version_info[1]} "
            "(Debian: apt install python3-dev)"
        ) from error


def export(model: torch.nn.Module, example: Inputs, where: torch.device) -> torch.export.ExportedProgram:
    """Return the graph of a model on ``where``: from the example's arguments to (start, end), B and S free.

    Raises what ``torch.export`` raises where the model fixes B or S.
    """
    inputs = {name: tensor.to(where) for name, tensor in trace_inputs(example).items()}
    free = dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)  # DYNAMIC: an error, not a constant, where it is not free
    with torch.no_grad(), quiet():
        return torch.export.export(
            Pair(model), (), inputs, dynamic_shapes={name: dict(free) for name in inputs}, strict=False
        )


class Packaged(TorchExecutor):
    """A loaded package; see ``Executor``. The graph has no gradients and no hooks."""

    def __init__(self, package: Any, where: torch.device, description: dict[str, Any]) -> None:
        super().__init__(where, description)
        self._package = package

    def run(self, placed: Inputs) -> Logits:
        """Compute (start, end) by the package."""
        with torch.no_grad():
            start, end = self._package(**placed)
        return start, end

    def close(self) -> None:
        """Unload the package."""
        self._package = None


def aotinductor(model: Any, member: Member, where: torch.device, example: Inputs, folder: Path) -> Packaged:
    """Export and compile ``model`` for any B and S into ``folder/model.pt2``; see ``Make``.

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
    description = described("AOTInductor of {}", member) | {
        "dynamic": "batch and length",
        "compiler": compiler,
        "export_s": exported - begin,
        "compile_s": compiled - exported,
        "package_bytes": path.stat().st_size,
        "built_for": {name: value for name, value in package.get_metadata().items() if value},
    }
    return Packaged(package, where, description)
