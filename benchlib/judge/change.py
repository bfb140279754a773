"""How much a metric changed between two sets of runs, and how sure that is.

Two kinds of noise count. Within a run the samples scatter; neighbours in a series that resemble each other count as the fewer
samples that they stand for. Between runs the whole run shifts (another host, another memory layout, a neighbour): no number
of samples inside one run shows that, only repeated runs do. The interval is the wider of the two.

Two or three runs hardly tell their own spread: Student's t with two degrees of freedom is 7. So the spread borrows: from a
calibration, from other stored runs of the same kind, and as long as these have fewer than ``DEFAULT_DOF`` degrees of freedom
from a stated default, as in the moderated variance of G. K. Smyth, "Linear models and empirical Bayes methods", 2004:
s² = sum(dof s²) / sum(dof).

All arithmetic is done on a :class:`Scale`: in logarithms for ratios, else in the metric's unit.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from benchlib.core.stats import MIN_FOR_INTERVAL, finite, median_ends
from benchlib.core.text import quantity
from benchlib.judge.changepoints import Disturbance, disturbance

# Two-sided: a change that is not there lies beyond either end in at most 1% of the comparisons.
GATE_CONFIDENCE = 0.98
CHANCE = (1 - GATE_CONFIDENCE) / 2
# The share of unchanged repeats whose ratio lies within the A/A band.
BAND_COVERAGE = 0.95
# Two runs tell next to nothing of the spread between runs (Student's t is 31.8 there): without a default their interval would
# leave everything open. They widen the A/A band only; from three runs on the interval counts them.
MIN_DOF = 2
# The default fills up what is known to this many degrees of freedom: t is 3.1 then, and runs replace it one by one.
DEFAULT_DOF = 6
# For the reach of a FAIL at least so many: by t of 6 the chance of one of 20 metrics is 9 standard errors away, and one accepted
# run would let a loss of 30% FAIL in 2% of runs instead of 58%.
REACH_DOF = 10

Basis = Literal["runs", "default", "samples", "none"]
Faster = Literal["higher", "lower", ""]


@dataclass(frozen=True)
class Scale:
    """What values are compared on. ``to`` takes a value there; a difference there is a change, and ``back`` returns what readers
    see of it: a ratio, or an amount in the metric's unit.
    """

    name: Literal["ratio", "difference"]
    to: Callable[[Any], Any]
    back: Callable[[float], float]

    def size(self, move: float) -> float:
        """Return how large a change is for a reader: 0.2 for a ratio of 0.8, the amount of a difference."""
        return abs(self.back(move) - self.back(0.0))

    def size_text(self, size: float, unit: str, digits: int = 0) -> str:
        return f"{size:.{digits}%}" if self is LOG else quantity(size, unit)

    def text(self, move: float, unit: str) -> str:
        """Write a change: ``0.952`` for a ratio, ``-1.2 s`` for a difference."""
        return f"{self.back(move):.3f}" if self is LOG else f"{'+' if move >= 0 else '-'}{quantity(abs(move), unit)}"


LOG = Scale("ratio", np.log, lambda move: math.exp(max(-700.0, min(move, 700.0))))
LINEAR = Scale("difference", np.asarray, float)
SCALES = {scale.name: scale for scale in (LOG, LINEAR)}


@dataclass(frozen=True)
class Spread:
    """Standard deviation between unchanged runs, on a scale.

    ``dof`` are the degrees of freedom that it rests on: runs minus one for each set of runs. ``source`` says where it comes from.
    """

    s: float
    dof: int
    source: str = ""

    def band(self, scale: Scale = LOG) -> float:
        """Return the A/A band: 95% of the ratios of two unchanged runs lie within 1/(1 + band) and 1 + band.

        For differences the band is an amount. Two runs differ with the variance of both: 1.96 * sqrt(2) * s.
        """
        return scale.size(normal((1 + BAND_COVERAGE) / 2) * math.sqrt(2) * self.s)


def pooled(*parts: Spread | None) -> Spread | None:
    """Return several estimates of one spread as one; None where there is none."""
    usable = [part for part in parts if part is not None and part.dof > 0]
    if not usable:
        return None
    dof = sum(part.dof for part in usable)
    sources = ", ".join(dict.fromkeys(part.source for part in usable if part.source))
    return Spread(math.sqrt(sum(part.s**2 * part.dof for part in usable) / dof), dof, sources)


def moderated(known: Spread | None, default: float | None, source: str = "default") -> Spread | None:
    """Return a spread of at least ``DEFAULT_DOF`` degrees of freedom: what is known, filled up with the default."""
    lacking = DEFAULT_DOF - (known.dof if known else 0)
    if default is None or lacking <= 0:
        return known
    return pooled(known, Spread(default, lacking, source))


@dataclass(frozen=True)
class Reading:
    """What one run says of a metric, on a scale: the median of its undisturbed part, how far ``below`` and ``above`` it the
    interval within the run ends, the mean level of the whole run, and how many samples it has.
    """

    value: float
    below: float
    above: float
    whole: float
    samples: int
    disturbed: Disturbance | None = None


@functools.lru_cache(maxsize=4096)
def reading(samples: tuple[float, ...], scale: Scale = LOG, faster: Faster = "") -> Reading:
    """Read a run. ``faster`` says which way of a speed is better; '' is no speed, and shifts of its level are its own.

    Raises ``ValueError`` for no samples, samples that are not finite, and for a ratio of values that are not above zero.
    """
    values = finite(samples)
    if scale is LOG and values.min() <= 0:
        raise ValueError("a ratio needs values above zero")
    shift = disturbance(values, faster) if faster else None
    counted = values if shift is None else values[~shift.mask()]
    level = whole = float(scale.to(np.median(counted)))
    if shift is not None:
        whole += shift.share * (float(scale.to(np.median(values[shift.mask()]))) - level)
    ends = median_ends(scale.to(counted), normal((1 + GATE_CONFIDENCE) / 2))
    return Reading(level, *ends, whole, len(values), shift)


def readings(runs: Iterable[Sequence[float]], scale: Scale = LOG, faster: Faster = "") -> list[Reading]:
    return [reading(tuple(run), scale, faster) for run in runs]


def own_spread(*sides: Sequence[Reading]) -> Spread | None:
    """Return the spread between the runs of the sides, pooled; None where no side has two."""
    return pooled(
        *(
            Spread(float(np.std([item.value for item in side], ddof=1)), len(side) - 1, "the compared runs")
            for side in sides
            if len(side) > 1
        )
    )


@dataclass(frozen=True)
class Change:
    """``move`` is new - old on the scale and ``least`` to ``most`` its 98% interval.

    ``basis`` says which noise the interval rests on: ``runs`` (between runs), ``default`` (between runs, but no run was there
    to tell it), ``samples`` (within one run on each side, the spread between runs is not known) or ``none`` (fewer than five
    samples in every run: what they scatter widens the interval, which holds the change less often than in 98%).
    ``spread`` is that between unchanged runs, None where it is not known. ``reach`` is how far unchanged runs lie apart with
    the probability ``chance`` of :func:`compared`.

    Runs whose level shifted count with their undisturbed part. ``whole`` is the move with all of them counted, on both sides,
    and ``disturbed`` are the shifts in the new ones.
    """

    scale: Scale
    move: float
    least: float
    most: float
    basis: Basis
    old_runs: int
    new_runs: int
    spread: Spread | None
    whole: float
    disturbed: tuple[Disturbance, ...] = ()
    reach: float = 0.0

    @property
    def sure(self) -> bool:
        return not self.least <= 0 <= self.most

    def text(self, unit: str) -> str:
        """Write the change with its interval: ``ratio 0.95, 98% interval 0.9 to 1.0``."""
        text = "ratio " * (self.scale is LOG) + self.scale.text(self.move, unit)
        interval = f"{self.scale.text(self.least, unit)} to {self.scale.text(self.most, unit)}"
        if self.basis != "none":
            return f"{text}, 98% interval {interval}"
        return text if self.least == self.most else f"{text}, {interval} by too few samples for an interval"


def compared(
    new: Sequence[Reading],
    old: Sequence[Reading] = (),
    scale: Scale = LOG,
    *,
    known: Spread | None = None,
    default: float | None = None,
    source: str = "default",
    chance: float = CHANCE,
) -> Change:
    """Compare two sides of runs; without ``old`` ones the change is the value of the new ones, with its interval.

    A side's value is the mean of its runs' values. ``known`` is a spread between runs measured elsewhere, ``default`` the one
    that is assumed as long as too few runs tell it, with its ``source``. Raises ``ValueError`` without new runs.
    """
    if not new:
        raise ValueError("a comparison needs at least one run on each side")
    signed = [(1, new), (-1, old)] if old else [(1, new)]
    move, whole = (
        sum(sign * sum(getattr(item, name) for item in side) / len(side) for sign, side in signed)
        for name in ("value", "whole")
    )
    # More of the old one is less of the change.
    below, above = (
        math.sqrt(sum(sum(getattr(item, ends[sign]) ** 2 for item in side) / len(side) ** 2 for sign, side in signed))
        for ends in ({1: "below", -1: "above"}, {1: "above", -1: "below"})
    )
    measured = pooled(known, own_spread(new, old))
    several = any(item.samples >= MIN_FOR_INTERVAL for item in (*new, *old))
    return moved(
        scale,
        move,
        moderated(measured, default, source),
        (len(new), len(old)),
        chance,
        within=(below, above),
        basis=("runs" if measured else "default", "samples" if several else "none"),
        whole=whole,
        disturbed=tuple(item.disturbed for item in new if item.disturbed),
    )


def moved(
    scale: Scale,
    move: float,
    spread: Spread | None,
    runs: tuple[int, int],
    chance: float = CHANCE,
    *,
    within: tuple[float, float] = (0.0, 0.0),
    basis: tuple[Basis, Basis] = ("runs", "none"),
    whole: float | None = None,
    disturbed: tuple[Disturbance, ...] = (),
) -> Change:
    """Return a move between the levels of so many new and old ``runs`` with its interval.

    It is the wider of Student's ``t * s * sqrt(1/r + 1/k)`` and the one ``within`` the runs, below and above. ``basis`` is that of
    the one and of the other.
    """
    half = reach = 0.0
    if between := spread is not None and spread.dof >= MIN_DOF:
        error = spread.s * math.sqrt(sum(1 / count for count in runs if count))
        half, reach = student(spread.dof) * error, student(max(spread.dof, REACH_DOF), chance) * error
    least, most = move - max(half, within[0]), move + max(half, within[1])
    whole = move if whole is None else whole
    return Change(scale, move, least, most, basis[not between], runs[1], runs[0], spread, whole, disturbed, reach)


@functools.lru_cache(maxsize=256)
def student(dof: int, chance: float = CHANCE) -> float:
    """Return what Student's t exceeds with the probability ``chance``; the default belongs to the gate's confidence."""
    from scipy.special import stdtrit

    return float(stdtrit(dof, 1 - chance))


@functools.lru_cache(maxsize=4)
def normal(probability: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(probability)
