"""Baselines: what may be accepted, what is comparable, what is told when it is not."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchlib.benchmarks import BENCHMARKS
from benchlib.commands import baseline
from benchlib.config import schema
from benchlib.config.schema import build, parse_overrides, save_config
from benchlib.core.errors import UserError
from benchlib.core.files import write_json
from benchlib.core.stats import thinned
from benchlib.judge import baselines
from benchlib.judge.checks import save_verdict, verdict_of
from benchlib.judge.regression import RegressionLimit, save_repeats
from benchlib.judge.verdict import judge
from benchlib.results import record
from benchlib.results.metrics import measured
from benchlib.results.record import load
from benchlib.results.run import Result, Run, save_result

LIMITS = [RegressionLimit(metric="rate", share=0.2), RegressionLimit(metric="f1", amount=1.0)]
MACHINE = {
    "cpu": {"model": "Z80", "usable_cores": 2},
    "memory_bytes": 2**34,
    "versions": {"torch": "2.13.0", "transformers": "5.1.0", "benchlib": "0.1.0"},
}


@pytest.fixture
def make_run(tmp_path):
    def make(name, rate=100.0, f1=88.0, status="complete", verdict="PASS", machine=MACHINE, samples=(), **config):
        path = tmp_path / name
        path.mkdir()
        resolved = build("squad", {"benchmark": "squad", **config})
        save_config(resolved, path)
        write_json(path / "machine.json", machine)
        metrics = [
            measured("rate", samples or [rate, rate * 1.01], "samples/s", "higher"),
            measured("f1", f1, "", "higher"),
        ]
        save_result(path, Result.of(resolved, status=status, metrics=metrics))
        save_verdict(
            path, verdict_of([], broken="" if verdict == "PASS" else "stopped").model_copy(update={"verdict": verdict})
        )
        return Run(path)

    return make


def statuses(run, root):
    return {check.name: check.status for check in baselines.regression_checks(run, LIMITS, baselines.find(run, root))}


@pytest.mark.parametrize(
    ("own", "others", "status", "source"),
    [
        (190.0, 10.0, "FAIL", "spread between runs 5.0%, from default"),
        (60.0, 140.0, "AMBIGUOUS", "spread between runs 40.1%, from default where others take 70% of the processors"),
        (90.0, 210.0, "AMBIGUOUS", "others take 70% of the processors"),  # of 300% that two cores do not have
        (60.0, 70.0, "FAIL", "from default"),  # 35% were idle: whoever wanted a core had one
    ],
)
def test_a_single_accepted_run_decides_less_where_others_take_the_processors(
    make_run, tmp_path, own, others, status, source
):
    """A loss of 35% on two cores. With 70% taken a run is 1 / (1 - 0.7) times slower: a third of ln 3.33 is 0.401."""
    machine = {**MACHINE, "cpu": {**MACHINE["cpu"], "logical_cores": 2}}
    runs = [make_run(name, rate=rate, machine=machine) for name, rate in (("old", 100.0), ("new", 65.0))]
    for run in runs:
        event = {"t": 1.0, "source": "supervisor", "kind": "sensor", "cpu_percent": own, "others_percent": others}
        (run.path / "events-supervisor.jsonl").write_text(json.dumps(event) + "\n")
    baselines.accept(runs[0], "first", LIMITS, root=tmp_path / "baselines", force=True)
    checks = baselines.regression_checks(runs[1], LIMITS, baselines.find(runs[1], tmp_path / "baselines"))
    check = next(check for check in checks if check.name == "rate vs baseline")
    assert check.status == status and source in check.source


def test_one_of_many_gated_metrics_has_to_be_farther_off_to_fail(make_run, tmp_path):
    """A loss of 32%, 0.39: by the default spread t of 10 is 3.9 for one metric (0.28), 5.9 for each of twenty (0.42)."""
    limits = [
        RegressionLimit(metric="rate", share=0.2),
        *(RegressionLimit(metric=f"m{i}", share=0.2) for i in range(19)),
    ]
    root = tmp_path / "baselines"
    for others, status in ((0, "FAIL"), (19, "AMBIGUOUS")):
        runs = [make_run(f"{name}{others}", rate=rate, seed=others) for name, rate in (("old", 100.0), ("new", 68.0))]
        for run in runs:
            more = [measured(f"m{i}", 1.0, "s", "lower") for i in range(others)]
            save_result(run.path, run.result.model_copy(update={"metrics": [run.result.metrics[0], *more]}))
        old, new = (Run(run.path) for run in runs)
        baselines.accept(old, "first", limits, root=root)
        checks = baselines.regression_checks(new, limits, baselines.find(new, root))
        assert [check.status for check in checks] == [status, *["PASS"] * others]
    assert "among all metrics of a run one may be as far off by chance: repeat the run" in checks[0].reason


def test_runs_that_others_slowed_are_refused_as_those_that_scatter(make_run, tmp_path):
    """With 70% taken the assumed spread is 0.401: no loss of less than three quarters would surely be found."""
    machine = {**MACHINE, "cpu": {**MACHINE["cpu"], "logical_cores": 2}}
    runs = [make_run(name, rate=rate, machine=machine) for name, rate in (("a", 100.0), ("b", 102.0))]
    for run, others in zip(runs, (140.0, 140.0), strict=True):
        event = {"t": 1.0, "source": "supervisor", "kind": "sensor", "cpu_percent": 60.0, "others_percent": others}
        (run.path / "events-supervisor.jsonl").write_text(json.dumps(event) + "\n")
    root = tmp_path / "baselines"
    for chosen in (runs[:1], runs):
        with pytest.raises(
            UserError, match=r"others took 70% of the processors, so .*found is -\d\d%.*quiet machine.*--force"
        ):
            baselines.accept(chosen, "night", LIMITS, root=root)
    assert baselines.accept(runs, "night", LIMITS, root=root, force=True).exists()


def test_workers_of_others_are_not_taken_for_a_neighbour(make_run):
    run = make_run("served", machine={**MACHINE, "cpu": {**MACHINE["cpu"], "logical_cores": 2}})
    event = {"t": 1.0, "source": "supervisor", "kind": "sensor", "cpu_percent": 30.0, "others_percent": 170.0}
    (run.path / "events-supervisor.jsonl").write_text(json.dumps(event) + "\n")
    assert record.others_share(run.path, run.machine, run.config) == pytest.approx(0.85)
    served = SimpleNamespace(backend="cpu", nnodes=1, workers=["http://127.0.0.1:8000"])
    assert record.others_share(run.path, run.machine, served) == 0.0


def test_accept_find_and_compare(make_run, tmp_path):
    root = tmp_path / "baselines"
    first = make_run("first")
    assert set(statuses(first, root).values()) == {"NO_BASELINE"}
    path = baselines.accept(first, "first run", LIMITS, root=root)
    assert path.parent == root / "squad" / "smoke"
    assert set(statuses(make_run("same"), root).values()) == {"PASS"}
    worse = statuses(make_run("worse", rate=65.0, f1=86.0), root)
    assert worse == {"rate vs baseline": "FAIL", "f1 vs baseline": "FAIL"}


def test_another_fingerprint_is_not_comparable_and_says_why(make_run, tmp_path):
    root = tmp_path / "baselines"
    baselines.accept(make_run("first"), "first run", LIMITS, root=root)
    other = make_run("other", machine=MACHINE | {"versions": {**MACHINE["versions"], "torch": "2.14.0"}}, batch_size=16)
    comparison = baselines.find(other, root)
    assert comparison.status == "NOT_COMPARABLE"
    assert {name for name, *_ in comparison.factors} == {"torch", "config.batch_size"}
    assert "torch is 2.14 here, 2.13 there" in comparison.reason
    patch = make_run(
        "patch", machine=MACHINE | {"versions": {**MACHINE["versions"], "torch": "2.13.1"}}, target_f1=1.0, budget_s=9
    )
    assert baselines.find(patch, root).status == "found"  # patch versions, targets and limits do not change the work


@pytest.mark.parametrize(
    "case", [{"status": "partial"}, {"status": "skipped", "verdict": "SKIPPED"}, {"verdict": "FAIL"}]
)
def test_a_failed_partial_or_skipped_run_is_not_accepted(make_run, tmp_path, case):
    with pytest.raises(UserError):
        baselines.accept(make_run("run", **case), "because", LIMITS, root=tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_reason_is_needed(make_run, tmp_path):
    with pytest.raises(UserError, match="--reason"):
        baselines.accept(make_run("run"), "  ", LIMITS, root=tmp_path / "b")


def test_if_improved_never_loosens(make_run, tmp_path):
    root = tmp_path / "b"
    baselines.accept(make_run("first"), "first", LIMITS, root=root)
    with pytest.raises(UserError, match="worse than the baseline in f1"):
        baselines.accept(make_run("mixed", rate=200.0, f1=87.9), "faster", LIMITS, if_improved=True, root=root)
    baselines.accept(make_run("better", rate=200.0), "faster", LIMITS, if_improved=True, root=root)
    assert baselines.stored(root)[0][1].latest.metric("rate").value == pytest.approx(201.0)


def test_a_metric_that_only_the_baseline_has_is_listed(make_run, tmp_path):
    root = tmp_path / "b"
    baselines.accept(make_run("first"), "first", LIMITS, root=root)
    run = make_run("second")
    save_result(
        run.path, Result.of(run.config, status="complete", metrics=[measured("rate", 100.0, "samples/s", "higher")])
    )
    assert statuses(run.refresh(), root)["f1 vs baseline"] == "NOT_COMPARABLE"


@pytest.mark.parametrize("text", ["{", '{"schema_version": 1}', '"x"'])
def test_a_damaged_baseline_is_named(make_run, tmp_path, text):
    root = tmp_path / "b"
    path = baselines.accept(make_run("first"), "first", LIMITS, root=root)
    path.write_text(text)
    comparison = baselines.find(make_run("second"), root)
    assert comparison.status == "NOT_COMPARABLE" and path.name in comparison.reason


def edited(path, change):
    """Change the newest accepted run of a baseline file by hand."""
    values = json.loads(path.read_text())
    record = values["runs"][-1]
    change(record, {metric["name"]: metric for metric in record["result"]["metrics"]})
    path.write_text(json.dumps(values))


def _times(factor):
    def change(record, metrics):
        record["samples"]["rate"] = [factor * value for value in record["samples"]["rate"]]
        metrics["rate"] |= {key: factor * metrics["rate"][key] for key in ("value", "ci_low", "ci_high")}

    return change


STEADY = [100.0, 101.0, 99.5, 100.5, 98.5, 102.0, 100.2]
LONG = [100.0 + 0.01 * number for number in range(400)]
IMPOSSIBLE = {
    "below zero": (STEADY, _times(-0.05), "rate = -5"),
    "zero": (STEADY, _times(0.0), "rate is 0 samples/s, and nothing can be compared with that"),
    "not its samples": (STEADY, lambda record, metrics: metrics["rate"].update(value=101.9), "the median of its 7 raw samples is 100"),
    "of fewer samples": (STEADY, lambda record, metrics: record["samples"]["rate"].pop(), "6 samples of rate, whose value is of 7"),
    "beside kept samples": (LONG, lambda record, metrics: metrics["rate"].update(value=103.9, ci_low=103.8, ci_high=103.95), "rate beside its kept samples"),
    "of nothing": (STEADY, lambda record, metrics: record["samples"].update(other=[1.0]), "samples of other, which it did not measure"),
    "a score of 188": (STEADY, lambda record, metrics: (metrics["f1"].update(value=188.0), record["samples"].update(f1=[188.0])), "a score is at most 100"),
}  # fmt: skip


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_baseline_that_cannot_be_true_is_refused_with_file_reason_and_remedy(make_run, tmp_path, case):
    samples, change, words = IMPOSSIBLE[case]
    root = tmp_path / "b"
    path = baselines.accept(make_run("first", samples=samples), "first", LIMITS, root=root)
    assert baselines.load_baseline(path).runs
    edited(path, change)
    with pytest.raises(UserError) as refused:
        baselines.load_baseline(path)
    assert words in str(refused.value) and path.name in str(refused.value)
    assert "restore the file, or delete it and accept sound runs" in str(refused.value)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999"])
def test_a_baseline_with_numbers_that_are_none_is_refused(make_run, tmp_path, text):
    path = baselines.accept(make_run("first", samples=STEADY), "first", LIMITS, root=tmp_path)
    path.write_text(path.read_text().replace("98.5", text))
    with pytest.raises(UserError, match=f"{path.name}: not valid JSON"):
        baselines.load_baseline(path)


def test_a_run_that_counts_three_times_is_refused(make_run, tmp_path):
    path = baselines.accept(make_run("first", samples=STEADY), "first", LIMITS, root=tmp_path)
    values = json.loads(path.read_text())
    (record,) = values["runs"]
    later = [record | {"run": f"copy-{number}", "started_at": record["started_at"] + number} for number in (1, 2)]
    path.write_text(json.dumps(values | {"runs": [record, *later]}))
    with pytest.raises(UserError, match="copy-1 is first once more: a run counts once"):
        baselines.load_baseline(path)


def test_a_refused_baseline_fails_its_own_runs_and_no_others(make_run, tmp_path):
    """The gate names the reason; a run of another fingerprint is compared with its own baseline as before."""
    root = tmp_path / "b"
    path = baselines.accept(make_run("first", samples=STEADY), "first", LIMITS, root=root)
    other = make_run("other", samples=STEADY, batch_size=16)
    baselines.accept(other, "other", LIMITS, root=root)
    edited(path, _times(-0.05))
    run, same = make_run("second", samples=STEADY[::-1]), make_run("same", samples=STEADY[::-1], batch_size=16)
    (rate, _) = baselines.regression_checks(run, LIMITS, baselines.find(run, root))
    assert rate.status == "NOT_COMPARABLE" and "its baseline is refused" in rate.reason and "rate = -5" in rate.reason
    assert set(statuses(same, root).values()) == {"PASS"}
    elsewhere = baselines.find(make_run("new", batch_size=4), root)
    assert (
        elsewhere.status == "NOT_COMPARABLE" and "1 baseline refused, see `benchlib baseline list`" in elsewhere.reason
    )
    refused = {}
    assert [item.key for _, item in baselines.stored(root, refused=refused)] == [
        baselines.find(same, root).baseline.key
    ]
    assert [*refused] == [path]
    with pytest.raises(UserError, match=r"--if-improved.*its baseline is refused"):
        baselines.accept(run, "better", LIMITS, if_improved=True, root=root)
    baselines.accept(run, "sound again", LIMITS, root=root)
    assert statuses(make_run("third", samples=STEADY), root)["rate vs baseline"] == "PASS"


def test_a_run_whose_numbers_cannot_be_true_becomes_no_baseline(make_run, tmp_path):
    with pytest.raises(UserError, match=r"not accepted: its numbers cannot be true: .*rate is 0 samples/s"):
        baselines.accept(make_run("first", samples=[0.0] * 5), "first", LIMITS, root=tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_run_that_was_cut_off_gets_a_verdict_that_says_so(make_run, tmp_path):
    run = make_run("cut")
    (run.path / "verdict.json").unlink()
    verdict = judge(run.path, tmp_path / "b")
    assert verdict.exit_code() == 2
    assert "ended without a status" in verdict.sentence
    (run.path / "result.json").write_text('{"half')
    assert "result.json" in judge(run.path, tmp_path / "b").sentence


def test_add_keeps_the_runs_and_their_spread_counts(make_run, tmp_path):
    """rate: medians 100.5, 103.515 and 97.485; t of 6 degrees of freedom at 0.075% is 5.5: 5.5 * 0.044 * sqrt(4/3) = 0.28."""
    root = tmp_path / "baselines"
    baselines.accept(make_run("a"), "first", LIMITS, root=root)
    for name, rate in (("b", 103.0), ("c", 97.0)):
        baselines.accept(make_run(name, rate=rate), "again", LIMITS, add=True, root=root)
    ((_, stored),) = baselines.stored(root)
    assert [item.run for item in stored.runs] == ["a", "b", "c"]
    for name, rate, status in (("new", 74.0, "FAIL"), ("near", 81.0, "PASS")):
        run = make_run(name, rate=rate)
        (check,) = [c for c in baselines.regression_checks(run, LIMITS, baselines.find(run, root)) if "rate" in c.name]
        assert check.status == status
        assert "3 runs" in check.limit
        assert "spread between runs 4.4%, from the compared runs, default" in check.source
    assert "surely worse, but within the limit" in check.reason


def test_a_spread_wider_than_the_limit_leaves_the_gate_open_and_says_so(make_run, tmp_path):
    root = tmp_path / "baselines"
    baselines.accept(make_run("a", rate=60.0), "first", LIMITS, root=root)
    for name, rate in (("b", 100.0), ("c", 160.0)):
        baselines.accept(make_run(name, rate=rate), "again", LIMITS, add=True, force=True, root=root)
    for name, rate, why in (("new", 70.0, "no change at all is not excluded"), ("near", 90.0, "too noisy to gate")):
        run = make_run(name, rate=rate)
        check = baselines.regression_checks(run, LIMITS, baselines.find(run, root))[0]
        assert check.status == "AMBIGUOUS"
        assert why in check.reason


def test_runs_that_would_loosen_the_limit_are_refused_unless_forced(make_run, tmp_path):
    """Of 67, 41 and 30, ln's deviation is 0.406: no loss of less than half is found for sure."""
    root = tmp_path / "baselines"
    runs = [make_run(name, rate=rate) for name, rate in (("a", 67.0), ("b", 41.0), ("c", 30.0))]
    for call in (lambda: baselines.accept(runs, "night", LIMITS, root=root), lambda: one_by_one(runs, root)):
        with pytest.raises(UserError, match=r"the limit is -20%, the smallest loss found is -\d+%.*--force"):
            call()
    path = baselines.accept(runs, "night", LIMITS, force=True, root=root)
    (rate, f1) = [row.cells() for row in baselines.widths(baselines.load_baseline(path), LIMITS, {})]
    assert rate["limit"] == "-20%" and rate["runs"] == "3, 30.15 samples/s to 67.33 samples/s"
    assert int(rate["smallest loss found"].strip("-%")) > 50
    assert f1["limit"] == "-1" and 1.2 < float(f1["smallest loss found"].strip("-")) < 1.6


