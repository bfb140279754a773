"""The two engines at work, the samples that each step gives them, and the largest batch that fits a device.

Notation: G samples of a global batch, n samples of a rank, S tokens of a sequence.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from benchlib.benchmarks.seq2seq.config import Seq2seqConfig
from benchlib.core.events import keep_alive
from benchlib.runtime import devices
from benchlib.runtime.largest import Trial, tried
from benchlib.runtime.measurement import Rank
from benchlib.runtime.steps import agree, comm_device
from benchlib.runtime.timing import Clock, GradientExchange
from benchlib.workloads.encdec import ENGINES, Plain
from benchlib.workloads.pairs import Pairs, generate
from benchlib.workloads.shards import Source
from benchlib.workloads.training import Cost, Mark, Row, data_parallel

# Neighbouring samples that an epoch's order keeps together, in small and in large sets: one read of a disk, whose rate
# falls with small ones. Their tokens are independent anyway.
BLOCK, LARGE_BLOCK = 32, 1024


@dataclass(frozen=True)
class Task:
    """What an engine trains on: ``batch`` samples per rank and step, products in ``precision``, weights of ``dtype``."""

    rank: Rank
    source: Source
    precision: str
    batch: int
    dtype: torch.dtype = torch.float32

    @property
    def config(self) -> Seq2seqConfig:
        return self.rank.config  # type: ignore[no-any-return]

    @property
    def global_batch(self) -> int:
        return self.batch * self.rank.world.size

    def steps(self, samples: int) -> int:
        return -(-samples // self.global_batch)


def epoch_order(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Return the samples of an epoch in their order, int64: blocks of neighbours, shuffled by seed and epoch."""
    block = min(LARGE_BLOCK, max(BLOCK, 1 << max(0, (samples // 64).bit_length() - 1)))
    starts = np.arange(0, samples, block)
    np.random.Generator(np.random.PCG64([seed, epoch])).shuffle(starts)
    order = (starts[:, None] + np.arange(block)).ravel()
    return order[order < samples]


def share(task: Task, epoch: int, steps: Iterable[int]) -> Iterator[tuple[np.ndarray, float]]:
    """Yield for each step of an epoch the samples of this rank, int64 (n,), and one over the tokens of the global
    batch.

    A rank without any takes one with the weight 0: it has to take part in the exchange.
    """
    world, order = task.rank.world, epoch_order(task.source.pairs.samples, task.config.seed, epoch)
    for step in steps:
        batch = order[step * task.global_batch : (step + 1) * task.global_batch]
        own = np.array_split(batch, world.size)[world.rank]
        yield (own, 1 / (len(batch) * task.config.sequence)) if len(own) else (batch[:1], 0.0)


class Engine:
    """A ``Work`` of the training loop. ``cached`` is the share of the shards in the page cache before each epoch."""

    unknown: tuple[str, ...] = ()

    def __init__(self, name: str, task: Task) -> None:
        self.name, self.task, self.device = name, task, task.rank.world.device
        self.exchange = GradientExchange(Clock(self.device))
        self.cached: list[float | None] = []
        self.model = self._fresh()
        if name == "tuned" and task.config.compile:
            self.model.hidden = torch.compile(self.model.hidden)  # type: ignore[method-assign]
        alone = task.rank.world.size == 1
        self.module: torch.nn.Module = self.model if alone else data_parallel(self.model, self.exchange)
        self._start()

    def _fresh(self) -> Plain:
        torch.manual_seed(self.task.config.seed)
        with self.device if self.device.type == "cuda" else contextlib.nullcontext():  # large models fit no host twice
            model = ENGINES[self.name](**self.task.config.shape)
        return model.to(self.device, self.task.dtype).train()

    def _start(self) -> None:
        fused = self.name == "tuned" or None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.task.config.learning_rate, fused=fused)
        self.scaler = devices.grad_scaler(self.task.precision, self.device)

    def restart(self, source: Source) -> None:
        """Take the first weights again, an optimizer that has seen nothing, and the samples of ``source``."""
        self.model.load_state_dict(self._fresh().state_dict())
        self.task = replace(self.task, source=source)
        self._start()

    def batches(self, epoch: int, steps: range) -> Iterator[tuple[torch.Tensor, float, bool]]:
        """Yield this rank's samples on its device; the page cache is put into its state before."""
        world, source = self.task.rank.world, self.task.source
        if source.shards:
            self.cached += [source.shards.settle()] if world.local_rank == 0 else []
        per_epoch = self.task.steps(source.pairs.samples)
        parts, again = itertools.tee(share(self.task, epoch, (step % per_epoch for step in steps)))
        loaded = zip(source.batches((own for own, _ in parts), pin=self.device.type == "cuda"), again, strict=True)
        return ((tokens.to(self.device, non_blocking=True), weight, True) for tokens, (_, weight) in loaded)

    def differentiate(self, batch: torch.Tensor, weight: float, last: bool, step: int, mark: Mark) -> torch.Tensor:
        """See ``Work``; ``batch`` is int64 (n, 2, S)."""
        if self.device.type == "cpu":
            devices.keep_freed_memory(self.name == "tuned")  # of the whole process, and the engines take turns in it
        with devices.autocast(self.task.precision, self.device):
            loss = self.module(batch[:, 0], batch[:, 1]) * weight
        mark("forward")
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        mark("backward")
        return loss.detach()  # type: ignore[no-any-return]

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.forget()

    def forget(self) -> None:
        """Drop the gradients; those of DDP are views and stay where they are."""
        self.optimizer.zero_grad(set_to_none=self.module is self.model)

    def cost(self, batch: torch.Tensor, weight: float) -> Cost:
        """See ``Work``; tokens are those of sources and targets."""
        count = len(batch) if weight else 0
        tokens = 2 * count * self.task.config.sequence
        return count, tokens, tokens, count * self.task.config.sample_flops


def compare(task: Task, engines: list[Engine], steps: int) -> dict[str, Row]:
    """Let the engines take ``steps`` steps each, interleaved on the same batches, after a pass that changes no weights.

    Return a row of each: the slowest rank's seconds ``first_s`` of that pass and ``step_s`` of the steps, their ``loss``.
    """
    events = task.rank.events
    rows: dict[str, Row] = {engine.name: {"step_s": [], "loss": []} for engine in engines}
    orders = list(share(task, 0, (step % task.steps(task.source.pairs.samples) for step in range(steps))))
    batches = [tokens.to(task.rank.world.device) for tokens in task.source.batches(order for order, _ in orders)]
    with keep_alive(events, task.config.startup_timeout_s):
        for engine in engines:
            rows[engine.name]["first_s"], _ = _timed(engine, batches[0], orders[0][1], update=False)
    events.emit("phase", name="compare")
    for number, (batch, (_, weight)) in enumerate(zip(batches, orders, strict=True)):
        for engine in engines if number % 2 == 0 else engines[::-1]:
            events.emit("progress", phase="compare", done=number, total=steps, unit="steps")
            for name, value in zip(("step_s", "loss"), _timed(engine, batch, weight), strict=True):
                rows[engine.name][name].append(value)
    return rows


def _timed(engine: Engine, batch: torch.Tensor, weight: float, update: bool = True) -> tuple[float, float]:
    device, world = engine.device, engine.task.rank.world
    devices.synchronize(device)
    agree(0.0, world)  # begin together
    began = time.perf_counter()
    loss = engine.differentiate(batch, weight, True, 0, lambda phase: None)
    (engine.update if update else engine.forget)()
    devices.synchronize(device)
    seconds = agree(time.perf_counter() - began, world)
    engine.exchange.take()
    total = loss.cpu().double().to(comm_device(world))
    dist.all_reduce(total)
    return seconds, float(total)


def one_trial(config: Seq2seqConfig, batch: int, limit_bytes: int) -> Trial:
    """Train some steps on ``batch`` samples within ``limit_bytes``; the engine that holds more where both will run."""
    device = devices.device(config.backend)
    precision = devices.mixed_precision(device) if config.amp else "fp32"

    def prepare() -> Callable[[], None]:
        model = ENGINES["tuned" if config.engine == "tuned" else "plain"](**config.shape).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
        pairs = Pairs(batch, config.sequence, config.vocabulary, config.seed)
        tokens = torch.from_numpy(generate(pairs, np.arange(batch))).to(device)

        def step() -> None:
            with devices.autocast(precision, device):
                loss = model(tokens[:, 0], tokens[:, 1]) / tokens[:, 1].numel()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return tried(device, batch, limit_bytes, prepare)
