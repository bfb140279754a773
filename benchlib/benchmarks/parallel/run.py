"""The parallelism benchmark as each rank executes it: peaks and links of the machine, proofs, then one strategy after the other."""

import contextlib
import gc
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchlib.benchmarks.parallel import bottleneck, estimate, largest_batch, metrics, scaling
from benchlib.benchmarks.parallel.config import PROOF_STEPS, ParallelConfig
from benchlib.benchmarks.parallel.measure import Alone, Plan, Row, compute_s, describe, links, measure
from benchlib.benchmarks.parallel.proofs import checkpointing_error, prove
from benchlib.benchmarks.parallel.shapes import STRATEGIES, Layout, Shape
from benchlib.core.errors import BackendUnavailable
from benchlib.core.events import EventWriter, keep_alive
from benchlib.results.run import Result, save_result
from benchlib.runtime import devices, peaks
from benchlib.runtime.group import World, all_gather_objects, barrier, world
from benchlib.runtime.largest import free_bytes
from benchlib.runtime.steps import launched_at

PEAK_S, COPY_S, COPY_BYTES = 0.2, 0.1, 64 << 20
TABLES = ("strategies", "kernels", "communication", "stages", "alpha_beta", "scaling", "batches")


def run(config: ParallelConfig, run_dir: Path, events: EventWriter) -> None:
    """Prove, run and measure every strategy; rank 0 leaves ``result.json``."""
    events.emit("phase", name="init")
    with world(config, run_dir) as here:
        _run(config, run_dir, events, here)


def _run(config: ParallelConfig, run_dir: Path, events: EventWriter, here: World) -> None:
    launched = launched_at(run_dir)
    result = Result.of(config, started_at=launched.wall)
    if here.main:
        save_result(run_dir, result)
    devices.require_precision(config.precision, here.device)
    gc.freeze()  # what the libraries brought stays: it is not looked through after each strategy
    if here.device.type == "cpu":
        devices.keep_freed_memory()
    events.emit("phase", name="peak")
    tops = [_peaks(config, here)]
    tables: dict[str, list[Row]] = {name: [] for name in TABLES}
    with keep_alive(events, config.startup_timeout_s):
        tables["alpha_beta"] = links(here)
    limit = min(all_gather_objects(1e9 * config.memory_gb or free_bytes(here)))
    startup_s, proofs = launched.since(), {}
    for shape in config.shapes:
        events.emit("phase", name="prove")
        with keep_alive(events, config.budget_s):
            proofs = _proofs(config, shape, here) if config.prove else {}
        events.emit("phase", name="measure")
        alone: Alone = {}
        for plan, obstacle in _plans(config, shape, here.size):
            row = _one(config, plan, obstacle or _too_large(config, plan, limit), here, events, tables, tops[0], alone)
            row |= proofs.get((plan.strategy, plan.schedule), {}) if not plan.scaling else {}
    events.emit("phase", name="peak")
    tops.append(_peaks(config, here))
    top = _best(tops)
    largest = None
    if config.find_max_batch:
        events.emit("phase", name="batch")
        largest = largest_batch.largest_batch(config, here, run_dir, events)
        tables["batches"] = largest.tried
    remade = checkpointing_error(config, config.shapes[0], here.device) if config.checkpointing else None
    if not here.main:
        return

    events.emit("phase", name="write")
    for row in tables["strategies"]:
        metrics.complete(row, top)
    tables["scaling"] = scaling.table(tables["strategies"])
    result.tables = {name: rows for name, rows in tables.items() if rows}
    total_s = launched.since()
    result.metrics = metrics.of(config, tables, top, startup_s, total_s)
    result.facts = {
        "machine_peaks": top,
        "memory_bytes": limit,
        "parameters": {shape.name: shape.parameters for shape in config.shapes},
        "proof_steps": PROOF_STEPS,
        "exchange_wrong_elements": [row["wrong_elements"] for row in tables["alpha_beta"]],
        "learning_rates": dict.fromkeys(("min", "max", "last"), config.learning_rate),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__},
    }
    if remade is not None:
        result.facts["checkpointing_error"] = remade
    if largest:
        result.facts["largest_batch"] = {name: getattr(largest, name) for name in ("batch", "below", "complete")}
    skipped = [f"{row['key']}: {row['reason']}" for row in tables["strategies"] if row["status"] == "skipped"]
    result.notes = [*dict.fromkeys(skipped), bottleneck.SCORES]
    result.status, result.ended_at = "complete", launched.wall + total_s
    save_result(run_dir, result)


