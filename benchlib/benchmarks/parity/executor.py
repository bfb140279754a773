"""What computes a model's outputs: the protocol of all executors, and how one is made for a member.

Letters: B rows, S tokens.
"""

import contextlib
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from benchlib.benchmarks.parity.config import Member
from benchlib.runtime import devices

# One input of a model: its keyword arguments (input_ids, attention_mask and, where the model takes them,
# token_type_ids), int64 (B, S) each, on the CPU.
Inputs = Mapping[str, torch.Tensor]
Logits = tuple[torch.Tensor, torch.Tensor]


class Executor(Protocol):
    """One way to compute, made by ``make(model, member, where, example, folder)`` of its module.

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


def make(member: Member) -> Make:
    """Return the ``make`` of the member's executor module; importing it loads what the module needs."""
    return importlib.import_module(member.executor).make  # type: ignore[no-any-return]
