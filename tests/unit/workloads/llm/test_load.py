"""Load: schedules, closed loops, the search for the knee against a server whose knee is known by construction."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from benchlib.workloads.llm.engines import Settings, Sim
from benchlib.workloads.llm.load import QUERY, Client, client_limits, find_knee, judged, measure, schedule

PROMPTS = [[3, 4, 5 + row] for row in range(20)]


@pytest.fixture
def sim():
    engine = Sim(Settings(step_s=0.001, slots=4, fixed_length=True))
    engine.start()
    yield engine
    engine.stop()


def test_schedules_have_their_rate():
    assert schedule("constant", 50, 5, 0).tolist() == pytest.approx([0, 0.02, 0.04, 0.06, 0.08])
    gaps = np.diff(schedule("poisson", 50, 20_000, 0))
    assert gaps.mean() == pytest.approx(0.02, rel=0.03) and gaps.std() == pytest.approx(0.02, rel=0.03)
    assert (schedule("poisson", 50, 100, 1) != schedule("poisson", 50, 100, 0)).all()


def test_a_closed_loop_keeps_to_its_concurrency(sim):
    client = Client(sim, PROMPTS, 10, 5)
    table = client.closed_loop(3, 30)
    order = np.sort(np.concatenate([table["issued_s"], table["last_s"]]))
    open_at = [(table["issued_s"] <= time).sum() - (table["last_s"] < time).sum() for time in order]
    assert len(table) == 30 and max(open_at) == 3 and not table["failed"].any()


def rows(issued, first, last, tokens=3, scheduled=None, failed=False):
    table = np.zeros(len(issued), QUERY)
    table["issued_s"], table["first_s"], table["last_s"], table["tokens"] = issued, first, last, tokens
    table["scheduled_s"] = issued if scheduled is None else scheduled
    table["attempt"], table["failed"] = 1, failed
    return table


def test_a_run_is_measured_by_hand():
    table = rows(issued=[0, 1, 2], first=[0.1, 1.1, 2.4], last=[0.3, 1.3, 2.8])
    row = measure(table, {"ttft": 0.3, "tpot": 0.5}, 0.5)
    assert row["samples_per_s"] == pytest.approx(3 / 2.8) and row["tokens_per_s"] == pytest.approx(9 / 2.8)
    assert row["goodput_per_s"] == pytest.approx(2 / 2.8)  # the third took 0.4 s to its first token
    assert row["ttft_ms"] == pytest.approx([100, 100, 400]) and row["tpot_ms"] == pytest.approx([100, 100, 200])
    assert row["outcome"] == "met" and set(row["late_ms"]) == {0.0}
    assert measure(table, {"ttft": 0.3}, 0.99)["outcome"] == "missed"
    assert measure(rows([0, 1], [0.1, 1.1], [0.2, 1.2], failed=[False, True]), {}, 0.5)["outcome"] == "missed"
    none = measure(rows([0, 1], [0.1, 1.1], [0.2, 1.2], failed=True), {"ttft": 0.3}, 0.5)
    assert (none["outcome"], none["samples_per_s"]) == ("missed", 0)
    assert set(none["why"]) == {"ttft_ms", "tpot_ms", "latency_ms"}


def test_a_late_client_is_told():
    issued = np.arange(10.0)
    limits = client_limits(rows(issued, issued, issued), 2.0)
    assert limits == [("late_client", 0, 0.2), ("client_rate", 0, 0.05)]
    late = rows(issued + 0.3, issued + 1, issued + 2, scheduled=issued)
    assert client_limits(late, 2.0)[0] == ("late_client", pytest.approx(0.3), 0.2)
    assert measure(late, {"ttft": 2.0}, 0.5)["outcome"] == "late"
    drifting = rows(1.07 * issued, issued + 1, issued + 2, scheduled=issued)
    assert client_limits(drifting, 1e3)[1] == ("client_rate", pytest.approx(0.07), 0.05)


def outcome(late, queries, share=0.99):
    """What a sample says with so many queries above the limit of 1 s."""
    return judged({"ttft": np.repeat([0.5, 2.0], [queries - late, late])}, {"ttft": 1.0}, share)


@pytest.mark.parametrize(("true_late", "chance"), [(0.010, 0.010), (0.015, 0.0005)])
def test_a_rate_is_proven_as_seldom_as_the_confidence_says(true_late, chance):
    """Of 662 queries p99 is proven with at most one late: with 1% late in truth a binomial of that has 1%, and not a half."""
    seen = {late: outcome(late, 662) for late in range(30)}
    assert [late for late, said in seen.items() if said == "proven"] == [0, 1]
    proven = sum(binom.pmf(late, 662, true_late) for late, said in seen.items() if said == "proven")
    assert proven == pytest.approx(chance, rel=0.02) and proven <= 0.01
    in_sample = sum(binom.pmf(late, 662, 0.01) for late, said in seen.items() if said != "missed")
    assert in_sample == pytest.approx(0.507, abs=0.001)


def test_few_queries_prove_nothing_and_each_limit_counts_on_its_own():
    assert [outcome(0, count) for count in (100, 458, 459)] == ["met", "met", "proven"]
    assert [outcome(late, 662) for late in (1, 2, 6, 7)] == ["proven", "unproven", "unproven", "missed"]
    # One is late by the first token, another one by the further tokens: both limits have one of 662, which no limit for both would.
    late = {name: np.roll(np.repeat([0.5, 2.0], [661, 1]), place) for place, name in enumerate(("ttft", "tpot"))}
    assert judged(late, {"ttft": 1.0, "tpot": 1.0}, 0.99) == "proven"


def knee_of(points):
    """The rate that is confirmed; None where none is."""
    outcomes = [("confirmation", outcome) for outcome in ("met", "proven")]
    return next((row["rate"] for row in points if (row["phase"], row["outcome"]) in outcomes), None)


def served(knee, noise=()):
    """A probe whose limits are met up to ``knee``; at the rates in ``noise`` a short run meets them and a long one does not."""
    asked = []

    def probe(rate, times):
        asked.append((rate, times))
        good = rate <= knee and not (times > 1 and rate in noise)
        return {"outcome": "met" if good else "missed"}

    return probe, asked


def test_the_knee_is_between_the_rates_and_confirmed_by_a_longer_run():
    probe, asked = served(33)
    assert knee_of(find_knee(probe, [10, 20, 40, 80])) == 30 and asked[-1] == (30, 3)
    assert [rate for rate, _ in asked] == [10, 20, 40, 30, 35, 30], "80 is not tried: 40 missed"
    probe, asked = served(33, noise={30})
    assert knee_of(find_knee(probe, [10, 20, 40])) == 20
    assert knee_of(find_knee(served(5)[0], [10, 20])) is None
    assert knee_of(find_knee(served(math.inf)[0], [10, 20])) == 20


def test_a_rate_that_a_longer_run_does_not_prove_is_no_knee():
    outcomes = iter(["met", "unproven", "unproven", "proven"])
    points = find_knee(lambda rate, times: {"outcome": next(outcomes)}, [10, 20], refine=0)
    assert [(row["phase"], row["rate"]) for row in points[2:]] == [("confirmation", 20), ("confirmation", 10)]
    assert knee_of(points) == 10


def test_a_rate_at_which_the_client_was_late_is_tried_again():
    late = iter(["late", "met", "met", "late", "late", "late", "met"])
    points = find_knee(lambda rate, times: {"outcome": next(late)}, [10, 20], refine=0)
    outcomes = [(row["rate"], row["outcome"]) for row in points]
    assert outcomes == [(10, "late"), (10, "met"), (20, "met"), *[(20, "late")] * 3, (10, "met")]
