"""What the regression gate can tell: the spread between unchanged runs, its false alarms, the smallest loss it finds.

`benchlib calibrate` measures it with real runs; they are stored under ``baselines/calibrations/<benchmark>/<tier>/<key>.json``,
by the fingerprint that baselines have too. Rare events are simulated: the comparisons are judged by the gate itself
(``benchlib.judge.regression``) on the recorded runs, drawn at random, and on made-up ones (``benchlib.judge.noise``) that scatter
around the true value with the standard deviation s between unchanged runs, on the scale of the gate: the logarithm for limits
that are shares, the metric's unit for limits that are amounts.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from benchlib.core.files import read_model, write_json
from benchlib.core.text import band_text, day, quantity
from benchlib.judge import noise as made_up
from benchlib.judge.change import DEFAULT_DOF, LEAST_DOF, Kind, Reading, Spread, change, own_spread, reading, student
from benchlib.judge.regression import (
    TWICE,
    RegressionLimit,
    RunRecord,
    Side,
    allowed_loss,
    default_spread,
    faster,
    is_timed,
    kind_of,
    regression_check,
    ruling,
    side_of,
)
from benchlib.results.metrics import Direction

SCHEMA: Final = 2
LEAST_RUNS = 3  # unchanged runs that a spread can be estimated from
POWER = 0.99
COMPARISONS = 10_000
TABLED = 1000  # comparisons of each noise and number of accepted runs
MADE_UP = 200  # runs of each noise
ACCEPTED = (1, 2, 3, 5, 10)
Noise = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


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


class Simulated(BaseModel):
    """What the gate with this calibration makes of runs with one kind of noise, by the number of accepted runs.

    ``noise`` is recorded (the unchanged runs themselves), normal (one number a run) or a kind of ``benchlib.judge.noise``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    noise: str
    accepted: int
    false_alarms: float
    undecided: float
    effect: float


class MetricCalibration(BaseModel):
    """One metric: its unchanged runs, the spread between them, and what the gate makes of them.

    ``values`` are the medians of the unchanged runs in the metric's unit, ``spread`` their standard deviation on the gate's
    scale. A run whose level shifted counts with its undisturbed part. ``single`` compares each run with each other one (a baseline of
    one run), ``left_out`` each run with all others.
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
    simulated: list[Simulated] = []

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

    schema_version: Literal[2] = SCHEMA
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
        return Spread(item.spread, len(item.values) - 1, f"a calibration of {len(item.values)} runs") if item else None

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
            "the loss found is the one that 99 % of these comparisons fail. Planted: how much slower the slowed runs came out, and how many of them the gate failed."
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

    def power_rows(self) -> list[dict[str, str]]:
        """Return one row per kind of noise: by accepted runs the shares that fail and stay undecided, and the losses found.

        Of all metrics of speed the worst.
        """
        timed = [item for item in self.metrics if item.kind == "ratio" and is_timed(item.unit)]
        groups: dict[str, dict[int, list[Simulated]]] = {}
        for item in timed:
            for row in item.simulated:
                groups.setdefault(row.noise, {}).setdefault(row.accepted, []).append(row)
        return [
            {"noise": noise}
            | {
                f"{count} accepted": f"{max(row.false_alarms for row in rows):.1%}, {max(row.undecided for row in rows):.1%}, "
                f"{max(row.effect for row in rows):.0%}"
                for count, rows in by_count.items()
            }
            for noise, by_count in groups.items()
        ]


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
    readings = [reading(side.runs[0], kind, faster(metric)) for side in sides]
    values = [side.value(kind) for side in sides]
    spread = own_spread([readings])
    assert spread is not None
    setup = Setup(limit, metric.direction, known_dof=spread.dof, default=default_spread(metric, limit, kind))
    setup = setup if setup.kind == kind else setup.as_amount(float(np.mean(values)))
    # A metric whose runs are all equal has nothing to simulate: the gate fails from its own limit on.
    power = simulate(setup, spread.s)
    return MetricCalibration(
        metric=limit.metric,
        unit=metric.unit,
        direction=metric.direction,
        limit=limit,
        kind=kind,
        values=values,
        spread=spread.s,
        single=_count(limit, [(entry, [other]) for entry, other in itertools.permutations(sides, 2)]),
        left_out=_count(limit, [(side, [*sides[:place], *sides[place + 1 :]]) for place, side in enumerate(sides)]),
        planted=[
            item for share, records in sorted(planted.items()) if (item := _planted(limit, share, records, sides, kind))
        ],
        false_alarms=power.false_alarms,
        comparisons=power.comparisons,
        effect=power.effect,
        simulated=_simulated(setup, spread.s, readings, made_up.KINDS if faster(metric) and kind == "ratio" else ()),
    )


def _simulated(setup: "Setup", s: float, readings: Sequence[Reading], kinds: Iterable[str]) -> list[Simulated]:
    """Simulate the gate by the number of accepted runs, on the recorded runs and on made-up ones with their spread."""
    pools = {"recorded": Pool.of(readings), "normal": Pool.scattered(s, gaussian, TABLED * (1 + ACCEPTED[-1]))}
    pools |= {kind: _made_up(kind).moved(s) for kind in kinds}
    rows = []
    for name, pool in pools.items():
        for accepted in ACCEPTED:
            if len(pool.value) > accepted:
                found = simulate_runs(replace(setup, old_runs=accepted), s, pool, TABLED)
                rows.append(
                    Simulated(
                        noise=name,
                        accepted=accepted,
                        false_alarms=found.false_alarms,
                        undecided=found.ambiguous,
                        effect=found.effect,
                    )
                )
    return rows


@lru_cache(maxsize=8)
def _made_up(kind: str) -> "Pool":
    """Return runs of one level with this noise."""
    return Pool.of([reading(tuple(run), "ratio", "higher") for run in made_up.runs_of(kind, 0.0, MADE_UP)])


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
        measured=change(_together(sides).runs, _together(unchanged).runs, faster=faster(metric)).value,
        verdicts=_count(limit, [(side, unchanged) for side in sides]),
    )


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

    def as_amount(self, level: float) -> "Setup":
        """Return the setup of a share that is judged as an amount, because the metric is near or below zero."""
        amount = (self.limit.share or 0.0) * abs(level)
        return replace(self, limit=RegressionLimit(metric=self.limit.metric, amount=amount))


@dataclass(frozen=True)
class Power:
    """Of simulated comparisons of unchanged runs: the shares that fail and that stay undecided, and the smallest loss found.

    ``effect`` is the loss that 99 % of the comparisons call a regression: a share of the baseline for ratios (a throughput
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
    on it fails; the 99 % quantile of these is the effect.
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
