"""LoadGen against engines that misbehave, rules read back from it, and the cases in which it prints VALID for nonsense."""

import ctypes
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("mlperf_loadgen", reason="pip install 'benchlib[inference]'")

from llm_servers import TOKEN, Faulty, own

from benchlib.benchmarks.inference import bounds, loadgen, logs, measures, rules, view, workers
from benchlib.benchmarks.inference.config import InferenceConfig
from benchlib.benchmarks.inference.judge import _prefix_cache, _valid, claims, reading
from benchlib.benchmarks.inference.measures import percentile_metric, rate_metric, why_invalid
from benchlib.core.errors import RunBroken, UserError
from benchlib.core.events import Moment
from benchlib.core.files import home
from benchlib.judge.impossible.claim import Claim, Latency, LoadGen
from benchlib.judge.impossible.own import Numbers
from benchlib.judge.impossible.rules import judge_claims
from benchlib.results.metrics import measured
from benchlib.results.run import Result
from benchlib.show.digest import cards, interval
from benchlib.show.history import over_runs
from benchlib.workloads.llm import dispatch, engines, queries
from benchlib.workloads.llm.engines import Kind, Settings, Sim
from benchlib.workloads.llm.load import Client

SAMPLES = 32
QUICK = InferenceConfig(
    engine="sim", samples=SAMPLES, server_qps=200, expected_qps=400, expected_latency_s=0.02, min_duration_s=0.05
)
PROMPTS = [[5, 6, 7 + row] for row in range(SAMPLES)]


def planned(folder, scenario="Server", config=QUICK, **more):
    values = {
        "name": scenario, "mode": "PerformanceOnly", "engine": "sim", "settings": Settings(step_s=0.001, slots=16),
        "conf": rules.Conf.of(config, scenario, SAMPLES), "prompts": PROMPTS, "warm_up": [[3, 4]], "repeated": [],
        "max_new": 12, "folder": folder / scenario, "deadline_s": 5.0, "limit_s": 20.0,
    }  # fmt: skip
    return loadgen.Test(**{**values, **more})


def ended(test, outcome, scenario="Server"):
    table = logs.add_schedule(outcome.table, logs.schedule(test.folder))
    rule = rules.applied(QUICK, scenario)
    log = logs.detail(test.folder)
    return measures.Tested(scenario, table, log, rule, outcome.repeated, outcome.errors, outcome.facts, computes=False)


def mended(tested):
    """Why a test is invalid, but for a client that a busy machine made late."""
    return [reason for reason in why_invalid(tested) if not reason.startswith("the client sent")]


def run(test):
    outcome = loadgen.perform(test, lambda done, rss: None)
    assert outcome.reason == ""
    return outcome


# Engines that misbehave. They are made in the test's process by name.


class OneToken(Sim):
    def submit(self, rid, ids, max_new, on_first, on_done):
        super().submit(rid, ids, 1, on_first, on_done)


class NoFirst(Sim):
    def submit(self, rid, ids, max_new, on_first, on_done):
        super().submit(rid, ids, max_new, lambda *_: None, on_done)


class Twice(Sim):
    def submit(self, rid, ids, max_new, on_first, on_done):
        def done(*answer):
            on_done(*answer)
            on_done(*answer)

        super().submit(rid, ids, max_new, on_first, done)


class Silent(Sim):
    def submit(self, rid, ids, max_new, on_first, on_done):
        if ids == [3, 4]:  # a warm-up query
            super().submit(rid, ids, max_new, on_first, on_done)


def in_process(test):
    """Run a test in this process, where the engines above are: LoadGen keeps state, so each caller is a process of its own."""
    engines.ENGINES.update(
        {name: Kind(f"{__name__}:{name}", "", torch=False) for name in ("OneToken", "NoFirst", "Twice", "Silent")}
    )
    sent = type("Pipe", (), {"send": lambda self, _: None})()
    test.folder.mkdir(parents=True)
    return loadgen._perform(test, sent)


def child(engine, folder, limit_s="120", deadline_s="120", *urls):
    """Start this file as a program that runs one test and prints what it makes of it."""
    command = [sys.executable, __file__, engine, str(folder), limit_s, deadline_s, *urls]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize(
    ("engine", "reasons"),
    [
        ("OneToken", ["fewer than two tokens", "LoadGen logged"]),
        ("NoFirst", ["had no first token", "LoadGen logged"]),
        ("Twice", ["came twice"]),
    ],
)
def test_engines_that_misbehave_are_invalid_though_loadgen_says_valid(engine, reasons, tmp_path):
    out, err = child(engine, tmp_path).communicate(timeout=300)
    assert out.startswith("VALID;"), err
    for reason in reasons:
        assert reason in out


def test_a_query_without_end_fails_at_its_deadline_and_the_test_ends(tmp_path):
    out, err = child("Silent", tmp_path, deadline_s="0.3").communicate(timeout=300)
    assert "64 of 64 queries failed (the first: no answer within 0.3 s)" in out, err


def test_an_interrupt_ends_a_hung_test_at_once(tmp_path):
    process = child("Silent", tmp_path, "100", "100")
    end = time.monotonic() + 120
    while not (tmp_path / "Server" / "mlperf_log_detail.txt").exists():  # LoadGen began
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)  # its queries have 100 s
    assert process.returncode == 130


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    test = planned(
        tmp_path_factory.mktemp("server"), repeated=loadgen.in_turns([[token] * 20 for token in range(5, 10)])
    )
    return test, run(test)


