"""What a test measured, as rows: its rates and sensors, the times of its queries, and whether it is valid, rule by rule. No torch.

All numbers come from the raw samples of queries; those of LoadGen stand beside them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchlib.benchmarks.inference.config import InferenceConfig
from benchlib.benchmarks.inference.rules import Rule, lg_scenario
from benchlib.config import addresses
from benchlib.core.events import Event
from benchlib.core.stats import percentile, resampled
from benchlib.judge.impossible.early_stopping import queries_needed
from benchlib.workloads.llm import queries
from benchlib.workloads.llm.load import client_limits

WINDOWS = 10  # of equal time, whose spread gives the interval of a rate
RATE_SHARE = 1.2  # by which LoadGen's completed rate may exceed the one from raw samples
BUSY = 0.9  # of a core: a client that only sends and computes nothing is late above it
Row = dict[str, Any]


@dataclass(frozen=True)
class Tested:
    """A performance test that ended: its raw samples, LoadGen's values, the rule it ran under, and facts of its process."""

    scenario: str
    table: np.ndarray
    log: Mapping[str, Any]
    rule: Rule
    repeated: int
    facts: Mapping[str, Any]
    computes: bool  # whether the engine computes in the process of the test

    @property
    def stated_per_s(self) -> float | None:
        """LoadGen's own rate."""
        value = self.log.get("result_samples_per_second", self.log.get("result_completed_samples_per_sec"))
        return float(value) if isinstance(value, (int, float)) else None


def validity(test: Tested) -> Iterator[Row]:
    """Yield a row for each rule of a valid test: ``measured`` is at most ``limit``.

    VALID takes that LoadGen says so, no error in its log, no failed query, counts and times that are possible, and a client
    that was not late. Why LoadGen says INVALID, which it often does not tell, is in rows of their own.
    """
    table, log = test.table, test.log
    done = queries.completed(table)

    def row(rule: str, measured: float, limit: float = 0.0) -> Row:
        return {"test": test.scenario, "rule": rule, "measured": float(measured), "limit": float(limit)}

    yield row("loadgen", log.get("result_validity") != "VALID")
    if log.get("result_validity") != "VALID":
        for name in ("min_duration", "min_queries", "perf_constraints"):
            if log.get(f"result_{name}_met") is False:
                yield row(name, 1)
        share, times = test.rule.percentile / 100, queries.times_s(done)
        for name, limit_s in test.rule.limits_s.items():
            if (value := percentile(times[name], share)) >= limit_s:
                yield row(f"{name}_limit", value, limit_s)
        if log.get("early_stopping_met") is False:
            late = int((~queries.meets(table, test.rule.limits_s)).sum())
            yield row("early_stopping", queries_needed(share, late), len(table))
    yield row("errors", log.get("num_errors", 0))
    yield row("failed", table["failed"].sum())
    yield row("repeated", test.repeated)
    paced = lg_scenario(test.scenario) == "Server"
    issued = int(log.get("result_query_count", 0)) * (1 if paced else int(log.get("generated_samples_per_query", 1)))
    if issued:
        yield row("miscounted", abs(issued - len(table)))
    yield row("short_answers", (done["tokens"] < 2).sum())
    if test.scenario != "Offline":
        first, many = queries.ttft_s(done), done[done["tokens"] > 1]
        yield row("no_first_token", np.isnan(first).sum())
        yield row("impossible_first_token", ((first <= 0) | (first > queries.latency_s(done))).sum())
        yield row("all_at_once", (queries.tpot_s(many) <= 0).sum())
    if paced:
        for rule, measured, limit in client_limits(table, test.rule.ttft_s or 0.0):
            yield row(rule, measured, limit)
    if not test.computes:
        yield row("busy_client", test.facts["driver_cpu_share"], BUSY)
    if test.stated_per_s and len(done):  # LoadGen takes the failed for answered
        yield row("stated_rate", test.stated_per_s * queries.span_s(done) / len(table), RATE_SHARE)


def broken(rows: Sequence[Row]) -> list[str]:
    """Return the rules that a test breaks."""
    return [row["rule"] for row in rows if not row["measured"] <= row["limit"]]


def times(test: Tested) -> Iterator[Row]:
    """Yield a row for each kind of time: its samples in s, and the limit of the scenario."""
    done = queries.completed(test.table)
    kinds = queries.times_s(done) | {"lateness": np.maximum(queries.lateness_s(test.table), 0.0)}  # two clocks, rounded
    for kind, samples in kinds.items():
        if len(samples) and (kind == "latency" or test.scenario != "Offline"):
            row: Row = {"test": test.scenario, "kind": kind, "seconds": samples.tolist()}
            limit_s = test.rule.limits_s.get(kind)
            yield row | ({"limit_s": limit_s} if limit_s else {"why": {"limit_s": "the scenario does not limit it"}})


