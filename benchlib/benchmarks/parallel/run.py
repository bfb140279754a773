"""The parallelism benchmark as each rank executes it: peaks and links, then one strategy after the other."""

import functools
import gc
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from statistics import fmean, median

import torch.distributed as dist

from benchlib.benchmarks.parallel import analysis
from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.estimate import HOPS, Rates, memory, rank_parameters, step_time
from benchlib.benchmarks.parallel.measure import PHASES, Row, Runner, together, tried
from benchlib.benchmarks.parallel.measure import measure as measured
from benchlib.benchmarks.parallel.shapes import STRATEGIES, Job, Shape
from benchlib.benchmarks.parallel.strategies import ShardedModel, prepare, prove
from benchlib.core.errors import BackendUnavailable, UserError
from benchlib.core.events import keep_alive
from benchlib.launch.diagnosis import is_secondary
from benchlib.runtime import devices, peaks
from benchlib.runtime.group import World, all_gather_objects, barrier
from benchlib.runtime.measurement import Rank, Tables
from benchlib.runtime.steps import comm_device
from benchlib.workloads import largest
from benchlib.workloads.alpha_beta import fit_alpha_beta
from benchlib.workloads.collective_ops import OPS, Place
from benchlib.workloads.collective_timing import Case, Exercise, Pace, interleaved

PEAK_S, COPY_S = 0.2, 0.1
MAX_BATCH = 65536  # of a copy and micro-batch
BROKE_S = 20.0  # between the first and the last rank that raises the same error
ALONE = 3  # steps of the compute of a rank
LINK_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
PROOF = ("loss_error", "weight_error", "loss_error_fp32", "gradient_error")


def measure(rank: Rank) -> Tables:
    config, here, events = rank.config, rank.world, rank.events
    devices.require_precision(config.precision, here.device)
    gc.freeze()  # what the libraries brought is not looked through: cycles that hold tensors are found sooner
    if here.device.type == "cpu":
        devices.keep_freed_memory()
    events.emit("phase", name="peak")
    first = _peaks(config, here)
    tables: Tables = {name: [] for name in ("strategies", "kernels", "operations", "stages")}
    with keep_alive(events, config.startup_timeout_s):
        tables["alpha_beta"] = links(here)
    forecast = Forecast(rank, Rates.of_run(first["rank_flops"], first["copy_bytes_per_s"], tables["alpha_beta"]))
    limit = min(all_gather_objects(1e9 * config.memory_gb or largest.free_bytes(here)))
    # Scaling of several strategies begins with one device.
    plans = {plan[0].key: plan for plan in _plans(config, here.size, limit)}
    events.emit("phase", name="prove and measure")
    for job, obstacle, reason in plans.values():
        try:
            if obstacle:
                raise BackendUnavailable(reason)
            row = _one(job, rank, forecast, tables)
        except BackendUnavailable as error:
            row = job.row() | {"status": "skipped", "obstacle": obstacle or "library", "reason": str(error)}
        except RuntimeError as error:
            if not everywhere(error, job.key, here):
                raise
            row = job.row() | {"status": "failed", "obstacle": "error", "reason": " ".join(str(error).split())[:500]}
        tables["strategies"].append(row)
    tables["batches"] = list[Row]()
    if config.find_max_batch:
        events.emit("phase", name="batch", text="finding the largest batches")
        broken = {row["key"] for row in tables["strategies"] if row["status"] == "failed"}
        own = [
            job
            for job, obstacle, _ in plans.values()
            if not job.scaling and obstacle in ("", "memory") and job.key not in broken
        ]
        for job in own:
            with keep_alive(events, config.budget_s):
                tables["batches"] += batches(job, rank, limit, largest.SEARCH_SHARE * config.budget_s / len(own))
    events.emit("phase", name="peak")
    last = _peaks(config, here)
    # The highest of several measurements: a busy neighbour lowers a peak and nothing raises it.
    facts = {name: max(first[name], last[name]) for name in first}
    products = devices.products_in(config.precision, here.device)
    for row in (row for row in tables["strategies"] if row["status"] == "ok"):
        row["precision"] = products
        row |= analysis.columns(row, [item for item in tables["kernels"] if item["key"] == row["key"]])
        # A rank alone has caches and turbo to itself.
        row["peak_flops"] = row["world"] * max(facts["rank_flops"], facts["alone_flops"] * (row["world"] == 1))
    tables["scaling"] = list(analysis.points(tables["strategies"]))
    facts |= {"precision": products, "memory_bytes": limit, "learning_rate_min": config.learning_rate}
    facts["model_error"] = analysis.off(tables["strategies"])
    facts["why"] = {name: "not asked for, or nothing to tell it by" for name, value in facts.items() if value is None}
    return tables | {"run": [facts]}


