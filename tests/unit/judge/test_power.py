"""How often the gate is wrong, on noise like that of real machines.

Run-to-run standard deviations that reproduce reference-figures, section 7, of pairs of single runs on public hosts: 1.5%
(one GPU, same host: 32% of the pairs differ by more than 2%, 1 to 3% by more than 5%), 2.1% (other hosts), 4.6% (eight
GPUs, whole run with start-up: 74%, 50%, 27% beyond 2, 5, 7%) and 0.25% (eight GPUs, steady state: none beyond 2%).
"""

import numpy as np
import pytest
from noise import KINDS, runs_of
from scipy.stats import norm

from benchlib.judge.change import CHANCE, Reading, Spread, compared, reading
from benchlib.judge.power import Pool, Setup, simulate, simulate_runs
from benchlib.judge.regression import FALSE_ALARMS, RegressionLimit, chance_of_each, default_spread, status_of
from benchlib.results.metrics import measured

SAME_HOST, OTHER_HOST, WHOLE_RUN, STEADY = 0.015, 0.021, 0.046, 0.0025
NOISES = [SAME_HOST, OTHER_HOST, WHOLE_RUN, STEADY]
ONE = 0.013  # 1% and three standard errors of 10,000 comparisons


def test_the_noise_is_that_of_the_public_logs():
    def beyond(s, share):
        return 2 * norm.sf(share / (s * 2**0.5))

    assert [beyond(SAME_HOST, share) for share in (0.02, 0.05, 0.07)] == pytest.approx([0.32, 0.03, 0.0], abs=0.04)
    assert [beyond(OTHER_HOST, share) for share in (0.02, 0.05, 0.07)] == pytest.approx([0.46, 0.09, 0.05], abs=0.05)
    assert [beyond(WHOLE_RUN, share) for share in (0.02, 0.05, 0.07)] == pytest.approx([0.74, 0.50, 0.27], abs=0.07)
    assert beyond(STEADY, 0.02) < 1e-6


def setup(share, old_runs, known_dof=0, new_runs=1):
    return Setup(RegressionLimit(metric="rate", share=share), "higher", old_runs, new_runs, known_dof)


@pytest.mark.parametrize("s", NOISES)
def test_false_alarms_stay_below_one_percent_of_10_000_comparisons(s):
    """Even where the limit is far below the noise: the spread that was measured keeps the gate quiet."""
    assert simulate(setup(0.05, old_runs=5), s, 10_000).false_alarms <= ONE
    assert simulate(setup(0.15, old_runs=1), s, 10_000).false_alarms <= ONE  # the kit's tightest limit, one run


@pytest.mark.parametrize("s", NOISES)
def test_a_calibration_keeps_single_runs_quiet_too(s):
    assert simulate(setup(0.05, old_runs=1, known_dof=7), s, 5_000).false_alarms <= ONE


def test_a_fixed_threshold_on_single_runs_is_what_raises_false_alarms():
    """Without repeated runs a 5% limit fails where the public logs say so: half of the 50% two-sided."""
    assert simulate(setup(0.05, old_runs=1), WHOLE_RUN, 5_000).false_alarms == pytest.approx(0.22, abs=0.03)


def heavy_tailed(generator, shape):
    return generator.standard_t(4, shape) / 2**0.5  # unit variance


@pytest.mark.parametrize("s", [SAME_HOST, WHOLE_RUN])
def test_outliers_do_not_raise_false_alarms(s):
    assert simulate(setup(0.20, old_runs=5), s, 5_000, noise=heavy_tailed).false_alarms <= ONE
    # A limit as small as the noise leaves all to the interval, which such noise exceeds a little more often than in 1%.
    assert simulate(setup(0.05, old_runs=5), s, 5_000, noise=heavy_tailed).false_alarms <= 0.02


