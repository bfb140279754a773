"""The encoder-decoder benchmark from the data to the result, as each rank executes it."""

import gc
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchlib.benchmarks.seq2seq import metrics
from benchlib.benchmarks.seq2seq.auto import largest_batch
from benchlib.benchmarks.seq2seq.config import SIZES, Seq2seqConfig
from benchlib.benchmarks.seq2seq.train import Compared, Engine, Task, Trained, compare, fitting, share, train
from benchlib.core.definitions import encoder_decoder_forward_flops, size_text
from benchlib.core.disk import DataLimit, Planted, data_limit
from benchlib.core.errors import RunBroken
from benchlib.core.events import EventWriter, keep_alive, read_events
from benchlib.core.stats import drift_text
from benchlib.results import peaks as recorded_peaks
from benchlib.results.metrics import measured
from benchlib.results.run import Result, save_result
from benchlib.runtime import devices, peaks
from benchlib.runtime.group import World, all_gather_objects, barrier, world
from benchlib.runtime.step_metrics import device_memory, device_rows, rank_rows, sensor_metrics
from benchlib.runtime.steps import Columns, launched_at
from benchlib.workloads.pairs import Pairs, entropy
from benchlib.workloads.shards import SHARD_BYTES, DiskRates, Source, disk_rates, open_source

PEAK_S = 0.3  # of matrix products of each size
MOST_ENTROPY = 1 << 22  # of a larger vocabulary the closed form is exact to five digits


def run(config: Seq2seqConfig, run_dir: Path, events: EventWriter) -> None:
    """Compare, train and measure; rank 0 leaves ``result.json`` and ``samples.parquet``."""
    events.emit("phase", name="init")
    with world(config, run_dir) as here:
        _run(config, run_dir, events, here)