def one_by_one(runs, root):
    baselines.accept(runs[0], "first", LIMITS, root=root)
    for run in runs[1:]:
        baselines.accept(run, "again", LIMITS, add=True, root=root)


def test_the_smallest_loss_found_agrees_with_the_gate(make_run, tmp_path):
    """Three runs with s = 0.02: a loss somewhat beyond the shown one always fails, one somewhat within it not always."""
    runs = [make_run(name, rate=rate) for name, rate in (("a", 98.0), ("b", 100.0), ("c", 102.0))]
    path = baselines.accept(runs, "night", LIMITS, root=tmp_path / "baselines")
    rate = baselines.widths(baselines.load_baseline(path), LIMITS, {})[0]
    assert rate.own == pytest.approx(0.2) and not rate.too_wide
    assert 0.25 < rate.effect < 0.32, "the limit of 20%, and what one run of a side may be off"


def test_add_needs_a_baseline_and_a_new_run(make_run, tmp_path):
    root = tmp_path / "baselines"
    run = make_run("a")
    with pytest.raises(UserError, match="no baseline to add a to, no run was accepted yet"):
        baselines.accept(run, "first", LIMITS, add=True, root=root)
    baselines.accept(run, "first", LIMITS, root=root)
    with pytest.raises(UserError, match="in the baseline already"):
        baselines.accept(run, "again", LIMITS, add=True, root=root)
    with pytest.raises(UserError, match="choose one"):
        baselines.accept(run, "again", LIMITS, add=True, if_improved=True, root=root)


