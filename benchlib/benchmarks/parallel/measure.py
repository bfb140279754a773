"""One strategy at work: its steps are timed, some are traced, and of a pipeline's one the schedule is recorded.

A step is: take a batch, forward, backward, update. Steps of all strategies go through ``Runner.steps``; ranks outside a smaller
mesh wait.
"""

import ctypes
import functools
import gc
import math
import re
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchlib.benchmarks.parallel import traces
from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.estimate import Rates, Work, busy, held_share, of_row, rank_parameters, step_time
from benchlib.benchmarks.parallel.proofs import tokens
from benchlib.benchmarks.parallel.shapes import Layout, Shape
from benchlib.benchmarks.parallel.strategies import Job, Way, prepare, timeline
from benchlib.benchmarks.parallel.strategies import alone as whole
from benchlib.core.events import EventWriter, keep_alive
from benchlib.core.stats import fit_alpha_beta, summary
from benchlib.runtime import devices
from benchlib.runtime.group import World, all_gather_objects
from benchlib.runtime.steps import comm_device
from benchlib.runtime.timing import Clock, GradientExchange, StepTimer, hold, union
from benchlib.workloads.collective_ops import OPS, Place
from benchlib.workloads.collective_timing import Case, Exercise, Pace, take_in_turns
from benchlib.workloads.llm import mininews

RECORDED = 3  # steps of a pipeline, of which the shortest is shown: neighbours only lengthen one
PARTS = ("data", "forward", "backward", "exchange_exposed", "optimizer")  # of a step, by the timer
TRACED, FEW = 2, 5  # steps under the profiler; one where fewer than this are counted
ALONE = 3  # steps of the compute of a rank
REPEATS = 10  # exchanges that planted_slowdown=1 adds to DDP's
SPOKEN_S = 0.5  # between signs of life
Row = dict[str, Any]
Alone = dict[tuple[Shape, int, int], dict[str, float]]  # by model, ranks that compute at once, and samples of each
Part = tuple[
    str, tuple[tuple[str, int], ...]
]  # the name of a parameter, and which shard of it by dimension of the mesh


@dataclass(frozen=True)
class Plan:
    """What is measured. ``scaling`` is empty for a row of its own, else strong or weak."""

    shape: Shape
    strategy: str
    schedule: str
    layout: Layout
    batch: int
    scaling: str = ""

    @property
    def key(self) -> str:
        """The name of its row."""
        words = [self.shape.name, self.strategy, self.schedule, self.scaling, str(self.layout) if self.scaling else ""]
        return " ".join(word for word in words if word)

    def identity(self) -> Row:
        """What names the row in every table."""
        return {
            "key": self.key, "model": self.shape.name, "strategy": self.strategy, "schedule": self.schedule,
            **asdict(self.layout), "world": self.layout.world, "scaling": self.scaling,
        }  # fmt: skip


def describe(config: ParallelConfig, plan: Plan) -> Row:
    """Return the part of a row that is known before anything runs."""
    length = config.length(plan.shape)
    return plan.identity() | {
        "batch_size": plan.batch, "seq_len": length, "micro_batches": config.micro_batches if plan.schedule else 1,
        "precision": config.precision, "checkpointing": config.checkpointing, "compile": config.compile,
        "parameters": plan.shape.parameters, "flops": plan.shape.step_flops(plan.batch, length), "status": "ok", "reason": "",
    }  # fmt: skip


