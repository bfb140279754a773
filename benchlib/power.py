"""What the regression gate can tell: its false alarms and the smallest loss that it finds, by simulation.

The comparisons that are simulated are judged by the gate itself (``benchlib.regression``), one number a run. A run's
number is drawn around the true one with the standard deviation s between unchanged runs, on the scale of the gate: the
logarithm for limits that are shares, the metric's unit for limits that are amounts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchlib.change import Kind, Spread, change
from benchlib.metrics import Direction
from benchlib.regression import RegressionLimit, allowed_loss, loss, status_of, threshold

POWER = 0.99
COMPARISONS = 10_000
Noise = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
_LEVEL = 100.0  # of the simulated metric; for differences its size has no influence


@dataclass(frozen=True)
class Setup:
    """A gate to look at: the limit, the runs on both sides, and the spread a calibration of ``known_dof`` would know."""

    limit: RegressionLimit
    direction: Direction = "higher"
    old_runs: int = 1
    new_runs: int = 1
    known_dof: int = 0

    @property
    def kind(self) -> Kind:
        """The scale of the gate."""
        return "difference" if self.limit.amount is not None else "ratio"


@dataclass(frozen=True)
class Power:
    """Of simulated A/A comparisons: the shares that fail and that stay undecided, and the smallest loss found.

    ``effect`` is the loss that 99 % of the comparisons call a regression: a share of the baseline for ratios (a throughput
    lower by it, a time higher by it), an amount for differences.
    """

    comparisons: int
    false_alarms: float
    ambiguous: float
    effect: float


def gaussian(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw standard normal noise."""
    return generator.standard_normal(shape)


def simulate(setup: Setup, s: float, comparisons: int = COMPARISONS, noise: Noise = gaussian, seed: int = 0) -> Power:
    """Judge ``comparisons`` pairs of unchanged sides whose runs scatter with standard deviation s.

    A loss shifts the new side and leaves its scatter as it is, so each comparison has one loss from which on it fails; the
    99 % quantile of these is the effect. Exact for one number a run.
    """
    generator = np.random.default_rng(seed)
    draws = s * noise(generator, (comparisons, setup.old_runs + setup.new_runs))
    known = _known(setup, s, comparisons, generator)
    alarms = ambiguous = 0
    critical = np.empty(comparisons)
    for index, draw in enumerate(draws):
        values = _LEVEL * np.exp(draw) if setup.kind == "ratio" else _LEVEL + draw
        old, new = ([[value] for value in side] for side in (values[: setup.old_runs], values[setup.old_runs :]))
        found = change(new, old, kind=setup.kind, known=known[index])
        level = float(np.mean(values[: setup.old_runs]))
        bound = threshold(setup.limit, setup.kind, setup.direction, level, found.band).bound
        status = status_of(found, bound, setup.direction)
        alarms, ambiguous = alarms + (status == "FAIL"), ambiguous + (status == "AMBIGUOUS")
        critical[index] = allowed_loss(bound, setup.kind, setup.direction) - loss(found, setup.direction)[0]
    effect = float(np.quantile(critical, POWER))
    if setup.kind == "ratio":
        effect = -math.expm1(-effect) if setup.direction == "higher" else math.expm1(effect)
    return Power(comparisons, alarms / comparisons, ambiguous / comparisons, effect)


def _known(setup: Setup, s: float, comparisons: int, generator: np.random.Generator) -> list[Spread | None]:
    """Draw what calibrations of ``known_dof`` would have measured of the true spread: s * sqrt(chi² / dof)."""
    if not setup.known_dof:
        return [None] * comparisons
    scale = np.sqrt(generator.chisquare(setup.known_dof, comparisons) / setup.known_dof)
    return [Spread(float(s * value), setup.known_dof) for value in scale]
