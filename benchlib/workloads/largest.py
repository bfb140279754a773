"""The largest batch that fits: doubling, then bisection, each trial in a process that may run out of memory."""

import re
import resource
import textwrap
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from benchlib.core.errors import BackendUnavailable, RunBroken
from benchlib.runtime import child, devices
from benchlib.runtime.group import World, all_gather_objects
from benchlib.runtime.measurement import Rank

FIRST = 8  # batch to double from; where it does not fit, the bisection goes below
SEARCH_SHARE = 0.4  # of the budget, at most
# How allocators and libraries say that memory is short. An illegal memory access is another thing, and no size mends it.
SHORT = re.compile(
    r"out.of.(\w+.)?memory|allocat\w+ memory|not enough memory|bad_?.?alloc|_ALLOC_FAILED|can't start new thread",
    re.IGNORECASE,
)
STEPS = 2  # of a trial: the second one has the optimizer's state in memory
TRIAL_S = 45.0  # more means that it swaps
Trial = dict[str, Any]  # batch, fits, peak_gb, samples_per_s, reason
OneTrial = Callable[[Any, int, int], Trial]  # a module's, of a config, a batch and the bytes that may be used


class OutOfTime(Exception):
    """The search has used up its share of the budget."""


@dataclass(frozen=True)
class LargestBatch:
    """``batch`` is the largest that fits (0: none did), ``below`` the smallest known not to, or one above ``most``."""

    batch: int
    below: int
    tried: list[Trial]
    complete: bool


def search(trial: Callable[[int], Trial], most: int) -> LargestBatch:
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
    return LargestBatch(low, below, sorted(tried, key=lambda row: row["batch"]), complete)


def largest_batch(rank: Rank, one_trial: OneTrial, limit_bytes: float, most: int) -> LargestBatch:
    """Search the largest batch of one device: rank 0 tries ``one_trial(config, batch, limit_bytes)``. All ranks call it."""
    end, main = time.monotonic() + SEARCH_SHARE * rank.config.budget_s, rank.world.main

    def trial(batch: int) -> Trial:
        kind = "progress" if main else "heartbeat"
        rank.events.emit(kind, phase="batch", done=batch, total=0, unit="samples", step=batch)
        row = in_a_process(one_trial, rank.config, batch, int(limit_bytes), end) if main else None
        if (row := all_gather_objects(row)[0]) is None:
            raise OutOfTime
        return row

    return search(trial, most)


def free_bytes(here: World) -> float:
    """Return the bytes that a rank may use: of a CPU its share of what is available, of a device what this process caches, too."""
    if devices.has_events(here.device):
        module = torch.get_device_module(here.device)
        module.empty_cache()
        return float(module.mem_get_info(here.device)[0])
    return psutil.virtual_memory().available / here.local_size  # an accelerator without such a count shares the host's


def in_a_process(one_trial: OneTrial, config: Any, batch: int, limit_bytes: int, end: float) -> Trial | None:
    """Return the row of a trial in a process of its own; None where it would not end before ``end`` (``time.monotonic``).

    A process that is killed did not fit. Raises ``RunBroken`` for an error that no smaller batch mends.
    """
    left = end - time.monotonic()
    if left <= 0:
        return None
    row: Trial = {"batch": batch, "fits": False, "peak_gb": None, "samples_per_s": None, "reason": ""}
    work = (one_trial, config, batch, limit_bytes, torch.get_num_threads())
    ended = child.run(_on_threads, *work, timeout_s=min(TRIAL_S, left), tell=lambda _: None)
    if ended.status == "timeout" and left < TRIAL_S:
        return None
    if ended.value and "error" in ended.value:
        raise RunBroken(f"a trial with a batch of {batch} failed, and not for want of memory: {ended.value['error']}")
    return row | (ended.value or {"reason": textwrap.shorten(ended.reason, 200, placeholder=" …")})


def _on_threads(one_trial: OneTrial, config: Any, batch: int, limit_bytes: int, threads: int, tell: Any) -> Trial:
    torch.set_num_threads(threads)
    try:
        return one_trial(config, batch, limit_bytes)
    except (BackendUnavailable, OSError):
        raise
    except Exception as error:
        traceback.print_exc()
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]}


def limited(device: torch.device, limit_bytes: int) -> None:
    """Let this process hold at most so much: more is an error in it, and nobody else's."""
    if devices.has_events(device):
        module = torch.get_device_module(device)
        whole = module.mem_get_info(device)[1]
        module.set_per_process_memory_fraction(min(1.0, limit_bytes / whole), device)
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
    except (RuntimeError, MemoryError) as error:  # the allocator of a CPU raises the first
        text = " ".join(str(error).split())
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or SHORT.search(text):
            return {"fits": False, "reason": f"out of memory: {_request(text)}"}
        raise
    peak, _ = devices.peak_memory_bytes(device)
    row = {"fits": True, "peak_gb": (peak or devices.peak_resident_bytes()) / 1e9, "samples_per_s": rate}
    # What the system lets a process map is not all that it holds.
    if device.type == "cpu" and 1e9 * row["peak_gb"] > limit_bytes:
        reason = f"its peak of {row['peak_gb']:.3g} GB is above the limit of {limit_bytes / 1e9:.3g} GB"
        return row | {"fits": False, "reason": reason}
    return row


def _request(text: str) -> str:
    """Return what an allocator says of the request that failed: the sentence with the amount, else the beginning."""
    match = re.search(r"(?i)tried to allocate [\d.]+ ?\w+", text)
    return match.group() if match else textwrap.shorten(text, 160, placeholder=" …")