def compute_s(
    config: ParallelConfig, plan: Plan, rates: Rates, here: World, events: EventWriter, alone: Alone
) -> float:
    """Return the seconds that a rank of the plan computes in a step while all its ranks compute. All ranks call it.

    That is its share of the model (``_share_s``), and for each layer what the strategy adds (hooks, dispatch of cut tensors):
    the step of a narrow model, which has hardly any products, over what the model of time says of it.
    """
    work = of_row(describe(config, plan), plan.shape, config.shard or 2)
    narrow = config.proof_shape(plan.shape, plan.layout)
    small = replace(work, shape=narrow, batch=plan.layout.data * config.micro_batches, seq=narrow.positions)
    scale = _share_s(config, small, here, events, alone) / sum(busy(small, rates))
    job = replace(Job.of(config, narrow, small.batch, here.device), length=narrow.positions)
    spread = _phases(config, job, prepare(plan.strategy, plan.layout, plan.schedule, job), here, events)["step_s"]
    added = max(0.0, spread - step_time(small, rates, scale).step_s)
    return _share_s(config, work, here, events, alone) + added * work.layers / small.layers


def _share_s(config: ParallelConfig, work: Work, here: World, events: EventWriter, alone: Alone) -> float:
    """Return the seconds in which each rank computes its share of a step at the same time.

    Each trains the whole model by itself on as many samples as have its share of the FLOPs; a pipeline's rank has its share of
    the layers, and each its share of the optimizer. ``alone`` keeps what was measured.
    """
    layout, micro = work.layout, work.micro_batches if work.layout.pipeline > 1 else 1
    share = work.rank_batch / micro / layout.tensor / layout.context
    samples = max(1, round(share))
    if (key := (work.shape, layout.world, samples)) not in alone:
        job = replace(Job.of(config, work.shape, samples, here.device), length=work.seq)
        way = whole(job) if here.rank < layout.world else None
        alone[key] = _phases(config, job, way, here, events)
    times = alone[key]
    passes = (times["data_s"] + times["forward_s"] + times["backward_s"]) * share / samples
    updated = rank_parameters(work) * held_share(work) / work.shape.parameters
    return passes * micro * work.layers / work.shape.layers + times["optimizer_s"] * updated


def _phases(config: ParallelConfig, job: Job, way: Way | None, here: World, events: EventWriter) -> dict[str, float]:
    """Return the median seconds of a step and of its phases on the slowest rank, of those that have a ``way``."""
    patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.budget_s))
    times: list[dict[str, float]] = []
    with keep_alive(events, config.budget_s):
        if way is not None:
            run = Runner(config, Plan(job.form, "single", "", way.layout, job.batch), job, way, here, events)
            run.steps(1)
            run.timer.take()
        dist.barrier(patient)  # all of them begin together
        if way is not None:
            run.steps(ALONE)
            times = run.timer.take()
        dist.barrier(patient)
    dist.destroy_process_group(patient)
    ranks = [rank for rank in all_gather_objects(times) if rank]
    phases = ("step_s", "data_s", "forward_s", "backward_s", "optimizer_s")
    return {name: max(statistics.median(row[name] for row in rank) for rank in ranks) for name in phases}


@dataclass
class Found:
    """What one rank saw; times in seconds."""

    times: list[dict[str, float]]
    losses: list[float | None]
    trace: traces.Trace
    stages: list[list[Row]]
    peak_bytes: float | None
    traced_s: float
    held: dict[Part, int]


def measure(config: ParallelConfig, plan: Plan, here: World, events: EventWriter) -> dict[str, list[Row]]:
    """Run a strategy and return its rows by table, the same on all ranks; all ranks call it.

    Raises ``BackendUnavailable`` as ``strategies.prepare`` does.
    """
    planted = round(REPEATS * config.planted_slowdown) if config.planted == "communication" else 0
    job = Job.of(config, plan.shape, plan.batch, here.device, planted)
    before = _settled(here.device)
    way = prepare(plan.strategy, plan.layout, plan.schedule, job)
    # Who has no part waits for as long as the others take, which may be more than a collective's time-out.
    patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.budget_s))
    result: Found | None = None
    if way is None:
        with keep_alive(events, config.budget_s):
            dist.barrier(patient)
    else:
        result = _rank(config, plan, job, way, here, events, before)
        dist.barrier(patient)
    dist.destroy_process_group(patient)
    del way
    gc.collect()
    results = [item for item in all_gather_objects(result) if item is not None]
    stages = _shortest([item.stages for item in results])
    row = describe(config, plan) | _row(plan, results, stages)
    tables: dict[str, list[Row]] = {"strategies": [row]}
    for table in ("kernels", "communication"):
        tables[table] = [plan.identity() | item for item in getattr(results[0].trace, table)]
    began = min((member["start_s"] for rank in stages for member in rank), default=0.0)
    tables["stages"] = [
        plan.identity() | one | {"rank": rank, "start_s": one["start_s"] - began, "end_s": one["end_s"] - began}
        for rank, seen in enumerate(stages)
        for one in seen
    ]
    return tables


