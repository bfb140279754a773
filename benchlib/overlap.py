"""How much of an asynchronous collective is hidden behind a computation.

Each round times the collective alone, the computation alone and both together, and the medians over the rounds are
compared: hidden = (alone + compute - together) / min(alone, compute), 1 where the shorter one costs nothing, 0 where
they run one after the other, below 0 where they get in each other's way. It is told as measured, not cut off. On a CPU
the collective computes too (copies, sums), so that as many free cores as its threads need are the condition for a high
share.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchlib import devices

ROUNDS = 7
WARMUP = 2
SIDE = 256  # of the matrices: their products stay in a core's cache, so they compete for cores, not for memory
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Overlap:
    """Medians over the rounds; a time is that of the slowest rank. The same on every rank."""

    alone_s: float
    compute_s: float
    together_s: float

    @property
    def hidden_share(self) -> float:
        """The part of the shorter one that costs no time."""
        return (self.alone_s + self.compute_s - self.together_s) / min(self.alone_s, self.compute_s)


def overlapped(
    start: Callable[[], dist.Work],
    compute: Callable[[], object] | None = None,
    device: torch.device = CPU,
    group: dist.ProcessGroup | None = None,
    rounds: int = ROUNDS,
    prepare: Callable[[], object] = lambda: None,
    verify: Callable[[], object] = lambda: None,
) -> Overlap:
    """Measure what ``start`` begins, ``compute``, and both. Collective: all ranks of ``group`` call it.

    ``start`` begins a collective on ``group`` and returns its work; without ``compute`` matrix products that take as
    long as the collective are used. Around every run of the collective, alone or beside the computation, ``prepare`` is
    called before it and ``verify`` after it, neither of which is timed.
    """

    def alone() -> None:
        start().wait()

    if compute is None:
        runs = [_exchange(alone, device, group, prepare, verify) for _ in range(WARMUP + rounds)]
        compute = products(statistics.median(runs[WARMUP:]), device, group)

    def together() -> None:
        work = start()
        compute()
        work.wait()

    phases: list[tuple[Callable[[], object], list[float]]] = [(alone, []), (compute, []), (together, [])]
    for count in range(WARMUP + rounds):
        for phase, times in phases:
            if phase is compute:
                taken = _time(phase, device, group)
            else:
                taken = _exchange(phase, device, group, prepare, verify)
            if count >= WARMUP:
                times.append(taken)
    return Overlap(*(statistics.median(times) for _, times in phases))


def _exchange(
    phase: Callable[[], object],
    device: torch.device,
    group: dist.ProcessGroup | None,
    prepare: Callable[[], object],
    verify: Callable[[], object],
) -> float:
    prepare()
    taken = _time(phase, device, group)
    verify()
    return taken


def products(seconds: float, device: torch.device = CPU, group: dist.ProcessGroup | None = None) -> Callable[[], None]:
    """Return a computation of about ``seconds`` on the slowest rank, the same on all of them: products of matrices.

    Collective: all ranks of ``group`` call it.
    """
    matrix = torch.full((SIDE, SIDE), 1.0 / SIDE, device=device)
    product = torch.empty_like(matrix)

    def multiply(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix, out=product)

    some = 20
    one_s = _median(lambda: multiply(some), device, group, ROUNDS) / some
    count = max(1, math.ceil(seconds / one_s))
    return lambda: multiply(count)


def _median(phase: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None, rounds: int) -> float:
    return statistics.median([_time(phase, device, group) for _ in range(WARMUP + rounds)][WARMUP:])


def _time(phase: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Return the seconds that a phase takes on the slowest rank."""
    devices.synchronize(device)
    dist.barrier(group)
    began = time.perf_counter()
    phase()
    devices.synchronize(device)
    taken = torch.tensor([time.perf_counter() - began], dtype=torch.float32, device=device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=group)
    return float(taken)
