"""What the regression gate can tell: the spread between unchanged runs, its false alarms, the smallest loss it finds.

`benchlib calibrate` measures it with real runs; they are stored under ``baselines/calibrations/<benchmark>/<tier>/<key>.json``,
by the fingerprint that baselines have too. Rare events are simulated: the comparisons are judged by the gate itself
(``benchlib.judge.regression``), one number per run, drawn around the true one with the standard deviation s between unchanged
runs, on the scale of the gate: the logarithm for limits that are shares, the metric's unit for limits that are amounts.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from benchlib.core.files import read_model, write_json
from benchlib.core.text import band_text, day, quantity
from benchlib.judge.change import Kind, Spread, change, pooled
from benchlib.judge.regression import (
    RegressionLimit,
    RunRecord,
    Side,
    allowed_loss,
    kind_of,
    loss,
    regression_check,
    side_of,
    status_of,
    threshold,
)
from benchlib.results.metrics import Direction

SCHEMA: Final = 1
TIMED = ("s", "ms", "us", "Gbps")  # units that a slow-down changes, beside all rates
LEAST_RUNS = 3  # unchanged runs that a spread can be estimated from
POWER = 0.99
COMPARISONS = 10_000
Noise = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
_LEVEL = 100.0  # of the simulated metric; for differences its size has no influence


class Counted(BaseModel):
    """Verdicts of comparisons of real runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    comparisons: int
    fail: int
    ambiguous: int

    @property
    def upper(self) -> float:
        """Upper end of the exact (Clopper-Pearson) 95 % interval of the share that fails."""
        from scipy.stats import binomtest

        return float(binomtest(self.fail, self.comparisons).proportion_ci(0.90, "exact").high)


class Planted(BaseModel):
    """Runs whose timed work was made longer by ``share``, against all unchanged runs.

    ``expected`` and ``measured`` are ratios to the unchanged runs: 1 / (1 + share) for rates, 1 + share for times.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    share: float
    expected: float
    measured: float
    verdicts: Counted


class MetricCalibration(BaseModel):
    """One metric: its unchanged runs, the spread between them, and what the gate makes of them.

    ``values`` are the medians of the unchanged runs in the metric's unit, ``spread`` their standard deviation on the gate's
    scale. ``single`` compares each run with each other one (a baseline of one run), ``left_out`` each run with all others.
    ``false_alarms`` and ``effect`` are simulated with this spread for the weakest gate that has this calibration: one
    accepted run. More accepted runs find smaller losses.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric: str
    unit: str
    direction: Direction
    limit: RegressionLimit
    kind: Kind
    values: list[float]
    spread: float
    single: Counted
    left_out: Counted
    planted: list[Planted]
    false_alarms: float
    comparisons: int
    effect: float

    @property
    def band(self) -> float:
        """The A/A band, see ``benchlib.judge.change.Spread.band``."""
        return Spread(self.spread, len(self.values) - 1).band(self.kind)

    def shown(self, amount: float) -> str:
        """Write an effect or a band for a reader."""
        return f"{amount:.1%}" if self.kind == "ratio" else quantity(amount, self.unit)