def test_a_server_run_of_sim_is_valid_and_its_times_are_loadgens(server):
    test, outcome = server
    mine = ended(test, outcome)
    assert mended(mine) == []
    assert mine.log["result_validity"] == "VALID" and len(mine.table) == 64
    first = np.sort(queries.ttft_s(mine.table))
    stated = mine.log["result_first_token_50.00_percentile_latency_ns"] * 1e-9
    assert queries.percentile(first, 0.5) == pytest.approx(stated, abs=5e-3)
    assert queries.lateness_s(mine.table).min() >= 0
    assert len(outcome.facts["repeat_ttft_s"]) == 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: {"table": late(t.table)}, "the client sent late"),
        (lambda t: {"log": {**t.log, "num_errors": 3}}, "LoadGen logged 3 errors"),
        (lambda t: {"table": t.table[:-1]}, "LoadGen counts 64 samples, the client 63"),
        (lambda t: {"facts": {**t.facts, "driver_cpu_share": 0.97}}, "used 97% of a core"),
        (lambda t: {"log": {**t.log, "result_completed_samples_per_sec": 2e6}}, "the last issued query"),
        (
            lambda t: {
                "table": t.table[:40],
                "log": {**t.log, "result_validity": "INVALID", "early_stopping_met": False},
            },
            "40 queries, 0 of them over a limit, do not prove p90: at least 44 are needed with so many; raise min_queries to 44",
        ),
        (
            lambda t: {
                "table": slow(t.table),
                "log": {**t.log, "result_validity": "INVALID", "early_stopping_met": False},
            },
            "13 of 64 queries were over a limit, p90 allows fewer than 6.4: lower server_qps",
        ),
        (lambda t: {"table": at_once(t.table)}, "came all at once"),
    ],
)
def test_each_reason_is_given(server, change, reason):
    mine = ended(*server)
    assert any(reason in text for text in why_invalid(dataclasses.replace(mine, **change(mine))))


def test_interactive_is_counted_as_server_is(server):
    """LoadGen knows one scenario for both; what it logs of samples per query is none of theirs."""
    mine = ended(*server)
    mine = dataclasses.replace(mine, log={**mine.log, "generated_samples_per_query": 2})
    assert mended(dataclasses.replace(mine, scenario="Interactive")) == mended(mine) == []


def test_the_version_of_loadgen_is_the_installed_one(tmp_path, monkeypatch):
    from benchlib.benchmarks.inference import run as bench_run

    monkeypatch.setattr(bench_run, "version", lambda name: {"mlcommons-loadgen": "9.8.7"}[name])
    bench = bench_run._Bench(QUICK, tmp_path, None, None, SimpleNamespace(prompts=PROMPTS))
    bench_run._save(bench, Moment.at(time.time()), 1.0)
    assert json.loads((tmp_path / "result.json").read_text())["facts"]["versions"]["loadgen"] == "9.8.7"


def test_failed_queries_explain_loadgens_rate_and_an_invalid_test_has_no_key_number(server):
    mine = ended(*server)
    table = mine.table.copy()
    table["failed"] = np.arange(64) % 4 > 0
    stated = 64 / queries.span_s(table)
    mine = dataclasses.replace(mine, table=table, log={**mine.log, "result_completed_samples_per_sec": stated})
    [reason] = mended(mine)
    assert reason.startswith("48 of 64 queries failed: LoadGen counts them as answered")
    test = {
        "test": "Server", "scenario": "Server", "valid": "INVALID", "loadgen": "VALID", "queries": 64, "failed": 48, "num_errors": 0,
        "samples_per_s": mine.samples_per_s, "loadgen_per_s": stated,
    }  # fmt: skip
    [claim] = claims(Numbers("inference", [], 1, tables={"tests": [test]}))
    assert not [each.reason for each in judge_claims([claim]) if each.status == "FAIL"]
    values = [measured(f"{name}_x", 1.0, "s") for name in ("ttft_p99_s_server", "peak_qps_server", "total_s")]
    for valid, shown in (("VALID", [0, 1, 2]), ("INVALID", [1, 2])):
        result = Result.of(QUICK, status="complete", metrics=measures.marked(values, [test | {"valid": valid}], "_x"))
        assert {card["name"] for card in cards(result)} == {values[place].name for place in shown}


class Counting:
    """Takes LoadGen's place: reads the answers out of memory as it does, ``calls`` of them at a time."""

    def __init__(self):
        self.calls, self.answers, self.firsts = [], [], []

    def QuerySampleResponse(self, rid, address, size, tokens=1):
        return rid, address, size, tokens

    def FirstTokenComplete(self, responses):
        self.firsts += [rid for rid, *_ in responses]

    def QuerySamplesComplete(self, responses):
        self.calls.append(len(responses))
        for rid, address, size, tokens in responses:
            ids = np.frombuffer(ctypes.string_at(address, size), np.int32).tolist()
            assert len(ids) == tokens
            self.answers.append((rid, ids))


def test_answers_of_offline_are_reported_together_and_each_once(tmp_path):
    count, lg = 1000, Counting()
    done = [threading.Event() for _ in range(2)]
    sut = loadgen.Sut(lg, planned(tmp_path, "Offline"), Silent(Settings()))
    sut.issue(range(1, count + 1), [n % SAMPLES for n in range(count)])

    def answer(part):
        for rid in range(1 + part, count + 1, 2):
            sut.on_done(rid, [rid] * (1 + rid % 7), "no such token" if rid == 500 else "")
        done[part].set()

    for part in range(2):
        threading.Thread(target=answer, args=(part,)).start()
    assert all(event.wait(120) for event in done)
    expected = {rid: [rid] * (1 + rid % 7) for rid in range(1, count + 1)} | {500: list(loadgen.FILLER)}
    assert sorted(lg.answers) == sorted(expected.items()), "the last one sends what was kept back"
    assert len(lg.calls) <= count / loadgen.TOGETHER * 2 + 2
    table = sut.log.table()
    assert table["failed"].sum() == 1 and table["sample"].tolist() == [n % SAMPLES for n in range(count)]
    assert table["tokens"][:5].tolist() == [2, 3, 4, 5, 6] and set(table["prompt_tokens"]) == {3}


