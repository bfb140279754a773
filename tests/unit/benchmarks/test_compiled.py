"""Parameters of the compiled path, and what a run is judged by: each check can fail."""

import pytest

from benchlib.benchmarks.compiled.config import CompiledConfig
from benchlib.benchmarks.compiled.spec import SPEC
from benchlib.config.schema import build, save_config
from benchlib.core.errors import UserError
from benchlib.core.events import Moment
from benchlib.judge.baselines import Comparison
from benchlib.results.run import Run

NONE = Comparison()
RUN = {
    "startup_s": 0.0, "total_s": 0.0, "collective": "gloo", "layout": "", "device": "cpu", "threads": 2, "torch": "2.13",
    "jax": "0.10", "stand_in": "tiny",
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"executors": ["xlb"]}, "no executor 'xlb'.*xla"),
        ({"executors": ["bf16"]}, "computes in bf16: name one in fp32"),
    ],
)
def test_what_does_not_fit_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        build("compiled", {"benchmark": "compiled", **values})


def tables():
    sizes = dict.fromkeys(("operations", "arguments", "text_bytes", "argument_bytes", "temporary_bytes"), 100)
    sizes |= dict.fromkeys(("export_s", "convert_s", "compile_s"), 1.0)
    program = {"max_abs": 2e-6, "one_minus_cos": 1e-13, "reference_error": 1e-6, **sizes}
    graph = dict.fromkeys(("max_abs", "one_minus_cos", "reference_error"), None) | sizes
    graph |= {"why": dict.fromkeys(graph, "its gradients are compared")}
    timed = {"batch": 1, "length": 32, "one_minus_cos": 0.0, "reference_error": 3e-6, "what": "a way"}
    timed |= {"eager_ms": 4.0, "eager_ready_s": 1.0, "gates": True}
    apart = {"relative": 5e-7, "reference_error": 1e-7, "parameters": 71, "unequal": 0}
    ran = {"max_abs": 1e-7, "one_minus_cos": 0.0, "compile_s": 1.0, "run_s": 1.0}
    of_eager = {"cpu_over_eager": [1.0] * 3, "ready_s": 1.0}
    of_xla = {"cpu_over_eager": [0.21, 0.25, 0.8], "ready_s": 3.0}
    return {
        "programs": [
            {"program": "bert", "dot_flops": 100, "formula_flops": 100.0, **program},
            {"program": "joint", "dot_flops": 300, "formula_flops": 300.0, **graph},
            {"program": "replicas", "dot_flops": 300, "formula_flops": 300.0, **graph},
        ],
        "gradients": [
            {"gradients": "XLA against autograd", "replicas": 1, **apart},
            {"gradients": "2 replicas against DDP", "replicas": 2, **apart},
        ],
        "curve": [{"step": step + 1, "eager": 3.0, "xla": 3.00001} for step in range(5)],
        "runtimes": [
            {"runtime": "xla", "what": "XLA", **ran},
            {"runtime": "iree", "status": "skipped", "reason": "pip install"},
        ],
        "targets": [{"target": "cuda", "status": "failed", "reason": "no such target"}],
        "executors": [
            {"executor": "eager", "max_abs": 0.0, "wall_ms": [4.0] * 3, "cpu_ms": [8.0] * 3, **of_eager, **timed},
            {"executor": "xla", "max_abs": 1e-6, "wall_ms": [1.0, 2.0, 5.0], "cpu_ms": [3.0] * 3, **of_xla, **timed},
            {"executor": "iree", "batch": 1, "length": 32, "status": "skipped", "reason": "pip install iree"},
        ],
        "run": [RUN],
    }


def judged(folder, stored, **fields):
    config = CompiledConfig(nproc=2, runtimes=["xla", "iree"], executors=["xla", "iree"], **fields)
    folder.mkdir()
    save_config(config, folder)
    SPEC.save(config, folder, Moment.now(), stored)
    run = Run(folder)
    return run, {check.name: check for check in SPEC.judge(run, NONE)}


def failed(checks):
    return [name for name, check in checks.items() if check.status == "FAIL"]


def test_a_right_run_passes_and_is_read(tmp_path):
    run, checks = judged(tmp_path / "run", tables())
    assert failed(checks) == []
    said = "xla at 1 x 32: 2 ms, 0.25 of eager's CPU time, ready after 3 s, which pays after 1,000 calls."
    assert said in SPEC.reading(run)
    assert run.result.value("cpu_over_eager_xla_b1_s32_tiny") == 0.25
    assert run.result.value("latency_ms_xla_b1_s32_tiny") == 2.0
    assert run.result.value("curve_max_abs") == pytest.approx(1e-5)


WRONG = [
    ("programs", "programs", 0, {"max_abs": 2e-5}),
    ("programs", "programs", 0, {"reference_error": 1e300}),
    ("FLOPs", "programs", 0, {"dot_flops": 101}),
    ("gradients", "gradients", 0, {"relative": 2e-6}),
    ("data parallel", "gradients", 1, {"relative": 2e-6}),
    ("data parallel", "gradients", 1, {"unequal": 1}),
    ("training", "curve", 3, {"xla": 3.001}),
    ("runtimes", "runtimes", 0, {"max_abs": 1e-4}),
    ("executors", "executors", 1, {"max_abs": 1.1e-5}),  # parity's limit, and not ten times as much
    ("executors", "executors", 1, {"one_minus_cos": 1e-9}),
]


@pytest.mark.parametrize(("check", "table", "row", "change"), WRONG)
def test_a_wrong_number_fails_its_check_alone(tmp_path, check, table, row, change):
    stored = tables()
    stored[table][row].update(change)
    _, checks = judged(tmp_path / "run", stored)
    assert set(failed(checks)) - {"numbers agree"} == {check}


def test_a_limit_grows_with_the_references_own_error_and_not_for_ever(tmp_path):
    for error, status in ((1e-5, "PASS"), (8e-6, "FAIL")):
        stored = tables()
        stored["executors"][1] |= {"max_abs": 2.9e-5, "reference_error": error}
        assert judged(tmp_path / f"run{error}", stored)[1]["executors"].status == status
