"""What the regression gate can tell: the spread between unchanged runs, its false alarms, the smallest loss it finds.

`benchlib calibrate` measures it with real runs; they are stored under ``baselines/calibrations/<benchmark>/<tier>/<key>.json``,
by the fingerprint that baselines have too.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np
from pydantic import BaseModel

from benchlib.core.files import read_model, write_json
from benchlib.core.text import day
from benchlib.judge.regression import (
    LOG,
    SCALES,
    RegressionLimit,
    Spread,
    compared,
    is_timed,
    own_spread,
    regression_check,
    scale_of,
    side_of,
    smallest_loss,
)
from benchlib.results.metrics import Direction
from benchlib.results.record import Record
from benchlib.results.run import fingerprint_key

SCHEMA: Final = 5
MIN_RUNS = 3  # unchanged runs that a spread can be estimated from


class Counted(BaseModel):
    """Verdicts of comparisons of real runs."""

    comparisons: int
    fail: int
    ambiguous: int

    @property
    def upper(self) -> float:
        """One-sided 95% bound on the share that fails: the upper end of the two-sided 90% Clopper-Pearson interval.

        It takes comparisons for independent: each unchanged run against all others is one comparison a run, but any two share
        runs.
        """
        from scipy.stats import binomtest

        return float(binomtest(self.fail, self.comparisons).proportion_ci(0.90, "exact").high)


class Planted(BaseModel):
    """Runs whose timed work was made longer by ``share``, against all unchanged runs; ``measured`` is their ratio to these."""

    share: float
    measured: float
    verdicts: Counted


class MetricCalibration(BaseModel):
    """One metric: its unchanged runs, the spread between them, and what the gate makes of them.

    ``values`` are the medians of the unchanged runs in the metric's unit, ``spread`` their standard deviation on the scale of
    the gate, ``kind`` its name. A run whose level shifted counts with its undisturbed part. ``left_out`` compares each run with
    all others. ``effect`` is the smallest loss that the weakest gate with this calibration finds in 99% of comparisons, one
    accepted run: more of them find smaller losses.
    """

    metric: str
    unit: str
    direction: Direction
    limit: RegressionLimit
    kind: Literal["ratio", "difference"]
    values: list[float]
    spread: float
    left_out: Counted
    planted: list[Planted]
    effect: float

    def cells(self) -> dict[str, str]:
        scale, counts = SCALES[self.kind], self.left_out
        spread = Spread(self.spread, len(self.values) - 1)
        planted = [(item.measured - 1, item.verdicts) for item in self.planted]
        slowed = [f"{slower:+.0%}: {found.fail} of {found.comparisons}" for slower, found in planted]
        return {
            "metric": self.metric,
            "limit": self.limit.text(self.direction),
            "A/A band": spread.band_text(scale, self.unit),
            "loss found": scale.size_text(self.effect, self.unit, 1),
            "false alarms": f"{counts.fail} of {counts.comparisons} (<{counts.upper:.0%})",
            "undecided": f"{counts.ambiguous} of {counts.comparisons}",
            "injected": "; ".join(slowed),
        }


METHOD = (
    "False alarms and undecided: each of the {runs} unchanged runs against all others, with the one-sided 95% bound of as many "
    "independent comparisons (these share runs); a metric that is often undecided scatters too much here for its limit "
    "(`--set limits.METRIC=SHARE`). Loss found: the one that fails in 99% of comparisons with one accepted run and this calibration, for normal "
    "noise. All this is of each metric on its own: in a run with others that are gated, what lies near it is AMBIGUOUS until it is "
    "repeated. Injected: how much slower the slowed runs came out, and how many of them the gate failed."
)


class Calibration(BaseModel):
    schema_version: Literal[5] = SCHEMA
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
        # The metrics of a run are no separate trials. Which runs failed is not stored: in the worst case others in each metric.
        alarms = min(self.runs, sum(item.left_out.fail for item in self.metrics))
        failed = f"at most {alarms} of the {self.runs} unchanged" if alarms else f"none of the {self.runs} unchanged"
        effects = sorted(item.effect for item in self.metrics if item.kind == LOG.name and is_timed(item.unit))
        span = " to ".join(dict.fromkeys(f"{effect:.1%}" for effect in (effects[:1] + effects[-1:])))
        return (
            f"The gate was calibrated here on {day(self.made_at)} with {self.runs} unchanged and {self.planted_runs} slowed runs: "
            f"{failed} failed in a metric against the others"
            + (f"; it finds losses of speed of {span}, by metric, with 99% power." if span else ".")
        )

    def method(self) -> str:
        return METHOD.format(runs=self.runs)

    def rows(self) -> list[dict[str, str]]:
        return [item.cells() for item in self.metrics]


def calibrate_metric(
    limit: RegressionLimit, unchanged: Sequence[Record], planted: Mapping[float, Sequence[Record]]
) -> MetricCalibration | None:
    """Judge the runs against each other by the gate itself; None where the unchanged runs lack the metric.

    ``planted`` maps the share by which the timed work was made longer to its runs.
    """
    members = _having(unchanged, limit)
    together = side_of(members, limit.metric)
    if together is None or len(members) < MIN_RUNS:
        return None
    metric = together.metric
    if limit.amount is None and max(np.median(run) for run in together.runs) <= 0:
        return None  # a share of nothing
    scale = scale_of(limit, together.lowest)
    spread = own_spread(together.readings(scale))
    assert spread is not None
    slowed = list[Planted]()
    for share, records in sorted(planted.items()):
        slow = side_of(_having(records, limit), limit.metric)
        if slow and scale is LOG and is_timed(metric.unit):
            ratio = compared(slow.readings(scale), together.readings(scale), scale)
            verdicts = _count(limit, [(record, members) for record in _having(records, limit)])
            slowed.append(Planted(share=share, measured=scale.back(ratio.move), verdicts=verdicts))
    return MetricCalibration(
        metric=limit.metric,
        unit=metric.unit,
        direction=metric.direction,
        limit=limit,
        kind=scale.name,
        values=[scale.back(item.value) for item in together.readings(scale)],
        spread=spread.s,
        left_out=_count(limit, [(record, [other for other in members if other is not record]) for record in members]),
        planted=slowed,
        effect=smallest_loss(limit, together, spread, runs=1),
    )


def _having(records: Sequence[Record], limit: RegressionLimit) -> list[Record]:
    return [record for record in records if (side := side_of([record], limit.metric)) and side.runs]


def _count(limit: RegressionLimit, pairs: Sequence[tuple[Record, Sequence[Record]]]) -> Counted:
    sides = [(side_of([new], limit.metric), side_of(old, limit.metric)) for new, old in pairs]
    statuses = [regression_check(limit, new, old).status for new, old in sides if new and old]
    return Counted(comparisons=len(statuses), fail=statuses.count("FAIL"), ambiguous=statuses.count("AMBIGUOUS"))


def path_of(root: Path, benchmark: str, tier: str, fingerprint: dict[str, str]) -> Path:
    return root / "calibrations" / benchmark / tier / f"{fingerprint_key(fingerprint)}.json"


def load_calibration(root: Path, benchmark: str, tier: str, fingerprint: dict[str, str]) -> Calibration | None:
    """Return the calibration of a fingerprint, None where there is none; ``UserError`` where it is cut or foreign."""
    path = path_of(root, benchmark, tier, fingerprint)
    return (
        read_model(path, Calibration, "a calibration (delete it and calibrate again)", SCHEMA)
        if path.exists()
        else None
    )


def save_calibration(root: Path, calibration: Calibration) -> Path:
    path = path_of(root, calibration.benchmark, calibration.tier, calibration.fingerprint)
    write_json(path, calibration.model_dump(mode="json"))
    return path