def _peaks(config: ParallelConfig, here: World) -> dict[str, Any]:
    """Return what a rank reaches while all do the same, and what rank 0 reaches alone."""
    rates = {}
    for precision in dict.fromkeys(["fp32", config.precision]):
        together, _ = peaks.all_ranks_peak(here, precision, PEAK_S)
        rates[precision] = (together or math.nan) / here.size
    alone = None
    if here.main:
        own = peaks.matmul_peaks(here.device, config.precision, sizes=peaks.default_sizes(here.device), seconds=PEAK_S)
        alone = max((peak.best or 0.0 for peak in own), default=0.0)
    barrier()
    kind = "host" if here.device.type == "cpu" else "device"
    copied = max(peaks.copy_rates(kind, here.device, COPY_BYTES, COPY_S))
    by_rank = all_gather_objects((alone, copied))
    return {
        "matmul_flops": rates,
        "matmul_flops_alone": by_rank[0][0],
        "copy_bytes_per_s": 1e9 * sum(rate for _, rate in by_rank) / len(by_rank),
    }


def _best(tops: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the highest of several measurements: a busy neighbour lowers a peak and nothing raises it."""
    rates = {name: max(top["matmul_flops"][name] for top in tops) for name in tops[0]["matmul_flops"]}
    return {"matmul_flops": rates} | {
        name: max(top[name] for top in tops) for name in tops[0] if name != "matmul_flops"
    }


def _proofs(config: ParallelConfig, shape: Shape, here: World) -> dict[tuple[str, str], Row]:
    """Return the differences from one device by strategy and schedule."""
    differences = {}
    for name in config.chosen:
        for schedule in config.schedules_of(name):
            if config.obstacle(name, schedule, shape, here.size):
                continue
            layout = config.layout(name, here.size)
            with contextlib.suppress(BackendUnavailable):  # its row says why
                differences[name, schedule] = asdict(prove(config, shape, name, layout, schedule, here))
    return differences


def _plans(config: ParallelConfig, shape: Shape, size: int) -> Iterator[tuple[Plan, str]]:
    """Yield what is to be measured, and why not where it does not fit; strategies that were not named may be many ranks short."""
    for name in config.chosen:
        for schedule in config.schedules_of(name):
            why = config.obstacle(name, schedule, shape, size)
            layout = Layout() if why else config.layout(name, size)
            yield Plan(shape, name, schedule, layout, config.batch_size), why
            if why or len(STRATEGIES[name].axes) != 1:
                continue
            for kind in ("strong", "weak") if config.scaling == "both" else filter(None, [config.scaling]):
                for ranks in (2**power for power in range(size.bit_length()) if 2**power < size):
                    batch = config.batch_size if kind == "strong" else config.batch_size // size * ranks
                    # One rank is the single device, whatever the strategy.
                    strategy, own = (name, schedule) if ranks > 1 else ("single", "")
                    if batch and not config.obstacle(strategy, own, shape, ranks, batch):
                        yield Plan(shape, strategy, own, config.layout(strategy, ranks), batch, kind), ""


def _too_large(config: ParallelConfig, plan: Plan, limit: float) -> str:
    """Return why a rank's memory of ``limit`` bytes is not enough for a plan; '' where it is, by the estimate."""
    need = estimate.memory(estimate.of_row(describe(config, plan), plan.shape, config.shard or 2)).total
    if need <= limit:
        return ""
    return f"a rank would need about {need / 1e9:.3g} GB of memory and may use {limit / 1e9:.3g} GB (memory_gb)"


def _one(
    config: ParallelConfig, plan: Plan, obstacle: str, here: World, events: EventWriter, tables: dict[str, list[Row]], top: dict[str, Any], alone: Alone,
) -> Row:  # fmt: skip
    """Measure one plan into the tables and return its row."""
    done = tables["strategies"]
    if same := next((row for row in done if row["key"] == plan.key), None):  # the single device of several strategies
        return same
    try:
        if obstacle:
            raise BackendUnavailable(obstacle)
        forecast = _forecast(config, plan, here, events, tables, top, alone)
        measured = measure(config, plan, here, events)
    except BackendUnavailable as error:
        done.append(describe(config, plan) | {"status": "skipped", "reason": str(error)})
        return done[-1]
    for name, rows in measured.items():
        tables[name] += rows
    measured["strategies"][0] |= forecast
    return measured["strategies"][0]


def _forecast(
    config: ParallelConfig, plan: Plan, here: World, events: EventWriter, tables: dict[str, list[Row]], top: dict[str, Any], alone: Alone,
) -> Row:  # fmt: skip
    """Return the columns compute_s, predicted_step_s and unpredicted: why there is no prediction, else ''."""
    nothing = {"compute_s": None, "predicted_step_s": None}
    if plan.layout.world == 1:
        return nothing | {"unpredicted": "one device"}
    if not any(
        row["strategy"] == "single" and row["model"] == plan.shape.name and row["status"] == "ok"
        for row in tables["strategies"]
    ):
        return nothing | {"unpredicted": "the model was not measured on one device"}
    rates = estimate.Rates.of_run(top, tables["alpha_beta"], config.precision)
    if rates is None:
        return nothing | {"unpredicted": "the times of the links fit no line"}
    row = describe(config, plan) | {"compute_s": compute_s(config, plan, rates, here, events, alone)}
    predicted = estimate.predict(row, top, tables["alpha_beta"], plan.shape)
    return {"compute_s": row["compute_s"], "predicted_step_s": predicted, "unpredicted": ""}
