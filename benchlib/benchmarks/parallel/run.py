"""The parallelism benchmark as each rank executes it: peaks and links, then one strategy after the other."""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from statistics import fmean

from benchlib.benchmarks.parallel import analysis
from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.estimate import Rates, memory
from benchlib.benchmarks.parallel.forecast import Forecast, links
from benchlib.benchmarks.parallel.measure import Row
from benchlib.benchmarks.parallel.measure import measure as measured
from benchlib.benchmarks.parallel.proofs import PROOF_STEPS, checkpointing_error, prove, tokens
from benchlib.benchmarks.parallel.shapes import STRATEGIES, Job
from benchlib.benchmarks.parallel.strategies import Way
from benchlib.core.errors import BackendUnavailable, UserError
from benchlib.core.events import keep_alive
from benchlib.runtime import devices, largest, peaks
from benchlib.runtime.group import World, all_gather_objects, barrier
from benchlib.runtime.measurement import Rank, Tables

PEAK_S, COPY_S, COPY_BYTES = 0.2, 0.1, 64 << 20
MAX_BATCH = 65536
PROOF = ("loss_error", "weight_error", "loss_error_fp32", "gradient_error")


def measure(rank: Rank) -> Tables:
    config, here, events = rank.config, rank.world, rank.events
    devices.require_precision(config.precision, here.device)
    gc.freeze()  # what the libraries brought is not looked through: cycles that hold tensors are found sooner
    if here.device.type == "cpu":
        devices.keep_freed_memory()
    events.emit("phase", name="peak")
    first = _peaks(config, here)
    tables: Tables = {name: [] for name in ("strategies", "kernels", "communication", "stages")}
    with keep_alive(events, config.startup_timeout_s):
        tables["alpha_beta"] = links(here)
    forecast = Forecast(rank, Rates.of_run(first["rank_flops"], first["copy_bytes_per_s"], tables["alpha_beta"]))
    limit = min(all_gather_objects(1e9 * config.memory_gb or largest.free_bytes(here)))
    # Scaling of several strategies begins with one device.
    plans = {plan[0].key: plan for plan in _plans(config, here.size, limit)}
    events.emit("phase", name="prove")
    proofs = {job.key: _proof(job, rank) for job, obstacle, _ in plans.values() if not obstacle}
    events.emit("phase", name="measure")
    for job, obstacle, reason in plans.values():
        try:
            if obstacle:
                raise BackendUnavailable(reason)
            row = _one(job, proofs[job.key], rank, forecast, tables)
        except BackendUnavailable as error:
            row = job.row() | {"status": "skipped", "obstacle": obstacle or "library", "reason": str(error)}
        tables["strategies"].append(row)
    events.emit("phase", name="peak")
    last = _peaks(config, here)
    # The highest of several measurements: a busy neighbour lowers a peak and nothing raises it.
    facts = {name: max(first[name], last[name]) for name in first}
    for row in (row for row in tables["strategies"] if row["status"] == "ok"):
        row |= analysis.columns(row, [item for item in tables["kernels"] if item["key"] == row["key"]])
        # A rank alone has caches and turbo to itself.
        row["peak_flops"] = row["world"] * max(facts["rank_flops"], facts["alone_flops"] * (row["world"] == 1))
    tables["scaling"] = list(analysis.points(tables["strategies"]))
    facts |= {"precision": config.precision, "memory_bytes": limit, "parameters": config.shape.parameters}
    facts |= {"proof_steps": PROOF_STEPS, "learning_rate_min": config.learning_rate}
    facts["model_error"] = analysis.off(tables["strategies"])
    facts["checkpointing_error"] = checkpointing_error(config.job(), here.device) if config.checkpointing else None
    facts |= dict.fromkeys(("largest_batch", "too_large_batch", "search_complete"))
    tables["batches"] = []
    if config.find_max_batch:
        events.emit("phase", name="batch")
        search = largest.largest_batch(rank, one_trial, limit, MAX_BATCH)
        facts |= {"largest_batch": search.batch, "too_large_batch": search.below, "search_complete": search.complete}
        for row in search.tried:
            tables["batches"].append(row | {"why": dict.fromkeys(("peak_gb", "samples_per_s"), row["reason"])})
    facts["why"] = {name: "not asked for, or nothing to tell it by" for name, value in facts.items() if value is None}
    return tables | {"run": [facts]}


