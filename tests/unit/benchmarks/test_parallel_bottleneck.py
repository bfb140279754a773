"""Where a step goes, what is named as its bottleneck, advice, scores and scaling: on rows whose answer is known."""

from types import SimpleNamespace

import pytest

from benchlib.benchmarks.parallel import bottleneck, figures, judge, scaling, tables
from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.estimate import predict
from benchlib.benchmarks.parallel.shapes import MODELS
from benchlib.results.run import Result

KERNELS = [
    {"class": "matmul", "time_s": 0.05, "flops": 4e9, "bytes": 1e8, "calls": 80},
    {"class": "elementwise", "time_s": 0.02, "flops": 1e7, "bytes": 2e8, "calls": 200},
    {"class": "communication", "time_s": 0.01, "flops": 0, "bytes": 4e6, "calls": 2},
    {"class": "optimizer", "time_s": 0.01, "flops": 1e6, "bytes": 2e7, "calls": 9},
]
PEAKS = {"matmul_flops": {"fp32": 1e11, "bf16": 3e11}, "matmul_flops_alone": 1e11, "copy_bytes_per_s": 1e10}


def row(strategy="data", **more):
    """A step of 0.1 s on two ranks, 0.07 of it kernels, 0.01 the optimizer, 0.01 exposed communication, 0.01 launching."""
    values = {
        "key": f"tiny {strategy}", "model": "tiny", "strategy": strategy, "schedule": "", "data": 2, "tensor": 1, "pipeline": 1,
        "context": 1, "world": 2, "scaling": "", "batch_size": 8, "seq_len": 64, "micro_batches": 1, "precision": "fp32",
        "checkpointing": False, "compile": False, "parameters": MODELS["tiny"].parameters, "status": "ok", "reason": "",
        "step_s": 0.1, "step_ci_low": 0.098, "step_ci_high": 0.102, "n": 8, "forward_s": 0.03, "backward_s": 0.06, "optimizer_s": 0.01,
        "data_s": 0.0, "comm_s": 0.02, "comm_hidden_share": 0.5, "bubble_s": None, "bubble_share": None, "rank_own_s": [0.09, 0.09],
        "flops": MODELS["tiny"].step_flops(8, 64), "peak_bytes": [3e7, 4e7], "mfu": 0.2,
    } | more  # fmt: skip
    values["samples_per_s"] = values["batch_size"] / values["step_s"]
    return values | {"tokens_per_s": values["samples_per_s"] * values["seq_len"]}


PLANTED = {
    "compute": {},
    "data": {"step_s": 0.2, "data_s": 0.1, "rank_own_s": [0.19, 0.19]},
    "communication": {"step_s": 0.2, "comm_s": 0.12, "comm_hidden_share": 1 / 12},
    # The last rank takes twice as long: the first one waits in the exchange, the slow one does not.
    "waiting": {"step_s": 0.2, "comm_s": 0.06, "comm_hidden_share": 0.0, "rank_own_s": [0.09, 0.19]},
    "bubble": {
        "step_s": 0.2,
        "data": 1,
        "pipeline": 2,
        "schedule": "1f1b",
        "forward_s": None,
        "bubble_share": 0.5,
        "comm_s": 0.11,
        "comm_hidden_share": 0.0,
    },
    "launch": {"step_s": 0.2, "rank_own_s": [0.19, 0.19]},
}


@pytest.mark.parametrize("part", PLANTED)
def test_what_was_planted_is_named(part):
    there = row(**PLANTED[part])
    parts = bottleneck.waterfall(there, KERNELS)
    found = bottleneck.bottleneck(parts)
    assert found.part == part and sum(parts.values()) == pytest.approx(there["step_s"]) and min(parts.values()) >= 0
    words = bottleneck.sentence(there, KERNELS, PEAKS)
    assert bottleneck.PARTS[part] in words and "at most" in words
    if part != "compute":
        assert found.seconds == pytest.approx(0.1, abs=0.012)
        assert found.bound == pytest.approx(there["step_s"] / (there["step_s"] - found.seconds))


def test_the_parts_of_a_plain_step():
    parts = bottleneck.waterfall(row(), KERNELS)
    expected = {"compute": 0.05, "elementwise": 0.02, "optimizer": 0.01, "communication": 0.01, "launch": 0.01}
    assert {name: value for name, value in parts.items() if value > 1e-12} == pytest.approx(expected)
    slow = [KERNELS[0] | {"time_s": 0.3}, KERNELS[1] | {"time_s": 0.1}]  # a profiler that stretches kernels
    assert bottleneck.waterfall(row(), slow)["compute"] == pytest.approx(0.08 * 0.75)
    assert bottleneck.waterfall(row(), [])["compute"] == pytest.approx(0.08)


def test_matrix_products_beside_their_peak():
    """At the peak the products take flops / 2 / peak; that bounds the gain."""
    there = row(flops=4e9)
    assert "take 20 ms at the measured peak" in bottleneck.sentence(there, KERNELS, PEAKS)
    assert "1.43 × as fast at most" in bottleneck.sentence(there, KERNELS, PEAKS)  # 0.1 / (0.05 + 0.02)
    assert "only more or faster devices" in bottleneck.sentence(there | {"flops": 1e11}, KERNELS, PEAKS)


