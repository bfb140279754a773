"""The inference benchmark: one LoadGen test after the other, each in a process of its own, then the answers and their scores.

This process loads the data, plans, and reads what the tests left; it computes nothing while a test runs.
"""

import dataclasses
import math
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import transformers

from benchlib.benchmarks.inference import loadgen, logs, measures
from benchlib.benchmarks.inference.loadgen import Outcome, Test
from benchlib.benchmarks.inference.rules import STREAMS, Load
from benchlib.config import addresses
from benchlib.core.errors import BackendUnavailable, RunBroken
from benchlib.core.events import keep_alive, read_events
from benchlib.core.files import atomic_path
from benchlib.runtime import devices
from benchlib.runtime.measurement import Rank, Tables
from benchlib.workloads.llm import articles, queries, scores
from benchlib.workloads.llm.articles import Summaries
from benchlib.workloads.llm.engines import ENGINES, Policy, Settings

WARM_UPS = 16  # two batches or more: the first ones are slower
SLACK = 4.0  # a test may take this much longer than expected, and its deadline, before it is ended
LATE_S = 3.0  # that a test waits for workers which were there before
TABLES = ("plan", "reduced", "tests", "validity", "times", "accuracy", "workers", "losses", "inflight")
Row = dict[str, Any]


@dataclasses.dataclass
class Bench:
    """What every step needs, and what it adds to. ``answers`` are the raw samples of queries by test."""

    rank: Rank
    data: Summaries
    load: Load
    tables: Tables
    run: Row
    queries: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


