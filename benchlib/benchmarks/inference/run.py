"""The inference benchmark: one LoadGen test after the other, each in a process of its own, then the answers and their scores.

This process loads the data, plans, and reads what the tests left; it computes nothing while a test runs.
"""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
import pandas as pd
import psutil
import torch
import transformers

from benchlib.benchmarks.inference import loadgen
from benchlib.benchmarks.inference.config import RULES, InferenceConfig
from benchlib.benchmarks.inference.loadgen import Outcome, Progress, Test
from benchlib.benchmarks.inference.spec import ROUGE, SPEC
from benchlib.config import addresses
from benchlib.core.errors import BackendUnavailable, RunBroken
from benchlib.core.events import Event, keep_alive, read_events
from benchlib.core.files import atomic_path
from benchlib.core.machine import BACKENDS, usable_cores
from benchlib.runtime import devices
from benchlib.runtime.measurement import Rank, Tables
from benchlib.workloads.llm import articles, decoders, served
from benchlib.workloads.llm.articles import Summaries
from benchlib.workloads.llm.engines import Policy, Settings
from benchlib.workloads.llm.load import QUERY

SLACK = 4.0  # a test may take this much longer than expected, and its deadline, before it is ended
LATE_S = 3.0  # that a test waits for workers which were there before
Row = dict[str, Any]


@dataclass
class Bench:
    """What every step needs, and what it adds to. ``samples`` of the config are those that the data set has.

    ``queries`` are raw samples by test, ``counts`` the tokens of answers in text, as servers state and as we count them.
    """

    rank: Rank
    config: InferenceConfig
    data: Summaries
    run: Row
    tables: Tables = field(default_factory=lambda: {table.name: [] for table in SPEC.tables})
    queries: dict[str, np.ndarray] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


def measure(rank: Rank) -> Tables:
    """Run all tests; one that does not end leaves the results of the others."""
    config = rank.config
    if find_spec("mlperf_loadgen") is None:
        raise BackendUnavailable("LoadGen is not installed: pip install -e '.[inference]' (wheels for Linux)")
    devices.require(config.backend)
    rank.events.emit("phase", name="data")
    data = articles.load(config.data, config.data_file, config.samples, config.seed, config.model, config.vocabulary)
    run: Row = {"samples": len(data.prompts), "scope": config.scope(), "simulated": config.engine == "sim"}
    run |= {"loadgen": version("mlcommons-loadgen"), "transformers": transformers.__version__}
    bench = Bench(rank, config.model_copy(update={"samples": run["samples"]}), data, run)
    if config.engine == "http":
        _meet(bench)
    elif config.engine != "sim" and (note := decoders.attention_note(config.model)):
        rank.events.emit("log", message=note)
    bench.tables["reduced"] = [row for scenario in config.scenarios for row in bench.config.reduced(scenario)]
    began_s = time.time()
    for scenario in config.scenarios:
        _performance(bench, scenario)
    if config.accuracy:
        _accuracy(bench)
    bench.tables["usage"] = usage(config, read_events(rank.run_dir), began_s)
    tables = bench.queries or {"": np.empty(0, QUERY)}
    frames = [pd.DataFrame(table).assign(test=name) for name, table in tables.items()]
    with atomic_path(rank.run_dir / "queries.parquet") as temporary:
        pd.concat(frames).to_parquet(temporary, index=False)
    counts = served.counts(bench.counts)
    why = counts.get("why", {}) | (
        {} if "paid_devices" in run else {"paid_devices": "the engine computes on this machine"}
    )
    return bench.tables | {"run": [run | counts | {"why": why}]}


def usage(config: InferenceConfig, events: Sequence[Event], began_s: float) -> list[Row]:
    """Return a row each for processor, device and memory: readings in percent since ``began_s`` (s, unix time), or why there are none.

    Processor: CPU time of the run's processes over all usable cores. Device: its own counter, mean of all devices. Memory:
    resident bytes of the process of the test over the memory of the machine.
    """
    during = [event for event in events if event["t"] >= began_s]
    stated: Row = next((event["availability"] for event in reversed(events) if event["kind"] == "sensors"), {})

    def readings(kind: str, name: str, whole: float) -> list[float]:
        values = [event.get(name) for event in during if event["kind"] == kind]
        return [100 * value / whole for value in values if isinstance(value, int | float)]

    lacking, why = "no reading fell into the tests, which took less than a second", ""
    if config.backend == "cpu":
        why = "the backend cpu has no device besides the processor"
    elif not all(map(addresses.is_local, config.workers)):
        why = "the workers are on other machines than the sensors"
    used = {
        "processor": readings("sensor", "cpu_percent", 100 * usable_cores()),
        "device": [] if why else readings("sensor", "utilization_percent", 100),
        "memory": readings("progress", "rss_bytes", psutil.virtual_memory().total),
    }
    reasons = {"device": why or stated.get("utilization_percent", lacking)}
    return [
        {"what": what, "used": values} if values else {"what": what, "why": {"used": reasons.get(what, lacking)}}
        for what, values in used.items()
    ]


