"""The regression gate: how much worse than the accepted runs a metric may get, judged by a ratio and its interval."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, RootModel, model_validator

from benchlib.core.files import read_model, write_json
from benchlib.core.text import band_text, quantity
from benchlib.judge.change import Change, Kind, Spread, change
from benchlib.judge.checks import Check, Status
from benchlib.results.metrics import Direction, Metric
from benchlib.results.run import Result, Run

KEPT_SAMPLES = 200
REPEATS = "repeats.json"
_EDGE = 1e-9  # of what is compared: 0.9 - 0.8 misses 0.1 by rounding, and a boundary value passes


class RegressionLimit(BaseModel):
    """How much worse a metric may get. Either a share of the baseline or an absolute amount in the metric's unit.

    A share of 1 lets a time double; of a rate it allows anything.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric: str
    share: float | None = Field(None, ge=0, le=1)
    amount: float | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _one_of_both(self) -> "RegressionLimit":
        if (self.share is None) == (self.amount is None):
            raise ValueError(f"limit of {self.metric}: give a share of the baseline or an amount, one of both")
        return self

    def text(self, direction: str) -> str:
        """The limit for a reader, as in ``-20 %`` or ``-1 point``."""
        sign = "-" if direction == "higher" else "+"
        return f"{sign}{self.share:.0%}" if self.share is not None else f"{sign}{self.amount:g}"


@dataclass(frozen=True)
class Side:
    """A metric in one or more runs: ``runs`` holds the samples of each."""

    metric: Metric
    runs: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, metric: Metric, samples: Iterable[float] = ()) -> "Side":
        """Make the side of one run; a run without stored samples counts with its value."""
        values = tuple(samples) or ((metric.value,) if metric.value is not None else ())
        return cls(metric, (values,) if values else ())

    def value(self, kind: Kind) -> float:
        """Return the (geometric, for ratios) mean of the runs' medians."""
        medians = np.array([np.median(run) for run in self.runs])
        return float(np.exp(np.log(medians).mean()) if kind == "ratio" else medians.mean())

    def text(self, kind: Kind) -> str:
        """The value with its unit, and of how many runs where there are several."""
        if len(self.runs) == 1:
            return self.metric.text
        return f"{quantity(self.value(kind), self.metric.unit)} ({len(self.runs)} runs)"


class RunRecord(BaseModel):
    """A run as a baseline or a repetition keeps it. ``samples`` holds each metric's, or 200 quantiles of them."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    run: str
    reason: str = ""
    started_at: float
    recorded_at: float
    metrics: list[Metric]
    samples: dict[str, list[float]]

    @classmethod
    def of(cls, run: Run, limits: Iterable[RegressionLimit], reason: str = "") -> "RunRecord":
        """Record a run that has a result, with the samples of the metrics that have a limit."""
        assert run.result is not None
        samples = {limit.metric: thinned(run.samples.get(limit.metric, [])) for limit in limits}
        return cls(
            run=run.path.name,
            reason=reason,
            started_at=run.result.started_at,
            recorded_at=time.time(),
            metrics=run.result.metrics,
            samples={name: values for name, values in samples.items() if values},
        )

    def is_copy_of(self, other: "RunRecord") -> bool:
        """Tell whether both are the same run, under whatever name: begun at the same microsecond with the same numbers."""
        return self.started_at == other.started_at and self.metrics == other.metrics

    def metric(self, name: str) -> Metric | None:
        """Return the metric of this name, or None."""
        return next((metric for metric in self.metrics if metric.name == name), None)


def side_of(records: Sequence[RunRecord], name: str) -> Side | None:
    """Return one side of a comparison from several runs; None where none of them has the metric.

    Runs in which the metric has no value do not count, unless none has one.
    """
    having = [(record, metric) for record in records if (metric := record.metric(name)) is not None]
    having = [pair for pair in having if pair[1].value is not None] or having[-1:]
    sides = [Side.of(metric, record.samples.get(name, [])) for record, metric in having]
    return Side(having[-1][1], tuple(run for side in sides for run in side.runs)) if having else None


def thinned(samples: Sequence[float], kept: int = KEPT_SAMPLES) -> list[float]:
    """Return the samples as they are, or of more than ``kept`` the ``kept`` quantiles at (i + 1/2) / kept, in ascending order.

    Quantiles keep the median and the spread; every second sample of a series that alternates would not.
    """
    if len(samples) <= kept:
        return list(samples)
    return [float(value) for value in np.quantile(np.asarray(samples, dtype=float), (np.arange(kept) + 0.5) / kept)]


@dataclass(frozen=True)
class Threshold:
    """How much worse counts: the larger of the metric's own limit and the A/A band that was measured.

    ``bound`` is a ratio or an amount on the worse side, in the metric's direction.
    """

    bound: float
    own: float
    band_decides: bool


def kind_of(limit: RegressionLimit, *values: float) -> Kind:
    """Return the scale to compare on: ratios, but differences for points and for values near or below zero."""
    return "difference" if limit.amount is not None or min(values) <= 0 else "ratio"


def threshold(limit: RegressionLimit, kind: Kind, direction: Direction, old: float, band: float) -> Threshold:
    """Return what a change has to exceed to be a regression. ``old`` is the baseline's value, ``band`` the A/A band."""
    if kind == "difference":
        own = limit.amount if limit.amount is not None else (limit.share or 0.0) * abs(old)
        return Threshold(max(own, band), own, band > own)
    share = limit.share or 0.0
    own, noise = (1 - share, 1 / (1 + band)) if direction == "higher" else (1 + share, 1 + band)
    worse = min(own, noise) if direction == "higher" else max(own, noise)
    return Threshold(worse, own, worse != own)


