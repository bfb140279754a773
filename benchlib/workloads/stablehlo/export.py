"""A module becomes a graph of core ATen operations: the forward pass, or the forward and the backward pass together.

Static shapes; dropout is to be off: random numbers have no lowering. Attention that torch has as one fused operation is held to plain products
(``SDPBackend.MATH``): the fused backward operation of a CPU is torch's own and has no counterpart elsewhere.
"""

import contextlib
import functools
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.export import ExportedProgram
from torch.export.experimental import _export_forward_backward
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchlib.workloads.answer_loss import answer_losses

aten = torch.ops.aten
_ERF_P = [-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05]
_ERF_P += [-7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02]
_ERF_Q = [-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03]
_ERF_Q += [-1.42647390514189e-02]


def _layer_norm(
    x: torch.Tensor, sizes: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, ...]:
    """Return the norm, its mean and 1 / deviation."""
    dims = list(range(-len(sizes), 0))
    mean = x.mean(dims, keepdim=True)
    scale = ((x - mean) * (x - mean)).mean(dims, keepdim=True).add(eps).rsqrt()
    scaled = (x - mean) * scale
    scaled = scaled if weight is None else scaled * weight
    return scaled if bias is None else scaled + bias, mean, scale


def _addmm(bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    product = x.mm(y) if alpha == 1 else x.mm(y) * alpha
    return product + (bias if beta == 1 else bias * beta)


def _erf(x: torch.Tensor) -> torch.Tensor:
    """Return x P(x^2) / Q(x^2) for |x| <= 4, by the coefficients of Eigen for fp32 (generic_fast_erf_float): within 3.1e-7."""
    if x.dtype is torch.float64:
        raise ValueError("erf is approximated for fp32, not for fp64: convert the model in fp32")
    inside = x.clamp(-4.0, 4.0)
    square, zero = inside * inside, torch.zeros_like(inside)
    p, q = (functools.reduce(lambda total, factor: total * square + factor, parts, zero) for parts in (_ERF_P, _ERF_Q))
    return inside * p / q


def _clamp(x: torch.Tensor, low: float | None = None, high: float | None = None) -> torch.Tensor:
    x = x if low is None else torch.where(x < low, low, x)
    return x if high is None else torch.where(x > high, high, x)


def _places(dim: int, index: torch.Tensor) -> list[torch.Tensor]:
    """Return indices of all dimensions that count in each but ``dim``, where ``index`` says."""
    counts = torch.meshgrid(*map(torch.arange, index.shape), indexing="ij")
    return [index if place == dim % index.ndim else count for place, count in enumerate(counts)]


# What torch takes for one operation and other compilers do not have: as plain ones, by torch's own definitions, but for a norm
# without operations below ATen, an error function, sums that are not multiplied by one, and what slices or indices do as well.
PLAIN = torch.export.default_decompositions()
PLAIN.update(get_decompositions([aten._softmax, aten._log_softmax, aten.gelu, aten.cumsum, aten.mean, aten.any]))
PLAIN.update(
    {
        aten.native_layer_norm.default: _layer_norm,
        aten.addmm.default: _addmm,
        aten.clamp.default: _clamp,
        aten.erf.default: _erf,
        aten.select.int: lambda x, dim, index: x.narrow(dim, index % x.shape[dim], 1).squeeze(dim),
        aten.split_with_sizes.default: lambda x, sizes, dim=0: x.tensor_split(list(accumulate(sizes))[:-1], dim),
        aten.embedding.default: lambda weight, index, *_: weight[index],
        aten.gather.default: lambda x, dim, index, **_: x[_places(dim, index)],
        aten.scatter.value: lambda x, dim, index, value: x.index_put(_places(dim, index), x.new_full((), value)),
    }
)


def forward(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor], whole_gelu: bool = False) -> ExportedProgram:
    """Return the graph of ``module(**inputs)``, tensors to tensors; with ``whole_gelu`` each GELU stays one operation.

    Raises what ``torch.export`` raises.
    """
    plain = PLAIN.copy()
    if whole_gelu:
        plain.pop(aten.gelu.default)
    with torch.no_grad(), quiet(), sdpa_kernel(SDPBackend.MATH):
        return torch.export.export(module, (), dict(inputs), strict=False).run_decompositions(plain)


