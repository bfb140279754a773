"""Where a step goes, what is named as its bottleneck, advice, checks and scaling: on rows whose answer is known."""

import math

import numpy as np
import pytest

from benchlib.benchmarks.parallel import analysis, measure
from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.shapes import MODELS, Job, Layout
from benchlib.benchmarks.parallel.spec import SPEC, main
from benchlib.judge.numbers import judged
from benchlib.spec import checks
from benchlib.spec.tables import Rows

KERNELS = [
    {"class": "matmul", "time_s": 0.05, "flops": 4e9, "bytes": 1e8, "calls": 80},
    {"class": "elementwise", "time_s": 0.02, "flops": 1e7, "bytes": 2e8, "calls": 200},
    {"class": "communication", "time_s": 0.01, "flops": 0, "bytes": 4e6, "calls": 2},
    {"class": "optimizer", "time_s": 0.01, "flops": 1e6, "bytes": 2e7, "calls": 9},
]
LINKS = [{"op": "all_reduce", "alpha_s": 1e-4, "beta_s_per_byte": 1e-9, "world": 2, "wrong_elements": 0}]
RUN = {
    "startup_s": 2.0, "total_s": 9.0, "collective": "gloo", "layout": "", "device": "cpu", "threads": 1, "torch": "2.13",
    "precision": "fp32", "rank_flops": 1e11, "alone_flops": 1e11, "copy_bytes_per_s": 1e10,
    "memory_bytes": 1e10, "learning_rate_min": 1e-3, "model_error": 0.1,
    "why": {},
}  # fmt: skip


def row(strategy="data", step_s=0.1, **more):
    """A step of 0.1 s on two ranks, 0.07 of it kernels, 0.01 the optimizer, 0.01 exposed communication, 0.01 launching."""
    job = Job(MODELS["tiny"], strategy, Layout(data=2) if strategy == "data" else Layout())
    why = dict.fromkeys(("bubble_share", "compute_s", "predicted_step_s"), "none")
    known = {
        "status": "ok", "steps_s": [0.98 * step_s, 0.99 * step_s, *[step_s] * 6, 1.01 * step_s, 1.02 * step_s], "world": 2,
        "forward_s": 0.03, "backward_s": 0.06, "optimizer_s": 0.01, "data_s": 0.0, "exposed_s": 0.01,
        "rank_own_s": [0.09, 0.09], "explained_shares": [0.97, 1.0], "peak_bytes": [3e7, 4e7], "losses": [2.0, 1.5],
        "counted_parameters": job.shape.parameters, "peak_flops": 2e11, "why": why, "loss_error": 1e-15, "weight_error": 1e-11,
        "loss_error_fp32": 1e-7, "gradient_error": 1e-7,
        **dict.fromkeys((f"estimated_{part}_gb" for part in ("parameters", "gradients", "optimizer", "activations", "buffers")), 0.01),
    }  # fmt: skip
    values = job.row() | known | more
    return values | analysis.columns(values, KERNELS)


INJECTED = {
    "compute": {},
    "data": {"step_s": 0.2, "data_s": 0.1, "rank_own_s": [0.19, 0.19]},
    "communication": {"step_s": 0.2, "exposed_s": 0.11},
    # The last rank takes twice as long: the first one waits in the exchange, the slow one does not.
    "waiting": {"step_s": 0.2, "exposed_s": 0.06, "rank_own_s": [0.09, 0.19]},
    "bubble": {"step_s": 0.2, "data": 1, "pipeline": 2, "schedule": "1f1b", "bubble_share": 0.5, "exposed_s": 0.11},
    "launch": {"step_s": 0.2, "rank_own_s": [0.19, 0.19]},
}


@pytest.mark.parametrize("part", INJECTED)
def test_what_was_planted_is_named(part):
    there = row(**INJECTED[part])
    parts, step = analysis.waterfall(there, KERNELS), 0.1 if part == "compute" else 0.2
    assert there["bottleneck"] == part and sum(parts.values()) == pytest.approx(step) and min(parts.values()) >= 0
    words = analysis.sentence(there | {"way": "data"}, 1e11)
    assert analysis.PARTS[part] in words and "at most" in words
    if part != "compute":
        assert parts[part] == pytest.approx(0.1, abs=0.012)
        assert there["faster_without"] == pytest.approx(step / (step - parts[part]))


def test_the_parts_of_a_plain_step():
    parts = analysis.waterfall(row(), KERNELS)
    expected = {"compute": 0.05, "elementwise": 0.02, "optimizer": 0.01, "communication": 0.01, "launch": 0.01}
    assert {name: value for name, value in parts.items() if value > 1e-12} == pytest.approx(expected)
    slow = [KERNELS[0] | {"time_s": 0.3}, KERNELS[1] | {"time_s": 0.1}]  # a profiler that stretches kernels
    assert analysis.waterfall(row(), slow)["compute"] == pytest.approx(0.08 * 0.75)


SINGLE, DATA, SHARDED = ("single", 0.2, 9e9), ("data", 0.1, 8e9), ("sharded", 0.15, 4e9)


