"""What a rank needs and how long a step takes at least, by arithmetic: of other machines, and beside what was measured.

Memory is weights in fp32, gradients, two moments of AdamW, activations that the backward pass needs, and buffers of the
optimizer, exchanges, casts and gathered layers. Time is compute at the peak of matrix products, element-wise work and
optimizer at the bandwidth of memory, exchanges by alpha + beta · bytes over a ring, and the bubble of a pipeline. Peaks
are never reached: a time from claimed peaks is a lower bound.

h hidden, k width of all keys; t, p degrees of tensor and pipeline parallelism; m micro-batches, v stages of a rank; a
seconds of a hop, b seconds per byte of a link.

``expected`` is what a dry run says of a machine, by name of ``params/machines`` or file, with ``:NODES``.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rich.console import Console

from benchlib.benchmarks.parallel.presets import Preset, names, preset
from benchlib.benchmarks.parallel.shapes import SCHEDULES, STRATEGIES, Job
from benchlib.core import terminal
from benchlib.core.definitions import BUS_FACTORS
from benchlib.core.errors import UserError
from benchlib.core.text import quantity, seconds

HERE = "this"  # the preset that `benchlib machine init` writes
WEIGHT_BYTES = 4  # weights, gradients and moments are fp32, whatever the precision of the products
BUCKET_BYTES = 25 * 2**20  # of DDP
# Values that element-wise kernels read (r) and write (w) for a token, forward + backward; counted by a test.
# Of h, in a layer: two norms 2 (2r1w + 2r1w), two sums with the residual and of their gradients 2 (2r1w + 2r1w), the
# biases' gradients 5r, the heads of attention put side by side 1r1w.
LAYER_PASSES = 30
# Of f: the activation function 1r1w + 2r1w and the bias's gradient 1r; a gated one is a little less of each matrix.
FFN_PASSES = 6
# Of V, in fp32: the logarithm of the softmax 1r1w + 2r1w, the gradient of the picked outputs 1w.
LOSS_PASSES = 6
ADAMW_PASSES = 7  # weight, gradient and two moments read; weight and two moments written


class Message(NamedTuple):
    """Exchanges of a rank in a step, of one kind: bytes of all ``calls`` together, by nccl-tests' convention."""

    op: str
    axis: str
    bytes: float
    calls: float

    def seconds(self, ranks: int, line: tuple[float, float]) -> float:
        """Return the seconds of all calls over a ring: ``calls · hops · a + bytes · bus factor · b``."""
        a, b = line
        return self.calls * HOPS[self.op](ranks) * a + self.bytes * BUS_FACTORS[self.op](ranks) * b


class Time(NamedTuple):
    """Seconds of a step by part; ``exposed_s`` is communication that compute does not hide, ``comm_s`` all of it."""

    compute_s: float
    elementwise_s: float
    optimizer_s: float
    exposed_s: float
    bubble_s: float
    comm_s: float

    @property
    def step_s(self) -> float:
        return sum(self[:-1])


def rank_parameters(job: Job) -> float:
    """Return the parameters that the fullest rank works with, before data-parallel sharding."""
    shape, t = job.shape, job.layout.tensor
    ends = shape.embedding_parameters(t), shape.head_parameters(t)
    return job.layers * shape.layer_parameters(t) + (sum(ends) if job.layout.pipeline == 1 else max(ends))


def _layer_activations(job: Job) -> float:
    """Bytes that a layer keeps of a token for the way back: inputs of norms and products, keys, values, outputs."""
    shape, t, width = job.shape, job.layout.tensor, job.width_bytes
    h, k = shape.hidden, shape.kv_width
    norms = 2 * h * 4 / (t if job.strategy == "sequence" else 1)
    if job.checkpointing:
        return norms / 2  # the input alone
    return norms + 2 * h * width + 2 * (h + k + shape.ffn_inputs) * width / t


def _in_flight(job: Job) -> float:
    """Micro-batches whose activations the first stage's rank holds at once, in units of all its layers."""
    p, m, v = job.layout.pipeline, job.micro_batches, job.rank_stages
    if v > 1:
        return min(m * v, (v - 1) * p + 2 * (p - 1) + 1) / v
    return m if job.schedule == "gpipe" else min(m, p)