def test_probes_of_the_search_for_the_peak_may_use_ids_again(tmp_path):
    """LoadGen gives the queries of a later probe ids of an earlier one; each is completed once under the id that it asked with."""
    lg = Counting()
    engine = SimpleNamespace()
    engine.submit = lambda rid, ids, most, on_first, on_done: (on_first(rid, 0.0, 7), on_done(rid, [7, 8 + rid], ""))
    sut = loadgen.Sut(lg, planned(tmp_path, mode="FindPeakPerformance"), engine)
    for probe in range(2):
        sut.issue([11, 12], [0, 1])
        end = time.monotonic() + 120
        while sut.log.unended and time.monotonic() < end:
            time.sleep(0.001)
        assert sorted(lg.answers[2 * probe :]) == [(11, [7, 8 + 2 * probe]), (12, [7, 9 + 2 * probe])]
    assert lg.firsts == [11, 12, 11, 12] and len(sut.log.table()) == 4 and sut.log.repeated == 0


def late(table):
    late = table.copy()
    late["issued_s"][::10] += 1.0
    return late


def slow(table):
    slow = table.copy()
    slow["first_s"][::5] += 3
    slow["last_s"][::5] += 3
    return slow


def at_once(table):
    same = table.copy()
    same["first_s"][3] = same["last_s"][3]
    return same


def test_accuracy_answers_are_those_of_the_engine_and_the_audit_sees_what_is_wrong(tmp_path):
    test = planned(tmp_path, "Offline", mode="AccuracyOnly")
    run(test)
    assert logs.answers(test.folder) == {row: engines.sim_answer(ids, 12) for row, ids in enumerate(PROMPTS)}
    audited = dataclasses.replace(planned(tmp_path, "Server"), audit=20, folder=tmp_path / "audit")
    run(audited)
    count, wrong = logs.audit(audited.folder, ends=(2,))
    assert count >= 20 and wrong == []
    token = engines.sim_answer(PROMPTS[0], 12)[0]
    assert any("end-of-sequence" in text for text in logs.audit(audited.folder, ends=(token,))[1])


def test_a_test_goes_on_without_a_worker_that_was_lost_before_it(tmp_path):
    servers = [own(slots=4) for _ in range(2)]
    settings = Settings(urls=tuple(server.url for server in servers), token=TOKEN, partial=True)
    servers[0].cut()
    test = planned(tmp_path, "Offline", name="after", engine="http", settings=settings, warm_up=[])
    try:
        outcome = run(test)
    finally:
        servers[1].cut()
    record = outcome.facts["dispatch"]
    assert not outcome.table["failed"].any() and set(outcome.table["worker"]) == {1}
    assert [row["state"] for row in record["workers"]] == ["down", "up"]
    assert {row["worker"] for row in record["inflight"] if row["open"]} == {1}
    assert logs.detail(test.folder)["sut_name"] == "Network SUT: 2 servers"
    said = workers.sentences({name: [{"test": "after", **row} for row in record[name]] for name in workers.TABLES})
    assert said == [
        f"after: worker {servers[0].url} was not there and did not come back; no query had to be sent again."
    ]


FAULTS = ("killed", "hung", "restarted", "garbage", "half", "slow")


@pytest.fixture(scope="module")
def embedded():
    """Two engines of the embedded model in fp32, which workers share, and what one of them answers undisturbed."""
    pair = [engines.make("static", Settings(model="tiny", slots=8, threads=1)) for _ in range(2)]
    for engine in pair:
        engine.start()
    client = Client(pair[0], PROMPTS, 12, 60)
    assert not client.at_once(SAMPLES)["failed"].any()
    yield pair, client.answers
    for engine in pair:
        engine.stop()


def over_two_workers(fault, kind, pair, folder):
    """Run LoadGen over two workers of which the first has a fault; return its test and what it left."""
    one, other = ({"engine": engine} if engine else {"step_s": 0.02, "slots": 2} for engine in pair)
    first = (
        Faulty(lambda number: fault if number % 4 == 2 else "", pair[0])
        if fault in ("garbage", "half", "slow")
        else own(**one)
    )
    second, go_on, over = own(**other), threading.Event(), threading.Event()

    def disturb():
        had = 0  # requests that it had: it breaks when one has just come, else it might have nothing to lose
        while not over.is_set() and (first.server.counts["ok"] < 5 or first.server.open <= had):  # 1 ok is its greeting
            had = first.server.open
            time.sleep(0.001)
        if fault == "hung":  # it takes connections and answers nothing, as a process after SIGSTOP
            first.loop.call_soon_threadsafe(go_on.wait)
        else:
            first.cut()
        if fault == "restarted":
            back.append(own(port=first.port, **one))

    back, disturber = [], threading.Thread(target=disturb)
    if not isinstance(first, Faulty):
        disturber.start()
    settings = Settings(urls=(first.url, second.url), token=TOKEN, slots=2)
    scenario, mode = ("Offline", "AccuracyOnly") if kind == "accuracy" else (kind, "PerformanceOnly")
    test = planned(
        folder / fault, scenario, mode=mode, engine="http", settings=settings, warm_up=[], deadline_s=60, limit_s=60
    )
    try:
        return test, run(test)
    finally:
        over.set()
        if fault == "hung":
            go_on.set()
            time.sleep(0.5)  # it takes the connections that came meanwhile, and finds them closed
        if not isinstance(first, Faulty):
            disturber.join()
        for server in (getattr(first, "hosted", first), second, *back):
            if not server.loop.is_closed():
                server.cut()