def test_a_run_that_was_slowed_on_purpose_is_compared_but_never_accepted(make_run, tmp_path):
    root = tmp_path / "baselines"
    baselines.accept(make_run("a"), "first", LIMITS, root=root)
    slowed = make_run("slowed", rate=60.0, planted_slowdown=0.6)
    assert statuses(slowed, root)["rate vs baseline"] == "FAIL"
    with pytest.raises(UserError, match="on purpose"):
        baselines.accept(slowed, "oops", LIMITS, root=root)


def test_earlier_repetitions_count_unless_the_latest_has_no_number(make_run, tmp_path):
    root = tmp_path / "baselines"
    baselines.accept(make_run("a"), "first", LIMITS, root=root)
    run = make_run("second", rate=95.0)
    save_repeats(
        run.path, [load(make_run(name, rate=rate).path).kept(LIMITS) for name, rate in (("x", 96.0), ("y", 97.0))]
    )
    (check, _) = baselines.regression_checks(run, LIMITS, baselines.find(run, root))
    assert check.value == pytest.approx((95.475 * 96.48 * 97.485) ** (1 / 3))
    save_result(
        run.path,
        Result.of(run.config, status="complete", metrics=[measured("rate", float("nan"), "samples/s", "higher")]),
    )
    check = baselines.regression_checks(run.refresh(), LIMITS, baselines.find(run, root))[0]
    assert check.status == "FAIL"
    (run.path / "repeats.json").write_text("[{}]")
    with pytest.raises(UserError, match=r"repeats\.json"):
        baselines.regression_checks(run.refresh(), LIMITS, baselines.find(run, root))


