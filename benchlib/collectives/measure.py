"""Times of an operation on all ranks: a barrier before each run, the slowest rank counts, every result is compared.

All functions here are collective: every rank calls them with the same arguments and gets the same answer.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from benchlib import devices
from benchlib.collectives.exercise import Timed
from benchlib.planted import hold

WARMUP = 2
LEAST_ROUNDS = 5
MOST_ROUNDS = 200
MOST_WALL = 3  # times the seconds asked for, with restoring and comparing


@dataclass(frozen=True)
class Series:
    """Runs of one thing on all ranks. ``times_s`` is (rounds, ranks); wrong elements are of all ranks and runs."""

    bytes: int
    times_s: np.ndarray
    wrong: int
    checked: int

    @property
    def seconds(self) -> np.ndarray:
        """The time of each run, (rounds,): that of its slowest rank."""
        return self.times_s.max(axis=1)  # type: ignore[no-any-return]

    @property
    def skew_s(self) -> float:
        """The median over the runs of the time between the first and the last rank."""
        return float(np.median(np.ptp(self.times_s, axis=1)))

    @property
    def slowest_shares(self) -> np.ndarray:
        """How often each rank was the slowest, (ranks,), from 0 to 1."""
        slowest = self.times_s.argmax(axis=1)
        return np.bincount(slowest, minlength=self.times_s.shape[1]) / len(slowest)


@dataclass(frozen=True)
class Pace:
    """How a series is taken: seconds of timed work, the planted slow-down, and how many rounds at least and at most.

    ``warmup`` rounds come before and are not timed.
    """

    seconds: float
    slowdown: float = 0.0
    least: int = LEAST_ROUNDS
    most: int = MOST_ROUNDS
    warmup: int = WARMUP


def once(thing: Timed, device: torch.device, slowdown: float = 0.0) -> tuple[float, int, int]:
    """Run a thing once on all ranks; returns this rank's seconds, wrong and checked elements."""
    thing.restore()
    devices.synchronize(device)
    dist.barrier()  # else a rank that comes late adds its delay to the time of the others
    began = time.perf_counter()
    thing.run()
    devices.synchronize(device)
    if slowdown and not thing.is_limit:
        hold(slowdown * (time.perf_counter() - began))
    return (time.perf_counter() - began, *thing.check())


def take(thing: Timed, device: torch.device, pace: Pace) -> Series:
    """Time a thing for about ``pace.seconds``."""
    return take_in_turns([thing], device, pace)[0]


def take_in_turns(things: Sequence[Timed], device: torch.device, pace: Pace) -> list[Series]:
    """Time several things round by round, so that a noisy neighbour hits all of them; ``pace.seconds`` for each."""
    began = time.perf_counter()
    warm = [[once(thing, device, pace.slowdown) for thing in things] for _ in range(pace.warmup)]
    taken = sum(statistics.median(run[0] for run in runs) for runs in zip(*warm, strict=True)) / len(things)
    whole = (time.perf_counter() - began) / pace.warmup / len(things)
    taken, whole = slowest([taken, whole], device)
    wanted = min(pace.seconds / max(taken, 1e-6), MOST_WALL * pace.seconds / max(whole, 1e-6))
    rounds = min(pace.most, max(pace.least, math.ceil(wanted)))
    runs = [[once(thing, device, pace.slowdown) for thing in things] for _ in range(rounds)]
    return [
        _gathered(thing, [turn[index] for turn in runs], [turn[index] for turn in warm], device)
        for index, thing in enumerate(things)
    ]


def _gathered(
    thing: Timed, runs: list[tuple[float, int, int]], warm: list[tuple[float, int, int]], device: torch.device
) -> Series:
    # The runs that warm up are not timed, but what they give has to be right as well.
    counts = [sum(run[index] for run in [*warm, *runs]) for index in (1, 2)]
    mine = torch.tensor([*counts, *(round(1e9 * run[0]) for run in runs)], dtype=torch.int64, device=device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    found = torch.stack(parts, dim=1).cpu().numpy()
    wrong, checked = found[:2].sum(axis=1).tolist()
    return Series(thing.bytes, 1e-9 * found[2:], wrong, checked)


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the maximum over ranks of each value. Ranks agree on it, and so on the number of rounds."""
    tensor = torch.tensor(values, device=device, dtype=torch.float32)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()  # type: ignore[no-any-return]
