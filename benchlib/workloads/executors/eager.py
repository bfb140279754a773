"""What computes a model's outputs: the protocol of all executors, those of torch, and export for other runtimes.

Eager is torch call by call, compiled is torch.compile (Dynamo's graph, Inductor's kernels), aotinductor a package that
was exported and compiled ahead of time and runs without Dynamo. Sizes are dynamic, with one exception that is torch's
own: a size of 1 is a constant to torch.compile, so that a batch of one row gets a graph of its own.

Notation: B rows, S tokens, H width.
"""

import contextlib
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchlib.core.errors import BackendUnavailable
from benchlib.core.machine import cpu_model
from benchlib.runtime import devices
from benchlib.runtime.timing import hold
from benchlib.workloads.executors import Member
from benchlib.workloads.stablehlo.export import Answers, exported, pair, quiet, trace_inputs

_NO_KERNEL = ("No available kernel", "No viable backend")  # how scaled_dot_product_attention says that none fits
_XLA_BACKEND = "openxla"  # torch_xla's own name in torch.compile
# One input of a model: its keyword arguments (input_ids, attention_mask and, where the model takes them,
# token_type_ids), int64 (B, S) each, on the CPU.
Inputs = Mapping[str, torch.Tensor]
Logits = tuple[torch.Tensor, torch.Tensor]
MASK = "attention_mask"


class Executor:
    """One way to compute, made by a call of the type ``Make``.

    ``module`` is called with an input's keyword arguments on the device and returns start and end logits with gradients
    (see ``export.pair``); None for a compiled graph that has none. ``model`` stays the owner of the parameters:
    gradients are read from it and an optimiser changes it in place, and ``module`` follows. ``description`` says what
    really ran, in plain JSON values: kernel, versions, actual precision.
    """

    module: Callable[..., Any] | None = None

    def __init__(self, where: torch.device, description: dict[str, Any]) -> None:
        self.where, self.description = where, description

    def place(self, inputs: Inputs) -> Any:
        """Put an input where it is computed with."""
        raise NotImplementedError

    def run(self, placed: Any) -> Sequence[Any]:
        """Compute start and end logits, tensors or arrays, from what ``place`` returned."""
        raise NotImplementedError

    def forward(self, inputs: Inputs) -> Logits:
        """Return (start, end), float32 or float64 (B, S) each, on the CPU and without gradients."""
        start, end = map(plain, self.run(self.place(inputs)))
        return start, end

    def hidden(self, inputs: Inputs) -> list[torch.Tensor]:
        """Return what embeddings and layers put out, (B, S, H) each, on the CPU; nothing where a graph hides them."""
        return []

    def timed(self, inputs: Inputs, slowdown: float = 0.0) -> Callable[[], None]:
        """Return a call that does one forward pass, waits for it and takes ``slowdown`` times as long again.

        The inputs are placed before, once.
        """
        placed = self.place(inputs)

        def once() -> None:
            begin = time.perf_counter()
            self.run(placed)
            devices.synchronize(self.where)
            hold((time.perf_counter() - begin) * slowdown)

        return once


# ``model`` is the question answering model with the weights to use, in eval mode, in fp32, on the CPU, its attention as
# the member wants it; the executor may move and convert it in place. ``where`` is the device. ``example`` is one input
# with padding, to trace with and to warm up; batch and length change from call to call, so a compiled executor takes
# both as dynamic. ``folder`` is empty, for files of the executor's own. Raises ``BackendUnavailable`` for what is lacking.
Make = Callable[[Any, Member, torch.device, Inputs, Path], Executor]


def plain(result: Any) -> torch.Tensor:
    """Return a result on the CPU, in float32 or, of a model in double precision, float64."""
    tensor = result.detach().cpu() if isinstance(result, torch.Tensor) else torch.from_numpy(np.array(result))
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def unpadded(inputs: Inputs) -> Inputs:
    """Return the first row of an input without its padding."""
    real = inputs[MASK][0].bool()
    return {name: tensor[:1, real] for name, tensor in inputs.items()}


