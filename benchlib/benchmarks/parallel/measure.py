"""One strategy at work: its steps are timed, some are traced, and of a pipeline's one the schedule is recorded.

A step is: take a batch, forward, backward, update. Steps of all strategies go through ``Runner.timed``; ranks outside a
smaller mesh wait.
"""

import ctypes
import functools
import gc
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from benchlib.benchmarks.parallel import traces
from benchlib.benchmarks.parallel.shapes import Job
from benchlib.benchmarks.parallel.strategies import ShardedModel, prepare, record, tokens
from benchlib.core.events import keep_alive
from benchlib.runtime import devices
from benchlib.runtime.measurement import Rank, Tables
from benchlib.runtime.steps import wall_s
from benchlib.runtime.timing import StepTimer, hold, union
from benchlib.workloads import largest

PHASES = ("data_s", "forward_s", "backward_s", "optimizer_s")  # of a step, by the timer
TRACED = 2  # steps under the profiler
RECORDED = 3  # steps of a pipeline, of which the shortest is shown: neighbours only lengthen one
REPEATS = 10  # exchanges that planted_slowdown=1 adds to DDP's
HEARTBEAT_S = 0.5  # between signs of life
CLEAR_REFS = Path("/proc/self/clear_refs")
Row = dict[str, Any]
Part = tuple[str, tuple[tuple[str, int], ...]]  # a parameter's name, and which shard of it by dimension of the mesh


def together(rank: Rank, work: Callable[[], Any] | None) -> list[Any]:
    """Return what ``work`` gives on each rank that has some; all call it. Others wait, beyond a usual time-out."""
    most_s = rank.config.budget_s
    group, results = dist.new_group(backend="gloo", timeout=timedelta(seconds=most_s)), [None] * rank.world.size
    with keep_alive(rank.events, 0.0 if work else most_s):
        dist.all_gather_object(results, work() if work else None, group=group)
    dist.destroy_process_group(group)
    return [result for result in results if result is not None]


def measure(job: Job, rank: Rank) -> tuple[Row, Tables]:
    """Run a strategy; return its row and those of other tables, on all ranks; all call it. Raises as ``strategies.prepare`` does."""
    if rank.config.planted == "communication":
        job = replace(job, repeats=round(REPEATS * rank.config.planted_slowdown))
    device = rank.world.device
    before = _held(device)
    way = prepare(job, device)
    ranks = together(rank, functools.partial(_rank, way, rank, before) if way else None)
    del way
    gc.collect()
    steps = [[row for rows in step for row in rows] for step in zip(*(item["stages"] for item in ranks), strict=True)]
    stages = min(steps, key=_span, default=[])
    began = min((row["start_s"] for row in stages), default=0.0)
    for row in stages:
        row |= {"start_s": row["start_s"] - began, "end_s": row["end_s"] - began}
    tables = ranks[0] | {"stages": stages}
    own = {"key": job.key, "scaling": job.scaling}
    named = {name: [own | row for row in tables[name]] for name in ("stages", "kernels", "operations")}
    return _row(job, ranks, stages), named


def tried(job: Job, rank: Rank) -> tuple[float | None, float]:
    """Take ``largest.STEPS`` steps; return the most bytes that a rank needs for them, None if nothing counts them, and the seconds
    of the last one. All ranks call it."""
    before = _held(rank.world.device)
    way = prepare(job, rank.world.device)

    def steps() -> tuple[float | None, float]:
        assert way is not None
        times, peak = Runner(way, rank).timed(largest.STEPS), _peak_bytes(rank.world.device)
        return (None if peak is None or before is None else max(0.0, peak - before)), times[-1]["step_s"]

    ranks = together(rank, steps if way else None)
    peaks = [peak for peak, _ in ranks if peak is not None]
    return (max(peaks) if len(peaks) == len(ranks) else None), max(step_s for _, step_s in ranks)


def _held(device: torch.device) -> float | None:
    """Give freed memory back to the system, reset the peak, and return the bytes that are held now, see ``_peak_bytes``."""
    gc.collect()
    if devices.has_events(device):
        torch.get_device_module(device).empty_cache()
    elif sys.platform.startswith("linux"):
        ctypes.CDLL(None).malloc_trim(0)
    return _count_anew(device)


def _rank(way: ShardedModel, rank: Rank, before: float | None) -> Row:
    """Return what this rank sees; it held ``before`` bytes."""
    config, device, number = rank.config, rank.world.device, rank.world.rank
    torch.manual_seed(config.seed + 1 + number)
    runner = Runner(way, rank)
    with keep_alive(rank.events, config.startup_timeout_s):
        runner.timed(config.warmup)
    _count_anew(device)
    way.meet()  # a rank that begins early would count its waiting for the others as a part of the first step
    seen: Row = {"times": runner.timed(config.steps), "losses": runner.losses[config.warmup :]}
    peak = _peak_bytes(device)
    seen["peak"] = None if peak is None or before is None else max(0.0, peak - before)
    devices.synchronize(device)
    kinds = {"cuda": [ProfilerActivity.CUDA], "xpu": [ProfilerActivity.XPU]}.get(device.type, [])
    with profile(activities=[ProfilerActivity.CPU, *kinds], record_shapes=True) as profiler:
        seen["traced_s"] = fmean(row["step_s"] for row in runner.timed(TRACED))
        devices.synchronize(device)
    seen["held"] = held(way)
    seen |= traces.read(profiler, device, TRACED, runner.counted(), sum(seen["held"].values()))
    passes, seen["stages"] = record(way), []
    for _ in range(RECORDED if way.stages else 0):
        runner.timed(1)
        seen["stages"].append([row | {"rank": number} for row in passes])
        passes.clear()
    return seen


