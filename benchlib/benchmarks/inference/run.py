"""The inference benchmark: one LoadGen test after the other, each in a process of its own, then accuracy and bounds.

This process loads the data, plans, and reads what the tests left; it computes nothing while a test runs.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import transformers

from benchlib.benchmarks.inference import bounds, loadgen, logs, rules, workers
from benchlib.benchmarks.inference.config import InferenceConfig
from benchlib.benchmarks.inference.loadgen import REPEATS, Outcome, Test, in_turns
from benchlib.benchmarks.inference.measures import Tested, marked, metrics_of, not_measured, why_invalid
from benchlib.config import addresses
from benchlib.core.errors import BackendUnavailable, RunBroken
from benchlib.core.events import EventWriter, Moment, keep_alive, read_events
from benchlib.core.files import atomic_path
from benchlib.results.metrics import Metric, derived, measured, not_available
from benchlib.results.run import Result, save_result
from benchlib.runtime import group, peaks
from benchlib.workloads.llm import articles, queries, scores
from benchlib.workloads.llm.articles import Summaries
from benchlib.workloads.llm.engines import ENGINES, Settings

WARM_UPS = 4
PROBE_TOKENS = 384  # of the prompt that is sent again and again
SLACK = 4.0  # a test may take this much longer than expected, and its deadline, before it is ended
AUDITED = 100  # answers that TEST06 looks at
PEAK_STEP, PEAK_TRIES = 0.9, 6  # of the rate that LoadGen's search found, until a whole run at it is VALID


@dataclass
class _Bench:
    """What every step needs, and what it adds to."""

    config: InferenceConfig
    run_dir: Path
    events: EventWriter
    device: torch.device
    data: Summaries
    metrics: list[Metric] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    kept: list[tuple[str, np.ndarray]] = field(default_factory=list)
    worker_bounds: list[bounds.Bound] = field(default_factory=list)  # by number; none where a worker does not say

    def row(self, table: str, **values: Any) -> None:
        """Add a row to a table of the result."""
        self.tables.setdefault(table, []).append(values)

    @property
    def scope(self) -> str:
        """The end of metrics' names, see ``InferenceConfig.scope``."""
        return self.config.scope(self.facts.get("says"))


def run(config: InferenceConfig, run_dir: Path, events: EventWriter) -> None:
    """Run all tests as the only rank and write ``result.json``."""
    began = Moment.at(psutil.Process().create_time())
    events.emit("phase", name="init")
    if find_spec("mlperf_loadgen") is None:
        raise BackendUnavailable("LoadGen is not installed: pip install 'benchlib[inference]' (wheels for Linux)")
    with group.world(config, run_dir) as world:
        events.emit("phase", name="data")
        source = config.data, config.data_file, config.samples, config.seed, config.model
        data = articles.load(*source, config.vocabulary)
        bench = _Bench(config, run_dir, events, world.device, data)
        if config.engine == "http":
            settings = dataclasses.replace(_settings(config, data, world.device), partial=False)
            events.emit("phase", name="workers", text=f"waiting for {', '.join(config.workers)}")
            with keep_alive(events, config.startup_timeout_s):
                bench.facts["says"], bench.worker_bounds = workers.meet(config, settings, data.tokenizer)
        startup_s = began.since()
        for scenario in config.scenarios:
            bench.row("plan", **rules.plan(config, scenario, len(data.prompts)))
            bench.tables.setdefault("reduced", []).extend(rules.reduced(config, scenario, len(data.prompts)))
        steps: list[tuple[str, str, Callable[[], None]]] = [
            (name, name, functools.partial(_performance, bench, name)) for name in config.scenarios
        ]
        if config.find_peak:
            steps.append(("FindPeak", "Server", lambda: _find_peak(bench)))
        if config.audit:
            steps.append(("TEST06", _audited_scenario(config), lambda: _audit(bench)))
        if config.accuracy and not config.random:
            steps.append(("accuracy", "Offline", lambda: _accuracy(bench)))
        for name, of, step in steps:
            try:
                step()
            except (RunBroken, BackendUnavailable) as error:  # those that ended stay, and the others have their turn
                if isinstance(error, BackendUnavailable) and not bench.tables.get("tests"):
                    raise
                _lost(bench, name, of, str(error))
        events.emit("phase", name="bounds")
        _roofline(bench)
        events.emit("phase", name="write")
        _save(bench, began, startup_s)


