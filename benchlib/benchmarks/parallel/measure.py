"""One strategy at work: its steps are timed, some are traced, and of a pipeline's one the schedule is recorded.

A step is: take a batch, forward, backward, update. Steps of all strategies go through ``Runner.timed``; ranks outside a smaller
mesh wait.
"""

import contextlib
import ctypes
import functools
import gc
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchlib.benchmarks.parallel import traces
from benchlib.benchmarks.parallel.estimate import Rates, held_share, rank_parameters, scale_of, step_time
from benchlib.benchmarks.parallel.proofs import tokens
from benchlib.benchmarks.parallel.shapes import Job, Shape
from benchlib.benchmarks.parallel.strategies import Way, alone, prepare, timeline
from benchlib.core.events import keep_alive
from benchlib.runtime import devices
from benchlib.runtime.group import World, all_gather_objects
from benchlib.runtime.measurement import Rank, Tables
from benchlib.runtime.steps import comm_device
from benchlib.runtime.timing import Clock, GradientExchange, StepTimer, hold, union
from benchlib.workloads.alpha_beta import fit_alpha_beta
from benchlib.workloads.collective_ops import OPS, Place
from benchlib.workloads.collective_timing import Case, Exercise, Pace, take_in_turns

RECORDED = 3  # steps of a pipeline, of which the shortest is shown: neighbours only lengthen one
PHASES = ("data_s", "forward_s", "backward_s", "exchange_exposed_s", "optimizer_s")  # of a step, by the timer
TRACED, FEW = 2, 5  # steps under the profiler; one where fewer than this are counted
ALONE = 3  # steps of the compute of a rank
REPEATS = 10  # exchanges that planted_slowdown=1 adds to DDP's
SPOKEN_S = 0.5  # between signs of life
LINK_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
LINK_OPS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
Row = dict[str, Any]
Shares = dict[tuple[Shape, int, int], Row]  # by model, ranks that compute at once, and samples of each
Part = tuple[str, tuple[tuple[str, int], ...]]  # a parameter's name, and which shard of it by dimension of the mesh


def links(here: World) -> list[Row]:
    """Return rows of op, world, wrong elements of the results, and ``t = alpha + beta bytes`` fitted to collectives of all ranks.

    Bytes are those of the larger side.
    """
    rows, at = list[Row](), Place(here.rank, here.size, comm_device(here))
    if here.size == 1:
        return [{"op": op, "status": "skipped", "reason": "one rank exchanges nothing"} for op in LINK_OPS]
    for op in LINK_OPS:
        reduction = "sum" if OPS[op].reduces else ""
        cases = [Exercise(Case(op, "library", "fp32", reduction, False, size), at) for size in LINK_BYTES]
        messages = take_in_turns(cases, at.device, Pace(0, least=5, most=5, warmup=1))
        line = fit_alpha_beta(LINK_BYTES, [median(series.seconds) for series in messages])
        row: Row = {"op": op, "world": here.size, "wrong_elements": sum(series.wrong for series in messages)}
        for name in ("alpha_s", "beta_s_per_byte"):
            row |= {"why": row.get("why", {}) | {name: line.reason}} if line.reason else {name: getattr(line, name)}
        rows.append(row)
    return rows


def compute_s(job: Job, rates: Rates, rank: Rank, known: Shares) -> float:
    """Return the seconds that a rank of a job computes in a step while all its ranks compute. All ranks call it.

    That is its share of the model (``_share_s``), and for each layer what the strategy adds (hooks, dispatch of cut tensors):
    the step of a narrow model, which has hardly any products, over what the model of time says of it.
    """
    small = job.narrow()
    scale = scale_of(small, rates, _share_s(small, rank, known))
    spread = _phases(small, prepare(small, rank.world.device), rank)["step_s"]
    added = max(0.0, spread - step_time(small, rates, scale).step_s)
    return _share_s(job, rank, known) + added * job.layers / small.layers


def _share_s(job: Job, rank: Rank, known: Shares) -> float:
    """Return the seconds in which each rank computes its share of a step at the same time.

    Each trains the whole model by itself on as many samples as have its share of the FLOPs; a pipeline's rank has its share of
    the layers, and each its share of the optimizer. ``known`` keeps what was measured.
    """
    layout, here = job.layout, rank.world
    share = job.batch / layout.data / job.parts / layout.tensor / layout.context
    samples = max(1, round(share))
    if (key := (job.shape, layout.world, samples)) not in known:
        single = job.alone(batch=samples)
        known[key] = _phases(single, alone(single, here.device) if here.rank < layout.world else None, rank)
    times = known[key]
    passes = (times["data_s"] + times["forward_s"] + times["backward_s"]) * share / samples
    updated = rank_parameters(job) * held_share(job) / job.shape.parameters
    return float(passes * job.parts * job.layers / job.shape.layers + times["optimizer_s"] * updated)


