"""Cross-entropy in one pass over the logits, as the operator ``benchlib::cross_entropy`` of torch.

On a GPU with Triton each row of logits is read once, in its own precision, and neither converted nor kept as probabilities; elsewhere
torch's operations compute the same. Backward needs the logits and one number per row.

Notation: N rows, V columns. loss_i = l_i - x_i[t_i] with l_i = log sum_j exp(x_ij); its gradient is exp(x_ij - l_i) - [j = t_i].
"""

import importlib.util
import os
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own variable: kernels then run on a CPU, for tests
WIDTHS = (torch.float32, torch.bfloat16, torch.float16)  # kernels sum in fp32, which fp64 must not


def has_kernel(logits: torch.Tensor) -> bool:
    """Return whether the Triton kernel computes these logits; else torch's operations do."""
    placed = logits.is_cuda or INTERPRETED
    return placed and logits.dtype in WIDTHS and importlib.util.find_spec("triton") is not None


def _kernels() -> Any:
    from benchlib.workloads import fused_kernels

    return fused_kernels


@torch.library.custom_op("benchlib::cross_entropy", mutates_args=())
def rows_loss(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and l of each row, fp32 or fp64 (N,), of logits (N, V) and int64 targets (N,)."""
    if has_kernel(logits):
        return _kernels().forward(logits.contiguous(), targets)  # type: ignore[no-any-return]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    sums = wide.logsumexp(1)
    return sums - wide.gather(1, targets[:, None])[:, 0], sums


@torch.library.custom_op("benchlib::cross_entropy_backward", mutates_args=())
def rows_gradient(
    logits: torch.Tensor, targets: torch.Tensor, sums: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the logits (N, V), in their precision, from that of the losses (N,)."""
    if has_kernel(logits):
        return _kernels().backward(logits.contiguous(), targets, sums, gradient.contiguous())  # type: ignore[no-any-return]
    shares = (logits.to(sums.dtype) - sums[:, None]).exp()
    shares.scatter_add_(1, targets[:, None], shares.new_full((len(targets), 1), -1.0))
    return (shares * gradient[:, None]).to(logits.dtype)


@rows_loss.register_fake
def _(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    empty = logits.new_empty(len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))
    return empty, torch.empty_like(empty)


@rows_gradient.register_fake
def _(logits: torch.Tensor, targets: torch.Tensor, sums: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(logits)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None]:
    return rows_gradient(*ctx.saved_tensors, gradient), None


rows_loss.register_autograd(_backward, setup_context=_keep)


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return what ``transformer_stack.loss`` returns: the mean cross-entropy of next tokens, or of an answer's start and end."""
    if logits.shape[2] == 2 and targets.shape[1] == 2:
        logits = logits.transpose(1, 2)
    losses, _ = rows_loss(logits.flatten(0, 1), targets.flatten())
    return losses.mean()
