"""LoadGen against engines that misbehave, rules read back from it, and the cases in which it prints VALID for nonsense."""

import dataclasses
import gc
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import binom

pytest.importorskip("mlperf_loadgen", reason="pip install -e '.[inference]'")

from llm_servers import LONG_S, TOKEN, Faulty, own

from benchlib.benchmarks.inference import loadgen
from benchlib.benchmarks.inference import run as bench_run
from benchlib.benchmarks.inference.config import PRELOAD, SET, InferenceConfig
from benchlib.benchmarks.inference.spec import SPEC
from benchlib.core.errors import RunBroken
from benchlib.core.stats import early_stopping_estimate, loadgen_percentile, queries_needed
from benchlib.judge.compare import RunSet
from benchlib.judge.cost import Machine, worth
from benchlib.judge.numbers import judged
from benchlib.results.record import Record
from benchlib.results.run import Result
from benchlib.runtime import child
from benchlib.spec import checks
from benchlib.spec.tables import Rows
from benchlib.workloads.llm import engines, load
from benchlib.workloads.llm.engines import Policy, Settings, Sim

SAMPLES = 32
QUICK = InferenceConfig(
    engine="sim", samples=SAMPLES, server_qps=200, expected_qps=400, expected_latency_s=0.02, min_duration_s=0.05
)
REAL = InferenceConfig(
    rules="mlperf", data="cnn_dailymail", samples=0, model="meta-llama/Llama-3.1-8B-Instruct", server_qps=30
)
PROMPTS = [[5, 6, 7 + row] for row in range(SAMPLES)]
EXPECTED = {row: engines.sim_answer(ids, 12) for row, ids in enumerate(PROMPTS)}


def planned(folder, scenario="Server", config=QUICK, **more):
    values = {"settings": Settings(step_s=0.001, slots=16), "prompts": PROMPTS, "warm_up": [[3, 4]], "limit_s": LONG_S}
    changed = {"deadline_s": more.pop("deadline_s", LONG_S), "engine": more.pop("engine", config.engine)}
    config = config.model_copy(update={"max_new": 12} | changed)
    return loadgen.Test(scenario, config, folder=folder / scenario, **values | more)


def broken(tested):
    """The rules that a test breaks, but for those of a client that a busy machine made late."""
    return set(loadgen.broken(list(loadgen.validity(tested)))) - {"late_client", "client_rate", "busy_client"}


def perform(test):
    return loadgen.perform(test, lambda _: None)


class Misbehaves(Sim):
    """An engine with a fault, which the name of its model says."""

    def submit(self, query):
        fault, warm_up, done = self.settings.model, query.ids == [3, 4], query.on_done
        if fault == "silent" and not warm_up:
            return
        if fault == "no first token":
            query.on_first = lambda *_: None
        if fault == "twice":
            query.on_done = lambda *answer: (done(*answer), done(*answer))
        query.max_new = 1 if fault == "one token" else query.max_new
        super().submit(query)


def measured(test, tell):
    engines.ENGINES["misbehaves"] = f"{__name__}:Misbehaves"
    return loadgen.measured(test, tell)


@pytest.mark.parametrize(
    ("fault", "deadline_s", "breaks"),
    [
        ("one token", LONG_S, {"errors", "short_answers"}),
        ("no first token", LONG_S, {"errors", "no_first_token"}),
        ("twice", LONG_S, {"repeated"}),
        ("silent", 0.3, {"failed"}),
    ],
)
def test_engines_that_misbehave_are_invalid_though_loadgen_says_valid(fault, deadline_s, breaks, tmp_path):
    settings = Settings(model=fault, step_s=0.001, slots=16)
    patient = QUICK.model_copy(update={"ttft_limit_s": 60.0, "tpot_limit_s": 10.0})  # whatever else runs here
    test = planned(tmp_path, config=patient, engine="misbehaves", settings=settings, deadline_s=deadline_s)
    child.serve(PRELOAD)
    process = child.run(measured, test, timeout_s=LONG_S, tell=lambda _: None)
    assert process.status == "done", process.reason
    mine = process.value
    assert mine.log["result_validity"] == "VALID" and broken(mine) == breaks


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    return perform(planned(tmp_path_factory.mktemp("server")))