def _phases(job: Job, way: Way | None, rank: Rank) -> Row:
    """Return the median seconds of a step and of its phases on the slowest rank, of those that have a ``way``."""
    times: list[dict[str, float]] = []
    with keep_alive(rank.events, rank.config.budget_s), _patient(rank) as meet:
        runner = Runner(job, way, rank) if way is not None else None
        if runner:
            runner.timed(1)
        meet()  # all of them begin together
        if runner:
            times = runner.timed(ALONE)
        meet()
    ranks = [own for own in all_gather_objects(times) if own]
    return {name: max(median(row[name] for row in own) for own in ranks) for name in ("step_s", *PHASES)}


@contextlib.contextmanager
def _patient(rank: Rank) -> Iterator[Callable[[], Any]]:
    """Give a barrier that waits for as long as other ranks take, which may be more than a collective's time-out."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=rank.config.budget_s))
    yield functools.partial(dist.barrier, group)
    dist.destroy_process_group(group)


def measure(job: Job, rank: Rank) -> Tables:
    """Run a strategy and return its rows by table, the same on all ranks; all ranks call it.

    Raises ``BackendUnavailable`` as ``strategies.prepare`` does.
    """
    config, device = rank.config, rank.world.device
    if config.planted == "communication":
        job = replace(job, repeats=round(REPEATS * config.planted_slowdown))
    before = _settled(device)
    way = prepare(job, device)
    found: Row | None = None
    with _patient(rank) as meet:
        if way is None:
            with keep_alive(rank.events, config.budget_s):
                meet()
        else:
            found = _rank(job, way, rank, before)
            meet()
    del way
    gc.collect()
    ranks = [item for item in all_gather_objects(found) if item is not None]
    # Of the recorded steps the shortest over all ranks; by rank.
    recorded = [list(rows) for rows in zip(*(item["stages"] for item in ranks), strict=True)]
    stages = min(recorded, key=lambda rows: _span([row for own in rows for row in own]), default=[])
    own = {"key": job.key, "scaling": job.scaling}
    began = min((row["start_s"] for rows in stages for row in rows), default=0.0)
    moved = [
        own | row | {"rank": number, "start_s": row["start_s"] - began, "end_s": row["end_s"] - began}
        for number, rows in enumerate(stages)
        for row in rows
    ]
    trace = ranks[0]["trace"]
    sides = {"kernels": trace.kernels, "communication": trace.communication}
    tables = {name: [own | row for row in rows] for name, rows in sides.items()}
    return {"strategies": [_row(job, ranks, stages)], "stages": moved, **tables}


def _rank(job: Job, way: Way, rank: Rank, before: float) -> Row:
    """Return what this rank sees."""
    config, device = rank.config, rank.world.device
    torch.manual_seed(config.seed + 1 + rank.world.rank)
    runner = Runner(job, way, rank)
    with keep_alive(rank.events, config.startup_timeout_s):
        runner.timed(config.warmup)
    devices.reset_peak_memory(device)
    counter = Path("/proc/self/clear_refs")
    if device.type == "cpu" and counter.exists():
        counter.write_text("5")  # proc(5): the peak begins anew
    times = runner.timed(config.steps)
    seen: Row = {"times": times, "losses": runner.losses[config.warmup :], "peak": _peak(device, before), "stages": []}
    devices.synchronize(device)
    few = 1 if config.steps < FEW else TRACED
    with traces.traced(device) as profiler:
        seen["traced_s"] = fmean(row["step_s"] for row in runner.timed(few))
        devices.synchronize(device)
    seen["held"] = held(way)
    seen["trace"] = traces.read(profiler, device, few, runner.counted(), sum(seen["held"].values()))
    del profiler
    for _ in range(RECORDED if way.stages else 0):
        rows: list[Row] = []
        with timeline(way, rows):
            runner.timed(1)
        seen["stages"].append(rows)
    return seen


# Memory of a process


def _settled(device: torch.device) -> float:
    """Give back what earlier strategies freed and return the bytes that this process holds by now."""
    gc.collect()
    if device.type != "cpu":
        if devices.has_events(device):
            torch.get_device_module(device).empty_cache()
        return 0.0
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).malloc_trim(0)
    return _resident("VmRSS") or 0.0


def _resident(name: str) -> float | None:
    """Return what this process holds (VmRSS), or held at most since the count began anew (VmHWM); None where Linux does not say.

    Without pages of files: the libraries' code of operations that were used for the first time is no memory of a strategy.
    """
    status = Path("/proc/self/status")
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", status.read_text(), re.M)) if status.exists() else {}
    return 1024.0 * (int(sizes[name]) - int(sizes["RssFile"])) if sizes else None


def _peak(device: torch.device, before: float) -> float | None:
    """Return the most bytes held since the count began anew, on a CPU beyond those ``before``; None where nobody counts them."""
    most = _resident("VmHWM") if device.type == "cpu" else devices.peak_memory_bytes(device)[0]
    return None if most is None else max(0.0, most - before)


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

    def __init__(self, job: Job, way: Way, rank: Rank) -> None:
        self.job, self.way, self.rank, self.config = job, way, rank, rank.config
        last = rank.world.rank == job.layout.world - 1 and job.layout.world > 1
        slow = {"": True, "rank": last}.get(self.config.planted, False)
        clock = Clock(rank.world.device)
        self.timer = StepTimer(clock, GradientExchange(clock), self.config.planted_slowdown if slow else 0.0)
        self.number, self.losses = 0, list[float | None]()
        self._spoken = time.monotonic()
        self._least_s = math.inf  # of a step without what is planted

    def timed(self, count: int) -> list[dict[str, float]]:
        """Take ``count`` steps and return their times; losses are read at the end, so that no step waits for its own."""
        way, timer, kept = self.way, self.timer, []
        timer.begin()
        for _ in range(count):
            began = time.perf_counter()
            inputs, targets = self._batch()
            timer.mark("data")
            kept.append(way.step(inputs, targets, timer.mark))
            way.update()
            timer.mark("optimizer")
            timer.end_step()
            if time.monotonic() - self._spoken >= SPOKEN_S:
                self._spoken = time.monotonic()
                self.rank.events.emit("heartbeat", step=self.number)
            self._least_s = min(self._least_s, time.perf_counter() - began - self._held())
        times = timer.take()
        self.losses += [float(mean) if way.has_loss else None for mean in kept]
        return times

    def counted(self) -> traces.Counter:
        """Take a step without compiled layers, and count the operations of its forward and backward pass."""
        inputs, targets = self._batch()
        counter = traces.Counter()
        with torch.compiler.set_stance("force_eager") if self.job.compile else contextlib.nullcontext(), counter:
            self.way.step(inputs, targets, lambda phase: None)
        self.way.update()
        return counter

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = (self.way.share(each).to(self.rank.world.device) for each in tokens(self.job, self.number))
        self.number += 1
        hold(self._held())
        return inputs, targets

    def _held(self) -> float:
        """Return the seconds by which a planted slow source of data delays a batch."""
        planted = self.config.planted == "data" and math.isfinite(self._least_s)
        return float(self.config.planted_slowdown * self._least_s) if planted else 0.0


# Rows


def _row(job: Job, ranks: list[Row], stages: list[list[Row]]) -> Row:
    """Return what the ranks measured as one row: phases are means over ranks of their medians."""
    steps = [max(each) for each in zip(*([row["step_s"] for row in rank["times"]] for rank in ranks), strict=True)]
    losses = zip(*(rank["losses"] for rank in ranks if None not in rank["losses"]), strict=True)
    explained = [sum(row[name] for name in PHASES) / row["step_s"] for rank in ranks for row in rank["times"]]
    row = job.row() | {
        name: fmean(median(row[name] for row in rank["times"]) for rank in ranks)
        for name in ("forward_s", "backward_s", "optimizer_s", "data_s")
    }
    row |= {
        "status": "ok",
        "steps_s": steps,
        "comm_s": fmean(rank["trace"].busy_s for rank in ranks),
        "exposed_s": fmean(rank["trace"].exposed_s for rank in ranks),
        "explained_shares": [min(explained), max(explained)],
        "rank_own_s": [max(0.0, rank["traced_s"] - rank["trace"].exposed_s) for rank in ranks],
        "peak_bytes": [rank["peak"] for rank in ranks if rank["peak"] is not None],
        "losses": [fmean(values) for values in losses],
        "counted_parameters": counted(rank["held"] for rank in ranks),
        "why": {},
    }
    if not row["peak_bytes"]:
        row["why"]["peak_bytes"] = "this system does not count the memory of a process"
    if job.schedule:
        row |= {"forward_s": None, "bubble_share": _bubble(job, stages)}
        row["why"]["forward_s"] = "a schedule mixes forward and backward passes"
    else:
        row["why"]["bubble_share"] = "no pipeline"
    return row


def _span(rows: list[Row]) -> float:
    return float(max(row["end_s"] for row in rows) - min(row["start_s"] for row in rows))


def _bubble(job: Job, ranks: list[list[Row]]) -> float:
    """Return the mean idle share of a pipeline's ranks between its first and its last work."""
    inner, idle = job.layout.pipeline * job.layout.tensor, list[float]()
    for first in range(0, len(ranks), inner):  # one pipeline after the other
        group = ranks[first : first + inner]
        span = _span([row for rows in group for row in rows])
        idle += [1 - union([(row["start_s"], row["end_s"]) for row in rows]) / span for rows in group]
    return fmean(idle)