def _shortest(recorded: list[list[list[Row]]]) -> list[list[Row]]:
    """Return by rank the rows of the recorded step that was the shortest over all ranks."""
    steps = [list(ranks) for ranks in zip(*recorded, strict=True)]
    return min(steps, key=lambda ranks: _span([row for rank in ranks for row in rank]), default=[])


def _span(rows: list[Row]) -> float:
    return float(max(row["end_s"] for row in rows) - min(row["start_s"] for row in rows))


def _settled(device: torch.device) -> float:
    """Give back what earlier strategies freed and return the bytes that this process holds by now."""
    gc.collect()
    if device.type == "cpu":
        if sys.platform.startswith("linux"):
            ctypes.CDLL(None).malloc_trim(0)
        return float(psutil.Process().memory_info().rss) - (_bytes("RssFile") or 0.0)
    if devices.has_events(device):
        torch.get_device_module(device).empty_cache()
    return 0.0


def _bytes(name: str) -> float | None:
    """Return a size of this process as Linux states it; None elsewhere.

    ``RssFile`` are pages of files: the libraries' code of operations that were used for the first time is no memory of a strategy.
    """
    status = Path("/proc/self/status")
    found = re.search(rf"^{name}:\s+(\d+) kB", status.read_text(), re.M) if status.exists() else None
    return 1024.0 * int(found[1]) if found else None


def _peak(device: torch.device, before: float) -> float | None:
    """Return the most bytes held since ``_forget_peak``, on a CPU beyond those ``before``; None where nobody counts them."""
    if device.type != "cpu":
        return devices.peak_memory_bytes(device)[0]
    most = _bytes("VmHWM")
    return None if most is None else max(0.0, most - (_bytes("RssFile") or 0.0) - before)


def _forget_peak(device: torch.device) -> None:
    devices.reset_peak_memory(device)
    counter = Path("/proc/self/clear_refs")
    if device.type == "cpu" and counter.exists():
        counter.write_text("5")  # proc(5): the peak begins anew


def _rank(
    config: ParallelConfig, plan: Plan, job: Job, way: Way, here: World, events: EventWriter, before: float
) -> Found:
    torch.manual_seed(config.seed + 1 + here.rank)
    run = Runner(config, plan, job, way, here, events)
    with keep_alive(events, config.startup_timeout_s):
        run.steps(config.warmup)
    run.timer.take()
    _forget_peak(here.device)
    run.steps(config.steps)
    losses, times = run.losses[config.warmup :], run.timer.take()
    peak = _peak(here.device, before)
    devices.synchronize(here.device)
    with traces.traced(here.device) as profiler:
        run.steps(run.few)
        devices.synchronize(here.device)
    traced_s = statistics.fmean(row["step_s"] for row in run.timer.take())
    trace = traces.read(profiler, here.device, run.few, config.precision, sum(held(way).values()))
    del profiler
    stages: list[list[Row]] = []
    for _ in range(RECORDED if way.stages else 0):
        stages.append([])
        with timeline(way, stages[-1]):
            run.steps(1)
    return Found(times, losses, trace, stages, peak, traced_s, held(way))


