"""The serving benchmark: what it states of rates that were worked out by hand, and what its checks refuse."""

import contextlib
import json
import re
from types import SimpleNamespace

import pytest
from llm_servers import TOKEN, Faulty, own

from benchlib.benchmarks.serving import run as serving_run
from benchlib.benchmarks.serving.run import Bench
from benchlib.benchmarks.serving.spec import SPEC
from benchlib.config.schema import resolve
from benchlib.core.errors import BackendUnavailable, UserError
from benchlib.core.events import EventWriter, read_events
from benchlib.judge.compare import RunSet
from benchlib.judge.cost import Machine, worth
from benchlib.judge.numbers import judged
from benchlib.results.record import Record
from benchlib.results.run import Result
from benchlib.spec import checks
from benchlib.spec.tables import Rows, split_samples

URLS = ["http://a:8000", "http://b:8000"]


def config(**values):
    return resolve("serving", "smoke", "cpu", {"workers": ",".join(URLS), **values}).config


def point(phase, sent, outcome="met", queries=100, **more):
    row = {f"{kind}_ms": [10.0] * queries for kind in ("ttft", "tpot", "latency", "late")}
    row |= {"phase": phase, "rate": sent, "outcome": outcome, "queries": queries, "failed": 0, "repeated": 0}
    row |= {"samples_per_s": sent, "tokens_per_s": 9 * sent, "goodput_per_s": sent, "percentile": 99.0}
    row |= {"ttft_limit_ms": 500.0, "tpot_limit_ms": 100.0, "why": {"concurrency": "an open loop has none"}}
    return row | more


def tables():
    """Two workers of 10 and 5 queries/s; together 12 instead of 15."""
    why = {"device_bytes": "not stated"}
    workers = [
        {"worker": number, "url": url, "model": "m", "asked_in": "ids", "alone_per_s": [10.0 - 5 * number], "answered": 60,
         "cpu_share": 0.5, "resident_bytes": 2e9 + 1e9 * number, "device_bytes": None, "why": why}
        for number, url in enumerate(URLS)
    ]  # fmt: skip
    rates = ("samples_per_s", "tokens_per_s", "sum_per_s")
    scaling = [
        {"size": size, "all": size == 2} | dict(zip(rates, ([together], [9 * together], [alone]), strict=True))
        for size, together, alone in ((1, 10.0, 10.0), (2, 12.0, 15.0))
    ]
    closed = point("closed", 6.0, rate=None, concurrency=4, why={"rate": "a closed loop has none"})
    load = [closed, point("sweep", 6.0), point("sweep", 12.0, "missed"), point("confirmation", 6.0)]
    recovery = {"queries": 128, "failed": 0, "repeated": 0, "requeued": 16, "answers": 64, "same_answers": 64, "exact": True, "killed_s": 0.3, "back_s": 1.0, "after_return": 9}  # fmt: skip
    lost = [{"t_s": 0.3, "worker": 0, "event": "down", "because": "gone", "times": 1}]
    inflight = [{"worker": worker, "open": [4, 2, 0]} for worker in range(2)]
    run = {
        "startup_s": 1.0, "total_s": 20.0, "scope": "random_prompts", "errors": "", "issued": 500, "failed": 0, "repeated": 0, "stated": None,
        "counted": None, "paid_devices": 2, "project_samples": 13368, "dispatcher_cpu_ms": [0.2], "worker_startup_s": [],
        "why": {"stated": "ids", "counted": "ids", "worker_startup_s": "they were there"},
    }  # fmt: skip
    every = {"workers": workers, "scaling": scaling, "load": load, "recovery": [recovery]}
    return every | {"losses": lost, "inflight": inflight, "run": [run]}


def rows_of(change=lambda tables: None, **values):
    own = tables()
    change(own)
    return Rows(config(**values), 1, own)


def statuses(rows):
    seen, faults = judged(SPEC.tables, rows)
    asked = [check for check in SPEC.checks if check.when(rows.config)]
    return {answer.name: answer.status for check in asked for answer in checks.judge(check, seen, [])} | {
        "finite": "FAIL" if faults else "PASS"
    }


def stated(rows):
    return {metric.name: metric for metric in SPEC.stated(rows)}