def _settings(config: InferenceConfig, data: Summaries, device: torch.device) -> Settings:
    longest = max(map(len, data.prompts)) + config.max_new
    positions = math.ceil(max(longest, PROBE_TOKENS + 2) / 64) * 64
    return Settings(
        model=config.model, device=str(device), precision=config.precision, slots=config.slots, threads=torch.get_num_threads(),
        positions=positions, shrink=config.shrink,
        fixed_length=config.random, step_s=config.step_s, urls=tuple(config.workers), token=addresses.bearer_token(),
        deadline_s=config.deadline_s, served_model=config.served_model, text=config.model if config.tokens == "text" else "",
        partial=True,  # all of them were there at the start of the run; one that is lost since is no reason to lose the next test
    )  # fmt: skip


def _test(bench: _Bench, name: str, scenario: str, mode: str, server_qps: float | None = None, audit: int = 0) -> Test:
    config, count = bench.config, len(bench.data.prompts)
    engine = config.engine_of(scenario)
    spare = articles.outside(bench.data.tokenizer, 40 * REPEATS + WARM_UPS, config.vocabulary)
    long = [[*itertools.chain(*spare[place : place + 40])][:PROBE_TOKENS] for place in range(0, 40 * REPEATS, 40)]
    # Whether a repeated prompt is faster: asked where first tokens are seen, once for an engine.
    asked = any(row["engine"] == engine for row in bench.tables.get("prefix_cache", []))
    expected = float(rules.plan(config, scenario, count, server_qps)["expected_s"])  # type: ignore[arg-type]
    factor = 40 if mode == "FindPeakPerformance" else 1
    issued = audit or rules.queries_issued(config, scenario, count, server_qps)
    sent = {"AccuracyOnly": count, "FindPeakPerformance": 0}.get(mode, issued)
    return Test(
        name=name, mode=mode, engine=engine, settings=_settings(config, bench.data, bench.device),
        conf=rules.Conf.of(config, scenario, count, server_qps), prompts=bench.data.prompts, warm_up=spare[-WARM_UPS:],
        repeated=[] if asked else in_turns(long), max_new=config.max_new, folder=bench.run_dir / "loadgen" / name,
        deadline_s=config.deadline_s, limit_s=config.test_limit_s or factor * SLACK * expected + config.deadline_s, audit=audit,
        sent=sent,
    )  # fmt: skip


def _perform(bench: _Bench, test: Test) -> Outcome:
    """Run a test; ``BackendUnavailable`` where what it needs is not here, ``RunBroken`` where it did not end by itself."""
    bench.events.emit("phase", name=test.name)

    def tell(done: int, rss_bytes: int) -> None:
        if done < 0:
            bench.events.emit("heartbeat")
        else:
            progress = {"done": done, "total": test.sent, "unit": "queries", "rss_bytes": rss_bytes}
            bench.events.emit("progress", phase=test.name, **progress)

    outcome = loadgen.perform(test, tell)
    if outcome.skipped:
        raise BackendUnavailable(outcome.reason)
    if outcome.reason:
        raise RunBroken(f"{test.name}: {outcome.reason}")
    bench.facts["engine"] = {**bench.facts.get("engine", {}), test.engine: outcome.facts["engine"]}
    if test.repeated:
        repeat, fresh = (outcome.facts[name] for name in ("repeat_ttft_s", "fresh_ttft_s"))
        bench.row("prefix_cache", engine=test.engine, tokens=PROBE_TOKENS, repeated_s=repeat, fresh_s=fresh)
    for table in workers.TABLES:
        for row in outcome.facts.get("dispatch", {}).get(table, []):
            bench.row(table, test=test.name, **row)
    mine = {name: [row for row in bench.tables.get(name, []) if row["test"] == test.name] for name in workers.TABLES}
    for sentence in workers.sentences(mine):
        bench.events.emit("log", message=f"Workers were lost. {sentence}")
    if counted := outcome.facts.get("dispatch", {}).get("counted", {}):
        sums = bench.facts.setdefault("counted", dict.fromkeys(counted, 0))
        bench.facts["counted"] = {name: sums[name] + counted[name] for name in sums}
    return outcome


