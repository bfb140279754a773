"""What the regression gate can tell: the spread between unchanged runs, its false alarms, the smallest loss it finds.

`benchlib calibrate` measures it with real runs; they are stored under ``baselines/calibrations/<benchmark>/<tier>/<key>.json``,
by the fingerprint that baselines have too. Rare events are simulated (``benchlib.judge.power``) with the spread that they measured.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from benchlib.core.files import read_model, write_json
from benchlib.core.text import band_text, day, quantity
from benchlib.judge.change import Kind, Spread, change, own_spread, reading
from benchlib.judge.power import Setup, simulate
from benchlib.judge.regression import (
    RegressionLimit,
    Side,
    faster,
    is_timed,
    kind_of,
    regression_check,
    side_of,
)
from benchlib.results.metrics import Direction, measured
from benchlib.results.record import Record

SCHEMA: Final = 3
LEAST_RUNS = 3  # unchanged runs that a spread can be estimated from


class Counted(BaseModel):
    """Verdicts of comparisons of real runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    comparisons: int
    fail: int
    ambiguous: int

    @property
    def upper(self) -> float:
        """One-sided 95% bound on the share that fails: the upper end of the two-sided 90% Clopper-Pearson interval.

        It takes comparisons for independent. Each unchanged run against all others is one comparison a run, but any two share
        runs; each against each other one is n (n - 1) comparisons of n runs, for which there is no such bound.
        """
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

    schema_version: Literal[3] = SCHEMA
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

    def side(self, metric: str) -> Side | None:
        """Return the unchanged runs of a metric, each with its value alone; None where it was not measured."""
        item = next((item for item in self.metrics if item.metric == metric), None)
        if item is None:
            return None
        named = measured(metric, item.values[-1], item.unit, item.direction)
        return Side(named, tuple((value,) for value in item.values))

    def sentence(self) -> str:
        """Return what the gate can be trusted with, as a sentence."""
        # The metrics of a run are no separate trials. Which runs failed is not stored: in the worst case others in each metric.
        alarms = min(self.runs, sum(item.left_out.fail for item in self.metrics))
        failed = f"at most {alarms} of the {self.runs} unchanged" if alarms else f"none of the {self.runs} unchanged"
        effects = sorted(item.effect for item in self.metrics if item.kind == "ratio" and is_timed(item.unit))
        span = f"{effects[0]:.1%}" + (f" to {effects[-1]:.1%}" if len(effects) > 1 else "") if effects else ""
        return (
            f"The gate was calibrated here on {day(self.made_at)} with {self.runs} unchanged and {self.planted_runs} slowed runs: "
            f"{failed} failed in a metric against the others"
            + (f"; it finds losses of speed of {span}, by metric, with 99% power." if span else ".")
        )

    def method(self) -> str:
        """Return how the figures were made."""
        return (
            f"False alarms and undecided: each of the {self.runs} unchanged runs against all others, with the one-sided 95% bound of as many independent comparisons (these share runs); "
            "a metric that is often undecided scatters too much here for its limit (`--set limits.METRIC=SHARE`). "
            "Of one run: each against each other one, as with a baseline of a single run and no calibration. "
            "Simulated: the same gate, with one accepted run and this calibration, on numbers drawn with the spread of these runs; "
            "the loss found is the one that 99% of these comparisons fail. All this is of each metric on its own: in a run with others that are gated, what lies near it is AMBIGUOUS until it is repeated. Planted: how much slower the slowed runs came out, and how many of them the gate failed."
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
                "undecided": f"{item.left_out.ambiguous} of {item.left_out.comparisons}",
                "of one run": f"{item.single.fail} of {item.single.comparisons}",
                "simulated": f"{item.false_alarms:.2%}",
                "planted": "; ".join(
                    f"{plant.measured - 1:+.0%}: {plant.verdicts.fail} of {plant.verdicts.comparisons}"
                    for plant in item.planted
                ),
            }
            for item in self.metrics
        ]


def calibrate_metric(
    limit: RegressionLimit, unchanged: Sequence[Record], planted: Mapping[float, Sequence[Record]]
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
    setup = Setup.of(limit, _together(sides), known_dof=spread.dof)
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
    )


def _together(sides: Sequence[Side]) -> Side:
    others = float(np.median([side.others for side in sides]))
    return Side(sides[-1].metric, tuple(run for side in sides for run in side.runs), others)


def _count(limit: RegressionLimit, pairs: Sequence[tuple[Side, Sequence[Side]]]) -> Counted:
    statuses = [regression_check(limit, new, _together(old)).status for new, old in pairs]
    return Counted(comparisons=len(statuses), fail=statuses.count("FAIL"), ambiguous=statuses.count("AMBIGUOUS"))


def _planted(
    limit: RegressionLimit, share: float, records: Sequence[Record], unchanged: Sequence[Side], kind: Kind
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


def path_of(root: Path, benchmark: str, tier: str, key: str) -> Path:
    """Return where the calibration of a fingerprint key is, below the folder of the baselines."""
    return root / "calibrations" / benchmark / tier / f"{key}.json"


def load_calibration(root: Path, benchmark: str, tier: str, key: str) -> Calibration | None:
    """Return the calibration of a fingerprint, None where there is none; ``UserError`` where it is cut or foreign."""
    path = path_of(root, benchmark, tier, key)
    if not path.exists():
        return None
    return read_model(path, Calibration, "a calibration (delete it and calibrate again)", SCHEMA)


def load_calibrations(root: Path, benchmark: str, tier: str) -> list[Calibration]:
    """Return the calibrations of all fingerprints of a benchmark and tier."""
    paths = sorted((root / "calibrations" / benchmark / tier).glob("*.json"))
    return [item for path in paths if (item := load_calibration(root, benchmark, tier, path.stem))]


def save_calibration(root: Path, calibration: Calibration, key: str) -> Path:
    """Write a calibration and return its file."""
    path = path_of(root, calibration.benchmark, calibration.tier, key)
    write_json(path, calibration.model_dump(mode="json"))
    return path
