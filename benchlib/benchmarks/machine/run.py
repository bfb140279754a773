"""The machine benchmark: what the devices, the memory, the network and the disk of a run reach.

Each rank measures alone (the others wait) and then all at once: what they lose against each other is what shared
caches, memory and power cost. Rates of several ranks are the sum of their medians; samples are the sums round by round.
"""

import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from benchlib.benchmarks.machine.config import MachineConfig
from benchlib.core.definitions import size_text
from benchlib.core.events import EventWriter, Moment
from benchlib.core.files import is_full
from benchlib.results.metrics import Metric, derived, measured, not_available
from benchlib.results.peaks import highest
from benchlib.results.run import Result, save_result
from benchlib.runtime import group
from benchlib.runtime.peaks import MatmulPeak, copy_rates, matmul_peaks, peak_together
from benchlib.workloads.collective_timing import AllReduce, Pace, time_all_reduce

MIB = 1 << 20
SPARE = 16 * MIB  # left for the run's own files and for others while the disk is measured
COPIES = {
    "host": "copy within the host's memory, bytes read and written",
    "device": "copy within the device's memory, bytes read and written",
    "host_to_device": "copy from pinned host memory to the device",
    "device_to_host": "copy from the device to pinned host memory",
}

Rates = list[float]
T = TypeVar("T")


@dataclass
class _Bench:
    """What every measurement needs: the world, the config, and a place to report progress."""

    world: group.World
    config: MachineConfig
    events: EventWriter
    steps: int
    done: int = 0

    def step(self) -> None:
        self.done += 1
        self.events.emit("progress", phase="measure", done=self.done, total=self.steps, unit="measurements")

    def together(self, measure: Callable[[], T]) -> list[T]:
        """Let all ranks measure at once."""
        group.barrier()
        return group.all_gather_objects(measure())

    def alone(self, measure: Callable[[], T]) -> list[T]:
        """Let the ranks of a node measure one after the other; nodes do not disturb each other."""
        value: T | None = None
        for turn in range(self.config.nproc):
            group.barrier()
            self.events.emit("heartbeat")  # a node of many ranks may take longer than the stall limit
            if turn == self.world.local_rank:
                value = measure()
        group.barrier()
        return group.all_gather_objects(value)  # type: ignore[return-value, arg-type]  # each rank had its turn


def run(config: MachineConfig, run_dir: Path, events: EventWriter) -> None:
    """Measure as one rank; rank 0 writes ``result.json`` and ``samples.parquet``."""
    began = Moment.at(psutil.Process().create_time())  # the import of torch is part of the start-up
    events.emit("phase", name="init")
    with group.world(config, run_dir) as world:
        copies = COPIES if world.device.type != "cpu" else ["host"]
        steps = 2 * len(config.precisions) + len(copies) + len(config.allreduce_mib) + 1
        bench = _Bench(world, config, events, steps)
        startup_s = max(group.all_gather_objects(began.since()))
        events.emit("phase", name="measure")
        metrics: list[Metric] = []
        tables: dict[str, list[dict[str, Any]]] = {"matmul": [], "allreduce": []}
        for precision in config.precisions:
            metrics += _products(bench, precision, tables["matmul"])
        for kind, meaning in COPIES.items():
            metrics.append(_copies(bench, kind, meaning))
        exchanges = [_exchange(bench, size) for size in config.allreduce_sizes]
        tables["allreduce"] = [_exchange_row(exchange) for exchange in exchanges] if world.size > 1 else []
        metrics += _exchange_metrics(exchanges)
        metrics.append(_disk(bench, run_dir))
        events.emit("phase", name="write")
        if world.rank == 0:
            metrics.append(measured("startup_s", startup_s, "s", "lower"))
            metrics.append(measured("total_s", began.since(), "s", "lower"))
            metrics += _highest(config, metrics, run_dir, world.size)
            facts = {
                "allreduce_wrong_elements": sum(exchange.wrong for exchange in exchanges),
                "collective": world.collective,
                "threads": torch.get_num_threads(),
                "device": _device_name(world.device),
                "torch": torch.__version__,
            }
            result = Result.of(
                config,
                status="complete",
                started_at=began.wall,
                ended_at=began.wall + began.since(),
                metrics=metrics,
                facts=facts,
                tables=tables,
            )
            save_result(run_dir, result)


