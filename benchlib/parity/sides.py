"""The two recordings of a comparison, with the judge of their differences."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchlib.parity import tolerances
from benchlib.parity.logits import Case
from benchlib.parity.recording import Recording, count_nonfinite
from benchlib.parity.rows import Judge, Row
from benchlib.parity.tolerances import Tolerance


@dataclass
class Sides:
    """Both sides and what is known so far: ``cases`` and ``tables`` are filled as the quantities are judged."""

    reference: Recording
    candidate: Recording
    truth: Recording | None
    inputs: Mapping[str, np.ndarray]
    judge: Judge
    cases: list[Case] = field(default_factory=list)
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
        reason = (self.candidate.meta.get("absent") or {}).get(quantity)
        if reason:
            return self.judge.skip(quantity, reason)
        lost = place in (self.candidate.meta.get("nonfinite") or {})
        return self.judge.fail(quantity, "not finite" if lost else "not computed, and no reason given")

    def eased(self, quantity: str) -> Tolerance:
        """Return the limit of a difference between logits, by the logits of all cases: see ``tolerances.eased``."""
        errors = [case.reference_error for case in self.cases]
        error = max((error for error in errors if error is not None), default=None)
        return self.judge.eased(quantity, self._largest, error)

    def eased_loss(self, quantity: str) -> Tolerance:
        """Return the limit of a difference between losses, by the same logits: see ``tolerances.eased_loss``."""
        limit = self.judge.tolerance(quantity)
        if not self.judge.ease:
            return limit
        return tolerances.eased_loss(
            limit, self.judge.member.precision, self._largest, self.eased(tolerances.LOGITS).value
        )

    @property
    def _largest(self) -> float:
        return max((case.largest for case in self.cases), default=0.0)
