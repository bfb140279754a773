"""The largest batch of one device: trials in processes of their own, since one that is too large may take the process with it.

python -m benchlib.benchmarks.parallel.largest_batch RUN_DIR BATCH BYTES THREADS    # one trial, one line of JSON
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.proofs import tokens
from benchlib.benchmarks.parallel.strategies import Job, alone
from benchlib.core.events import EventWriter
from benchlib.runtime import devices
from benchlib.runtime.group import World, all_gather_objects
from benchlib.runtime.largest import Found, OutOfTime, Trial, free_bytes, in_a_process, run_trial, search, tried

MOST = 65536
SEARCH_SHARE = 0.4  # of the budget, at most


def largest_batch(config: ParallelConfig, here: World, run_dir: Path, events: EventWriter) -> Found:
    """Search the largest batch of the first model on one device. All ranks call it; rank 0 tries and tells the others."""
    limit = int(all_gather_objects(1e9 * config.memory_gb or free_bytes(here))[0])
    end = time.monotonic() + SEARCH_SHARE * config.budget_s

    def trial(batch: int) -> Trial:
        events.emit(
            "progress" if here.main else "heartbeat", phase="batch", done=batch, total=0, unit="samples", step=batch
        )
        row = in_a_process(__name__, run_dir, batch, limit, torch.get_num_threads(), end) if here.main else None
        if (row := all_gather_objects(row)[0]) is None:
            raise OutOfTime
        return row

    return search(trial, MOST)


def one_trial(config: ParallelConfig, batch: int, limit_bytes: int) -> Trial:
    """Train some steps of the first model on ``batch`` samples within ``limit_bytes``."""
    device, shape = devices.device(config.backend), config.shapes[0]
    length = config.length(shape)

    def prepare() -> Callable[[], None]:
        way = alone(Job.of(config, shape, batch, device))
        inputs, targets = (each.to(device) for each in tokens(shape, length, batch, config.seed, 0))

        def step() -> None:
            way.step(inputs, targets, lambda phase: None)
            way.optimizer.step()
            way.optimizer.zero_grad(set_to_none=True)

        return step

    return tried(device, batch, limit_bytes, prepare)


if __name__ == "__main__":
    run_trial(one_trial)