def _run(config: Seq2seqConfig, run_dir: Path, events: EventWriter, here: World) -> None:
    launched = launched_at(run_dir)
    deadline = launched.monotonic + config.budget_s
    result = Result.of(config, started_at=launched.wall)
    if here.main:
        save_result(run_dir, result)
    precision = devices.mixed_precision(here.device) if config.amp else "fp32"
    before = peaks.all_ranks_peak(here, precision, PEAK_S)

    batch, limit_bytes, search = config.batch_size, 0.0, None
    if config.batch == "auto":
        events.emit("phase", name="batch")
        search, limit_bytes = largest_batch(
            config,
            here,
            run_dir,
            lambda size: events.emit("progress", phase="batch", done=size, total=0, unit="samples"),
        )
        batch = search.batch
    task = Task(config, here, events, precision, min(batch, -(-config.epoch_samples // here.size)))

    events.emit("phase", name="model")
    names = ["plain", "tuned"] if config.engine == "both" else [config.engine]
    engines = [Engine(name, task) for name in names]
    engine = engines[-1]
    counted = sum(parameter.numel() for parameter in engine.model.parameters())
    if counted != config.parameters:
        raise RunBroken(f"the model has {counted:,} parameters, and the config says {config.parameters:,}")
    compiles = config.compile and names[-1] == "tuned"
    events.emit("phase", name="warmup", text="compiling" if compiles else "first pass")
    pairs = Pairs(config.epoch_samples, config.sequence, config.vocabulary, config.seed, config.token_bytes)
    compared = compare(task, engines, open_source(pairs, read_ahead=config.read_ahead), config.compare_steps)
    del engines
    gc.collect()
    engine.restart()
    step_s = float(np.median(compared.step_s[engine.name]))
    samples, reason = fitting(task, step_s, deadline)

    events.emit("phase", name="data")
    began = time.monotonic()
    source = _source(config, samples, here, events)
    unmeasured, probe = _unmeasured(config, source.pairs.sample_bytes), source
    if not unmeasured and (count := _to_measure(config, source.pairs)) > samples:
        probe = _source(config, count, here, events)
    data_s = time.monotonic() - began
    events.emit("phase", name="train")
    devices.reset_peak_memory(here.device)
    trained = train(task, engine, source, step_s)
    memory, memory_reason = devices.peak_memory_bytes(here.device)

    events.emit("phase", name="disk" if source.shards else "peak")
    rates, limit = (None, None) if unmeasured else _disk(config, probe, trained, here, task)
    after = peaks.all_ranks_peak(here, precision, PEAK_S)
    resident = all_gather_objects(devices.peak_resident_bytes())
    by_rank = all_gather_objects(memory)
    mended = all_gather_objects(str(source.shards.prepared) if source.shards else "")
    if not here.main:
        return

    events.emit("phase", name="write")
    # Several times, since a busy neighbour lowers a peak and nothing raises it.
    measured_peaks = (before, after, recorded_peaks.highest(run_dir, precision, here.size))
    peak, peak_reason = max(measured_peaks, key=lambda item: item[0] or 0.0)
    sensed = read_events(run_dir, {"sensor", "sensors"})
    window = trained.began.wall, trained.began.wall + trained.train_s
    scope = config.scope(samples)
    result.metrics = [
        *metrics.loss_metrics(trained, scope),
        *metrics.speed_metrics(trained, scope, here.size, peak, peak_reason),
        *metrics.engine_metrics(config, compared, task.global_batch, scope),
        *metrics.disk_metrics(rates, limit, unmeasured),
        device_memory(by_rank, memory_reason),
        measured("resident_memory_gb", max(resident) / 1e9, "GB", "lower", reason="peak of the largest rank so far"),
        *sensor_metrics(sensed, *window, config.backend),
        measured("startup_s", trained.began.monotonic - launched.monotonic, "s", "lower", reason="until the first epoch"),
        measured("data_s", data_s, "s", "lower", reason=source.description),
        measured("train_s", trained.train_s, "s", "lower", reason="all epochs, with the one to warm up"),
        measured("total_s", launched.since(), "s", "lower", reason="from the launch to the result"),
    ]  # fmt: skip
    rate = result.metric(f"train_samples_per_s{scope}")
    result.facts = _facts(config, task, trained, compared, reason) | {
        "samples_seen": Columns(trained.table)["samples"].sum(axis=0).astype(int).tolist(),
        "data": source.description,
        "page_cache": {
            "asked": config.page_cache,
            "cached_before_each_epoch": None if None in trained.cached else trained.cached,
        }
        if source.shards
        else None,
        "data_limit": asdict(limit) if limit else None,
        "data_limit_reason": unmeasured,
        "memory_limit_gb": limit_bytes / 1e9 if limit_bytes else None,
        "batch_below": search.below if search and not search.complete else None,
        "batch_limited_by": search and ("memory" if any(not row["fits"] for row in search.tried) else "samples"),
        "throughput_drift": drift_text(rate.samples if rate else []),
    }
    seen = result.facts["samples_seen"]
    result.tables = {
        "ranks": rank_rows(Columns(trained.counted), seen, resident, by_rank),
        "devices": device_rows(sensed, *window),
        "epochs": [
            {"epoch": number, "counted": number > 0, "seconds": seconds, "loss": float(loss)}
            for number, (seconds, loss) in enumerate(zip(trained.epoch_s, _epoch_losses(trained), strict=True))
        ],
        "engines": [
            {"step": step + 1, **{name: compared.losses[name][step] for name in compared.losses}}
            for step in range(config.compare_steps)
        ],
        "batches": search.tried if search else [],
        "sizes": _sizes(config, result, limit),
    }
    result.notes = [source.description, reason, *dict.fromkeys(filter(None, mended))]
    result.status, result.ended_at = "complete", launched.wall + launched.since()
    save_result(run_dir, result)


def _source(config: Seq2seqConfig, samples: int, here: World, events: EventWriter) -> Source:
    """Open the samples; of all processes one writes the shards that are missing, the others wait for it."""

    source = open_source(
            Pairs(samples, config.sequence, config.vocabulary, config.seed, config.token_bytes), config.data_dir,
            min(config.num_shards, samples), config.page_cache, config.read, config.read_ahead, config.verify,
            planted=Planted(1e6 * config.planted_disk_mb_per_s, here.local_size),
            progress=lambda done, total: events.emit("progress", phase="data", done=done, total=total, unit="shards"),
        )  # fmt: skip
    if source.shards and source.shards.prepared.mended:  # said now: the run may break before its result
        events.emit("log", message=str(source.shards.prepared))
    return source


def _unmeasured(config: Seq2seqConfig, sample_bytes: int) -> str:
    """Say why nothing is known of the disk; '' where it is measured: kilobytes say nothing of one, unless it is slow on purpose."""
    if not config.data_dir:
        return "samples are generated in memory: set data_dir=FOLDER to measure a disk"
    asked = config.epoch_samples * sample_bytes
    if asked >= SHARD_BYTES or config.planted_disk_mb_per_s:
        return ""
    return (
        f"{size_text(asked)} of samples are too few for the rate of a disk, which takes a whole shard of {size_text(SHARD_BYTES)}: "
        f"set samples={-(-SHARD_BYTES // sample_bytes)} or more"
    )


def _to_measure(config: Seq2seqConfig, pairs: Pairs) -> int:
    """Return how many samples the disk is measured with: those of an epoch, but a whole shard where the budget cut them below."""
    return pairs.samples if config.planted_disk_mb_per_s else max(pairs.samples, -(-SHARD_BYTES // pairs.sample_bytes))


def _disk(
    config: Seq2seqConfig, source: Source, trained: Trained, here: World, task: Task
) -> tuple[DiskRates, DataLimit]:
    """Read the shards raw and by the loaders of all ranks, and compare with what the training asked for."""
    samples = source.pairs.samples
    steps = [(1, step) for step in range(task.steps(samples))]
    order = np.concatenate([mine for mine, _ in share(task, samples, steps)])
    with keep_alive(task.events, config.startup_timeout_s):
        seconds = min(2.0, config.budget_s / 100)
        own = disk_rates(source, task.batch, seconds=seconds, order=order, raw=here.local_rank == 0, barrier=barrier)
    by_rank = all_gather_objects(own)
    together = DiskRates(
        [sum(rates) for rates in zip(*(rank.raw_bytes_per_s for rank in by_rank if rank.tool), strict=True)],
        [sum(rates) for rates in zip(*(rank.loader_bytes_per_s for rank in by_rank), strict=True)],
        own.tool or by_rank[0].tool,
    )
    steady = Columns(trained.counted)
    compute_s = float(np.median((steady["step_s"] - steady["data_s"]).max(axis=1)))
    return together, data_limit(
        source.pairs.sample_bytes, task.global_batch, compute_s, float(np.median(together.loader_bytes_per_s)),
        float(np.median(together.raw_bytes_per_s)), config.sample_flops,
    )  # fmt: skip


def _epoch_losses(trained: Trained) -> np.ndarray:
    losses, samples = (Columns(trained.table)[name].sum(axis=1) for name in ("loss", "samples"))
    shape = (len(trained.epoch_s), trained.steps_per_epoch)
    return (losses * samples).reshape(shape).sum(axis=1) / samples.reshape(shape).sum(axis=1)  # type: ignore[no-any-return]


def _facts(config: Seq2seqConfig, task: Task, trained: Trained, compared: Compared, reason: str) -> dict[str, Any]:
    vocabulary = config.vocabulary
    floor = entropy(vocabulary) if vocabulary <= MOST_ENTROPY else float(np.log(vocabulary) + np.log(2) - 1)
    identity: dict[str, Any] = {"data_dir": "a disk" if config.data_dir else ""}
    if config.batch == "auto":
        identity["batch_size"] = task.batch
    if trained.samples != config.epoch_samples:
        identity["samples"] = trained.samples
    return {
        "parameters": config.parameters,
        "sample_flops": config.sample_flops,
        "precision": task.precision,
        "batch_per_rank": task.batch,
        "global_batch": task.global_batch,
        "epoch_tokens": trained.samples * config.sequence,
        "epoch_items": config.epoch_samples,
        "samples_per_epoch": trained.samples,
        "samples_expected": trained.samples * (config.epochs + 1),
        "plan_reason": reason,
        "planned_steps": len(trained.table),
        "steps_per_epoch": trained.steps_per_epoch,
        "steady_from_step": trained.steps_per_epoch + 1,
        "learning_rates": {"min": config.learning_rate, "max": config.learning_rate, "last": config.learning_rate},
        "checksums": trained.checksums,
        "token_entropy": floor,
        "first_pass_s": compared.first_s,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__},
        "identity": identity,
    }


def _sizes(config: Seq2seqConfig, result: Result, limit: DataLimit | None) -> list[dict[str, Any]]:
    """Return for each size of the ladder what it would ask of the disk at the FLOP/s of this run."""
    rate = result.value(f"flops_per_s{config.scope(result.facts['samples_per_epoch'])}")
    if limit is None or rate is None:
        return []
    rows = []
    for size, values in SIZES.items():
        length = values["sequence"]
        flops = 3 * encoder_decoder_forward_flops(
            values["d_model"], values["encoder_layers"], values["decoder_layers"], values["dim_feedforward"],
            config.vocabulary, length, length,
        )  # fmt: skip
        asked = rate / flops * 2 * length * config.token_bytes
        rows.append(
            {
                "size": size,
                "flops_per_sample": flops,
                "asked_mb_per_s": asked / 1e6,
                "held_back": asked > limit.given_bytes_per_s,
            }
        )
    return rows
