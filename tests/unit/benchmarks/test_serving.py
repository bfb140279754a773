"""The serving benchmark: what it makes of rates that were worked out by hand, and what its checks refuse."""

import json
import re
from types import SimpleNamespace

import pytest
from llm_servers import TOKEN, own

from benchlib.benchmarks.serving import judge, metrics, tables, view
from benchlib.benchmarks.serving import run as serving_run
from benchlib.benchmarks.serving.bench import Bench
from benchlib.benchmarks.serving.figures import FIGURES
from benchlib.config.schema import resolve
from benchlib.core.errors import UserError
from benchlib.judge.baselines import Comparison
from benchlib.judge.compare import RunSet
from benchlib.judge.cost import worth
from benchlib.judge.impossible.own import Numbers, own_claims
from benchlib.judge.impossible.rules import judge_claims
from benchlib.judge.machines import Machine
from benchlib.judge.prices import Price
from benchlib.results.record import Record
from benchlib.results.run import Result

URLS = ["http://a:8000", "http://b:8000"]


def config(**values):
    return resolve("serving", "smoke", "cpu", {"workers": ",".join(URLS), **values}).config


def joint(rate=12.0, given=(80, 40), ends=(10.0, 9.0), idle=(8.0, 0.0)):
    return {
        "samples_per_s": rate, "tokens_per_s": 9 * rate, "duration_s": max(ends), "given": list(given), "end_s": list(ends),
        "idle_slot_s": list(idle),
    }  # fmt: skip


def row(phase, rate, why="", client="", queries=100):
    times = {f"{name}_p{part}_ms": 10.0 for name in ("ttft", "tpot", "latency") for part in (50, 90, 99)}
    return {"phase": phase, "rate": rate, "why": why, "client": client, "queries": queries, "goodput_per_s": rate, "late_p99_ms": 0.5, "samples_per_s": rate, **times}  # fmt: skip


@pytest.fixture
def bench():
    """Two workers of 10 and 5 queries/s; together 12 instead of 15, in 10 s instead of 8."""
    made = Bench(config(concurrency=16), None, list(URLS), "", [])
    made.alone = [[10.0], [5.0]]
    made.says = [{"resident_bytes": 2e9, "device_bytes": None, "cpu_share": 0.5}, {"resident_bytes": 3e9}]
    made.predicted = [metrics.predict([10.0, 5.0], 120)]
    made.together, made.equal = [joint()], [joint(9.6, (60, 60), (12.5, 12.0))]
    made.sweep = [row("sweep", 6.0), row("sweep", 12.0, "slow"), row("confirmation", 6.0)]
    made.knee, made.knee_samples = made.sweep[-1], {"ttft": [0.01] * 100, "tpot": [0.01] * 100}
    made.cpu_ms, made.issued = [0.2], 500
    return made


def run_of(bench):
    result = Result.of(bench.config, status="complete", metrics=metrics.metrics(bench, 1.0, 20.0), facts=metrics.facts(bench), tables=metrics.series(bench))  # fmt: skip
    return SimpleNamespace(config=bench.config, result=result, samples={item.name: item.samples for item in result.metrics}, events=[], machine={})  # fmt: skip


def statuses(run):
    return {check.name: check.status for check in judge.checks(run, Comparison(status="NO_BASELINE"))}


def test_where_the_time_went_is_worked_out_by_hand(bench):
    made = metrics.series(bench)
    # ideal 120 / 15 = 8 s; worker 0 had 80 of them: 8 s, worker 1 had 40: 8 s, so the split costs nothing
    assert {item["part"]: pytest.approx(item["seconds"]) for item in made["cost"]} == {
        "ideal": 8.0, "split": 0.0, "dispatcher": 0.5, "slowness": 1.5,
    }  # fmt: skip
    bench.together = [joint(given=(60, 60))]  # worker 1 alone takes 12 s for that
    assert [item["seconds"] for item in metrics.series(bench)["cost"]] == pytest.approx([8.0, 4.0, 0.5, -2.5])
    assert sum(item["share"] for item in made["cost"]) == pytest.approx(1)
    weighted, equal = made["splits"]
    assert (weighted["predicted_s"], equal["predicted_s"]) == (8.0, 12.0)
    assert (weighted["measured_over_predicted"], equal["measured_over_predicted"]) == pytest.approx((1.25, 12.5 / 12))
    assert made["scaling"][-1]["efficiency"] == pytest.approx(0.8)
    assert [item["predicted_share"] for item in made["workers"]] == pytest.approx([2 / 3, 1 / 3])


