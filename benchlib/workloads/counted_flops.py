"""The FLOPs of training a model, counted by torch's own counter and not by a formula: gated layers, relative positions, shared weights.

Notation: B sequences, S tokens of each. Of one architecture the FLOPs are those of each sequence, and what is computed once for the
whole batch (tables of relative positions), both with a part of each token and of each pair of tokens:
``B (a + b S + c S²) + d + e S + f S²``. Six small shapes determine these numbers, and a seventh has to agree.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

UNIT = 16  # tokens: of the small shapes, a multiple of what most architectures fill up to
MAX_MISS = 0.01  # share by which the seventh shape may be off
SOME_TOKEN = 5


@dataclass(frozen=True)
class TrainFlops:
    """What training takes. Without ``terms``, one for each of :func:`_powers`, nothing is known, for the ``reason``."""

    terms: np.ndarray = field(default_factory=lambda: np.full(6, np.nan))
    reason: str = ""

    def of(self, samples: int, length: int) -> float:
        """Return the FLOPs of forward and backward pass of ``samples`` padded to ``length`` tokens; NaN if they are not known."""
        return float(self.terms @ _powers(samples, length))


def train_flops(model: Any, max_length: int) -> TrainFlops:
    """Count what training a model with a QA head takes on up to ``max_length`` tokens. The model is on the CPU and is left as it is."""
    unit = max(1, min(UNIT, max_length // 4))
    shapes = [(samples, unit * times) for samples in (1, 2) for times in (1, 2, 3)]
    try:
        counted = [_count(model, *shape) for shape in (*shapes, (1, max_length))]
    except Exception as error:  # an architecture that needs more than tokens, or another length, says so in its own way
        return TrainFlops(reason=f"its FLOPs cannot be counted: {' '.join(str(error).split())[:200]}")
    terms = np.linalg.solve([_powers(*shape) for shape in shapes], counted[:-1])
    found = TrainFlops(terms)
    if abs(found.of(1, max_length) / counted[-1] - 1) > MAX_MISS:
        return TrainFlops(reason="its FLOPs are no square of the length: parts of it change with the length")
    return found


def _powers(samples: int, length: int) -> list[float]:
    return [float(number * length**power) for number in (samples, 1) for power in (0, 1, 2)]


def _count(model: Any, samples: int, length: int) -> int:
    """Return the FLOPs of a forward and a backward pass, with attention in products that the counter sees."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in model.buffers()}
    shared |= {id(weight): torch.nn.Parameter(weight.detach(), weight.requires_grad) for weight in model.parameters()}
    # A copy with the same numbers: some architectures change themselves when texts are short.
    own = copy.deepcopy(model, shared).eval()
    ids = torch.full((samples, length), SOME_TOKEN)
    if isinstance(end := getattr(model.config, "sep_token_id", None), int):
        ids[:, 1:4] = end  # Longformer looks for three, and attends from what comes before to all tokens
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = own(input_ids=ids, attention_mask=torch.ones_like(ids))
        (output.start_logits.sum() + output.end_logits.sum()).backward()
    return int(counter.get_total_flops())
