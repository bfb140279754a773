"""How much a metric changed between two sets of runs, and how sure that is.

Two kinds of noise count. Within a run the samples scatter; neighbours in a series that resemble each other count as the fewer
samples that they stand for. Between runs the whole run shifts (another host, another memory layout, a neighbour): no number
of samples inside one run shows that, only repeated runs do. The interval is the wider of the two.

Two or three runs hardly tell their own spread: Student's t with two degrees of freedom is 7. So the spread borrows: from a
calibration, from other stored runs of the same kind, and as long as these have fewer than ``DEFAULT_DOF`` degrees of freedom
from a stated default, as in the moderated variance of G. K. Smyth, "Linear models and empirical Bayes methods", 2004:
s² = sum(dof s²) / sum(dof).

Letters: k old runs, r new runs, m a run's value; on the ratio scale m stands for log(value).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from benchlib.core.stats import LEAST_FOR_INTERVAL, finite, median_ends
from benchlib.judge.changepoints import Disturbance, disturbance

# Two-sided: a change that is not there lies beyond either end in at most 1% of the comparisons.
GATE_CONFIDENCE = 0.98
CHANCE = (1 - GATE_CONFIDENCE) / 2
# The share of unchanged repeats whose ratio lies within the A/A band.
BAND_COVERAGE = 0.95
# Two runs tell next to nothing of the spread between runs (Student's t is 31.8 there): without a default their interval would
# leave everything open. They widen the A/A band only; from three runs on the interval counts them.
LEAST_DOF = 2
# The default fills up what is known to this many degrees of freedom: t is 3.1 then, and runs replace it one by one.
DEFAULT_DOF = 6
# For the reach of a FAIL at least so many: by t of 6 the chance of one of 20 metrics is 9 standard errors away, and one accepted
# run would let a loss of 30% FAIL in 2% of runs instead of 58%.
REACH_DOF = 10

SIGNS = (1.0, -1.0)  # of the first side and of the one that it is compared with

Kind = Literal["ratio", "difference"]
Basis = Literal["runs", "default", "samples", "none"]
Faster = Literal["higher", "lower", ""]
Runs = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Spread:
    """Standard deviation between unchanged runs, of log(value) for ratios and of the value for differences.

    ``dof`` are the degrees of freedom that it rests on: runs minus one for each set of runs. ``source`` says where it comes from.
    """

    s: float
    dof: int
    source: str = ""

    def band(self, kind: Kind = "ratio") -> float:
        """Return the A/A band: 95% of the ratios of two unchanged runs lie within 1/(1 + band) and 1 + band.

        For differences the band is an amount. Two runs differ with the variance of both: 1.96 * sqrt(2) * s.
        """
        width = _normal_quantile((1 + BAND_COVERAGE) / 2) * math.sqrt(2) * self.s
        return math.expm1(min(width, 700.0)) if kind == "ratio" else width


def pooled(*parts: Spread | None) -> Spread | None:
    """Return several estimates of one spread as one; None where there is none."""
    usable = [part for part in parts if part is not None and part.dof > 0]
    if not usable:
        return None
    dof = sum(part.dof for part in usable)
    sources = ", ".join(dict.fromkeys(part.source for part in usable if part.source))
    return Spread(math.sqrt(sum(part.s**2 * part.dof for part in usable) / dof), dof, sources)


def moderated(known: Spread | None, default: float | None, source: str = "default") -> Spread | None:
    """Return a spread of at least ``DEFAULT_DOF`` degrees of freedom: what is known, filled up with the default.

    ``source`` says where the default comes from.
    """
    lacking = DEFAULT_DOF - (known.dof if known else 0)
    if default is None or lacking <= 0:
        return known
    return pooled(known, Spread(default, lacking, source))


@dataclass(frozen=True)
class Change:
    """``value`` is new / old (or new - old) and ``low`` to ``high`` its 98% interval.

    ``basis`` says which noise the interval rests on: ``runs`` (between runs), ``default`` (between runs, but no run was there
    to tell it), ``samples`` (within one run on each side, the spread between runs is not known) or ``none`` (fewer than five
    samples in every run: what they scatter widens ``low`` to ``high``, which holds the change less often than in 98%).
    ``spread`` is that between unchanged runs, or None where no side has two runs and none is known.

    ``reach`` is how far, on the scale of the gate, unchanged runs lie apart with the probability ``chance`` of ``compared``.

    Runs whose level shifted count with their undisturbed part. ``whole`` is the value with all of them counted, on both sides,
    and ``disturbed`` are the shifts in the new ones.
    """

    kind: Kind
    value: float
    low: float
    high: float
    basis: Basis
    old_runs: int
    new_runs: int
    spread: Spread | None
    whole: float
    disturbed: tuple[Disturbance, ...] = ()
    reach: float = 0.0

    @property
    def band(self) -> float:
        """The A/A band, 0 where no spread between runs is known."""
        return self.spread.band(self.kind) if self.spread else 0.0

    @property
    def sure(self) -> bool:
        """Whether the interval excludes that nothing changed."""
        neutral = 1.0 if self.kind == "ratio" else 0.0
        return not self.low <= neutral <= self.high

    def of_whole_runs(self) -> "Change":
        """Return the change of whole runs, disturbed or not; as sure as this one."""
        move = _scaled(self.whole, self.kind) - _scaled(self.value, self.kind)
        low, high = (_back(_scaled(end, self.kind) + move, self.kind) for end in (self.low, self.high))
        return replace(self, value=self.whole, low=low, high=high, disturbed=())


def _scaled(value: float, kind: Kind) -> float:
    return math.log(value) if kind == "ratio" else value


def _back(value: float, kind: Kind) -> float:
    return math.exp(max(-700.0, min(value, 700.0))) if kind == "ratio" else value


@dataclass(frozen=True)
class Reading:
    """What one run says of a metric, on the scale of the comparison: the median of its undisturbed part, how far ``below``
    and ``above`` it the interval within the run ends, the mean level of the whole run, and how many samples it has.
    """

    value: float
    below: float
    above: float
    whole: float
    samples: int
    disturbed: Disturbance | None = None


@lru_cache(maxsize=4096)
def reading(samples: tuple[float, ...], kind: Kind = "ratio", faster: Faster = "") -> Reading:
    """Read a run. ``faster`` says which way of a speed is better; '' is no speed, and shifts of its level are its own.

    Raises ``ValueError`` for no samples, samples that are not finite, and for a ratio of values that are not above zero.
    """
    values = finite(samples)
    if kind == "ratio" and values.min() <= 0:
        raise ValueError("a ratio needs values above zero")
    scale: Callable[[Any], Any] = np.log if kind == "ratio" else np.asarray
    shift = disturbance(values, faster) if faster else None
    if shift is None:
        level = float(scale(np.median(values)))
        return Reading(level, *_ends(values, kind), level, len(values))
    mask = shift.mask()
    level, disturbed = (float(scale(np.median(part))) for part in (values[~mask], values[mask]))
    whole = (1 - shift.share) * level + shift.share * disturbed
    return Reading(level, *_ends(values[~mask], kind), whole, len(values), shift)


def _ends(values: np.ndarray, kind: Kind) -> tuple[float, float]:
    return median_ends(np.log(values) if kind == "ratio" else values, _normal_quantile((1 + GATE_CONFIDENCE) / 2))


def own_spread(sides: Sequence[Sequence[Reading]]) -> Spread | None:
    """Return the spread between the runs of the sides, pooled; None where no side has two."""
    parts = []
    for side in sides:
        if len(side) > 1:
            values = np.array([item.value for item in side])
            parts.append(Spread(float(values.std(ddof=1)), len(side) - 1, "the compared runs"))
    return pooled(*parts)


def change(
    new: Runs,
    old: Runs,
    *,
    kind: Kind = "ratio",
    known: Spread | None = None,
    default: float | None = None,
    source: str = "default",
    faster: Faster = "",
    chance: float = CHANCE,
) -> Change:
    """Compare two sides, each the samples of one or more runs.

    ``known`` is a spread between runs measured elsewhere, ``default`` the one that is assumed as long as too few runs tell
    it, with its ``source``. A side's value is the (geometric) mean of its runs' values. The interval between runs is Student's
    ``t * s * sqrt(1/r + 1/k)`` with s moderated over both sides, ``known`` and ``default``. Raises ``ValueError`` for a side
    without samples, samples that are not finite, and for a ratio of values that are not above zero.
    """
    if not new or not old:
        raise ValueError("a comparison needs at least one run on each side")
    sides = [[reading(tuple(run), kind, faster) for run in side] for side in (new, old)]
    return compared(sides[0], sides[1], kind=kind, known=known, default=default, source=source, chance=chance)


def compared(
    new: Sequence[Reading],
    old: Sequence[Reading],
    *,
    kind: Kind,
    known: Spread | None,
    default: float | None,
    source: str = "default",
    chance: float = CHANCE,
) -> Change:
    """Compare two sides whose runs have been read; ``chance`` is the probability that ``Change.reach`` belongs to, one-sided."""
    value, (least, most), basis, spread = _interval((new, old), known, default, source)
    reach = 0.0
    if spread is not None and spread.dof >= LEAST_DOF:
        reach = student(max(spread.dof, REACH_DOF), chance) * spread.s * math.sqrt(1 / len(new) + 1 / len(old))
    whole = value + sum(
        sign * sum(item.whole - item.value for item in side) / len(side)
        for sign, side in zip(SIGNS, (new, old), strict=True)
    )
    middle, low, high = (_back(end, kind) for end in (value, least, most))
    shifts = tuple(item.disturbed for item in new if item.disturbed)
    return Change(kind, middle, low, high, basis, len(old), len(new), spread, _back(whole, kind), shifts, reach)


@dataclass(frozen=True)
class Estimate:
    """The value of one side, above zero, with its 98% interval; ``basis`` as in :class:`Change`."""

    value: float
    low: float
    high: float
    basis: Basis

    def under(self, factor: float) -> "Estimate":
        """Return ``factor / value``, as a time or a price is of a rate."""
        return Estimate(factor / self.value, factor / self.high, factor / self.low, self.basis)

    def times(self, factor: float) -> "Estimate":
        """Return ``factor * value``."""
        return Estimate(factor * self.value, factor * self.low, factor * self.high, self.basis)


def estimate(runs: Runs) -> Estimate:
    """Return the value of one side, the geometric mean of its runs' medians, with the interval that ``change`` takes.

    Raises ``ValueError`` for a side without samples, and for samples that are not finite or not above zero.
    """
    if not runs:
        raise ValueError("an estimate needs at least one run")
    value, (least, most), basis, _ = _interval(([reading(tuple(run)) for run in runs],), None, None)
    middle, low, high = (_back(end, "ratio") for end in (value, least, most))
    return Estimate(middle, low, high, basis)


def _interval(
    sides: Sequence[Sequence[Reading]], known: Spread | None, default: float | None, source: str = "default"
) -> tuple[float, tuple[float, float], Basis, Spread | None]:
    """Return value, interval, basis and spread of the first side, or of the first against the second."""
    value = below = above = 0.0
    for sign, side in zip(SIGNS, sides, strict=False):
        value += sign * sum(item.value for item in side) / len(side)
        ends = [sum(getattr(item, end) ** 2 for item in side) / len(side) ** 2 for end in ("below", "above")]
        below, above = below + ends[sign < 0], above + ends[sign > 0]  # more of the old one is less of the change
    half = 0.0
    basis: Basis = "samples" if any(item.samples >= LEAST_FOR_INTERVAL for side in sides for item in side) else "none"
    measured = pooled(known, own_spread(sides))
    spread = moderated(measured, default, source)
    if spread is not None and spread.dof >= LEAST_DOF:
        half = student(spread.dof) * spread.s * math.sqrt(sum(1 / len(side) for side in sides))
        basis = "runs" if measured else "default"
    return value, (value - max(half, math.sqrt(below)), value + max(half, math.sqrt(above))), basis, spread


@lru_cache(maxsize=256)
def student(dof: int, chance: float = CHANCE) -> float:
    """Return what Student's t exceeds with the probability ``chance``; the default belongs to the gate's confidence."""
    from scipy.special import stdtrit

    return float(stdtrit(dof, 1 - chance))


@lru_cache(maxsize=4)
def _normal_quantile(probability: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(probability)
