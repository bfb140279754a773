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
from prometheus_client.registry import Collector

from benchlib.core.text import OF_RUNS, counted
from benchlib.results.record import Record
from benchlib.results.run import fingerprint_key
from benchlib.results.verdict import Status
from benchlib.show.exports import put

OF_RUN = ("benchmark", "tier", "backend", "host")
OF_METRIC = (*OF_RUN, "metric", "unit")
GAUGES = {
    "run_readable": (OF_RUN, "0 where a part of the run is damaged."),
    "run_start_time_seconds": (OF_RUN, "Unix time of the run's start."),
    "run_duration_seconds": (OF_RUN, "Wall time."),
    "metric_value": (OF_METRIC, "A metric: its median, in the unit of the label."),
    "metric_low": (OF_METRIC, "Lower end of the 95% interval of the median."),
    "metric_high": (OF_METRIC, "Upper end of the 95% interval of the median."),
    "metric_samples": (OF_METRIC, "Samples that the metric rests on."),
}


def write_openmetrics(runs: Sequence[Record], output: str) -> str:
    return put(openmetrics(runs), output, f"OpenMetrics of {counted(len(newest(runs)), 'run')}")


def write_prometheus(runs: Sequence[Record], output: str) -> str:
    """Write the Prometheus text format; the textfile collector wants the name to end in ``.prom``."""
    return put(prometheus(runs), output, f"Metrics of {counted(len(newest(runs)), 'run')}")


def openmetrics(runs: Sequence[Record]) -> str:
    return exposition.generate_latest(_Newest(runs)).decode()


def prometheus(runs: Sequence[Record]) -> str:
    return generate_latest(_Newest(runs)).decode()


def newest(runs: Sequence[Record]) -> list[Record]:
    return list({_labels(run): run for run in sorted(runs, key=lambda run: run.started_at)}.values())


def _labels(run: Record) -> tuple[str, ...]:
    return run.benchmark, run.tier, run.backend, run.host or "unknown"


class _Newest(Collector):
    def __init__(self, runs: Sequence[Record]) -> None:
        self.runs = newest(runs)

    def collect(self) -> Iterator[Metric]:
        info = InfoMetricFamily("benchlib_run", "The newest run.", labels=OF_RUN)
        verdict = StateSetMetricFamily("benchlib_verdict", "What all checks of the run say together.", labels=OF_RUN)
        words = "The status of each check; gates says whether its failure fails the run."
        status = StateSetMetricFamily("benchlib_check_status", words, labels=(*OF_RUN, "check", "kind", "gates"))
        gauges = {
            name: GaugeMetricFamily(f"benchlib_{name}", what, labels=labels, unit="seconds" * name.endswith("_seconds"))
            for name, (labels, what) in GAUGES.items()
        }
        for run in self.runs:
            labels = _labels(run)
            facts = {name: run.setup.get(name, "") for name in ("benchlib", "torch")} | {"run": run.run}
            facts["fingerprint"] = fingerprint_key(run.fingerprint) if run.fingerprint else ""
            info.add_metric(labels, facts)
            verdict.add_metric(labels, {word: word == run.word for word in OF_RUNS})
            # Each check and each metric once, even where a foreign run repeats one.
            for check in {check.name: check for check in (run.verdict.checks if run.verdict else [])}.values():
                states = {word: word == check.status for word in get_args(Status)}
                status.add_metric((*labels, check.name, check.kind, "true" if check.gates else "false"), states)
            took = run.ended_at and run.ended_at - run.started_at
            times = {
                "readable": float(not run.problems),
                "start_time_seconds": run.started_at,
                "duration_seconds": took,
            }
            rows = [(f"run_{name}", labels, value) for name, value in times.items()]
            for metric in {metric.name: metric for metric in run.metrics if metric.value is not None}.values():
                numbers = {"value": metric.value, "samples": metric.n, "low": metric.ci_low, "high": metric.ci_high}
                of = (*labels, metric.name, metric.unit)
                rows += [(f"metric_{name}", of, value) for name, value in numbers.items()]
            for name, of, value in rows:
                if value is not None:
                    gauges[name].add_metric(of, value)
        yield from (info, verdict, status, *gauges.values())