@pytest.mark.parametrize("kind", ["Offline", "Server", "accuracy"])
def test_no_fault_of_a_worker_loses_a_query_or_changes_an_answer(kind, tmp_path, request):
    """All faults at once, each with two workers and a LoadGen of its own: they mostly wait.

    The accuracy runs are answered by the embedded model in fp32, token for token as in an undisturbed run.
    """
    pair, expected = request.getfixturevalue("embedded") if kind == "accuracy" else ((None, None), {})
    with ThreadPoolExecutor() as pool:
        runs = pool.map(lambda fault: over_two_workers(fault, kind, pair, tmp_path), FAULTS)
        ended = dict(zip(FAULTS, runs, strict=True))
    for fault, (test, outcome) in ended.items():
        table, record = outcome.table, outcome.facts["dispatch"]
        assert len(table) >= SAMPLES and len(set(table["query"])) == len(table), fault
        assert not table["failed"].any() and outcome.errors == [] and outcome.repeated == 0, (fault, outcome.errors)
        assert logs.detail(test.folder)["num_errors"] == 0, fault
        assert set(table["worker"]) == {0, 1} and (table["attempt"].max() > 1) == (fault != "slow"), fault
        again = [row["times"] for row in record["losses"] if row["event"] == "requeued"]
        assert sum(again) == (table["attempt"] - 1).sum(), fault
        moved = {row["event"] for row in record["losses"]}
        # An answer of nonsense comes from a worker that is there; one that broke off is asked for its health first.
        wanted = {"killed": {"down"}, "hung": {"down"}, "restarted": {"down", "up"}, "half": {"down", "up"}}
        # The few answers of the embedded model may all be there before a worker is up again.
        late = {"up"} if kind == "accuracy" else set()
        assert wanted.get(fault, set()) - late <= moved and (moved == set()) == (fault == "slow"), (fault, moved)
        assert kind != "accuracy" or logs.answers(test.folder) == expected, fault
    assert len(set(map(tuple, expected.values()))) > SAMPLES // 4 or not expected, "answers differ"


def test_loadgen_over_servers_that_are_all_killed_ends_and_counts(tmp_path):
    servers = [own(step_s=0.03) for _ in range(2)]
    program = child("http", tmp_path, "60", "60", *(server.url for server in servers))
    while servers[0].server.counts["ok"] < 5 and program.poll() is None:
        time.sleep(0.001)
    for server in servers:
        server.cut()
    out, err = program.communicate(timeout=300)
    assert re.search(r"[1-9]\d* of 64 queries failed \(the first: no worker was left for 0.3 s", out), err
    assert "twice" not in out


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("*.Server.target_qps=300", "ignored"),
        ("*.Server.target_qsp = 300", "ignored"),
        ("*.Server.target_qps = 5s", "code -22"),
    ],
)
def test_lines_that_loadgen_ignores_are_found(tmp_path, line, reason):
    """A typing error in the conf is silent in LoadGen: what was read back tells."""
    conf = rules.Conf("Server", rules.MODEL, line + chr(10), {"server_target_qps": 300.0})
    test = planned(tmp_path, conf=conf)
    assert reason in loadgen.perform(test, lambda done, rss: None).reason


@pytest.mark.parametrize("scenario", ["Offline", "Server", "Interactive", "SingleStream"])
def test_the_real_rules_are_those_of_the_embedded_conf(tmp_path, scenario):
    """With rules=mlperf the conf names the target alone, and LoadGen has all that the kit's table of rules says."""
    config = InferenceConfig(rules="mlperf", data="cnn_dailymail", samples=0, model="meta-llama/Llama-3.1-8B-Instruct")
    conf = rules.Conf.of(config, scenario, rules.SET)
    assert conf.expected["min_duration_ms"] == 600_000 and len(conf.text.splitlines()) == 1
    test = planned(tmp_path, scenario, config, conf=conf, limit_s=0.1)
    assert loadgen.perform(test, lambda done, rss: None).reason.startswith("the test did not end within")


def test_what_is_reduced_is_listed_and_nothing_else():
    rows = {(row["rule"]): (row["MLPerf"], row["this run"]) for row in rules.reduced(QUICK, "Server", SAMPLES)}
    assert rows["least queries"] == ("100", "64") and rows["percentile"] == ("p99", "p90") and "TTFT limit" not in rows
    full = InferenceConfig(rules="mlperf", data="cnn_dailymail", samples=0, model="meta-llama/Llama-3.1-8B-Instruct")
    assert all(rules.reduced(full, scenario, rules.SET) == [] for scenario in ("Offline", "Server", "Interactive"))
    assert full.scope() == "" and "_reduced" in QUICK.scope() and "_sim" in QUICK.scope()


def test_the_plan_says_how_many_queries_a_percentile_takes():
    tight = QUICK.model_copy(update={"percentile": 99.0, "min_queries": 100})
    row = rules.plan(tight, "Server", 50)
    assert row["queries needed"] == 459 and row["enough"] == "no: raise min_queries to 459"
    assert rules.queries_issued(tight, "Server", 50) == 100
    full = InferenceConfig(rules="mlperf", data="cnn_dailymail", samples=0, model="m", server_qps=30)
    assert rules.queries_issued(full, "Server", rules.SET) == 2 * rules.SET  # 18,000 in whole sets


