"""The change between two sets of runs, against Student's and Welch's arithmetic by hand and against scipy's own tests."""

import math

import numpy as np
import pytest
from noise import runs_of
from scipy import stats as scipy_stats

from benchlib.judge.change import GATE_CONFIDENCE, Spread, change, estimate, reading


def test_single_numbers_give_their_ratio_and_no_interval():
    found = change([[50.0]], [[40.0]])
    assert (found.value, found.low, found.high, found.basis, found.spread) == (
        pytest.approx(1.25), pytest.approx(1.25), pytest.approx(1.25), "none", None,
    )  # fmt: skip
    assert change([[87.0]], [[88.0]], kind="difference").value == -1.0


def test_the_value_is_the_ratio_of_the_geometric_means_of_the_medians():
    found = change([[1.0, 8.0, 9.0], [2.0]], [[4.0], [1.0]])
    assert found.value == pytest.approx(math.sqrt(8 * 2) / math.sqrt(4 * 1))


def test_the_interval_between_runs_is_the_pooled_t_interval():
    """scipy's t test of two samples has the same interval where both sides are pooled."""
    new, old = np.array([10.2, 9.9, 10.4]), np.array([10.0, 10.1, 9.8, 10.3])
    found = change([[value] for value in new], [[value] for value in old], kind="difference")
    expected = scipy_stats.ttest_ind(new, old).confidence_interval(GATE_CONFIDENCE)
    assert (found.low, found.high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert (found.basis, found.spread.dof) == ("runs", 5)


def test_a_calibrated_spread_counts_with_its_degrees_of_freedom():
    """s² = (0.02² x 7) / 7 for one run on each side: t(0.99, 7) = 2.998, half = 2.998 x 0.02 x sqrt(2)."""
    found = change([[100.0]], [[100.0]], known=Spread(0.02, 7))
    assert math.log(found.high) == pytest.approx(2.998 * 0.02 * math.sqrt(2), rel=1e-4)
    assert found.low == pytest.approx(1 / found.high)


def test_the_band_holds_95_percent_of_the_ratios_of_unchanged_runs():
    generator = np.random.default_rng(1)
    first, second = np.exp(0.03 * generator.standard_normal((2, 20_000)))
    band = Spread(0.03, 10).band()
    assert np.mean((first / second < 1 + band) & (second / first < 1 + band)) == pytest.approx(0.95, abs=0.005)


def test_two_runs_widen_the_band_but_not_the_interval():
    found = change([[100.0]], [[100.0], [110.0]])
    assert found.basis == "none"
    assert found.band > 0
    assert change([[100.0]], [[100.0], [110.0], [105.0]]).basis == "runs"


def test_fewer_than_five_samples_in_every_run_claim_no_interval():
    three, five = [99.0, 100.0, 101.0], [98.0, 99.0, 100.0, 101.0, 102.0]
    found = change([three], [three])
    assert found.basis == "none"
    assert found.low < 1 < found.high  # what they scatter still counts
    assert change([three], [five]).basis == "samples"


def test_samples_within_runs_are_resampled():
    generator = np.random.default_rng(2)
    new, old = generator.normal(100, 5, 200), generator.normal(100, 5, 200)
    found = change([new.tolist()], [old.tolist()])
    # The median of n normal samples scatters by 1.2533 sigma / sqrt(n); two sides, 98%.
    half = scipy_stats.norm.ppf(0.99) * 1.2533 * 0.05 / math.sqrt(200) * math.sqrt(2)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.3)
    assert found.basis == "samples"


@pytest.mark.parametrize(("new", "old"), [([], [[1.0]]), ([[]], [[1.0]]), ([[math.nan]], [[1.0]]), ([[0.0]], [[1.0]])])
def test_what_cannot_be_compared_is_refused(new, old):
    with pytest.raises(ValueError, match=r"at least one run|no samples|not finite|above zero"):
        change(new, old)


def test_the_default_fills_up_what_too_few_runs_tell():
    """Three runs have two degrees of freedom, the default of 5% takes the other four: s² = (2 x 0.02² + 4 x 0.05²) / 6."""
    runs = [[100 * math.exp(x)] for x in (-0.02, 0.0, 0.02)]
    found = change([[100.0]], runs, default=0.05)
    assert found.spread.dof == 6
    assert found.spread.s == pytest.approx(math.sqrt((2 * 0.02**2 + 4 * 0.05**2) / 6))
    assert math.log(found.high) == pytest.approx(3.143 * found.spread.s * math.sqrt(4 / 3), rel=1e-3)
    assert "default" in found.spread.source and "compared runs" in found.spread.source
    assert change([[100.0]], [[100.0]], default=0.05).basis == "default"
    eight = [[100 * math.exp(0.02 * (-1) ** n)] for n in range(8)]
    assert change([[100.0]], eight, default=0.5).spread.dof == 7  # runs have replaced it


def test_neighbours_that_resemble_each_other_count_as_fewer_samples():
    """An autoregressive series with correlation 0.8 says as much as a ninth of its samples: (1 + 0.8) / (1 - 0.8)."""
    generator = np.random.default_rng(5)
    noise = generator.standard_normal((20, 400))
    for place in range(1, 400):
        noise[:, place] = 0.8 * noise[:, place - 1] + 0.6 * noise[:, place]
    mixed = generator.permuted(noise, axis=1)
    widths = [
        np.mean([np.log(found.high / found.low) for run in runs for found in [estimate([np.exp(0.05 * run).tolist()])]])
        for runs in (noise, mixed)
    ]
    assert widths[0] / widths[1] == pytest.approx(3, rel=0.25)


def shifted(share=0.5, level=2 / 3, n=200, seed=3):
    """A rate of 100 with 5% noise, of which a share in the middle has another level."""
    rates = 100 * np.exp(0.05 * np.random.default_rng(seed).standard_normal(n))
    start = int(n * (1 - share) / 2)
    rates[start : start + int(n * share)] *= level
    return tuple(rates)


def test_a_disturbed_run_counts_with_its_undisturbed_part():
    found = change([shifted()], [shifted(share=0, seed=4)], faster="higher")
    (shift,) = found.disturbed
    assert shift.parts == ((50, 150),)
    assert shift.ratio == pytest.approx(2 / 3, rel=0.03)
    assert found.value == pytest.approx(1, abs=0.02)
    assert found.whole == pytest.approx(math.sqrt(2 / 3), rel=0.03)  # half of the logarithm
    assert change([shifted()], [shifted(share=0, seed=4)]).disturbed == ()  # what is no speed is taken as it is
    assert change([shifted(level=1.5)], [shifted(share=0)], faster="lower").disturbed[0].share == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["steady", "autocorrelated", "heavy-tailed", "drifting"])
def test_noise_is_no_disturbance(kind):
    found = [reading(tuple(run), "ratio", "higher").disturbed for run in runs_of(kind, 0.03, 150)]
    assert sum(shift is not None for shift in found) <= 150 * 0.03
