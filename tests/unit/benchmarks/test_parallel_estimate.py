"""Estimates of parallel strategies beside sums done by hand, presets of machines, and a layout of 128 ranks in one process."""

from types import SimpleNamespace

import pytest
import yaml
from click.testing import CliRunner

from benchlib.benchmarks.machine import command_init
from benchlib.benchmarks.parallel import estimate, planning, scaling
from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.estimate import Message, Rates, Work
from benchlib.benchmarks.parallel.shapes import MODELS, STRATEGIES, Layout, Shape
from benchlib.cli import main
from benchlib.core.errors import UserError
from benchlib.judge import presets
from benchlib.judge.references import registry, vendor_peak
from benchlib.results.metrics import derived
from benchlib.results.run import Result

SMALL = Shape("s", "decoder", 8, 4, 2, 2, 32, 16, 100)
# By hand: attention 4·64 + 4·8, feed-forward 2·8·32 + 32 + 8, two norms of 16; around them 116·8, a norm and 800.
LAYER = 288 + 552 + 32
COUNT = 4 * LAYER + 928 + 16 + 800
PEAKS = {"matmul_flops": {"fp32": 1e9}, "matmul_flops_alone": 1e9, "copy_bytes_per_s": 1e12}


def work(strategy, **more):
    axes = STRATEGIES[strategy].axes
    return Work(
        **{"shape": SMALL, "strategy": strategy, "layout": Layout(**dict.fromkeys(axes, 2)), "batch": 8, "seq": 16}
        | more
    )


@pytest.mark.parametrize(
    ("name", "count"),
    [("bert-base", 108_893_186), ("gpt2", 124_439_808), ("gpt2-xl", 1_557_611_200), ("llama-1b", 1_235_814_400), ("llama-8b", 8_030_261_248)],
)  # fmt: skip
def test_parameters_are_those_that_the_checkpoints_have(name, count):
    assert MODELS[name].parameters == count


def test_parameters_and_flops_by_hand():
    assert (SMALL.layer_parameters(), SMALL.parameters) == (LAYER, COUNT)
    products = 4 * (4 * 64 + 2 * 8 * 32) + 800
    assert SMALL.step_flops(8, 16) == 3 * 8 * (2 * 16 * products + 4 * 4 * 16**2 * 8)


def test_memory_by_hand():
    token = 4 * (
        2 * 8 + 2 * 8 + 2 * 8 + 2 * 8 + 2 * 32
    )  # norms' inputs and outputs, q k v and what attention gives, feed-forward
    passing = 4 * (
        2 * 32 + 4 * 8
    )  # gradients within one layer: around the activation function, of q k v and the output
    activations = 8 * 16 * (4 * token + passing + 12 * 100)
    alone = estimate.memory(work("single"))
    assert (alone.parameters, alone.gradients, alone.optimizer) == (4 * COUNT, 4 * COUNT, 8 * COUNT)
    assert (alone.activations, alone.buffers) == (activations, 2 * 4 * 800)  # AdamW's temporaries of the largest matrix
    assert estimate.memory(work("data")).total == 16 * COUNT + activations / 2 + 6400
    cut = estimate.memory(work("sharded"))
    assert (cut.parameters, cut.gradients, cut.optimizer) == (2 * COUNT, 2 * COUNT, 4 * COUNT)
    assert cut.buffers == 3200 + 16 * (COUNT - 4 * LAYER + LAYER)
    kept = estimate.memory(work("single", checkpointing=True)).total
    assert kept < alone.total
    halves = estimate.memory(work("pipeline", schedule="gpipe", micro_batches=4)).parameters
    assert halves == 4 * (2 * LAYER + 928)


def test_a_schedule_that_starts_backward_early_keeps_less():
    def of(schedule):
        return estimate.memory(work("pipeline", schedule=schedule, micro_batches=8, batch=64)).total

    assert of("1f1b") < of("gpipe")


def test_exchanges_by_hand():
    assert estimate.messages(work("data")) == [Message("all_reduce", "data", 4 * COUNT, 1)]
    gathers, cut = estimate.messages(work("sharded"))
    assert (gathers.size_bytes, cut.size_bytes) == (8 * COUNT, 4 * COUNT)
    reduced, gathered = estimate.messages(work("tensor"))
    states = 8 * 16 * 8 * 4
    assert (reduced.size_bytes, gathered.size_bytes) == ((4 * 4 + 2) * states, 8 * 16 * 100 * 4)
    # Ring of 4: 6 hops of 2 us each, and 1.5 times the bytes at 1 GB/s.
    assert estimate.exchange_s(Message("all_reduce", "data", 1e6, 3), 4, (2e-6, 1e-9)) == pytest.approx(
        3 * 6 * 2e-6 + 1.5e-3
    )