def loss(result: Change, direction: Direction) -> tuple[float, float]:
    """Return the loss at the better and at the worse end of the interval, on a scale on which more is worse.

    The scale is the logarithm for ratios, the metric's unit for differences. Directions other than ``higher`` count as
    lower is better.
    """
    ends = (math.log(result.low), math.log(result.high)) if result.kind == "ratio" else (result.low, result.high)
    return (-ends[1], -ends[0]) if direction == "higher" else ends


def loss_of(result: Change, direction: Direction) -> float:
    """Return the loss of the value itself, on the scale of ``loss``; below zero where it is better."""
    value = math.log(result.value) if result.kind == "ratio" else result.value
    return -value if direction == "higher" else value


def allowed_loss(bound: float, kind: Kind, direction: Direction) -> float:
    """Return a threshold's bound on the scale of ``loss``."""
    if kind == "difference":
        return bound
    if direction == "higher":
        return -math.log(bound) if bound > 0 else math.inf
    return math.log(bound)


def status_of(result: Change, bound: float, direction: Direction, size: float = 0.0) -> Status:
    """Return FAIL where the whole interval is worse than the bound, PASS where it is within it, else AMBIGUOUS.

    A boundary value passes: ``size`` is that of the values whose difference was rounded. A value that is no worse than the
    baseline's is never a regression, however wide its interval.
    """
    least, most = loss(result, direction)
    if loss_of(result, direction) <= 0:
        return "PASS"
    limit = allowed_loss(bound, result.kind, direction)
    floor = 1.0 if result.kind == "ratio" else 0.0  # logarithms have a scale of their own, amounts have not
    slack = _EDGE * max(floor, abs(limit), abs(least), abs(most), size)
    if least > limit + slack:
        return "FAIL"
    return "PASS" if most <= limit + slack else "AMBIGUOUS"


def regression_check(limit: RegressionLimit, new: Side, old: Side, calibrated: Spread | None = None) -> Check:
    """Compare a metric with its baseline by ``benchlib.judge.change.change``; the direction is the metric's.

    ``known`` is the spread between unchanged runs that a calibration measured.
    """
    metric = new.metric
    lacking = _no_value(new, old)
    if lacking is not None:
        return lacking
    kind = kind_of(limit, *(min(run) for side in (new, old) for run in side.runs))
    result = change(new.runs, old.runs, kind=kind, calibrated=calibrated)
    wanted = threshold(limit, kind, metric.direction, old.value(kind), result.band)
    size = abs(old.value(kind)) if kind == "difference" else 0.0  # ratios have a scale of their own
    status = status_of(result, wanted.bound, metric.direction, size)
    advice = "; the interval spans the limit" if status == "AMBIGUOUS" else ""
    advice += ": repeat the run" if advice and len(new.runs) == 1 else ""
    return baseline_check(
        metric,
        status=status,
        reason=f"{new.text(kind)} against {old.text(kind)}: {_text(result, metric.unit)}{advice}",
        value=new.metric.value if len(new.runs) == 1 else new.value(kind),
        limit=_limit_text(limit, wanted, result, metric) + f" of {old.text(kind)}",
        source=_basis(result),
    )


