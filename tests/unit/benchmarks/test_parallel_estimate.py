"""Estimates of parallel strategies beside sums done by hand, presets of machines, and layouts of many ranks in one process."""

import pytest
import torch
import torch.distributed as dist

from benchlib.benchmarks.parallel import estimate, measure, presets, strategies
from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.estimate import Message, Rates, rank_parameters
from benchlib.benchmarks.parallel.shapes import MODELS, STRATEGIES, Job, Layout, Shape

SMALL = Shape("s", "decoder", 8, 4, 2, 2, 32, 16, 100)
# By hand: attention 4·64 + 4·8, feed-forward 2·8·32 + 32 + 8, two norms of 16; around them 116·8, a norm and 800.
LAYER = 288 + 552 + 32
COUNT = 4 * LAYER + 928 + 16 + 800


def work(strategy, **more):
    layout = Layout(**dict.fromkeys(STRATEGIES[strategy], 2))
    return Job(**{"shape": SMALL, "strategy": strategy, "layout": layout, "batch": 8, "seq": 16} | more)


def need(job):
    return sum(estimate.memory(job).values())


CHECKPOINTS = {"bert-base": 108_893_186, "gpt2": 124_439_808, "gpt2-xl": 1_557_611_200, "llama-1b": 1_235_814_400, "llama-8b": 8_030_261_248}  # fmt: skip


def test_parameters_are_those_of_the_checkpoints_and_flops_those_by_hand():
    assert {name: MODELS[name].parameters for name in CHECKPOINTS} == CHECKPOINTS
    assert (SMALL.layer_parameters(), SMALL.parameters) == (LAYER, COUNT)
    products = 4 * (4 * 64 + 2 * 8 * 32) + 800
    assert SMALL.step_flops(8, 16) == 3 * 8 * (2 * 16 * products + 4 * 4 * 16**2 * 8)


def test_memory_by_hand():
    token = 4 * (2 * 8 + 2 * 8 + 2 * 8 + 2 * 8 + 2 * 32)  # inputs and outputs of norms, q k v and output, feed-forward
    passing = 4 * (2 * 32 + 4 * 8)  # gradients in one layer: around the activation function, of q k v and the output
    activations = 8 * 16 * (4 * token + passing + 12 * 100)
    alone = {"parameters": 4 * COUNT, "gradients": 4 * COUNT, "optimizer": 8 * COUNT, "activations": activations}
    # AdamW's temporaries of the largest matrix.
    assert estimate.memory(work("single")) == alone | {"buffers": 2 * 4 * 800}
    assert need(work("data")) == 16 * COUNT + activations / 2 + 6400
    cut = {"parameters": 2 * COUNT, "gradients": 2 * COUNT, "optimizer": 4 * COUNT, "activations": activations / 2}
    assert estimate.memory(work("sharded")) == cut | {"buffers": 3200 + 16 * (COUNT - 4 * LAYER + LAYER)}
    assert need(work("single", checkpointing=True)) < need(work("single"))
    halves = estimate.memory(work("pipeline", schedule="gpipe", micro_batches=4))
    assert halves["parameters"] == 4 * (2 * LAYER + 928)
    early, late = (work("pipeline", schedule=name, micro_batches=8, batch=64) for name in ("1f1b", "gpipe"))
    assert need(early) < need(late)


def test_exchanges_by_hand():
    def stated(strategy):
        return list(estimate.messages(work(strategy)))

    states = 8 * 16 * 8 * 4
    assert stated("data") == [Message("all_reduce", "data", 4 * COUNT, 1)]
    assert [message.bytes for message in stated("sharded")] == [8 * COUNT, 4 * COUNT]
    # A stage of a pipeline gathers its weights for each of eight micro-batches, and once for the way back.
    job = work("sharded_pipeline", schedule="1f1b", micro_batches=8, batch=64)
    gathered, cut = (message for message in estimate.messages(job) if message.axis == "shard")
    weights, parts = 4 * estimate.rank_parameters(job), job.layers + 1
    assert (gathered[2:], cut[2:]) == ((9 * weights, 9 * parts), (weights, parts))
    assert stated("hybrid_sharded") == [*stated("sharded"), Message("all_reduce", "data", 2 * COUNT, 5)]
    assert [message.bytes for message in stated("tensor")] == [(4 * 4 + 2) * states, 8 * 16 * 100 * 4]
    # Ring of 4: 6 hops of 2 us each, and 1.5 times the bytes at 1 GB/s.
    seconds = Message("all_reduce", "data", 1e6, 3).seconds(4, (2e-6, 1e-9))
    assert seconds == pytest.approx(3 * 6 * 2e-6 + 1.5e-3)