def _lost(bench: _Bench, name: str, scenario: str, why: str) -> None:
    """Add the row of a test that did not end; what ended before it stays."""
    if name in [row["test"] for row in bench.tables.get("tests", [])]:  # it ended, and what came after it did not
        bench.notes.append(f"{name}: {why}")
        return
    _row(bench, name, scenario, [f"it did not end: {why}"], {})
    if name in bench.config.scenarios:
        bench.metrics += not_measured(name, bench.scope, "the test did not end")


def _tested(bench: _Bench, test: Test, scenario: str, outcome: Outcome) -> Tested:
    assert outcome.table is not None
    table = logs.add_schedule(outcome.table, logs.schedule(test.folder))
    bench.kept.append((test.name, table))
    log, rule, computes = logs.detail(test.folder), rules.applied(bench.config, scenario), ENGINES[test.engine].torch
    return Tested(scenario, table, log, rule, outcome.repeated, outcome.errors, outcome.facts, computes)


def _row(bench: _Bench, name: str, scenario: str, reasons: Sequence[str], values: Mapping[str, Any]) -> None:
    """Add the row of a test; ``values`` are what it measured, nothing where it did not end."""
    rule = rules.applied(bench.config, scenario)
    empty = {"loadgen": "", "sut": "", **dict.fromkeys(("queries", "failed", "tokens", "num_errors", "repeated"), 0)}
    empty |= dict.fromkeys(("samples_per_s", "loadgen_per_s", "server_qps", "seconds", "began", "ended"))
    bench.row(
        "tests", test=name, scenario=scenario, engine=bench.config.engine_of(scenario), valid="INVALID" if reasons else "VALID",
        why="; ".join(reasons), ttft_limit_s=rule.ttft_s, tpot_limit_s=rule.tpot_s, percentile=rule.percentile, **{**empty, **values},
    )  # fmt: skip


def _add(bench: _Bench, name: str, tested: Tested) -> None:
    """Add the row of a test that ended."""
    done, log = queries.completed(tested.table), tested.log
    paced = rules.lg_scenario(tested.scenario) == "Server"
    values = {
        "loadgen": str(log.get("result_validity", "")), "sut": str(log.get("sut_name", "")), "queries": len(tested.table),
        "failed": int(tested.table["failed"].sum()), "tokens": int(done["tokens"].sum()), "samples_per_s": tested.samples_per_s,
        "loadgen_per_s": tested.stated_per_s, "server_qps": float(log.get("effective_target_qps", 0)) if paced else None,
        "seconds": queries.span_s(done) if len(done) else None, "began": log.get("began"), "ended": log.get("ended"),
        "num_errors": int(log.get("num_errors", 0)), "repeated": tested.repeated,
    }  # fmt: skip
    _row(bench, name, tested.scenario, why_invalid(tested), values)


def _performance(bench: _Bench, scenario: str) -> None:
    test = _test(bench, scenario, scenario, "PerformanceOnly")
    tested = _tested(bench, test, scenario, _perform(bench, test))
    _add(bench, scenario, tested)
    plan = next(row for row in bench.tables["plan"] if row["scenario"] == scenario)
    plan["queries sent"] = len(tested.table) // (rules.STREAMS if scenario == "MultiStream" else 1)
    plan["took_s"] = round(float(tested.facts["seconds"]), 1)
    bench.metrics += metrics_of(tested, bench.config, read_events(bench.run_dir), bench.scope)
    _timeline(bench, tested)


