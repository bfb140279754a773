"""What is hidden behind a computation: with collectives whose times are known, and with a real one."""

import pytest
import torch
import torch.distributed as dist
from worlds import in_world

from benchlib.benchmarks.collectives import overlap
from benchlib.benchmarks.collectives.overlap import overlapped
from benchlib.workloads import collective_timing
from benchlib.workloads.collective_ops import Place
from benchlib.workloads.collective_timing import Case, Exercise

SHORT_S, LONG_S = 0.02, 0.05
CPU = torch.device("cpu")


class Clock:
    """Seconds that only what is measured moves."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def work(self, seconds):
        self.now += seconds


class Elsewhere(Exercise):
    """A collective that goes on by itself, after it held up its caller for a while; every run has one wrong element of ten."""

    def __init__(self, clock, seconds, held=0.0):
        super().__init__(Case("all_reduce", "async", "fp32", "sum", True, 4), Place(0, 1, CPU))
        self.clock, self.seconds, self.held = clock, seconds, held

    def start(self, later=True):
        self.clock.work(self.held)
        self.end = self.clock.now + self.seconds
        return self

    def wait(self):
        self.clock.now = max(self.clock.now, self.end)

    def check(self):
        return 1, 10


def measured(rank, size):
    clock = collective_timing.time = Clock()
    overlap.PACE = overlap.PACE._replace(least=3, most=3)
    slowest = LONG_S if rank == size - 1 else SHORT_S
    overlap.products = lambda seconds, device: lambda: clock.work(slowest)
    behind = overlapped(Elsewhere(clock, SHORT_S), CPU)
    assert behind["alone_us"] == pytest.approx([1e6 * SHORT_S] * 3)
    assert behind["compute_us"] == pytest.approx([1e6 * LONG_S] * 3)  # that of the slowest rank, on all ranks
    assert behind["hidden_share"] == pytest.approx(1) and "why" not in behind
    # Alone twice and together, those that warm up as well, on both ranks.
    assert (behind["wrong_elements"], behind["checked_elements"]) == (15 * size, 150 * size)
    overlap.products = lambda seconds, device: lambda: clock.work(LONG_S)
    blocking = overlapped(Elsewhere(clock, 0.0, SHORT_S), CPU)
    assert blocking.get("hidden_share", 0.0) == pytest.approx(0, abs=1e-4)
    seen = [None] * size
    dist.all_gather_object(seen, behind)
    assert seen == [behind] * size


def test_the_hidden_share_of_known_times(tmp_path):
    in_world(2, tmp_path, measured)