def fast(strategy, step_s, peak, **more):
    ends = {"step_ci_low": 0.98 * step_s, "step_ci_high": 1.02 * step_s}
    return row(strategy, step_s=step_s, peak_bytes=[peak, peak], **ends, **more)


def test_what_the_noise_hides_is_not_called_the_fastest():
    def title(*rows):
        run = SimpleNamespace(result=SimpleNamespace(tables={"strategies": list(rows)}, facts={}))
        return figures.strategies(run).alt

    data, near, far = fast("data", 0.100, 8e9), fast("single", 0.102, 9e9, world=1), fast("sharded", 0.15, 4e9)
    assert "data and single: equal within the noise, up to 80.00 samples/s" in title(data, near, far)
    assert "data is fastest: 80.00 samples/s" in title(data, far)
    assert "1.02 × the next one (single), within the noise." in bottleneck.advice([data, near])


def test_advice_takes_the_fastest_that_fits():
    rows = [fast("single", 0.2, 9e9, world=1), fast("data", 0.10, 8e9), fast("sharded", 0.15, 4e9)]
    assert "take data, the fastest" in bottleneck.advice(rows) and "1.50 × the next one (sharded)" in bottleneck.advice(
        rows
    )
    tight = bottleneck.advice(rows, memory_bytes=5e9)
    assert "take sharded" in tight and "the model does not fit one device." in tight
    slow_first = [fast("sharded", 0.15, 4e9), fast("data", 0.10, 4.5e9), fast("single", 0.2, 9e9, world=1)]
    words = bottleneck.advice(slow_first, memory_bytes=5e9)
    assert "take data, the fastest" in words and "does not fit one device" in words and "first" not in words
    assert "the only one that ran and fits" in bottleneck.advice(rows[1:2])
    assert "no strategy fits" in bottleneck.advice(rows, memory_bytes=1e9)
    lacking = [{"strategy": "single", "model": "tiny", "status": "failed", "reason": "out of memory"}]
    assert "does not fit one device" in bottleneck.advice(rows[1:], lacking)
    skipped = row("single", world=1, status="skipped", reason="a rank would need about 9 GB of memory")
    assert "the model does not fit one device" in bottleneck.sentences(run_of([skipped, *rows[1:]]))[1]


def test_advice_takes_less_memory_where_noise_tells_no_difference():
    rows = [fast("data", 0.10, 8e9), fast("sharded", 0.103, 4e9)]
    assert "take sharded, as fast as data within the noise and with 50% of its memory" in bottleneck.advice(rows)


def run_of(rows, planted="", **more):
    config = ParallelConfig(nproc=2, planted=planted, planted_slowdown=1.0 if planted else 0.0)
    kernels = [item | {"key": one["key"]} for one in rows for item in KERNELS]
    links = [{"op": "all_reduce", "alpha_s": 1e-4, "beta_s_per_byte": 1e-9, "reason": "", "world": 2}]
    content = {"strategies": rows, "kernels": kernels, "alpha_beta": links, "communication": []} | more
    result = Result(
        benchmark="parallel",
        tier="smoke",
        backend="cpu",
        world_size=2,
        status="complete",
        facts={"machine_peaks": PEAKS},
        tables=content,
    )
    return SimpleNamespace(config=config, result=result, machine={"cpu": {"model": "CPU"}}, samples={}, events=[])


@pytest.mark.parametrize(("planted", "part"), bottleneck.PLANTED.items())
def test_a_planted_fault_that_is_not_named_fails(planted, part):
    def status(rows):
        return {check.name: check.status for check in bottleneck.checks(run_of(rows, planted))}["planted bottleneck"]

    assert status([row(**PLANTED[part])]) == "PASS"
    assert status([row()]) == "FAIL"
    assert status([row("tensor", world=1)]) == "FAIL"  # nothing to find it in


def test_parts_that_do_not_explain_a_step_fail():
    def status(*shares):
        return bottleneck.checks(run_of([row(explained_shares=list(shares))]))[0].status

    assert (status(0.97, 1.0), status(0.6, 1.0), status(0.97, 1.2)) == ("PASS", "FAIL", "FAIL")


def test_scores_follow_from_the_columns_of_their_table():
    rows = [fast("single", 0.2, 6e7, world=1), fast("data", 0.125, 5e7), row("tensor", status="skipped", reason="no")]
    run = run_of(rows)
    single, data = tables.summary(run)
    assert (single["performance score"], data["performance score"]) == (pytest.approx(62.5), 100)
    assert (single["efficiency score"], data["efficiency score"]) == (100, pytest.approx(80))
    assert data["memory efficiency"] == pytest.approx(16 * data_parameters() / 1e8)
    assert tables.not_run(run) == [{"model": "tiny", "strategy": "tensor", "why": "no"}]
    assert data["forward ms"] == 30 and data["hardware"] == "2 x CPU"