def test_several_runs_of_one_kind_are_accepted_together_or_not_at_all(make_run, tmp_path, monkeypatch, capsys):
    root = tmp_path / "baselines"
    monkeypatch.setattr(baselines, "folder", lambda: root)
    monkeypatch.setattr(baseline.judging, "judged", lambda run: run.verdict)
    runs = [make_run(name).path for name in ("a", "b", "c")]
    odd, slowed = make_run("odd", batch_size=3).path, make_run("slowed", planted_slowdown=0.1).path
    for wrong, said in ((odd, "config.batch_size"), (slowed, "on purpose")):
        with pytest.raises(UserError, match=said):
            baseline.accept([*runs, wrong], "night", add=False, if_improved=False)
    assert not root.exists()
    monkeypatch.setattr(baseline, "disturbances", lambda run: ["Others took 40%."] if run.run == "a" else [])
    baseline.accept(runs, "night", add=False, if_improved=False)
    ((_, stored),) = baselines.stored(root)
    assert [item.run for item in stored.runs] == ["a", "b", "c"]
    monkeypatch.setattr(baseline.judging, "judged", lambda run: verdict_of([], broken="a file was cut since"))
    with pytest.raises(UserError, match="cut since"):  # whatever the stored verdict said
        baseline.accept(runs[:1], "night", add=False, if_improved=False)
    output = capsys.readouterr().out
    assert "accepted:" in output and output.count("disturbed") == 1 and "a: Others took 40%." in output