def _peaks(config: ParallelConfig, here: World) -> Row:
    """Return what a rank reaches while all do the same, and rank 0 alone: FLOP/s, and bytes/s read plus written."""
    (together, _), alone = peaks.all_ranks_peak(here, config.precision, PEAK_S), math.nan
    if here.main:
        sizes = peaks.default_sizes(here.device)
        alone = peaks.best(peaks.matmul_peaks(here.device, config.precision, sizes=sizes, seconds=PEAK_S))
    barrier()
    kind = "host" if here.device.type == "cpu" else "device"
    copies = peaks.copy_rates(kind, here.device, COPY_BYTES, COPY_S)
    by_rank = all_gather_objects((alone, max(copies)))
    rates = {"rank_flops": (together or math.nan) / here.size, "alone_flops": by_rank[0][0]}
    return rates | {"copy_bytes_per_s": 1e9 * fmean(rate for _, rate in by_rank)}


def _plans(config: ParallelConfig, size: int, limit: float) -> Iterator[tuple[Job, str, str]]:
    """Yield what is to be measured, and what stands in its way, if anything, with the reason."""
    kinds = ("strong", "weak") if config.scaling == "both" else (config.scaling,) * bool(config.scaling)
    for name, schedule in config.ways(config.chosen):
        try:
            jobs = [config.job(name, schedule, size)]
        except UserError as error:
            yield replace(config.job(), strategy=name, schedule=schedule), "layout", str(error)
            continue
        for kind in kinds if len(STRATEGIES[name]) == 1 else ():
            for ranks in (2**power for power in range(size.bit_length()) if 2**power < size):
                batch = config.batch_size if kind == "strong" else config.batch_size // size * ranks
                # One rank is the single device, whatever the strategy.
                way = (name, schedule) if ranks > 1 else ("single", "")
                with suppress(UserError):
                    jobs += [config.job(*way, ranks, batch, kind)] if batch else []
        for job in jobs:
            need = sum(memory(job).values())
            why = f"a rank would need about {need / 1e9:.3g} GB of memory and may use {limit / 1e9:.3g} GB (memory_gb)"
            yield job, *(("memory", why) if need > limit else ("", ""))


def _proof(job: Job, rank: Rank) -> Row:
    lacks = "its own row has the proof" if job.scaling else "" if rank.config.prove else "prove = false"
    with keep_alive(rank.events, rank.config.budget_s), suppress(BackendUnavailable):  # its row will say why
        return {"why": dict.fromkeys(PROOF, lacks)} if lacks else prove(job, rank.world.device)
    return {}


def _one(job: Job, proof: Row, rank: Rank, forecast: Forecast, tables: Tables) -> Row:
    """Predict and measure a job; return its row, and add what else it gives to the tables."""
    single_ran = any(row["strategy"] == "single" and row["status"] == "ok" for row in tables["strategies"])
    predicted, results = forecast.columns(job, single_ran), measured(job, rank)
    (row,) = results.pop("strategies")
    for name, rows in results.items():
        tables[name] += rows
    why = row["why"] | proof["why"] | predicted["why"]
    row |= {f"estimated_{part}_gb": size / 1e9 for part, size in memory(job).items()}
    return row | proof | predicted | {"why": why}


def one_trial(config: ParallelConfig, batch: int, limit_bytes: int) -> largest.Trial:
    """Train some steps on ``batch`` samples of one device within ``limit_bytes``, in a process that may run out of memory."""
    device, job = devices.device(config.backend), config.job(batch=batch)

    def prepare() -> Callable[[], None]:
        way, inputs = Way(job, device), tokens(job, 0, device)

        def step() -> None:
            way.step(*inputs)
            way.update()

        return step

    return largest.tried(device, batch, limit_bytes, prepare)
