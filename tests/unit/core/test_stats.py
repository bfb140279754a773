"""Statistics of samples: intervals that hold what they promise, and series that drift."""

import math

import numpy as np
import pytest

from benchlib.core.stats import block_length, drift, drift_text, fit_alpha_beta, median_interval, quarters
from benchlib.results.metrics import measured


def correlated(rng, n, phi):
    """Return an AR(1) series about 100 with standard deviation 5; its lag-1 autocorrelation is ``phi``."""
    noise, series = rng.normal(size=n + 100), np.zeros(n + 100)
    for index in range(1, n + 100):
        series[index] = phi * series[index - 1] + noise[index]
    return 100 + 5 * np.sqrt(1 - phi**2) * series[100:]


@pytest.mark.parametrize(("phi", "least"), [(0.0, 0.9), (0.6, 0.82)])
def test_intervals_of_autocorrelated_samples_hold_the_median(phi, least):
    """Intervals of independent samples hold it in two of three series where the lag-1 autocorrelation is 0.6."""
    rng = np.random.default_rng(3)
    series = [correlated(rng, 200, phi) for _ in range(100)]
    intervals = [median_interval(samples) for samples in series]
    assert sum(low <= 100 <= high for low, high in intervals) >= 100 * least
    lengths = [block_length(samples) for samples in series]
    assert np.median(lengths) == 1 if phi == 0 else 4 <= np.median(lengths) <= 12


def test_a_metric_has_the_interval_of_its_samples_in_their_order():
    samples = correlated(np.random.default_rng(5), 100, 0.9)
    inner, outer = (
        measured("speed", values.tolist(), "1/s") for values in (np.random.default_rng(6).permutation(samples), samples)
    )
    assert inner.value == outer.value
    assert outer.ci_high - outer.ci_low > 1.5 * (inner.ci_high - inner.ci_low)


@pytest.mark.parametrize("samples", [[1.0], [1.0, 2.0], [5.0] * 50, [0.0] * 9, [1.0, 2.0] * 30, list(range(40))])
def test_short_constant_alternating_and_rising_series_have_an_interval(samples):
    assert 1 <= block_length(samples) <= max(1, len(samples) // 3)
    if len(samples) < 5:
        with pytest.raises(ValueError, match="no interval"):
            median_interval(samples)
    else:
        low, high = median_interval(samples)
        assert min(samples) <= low <= high <= max(samples)


@pytest.mark.parametrize(
    ("levels", "word", "ends"),
    [
        ([63, 97, 94, 114], "rose", (63, 114)),
        ([114, 94, 97, 63], "fell", (114, 63)),
        ([97, 63, 94, 96], "varied", (63, 97)),
    ],
)
def test_a_series_whose_quarters_differ_is_not_steady(levels, word, ends):
    samples = np.repeat(levels, 10) + np.tile([-1, -0.5, 0, 0.5, 1], 8)
    assert quarters(samples) == levels
    assert drift(samples) == (word, *ends)
    joined = "between {} and {}" if word == "varied" else "from {} to {}"
    assert drift_text(samples) == f"{word} {joined.format(*ends)}"


def test_a_steady_series_and_a_short_one_did_not_drift():
    noise = np.random.default_rng(1).normal(0, 3, 40)
    for samples in (94 + noise, np.repeat([94, 96, 98, 99], 10) + noise / 10, [63.0] * 5 + [114.0] * 5):
        assert drift_text(samples) == ""
    assert quarters([63.0, 114.0]) == []


def test_independent_noise_is_seldom_called_a_drift():
    rng = np.random.default_rng(2)
    assert sum(drift(rng.normal(100, 15, 24)) is not None for _ in range(60)) <= 6


def test_a_fit_finds_exact_parameters():
    sizes = [2.0**power for power in range(10, 28)]
    for alpha, beta in ((150e-6, 5e-10), (5e-6, 2e-12), (0.0, 1e-9)):
        found = fit_alpha_beta(sizes, [alpha + beta * size for size in sizes])
        assert found.alpha_s == pytest.approx(alpha, rel=1e-4, abs=1e-9)
        assert found.beta_s_per_byte == pytest.approx(beta, rel=1e-4)
        assert found.residual < 1e-3
        assert found.points == len(sizes)
    assert found.half_bytes == pytest.approx(0.0, abs=10)


def test_a_fit_agrees_with_weighted_least_squares_and_outliers_move_it_little():
    sizes = np.array([2.0**power for power in range(10, 27)])
    noise = np.random.default_rng(1).normal(1, 0.02, len(sizes))
    seconds = (1e-4 + 4e-10 * sizes) * noise
    found = fit_alpha_beta(sizes, seconds)
    beta, alpha = np.polyfit(sizes, seconds, 1, w=1 / seconds)  # numpy minimises the squares of w * deviation
    assert (found.alpha_s, found.beta_s_per_byte) == (pytest.approx(alpha, rel=0.01), pytest.approx(beta, rel=0.01))
    assert found.residual == pytest.approx(0.02, rel=0.5)
    seconds[3] *= 20  # a neighbour on the machine
    disturbed = fit_alpha_beta(sizes, seconds)
    _, moved = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    assert abs(disturbed.alpha_s / 1e-4 - 1) < 0.05
    assert abs(disturbed.alpha_s - 1e-4) <= abs(moved - 1e-4)


def test_times_on_no_line_are_not_fitted():
    sizes = [2**10, 2**13, 2**16, 2**20]
    found = fit_alpha_beta(sizes, [1e-4, 1e-2, 1e-4, 1e-2])
    assert math.isnan(found.alpha_s) and math.isnan(found.beta_s_per_byte)
    assert found.points == 4 and found.residual > 0.5
    assert (
        found.reason
        == f"the times of 4 sizes do not fit a line: the best one misses them by {found.residual:.0%}, more than 50%"
    )


def test_a_free_line_with_a_negative_start_is_fitted_anew_within_the_bounds():
    """A line of which alpha is set to 0 afterwards keeps a slope that fits worse than the best one through 0."""
    sizes = np.array([2.0**power for power in range(10, 24, 2)])
    seconds = 1e-9 * sizes**1.2  # convex: the free line starts below 0
    fit = fit_alpha_beta(sizes, seconds)
    beta, alpha = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    assert alpha < 0 <= fit.alpha_s
    assert fit.residual < np.sqrt(np.mean((beta * sizes / seconds - 1) ** 2))


def test_too_few_sizes_are_not_fitted():
    assert fit_alpha_beta([1, 1000, 10**6], [1, 1, 2]).reason == "3 sizes: a line by size needs 4"
    assert "the largest must be 64 times the smallest" in fit_alpha_beta([10, 20, 30, 40], [1, 2, 3, 4]).reason
    assert fit_alpha_beta([10, 100, 1000, 10**4], [1, float("nan"), 3, 4]).reason == "3 sizes: a line by size needs 4"
