"""The encoder-decoder benchmark as each rank executes it: largest batch, engines interleaved, the training, the disk.

Notation: G samples of a global batch, n samples of a rank, S tokens of a sequence.
"""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import truediv
from statistics import fmean, median

import numpy as np
import torch
import torch.distributed as dist

from benchlib.benchmarks.seq2seq.config import Seq2seqConfig
from benchlib.core.errors import BackendUnavailable, RunBroken
from benchlib.core.events import keep_alive
from benchlib.runtime import devices
from benchlib.runtime.group import all_gather_objects, barrier
from benchlib.runtime.measurement import Rank, Tables
from benchlib.runtime.steps import Columns, agree, comm_device, wall_s
from benchlib.workloads import training
from benchlib.workloads.encdec import ENGINES, Plain
from benchlib.workloads.largest import Trial, free_bytes, largest_batch, tried
from benchlib.workloads.shards import SHARD_BYTES, Pairs, Shards, Source, disk_rates, entropy, generate
from benchlib.workloads.training import Cost, Plan, Row, Trained, Work, data_parallel

# Neighbouring samples that an epoch's order keeps together, in small and in large sets: one read of a disk, whose rate
# falls with small ones. Their tokens are independent anyway.
BLOCK, LARGE_BLOCK = 32, 1024
MAX_BATCH = 65536
UNASKED = "nothing was compiled"
MAX_ENTROPY = 1 << 22  # of a larger vocabulary the closed form is exact to five digits


@dataclass(frozen=True)
class Task:
    """What an engine trains on: ``batch`` samples per rank and step, products in ``precision``.

    ``uncompiled`` says why the tuned engine runs call by call; '' if it is compiled.
    """

    rank: Rank
    source: Source
    precision: str
    batch: int
    uncompiled: str = UNASKED

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
    """Yield for each step the samples of this rank, int64 (n,), and one over the tokens of the global batch.

    They come in the order of ``epoch``, again and again. A rank without any takes one with the weight 0: it has to take part
    in the exchange.
    """
    world, order = task.rank.world, epoch_order(task.source.pairs.samples, task.config.seed, epoch)
    for step in steps:
        first = step % task.steps(len(order)) * task.global_batch
        batch = order[first : first + task.global_batch]
        own = np.array_split(batch, world.size)[world.rank]
        yield (own, 1 / (len(batch) * task.config.sequence)) if len(own) else (batch[:1], 0.0)


class Engine(Work):
    """An engine at work. ``cached`` is the share of the shards in the page cache before each epoch."""

    def __init__(self, name: str, task: Task) -> None:
        super().__init__(task.rank)
        self.name, self.task, self.device = name, task, task.rank.world.device
        self.cached: list[float | None] = []
        self.model: Plain = self._fresh()
        if name == "tuned" and not task.uncompiled:
            self.model.hidden = torch.compile(self.model.hidden)  # type: ignore[method-assign]
        alone = task.rank.world.size == 1
        self.module: torch.nn.Module = self.model if alone else data_parallel(self.model, self.timer)
        self._start()

    def _fresh(self) -> Plain:
        torch.manual_seed(self.task.config.seed)
        with self.device if self.device.type == "cuda" else contextlib.nullcontext():  # large models fit no host twice
            model = ENGINES[self.name](**self.task.config.shape)
        return model.to(self.device).train()

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
        source = self.task.source
        if isinstance(source, Shards) and self.task.rank.world.local_rank == 0:
            self.cached.append(source.settle())
        parts, weights = zip(*share(self.task, epoch, steps), strict=True)
        loaded = zip(source.batches(parts, pin=devices.has_events(self.device)), weights, strict=True)
        return ((tokens.to(self.device, non_blocking=True), weight, True) for tokens, weight in loaded)

    def differentiate(self, batch: torch.Tensor, weight: float, last: bool, step: int) -> torch.Tensor:
        """See ``Work``; ``batch`` is int64 (n, 2, S)."""
        if self.device.type == "cpu":
            devices.keep_freed_memory(self.name == "tuned")  # of the whole process, and the engines take turns in it
        with devices.autocast(self.task.precision, self.device):
            loss = self.module(batch[:, 0], batch[:, 1]) * weight
        self.timer.mark("forward")
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.timer.mark("backward")
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


