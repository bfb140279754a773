"""The parallelism benchmark as each rank executes it: peaks and links of the machine, proofs, then one strategy after the other."""

import contextlib
import gc
import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

from benchlib.benchmarks.parallel import bottleneck, scaling
from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.estimate import Rates, memory, scale_of, step_time
from benchlib.benchmarks.parallel.largest_batch import largest_batch
from benchlib.benchmarks.parallel.measure import Row, Shares, compute_s, links
from benchlib.benchmarks.parallel.measure import measure as measured
from benchlib.benchmarks.parallel.proofs import PROOF_STEPS, checkpointing_error, prove
from benchlib.benchmarks.parallel.shapes import STRATEGIES, Job
from benchlib.core.errors import BackendUnavailable
from benchlib.core.events import keep_alive
from benchlib.runtime import devices, peaks
from benchlib.runtime.group import World, all_gather_objects, barrier
from benchlib.runtime.largest import free_bytes
from benchlib.runtime.measurement import Rank, Tables

PEAK_S, COPY_S, COPY_BYTES = 0.2, 0.1, 64 << 20
PROOF = ("loss_error", "weight_error", "loss_error_fp32", "gradient_error")
TABLES = ("strategies", "kernels", "communication", "stages", "alpha_beta", "scaling", "batches")


def measure(rank: Rank) -> Tables:
    """Prove, run and measure every strategy."""
    config, here, events = rank.config, rank.world, rank.events
    devices.require_precision(config.precision, here.device)
    gc.freeze()  # what the libraries brought stays: it is not looked through after each strategy
    if here.device.type == "cpu":
        devices.keep_freed_memory()
    events.emit("phase", name="peak")
    tables: Tables = {name: [] for name in TABLES}
    first = _peaks(config, here)
    with keep_alive(events, config.startup_timeout_s):
        tables["alpha_beta"] = links(here)
    rates = Rates.of_run(first["rank_flops"], first["copy_bytes_per_s"], tables["alpha_beta"])
    limit = min(all_gather_objects(1e9 * config.memory_gb or free_bytes(here)))
    events.emit("phase", name="prove")
    with keep_alive(events, config.budget_s):
        proofs = _proofs(rank) if config.prove else {}
    events.emit("phase", name="measure")
    jobs, shares = dict[str, Job](), Shares()
    for job, obstacle, reason in _plans(config, here.size, limit):
        if job.key not in jobs:  # the single device of several strategies
            jobs[job.key] = job
            proof = {} if job.scaling else proofs.get((job.strategy, job.schedule), {})
            lacking = dict.fromkeys(PROOF, "its own row has the proof" if job.scaling else "prove = false")
            row = _one(job, obstacle, reason, rank, rates, tables, shares)
            _join(row, proof or {"why": lacking})
    events.emit("phase", name="peak")
    last = _peaks(config, here)
    # The highest of several measurements: a busy neighbour lowers a peak and nothing raises it.
    facts = {name: max(first[name], last[name]) for name in first}
    for row in (row for row in tables["strategies"] if row["status"] == "ok"):
        row |= bottleneck.columns(row, [item for item in tables["kernels"] if item["key"] == row["key"]])
        # A rank alone has caches and turbo to itself.
        row["peak_flops"] = row["world"] * max(facts["rank_flops"], facts["alone_flops"] * (row["world"] == 1))
    facts |= {"precision": config.precision, "memory_bytes": limit, "parameters": config.shape.parameters}
    facts |= {"proof_steps": PROOF_STEPS, "learning_rate_min": config.learning_rate}
    facts["model_error"] = scaling.off(tables["strategies"])
    facts["checkpointing_error"] = checkpointing_error(config.job(), here.device) if config.checkpointing else None
    facts |= dict.fromkeys(("largest_batch", "too_large_batch", "search_complete"))
    if config.find_max_batch:
        events.emit("phase", name="batch")
        tables["batches"], found = largest_batch(rank, limit)
        facts |= found
    facts["why"] = {name: "not asked for, or nothing to tell it by" for name, value in facts.items() if value is None}
    tables["scaling"] = scaling.points(tables["strategies"], jobs, rates)
    return tables | {"run": [facts]}


def _join(row: Row, more: Row) -> None:
    """Add columns to a row, with the reasons of those that lack."""
    row |= more | {"why": row.get("why", {}) | more.get("why", {})}