def _activations(job: Job) -> float:
    shape, t, p, width = job.shape, job.layout.tensor, job.layout.pipeline, job.width_bytes
    tokens = job.tokens / job.micro_batches
    stored = tokens * job.layers * _layer_activations(job)
    # Gradients on their way through one layer: in and out of the activation function, and of the attention's parts.
    passing = 2 * tokens * width * (shape.ffn_inputs + shape.hidden + shape.kv_width) / t
    if job.checkpointing:
        passing += tokens * _layer_activations(replace(job, checkpointing=False))
    # Logits, their logarithm, their gradient; of tensor parallelism both also before they are gathered.
    head = tokens * shape.outputs * (width + 4 + 4 + (2 * width / t if t > 1 else 0))
    first = _in_flight(job) * stored + passing
    if p == 1:
        return first + head
    waiting = job.micro_batches if job.schedule == "gpipe" else 1
    return max(first, waiting * (stored + tokens * shape.outputs * 4) + passing + head)


def memory(job: Job) -> dict[str, float]:
    """Return what the fullest rank needs, bytes by part: all peaks at once, since little freed memory is used again."""
    shape, layout, parameters = job.shape, job.layout, rank_parameters(job)
    weights = WEIGHT_BYTES * parameters
    # AdamW's square root and quotient of one matrix.
    largest = shape.hidden * max(shape.rows, shape.ffn)
    buffers = 2 * WEIGHT_BYTES * largest / layout.shard / layout.tensor
    if layout.shard > 1:
        layer = shape.layer_parameters(layout.tensor)
        ends = parameters - layer * (shape.layers // layout.pipeline)
        # As gathered, as parameters, their gradients, and those packed for the exchange: of the ends, and of one layer.
        buffers += 4 * WEIGHT_BYTES * (ends + layer)
    elif layout.data * layout.context > 1 and job.strategy != "data":
        buffers += weights  # gradients of a group, packed for the exchange
    if job.precision == "bf16":
        buffers += 2 * parameters
    held = weights / layout.shard  # of FSDP2 a shard
    states = {"parameters": held, "gradients": held, "optimizer": 2 * held}
    return states | {"activations": _activations(job), "buffers": buffers}


def messages(job: Job) -> Iterator[Message]:
    """Yield the exchanges of a step that the fullest rank takes part in."""
    shape, layout, layers, width = job.shape, job.layout, job.layers, job.width_bytes
    states = job.tokens * shape.hidden * width  # hidden states of all tokens of a rank
    weights = WEIGHT_BYTES * rank_parameters(job)
    if layout.tensor > 1:
        calls = 2 * layers * (3 if job.checkpointing else 2)
        if job.strategy == "sequence":
            for op in ("all_gather", "reduce_scatter"):
                yield Message(op, "tensor", calls * states, calls * job.micro_batches)
        else:  # also of embedding and head
            yield Message("all_reduce", "tensor", (calls + 2) * states, (calls + 2) * job.micro_batches)
        if shape.kind == "decoder":
            yield Message("all_gather", "tensor", job.tokens * shape.rows * width, job.micro_batches)
    if layout.context > 1:
        keys, hops = 2 * job.tokens * shape.kv_width * width * layers, layout.context - 1
        yield Message("send_recv", "context", 3 * keys * hops, 3 * hops * layers)
        yield Message("all_reduce", "context", weights, layers + 1)
    if layout.pipeline > 1:
        calls = 2 * job.micro_batches * job.rank_stages
        yield Message("send_recv", "pipeline", 2 * job.rank_stages * states, calls)
    if layout.shard > 1:
        # Forward for each micro-batch, once for the way back, on which a stage keeps what it gathered; gradients are cut once.
        gathers = job.micro_batches + 1
        yield Message("all_gather", "shard", gathers * weights, gathers * (layers + 1))
        yield Message("reduce_scatter", "shard", weights, layers + 1)
    if layout.data > 1:
        yield Message("all_reduce", "data", weights / layout.shard, _buckets(job))


def _buckets(job: Job) -> int:
    """Exchanges of all gradients: DDP's buckets, else one for each layer and one for the ends."""
    if job.strategy != "data":
        return job.layers + 1
    return max(1, round(WEIGHT_BYTES * rank_parameters(job) / BUCKET_BYTES))


HOPS: dict[str, Callable[[int], int]] = {  # of a ring of n ranks
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "send_recv": lambda n: 1,
}


@dataclass(frozen=True)
class Rates:
    """What a machine does: FLOP/s of a rank, bytes/s of its memory, and ``line(op, ranks, stride)`` = (a, b)."""

    flops: float
    copy_bytes_per_s: float
    line: Callable[[str, int, int], tuple[float, float]]

    @classmethod
    def of_preset(cls, machine: Preset, precision: str) -> "Rates":
        """Take the claimed peaks of a machine; a group that spans nodes has its share of the network."""

        def line(op: str, ranks: int, stride: int) -> tuple[float, float]:
            link, network = machine.link, machine.network
            if link and (ranks * stride <= machine.devices or network is None):
                assert link.gbytes_per_s is not None
                return link.latency_us.value / 1e6, 1 / (1e9 * link.gbytes_per_s.value)
            assert network is not None and network.gbytes_per_s is not None
            # So many groups share the adapters of a node, and such a share of a ring's hops leaves it.
            groups = min(stride, machine.devices)
            leaving = groups / machine.devices
            inside = link.latency_us.value if link else 0.0
            hop_us = leaving * network.latency_us.value + (1 - leaving) * inside
            return hop_us / 1e6, groups / (1e9 * network.gbytes_per_s.value)

        return cls(machine.peak_flops(precision)[0], 1e9 * machine.memory_gbytes_per_s.value, line)

    @classmethod
    def of_run(cls, flops: float, copy_bytes_per_s: float, links: Sequence[Mapping[str, Any]]) -> "Rates | None":
        """Take what a run measured; None without a line of any link. An operation without one has another's."""
        hops: dict[str, tuple[float, float]] = {}
        for row in links:
            if row.get("alpha_s") is not None:
                op, ranks = row["op"], row["world"]
                hops[op] = row["alpha_s"] / HOPS[op](ranks), row["beta_s_per_byte"] / BUS_FACTORS[op](ranks)
        if not hops:
            return None
        return cls(flops, copy_bytes_per_s, lambda op, ranks, stride: hops.get(op) or next(iter(hops.values())))


def bubble_share(pipeline: int, micro_batches: int, schedule: str) -> float:
    """Return the idle share of a step, with equal stages: ``(p-1)/(v m + p-1)``; zero-bubble idles a third of it."""
    idle = (pipeline - 1) / (3 if schedule == "zero_bubble" else 1)
    return idle / (SCHEDULES[schedule][0] * micro_batches + idle) if schedule else 0.0


def step_time(job: Job, rates: Rates, compute_s: float = 0.0) -> Time:
    """Return the seconds of a step, whose compute takes a rank ``compute_s``; 0: as long as at the peaks."""
    shape, layout = job.shape, job.layout
    products = (4 / 3 if job.checkpointing else 1.0) * job.flops / layout.world / rates.flops
    cut = layout.tensor if job.strategy == "sequence" else 1
    layer = LAYER_PASSES * shape.hidden / cut + FFN_PASSES * shape.ffn_inputs / layout.tensor
    passed = job.tokens * (job.layers * layer * job.width_bytes + 4 * LOSS_PASSES * shape.outputs)
    moved = ADAMW_PASSES * WEIGHT_BYTES * rank_parameters(job) / layout.shard
    at_peaks = (products, passed / rates.copy_bytes_per_s, moved / rates.copy_bytes_per_s)
    scale = compute_s / sum(at_peaks) if compute_s else 1.0
    compute, elementwise, optimizer = (scale * value for value in at_peaks)
    spent, degrees = dict.fromkeys(vars(layout), 0.0), list(vars(layout).values())
    for message in messages(job):
        place = list(spent).index(message.axis)
        ranks, stride = degrees[place], math.prod(degrees[place + 1 :])
        spent[message.axis] += message.seconds(ranks, rates.line(message.op, ranks, stride))
    # Compute hides exchanges between copies, but for the last one; others stand in its way.
    between, passes_s = spent["data"] + spent["shard"], compute + elementwise
    if layout.shard > 1:
        hidden = min(between * job.layers / (job.layers + 1), passes_s)
    else:
        hidden = min(between * (1 - 1 / _buckets(job)), 2 / 3 * passes_s)
    comm, share = sum(spent.values()), bubble_share(layout.pipeline, job.micro_batches, job.schedule)
    return Time(compute, elementwise, optimizer, comm - hidden, passes_s * share / (1 - share), comm)


Estimate = tuple[Job, float, Time]  # with the bytes of the fullest device


def machine(text: str) -> Preset:
    """Return the machine of ``NAME`` or ``NAME:NODES``; ``UserError`` for none, or for nodes that are not joined."""
    name, sign, nodes = text.partition(":")
    chosen = preset(name)
    if sign and not (nodes.isdigit() and int(nodes)):
        raise UserError(f"machine = {text}: expected NAME:NODES with a whole number of nodes, as in {name}:16")
    if sign and chosen.network is None:
        raise UserError(f"machine = {text}: {name} has no network between nodes: take {name}, or a file with `network`")
    return chosen.model_copy(update={"nodes": int(nodes)}) if sign else chosen


def expected(config: Any) -> str:
    """Return the lines of a dry run about memory and time, '' where no machine is named and none was written."""
    name = config.machine or (HERE if HERE in names() else "")
    if not name:
        return ""
    there, job = machine(name), config.job()
    world = there.world if config.machine else config.world_size
    possible, lacking = estimates(config, Rates.of_preset(there, job.precision), world)
    capacity, (_, peak) = 1e9 * there.memory_gb.value, there.peak_flops(job.precision)
    note = "" if peak == job.precision else f"; it has no {job.precision} peak: {peak} is taken"
    lines = [
        f"estimates for {name} ({there.description}), devices: {world}; nothing was measured; "
        f"times are lower bounds from the peaks below{note}",
        f"{job.batch:,} samples of {job.seq:,} tokens a step, {job.precision}{', checkpointing' * job.checkpointing}",
        *_table(possible, capacity),
        *(f"not possible: {why}" for why in lacking),
        *([_choice(possible, capacity)] if possible else []),
        "sources of the peaks:",
        *(f"  {what} {figure.value:,.6g}: {figure.kind}, {figure.source}" for what, figure in there.sources.items()),
    ]
    return "\n\n  " + "\n  ".join(lines)


def estimates(config: Any, rates: Rates, world: int) -> tuple[list[Estimate], list[str]]:
    """Return the estimates of all strategies that fit a world, and why others do not."""
    possible, lacking = list[Estimate](), list[str]()
    for name, schedule in config.ways(config.strategies or (STRATEGIES if config.machine else config.chosen)):
        try:
            job = config.job(name, schedule, world if STRATEGIES[name] else 1)
        except UserError as error:
            lacking.append(str(error))
        else:
            possible.append((job, sum(memory(job).values()), step_time(job, rates)))
    return possible, lacking


def _choice(possible: list[Estimate], capacity: float) -> str:
    """Say which strategy the estimates prefer: the fastest that fits, and whether one device does not."""
    fitting = [item for item in possible if item[1] <= capacity]
    if not fitting:
        return "estimate: none fits the memory of a device: take more devices, checkpointing=true or fewer samples"
    best, *_ = min(fitting, key=lambda item: item[2].step_s)
    words = f"estimate: {best.strategy} ({best.layout}) is the fastest that fits"
    lacks = [need for job, need, _ in possible if job.strategy == "single" and need > capacity]
    return words + "".join(f"; one device needs {quantity(need / 1e9, 'GB')} and does not fit" for need in lacks)


def _table(possible: list[Estimate], capacity: float) -> list[str]:
    rows = []
    for job, need, time in possible:
        times = {"step at least": time.step_s, "compute": time.compute_s}
        times |= {"memory-bound": time.elementwise_s + time.optimizer_s, "communication": time.comm_s}
        times |= {"exposed": time.exposed_s, "bubble": time.bubble_s}
        row = {"strategy": f"{job.strategy} {job.schedule}", "layout": str(job.layout)}
        row |= {"memory a device": quantity(need / 1e9, "GB"), "fits": "yes" if need <= capacity else "no"}
        row |= {part: seconds(value) if value else "0" for part, value in times.items()}
        rows.append(row | {"samples/s at most": f"{job.batch / time.step_s:,.4g}"})
    console = Console(width=200, no_color=True)
    with console.capture() as shown:
        console.print(terminal.table(rows))
    return [line.rstrip() for line in shown.get().splitlines()]
