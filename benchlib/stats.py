"""Statistics of samples. All intervals are 95 % bootstrap percentile intervals of the median, by scipy."""

import math
from collections.abc import Sequence
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
    values = _finite(samples)
    low, high = median_interval(values) if len(values) > 1 else (None, None)
    p05, median, p95, p99 = (float(value) for value in np.percentile(values, [5, 50, 95, 99]))
    return Summary(len(values), median, float(values.mean()), p05, p95, p99, low, high)


def median_interval(samples: Sequence[float] | np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median of two or more samples."""
    return _bootstrap((_finite(samples),), lambda values, axis: np.median(values, axis=axis), seed)


def ratio_interval(candidate: Sequence[float], baseline: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Return median(candidate) / median(baseline) and its 95 % interval.

    Both sides are resampled on their own. With one sample on each side there is no spread to resample and the
    interval is the ratio itself. A baseline whose median is not positive raises ``ValueError``.
    """
    new, old = _finite(candidate), _finite(baseline)
    if np.median(old) <= 0 or old.min() <= 0:
        raise ValueError("a ratio needs a baseline above zero")
    ratio = float(np.median(new) / np.median(old))
    if len(new) < 2 and len(old) < 2:
        return ratio, ratio, ratio
    # scipy refuses a single observation on one side: it is a constant there.
    if len(new) < 2 or len(old) < 2:
        low, high = median_interval(old if len(new) < 2 else new, seed)
        bounds = (
            (float(new[0]) / high, float(new[0]) / low) if len(new) < 2 else (low / float(old[0]), high / float(old[0]))
        )
        return ratio, *bounds
    low, high = _bootstrap((new, old), lambda x, y, axis: np.median(x, axis=axis) / np.median(y, axis=axis), seed)
    return ratio, low, high


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


def _finite(samples: Sequence[float] | np.ndarray) -> np.ndarray:
    values = np.asarray(samples, dtype=float)
    if values.size == 0:
        raise ValueError("no samples")
    if not np.isfinite(values).all():
        raise ValueError(f"{int((~np.isfinite(values)).sum())} of {values.size} samples are not finite numbers")
    return values


def _bootstrap(data: tuple[np.ndarray, ...], statistic: object, seed: int) -> tuple[float, float]:
    if all(np.ptp(values) == 0 for values in data):  # no spread: scipy would warn of a degenerate distribution
        value = float(statistic(*data, axis=-1))  # type: ignore[operator]
        return value, value
    from scipy.stats import bootstrap  # takes half a second to import: only who needs an interval pays

    result = bootstrap(
        data,
        statistic,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        vectorized=True,
        paired=False,
        rng=np.random.default_rng(seed),
    )
    low, high = float(result.confidence_interval.low), float(result.confidence_interval.high)
    assert math.isfinite(low) and math.isfinite(high)
    return low, high