def held(way: Way) -> dict[Part, int]:
    """Return how many values of each parameter this rank holds, by its name and the shard of it."""
    sizes: dict[Part, int] = {}
    for part in way.parts:
        for name, each in part.named_parameters():
            shard: tuple[tuple[str, int], ...] = ()
            if isinstance(each, DTensor):
                mesh = each.device_mesh
                place = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), each.placements, strict=True)
                shard = tuple((axis, index) for axis, index, how in place if not how.is_replicate())
            sizes[name, shard] = (each.to_local() if isinstance(each, DTensor) else each).numel()
    return sizes


def counted(ranks: Iterable[dict[Part, int]]) -> int:
    """Return how many parameters ranks hold together, each shard once: of its replicas the smallest counts."""
    sizes: dict[Part, int] = {}
    for rank in ranks:
        for part, size in rank.items():
            sizes[part] = min(size, sizes.get(part, size))
    return sum(sizes.values())


class Runner:
    """The loop, and where it is: the number of the next batch, the losses so far."""

    def __init__(
        self, config: ParallelConfig, plan: Plan, job: Job, way: Way, here: World, events: EventWriter
    ) -> None:
        self.config, self.plan, self.job, self.way, self.here, self.events = config, plan, job, way, here, events
        last = here.rank == plan.layout.world - 1
        slow = {"": True, "rank": last and plan.layout.world > 1}.get(config.planted, False)
        clock = Clock(here.device)
        self.timer = StepTimer(clock, GradientExchange(clock), config.planted_slowdown if slow else 0.0)
        self.number = 0
        self.few = 1 if config.steps < FEW else TRACED
        self.total = config.warmup + config.steps + self.few + (RECORDED if way.stages else 0)
        self.losses: list[float | None] = []
        self._kept: list[torch.Tensor] = []
        self._spoken = time.monotonic()
        self._least_s = math.inf  # of a step without what is planted

    def steps(self, count: int) -> None:
        """Take ``count`` steps; their losses are read at the end, so that no step waits for its own."""
        way, timer = self.way, self.timer
        timer.begin()
        for _ in range(count):
            began = time.perf_counter()
            inputs, targets = self._batch()
            timer.mark("data")
            mean = way.step(inputs, targets, timer.mark)
            way.optimizer.step()
            way.optimizer.zero_grad(set_to_none=True)
            timer.mark("optimizer")
            timer.end_step()
            self._kept.append(mean)
            self._speak()
            self._least_s = min(self._least_s, time.perf_counter() - began - self._held())
        timer.clock.settle()
        self.losses += [float(mean) if way.has_loss else None for mean in self._kept]
        self._kept = []

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        config, job = self.config, self.job
        make = _text if config.source == "text" and job.form.kind == "decoder" else tokens
        inputs, targets = make(job.form, job.length, job.batch, job.seed, self.number)
        self.number += 1
        hold(self._held())
        device = self.here.device
        return self.way.share(inputs).to(device), self.way.share(targets).to(device)

    def _held(self) -> float:
        """Return the seconds by which a planted slow source of data delays a batch."""
        planted = self.config.planted == "data" and math.isfinite(self._least_s)
        return self.config.planted_slowdown * self._least_s if planted else 0.0

    def _speak(self) -> None:
        if time.monotonic() - self._spoken < SPOKEN_S:
            return
        self._spoken = time.monotonic()
        kind = "progress" if self.here.main else "heartbeat"
        self.events.emit(kind, phase=self.plan.key, done=self.number, total=self.total, unit="steps", step=self.number)


def _text(form: Shape, length: int, batch: int, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bytes of the kit's news and what follows them, int64 (B, S) each."""
    data = _news(seed)
    drawn = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(data) - length - 1, (batch,), generator=drawn)
    rows = torch.stack([data[start : start + length + 1] for start in starts.tolist()])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@functools.cache
