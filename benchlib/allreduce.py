"""The time of an all-reduce over the process group, with every result verified: one case of the table of collectives."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchlib.bandwidth import algbw_gbps, busbw_gbps
from benchlib.collectives.cases import Case
from benchlib.collectives.exercise import Exercise
from benchlib.collectives.measure import Pace, take
from benchlib.collectives.ops import Place

WARMUP = 3
MIN_ROUNDS = 5


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


def time_all_reduce(size_bytes: int, device: torch.device, seconds: float, slowdown: float = 0.0) -> Timing:
    """Time fp32 sums of ``size_bytes`` (at least one element) in place on the default process group.

    Collective: every rank calls it with the same arguments, and every rank gets the same answer. Takes about
    ``seconds`` of exchange, 5 to 200 operations, after 3 that are not counted; with the verification three times that.
    ``slowdown`` makes each operation longer by this share of its time.
    """
    place = Place(dist.get_rank(), dist.get_world_size(), device)
    case = Case("all_reduce", "library", "fp32", "sum", in_place=True, bytes=size_bytes)
    series = take(Exercise(case, place), device, Pace(seconds, slowdown, MIN_ROUNDS, warmup=WARMUP))
    return Timing(series.bytes, place.ranks, tuple(series.seconds.tolist()), series.wrong)