def test_thinned_samples_keep_median_and_spread():
    """An all-reduce that alternates between two speeds: every second sample would have one of them only."""
    alternating = [10.0, 20.0] * 200 + [15.0]
    kept = thinned(alternating, 200)
    assert len(kept) == 200
    assert (min(kept), max(kept)) == (10.0, 20.0)
    assert sum(value < 15 for value in kept) == sum(value > 15 for value in kept)
    assert thinned([3.0, 1.0], 200) == [3.0, 1.0]


def test_a_copy_under_another_name_is_no_second_run(make_run, tmp_path):
    root = tmp_path / "baselines"
    first = make_run("a")
    shutil.copytree(first.path, tmp_path / "copy")
    copy = Run(tmp_path / "copy")
    with pytest.raises(UserError, match="copy is a copy of a"):
        baselines.accept([first, copy], "both", LIMITS, root=root)
    assert not root.exists()
    baselines.accept(first, "first", LIMITS, root=root)
    with pytest.raises(UserError, match="copy is a copy of a"):
        baselines.accept(copy, "again", LIMITS, add=True, root=root)


def test_an_accepted_run_is_compared_with_the_others_only(make_run, tmp_path):
    root = tmp_path / "baselines"
    first, second = make_run("a", rate=100.0), make_run("b", rate=200.0)
    baselines.accept(first, "first", LIMITS, root=root)
    checks = baselines.regression_checks(first, LIMITS, baselines.find(first, root))
    assert {check.status for check in checks} == {"NO_BASELINE"}
    assert "this run is the baseline itself" in checks[0].reason
    baselines.accept(second, "second", LIMITS, add=True, force=True, root=root)
    check = baselines.regression_checks(first, LIMITS, baselines.find(first, root))[0]
    assert "201.0 samples/s: ratio 0.500" in check.reason