def test_a_sound_run_passes_and_states_what_was_worked_out_by_hand():
    rows = rows_of(target_efficiency=0.8)
    answers = statuses(rows)
    assert answers.pop("tokens counted") == "SKIPPED" and set(answers.values()) == {"PASS"}
    metrics = {name.removesuffix("_random_prompts"): metric for name, metric in stated(rows).items()}
    values = {"samples_per_s_all": 12, "samples_per_s_sum": 15, "scaling_efficiency": 0.8}
    values |= {"knee_per_s": 6, "worker_memory_gb": 3}
    values |= {"projected_hours": 13368 / 12 / 3600, "ttft_p99_at_knee_ms": 10, "client_late_p99_ms": 10}
    assert {name: metrics[name].value for name in values} == pytest.approx(values)
    assert metrics["worker_startup_s"].provenance == "not_available" and "device_memory_gb" not in metrics
    said = " ".join(line for say in SPEC.says for line in say(rows))
    assert "80% of the sum" in said and "Both limits are met in the sample up to 6" in said
    assert "speed only, no quality" in SPEC.warnings(rows)[0]
    assert "computes nothing" in SPEC.warnings(rows_of(put("run", "scope", "sim")))[0]


def put(table, column, value, place=-1):
    return lambda tables: tables[table][place].update({column: value})


def points(*rows):
    return lambda tables: tables.update(load=list(rows))


def counts(counted):
    why = {"worker_startup_s": "they were there"}
    return lambda tables: tables["run"][0].update(stated=100, counted=counted, why=why)


@pytest.mark.parametrize(
    ("change", "check", "status"),
    [
        (put("run", "failed", 1), "every query answered", "FAIL"),
        (put("run", "repeated", 1), "every query answered", "FAIL"),
        (put("scaling", "samples_per_s", [16.5]), "possible scaling", "FAIL"),
        (put("scaling", "samples_per_s", [12.0, 16.5]), "possible scaling", "FAIL"),  # rounds of which one lacks its sum
        (points(point("sweep", 6.0, "missed")), "limits met", "FAIL"),
        (points(point("sweep", 6.0, "late")), "limits met", "SKIPPED"),
        (points(point("sweep", 6.0), point("confirmation", 6.0, "missed")), "limits met", "FAIL"),
        (points(point("sweep", 6.0), point("confirmation", 6.0, "unproven")), "limits met", "FAIL"),
        (put("load", "ttft_ms", [-0.01] * 100), "finite", "FAIL"),
        (put("recovery", "failed", 1), "recovery", "FAIL"),
        (put("recovery", "same_answers", 63), "recovery", "FAIL"),
        (lambda tables: tables["recovery"][0].update(same_answers=63, exact=False), "recovery", "PASS"),
        (put("run", "why", {}), "finite", "FAIL"),
        (put("scaling", "samples_per_s", [11.0]), "target efficiency", "FAIL"),
        (counts(96), "tokens counted", "PASS"),
        (counts(94), "tokens counted", "FAIL"),
        (counts(106), "tokens counted", "FAIL"),
    ],
)  # fmt: skip
def test_what_is_wrong_does_not_pass(change, check, status):
    rows = rows_of(change)
    changed = {"recovery": True, "target_efficiency": 0.75} | ({} if check == "tokens counted" else {"workers": []})
    rows = Rows(rows.config.model_copy(update=changed), 1, rows.tables)
    assert statuses(rows)[check] == status


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ("proven", "both limits met with 99% confidence at p99 by 100 queries"),
        ("met", "both limits met in the sample at p99 by 100 queries; 459 with none late would show it"),
    ],
)
def test_a_knee_says_whether_it_was_proven(outcome, words):
    rows = rows_of(points(point("sweep", 6.0, "met"), point("confirmation", 6.0, outcome)))
    (answer,) = [check for check in SPEC.checks if check.name == "limits met"]
    (judgement,) = checks.judge(answer, rows, [])
    assert judgement.status == "PASS" and words in judgement.reason
    assert words.partition(";")[0] in stated(rows)["knee_per_s_random_prompts"].reason


@pytest.mark.parametrize(("queries", "said"), [(100, True), (101, False)])
def test_a_percentile_of_few_queries_says_what_it_is(queries, said):
    """By linear interpolation p99 of 100 lies at 0.99 x 99 = 98.01, between the last two of 0 to 99; of 101 it is the last but one."""
    rows = rows_of(points(point("sweep", 6.0, queries=queries)))
    assert any("p99 lies between its two largest times" in words for words in SPEC.warnings(rows)) is said