@pytest.mark.parametrize(("rows", "memory_gb", "said"), [
    ((SINGLE, DATA, SHARDED), 99, "take data, the fastest: 80.00 samples/s, 1.50 × the next one (sharded)."),
    ((SINGLE, DATA, SHARDED), 5, "take sharded, the only one that ran and fits: 53.33 samples/s; the model does not fit one device."),
    ((DATA,), 1, "no strategy fits the memory of a device"),
    ((DATA, ("sharded", 0.101, 4e9)), 99, "take sharded, as fast as data within the noise and with 50% of its memory."),
])  # fmt: skip
def test_advice_takes_the_fastest_that_fits_and_of_equal_ones_the_smallest(rows, memory_gb, said):
    run = run_of([row(name, step_s, peak_bytes=[peak, peak]) for name, step_s, peak in rows])
    assert said in analysis.advice(main.whole(run), memory_gb)


def run_of(rows, **config):
    config = ParallelConfig(nproc=2, **config)
    kernels = [item | {"key": one["key"], "scaling": ""} for one in rows for item in KERNELS]
    tables = {"strategies": rows, "kernels": kernels, "stages": [], "alpha_beta": LINKS}
    return Rows(config, 2, tables | {"scaling": [], "run": [RUN]})


def statuses(run):
    rows, _ = judged(SPEC.tables, run)
    asked = [check for check in SPEC.checks if check.when(run.config) and not check.rule]
    return {answer.name: answer.status for check in asked for answer in checks.judge(check, rows, [])}


WRONG = {
    "equal to one device in fp64": ({"loss_error": 1.1e-12}, {"weight_error": math.inf}),
    "equal to one device in fp32": ({"gradient_error": 2e-5},), "same losses": ({"losses": [2.0, 1.51]},),
    "parameter count": ({"counted_parameters": 940799},), "parts of a step": ({"explained_shares": [0.6, 1.0]},),
}  # fmt: skip


@pytest.mark.parametrize(("check", "change"), [(check, change) for check in WRONG for change in WRONG[check]])
def test_what_is_wrong_fails_its_check_alone(check, change):
    answers = statuses(run_of([row("single", world=1), row() | change]))
    assert {name for name, status in answers.items() if status != "PASS"} == {check}


@pytest.mark.parametrize(("planted", "part"), analysis.INJECTED.items())
def test_a_planted_fault_that_is_not_named_fails(planted, part):
    def status(one):
        return statuses(run_of([one], planted=planted, planted_slowdown=1.0))["injected bottleneck"]

    assert status(row(**INJECTED[part])) == "PASS"
    assert status(row()) == "FAIL"


def scaled(kind):
    """Rows of one rank at 40 samples/s, with the batch of all or half of it, and of two at 64; and their points."""
    batch = 8 if kind == "strong" else 4
    single = row("single", batch / 40, world=1, data=1, batch_size=batch, scaling=kind, key=f"tiny single {kind}")
    rows = [single, row("data", 0.125, compute_s=0.1, predicted_step_s=0.11)]
    return list(analysis.points(rows))


@pytest.mark.parametrize("kind", ["strong", "weak"])
def test_efficiency_with_its_interval_and_the_model_beside_it(kind):
    first, second = scaled(kind)
    assert [(point["kind"], point["world"]) for point in (first, second)] == [(kind, 1), (kind, 2)]
    assert (first["efficiency"], first["low"], first["high"]) == (1, 1, 1) and "predicted" not in first
    assert second["efficiency"] == pytest.approx(64 / 80)
    # Steps of 0.98 to 1.02 times 0.1 s: the worse ends of both are at most so far apart.
    assert 0.8 * 0.98 / 1.02 <= second["low"] < 0.8 < second["high"] <= 0.8 * 1.02 / 0.98
    assert second["predicted"] == pytest.approx(8 / 0.11 / 80) and second["error"] == pytest.approx(0.125 / 0.11 - 1)


def test_a_rate_is_all_samples_over_all_time_and_so_is_the_utilisation():
    """Four steps of 8 samples in 1 + 1 + 1 + 5 s."""
    stalled = {**row(), "steps_s": [1.0, 1.0, 1.0, 5.0]}
    rows, peak = run_of([stalled]), stalled["peak_flops"]
    values = {name: main[name].number(stalled, rows) for name in ("samples_per_s", "mfu", "steps_s")}
    assert values == pytest.approx({"samples_per_s": 32 / 8, "mfu": 4 * stalled["flops"] / 8 / peak, "steps_s": 1.0})


def test_all_steps_of_the_single_device_are_the_base_of_the_scaling():
    """Eight samples in 0.2 s, and measured again in 0.3 s: 32 samples/s."""
    single, again = row("single", 0.2, world=1, data=1), row("single", 0.3, world=1, data=1, scaling="strong", key="s")
    first, second = analysis.points([single, again, row("data", 0.125)])
    assert (first["samples_per_s"], second["efficiency"]) == pytest.approx((32, 64 / (2 * 32)))


def test_steps_of_ranks_that_end_at_different_times_add_up_to_the_wall_time():
    ends = np.arange(1, 101)[:, None] + np.random.default_rng(0).normal(0.0, 0.005, (100, 8))
    phases = dict.fromkeys(measure.PHASES, 0.25)
    ranks = [
        {"times": [{"step_s": step_s, **phases} for step_s in np.diff(own, prepend=0.0)], "losses": [1.0]}
        | {"exposed_s": 0.0, "traced_s": 1.0, "peak": 1.0, "held": {}}
        for own in ends.T
    ]
    steps_s = measure._row(Job(MODELS["tiny"], "data", Layout(data=8)), ranks, [])["steps_s"]
    assert (len(steps_s), sum(steps_s)) == (100, pytest.approx(ends[-1].max()))
