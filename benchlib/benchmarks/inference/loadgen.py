"""One LoadGen test in a process of its own, what LoadGen leaves in its folder, and what was measured, as rows.

LoadGen keeps static state, cannot be aborted and waits for ever for a query that is not completed. So each test is a
process: ``StartTest`` blocks a daemon thread of it, its main thread watches. A query that is not answered within its
deadline is completed with two filler tokens and counts as failed; a test that does not end in time ends with its process.

``issue`` notes the queries and hands them to another thread: it runs on LoadGen's issuing thread, and whatever it does
makes later queries late. No torch here: the engine loads what it needs. All numbers of rows come from the raw samples of
queries; those of LoadGen stand beside them.
"""

import array
import contextlib
import gc
import json
import math
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchlib.benchmarks.inference.config import RULES, InferenceConfig, Rule
from benchlib.config import addresses
from benchlib.core.energy import energy_j
from benchlib.core.errors import BackendUnavailable, RunBroken
from benchlib.core.events import Event
from benchlib.core.stats import early_stopping_estimate, loadgen_percentile, queries_needed
from benchlib.runtime import child
from benchlib.workloads.llm import load
from benchlib.workloads.llm.engines import COMPUTING, Query, Settings, make
from benchlib.workloads.llm.load import Client, QueryLog

SUT = "Network SUT"  # in the name that the system tells LoadGen: MLPerf's rules for the network division
FILLER = (0, 0)
TICK_S = 0.05
SAY_S = 1.0  # between signs of life
WARM_UP_S = 120.0
WINDOWS = 10  # of equal time, whose spread gives the interval of a rate
RATE_SHARE = 1.2  # by which LoadGen's completed rate may exceed the one from raw samples
BUSY = 0.9  # of a core: a client that only sends and computes nothing is late above it
NOTHING = "no query was completed"
Progress = tuple[int, int]  # completed queries, resident bytes
Row = dict[str, Any]
Optional = tuple[float | None, str]  # a number, and why there is none


@dataclass(frozen=True)
class Test:
    """What a test process needs to know. ``samples`` of the config are those of the data set."""

    scenario: str
    config: InferenceConfig
    settings: Settings
    prompts: list[list[int]]
    warm_up: list[list[int]]  # prompts that are not in the data set
    folder: Path
    limit_s: float
    mode: str = "PerformanceOnly"  # or AccuracyOnly


@dataclass(frozen=True)
class Outcome:
    """What a test that ended leaves: its raw samples, LoadGen's values, reasons of failures, facts of its process."""

    scenario: str
    rule: Rule
    table: np.ndarray
    log: Mapping[str, Any]
    errors: list[str]
    repeated: int
    facts: Mapping[str, Any]

    @property
    def paced(self) -> bool:
        return self.rule.lg == "Server"

    @property
    def stated_per_s(self) -> float | None:
        """LoadGen's own rate."""
        return self.log.get("result_samples_per_second", self.log.get("result_completed_samples_per_sec"))