def _timeline(bench: _Bench, tested: Tested) -> None:
    """Keep when the events of the fastest, the median and the slowest query were, from its start."""
    done = queries.completed(tested.table)
    if tested.scenario == "Offline" or not len(done):
        return
    order = np.argsort(queries.latency_s(done), kind="stable")
    for which, place in (("fastest", 0), ("median", len(order) // 2), ("slowest", len(order) - 1)):
        query, begin = done[order[place]], float(queries.start_s(done)[order[place]])
        times = {name: float(query[name]) - begin for name in ("issued_s", "first_s", "last_s")}
        counts = {name: int(query[name]) for name in ("prompt_tokens", "tokens", "attempt")}
        bench.row("timeline", scenario=tested.scenario, query=which, **times, **counts)


def _find_peak(bench: _Bench) -> None:
    """Let LoadGen search for the highest rate of Server, and confirm it: its search tests one percentile in short probes.

    A rate at which a whole run is not VALID is lowered by a tenth, up to ``PEAK_TRIES`` runs in all.
    """
    test = _test(bench, "FindPeak", "Server", "FindPeakPerformance")
    _perform(bench, test)
    stated = logs.peak_qps(logs.detail(test.folder))
    name = f"peak_qps_server{bench.scope}"
    if stated is None:
        why = "LoadGen's search reported no rate: the first probe must pass, lower server_qps"
        bench.metrics.append(not_available(name, "queries/s", "higher", why))
        return
    bench.facts["peak_qps_loadgen"] = stated
    reasons: list[str] = []
    rate = stated
    for number in range(PEAK_TRIES):
        rate = float(f"{stated * PEAK_STEP**number:.4g}")
        confirm = _test(bench, f"FindPeak run {number + 1}", "Server", "PerformanceOnly", server_qps=rate)
        tested = _tested(bench, confirm, "Server", _perform(bench, confirm))
        reasons = why_invalid(tested)
        valid = "INVALID" if reasons else "VALID"
        bench.row("peak", rate=rate, queries=len(tested.table), samples_per_s=tested.samples_per_s, valid=valid, why="; ".join(reasons))  # fmt: skip
        if not reasons or number == PEAK_TRIES - 1:
            _add(bench, "FindPeak confirmed", tested)
            break
    bench.metrics.append(
        not_available(
            name, "queries/s", "higher", f"LoadGen found {stated:g}; no run from there down to {rate:g} is VALID: {reasons[0]}"
        )
        if reasons
        else measured(
            name, rate, "queries/s", "higher", reason=f"LoadGen's search found {stated:g}; a whole run at this rate is VALID"
        )
    )  # fmt: skip


def _audited_scenario(config: InferenceConfig) -> str:
    return next((item for item in config.scenarios if item != "Offline"), "Offline")


def _audit(bench: _Bench) -> None:
    scenario = _audited_scenario(bench.config)
    answers = min(AUDITED, len(bench.data.prompts))
    test = _test(bench, "TEST06", scenario, "PerformanceOnly", audit=answers)
    _perform(bench, test)
    # Servers do not say which tokens end their answers; the tokenizer does.
    stated = bench.facts.get("says", {}).get("ends")
    ends = bench.facts["engine"][test.engine].get("ends") or stated or [bench.data.tokenizer.eos_token_id]
    count, wrong = logs.audit(test.folder, tuple(ends))
    bench.facts["audit"] = {"answers": count, "asked": answers, "wrong": wrong[:20], "wrong_count": len(wrong)}


def _accuracy(bench: _Bench) -> None:
    test = _test(bench, "accuracy", "Offline", "AccuracyOnly")
    outcome = _perform(bench, test)
    assert outcome.table is not None
    bench.kept.append((test.name, outcome.table))
    log, answers = logs.detail(test.folder), logs.answers(test.folder)
    bench.events.emit("phase", name="scores")
    rows, end = scores.score(bench.data, answers), bench.scope
    for row in rows:
        row.pop("per_text")
        bench.row("rouge", **row)
    bench.facts["accuracy"] = {
        "samples": len(bench.data.prompts), "answered": len(answers), "failed": int(outcome.table["failed"].sum()),
        "num_errors": int(log["num_errors"]), "errors": outcome.errors[:5], "splitter": rows[0]["splitter"],
    }  # fmt: skip
    how = f"rouge_score with stemmer, mean of {len(answers):,} texts; sentences by {rows[0]['splitter']}"
    bench.metrics += [derived(f"{kind}{end}", rows[0][kind], "%", "higher", how) for kind in scores.KINDS]
    shuffled, lead = "control: references of other articles", "control: the article's first characters"
    bench.metrics += [
        derived(f"control_rouge1_shuffled{end}", rows[1]["rouge1"], "%", "none", shuffled),
        derived(f"control_rouge1_lead{end}", rows[2]["rouge1"], "%", "none", lead),
        derived(f"gen_len{end}", rows[0]["gen_len"], "characters", "none", "of all answers, after splitting"),
    ]


def _roofline(bench: _Bench) -> None:
    """Add how near Offline, prefill and decoding came to what memory and matrix products allow, see ``bounds``.

    Workers of the kit say so of themselves and measured their machines before the tests; an engine of this process is measured now.
    """
    config, names = bench.config, list(dict.fromkeys(map(bench.config.engine_of, bench.config.scenarios)))
    engines = {name: bench.worker_bounds for name in names if config.engine == "http"}
    reached = functools.cache(functools.partial(peaks.reached, bench.device, config.precision))
    for name in names:
        facts = bench.facts.get("engine", {}).get(name, {})
        if config.engine != "http" and "read_bytes" in facts:
            bytes_per_s, flop_per_s = reached(int(facts["read_bytes"]), config.peak_seconds)
            bound = bounds.Bound.of({**facts, "bytes_per_s": bytes_per_s, "flop_per_s": flop_per_s})
            engines[name] = [bound] if bound else []
    row = next((row for row in bench.tables.get("tests", []) if row["scenario"] == "Offline"), None)
    missing = "" if row else "Offline was not run"
    if row and not engines.get(row["engine"]):
        missing = "the engine does not say how large its weights are"
        missing += " or what its machine reaches: only workers of the kit do" if config.engine == "http" else ""
    tables, of = dict(bench.kept), engines.get(row["engine"], []) if row else []
    bench.metrics += bounds.offline(of, tables.get("Offline"), missing, bench.scope)
    probes = bench.tables.get("prefix_cache", [])
    bench.metrics += bounds.shares(bench.tables.get("tests", []), tables, probes, engines, bench.scope)


def _save(bench: _Bench, began: Moment, startup_s: float) -> None:
    """Write the raw samples of all queries to ``queries.parquet``, and the result."""
    import pandas as pd

    frames = [pd.DataFrame(table).assign(test=name) for name, table in bench.kept or [("", np.empty(0, queries.QUERY))]]
    with atomic_path(bench.run_dir / "queries.parquet") as temporary:
        pd.concat(frames).to_parquet(temporary, index=False)
    bench.metrics.append(measured("startup_s", startup_s, "s", "lower", reason="imports, process group, data"))
    bench.metrics.append(measured("total_s", began.since(), "s", "lower"))
    lengths = sorted(map(len, bench.data.prompts))
    bench.facts |= {
        "prompt_tokens_least": lengths[0], "prompt_tokens_median": lengths[len(lengths) // 2], "prompt_tokens_most": lengths[-1],
        "samples": len(lengths), "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "loadgen": version("mlcommons-loadgen")},
    }  # fmt: skip
    result = Result.of(
        bench.config, status="complete", started_at=began.wall, ended_at=began.wall + began.since(),
        metrics=marked(bench.metrics, bench.tables.get("tests", []), bench.scope), facts=bench.facts, tables=bench.tables, notes=bench.notes,
    )  # fmt: skip
    save_result(bench.run_dir, result)
