"""Dropout for CPUs that draws its masks four times as fast as torch does, in attention too.

torch's generator gives a CPU one Bernoulli value at a time, which makes dropout a fifth of a BERT training step. Here
SFC64, seeded by a draw from torch's generator, fills a buffer with random bits, and 16 of them decide on a value: so
torch's random state still determines every mask, and a rate is met to within 1 / 131,072.

Letters: B samples, H heads, S tokens, D values of a head.
"""

from typing import Any

import numpy as np
import torch
import transformers
from transformers.masking_utils import sdpa_mask

ATTENTION = "benchlib_cpu"  # the name under which transformers finds ``attention``


def keep_mask(shape: torch.Size | tuple[int, ...], rate: float) -> torch.Tensor:
    """Return a bool tensor that is True with probability 1 - ``rate``; torch's CPU generator determines it."""
    seed = int(torch.randint(2**62, ()))
    count = int(np.prod(shape))
    bits = np.random.SFC64(seed).random_raw(-(-count // 4)).view(np.int16)
    return torch.from_numpy(bits)[:count].view(shape) >= round(rate * 65536) - 32768


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, rate: float) -> torch.Tensor:
        keep = keep_mask(values.shape, rate)
        ctx.save_for_backward(keep)
        ctx.scale = 1 / (1 - rate)
        return (values * keep).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (keep,) = ctx.saved_tensors
        return (gradients[0] * keep).mul_(ctx.scale), None


class Dropout(torch.nn.Dropout):
    """``torch.nn.Dropout`` with faster masks; the same in expectation."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Drop values while training."""
        if not self.training or not self.p:
            return input
        return _Drop.apply(input, self.p)  # type: ignore[no-any-return]


class _Attention(torch.autograd.Function):
    """softmax(q k' scale + bias), dropped, times v. All (B, H, S, D), the bias (B or 1, 1, S or 1, S).

    One function instead of a chain of operations: on a CPU each pass over the (B, H, S, S) weights costs about as much
    as a third of a matrix product, and most of them are saved here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        scale: float,
        rate: float,
    ) -> torch.Tensor:
        weights = torch.matmul(query * scale, key.transpose(2, 3))
        if bias is not None:
            weights += bias
        weights = torch.softmax(weights, -1)
        keep = keep_mask(weights.shape, rate)
        dropped = weights * keep
        ctx.save_for_backward(query, key, value, weights, keep, dropped)
        ctx.scale, ctx.rest = scale, 1 / (1 - rate)
        return torch.matmul(dropped, value * ctx.rest)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        query, key, value, weights, keep, dropped = ctx.saved_tensors
        gradient = gradients[0] * ctx.rest
        of_value = torch.matmul(dropped.transpose(2, 3), gradient)
        of_weights = torch.matmul(gradient, value.transpose(2, 3)).mul_(keep)
        of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
        of_query = torch.matmul(of_scores, key).mul_(ctx.scale)
        of_key = torch.matmul(of_scores.transpose(2, 3), query).mul_(ctx.scale)
        return of_query, of_key, of_value, None, None, None


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' implementations do: (B, H, S, D) each, the mask bool, True where to look; returns (B, S, H, D)."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if module.training and dropout:
        bias = None
        if attention_mask is not None:
            bias = torch.zeros(attention_mask.shape, dtype=query.dtype).masked_fill_(
                ~attention_mask, torch.finfo(query.dtype).min
            )
        output = _Attention.apply(query, key, value, bias, scale, dropout)
    else:
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scale
        )
    return output.transpose(1, 2).contiguous(), None


def speed_up(model: Any) -> list[str]:
    """Replace the dropout of a transformers model on a CPU; return what was replaced.

    Attention is replaced only where the model takes the implementation from transformers' table and has the dropout:
    without it torch's own kernel is faster.
    """
    replaced = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Dropout and child.p:
                setattr(module, name, Dropout(child.p).train(child.training))
                replaced.append("dropout")
    rate = getattr(model.config, "attention_probs_dropout_prob", getattr(model.config, "attention_dropout", 0.0))
    if rate and model.config._attn_implementation == "sdpa" and model.config.model_type in _TABLE_USERS:
        transformers.AttentionInterface.register(ATTENTION, attention)
        transformers.AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        model.set_attn_implementation(ATTENTION)
        replaced.append("attention")
    return sorted(set(replaced))


# Families whose attention is a plain softmax from the table, checked by a test against torch's dropout-free kernel.
_TABLE_USERS = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert")
