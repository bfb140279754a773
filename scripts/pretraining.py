"""What the trainings of the embedded models share: their options, and steps of AdamW at a rate that warms up and falls."""

import argparse
from pathlib import Path

import torch
from measuring import options_of
from torch import Tensor, nn


def options_for(doc: str | None, *, steps: int, lr: float, layers: int) -> argparse.ArgumentParser:
    parser = options_of(doc)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=layers)
    return parser


class Steps:
    """AdamW without weight decay of biases and norms, gradients clipped to 1."""

    def __init__(self, model: nn.Module, lr: float, eps: float) -> None:
        self.parameters, self.lr = list(model.parameters()), lr
        groups = [
            {"params": [p for p in self.parameters if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in self.parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), eps=eps)

    def __call__(self, loss: Tensor, warm: float, fall: float) -> None:
        """One step. ``warm``: share of the warm-up that is over; ``fall``: the same of the fall at the end, from 1 down."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, warm, max(0.02, fall))
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