def _count_anew(device: torch.device) -> float | None:
    """Reset the peak of the memory, and return what is held by now, see ``_peak_bytes``."""
    devices.reset_peak_memory(device)
    if device.type == "cpu" and CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5")  # proc(5)
    return _peak_bytes(device)


def _peak_bytes(device: torch.device) -> float | None:
    """Return the most bytes that tensors, on a CPU this process, held since the count began; None where none counts.

    Without pages of files: libraries' code of operations that are used for the first time is no memory of a strategy.
    """
    if device.type != "cpu":
        return devices.peak_memory_bytes(device)[0]
    pages = getattr(psutil.Process().memory_info(), "shared", None)  # Linux
    return None if pages is None else devices.peak_resident_bytes() - pages


def held(way: ShardedModel) -> dict[Part, int]:
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

    def __init__(self, way: ShardedModel, rank: Rank) -> None:
        self.way, self.rank, config, ranks = way, rank, rank.config, way.job.layout.world
        last = rank.world.rank == ranks - 1 and ranks > 1
        slow = {"": True, "rank": last}.get(config.planted, False)
        self.timer = StepTimer(rank.world.device, config.planted_slowdown if slow else 0.0)
        self.number, self.losses = 0, list[float | None]()
        self._spoken = time.monotonic()
        self._delay = config.planted_slowdown if config.planted == "data" else 0.0  # of a batch, in steps
        self._least_s = 0.0  # of a step without that

    def timed(self, count: int) -> list[dict[str, float]]:
        """Take ``count`` steps and return their times; losses are read at the end: no step waits for its own."""
        way, timer, means = self.way, self.timer, []
        timer.begin()
        for _ in range(count):
            began, held_s = time.perf_counter(), self._delay * self._least_s
            inputs, targets = self._batch()
            hold(held_s)
            timer.mark("data")
            means.append(way.step(inputs, targets, timer.mark))
            way.update()
            timer.mark("optimizer")
            timer.end_step()
            if time.monotonic() - self._spoken >= HEARTBEAT_S:
                self._spoken = time.monotonic()
                self.rank.events.emit("heartbeat", step=self.number)
            worked_s = time.perf_counter() - began - held_s
            self._least_s = min(worked_s, self._least_s or worked_s)
        times = timer.take()
        self.losses += [float(mean) if way.has_loss else None for mean in means]
        return times

    def counted(self) -> traces.Counter:
        """Take a step without compiled layers, and count the operations of its forward and backward pass."""
        batch = self._batch()
        with torch.compiler.set_stance("force_eager"), traces.Counter() as counter:
            self.way.step(*batch)
        self.way.update()
        return counter

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = map(self.way.share, tokens(self.way.job, self.number))
        self.number += 1
        return devices.moved(inputs, self.way.device), devices.moved(targets, self.way.device)


def _row(job: Job, ranks: list[Row], stages: list[Row]) -> Row:
    """Return what the ranks measured as one row: phases are means over ranks of their medians."""
    steps = [rank["times"] for rank in ranks]
    losses = zip(*(rank["losses"] for rank in ranks if None not in rank["losses"]), strict=True)
    explained = [sum(step[name] for name in PHASES) / step["step_s"] for own in steps for step in own]
    row = job.row() | {name: fmean(median(step[name] for step in own) for own in steps) for name in PHASES}
    row |= {
        "steps_s": wall_s(np.array([[step["step_s"] for step in own] for own in steps]).T).tolist(),
        "exposed_s": fmean(rank["exposed_s"] for rank in ranks),
        "explained_shares": [min(explained), max(explained)],
        "rank_own_s": [max(0.0, rank["traced_s"] - rank["exposed_s"]) for rank in ranks],
        "peak_bytes": [rank["peak"] for rank in ranks if rank["peak"] is not None],
        "losses": [fmean(values) for values in losses],
        "counted_parameters": counted(rank["held"] for rank in ranks),
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


def _bubble(job: Job, stages: list[Row]) -> float:
    """Return the mean idle share of a pipeline's ranks between its first and its last work."""
    idle = []
    for rank in range(job.layout.world):
        pipe = job.layout.pipeline * job.layout.tensor  # ranks of a copy
        span = _span([row for row in stages if row["rank"] // pipe == rank // pipe])
        work = [(row["start_s"], row["end_s"]) for row in stages if row["rank"] == rank]
        idle.append(1 - union(work) / span)
    return fmean(idle)
