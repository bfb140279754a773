"""What a rank needs and how long a step takes at least, by arithmetic: of machines that are not here, and beside what was measured.

Memory of a rank is the sum of five parts: weights in fp32, their gradients, two moments of AdamW, the activations that the
backward pass needs, and buffers of the optimizer, exchanges, casts and gathered layers. Time is compute at the peak of matrix products,
element-wise work and the optimizer at the bandwidth of memory, exchanges by alpha + beta · bytes over a ring, and the
bubble of a pipeline. Peaks are never reached: a time from claimed peaks is a lower bound, and every figure here is an estimate.

h hidden, k width of all keys, f feed-forward, L layers, V outputs, S tokens, B samples; t, p, c, d degrees of tensor, pipeline,
context and data parallelism; m micro-batches, v stages of a rank, a seconds of a hop, b seconds per byte of a link.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from benchlib.benchmarks.parallel.shapes import SCHEDULES, Job
from benchlib.core.definitions import BUS_FACTORS
from benchlib.judge.presets import Preset

WEIGHT_BYTES = 4  # weights, gradients and moments are fp32, whatever the precision of the products
BUCKET_BYTES = 25 * 2**20  # of DDP
# Values that element-wise kernels read (r) and write (w) for a token, forward + backward; counted by a test.
# Of h, in a layer: two norms 2 (2r1w + 2r1w), two sums with the residual and of their gradients 2 (2r1w + 2r1w), the biases'
# gradients 5r, the heads of attention put side by side 1r1w.
LAYER_PASSES = 30
# Of f: the activation function 1r1w + 2r1w and the bias's gradient 1r; a gated one is a little less of each of its two matrices.
FFN_PASSES = 6
# Of V, in fp32: the logarithm of the softmax 1r1w + 2r1w, the gradient of the picked outputs 1w.
LOSS_PASSES = 6
ADAMW_PASSES = 7  # weight, gradient and two moments read; weight and two moments written


class Message(NamedTuple):
    """Exchanges of one kind that a rank takes part in per step: bytes of all ``calls`` together, by nccl-tests' convention."""

    op: str
    axis: str
    bytes: float
    calls: float


class Time(NamedTuple):
    """Seconds of a step by part; ``exposed_s`` is the communication that is not hidden behind compute, ``comm_s`` all of it."""

    compute_s: float
    elementwise_s: float
    optimizer_s: float
    exposed_s: float
    bubble_s: float
    comm_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return sum(self[:-1])


def _width(job: Job) -> int:
    """Bytes of a value of the activations."""
    return 2 if job.precision == "bf16" else 4


# Memory


def rank_parameters(job: Job) -> float:
    """Return the parameters that the fullest rank works with, before data-parallel sharding."""
    shape, t = job.shape, job.layout.tensor
    ends = shape.embedding_parameters(t), shape.head_parameters(t)
    return job.layers * shape.layer_parameters(t) + (sum(ends) if job.layout.pipeline == 1 else max(ends))


def held_share(job: Job) -> float:
    """Return the share of these that a rank keeps between uses: with FSDP2 its shard."""
    if not job.cut:
        return 1.0
    return 1 / (job.shard if job.copies == "hybrid" else job.layout.data)


def _layer_activations(job: Job) -> float:
    """Bytes that one layer keeps of a token until its backward pass: inputs of norms and products, keys, values, outputs."""
    shape, t, width = job.shape, job.layout.tensor, _width(job)
    h, k, f = shape.hidden, shape.kv_width, shape.ffn
    norms = 2 * h * 4 / (t if job.strategy == "sequence" else 1)
    if job.checkpointing:
        return norms / 2  # the input alone
    return norms + 2 * h * width + (2 * h + 2 * k + 2 * (shape.ffn_matrices - 1) * f) * width / t


def _in_flight(job: Job) -> float:
    """Micro-batches whose activations the first stage's rank holds at once, in units of all its layers."""
    p, m, v = job.layout.pipeline, job.micro_batches, job.rank_stages
    if p == 1:
        return 1
    if job.schedule == "gpipe":
        return m
    warm = min(m * v, (v - 1) * p + 2 * (p - 1) + 1) if v > 1 else min(m, p)
    return warm / v


def _activations(job: Job) -> float:
    shape, t, p, width = job.shape, job.layout.tensor, job.layout.pipeline, _width(job)
    tokens = job.tokens / job.parts
    kept = tokens * job.layers * _layer_activations(job)
    # Gradients on their way through one layer: in and out of the activation function, and of the attention's parts.
    passing = 2 * tokens * width * ((shape.ffn_matrices - 1) * shape.ffn + shape.hidden + shape.kv_width) / t
    if job.checkpointing:
        passing += tokens * _layer_activations(replace(job, checkpointing=False))
    # Logits, their logarithm, their gradient; of tensor parallelism also before they are gathered, and that of the gradient.
    head = tokens * shape.outputs * (width + 4 + 4 + (2 * width / t if t > 1 else 0))
    first = _in_flight(job) * kept + passing
    if p == 1:
        return first + head
    waiting = job.micro_batches if job.schedule == "gpipe" else 1
    return max(first, waiting * (kept + tokens * shape.outputs * 4) + passing + head)