class Sut:
    """The system under test: LoadGen's callbacks on one side, an engine's on the other."""

    def __init__(self, lg: Any, test: Test, engine: Any) -> None:
        self.lg, self.test, self.engine = lg, test, engine
        self.log = QueryLog()
        self.expired: set[int] = set()
        self.needs_first = test.scenario != "Offline"
        # LoadGen forgets a query that is complete: what is noted and what it hears of a query come in one order.
        self._lock = threading.RLock()
        self._queue: queue.SimpleQueue[tuple[Sequence[int], Sequence[int]]] = queue.SimpleQueue()
        threading.Thread(target=self._submit, name="submit", daemon=True).start()

    def issue(self, ids: Sequence[int], samples: Sequence[int]) -> None:
        """Take queries from LoadGen."""
        self.log.issue(ids, samples, time.monotonic(), [len(self.test.prompts[sample]) for sample in samples])
        self._queue.put((ids, samples))

    def _submit(self) -> None:
        while True:
            for rid, sample in zip(*self._queue.get(), strict=True):
                try:
                    ids, most = self.test.prompts[sample], self.test.config.max_new
                    self.engine.submit(Query(rid, ids, most, self.on_first, self.on_done))
                except Exception as error:  # the engine refuses it: the query failed, the test goes on
                    self.on_done(rid, [], f"{type(error).__name__}: {error}")

    def on_first(self, rid: int, time_s: float, token: int) -> None:
        """Report a first token to LoadGen, once."""
        with self._lock:
            if rid not in self.expired and self.log.first(rid, time_s) and self.needs_first:
                self._report(self.lg.FirstTokenComplete, rid, [token])

    def on_done(self, rid: int, ids: Sequence[int], error: str) -> None:
        """Report a completion to LoadGen, once; a failure with filler tokens."""
        with self._lock:
            if rid in self.expired or not self.log.done(rid, time.monotonic(), len(ids), error):
                return
            if error and self.needs_first and math.isnan(self.log.queries[rid].first_s):
                self._report(self.lg.FirstTokenComplete, rid, FILLER[:1])
            self._report(self.lg.QuerySamplesComplete, rid, FILLER if error else ids)

    def expire(self) -> None:
        """Fail the queries whose deadline has passed."""
        deadline_s = self.test.config.deadline_s
        for rid in self.log.overdue(time.monotonic(), deadline_s):
            with self._lock:
                self.on_done(rid, [], f"no answer within {deadline_s:g} s")
                self.expired.add(rid)  # what still comes of it is late, and no second completion

    def _report(self, call: Callable[[Any], None], rid: int, ids: Sequence[int]) -> None:
        data = array.array("i", ids)
        address, size = data.buffer_info()
        call([self.lg.QuerySampleResponse(rid, address, size * data.itemsize, size)])


def settings_of(lg: Any, scenario: str, file: Path, text: str, expected: Mapping[str, float]) -> Any:
    """Return LoadGen's settings from the text of a conf; ``RunBroken`` where it did not take over what is expected."""
    file.write_text(text, encoding="utf-8")
    settings, rule = lg.TestSettings(), RULES[scenario]
    if code := settings.FromConfig(str(file), rule.model, rule.lg):
        raise RunBroken(f"LoadGen could not read {file.name} (code {code}):\n{text}")
    for name, value in expected.items():
        used = float(getattr(settings, name))
        if abs(used - value) > 1e-9 * max(1.0, abs(value)):
            what = f"{name} is {used:g} and not {value:g}; the file:\n{text}"
            raise RunBroken(f"LoadGen ignored a line of {file.name}: {what}")
    settings.scenario = getattr(lg.TestScenario, rule.lg)
    return settings