@pytest.mark.parametrize("mode", ["both", "distributed"])
def test_both_splits_are_predicted_before_the_joint_runs_that_they_are_compared_with(mode):
    """Two sim workers of 4 slots: 16 queries of 16 tokens are 4 x 16 steps of 10 ms, 25 queries/s, and of 20 ms, 12.5.

    All together, where slots stand empty at the end, rates are a little lower.
    """
    servers = [own(step_s=step_s, slots=4, fixed_length=True) for step_s in (0.010, 0.020)]
    said = []

    def emit(kind, **values):
        if kind == "prediction":
            said.append((values, [server.server.counts["ok"] for server in servers]))

    values = {
        "workers": ",".join(server.url for server in servers),
        "queries": 16,
        "concurrency": 8,
        "rounds": 1,
        "mode": mode,
    }
    made = Bench(config(**values), SimpleNamespace(emit=emit), [server.url for server in servers], TOKEN, [[3, 4, 5]])
    try:
        serving_run._rates(made)
    finally:
        for server in servers:
            server.cut()
    [(event, answered)] = said
    assert sum(answered) == 34, "16 for each, alone or together, and a greeting; none of the runs that are compared"
    assert mode == "distributed" or answered == [17, 17]
    assert event["round"] == 1 and made.issued == 4 * 16 + 32
    weighted, equal = event["splits"]["weighted"], event["splits"]["equal"]
    # 32 queries at the sum of both rates; 16 by each, which takes as long as the slower one. A busy machine lowers the rates.
    rates = [share * 32 / weighted["seconds"] for share in weighted["shares"]]
    assert sum(weighted["shares"]) == pytest.approx(1) and equal["shares"] == [0.5, 0.5]
    assert equal["seconds"] == pytest.approx(16 / min(rates))
    assert 0 < rates[0] < 25 * 1.05 and 0 < rates[1] < 12.5 * 1.05
    rows = {row["split"]: row for row in metrics.series(made)["splits"]}
    assert rows["equal"]["predicted_s"] == equal["seconds"] and made.equal[0]["given"] == [16, 16]
    row = rows["equal"]
    assert row["measured_over_predicted"] == pytest.approx(row["measured_s"] / row["predicted_s"])


def test_a_run_that_missed_its_prediction_says_so(bench):
    assert statuses(run_of(bench)) | {"prediction of the equal split": "PASS", "prediction of the weighted split": "PASS"} == statuses(run_of(bench))  # fmt: skip
    bench.equal = [joint(6.0, (60, 60), (20.0, 12.0))]  # predicted: 12 s
    [missed] = [
        check for check in judge.checks(run_of(bench), Comparison(status="NO_BASELINE")) if check.word == "DIFFERS"
    ]
    assert missed.name == "prediction of the equal split" and "20.00 s, 12.00 s predicted: 1.67 times" in missed.reason
    bench.predicted = [{}]  # a worker failed alone: nothing can be said of it with others
    assert not [name for name in statuses(run_of(bench)) if "prediction" in name]


def test_a_run_is_priced_by_new_tokens_and_servers(bench):
    def machine(usd):
        result = run_of(bench).result
        run = Record(
            benchmark="serving", tier="smoke", backend="cpu", run="r", result=result,
            fingerprint={"world_size": "1", "config.concurrency": "16", "config.workers": json.dumps(list(URLS))},
        )  # fmt: skip
        return Machine(f"at {usd} USD", RunSet("r", (run,)), Price(usd, "given"))

    item = worth([machine(1.8), machine(3.6)])
    # Two servers at 1.80 USD: 3.60 USD an hour for 108 tokens/s.
    assert (item.items, item.machines[0].devices) == ("tokens", 2)
    assert item.row("usd_per_million").values[0].value == pytest.approx(3.6 / 3600 * 1e6 / 108)
    bench.together = []  # one worker at a time measures no joint rate
    assert "both" in machine(1).rate


