"""The training loop of both engines, data parallel over any number of ranks, with the same result for each number.

Each rank differentiates the sum of its samples' losses over the tokens of the global batch; the gradients are added. Letters:
G samples of a global batch, S tokens of a sequence, W ranks.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchlib.benchmarks.seq2seq.config import Seq2seqConfig
from benchlib.core.events import EventWriter, Moment, keep_alive
from benchlib.runtime import devices
from benchlib.runtime.group import World
from benchlib.runtime.steps import Step, StepLog, agree, comm_device, compare_ranks
from benchlib.runtime.timing import Clock, GradientExchange, StepTimer, sum_hook
from benchlib.workloads.encdec import ENGINES, Plain
from benchlib.workloads.shards import Batch, Source

# Neighbouring samples that an epoch's order keeps together, in small and in large sets: one read of a disk, whose rate falls with
# small ones. Their tokens are independent anyway.
BLOCK, LARGE_BLOCK = 32, 1024
CUT_MARGIN = 0.9  # share of the time left that a cut training plans to use
AFTER_S = 5.0  # of the budget, for what comes after the training


@dataclass(frozen=True)
class Task:
    """What the loop is given: ``batch`` samples per rank and step, matrix products in ``precision``, weights in ``dtype``."""

    config: Seq2seqConfig
    world: World
    events: EventWriter
    precision: str
    batch: int
    dtype: torch.dtype = torch.float32

    @property
    def global_batch(self) -> int:
        """Samples of a step over all ranks."""
        return self.batch * self.world.size

    def steps(self, samples: int) -> int:
        """Return the steps of an epoch of ``samples``."""
        return -(-samples // self.global_batch)


@dataclass
class Trained:
    """``table`` is ``StepLog.table``, steps of the warm-up epoch first; ``epoch_s`` the wall times of all epochs,
    ``cached`` the share of the shards that the page cache held before each."""

    samples: int
    steps_per_epoch: int
    table: np.ndarray
    epoch_s: list[float]
    checksums: list[list[str]]
    cached: list[float | None]
    began: Moment
    train_s: float

    @property
    def counted(self) -> np.ndarray:
        """The steps of the counted epochs."""
        return self.table[self.steps_per_epoch :]


def epoch_order(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Return the samples of an epoch in their order, int64: blocks of neighbours, shuffled by seed and epoch."""
    block = min(LARGE_BLOCK, max(BLOCK, 1 << max(0, (samples // 64).bit_length() - 1)))
    starts = np.arange(0, samples, block)
    np.random.Generator(np.random.PCG64([seed, epoch])).shuffle(starts)
    order = (starts[:, None] + np.arange(block)).ravel()
    return order[order < samples]


def share(task: Task, samples: int, steps: Iterable[tuple[int, int]]) -> Iterator[tuple[np.ndarray, float]]:
    """Yield for each (epoch, step) the samples of this rank, and one over the tokens of the global batch.

    A rank without any takes one with the weight 0: it has to take part in the exchange.
    """
    order, current = np.empty(0, np.int64), -1
    for epoch, step in steps:
        if epoch != current:
            order, current = epoch_order(samples, task.config.seed, epoch), epoch
        batch = order[step * task.global_batch : (step + 1) * task.global_batch]
        mine = np.array_split(batch, task.world.size)[task.world.rank]
        weight = 1 / (len(batch) * task.config.sequence)
        yield (mine, weight) if len(mine) else (batch[:1], 0.0)


class Engine:
    """One engine at work: its model, its optimizer, its exchange of gradients."""

    def __init__(self, name: str, task: Task) -> None:
        self.name, self.task = name, task
        self.device = task.world.device
        self.exchange = GradientExchange(Clock(self.device))
        self.model = self._fresh()
        if name == "tuned" and task.config.compile:
            self.model.hidden = torch.compile(self.model.hidden)  # type: ignore[method-assign]
        self.module: torch.nn.Module = self.model
        if task.world.size > 1:
            ddp = DistributedDataParallel(
                self.model,
                device_ids=[self.device] if devices.has_events(self.device) else None,
                gradient_as_bucket_view=True,
            )
            ddp.broadcast_buffers = False  # the mask is the same everywhere
            ddp.register_comm_hook(self.exchange, sum_hook)
            self.module = ddp
        self._start()

    def _fresh(self) -> Plain:
        torch.manual_seed(self.task.config.seed)
        with self.device if self.device.type == "cuda" else contextlib.nullcontext():  # large models fit no host twice
            model = ENGINES[self.name](**self.task.config.shape)
        return model.to(self.device, self.task.dtype).train()

    def _start(self) -> None:
        tuned, config = self.name == "tuned", self.task.config
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate, fused=tuned or None)
        self.scaler = devices.grad_scaler(self.task.precision, self.device)

    def restart(self) -> None:
        """Take the first weights again, and an optimizer that has seen nothing."""
        self.model.load_state_dict(self._fresh().state_dict())
        self._start()

    def step(self, batch: Batch, weight: float, timer: StepTimer | None = None, update: bool = True) -> torch.Tensor:
        """Do one step and return this rank's part of the loss. Without ``update`` the weights stay as they are."""
        mark = timer.mark if timer else lambda phase: None
        if self.device.type == "cpu":
            devices.keep_freed_memory(self.name == "tuned")  # of the whole process, and the engines take turns in it
        self.optimizer.zero_grad(set_to_none=self.task.world.size == 1)  # DDP's gradients are views and stay there
        with devices.autocast(self.task.precision, self.device):
            loss = self.module(batch.source, batch.target) * weight
        mark("forward")
        (self.scaler.scale(loss) if self.scaler else loss).backward()  # type: ignore[no-untyped-call]
        mark("backward")
        if update and self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif update:
            self.optimizer.step()
        mark("optimizer")
        return loss.detach()  # type: ignore[no-any-return]


@dataclass
class Compared:
    """What the engines did in turns: seconds (of the slowest rank) and losses of each step by engine, first passes apart."""

    step_s: dict[str, list[float]]
    losses: dict[str, list[float]]
    first_s: dict[str, float]

    @property
    def compile_s(self) -> float:
        """Seconds of the tuned engine's first pass beyond those of a later one."""
        return max(0.0, self.first_s["tuned"] - float(np.median(self.step_s["tuned"])))


def compare(task: Task, engines: list[Engine], source: Source, steps: int) -> Compared:
    """Let the engines take ``steps`` steps each, in turns on the same batches, after a pass that changes no weights."""
    names = [engine.name for engine in engines]
    result = Compared({name: [] for name in names}, {name: [] for name in names}, {})
    places = [(0, step % task.steps(source.pairs.samples)) for step in range(steps)]
    orders = list(share(task, source.pairs.samples, places))
    batches = [batch.to(task.world.device) for batch in source.batches(order for order, _ in orders)]
    with keep_alive(task.events, task.config.startup_timeout_s):
        for engine in engines:
            result.first_s[engine.name], _ = _timed(engine, batches[0], orders[0][1], update=False)
    task.events.emit("phase", name="compare")
    for number, (batch, (_, weight)) in enumerate(zip(batches, orders, strict=True)):
        for engine in engines if number % 2 == 0 else engines[::-1]:
            task.events.emit("progress", phase="compare", done=number, total=steps, unit="steps")
            seconds, loss = _timed(engine, batch, weight)
            result.step_s[engine.name].append(seconds)
            result.losses[engine.name].append(loss)
    return result


def _timed(engine: Engine, batch: Batch, weight: float, update: bool = True) -> tuple[float, float]:
    device, world = engine.device, engine.task.world
    devices.synchronize(device)
    agree(0.0, world)  # begin together
    began = time.perf_counter()
    loss = engine.step(batch, weight, update=update)
    devices.synchronize(device)
    seconds = agree(time.perf_counter() - began, world)
    engine.exchange.take()
    total = loss.cpu().double().to(comm_device(world))
    dist.all_reduce(total)
    return seconds, float(total)


def fitting(task: Task, step_s: float, deadline: float) -> tuple[int, str]:
    """Return how many samples an epoch has, and why: all, or what fits before ``deadline`` (``time.monotonic``).

    Never fewer than one step. A cut is rounded down to a power of two steps.
    """
    config, passes = task.config, task.config.epochs + 1
    wanted = config.epoch_samples
    left = -agree(-(deadline - time.monotonic() - min(AFTER_S, 0.1 * config.budget_s)), task.world)
    need = task.steps(wanted) * passes * step_s
    if need <= left:
        return wanted, "all samples fit the budget"
    most = max(1, int(CUT_MARGIN * left / step_s / passes))
    if most >= task.steps(wanted):
        return wanted, "all samples fit the budget"
    steps = (
        1 << most.bit_length() - 1
    )  # a power of two: runs of somewhat other speed get the same work and stay comparable
    samples = steps * task.global_batch
    return samples, (
        f"{passes} epochs of {wanted:,} samples need {need:,.0f} s at {step_s:.3g} s a step, but {max(left, 0):,.0f} s of the "
        f"budget are left for them: cut to {samples:,} samples"
    )


def _stream(task: Task, source: Source, places: Iterable[tuple[int, int]]) -> Iterator[tuple[Batch, float]]:
    """Yield this rank's batches on its device with their weights, made ahead on the threads of ``source``."""
    weights: deque[float] = deque()

    def orders() -> Iterator[np.ndarray]:
        for order, weight in share(task, source.pairs.samples, places):
            weights.append(weight)
            yield order

    for batch in source.batches(orders(), pin=task.world.device.type == "cuda"):
        yield batch.to(task.world.device), weights.popleft()


def train(task: Task, engine: Engine, source: Source, step_s: float) -> Trained:
    """Train the warm-up epoch and the counted ones. ``step_s`` is the expected time of a step, the same on all ranks."""
    config, world = task.config, task.world
    samples, per_epoch = source.pairs.samples, task.steps(source.pairs.samples)
    log = StepLog(world, task.events, step_s)
    timer = StepTimer(engine.exchange.clock, engine.exchange, config.planted_slowdown)
    if world.main:
        total = per_epoch * (config.epochs + 1)
        task.events.emit(
            "plan", total_steps=total, planned_steps=total, epoch_share=1.0, samples=samples, step_s=step_s
        )
    epoch_s: list[float] = []
    checksums: list[list[str]] = []
    cached: list[float | None] = []
    began = Moment.now()
    for epoch in range(config.epochs + 1):
        if source.shards:
            source.shards.release()
            agree(0.0, world)  # what any process of the host maps cannot be evicted
            cached += [source.shards.settle()] if world.local_rank == 0 else []
        stream = _stream(task, source, [(epoch, step) for step in range(per_epoch)])
        agree(0.0, world)  # begin together
        epoch_began = time.perf_counter()
        timer.begin()
        for step in range(per_epoch):
            batch, weight = next(stream)
            timer.mark("data")
            loss = engine.step(batch, weight, timer)
            timer.end_step()
            count = len(batch.tokens) if weight else 0
            tokens = 2 * count * config.sequence
            done = epoch * per_epoch + step + 1
            due = log.add(
                Step(done, epoch, config.learning_rate, loss, count, tokens, tokens, count * config.sample_flops)
            )
            if due or step == per_epoch - 1:
                log.gather(timer.take())
        epoch_s.append(agree(time.perf_counter() - epoch_began, world))
        checksums.append(compare_ranks(engine.model, world, task.events, epoch))
    return Trained(samples, per_epoch, log.table, epoch_s, checksums, cached, began, began.since())