def _peaks(config: ParallelConfig, here: World) -> Row:
    """Return what a rank reaches while all do the same, and what rank 0 reaches alone: FLOP/s, and bytes/s read plus written."""
    together = {name: peaks.all_ranks_peak(here, name, PEAK_S)[0] for name in dict.fromkeys(("fp32", config.precision))}
    rates, alone = {name: (rate or math.nan) / here.size for name, rate in together.items()}, math.nan
    if here.main:
        sizes = peaks.default_sizes(here.device)
        alone = peaks.best(peaks.matmul_peaks(here.device, config.precision, sizes=sizes, seconds=PEAK_S))
    barrier()
    copies = peaks.copy_rates(peaks.memory_of(here.device), here.device, COPY_BYTES, COPY_S)
    by_rank = all_gather_objects((alone, max(copies)))
    found = {"alone_flops": by_rank[0][0], "copy_bytes_per_s": 1e9 * fmean(rate for _, rate in by_rank)}
    return found | {"rank_flops": rates[config.precision], "rank_flops_fp32": rates["fp32"]}


def _proofs(rank: Rank) -> dict[tuple[str, str], Row]:
    """Return the differences from one device by strategy and schedule."""
    config, size, found = rank.config, rank.world.size, {}
    for name, schedule in config.ways(config.chosen):
        if not config.obstacle(name, schedule, size):
            with contextlib.suppress(BackendUnavailable):  # its row says why
                found[name, schedule] = prove(config.job(name, schedule, size), rank.world.device)
    return found


def _plans(config: ParallelConfig, size: int, limit: float) -> Iterator[tuple[Job, str, str]]:
    """Yield what is to be measured, and what stands in its way, if anything, with the reason."""
    kinds = ("strong", "weak") if config.scaling == "both" else (config.scaling,) * bool(config.scaling)
    for name, schedule in config.ways(config.chosen):
        if why := config.obstacle(name, schedule, size):
            yield replace(config.job(), strategy=name, schedule=schedule), "layout", why
            continue
        jobs = [config.job(name, schedule, size)]
        for kind in kinds if len(STRATEGIES[name].axes) == 1 else ():
            for ranks in (2**power for power in range(size.bit_length()) if 2**power < size):
                batch = config.batch_size if kind == "strong" else config.batch_size // size * ranks
                # One rank is the single device, whatever the strategy.
                way, own = (name, schedule) if ranks > 1 else ("single", "")
                if batch and not config.obstacle(way, own, ranks, batch):
                    jobs.append(config.job(way, own, ranks, batch, kind))
        for job in jobs:
            need = sum(memory(job).values()) / 1e9
            why = f"a rank would need about {need:.3g} GB of memory and may use {limit / 1e9:.3g} GB (memory_gb)"
            yield job, *(("memory", why) if 1e9 * need > limit else ("", ""))


def _one(job: Job, obstacle: str, reason: str, rank: Rank, rates: Rates | None, tables: Tables, shares: Shares) -> Row:
    """Measure one job into the tables and return its row."""
    try:
        if reason:
            raise BackendUnavailable(reason)
        alone = any(row["strategy"] == "single" and row["status"] == "ok" for row in tables["strategies"])
        forecast = _forecast(job, rank, rates, alone, shares)
        made = measured(job, rank)
    except BackendUnavailable as error:
        skipped = {"status": "skipped", "obstacle": obstacle or "library", "reason": str(error)}
        tables["strategies"].append(job.row() | skipped)
        return tables["strategies"][-1]
    for name, rows in made.items():
        tables[name] += rows
    (row,) = made["strategies"]
    row |= {f"estimated_{part}_gb": size / 1e9 for part, size in memory(job).items()}
    _join(row, forecast)
    return row


def _forecast(job: Job, rank: Rank, rates: Rates | None, alone: bool, shares: Shares) -> Row:
    """Return the columns compute_s and predicted_step_s, or why there is no prediction."""
    why = "one device" if job.layout.world == 1 else "" if alone else "the model was not measured on one device"
    if why or rates is None:
        why = why or "the times of the links fit no line"
        return {"why": dict.fromkeys(("compute_s", "predicted_step_s"), why)}
    spent = compute_s(job, rates, rank, shares)
    step = step_time(job, rates, scale_of(job, rates, spent)).step_s
    return {"compute_s": spent, "predicted_step_s": step}
