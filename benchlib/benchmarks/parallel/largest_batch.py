"""The largest batch of one device: trials in processes of their own, which one that is too large may end.

python -m benchlib.benchmarks.parallel.largest_batch RUN_DIR BATCH BYTES THREADS    # one trial, one line of JSON
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.proofs import tokens
from benchlib.benchmarks.parallel.strategies import Way
from benchlib.runtime import devices
from benchlib.runtime.group import all_gather_objects
from benchlib.runtime.largest import OutOfTime, Trial, in_a_process, run_trial, search, tried
from benchlib.runtime.measurement import Rank

MAX_BATCH = 65536
SEARCH_SHARE = 0.4  # of the budget, at most


def largest_batch(rank: Rank, limit_bytes: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Search the largest batch on one device; return trials as rows, and facts. All ranks call it, rank 0 tries."""
    rank.events.emit("phase", name="batch")
    end, main = time.monotonic() + SEARCH_SHARE * rank.config.budget_s, rank.world.main

    def trial(batch: int) -> Trial:
        kind, threads = "progress" if main else "heartbeat", torch.get_num_threads()
        rank.events.emit(kind, phase="batch", done=batch, total=0, unit="samples", step=batch)
        row = in_a_process(__name__, rank.run_dir, batch, int(limit_bytes), threads, end) if main else None
        if (row := all_gather_objects(row)[0]) is None:
            raise OutOfTime
        return row

    largest = search(trial, MAX_BATCH)
    rows = [row | {"why": dict.fromkeys(("peak_gb", "samples_per_s"), row["reason"])} for row in largest.tried]
    return rows, {"largest_batch": largest.batch, "too_large_batch": largest.below, "search_complete": largest.complete}


def one_trial(config: ParallelConfig, batch: int, limit_bytes: int) -> Trial:
    """Train some steps on ``batch`` samples within ``limit_bytes``."""
    device, job = devices.device(config.backend), config.job(batch=batch)

    def prepare() -> Callable[[], None]:
        way, inputs = Way(job, device), tokens(job, 0, device)

        def step() -> None:
            way.step(*inputs)
            way.update()

        return step

    return tried(device, batch, limit_bytes, prepare)


if __name__ == "__main__":
    run_trial(one_trial)
