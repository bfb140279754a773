"""The fit of start-up time and bandwidth: exact lines, numpy's own, outliers, and what no line fits."""

import math

import numpy as np
import pytest

from benchlib.workloads.alpha_beta import fit_alpha_beta

SIZES = np.array([2.0**power for power in range(10, 27)])


@pytest.mark.parametrize(("alpha", "beta"), [(150e-6, 5e-10), (5e-6, 2e-12), (0.0, 1e-9)])
def test_exact_parameters(alpha, beta):
    fit = fit_alpha_beta(SIZES, alpha + beta * SIZES)
    assert fit.alpha_s == pytest.approx(alpha, rel=1e-4, abs=1e-9)
    assert fit.beta_s_per_byte == pytest.approx(beta, rel=1e-4)
    assert fit.half_bytes == pytest.approx(alpha / beta, rel=1e-3, abs=10)
    assert (fit.residual < 1e-3, fit.points) == (True, len(SIZES))


def test_weighted_least_squares_agree_and_outliers_move_it_little():
    seconds = (1e-4 + 4e-10 * SIZES) * np.random.default_rng(1).normal(1, 0.02, len(SIZES))
    fit = fit_alpha_beta(SIZES, seconds)
    beta, alpha = np.polyfit(SIZES, seconds, 1, w=1 / seconds)  # numpy minimises the squares of w * deviation
    assert (fit.alpha_s, fit.beta_s_per_byte) == (pytest.approx(alpha, rel=0.01), pytest.approx(beta, rel=0.01))
    assert fit.residual == pytest.approx(0.02, rel=0.5)
    seconds[3] *= 20  # a neighbour on the machine
    disturbed = fit_alpha_beta(SIZES, seconds)
    _, moved = np.polyfit(SIZES, seconds, 1, w=1 / seconds)
    assert abs(disturbed.alpha_s - 1e-4) < min(0.05 * 1e-4, abs(moved - 1e-4))


def test_a_free_line_with_a_negative_start_is_fitted_anew_within_the_bounds():
    """A line of which alpha is set to 0 afterwards keeps a slope that fits worse than the best one through 0."""
    sizes = SIZES[:14:2]
    seconds = 1e-9 * sizes**1.2  # convex: the free line starts below 0
    fit = fit_alpha_beta(sizes, seconds)
    beta, alpha = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    assert alpha < 0 <= fit.alpha_s
    assert fit.residual < np.sqrt(np.mean((beta * sizes / seconds - 1) ** 2))


@pytest.mark.parametrize(("sizes", "seconds", "reason"), [
    ([1, 1000, 10**6], [1, 1, 2], "3 sizes: a line by size needs 4"),
    ([10, 20, 30, 40], [1, 2, 3, 4], "sizes from 10 to 40 bytes: the largest must be 64 times the smallest"),
    ([2**10, 2**13, 2**16, 2**20], [1e-4, 1e-2, 1e-4, 1e-2], "the times of 4 sizes do not fit a line"),
])  # fmt: skip
def test_no_line_has_its_reason(sizes, seconds, reason):
    fit = fit_alpha_beta(sizes, seconds)
    assert math.isnan(fit.alpha_s) and math.isnan(fit.beta_s_per_byte)
    assert fit.reason.startswith(reason)