def measured(test: Test, tell: Callable[[Progress], None]) -> Outcome:
    """Be the process of a test. Raises ``RunBroken`` where LoadGen does not come to its end."""
    import mlperf_loadgen as lg

    config, scenario = test.config, test.scenario
    name = config.engine_of(scenario)
    test.folder.mkdir(parents=True)  # new and empty: what lies in it is of this test
    engine = make(name, test.settings)
    engine.start()
    client = Client(engine, test.warm_up, config.max_new, WARM_UP_S)
    if test.warm_up and client.at_once(len(test.warm_up))["failed"].any():
        why = next(iter(client.log.errors.values()), f"no answer within {WARM_UP_S:g} s")
        raise RunBroken(f"the engine failed at a warm-up query: {why}")
    settings = settings_of(lg, scenario, test.folder / "user.conf", *config.conf(scenario))
    settings.mode = getattr(lg.TestMode, test.mode)
    logging = lg.LogSettings()
    logging.log_output.outdir = str(test.folder)
    logging.enable_trace = RULES[scenario].lg == "Server" and test.mode == "PerformanceOnly"
    sut = Sut(lg, test, engine)
    engine.on_send = sut.log.send
    if name == "http":

        def issue(batch: Sequence[Any]) -> None:
            sut.issue([query.id for query in batch], [query.index for query in batch])

        handle = lg.ConstructQDL(issue, _nothing, lambda: f"{SUT}: {len(test.settings.urls)} servers")
    else:
        handle = lg.ConstructFastSUT(sut.issue, _nothing)
    count = len(test.prompts)
    used = min(count, int(settings.performance_sample_count_override) or count)
    library = lg.ConstructQSL(count, used, _nothing, _nothing)
    failure: list[str] = []

    def start() -> None:
        try:
            lg.StartTestWithLogSettings(handle, library, settings, logging, "")
        except BaseException:  # an exception in a callback comes out here, and the process would die at its exit
            failure.append(traceback.format_exc())

    gc.freeze()  # what is loaded stays for good: collections look at queries alone, and seldom
    gc.set_threshold(50_000, 20, 20)
    process, began, cpu = psutil.Process(), time.monotonic(), time.process_time()
    thread = threading.Thread(target=start, name="LoadGen", daemon=True)
    thread.start()
    looked = began
    while thread.is_alive():
        thread.join(TICK_S)
        now = time.monotonic()
        if now - began > test.limit_s:
            raise RunBroken(f"the test did not end within {test.limit_s:.0f} s; {sut.log.unended} queries were open")
        if now - looked > min(SAY_S, config.deadline_s / 4):  # looks at every query: not at each tick
            looked = now
            sut.expire()
            tell((sut.log.ended, process.memory_info().rss))
    if failure:
        raise RunBroken(f"LoadGen's test ended with an exception: {failure[0]}")
    seconds = time.monotonic() - began
    facts = {"resident_bytes": process.memory_info().rss, "seconds": seconds, "computes": name in COMPUTING}
    facts |= {"driver_cpu_share": (time.process_time() - cpu) / seconds}
    # Of servers some may have been lost.
    facts |= {"dispatch": engine.record(began)} if name == "http" else {"device_memory": engine.device_memory()}
    table, errors = with_schedule(sut.log.table(), test.folder), sorted(set(sut.log.errors.values()))
    return Outcome(scenario, config.rule(scenario), table, detail(test.folder), errors, sut.log.repeated, facts)


def _nothing(*_: Any) -> None:
    """LoadGen asks for samples to be loaded, which are in memory, or says that no more queries come for now."""


def perform(test: Test, tell: Callable[[Progress | None], None]) -> Outcome:
    """Run a test in a process and return what it left; ``tell`` gets its progress, and None for no news.

    The process is ended at the latest 30 s after the test's own limit, and on every exception here. Raises
    ``BackendUnavailable`` where what it needs is not here, ``RunBroken`` where it did not end by itself.
    """
    ended = child.run(measured, test, timeout_s=test.limit_s + 2 * WARM_UP_S + 30, tell=tell)
    if ended.status == "unavailable":
        raise BackendUnavailable(ended.reason)
    if ended.status != "done":
        raise RunBroken(f"the process of the test: {ended.reason.removeprefix('RunBroken: ')}")
    return ended.value  # type: ignore[no-any-return]


