"""Statistics of the samples of one run: medians, percentiles, 95 % bootstrap intervals of the median (scipy)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True)
class Summary:
    """Of n samples, in their unit. The interval is None for fewer than two samples."""

    n: int
    median: float
    mean: float
    p05: float
    p95: float
    p99: float
    ci_low: float | None
    ci_high: float | None


def summary(samples: Sequence[float]) -> Summary:
    """Summarise finite samples; none, or one that is not finite, raises ``ValueError``."""
    values = finite(samples)
    low, high = median_interval(values) if len(values) > 1 else (None, None)
    p05, median, p95, p99 = (float(value) for value in np.percentile(values, [5, 50, 95, 99]))
    return Summary(len(values), median, float(values.mean()), p05, p95, p99, low, high)


def median_interval(samples: Sequence[float] | np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median of two or more samples, in whatever order."""
    return resampled([np.sort(finite(samples))], lambda values, axis: np.median(values, axis=axis), CONFIDENCE, seed)


def smoothed(values: Sequence[float], window: int | None = None) -> np.ndarray:
    """Return the trailing mean over ``window`` samples (a tenth of them, at least one), as many as went in."""
    array = np.asarray(values, dtype=float)
    width = window or smoothing_window(len(array))
    sums = np.cumsum(np.concatenate([[0.0], array]))
    ends = np.arange(1, len(array) + 1)
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)  # type: ignore[no-any-return]


def smoothing_window(n: int) -> int:
    """Return the width that loss curves of n steps are smoothed with: a tenth, from 1 to 100 steps."""
    return min(100, max(1, n // 10))


def finite(samples: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the samples as an array; none, or one that is not finite, raises ``ValueError``."""
    values = np.asarray(samples, dtype=float)
    if values.size == 0:
        raise ValueError("no samples")
    if not np.isfinite(values).all():
        raise ValueError(f"{int((~np.isfinite(values)).sum())} of {values.size} samples are not finite numbers")
    return values


def resampled(
    data: Sequence[np.ndarray], statistic: Callable[..., np.ndarray], confidence: float, seed: int = 0
) -> tuple[float, float]:
    """Return the bootstrap percentile interval of ``statistic(*data, axis=...)``, each array resampled on its own.

    Every array needs two or more values. Where none of them has any spread the interval is the value itself.
    """
    if all(np.ptp(values) == 0 for values in data):  # scipy would warn of a degenerate distribution
        value = float(statistic(*data, axis=-1))
        return value, value
    from scipy.stats import bootstrap  # takes half a second to import: only who needs an interval pays

    result = bootstrap(
        tuple(data),
        statistic,
        n_resamples=RESAMPLES,
        confidence_level=confidence,
        method="percentile",
        vectorized=True,
        paired=False,
        rng=np.random.default_rng(seed),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)
