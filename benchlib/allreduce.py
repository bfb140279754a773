"""The time of an all-reduce over the process group, with every result verified.

The data are small whole numbers that differ by rank and by element, so that their sum is exact in any order and a
swapped, lost or doubled contribution shows. An operation takes as long as its slowest rank.
"""

import math
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchlib import devices
from benchlib.bandwidth import algbw_gbps, busbw_gbps
from benchlib.planted import hold

WARMUP = 3
MIN_ROUNDS = 5
MAX_ROUNDS = 200
MAX_WALL = 3  # times the seconds asked for, with the verification


@dataclass(frozen=True)
class Timing:
    """All-reduces of ``size_bytes`` (per rank) over ``ranks``; the same on every rank."""

    size_bytes: int
    ranks: int
    seconds: tuple[float, ...]  # of each operation, the maximum over ranks
    wrong: int  # elements over all ranks and operations

    @property
    def algbw_gbps(self) -> list[float]:
        """Algorithm bandwidth of each operation in Gbps."""
        return [algbw_gbps(self.size_bytes, value) for value in self.seconds]

    @property
    def busbw_gbps(self) -> list[float]:
        """Bus bandwidth of each operation in Gbps."""
        return [busbw_gbps("all_reduce", self.size_bytes, value, self.ranks) for value in self.seconds]


def contribution(elements: int, rank: int, device: torch.device) -> torch.Tensor:
    """Return the data of one rank: whole numbers from 0 to 60, fp32 (elements,)."""
    index = torch.arange(elements, device=device, dtype=torch.int64)
    return ((index * 7 + rank * 13 + index // 61) % 61).to(torch.float32)


def time_all_reduce(size_bytes: int, device: torch.device, seconds: float, slowdown: float = 0.0) -> Timing:
    """Time fp32 sums of ``size_bytes`` (at least one element) in place on the default process group.

    Collective: every rank calls it with the same arguments, and every rank gets the same answer. Takes about
    ``seconds`` of exchange, 5 to 200 operations, after 3 that are not counted; with the verification three times that.
    ``slowdown`` makes each operation longer by this share of its time.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    elements = max(1, size_bytes // 4)
    own = contribution(elements, rank, device)
    expected = torch.zeros(elements, device=device)
    for other in range(ranks):
        expected += contribution(elements, other, device)
    data, wrong = torch.empty_like(own), 0

    def once() -> float:
        nonlocal wrong
        data.copy_(own)
        devices.synchronize(device)
        dist.barrier()  # else a rank that comes late adds its delay to the time of the others
        began = time.perf_counter()
        dist.all_reduce(data)
        devices.synchronize(device)
        hold(slowdown * (time.perf_counter() - began))
        taken = time.perf_counter() - began
        if not torch.equal(data, expected):
            wrong += int((data != expected).sum())
        return taken

    began = time.perf_counter()
    warm = [once() for _ in range(WARMUP)]
    taken, whole = _slowest([statistics.median(warm), (time.perf_counter() - began) / WARMUP], device)
    wanted = min(seconds / max(taken, 1e-6), MAX_WALL * seconds / whole)
    rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, math.ceil(wanted)))
    times = _slowest([once() for _ in range(rounds)], device)
    total = torch.tensor([wrong], device=device, dtype=torch.int64)
    dist.all_reduce(total)
    return Timing(4 * elements, ranks, tuple(times), int(total))


def _slowest(values: list[float], device: torch.device) -> list[float]:
    """Return the maximum over ranks of each value. Ranks agree on it, and so on the number of rounds."""
    tensor = torch.tensor(values, device=device, dtype=torch.float32)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()  # type: ignore[no-any-return]
