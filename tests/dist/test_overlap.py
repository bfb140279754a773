"""What is hidden behind a computation: with collectives whose times are known, and with a real one."""

import time

import pytest
import torch
import torch.distributed as dist
from worlds import in_world

from benchlib.benchmarks.collectives import extras
from benchlib.benchmarks.collectives.extras import Overlap, overlapped

SHORT_S, LONG_S = 0.02, 0.05


class Clock:
    """Seconds that only what is measured moves."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def work(self, seconds):
        self.now += seconds


class Elsewhere:
    """A collective that goes on by itself."""

    def __init__(self, clock, seconds):
        self.clock, self.end = clock, clock.now + seconds

    def wait(self):
        self.clock.now = max(self.clock.now, self.end)


def measured(rank, size):
    clock = extras.time = Clock()
    slowest = LONG_S if rank == size - 1 else SHORT_S
    behind = overlapped(lambda: Elsewhere(clock, SHORT_S), lambda: clock.work(slowest), rounds=3)
    assert behind.alone_s == pytest.approx(SHORT_S)
    assert behind.compute_s == pytest.approx(LONG_S)  # that of the slowest rank, on all ranks
    assert behind.hidden_share == pytest.approx(1)

    def blocking():
        clock.work(SHORT_S)
        return Elsewhere(clock, 0)

    assert overlapped(blocking, lambda: clock.work(LONG_S), rounds=3).hidden_share == pytest.approx(0, abs=1e-5)

    extras.time = time
    tensor = torch.ones(1 << 20)
    real = overlapped(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True), rounds=3)
    assert min(real.alone_s, real.compute_s, real.together_s) > 0
    seen = [None] * size
    dist.all_gather_object(seen, real)
    assert seen == [real] * size


def test_the_hidden_share_of_known_times(tmp_path):
    in_world(2, tmp_path, measured)


def test_the_share_is_not_cut_off():
    assert Overlap(2.0, 1.0, 2.0).hidden_share == 1
    assert Overlap(2.0, 1.0, 3.0).hidden_share == 0
    assert Overlap(2.0, 1.0, 4.0).hidden_share is None  # they get in each other's way
    assert Overlap(2.0, 1.0, 1.5).hidden_share is None  # one of them was disturbed when it was alone
