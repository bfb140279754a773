"""What a rule is and says of numbers, and when two numbers that were rounded for print still agree."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from benchlib.core.text import quantity, with_unit
from benchlib.judge.impossible.claim import Claim

PEAK_SLACK = 1.05  # a peak is itself measured: a value may exceed it by noise, not by more
SCALING_SLACK = 1.05  # n devices do n times the work of one, and more by noise alone
RATE_SLACK = 0.05  # between a stated rate and counts over time: the ends of a window are seldom sharp
MAX_ROUNDING = 0.03  # of a value that was written with few digits
ROUNDING = 2e-4  # of values that follow from each other exactly, beside the rounding of each for print


@dataclass(frozen=True)
class Finding:
    """What a rule says; AMBIGUOUS is rare, not impossible. ``value`` and ``limit`` are those of the check that it may become."""

    status: Literal["PASS", "FAIL", "AMBIGUOUS", "SKIPPED"]
    reason: str
    value: float | None = None
    unit: str = ""
    limit: str = ""


# It returns None where what is stated does not suffice.
Judge = Callable[[Any], Finding | None]


@dataclass(frozen=True)
class Rule:
    """``judge`` takes the part of a claim of this name, where that states all fields that it ``needs``.

    Its docstring is the class of mistakes that it catches, in the words of a reader.
    """

    name: str
    part: str
    needs: Sequence[str]
    judge: Judge

    @property
    def catches(self) -> str:
        return (self.judge.__doc__ or "").rstrip(".")

    def findings(self, claim: Claim) -> Iterator[Finding]:
        """Yield a finding for each statement of the claim that the rule applies to."""
        stated = getattr(claim, self.part)
        for part in stated if isinstance(stated, list) else [stated] if stated else []:
            whole = not any(getattr(part, name) in (None, [], "") for name in self.needs)
            if whole and (answer := self.judge(part)):
                yield answer


RULES: dict[str, Rule] = {}


def rule(part: str, name: str, needs: str = "") -> Callable[[Judge], Judge]:
    def register(judge: Judge) -> Judge:
        RULES[name] = Rule(name, part, needs.split(), judge)
        return judge

    return register


def finding(
    holds: bool, reason: str, *, wrong: str = "", value: float | None = None, unit: str = "", limit: str = ""
) -> Finding:
    """Return PASS or FAIL with the reason; a FAIL adds ``wrong`` to it."""
    text = reason if holds or not wrong else f"{reason}: {wrong}"
    return Finding("PASS" if holds else "FAIL", text, value, unit, limit)


def suspicious(reason: str, why: str, *, value: float | None = None, unit: str = "", limit: str = "") -> Finding:
    """Return a finding on what is rare but can be, with what would explain it."""
    return Finding("AMBIGUOUS", f"{reason}: suspicious, {why}", value, unit, limit)


def none_wrong(wrong: Sequence[str], good: str, why: str = "", about: str = "") -> Finding:
    """Return a FAIL that lists what is wrong, with the reason ``why``; where nothing is, a PASS that says ``good``."""
    return finding(not wrong, about + ("; ".join(wrong) or good), wrong=why)


def half_unit(value: float, most: float = MAX_ROUNDING) -> float:
    """Return half of the last digit that a value was written with: 156.2 -> 0.05; at most the share ``most`` of it.

    Zeros may be rounding or not: 10,000 is taken for 9,700 to 10,300, never for 5,000 to 15,000.
    """
    exponent = Decimal(repr(float(value))).normalize().as_tuple().exponent
    return min(0.5 * 10.0**exponent, most * abs(value)) if value and isinstance(exponent, int) else 0.0


def span(value: float, most: float = MAX_ROUNDING) -> tuple[float, float]:
    """Return the ends of the values that print as this one."""
    half = half_unit(value, most)
    return value - half, value + half


def follows(
    stated: float,
    expected: float,
    by: str,
    unit: str = "",
    ends: Sequence[float] = (),
    slack: float = ROUNDING,
    absolute: float = 0.0,
) -> Finding:
    """Hold a stated value, as rounded, against what it has to follow from, ``by`` the terms of that; ``ends`` are those of its range.

    ``slack`` is a share (5e-4: 0.05%); ``absolute`` is for small values that were printed with fixed decimals.
    """
    below, above = span(stated)
    low, high = min(ends, default=expected), max(ends, default=expected)
    margin = slack * max(abs(low), abs(high), abs(stated)) + absolute
    reason = f"{figure(stated, unit)} stated, {figure(expected, unit)} by {by}"
    wrong = f"{stated / expected:.4g} times that" if expected else "it does not follow"
    good = above >= low - margin and below <= high + margin
    return finding(good, reason, wrong=wrong, value=stated, unit=unit)


def figure(value: float, unit: str = "") -> str:
    """Write a number with up to six digits, so that a reader sees what was compared."""
    if unit == "FLOP/s":
        return quantity(value, unit)
    return with_unit(f"{value:,.0f}" if 1e5 <= abs(value) < 1e15 else f"{value:,.6g}", unit)