def test_limits_and_targets_that_were_set_and_not_judged_are_named(bench):
    bench.config = config(target_efficiency=0.7)
    assert judge.missed(run_of(bench)) == {}
    bench.sweep = [row("sweep", 6.0, "late", "the client was late")]
    assert judge.missed(run_of(bench)) == {"ttft_ms": ["= 500"], "tpot_ms": ["= 100"]}
    bench.knee, bench.together, bench.config = None, [], config(mode="single", target_efficiency=0.7)
    assert set(judge.missed(run_of(bench))) == {"ttft_ms", "tpot_ms", "target_efficiency"}


def test_the_projection_is_samples_over_rate(bench):
    made = {item.name: item for item in metrics.metrics(bench, 1.0, 20.0)}
    assert made["projected_hours_random_prompts"].value == pytest.approx(13368 / 12 / 3600)
    assert made["worker_startup_s"].provenance == made["device_memory_gb_random_prompts"].provenance == "not_available"
    assert made["worker_memory_gb_random_prompts"].value == 3, "of the fullest worker"
    bench.knee, bench.together, bench.config = None, [], config(mode="single")
    made = {item.name: item.provenance for item in metrics.metrics(bench, 1.0, 20.0)}
    assert made["knee_per_s_random_prompts"] == made["scaling_efficiency_random_prompts"] == "not_available"


def test_simulated_workers_elsewhere_are_named_in_metrics_words_and_limits(bench):
    bench.engines = ["sim", "sim"]
    run = run_of(bench)
    assert run.result.metric("samples_per_s_all_sim") and not run.result.metric("samples_per_s_all_random_prompts")
    assert {limit.metric.rsplit("_", 1)[-1] for limit in judge.limits(run)} == {"sim"}
    assert statuses(run)["possible scaling"] == "PASS"
    assert "computes nothing" in view.warnings(run.config, run.result)[0] and "`sim`" in judge.reading(run)[-1]


@pytest.mark.parametrize("mode", ["single", "distributed", "both"])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_progress_ends_at_its_total(monkeypatch, mode, workers):
    rows = []
    events = SimpleNamespace(emit=lambda kind, **values: rows.append((values["done"], values["total"])) if kind == "progress" else None)  # fmt: skip
    made = Bench(config(mode=mode, rounds=2), events, [f"http://{number}" for number in range(workers)], "", [])
    monkeypatch.setattr(serving_run, "_at_once", lambda *_: {"samples_per_s": 1.0, "each_per_s": [1.0] * workers})
    serving_run._rates(made)
    assert [done for done, _ in rows] == [*range(1, len(rows) + 1)] and {total for _, total in rows} == {len(rows)}


def test_a_sound_run_passes_and_says_what_it_found(bench):
    run = run_of(bench)
    assert {statuses(run)[name] for name in ("every query answered", "possible scaling", "limits met", "finite", "numbers agree")} == {"PASS"}  # fmt: skip
    text = " ".join(judge.reading(run))
    assert "80% of the sum" in text and "predicted to take 8.00 s and took 10.00 s" in text and "random tokens" in text


@pytest.mark.parametrize(
    ("change", "check", "status"),
    [
        (lambda bench: setattr(bench, "failed", 1), "every query answered", "FAIL"),
        (lambda bench: setattr(bench, "repeated", 1), "every query answered", "FAIL"),
        (lambda bench: setattr(bench, "together", [joint(16.5)]), "possible scaling", "FAIL"),
        (lambda bench: setattr(bench, "sweep", [row("sweep", 6.0, "slow")]), "limits met", "FAIL"),
        (lambda bench: setattr(bench, "sweep", [row("sweep", 6.0, "late", "late")]), "limits met", "SKIPPED"),
        (lambda bench: bench.knee_samples.update(ttft=[-0.01] * 100), "finite", "FAIL"),
        (lambda bench: setattr(bench, "config", config(target_efficiency=0.9)), "target efficiency", "FAIL"),
        (lambda bench: setattr(bench, "config", config(target_efficiency=0.8)), "target efficiency", "PASS"),
        (lambda bench: setattr(bench, "recovery", recovered(failed=1)), "recovery", "FAIL"),
        (lambda bench: setattr(bench, "recovery", recovered(same_answers=63)), "recovery", "FAIL"),
        (lambda bench: setattr(bench, "recovery", recovered()), "recovery", "PASS"),
    ],
)
def test_what_is_wrong_does_not_pass(bench, change, check, status):
    change(bench)
    assert statuses(run_of(bench))[check] == status


