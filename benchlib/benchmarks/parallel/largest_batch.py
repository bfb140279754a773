"""The largest batch of one device: trials in processes of their own, since one that is too large may take the process with it.

python -m benchlib.benchmarks.parallel.largest_batch RUN_DIR BATCH BYTES THREADS    # one trial, one line of JSON
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.proofs import tokens
from benchlib.benchmarks.parallel.strategies import alone
from benchlib.runtime import devices
from benchlib.runtime.group import all_gather_objects
from benchlib.runtime.largest import OutOfTime, Trial, in_a_process, run_trial, search, tried
from benchlib.runtime.measurement import Rank

MOST = 65536
SEARCH_SHARE = 0.4  # of the budget, at most


def largest_batch(rank: Rank, limit_bytes: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Search the largest batch on one device. All ranks call it; rank 0 tries and tells the others.

    Return the trials as rows, and what was found for the row of the run.
    """
    end, main = time.monotonic() + SEARCH_SHARE * rank.config.budget_s, rank.world.main

    def trial(batch: int) -> Trial:
        kind = "progress" if main else "heartbeat"
        rank.events.emit(kind, phase="batch", done=batch, total=0, unit="samples", step=batch)
        threads, limit = torch.get_num_threads(), int(limit_bytes)
        row = in_a_process(__name__, rank.run_dir, batch, limit, threads, end) if main else None
        if (row := all_gather_objects(row)[0]) is None:
            raise OutOfTime
        return row

    found = search(trial, MOST)
    rows = []
    for row in found.tried:
        reason = row.pop("reason", "")
        rows.append(row | {"why": dict.fromkeys(("peak_gb", "samples_per_s"), reason) if reason else {}})
    names = {"largest_batch": found.batch, "too_large_batch": found.below, "search_complete": found.complete}
    return rows, names


def one_trial(config: ParallelConfig, batch: int, limit_bytes: int) -> Trial:
    """Train some steps on ``batch`` samples within ``limit_bytes``."""
    device, job = devices.device(config.backend), config.job(batch=batch)

    def prepare() -> Callable[[], None]:
        way = alone(job, device)
        inputs, targets = (each.to(device) for each in tokens(job, 0))

        def step() -> None:
            way.step(inputs, targets, lambda phase: None)
            way.update()

        return step

    return tried(device, batch, limit_bytes, prepare)


if __name__ == "__main__":
    run_trial(one_trial)
