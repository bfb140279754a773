"""What a SQuAD run is judged by, on results made by hand: each check can fail, and a cut run cannot pass unseen."""

from types import SimpleNamespace

import pytest

from benchlib.benchmarks.squad import metrics, run
from benchlib.benchmarks.squad.judge import checks, lacks, missed, published, reading, refuse
from benchlib.benchmarks.squad.view import VIEW
from benchlib.config.schema import build, save_config
from benchlib.core.errors import UserError
from benchlib.core.files import write_json
from benchlib.judge.baselines import Comparison
from benchlib.judge.checks import verdict_of
from benchlib.results.metrics import derived, measured, not_available
from benchlib.results.run import Result, Run, save_result
from benchlib.workloads.collective_timing import AllReduce

NONE = Comparison(status="NO_BASELINE")


@pytest.fixture
def judged(tmp_path):
    """Judge a made-up quick run after ``changes``: config, facts and metric values by name."""

    def judge(config=None, facts=None, losses=(2.0, 1.0, 0.5, 0.2), step_s=(), tables=None, **values):
        settings = {"benchmark": "squad", "target_f1_embedded": 88.0, "nproc": 2, **(config or {})}
        resolved = build("squad", settings)
        known = {
            "samples_seen": [80, 80], "samples_expected": 160, "checksums_equal": True, "checksums": [["a", "a"]], "epoch_share": 1.0,
            "total_steps": len(losses), "planned_steps": len(losses), "plan_reason": "cut to fit", "learning_rates": {"min": 1e-6, "max": 1e-3, "last": 1e-6}, "allreduce_wrong_elements": 0,
        }  # fmt: skip
        known |= facts or {}
        scope, quality = resolved.scope(), resolved.quality_scope(known["epoch_share"])
        found = {
            "f1": 92.0,
            "exact_match": 90.0,
            "flops": 50.0,
            "peak": 100.0,
            "total": 30.0,
            "padding_share": 0.1,
        } | values
        metrics = [
            measured("loss", list(losses), ""),
            derived(f"loss_final{quality}", losses[-1], "", "lower"),
            measured(f"f1{quality}", found["f1"], "", "higher"),
            measured(f"exact_match{quality}", found["exact_match"], "", "higher"),
            measured("padding_share", found["padding_share"], "ratio"),
            derived(f"flops_per_s{scope}", found["flops"], "FLOP/s", "higher"),
            measured("matmul_peak_flops", found["peak"], "FLOP/s", "higher"),
            measured(f"train_samples_per_s{scope}", 100.0, "samples/s", "higher"),
            measured("allreduce_gbps", 7.0, "Gbps", "higher"),
            not_available("device_memory_gb", "GB", "lower", "a CPU"),
            measured("total_s", found["total"], "s", "lower"),
            *([measured(f"step_s{scope}", step_s, "s", "lower")] if step_s else []),
        ]
        save_config(resolved, tmp_path)
        save_result(tmp_path, Result.of(resolved, status="complete", metrics=metrics, facts=known, tables=tables or {}))
        return {check.name: check for check in checks(Run(tmp_path), NONE)}

    return judge


def test_wrong_sums_are_counted_and_do_not_end_the_run(monkeypatch):
    wrong = AllReduce((4,), 2, (1e-3,), wrong=3, checked=10)
    monkeypatch.setattr(run, "time_all_reduce", lambda *_: wrong)
    trained, here = SimpleNamespace(bucket_bytes=[4]), SimpleNamespace(size=2, device=None, collective="gloo")
    assert run._exchange(trained, here, 1.0, wrong).wrong == 6


def test_bandwidths_of_a_timing_by_hand():
    timing = AllReduce(sizes=(4 * 10**8, 6 * 10**8), ranks=4, seconds=(0.5, 1.0), wrong=0, checked=0)
    bus, algorithm = metrics.exchange_metrics(timing)
    assert (bus.samples, algorithm.samples) == (pytest.approx([24, 12]), pytest.approx([16, 8]))


