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
from dataclasses import dataclass, field, replace
from typing import Any

from benchlib.benchmarks.parallel.shapes import STAGES_PER_RANK, STRATEGIES, Layout, Shape
from benchlib.core.definitions import BUS_FACTORS
from benchlib.judge.presets import Preset

WEIGHT_BYTES = 4  # weights, gradients and moments are fp32, whatever the precision of the products
BUCKET_BYTES = 25 * 2**20  # of DDP
# Values that element-wise kernels read and write for a token, forward and backward: two norms, two residuals and the
# activation function of a layer, and the loss over the vocabulary.
LAYER_PASSES, FFN_PASSES, LOSS_PASSES = 30, 6, 6
ADAMW_PASSES = 7  # weight, gradient and two moments read; weight and two moments written
MEGA = 1e6


@dataclass(frozen=True)
class Work:
    """What is trained and how it lies: ``batch`` is global, ``shard`` the ranks that share a copy in ``hybrid_sharded``."""

    shape: Shape
    strategy: str
    layout: Layout
    batch: int
    seq: int
    micro_batches: int = 1
    schedule: str = ""
    precision: str = "fp32"
    checkpointing: bool = False
    shard: int = 2

    @property
    def stages(self) -> int:
        """Stages of a rank."""
        return STAGES_PER_RANK.get(self.schedule, 1)

    @property
    def rank_batch(self) -> float:
        """Samples of a step that a rank sees."""
        return self.batch / self.layout.data

    @property
    def tokens(self) -> float:
        """Tokens of a step that a rank works on."""
        return self.rank_batch * self.seq / self.layout.context

    @property
    def copies(self) -> str:
        """How copies of the model are kept alike, see ``Strategy.copies``."""
        return STRATEGIES[self.strategy].copies

    @property
    def layers(self) -> int:
        """Layers of the fullest rank."""
        return -(-self.shape.layers // self.layout.pipeline)

    @property
    def width(self) -> int:
        """Bytes of a value of the activations."""
        return 2 if self.precision == "bf16" else 4

    @property
    def flops(self) -> float:
        """FLOPs of a step, all ranks, as MFU counts them."""
        return self.shape.step_flops(self.batch, self.seq)


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that needs most."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        """All parts."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Message:
    """Exchanges of one kind that a rank takes part in per step: bytes of all ``calls`` together, by nccl-tests' convention."""

    op: str
    axis: str
    size_bytes: float
    calls: float


@dataclass(frozen=True)
class Time:
    """Seconds of a step by part. ``comm_s`` is all communication, of which ``exposed_s`` is not hidden behind compute."""

    compute_s: float
    elementwise_s: float
    optimizer_s: float
    comm_s: float
    exposed_s: float
    bubble_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.elementwise_s + self.optimizer_s + self.exposed_s + self.bubble_s


# Memory


def rank_parameters(work: Work) -> float:
    """Return the parameters that the fullest rank works with, before data-parallel sharding."""
    shape, t = work.shape, work.layout.tensor
    ends = shape.embedding_parameters(t), shape.head_parameters(t)
    return work.layers * shape.layer_parameters(t) + (sum(ends) if work.layout.pipeline == 1 else max(ends))


def held_share(work: Work) -> float:
    """Return the share of these that a rank keeps between uses: with FSDP2 its shard."""
    if work.copies == "hybrid":
        return 1 / work.shard
    return 1 / work.layout.data if work.copies in ("shard", "direct") else 1.0


def _layer_activations(work: Work) -> float:
    """Bytes that one layer keeps of a token until its backward pass: inputs of norms and products, keys, values, outputs."""
    shape, t = work.shape, work.layout.tensor
    h, k, f = shape.hidden, shape.kv_width, shape.ffn
    norms = 2 * h * 4 / (t if work.strategy == "sequence" else 1)
    if work.checkpointing:
        return norms / 2  # the input alone
    return norms + 2 * h * work.width + (2 * h + 2 * k + 2 * (shape.ffn_matrices - 1) * f) * work.width / t


def _in_flight(work: Work) -> float:
    """Micro-batches whose activations the first stage's rank holds at once, in units of all its layers."""
    p, m, v = work.layout.pipeline, work.micro_batches, work.stages
    if p == 1:
        return 1
    if work.schedule == "gpipe":
        return m
    warm = min(m * v, (v - 1) * p + 2 * (p - 1) + 1) if v > 1 else min(m, p)
    return warm / v


def _activations(work: Work) -> float:
    shape, t, p = work.shape, work.layout.tensor, work.layout.pipeline
    tokens = work.tokens / (work.micro_batches if p > 1 else 1)
    kept = tokens * work.layers * _layer_activations(work)
    # Gradients on their way through one layer: in and out of the activation function, and of the attention's parts.
    passing = 2 * tokens * work.width * ((shape.ffn_matrices - 1) * shape.ffn + shape.hidden + shape.kv_width) / t
    if work.checkpointing:
        passing += tokens * _layer_activations(replace(work, checkpointing=False))
    # Logits, their logarithm, their gradient; of tensor parallelism also before they are gathered, and that of the gradient.
    head = tokens * shape.outputs * (work.width + 4 + 4 + (2 * work.width / t if t > 1 else 0))
    first = _in_flight(work) * kept + passing
    if p == 1:
        return first + head
    waiting = work.micro_batches if work.schedule == "gpipe" else 1
    return max(first, waiting * (kept + tokens * shape.outputs * 4) + passing + head)


def memory(work: Work) -> Memory:
    """Return what the fullest rank needs, in bytes: the peaks of all parts at once, since freed memory is seldom all used again."""
    parameters, held = rank_parameters(work), held_share(work)
    weights = WEIGHT_BYTES * parameters
    # AdamW's square root and quotient of one matrix.
    largest = work.shape.hidden * max(work.shape.vocabulary, work.shape.ffn)
    buffers = 2 * WEIGHT_BYTES * largest * held / work.layout.tensor
    if work.copies in ("shard", "direct", "hybrid"):
        layer = work.shape.layer_parameters(work.layout.tensor)
        ends = parameters - layer * (work.shape.layers // work.layout.pipeline)
        # As gathered, as parameters, their gradients, and those packed for the exchange: of the ends, and of one layer.
        buffers += 4 * WEIGHT_BYTES * (ends + layer)
    elif work.copies == "replicate" and work.layout.data * work.layout.context > 1:
        buffers += weights  # gradients of a group, packed for the exchange
    if work.precision == "bf16":
        buffers += 2 * parameters
    return Memory(weights * held, weights * held, 2 * weights * held, _activations(work), buffers)


# Communication


def messages(work: Work) -> list[Message]:
    """Return the exchanges of a step that the fullest rank takes part in."""
    shape, layout, layers, size = work.shape, work.layout, work.layers, work.width
    states = work.tokens * shape.hidden * size  # hidden states of all tokens of a rank
    weights = WEIGHT_BYTES * rank_parameters(work)
    mine: list[Message] = []
    parts = work.micro_batches if layout.pipeline > 1 else 1
    if layout.tensor > 1:
        forward = 2 if work.checkpointing else 1
        if work.strategy == "sequence":
            calls = 2 * layers * (1 + forward)
            mine += [Message(op, "tensor", calls * states, calls * parts) for op in ("all_gather", "reduce_scatter")]
        else:
            calls = 2 * layers * (1 + forward) + 2  # and of embedding and head
            mine.append(Message("all_reduce", "tensor", calls * states, calls * parts))
        if shape.kind == "decoder":
            mine.append(Message("all_gather", "tensor", work.tokens * shape.vocabulary * size, parts))
    if layout.context > 1:
        keys = 2 * work.tokens * shape.kv_width * size * layers
        rounds = (layout.context - 1) * layers
        mine.append(Message("send_recv", "context", 3 * keys * (layout.context - 1), 3 * rounds))
        mine.append(Message("all_reduce", "context", weights, layers + 1))
    if layout.pipeline > 1:
        calls = 2 * work.micro_batches * work.stages
        mine.append(Message("send_recv", "pipeline", 2 * work.stages * states, calls))
    return mine + _of_copies(work, weights)


def _of_copies(work: Work, weights: float) -> list[Message]:
    """Return the exchanges of weights and gradients between copies of the model."""
    if work.layout.data == 1:
        return []
    if work.copies in ("shard", "direct", "hybrid"):
        times = (work.micro_batches if work.layout.pipeline > 1 else 1) * (work.layers + 1)
        gathers = Message("all_gather", "data", 2 * weights, 2 * times)
        cut = Message("reduce_scatter", "data", weights, times)
        if work.copies != "hybrid":
            return [gathers, cut]
        return [gathers, cut, Message("all_reduce", "copies", weights / work.shard, work.layers + 1)]
    return [Message("all_reduce", "data", weights, _buckets(work))]


def _buckets(work: Work) -> int:
    """Exchanges of all gradients: DDP's buckets, else one for each layer and one for the ends."""
    if work.copies != "ddp":
        return work.layers + 1
    return max(1, round(WEIGHT_BYTES * rank_parameters(work) / BUCKET_BYTES))


def _degree(work: Work, axis: str) -> int:
    if work.copies == "hybrid" and axis in ("data", "copies"):
        return work.shard if axis == "data" else work.layout.data // work.shard
    return int(getattr(work.layout, axis))


def _stride(work: Work, axis: str) -> int:
    """Return how far neighbours of an axis are apart: meshes are data, pipeline, tensor, context from the outside in."""
    inner = {"data": ("pipeline", "tensor", "context"), "pipeline": ("tensor", "context"), "tensor": ("context",)}
    within = inner.get("data" if axis == "copies" else axis, ())
    return (work.shard if axis == "copies" else 1) * math.prod(getattr(work.layout, name) for name in within)


HOPS: dict[str, Callable[[int], int]] = {  # of a ring of n ranks
    "all_reduce": lambda n: 2 * (n - 1), "all_gather": lambda n: n - 1, "reduce_scatter": lambda n: n - 1, "send_recv": lambda n: 1,
}  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """What a machine does: FLOP/s of a rank, bytes per second of its memory, and ``line(op, ranks, stride)`` = (a, b)."""

    flops: float
    copy_bytes_per_s: float
    line: Callable[[str, int, int], tuple[float, float]]
    memory_bytes: float | None = None
    note: str = ""

    @classmethod
    def of_preset(cls, machine: Preset, precision: str) -> "Rates":
        """Take the claimed peaks of a machine; a group that spans nodes has its share of the network."""
        flops, taken = machine.peak_flops(precision)

        def line(op: str, ranks: int, stride: int) -> tuple[float, float]:
            link, network = machine.link, machine.network
            if link and (ranks * stride <= machine.devices or network is None):
                assert machine.link_bytes_per_s is not None
                return link.latency_us.value / MEGA, 1 / machine.link_bytes_per_s
            assert network is not None and network.gbytes_per_s is not None
            # So many groups share the adapters of a node, and such a share of a ring's hops leaves it.
            groups = min(stride, machine.devices)
            leaving = groups / machine.devices
            inside = link.latency_us.value if link else 0.0
            hop_us = leaving * network.latency_us.value + (1 - leaving) * inside
            return hop_us / MEGA, groups / (1e9 * network.gbytes_per_s.value)

        note = "" if taken == precision else f"it has no {precision} peak: {taken} is taken"
        return cls(flops, 1e9 * machine.memory_gbytes_per_s.value, line, 1e9 * machine.memory_gb.value, note)

    @classmethod
    def of_run(
        cls, peaks: Mapping[str, Any], alpha_beta: Sequence[Mapping[str, Any]], precision: str
    ) -> "Rates | None":
        """Take what a run measured; None where it measured no peak or no link. An operation without a line is taken for another one."""
        flops, copy = (peaks.get("matmul_flops") or {}).get(precision), peaks.get("copy_bytes_per_s")
        hops: dict[str, tuple[float, float]] = {}
        for row in alpha_beta:
            ranks = int(row["world"])
            if row["alpha_s"] is not None:
                bus = BUS_FACTORS[row["op"]](ranks)
                hops[row["op"]] = (row["alpha_s"] / HOPS[row["op"]](ranks), row["beta_s_per_byte"] / bus)

        def line(op: str, ranks: int, stride: int) -> tuple[float, float]:
            return hops.get(op) or next(iter(hops.values()))

        if not flops or not copy or not hops:
            return None
        return cls(float(flops), float(copy), line)


def exchange_s(message: Message, ranks: int, line: tuple[float, float]) -> float:
    """Return the seconds of exchanges over a ring: ``calls · hops · a + bytes · bus factor · b``."""
    if ranks < 2:
        return 0.0
    a, b = (max(0.0, value) for value in line)
    return message.calls * HOPS[message.op](ranks) * a + message.size_bytes * BUS_FACTORS[message.op](ranks) * b


# Time


def bubble_share(layout: Layout, micro_batches: int, schedule: str) -> float:
    """Return the idle share of a pipeline's step, with equal stages: ``(p-1)/(v m + p-1)``; zero-bubble has a third of it."""
    p, v = layout.pipeline, STAGES_PER_RANK.get(schedule, 1)
    idle = (p - 1) / (3 if schedule == "zero_bubble" else 1)
    return idle / (v * micro_batches + idle)


def busy(work: Work, rates: Rates) -> tuple[float, float, float]:
    """Return the seconds of matrix products, element-wise kernels and the optimizer on a rank."""
    shape, layout = work.shape, work.layout
    again = 4 / 3 if work.checkpointing else 1.0
    compute = again * work.flops / layout.world / rates.flops
    cut = layout.tensor if work.strategy == "sequence" else 1
    layer = LAYER_PASSES * shape.hidden / cut + FFN_PASSES * (shape.ffn_matrices - 1) * shape.ffn / layout.tensor
    head = LOSS_PASSES * shape.outputs * 4
    passes = work.tokens * (work.layers * layer * work.width + head)
    moved = ADAMW_PASSES * WEIGHT_BYTES * rank_parameters(work) * held_share(work)
    return compute, passes / rates.copy_bytes_per_s, moved / rates.copy_bytes_per_s


def hidden_s(work: Work, spent: Mapping[str, float], compute_s: float) -> float:
    """Return how much of the exchanges compute can hide: those between copies, but for the last; others stand in its way."""
    between = spent.get("data", 0.0) + spent.get("copies", 0.0)
    if work.copies in ("shard", "direct", "hybrid"):
        return min(between * work.layers / (work.layers + 1), compute_s)
    return min(between * (1 - 1 / _buckets(work)), 2 / 3 * compute_s)


def spent_s(work: Work, rates: Rates) -> dict[str, float]:
    """Return the seconds of all exchanges by axis."""
    spent: dict[str, float] = {}
    for message in messages(work):
        ranks = _degree(work, message.axis)
        line = rates.line(message.op, ranks, _stride(work, message.axis)) if ranks > 1 else (0.0, 0.0)
        spent[message.axis] = spent.get(message.axis, 0.0) + exchange_s(message, ranks, line)
    return spent


def step_time(work: Work, rates: Rates, scale: float = 1.0) -> Time:
    """Return the seconds of a step; ``scale`` is how many times slower than at the peaks this machine computes."""
    compute, elementwise, optimizer = (scale * value for value in busy(work, rates))
    spent = spent_s(work, rates)
    comm = sum(spent.values())
    share = bubble_share(work.layout, work.micro_batches, work.schedule)
    bubble = (compute + elementwise) * share / (1 - share)
    return Time(compute, elementwise, optimizer, comm, comm - hidden_s(work, spent, compute + elementwise), bubble)


def of_row(row: Mapping[str, Any], shape: Shape, shard: int = 2) -> Work:
    """Return the work of a row of the table ``strategies``."""
    layout = Layout(*(int(row.get(axis) or 1) for axis in ("data", "tensor", "pipeline", "context")))
    return Work(
        shape, row["strategy"], layout, int(row["batch_size"]), int(row["seq_len"]), int(row.get("micro_batches") or 1),
        row.get("schedule") or "", row["precision"], bool(row.get("checkpointing")), shard,
    )  # fmt: skip


def calibrated(
    row: Mapping[str, Any], peaks: Mapping[str, Any], alpha_beta: Sequence[Mapping[str, Any]], shape: Shape
) -> tuple[Rates, float] | None:
    """Return what a run measured of its machine, and how many times slower than at its peaks the ranks of a row compute.

    That is its ``compute_s`` over the estimate of it. None where a part lacks.
    """
    rates = Rates.of_run(peaks, alpha_beta, row["precision"])
    if rates is None or row.get("compute_s") is None:
        return None
    return rates, row["compute_s"] / sum(busy(of_row(row, shape), rates))


def predict(
    row: Mapping[str, Any], peaks: Mapping[str, Any], alpha_beta: Sequence[Mapping[str, Any]], shape: Shape
) -> float | None:
    """Return the step in seconds that the model expects of a row of ``strategies`` that was not measured yet; None as ``calibrated``."""
    here = calibrated(row, peaks, alpha_beta, shape)
    return step_time(of_row(row, shape), *here).step_s if here else None


@dataclass(frozen=True)
class Estimate:
    """Memory and time of one strategy on a machine; ``fits`` is None where the machine's memory is not known."""

    work: Work
    memory: Memory
    time: Time
    capacity: float | None = None
    note: str = field(default="")

    @property
    def fits(self) -> bool | None:
        """Whether the fullest rank's memory is enough."""
        return None if self.capacity is None else self.memory.total <= self.capacity

    @property
    def samples_per_s(self) -> float:
        """Samples per second, all ranks: an upper bound from claimed peaks."""
        return self.work.batch / self.time.step_s
