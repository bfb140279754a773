"""Two recordings compared: what each quantity differs by, whether that is within its tolerance, and where it sits.

A pure function of files: it computes no model, so a recording from another machine is compared as one from this one.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchlib.parity.members import Member
from benchlib.parity.recording import Recording

PASS, FAIL, SKIPPED, NOT_COMPARED = "PASS", "FAIL", "SKIPPED", "NOT COMPARED"


@dataclass(frozen=True)
class Row:
    """One quantity of one member. ``value`` is None where there is none to judge; then ``reason`` says why.

    ``gates`` says whether it decides the member's outcome and the member the run's; ``worst`` names the case, parameter,
    step or layer that the value comes from; ``why`` is where the limit comes from.
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
class Comparison:
    """What came of one member: its outcome with the reason, its quantities, and the tables behind them."""

    member: str
    outcome: str
    reason: str
    rows: tuple[Row, ...] = ()
    logits: tuple[dict[str, Any], ...] = ()
    histogram: tuple[dict[str, Any], ...] = ()
    layers: tuple[dict[str, Any], ...] = ()
    gradients: tuple[dict[str, Any], ...] = ()
    curves: tuple[dict[str, Any], ...] = ()
    latency: tuple[dict[str, Any], ...] = ()
    truth: tuple[dict[str, Any], ...] = ()

    def quantities(self) -> list[dict[str, Any]]:
        """Return the rows as the table of the result."""
        return [asdict(row) for row in self.rows]


def not_compared(member: Member, reason: str) -> Comparison:
    """Return the comparison of a member that has nothing to be compared with. It never passes."""
    return Comparison(member.name, NOT_COMPARED, reason)


def compare(
    reference: Recording | None,
    candidate: Recording | None,
    truth: Recording | None,
    inputs: Mapping[str, np.ndarray],
    member: Member,
    f1: tuple[float, float] | None = None,
    questions: int = 0,
) -> Comparison:
    """Compare ``candidate``, recorded by ``member``, with ``reference``.

    ``inputs`` are the golden inputs: their attention masks say which positions count. ``f1`` are the reference's and the
    candidate's F1 on the dev set of ``questions`` questions. ``truth`` says how far both are from it.
    """
    if reference is None or candidate is None:
        return not_compared(member, "there is no recording of the " + ("reference" if reference is None else "member"))
    raise NotImplementedError