class Calibration(BaseModel):
    """The calibration of one benchmark, tier and fingerprint."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = SCHEMA
    benchmark: str
    tier: str
    fingerprint: dict[str, str]
    made_at: float
    runs: int
    planted_runs: int
    metrics: list[MetricCalibration]

    def spread(self, metric: str) -> Spread | None:
        """Return the spread between unchanged runs of a metric, on its gate's scale; None where it was not measured."""
        item = next((item for item in self.metrics if item.metric == metric), None)
        return Spread(item.spread, len(item.values) - 1) if item else None

    def sentence(self) -> str:
        """Return what the gate can be trusted with, as a sentence."""
        alarms = sum(item.left_out.fail for item in self.metrics)
        comparisons = sum(item.left_out.comparisons for item in self.metrics)
        effects = sorted(item.effect for item in self.metrics if item.kind == "ratio" and is_timed(item.unit))
        span = f"{effects[0]:.1%}" + (f" to {effects[-1]:.1%}" if len(effects) > 1 else "") if effects else ""
        return (
            f"The gate was calibrated here on {day(self.made_at)} with {self.runs} unchanged and {self.planted_runs} slowed runs: "
            f"{alarms} false alarm{'s' * (alarms != 1)} in {comparisons} A/A comparisons"
            + (f"; it finds losses of speed of {span}, by metric, with 99 % power." if span else ".")
        )

    def method(self) -> str:
        """Return how the figures were made."""
        return (
            f"False alarms: each of the {self.runs} unchanged runs against all others, with the upper end of the exact 95 % interval; "
            "of one run: each against each other one, as with a baseline of a single run and no calibration. "
            "Simulated: the same gate, with one accepted run and this calibration, on numbers drawn with the spread of these runs; "
            "the loss found is the one that 99 % of these comparisons call a regression. Planted: how much slower the slowed runs came out, and how many of them the gate failed."
        )

    def rows(self) -> list[dict[str, str]]:
        """Return one row per metric for readers."""
        return [
            {
                "metric": item.metric,
                "limit": item.limit.text(item.direction),
                "A/A band": band_text(item.band, item.kind, item.unit),
                "loss found": item.shown(item.effect),
                "false alarms": f"{item.left_out.fail} of {item.left_out.comparisons} (<{item.left_out.upper:.0%})",
                "of one run": f"{item.single.fail} of {item.single.comparisons}",
                "simulated": f"{item.false_alarms:.2%}",
                "planted": "; ".join(
                    f"{plant.measured - 1:+.0%}: {plant.verdicts.fail} of {plant.verdicts.comparisons}"
                    for plant in item.planted
                ),
            }
            for item in self.metrics
        ]


def is_timed(unit: str) -> bool:
    """Tell whether a slow-down changes a metric of this unit."""
    return unit in TIMED or unit.endswith("/s")


def calibrate_metric(
    limit: RegressionLimit, unchanged: Sequence[RunRecord], planted: Mapping[float, Sequence[RunRecord]]
) -> MetricCalibration | None:
    """Judge the runs against each other by the gate itself; None where the unchanged runs lack the metric.

    ``planted`` maps the share by which the timed work was made longer to its runs.
    """
    sides = [side for record in unchanged if (side := side_of([record], limit.metric)) is not None and side.runs]
    if len(sides) < LEAST_RUNS:
        return None
    metric = sides[0].metric
    if limit.amount is None and max(np.median(side.runs[0]) for side in sides) <= 0:
        return None  # a share of nothing
    kind = kind_of(limit, *(min(side.runs[0]) for side in sides))
    medians = np.array([np.median(side.runs[0]) for side in sides])
    spread = pooled([np.log(medians) if kind == "ratio" else medians], None)
    assert spread is not None
    setup = Setup(limit, metric.direction, old_runs=1, known_dof=spread.dof)
    # A metric whose runs are all equal has nothing to simulate: the gate fails from its own limit on.
    power = simulate(setup if setup.kind == kind else setup.as_amount(float(medians.mean())), spread.s)
    return MetricCalibration(
        metric=limit.metric,
        unit=metric.unit,
        direction=metric.direction,
        limit=limit,
        kind=kind,
        values=medians.tolist(),
        spread=spread.s,
        single=_count(limit, [(entry, [other]) for entry, other in itertools.permutations(sides, 2)]),
        left_out=_count(limit, [(side, [*sides[:place], *sides[place + 1 :]]) for place, side in enumerate(sides)]),
        planted=[
            item for share, records in sorted(planted.items()) if (item := _planted(limit, share, records, sides, kind))
        ],
        false_alarms=power.false_alarms,
        comparisons=power.comparisons,
        effect=power.effect,
    )


def _together(sides: Sequence[Side]) -> Side:
    return Side(sides[-1].metric, tuple(run for side in sides for run in side.runs))