@pytest.mark.parametrize(
    ("schedule", "share"), [("gpipe", 3 / 11), ("1f1b", 3 / 11), ("interleaved", 3 / 19), ("zero_bubble", 1 / 17)]
)
def test_bubbles(schedule, share):
    assert estimate.bubble_share(Layout(pipeline=4), 8, schedule) == pytest.approx(share)


def test_what_was_measured_is_given_back():
    """A fit over 4 ranks predicts just its own line over 4 ranks."""
    rates = Rates.of_run(PEAKS, [{"op": "all_gather", "alpha_s": 3e-4, "beta_s_per_byte": 2e-9, "world": 4}], "fp32")
    assert estimate.exchange_s(
        Message("all_gather", "data", 1e6, 1), 4, rates.line("all_gather", 4, 1)
    ) == pytest.approx(3e-4 + 2e-3)
    assert Rates.of_run({}, [], "fp32") is None


def test_a_prediction_divides_the_work_and_adds_the_exchange():
    def row(strategy, **more):
        return {"strategy": strategy, "batch_size": 8, "seq_len": 16, "precision": "fp32", "model": "s"} | more

    free = [{"op": "all_reduce", "alpha_s": 0.0, "beta_s_per_byte": 0.0, "world": 2}]
    slow = [{"op": "all_reduce", "alpha_s": 0.5, "beta_s_per_byte": 0.0, "world": 2}]
    single, halves = row("single", step_s=2.0), row("data", data=2, compute_s=1.2)
    assert estimate.predict(halves, PEAKS, free, SMALL) == pytest.approx(1.2)
    assert estimate.predict(halves, PEAKS, slow, SMALL) == pytest.approx(1.7)
    assert estimate.predict(row("data", data=2), PEAKS, free, SMALL) is None
    unfitted = [{"op": "all_reduce", "alpha_s": None, "beta_s_per_byte": None, "world": 2}]
    assert estimate.predict(halves, PEAKS, unfitted, SMALL) is None  # no exchange is free
    line = scaling.extrapolated(halves, single, SMALL, PEAKS, slow, "strong")
    assert [n for n, _ in line] == [8] and 0 < line[0][
        1
    ] < 0.2  # 14 hops of 0.25 s beside a quarter of a second of work
    assert [n for n, _ in scaling.extrapolated(halves, single, SMALL, PEAKS, slow, "weak")] == [8, 64, 1024]


# Machines


def test_every_preset_is_whole_and_shares_the_registry():
    assert {"a100", "a10g", "a30-2x", "h100", "h200", "m4-max", "mi300x", "tpu-v5e", "v100-4x-nvlink"} <= set(
        presets.names()
    )
    for name in presets.names():
        assert all(len(given.source) > 8 for given in presets.preset(name).sources.values())
    h100 = presets.preset("h100")
    assert h100.peak_flops("bf16")[0] == vendor_peak("NVIDIA H100 80GB HBM3").dense_flops["bf16"]
    assert h100.link_bytes_per_s == 1e9 * registry().devices["h100-sxm"].link_gbytes_per_s
    assert presets.preset("v100-4x-nvlink").peak_flops("bf16") == (125e12, "fp16")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peak_tflops": {"bf16": {"value": 1979, "source": "with sparsity"}}}, "stands in references.yaml"),
        ({"memory_gb": {"value": 80, "source": ""}}, "memory_gb.source"),
        ({"device": "h100"}, "not in `devices`"),
        ({"devices": 8, "link": None}, "need `link`"),
        ({"nodes": 2, "network": None}, "need `network`"),
        ({"speed": 1}, "speed"),
    ],
)
def test_a_preset_that_is_wrong_is_refused(change, said):
    content = yaml.safe_load((presets.folder() / "h100.yaml").read_text())
    with pytest.raises(ValueError, match=said):
        presets.parse(content | change)


def test_unknown_machines_and_nodes():
    with pytest.raises(UserError, match="h100"):
        planning.machine("h10")
    with pytest.raises(UserError, match="no network"):
        planning.machine("a10g:4")
    with pytest.raises(UserError, match="whole number"):
        planning.machine("h100:many")
    assert planning.machine("h100:16").world == 128


def test_a_dry_run_says_what_fits_and_marks_every_figure():
    config = ParallelConfig(model="llama-8b", machine="h100", batch_size=8, precision="bf16", seq_len=512, untie=True)
    text = planning.expected(config)
    assert "estimates for h100" in text and "nothing was measured" in text and "lower bounds" in text
    assert "is the fastest that fits; one device needs" in text and "first" not in text
    assert "pytorch/torchtitan" in text and "assumed" in text
    rates = Rates.of_preset(presets.preset("h100"), "bf16")
    possible, _ = planning.estimates(config, config.shapes[0], rates, 8)
    fits = {item.work.strategy: item.fits for item in possible}
    assert (fits["single"], fits["data"], fits["sharded"]) == (False, False, True)
    single = next(item for item in possible if item.work.strategy == "single")
    assert single.memory.total > 16 * 8.03e9  # weights, gradients and moments alone


