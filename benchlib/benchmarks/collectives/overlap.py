"""How much of an asynchronous collective is hidden behind a computation.

Each round times the collective alone, the computation alone and both together; ``hidden_share`` compares the medians. On a
CPU the collective computes too (copies, sums), so that a high share needs as many free cores as its threads. On an
accelerator the computation occupies every multiprocessor: it is what a collective hides beside a busy device.
"""

import copy
import math
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from benchlib.workloads.collective_timing import Exercise, Pace, interleaved

PACE = Pace(0.0, least=7, most=7)
SIDE = 256  # of the matrices: their products stay in a core's cache, so they compete for cores, not for memory
BATCH = 128  # products at once on an accelerator: 512 tiles of 128 x 128, more than any has multiprocessors
SOME = 20  # products that are timed to see how long one takes
SLOWER, DISTURBED = "together they take longer than one after the other", "the time alone was disturbed"


def overlapped(exchange: Exercise, device: torch.device) -> dict[str, Any]:
    """Measure an asynchronous collective, products of matrices that take as long, and both. All ranks call it.

    Returns the times of each round, with ``hidden_share`` or why they give none, and what was compared in all runs.
    """
    (alone,) = interleaved([exchange], device, PACE)
    compute, both = products(median(alone.seconds), device), copy.copy(exchange)
    both.beside = compute
    every = interleaved([exchange, _only(compute), both], device, PACE)
    row = dict(zip(("alone_us", "compute_us", "together_us"), (series.times_us for series in every), strict=True))
    alone_us, compute_us, together_us = map(median, row.values())
    share = (alone_us + compute_us - together_us) / min(alone_us, compute_us)  # of the shorter, hidden behind the other
    why = SLOWER if share < 0 else DISTURBED if share > 1 else ""
    hidden = {"why": {"hidden_share": why}} if why else {"hidden_share": share}
    return row | alone.counts(*every) | hidden


def products(seconds: float, device: torch.device) -> Callable[[], None]:
    """Return products of matrices of about ``seconds`` on the slowest rank, the same on all of them. A collective."""
    matrix = torch.full((1 if device.type == "cpu" else BATCH, SIDE, SIDE), 1.0 / SIDE, device=device)
    product = torch.empty_like(matrix)

    def multiply(count: int) -> None:
        for _ in range(count):
            torch.bmm(matrix, matrix, out=product)

    (some,) = interleaved([_only(lambda: multiply(SOME))], device, PACE)
    count = max(1, math.ceil(seconds / (median(some.seconds) / SOME)))
    return lambda: multiply(count)


def _only(run: Callable[[], None]) -> Any:
    """Return a computation as ``interleaved`` times it."""
    plain = {"bytes": 0, "is_limit": True, "first_wrong": ""}
    return SimpleNamespace(**plain, restore=lambda: None, run=run, check=lambda: (0, 0))
