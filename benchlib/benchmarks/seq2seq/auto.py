"""The largest batch that fits: doubling, then bisection, each trial in a process of its own that may run out of memory.

python -m benchlib.benchmarks.seq2seq.auto RUN_DIR BATCH BYTES THREADS    # one trial, one line of JSON
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchlib.benchmarks.seq2seq.config import Seq2seqConfig
from benchlib.core.errors import RunBroken
from benchlib.runtime import devices
from benchlib.runtime.group import World, all_gather_objects
from benchlib.runtime.largest import Found, OutOfTime, Trial, free_bytes, in_a_process, run_trial, search, tried
from benchlib.workloads.encdec import ENGINES
from benchlib.workloads.pairs import Pairs, generate

MOST = 65536
SEARCH_SHARE = 0.4  # of the budget, at most: the rest is for the training


def largest_batch(
    config: Seq2seqConfig, here: World, run_dir: Path, alive: Callable[[int], None]
) -> tuple[Found, float]:
    """Return what was found, and the limit in bytes. All ranks call it; rank 0 tries on its device and tells the others."""
    limit = config.memory_share * (1e9 * config.memory_gb or free_bytes(here))
    limit = all_gather_objects(limit)[0]
    most = min(MOST, -(-config.epoch_samples // here.size))
    end = time.monotonic() + SEARCH_SHARE * config.budget_s

    def trial(batch: int) -> Trial:
        alive(batch)
        row = _in_a_process(run_dir, batch, int(limit), torch.get_num_threads(), end) if here.main else None
        if (row := all_gather_objects(row)[0]) is None:  # that of rank 0
            raise OutOfTime
        return row

    result = search(trial, most)
    if result.batch:
        return result, limit
    if not result.complete:
        raise RunBroken(
            f"batch = auto: no batch was found to fit in {SEARCH_SHARE:.0%} of budget_s = {config.budget_s:g} "
            f"({len(result.tried)} trials ended): set a larger budget_s, or batch_size"
        )
    raise RunBroken(f"batch = auto: not even one sample fits into {limit / 1e9:.3g} GB: {result.tried[0]['reason']}")


def _in_a_process(run_dir: Path, batch: int, limit_bytes: int, threads: int, end: float) -> Trial | None:
    return in_a_process(__name__, run_dir, batch, limit_bytes, threads, end)


def one_trial(config: Seq2seqConfig, batch: int, limit_bytes: int) -> Trial:
    """Train some steps on ``batch`` samples within ``limit_bytes``; the engine that holds more where both will run."""
    device = devices.device(config.backend)
    precision = devices.mixed_precision(device) if config.amp else "fp32"

    def prepare() -> Callable[[], None]:
        name = "tuned" if config.engine == "tuned" else "plain"
        model = ENGINES[name](**config.shape).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
        pairs = Pairs(batch, config.sequence, config.vocabulary, config.seed)
        tokens = torch.from_numpy(generate(pairs, np.arange(batch))).to(device)

        def step() -> None:
            with devices.autocast(precision, device):
                loss = model(tokens[:, 0], tokens[:, 1]) / tokens[:, 1].numel()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return tried(device, batch, limit_bytes, prepare)


if __name__ == "__main__":
    run_trial(one_trial)
