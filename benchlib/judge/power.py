"""What the gate makes of noise, simulated: false alarms, undecided comparisons and the smallest loss found.

The comparisons are judged by the rule of the gate itself (``benchlib.judge.regression``), on runs drawn at random. They scatter around the true value with the standard deviation s between unchanged
runs, on the scale of the gate: the logarithm for limits that are shares, the metric's unit for limits that are amounts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchlib.core.text import quantity
from benchlib.judge.change import DEFAULT_DOF, LEAST_DOF, Kind, Reading, student
from benchlib.judge.regression import (
    TWICE,
    RegressionLimit,
    Side,
    allowed_loss,
    default_spread,
    kind_of,
    ruling,
)
from benchlib.results.metrics import Direction

POWER = 0.99
COMPARISONS = 10_000
Noise = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def effect_text(amount: float, kind: Kind, unit: str) -> str:
    """Write a loss for a reader: a share, or an amount in the metric's unit."""
    return f"{amount:.0%}" if kind == "ratio" else quantity(amount, unit)


@dataclass(frozen=True)
class Setup:
    """A gate to look at: the limit, the runs on both sides, the spread that a calibration of ``known_dof`` would know, and the
    default that is assumed below that.
    """

    limit: RegressionLimit
    direction: Direction = "higher"
    old_runs: int = 1
    new_runs: int = 1
    known_dof: int = 0
    default: float | None = None

    @property
    def kind(self) -> Kind:
        """The scale of the gate."""
        return "difference" if self.limit.amount is not None else "ratio"

    @classmethod
    def of(cls, limit: RegressionLimit, side: Side, old_runs: int = 1, known_dof: int = 0) -> "Setup":
        """Return the setup for a metric that has recorded runs; a share of a value near or below zero is judged as an amount."""
        kind, direction = kind_of(limit, *(min(run) for run in side.runs)), side.metric.direction
        default = default_spread(side.metric, limit, kind, side.others)
        if kind == "difference" and limit.amount is None:
            amount = allowed_loss(limit, kind, direction, side.value(kind))
            limit = RegressionLimit(metric=limit.metric, amount=amount)
        return cls(limit, direction, old_runs, known_dof=known_dof, default=default)

    @property
    def allowed(self) -> float:
        """The change (or amount) that the limit allows."""
        own = allowed_loss(self.limit, self.kind, self.direction, 1.0)
        return own if self.kind == "difference" else abs(math.expm1(-own if self.direction == "higher" else own))


@dataclass(frozen=True)
class Power:
    """Of simulated comparisons of unchanged runs: the shares that fail and that stay undecided, and the smallest loss found.

    ``effect`` is the loss that 99% of the comparisons call a regression: a share of the baseline for ratios (a throughput
    lower by it, a time higher by it), an amount for differences.
    """

    comparisons: int
    false_alarms: float
    ambiguous: float
    effect: float


@dataclass(frozen=True)
class Pool:
    """Unchanged runs to draw comparisons from, on the scale of the gate: (N,) values, whole values, how far ``below`` and
    ``above`` their intervals end, and whether their level shifted.
    """

    value: np.ndarray
    whole: np.ndarray
    below: np.ndarray
    above: np.ndarray
    disturbed: np.ndarray

    @classmethod
    def of(cls, readings: Sequence[Reading]) -> "Pool":
        """Make a pool of runs that have been read."""
        rows = [(item.value, item.whole, item.below, item.above, item.disturbed is not None) for item in readings]
        return cls(*(np.array(column) for column in zip(*rows, strict=True)))

    @classmethod
    def scattered(cls, s: float, noise: Noise, runs: int, seed: int = 0) -> "Pool":
        """Make a pool of runs of one number each that scatter with standard deviation s."""
        value = s * noise(np.random.default_rng(seed), (runs,))
        return cls(value, value, np.zeros(runs), np.zeros(runs), np.zeros(runs, dtype=bool))

    def moved(self, s: float, seed: int = 0) -> "Pool":
        """Return the same runs with levels that scatter by s as well: what is within them stays."""
        levels = s * np.random.default_rng(seed).standard_normal(len(self.value))
        return replace(self, value=self.value + levels, whole=self.whole + levels)

    def draws(self, comparisons: int, runs: int, generator: np.random.Generator) -> np.ndarray:
        """Return the indices of the runs of each comparison, (comparisons, runs): no run twice where there are enough."""
        size = len(self.value)
        if size >= comparisons * runs:
            return np.arange(comparisons * runs).reshape(comparisons, runs)
        if size < runs:
            return generator.integers(size, size=(comparisons, runs))
        return np.argsort(generator.random((comparisons, size)), axis=1)[:, :runs]


