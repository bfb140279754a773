"""What the devices, the memory, the network and the disk of a run reach.

Each rank measures alone (the others wait) and then all at once: what they lose against each other is what shared
caches, memory and power cost. Rates of several ranks are summed round by round.
"""

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from benchlib.benchmarks.machine.spec import COPIES
from benchlib.core.files import is_full
from benchlib.results.peaks import highest
from benchlib.runtime import group
from benchlib.runtime.measurement import Rank, Tables
from benchlib.runtime.peaks import MatmulPeak, copy_rates, matmul_peaks, peak_together
from benchlib.workloads.collective_timing import Pace, time_all_reduce

MIB = 1 << 20
SPARE = 16 * MIB  # left for the run's own files and for others while the disk is measured

Row = dict[str, Any]
T = TypeVar("T")


def measure(rank: Rank) -> Tables:
    """Measure everything that the config names, one after the other."""
    config, on_cpu = rank.config, rank.world.device.type == "cpu"
    kinds = ["host"] if on_cpu else list(COPIES)
    total = len(config.precisions) + len(kinds) + len(config.allreduce_mib) + 1
    products, matmul, copies, exchanges, disk = (list[Row]() for _ in range(5))

    def progress() -> None:
        rank.progress(sum(map(len, (products, copies, exchanges, disk))), total)

    for precision in config.precisions:
        product, rows = _products(rank, precision)
        products.append(product)
        matmul += rows
        progress()
    for kind in kinds:
        copies.append({"kind": kind, "mib": config.copy_mib, "gbytes_per_s": _copies(rank, kind)})
        progress()
    for size in config.allreduce_sizes:
        exchanges.append(_exchange(rank, size))
        progress()
    disk.append(_disk(rank))
    progress()
    alone = {"status": "skipped", "reason": "the device is the host: there is no other memory"}
    copies += [{"kind": kind, **alone} for kind in COPIES if kind not in kinds]
    return {
        "products": products,
        "matmul": matmul,
        "copies": copies,
        "allreduce": exchanges,
        "disk": disk,
        "run": [{}],
    }


def _together(measure: Callable[[], T]) -> list[T]:
    """Let all ranks measure at once."""
    group.barrier()
    return group.all_gather_objects(measure())


def _alone(rank: Rank, measure: Callable[[], T]) -> list[T]:
    """Let the ranks of a node measure one after the other; nodes do not disturb each other."""
    value: T | None = None
    for turn in range(rank.config.nproc):
        group.barrier()
        rank.events.emit("heartbeat")  # a node of many ranks may take longer than the stall limit
        if turn == rank.world.local_rank:
            value = measure()
    group.barrier()
    return group.all_gather_objects(value)  # type: ignore[return-value, arg-type]  # each rank had its turn


def _products(rank: Rank, precision: str) -> tuple[Row, list[Row]]:
    """Measure one precision, all ranks at once for each size, then each rank alone at the best size."""
    device, config = rank.world.device, rank.config

    def peaks(sizes: list[int]) -> list[MatmulPeak]:
        return matmul_peaks(device, precision, sizes=sizes, seconds=config.seconds, slowdown=config.planted_slowdown)

    together = _together(lambda: peaks(config.matmul_sizes))
    product: Row = {"precision": precision, "ranks": rank.world.size}
    if lacking := next((peak.reason for found in together for peak in found if peak.reason), ""):
        return product | {"status": "skipped", "reason": lacking}, []
    by_size = [{peak.size: peak for peak in found} for found in together]
    # A slow rank may have left out a size: only those that every rank has can be summed.
    sizes = sorted(set.intersection(*map(set, by_size)))
    sums = {size: _rounds([found[size].samples for found in by_size]) for size in sizes}
    best = max(sizes, key=lambda size: statistics.median(sums[size]))
    alone = _alone(rank, lambda: peaks([best])[0])
    rows = [
        {"precision": precision, "n": size, "rank": place, "together_flops": list(found[size].samples)}
        | (
            {"alone_flops": list(alone[place].samples)}
            if size == best
            else {"why": {"alone_flops": "not the best size"}}
        )
        for size in sizes
        for place, found in enumerate(by_size)
    ]
    peak, peak_n = peak_together(together)
    top, source = highest(rank.run_dir, precision, rank.world.size)
    return product | {
        "n": best,
        "flops": sums[best],
        "alone_flops": [rate for one in alone for rate in one.samples],
        "best_flops": max(one.best or 0.0 for one in [*alone, *(one for found in together for one in found)]),
        "peak_flops": peak,
        "peak_n": peak_n,
        "highest_flops": max(peak, top) if top else None,
        "highest_of": source if top and top > peak else "",
        "why": {} if top else {"highest_flops": "no earlier run of this machine"},
    }, rows


def _copies(rank: Rank, kind: str) -> list[float]:
    size, config = rank.config.copy_mib * MIB, rank.config
    rates = _together(lambda: copy_rates(kind, rank.world.device, size, config.seconds, config.planted_slowdown))
    return _rounds(rates)


def _rounds(by_rank: list[Any]) -> list[float]:
    """Add the ranks' samples round by round; rounds that not every rank had are left out."""
    return [sum(values) for values in zip(*by_rank, strict=False)]


def _exchange(rank: Rank, size: int) -> Row:
    group.barrier()
    pace = Pace(rank.config.seconds, rank.config.planted_slowdown, warmup=3)
    exchange = time_all_reduce([size], rank.world.device, pace)
    row: Row = {"bytes": size, "wrong_elements": exchange.wrong}
    if rank.world.size == 1:
        return row | {"status": "skipped", "reason": "one rank has nobody to exchange with; set nproc to 2 or more"}
    return row | {"times_us": [1e6 * value for value in exchange.seconds]}


def _disk(rank: Rank) -> Row:
    """Measure how fast rank 0 writes to the run folder, synced: what checkpoints and samples wait for."""
    size, first = min(rank.config.copy_mib, 64) * MIB, rank.world.main
    rates = group.all_gather_objects(_write_rates(rank.run_dir, size) if first else [])[0]
    if rates:
        return {"bytes": size, "gbytes_per_s": rates}
    return {"bytes": size, "status": "skipped", "reason": f"no space for {size // MIB} MiB at {rank.run_dir}"}


def _write_rates(folder: Path, size: int) -> list[float]:
    """Return the rates in GB/s; none where a disk without space for it may still hold the result."""
    if shutil.disk_usage(folder).free < size + SPARE:
        return []
    data = os.urandom(size)  # a file system that compresses would not write zeros
    path, rates = folder / "disk.tmp", list[float]()
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
        return []  # a quota, or another process took the space
    finally:
        path.unlink(missing_ok=True)
    return rates
