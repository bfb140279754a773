"""The two recordings of a comparison, with the judge of their differences."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchlib.parity.recording import Recording, count_nonfinite
from benchlib.parity.rows import Judge, Row


@dataclass
class Sides:
    """Both sides and what is known so far. ``tables`` are filled as the quantities are judged."""

    reference: Recording
    candidate: Recording
    truth: Recording | None
    inputs: Mapping[str, np.ndarray]
    judge: Judge
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def nonfinite(self) -> dict[str, int]:
        """How many numbers of the candidate are no numbers, by place: what its writer counted, and what is there."""
        tensors = {
            "outputs": self.candidate.outputs(),
            "gradients": self.candidate.gradients(),
            "layers": self.candidate.layers(),
        }
        counted = dict(self.candidate.meta.get("nonfinite") or {})
        for where, arrays in tensors.items():
            counted |= count_nonfinite(arrays, where)
        return counted

    def lacking(self, quantity: str, place: str) -> Row:
        """Return the row of a quantity that the candidate has no value of: a reason is accepted, silence is not."""
        if place in (self.candidate.meta.get("nonfinite") or {}):
            return self.judge.fail(quantity, f"not finite: {place}")
        reason = (self.candidate.meta.get("absent") or {}).get(quantity)
        return (
            self.judge.skip(quantity, reason)
            if reason
            else self.judge.fail(quantity, "not computed, and no reason given")
        )