@pytest.mark.parametrize(
    ("queries_least", "seconds", "latency", "sent"),
    [
        (64, 0.2, 0.5, 96),
        (64, 0.2, 0.002, 224),
        (10, 0.2, 0.5, 32),
        (33, 0.2, 0.5, 64),
        (100, 0.01, 0.5, 128),
        (32, 0.5, 0.01, 128),
    ],
)
def test_single_stream_is_planned_as_loadgen_sends_it(queries_least, seconds, latency, sent):
    """The numbers are those that LoadGen 6.0.17 sent of a set of 32."""
    asked = QUICK.model_copy(
        update={"min_queries": queries_least, "min_duration_s": seconds, "expected_latency_s": latency}
    )
    assert rules.queries_issued(asked, "SingleStream", SAMPLES) == sent


def test_the_plan_is_told_before_the_run_and_has_to_fit_the_budget():
    real = {"rules": "mlperf", "data": "cnn_dailymail", "samples": 0, "model": "m", "scenarios": ["Offline", "Server"]}
    config = InferenceConfig(**real, server_qps=30, budget_s=3600)
    text = config.expected_work()
    # 600 s at least of Offline; 18,000 queries of Server in whole sets at 30/s are 26,736 / 30 = 891 s.
    assert "24 min 51 s at least: Offline 13,368 queries in 11 min 8 s, Server 26,736 queries in 14 min 51 s" in text
    config.check_whole()
    with pytest.raises(
        ValueError, match=r"budget_s = 900: the tests alone take 24 min 51 s .* set budget_s=\d+, or rules=reduced"
    ):
        InferenceConfig(**real, server_qps=30, budget_s=900).check_whole()


def test_names_say_what_the_workers_are_and_that_they_were_reached_over_a_network():
    far = InferenceConfig(workers=["http://a:8000"])
    assert far.scope() == "_tiny_mininews_network_reduced"
    assert far.scope({"model": "sim", "engine": "sim"}) == "_tiny_mininews_sim_network_reduced"
    assert far.scope({"model": "meta/Other-1B"}) == "_other_1b_mininews_network_reduced"
    text = InferenceConfig(workers=["http://a:8000"], tokens="text")
    assert text.scope() == "_tiny_mininews_network_text_reduced"
    for wrong in (
        {"tokens": "text"},
        {"tokens": "text", "workers": ["http://a"], "audit": True},
        {"workers": ["http://a", "http://a:80"]},
    ):
        with pytest.raises(ValueError, match=r"tokens = text|one server"):
            InferenceConfig(**wrong)


def test_workers_are_met_before_the_run_and_serve_the_model_that_makes_the_prompts():
    sim, other = own(), own(name="another")
    tokenizer = lambda text: {"input_ids": [1, 2]}  # noqa: E731
    try:
        config = InferenceConfig(workers=[sim.url])
        says, limits = workers.meet(config, Settings(urls=(sim.url,), token=TOKEN), tokenizer)
        assert says["engine"] == "sim" and limits == []
        other.server.kind = "static"
        config = InferenceConfig(workers=[other.url])
        with pytest.raises(
            UserError, match=r"model = tiny makes the prompts, and .* models tiny and another: set model"
        ):
            workers.meet(config, Settings(urls=(other.url,), token=TOKEN), tokenizer)
        config = InferenceConfig(workers=[other.url], served_model="another")
        facts = {name: value for name, value in vars(BIG).items() if not name.endswith("_per_s")}
        other.engine.facts.update(facts)
        other.server.peaks = lambda: (100e9, 10e12)
        settings = Settings(urls=(other.url,), token=TOKEN, served_model="another")
        says, limits = workers.meet(config, settings, tokenizer)
        assert says["model"] == "another" and limits == [BIG], "it says what its model reads, and measures its machine"
        with pytest.raises(UserError, match="it serves another and not x: correct served_model"):
            workers.meet(config, Settings(urls=(other.url,), token=TOKEN, served_model="x"), tokenizer)
    finally:
        sim.cut()
        other.cut()


def peak_runs(monkeypatch, highest):
    """Run the search for the peak with a system that is VALID up to a rate; LoadGen's search always finds 40."""
    from benchlib.benchmarks.inference import run as bench_run  # with torch: too slow for the programs above

    rates = []
    monkeypatch.setattr(
        bench_run, "_test", lambda bench, name, *_, server_qps=0: SimpleNamespace(name=name, folder="", qps=server_qps)
    )
    monkeypatch.setattr(bench_run, "_perform", lambda bench, test: test)
    monkeypatch.setattr(
        bench_run,
        "_tested",
        lambda bench, test, *_: SimpleNamespace(table=[0] * 64, samples_per_s=test.qps, qps=test.qps),
    )
    monkeypatch.setattr(bench_run, "why_invalid", lambda tested: [] if tested.qps <= highest else ["too slow"])
    monkeypatch.setattr(bench_run, "_add", lambda bench, name, tested: rates.append(tested.qps))
    monkeypatch.setattr(logs, "detail", lambda folder: {"messages": ["Found peak performance field: 40.0"]})
    bench = bench_run._Bench(QUICK, None, None, None, None)
    bench_run._find_peak(bench)
    return bench, rates, bench_run.PEAK_TRIES