def _news(seed: int) -> torch.Tensor:
    text = " ".join(article.text for article in mininews.generate(2000, seed)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def _row(plan: Plan, ranks: list[Found], stages: list[list[Row]]) -> Row:
    """Return what the ranks measured as one row."""

    def part(name: str) -> float:
        return statistics.fmean(statistics.median(row[name] for row in rank.times) for rank in ranks)

    slowest = np.array([[row["step_s"] for row in rank.times] for rank in ranks]).max(axis=0)
    stats = summary(slowest.tolist())
    busy = statistics.fmean(rank.trace.busy_s for rank in ranks)
    bare = statistics.fmean(rank.trace.exposed_s for rank in ranks)
    losses = [[loss for rank in ranks if (loss := rank.losses[step]) is not None] for step in range(len(slowest))]
    bubble = _bubble(plan, stages)
    explained = [sum(row[f"{phase}_s"] for phase in PARTS) / row["step_s"] for rank in ranks for row in rank.times]
    return {
        "step_s": stats.median, "step_ci_low": stats.ci_low, "step_ci_high": stats.ci_high, "n": stats.n, "steps_s": slowest.tolist(),
        "forward_s": None if plan.schedule else part("forward_s"), "backward_s": part("backward_s"),
        "optimizer_s": part("optimizer_s"), "data_s": part("data_s"),
        "comm_s": busy, "comm_hidden_share": max(0.0, 1 - bare / busy) if busy else None,
        "bubble_s": bubble[0], "bubble_share": bubble[1], "samples_per_s": plan.batch / stats.median,
        "explained_shares": [min(explained), max(explained)],
        "rank_own_s": [max(0.0, rank.traced_s - rank.trace.exposed_s) for rank in ranks],
        "peak_bytes": [rank.peak_bytes for rank in ranks if rank.peak_bytes is not None],
        "losses": [statistics.fmean(values) if values else math.nan for values in losses],
        "counted_parameters": counted(rank.held for rank in ranks),
    }  # fmt: skip


def _bubble(plan: Plan, ranks: list[list[Row]]) -> tuple[float | None, float | None]:
    """Return the mean idle time of a pipeline's ranks between its first and its last work, in seconds and as a share."""
    if not plan.schedule or not ranks:
        return None, None
    inner = plan.layout.pipeline * plan.layout.tensor
    idle, share = [], []
    for first in range(0, len(ranks), inner):  # one pipeline after the other
        group = ranks[first : first + inner]
        spans = [[(row["start_s"], row["end_s"]) for row in rank] for rank in group]
        span = _span([row for rank in group for row in rank])
        idle += [span - union(rank) for rank in spans]
        share += [1 - union(rank) / span for rank in spans]
    return statistics.fmean(idle), statistics.fmean(share)


# The links between the ranks.

LINK_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
LINK_OPS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
LINK_PACE = Pace(0, least=5, most=5, warmup=1)


def links(here: World) -> list[Row]:
    """Return rows of op, world, wrong_elements of the results, and ``t = alpha + beta bytes`` fitted to collectives of all ranks:
    alpha_s, beta_s_per_byte, both None with a ``reason`` where the times fit no line.

    Bytes are those of the larger side.
    """
    rows, at = [], Place(here.rank, here.size, comm_device(here))
    for op in LINK_OPS if here.size > 1 else ():
        reduction = "sum" if OPS[op].reduces else ""
        cases = [Exercise(Case(op, "library", "fp32", reduction, False, size), at) for size in LINK_BYTES]
        messages = take_in_turns(cases, at.device, LINK_PACE)
        line = fit_alpha_beta(LINK_BYTES, [float(np.median(series.seconds)) for series in messages])
        fitted = {name: None if line.reason else getattr(line, name) for name in ("alpha_s", "beta_s_per_byte")}
        wrong = sum(series.wrong for series in messages)
        rows.append({"op": op, "world": here.size, "wrong_elements": wrong, "reason": line.reason} | fitted)
    return rows