class TorchExecutor(Executor):
    """What torch's own executors share, and a loaded package of AOTInductor: ``call`` returns (start, end), (B, S) each."""

    def __init__(self, call: Any, where: torch.device, description: dict[str, Any]) -> None:
        super().__init__(where, description)
        self._call = call

    masks = True

    def place(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        taken = inputs if self.masks else {name: inputs[name] for name in inputs if name != MASK}
        return {name: tensor.to(self.where) for name, tensor in taken.items()}

    def run(self, placed: Inputs) -> Logits:
        with torch.no_grad():
            return pair(self._call(**placed))


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
    """Torch call by call. In bf16 the weights stay fp32 and autocast chooses what is rounded; fp64 rounds nothing."""

    def __init__(self, model: Any, member: Member, where: torch.device, example: Inputs, folder: Path) -> None:
        """See ``Make``: a device may lack the precision or the attention kernel."""
        # A CPU without the instructions computes the same, slower.
        if member.precision == "bf16" and where.type != "cpu" and (reason := devices.lacking("bf16", where)):
            raise BackendUnavailable(reason)
        if member.precision == "fp64" and where.type == "xpu" and not torch.xpu.get_device_properties(where).has_fp64:
            raise BackendUnavailable(f"{device_name(where)} has no fp64 units")
        self.module = (model.double() if member.precision == "fp64" else model).to(where)
        super().__init__(self._called, where, described("{}, call by call", member))
        self.member, self.masks = member, member.masks
        try:
            self.forward(example if member.masks else unpadded(example))
        except RuntimeError as error:
            if member.kernel and any(text in str(error) for text in _NO_KERNEL):
                raise BackendUnavailable(
                    f"the {member.kernel} attention kernel does not run this model on {device_name(where)} in "
                    f"{member.precision}: it is not built in, or takes no attention mask, which padded inputs need"
                ) from error
            raise

    def hidden(self, inputs: Inputs) -> list[torch.Tensor]:
        with torch.no_grad():
            output = self._called(**self.place(inputs), output_hidden_states=True)
        return [plain(tensor) for tensor in output.hidden_states or ()]

    def _called(self, **arguments: Any) -> Any:
        assert self.module is not None
        with autocast(self.member, self.where):
            return self.module(**arguments)


def device_name(where: torch.device) -> str:
    """Return the name of a device as its driver gives it, of a CPU its model."""
    if where.type in ("cuda", "xpu"):
        return str(torch.get_device_module(where).get_device_name(where))
    if where.type == "xla":
        return str(importlib.import_module("torch_xla.runtime").device_type())
    return cpu_model() if where.type == "cpu" else str(where.type)


class Compiled(TorchExecutor):
    """The model compiled for any B and S. Its hidden states are not asked for: other code would be compared than what users run."""

    def __init__(self, model: Any, member: Member, where: torch.device, example: Inputs, folder: Path) -> None:
        """See ``Make``: a C++ compiler is needed."""
        description = described("torch.compile of {}", member)
        description["dynamic"] = "batch and length; batch 1 is compiled apart"
        backend = _XLA_BACKEND if where.type == "xla" else "inductor"
        if backend == "inductor":
            description["compiler"] = devices.compiler(where)
        torch.compiler.reset()
        self.module = answers = Answers(model.to(where))
        super().__init__(answers, where, description)
        begin = time.monotonic()
        with quiet():
            answers.compile(dynamic=True, backend=backend)
        self.forward(trace_inputs(example))
        description["compile_s"] = time.monotonic() - begin

    def run(self, placed: Inputs) -> Logits:
        with quiet():  # a new shape is compiled
            return super().run(placed)


def require_package(name: str) -> Any:
    """Import and return a package of the extra ``parity``; raise ``BackendUnavailable`` where it is lacking or broken."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BackendUnavailable(f"{name} cannot be imported ({error}): pip install -e '.[parity]'") from error


def aotinductor(model: Any, member: Member, where: torch.device, example: Inputs, folder: Path) -> TorchExecutor:
    """Export and compile for any B and S into ``folder/model.pt2``; see ``Make``: a C++ compiler is needed."""
    compiler = devices.compiler(torch.device("cpu"))  # the package is C++ on every device
    path = folder / "model.pt2"
    begin = time.monotonic()
    program = exported(model.to(where), example, where)
    export_s = time.monotonic() - begin
    # torch._inductor is where torch's documentation has these two functions: there is no other name.
    with torch.no_grad(), quiet():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    package = torch._inductor.aoti_load_package(str(path), device_index=-1 if where.index is None else where.index)
    description = described("AOTInductor of {}", member) | {
        "dynamic": "batch and length",
        "compiler": compiler,
        "export_s": export_s,
        "compile_s": time.monotonic() - begin - export_s,
        "package_bytes": path.stat().st_size,
    }
    return TorchExecutor(package, where, description)
