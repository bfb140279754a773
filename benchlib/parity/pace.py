"""Which members still fit the time of a run: by what those before them took, so that nothing is begun in vain."""

from dataclasses import dataclass, field

from benchlib.clock import Moment
from benchlib.parity.members import Member

RESERVE_S = 3.0  # of the budget, for the results
COMPILING_S = 20.0  # that a member which compiles or exports takes more than the others, before one has told
FAIR = 3.0  # times of what was expected: who had that much and is not done hangs, or is far too slow


@dataclass
class Pace:
    """The time of a run and what its processes took, in seconds. ``began`` is when the run did."""

    began: Moment
    budget_s: float
    quick: list[float] = field(default_factory=list)
    slow: list[float] = field(default_factory=list)
    double: list[float] = field(default_factory=list)

    def left_s(self) -> float:
        """Return what is left of the budget."""
        return self.budget_s - RESERVE_S - self.began.since()

    def took(self, seconds: float, precision: str = "fp32", slow: bool = False) -> None:
        """Learn from a process that ended."""
        (self.double if precision == "fp64" else self.slow if slow else self.quick).append(seconds)

    def expected_s(self, precision: str = "fp32", slow: bool = False) -> float:
        """Return what a process will take: as long as the longest of its kind; 0 where nothing is known."""
        usual = max(self.quick, default=0.0)
        if precision == "fp64":
            return max(self.double, default=usual)
        return max(self.slow, default=usual + COMPILING_S) if slow else usual

    def lacking(self, member: Member) -> str:
        """Return why a member does not fit the time that is left; '' where it does."""
        expected, left = self.expected_s(member.precision, member.slow), self.left_s()
        if left > 0 and expected <= left:
            return ""
        return f"no time in the budget of {self.budget_s:g} s: {max(left, 0):.0f} s left, {expected:.0f} s needed"

    def was_fair(self, seconds: float, member: Member) -> bool:
        """Tell whether a member that was ended had so much time that it is its own fault."""
        expected = self.expected_s(member.precision, member.slow)
        return expected > 0 and seconds >= FAIR * expected
