"""The training loop that benchmarks share, data parallel over any number of ranks, and the rows that it leaves.

Each rank differentiates its part of the mean loss over the global batch, and the gradients are added, not averaged:
neither the number of ranks nor the size of their shares changes what is computed. A step ends when the last rank ends it.

Notation: K steps, W ranks, C columns.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from benchlib.core.energy import energy_j, mean_power_w
from benchlib.core.events import Event, Moment, read_events, restarts
from benchlib.core.stats import drift
from benchlib.runtime import devices, peaks
from benchlib.runtime.group import World, all_gather_objects
from benchlib.runtime.measurement import Rank, Tables
from benchlib.runtime.steps import COLUMNS, Columns, Step, StepLog, agree, compare_ranks, wall_s
from benchlib.runtime.timing import StepTimer, sum_hook
from benchlib.workloads import stored_peaks

Row = dict[str, Any]
Cost = tuple[int, int, int, float]  # samples, tokens, tokens with padding and FLOPs
Part = TypeVar("Part")
Made = TypeVar("Made")
PARTS = COLUMNS[6:]  # of a step's time
CUT_MARGIN = 0.9  # share of the time that is left which a cut training plans to use: a neighbour may slow it down
AFTER_S, AFTER_SHARE = 5.0, 0.05  # of the budget, for what comes after the training: the less of both
PEAK_S = 0.3  # of matrix products of each size
READING_S = 3.0  # at most, until the sensors were read once more: they are read once a second
NO_PARTS = "this engine does not tell how a step's time is divided"


@dataclass(frozen=True)
class Plan:
    """How much of the training that the config asks for (``total_*``) this run does, and what it was decided by.

    ``step_s`` is the time of a step that was measured before (0: none was), ``left_s`` what the budget left for all of
    them. ``cut_by`` is "", "max_steps" or "budget".
    """

    total_steps: int
    total_samples: int
    planned_steps: int
    samples: int
    step_s: float = 0.0
    left_s: float = 0.0
    cut_by: str = ""

    @property
    def epoch_share(self) -> float:
        return self.samples / self.total_samples


def fitting(steps: int, step_s: float, left_s: float, least: int = 1) -> int:
    """Return how many of ``steps`` fit into ``left_s`` seconds, at least ``least``; those of a cut leave a margin."""
    return steps if steps * step_s <= left_s else min(steps, max(least, int(CUT_MARGIN * left_s / step_s)))


def time_left(rank: Rank, later_s: float = 0.0) -> float:
    """Return the seconds of the budget that a training may take, ``later_s`` is for what follows. All ranks call it."""
    budget_s = rank.config.budget_s
    left_s = rank.left_s() - min(AFTER_S, AFTER_SHARE * budget_s) - later_s
    return -agree(-left_s, rank.world)


def begin(rank: Rank, plan: Plan) -> None:
    """Tell the plan and that the training begins."""
    if rank.world.main:
        rank.events.emit("plan", **asdict(plan), epoch_share=plan.epoch_share)
    rank.events.emit("phase", name="train")
    devices.reset_peak_memory(rank.world.device)


class Work:
    """What a rank trains. ``unknown`` are the columns of a step's time that it cannot tell.

    The ranks tell each other their steps at least once in ``every`` (0: about twice a second). ``save`` is called after
    every ``save_every`` steps and at the end (0: only then, -1: never).
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    unknown: tuple[str, ...] = ()
    every, save_every = 0, -1

    def __init__(self, rank: Rank) -> None:
        self.timer = StepTimer(rank.world.device, rank.config.planted_slowdown, alike=True)

    def batches(self, epoch: int, steps: range) -> Iterator[tuple[Any, float, bool]]:
        """Yield micro-batches on the device, the weight of their summed loss, whether it is a step's last."""
        raise NotImplementedError

    def differentiate(self, batch: Any, weight: float, last: bool, step: int) -> torch.Tensor:
        """Add the gradients of ``weight`` times the summed loss of a micro-batch; return that product, a scalar.

        After the step's last micro-batch they are the sum over the ranks. ``timer`` is called where the passes end.
        """
        raise NotImplementedError

    def update(self) -> None:
        """Let the optimizer take its step and zero the gradients."""
        raise NotImplementedError

    def cost(self, batch: Any, weight: float) -> Cost:
        """Return the cost of a micro-batch; of the weight 0 it has no samples."""
        raise NotImplementedError

    def follow(self, table: np.ndarray, next_open: int) -> None:
        """See all steps, when the ranks have told each other theirs; a change from step ``next_open`` on takes effect."""

    def save(self, plan: Plan, step: int, table: np.ndarray) -> None:
        """Write a checkpoint after ``step`` steps, which are those of ``table``."""


