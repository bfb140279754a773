"""What of a run is kept to compare with: its metrics and a thinned part of the samples."""

import time
from collections.abc import Iterable, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict

from benchlib.metrics import Metric
from benchlib.regression import RegressionLimit, Side
from benchlib.results import Run

KEPT_SAMPLES = 200


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
    found = [(record, metric) for record in records if (metric := record.metric(name)) is not None]
    if not found:
        return None
    valued = [(record, metric) for record, metric in found if metric.value is not None]
    sides = [Side.of(metric, record.samples.get(name, [])) for record, metric in valued]
    last = (valued or found)[-1][1]
    return Side(last, tuple(run for side in sides for run in side.runs))


def thinned(samples: Sequence[float], kept: int = KEPT_SAMPLES) -> list[float]:
    """Return the samples as they are, or of more than ``kept`` the ``kept`` quantiles at (i + 1/2) / kept, in ascending order.

    Quantiles keep the median and the spread; every second sample of a series that alternates would not.
    """
    if len(samples) <= kept:
        return list(samples)
    return [float(value) for value in np.quantile(np.asarray(samples, dtype=float), (np.arange(kept) + 0.5) / kept)]
