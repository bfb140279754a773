"""What the devices, the memory, the network and the disk of a run reach.

Each rank measures alone (the others wait) and then all at once: what they lose against each other is what shared
caches, memory and power cost. Rates of several ranks are summed round by round.
"""

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchlib.benchmarks.machine.spec import COPIES
from benchlib.runtime import group
from benchlib.runtime.measurement import Rank, Tables
from benchlib.runtime.peaks import (
    MIB,
    MatmulPeak,
    copy_rates,
    copy_size,
    default_sizes,
    matmul_peaks,
    peak_together,
    too_small,
)
from benchlib.runtime.peaks import best as best_of
from benchlib.workloads.collective_timing import Pace, time_all_reduce
from benchlib.workloads.stored_peaks import highest

Row = dict[str, Any]


def measure(rank: Rank) -> Tables:
    """Measure everything that the config names, one after the other."""
    config = rank.config
    plan: list[Callable[[], Tables]] = [
        *(functools.partial(_products, rank, precision) for precision in config.precisions),
        *(functools.partial(_copies, rank, kind) for kind in COPIES),
        *(functools.partial(_exchange, rank, size) for size in config.allreduce_sizes),
        functools.partial(_disk, rank),
    ]
    tables: Tables = {}
    for done, step in enumerate(plan, 1):
        for name, rows in step().items():
            tables.setdefault(name, []).extend(rows)
        rank.progress(done, len(plan))
    return tables


def _products(rank: Rank, precision: str) -> Tables:
    """Measure matrix products, all ranks at once at each size, then each rank alone at the best size."""
    config, world = rank.config, rank.world
    how = {"seconds": config.seconds, "slowdown": config.planted_slowdown}
    peaks = functools.partial(matmul_peaks, world.device, precision, **how)
    group.barrier()
    planned = config.matmul_sizes or default_sizes(world.device)
    together = group.all_gather_objects(peaks(sizes=planned))
    product: Row = {"precision": precision, "ranks": world.size}
    every = [peak for by_size in together for peak in by_size]
    if lacking := next((peak.reason for peak in every if peak.reason), ""):
        return {"products": [product | {"status": "skipped", "reason": lacking}]}
    samples = [{peak.size: peak.samples for peak in by_size} for by_size in together]
    # A slow rank may have left out a size: only those that every rank has can be summed.
    sums = {size: _rounds([of_rank[size] for of_rank in samples]) for size in set.intersection(*map(set, samples))}
    best = max(sums, key=lambda size: statistics.median(sums[size]))
    own = list[MatmulPeak]()
    for turn in range(config.nproc):  # the ranks of a node one after the other; nodes do not disturb each other
        group.barrier()
        rank.events.emit("heartbeat")  # a node of many ranks may take longer than the stall limit
        own += peaks(sizes=[best]) if turn == world.local_rank else []
    group.barrier()
    alone = [peak for of_rank in group.all_gather_objects(own) for peak in of_rank]
    rows: list[Row] = [
        {"precision": precision, "n": best, "rank": number, "together_flops": list(of_rank[best])}
        | {"alone_flops": list(alone[number].samples)}
        for number, of_rank in enumerate(samples)
    ]
    peak, peak_n = peak_together(together)
    earlier, where = highest(rank.run_dir, precision, world.size)
    product |= {"sizes": sorted(sums), "n": best, "flops": sums[best], "peak_flops": peak, "peak_n": peak_n}
    product["alone_flops"] = [rate for of_rank in alone for rate in of_rank.samples]
    product["best_flops"] = best_of([*alone, *every])
    product |= {"highest_flops": earlier and max(peak, earlier), "highest_of": where if (earlier or 0) > peak else ""}
    product["why"] = {} if earlier else {"highest_flops": "no earlier run of this machine"}
    if small := too_small(world.device, max(sums)):
        product |= {"peak_flops": None}
        product["why"] |= {"peak_flops": small}
    return {"products": [product], "matmul": rows}


def _rounds(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Add the ranks' samples round by round; rounds that not every rank had are left out."""
    return [sum(values) for values in zip(*by_rank, strict=False)]


def _copies(rank: Rank, kind: str) -> Tables:
    config, device = rank.config, rank.world.device
    if kind != "host" and device.type == "cpu":
        reason = "the device is the host: there is no other memory"
        return {"copies": [{"kind": kind, "status": "skipped", "reason": reason}]}
    group.barrier()
    size = copy_size(kind, rank.world, config.copy_mib * MIB)
    rates = _rounds(
        group.all_gather_objects(copy_rates(kind, device, size.bytes, config.seconds, config.planted_slowdown))
    )
    row = {"kind": kind, "mib": size.bytes // MIB, "cache_bytes": size.cache or None, "any_gbytes_per_s": rates}
    row |= {"gbytes_per_s": None if size.lacking else rates}
    why = {"gbytes_per_s": size.lacking, "cache_bytes": "" if size.cache else "the driver does not state it"}
    return {"copies": [row | {"why": {name: reason for name, reason in why.items() if reason}}]}


def _exchange(rank: Rank, size: int) -> Tables:
    group.barrier()
    pace = Pace(rank.config.seconds, rank.config.planted_slowdown, warmup=3)
    exchange = time_all_reduce([size], rank.world.device, pace)
    alone = {"status": "skipped", "reason": "one rank has nobody to exchange with; set nproc=2 or more"}
    row = {"bytes": size, "wrong_elements": exchange.wrong}
    return {"allreduce": [row | (alone if rank.world.size == 1 else {"times_us": exchange.times_us})]}


def _disk(rank: Rank) -> Tables:
    """Measure how fast rank 0 writes to the run folder, synced: what checkpoints and samples wait for."""
    size, rates = 64 * MIB, list[float]()
    data = os.urandom(size)  # zeros would be compressed
    for _ in range(3 * rank.world.main):
        began = time.perf_counter()
        with tempfile.TemporaryFile(dir=rank.run_dir) as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle)
            rates.append(1e-9 * size / (time.perf_counter() - began))
    return {"disk": [{"bytes": size, "gbytes_per_s": group.all_gather_objects(rates)[0]}]}