def test_rates_of_rounds_are_all_work_over_all_time():
    """Two rounds of 30 queries: 3 s and 1 s are 60 in 4 s, 15 queries/s, and not the median of 10 and 30."""

    def change(tables):
        put("scaling", "samples_per_s", [10.0, 30.0])(tables)
        put("scaling", "sum_per_s", [40.0, 40.0])(tables)

    metrics = stated(rows_of(change))
    hours = 13368 / 15 / 3600
    values = {"samples_per_s_all": 15, "scaling_efficiency": 15 / 40, "projected_hours": hours}
    assert {name: metrics[f"{name}_random_prompts"].value for name in values} == pytest.approx(values)


def test_servers_that_complete_no_query_fail_with_the_reason():
    servers = [Faulty(lambda number: "400"), Faulty(lambda number: "400")]
    urls = [server.url for server in servers]
    values = config(workers=",".join(urls), rounds=1, queries=8, concurrencies="1")
    bench = Bench(values, SimpleNamespace(emit=lambda *_, **__: None), urls, "", [[3, 4, 5]])
    try:
        serving_run._rates(bench)
        with pytest.raises(BackendUnavailable, match="no query was completed"):
            serving_run._load(bench)
    finally:
        for server in servers:
            server.hosted.cut()
    (facts,) = tables()["run"]
    facts |= {"issued": bench.sums["issued"], "failed": bench.sums["failed"], "errors": "; ".join(bench.errors)}
    rows = Rows(values, 1, bench.tables | {"run": [facts]})
    answers = statuses(rows)
    assert (answers["every query answered"], answers["limits met"], answers["finite"]) == ("FAIL", "FAIL", "PASS")
    metric = stated(rows)["samples_per_s_all_random_prompts"]
    assert metric.value is None and "no query was completed" in metric.reason


def test_an_exception_of_the_sender_ends_the_recovery(monkeypatch):
    def at_once(count):
        if count > 16:
            raise ValueError("the sender's own")
        return []

    client = SimpleNamespace(at_once=at_once, answers={})
    monkeypatch.setattr(Bench, "client", lambda *_: contextlib.nullcontext((client, None)))
    monkeypatch.setattr(Bench, "measure", lambda *_: {})
    bench = Bench(config(queries=8), None, URLS, TOKEN, [])
    bench.tables["scaling"] = [{"samples_per_s": [1e6]}]
    pool = SimpleNamespace(kill=lambda _: None, start=lambda _: None, wait=lambda _: None, ready_s=[0.0])
    with pytest.raises(ValueError, match="the sender's own"):
        serving_run._recovery(bench, pool)


def test_a_run_is_priced_by_new_tokens_and_servers():
    def machine(usd):
        rows, (thin, _) = rows_of(), split_samples(SPEC.tables, tables())
        of = {"metrics": SPEC.stated(rows), "facts": dict(thin["run"][0]), "tables": {}}
        result = Result.of(rows.config, status="complete", **of)
        run = Record(
            benchmark="serving", tier="smoke", backend="cpu", run="r", result=result,
            fingerprint={"world_size": "1", "config.concurrency": "16", "config.workers": json.dumps(list(URLS))},
        )  # fmt: skip
        return Machine(f"at {usd} USD", RunSet("r", (run,)), usd)

    item = worth([machine(1.8), machine(3.6)])
    # Two servers at 1.80 USD: 3.60 USD an hour for 108 tokens/s.
    assert (item["items"], item["machines"][0]["devices"]) == ("tokens", 2)
    (value,) = (row["values"][0]["value"] for row in item["rows"] if row["name"] == "usd_per_million")
    assert value == pytest.approx(3.6 / 3600 * 1e6 / 108)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_worker_that_dies_between_two_measurements_leaves_the_rates_of_the_others(monkeypatch, lost):
    """Once the run has come to its end, the last of two workers; all of them end the run where nothing was measured."""
    servers, measured = [own(), own()], []
    urls = [server.url for server in servers]
    values = config(workers=",".join(urls), rounds=1, queries=8, gone_s=0.3)
    bench = Bench(values, SimpleNamespace(emit=lambda *_, **__: None), urls, TOKEN, [[3, 4, 5]])
    once = serving_run._at_once

    def at_once(bench, workers):
        while len(measured) == 1 and len(servers) > 2 - lost:
            servers.pop().cut()
        row = once(bench, workers)
        measured.append([worker["url"] for worker in workers])
        return row

    monkeypatch.setattr(serving_run, "_at_once", at_once)
    try:
        if lost == 2:
            with pytest.raises(BackendUnavailable, match="no worker is left"):
                serving_run._rates(bench)
            return
        serving_run._rates(bench)
    finally:
        for server in servers:
            server.cut()
    assert [worker["url"] for worker in bench.tables["workers"]] == urls[: 2 - lost]
    assert measured == ([urls[:1], urls[1:], urls] if not lost else [urls[:1], urls[:1]])
    named = [row["because"] for row in bench.tables["losses"]]
    assert bool(named) == bool(lost) and all(urls[1] in because for because in named)
    # It was asked for alone, as the only worker of that measurement, and is the second of the run all the same.
    assert {row["worker"] for row in bench.tables["losses"]} == ({1} if lost else set())


