"""Triton kernels of ``fused_loss``: a program per row of logits (N, V), in blocks of columns. Import it if triton is installed."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _forward(logits, targets, losses, sums, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    begin, lanes = logits + row * columns, tl.arange(0, BLOCK)
    largest, total = float("-inf"), 0.0
    for first in range(0, columns, BLOCK):
        x = tl.load(begin + first + lanes, mask=first + lanes < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(x - higher), 0)
        largest = higher
    whole = largest + tl.log(total)
    tl.store(sums + row, whole)
    tl.store(losses + row, whole - tl.load(begin + tl.load(targets + row)).to(tl.float32))


@triton.jit
def _backward(logits, targets, sums, gradient, result, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = block * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < columns
    x = tl.load(logits + row * columns + lanes, mask=inside, other=float("-inf")).to(tl.float32)
    share = tl.exp(x - tl.load(sums + row)) - tl.where(lanes == tl.load(targets + row), 1.0, 0.0)
    tl.store(result + row * columns + lanes, share * tl.load(gradient + row), mask=inside)


def forward(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return losses and logarithms of sums, fp32 (N,) each, of contiguous logits (N, V) and int64 targets (N,)."""
    rows, columns = logits.shape
    losses, sums = (torch.empty(rows, device=logits.device) for _ in range(2))
    _forward[(rows,)](logits, targets, losses, sums, columns, BLOCK=BLOCK)
    return losses, sums


def backward(logits: torch.Tensor, targets: torch.Tensor, sums: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of contiguous logits (N, V), in their precision."""
    rows, columns = logits.shape
    result = torch.empty_like(logits)
    _backward[(rows, triton.cdiv(columns, BLOCK))](logits, targets, sums, gradient, result, columns, BLOCK=BLOCK)
    return result