def test_a_server_run_of_sim_is_valid_and_its_times_are_loadgens(server):
    assert broken(server) == set()
    assert server.log["result_validity"] == "VALID" and len(server.table) == 64
    first = np.sort(load.each_s(server.table)["ttft"])
    stated = server.log["result_first_token_50.00_percentile_latency_ns"] * 1e-9
    assert loadgen_percentile(first, 0.5) == pytest.approx(stated, abs=5e-3)
    assert load.lateness_s(server.table).min() >= 0


INVALID = {"result_validity": "INVALID", "early_stopping_met": False}
LATE_ANSWERS = {"rows": slice(None, None, 5), "first_s": 3, "last_s": 3}


def changed(tested, log=(), rows=slice(None), count=None, facts=(), **seconds):
    """A test after changes to its log, its facts, the number of its queries, and the times of some of them."""
    table = tested.table[:count].copy()
    for name, more in seconds.items():
        table[name][rows] += more
    values = {"log": {**tested.log, **dict(log)}, "facts": {**tested.facts, **dict(facts)}}
    return dataclasses.replace(tested, table=table, **values)


@pytest.mark.parametrize(
    ("change", "rule", "measured", "limit"),
    [
        ({"rows": slice(None, None, 10), "issued_s": 1.0}, "late_client", 1.0, 0.2),
        ({"count": 63}, "miscounted", 1, 0),
        ({"facts": {"driver_cpu_share": 0.97}}, "busy_client", 0.97, 0.9),
        ({"log": {"result_completed_samples_per_sec": 2e6}}, "stated_rate", None, 1.2),
        ({"log": INVALID}, "loadgen", 1, 0),
        # p90 takes 44 queries if none is late, and 236 with 13 (exact binomial).
        ({"count": 40, "log": INVALID}, "early_stopping", 44, 40),
        ({**LATE_ANSWERS, "log": INVALID}, "early_stopping", 236, 64),
        ({**LATE_ANSWERS, "log": INVALID}, "ttft_limit", None, 2),
        ({"rows": 3, "first_s": 1}, "all_at_once", 1, 0),
    ],
)
def test_a_rule_that_is_broken_has_its_row(server, change, rule, measured, limit):
    tested = changed(server, **change)
    (row,) = [row for row in loadgen.validity(tested) if row["rule"] == rule]
    assert row["limit"] == limit and (measured is None or row["measured"] == pytest.approx(measured, abs=0.2))
    assert rule in loadgen.broken([row])
    answer = next(check for check in judge(tables_of(tested)) if check.name == "valid Server")
    assert answer.status == "FAIL"


def test_early_stopping_judges_each_limit_on_its_own(server):
    """6 late by the first token and 7 others by the further tokens: LoadGen asks for what 7 late need, and not 13."""
    late = changed(server, log=INVALID, rows=slice(0, 6), first_s=2.5, last_s=2.5)
    late = changed(late, rows=slice(6, 13), last_s=5.0)
    (row,) = [row for row in loadgen.validity(late) if row["rule"] == "early_stopping"]
    needed = next(count for count in range(8, 500) if binom.cdf(7, count, 0.1) <= 0.01)
    assert row["measured"] == needed < 236  # of 13 (exact binomial)


def test_single_stream_states_the_estimate_of_loadgen(tmp_path):
    """Of 96 queries two may be late for p90: the second largest. LoadGen, which estimates the first token, discards as many."""
    tested = perform(planned(tmp_path, "SingleStream", settings=Settings(step_s=0.002, slots=1)))
    rows = {row["kind"]: row for row in loadgen.times(tested)}
    assert len(tested.table) == 96
    for row in rows.values():
        assert row["estimate_s"] == sorted(row["seconds"])[-2]
    assert "Would discard 1 highest" in tested.log["early_stopping_ttft_result"]
    metrics = {metric.name: metric for metric in SPEC.stated(rows_of({"times": list(rows.values())}))}
    assert metrics["latency_estimate_s_singlestream_x"].value == rows["latency"]["estimate_s"]
    few = next(row for row in loadgen.times(changed(tested, count=63)) if row["kind"] == "latency")
    assert few["estimate_s"] is None and "63 queries, 64 are needed" in few["why"]["estimate_s"]