def rate(name: str, table: np.ndarray, weights: np.ndarray) -> Row:
    """Return what was completed over the time to the last completion, with the 95% interval from ``WINDOWS`` of equal time."""
    span, columns = queries.span_s(table), (f"{name}_per_s", f"{name}_low", f"{name}_high")
    if not span > 0:
        return {"why": dict.fromkeys(columns, "no query was completed")}
    begin, value = float(np.min(queries.start_s(table))), float(weights.sum()) / span
    counts, _ = np.histogram(table["last_s"], WINDOWS, (begin, begin + span), weights=weights)
    low, high = resampled([counts * WINDOWS / span], lambda data, axis: np.asarray(np.mean(data, axis=axis)), 0.95)
    return dict(zip(columns, (value, min(low, value), max(high, value)), strict=True))


def measured(test: Tested, config: InferenceConfig, events: Sequence[Event]) -> Row:
    """Return the row of a test that ended."""
    table, log, rule = test.table, test.log, test.rule
    done, paced = queries.completed(table), lg_scenario(test.scenario) == "Server"
    span = queries.span_s(done)
    rows = [
        rate("samples", done, np.ones(len(done))),
        rate("tokens", done, done["tokens"].astype(float)),
        _memory(test),
        _energy(config, log, events),
    ]
    row: Row = {
        "loadgen": str(log.get("result_validity", "")),
        "sut": str(log.get("sut_name", "")),
        "queries": len(table),
        "tokens": int(done["tokens"].sum()),
        "seconds": span if len(done) else None,
        "loadgen_per_s": test.stated_per_s,
        "server_qps": float(log.get("effective_target_qps", 0)) if paced else None,
        "goodput_per_s": int(queries.meets(table, rule.limits_s).sum()) / span if rule.limits_s and len(done) else None,
        "driver_cores": float(test.facts["driver_cpu_share"]),
        "price_per_hour_usd": config.price_per_hour_usd,
    }
    why = {
        "seconds": "no query was completed",
        "loadgen_per_s": "LoadGen states no rate in this scenario",
        "server_qps": "the scenario has no rate",
        "goodput_per_s": "the scenario has no latency limits",
        "price_per_hour_usd": "no price was given: set price_per_hour_usd",
    }
    why = {name: reason for name, reason in why.items() if row[name] is None}
    for part in rows:
        row |= part
        why |= part.get("why", {})
    return row | {"why": why}


def _memory(test: Tested) -> Row:
    """Return what the process of the test, or the fullest worker, held."""
    row: Row = {"resident_memory_gb": test.facts["resident_bytes"] / 1e9}
    if "dispatch" not in test.facts:
        held, reason = test.facts["device_memory"]
        lacking = {"worker_memory_gb": "no workers"} | ({} if held is not None else {"device_memory_gb": reason})
        return row | {"device_memory_gb": held and held / 1e9, "why": lacking}
    why: dict[str, str] = {}
    for name, column in (("worker_memory_gb", "resident_bytes"), ("device_memory_gb", "device_bytes")):
        stated = [row[column] for row in test.facts["dispatch"]["workers"] if row[column] is not None]
        row[name] = max(stated) / 1e9 if stated else None
        why |= {} if stated else {name: "no worker states it in its /metrics"}
    return row | {"why": why}


def _energy(config: InferenceConfig, log: Mapping[str, Any], events: Sequence[Event]) -> Row:
    """Return what the test took of energy, between LoadGen's power_begin and power_end, by a counter of this machine."""
    if not all(map(addresses.is_local, config.workers)):
        return {"energy_j": None, "why": {"energy_j": "the workers are on other machines than the sensors"}}
    stated = (event["availability"] for event in reversed(events) if event["kind"] == "sensors")
    reasons: Mapping[str, Any] = next(stated, {})
    joules = energy_j(events, log.get("began"), log.get("ended"))
    missing = str(reasons.get("energy_j", "no readings of an energy counter before and after the test"))
    return {"energy_j": joules, "why": {} if joules is not None else {"energy_j": missing}}


def energy_j(events: Sequence[Event], began: float | None, ended: float | None) -> float | None:
    """Return what an energy counter rose by between two moments; None without a reading before and after them."""
    read = [event for event in events if event["kind"] == "sensor" and isinstance(event.get("energy_j"), (int, float))]
    readings = sorted((float(event["t"]), float(event["energy_j"])) for event in read)
    if began is None or ended is None or len(readings) < 2 or readings[0][0] > began or readings[-1][0] < ended:
        return None
    times_s, joules = np.array(readings).T
    before, after = np.interp([began, ended], times_s, joules)
    return float(after - before)
