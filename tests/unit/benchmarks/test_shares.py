"""The split of a batch among heterogeneous ranks: the optimum by trying all, memory, drift, and the parts of a step."""

import itertools

import numpy as np
import pytest

from benchlib.benchmarks.squad import balance
from benchlib.benchmarks.squad.balance import Member, Split, fit
from benchlib.core.errors import UserError

TOKENS = 100.0


def member(sample_s=1.0, most=64, **more):
    return Member(most=most, sample_s=sample_s, **more)


def split_of(*members, samples=16):
    return balance.best_split(members, samples, TOKENS)


@pytest.mark.parametrize("seed", range(40))
def test_the_split_is_the_best_of_all(seed):
    draw = np.random.default_rng(seed)
    count, samples = int(draw.integers(1, 4)), int(draw.integers(1, 15))
    members = [
        member(draw.exponential(1.0), int(draw.integers(0, 7)), step_s=step_s, batch_s=batch_s, token_s=0.01)
        for step_s, batch_s in draw.choice([0.0, 0.7, 4.0], (count, 2))
    ]
    if not any(item.most for item in members):
        members[0] = member(1.0, 3)
    possible = [
        other
        for other in itertools.product(range(samples + 1), repeat=count)
        if sum(other) == samples and all(item.most or not n for item, n in zip(members, other, strict=True))
    ]
    split = balance.optimum(members, samples, TOKENS)
    assert tuple(split) in possible
    best = min(Split(tuple(members), list(other), TOKENS).step_s for other in possible)
    assert Split(tuple(members), split, TOKENS).step_s == pytest.approx(best, rel=1e-12)


def test_without_fixed_parts_the_split_is_the_harmonic_one():
    assert balance.optimum([member(0.1), member(0.3), member(0.6)], 90, TOKENS) == [60, 20, 10]
    # Whole samples: with two ranks held at 2 and 2 of 16 the first would get 12, and 9+5+2 is sooner done.
    assert balance.optimum([member(0.01), member(0.02), member(0.04)], 16, TOKENS) == [9, 5, 2]


def test_memory_cuts_into_whole_micro_batches_whose_cost_counts():
    # 10 s a micro-batch: with memory for 4 samples at once a rank pays that more often.
    free, limited = member(1.0, most=64, batch_s=10.0), member(1.0, most=4, batch_s=10.0)
    assert split_of(free, free, samples=24).shares == [12, 12]
    split = split_of(free, limited, samples=24)
    assert split.shares == [17, 7]  # 10 + 17 s and 2 x 10 + 7 s
    assert [item.micro_batches(n) for item, n in zip(split.members, split.shares, strict=True)] == [1, 2]
    assert limited.micro_batches(9) == 3
    with pytest.raises(UserError, match=r"no rank has memory for one sample.*memory_limits_gb"):
        balance.optimum([member(most=0)], 4, TOKENS)


def test_the_smaller_last_batch_is_split_anew():
    assert [split_of(member(1.0), member(3.0)).of(count) for count in (16, 5, 1)] == [[12, 4], [4, 1], [1, 0]]


@pytest.mark.parametrize("steps", [7, 8, 30])
def test_a_drift_is_answered_after_some_steps(steps):
    split = split_of(member(1.0), member(3.0))
    better = balance.replanned(split, np.ones((steps, 2)) * [3.0, 1.0], from_step=40)  # rank 0 became as slow as rank 1
    if steps < balance.WINDOW:
        assert better is None
        return
    assert (better.shares, better.from_step, better.drifted, better.factor) == ([8, 8], 40, 0, 3.0)
    assert balance.replanned(better, np.ones((steps, 2)), 60) is None  # the new speeds are what is expected now


def test_noise_and_what_slows_all_alike_change_nothing():
    split, draw = split_of(member(1.0), member(3.0), samples=64), np.random.default_rng(0)
    single = np.ones((8, 2))
    single[3] = 20.0  # one step held up
    for ratios in [draw.lognormal(0, 0.05, (8, 2)) for _ in range(100)] + [np.full((8, 2), 5.0), single]:
        assert balance.replanned(split, ratios, 0) is None


def test_parts_of_a_step_add_up_to_it():
    draw, split = np.random.default_rng(2), split_of(member(1.0, step_s=0.2), member(3.0, batch_s=0.4))
    samples = np.tile([10.0, 6.0], (20, 1))
    tokens = samples * draw.uniform(80, 120, (20, 1))
    own = split.expected(samples, tokens) * draw.lognormal(0, 0.05, (20, 2))
    step_s = own.max(axis=1) + 0.3
    parts = split.wait_parts(samples, tokens, own, step_s)
    assert sum(parts.values()) == pytest.approx(step_s.mean())
    assert parts["best_s"] < own.mean(axis=0).max()  # 12+4 is better than 10+6
    assert parts["other_split_s"] > 0.1 * parts["best_s"]
    assert parts["exchange_s"] == pytest.approx(0.3)


def test_speeds_come_back_from_times_of_shapes():
    shapes, seconds = [(1, 104), (4, 48), (6, 160), (8, 96)], (0.004, 0.002, 3e-5)
    times = [seconds[0] + seconds[1] * samples + seconds[2] * samples * tokens for samples, tokens in shapes]
    assert fit(shapes, times) == pytest.approx(seconds, rel=1e-6)
    assert min(fit(shapes, [0.1, 0.05, 0.4, 0.2])) >= 0
