"""The calibration that `benchlib calibrate` writes: what it says of the gate is held against the runs that it rests on.

It states no result of a run. Its simulated shares can only be held against their bounds.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchlib.judge.calibration import Calibration, Counted, MetricCalibration
from benchlib.judge.change import pooled
from benchlib.judge.foreign.kit import keys, parse, validated
from benchlib.judge.impossible import numbers
from benchlib.judge.impossible.claim import Claim, Learning, Quantity, Restated

NOISE = 0.01  # share of a limit that a simulated effect may fall below it


def sniff(path: Path, text: str) -> bool:
    """A JSON object with the fields of a calibration."""
    return {"schema_version", "fingerprint", "benchmark", "runs", "planted_runs", "metrics"} <= keys(text)


def read(path: Path, text: str) -> list[Claim]:
    """Return a claim for each metric that was calibrated."""
    found: Calibration = validated(path, Calibration, parse(path, text), "a calibration of this version")
    return [_claim(item, found) for item in found.metrics]


def _claim(item: MetricCalibration, of: Calibration) -> Claim:
    finite = bool(item.values) and all(math.isfinite(value) for value in item.values)
    kept = Quantity(
        name=item.metric,
        value=float(np.median(item.values)) if finite else None,
        unit=item.unit,
        samples=item.values if finite else [],
        unit_of_name=numbers.unit_of(item.metric),
    )
    effect = Quantity(name=f"loss found in {item.metric}", value=item.effect if math.isfinite(item.effect) else None)
    alarms = item.false_alarms if math.isfinite(item.false_alarms) else -1.0
    return Claim(
        subject=item.metric,
        quantities=[kept, effect],
        learning=Learning(shares={"false alarms": alarms}),
        restated=[*_counts(item, of), *_spread(item), *_effect(item), *_planted(item)],
    )


def _counts(item: MetricCalibration, of: Calibration) -> Iterator[Restated]:
    runs = len(item.values)
    yield _at_most("runs", runs, of.runs, "all unchanged runs")
    yield _same("comparisons of one with one", item.single.comparisons, runs * (runs - 1), f"the {runs} runs")
    yield _same("comparisons with all others", item.left_out.comparisons, runs, f"the {runs} runs")
    verdicts = {"one with one": item.single, "with all others": item.left_out}
    for name, counted in {
        **verdicts,
        **{f"planted {plant.share:.0%}": plant.verdicts for plant in item.planted},
    }.items():
        yield _verdicts(name, counted)


def _verdicts(name: str, counted: Counted) -> Restated:
    decided = max(0, counted.fail) + max(0, counted.ambiguous)
    if min(counted.fail, counted.ambiguous) < 0:
        return _same(f"verdicts {name}", f"{counted.fail} failed, {counted.ambiguous} undecided", "none below zero", "")
    return _at_most(f"verdicts {name}", decided, counted.comparisons, "the comparisons")


def _spread(item: MetricCalibration) -> Iterator[Restated]:
    values = np.array(item.values)
    if len(values) < 2 or not np.isfinite(values).all() or (item.kind == "ratio" and values.min() <= 0):
        return
    true = pooled([np.log(values) if item.kind == "ratio" else values], None)
    assert true is not None
    yield _near("spread", item.spread, true.s, "the values of the runs")


def _effect(item: MetricCalibration) -> Iterator[Restated]:
    least = item.limit.share if item.kind == "ratio" else item.limit.amount
    if least is not None and math.isfinite(item.effect):
        good = item.effect >= least * (1 - NOISE)
        yield _same("loss found", f"{item.effect:.4g}", f"{item.effect if good else least:.4g}", "the limit, at least")


def _planted(item: MetricCalibration) -> Iterator[Restated]:
    for plant in item.planted:
        true = 1 / (1 + plant.share) if item.direction == "higher" else 1 + plant.share
        yield _near(f"planted {plant.share:.0%}", plant.expected, true, "the slow-down")


def _same(name: str, stated: object, other: object, source: str) -> Restated:
    return Restated(name=name, stated=str(stated), other=str(other), source=source)


def _at_most(name: str, stated: int, most: int, source: str) -> Restated:
    return _same(name, stated, stated if stated <= most else f"{most} at most", source)


def _near(name: str, stated: float, true: float, source: str) -> Restated:
    good = math.isclose(stated, true, rel_tol=1e-6, abs_tol=1e-9)
    return _same(name, f"{stated:.6g}", f"{stated if good else true:.6g}", source)