def test_a_good_run_passes(judged):
    found = judged()
    assert {check.status for check in found.values() if check.gates and check.kind != "regression"} == {"PASS"}
    assert found["F1 target"].status == "SKIPPED"  # generated data never count for the target of SQuAD
    assert not found["F1 target"].gates


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("loss decreases", {"losses": (1.0, 1.0, 1.0, 1.0)}),
        ("loss decreases", {"losses": (1.0,)}),
        ("ranks equal", {"facts": {"checksums_equal": False}}),
        ("ranks equal", {"facts": {"checksums": []}}),
        ("ranks equal", {"facts": {"checksums": [["a"]]}}),
        ("whole training", {"facts": {"epoch_share": 5.0}}),
        ("sample count", {"facts": {"samples_seen": [80, 79]}}),
        ("learning rate", {"facts": {"learning_rates": {"min": 0.0, "max": 1e-3, "last": 0.0}}}),
        *(("all-reduce right", {"facts": {"allreduce_wrong_elements": wrong}}) for wrong in (3, -3, 5.0, "5", None)),
        ("finite", {"f1": float("nan")}),
        ("possible quality", {"f1": 250.0}),
        ("possible quality", {"exact_match": 92.1}),
        ("possible quality", {"padding_share": 1.2}),
        ("possible speed", {"flops": 106.0}),
        ("time budget", {"total": 60.1}),
        ("F1 on embedded data", {"f1": 87.99, "exact_match": 80.0}),
    ],
)
def test_each_check_can_fail(judged, name, changes):
    found = judged(**changes)
    assert found[name].status == "FAIL"
    assert verdict_of(list(found.values())).verdict == "FAIL"


@pytest.mark.parametrize(
    ("table", "row", "column", "legitimate"),
    [
        ("devices", {"device": 0, "power_w": 70.0, "temperature_c": None}, "temperature_c", True),
        ("devices", {"device": None, "power_w": 70.0}, "device", False),
        ("ranks", {"rank": 0, "step_s_p05": None, "step_s_p95": None}, "step_s_p05", True),
        ("ranks", {"rank": 0, "step_s_p05": None, "step_s_p95": 0.2}, "step_s_p05", False),
        ("ranks", {"rank": 0, "step_s_p05": None}, "step_s_median", False),
        ("unlike_steps", {"step": -1, "expected_s": None}, "expected_s", True),
        ("unlike_steps", {"step": None, "expected_s": None}, "expected_s", False),
        ("unlike_ranks", {"expected_s": None, "own_s": None, "idle_s": None}, "own_s", True),
        ("unlike_ranks", {"expected_s": 0.1, "own_s": None, "idle_s": None}, "own_s", False),
        ("facts", {"allreduce_wrong_elements": None, "samples_seen": [1, 2]}, "allreduce_wrong_elements", False),
    ],
)
def test_a_null_has_its_reason_in_its_row(table, row, column, legitimate):
    assert lacks(table, row, column) == legitimate


def test_percentiles_of_many_steps_do_not_go_missing(judged):
    rows = [{"rank": 0, "step_s_median": 0.2, "step_s_p05": None, "step_s_p95": None}]
    few, many = (judged(step_s=[0.2] * steps, tables={"ranks": rows})["finite"] for steps in (19, 20))
    assert (few.status, many.status) == ("PASS", "FAIL")
    assert "percentiles_s" in many.reason


def test_a_training_that_the_speed_cut_does_not_pass_its_target_unseen(judged):
    found = judged(facts={"epoch_share": 0.12, "total_steps": 33}, f1=73.0, exact_match=70.0)
    for name in ("F1 on embedded data", "whole training"):
        assert (found[name].status, found[name].gates) == ("SKIPPED", True)
    assert "12%" in found["F1 on embedded data"].reason
    verdict = verdict_of(list(found.values()))
    assert verdict.exit_code(strict=True) == 3
    assert "whole training" in verdict.sentence


def test_a_training_that_the_user_cut_is_what_was_asked_for(judged):
    found = judged(config={"max_steps": 2}, facts={"epoch_share": 0.2})
    assert not found["whole training"].gates
    assert not found["F1 on embedded data"].gates


def test_targets_that_were_set_and_not_judged_are_named(judged, tmp_path):
    judged(config={"target_samples_per_s": 1000, "target_allreduce_gbps": 5, "target_memory_gb": 12})
    assert missed(Run(tmp_path)) == {
        "target_samples_per_s": ["= 1000"],
        "target_memory_gb": ["= 12"],
    }  # a stand-in on a CPU


def test_a_run_of_another_benchmark_one_without_checkpoint_and_a_finished_one_are_not_resumed(tmp_path):
    config = build("squad", {"benchmark": "squad", "resume": str(tmp_path)})
    save_config(build("machine", {"benchmark": "machine"}), tmp_path)
    with pytest.raises(UserError, match="a run of machine"):
        refuse(config)
    save_config(build("squad", {"benchmark": "squad"}), tmp_path)
    with pytest.raises(UserError, match="left no checkpoint"):
        refuse(config)
    (tmp_path / "checkpoints").mkdir()
    refuse(config)
    write_json(tmp_path / "status.json", {"outcome": "stopped"})
    refuse(config)
    write_json(tmp_path / "status.json", {"outcome": "complete"})
    with pytest.raises(UserError, match="this run is finished, nothing is left to train; start a new run"):
        refuse(config)


