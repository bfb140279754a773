"""The encoder-decoder benchmark as each rank executes it: largest batch, engines interleaved, the training, the disk."""

import gc
import math
import time
from dataclasses import replace
from operator import truediv
from statistics import median

import numpy as np
import torch

from benchlib.benchmarks.seq2seq import engine
from benchlib.benchmarks.seq2seq.config import Seq2seqConfig
from benchlib.benchmarks.seq2seq.engine import Engine, Task, compare, share
from benchlib.core.errors import RunBroken
from benchlib.core.events import keep_alive
from benchlib.runtime import devices
from benchlib.runtime.group import all_gather_objects, barrier
from benchlib.runtime.largest import free_bytes, largest_batch
from benchlib.runtime.measurement import Rank, Tables
from benchlib.runtime.steps import Columns
from benchlib.workloads import training
from benchlib.workloads.pairs import Pairs, entropy
from benchlib.workloads.shards import SHARD_BYTES, Source, disk_rates, open_source
from benchlib.workloads.training import Plan, Row, Trained

MAX_BATCH = 65536
MAX_ENTROPY = 1 << 22  # of a larger vocabulary the closed form is exact to five digits


def measure(rank: Rank) -> Tables:
    """Compare the engines, train one of them and measure the disk."""
    config, world, events = rank.config, rank.world, rank.events
    precision = devices.mixed_precision(world.device) if config.amp else "fp32"
    first = training.peak(rank, precision)
    batch, batches, searched = _batch(rank)

    events.emit("phase", name="model")
    task = Task(rank, _source(rank, config.epoch_samples, in_memory=True), precision, batch)
    names = ["plain", "tuned"] if config.engine == "both" else [config.engine]
    engines = [Engine(name, task) for name in names]
    trainer = engines[-1]
    if (counted := sum(map(torch.numel, trainer.model.parameters()))) != config.parameters:
        raise RunBroken(f"the model has {counted:,} parameters, and the config says {config.parameters:,}")
    compiles = config.compile and names[-1] == "tuned"
    events.emit("phase", name="warmup", text="compiling" if compiles else "first pass")
    compared = compare(task, engines, config.compare_steps)
    del engines
    gc.collect()
    plan = planned(task, median(compared[trainer.name]["step_s"]))
    samples = plan.samples // (config.epochs + 1)

    events.emit("phase", name="data")
    began, unmeasured = time.monotonic(), _unmeasured(config, task.source.pairs.sample_bytes)
    source = _source(rank, samples)
    # A whole shard also where the budget cut the samples below one.
    probe = source if unmeasured else _source(rank, max(samples, -(-SHARD_BYTES // source.pairs.sample_bytes)))
    data_s = time.monotonic() - began
    trainer.restart(source)
    per_epoch = task.steps(samples)
    trained = training.train(rank, trainer, plan, [config.learning_rate] * plan.planned_steps, per_epoch)

    events.emit("phase", name="peak" if unmeasured else "disk")
    skipped: Row = {"status": "skipped", "reason": unmeasured}
    disk = skipped if unmeasured else _disk(replace(task, source=probe), trained, per_epoch)
    trained.tables = {"epochs": _epochs(trained, trainer, per_epoch), "batches": batches, "disk": [disk]}
    trained.tables["engines"] = _engines(config, compared)
    tables = training.rows(trained, rank, precision, first, warm=per_epoch)
    vocabulary, scope = config.vocabulary, config.scope(samples)
    floor = entropy(vocabulary) if vocabulary <= MAX_ENTROPY else math.log(vocabulary) + math.log(2) - 1
    identity: Row = {"data_dir": "a disk" if config.data_dir else ""}
    identity |= {"batch_size": task.batch} if config.batch else {}
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
            "epoch_s": trained.epoch_s[1:],
            "lowest_loss": min(Columns(trained.table[:per_epoch])["loss"].sum(axis=1).tolist()),
            "page_cache": config.page_cache,
            "identity": identity,
            **searched,
            "data_s": data_s,
        }
    return tables


def _batch(rank: Rank) -> tuple[int, list[Row], Row]:
    """Return the samples of a rank and step, the batches that were tried, and what limited the search."""
    config, size = rank.config, rank.world.size
    most = min(MAX_BATCH, -(-config.epoch_samples // size))
    if not config.batch:
        return min(config.batch_size, most), [], {"memory_limit_gb": None, "batch_below": None, "batch_limited_by": ""}
    rank.events.emit("phase", name="batch")
    limit = all_gather_objects(config.memory_share * (1e9 * config.memory_gb or free_bytes(rank.world)))[0]
    search = largest_batch(rank, engine.one_trial, limit, most)
    if not search.batch:
        reason = "the search took its share of budget_s: set a larger one"
        reason = search.tried[0]["reason"] if search.complete else reason
        raise RunBroken(f"batch = auto: no batch was found to fit into {limit / 1e9:.3g} GB: {reason}")
    lacking = dict.fromkeys(("peak_gb", "samples_per_s"))
    rows = [row | {"why": dict.fromkeys(lacking, row.pop("reason", ""))} for row in search.tried]
    whole = "samples" if all(row["fits"] for row in rows) else "memory"
    limited_by = whole if search.complete else "time"
    limits: Row = {"memory_limit_gb": limit / 1e9, "batch_below": search.below, "batch_limited_by": limited_by}
    return search.batch, rows, limits


def planned(task: Task, step_s: float) -> Plan:
    """Decide how many samples an epoch has: all, or what fits at ``step_s`` seconds a step; never fewer than one step.

    A cut is rounded down to a power of two steps, so that runs of somewhat other speed get the same work and stay
    comparable.
    """
    passes, wanted = task.config.epochs + 1, task.config.epoch_samples
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

    def progress(done: int, total: int) -> None:
        rank.events.emit("progress", phase="data", done=done, total=total, unit="shards")

    pairs = Pairs(samples, config.sequence, config.vocabulary, config.seed, config.token_bytes)
    data_dir = "" if in_memory else config.data_dir
    with keep_alive(rank.events, config.budget_s):
        return open_source(pairs, data_dir, config.page_cache, config.read_ahead, progress=progress)


def _unmeasured(config: Seq2seqConfig, sample_bytes: int) -> str:
    """Say why nothing is measured of the disk; '' where it is: less than a shard says nothing of one."""
    if not config.data_dir:
        return "samples are generated in memory: set data_dir=FOLDER to measure a disk"
    if config.epoch_samples * sample_bytes >= SHARD_BYTES:
        return ""
    return f"less than a whole shard says nothing of a disk: set samples={-(-SHARD_BYTES // sample_bytes)} or more"


def _disk(task: Task, trained: Trained, per_epoch: int) -> Row:
    """Read the shards raw and by the loaders of all ranks; ``compute_s`` is a step without its waiting for data."""
    rank, source = task.rank, task.source
    order = np.concatenate([own for own, _ in share(task, 1, range(task.steps(source.pairs.samples)))])
    with keep_alive(rank.events, rank.config.startup_timeout_s):
        seconds, reads_raw = min(2.0, rank.config.budget_s / 100), rank.world.local_rank == 0
        rates = disk_rates(source, task.batch, order, seconds=seconds, raw=reads_raw, barrier=barrier)
    raw, loader = zip(*all_gather_objects(rates), strict=True)
    steady = Columns(trained.table[per_epoch:])
    return {
        "raw_mb_per_s": [sum(parts) / 1e6 for parts in zip(*filter(None, raw), strict=True)],
        "loader_mb_per_s": [sum(parts) / 1e6 for parts in zip(*loader, strict=True)],
        "sample_bytes": source.pairs.sample_bytes,
        "compute_s": float(np.median((steady["step_s"] - steady["data_s"]).max(axis=1))),
    }


def _epochs(trained: Trained, trainer: Engine, per_epoch: int) -> list[Row]:
    losses, samples = (Columns(trained.table)[name].sum(axis=1).reshape(-1, per_epoch) for name in ("loss", "samples"))
    means, cached = (losses * samples).sum(axis=1) / samples.sum(axis=1), trainer.cached or [None] * len(losses)
    lacking = "this system does not tell" if trainer.cached else "samples were generated in memory"
    return [
        {"epoch": number, "counted": number > 0, "seconds": seconds, "loss": float(loss), "cached": inside}
        | {"why": {"cached": lacking} if inside is None else {}}
        for number, (seconds, loss, inside) in enumerate(zip(trained.epoch_s, means, cached, strict=True))
    ]


def _engines(config: Seq2seqConfig, compared: dict[str, Row]) -> list[Row]:
    """Return a row for each engine: its interleaved steps, and how much faster than the plain one the tuned one is."""
    asked, first_s = f"engine = {config.engine}", {name: row.pop("first_s") for name, row in compared.items()}
    none: Row = {"ratios": None, "compile_s": None, "why": {"ratios": asked, "compile_s": "nothing was compiled"}}
    skipped: Row = {"status": "skipped", "reason": asked}
    rows: list[Row] = [{"engine": name, **none, **compared.get(name, skipped)} for name in ("plain", "tuned")]
    plain, tuned = rows
    if len(compared) > 1:
        tuned["ratios"] = list(map(truediv, plain["step_s"], tuned["step_s"]))
    if config.compile and "tuned" in compared:
        tuned["compile_s"] = max(0.0, first_s["tuned"] - median(tuned["step_s"]))
    return rows
