"""The split of a batch among unlike ranks: the true optimum by trying all, memory, drift, and plans that do not fit."""

import itertools
import json
from typing import Any

import numpy as np
import pytest

from benchlib.benchmarks.squad import shares
from benchlib.benchmarks.squad.shares import Plan, Rank
from benchlib.benchmarks.squad.unlike import fit
from benchlib.config.schema import build
from benchlib.core.errors import UserError

TOKENS = 100.0


def rank(sample_s: float = 1.0, most: int = 64, **more: Any) -> Rank:
    return Rank(device="cpu", threads=1, precision="fp32", most=most, sample_s=sample_s, **more)


def plan_of(ranks: list[Rank], samples: int = 16, **more: Any) -> Plan:
    counts = shares.optimum(ranks, samples, TOKENS)
    ranks = [item.model_copy(update={"samples": count}) for item, count in zip(ranks, counts, strict=True)]
    return Plan(model="m", max_length=384, global_batch=samples, tokens=TOKENS, ranks=ranks, **more)


def all_splits(samples: int, ranks: int) -> Any:
    return (split for split in itertools.product(range(samples + 1), repeat=ranks) if sum(split) == samples)


@pytest.mark.parametrize("seed", range(40))
def test_the_split_is_the_best_of_all(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count, samples = int(draw.integers(1, 4)), int(draw.integers(1, 15))
    ranks = [
        rank(draw.exponential(1.0), int(draw.integers(0, 7)), step_s=draw.choice([0.0, 0.5, 4.0]), batch_s=draw.choice([0.0, 0.7, 3.0]), token_s=draw.exponential(0.01))
        for _ in range(count)
    ]  # fmt: skip
    if not any(item.most for item in ranks):
        ranks[0] = rank(1.0, 3)
    split = shares.optimum(ranks, samples, TOKENS)
    assert sum(split) == samples
    possible = [
        other for other in all_splits(samples, count)
        if all(item.most or not share for item, share in zip(ranks, other, strict=True))
    ]  # fmt: skip
    assert tuple(split) in possible
    best = min(shares.longest(ranks, other, TOKENS) for other in possible)
    assert shares.longest(ranks, split, TOKENS) == pytest.approx(best, rel=1e-12)
    # The bound of samples that can be cut ignores what a rank without work still does.
    working = [item for item in ranks if item.most]
    assert shares.harmonic_s(working, samples, TOKENS) <= best * (1 + 1e-12)


def test_without_fixed_parts_the_split_is_the_harmonic_one() -> None:
    ranks = [rank(0.1), rank(0.3), rank(0.6)]
    assert shares.optimum(ranks, 90, TOKENS) == [60, 20, 10]
    assert shares.harmonic_s(ranks, 90, TOKENS) == pytest.approx(6.0)


def test_memory_cuts_into_whole_micro_batches_whose_cost_counts() -> None:
    # 10 s a micro-batch: with memory for 4 samples at once a rank pays that more often.
    free, limited = rank(1.0, most=64, batch_s=10.0), rank(1.0, most=4, batch_s=10.0)
    assert shares.optimum([free, free], 24, TOKENS) == [12, 12]
    split = shares.optimum([free, limited], 24, TOKENS)
    assert split == [17, 7]  # 10 + 17 s and 2 x 10 + 7 s
    plan = plan_of([free, limited], 24)
    assert [item.micro_batches(item.samples) for item in plan.ranks] == [1, 2]
    assert plan.ranks[1].micro_batches(9) == 3
    assert shares.fitting(2e9, 1e9, 1e6, 100, 64) == 10
    assert shares.fitting(0.5e9, 1e9, 1e6, 100, 64) == 0
    assert shares.fitting(None, 1e9, 1e6, 100, 64) == 64
    with pytest.raises(UserError, match=r"no rank has memory for one sample.*memory_limits_gb"):
        shares.optimum([rank(most=0, limit_bytes=1e9, held_bytes=2e9)], 4, TOKENS)


def test_the_smaller_last_batch_is_split_anew() -> None:
    plan = plan_of([rank(1.0), rank(3.0)])
    assert plan.shares == [12, 4]
    assert plan.split(16) == [12, 4]
    assert plan.split(5) == [4, 1]
    assert plan.split(1) == [1, 0]


@pytest.mark.parametrize("steps", [7, 8, 30])
def test_a_drift_is_answered_after_some_steps(steps: int) -> None:
    plan = plan_of([rank(1.0), rank(3.0)])
    ratios = np.ones((steps, 2)) * np.array([3.0, 1.0])  # rank 0 became as slow as rank 1
    made = shares.replanned(plan, ratios, from_step=40)
    if steps < shares.WINDOW:
        assert made is None
        return
    assert made is not None
    assert (made.shares, made.from_step) == ([8, 8], 40)
    assert made.reason.startswith(
        "rank 0 took 3.00 × the time that was expected of it over 8 steps: the split goes from 12+4 to 8+8"
    )
    assert shares.replanned(made, np.ones((steps, 2)), 60) is None  # the new speeds are what is expected now


def test_noise_and_what_slows_all_alike_change_nothing() -> None:
    plan = plan_of([rank(1.0), rank(3.0)], 64)
    draw = np.random.default_rng(0)
    for _ in range(100):
        assert shares.replanned(plan, draw.lognormal(0, 0.05, (8, 2)), 0) is None
    assert shares.replanned(plan, np.full((8, 2), 5.0), 0) is None
    single = np.ones((8, 2))
    single[3] = 20.0  # one step held up
    assert shares.replanned(plan, single, 0) is None


def test_a_hopeless_rank_is_named_and_gets_nothing() -> None:
    plan = plan_of([rank(1.0), rank(1.0)])
    made = shares.replanned(plan, np.ones((8, 2)) * np.array([1.0, 40.0]), 9)
    assert made is not None
    assert made.shares == [16, 0]
    assert "rank 1 is hopeless: one sample alone would take it 40 s" in made.reason
    # More ranks than samples: who gets none could do as much as the others.
    assert (
        shares.without_work([rank(), rank(), rank(most=0)], [1, 0, 0], TOKENS)
        == "; rank 2 gets none: its memory does not hold one sample"
    )


def test_a_plan_goes_through_a_file_and_says_how_it_differs(tmp_path: Any) -> None:
    plan = plan_of([rank(1.0), rank(3.0)], reason="by calibration")
    shares.save(tmp_path, plan)
    assert shares.load(tmp_path) == shares.load(tmp_path / shares.FILE) == plan
    assert shares.difference(plan, plan_of([rank(9.0), rank(1.0)])) == ""  # speeds are what it is for
    other = plan_of([rank(1.0), rank(3.0, work=3).model_copy(update={"device": "H200"})], 32)
    assert shares.difference(plan, other) == (
        "global batch: the plan has 16, this run 32; device of rank 1: the plan has cpu, this run H200; work of rank 1: the plan has 1, this run 3"
    )
    values = json.loads((tmp_path / shares.FILE).read_text())
    values["ranks"][0]["samples"] = 13
    (tmp_path / shares.FILE).write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"its shares 13\+4 are 17 samples, its global batch has 16"):
        shares.load(tmp_path)
    with pytest.raises(UserError, match="expected off, auto, or the plan of an earlier run"):
        shares.load(tmp_path / "autp")