def joint(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> ExportedProgram:
    """Return the graph of the loss ``module(**inputs)``, a scalar, and of its gradients by every parameter.

    The graph's signature says which output is which gradient; see ``torch.export.graph_signature``.
    """
    with torch.enable_grad(), quiet(), sdpa_kernel(SDPBackend.MATH):
        # The one name that torch calls experimental; no public one gives the joint graph.
        program = _export_forward_backward(torch.export.export(module, (), dict(inputs), strict=False))
        return program.run_decompositions(PLAIN)


def exported(model: torch.nn.Module, example: Mapping[str, torch.Tensor], where: torch.device) -> ExportedProgram:
    """Return the graph of a model on ``where``: from the example's arguments to (start, end), B and S free.

    Raises what ``torch.export`` raises where the model fixes B or S.
    """
    inputs = {name: tensor.to(where) for name, tensor in trace_inputs(example).items()}
    free = torch.export.Dim.DYNAMIC  # an error, not a constant, where a size is not free
    sizes = {name: dict.fromkeys(range(min(2, tensor.ndim)), free) for name, tensor in inputs.items()}
    with torch.no_grad(), quiet():
        return torch.export.export(Answers(model), (), inputs, dynamic_shapes=sizes, strict=False)


def trace_inputs(example: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return inputs of B rows and S tokens to trace with whose B and S are general: at least 2, and not equal.

    A tracer takes a size of 0 or 1 for a constant (of what broadcasts), and two sizes that are equal for one.
    """
    first = {name: tensor[:1] for name, tensor in example.items()}
    if any(tensor.ndim > 1 and tensor.shape[1] < 2 for tensor in first.values()):
        first = {name: tensor.repeat(1, 2) if tensor.ndim > 1 else tensor for name, tensor in first.items()}
    rows = 3 if any(tensor.ndim > 1 and tensor.shape[1] == 2 for tensor in first.values()) else 2
    return {name: tensor.repeat(rows, *[1] * (tensor.ndim - 1)) for name, tensor in first.items()}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporters' hints and deprecations out of the logs; errors are raised as ever."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Wrapped(torch.nn.Module):
    """A model as a function of tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def sides(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return start and end logits, (B, S) each."""
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        return pair(self.model(input_ids=input_ids, attention_mask=attention_mask, **types))


class AnswerLoss(_Wrapped):
    """The loss of question answering, see ``answer_losses``."""

    def forward(
        self, start: torch.Tensor, end: torch.Tensor, weight: torch.Tensor | None = None, **inputs: torch.Tensor
    ) -> torch.Tensor:
        """Return the scalar loss of labels int64 (B,) and the model's own int64 (B, S) inputs.

        It is the mean over the rows, or with ``weight``, fp32 (B,), their weighted sum.
        """
        losses = answer_losses(*self.sides(**inputs), inputs["attention_mask"], start, end)
        return losses.mean() if weight is None else (losses * weight).sum()


class Pullback(_Wrapped):
    """What a joint graph needs to be one of any loss: start and end logits times given slopes, summed.

    Its gradients are those of the loss whose slopes by the logits are given.
    """

    def forward(self, start_slope: torch.Tensor, end_slope: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """Return a scalar of slopes fp32 (B, S) and the model's own inputs."""
        start, end = self.sides(**inputs)
        return (start * start_slope).sum() + (end * end_slope).sum()


class Answers(_Wrapped):
    """A question answering model: start and end logits of its own inputs."""

    forward = _Wrapped.sides


class NextToken(_Wrapped):
    """A decoder: logits (B, S, V) of input_ids int64 (B, S), without a cache."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


def pair(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return start and end logits of what a question answering model returned."""
    return output if isinstance(output, tuple) else (output.start_logits, output.end_logits)
