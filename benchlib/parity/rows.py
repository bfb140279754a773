"""A row of the matrix: one quantity of one member, judged against its tolerance."""

import math
from dataclasses import dataclass

from benchlib.parity import tolerances
from benchlib.parity.members import Member
from benchlib.parity.tolerances import Tolerance

PASS, FAIL, SKIPPED, NOT_COMPARED = "PASS", "FAIL", "SKIPPED", "NOT COMPARED"


@dataclass(frozen=True)
class Row:
    """One quantity of one member. ``value`` is None where there is no number to judge; then ``reason`` says why.

    ``gates`` says whether a FAIL here fails the run. ``worst`` names the case, parameter, step or layer that the value
    comes from; ``why`` is where the limit comes from.
    """

    member: str
    quantity: str
    value: float | None
    limit: float | None
    limit_text: str
    unit: str
    status: str
    gates: bool
    worst: str = ""
    why: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Judge:
    """Makes the rows of one member on ``backend``, compared with a reference that ran on ``other``.

    ``ease`` says whether limits of logits follow their size and the reference's own error: see ``tolerances.eased``.
    """

    member: Member
    backend: str
    other: str
    ease: bool = True

    def tolerance(self, quantity: str) -> Tolerance:
        """Return the limit of a quantity: the looser one of the two backends."""
        return tolerances.between(self.backend, self.other, self.member.precision, quantity)

    def eased(self, quantity: str, largest: float, reference_error: float | None) -> Tolerance:
        """Return the limit of a difference between logits that reach ``largest`` in the reference."""
        limit = self.tolerance(quantity)
        return tolerances.eased(limit, self.member.precision, largest, reference_error) if self.ease else limit

    def judge(
        self, quantity: str, value: float, worst: str = "", reason: str = "", limit: Tolerance | None = None
    ) -> Row:
        """Return the row of a measured value; one that is no number fails. ``limit`` stands in for the table's."""
        limit = limit or self.tolerance(quantity)
        finite = math.isfinite(value)
        status = PASS if finite and limit.holds(value) else FAIL
        told = reason or ("" if finite else "not finite")
        return self._row(quantity, value if finite else None, status, worst, told, limit)

    def fail(self, quantity: str, reason: str, worst: str = "") -> Row:
        """Return the row of a quantity that should have a value and has none."""
        return self._row(quantity, None, FAIL, worst, reason)

    def skip(self, quantity: str, reason: str) -> Row:
        """Return the row of a quantity that there is nothing to judge of."""
        return self._row(quantity, None, SKIPPED, "", reason)

    def _row(
        self, quantity: str, value: float | None, status: str, worst: str, reason: str, limit: Tolerance | None = None
    ) -> Row:
        limit = limit or self.tolerance(quantity)
        gates = self.member.gates and quantity not in tolerances.LOCATES
        return Row(
            self.member.name, quantity, value, limit.value, limit.text, limit.unit, status, gates, worst, limit.why, reason
        )  # fmt: skip