def test_a_peak_that_a_whole_run_does_not_confirm_is_lowered_until_one_does(monkeypatch):
    bench, kept, _ = peak_runs(monkeypatch, highest=33)
    assert [row["rate"] for row in bench.tables["peak"]] == [40, 36, 32.4] and kept == [32.4]
    assert bench.metrics[0].value == 32.4 and "search found 40" in bench.metrics[0].reason
    bench, kept, tries = peak_runs(monkeypatch, highest=1)
    assert len(bench.tables["peak"]) == tries and bench.metrics[0].provenance == "not_available"


def test_a_test_that_does_not_end_leaves_those_before_it_and_a_verdict():
    from benchlib.benchmarks.inference import run as bench_run

    bench = bench_run._Bench(QUICK, None, None, None, None)
    bench_run._lost(bench, "Server", "Server", "no worker is left")
    [row] = bench.tables["tests"]
    check = _valid(row)
    assert check.status == "FAIL" and check.reason == "it did not end: no worker is left"
    assert {metric.provenance for metric in bench.metrics} == {"not_available"}
    values = bench_run._Bench(QUICK, None, None, None, None)
    table, log = answered([-1], 3, 2, 1.0, 2.0), {"result_validity": "VALID"}
    bench_run._add(values, "Server", measures.Tested("Server", table, log, rules.RULES["Server"], 0, [], {}, False))
    assert set(row) == set(values.tables["tests"][0]), "the row has every column of a test that ended"


def test_a_lost_worker_is_told_in_the_terminal_and_once_above_the_fold(monkeypatch):
    from benchlib.benchmarks.inference import run as bench_run

    dispatched = {
        "workers": [{"worker": 0, "url": "http://a"}, {"worker": 1, "url": "http://b"}],
        "losses": [{"worker": 1, "t_s": 2.5, "event": "down", "times": 1}, {"worker": 1, "t_s": 2.5, "event": "requeued", "times": 3}],
    }  # fmt: skip
    outcome = SimpleNamespace(skipped=False, reason="", facts={"engine": {}, "dispatch": dispatched})
    monkeypatch.setattr(bench_run.loadgen, "perform", lambda *_: outcome)
    said = []
    emit = lambda kind, **values: said.append(values["message"]) if kind == "log" else None  # noqa: E731
    bench = bench_run._Bench(QUICK, None, SimpleNamespace(emit=emit), None, None)
    for name in ("Offline", "Server"):
        bench_run._perform(bench, SimpleNamespace(name=name, sent=1, engine="http", repeated=[]))
        dispatched.clear()  # nothing is lost in the second
    words = "Offline: worker http://b was lost after 2.5 s and did not come back; 3 queries were sent again to others."
    assert said == [f"Workers were lost. {words}"]
    result = Result.of(QUICK, status="complete", tables=bench.tables, facts={})
    above = [*view.warnings(QUICK, result), *reading(SimpleNamespace(config=QUICK, result=result))]
    assert sum(words in sentence for sentence in above) == 1


def test_the_picture_of_the_slowest_query_says_how_often_it_was_sent():
    from benchlib.benchmarks.inference import run as bench_run
    from benchlib.benchmarks.inference.figures import FIGURES

    bench, table = bench_run._Bench(QUICK, None, None, None, None), answered([0, 0, 0], 3, 2, 1.0, [2.0, 3.0, 5.0])
    for attempt, words in ((1, ""), (2, ", sent 2 times")):
        bench.tables.clear()
        table["attempt"][2] = attempt
        bench_run._timeline(bench, SimpleNamespace(scenario="Server", table=table))
        title = FIGURES["query-timeline"](SimpleNamespace(result=SimpleNamespace(tables=bench.tables))).alt
        assert "Slowest query (Server): 5" in title and ("sent" in title) == bool(words) and words in title


def test_a_search_for_the_peak_takes_probes_in_which_a_queue_shows():
    values = {"scenarios": ["Server"], "find_peak": True, "ttft_limit_s": 0.2}
    with pytest.raises(ValueError, match="no queue reaches the limit"):
        InferenceConfig(**values, min_duration_s=0.9)
    assert InferenceConfig(**values, min_duration_s=1.0).find_peak


def test_a_prefix_cache_is_noticed():
    row = {"engine": "continuous", "tokens": 384, "fresh_s": [0.02, 0.021, 0.02], "repeated_s": [0.022, 0.02, 0.01]}
    assert _prefix_cache(row).status == "PASS"
    assert _prefix_cache({**row, "repeated_s": [0.03, 0.004, 0.01]}).status == "FAIL"


def test_a_prefix_cache_that_is_switched_on_is_noticed_at_the_engine_itself():
    """By the run's own probe: a repeated prompt of 384 tokens, in turns with fresh ones of the same length."""
    import torch

    torch.set_num_threads(1)
    prompts = np.random.default_rng(0).integers(3, 900, (loadgen.REPEATS, 384)).tolist()
    found = {}
    for shared in (False, True):
        engine = engines.make("continuous", Settings(model="tiny", slots=2, share_prefixes=shared))
        engine.start()
        try:
            loadgen._ask(engine, prompts[1:3], 2, together=True)
            times = loadgen._ask(engine, loadgen.in_turns(prompts), 2, together=False)
        finally:
            engine.stop()
        row = {"engine": "continuous", "tokens": 384, "repeated_s": times[2::3], "fresh_s": times[::3]}
        found[shared] = _prefix_cache(row).status, row
    assert found[False][0] == "PASS" and found[True][0] == "FAIL", found


