"""Metrics for Prometheus: OpenMetrics text, and the older text format that node exporter's textfile collector reads.

Only the newest run of each benchmark, tier, backend and host is exported: a scrape is the present state and holds each
series once. There are no timestamps, which the textfile collector refuses; the start of the run is a value of its own.
The file appears whole or not at all. Units are a label where Prometheus has no base unit for them.
"""

from collections.abc import Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Enum, Gauge, Info, generate_latest
from prometheus_client.openmetrics import exposition

from benchlib.core.text import OF_RUNS, counted
from benchlib.results.record import Record
from benchlib.results.run import fingerprint_key
from benchlib.results.verdict import Status
from benchlib.show.exports import put

OF_RUN = ("benchmark", "tier", "backend", "host")
OF_METRIC = (*OF_RUN, "metric", "unit")
OF_CHECK = ("check", "kind", "gates")
GAUGES = {
    "run_readable": (OF_RUN, "0 where a part of the run is damaged."),
    "run_start_time_seconds": (OF_RUN, "Unix time of the run's start."),
    "run_duration_seconds": (OF_RUN, "Wall time."),
    "metric_value": (OF_METRIC, "A metric: the number that its samples make, in the unit of the label."),
    "metric_low": (OF_METRIC, "Lower end of its 95% interval."),
    "metric_high": (OF_METRIC, "Upper end of its 95% interval."),
    "metric_samples": (OF_METRIC, "Samples that the metric rests on."),
}


def write_openmetrics(runs: Sequence[Record], output: str) -> str:
    return put(openmetrics(runs), output, f"OpenMetrics of {counted(len(newest(runs)), 'run')}")


def write_prometheus(runs: Sequence[Record], output: str) -> str:
    """Write the Prometheus text format; the textfile collector wants the name to end in ``.prom``."""
    return put(prometheus(runs), output, f"Metrics of {counted(len(newest(runs)), 'run')}")


def openmetrics(runs: Sequence[Record]) -> str:
    return exposition.generate_latest(_registry(runs)).decode()


def prometheus(runs: Sequence[Record]) -> str:
    return generate_latest(_registry(runs)).decode()


def newest(runs: Sequence[Record]) -> list[Record]:
    """Return the newest run of each place that was not slowed on purpose."""
    honest = [run for run in runs if not run.injected]
    return list({_labels(run): run for run in sorted(honest, key=lambda run: run.started_at)}.values())


def _labels(run: Record) -> tuple[str, ...]:
    return run.benchmark, run.tier, run.backend, run.host or "unknown"


def _registry(runs: Sequence[Record]) -> CollectorRegistry:
    own = CollectorRegistry()
    info = Info("benchlib_run", "The newest run.", OF_RUN, registry=own)
    words = "What all checks of the run say together."
    verdict = Enum("benchlib_verdict", words, OF_RUN, registry=own, states=OF_RUNS)
    words, of = "The status of each check; gates says whether its failure fails the run.", (*OF_RUN, *OF_CHECK)
    status = Enum("benchlib_check_status", words, of, registry=own, states=get_args(Status))
    gauges = {
        name: Gauge(f"benchlib_{name}", what, labels, unit="seconds" * name.endswith("_seconds"), registry=own)
        for name, (labels, what) in GAUGES.items()
    }
    for run in newest(runs):
        labels = _labels(run)
        facts = {name: run.setup.get(name, "") for name in ("benchlib", "torch")} | {"run": run.run}
        info.labels(*labels).info(facts | {"fingerprint": fingerprint_key(run.fingerprint) if run.fingerprint else ""})
        verdict.labels(*labels).state(run.word)
        for check in run.verdict.checks if run.verdict else []:
            status.labels(*labels, check.name, check.kind, str(check.gates).lower()).state(check.status)
        gauges["run_readable"].labels(*labels).set(not run.problems)
        gauges["run_start_time_seconds"].labels(*labels).set(run.started_at)
        if run.ended_at:
            gauges["run_duration_seconds"].labels(*labels).set(run.ended_at - run.started_at)
        for metric in run.metrics:
            numbers = {"value": metric.value, "samples": metric.n, "low": metric.ci_low, "high": metric.ci_high}
            for name, value in numbers.items():
                if metric.value is not None and value is not None:
                    gauges[f"metric_{name}"].labels(*labels, metric.name, metric.unit).set(value)
    return own
