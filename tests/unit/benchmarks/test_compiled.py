"""Parameters of the compiled path, and what a run is judged by: each check can fail."""

import copy

import numpy as np
import pytest

from benchlib.benchmarks.compiled import figures, judge, programs
from benchlib.benchmarks.compiled.config import CompiledConfig
from benchlib.config.schema import build, save_config
from benchlib.core.errors import UserError
from benchlib.judge.baselines import Comparison
from benchlib.judge.numbers import fault_of, judged_view, within
from benchlib.results.metrics import measured
from benchlib.results.run import Result, Run, save_result

NONE = Comparison(status="NO_BASELINE")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"executors": ["xlb"]}, "no executor 'xlb'.*xla"),
        ({"executors": ["bf16"]}, "computes in bf16: name one in fp32"),
        ({"lengths": [513]}, "positions for 512"),
        ({"runtimes": ["tvm"]}, "runtimes"),
        ({"models": []}, "models"),
    ],
)
def test_what_does_not_fit_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        build("compiled", {"benchmark": "compiled", **values})


def test_eager_is_always_timed_and_first():
    assert CompiledConfig(executors=["xla"]).executors == ["eager", "xla"]
    assert CompiledConfig(batch_sizes=[8, 1], lengths=[128]).shapes == [(1, 128), (8, 128)]


def tables():
    program = {
        "program": "bert",
        "max_abs": 2e-6,
        "one_minus_cos": 1e-13,
        "reference_error": 1e-6,
        "export_s": 1.0,
        "dot_flops": 100,
        "formula_flops": 100.0,
    }
    timed = {
        "batch": 1,
        "length": 32,
        "status": "timed",
        "one_minus_cos": 0.0,
        "reference_error": 3e-6,
        "peak_share": 0.3,
        "ci_low": None,
        "ci_high": None,
        "reason": "",
    }
    return {
        "programs": [program, {"program": "joint", "dot_flops": 300}, {"program": "replicas", "dot_flops": 300, "export_s": None}],
        "gradients": [
            {"gradients": "a", "replicas": 1, "relative": 5e-7, "reference_error": 1e-7, "parameters": 71},
            {"gradients": "b", "replicas": 2, "relative": 5e-7, "reference_error": 1e-7, "parameters": 71, "replicas_equal": True},
        ],
        "curve": [{"step": step + 1, "eager": 3.0, "xla": 3.00001} for step in range(5)],
        "runtimes": [
            {"runtime": "xla", "status": "computed", "max_abs": 1e-7, "one_minus_cos": 0.0, "reason": "XLA"},
            {"runtime": "iree", "status": "SKIPPED", "max_abs": None, "one_minus_cos": None, "reason": "pip install"},
        ],
        "executors": [
            {"executor": "eager", "max_abs": 0.0, "wall_ms": 4.0, "cpu_ms": 8.0, "ready_s": 1.0, **timed},
            {"executor": "xla", "max_abs": 1e-6, "wall_ms": 2.0, "cpu_ms": 3.0, "ready_s": 3.0, **timed},
        ],
    }  # fmt: skip


def judged(folder, stored, **fields):
    config = CompiledConfig(nproc=2, runtimes=["xla", "iree"], **fields)
    folder.mkdir()
    save_config(config, folder)
    metrics = [measured("total_s", 5.0, "s", "lower"), measured("latency_ms_xla_b1_s32_tiny", 2.0, "ms", "lower")]
    metrics.append(measured("cpu_over_eager_xla_b1_s32_tiny", [0.21, 0.25, 0.8], "", "lower"))
    save_result(
        folder,
        Result.of(
            config, status="complete", metrics=metrics, tables=stored, facts={"all_reduce": {"text": 72, "compiled": 1}}
        ),
    )
    run = Run(folder)
    view, faults = judged_view(run, judge.lacks, ())
    statuses = {check.name: check for check in judge.checks(view, NONE)}
    return {name: check.status for name, check in statuses.items()}, run, statuses, faults


def test_a_right_run_passes_and_is_read(tmp_path):
    statuses, run, _, faults = judged(tmp_path / "run", tables())
    assert faults == []
    assert {name for name, status in statuses.items() if status != "PASS"} <= {
        "numbers agree",
        "latency_ms_xla_b1_s32_tiny vs baseline",
    }
    sentences = " ".join(judge.reading(run))
    assert "pays after 1,000 calls" in sentences  # 2 s more to get ready, 2 ms won a call
    assert "0.25 of eager's CPU time" in sentences  # as its tile, the median of the rounds
    assert "72 all-reduces" in sentences and "into 1" in sentences