def test_rates_are_those_of_servers_whose_rate_is_known():
    """Two sim workers of 4 slots: 16 queries of 16 tokens are 4 x 16 steps of 10 ms, 25 queries/s, and of 20 ms, 12.5."""
    servers = [own(step_s=step_s, slots=4, fixed_length=True) for step_s in (0.010, 0.020)]
    urls = [server.url for server in servers]
    values = {"workers": ",".join(urls), "queries": 16, "concurrency": 8, "rounds": 1}
    bench = Bench(config(**values), SimpleNamespace(emit=lambda *_, **__: None), urls, TOKEN, [[3, 4, 5]])
    try:
        serving_run._rates(bench)
    finally:
        for server in servers:
            server.cut()
    alone = [worker["alone_per_s"][0] for worker in bench.tables["workers"]]
    assert 0 < alone[0] < 25 * 1.05 and 0 < alone[1] < 12.5 * 1.05, "a busy machine lowers them"
    (_, joint) = bench.tables["scaling"]
    assert joint["sum_per_s"] == [sum(alone)] and joint["samples_per_s"][0] < 37.5 * 1.05
    assert sum(worker["answered"] for worker in bench.tables["workers"]) == 32 and bench.sums["issued"] == 64
    assert (bench.sums["failed"], bench.sums["repeated"], len(bench.cpu_ms)) == (0, 0, 3)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"workers": "a:8000"}, "not the address of a server"),
        ({"workers": "http://a:8000", "recovery": True}, "only those that are started here"),
        ({"ttft_ms": 3000}, "set point_s=3 or more"),
        ({"nproc": 2}, "the work of one process"),
    ],
)
def test_wrong_parameters_are_refused_before_anything_starts(values, words):
    with pytest.raises(UserError, match=re.escape(words)):
        resolve("serving", "smoke", "cpu", values)


def test_what_the_client_needs_has_no_torch():
    """The image of the dispatcher has none."""
    import grimp

    graph = grimp.build_graph("benchlib", include_external_packages=True, cache_dir=None)
    for module in ("benchlib.benchmarks.serving.run", "benchlib.workloads.llm.server"):
        upstream = graph.find_upstream_modules(module) | {module}
        assert not upstream & {"torch", "transformers", "datasets"}, module


@pytest.mark.parametrize(
    ("workers", "count", "places", "note"),
    [
        (4, 8, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"], ""),
        (3, 2, ["cuda:0", "cuda:1", "cuda:0"], "3 workers share 2 devices, up to 2 on one"),
        (2, 1, ["cuda", "cuda"], "2 workers share 1 device, up to 2 on one"),
    ],
)
def test_workers_are_spread_over_the_devices_and_it_is_said_who_shares_one(workers, count, places, note, tmp_path):
    asked = resolve("serving", "smoke", "cuda", {"worker_count": workers, "engine": "static"}).config
    machine, events = {"devices": {"backends": {"cuda": {"count": count}}}}, EventWriter(tmp_path, "rank0")
    assert serving_run.spread(asked, machine, events) == places
    written = [event["message"] for event in read_events(tmp_path, {"log"})]
    assert len(written) == bool(note) and all(message.startswith(note) for message in written)
    assert serving_run.spread(config(workers="", worker_count=2, engine="static"), {}, events) == ["cpu", "cpu"]