@pytest.mark.parametrize("count", [64, 80, 97, 700])
def test_the_estimate_bounds_the_percentile_with_the_confidence(count):
    """Of n samples the one at place k is above p90 with P(Binomial(n, 0.9) < k); LoadGen takes the next after the least that has 99%."""
    samples = np.random.default_rng(0).permutation(count)
    place = next(k for k in range(1, count + 1) if binom.cdf(k - 1, count, 0.9) >= 0.99)
    assert early_stopping_estimate(samples, 0.9) == sorted(samples)[place]
    assert np.isnan(early_stopping_estimate(samples[:63], 0.9))


def test_servers_are_priced_one_by_one():
    """Two servers at 3.20 USD are 6.40 USD an hour; 100 tokens/s are 360,000 in it."""
    servers = [own(), own()]
    config = InferenceConfig(workers=[server.url for server in servers], scenarios=["Offline"])
    emit = SimpleNamespace(emit=lambda *_, **__: None)
    bench = bench_run.Bench(SimpleNamespace(config=config, events=emit), config, SimpleNamespace(prompts=PROMPTS), {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BENCHLIB_TOKEN", TOKEN)
        bench_run._meet(bench)
    for server in servers:
        server.cut()
    row = {
        "test": "Offline",
        "valid": True,
        "broken": [],
        "tokens_per_s": 100.0,
        "tokens_low": 90.0,
        "tokens_high": 110.0,
    }
    stated = SPEC.stated(rows_of({"tests": [row], "run": [bench.run | {"scope": "_x"}]}, config))
    result = Result.of(config, status="complete", metrics=stated, facts=bench.run, tables={})
    record = Record(benchmark="inference", tier="smoke", backend="cpu", run="r", result=result, fingerprint={})
    machines = [Machine(label, RunSet("r", (record,)), 3.2) for label in ("a", "b")]
    item = worth(machines)
    assert item["machines"][0]["devices"] == 2
    asked = {"config.workers": json.dumps(config.workers)}
    silent = record.model_copy(update={"fingerprint": asked, "result": result.model_copy(update={"facts": {}})})
    assert Machine("stored before it was stated", RunSet("r", (silent,)), 3.2).devices == 2
    (value,) = (row["values"][0]["value"] for row in item["rows"] if row["name"] == "usd_per_million")
    assert value == pytest.approx(6.4 / 0.36)


def test_loadgen_hears_of_a_first_token_before_its_query_ends():
    """A deadline passes while a first token is being reported: LoadGen, which forgets a query at its end, hears of both in order."""
    started, ended, heard = threading.Event(), threading.Event(), []

    def first(_):
        started.set()
        ended.wait(0.3)  # as long as the report takes, another thread ends the query if it can
        heard.append("first token")

    def end(_):
        heard.append("end")
        ended.set()

    lg = SimpleNamespace(FirstTokenComplete=first, QuerySamplesComplete=end, QuerySampleResponse=lambda *_: None)
    test = SimpleNamespace(scenario="Server", config=QUICK, prompts=PROMPTS)
    sut = loadgen.Sut(lg, test, None)
    sut.log.issue([1], [0], time.monotonic() - 1e4, [3])  # overdue
    token = threading.Thread(target=sut.on_first, args=(1, time.monotonic(), 5))
    token.start()
    assert started.wait(LONG_S)
    sut.expire()
    token.join()
    assert heard == ["first token", "end"]


def tables_of(tested):
    """The tables of a run with this test alone."""
    rows = list(loadgen.validity(tested))
    broken = loadgen.broken(rows)
    row = {"test": "Server", "engine": "sim", "percentile": 90.0, "valid": not broken, "broken": broken}
    row |= loadgen.row_of(tested, QUICK, [])
    return {"tests": [row], "validity": [row | {"detail": ""} for row in rows], "times": list(loadgen.times(tested))}


def rows_of(tables, config=QUICK):
    empty = {table.name: [] for table in SPEC.tables}
    return Rows(config, 1, empty | {"run": [{"scope": "_x", "total_s": 1.0, "startup_s": 1.0}]} | tables)


def judge(tables, config=QUICK):
    rows, _ = judged(SPEC.tables, rows_of(tables, config))
    asked = [check for check in SPEC.checks if check.when(config)]
    return [answer for check in asked for answer in checks.judge(check, rows, [])]


def test_an_invalid_test_has_rows_and_no_metrics(server, monkeypatch):
    monkeypatch.setattr(load, "client_limits", lambda *_: [])  # a busy machine makes the client late
    monkeypatch.setattr(loadgen, "BUSY", np.inf)
    # LoadGen takes the failed for answered: that explains its rate.
    failed = changed(server, {"result_completed_samples_per_sec": 64 / load.span_s(server.table)})
    failed.table["failed"] = np.arange(64) % 4 > 0
    assert broken(failed) == {"failed"} and tables_of(failed)["tests"][0]["samples_per_s"] > 0
    metrics, sound = (
        {metric.name: metric for metric in SPEC.stated(rows_of(tables_of(tested)))} for tested in (failed, server)
    )
    assert "not valid: failed queries" in metrics["ttft_p99_s_server_x"].reason
    assert {metric.value for name, metric in metrics.items() if "_server_" in name} == {None}
    first = sound["ttft_p99_s_server_x"]
    assert (first.value, first.n) == (loadgen_percentile(load.each_s(server.table)["ttft"], 0.99), 64)


def test_a_test_that_does_not_end_fails_and_leaves_the_others(monkeypatch, tmp_path):
    def broken_off(*_, **__):
        raise RunBroken("no worker is left")

    monkeypatch.setattr(bench_run, "_perform", broken_off)
    rank = SimpleNamespace(config=QUICK, run_dir=tmp_path)
    data = SimpleNamespace(prompts=PROMPTS)
    bench = bench_run.Bench(rank, QUICK, data, {"simulated": False})
    bench_run._performance(bench, "Server")
    bench_run._accuracy(bench)
    answers = {answer.name: answer for answer in judge(bench.tables)}
    assert answers["valid Server"].status == answers["accuracy complete"].status == "FAIL"
    assert all("no worker is left" in answers[name].reason for name in ("valid Server", "accuracy complete"))
    faults = judged(SPEC.tables, rows_of(bench.tables))[1]
    assert [fault for fault in faults if "in the facts" not in fault] == [], "what lacks says why"


FAULTS = ("killed", "hung", "restarted", "garbage", "half", "slow")


def over_two_workers(fault, folder):
    """Run LoadGen over two workers of which the first has a fault; return its test and what it left."""
    options, go_on, over = {"step_s": 0.02, "slots": 2}, threading.Event(), threading.Event()
    faulty = fault in ("garbage", "half", "slow")
    first = Faulty(lambda number: fault if number % 4 == 2 else "") if faulty else own(**options)
    second, servers = own(**options), [getattr(first, "hosted", first)]

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
            servers.append(own(port=first.port, **options))

    disturber = threading.Thread(target=(lambda: None) if faulty else disturb)
    disturber.start()
    patient = {f"{name}_s": LONG_S for name in ("deadline", "stall", "gone", "start")}
    policy = Policy(4, probe_s=0.05, probe_limit_s=2 if fault == "hung" else LONG_S, **patient)
    settings = Settings(urls=(first.url, second.url), token=TOKEN, policy=policy)
    test = planned(folder / fault, mode="AccuracyOnly", engine="http", settings=settings, warm_up=[])
    try:
        return test, perform(test)
    finally:
        over.set()
        if fault == "hung":
            go_on.set()
            time.sleep(0.5)  # it takes the connections that came meanwhile, and finds them closed
        disturber.join()
        for server in (*servers, second):
            if not server.loop.is_closed():
                server.cut()


# A server that is cut as SIGKILL does it may leave a connection that was just accepted to the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_fault_of_a_worker_loses_a_query_or_changes_an_answer(tmp_path):
    """All faults at once, each with two workers and a LoadGen of its own: they mostly wait."""
    with ThreadPoolExecutor() as pool:
        runs = pool.map(lambda fault: over_two_workers(fault, tmp_path), FAULTS)
        ended = dict(zip(FAULTS, runs, strict=True))
    gc.collect()
    for fault, (test, outcome) in ended.items():
        table, record = outcome.table, outcome.facts["dispatch"]
        assert len(table) >= SAMPLES and len(set(table["query"])) == len(table), fault
        assert not table["failed"].any() and outcome.errors == [] and outcome.repeated == 0, (fault, outcome.errors)
        log = outcome.log
        assert (log["num_errors"], log["sut_name"]) == (0, "Network SUT: 2 servers"), fault
        attempts, moved = table["attempt"], {row["event"] for row in record["losses"]}
        again = [row["times"] for row in record["losses"] if row["event"] == "requeued"]
        assert 1 in table["worker"] and sum(again) == (attempts - 1).sum(), fault
        # What was open when a worker was to break may have been answered before it broke: then there is nothing to notice.
        unseen = fault == "slow" or (fault in ("killed", "hung", "restarted") and attempts.max() == 1)
        assert unseen or attempts.max() > 1, fault
        assert unseen or "down" in moved, (fault, moved)
        assert fault != "slow" or (moved, attempts.max()) == (set(), 1)
        assert loadgen.answers(test.folder) == EXPECTED, fault


@pytest.mark.parametrize(("line", "reason"), [("qps=300", "ignored"), ("qps = 5s", "code -22")])
def test_lines_that_loadgen_ignores_are_found(tmp_path, line, reason):
    """A typing error in the conf is silent in LoadGen: what was read back tells."""
    import mlperf_loadgen

    text, file = f"*.Server.target_{line}\n", tmp_path / "user.conf"
    with pytest.raises(RunBroken, match=reason):
        loadgen.settings_of(mlperf_loadgen, "Server", file, text, {"server_target_qps": 300.0})


@pytest.mark.parametrize("scenario", ["Offline", "Server", "Interactive"])
def test_the_real_rules_are_those_of_the_embedded_conf(tmp_path, scenario):
    """With rules=mlperf the conf names the target alone, and LoadGen has all that the kit's table of rules says."""
    text, expected = REAL.conf(scenario)
    assert expected["min_duration_ms"] == 600_000 and len(text.splitlines()) == 1
    with pytest.raises(RunBroken, match="the test did not end within"):
        perform(planned(tmp_path, scenario, REAL, engine="sim", limit_s=0.1))


@pytest.mark.parametrize("over", [0, 3, 20])
def test_the_queries_needed_are_the_binomial_distribution_s(over):
    queries = queries_needed(0.97, over)
    assert binom.cdf(over, queries, 0.03) <= 0.01 < binom.cdf(over, queries - 1, 0.03)
    assert REAL.issued("Server") == 2 * SET  # 18,000 in whole sets


@pytest.mark.parametrize(
    ("queries_least", "seconds", "latency", "sent"),
    [(64, 0.2, 0.5, 96), (64, 0.2, 0.002, 224), (10, 0.2, 0.5, 32)],
)
def test_single_stream_is_planned_as_loadgen_sends_it(queries_least, seconds, latency, sent):
    """The numbers are those that LoadGen 6.0.17 sent of a set of 32."""
    values = {"min_queries": queries_least, "min_duration_s": seconds, "expected_latency_s": latency}
    assert QUICK.model_copy(update=values).issued("SingleStream") == sent


def test_the_process_that_waits_for_the_test_opens_no_device(monkeypatch):
    monkeypatch.setattr(bench_run.devices, "device", lambda *_: pytest.fail("a context beside the one of the test"))
    config = InferenceConfig(backend="cuda", engine="static")
    bench = SimpleNamespace(config=config, data=SimpleNamespace(prompts=[[5] * 9]))
    assert bench_run._settings(bench).device == "cuda"


def test_utilisation_is_of_the_readings_in_the_tests(monkeypatch):
    """Two of four cores are 50%, 2 of 8 GB are 25%; a reading before the tests does not count."""
    monkeypatch.setattr(bench_run, "usable_cores", lambda: 4)
    monkeypatch.setattr(bench_run.psutil, "virtual_memory", lambda: SimpleNamespace(total=8e9))
    sensor = {"kind": "sensor", "utilization_percent": 90.0}
    events = [sensor | {"t": 9.0, "cpu_percent": 400.0}, sensor | {"t": 10.0, "cpu_percent": 200.0}]
    events += [sensor | {"t": 11.0, "cpu_percent": None}, {"kind": "progress", "t": 10.5, "rss_bytes": 2e9}]
    for changes, device in (({}, None), ({"backend": "cuda"}, [90.0, 90.0]), ({"workers": ["http://far:1"]}, None)):
        rows = bench_run.usage(QUICK.model_copy(update={"backend": "cuda"} | changes if changes else {}), events, 10.0)
        assert [row.get("used") for row in rows] == [[50.0], device, [25.0]]
        assert bool(rows[1].get("why")) is (device is None)
    assert all("used" not in row and row["why"]["used"] for row in bench_run.usage(QUICK, events, 20.0))


def test_utilisation_is_a_mean():
    """A device that is busy in two of three seconds is used by 60%, and not by 90%."""
    rows = rows_of({"usage": [{"what": "device", "used": [90.0, 90.0, 0.0]}]})
    (metric,) = [metric for metric in SPEC.stated(rows) if metric.name.startswith("utilization_device")]
    assert metric.value == pytest.approx(60)


def test_energy_is_that_of_the_test_alone_and_not_of_workers_elsewhere():
    """100 W from 100.3 to 104.1 s are 380 J, whatever second the counter was read in."""
    events = [{"kind": "sensor", "t": t, "energy_j": 1000 + 100 * t} for t in range(95, 115)]
    log = {"began": 100.3, "ended": 104.1}
    assert loadgen._energy(QUICK, log, events)[0] == pytest.approx(380)
    far = InferenceConfig(workers=["http://a:8000"])
    for config, ended in ((far, 104.1), (QUICK, 114.5)):  # the counter was read until 114 s
        assert loadgen._energy(config, log | {"ended": ended}, events)[0] is None


SCORES = {
    "samples": 32, "answered": 32, "failed": 0, "errors": 0, "first": "", "splitter": "punkt", "gen_len": 8_167_644.0,
    "rouge1": 38.8, "rouge2": 16.0, "rougeL": 24.5, "rougeLsum": 35.8, "rouge1_shuffled": 20.0, "rouge1_lead": 19.0, "answer_tokens": 4096,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({}, ""),
        ({"answered": 31}, "accuracy complete"),
        ({"failed": 1}, "accuracy complete"),
        ({"rouge1_shuffled": 38.8}, "better than chance"),
        ({"rouge2": 15.7}, "reference rouge2"),
        ({"gen_len": 7e6}, "reference length"),
        ({"gen_len": 9.1e6}, "reference length"),
    ],
)
def test_answers_are_held_against_what_mlperf_asks_for(change, check):
    answers = judge({"accuracy": [SCORES | change]}, REAL)
    asked = [answer for answer in answers if not answer.name.startswith("valid")]
    assert {answer.name for answer in asked if answer.status != "PASS"} == ({check} if check else set())
    reduced = [answer for answer in judge({"accuracy": [SCORES]}) if answer.name.startswith("reference")]
    assert {(answer.status, answer.gates) for answer in reduced} == {("SKIPPED", False)} and len(reduced) == 5