@pytest.mark.parametrize(
    ("check", "table", "row", "change"),
    [
        ("programs", "programs", 0, {"max_abs": 2e-5}),
        ("programs", "programs", 0, {"one_minus_cos": 1e-9}),
        ("programs", "programs", 0, {"program": "other"}),
        ("programs", "programs", 0, {"max_abs": 1e300}),
        ("programs", "programs", 0, {"max_abs": float("inf")}),
        ("programs", "programs", 0, {"max_abs": None}),
        ("programs", "programs", 0, {"max_abs": -1e-6}),
        ("programs", "programs", 0, {"one_minus_cos": float("nan")}),
        ("programs", "programs", 0, {"reference_error": 1e300}),
        ("programs", "programs", 0, {"reference_error": None}),
        ("FLOPs", "programs", 0, {"formula_flops": None}),
        ("FLOPs", "programs", 1, {"dot_flops": None}),
        ("FLOPs", "programs", 1, {"program": "other"}),
        ("FLOPs", "programs", 0, {"dot_flops": 101}),
        ("FLOPs", "programs", 1, {"dot_flops": 299}),
        ("gradients", "gradients", 0, {"relative": 2e-6}),
        ("gradients", "gradients", 0, {"relative": None}),
        ("gradients", "gradients", 0, {"reference_error": 1e300}),
        ("data parallel", "gradients", 1, {"relative": 2e-6}),
        ("data parallel", "gradients", 1, {"replicas_equal": False}),
        ("data parallel", "gradients", 1, {"replicas": 3}),
        ("training", "curve", 3, {"xla": 3.001}),
        ("training", "curve", 3, {"xla": None}),
        ("runtimes", "runtimes", 0, {"max_abs": 1e-4}),
        ("runtimes", "runtimes", 0, {"max_abs": None}),
        ("executors", "executors", 1, {"max_abs": 1e-3}),
        ("executors", "executors", 1, {"max_abs": 1.1e-5}),  # parity's limit, and not ten times as much
        ("executors", "executors", 1, {"max_abs": None}),
        ("executors", "executors", 1, {"max_abs": -1e-6}),
        ("executors", "executors", 1, {"one_minus_cos": 1e-9}),
        ("executors", "executors", 1, {"reference_error": 1e-3}),
        ("executors", "executors", 1, {"length": 64}),
    ],
)
def test_a_wrong_number_fails_its_check_alone(tmp_path, check, table, row, change):
    stored = copy.deepcopy(tables())
    stored[table][row].update(change)
    statuses, _, found, faults = judged(tmp_path / "run", stored)
    ((name, value),) = change.items()
    if not within(value, least=0.0) and not isinstance(value, (str, bool)):
        assert f"{name} is {fault_of(value)} in row {row + 1} of {table}" in found[check].reason and faults
    assert [name for name, status in statuses.items() if status == "FAIL"] == [check]


@pytest.mark.parametrize(("apart", "words"), [(0.0, "steps are equal"), (1e-5, "steps are within 1e-05")])
def test_the_picture_of_losses_says_how_far_they_are_apart(tmp_path, apart, words):
    stored = tables()
    stored["curve"] = [{"step": step + 1, "eager": 3.0, "xla": 3.0 + apart} for step in range(5)]
    assert words in figures.curve(judged(tmp_path / "run", stored)[1]).alt


def test_a_limit_of_the_executors_grows_with_the_references_own_error(tmp_path):
    for error, status in ((1e-5, "PASS"), (8e-6, "FAIL")):
        stored = tables()
        stored["executors"][1] |= {"max_abs": 2.9e-5, "reference_error": error}
        assert judged(tmp_path / f"run{error}", stored)[0]["executors"] == status


def test_one_minus_cosine_is_exact_where_the_formula_has_no_digit_left():
    a, b = np.array([1.0, 0.0], np.float64), np.array([1.0, 1e-9])
    assert programs.apart([a], [b]) == (1e-9, pytest.approx(5e-19, rel=1e-6, abs=0))


def test_limits_grow_with_the_references_own_error_and_not_for_ever():
    assert judge.eased(1e-6, 1e-7) == 1e-6
    assert judge.eased(1e-6, 1e-6) == pytest.approx(3e-6)
    assert judge.eased(1e-6, 1.0) == pytest.approx(1e-5)


def test_a_step_too_few_fails(tmp_path):
    stored = tables()
    stored["curve"].pop()
    assert judged(tmp_path / "run", stored)[0]["training"] == "FAIL"