def test_the_targets_hold_for_a_whole_training_on_squad(judged):
    real = {
        "data": "squad",
        "model": "bert-base-uncased",
        "train_questions": 0,
        "eval_questions": 0,
        "target_f1": 88.0,
        "reference_f1": 88.5,
        "target_loss": 0.5,
    }
    found = judged(config=real, f1=87.9, exact_match=80.0)
    assert found["F1 target"].status == "FAIL"
    assert (found["F1 reference"].status, found["F1 reference"].gates) == ("FAIL", False)
    reached = judged(config=real, f1=88.0, exact_match=80.0)["F1 target"]
    assert (reached.status, reached.limit) == ("PASS", ">= 88.00")
    assert judged()["F1 on embedded data"].limit == ">= 88.00 for the stand-in", "no target of BERT"
    assert judged(config=real, losses=(2.0, 0.5))["final loss"].status == "FAIL"  # the loss has to be under its limit


def test_a_speed_that_rose_is_told_as_such_by_reading_and_warnings(tmp_path):
    config = build("squad", {"benchmark": "squad", "nproc": 2})
    speeds = [level * share for level in (63, 97, 94, 114) for share in (0.98, 0.99, 1.0, 1.01, 1.02)]
    for name, samples, drift in (
        ("rising", speeds, "rose from 63 to 114"),
        ("steady", [94.0] * 20, ""),
        ("two", [90.0, 98.0], ""),
    ):
        metrics = [derived(f"train_samples_per_s{config.scope()}", samples, "samples/s", "higher")]
        result = Result.of(config, status="complete", metrics=metrics, facts={"throughput_drift": drift})
        (tmp_path / name).mkdir()
        save_config(config, tmp_path / name)
        write_json(tmp_path / name / "machine.json", {})
        save_result(tmp_path / name, result)
        said = [*reading(Run(tmp_path / name)), *VIEW.warnings(config, result)]
        assert any("Training throughput rose from 63 to 114 samples/s by quarter" in one for one in said) == bool(drift)
        assert sum("no steady state" in one for one in said) == (2 if drift else 0)
        assert any("Training runs at 94" in one for one in said) == (not drift)


@pytest.mark.parametrize(
    ("settings", "facts", "expected"),
    [
        ({"train_questions": 0, "eval_questions": 0}, {}, "whole"),
        ({"train_questions": 4000}, {}, "shortened set"),
        ({"train_questions": 0, "eval_questions": 0}, {"epoch_share": 0.25}, "cut by the budget to 25%"),
        ({"train_questions": 4000, "max_steps": 10}, {"epoch_share": 0.5, "planned_steps": 10}, "cut by max_steps to 50%, shortened set"),
        ({"data": "minisquad"}, {}, "generated set"),  # of any size that was asked for: no whole, and not shortened
    ],
)  # fmt: skip
def test_what_was_trained_is_called_what_it_is(judged, tmp_path, settings, facts, expected):
    judged(config={"data": "squad", "model": "bert-base-uncased"} | settings, facts=facts)
    write_json(tmp_path / "machine.json", {})
    run = Run(tmp_path)
    assert {item.conditions["training"] for item in published(run) if item.quantity == "f1"} == {expected}
    assert any(f"Training and evaluation: {expected}." in sentence for sentence in reading(run)) == (
        expected not in ("whole", "generated set")
    )


def test_where_a_step_goes_adds_up_to_the_step(tmp_path):
    config = build("squad", {"nproc": 2})
    times = {"step_s": 0.2, "time_data_s": 0.01, "time_forward_s": 0.05, "time_backward_s": 0.1, "time_exchange_s": 0.03,
             "exchange_exposed_s": 0.02, "time_optimizer_s": 0.01}  # fmt: skip
    metrics = [measured(name, [value] * 4, "s", "lower") for name, value in times.items()]
    save_config(config, tmp_path)
    write_json(tmp_path / "machine.json", {})
    save_result(tmp_path, Result.of(config, status="complete", metrics=metrics, facts={}))
    assert "The largest part of a step goes to backward: 100 ms of 200 ms (50%)." in reading(Run(tmp_path))
