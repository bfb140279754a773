"""Metrics for Prometheus: OpenMetrics text, and the older text format that node exporter's textfile collector reads.

Only the newest run of each benchmark, tier, backend and host is exported: a scrape is the present state and holds each
series once. There are no timestamps, which the textfile collector refuses; the start of the run is a value of its own.
The file appears whole or not at all. Units are a label where Prometheus has no base unit for them.
"""

from collections.abc import Iterator, Sequence
from typing import get_args

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, StateSetMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition
from prometheus_client.registry import Collector, CollectorRegistry

from benchlib.core.text import OF_RUNS, counted
from benchlib.results.record import Record
from benchlib.results.run import fingerprint_key
from benchlib.results.verdict import Status
from benchlib.show.exports import put

LABELS = ("benchmark", "tier", "backend", "host")
STATUSES = get_args(Status)


def write_openmetrics(runs: Sequence[Record], output: str) -> str:
    """Write OpenMetrics text, with ``# EOF``."""
    return put(openmetrics(runs), output, f"OpenMetrics of {counted(len(newest(runs)), 'run')}")


def write_prometheus(runs: Sequence[Record], output: str) -> str:
    """Write the Prometheus text format; the textfile collector wants the name to end in ``.prom``."""
    return put(prometheus(runs), output, f"Metrics of {counted(len(newest(runs)), 'run')}")


def openmetrics(runs: Sequence[Record]) -> str:
    """Return the runs as OpenMetrics text."""
    return exposition.generate_latest(_registry(runs)).decode()


def prometheus(runs: Sequence[Record]) -> str:
    """Return the runs in the Prometheus text format."""
    return generate_latest(_registry(runs)).decode()


def newest(runs: Sequence[Record]) -> list[Record]:
    """Return the newest run of each benchmark, tier, backend and host."""
    return list({_labels(run): run for run in sorted(runs, key=lambda run: run.started_at)}.values())


def _labels(run: Record) -> tuple[str, ...]:
    return run.benchmark, run.tier, run.backend, run.host or "unknown"


class _Runs(Collector):
    def __init__(self, runs: Sequence[Record]) -> None:
        self.runs = newest(runs)

    def collect(self) -> Iterator[Metric]:
        yield from self._of_runs()
        yield from self._of_checks()
        yield from self._of_metrics()

    def _of_runs(self) -> Iterator[Metric]:
        info = InfoMetricFamily("benchlib_run", "The newest run.", labels=LABELS)
        verdict = StateSetMetricFamily("benchlib_verdict", "What all checks of the run say together.", labels=LABELS)
        readable = GaugeMetricFamily("benchlib_run_readable", "0 where a part of the run is damaged.", labels=LABELS)
        started = GaugeMetricFamily(
            "benchlib_run_start_time_seconds", "Unix time of the run's start.", labels=LABELS, unit="seconds"
        )
        took = GaugeMetricFamily("benchlib_run_duration_seconds", "Wall time.", labels=LABELS, unit="seconds")
        for run in self.runs:
            labels = _labels(run)
            facts = {name: run.setup.get(name, "") for name in ("benchlib", "torch")}
            facts |= {"run": run.run, "fingerprint": fingerprint_key(run.fingerprint) if run.fingerprint else ""}
            info.add_metric(labels, facts)
            verdict.add_metric(labels, {word: word == run.word for word in OF_RUNS})
            readable.add_metric(labels, float(not run.problems))
            started.add_metric(labels, run.started_at)
            if run.ended_at is not None:
                took.add_metric(labels, run.ended_at - run.started_at)
        yield from (info, verdict, readable, started, took)

    def _of_checks(self) -> Iterator[Metric]:
        status = StateSetMetricFamily(
            "benchlib_check_status",
            "The status of each check; gates says whether its failure fails the run.",
            labels=(*LABELS, "check", "kind", "gates"),
        )
        for run in self.runs:
            # Each check once, even where a foreign verdict repeats one.
            for check in {check.name: check for check in (run.verdict.checks if run.verdict else [])}.values():
                gates = "true" if check.gates else "false"
                labels = (*_labels(run), check.name, check.kind, gates)
                status.add_metric(labels, {word: word == check.status for word in STATUSES})
        yield status

    def _of_metrics(self) -> Iterator[Metric]:
        names = (*LABELS, "metric", "unit")
        value = GaugeMetricFamily(
            "benchlib_metric_value", "A metric: its median, in the unit of the label.", labels=names
        )
        low = GaugeMetricFamily("benchlib_metric_low", "Lower end of the 95% interval of the median.", labels=names)
        high = GaugeMetricFamily("benchlib_metric_high", "Upper end of the 95% interval of the median.", labels=names)
        count = GaugeMetricFamily("benchlib_metric_samples", "Samples that the metric rests on.", labels=names)
        for run in self.runs:
            for metric in {m.name: m for m in run.metrics}.values():
                if metric.value is None:
                    continue
                labels = (*_labels(run), metric.name, metric.unit)
                value.add_metric(labels, metric.value)
                count.add_metric(labels, metric.n)
                if metric.ci_low is not None and metric.ci_high is not None:
                    low.add_metric(labels, metric.ci_low)
                    high.add_metric(labels, metric.ci_high)
        yield from (value, low, high, count)


def _registry(runs: Sequence[Record]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(_Runs(runs))
    return registry