class Memory(NamedTuple):
    """Bytes that tensors of a device held at most, or why that is not known, and that the process held."""

    device: float | None = None
    reason: str = ""
    resident: float = 0.0


@dataclass
class Trained:
    """What a training leaves: ``table`` is ``StepLog.table``, ``rates`` the learning rate of each step, ``checksums``
    those of all ranks' weights after each epoch, ``passed_over`` what is wrong with checkpoints that were not taken.
    Steps before ``first`` are of the run that it continued. ``memory`` is what this rank held at most by the end of the training."""

    plan: Plan
    rates: Sequence[float]
    began: Moment
    table: np.ndarray
    first: int = 0
    train_s: float = 0.0
    epoch_s: list[float] = field(default_factory=list)
    checksums: list[list[str]] = field(default_factory=list)
    bucket_bytes: list[int] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)
    tables: Tables = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)

    def end(self, world: World) -> "Trained":
        """Note how long the training took and how much memory; what follows, an evaluation for one, may hold more."""
        self.train_s = self.began.since()
        self.memory = Memory(*devices.peak_memory_bytes(world.device), devices.peak_resident_bytes())
        return self


def train(
    rank: Rank, work: Work, plan: Plan, rates: Sequence[float], per_epoch: int, table: np.ndarray | None = None
) -> Trained:
    """Take the steps of ``plan`` at the learning ``rates``, those of ``table`` are done; all ranks call it."""
    world, timer = rank.world, work.timer
    begin(rank, plan)
    log = StepLog(world, rank.events, plan.step_s, table)
    log.every = min(log.every, work.every or log.every)
    first = len(log.table)
    trained = Trained(plan, rates, Moment.now(), log.table, first)
    for epoch in range(first // per_epoch, -(-plan.planned_steps // per_epoch)):
        steps = range(max(first, epoch * per_epoch), min((epoch + 1) * per_epoch, plan.planned_steps))
        stream = work.batches(epoch, steps)
        agree(0.0, world)  # begin together
        epoch_began = time.perf_counter()
        timer.begin()
        for step in steps:
            for group in work.optimizer.param_groups:
                group["lr"] = rates[step]
            loss: torch.Tensor | float = 0.0
            last, costs = False, list[Cost]()
            while not last:
                batch, weight, last = next(stream)
                timer.mark("data")
                loss = loss + work.differentiate(batch, weight, last, step)
                costs.append(work.cost(batch, weight))
            trained.bucket_bytes = trained.bucket_bytes or [size for *_, size in work.timer.intervals]
            work.update()
            timer.mark("optimizer")
            timer.end_step()
            done = step + 1
            due = log.add(Step(done, epoch, rates[step], loss, *map(sum, zip(*costs, strict=True))))
            saves = work.save_every >= 0 and (done == plan.planned_steps or not done % (work.save_every or math.inf))
            if due or saves or done == steps.stop:
                log.gather([{name: row[name] for name in row if name not in work.unknown} for row in timer.take()])
                timer.mark("report")  # where ranks wait for each other: no rank's compute time
                work.follow(log.table, done + 1)  # the first micro-batch of the next step may be made already
            if saves:
                work.save(plan, done, log.table)
                timer.begin()  # a checkpoint is no part of a step's time
        trained.epoch_s.append(agree(time.perf_counter() - epoch_began, world))
        trained.checksums.append(compare_ranks(work.model, world, rank.events, epoch + 1))
    trained.table = log.table
    return trained.end(world)


def data_parallel(module: torch.nn.Module, timer: StepTimer, **options: Any) -> DistributedDataParallel:
    """Return a module whose gradients DDP adds during the backward pass; ``timer`` keeps when and how many bytes."""
    device = timer.clock.device
    ddp = DistributedDataParallel(
        module, device_ids=[device] if devices.has_events(device) else None, gradient_as_bucket_view=True, **options
    )
    # Buffers here are constant; without this every forward pass would begin with an exchange of them. (Set here because
    # the argument's name differs between versions of torch.)
    ddp.broadcast_buffers = False
    ddp.register_comm_hook(timer, sum_hook)
    return ddp


def prefetched(make: Callable[[Part], Made], parts: Iterable[Part], ahead: int = 1) -> Iterator[Made]:
    """Yield ``make(part)`` for each part, so many ``ahead`` being made on threads while the caller works on one."""
    pool, waiting = ThreadPoolExecutor(max(1, ahead), thread_name_prefix="batches"), deque[Any]()
    try:
        for part in parts:
            waiting.append(pool.submit(make, part))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def peak(rank: Rank, precision: str) -> tuple[float | None, str]:
    """Measure the matrix-product peak of all ranks at once: FLOP/s, and how or why not. All ranks call it."""
    return peaks.all_ranks_peak(rank.world, precision, PEAK_S)


def rows(trained: Trained, rank: Rank, precision: str, first: tuple[float | None, str], warm: int = 0) -> Tables:
    """Return the tables run, steps and ranks of a training; all ranks call it, right after the training.

    ``first`` is the peak of matrix products in ``precision`` before the training. It is measured again, and the highest
    counts: a busy neighbour lowers one and nothing raises it. The first ``warm`` steps do not count for the speed.
    """
    from benchlib.workloads.training_spec import resident_gb  # here: the front's pictures, which no step needs

    world, plan, measured = rank.world, trained.plan, (first, peak(rank, precision))
    memory = all_gather_objects(trained.memory)
    events = _events(rank.run_dir, trained.began.wall + trained.train_s) if world.local_rank == 0 else []
    nodes = all_gather_objects(_sensed(events, trained, rank.config.backend) if world.local_rank == 0 else None)
    again = max(all_gather_objects(restarts(rank.run_dir)))  # a node that took another's place was not there before
    if not world.main:
        return {}
    whole, here = Columns(trained.table), Columns(trained.table[trained.first :])
    steady = Columns(here.table[warm:])
    flops, peak_of = max(
        (*measured, stored_peaks.highest(rank.run_dir, precision, world.size)), key=lambda pair: pair[0] or 0.0
    )
    counted = [own.device for own in memory if own.device is not None]
    run: Row = {
        **{name: getattr(plan, name) for name in ("planned_steps", "total_steps", "epoch_share", "cut_by")},
        "expected_step_s": plan.step_s,
        "left_s": max(plan.left_s, 0.0),
        "samples_expected": plan.samples,
        "samples_seen": whole["samples"].sum(axis=0).astype(int).tolist(),
        "resumed_step": trained.first,
        "restarts": again,
        "learning_rate_min": min(trained.rates),
        "checksums": trained.checksums,
        "loss": whole["loss"].sum(axis=1).tolist(),
        "trained_samples": int(here["samples"].sum()),
        "startup_s": trained.began.monotonic - rank.began.monotonic,
        "train_s": trained.train_s,
        "precision": precision,
        "peak_flops": flops,
        "peak_of": peak_of,
        "padding_share": float(1 - here["tokens"].sum() / here["padded_tokens"].sum()),
        "device_memory_gb": max(counted) / 1e9 if counted else None,
        "resident_memory_gb": max(own.resident for own in memory) / 1e9,
        **_of_nodes([node for node in nodes if node]),
    }
    run["why"] |= {"peak_flops": peak_of} if not flops else {}
    run["why"] |= {"device_memory_gb": memory[0].reason} if not counted else {}
    steps = _series(steady, wall_s(here["step_s"])[warm:], world)
    # Of what has no FLOP rate or no peak there is no MFU.
    if not flops or steps["flops"] is None:
        steps["why"] |= dict.fromkeys(("mfu", "hfu"), steps["why"].get("flops") or peak_of)
    steps["drift"] = drift([n / s for n, s in zip(steps["samples"], steps["step_s"], strict=True)])
    ranks, read = list[Row](), resident_gb(events)
    for number, own in enumerate(memory):
        row: Row = {name: float(np.mean(steady[name][:, number])) for name in ("step_s", *PARTS)}
        why = {name: NO_PARTS for name in PARTS if np.isnan(row[name])}
        row |= {
            "rank": number,
            "samples": run["samples_seen"][number],
            "resident_gb": own.resident / 1e9,
            **dict.fromkeys(why),
        }
        row["memory_gb"], why["memory_gb"] = read.get(number) or None, "no supervisor sampled it"
        row["device_gb"], why["device_gb"] = own.device and own.device / 1e9, own.reason
        ranks.append(row | {"why": why})
    return {"run": [run], "steps": [steps], "ranks": ranks, **trained.tables}


def compute_time(columns: Any) -> np.ndarray:
    """Return the seconds that each rank worked in each step without waiting for others, (K, W); NaN where unknown.

    ``columns`` are ``Columns``, or a row of the timer: then it is one number.
    """
    return np.sum([columns[f"{part}_s"] for part in ("data", "forward", "backward", "optimizer")], axis=0)


def _series(steady: Columns, step_s: np.ndarray, world: World) -> Row:
    """Return the row of the counted steps, which took ``step_s`` (K,): each column has a number a step, over all ranks."""
    row: Row = {name: steady[name].sum(axis=1).tolist() for name in ("samples", "tokens", "padded_tokens", "flops")}
    # The rank that waits longest for data in all: the largest waits of each step add up to more than any rank waits.
    starved = steady["data_s"].sum(axis=0).argmax()
    row |= {"step_s": step_s.tolist(), "data_wait_s": steady["data_s"][:, starved].tolist()}
    row |= {name: steady[name].mean(axis=1).tolist() for name in PARTS}
    work, busy = compute_time(steady), steady["exchange_s"]
    hidden = 1 - np.minimum(steady["exchange_exposed_s"], busy).sum(axis=1) / np.maximum(busy.sum(axis=1), 1e-12)
    row |= {"exchange_overlap": hidden.tolist(), "rank_skew": (work.max(axis=1) / work.mean(axis=1)).tolist()}
    of_parts = (*PARTS, "data_wait_s", "exchange_overlap", "rank_skew")
    lacking = {name: NO_PARTS for name in of_parts if np.isnan(row[name]).any()}
    if np.isnan(row["flops"]).any():
        lacking["flops"] = "torch cannot count the FLOPs of this architecture"
    if world.size == 1:
        lacking |= {"exchange_overlap": "one rank exchanges nothing", "rank_skew": "one rank has nobody to wait for"}
    return row | dict.fromkeys(lacking) | {"why": lacking}


def _events(run_dir: Path, until: float) -> list[Event]:
    """Return what the supervisor of this node wrote, with a reading of power after the wall time ``until`` if it reads power."""
    end = time.monotonic() + READING_S
    while True:
        events = read_events(run_dir, {"sensor", "sensors", "launched"}, "supervisor")
        last = next((event for event in reversed(events) if event["kind"] == "sensor"), None)
        if last is None or last.get("power_w") is None or last["t"] >= until or time.monotonic() > end:
            return events
        time.sleep(0.1)


def _sensed(events: Sequence[Event], trained: Trained, backend: str) -> Row:
    """Return energy, mean power, temperatures and utilisation of a node over the training, or why there are none."""
    reasons: Row = next((event["availability"] for event in reversed(events) if event["kind"] == "sensors"), {})
    began, ended = trained.began.wall, trained.began.wall + trained.train_s
    during = [event for event in events if event["kind"] == "sensor" and began <= event["t"] <= ended]
    lacking = "the sensor gave no value" if during else "no reading fell into the training"
    # Of a CPU the time of the ranks: 100% is one core.
    used = "cpu_percent" if backend == "cpu" else "utilization_percent"
    row: Row = {"why": {}}
    for name, found in (("energy_j", energy_j), ("power_w", mean_power_w)):
        row[name], row["why"][name] = found(events, began, ended)
    for name, key in (("temperature_c", "temperature_c"), ("utilization", used)):
        row[name] = [float(event[key]) for event in during if isinstance(event.get(key), int | float)] or None
        row["why"][name] = str(reasons.get(key, lacking))
    return row


def _of_nodes(nodes: Sequence[Row]) -> Row:
    """Return what all nodes sensed: the sums of energy and power, the readings of the others. What a node lacks is not known of all."""
    row: Row = {"why": {}}
    for name in ("energy_j", "power_w", "temperature_c", "utilization"):
        lacking = [number for number, node in enumerate(nodes) if node[name] is None]
        row[name] = None if lacking else sum((node[name] for node in nodes[1:]), nodes[0][name])
        if lacking:
            where = f"node {lacking[0]}: " if nodes[1:] else ""
            row["why"][name] = where + nodes[lacking[0]]["why"][name]
    return row
