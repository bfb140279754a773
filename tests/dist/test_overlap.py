"""What is hidden behind a computation: with collectives whose times are known, and with a real one."""

import statistics
import threading
import time

import pytest
import torch
import torch.distributed as dist
from worlds import in_world

from benchlib.benchmarks.collectives.extras import Overlap, overlapped, products

SHORT_S, LONG_S = 0.02, 0.05


class Elsewhere:
    """A collective that goes on by itself: a thread that sleeps."""

    def __init__(self, seconds):
        self.thread = threading.Thread(target=time.sleep, args=(seconds,))
        self.thread.start()

    def wait(self):
        self.thread.join()


class Done:
    def wait(self):
        pass


def measured(rank, size):
    slowest = LONG_S if rank == size - 1 else SHORT_S
    behind = overlapped(lambda: Elsewhere(SHORT_S), lambda: time.sleep(slowest), rounds=3)
    assert behind.alone_s == pytest.approx(SHORT_S, rel=0.5)
    assert behind.compute_s == pytest.approx(LONG_S, rel=0.5)  # that of the slowest rank, on all ranks
    assert behind.hidden_share > 0.6

    def blocking():
        time.sleep(SHORT_S)
        return Done()

    share = overlapped(blocking, lambda: time.sleep(LONG_S), rounds=3).hidden_share
    assert share is None or share < 0.4  # none where the two together took a little longer than one after the other

    tensor = torch.ones(1 << 20)
    real = overlapped(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True), rounds=3)
    assert min(real.alone_s, real.compute_s, real.together_s) > 0
    seen = [None] * size
    dist.all_gather_object(seen, real)
    assert seen == [real] * size

    def taken(work):
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    few, many = products(0.005), products(0.1)
    assert statistics.median(taken(many) / taken(few) for _ in range(5)) > 3  # 20 on an idle machine


@pytest.mark.alone
def test_the_hidden_share_of_known_times(tmp_path):
    in_world(2, tmp_path, measured)


def test_the_share_is_not_cut_off():
    assert Overlap(2.0, 1.0, 2.0).hidden_share == 1
    assert Overlap(2.0, 1.0, 3.0).hidden_share == 0
    assert Overlap(2.0, 1.0, 4.0).hidden_share is None  # they get in each other's way
    assert Overlap(2.0, 1.0, 1.5).hidden_share is None  # one of them was disturbed when it was alone