def test_a_better_value_passes_however_wide_its_interval(make_run, tmp_path):
    root = tmp_path / "baselines"
    baselines.accept(
        [make_run(name, rate=rate) for name, rate in (("a", 60.0), ("b", 100.0), ("c", 160.0))],
        "x",
        LIMITS,
        force=True,
        root=root,
    )
    for name, rate, status in (("better", 110.0, "PASS"), ("worse", 90.0, "AMBIGUOUS")):
        run = make_run(name, rate=rate)
        assert baselines.regression_checks(run, LIMITS, baselines.find(run, root))[0].status == status


def limited(make_run, tmp_path, name, speed=100.0, **limits):
    """A run judged with limits of the user's own; the gate has those of LIMITS."""
    run = make_run(name, rate=speed, limits=limits)
    comparison = baselines.find(run, tmp_path / "baselines")
    return {check.name: check for check in baselines.regression_checks(run, LIMITS, comparison)}


def test_limits_of_the_user_count_and_an_edited_or_missing_one_is_noticed(make_run, tmp_path):
    root = tmp_path / "baselines"
    baselines.accept([make_run(name) for name in "abcdefgh"], "first", LIMITS, root=root)
    assert [limit.share for limit in baselines.stored(root)[0][1].limits] == [0.2, None]
    usual = limited(make_run, tmp_path, "usual", 88.0)
    assert usual["rate vs baseline"].status == "PASS" and "limits as accepted" not in usual
    tight = limited(make_run, tmp_path, "tight", 88.0, rate=0.1)
    assert (tight["rate vs baseline"].status, tight["rate vs baseline"].limit[:4]) == ("FAIL", "-10%")
    assert tight["limits as accepted"].reason == "rate 10%, accepted with 20%"
    assert not tight["limits as accepted"].gates
    wrong = limited(make_run, tmp_path, "wrong", rat=0.1)["limits apply"]
    assert wrong.status == "SKIPPED" and wrong.gates and "rate" in wrong.reason
    with pytest.raises(UserError, match="a share of the baseline from 0 to 1"):
        limited(make_run, tmp_path, "large", rate=3.0)
    run = make_run("other", rate=70.0)
    checks = baselines.regression_checks(run, LIMITS[1:], baselines.find(run, root))
    assert {check.name: check.status for check in checks} == {
        "limits as accepted": "FAIL", "f1 vs baseline": "PASS", "rate vs baseline": "FAIL",
    }  # fmt: skip
    (path,) = root.rglob("*.json")
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"limits": content["limits"][1:]}))
    assert limited(make_run, tmp_path, "lacking")["limits as accepted"].reason == "rate 20%, accepted without a limit"


