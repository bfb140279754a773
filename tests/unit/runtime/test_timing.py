"""A planted slow-down really takes the time that it states, and does not feed on itself."""

import time

import pytest
import torch

from benchlib.runtime import peaks
from benchlib.runtime.timing import Clock, GradientExchange, StepTimer, hold

pytestmark = pytest.mark.alone
CPU = torch.device("cpu")


def step_of(slowdown, work_s, waited_s):
    """Return the least times of five steps that work, then wait in the backward pass for another rank's gradients.

    The least: a busy machine only adds.
    """
    rows = [one_step(slowdown, work_s, waited_s) for _ in range(5)]
    return {name: min(row[name] for row in rows) for name in ("step_s", "forward_s")}


def one_step(slowdown, work_s, waited_s):
    clock = Clock(CPU)
    exchange = GradientExchange(clock)
    timer = StepTimer(clock, exchange, slowdown)
    timer.begin()
    hold(work_s)
    timer.mark("forward")
    launched = clock.stamp()
    hold(waited_s)
    exchange.intervals.append([launched, clock.stamp(), 4])
    timer.mark("backward")
    timer.end_step()
    return timer.take()[0]


def test_a_step_becomes_longer_by_a_share_of_its_own_work():
    row = step_of(0.5, work_s=0.02, waited_s=0.0)
    assert row["step_s"] == pytest.approx(0.03, rel=0.1)
    assert row["forward_s"] == pytest.approx(0.02, rel=0.1)


def test_waiting_for_a_slowed_rank_is_not_slowed_again():
    assert step_of(3.0, work_s=0.01, waited_s=0.05)["step_s"] == pytest.approx(0.01 * 4 + 0.05, rel=0.15)


def test_without_phases_the_least_step_is_slowed():
    timer = StepTimer(Clock(CPU), GradientExchange(Clock(CPU)), 1.0)
    timer.begin()
    for work_s in 5 * (0.01, 0.03):
        hold(work_s)
        timer.end_step()
    steps = [row["step_s"] for row in timer.take()]
    # The best of five: a busy machine only adds.
    assert [min(steps[::2]), min(steps[1::2])] == pytest.approx([0.02, 0.04], rel=0.15)


def test_a_timed_operation_is_slowed():
    plain, slowed = (min(peaks.timed_groups(CPU, lambda: time.sleep(0.005), 0.25, share)) for share in (0.0, 1.0))
    assert slowed / plain == pytest.approx(2.0, rel=0.2)