def everywhere(error: RuntimeError, key: str, here: World) -> bool:
    """Whether all ranks raised an error of their own at the same strategy, so that they can go on together. Each that did calls it.

    They ask the store: a rank without an error is in the middle of an exchange, and must not take part in another one.
    """
    store = dist.distributed_c10d._get_default_store()
    if is_secondary(error):
        return False
    store.set(f"broke/{key}/{here.rank}", "")
    try:
        store.wait([f"broke/{key}/{rank}" for rank in range(here.size)], timedelta(seconds=BROKE_S))
    except RuntimeError:  # some did not
        return False
    return True


def _peaks(config: ParallelConfig, here: World) -> Row:
    """Return what a rank reaches while all do the same, and rank 0 alone: FLOP/s, and bytes/s read plus written."""
    precision, alone = devices.products_in(config.precision, here.device), math.nan
    together, _ = peaks.all_ranks_peak(here, precision, PEAK_S)
    if here.main:
        sizes = peaks.default_sizes(here.device)
        alone = peaks.best(peaks.matmul_peaks(here.device, precision, sizes=sizes, seconds=PEAK_S))
    barrier()
    kind = "host" if here.device.type == "cpu" else "device"
    copies = peaks.copy_rates(kind, here.device, peaks.copy_size(kind, here).bytes, COPY_S)
    by_rank = all_gather_objects((alone, max(copies)))
    rates = {"rank_flops": (together or math.nan) / here.size, "alone_flops": by_rank[0][0]}
    return rates | {"copy_bytes_per_s": 1e9 * fmean(rate for _, rate in by_rank)}


def links(here: World) -> list[Row]:
    """Return rows of op, wrong elements of its results, and ``t = alpha + beta bytes`` fitted to its times."""
    if here.size == 1:
        return [{"op": op, "status": "skipped", "reason": "one rank exchanges nothing"} for op in HOPS]
    rows, at, names = list[Row](), Place(here.rank, here.size, comm_device(here)), ("alpha_s", "beta_s_per_byte")
    for op in HOPS:
        reduction = "sum" if OPS[op].reduces else ""
        cases = [Exercise(Case(op, "library", "fp32", reduction, False, size), at) for size in LINK_BYTES]
        messages = interleaved(cases, at.device, Pace(0, least=5, most=5, warmup=1))
        line = fit_alpha_beta(LINK_BYTES, [median(series.seconds) for series in messages])
        row: Row = {"op": op, "world": here.size, "wrong_elements": sum(series.wrong for series in messages)}
        row |= {"why": dict.fromkeys(names, line.reason)} if line.reason else {n: getattr(line, n) for n in names}
        rows.append(row)
    return rows