def _meet(bench: Bench) -> None:
    """See that all workers are there and answer, and note what they are: one that is lost later costs no test."""
    from benchlib.workloads.llm.dispatch import Dispatcher

    config, events = bench.rank.config, bench.rank.events
    events.emit("phase", name="workers", text=f"waiting for {', '.join(config.workers)}")
    dispatcher = Dispatcher(replace(_settings(bench), policy=Policy(start_s=config.startup_timeout_s)))
    try:
        with keep_alive(events, config.startup_timeout_s):
            dispatcher.start()
    finally:
        dispatcher.stop()
    bench.run["paid_devices"] = len(dispatcher.workers)  # each a machine of its own, of which this one knows no more
    for note in dict.fromkeys(worker.note for worker in dispatcher.workers if worker.note):
        events.emit("log", message=note)
    first, text = dispatcher.workers[0], any(worker.text for worker in dispatcher.workers)
    bench.run["simulated"] = sim = first.engine == "sim"
    bench.run["scope"] = config.scope(first.model, sim, text)


def _settings(bench: Bench) -> Settings:
    config = bench.config
    longest = max(map(len, bench.data.prompts)) + config.max_new
    return Settings(
        **config.model_dump(include={"model", "precision", "slots", "shrink", "step_s", "served_model"}),
        # By name: the process of the test opens it, and this one keeps no context beside it.
        device=BACKENDS[config.backend].device_type,
        threads=torch.get_num_threads(),
        positions=math.ceil(longest / 64) * 64,
        fixed_length=config.random,
        urls=tuple(config.workers),
        token=addresses.bearer_token(),
        # Twice what a worker works on: its next query waits there, and not for a way back and forth.
        policy=Policy(2 * config.slots, config.deadline_s, start_s=LATE_S, partial=True),
    )


def _perform(bench: Bench, scenario: str, accuracy: bool = False) -> Outcome:
    """Run a test; ``BackendUnavailable`` where what the first one needs is not here, ``RunBroken`` where it did not end by itself."""
    config, events, name = bench.config, bench.rank.events, "accuracy" if accuracy else scenario
    limit_s = config.test_limit_s or SLACK * config.plan(scenario)["expected_s"] + config.deadline_s
    folder, mode = bench.rank.run_dir / "loadgen" / name, "AccuracyOnly" if accuracy else "PerformanceOnly"
    test = Test(scenario, config, _settings(bench), bench.data.prompts, bench.data.warm_up, folder, limit_s, mode)
    total = config.samples if accuracy else config.issued(scenario)

    def tell(progress: Progress | None) -> None:
        if progress is None:
            events.emit("heartbeat")
        else:
            done, rss_bytes = progress
            events.emit("progress", phase=name, done=done, total=total, unit="queries", rss_bytes=rss_bytes)

    events.emit("phase", name=name)
    try:
        outcome = loadgen.perform(test, tell)
    except BackendUnavailable as error:
        if not bench.queries:
            raise
        raise RunBroken(str(error)) from None
    bench.queries[name] = outcome.table
    record = outcome.facts.get("dispatch", {})
    bench.counts.update(record.pop("counts", {}))
    for table, rows in record.items():
        bench.tables[table] += [{"test": name, **row} for row in rows]
    for row in record.get("losses", []):
        events.emit("log", message=f"{name}: worker {row['worker']}, {row['event']}: {row['because']}")
    return outcome


def _performance(bench: Bench, scenario: str) -> None:
    config, tables, plan = bench.config, bench.tables, bench.config.plan(scenario)
    row: Row = {"test": scenario, "engine": config.engine_of(scenario)}
    tables["tests"].append(row)
    tables["plan"].append(plan)
    try:
        outcome = _perform(bench, scenario)
    except RunBroken as error:
        row |= {"status": "failed", "reason": str(error), "valid": False, "broken": ["ended"]}
        ended = {"test": scenario, "rule": "ended", "measured": 1.0, "limit": 0.0, "detail": str(error)}
        tables["validity"].append(ended)
        plan |= {"why": plan.get("why", {}) | dict.fromkeys(("queries_sent", "took_s"), "the test did not end")}
        return
    errors = "; ".join([*outcome.errors[:2], *outcome.log["errors"][:2]])[:300]
    validity = list(loadgen.validity(outcome))
    tables["validity"] += [
        row | {"detail": errors if row["rule"] in ("failed", "errors", "repeated") else ""} for row in validity
    ]
    tables["times"] += loadgen.times(outcome)
    broken = loadgen.broken(validity)
    row |= loadgen.row_of(outcome, config, read_events(bench.rank.run_dir)) | {"valid": not broken, "broken": broken}
    plan |= {"queries_sent": len(outcome.table) // RULES[scenario].streams, "took_s": outcome.facts["seconds"]}


def _accuracy(bench: Bench) -> None:
    """Answer the whole set and score it, beside two controls."""
    config = bench.config
    if config.random or bench.run["simulated"]:
        reason = "random weights have no accuracy" if config.random else "what is simulated computes nothing"
        bench.tables["accuracy"].append({"status": "skipped", "reason": reason})
        return
    row: Row = {"samples": config.samples, "answered": 0, "failed": config.samples, "errors": 0, "first": ""}
    bench.tables["accuracy"].append(row)
    try:
        outcome = _perform(bench, "Offline", accuracy=True)
        answers = loadgen.answers(bench.rank.run_dir / "loadgen" / "accuracy")
    except RunBroken as error:
        columns = (*ROUGE, "gen_len", "answer_tokens", "splitter", "rouge1_shuffled", "rouge1_lead")
        row |= {"first": str(error), "why": dict.fromkeys(columns, "the test did not end")}
        return
    bench.rank.events.emit("phase", name="scores")
    row |= {"answered": len(answers), "failed": int(outcome.table["failed"].sum())}
    row |= {"answer_tokens": sum(map(len, answers.values()))}
    row |= {"errors": int(outcome.log["num_errors"]), "first": next(iter(outcome.errors), "")}
    row |= articles.score(bench.data, answers)