def recovered(**more):
    return {"queries": 128, "failed": 0, "repeated": 0, "requeued": 16, "answers": 64, "same_answers": 64, "killed_s": 0.3, "back_s": 1.0, "end_s": 3.0, "after_return": 9} | more  # fmt: skip


def test_two_workers_faster_than_twice_the_fastest_are_impossible(bench):
    bench.alone, bench.together = [[10.0123], [5.0]], [joint(22.0123)]
    failed = [judged.rule.name for judged in judge_claims(own_claims(Numbers.of_run(run_of(bench)))) if judged.failures]
    assert failed == ["scaling"]


def test_one_worker_that_is_faster_at_its_second_measurement_is_possible(bench):
    """As on a busy machine, 40% apart: with a second worker the same rates are impossible, see above."""
    made = Bench(config(workers=URLS[0]), None, URLS[:1], "", [])
    made.alone, made.together, made.says, made.cpu_ms, made.issued = [[10.0123]], [joint(14.0123, (80,), (5.7,), (0.0,))], [{}], [0.2], 160  # fmt: skip
    assert statuses(run_of(made)).items() >= {"numbers agree": "PASS", "possible scaling": "SKIPPED"}.items()


def test_pictures_and_tables_say_what_they_show(bench):
    bench.closed = [row("", 0.0) | {"concurrency": 4, "tokens_per_s": 90.0}]
    bench.recovery = recovered()
    bench.inflight = [{"t_s": t / 10, "worker": w, "open": 4} for t in range(10) for w in range(2)]
    bench.losses = [{"t_s": 0.3, "worker": 0, "event": "down", "times": 1, "reason": "gone"}, {"t_s": 0.3, "worker": 0, "event": "requeued", "times": 16, "reason": "gone"}]  # fmt: skip
    run = run_of(bench)
    for name, words in (("load-latency", "Both limits hold up to 6 "), ("concurrency", "4 queries at once"), ("scaling", "2 workers reach 80%"), ("in-flight", "16 queries sent again, 0 of 128 lost")):  # fmt: skip
        picture = FIGURES[name](run)
        assert not picture.empty and words in picture.alt
    shown = tables.report(run)
    assert "of the joint run's time: ideal 80.0%, split 0.0%, dispatcher 5.0%, slowness 15.0%." in " ".join(
        judge.reading(run)
    )
    assert [row["limits"] for row in shown["Open loops"]] == ["met", "slow", "met: the knee"]
    assert shown["Workers"][0]["share predicted"] == "66.7%"
    bench = Bench(config(), None, list(URLS), "", [])
    bench.alone, bench.says = [[], []], [{}, {}]
    empty = run_of(bench)
    assert all(draw(empty).empty for draw in FIGURES.values())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"workers": "a:8000"}, "not the address of a server"),
        ({"workers": "http://user:secret@a:8000"}, "must not hold a password"),
        ({"workers": "http://a:8000", "recovery": True}, "only those that are started here"),
        ({"percentile": 100}, "percentile"),
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


def test_without_torch_there_is_the_cpu(monkeypatch):
    """A client of servers needs no more; the other backends say what is missing."""
    import importlib.util

    from benchlib.core import machine

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    backends = machine.probe_devices()["backends"]
    assert [name for name, device in backends.items() if device["available"]] == ["cpu"]
    assert "torch is not installed" in backends["cuda"]["reason"]
