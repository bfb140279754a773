"""What the regression gate can tell: the spread between unchanged runs, its false alarms, the smallest loss it finds.

`benchlib calibrate` measures it with real runs; they are stored under ``baselines/calibrations/<benchmark>/<tier>/<key>.json``,
by the fingerprint that baselines have too, and judged against each other by the gate itself.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from benchlib.core.text import day
from benchlib.judge.regression import (
    LEVEL,
    LOG,
    KeptRuns,
    RegressionLimit,
    Scale,
    Side,
    Spread,
    compared,
    deciding_spread,
    is_timed,
    level_spread,
    own_spread,
    read_runs,
    regression_check,
    scale_of,
    side_of,
    smallest_loss,
)
from benchlib.results.record import Record
from benchlib.results.run import fingerprint_key

MIN_RUNS = 3  # unchanged runs that a spread can be estimated from
METHOD = (
    "False alarms and undecided: each of the {runs} unchanged runs against all others; a metric that is often undecided scatters "
    "too much here for its limit (`--set limits.METRIC=SHARE`). Loss found: the one that fails in 99% of comparisons with one accepted run and this "
    "calibration, for normal noise. All this is of each metric on its own: in a run with others that are gated, what lies near it "
    "is AMBIGUOUS until it is repeated. Injected: how much slower the slowed runs came out, and how many of them the gate failed."
)


class Calibrated(NamedTuple):
    """One metric: its unchanged runs, the spread between them, and what the gate makes of them, each against all others.

    ``slowed`` are the runs whose timed work was made longer by a share: their ratio to the unchanged runs, and what the gate says
    of them against all of these. ``effect`` is the smallest loss that the weakest gate with this calibration finds in 99% of
    comparisons, one accepted run: more of them find smaller losses.
    """

    limit: RegressionLimit
    side: Side
    scale: Scale
    spread: Spread
    statuses: Counter[str]
    slowed: dict[float, tuple[float, Counter[str]]]
    effect: float

    def cells(self) -> dict[str, str]:
        unit, count = self.side.metric.unit, self.statuses.total()
        slowed = [f"{ratio - 1:+.0%}: {counts['FAIL']} of {counts.total()}" for ratio, counts in self.slowed.values()]
        return {
            "metric": self.limit.metric,
            "limit": self.limit.text(self.side.metric.direction),
            "A/A band": self.spread.band_text(self.scale, unit),
            "loss found": self.scale.size_text(self.effect, unit, 1),
            "false alarms": f"{self.statuses['FAIL']} of {count}",
            "undecided": f"{self.statuses['AMBIGUOUS']} of {count}",
            "injected": "; ".join(slowed),
        }


class Calibration(KeptRuns):
    """Runs of one fingerprint, the unchanged ones first; those that were slowed say by how much in their config."""

    @cached_property
    def calibrated(self) -> dict[str, Calibrated]:
        """What the gate makes of each metric that enough of the unchanged runs have."""
        calibrated = {limit.metric: self._calibrated(limit) for limit in self.limits}
        return {name: item for name, item in calibrated.items() if item}

    def _calibrated(self, limit: RegressionLimit) -> Calibrated | None:
        having = [run for run in self.runs if (side := side_of([run], limit.metric)) and side.runs]
        members = [run for run in having if not run.injected]
        together = side_of(members, limit.metric)
        # Of zeros a share is nothing.
        if together is None or len(members) < MIN_RUNS or (limit.amount is None and max(map(max, together.runs)) <= 0):
            return None
        scale, slowed = scale_of(limit, together.lowest), dict[float, tuple[float, Counter[str]]]()
        spread = own_spread(together.readings(scale)) or Spread(0.0, 0)
        for share in sorted({run.injected for run in having} - {0.0}):
            injected = [run for run in having if run.injected == share]
            slow = side_of(injected, limit.metric)
            if slow and scale is LOG and is_timed(together.metric.unit):
                ratio = scale.back(compared(slow.readings(scale), together.readings(scale), scale).move)
                slowed[share] = ratio, Counter(_status(limit, run, members) for run in injected)
        others = [(run, [other for other in members if other is not run]) for run in members]
        statuses = Counter(_status(limit, *pair) for pair in others)
        return Calibrated(
            limit,
            together,
            scale,
            spread,
            statuses,
            slowed,
            smallest_loss(limit, together, deciding_spread(together, scale), runs=1),
        )

    def spread(self, metric: str) -> Spread | None:
        """Return the spread between unchanged runs of a metric, on its gate's scale; None where it was not measured.

        A name that ends with ``LEVEL`` asks for that of their undisturbed levels.
        """
        item = self.calibrated.get(metric.removesuffix(LEVEL))
        spread = item and (level_spread(item.side.levels) if metric.endswith(LEVEL) else item.spread)
        return replace(spread, source=f"a calibration of {len(item.side.runs)} runs") if item and spread else None

    def sentence(self) -> str:
        # The metrics of a run are no separate trials: in the worst case other runs failed in each metric.
        count, items = sum(not run.injected for run in self.runs), self.calibrated.values()
        alarms = min(count, sum(item.statuses["FAIL"] for item in items))
        failed = f"at most {alarms} of the {count} unchanged" if alarms else f"none of the {count} unchanged"
        effects = sorted(item.effect for item in items if item.scale is LOG and is_timed(item.side.metric.unit))
        span = (
            f"; it finds losses of speed from {effects[0]:.1%} to {effects[-1]:.1%} on, by metric, with 99% power"
            if effects
            else ""
        )
        when, slowed = day(self.runs[0].accepted_at or 0), len(self.runs) - count
        runs = f"{count} unchanged and {slowed} slowed runs"
        return (
            f"The gate was calibrated here on {when} with {runs}: {failed} failed in a metric against the others{span}."
        )

    def method(self) -> str:
        return METHOD.format(runs=sum(not run.injected for run in self.runs))

    def rows(self) -> list[dict[str, str]]:
        return [item.cells() for item in self.calibrated.values()]


def _status(limit: RegressionLimit, new: Record, old: Sequence[Record]) -> str:
    return regression_check(limit, side_of([new], limit.metric), side_of(old, limit.metric)).status


def path_of(root: Path, benchmark: str, tier: str, fingerprint: dict[str, str]) -> Path:
    return root / "calibrations" / benchmark / tier / f"{fingerprint_key(fingerprint)}.json"


def load_calibration(root: Path, benchmark: str, tier: str, fingerprint: dict[str, str]) -> Calibration | None:
    """Return the calibration of a fingerprint, None if there is none; ``UserError`` if it is cut, foreign or lost a number."""
    path, what = path_of(root, benchmark, tier, fingerprint), "a calibration (delete it and calibrate again)"
    return read_runs(path, Calibration, what) if path.exists() else None


def save_calibration(root: Path, calibration: Calibration) -> Path:
    first = calibration.runs[0]
    return calibration.save(path_of(root, first.benchmark, first.tier, first.fingerprint))