def _highest(config: MachineConfig, metrics: list[Metric], run_dir: Path, ranks: int) -> list[Metric]:
    """Return the highest peak of each precision that this and the earlier runs of the machine measured."""
    values = {metric.name: metric for metric in metrics if metric.value}
    best = []
    for precision in config.precisions:
        own, (value, reason) = values.get(f"matmul_{precision}_peak_flops"), highest(run_dir, precision, ranks)
        if own and value:
            of_own = f"{own.reason}, measured by this run"
            value, reason = max((value, reason), (own.value or 0.0, of_own))
            best.append(measured(f"matmul_{precision}_highest_flops", value, "FLOP/s", "none", reason=reason))
    return best


def _products(bench: _Bench, precision: str, table: list[dict[str, Any]]) -> list[Metric]:
    """Measure one precision, all ranks at once for each size, then each rank alone at the best size."""
    device, config = bench.world.device, bench.config
    by_rank = bench.together(
        lambda: matmul_peaks(
            device, precision, sizes=config.matmul_sizes, seconds=config.seconds, slowdown=config.planted_slowdown
        )
    )
    bench.step()
    names = [f"matmul_{precision}{kind}_flops" for kind in ("", "_alone", "_best", "_peak")]
    lacking = next((peak.reason for peaks in by_rank for peak in peaks if peak.reason), "")
    if lacking:
        bench.step()
        return [not_available(name, "FLOP/s", "higher", lacking) for name in names]
    # A slow rank may have left out a size: only those that every rank has can be summed.
    sizes = sorted(set.intersection(*({peak.size for peak in peaks} for peaks in by_rank)))
    sums = {size: _sum_rounds([_of_size(peaks, size).samples for peaks in by_rank]) for size in sizes}
    best = max(sizes, key=lambda size: statistics.median(sums[size]))
    alone = bench.alone(
        lambda: _of_size(
            matmul_peaks(device, precision, sizes=[best], seconds=config.seconds, slowdown=config.planted_slowdown),
            best,
        )
    )
    bench.step()
    for size in sizes:
        for rank, peaks in enumerate(by_rank):
            peak = _of_size(peaks, size)
            row = {
                "precision": precision,
                "n": size,
                "rank": rank,
                "together_flops": peak.median,
                "best_flops": peak.best,
            }
            table.append(row | {"alone_flops": alone[rank].median if size == best else None})
    highest = max(peak.best or 0.0 for peak in [*alone, *(peak for peaks in by_rank for peak in peaks)])
    ranks = f"sum over {bench.world.size} ranks" if bench.world.size > 1 else "one rank"
    peak_flops, peak_size = peak_together(by_rank)
    return [
        derived(names[3], peak_flops, "FLOP/s", "higher", f"n = {peak_size}, {ranks} at once, best samples"),
        derived(names[0], sums[best], "FLOP/s", "higher", f"n = {best}, {ranks} at once"),
        measured(
            names[1],
            [rate for peak in alone for rate in peak.samples],
            "FLOP/s",
            "higher",
            reason=f"n = {best}, one rank, the others waiting",
        ),
        measured(names[2], highest, "FLOP/s", "higher", reason="the highest sample of any rank and size"),
    ]


def _copies(bench: _Bench, kind: str, meaning: str) -> Metric:
    name, device = f"copy_{kind}_gbytes_per_s", bench.world.device
    if device.type == "cpu" and kind != "host":
        return not_available(name, "GB/s", "higher", "the device is the host: there is no other memory")
    size = bench.config.copy_mib * MIB
    rates = bench.together(lambda: copy_rates(kind, device, size, bench.config.seconds, bench.config.planted_slowdown))
    bench.step()
    return derived(
        name,
        _sum_rounds(rates),
        "GB/s",
        "higher",
        f"{meaning}, {bench.config.copy_mib} MiB, sum over {bench.world.size} ranks at once",
    )


