"""What a test measured, as rows: its rates and sensors, the times of its queries, and whether it is valid, rule by rule. No torch.

All numbers come from the raw samples of queries; those of LoadGen stand beside them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchlib.benchmarks.inference.config import InferenceConfig
from benchlib.benchmarks.inference.loadgen import Outcome
from benchlib.config import addresses
from benchlib.core.events import Event
from benchlib.core.stats import percentile
from benchlib.judge.impossible.early_stopping import queries_needed
from benchlib.workloads.llm import load

WINDOWS = 10  # of equal time, whose spread gives the interval of a rate
RATE_SHARE = 1.2  # by which LoadGen's completed rate may exceed the one from raw samples
BUSY = 0.9  # of a core: a client that only sends and computes nothing is late above it
NOTHING = "no query was completed"
Row = dict[str, Any]
Optional = tuple[float | None, str]  # a number, and why there is none


def validity(test: Outcome) -> Iterator[Row]:
    """Yield a row for each rule of a valid test: ``measured`` is at most ``limit``.

    VALID takes that LoadGen says so, no error in its log, no failed query, counts and times that are possible, and a client
    that was not late. Why LoadGen says INVALID, which it often does not tell, is in rows of their own.
    """
    for name, measured, limit in _validity(test):
        yield {"test": test.scenario, "rule": name, "measured": float(measured), "limit": float(limit)}


def _validity(test: Outcome) -> Iterator[tuple[str, float, float]]:
    table, log, limits_s = test.table, test.log, test.rule.limits_s
    done = load.completed(table)
    invalid = log.get("result_validity") != "VALID"
    yield "loadgen", invalid, 0
    if invalid:
        for name in ("min_duration", "min_queries", "perf_constraints"):
            if log.get(f"result_{name}_met") is False:
                yield name, 1, 0
        share, times = test.rule.percentile / 100, load.times_s(done)
        for name, limit_s in limits_s.items():
            if (value := percentile(times[name], share)) >= limit_s:
                yield f"{name}_limit", value, limit_s
        if log.get("early_stopping_met") is False:
            late = int((~load.meets(table, limits_s)).sum())
            yield "early_stopping", queries_needed(share, late), len(table)
    yield "errors", log["num_errors"], 0
    yield "failed", table["failed"].sum(), 0
    yield "repeated", test.repeated, 0
    per_query = 1 if test.paced else log.get("generated_samples_per_query", 1)
    if issued := int(log.get("result_query_count", 0)) * int(per_query):
        yield "miscounted", abs(issued - len(table)), 0
    yield "short_answers", (done["tokens"] < 2).sum(), 0
    if test.scenario != "Offline":
        times = load.each_s(done)
        yield "no_first_token", np.isnan(times["ttft"]).sum(), 0
        yield "impossible_first_token", ((times["ttft"] <= 0) | (times["ttft"] > times["latency"])).sum(), 0
        yield "all_at_once", (times["tpot"] <= 0).sum(), 0
    if test.paced:
        yield from load.client_limits(table, limits_s["ttft"])
    if not test.facts["computes"]:
        yield "busy_client", test.facts["driver_cpu_share"], BUSY
    if test.stated_per_s and len(done):  # LoadGen takes the failed for answered
        yield "stated_rate", test.stated_per_s * load.span_s(done) / len(table), RATE_SHARE


def broken(rows: Sequence[Row]) -> list[str]:
    """Return the rules that a test breaks."""
    return [row["rule"] for row in rows if not row["measured"] <= row["limit"]]


def times(test: Outcome) -> Iterator[Row]:
    """Yield a row for each kind of time: its samples in s, and the limit of the scenario."""
    done = load.completed(test.table)
    for kind, samples in (load.times_s(done) | {"lateness": load.lateness_s(test.table)}).items():
        if len(samples) and (kind == "latency" or test.scenario != "Offline"):
            row: Row = {"test": test.scenario, "kind": kind, "seconds": samples.tolist()}
            limit_s = test.rule.limits_s.get(kind)
            yield row | ({"limit_s": limit_s} if limit_s else {"why": {"limit_s": "the scenario does not limit it"}})


def rate(table: np.ndarray, weights: np.ndarray) -> tuple[float | None, float | None, float | None]:
    """Return what was completed over the time to the last completion, and its 95% interval from ``WINDOWS`` of equal time."""
    span = load.span_s(table)
    if not span > 0:
        return None, None, None
    begin, value = float(np.min(load.start_s(table))), float(weights.sum()) / span
    counts, _ = np.histogram(table["last_s"], WINDOWS, (begin, begin + span), weights=weights)
    rates = np.random.default_rng(0).choice(counts * WINDOWS / span, (2000, WINDOWS)).mean(axis=1)
    low, high = map(float, np.percentile(rates, [2.5, 97.5]))
    return value, min(low, value), max(high, value)


def measured(test: Outcome, config: InferenceConfig, events: Sequence[Event]) -> Row:
    """Return the row of a test that ended."""
    table, log, limits_s = test.table, test.log, test.rule.limits_s
    done = load.completed(table)
    span = load.span_s(done) if len(done) else None
    good = load.meets(table, limits_s).sum() / span if limits_s and span else None
    optional: dict[str, Optional] = {
        "seconds": (span, NOTHING),
        "loadgen_per_s": (test.stated_per_s, "LoadGen states no rate in this scenario"),
        "server_qps": (log.get("effective_target_qps") if test.paced else None, "the scenario has no rate"),
        "goodput_per_s": (good, NOTHING if limits_s else "the scenario has no latency limits"),
        "price_per_hour_usd": (config.price_per_hour_usd, "no price was given: set price_per_hour_usd"),
        "energy_j": _energy(config, log, events),
        **_memory(test.facts),
    }
    for what, weights in (("samples", np.ones(len(done))), ("tokens", done["tokens"])):
        for part, value in zip(("per_s", "low", "high"), rate(done, weights), strict=True):
            optional[f"{what}_{part}"] = value, NOTHING
    row: Row = {name: None if value is None else float(value) for name, (value, _) in optional.items()}
    return row | {
        "loadgen": log["result_validity"],
        "sut": log["sut_name"],
        "queries": len(table),
        "tokens": int(done["tokens"].sum()),
        "driver_cores": float(test.facts["driver_cpu_share"]),
        "why": {name: reason for name, (value, reason) in optional.items() if value is None},
    }


def _memory(facts: Mapping[str, Any]) -> dict[str, Optional]:
    """Return what the process of the test, or the fullest worker, held."""
    own = {"resident_memory_gb": (facts["resident_bytes"] / 1e9, "")}
    if "dispatch" not in facts:
        held, reason = facts["device_memory"]
        return own | {"device_memory_gb": (held and held / 1e9, reason), "worker_memory_gb": (None, "no workers")}
    for name, column in (("worker_memory_gb", "resident_bytes"), ("device_memory_gb", "device_bytes")):
        stated = [row[column] / 1e9 for row in facts["dispatch"]["workers"] if row[column] is not None]
        own[name] = max(stated, default=None), "no worker states it in its /metrics"
    return own


def _energy(config: InferenceConfig, log: Mapping[str, Any], events: Sequence[Event]) -> Optional:
    """Return what a counter of this machine rose by between LoadGen's power_begin and power_end, in J."""
    if not all(map(addresses.is_local, config.workers)):
        return None, "the workers are on other machines than the sensors"
    read = [event for event in events if event["kind"] == "sensor" and isinstance(event.get("energy_j"), (int, float))]
    times_s, joules = (np.array([event[name] for event in read]) for name in ("t", "energy_j"))
    began, ended = log["began"], log["ended"]
    if len(read) > 1 and times_s.min() <= began and ended <= times_s.max():
        order = np.argsort(times_s)
        before, after = np.interp([began, ended], times_s[order], joules[order])
        return float(after - before), ""
    stated = (event["availability"] for event in reversed(events) if event["kind"] == "sensors")
    default = "no readings of an energy counter before and after the test"
    return None, next(stated, {"energy_j": default}).get("energy_j", default)