def _records(path: Path, *marks: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of the lines with all ``marks``; LoadGen does not escape what it quotes in a message."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        if all(mark in line for mark in marks):
            with contextlib.suppress(ValueError):
                yield json.loads(line[line.index("{") :].rstrip(", "))


def detail(folder: Path) -> dict[str, Any]:
    """Return the values of ``mlperf_log_detail.txt`` by key, the last of each; ``errors`` are the messages of errors.

    ``began`` and ``ended`` are the wall times of power_begin and power_end, up to the last completion. Raises ``RunBroken``
    where the log is missing or has no end.
    """
    path = folder / "mlperf_log_detail.txt"
    records = list(_records(path, ":::MLLOG "))
    values: dict[str, Any] = {record["key"]: record["value"] for record in records}
    if "power_end" not in values:
        raise RunBroken(f"{path}: LoadGen left no end of its log: the test did not end")
    wrong = [record for record in records if record["metadata"].get("is_error") and record["key"] != "num_errors"]
    errors = [f"{record['key']}: {record['value']}" for record in wrong]
    began, ended = (
        datetime.strptime(values[key], "%m-%d-%Y %H:%M:%S.%f").replace(tzinfo=UTC).timestamp()
        for key in ("power_begin", "power_end")
    )
    # An accuracy run does not count its errors.
    return {"num_errors": len(errors), **values, "errors": errors, "began": began, "ended": ended}


def with_schedule(table: np.ndarray, folder: Path) -> np.ndarray:
    """Return queries with the scheduled times of LoadGen's trace, on our clock; unchanged where the two do not match.

    The trace is not valid JSON: it is read line by line. Only Server has one. Its times count from an origin of LoadGen's own;
    the clocks differ by a constant: the least time that any query took from LoadGen's issue to our note of it counts as zero.
    """
    records = _records(folder / "mlperf_log_trace.json", '"name":"Sample",', '"ph":"b"')
    keys = ("sample_seq", "sample_idx", "issue_start_ns")
    rows = [(*(record["args"][key] for key in keys), record["ts"]) for record in records]
    _, sample, late_ns, due_us = np.array(sorted(rows), float).reshape(-1, 4).T
    if len(table) and np.array_equal(sample, table["sample"]):
        table["scheduled_s"] = 1e-6 * due_us + np.min(table["issued_s"] - 1e-6 * due_us - 1e-9 * late_ns)
    return table


def answers(folder: Path) -> dict[int, list[int]]:
    """Return the tokens of ``mlperf_log_accuracy.json`` by row of the data set."""
    records = json.loads((folder / "mlperf_log_accuracy.json").read_text(encoding="utf-8"))
    return {int(row["qsl_idx"]): np.frombuffer(bytes.fromhex(row["data"]), np.int32).tolist() for row in records}


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
            if (value := loadgen_percentile(times[name], share)) >= limit_s:
                yield f"{name}_limit", value, limit_s
        if log.get("early_stopping_met") is False:
            # Each limit on its own, as LoadGen: a query that is late by one of them is in time for the other.
            late = [int((~load.meets(table, {name: limit_s})).sum()) for name, limit_s in limits_s.items()]
            yield "early_stopping", queries_needed(share, max(late, default=0)), len(table)
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
    """Yield a row for each kind of time: its samples in s, the limit of the scenario, and of SingleStream LoadGen's estimate."""
    done, share = load.completed(test.table), test.rule.percentile / 100
    closed, least = test.scenario == "SingleStream", queries_needed(share, 1)
    for kind, samples in (load.times_s(done) | {"lateness": load.lateness_s(test.table)}).items():
        if len(samples) and (kind == "latency" or test.scenario != "Offline"):
            known = closed and len(samples) >= least
            few = (
                f"{len(samples)} queries, {least} are needed"
                if closed
                else "LoadGen estimates it in SingleStream alone"
            )
            optional: dict[str, Optional] = {
                "limit_s": (test.rule.limits_s.get(kind), "the scenario does not limit it"),
                "estimate_s": (early_stopping_estimate(samples, share) if known else None, few),
            }
            row: Row = {"test": test.scenario, "kind": kind, "seconds": samples.tolist()}
            row |= {name: value for name, (value, _) in optional.items()}
            yield row | {"why": {name: reason for name, (value, reason) in optional.items() if value is None}}


def rate(table: np.ndarray, weights: np.ndarray) -> Sequence[float | None]:
    """Return what was completed over the time to the last completion, and its 95% interval from ``WINDOWS`` of equal time."""
    span = load.span_s(table)
    if not span > 0:
        return [None] * 3
    begin, value = float(np.min(load.start_s(table))), float(weights.sum()) / span
    counts, _ = np.histogram(table["last_s"], WINDOWS, (begin, begin + span), weights=weights)
    rates = np.random.default_rng(0).choice(counts * WINDOWS / span, (2000, WINDOWS)).mean(axis=1)
    low, high = map(float, np.percentile(rates, [2.5, 97.5]))
    return value, min(low, value), max(high, value)


def row_of(test: Outcome, config: InferenceConfig, events: Sequence[Event]) -> Row:
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
        "tokens": (int(done["tokens"].sum()) or None, NOTHING),
        **_memory(test.facts),
    }
    for what, weights in (("samples", np.ones(len(done))), ("tokens", done["tokens"])):
        for part, value in zip(("per_s", "low", "high"), rate(done, weights), strict=True):
            optional[f"{what}_{part}"] = value, NOTHING
    row: Row = {name: None if value is None else float(value) for name, (value, _) in optional.items()}
    return row | {
        "loadgen": log["result_validity"],
        "queries": len(table),
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
    return energy_j(events, log["began"], log["ended"])
