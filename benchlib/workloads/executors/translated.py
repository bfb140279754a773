"""The model as StableHLO text, in other compilers: XLA through PJRT, and IREE.

The text has static shapes: each batch and length is exported, converted and compiled when it first comes.
Weights are arguments, so gradients and training work as in torch: the backward pass is a second program,
whose gradients are those of the logits times given slopes, and ``model`` stays the owner of the parameters.

Notation: B rows, S tokens.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchlib.workloads.executors import Member
from benchlib.workloads.executors.eager import Executor, Inputs, Logits
from benchlib.workloads.stablehlo import export, runtimes
from benchlib.workloads.stablehlo.convert import convert

SLOPES = ("start_slope", "end_slope")


class Translated(Executor):
    """An executor, by the member's name one of ``runtimes.RUNTIMES``, whose description has the seconds of each shape, in order."""

    def __init__(self, model: Any, member: Member, where: torch.device, example: Inputs, folder: Path) -> None:
        """See ``eager.Make``."""
        about = {"precision": "fp32", "dynamic": "no: compiled for each shape", "convert_s": [], "compile_s": []}
        super().__init__(torch.device("cpu"), about)
        self._platform = {"cuda": "rocm" if torch.version.hip else "cuda", "xla": "tpu"}.get(where.type, where.type)
        self._load, self._model = runtimes.RUNTIMES[member.name], model.to("cpu")
        self._forward, self._pullback = export.Answers(model), export.Pullback(model)
        self._programs: dict[Any, runtimes.Runtime] = {}
        self.module = self._differentiable
        self.forward(example)  # what is lacking is reported here, before anything is measured

    def place(self, inputs: Inputs) -> tuple[runtimes.Runtime, Sequence[Any]]:
        program = self._program(self._forward, inputs)
        return program, program.place(runtimes.arguments(program.manifest, runtimes.state(self._forward), inputs))

    def run(self, placed: tuple[runtimes.Runtime, Sequence[Any]]) -> Sequence[Any]:
        program, arrays = placed
        return program.run(arrays)

    def gradients(self, inputs: Inputs, slopes: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the gradients by parameter of a loss whose slopes by start and end logits are given, (B, S) each."""
        arguments = {**dict(zip(SLOPES, slopes, strict=True)), **inputs}
        program = self._program(self._pullback, arguments)
        results = runtimes.computed(program, runtimes.state(self._forward), arguments)
        return {
            item.name.removeprefix("model."): torch.from_numpy(value)
            for item, value in results
            if item.role == "gradient"
        }

    def _differentiable(self, **inputs: torch.Tensor) -> Logits:
        names, parameters = zip(*self._model.named_parameters(), strict=True)
        logits: Logits = _Call.apply(self, names, inputs, *parameters)  # type: ignore[no-untyped-call]
        return logits

    def _program(self, module: torch.nn.Module, inputs: Inputs) -> runtimes.Runtime:
        """Return the program of a shape; the first time it is converted and compiled."""
        key = module, *(tuple(inputs[name].shape) for name in sorted(inputs))
        if key not in self._programs:
            graph = (export.joint if module is self._pullback else export.forward)(module, inputs)
            began = time.perf_counter()
            converted = convert(graph)
            self.description["convert_s"].append(time.perf_counter() - began)
            program = self._load(converted.text, converted.manifest, self._platform)
            self._programs[key] = program
            self.description |= program.description
            self.description["compile_s"].append(program.compile_s)
        return self._programs[key]


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
