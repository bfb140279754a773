"""An injected slow-down really takes the time that it states, and does not feed on itself; by a clock of the test's own."""

import time

import pytest
import torch

from benchlib.runtime import devices, peaks
from benchlib.runtime.timing import Clock, StepTimer, union

CPU = torch.device("cpu")


@pytest.fixture
def work(monkeypatch):
    """Return a function that takes some seconds by the clock, which goes on by 10 µs whenever it is read."""
    now = [0.0]

    def read():
        now[0] += 1e-5
        return now[0]

    def work(seconds):
        now[0] += seconds

    monkeypatch.setattr(time, "perf_counter", read)
    return work


def step_of(work, slowdown, work_s, waited_s):
    """Return the times of a step that works, then waits in the backward pass for another rank's gradients."""
    timer = StepTimer(CPU, slowdown)
    timer.begin()
    work(work_s)
    timer.mark("forward")
    launched = timer.clock.stamp()
    work(waited_s)
    timer.intervals.append([launched, timer.clock.stamp(), 4])
    timer.mark("backward")
    timer.end_step()
    return timer.take()[0]


def test_a_device_without_events_is_waited_for_before_the_clock_is_read(monkeypatch):
    calls = []
    monkeypatch.setattr(devices, "synchronize", lambda device: calls.append("waited"))
    monkeypatch.setattr(time, "perf_counter", lambda: calls.append("read"))
    Clock(CPU).stamp()
    assert calls == ["waited", "read"]


def test_exchanges_that_overlap_count_once():
    assert union([(1, 3), (2, 4), (6, 7), (6.2, 6.5)]) == 4


def test_a_step_becomes_longer_by_a_share_of_its_own_work(work):
    row = step_of(work, 0.5, work_s=0.02, waited_s=0.0)
    assert row["step_s"] == pytest.approx(0.03, rel=0.01)
    assert row["forward_s"] == pytest.approx(0.02, rel=0.01)


def test_waiting_for_a_slowed_rank_is_not_slowed_again(work):
    assert step_of(work, 3.0, work_s=0.01, waited_s=0.05)["step_s"] == pytest.approx(0.01 * 4 + 0.05, rel=0.01)


def test_without_phases_the_least_step_is_slowed(work):
    timer = StepTimer(CPU, 1.0)
    timer.begin()
    for work_s in 5 * (0.01, 0.03):
        work(work_s)
        timer.end_step()
    assert [row["step_s"] for row in timer.take()] == pytest.approx(5 * [0.02, 0.04], rel=0.01)


def test_a_timed_operation_is_slowed(work):
    plain, slowed = (peaks.timed_groups(CPU, lambda: work(0.005), 0.25, share) for share in (0.0, 1.0))
    assert slowed == pytest.approx([2 * plain[0]] * len(slowed), rel=0.01)
