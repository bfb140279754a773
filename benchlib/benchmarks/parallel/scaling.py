"""How strategies scale: efficiency with its interval, the model's prediction beside it, and what the model says of more devices.

Efficiency of n devices is X_n / (n X_1) with X in samples/s: with one global batch (strong) this is T_1 / (n T_n), with one batch
per device (weak) T_1 / T_n. The interval takes the worse ends of both intervals, so it is wider than one of 95%.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchlib.benchmarks.parallel.estimate import Rates, scale_of, step_time
from benchlib.benchmarks.parallel.shapes import STRATEGIES, Job
from benchlib.core.stats import summary

WORLDS = (8, 64, 1024)  # what is extrapolated to
MOST_OFF = 0.5  # of measured over predicted steps, less one: a model that misses half of its strategies by more predicts nothing
Row = dict[str, Any]


def off(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return how far measured steps are from the predicted ones, as a share of these: the median over strategies."""
    pairs = [
        (row["steps_s"], row.get("predicted_step_s")) for row in rows if row["status"] == "ok" and not row["scaling"]
    ]
    errors = [abs(statistics.median(steps) / predicted - 1) for steps, predicted in pairs if predicted]
    return statistics.median(errors) if errors else None


def points(rows: Sequence[Row], jobs: Mapping[str, Job], rates: Rates | None) -> list[Row]:
    """Return strong and weak scaling of each strategy, from one rank (the single device) to all, then what the model says of more.

    ``low`` to ``high`` is the interval of ``efficiency``; ``predicted`` is the model's efficiency and ``error`` the measured over
    the predicted step less one, above zero where the machine is slower than the model. A model that is ``off`` predicts nothing.
    """
    error, made = off(rows), list[Row]()
    ran = [row for row in rows if row["status"] == "ok"]
    for kind in ("strong", "weak"):
        for last in (row for row in ran if not row["scaling"] and row["world"] > 1):
            alike = {("single", ""), (last["strategy"], last["schedule"])}
            same = [row for row in ran if row["scaling"] == kind and (row["strategy"], row["schedule"]) in alike]
            base = next((row for row in same if row["world"] == 1), None)
            if base is None:
                continue
            curve = {"key": last["key"], "kind": kind}
            trusted = error is not None and error <= MOST_OFF
            for row in sorted([*same, last], key=lambda item: int(item["world"])):
                made.append(curve | {"source": "measured"} | _point(row, base, trusted))
            if trusted and rates:
                shown = _extrapolated(jobs[last["key"]], last, jobs[base["key"]], base, rates, kind)
                made += [curve | {"source": "model"} | point for point in shown]
    return made


def _point(row: Row, base: Row, trusted: bool) -> Row:
    steps, first = summary(row["steps_s"]), summary(base["steps_s"])
    n, one = row["world"], base["batch_size"]
    ideal = n * one / first.median  # n times the rate of one device
    point: Row = {"world": n, "samples_per_s": row["batch_size"] / steps.median, "why": {}}
    point["efficiency"] = point["samples_per_s"] / ideal
    if n == 1:
        point |= {"low": 1.0, "high": 1.0}
    elif steps.ci_low and steps.ci_high and first.ci_low and first.ci_high:
        point["low"] = row["batch_size"] / steps.ci_high / (n * one / first.ci_low)
        point["high"] = row["batch_size"] / steps.ci_low / (n * one / first.ci_high)
    else:
        point["why"] |= dict.fromkeys(("low", "high"), f"{steps.n} steps have no interval")
    if (predicted := row.get("predicted_step_s")) and trusted:
        return point | {"predicted": row["batch_size"] / predicted / ideal, "error": steps.median / predicted - 1}
    why = "the model is too far off" if predicted else row["why"].get("predicted_step_s", "the model predicts nothing")
    point["why"] |= dict.fromkeys(("predicted", "error"), why)
    return point


def _extrapolated(job: Job, row: Row, single: Job, base: Row, rates: Rates, kind: str) -> Iterator[Row]:
    """Yield what the model gives a strategy on 8, 64 and 1,024 devices: a model, never a measurement.

    Degrees of tensor and pipeline parallelism stay and copies are added, over links like the measured ones. A strong curve ends
    where each copy has one sample. Nothing for strategies that have no copies to add.
    """
    if "data" not in STRATEGIES[job.strategy].axes:
        return
    scale = scale_of(job, rates, row["compute_s"])
    inner, rate = job.layout.world // job.layout.data, single.batch / statistics.median(base["steps_s"])
    unmeasured = ("samples_per_s", "efficiency", "low", "high", "error")
    for world in WORLDS:
        data, batch = world // inner, single.batch * (world if kind == "weak" else 1)
        if world % inner == 0 and data <= batch:
            there = replace(job, layout=replace(job.layout, data=data), batch=batch)
            efficiency = batch / step_time(there, rates, scale).step_s / (world * rate)
            why = dict.fromkeys(unmeasured, "nothing was measured")
            yield {"world": world, "predicted": efficiency, "why": why}
