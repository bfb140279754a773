"""How much a metric changed between two sets of runs, and how sure that is.

Two kinds of noise count. Within a run the samples scatter: the bootstrap (scipy) resamples them. Between runs the whole
run shifts (another host, another memory layout, a neighbour): no number of samples inside one run shows that, only
repeated runs do. The interval is the wider of the two.

Letters: k old runs, r new runs, m a run's median; on the ratio scale m stands for log(median).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from benchlib.core.stats import LEAST_FOR_INTERVAL, finite, resampled

# Two-sided: a change that is not there lies beyond either end in at most 1 % of the comparisons.
GATE_CONFIDENCE = 0.98
# The share of unchanged repeats whose ratio lies within the A/A band.
BAND_COVERAGE = 0.95
# Two runs tell next to nothing of the spread between runs (Student's t is 31.8 there): their interval would leave every
# comparison undecided. They widen the A/A band only; from three runs on the interval counts them.
LEAST_DOF = 2

SIGNS = (1.0, -1.0)  # of the first side and of the one that it is compared with

Kind = Literal["ratio", "difference"]
Basis = Literal["runs", "samples", "none"]
Runs = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Spread:
    """Standard deviation between unchanged runs, of log(median) for ratios and of the median for differences.

    ``dof`` are the degrees of freedom that it rests on: runs minus one for each set of runs.
    """

    s: float
    dof: int

    def band(self, kind: Kind = "ratio") -> float:
        """Return the A/A band: 95 % of the ratios of two unchanged runs lie within 1/(1 + band) and 1 + band.

        For differences the band is an amount. Two runs differ with the variance of both: 1.96 * sqrt(2) * s.
        """
        width = _normal_quantile((1 + BAND_COVERAGE) / 2) * math.sqrt(2) * self.s
        return math.expm1(min(width, 700.0)) if kind == "ratio" else width


@dataclass(frozen=True)
class Change:
    """``value`` is new / old (or new - old) and ``low`` to ``high`` its 98 % interval.

    ``basis`` says which noise the interval rests on: ``runs`` (between runs), ``samples`` (within one run on each side, the
    spread between runs is not known well enough) or ``none`` (fewer than five samples in every run: what they scatter widens
    ``low`` to ``high``, which holds the change less often than in 98 %). ``spread`` is that between unchanged runs, or None
    where no side has two runs and none is known.
    """

    kind: Kind
    value: float
    low: float
    high: float
    basis: Basis
    old_runs: int
    new_runs: int
    spread: Spread | None

    @property
    def band(self) -> float:
        """The A/A band, 0 where no spread between runs is known."""
        return self.spread.band(self.kind) if self.spread else 0.0


def change(new: Runs, old: Runs, *, kind: Kind = "ratio", calibrated: Spread | None = None) -> Change:
    """Compare two sides, each the samples of one or more runs; ``calibrated`` is a spread between runs measured elsewhere.

    A side's value is the (geometric) mean of its runs' medians. The interval between runs is Student's
    ``t * s * sqrt(1/r + 1/k)`` with s pooled over both sides and ``calibrated``. Raises ``ValueError`` for a side without
    samples, samples that are not finite, and for a ratio of values that are not above zero.
    """
    if not new or not old:
        raise ValueError("a comparison needs at least one run on each side")
    value, low, high, basis, spread = _interval((new, old), kind, calibrated)
    return Change(kind, value, low, high, basis, len(old), len(new), spread)


@dataclass(frozen=True)
class Estimate:
    """The value of one side, above zero, with its 98 % interval; ``basis`` as in :class:`Change`."""

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
    return Estimate(*_interval((runs,), "ratio", None)[:4])


def _interval(
    sides: Sequence[Runs], kind: Kind, calibrated: Spread | None
) -> tuple[float, float, float, Basis, Spread | None]:
    """Return value, interval, basis and spread of the first side, or of the first against the second."""
    runs = [[finite(run) for run in side] for side in sides]
    if kind == "ratio" and min(run.min() for side in runs for run in side) <= 0:
        raise ValueError("a ratio needs values above zero")
    scale = np.log if kind == "ratio" else np.asarray
    medians = [np.array([scale(np.median(run)) for run in side]) for side in runs]
    value = float(sum(sign * side.mean() for sign, side in zip(SIGNS, medians, strict=False)))
    low, high = _within(runs, medians, value, scale)
    basis: Basis = "samples" if any(len(run) >= LEAST_FOR_INTERVAL for side in runs for run in side) else "none"
    spread = pooled(medians, calibrated)
    if spread is not None and spread.dof >= LEAST_DOF:
        half = student(spread.dof) * spread.s * math.sqrt(sum(1 / len(side) for side in runs))
        basis = "runs"
        low, high = min(low, value - half), max(high, value + half)
    if kind == "ratio":
        value, low, high = (math.exp(max(-700.0, min(end, 700.0))) for end in (value, low, high))
    return value, low, high, basis, spread


def pooled(medians: Sequence[np.ndarray], calibrated: Spread | None) -> Spread | None:
    """Return the spread between runs, pooled over the sides and what is known; None where nothing has two runs."""
    squares = sum(float(((side - side.mean()) ** 2).sum()) for side in medians)
    dof = sum(len(side) - 1 for side in medians)
    if calibrated is not None:
        squares, dof = squares + calibrated.s**2 * calibrated.dof, dof + calibrated.dof
    return Spread(math.sqrt(squares / dof), dof) if dof else None


@lru_cache(maxsize=256)
def student(dof: int) -> float:
    """Return the quantile of Student's t that belongs to the gate's confidence."""
    from scipy.stats import t

    return float(t.ppf((1 + GATE_CONFIDENCE) / 2, dof))


@lru_cache(maxsize=4)
def _normal_quantile(probability: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(probability)


def _within(
    sides: list[list[np.ndarray]], medians: list[np.ndarray], value: float, scale: Callable[..., Any]
) -> tuple[float, float]:
    """Return the interval of the change by resampling the samples of each run that has several."""
    weights, data, fixed = [], [], 0.0
    for sign, side, middle in zip(SIGNS, sides, medians, strict=False):
        for run, median in zip(side, middle, strict=True):
            if len(run) > 1 and np.ptp(run) > 0:
                weights.append(sign / len(side))
                data.append(run)
            else:  # a constant: resampling it gives it again
                fixed += sign / len(side) * float(median)
    if not data:
        return value, value

    def statistic(*runs: np.ndarray, axis: int) -> np.ndarray:
        parts = [weight * scale(np.median(run, axis=axis)) for weight, run in zip(weights, runs, strict=True)]
        return np.sum(parts, axis=0) + fixed  # type: ignore[no-any-return]

    return resampled(data, statistic, GATE_CONFIDENCE)
