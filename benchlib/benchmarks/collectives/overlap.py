"""How much of an asynchronous collective is hidden behind a computation.

Each round times the collective alone, the computation alone and both together; ``hidden_share`` compares the medians. On a
CPU the collective computes too (copies, sums), so that a high share needs as many free cores as its threads. On an
accelerator the computation occupies every multiprocessor: it is what a collective hides beside a busy device.
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchlib.runtime import devices
from benchlib.workloads.collective_timing import Exercise, slowest

ROUNDS, WARMUP = 7, 2
SIDE = 256  # of the matrices: their products stay in a core's cache, so they compete for cores, not for memory
BATCH = 128  # products at once on an accelerator: 512 tiles of 128 x 128, more than any has multiprocessors
SOME = 20  # products that are timed to see how long one takes
SLOWER, DISTURBED = "together they take longer than one after the other", "the time alone was disturbed"


def overlapped(exchange: Exercise, device: torch.device) -> tuple[dict[str, Any], list[tuple[float, int, int]]]:
    """Measure a collective, products of matrices that take as long, and both. All ranks call it.

    Returns the times of each round, of the slowest rank, with ``hidden_share`` or why they give none. Then the seconds,
    wrong and checked elements of every run of the collective.
    """
    compared = list[tuple[float, int, int]]()

    def run(beside: Callable[[], object]) -> float:
        def phase() -> None:
            work = exchange.start()
            beside()
            work.wait()

        exchange.restore()
        seconds = _time(phase, device)
        compared.append((seconds, *exchange.check()))
        return seconds

    alone = [run(lambda: None) for _ in range(WARMUP + ROUNDS)]
    compute = products(statistics.median(alone[WARMUP:]), device)
    turns = [(run(lambda: None), _time(compute, device), run(compute)) for _ in range(WARMUP + ROUNDS)]
    times = dict(zip(("alone_us", "compute_us", "together_us"), zip(*turns[WARMUP:], strict=True), strict=True))
    alone_s, compute_s, together_s = map(statistics.median, times.values())
    share = (alone_s + compute_s - together_s) / min(alone_s, compute_s)  # of the shorter one, hidden behind the other
    why = SLOWER if share < 0 else DISTURBED if share > 1 else ""
    row: dict[str, Any] = {name: [1e6 * value for value in values] for name, values in times.items()}
    return row | ({"why": {"hidden_share": why}} if why else {"hidden_share": share}), compared


def products(seconds: float, device: torch.device) -> Callable[[], None]:
    """Return products of matrices of about ``seconds`` on the slowest rank, the same on all of them. A collective."""
    matrix = torch.full((1 if device.type == "cpu" else BATCH, SIDE, SIDE), 1.0 / SIDE, device=device)
    product = torch.empty_like(matrix)

    def multiply(count: int) -> None:
        for _ in range(count):
            torch.bmm(matrix, matrix, out=product)

    runs = [_time(lambda: multiply(SOME), device) for _ in range(WARMUP + ROUNDS)]
    count = max(1, math.ceil(seconds / (statistics.median(runs[WARMUP:]) / SOME)))
    return lambda: multiply(count)


def _time(phase: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that a phase takes on the slowest rank."""
    devices.synchronize(device)
    dist.barrier()
    began = time.perf_counter()
    phase()
    devices.synchronize(device)
    return slowest([time.perf_counter() - began], device)[0]