def test_limits_are_set_by_metric_and_add_up_over_files_and_command_line(monkeypatch):
    own = {"limits": {"f1": 0.5, "loss_final": 0.3}}
    read = schema.read_params
    monkeypatch.setattr(
        schema, "read_params", lambda kind, name: read(kind, name) | ({"squad": own} if kind == "backends" else {})
    )
    found = schema.resolve("squad", "smoke", "cpu", parse_overrides(["limits.train_samples_per_s=0.1", "limits.f1=2"]))
    assert found.config.limits == {"f1": 2.0, "loss_final": 0.3, "train_samples_per_s": 0.1}
    assert "limits" not in found.config.work()
    assert "--set limits.train_samples_per_s=0.1" in schema.command(found.config)
    for wrong in ("limits.f1=-1", "limits.f1=x", "limits=3"):
        with pytest.raises(UserError, match="limits"):
            schema.resolve("squad", "smoke", "cpu", parse_overrides([wrong]))


def test_a_share_above_one_is_refused_before_anything_runs():
    for benchmark, name in (("squad", "train_samples_per_s"), ("collectives", "allreduce"), ("inference", "f2")):
        with pytest.raises(
            UserError, match=f"limits.{name} = 7: a share of the baseline from 0 to 1, as in 0.2 for 20%"
        ):
            schema.build(benchmark, {"benchmark": benchmark, "limits": {name: 7}})
    schema.build(
        "machine", {"benchmark": "machine", "limits": {"f1": 7, "rouge1_mininews": 1.5}}
    )  # of others in its tier


