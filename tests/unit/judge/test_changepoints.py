"""Changes of level: how often one is seen that is none, how soon a real one is, and the band, on simulated runs.

The spreads are those that public logs of GPU hosts show: 1.5% on one host, 4.6% between hosts.
"""

import math
import sys

import numpy as np
import pytest
from scipy import stats

from benchlib.core.files import home
from benchlib.judge.changepoints import levels

sys.path.insert(0, str(home() / "scripts"))
from bench_changes import detected, false_changes, series


@pytest.mark.parametrize("odd", [0.0, 0.04], ids=["normal", "odd-runs"])
@pytest.mark.parametrize("spread", [0.015, 0.046])
@pytest.mark.parametrize("n", [8, 12, 40, 400])
def test_unchanged_series_show_less_than_one_change_in_a_thousand_runs(n, spread, odd):
    assert false_changes(n, spread, odd, runs=8_000, seed=n) <= 1.0


def test_steps_are_found_soon():
    assert detected(0.05, 0.015, after=5, trials=100) >= 0.9
    assert detected(0.15, 0.046, after=5, trials=100) >= 0.85
    assert detected(0.15, 0.015, after=3, trials=100) >= 0.99
    assert detected(0.15, 0.046, after=10, odd=0.04, trials=100) >= 0.85


def test_one_or_two_odd_runs_make_no_level():
    values = series(np.random.default_rng(3), 30, 0.015, 0.0)
    for at in ((15,), (15, 16), (28, 29)):
        odd = [value * (1.6 if index in at else 1.0) for index, value in enumerate(values)]
        assert len(levels(odd).levels) == 1
        assert levels(odd).levels[0].high < 1.1  # and do not widen the band
    assert [level.start for level in levels([*values[:27], *(value * 1.6 for value in values[27:])]).levels] == [0, 27]


def test_levels_of_a_hand_made_series():
    low, high = [9.9, 10.0, 10.1, 10.0, 9.9, 10.1], [12.0, 12.1, 11.9, 12.0]
    split = levels(low + high)
    assert [(level.start, level.end) for level in split.levels] == [(0, 6), (6, 10)]
    assert [level.median for level in split.levels] == pytest.approx([10.0, 12.0])
    # The spread about the levels' medians by hand: squares of logs over the runs less the levels.
    squares = sum(math.log(v / 10) ** 2 for v in low) + sum(math.log(v / 12) ** 2 for v in high)
    assert split.spread == pytest.approx(math.sqrt(squares / 8))
    half = stats.t.ppf(0.975, 8) * split.spread * math.sqrt(1 + math.pi / 8)
    assert split.levels[1].high == pytest.approx(12 * math.exp(half))


@pytest.mark.parametrize("n", [6, 12, 50])
def test_the_band_holds_95_percent_of_further_runs(n):
    rng = np.random.default_rng(n)
    inside = []
    for _ in range(1500):
        values = series(rng, n + 1, 0.046, 0.0)
        level = levels(values[:-1]).levels[-1]
        inside.append(level.low <= values[-1] <= level.high)
    assert 0.93 <= np.mean(inside) <= 0.97


def test_scores_that_are_equal_or_zero():
    assert len(levels([76.25] * 20).levels) == 1
    assert [level.start for level in levels([76.25] * 10 + [75.0] * 4).levels] == [0, 10]
    assert levels([0.0, 0.0, 0.0, 1.0, 0.0, 0.0]).ratio is False
    # Half of the runs agree to the last digit, as scores of few questions do; the others scatter by one answer.
    rng = np.random.default_rng(1)
    assert all(
        len(levels(list(75 + 1.5 * rng.integers(-1, 2, 30) * (rng.random(30) < 0.5))).levels) == 1 for _ in range(60)
    )