def compare(task: Task, engines: list[Engine]) -> dict[str, Row]:
    """Let the engines take ``compare_steps`` steps each, interleaved on the same batches, after a pass that changes no weights.

    Return a row of each: the slowest rank's seconds ``first_s`` of that pass and ``step_s`` of the steps, their ``loss``.
    """
    events, steps = task.rank.events, task.config.compare_steps
    rows: dict[str, Row] = {engine.name: {"step_s": [], "loss": []} for engine in engines}
    shares, weights = zip(*share(task, 0, range(steps)), strict=True)
    batches = [tokens.to(task.rank.world.device) for tokens in task.source.batches(shares)]
    with keep_alive(events, task.config.startup_timeout_s):
        for engine in engines:
            rows[engine.name]["first_s"], _ = _timed(engine, batches[0], weights[0], update=False)
    events.emit("phase", name="compare")
    for number, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
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
    loss = engine.differentiate(batch, weight, True, 0)
    (engine.update if update else engine.forget)()
    devices.synchronize(device)
    seconds = agree(time.perf_counter() - began, world)
    total = loss.cpu().double().to(comm_device(world))
    dist.all_reduce(total)
    return seconds, float(total)


def one_trial(config: Seq2seqConfig, batch: int, limit_bytes: int) -> Trial:
    """Train some steps on ``batch`` samples within ``limit_bytes``; the engine that holds more where both will run."""
    device = devices.device(config.backend)
    precision, held = devices.mixed_precision(device) if config.amp else "fp32", list[torch.Tensor]()

    def prepare() -> Callable[[], None]:
        model = ENGINES["tuned" if config.engine == "tuned" else "plain"](**config.shape).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
        # Where both engines run, the other one stays while this one works: its weights and two moments, with DDP its gradients.
        other = (3 + (config.world_size > 1)) * config.parameters if config.engine == "both" else 0
        held.append(torch.ones(other, device=device))
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