def test_bubbles():
    shares = {"gpipe": 3 / 11, "1f1b": 3 / 11, "interleaved": 3 / 19, "zero_bubble": 1 / 17}
    assert {schedule: estimate.bubble_share(4, 8, schedule) for schedule in shares} == pytest.approx(shares)


def test_what_was_measured_is_given_back_and_divided():
    """A fit over 4 ranks predicts just its own line over 4 ranks; half of the work takes as long as was measured."""
    link = {"op": "all_gather", "alpha_s": 3e-4, "beta_s_per_byte": 2e-9, "world": 4}
    line = Rates.of_run(1e9, 1e12, [link]).line("all_gather", 4, 1)
    assert Message("all_gather", "shard", 1e6, 1).seconds(4, line) == pytest.approx(3e-4 + 2e-3)
    for alpha, expected in ((0.0, 1.2), (0.5, 1.7)):
        link = {"op": "all_reduce", "alpha_s": alpha, "beta_s_per_byte": 0.0, "world": 2}
        step = estimate.step_time(work("data"), Rates.of_run(1e9, 1e12, [link]), 1.2).step_s
        assert step == pytest.approx(expected)


def test_a_dry_run_says_what_fits_and_marks_every_figure():
    config = ParallelConfig(model="llama-8b", machine="h100", batch_size=8, precision="bf16", seq_len=512)
    text = estimate.expected(config)
    assert "estimates for h100" in text and "nothing was measured" in text and "lower bounds" in text
    possible, _ = estimate.estimates(config, Rates.of_preset(presets.preset("h100"), "bf16"), 8)
    needs = {job.strategy: need for job, need, _ in possible}
    assert min(needs["single"], needs["data"]) > 80e9 > needs["sharded"]
    assert needs["single"] > 16 * 8.03e9  # weights, gradients and moments alone


def test_across_nodes_the_network_is_shared_by_the_groups_of_a_node():
    machine = estimate.machine("h100:16")
    assert machine.world == 128
    rates = Rates.of_preset(machine, "bf16")
    assert rates.line("all_reduce", 8, 1)[1] == pytest.approx(1 / 450e9)
    hop, byte = rates.line("all_reduce", 16, 8)  # eight groups, each with a rank of every node
    assert byte == pytest.approx(8 / 400e9) and hop == pytest.approx(14e-6)


# Layouts of many ranks, in one process: the exchanges of torch's fake process group carry nothing.


@pytest.mark.parametrize(("model", "strategy", "schedule", "layout", "corners"), [
    ("llama-8b", "data_tensor_pipeline", "1f1b", Layout(8, 1, 4, 4), [0, 3, 12, 15, 112, 115, 124, 127]),
    ("small", "hybrid_sharded", "", Layout(2, 4), [0, 5]),
])  # fmt: skip
def test_many_ranks_hold_what_the_estimate_gives(model, strategy, schedule, layout, corners):
    """torch's own placement holds as many parameters at the corners of the mesh as the arithmetic says of the fullest."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    job, held = Job(MODELS[model], strategy, layout, schedule, micro_batches=4 if schedule else 1).narrow(), []
    for rank in corners:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
        try:
            held.append(sum(measure.held(strategies.prepare(job, torch.device("cpu"))).values()))
        finally:
            strategies.mesh.cache_clear()
            dist.destroy_process_group()
    assert max(held) == rank_parameters(job) / layout.shard