def gaussian(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw standard normal noise."""
    return generator.standard_normal(shape)


def simulate(setup: Setup, s: float, comparisons: int = COMPARISONS, noise: Noise = gaussian, seed: int = 0) -> Power:
    """Judge ``comparisons`` pairs of unchanged sides whose runs are one number each and scatter with standard deviation s."""
    pool = Pool.scattered(s, noise, comparisons * (setup.old_runs + setup.new_runs), seed)
    return simulate_runs(setup, s, pool, comparisons, seed)


def simulate_runs(setup: Setup, s: float, pool: Pool, comparisons: int = COMPARISONS, seed: int = 0) -> Power:
    """Judge ``comparisons`` pairs of sides drawn from a pool of unchanged runs; s is what a calibration would know.

    The arithmetic is that of ``benchlib.judge.change.compared`` for many comparisons at once (a test holds them equal), the
    rule is ``ruling``. A loss shifts the new side and leaves its scatter as it is, so each comparison has one loss from which
    on it fails; the 99% quantile of these is the effect.
    """
    generator = np.random.default_rng(seed + 1)
    drawn = pool.draws(comparisons, setup.old_runs + setup.new_runs, generator)
    sides = drawn[:, : setup.new_runs], drawn[:, setup.new_runs :]
    values = [pool.value[side] for side in sides]
    half = _halves(setup, s, values, generator)
    within = [np.sqrt(sum((end[side] ** 2).mean(axis=1) / side.shape[1] for end, side in zip(ends, sides, strict=True)))
              for ends in ((pool.below, pool.above), (pool.above, pool.below))]  # fmt: skip
    down, up = (np.maximum(half, end) for end in within)
    better, worse = (up, down) if setup.direction == "higher" else (down, up)
    sign = -1.0 if setup.direction == "higher" else 1.0
    lost = sign * (values[0].mean(axis=1) - values[1].mean(axis=1))
    whole = sign * (pool.whole[sides[0]].mean(axis=1) - pool.whole[sides[1]].mean(axis=1))
    allowed, twice = (allowed_loss(setup.limit, setup.kind, setup.direction, 1.0, times) for times in (1.0, TWICE))
    disturbed = pool.disturbed[sides[0]].any(axis=1)
    first, second = (ruling(loss, loss - better, loss + worse, allowed, twice) for loss in (lost, whole))
    status = np.where(disturbed & (first != second), "AMBIGUOUS", first)
    critical = np.maximum(allowed, better) - np.where(disturbed, np.minimum(lost, whole), lost)
    effect = float(np.quantile(critical, POWER))
    if setup.kind == "ratio":
        effect = -math.expm1(-effect) if setup.direction == "higher" else math.expm1(effect)
    return Power(comparisons, float(np.mean(status == "FAIL")), float(np.mean(status == "AMBIGUOUS")), effect)


def _halves(setup: Setup, s: float, values: Sequence[np.ndarray], generator: np.random.Generator) -> np.ndarray:
    """Return half of the interval between runs of each comparison, (comparisons,)."""
    count = len(values[0])
    dof = sum(side.shape[1] - 1 for side in values)
    squares = sum(((side - side.mean(axis=1, keepdims=True)) ** 2).sum(axis=1) for side in values)
    if setup.known_dof:  # what calibrations of that size would have measured of the true spread
        squares, dof = squares + s**2 * generator.chisquare(setup.known_dof, count), dof + setup.known_dof
    if setup.default is not None and (lacking := DEFAULT_DOF - dof) > 0:
        squares, dof = squares + lacking * setup.default**2, dof + lacking
    if dof < LEAST_DOF:
        return np.zeros(count)
    return student(dof) * np.sqrt(squares / dof * sum(1 / side.shape[1] for side in values))  # type: ignore[no-any-return]