def test_across_nodes_the_network_is_shared_by_the_groups_of_a_node():
    machine = planning.machine("h100:16")
    rates = Rates.of_preset(machine, "bf16")
    assert rates.line("all_reduce", 8, 1)[1] == pytest.approx(1 / 450e9)
    hop, byte = rates.line("all_reduce", 16, 8)  # eight groups, each with a rank of every node
    assert byte == pytest.approx(8 / 400e9) and hop == pytest.approx(14e-6)
    assert rates.line("all_reduce", 128, 1)[0] == pytest.approx((14 + 7 * 3.4) / 8 * 1e-6)


def test_this_machine_becomes_a_preset():
    metrics = [
        derived("matmul_fp32_peak_flops", 4e11, "FLOP/s", "higher", "n = 1024"),
        derived("copy_host_gbytes_per_s", 10.0, "GB/s", "higher", "64 MiB"),
    ]
    rows = [
        {"bytes": 1000, "median_us": 400.0, "busbw_gbps": 0.1},
        {"bytes": 2**24, "median_us": 9e4, "busbw_gbps": 8.0},
    ]
    result = Result(
        benchmark="machine",
        tier="smoke",
        backend="cpu",
        world_size=2,
        metrics=metrics,
        facts={"collective": "gloo"},
        tables={"allreduce": rows},
    )
    config = SimpleNamespace(benchmark="machine", backend="cpu", nproc=2, nnodes=1, world_size=2)
    run = SimpleNamespace(
        path=SimpleNamespace(name="run-1"),
        config=config,
        result=result,
        machine={"memory_bytes": 16e9, "cpu": {"model": "CPU"}},
    )
    made = presets.parse(command_init.content(run))
    assert made.peak_flops("fp32") == (2e11, "fp32")
    assert (made.memory_gb.value, made.memory_gbytes_per_s.value, made.link_bytes_per_s) == (8, 5, 1e9)
    assert made.link.latency_us.value == 200 and made.link.latency_us.kind == "measured"
    run.config.benchmark = "squad"
    with pytest.raises(UserError, match="benchmark machine"):
        command_init.content(run)


def test_the_list_shows_models_and_strategies():
    models, ways = planning.listing().values()
    assert {row["model"] for row in models} == set(MODELS) and {row["strategy"] for row in ways} == set(STRATEGIES)
    ended = CliRunner().invoke(main, ["list"])
    assert ended.exit_code == 0 and "8,030,261,248" in ended.output and "hybrid_sharded" in ended.output


# A layout of 128 ranks


def test_a_layout_of_128_ranks_in_one_process(monkeypatch):
    """torch's own placement holds as many parameters at the corners of the mesh as the arithmetic says."""
    from benchlib.benchmarks.parallel import layout_check

    rows = layout_check.check("llama-8b", "data_tensor_pipeline", "1f1b", Layout(8, 4, 4))
    assert [row["rank"] for row in rows] == [0, 3, 12, 15, 112, 115, 124, 127]
    assert rows[-1]["place"] == {"data": 7, "pipeline": 3, "tensor": 3, "context": 0}
    assert max(row["held"] for row in rows) == rows[0]["estimate"]
    (shard,) = layout_check.check("small", "sharded", "", Layout(4), [0])
    assert shard["held"] == shard["estimate"]
    monkeypatch.setattr(layout_check, "check", lambda *_: rows)
    words = "parallel layout llama-8b data_tensor_pipeline --data 8 --tensor 4 --pipeline 4"
    shown = CliRunner().invoke(main, words.split())
    assert shown.exit_code == 0 and "128 ranks, 8 at the corners" in shown.output
    wrong = CliRunner().invoke(main, ["parallel", "layout", "small", "data", "--data", "8", "--tensor", "4"])
    assert wrong.exit_code == 2 and "leave it out" in wrong.output


def test_a_preset_is_not_overwritten(tmp_path, monkeypatch):
    given = {"value": 1, "source": "measured by hand"}
    content = {
        "description": "a machine",
        "peak_tflops": {"fp32": given},
        "memory_gb": given,
        "memory_gbytes_per_s": given,
    }
    monkeypatch.setattr(command_init, "folder", lambda: tmp_path)
    monkeypatch.setattr(command_init, "content", lambda _: content)
    path = command_init.write(tmp_path, "mine", force=False)
    assert presets.preset(str(path)).memory_gb.value == 1
    with pytest.raises(UserError, match="--force"):
        command_init.write(tmp_path, "mine", force=False)
    with pytest.raises(UserError, match="letters"):
        command_init.write(tmp_path, "../mine", force=True)
