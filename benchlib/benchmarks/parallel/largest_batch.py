"""The largest batch of one device: trials in processes of their own, which one that is too large may end."""

from collections.abc import Callable
from typing import Any

from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.proofs import tokens
from benchlib.benchmarks.parallel.strategies import Way
from benchlib.runtime import devices, largest
from benchlib.runtime.measurement import Rank

MAX_BATCH = 65536


def largest_batch(rank: Rank, limit_bytes: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Search the largest batch on one device; return trials as rows, and facts. All ranks call it, rank 0 tries."""
    rank.events.emit("phase", name="batch")
    search = largest.largest_batch(rank, one_trial, limit_bytes, MAX_BATCH)
    rows = [row | {"why": dict.fromkeys(("peak_gb", "samples_per_s"), row["reason"])} for row in search.tried]
    return rows, {"largest_batch": search.batch, "too_large_batch": search.below, "search_complete": search.complete}


def one_trial(config: ParallelConfig, batch: int, limit_bytes: int) -> largest.Trial:
    """Train some steps on ``batch`` samples within ``limit_bytes``."""
    device, job = devices.device(config.backend), config.job(batch=batch)

    def prepare() -> Callable[[], None]:
        way, inputs = Way(job, device), tokens(job, 0, device)

        def step() -> None:
            way.step(*inputs)
            way.update()

        return step

    return largest.tried(device, batch, limit_bytes, prepare)