def measure(rank: Rank) -> Tables:
    """Compare the engines, train one of them and measure the disk."""
    config, world, events = rank.config, rank.world, rank.events
    precision = devices.mixed_precision(world.device) if config.amp else "fp32"
    products = devices.products_in(precision, world.device)
    first = training.peak(rank, products)
    batch, batches, searched = _batch(rank)

    events.emit("phase", name="model")
    uncompiled = _uncompiled(rank)
    task = Task(rank, _source(rank, config.epoch_samples, in_memory=True), precision, batch, uncompiled)
    names = ["plain", "tuned"] if config.engine == "both" else [config.engine]
    engines = [Engine(name, task) for name in names]
    trainer = engines[-1]
    if (counted := sum(map(torch.numel, trainer.model.parameters()))) != config.parameters:
        raise RunBroken(f"the model has {counted:,} parameters, and the config says {config.parameters:,}")
    words = "first pass" if uncompiled or names[-1] != "tuned" else "compiling"
    events.emit("phase", name="warmup", text=words)
    compared = compare(task, engines)
    del engines
    gc.collect()
    plan = planned(task, fmean(compared[trainer.name]["step_s"]))
    samples, warm = plan.samples // config.passes, config.warmup_epochs

    events.emit("phase", name="data")
    began, unmeasured = time.monotonic(), _unmeasured(config, task.source.pairs.sample_bytes)
    source = _source(rank, samples)
    # A whole shard also where the budget cut the samples below one.
    least = -(-SHARD_BYTES // source.pairs.sample_bytes)
    probe = source if unmeasured or samples >= least else _source(rank, least)
    data_s = time.monotonic() - began
    trainer.restart(source)
    per_epoch = task.steps(samples)
    trained = training.train(rank, trainer, plan, [config.learning_rate] * plan.planned_steps, per_epoch)

    events.emit("phase", name="peak" if unmeasured else "disk")
    skipped: Row = {"status": "skipped", "reason": unmeasured}
    disk = skipped if unmeasured else _disk(replace(task, source=probe), trained, warm * per_epoch)
    trained.tables = {"epochs": _epochs(trained, trainer, per_epoch, warm), "batches": batches, "disk": [disk]}
    trained.tables["engines"] = _engines(config, compared, uncompiled)
    tables = training.rows(trained, rank, products, first, warm=warm * per_epoch)
    vocabulary, scope = config.vocabulary, config.scope(samples)
    floor = entropy(vocabulary) if vocabulary <= MAX_ENTROPY else math.log(vocabulary) + math.log(2) - 1
    identity: Row = {"data_dir": "a disk" if config.data_dir else ""}
    identity |= {"batch_size": task.batch} if config.batch else {}
    identity |= {"compile": False} if uncompiled else {}
    identity |= {"samples": samples} if samples != config.epoch_samples else {}
    for row in tables.get("run", []):
        row["why"] |= {name: "batch = auto was not asked for" for name, value in searched.items() if value is None}
        row |= {
            "speed_scope": scope,
            "quality": scope,
            "parameters": config.parameters,
            "sample_flops": config.sample_flops,
            "batch_per_rank": task.batch,
            "global_batch": task.global_batch,
            "epoch_items": config.epoch_samples,
            "samples_per_epoch": samples,
            "steps_per_epoch": per_epoch,
            "epoch_tokens": samples * config.sequence,
            "vocabulary": vocabulary,
            "token_entropy": floor,
            "epoch_s": trained.epoch_s[warm:],
            "lowest_loss": min(Columns(trained.table[:per_epoch])["loss"].sum(axis=1).tolist()),
            "page_cache": config.page_cache,
            "identity": identity,
            **searched,
            "data_s": data_s,
        }
    return tables


def _uncompiled(rank: Rank) -> str:
    """Return why the tuned engine is not compiled, on all ranks alike; '' if it is."""
    if not rank.config.compile:
        return UNASKED
    lack = ""
    try:
        devices.compiler(rank.world.device)
    except BackendUnavailable as error:
        lack = str(error)
    lack = next(filter(None, all_gather_objects(lack)), "")
    if lack and rank.world.main:
        rank.events.emit("log", message=f"the tuned engine runs uncompiled: {lack}")
    return lack


def _batch(rank: Rank) -> tuple[int, list[Row], Row]:
    """Return the samples of a rank and step, the batches that were tried, and what limited the search."""
    config, size = rank.config, rank.world.size
    most = min(MAX_BATCH, -(-config.epoch_samples // size))
    if not config.batch:
        return min(config.batch_size, most), [], {"memory_limit_gb": None, "batch_below": None, "batch_limited_by": ""}
    rank.events.emit("phase", name="batch")
    limit = all_gather_objects(config.memory_share * (1e9 * config.memory_gb or free_bytes(rank.world)))[0]
    search = largest_batch(rank, one_trial, limit, most)
    if not search.batch:
        reason = "the search took its share of budget_s: set a larger one"
        reason = search.tried[0]["reason"] if search.complete else reason
        raise RunBroken(f"batch = auto: no batch was found to fit into {limit / 1e9:.3g} GB: {reason}")
    measured = ("peak_gb", "samples_per_s")
    rows = [row | {"why": dict.fromkeys(measured, row.pop("reason", ""))} for row in search.tried]
    limited_by = "time" if not search.complete else "samples" if all(row["fits"] for row in rows) else "memory"
    limits: Row = {"memory_limit_gb": limit / 1e9, "batch_below": search.below, "batch_limited_by": limited_by}
    return search.batch, rows, limits


def planned(task: Task, step_s: float) -> Plan:
    """Decide how many samples an epoch has: all, or what fits at ``step_s`` seconds a step; never fewer than one step.

    A cut is rounded down to a power of two steps, so that runs of somewhat other speed get the same work and stay
    comparable.
    """
    passes, wanted = task.config.passes, task.config.epoch_samples
    left_s, whole = training.time_left(task.rank), task.steps(wanted)
    steps = max(1, training.fitting(whole * passes, step_s, left_s) // passes)
    samples, cut_by = wanted, ""
    if steps < whole:
        steps, cut_by = 1 << steps.bit_length() - 1, "budget"
        samples = steps * task.global_batch
    return Plan(whole * passes, wanted * passes, steps * passes, samples * passes, step_s, left_s, cut_by)


def _source(rank: Rank, samples: int, in_memory: bool = False) -> Source:
    """Open the samples; of all processes one writes the shards that are missing, the others wait for it."""
    config = rank.config
    pairs = Pairs(samples, config.sequence, config.vocabulary, config.seed, config.token_bytes)
    if in_memory or not config.data_dir:
        return Source(pairs, config.read_ahead)
    shards = Shards(
        pairs,
        config.data_dir,
        config.page_cache,
        config.read_ahead,
        config.num_shards,
        config.epoch_samples,
        mapped=config.read == "mmap",
    )
    progress, part = partial(rank.events.emit, "progress", phase="data", unit="shards"), rank.world.local_rank
    with keep_alive(rank.events, config.budget_s):
        for path in shards.prepare(progress, part, rank.world.local_size):
            rank.events.emit("log", message=f"{path.name} was written again: its bytes do not match its checksum")
    return shards


def _unmeasured(config: Seq2seqConfig, sample_bytes: int) -> str:
    """Say why nothing is measured of the disk; '' where it is: less than a shard says nothing of one."""
    if not config.data_dir:
        return "samples are generated in memory: set data_dir=FOLDER to measure a disk"
    if config.epoch_samples * sample_bytes >= SHARD_BYTES:
        return ""
    return f"less than a whole shard says nothing of a disk: set samples={-(-SHARD_BYTES // sample_bytes)} or more"


def _disk(task: Task, trained: Trained, warm: int) -> Row:
    """Read the shards raw, with their checksums and by the loaders of all ranks.

    ``compute_s`` is the mean step without its waiting for data, after the first ``warm`` steps.
    """
    rank, source = task.rank, task.source
    assert isinstance(source, Shards)
    order = np.concatenate([own for own, _ in share(task, 1, range(task.steps(source.pairs.samples)))])
    with keep_alive(rank.events, rank.config.startup_timeout_s):
        seconds, reads_raw = min(2.0, rank.config.budget_s / 100), rank.world.local_rank == 0
        rates = disk_rates(source, task.batch, order, seconds, reads_raw, barrier)
    of_ranks, steady = all_gather_objects(rates), Columns(trained.table[warm:])
    total = {kind: zip(*filter(None, (own[kind] for own in of_ranks)), strict=True) for kind in rates}
    return {
        **{f"{kind}_mb_per_s": [sum(parts) / 1e6 for parts in rounds] for kind, rounds in total.items()},
        "sample_bytes": source.pairs.sample_bytes,
        "compute_s": float(wall_s(steady["step_s"] - steady["data_s"]).mean()),
    }


def _epochs(trained: Trained, trainer: Engine, per_epoch: int, warm: int) -> list[Row]:
    losses, samples = (Columns(trained.table)[name].sum(axis=1).reshape(-1, per_epoch) for name in ("loss", "samples"))
    means, cached = (losses * samples).sum(axis=1) / samples.sum(axis=1), trainer.cached or [None] * len(losses)
    lacking = "this system does not tell" if trainer.cached else "samples were generated in memory"
    return [
        {"epoch": number, "counted": number >= warm, "seconds": seconds, "loss": float(loss), "cached": inside}
        | {"why": {"cached": lacking} if inside is None else {}}
        for number, (seconds, loss, inside) in enumerate(zip(trained.epoch_s, means, cached, strict=True))
    ]


def _engines(config: Seq2seqConfig, compared: dict[str, Row], uncompiled: str) -> list[Row]:
    """Return a row for each engine: its interleaved steps, and how much faster than the plain one the tuned one is."""
    asked, first_s = f"engine = {config.engine}", {name: row.pop("first_s") for name, row in compared.items()}
    none: Row = {"ratios": None, "compile_s": None, "why": {"ratios": asked, "compile_s": uncompiled or UNASKED}}
    skipped: Row = {"status": "skipped", "reason": asked}
    rows: list[Row] = [{"engine": name, **none, **compared.get(name, skipped)} for name in ("plain", "tuned")]
    plain, tuned = rows
    if len(compared) > 1:
        tuned["ratios"] = list(map(truediv, plain["step_s"], tuned["step_s"]))
        tuned["why"] = {name: reason for name, reason in tuned["why"].items() if name != "ratios"}
    if not uncompiled and "tuned" in compared:
        tuned["compile_s"] = max(0.0, first_s["tuned"] - median(tuned["step_s"]))
    return rows