@pytest.mark.parametrize(("s", "direction"), [*((s, "higher") for s in NOISES), (WHOLE_RUN, "lower")])
def test_the_stated_effect_is_found_with_99_percent_power(s, direction):
    """Fresh noise, the loss really applied to the new runs: at least 99% fail."""
    limit = RegressionLimit(metric="m", share=0.05)
    stated = simulate(Setup(limit, direction, 5), s, 10_000).effect
    factor = 1 - stated if direction == "higher" else 1 + stated

    def shifted(generator, shape):
        noise = generator.standard_normal(shape)
        noise.reshape(-1, 6)[:, 0] += np.log(factor) / s  # of six runs the first is the new one
        return noise

    found = simulate(Setup(limit, direction, 5), s, 4_000, noise=shifted, seed=99).false_alarms
    assert found >= 0.985  # 0.99 less three standard errors of 4,000 comparisons


def test_repetition_decides_what_noise_left_open():
    once, thrice = (simulate(setup(0.08, 5, new_runs=runs), WHOLE_RUN, 2_000).ambiguous for runs in (1, 3))
    assert once > 0.3
    assert thrice < 0.1


def test_points_are_judged_as_amounts():
    limit = Setup(RegressionLimit(metric="f1", amount=1.0), "higher", old_runs=5)
    found = simulate(limit, 0.2, 4_000)
    assert found.false_alarms <= ONE
    assert 1.0 < found.effect < 3.0


RATE = measured("rate", 1.0, "samples/s", "higher")


@pytest.mark.parametrize("kind", KINDS)
def test_the_gate_decides_whatever_the_noise_and_the_number_of_accepted_runs(kind):
    """The goal of the rule: a limit of 20%, 4% between runs, one new run (``scripts/simulate_gate.py`` has the tables)."""
    limit = RegressionLimit(metric="rate", share=0.2)
    pool = Pool.of([reading(tuple(run), "ratio", "higher") for run in runs_of(kind, 0.0, 150)]).moved(0.04)
    for accepted in (1, 2, 3, 5, 10):
        setup = Setup(limit, "higher", accepted, default=default_spread(RATE, limit, "ratio"))
        found = simulate_runs(setup, 0.04, pool, 1000)
        assert found.false_alarms <= 0.01
        assert found.ambiguous <= (0.15 if kind == "neighbour" else 0.05)
        assert found.effect <= 0.35


def test_many_comparisons_at_once_are_those_of_the_gate_one_by_one():
    limit, default = RegressionLimit(metric="rate", share=0.05), 0.05
    readings = [reading(tuple(run), "ratio", "higher") for run in runs_of("neighbour", 0.05, 60)]
    pool = Pool.of(readings)
    for new, old in ((1, 1), (1, 4), (2, 9)):
        setup = Setup(limit, "higher", old, new, default=default)
        found = simulate_runs(setup, 0.05, pool, 300)
        drawn = pool.draws(300, new + old, np.random.default_rng(1))
        words = []
        for row in drawn:
            sides = [[readings[place] for place in part] for part in (row[:new], row[new:])]
            result = compared(*sides, kind="ratio", known=None, default=default)
            words.append(status_of(result, limit, "higher", 100.0))
        assert found.false_alarms == pytest.approx(words.count("FAIL") / 300)
        assert found.ambiguous == pytest.approx(words.count("AMBIGUOUS") / 300)


def test_a_run_of_twenty_unchanged_metrics_rarely_fails_in_any():
    """Each scatters by 15% between runs, which is known: with 1% each 18% of the runs would fail."""
    limits = [RegressionLimit(metric=f"m{number}", share=0.2) for number in range(20)]
    metrics = [measured(limit.metric, 1.0, "s", "lower") for limit in limits]
    draws = 0.15 * np.random.default_rng(0).standard_normal((400, 20, 2))
    red = dict[float, int]()
    for chance in (CHANCE, chance_of_each(limits, metrics)):
        red[chance] = 0
        for run in draws:
            sides = [[[Reading(value, 0.0, 0.0, value, 1)] for value in pair] for pair in run.tolist()]
            changes = [
                compared(new, old, kind="ratio", known=Spread(0.15, 200), default=0.05, chance=chance)
                for new, old in sides
            ]
            words = [status_of(change, limit, "lower", 1.0) for change, limit in zip(changes, limits, strict=True)]
            red[chance] += "FAIL" in words
    assert red[CHANCE] > 0.1 * len(draws)
    assert red[FALSE_ALARMS / 20] <= 0.01 * len(draws)