def test_intervals_hold_the_value():
    times = np.arange(1, 201) / 100
    metric = percentile_metric("x_s", times, 0.9, "s", "")
    assert (metric.value, metric.n) == (1.81, 200) and metric.ci_low < 1.81 < metric.ci_high
    # Of 200 binomial draws at 0.9 the middle 95% are 171 to 188.
    assert (metric.ci_low, metric.ci_high) == (1.71, 1.89)
    # All n lie below p99 with 0.99^n: 53% of 64, 2.50% of 367 and 2.48% of 368. An end holds with 97.5% or is none.
    few, short, enough = (percentile_metric("x_s", np.arange(1.0, n + 1), 0.99, "s", "") for n in (64, 367, 368))
    # Of 64: P(3 or more above p99) = 2.6%, P(4 or more) = 0.4%, so that 61 of them lie below it with 97.5%.
    assert (few.value, few.ci_low, few.ci_high) == (64, 61, None) and "largest" in few.reason
    assert (short.ci_high, enough.ci_high) == (None, 368) and interval(few) == "at least 61.00 s"
    table = np.zeros(100, queries.QUERY)
    table["scheduled_s"], table["last_s"], table["tokens"] = 0, np.arange(1, 101) / 10, 7
    rate = rate_metric("r", table, table["tokens"].astype(float), "tokens/s", "")
    assert rate.value == pytest.approx(70) and rate.ci_low <= 70 <= rate.ci_high


BIG = bounds.Bound(10, 10e9, 1e6, 5e9, 100e9, 10e12)  # 10 GB of weights, 1 MB of cache a token; 100 GB/s, 10 TFLOP/s


def answered(workers, prompt_tokens, tokens, first_s, last_s):
    table = np.zeros(len(workers), queries.QUERY)
    table["worker"], table["prompt_tokens"], table["tokens"] = workers, prompt_tokens, tokens
    table["first_s"], table["last_s"] = first_s, last_s
    return table


def test_shares_of_the_bounds_are_those_by_hand():
    table = answered([-1, -1], 95, 10, 1.0, [1 + 9 * 0.202, 1 + 9 * 0.404])
    tests = [
        {"test": name, "scenario": name, "engine": engine}
        for name, engine in (("Server", "own"), ("Offline", "own"), ("SingleStream", "other"))
    ]
    probes = [
        {"engine": "own", "tokens": 100, "fresh_s": [0.2, 0.4]},
        {"engine": "other", "tokens": 100, "fresh_s": [0.2]},
    ]
    tables = dict.fromkeys(("Server", "Offline", "SingleStream"), table)
    made = list(bounds.shares(tests, tables, probes, {"own": [BIG]}, "_x"))
    # Prefill: 2 x 5e9 x 100 / 1e13 = 0.1 s. Decoding: (10e9 + 100 x 1e6) / 1e11 = 0.101 s.
    assert {metric.name: pytest.approx(metric.samples) for metric in made} == {
        "prefill_share_own_x": [0.5, 0.25],
        "decode_share_server_x": [0.5, 0.25],
    }
    # At two workers each query has the bound of its own: the second has half the bandwidth.
    slow = dataclasses.replace(BIG, bytes_per_s=50e9)
    table = answered([0, 1], 95, 10, 1.0, 1 + 9 * 0.404)
    [share] = bounds.shares(tests[:1], {"Server": table}, [], {"own": [BIG, slow]}, "")
    assert share.samples == pytest.approx([0.25, 0.5])


def test_the_least_time_of_offline_is_that_of_all_workers_together():
    """Decoding 100e9 / (10e9 / 10 + 100 x 1e6) = 90.9 tokens/s, prefill 1e13 / 1e10 = 1000 tokens/s."""
    table = answered([0, 1], 95, 10, np.nan, 2.0)
    alone = 20 / (100e9 / 1.1e9) + 190 / 1000  # s
    for each, least in (([BIG], alone), ([BIG, BIG], alone / 2)):
        decode, prefill, share = bounds.offline(each, table, "", "_x")
        assert decode.value == pytest.approx(len(each) * 100e9 / 1.1e9) and prefill.value == 1000 * len(each)
        assert (share.name, share.value) == ("roofline_share_offline_x", pytest.approx(least / 2))
    missing = list(bounds.offline([], table, "the engine is silent", "_x"))
    assert {metric.provenance for metric in missing} == {"not_available"} and missing[
        0
    ].reason == "the engine is silent"
    facts = {**vars(BIG), "flop_per_s": float("nan")}
    assert bounds.Bound.of(vars(BIG)) == BIG and bounds.Bound.of(facts) is None and bounds.Bound.of({}) is None


