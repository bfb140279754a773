"""A module becomes a graph of core ATen operations: the forward pass, or the forward and the backward pass together.

Static shapes; dropout off. Attention that torch has as one fused operation is held to plain products (``SDPBackend.MATH``): the
fused backward operation of a CPU is torch's own and has no counterpart elsewhere.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.nn.attention import SDPBackend, sdpa_kernel

_NOISY = (
    "torch.onnx", "torch.export", "torch._export", "torch._inductor", "torch._dynamo", "torch._subclasses", "onnxscript", "onnx_ir",
)  # fmt: skip


def forward(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> ExportedProgram:
    """Return the graph of ``module(**inputs)``, tensors to tensors. Raises what ``torch.export`` raises."""
    _require_no_dropout(module)
    with torch.no_grad(), quiet(), sdpa_kernel(SDPBackend.MATH):
        return torch.export.export(module, (), dict(inputs), strict=False).run_decompositions()


def joint(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> ExportedProgram:
    """Return the graph of the loss ``module(**inputs)``, a scalar, and of its gradients by every parameter.

    The graph's signature says which output is which gradient; see ``torch.export.graph_signature``.
    """
    # The one place with a name that torch calls experimental; no public one gives the joint graph.
    from torch.export.experimental import _export_forward_backward

    _require_no_dropout(module)
    with torch.enable_grad(), quiet(), sdpa_kernel(SDPBackend.MATH):
        exported = torch.export.export(module, (), dict(inputs), strict=False)
        return _export_forward_backward(exported)


def _require_no_dropout(module: torch.nn.Module) -> None:
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.Dropout) and child.training and child.p:
            raise ValueError(
                f"{name} drops values at random, which is not converted: call eval() first, or set its rate to 0"
            )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporters' hints and deprecations out of the logs; errors are raised as ever."""
    levels = {name: logging.getLogger(name).level for name in _NOISY}
    try:
        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


class AnswerLoss(torch.nn.Module):
    """The loss of question answering: the mean of the cross-entropies of start and end; no answer begins or ends in padding."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, start: torch.Tensor, end: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """Return the scalar loss of labels int64 (B,) and the model's own int64 (B, S) inputs."""
        sides = pair(self.model(**inputs))
        padding = inputs["attention_mask"] == 0
        lowest = torch.finfo(sides[0].dtype).min
        entropy = torch.nn.functional.cross_entropy
        first, last = (
            entropy(side.masked_fill(padding, lowest), label) for side, label in zip(sides, (start, end), strict=True)
        )
        return (first + last) / 2


class Pullback(torch.nn.Module):
    """What a joint graph needs to be one of any loss: start and end logits times given slopes, summed.

    Its gradients are those of the loss whose slopes by the logits are given.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, start_slope: torch.Tensor, end_slope: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """Return a scalar of slopes fp32 (B, S) and the model's own inputs."""
        start, end = pair(self.model(**inputs))
        return (start * start_slope).sum() + (end * end_slope).sum()


class Answers(torch.nn.Module):
    """A question answering model as a function of tensors: start and end logits, (B, S) each."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (start, end) of the model's own inputs."""
        return pair(self.model(**inputs))


class NextToken(torch.nn.Module):
    """A decoder as a function of tensors: logits (B, S, V) of input_ids int64 (B, S), without a cache."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


def pair(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return start and end logits of what a question answering model returned."""
    return output if isinstance(output, tuple) else (output.start_logits, output.end_logits)
