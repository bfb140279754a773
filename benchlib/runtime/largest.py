"""The largest batch that fits: doubling, then bisection, each trial in a process that may run out of memory."""

import json
import os
import re
import resource
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchlib.config.schema import load_config
from benchlib.runtime import devices
from benchlib.runtime.group import World, all_gather_objects
from benchlib.runtime.measurement import Rank

FIRST = 8  # batch to double from; where it does not fit, the bisection goes below
SEARCH_SHARE = 0.4  # of the budget, at most
STEPS = 2  # of a trial: the second one has the optimizer's state in memory
TRIAL_S = 45.0  # more means that it swaps
Trial = dict[str, Any]  # batch, fits, peak_gb, samples_per_s, reason


class OutOfTime(Exception):
    """The search has used up its share of the budget."""


@dataclass(frozen=True)
class Found:
    """``batch`` is the largest that fits (0: none did), ``below`` the smallest known not to, or one above ``most``."""

    batch: int
    below: int
    tried: list[Trial]
    complete: bool


def search(trial: Callable[[int], Trial], most: int) -> Found:
    """Find the largest batch that fits, to a sixteenth; as far as it got where ``trial`` raises ``OutOfTime``."""
    tried: list[Trial] = []

    def fits(batch: int) -> bool:
        tried.append(trial(batch))
        return bool(tried[-1]["fits"])

    low, high, complete = 0, min(FIRST, most), True
    try:
        while high <= most and fits(high):
            low, high = high, 2 * high
        high = min(high, most + 1)
        while high - low > max(1, low // 16):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
    except OutOfTime:
        complete = False
    below = min([row["batch"] for row in tried if not row["fits"]], default=most + 1)
    return Found(low, below, sorted(tried, key=lambda row: row["batch"]), complete)


def largest_batch(rank: Rank, module: str, limit_bytes: float, most: int) -> Found:
    """Search the largest batch of one device by trials of ``module``, see :func:`run_trial`. All ranks call it."""
    end, main = time.monotonic() + SEARCH_SHARE * rank.config.budget_s, rank.world.main

    def trial(batch: int) -> Trial:
        kind = "progress" if main else "heartbeat"
        rank.events.emit(kind, phase="batch", done=batch, total=0, unit="samples", step=batch)
        threads, limit = torch.get_num_threads(), int(limit_bytes)
        row = in_a_process(module, rank.run_dir, batch, limit, threads, end) if main else None
        if (row := all_gather_objects(row)[0]) is None:
            raise OutOfTime
        return row

    return search(trial, most)


def free_bytes(here: World) -> float:
    """Return the bytes that a rank may use: of a CPU its share of what is available."""
    if here.device.type == "cuda":
        return float(torch.cuda.mem_get_info(here.device)[0])
    return psutil.virtual_memory().available / here.local_size  # an accelerator without such a count shares the host's


def in_a_process(module: str, run_dir: Path, batch: int, limit_bytes: int, threads: int, end: float) -> Trial | None:
    """Return the row of a trial by ``python -m module RUN_DIR BATCH BYTES THREADS``.

    None where it would not end before ``end`` (``time.monotonic``).
    """
    left = end - time.monotonic()
    if left <= 0:
        return None
    words = [sys.executable, "-m", module, str(run_dir), str(batch), str(limit_bytes), str(threads)]
    row: Trial = {"batch": batch, "fits": False, "peak_gb": None, "samples_per_s": None, "reason": ""}
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=min(TRIAL_S, left), check=False)
    except subprocess.TimeoutExpired:
        if left < TRIAL_S:
            return None
        return row | {"reason": f"took more than {TRIAL_S:.0f} s"}
    last = done.stdout.strip().splitlines()
    if done.returncode or not last:
        errors = done.stderr.strip().splitlines()
        why = f"ended by signal {-done.returncode}" if done.returncode < 0 else (errors or ["no output"])[-1]
        return row | {"reason": textwrap.shorten(why, 200, placeholder=" …")}
    return row | dict(json.loads(last[-1]))


def limited(device: torch.device, limit_bytes: int) -> None:
    """Let this process hold at most so much: more is an error in it, and nobody else's."""
    if device.type == "cuda":
        whole = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / whole), device)
    elif device.type == "cpu":
        # What the libraries mapped already is no part of the work, but of the process: it counts.
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


def tried(device: torch.device, batch: int, limit_bytes: int, prepare: Callable[[], Callable[[], object]]) -> Trial:
    """Take ``STEPS`` steps of what ``prepare`` returns; whether they fit into ``limit_bytes``, and why not."""
    limited(device, limit_bytes)
    try:
        step = prepare()
        for _ in range(STEPS):
            devices.synchronize(device)
            began = time.perf_counter()
            step()
            devices.synchronize(device)
        rate = batch / (time.perf_counter() - began)
    except (
        RuntimeError,
        MemoryError,
    ) as error:  # torch.OutOfMemoryError is a RuntimeError; a CPU's allocator raises that one
        text = " ".join(str(error).split())
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "memory" in text:
            return {"fits": False, "reason": f"out of memory: {_request(text)}"}
        raise
    peak, _ = devices.peak_memory_bytes(device)
    row = {"fits": True, "peak_gb": (peak or devices.peak_resident_bytes()) / 1e9, "samples_per_s": rate}
    if (
        device.type == "cpu" and 1e9 * row["peak_gb"] > limit_bytes
    ):  # what the system lets it map is not all that it holds
        reason = f"its peak of {row['peak_gb']:.3g} GB is above the limit of {limit_bytes / 1e9:.3g} GB"
        return row | {"fits": False, "reason": reason}
    return row


def _request(text: str) -> str:
    """Return what an allocator says of the request that failed: the sentence with the amount, else the beginning."""
    match = re.search(r"(?i)tried to allocate [\d.]+ ?\w+", text)
    return match.group() if match else textwrap.shorten(text, 160, placeholder=" …")


def run_trial(one_trial: Callable[[Any, int, int], Trial]) -> None:
    """The program of a trial: read the run's config, try the batch that the arguments name, print the row."""
    run_dir, batch, limit_bytes, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    print(json.dumps(one_trial(load_config(run_dir), int(batch), int(limit_bytes))), flush=True)
    os._exit(0)  # the limit would also hold while the interpreter takes itself down
