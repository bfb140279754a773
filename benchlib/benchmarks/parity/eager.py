"""The model as torch runs it call by call: eager or scaled_dot_product_attention, on any device, in fp32, bf16 or fp64.

Letters: B rows, S tokens.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchlib.benchmarks.parity.config import Member
from benchlib.benchmarks.parity.executor import Inputs, Logits, autocast, logits
from benchlib.core.errors import BackendUnavailable
from benchlib.runtime import devices

_NO_KERNEL = ("No available kernel", "No viable backend")  # how scaled_dot_product_attention says that none fits


class Eager:
    """See ``benchlib.benchmarks.parity.executor.Executor``. In bf16 the weights stay fp32 and autocast chooses what is rounded."""

    hooks = True

    def __init__(self, model: Any, member: Member, where: torch.device) -> None:
        """Place the model; fp64 converts its weights, which were fp32 before, without rounding them."""
        self.member, self.where = member, where
        self.module: torch.nn.Module | None = (model.double() if member.precision == "fp64" else model).to(where)
        self.description: dict[str, Any] = {
            "runtime": f"torch {torch.__version__}, call by call",
            "attention": member.attention,
            "kernel": _kernel(member),
            "precision": {"fp32": "fp32", "fp64": "fp64", "bf16": "bf16 products, fp32 weights (autocast)"}[
                member.precision
            ],
            "threads": torch.get_num_threads(),
        }

    def forward(self, inputs: Inputs) -> Logits:
        """Return (start, end), float32 (float64 of fp64) (B, S) each, on the CPU."""
        start, end = self._run(self._placed(inputs))
        if self.member.precision == "fp64":
            return start.cpu(), end.cpu()
        return start.float().cpu(), end.float().cpu()

    def timed(self, inputs: Inputs) -> Callable[[], None]:
        """Return a call that does one forward pass and waits for the device."""
        placed = self._placed(inputs)

        def once() -> None:
            self._run(placed)
            devices.synchronize(self.where)

        return once

    def close(self) -> None:
        """Let go of the model."""
        self.module = None

    def _placed(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self.where) for name, tensor in inputs.items()}

    def _run(self, placed: dict[str, torch.Tensor]) -> Logits:
        assert self.module is not None, "closed"
        with torch.no_grad(), autocast(self.member, self.where):
            return logits(self.module(**placed))


def _kernel(member: Member) -> str:
    if member.attention == "eager":
        return "matrix products and softmax"
    return f"scaled_dot_product_attention: {member.kernel or 'of torch’s choice'}"


def make(model: Any, member: Member, where: torch.device, example: Inputs, folder: Path) -> Eager:
    """Return the executor; see ``benchlib.benchmarks.parity.executor.Make``.

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
    """Return the name of a device as its driver gives it, else its type."""
    if where.type in ("cuda", "xpu"):
        return str(torch.get_device_module(where).get_device_name(where))
    if where.type == "xla":
        return str(importlib.import_module("torch_xla.runtime").device_type())
    return str(where.type)
