"""What the checks of a run said, as it is stored: named questions with a status, a reason and the numbers behind it."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from benchlib.core.interrupts import EXIT_INTERRUPTED
from benchlib.core.text import check_word

Status = Literal["PASS", "FAIL", "AMBIGUOUS", "SKIPPED", "NO_BASELINE", "NOT_COMPARABLE"]
Kind = Literal["outcome", "sanity", "target", "reference", "budget", "regression"]

GATE = " vs baseline"  # ends the name of a check that compares a metric with accepted runs
EXIT_PASS, EXIT_FAIL, EXIT_BROKEN, EXIT_NOTHING_TO_COMPARE = 0, 1, 2, 3


class Check(BaseModel):
    """One question. ``gates`` says whether its FAIL fails the run; ``source`` says where the limit comes from."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    kind: Kind
    question: str
    status: Status
    reason: str
    value: float | None = None
    unit: str = ""
    limit: str = ""
    source: str = ""
    gates: bool = True

    @property
    def word(self) -> str:
        """What readers see: the status, DIFFERS where a failure gates nothing, INCOMPLETE for a gate without its numbers."""
        return check_word(self.status, self.gates)


class Verdict(BaseModel):
    """What all checks of a run say together.

    ``gate`` states how far the regression gate can be trusted: ``sentence``, ``method`` and ``rows`` of the calibration, or None.
    ``elsewhere`` names the node that holds the result of a run of several nodes; '' where the result is here.
    """

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    verdict: Literal["PASS", "FAIL", "BROKEN", "STOPPED", "AMBIGUOUS", "SKIPPED"]
    sentence: str
    checks: list[Check]
    gate: dict[str, Any] | None = None
    elsewhere: str = ""

    @property
    def broken(self) -> bool:
        """Whether the run did not get to its end: it broke or was stopped."""
        return self.verdict in ("BROKEN", "STOPPED")

    @property
    def regressed(self) -> bool:
        """Whether it FAILs by comparisons with accepted runs alone."""
        kinds = {check.kind for check in self.checks if check.gates and check.status == "FAIL"}
        return self.verdict == "FAIL" and kinds == {"regression"}

    def exit_code(self, strict: bool = False) -> int:
        """Return 0 pass, 1 a check failed, 2 the run broke, 130 stopped; with ``strict`` 3 where a gate had nothing to compare with."""
        if code := {"FAIL": EXIT_FAIL, "BROKEN": EXIT_BROKEN, "STOPPED": EXIT_INTERRUPTED}.get(self.verdict):
            return code
        if self.elsewhere:  # the verdict is on that node
            return EXIT_PASS
        undecided = self.verdict == "SKIPPED" or any(
            check.gates and check.status in ("AMBIGUOUS", "SKIPPED", "NO_BASELINE", "NOT_COMPARABLE")
            for check in self.checks
        )
        return EXIT_NOTHING_TO_COMPARE if strict and undecided else EXIT_PASS