def test_parts_of_a_step_add_up_to_it() -> None:
    draw = np.random.default_rng(2)
    plan = plan_of([rank(1.0, step_s=0.2), rank(3.0, batch_s=0.4)])
    samples = np.tile([10.0, 6.0], (20, 1))
    tokens = samples * draw.uniform(80, 120, (20, 1))
    own = plan.expected(samples, tokens) * draw.lognormal(0, 0.05, (20, 2))
    step_s = own.max(axis=1) + 0.3
    parts = shares.wait_parts(plan.ranks, samples, tokens, own, step_s)
    best, perfect = parts.pop("best"), parts["perfect"]
    assert sum(parts.values()) == pytest.approx(step_s.mean())
    assert perfect <= best < own.mean(axis=0).max()  # 12+4 is better than 10+6
    assert parts["another split than the best"] > 0.1 * best
    assert parts["exchange and the rest"] == pytest.approx(0.3)


def test_speeds_come_back_from_times_of_shapes() -> None:
    shapes = [(1, 104), (4, 48), (6, 160), (8, 96)]
    known = (0.004, 0.002, 3e-5)
    times = [known[0] + known[1] * samples + known[2] * samples * tokens for samples, tokens in shapes]
    assert fit(shapes, times) == pytest.approx(known, rel=1e-6)
    assert min(fit(shapes, [0.1, 0.05, 0.4, 0.2])) >= 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"balance": "auto", "engine": "trainer"}, "balance = auto with engine = trainer"),
        ({"planted_work": [1, 3], "engine": "trainer"}, "planted_work = 1,3 with engine = trainer"),
        ({"memory_limits_gb": [1, 2]}, "set balance=auto"),
        ({"bf16_ranks": [1], "precision": "bf16"}, "the other ranks compute in fp32"),
        ({"planted_drift": [3, 1]}, "go together"),
        ({"planted_work": [1, 0]}, "planted_work"),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build("squad", {"benchmark": "squad", "nproc": 2, **values})


def test_lists_name_every_rank_and_a_plan_is_for_these_ranks(tmp_path: Any) -> None:
    def whole(**values: Any) -> None:
        build("squad", {"benchmark": "squad", "nproc": 2, **values}).check_whole()

    whole(planted_work=[1, 3], bf16_ranks=[1], balance="auto")
    with pytest.raises(UserError, match="planted_work has 3 numbers for 2 ranks"):
        whole(planted_work=[1, 3, 1])
    with pytest.raises(UserError, match="bf16_ranks = 2: there are 2 ranks"):
        whole(bf16_ranks=[2])
    shares.save(tmp_path, plan_of([rank(), rank()], 16))
    whole(balance=str(tmp_path))
    with pytest.raises(UserError, match="its plan is for 16 samples a step on 2 ranks, this run has 32 on 2"):
        whole(balance=str(tmp_path), batch_size=16)