def test_a_suite_has_a_row_for_each_model():
    rows = [
        fast("data", 0.1, 5e7),
        fast("sharded", 0.2, 5e7),
        fast("data", 0.4, 5e7, model="small", key="small data", predicted_step_s=0.3),
    ]
    run = run_of(rows)
    assert [row["performance score"] for row in tables.summary(run)] == [100, 50, 100]  # of the best of the same model
    tiny, small = tables.of_suite(run)
    assert (tiny["model"], tiny["strategies"], tiny["best"], small["samples/s"]) == ("tiny", 2, "tiny data", 20)
    assert [row["predicted"] for row in tables.steps(run)] == [None, None, 300]
    assert [text.split(":")[1].split()[0] for text in bottleneck.sentences(run)] == ["tiny", "tiny", "small", "small"]
    assert tables.of_suite(run_of(rows[:2])) == []


def data_parameters():
    return MODELS["tiny"].parameters


def points():
    single = row("single", world=1, data=1, step_s=0.2, comm_s=0.0, rank_own_s=[0.2])
    last = row("data", step_s=0.125, compute_s=0.1)
    links = [{"op": "all_reduce", "alpha_s": 1e-4, "beta_s_per_byte": 1e-9, "world": 2}]
    last["predicted_step_s"] = predicted = predict(last, PEAKS, links, MODELS["tiny"])
    base = {"key": "tiny data", "model": "tiny", "strategy": "data", "schedule": "", "kind": "strong", "batch_size": 8}
    scale = [
        base | {"world": 1, "step_s": 0.2, "samples_per_s": 40.0, "samples_per_s_low": 39.0, "samples_per_s_high": 41.0, "predicted_step_s": None},
        base | {"world": 2, "step_s": 0.125, "samples_per_s": 64.0, "samples_per_s_low": 62.0, "samples_per_s_high": 66.0, "predicted_step_s": predicted},
    ]  # fmt: skip
    return [single, last], scale


def test_efficiency_with_its_interval_and_the_model_beside_it():
    strategies, rows = points()
    first, last = scaling.points({"strategies": strategies, "scaling": rows})
    assert (first.efficiency, first.predicted) == (1, None)
    assert last.efficiency == pytest.approx(0.8)
    assert (last.low, last.high) == (pytest.approx(62 / 82), pytest.approx(66 / 78))
    assert last.predicted == pytest.approx(8 / last.predicted_step_s / 80) and 0.8 < last.predicted < 1
    assert last.error == pytest.approx(0.125 / last.predicted_step_s - 1)
    assert scaling.points({"scaling": rows[1:]}) == []


@pytest.mark.parametrize(
    ("share", "words"), [(0.5, "predicted the steps to 50% (median of 1 strategy)"), (0.6, "No prediction: ")]
)
def test_a_model_that_is_far_off_predicts_nothing(share, words):
    rows, scale = points()
    for one in (rows[1], scale[1]):
        one["predicted_step_s"] = one["step_s"] / (1 + share)
    run = run_of(rows, scaling=scale)
    shown = share <= scaling.MOST_OFF
    assert words in scaling.forecast(run.result.tables) and words in " ".join(judge.reading(run))
    steps, curve = tables.steps(run), tables.curves(run)
    assert [(row["predicted"] is not None) for row in steps] == [False, shown]
    assert (curve[1]["model"] is not None) == (curve[1]["measured over model"] is not None) == shown
    picture = figures.curves(run)
    assert ("dashed" in picture.alt) == shown and (
        "no prediction, the model's step is off by 60%" in picture.alt
    ) != shown
    ends = [line for axes in picture.axes for line in axes.lines if line.get_linestyle() == "--"]
    assert bool(ends) == shown


def test_pictures_and_tables_of_planted_rows():
    rows, scale = points()
    pipe = row("pipeline", key="tiny pipeline 1f1b", micro_batches=4, **PLANTED["bubble"])
    stages = [
        {"key": pipe["key"], "rank": rank, "micro_batch": 0, "stage": rank, "phase": phase, "start_s": start, "end_s": start + 0.05}
        for rank, phase, start in ((0, "forward", 0), (1, "forward", 0.05), (1, "backward", 0.1), (0, "backward", 0.15))
    ]  # fmt: skip
    run = run_of([*rows, pipe], scaling=scale, stages=stages)
    drawn = {name: draw(run) for name, draw in figures.FIGURES.items()}
    assert [name for name, picture in drawn.items() if picture.empty] == []
    assert "80% efficiency on 2 devices" in drawn["scaling"].alt and "not measured" in drawn["scaling"].alt
    assert "the bubble is 50% of the step" in drawn["stages"].alt
    assert (
        "matmul kernels" in drawn["roofline"].alt.lower() and "80% of their roof" in drawn["roofline"].alt
    )  # 4e9 / 0.05 of 1e11
    shown = tables.tables(run)
    assert [one["from"] for one in shown["Scaling"]] == [
        "measured",
        "measured",
        "the model alone",
    ]  # 8 samples: no more copies
    assert shown["Bubble"][0]["model of equal stages"] == pytest.approx(0.2)
    assert all(draw(run_of([])).empty for draw in figures.FIGURES.values())
