"""Statistics of samples: intervals that hold what they promise, and series that drift."""

import numpy as np
import pytest
from scipy.stats import bootstrap

from benchlib.core.stats import average, average_interval, block_length, drift, windows
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
    intervals = [average_interval(samples) for samples in series]
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


def test_the_interval_of_independent_samples_is_that_of_scipy():
    samples = np.random.default_rng(4).lognormal(size=40)
    low, high = bootstrap((np.sort(samples),), np.median, n_resamples=2000, method="percentile", rng=np.random.default_rng(0)).confidence_interval  # fmt: skip
    assert block_length(samples) == 1
    assert average_interval(samples) == pytest.approx((low, high))


@pytest.mark.parametrize("samples", [[1.0], [1.0, 2.0], [5.0] * 50, [0.0] * 9, [1.0, 2.0] * 30, list(range(40))])
def test_short_constant_alternating_and_rising_series_have_an_interval(samples):
    assert 1 <= block_length(samples) <= max(1, len(samples) // 3)
    if len(samples) < 5:
        with pytest.raises(ValueError, match="no interval"):
            average_interval(samples)
    else:
        low, high = average_interval(samples)
        assert min(samples) <= low <= high <= max(samples)


@pytest.mark.parametrize(
    ("levels", "text"),
    [
        ([63, 97, 94, 114], "rose from 63 to 114"),
        ([114, 94, 97, 63], "fell from 114 to 63"),
        ([97, 63, 94, 96], "varied between 63 and 97"),
    ],
)
def test_a_series_whose_quarters_differ_is_not_steady(levels, text):
    assert drift(np.repeat(levels, 10) + np.tile([-1, -0.5, 0, 0.5, 1], 8)) == text


def test_a_steady_series_and_a_short_one_did_not_drift():
    noise = np.random.default_rng(1).normal(0, 3, 40)
    for samples in (94 + noise, np.repeat([94, 96, 98, 99], 10) + noise / 10, [63.0] * 5 + [114.0] * 5):
        assert drift(samples) == ""


def test_independent_noise_is_seldom_called_a_drift():
    rng = np.random.default_rng(2)
    assert sum(drift(rng.normal(100, 15, 24)) != "" for _ in range(60)) <= 6


def test_windows_of_equal_work_average_to_all_work_over_all_time():
    """100 steps of 8 samples, of which every third takes twice as long: the median step hides a third of the time."""
    work, time_s = [8.0] * 99, [0.1, 0.1, 0.2] * 33
    rates = windows(work, time_s)
    assert len(rates) == 40
    assert average(rates, "harmonic") == pytest.approx(99 * 8 / 13.2)  # 60 samples/s, where the typical step makes 80
    assert average([work / time for work, time in zip(work, time_s, strict=True)]) == pytest.approx(80)


def test_windows_follow_the_work_and_not_the_steps():
    """By hand: 1 + 3 samples in 1 s each are two windows of 2: the first ends a third into the second step."""
    assert windows([1.0, 3.0], [1.0, 1.0]) == pytest.approx([2 / (4 / 3), 2 / (2 / 3)])
    assert windows([4.0], [2.0]) == [2.0]
    assert windows([4.0, 4.0], [2.0, 0.0]) == [4.0]