def test_pictures_show_requests_in_flight_with_losses_and_earlier_runs(tmp_path):
    """A run folder is copied; of both runs and of the lost worker the pictures say the numbers."""
    from benchlib.benchmarks.inference.figures import FIGURES
    from benchlib.core.run_folder import record_files
    from benchlib.results.run import Run

    demo = next(path for path in (home() / "notebooks" / "demo-runs").glob("*/*") if (path / "result.json").exists())
    day = tmp_path / demo.parent.name
    for number, seconds in enumerate((10.0, 12.5)):
        folder = day / f"{demo.name[:-2]}{number:02d}"
        shutil.copytree(demo, folder)
        result = json.loads((folder / "result.json").read_text())
        result["started_at"] += number
        [total] = [metric for metric in result["metrics"] if metric["name"] == "total_s"]
        total.update(value=seconds, n=1, ci_low=None, ci_high=None)
        (folder / "result.json").write_text(json.dumps(result))
        record_files(folder)  # the copies were changed on purpose
    picture = over_runs("total_s")(Run(folder))
    assert "over 2 runs" in picture.alt and "12.5" in picture.alt and "10" in picture.alt
    assert over_runs("total_s")(SimpleNamespace()).empty

    rows = [
        {"test": name, "t_s": t, "worker": w, "open": 4 - 4 * w}
        for name in ("Offline", "Server")
        for t in (0, 1)
        for w in (0, 1)
    ]
    lost = [
        {"test": "Server", "t_s": 0.5, "worker": 0, "event": "down", "times": 1, "reason": "gone"},
        {"test": "Server", "t_s": 0.5, "worker": 0, "event": "requeued", "times": 7, "reason": "gone"},
        {"test": "Server", "t_s": 0.0, "worker": 1, "event": "down", "times": 1, "reason": "absent"},
        {"test": "Server", "t_s": 0.25, "worker": 1, "event": "up", "times": 1, "reason": ""},
    ]
    state = [{"test": "Server", "worker": w, "url": f"http://{w}"} for w in (0, 1)]
    shown = SimpleNamespace(result=SimpleNamespace(tables={"inflight": rows, "losses": lost, "workers": state}))
    picture = FIGURES["in-flight"](shown)
    assert [axes.get_title("left") for axes in picture.axes] == ["Server"], "the tests that lost one"
    assert "Workers lost: 1, queries sent again: 7" in picture.alt and "http://0 was lost after 0.5 s" in picture.alt
    [axes] = picture.axes
    spans = [[(x, y) for x, y in each.get_segments()[0]] for each in axes.collections]
    assert [[x for x, _ in span] for span in spans] == [[0.5, 1], [0, 0.25]]
    highest, legend = max(y for span in spans for _, y in span), axes.get_legend().get_window_extent()
    assert len({y for span in spans for _, y in span}) == 2 and axes.transData.transform((0, highest))[1] < legend.y0
    assert FIGURES["in-flight"](SimpleNamespace(result=SimpleNamespace(tables={}))).empty


def test_utilization_is_that_of_the_test_alone(server):
    mine = dataclasses.replace(ended(*server), log={"began": 100.0, "ended": 110.0})
    events = [
        {"kind": "sensor", "t": time, "cpu_percent": value}
        for time, value in ((99, 7), (101, 50), (105, 70), (109, 60), (111, 9))
    ]
    device, cpu = measures._utilization(mine, events, "_x", {})
    assert (cpu.name, cpu.value, cpu.n) == ("cpu_utilization_x", 60, 3)
    assert device.value is None and "no reading" in device.reason


def test_energy_is_that_between_begin_and_end_and_only_of_this_machine():
    """100 W for 3.8 s are 380 J, whatever second the counter was read in."""
    events = [{"kind": "sensor", "t": t, "energy_j": 1000 + 100 * t} for t in range(95, 115)]
    assert measures._energy_j(events, 100.3, 104.1) == pytest.approx(380)
    assert measures._energy_j(events, 100.3, 114.5) is None and measures._energy_j(events, 94.0, 99.0) is None
    assert measures._energy_j(events[:1], 95.0, 95.0) is None
    own, near, far = (InferenceConfig(workers=urls) for urls in ([], ["http://127.0.0.1:8000"], ["http://a:8000"]))
    assert [set(measures._not_seen(config)) for config in (own, near, far)] == [
        set(),
        {"process"},
        {"process", "machine"},
    ]


VALID = {"scenario": "Server", "valid": True, "errors": 0, "samples_per_s": 44.0, "raw_samples_per_s": 44.0}


@pytest.mark.parametrize(
    ("claim", "rule"),
    [
        ({"loadgen": {**VALID, "errors": 50}}, "LoadGen errors"),
        ({"loadgen": {**VALID, "samples_per_s": 427.5}}, "LoadGen rate"),
        ({"latencies": [{"name": "TTFT", "percentiles_s": {99: 0.0}, "of_tokens": True}]}, "tokens take time"),
        ({"latencies": [{"name": "TPOT", "percentiles_s": {99: -0.0021}, "of_tokens": True}]}, "no time below zero"),
    ],
)
def test_what_loadgen_calls_valid_and_cannot_be_is_refused(claim, rule):
    """The cases were printed by LoadGen 6.0.17: no first token, one token, two completions, the last issued query first."""
    honest = Claim(loadgen=LoadGen(**VALID), latencies=[Latency(name="TTFT", percentiles_s={99: 0.1}, of_tokens=True)])
    assert not [judgement for judgement in judge_claims([honest]) if judgement.status == "FAIL"]
    failed = [
        judgement.rule.name for judgement in judge_claims([Claim.model_validate(claim)]) if judgement.status == "FAIL"
    ]
    assert failed == [rule]


def test_a_log_without_an_end_is_no_result(tmp_path):
    with pytest.raises(RunBroken, match="no end of its log"):
        logs.detail(tmp_path)


if __name__ == "__main__":
    sys.modules["test_inference"] = sys.modules["__main__"]
    engine, folder, limit_s, deadline_s, *urls = sys.argv[1:]
    mine = planned(Path(folder), engine=engine, limit_s=float(limit_s), deadline_s=float(deadline_s))
    if urls:
        mine = dataclasses.replace(mine, settings=Settings(urls=tuple(urls), token=TOKEN))
        dispatch.Policy = functools.partial(dispatch.Policy, probe_s=0.1, probe_limit_s=0.3, gone_s=0.3)
    try:
        outcome = in_process(mine)
    except KeyboardInterrupt:
        os._exit(130)
    result = ended(mine, outcome)
    print(result.log["result_validity"], *why_invalid(result), sep="; ", flush=True)
    os._exit(0)