def test_limits_that_are_amounts_are_named_by_the_config():
    pattern = re.compile(r'RegressionLimit\(metric=f?"(\w+)[^\n]*?amount=')
    folder = Path(schema.__file__).parents[1] / "benchmarks"
    limits = {
        (path.parent.name, name) for path in folder.glob("*/judge.py") for name in pattern.findall(path.read_text())
    }
    assert limits == {(name, amount) for name in BENCHMARKS for amount in schema.config_class(name).AMOUNTS} != set()


def test_stored_runs_of_the_same_kind_tell_the_spread_accepted_or_not(make_run, tmp_path):
    """Six runs that differ by 1%, one of them odd; runs of another config, planted or later ones do not count."""
    day = tmp_path / "store" / "smoke-20261120"
    day.mkdir(parents=True)
    rates = (100.0, 101.0, 99.0, 100.5, 60.0, 99.5)
    for number, rate in enumerate(rates):
        make_run(f"store/smoke-20261120/squad-cpu-10000{number}-abcdef", rate=rate)
    make_run("store/smoke-20261120/squad-cpu-200000-abcdef", rate=50.0, batch_size=4)
    make_run("store/smoke-20261120/squad-cpu-200001-abcdef", rate=50.0, planted_slowdown=0.5)
    run = make_run("store/smoke-20261120/squad-cpu-300000-abcdef")
    make_run("store/smoke-20261120/squad-cpu-400000-abcdef", rate=10.0)
    spread = baselines.known_spreads(load(run.path), LIMITS, None, [load(run.path).kept(LIMITS)])["rate"]
    assert spread.source == "6 stored runs"
    assert 0.004 < spread.s < 0.015
    first = baselines.Run(day / "squad-cpu-100000-abcdef")
    root = tmp_path / "baselines"
    baselines.accept(first, "first", LIMITS, root=root)
    check = baselines.regression_checks(run, LIMITS, baselines.find(run, root))[0]
    assert "from 5 stored runs, default" in check.source


def test_a_disturbed_repetition_is_replaced_by_one_that_is_not(make_run, tmp_path):
    root = tmp_path / "baselines"
    baselines.accept(make_run("a"), "first", LIMITS, root=root)
    half = [100.0] * 50 + [40.0] * 50
    noisy = [value * (1 + 0.01 * (-1) ** place) for place, value in enumerate(half)]
    disturbed = make_run("disturbed", samples=noisy)
    check = baselines.regression_checks(disturbed, LIMITS, baselines.find(disturbed, root))[0]
    assert check.status == "AMBIGUOUS"
    assert "its level shifted by -60% from 50% to 100% of the samples" in check.reason
    assert "disagree about the limit: repeat the run" in check.reason
    again = make_run("again")
    save_repeats(again.path, [load(disturbed.path).kept(LIMITS)])
    check = baselines.regression_checks(again, LIMITS, baselines.find(again, root))[0]
    assert (check.status, check.value) == ("PASS", pytest.approx(100.5))