def measure(rank: Rank) -> Tables:
    """Run all tests; one that does not end leaves the results of the others."""
    config, events = rank.config, rank.events
    if find_spec("mlperf_loadgen") is None:
        raise BackendUnavailable("LoadGen is not installed: pip install 'benchlib[inference]' (wheels for Linux)")
    devices.require(config.backend)
    events.emit("phase", name="data")
    data = articles.load(config.data, config.data_file, config.samples, config.seed, config.model, config.vocabulary)
    load, lengths = config.load(len(data.prompts)), sorted(map(len, data.prompts))
    run: Row = {"samples": len(lengths), "stated": 0, "counted": 0, "transformers": transformers.__version__}
    run |= {
        "prompt_tokens_least": lengths[0],
        "prompt_tokens_most": lengths[-1],
        "loadgen": version("mlcommons-loadgen"),
    }
    run["prompt_tokens_median"] = lengths[len(lengths) // 2]
    bench = Bench(rank, data, load, {name: [] for name in TABLES}, run)
    run |= _meet(bench) if config.engine == "http" else {"scope": config.scope(), "simulated": config.engine == "sim"}
    bench.tables["reduced"] = [row for scenario in config.scenarios for row in load.reduced(scenario)]
    for scenario in config.scenarios:
        _performance(bench, scenario)
    if config.accuracy:
        _accuracy(bench)
    _keep_queries(bench)
    if not run["stated"]:
        run |= {"stated": None, "counted": None}
        run["why"] = dict.fromkeys(("stated", "counted"), "no server gave texts and stated how many tokens they have")
    return bench.tables | {"run": [run]}


def _meet(bench: Bench) -> Row:
    """See that all workers are there and answer, and return what they are: one that is lost later costs no test."""
    from benchlib.workloads.llm.dispatch import Dispatcher

    config, events = bench.rank.config, bench.rank.events
    events.emit("phase", name="workers", text=f"waiting for {', '.join(config.workers)}")
    dispatcher = Dispatcher(_settings(bench), Policy(start_s=config.startup_timeout_s))
    try:
        with keep_alive(events, config.startup_timeout_s):
            dispatcher.start()
        (first, *_) = dispatcher.workers
    finally:
        dispatcher.stop()
    sim, text = first.engine == "sim", any(worker.text for worker in dispatcher.workers)
    return {"scope": config.scope(first.model, sim, text), "simulated": sim}


def _settings(bench: Bench) -> Settings:
    config, longest = bench.rank.config, max(map(len, bench.data.prompts)) + bench.rank.config.max_new
    same = {name: getattr(config, name) for name in ("model", "precision", "slots", "shrink", "step_s", "served_model")}
    return Settings(
        **same,
        device=str(devices.device(config.backend, 0)),
        threads=torch.get_num_threads(),
        positions=math.ceil(longest / 64) * 64,
        fixed_length=config.random,
        urls=tuple(config.workers),
        token=addresses.bearer_token(),
        # Twice what a worker works on: its next query waits there, and not for a way back and forth.
        policy=Policy(2 * config.slots, config.deadline_s, start_s=LATE_S, partial=True),
    )


def _test(bench: Bench, name: str, scenario: str, mode: str = "PerformanceOnly") -> Test:
    config, load = bench.rank.config, bench.load
    return Test(
        name=name,
        mode=mode,
        engine=config.engine_of(scenario),
        settings=_settings(bench),
        conf=load.conf(scenario),
        prompts=bench.data.prompts,
        warm_up=articles.outside(bench.data.tokenizer, WARM_UPS, config.vocabulary),
        max_new=config.max_new,
        folder=bench.rank.run_dir / "loadgen" / name,
        deadline_s=config.deadline_s,
        limit_s=config.test_limit_s or SLACK * load.plan(scenario)["expected_s"] + config.deadline_s,
        sent=load.samples if mode == "AccuracyOnly" else load.issued(scenario),
    )


def _perform(bench: Bench, test: Test) -> Outcome:
    """Run a test; ``BackendUnavailable`` where what the first one needs is not here, ``RunBroken`` where it did not end by itself."""
    events = bench.rank.events
    events.emit("phase", name=test.name)

    def tell(done: int, rss_bytes: int) -> None:
        if done < 0:
            events.emit("heartbeat")
        else:
            progress = {"done": done, "total": test.sent, "unit": "queries", "rss_bytes": rss_bytes}
            events.emit("progress", phase=test.name, **progress)

    outcome = loadgen.perform(test, tell)
    if outcome.skipped and not bench.queries:
        raise BackendUnavailable(outcome.reason)
    if outcome.reason:
        raise RunBroken(outcome.reason)
    assert outcome.table is not None
    bench.queries[test.name] = outcome.table
    record = outcome.facts.get("dispatch", {})
    for table in ("workers", "losses", "inflight"):
        bench.tables[table] += [{"test": test.name, **row} for row in record.get(table, [])]
    for name in ("stated", "counted"):
        bench.run[name] += record.get(name, 0)
    for row in record.get("losses", []):
        events.emit("log", message=f"{test.name}: worker {row['worker']}, {row['event']}: {row['because']}")
    return outcome


def _performance(bench: Bench, scenario: str) -> None:
    config, tables, plan = bench.rank.config, bench.tables, bench.load.plan(scenario)
    row: Row = {"test": scenario, "engine": config.engine_of(scenario)}
    row["percentile"] = bench.load.rule(scenario).percentile
    tables["tests"].append(row)
    tables["plan"].append(plan)
    try:
        test = _test(bench, scenario, scenario)
        outcome = _perform(bench, test)
        log = logs.detail(test.folder)
    except RunBroken as error:
        row |= {"status": "failed", "reason": str(error), "valid": False, "broken": ["ended"]}
        ended = {"test": scenario, "rule": "ended", "measured": 1.0, "limit": 0.0, "detail": str(error)}
        tables["validity"].append(ended)
        plan |= {"why": plan.get("why", {}) | dict.fromkeys(("queries_sent", "took_s"), "the test did not end")}
        return
    table = bench.queries[scenario] = logs.add_schedule(bench.queries[scenario], logs.schedule(test.folder))
    computes, rule = ENGINES[test.engine].torch, bench.load.rule(scenario)
    tested = measures.Tested(scenario, table, log, rule, outcome.repeated, outcome.facts, computes)
    validity, errors = list(measures.validity(tested)), "; ".join([*outcome.errors[:2], *log["errors"][:2]])[:300]
    tables["validity"] += [
        rule | {"detail": errors if rule["rule"] in ("failed", "errors") else ""} for rule in validity
    ]
    tables["times"] += measures.times(tested)
    broken = measures.broken(validity)
    row |= measures.measured(tested, config, read_events(bench.rank.run_dir))
    row |= {"valid": not broken, "broken": broken}
    streams = STREAMS if scenario == "MultiStream" else 1
    plan |= {"queries_sent": len(table) // streams, "took_s": float(outcome.facts["seconds"])}


def _accuracy(bench: Bench) -> None:
    """Answer the whole set and score it, beside two controls."""
    config, samples = bench.rank.config, len(bench.data.prompts)
    if config.random or bench.run["simulated"]:
        reason = "random weights have no accuracy" if config.random else "what is simulated computes nothing"
        bench.tables["accuracy"].append({"status": "skipped", "reason": reason})
        return
    row: Row = {"samples": samples, "answered": 0, "failed": samples, "errors": 0, "first": ""}
    bench.tables["accuracy"].append(row)
    try:
        test = _test(bench, "accuracy", "Offline", "AccuracyOnly")
        outcome = _perform(bench, test)
        log, answers = logs.detail(test.folder), logs.answers(test.folder)
    except RunBroken as error:
        columns = (*scores.KINDS, "gen_len", "splitter", "rouge1_shuffled", "rouge1_lead")
        row |= {"first": str(error), "why": dict.fromkeys(columns, "the test did not end")}
        return
    bench.rank.events.emit("phase", name="scores")
    row |= {"answered": len(answers), "failed": int(bench.queries["accuracy"]["failed"].sum())}
    row |= {"errors": int(log["num_errors"]), "first": next(iter(outcome.errors), "")}
    row |= scores.score(bench.data, answers)


def _keep_queries(bench: Bench) -> None:
    """Write the raw samples of all queries to ``queries.parquet``."""
    import pandas as pd

    tables = bench.queries or {"": np.empty(0, queries.QUERY)}
    frames = [pd.DataFrame(table).assign(test=name) for name, table in tables.items()]
    with atomic_path(bench.rank.run_dir / "queries.parquet") as temporary:
        pd.concat(frames).to_parquet(temporary, index=False)