def memory(job: Job) -> dict[str, float]:
    """Return what the fullest rank needs, bytes by part: the peaks of all at once, since freed memory is seldom all used again."""
    shape, parameters, held = job.shape, rank_parameters(job), held_share(job)
    weights = WEIGHT_BYTES * parameters
    # AdamW's square root and quotient of one matrix.
    largest = shape.hidden * max(shape.vocabulary, shape.ffn)
    buffers = 2 * WEIGHT_BYTES * largest * held / job.layout.tensor
    if job.cut:
        layer = shape.layer_parameters(job.layout.tensor)
        ends = parameters - layer * (shape.layers // job.layout.pipeline)
        # As gathered, as parameters, their gradients, and those packed for the exchange: of the ends, and of one layer.
        buffers += 4 * WEIGHT_BYTES * (ends + layer)
    elif job.copies == "replicate" and job.layout.data * job.layout.context > 1:
        buffers += weights  # gradients of a group, packed for the exchange
    if job.precision == "bf16":
        buffers += 2 * parameters
    kept = {"parameters": weights * held, "gradients": weights * held, "optimizer": 2 * weights * held}
    return kept | {"activations": _activations(job), "buffers": buffers}


# Communication


def messages(job: Job) -> list[Message]:
    """Return the exchanges of a step that the fullest rank takes part in."""
    shape, layout, layers, width = job.shape, job.layout, job.layers, _width(job)
    states = job.tokens * shape.hidden * width  # hidden states of all tokens of a rank
    weights = WEIGHT_BYTES * rank_parameters(job)
    mine: list[Message] = []
    if layout.tensor > 1:
        calls = 2 * layers * (3 if job.checkpointing else 2)
        if job.strategy == "sequence":
            ops = ("all_gather", "reduce_scatter")
            mine += [Message(op, "tensor", calls * states, calls * job.parts) for op in ops]
        else:  # also of embedding and head
            mine.append(Message("all_reduce", "tensor", (calls + 2) * states, (calls + 2) * job.parts))
        if shape.kind == "decoder":
            mine.append(Message("all_gather", "tensor", job.tokens * shape.vocabulary * width, job.parts))
    if layout.context > 1:
        keys, hops = 2 * job.tokens * shape.kv_width * width * layers, layout.context - 1
        mine.append(Message("send_recv", "context", 3 * keys * hops, 3 * hops * layers))
        mine.append(Message("all_reduce", "context", weights, layers + 1))
    if layout.pipeline > 1:
        calls = 2 * job.micro_batches * job.rank_stages
        mine.append(Message("send_recv", "pipeline", 2 * job.rank_stages * states, calls))
    if layout.data > 1 and job.cut:
        times = job.parts * (layers + 1)
        mine.append(Message("all_gather", "data", 2 * weights, 2 * times))
        mine.append(Message("reduce_scatter", "data", weights, times))
        if job.copies == "hybrid":
            mine.append(Message("all_reduce", "copies", weights / job.shard, layers + 1))
    elif layout.data > 1:
        mine.append(Message("all_reduce", "data", weights, _buckets(job)))
    return mine


def _buckets(job: Job) -> int:
    """Exchanges of all gradients: DDP's buckets, else one for each layer and one for the ends."""
    if job.copies != "ddp":
        return job.layers + 1
    return max(1, round(WEIGHT_BYTES * rank_parameters(job) / BUCKET_BYTES))


def _place(job: Job, axis: str) -> tuple[int, int]:
    """Return the ranks of an axis and how far neighbours are apart: data, pipeline, tensor, context from the outside in."""
    degrees = {"data": job.layout.data} | {
        name: getattr(job.layout, name) for name in ("pipeline", "tensor", "context")
    }
    if job.copies == "hybrid":
        degrees = {"copies": job.layout.data // job.shard} | degrees | {"data": job.shard}
    axes = list(degrees)
    return degrees[axis], math.prod(degrees[name] for name in axes[axes.index(axis) + 1 :])


HOPS: dict[str, Callable[[int], int]] = {  # of a ring of n ranks
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "send_recv": lambda n: 1,
}


@dataclass(frozen=True)
class Rates:
    """What a machine does: FLOP/s of a rank, bytes per second of its memory, and ``line(op, ranks, stride)`` = (a, b)."""

    flops: float
    copy_bytes_per_s: float
    line: Callable[[str, int, int], tuple[float, float]]
    memory_bytes: float = 0.0
    note: str = ""

    @classmethod
    def of_preset(cls, machine: Preset, precision: str) -> "Rates":
        """Take the claimed peaks of a machine; a group that spans nodes has its share of the network."""
        flops, taken = machine.peak_flops(precision)

        def line(op: str, ranks: int, stride: int) -> tuple[float, float]:
            link, network = machine.link, machine.network
            if link and (ranks * stride <= machine.devices or network is None):
                assert machine.link_bytes_per_s is not None
                return link.latency_us.value / 1e6, 1 / machine.link_bytes_per_s
            assert network is not None and network.gbytes_per_s is not None
            # So many groups share the adapters of a node, and such a share of a ring's hops leaves it.
            groups = min(stride, machine.devices)
            leaving = groups / machine.devices
            inside = link.latency_us.value if link else 0.0
            hop_us = leaving * network.latency_us.value + (1 - leaving) * inside
            return hop_us / 1e6, groups / (1e9 * network.gbytes_per_s.value)

        note = "" if taken == precision else f"; it has no {precision} peak: {taken} is taken"
        return cls(flops, 1e9 * machine.memory_gbytes_per_s.value, line, 1e9 * machine.memory_gb.value, note)

    @classmethod
    def of_run(cls, flops: float, copy_bytes_per_s: float, links: Sequence[Mapping[str, Any]]) -> "Rates | None":
        """Take what a run measured of its ranks; None without a line of any link. An operation without one has another's."""
        hops: dict[str, tuple[float, float]] = {}
        for row in links:
            if row.get("alpha_s") is not None:
                op, ranks = row["op"], row["world"]
                hops[op] = row["alpha_s"] / HOPS[op](ranks), row["beta_s_per_byte"] / BUS_FACTORS[op](ranks)
        if not hops:
            return None
        return cls(flops, copy_bytes_per_s, lambda op, ranks, stride: hops.get(op) or next(iter(hops.values())))


def exchange_s(message: Message, ranks: int, line: tuple[float, float]) -> float:
    """Return the seconds of exchanges over a ring: ``calls · hops · a + bytes · bus factor · b``."""
    if ranks < 2:
        return 0.0
    a, b = line
    return message.calls * HOPS[message.op](ranks) * a + message.bytes * BUS_FACTORS[message.op](ranks) * b


# Time


def bubble_share(pipeline: int, micro_batches: int, schedule: str) -> float:
    """Return the idle share of a pipeline's step, with equal stages: ``(p-1)/(v m + p-1)``; zero-bubble has a third of it."""
    idle = (pipeline - 1) / (3 if schedule == "zero_bubble" else 1)
    return idle / (SCHEDULES[schedule][0] * micro_batches + idle) if schedule else 0.0


def busy(job: Job, rates: Rates) -> tuple[float, float, float]:
    """Return the seconds of matrix products, element-wise kernels and the optimizer on a rank."""
    shape, layout = job.shape, job.layout
    compute = (4 / 3 if job.checkpointing else 1.0) * job.flops / layout.world / rates.flops
    cut = layout.tensor if job.strategy == "sequence" else 1
    layer = LAYER_PASSES * shape.hidden / cut + FFN_PASSES * (shape.ffn_matrices - 1) * shape.ffn / layout.tensor
    passes = job.tokens * (job.layers * layer * _width(job) + 4 * LOSS_PASSES * shape.outputs)
    moved = ADAMW_PASSES * WEIGHT_BYTES * rank_parameters(job) * held_share(job)
    return compute, passes / rates.copy_bytes_per_s, moved / rates.copy_bytes_per_s


def _hidden_s(job: Job, spent: Mapping[str, float], compute_s: float) -> float:
    """Return how much of the exchanges compute can hide: those between copies, but for the last; others stand in its way."""
    between = spent.get("data", 0.0) + spent.get("copies", 0.0)
    if job.cut:
        return min(between * job.layers / (job.layers + 1), compute_s)
    return min(between * (1 - 1 / _buckets(job)), 2 / 3 * compute_s)


def step_time(job: Job, rates: Rates, scale: float = 1.0) -> Time:
    """Return the seconds of a step; ``scale`` is how many times slower than at the peaks this machine computes."""
    compute, elementwise, optimizer = (scale * value for value in busy(job, rates))
    spent: dict[str, float] = {}
    for message in messages(job):
        ranks, stride = _place(job, message.axis)
        seconds = exchange_s(message, ranks, rates.line(message.op, ranks, stride))
        spent[message.axis] = spent.get(message.axis, 0.0) + seconds
    comm, share = sum(spent.values()), bubble_share(job.layout.pipeline, job.micro_batches, job.schedule)
    bubble = (compute + elementwise) * share / (1 - share)
    exposed = comm - _hidden_s(job, spent, compute + elementwise)
    return Time(compute, elementwise, optimizer, exposed, bubble, comm)


def scale_of(job: Job, rates: Rates, compute_s: float) -> float:
    """Return how many times slower than at the peaks a rank computes that takes ``compute_s`` for its part of a job."""
    return compute_s / sum(busy(job, rates))