def _exchange(bench: _Bench, size: int) -> AllReduce:
    group.barrier()
    pace = Pace(bench.config.seconds, bench.config.planted_slowdown, warmup=3)
    exchange = time_all_reduce([size], bench.world.device, pace)
    bench.step()
    return exchange


def _exchange_row(exchange: AllReduce) -> dict[str, Any]:
    return {
        "bytes": exchange.sizes[0],
        "operations": len(exchange.seconds),
        "median_us": 1e6 * statistics.median(exchange.seconds),
        "algbw_gbps": statistics.median(exchange.algbw_gbps),
        "busbw_gbps": statistics.median(exchange.busbw_gbps),
        "wrong_elements": exchange.wrong,
    }


def _exchange_metrics(exchanges: list[AllReduce]) -> list[Metric]:
    """Return the bus bandwidth at the largest size and the latency at the smallest."""
    large, small = (pick(exchanges, key=lambda exchange: exchange.sizes) for pick in (max, min))
    names = ("allreduce_gbps", "allreduce_algbw_gbps", "allreduce_latency_us")
    if large.ranks == 1:
        why = "one rank has nobody to exchange with; set nproc to 2 or more"
        return [
            not_available(name, "us" if "latency" in name else "Gbps", "lower" if "latency" in name else "higher", why)
            for name in names
        ]
    return [
        derived(
            names[0],
            large.busbw_gbps,
            "Gbps",
            "higher",
            f"bus bandwidth, 2(n-1)/n x bytes / time, {size_text(large.sizes[0])} over {large.ranks} ranks",
        ),
        derived(
            names[1],
            large.algbw_gbps,
            "Gbps",
            "higher",
            f"algorithm bandwidth, bytes / time, {size_text(large.sizes[0])} over {large.ranks} ranks",
        ),
        measured(
            names[2],
            [1e6 * value for value in small.seconds],
            "us",
            "lower",
            reason=f"all-reduce of {size_text(small.sizes[0])} over {small.ranks} ranks",
        ),
    ]


def _disk(bench: _Bench, run_dir: Path) -> Metric:
    """Measure how fast rank 0 writes to the run folder, synced: what checkpoints and samples wait for."""
    name, size = "disk_write_gbytes_per_s", min(bench.config.copy_mib, 64) * MIB
    first = bench.world.rank == 0
    rates, lacking = group.all_gather_objects(_write_rates(run_dir, size) if first else ([], ""))[0]
    bench.step()
    # Direction "none": disks of shared machines vary by more than any limit, so it is shown and not judged.
    if lacking:
        return not_available(name, "GB/s", "none", lacking)
    return measured(name, rates, "GB/s", "none", reason=f"{size // MIB} MiB to the run folder, synced, by one rank")


def _write_rates(folder: Path, size: int) -> tuple[Rates, str]:
    """Return the rates in GB/s, or why there are none: a disk without space for it may still hold the result."""
    lacking = f"no space for {size // MIB} MiB at {folder}"
    if shutil.disk_usage(folder).free < size + SPARE:
        return [], lacking
    data = os.urandom(size)  # a file system that compresses would not write zeros
    path, rates = folder / "disk.tmp", []
    try:
        for _ in range(3):
            began = time.perf_counter()
            with path.open("wb") as handle:
                handle.write(data)
                handle.flush()
                os.fsync(handle.fileno())
            rates.append(1e-9 * size / (time.perf_counter() - began))
    except OSError as error:
        if not is_full(error):
            raise
        return [], lacking  # a quota, or another process took the space
    finally:
        path.unlink(missing_ok=True)
    return rates, ""


def _of_size(peaks: list[MatmulPeak], size: int) -> MatmulPeak:
    return next(peak for peak in peaks if peak.size == size)


def _sum_rounds(by_rank: list[tuple[float, ...]] | list[Rates]) -> Rates:
    """Add the ranks' samples round by round; rounds that not every rank had are left out."""
    return [sum(values) for values in zip(*by_rank, strict=False)]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
