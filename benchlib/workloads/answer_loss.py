"""The loss of question answering, masked."""

import torch


def answer_losses(
    start: torch.Tensor, end: torch.Tensor, attention_mask: torch.Tensor, first: torch.Tensor, last: torch.Tensor
) -> torch.Tensor:
    """Return the mean of the cross entropies of start and end of each row, (B,).

    Logits (B, S), labels int64 (B,). No answer begins or ends in padding: its logits are out of the softmax, so that how
    much of it there is does not matter. In fp32 at least: bf16 loses the digits that a loss is made of.
    """
    exact = torch.promote_types(start.dtype, torch.float32)
    padding = attention_mask == 0
    losses = [
        torch.nn.functional.cross_entropy(
            side.to(exact).masked_fill(padding, torch.finfo(exact).min), label, reduction="none"
        )
        for side, label in ((start, first), (end, last))
    ]
    return (losses[0] + losses[1]) / 2