def _no_value(new: Side, old: Side) -> Check | None:
    """Return the check of a side without a value, None where both have one. A value that is no number fails."""
    if new.runs and old.runs and new.metric.value is not None and old.metric.value is not None:
        return None
    if new.metric.value is None and new.metric.provenance != "not_available":
        return baseline_check(new.metric, status="FAIL", reason=f"not a number: {new.metric.reason}")
    which, side = ("this run", new) if new.metric.value is None or not new.runs else ("the baseline", old)
    reason = f"{which} has no value: {side.metric.reason}"
    return baseline_check(new.metric, status="NOT_COMPARABLE", reason=reason, value=new.metric.value)


def _text(result: Change, unit: str) -> str:
    if result.kind == "ratio":
        text, interval = f"ratio {result.value:.3f}", f"{result.low:.3f} to {result.high:.3f}"
    else:
        text = _signed(result.value, unit)
        interval = f"{_signed(result.low, unit)} to {_signed(result.high, unit)}"
    if result.basis == "none":
        return text if result.low == result.high else f"{text}, {interval} by too few samples for an interval"
    return f"{text}, 98 % interval {interval}"


def _limit_text(limit: RegressionLimit, wanted: Threshold, result: Change, metric: Metric) -> str:
    own = limit.text(metric.direction)
    if not wanted.band_decides:
        return own
    if result.kind == "ratio":
        return f"{wanted.bound - 1:+.1%} (the A/A band, wider than {own})"
    return f"{'-' if metric.direction == 'higher' else '+'}{quantity(wanted.bound)} (the A/A band, wider than {own})"


def _basis(result: Change) -> str:
    runs = f"baseline of {result.old_runs} run{'s' * (result.old_runs > 1)}"
    if result.spread is None:
        return f"{runs}; the spread between runs is not known, accept --add and calibrate measure it"
    band = band_text(result.band, result.kind)
    few = "" if result.basis == "runs" else ", from too few runs to widen the interval: add a third"
    return f"{runs}; A/A band {band}{few}"


def _signed(amount: float, unit: str) -> str:
    return f"{'+' if amount >= 0 else '-'}{quantity(abs(amount), unit)}"


def baseline_check(metric: Metric, **fields: Any) -> Check:
    """Return a regression check of a metric; ``fields`` are those of ``Check`` beside name, kind, question and unit."""
    question = f"Is {metric.name} at least as good as the baseline?"
    common = {"name": f"{metric.name} vs baseline", "kind": "regression", "unit": metric.unit, "source": "baseline"}
    return Check(**{**common, "question": question, **fields})


def open_checks(
    limits: Iterable[RegressionLimit], result: Result, status: Literal["NO_BASELINE", "NOT_COMPARABLE"], reason: str
) -> list[Check]:
    """Make the regression checks of a run that has nothing to compare with."""
    metrics = [(limit, result.metric(limit.metric)) for limit in limits]
    return [
        baseline_check(
            metric,
            status=status,
            reason=f"measured {metric.text}; {reason}",
            value=metric.value,
            limit=limit.text(metric.direction),
        )
        for limit, metric in metrics
        if metric is not None and metric.value is not None
    ]


class Repeats(RootModel[list[RunRecord]]):
    """``repeats.json``: the earlier repetitions that a run of ``--repeat N`` is judged together with.

    The records are copied, not linked: a run stays judged as it was when the folders of the others are gone.
    """


def repeats(run: Run) -> list[RunRecord]:
    """Return the earlier repetitions of a run, the oldest first; none where it was not repeated."""
    path = run.path / REPEATS
    return read_model(path, Repeats, "the records of repetitions").root if path.exists() else []


def save_repeats(run_dir: Path | str, records: Sequence[RunRecord]) -> None:
    """Write the earlier repetitions into the folder of the latest one."""
    write_json(Path(run_dir) / REPEATS, Repeats(list(records)).model_dump(mode="json"))
