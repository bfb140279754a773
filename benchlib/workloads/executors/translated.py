"""The model as StableHLO text, in other compilers: XLA through PJRT, and IREE.

The text has static shapes: each batch and length is converted and compiled when it first comes, all but the first from
one export. Weights are arguments, so gradients and training work as in torch: the backward pass is a second program,
whose gradients are those of the logits times given slopes, and ``model`` stays the owner of the parameters.

Notation: B rows, S tokens.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchlib.core import mlir
from benchlib.core.errors import BackendUnavailable
from benchlib.workloads.executors import Member
from benchlib.workloads.executors.eager import Executor, Inputs, Logits
from benchlib.workloads.stablehlo import export, runtimes
from benchlib.workloads.stablehlo.convert import convert
from benchlib.workloads.stablehlo.manifest import array

SLOPES = ("start_slope", "end_slope")


class Translated(Executor):
    """An executor whose description has the seconds of each shape, in order."""

    def __init__(self, model: torch.nn.Module, runtime: str, platform: str) -> None:
        about = {"precision": "fp32", "dynamic": "no: compiled for each shape", "convert_s": [], "compile_s": []}
        super().__init__(torch.device("cpu"), about)
        self._model, self._runtime, self._platform = model, runtime, platform
        self._forward, self._pullback = export.Answers(model), export.Pullback(model)
        self._families: dict[str, export.Family] = {}
        self._programs: dict[Any, runtimes.Runtime] = {}
        self._weights: dict[str, Any] = {}
        self._version = -1
        self.module = _Module(self)

    def forward(self, inputs: Inputs) -> Logits:
        start, end = (torch.from_numpy(np.array(side)) for side in self._call(self._forward, inputs))
        return start, end

    def timed(self, inputs: Inputs) -> Callable[[], None]:
        program = self._program(self._forward, inputs)
        placed = self._placed(program, inputs)

        def once() -> None:
            program.run(placed)

        return once

    def gradients(self, inputs: Inputs, slopes: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the gradients by parameter of a loss whose slopes by start and end logits are given, (B, S) each."""
        arguments = {**dict(zip(SLOPES, slopes, strict=True)), **inputs}
        values = self._call(self._pullback, arguments)
        results = self._program(self._pullback, arguments).manifest.results
        return {
            item.name.removeprefix("model."): torch.from_numpy(np.array(value))
            for item, value in zip(results, values, strict=True)
            if item.role == "gradient"
        }

    def close(self) -> None:
        self._families, self._programs, self._weights, self.module = {}, {}, {}, None

    def _call(self, module: torch.nn.Module, inputs: Inputs) -> Sequence[Any]:
        program = self._program(module, inputs)
        return program.run(self._placed(program, inputs))

    def _program(self, module: torch.nn.Module, inputs: Inputs) -> runtimes.Runtime:
        """Return the program of a shape; the first time it is converted and compiled."""
        kind = type(module).__name__.lower()
        key = kind, *(tuple(inputs[name].shape) for name in sorted(inputs))
        if key not in self._programs:
            graph = self._graph(module, kind, inputs)
            began = time.perf_counter()
            converted = convert(graph, kind)
            self.description["convert_s"].append(time.perf_counter() - began)
            program = runtimes.RUNTIMES[self._runtime](converted.text, converted.manifest, self._platform)
            self._programs[key] = program
            self.description |= program.description
            self.description["compile_s"].append(program.compile_s)
        return self._programs[key]

    def _graph(self, module: torch.nn.Module, kind: str, inputs: Inputs) -> Any:
        """Return the graph of a shape. Free sizes take several times as long to export, and pay from the second on."""
        gradients = module is self._pullback
        if all(name != kind for name, *_ in self._programs):
            return (export.joint if gradients else export.forward)(module, inputs)
        if kind not in self._families:
            self._families[kind] = export.Family(module, inputs, gradients)
        return self._families[kind].graph(inputs)

    def _placed(self, program: runtimes.Runtime, inputs: Inputs) -> list[Any]:
        tensors = {
            **dict(self._pullback.named_buffers()),
            **dict(self._pullback.named_parameters(remove_duplicate=False)),
        }
        version = sum(tensor._version for tensor in tensors.values())  # whatever writes into a parameter counts it up
        if version != self._version:
            self._weights, self._version = {}, version
        items = program.manifest.arguments
        fresh = [item for item in items if item.name in inputs or item.name not in self._weights]
        arrays = [array(inputs[item.name] if item.name in inputs else tensors[item.name], item) for item in fresh]
        placed = dict(zip((item.name for item in fresh), program.place(arrays), strict=True))
        self._weights |= {name: value for name, value in placed.items() if name not in inputs}
        return [placed[item.name] if item.name in placed else self._weights[item.name] for item in items]


class _Module(torch.nn.Module):
    """The executor as a module with gradients."""

    def __init__(self, owner: Translated) -> None:
        super().__init__()
        self._owner = [owner]  # in a list: the executor's model is no child of this module

    def forward(self, **inputs: torch.Tensor) -> Logits:
        (owner,) = self._owner
        names, parameters = zip(*owner._model.named_parameters(), strict=True)
        logits: Logits = _Call.apply(owner, names, inputs, *parameters)  # type: ignore[no-untyped-call]
        return logits


class _Call(torch.autograd.Function):
    """One call of the two programs."""

    @staticmethod
    def forward(
        ctx: Any, owner: Translated, names: Sequence[str], inputs: Mapping[str, torch.Tensor], *parameters: torch.Tensor
    ) -> Logits:
        ctx.call = owner, names, inputs
        return owner.forward(inputs)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> Any:
        """Return the parameters' gradients; none for one that the logits do not depend on."""
        owner, names, inputs = ctx.call
        gradients = owner.gradients(inputs, [slope.contiguous() for slope in slopes])
        return (None, None, None, *(gradients.get(name) for name in names))


def xla(model: Any, member: Member, where: torch.device, example: Inputs, folder: Path) -> Translated:
    """Return the model in XLA; see ``eager.Make``.

    Raises ``BackendUnavailable`` without jax or the plugin of the platform.
    """
    mlir.jax()
    platform = {"cuda": "rocm" if torch.version.hip else "cuda", "xla": "tpu"}.get(where.type, where.type)
    executor = Translated(model.to("cpu"), "xla", platform)
    executor.forward(example)  # what is lacking is reported here, before anything is measured
    return executor


def iree(model: Any, member: Member, where: torch.device, example: Inputs, folder: Path) -> Translated:
    """Return the model in IREE, on a CPU; see ``eager.Make``. Raises ``BackendUnavailable`` without IREE's packages."""
    if where.type != "cpu":
        raise BackendUnavailable(f"IREE computes on CPUs here, not on {where.type}: use backend cpu")
    runtimes.iree("runtime")
    executor = Translated(model.to("cpu"), "iree", "cpu")
    executor.forward(example)
    return executor