class Forecast:
    """The model of a step's time with what the run measures: links by size, and compute while all ranks compute.

    It keeps measured phases by model, ranks that compute at once, and samples of each.
    """

    def __init__(self, rank: Rank, rates: Rates | None) -> None:
        self.rank, self.rates, self.shares = rank, rates, dict[tuple[Shape, int, int], Row]()

    def columns(self, job: Job, single_ran: bool) -> Row:
        """Return the columns compute_s and predicted_step_s of a job, or why there are none; all ranks call it.

        Compute of a rank while all ranks compute is its share of the model, and for each layer what the strategy adds
        (hooks, dispatch of cut tensors): the step of a narrow model, which has hardly any products, over its forecast.
        """
        lacks = "" if single_ran else "the model was not measured on one device"
        lacks = "one device" if job.layout.world == 1 else lacks or ("" if self.rates else "no line fits the links")
        if lacks or self.rates is None:
            return {"why": dict.fromkeys(("compute_s", "predicted_step_s"), lacks)}
        small = job.narrow()
        modelled = step_time(small, self.rates, self._share_s(small)).step_s
        added = max(0.0, self._phases(prepare(small, self.rank.world.device))["step_s"] - modelled)
        compute_s = self._share_s(job) + added * job.layers / small.layers
        return {"compute_s": compute_s, "predicted_step_s": step_time(job, self.rates, compute_s).step_s, "why": {}}

    def _share_s(self, job: Job) -> float:
        """Return the seconds in which each rank computes its share of a step at the same time.

        Each trains the whole model by itself on as many samples as have its share of the FLOPs; a pipeline's rank has
        its share of the layers, and each its share of the optimizer.
        """
        layout, here = job.layout, self.rank.world
        share = job.batch / job.micro_batches / layout.feeds / layout.tensor / layout.context
        samples = max(1, round(share))
        if (key := (job.shape, layout.world, samples)) not in self.shares:
            computes = here.rank < layout.world
            self.shares[key] = self._phases(ShardedModel(job.alone(batch=samples), here.device) if computes else None)
        times = self.shares[key]
        passes = (times["data_s"] + times["forward_s"] + times["backward_s"]) * share / samples
        updated = rank_parameters(job) / layout.shard / job.shape.parameters
        return float(passes * job.micro_batches * job.layers / job.shape.layers + times["optimizer_s"] * updated)

    def _phases(self, way: ShardedModel | None) -> Row:
        """Return the median seconds of a step and of its phases on the slowest rank, of those that have a ``way``."""
        runner = Runner(way, self.rank) if way else None
        with keep_alive(self.rank.events, self.rank.config.budget_s):
            for count in (1, ALONE):  # warmed up they begin together
                ranks = together(self.rank, functools.partial(runner.timed, count) if runner else None)
        return {name: max(median(row[name] for row in own) for own in ranks) for name in ("step_s", *PHASES)}


def batches(job: Job, rank: Rank, limit: float, seconds: float) -> list[Row]:
    """Try batches of a strategy for ``seconds`` and return them: the largest that fits ``limit`` bytes of each rank, to a sixteenth.

    All ranks call it. A batch is tried if smaller ones, by a line through the peaks of the largest two, or without them the
    estimate, say that the free memory holds it; a rank that runs out of memory would end the run.
    """
    unit, end = job.layout.feeds * job.micro_batches, time.monotonic() + seconds
    free, peaks_at = min(all_gather_objects(largest.free_bytes(rank.world))), dict[int, float]()

    def trial(count: int) -> largest.Trial:
        batch = unit * count
        if all_gather_objects(time.monotonic() > end)[0]:
            raise largest.OutOfTime
        row: largest.Trial = {"key": job.key, "batch": batch, "fits": False}
        need = sum(memory(replace(job, batch=batch)).values())
        if len(peaks_at) > 1:
            (low, low_peak), (high, high_peak) = sorted(peaks_at.items())[-2:]
            need = high_peak + (high_peak - low_peak) / (high - low) * (batch - high)
        if need > free:
            reason = f"not tried: it would need {need / 1e9:.3g} GB and {free / 1e9:.3g} GB are free"
            return row | {"why": dict.fromkeys(("peak_gb", "samples_per_s"), reason)}
        peak, step_s = tried(replace(job, batch=batch), rank)
        if peak is None:
            raise BackendUnavailable("this system does not count the memory of a process")
        peaks_at[batch] = peak
        return row | {"fits": peak <= limit, "peak_gb": peak / 1e9, "samples_per_s": batch / step_s}

    try:
        search = largest.search(trial, MAX_BATCH)
    except BackendUnavailable as error:
        return [{"key": job.key, "status": "skipped", "reason": str(error)}]
    return [row | {"largest": row["batch"] == search.batch * unit, "complete": search.complete} for row in search.tried]


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


def _one(job: Job, rank: Rank, forecast: Forecast, tables: Tables) -> Row:
    """Prove, predict and measure a job; return its row, and add what else it gives to the tables."""
    lacks = "its own row has the proof" if job.scaling else "" if rank.config.prove else "prove = false"
    with keep_alive(rank.events, rank.config.budget_s):
        proof = {"why": dict.fromkeys(PROOF, lacks)} if lacks else prove(job, rank.world.device)
    single_ran = any(row["strategy"] == "single" and row["status"] == "ok" for row in tables["strategies"])
    predicted, (row, results) = forecast.columns(job, single_ran), measured(job, rank)
    for name, rows in results.items():
        tables[name] += rows
    why = row["why"] | proof["why"] | predicted["why"]
    row |= {f"estimated_{part}_gb": size / 1e9 for part, size in memory(job).items()}
    return row | proof | predicted | {"why": why}