def _count(limit: RegressionLimit, pairs: Sequence[tuple[Side, Sequence[Side]]]) -> Counted:
    statuses = [regression_check(limit, new, _together(old)).status for new, old in pairs]
    return Counted(comparisons=len(statuses), fail=statuses.count("FAIL"), ambiguous=statuses.count("AMBIGUOUS"))


def _planted(
    limit: RegressionLimit, share: float, records: Sequence[RunRecord], unchanged: Sequence[Side], kind: Kind
) -> Planted | None:
    sides = [side for record in records if (side := side_of([record], limit.metric)) is not None and side.runs]
    metric = unchanged[0].metric
    if not sides or kind != "ratio" or not is_timed(metric.unit):
        return None
    return Planted(
        share=share,
        expected=1 / (1 + share) if metric.direction == "higher" else 1 + share,
        measured=change(_together(sides).runs, _together(unchanged).runs).value,
        verdicts=_count(limit, [(side, unchanged) for side in sides]),
    )


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

    def as_amount(self, level: float) -> "Setup":
        """Return the setup of a share that is judged as an amount, because the metric is near or below zero."""
        amount = (self.limit.share or 0.0) * abs(level)
        return replace(self, limit=RegressionLimit(metric=self.limit.metric, amount=amount))


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
    99 % quantile of these is the effect. Exact for one number per run.
    """
    generator = np.random.default_rng(seed)
    draws = s * noise(generator, (comparisons, setup.old_runs + setup.new_runs))
    spreads = _calibrated(setup, s, comparisons, generator)
    alarms = ambiguous = 0
    critical = np.empty(comparisons)
    for index, draw in enumerate(draws):
        values = _LEVEL * np.exp(draw) if setup.kind == "ratio" else _LEVEL + draw
        old, new = ([[value] for value in side] for side in (values[: setup.old_runs], values[setup.old_runs :]))
        result = change(new, old, kind=setup.kind, calibrated=spreads[index])
        level = float(np.mean(values[: setup.old_runs]))
        bound = threshold(setup.limit, setup.kind, setup.direction, level, result.band).bound
        status = status_of(result, bound, setup.direction)
        alarms, ambiguous = alarms + (status == "FAIL"), ambiguous + (status == "AMBIGUOUS")
        critical[index] = allowed_loss(bound, setup.kind, setup.direction) - loss(result, setup.direction)[0]
    effect = float(np.quantile(critical, POWER))
    if setup.kind == "ratio":
        effect = -math.expm1(-effect) if setup.direction == "higher" else math.expm1(effect)
    return Power(comparisons, alarms / comparisons, ambiguous / comparisons, effect)


def _calibrated(setup: Setup, s: float, comparisons: int, generator: np.random.Generator) -> list[Spread | None]:
    """Draw what calibrations of ``known_dof`` would have measured of the true spread: s * sqrt(chi² / dof)."""
    if not setup.known_dof:
        return [None] * comparisons
    scale = np.sqrt(generator.chisquare(setup.known_dof, comparisons) / setup.known_dof)
    return [Spread(float(s * value), setup.known_dof) for value in scale]


def path_of(root: Path, benchmark: str, tier: str, key: str) -> Path:
    """Return where the calibration of a fingerprint key is, below the folder of the baselines."""
    return root / "calibrations" / benchmark / tier / f"{key}.json"


def load_calibration(root: Path, benchmark: str, tier: str, key: str) -> Calibration | None:
    """Return the calibration of a fingerprint, None where there is none; ``UserError`` where it is cut or foreign."""
    path = path_of(root, benchmark, tier, key)
    if not path.exists():
        return None
    return read_model(path, Calibration, "a calibration (delete it and calibrate again)", SCHEMA)


def save_calibration(root: Path, calibration: Calibration, key: str) -> Path:
    """Write a calibration and return its file."""
    path = path_of(root, calibration.benchmark, calibration.tier, key)
    write_json(path, calibration.model_dump(mode="json"))
    return path
