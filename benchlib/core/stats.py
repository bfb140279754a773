"""Statistics of the samples of one run: medians, percentiles, 95% bootstrap intervals of the median, and whether they drift.

Samples are in the order in which they were taken. Neighbours of a series that was disturbed for a while resemble each
other and say less than as many independent samples do: their interval comes from resampled blocks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000
LEAST_FOR_INTERVAL = 5  # samples: the range of n holds the median with 1 - 2^(1 - n), 75% for three and 94% for five
LEAST_PER_QUARTER = 5  # samples: with fewer, one slow step makes a quarter differ
DRIFT = 1.1  # of the largest median of a quarter over the smallest: less is noise to a reader
LEAST_FOR_P95 = 20  # samples: of fewer no twentieth exists
LEAST_POINTS = 4  # of a fit of times by size
LEAST_SPAN = 64.0  # largest size / smallest
MOST_RESIDUAL = 0.5  # a line that misses its points by half of their times describes none of them


@dataclass(frozen=True)
class Summary:
    """Of n samples, in their unit. The interval is None for fewer than five samples: not even their range holds the median so often."""

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
    low, high = median_interval(values) if len(values) >= LEAST_FOR_INTERVAL else (None, None)
    p05, median, p95, p99 = (float(value) for value in np.percentile(values, [5, 50, 95, 99]))
    return Summary(len(values), median, float(values.mean()), p05, p95, p99, low, high)


def median_interval(samples: Sequence[float] | np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Return the 95% bootstrap interval of the median of five or more samples in the order in which they were taken.

    Autocorrelated samples are resampled in blocks (``block_length``) from the series closed to a circle: D. N. Politis and
    J. P. Romano, "A circular block-resampling procedure for stationary data", in Exploring the Limits of Bootstrap, 1992.
    Fewer samples raise ``ValueError``: no resampling makes an interval of 95% of them.
    """
    values = finite(samples)
    if len(values) < LEAST_FOR_INTERVAL:
        raise ValueError(f"{len(values)} samples have no interval of {CONFIDENCE:.0%}: {LEAST_FOR_INTERVAL} are needed")
    length = block_length(values)
    if length == 1:
        return resampled([np.sort(values)], lambda data, axis: np.median(data, axis=axis), CONFIDENCE, seed)
    starts = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, math.ceil(len(values) / length), 1))
    places = (starts + np.arange(length)).reshape(RESAMPLES, -1)[:, : len(values)] % len(values)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(np.median(values[places], axis=1), [tail, 100 - tail])
    return float(low), float(high)


def percentile(samples: Sequence[float] | np.ndarray, share: float) -> float:
    """Return ``sorted[int(n share)]``, a sample as LoadGen takes it, with ``share`` from 0 to 1; NaN of no samples."""
    ordered = np.sort(np.asarray(samples, float))
    return float(ordered[min(int(len(ordered) * share), len(ordered) - 1)]) if len(ordered) else math.nan


def percentile_interval(samples: Sequence[float] | np.ndarray, share: float) -> tuple[float | None, float | None]:
    """Return the 95% interval of a percentile by its order statistics: binomial, no distribution is assumed.

    An end whose order statistic would lie outside the samples is None: 64 samples bound their p99 from below only, since all
    of them lie under it with 0.99^64 = 53%. The upper end of p99 takes 368.
    """
    from scipy.stats import binom

    ordered = np.sort(np.asarray(samples, float))
    low, high = (int(binom.ppf(part, len(ordered), share)) for part in (0.025, 0.975))
    return float(ordered[low - 1]) if low else None, float(ordered[high]) if high < len(ordered) else None


def block_length(samples: Sequence[float] | np.ndarray) -> int:
    """Return the length of the blocks to resample samples in, from their autocorrelation; 1 where they have none.

    The rule for circular blocks of D. N. Politis and H. White, "Automatic block-length selection for the dependent
    bootstrap", Econometric Reviews 23, 2004, with the correction by Patton, Politis and White in volume 28, 2009. At most
    3 sqrt(n), and a third of the n samples.
    """
    n, (time, slope) = len(samples), _memory(samples)
    if (
        time <= 0 or slope <= 0
    ):  # independent, or neighbours alternate: the interval of independent samples is wide enough
        return 1
    length = (1.5 * (slope / time) ** 2 * n) ** (1 / 3)
    return max(1, min(round(length), math.ceil(3 * math.sqrt(n)), n // 3))


def _memory(samples: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Return how many samples say as much as one independent one, and the slope that the block length needs; (1, 0) without memory."""
    centred = finite(samples) - np.mean(samples)
    n = len(centred)
    near = max(
        5, math.ceil(math.sqrt(math.log10(max(n, 2))))
    )  # lags that must all be small for the memory to have ended
    covariance = np.array([centred[: n - lag] @ centred[lag:] / n for lag in range(min(n, math.isqrt(n) + 1 + near))])
    if n < 4 or covariance[0] <= 1e-12 * float(np.mean(np.square(samples))):
        return 1.0, 0.0
    large = np.flatnonzero(np.abs(covariance[1:]) >= 2 * math.sqrt(math.log10(n) / n) * covariance[0]) + 1
    # The last lag before ``near`` small ones in a row.
    ends = [lag for lag in (0, *large) if not np.isin(np.arange(lag + 1, lag + near + 1), large).any()]
    if ends[0] == 0:
        return 1.0, 0.0
    lags = np.arange(1, min(2 * int(ends[0]), len(covariance) - 1) + 1)
    weights = np.clip(2 * (1 - lags / (2 * ends[0])), 0, 1)  # flat to one half, then falling to zero
    spectrum = 1 + 2 * float(weights @ covariance[lags]) / covariance[0]
    return float(spectrum), 2 * float(weights @ (lags * covariance[lags])) / float(covariance[0])


def median_ends(samples: np.ndarray, z: float) -> tuple[float, float]:
    """Return how far below and above the median of samples, in the order in which they were taken, its interval ends.

    z is the normal quantile of the confidence. The ends are the order statistics at n/2 -+ z n / (2 sqrt m), where the n
    samples say as much as m independent ones; of fewer than five samples they follow from the standard deviation.
    """
    n = len(samples)
    if n < 2 or np.ptp(samples) == 0:
        return 0.0, 0.0
    if n < LEAST_FOR_INTERVAL:
        half = z * float(samples.std(ddof=1)) * math.sqrt(math.pi / 2 / n)
        return half, half
    half = min(0.5, z / 2 / math.sqrt(n / max(1.0, _memory(samples)[0])))
    low, middle, high = np.quantile(samples, [0.5 - half, 0.5, 0.5 + half])
    return float(middle - low), float(high - middle)


def quarters(samples: Sequence[float]) -> list[float]:
    """Return the medians of the four quarters of a series; none of fewer than twenty samples."""
    if len(samples) < 4 * LEAST_PER_QUARTER:
        return []
    return [float(np.median(part)) for part in np.array_split(finite(samples), 4)]


def drift(samples: Sequence[float]) -> tuple[str, float, float] | None:
    """Return how a series moved, as "rose", "fell" or "varied" with two medians of quarters; None for a steady or short one.

    It moved where the largest median of a quarter is more than 1.1 times the smallest and their 95% intervals do not
    overlap. Then no one number stands for the series.
    """
    medians = quarters(samples)
    if not medians:
        return None
    parts = np.array_split(finite(samples), 4)
    least, most = int(np.argmin(medians)), int(np.argmax(medians))
    if medians[most] <= DRIFT * medians[least] or median_interval(parts[least])[1] >= median_interval(parts[most])[0]:
        return None
    if {least, most} == {0, 3}:
        return "rose" if most == 3 else "fell", medians[0], medians[3]
    return "varied", medians[least], medians[most]


def drift_text(samples: Sequence[float]) -> str:
    """Write a drift for a reader, without the unit: ``rose from 63 to 114``; '' for a series that did not."""
    moved = drift(samples)
    if moved is None:
        return ""
    word, first, last = moved
    return (
        f"{word} between {first:.3g} and {last:.3g}" if word == "varied" else f"{word} from {first:.3g} to {last:.3g}"
    )


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


@dataclass(frozen=True)
class AlphaBeta:
    """t = alpha_s + S * beta_s_per_byte, all NaN where there is no fit; ``reason`` says why. ``residual`` is the relative RMS.

    The model is Hockney's (R. W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel
    Computing 20, 1994).
    """

    alpha_s: float = math.nan
    beta_s_per_byte: float = math.nan
    residual: float = math.nan
    points: int = 0
    reason: str = ""

    @property
    def half_bytes(self) -> float:
        """Hockney's n1/2: the size at which half of the bandwidth is reached, in bytes."""
        return self.alpha_s / self.beta_s_per_byte


def fit_alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta:
    """Fit start-up time and bandwidth to times in seconds by size in bytes; both parameters are bounded to 0 and above.

    Relative deviations count, outliers less. Too few sizes, too small a span of sizes, and times that do not fit a line give
    NaN and the reason.
    """
    x, y = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    good = np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)
    x, y = x[good], y[good]
    if len(set(x)) < LEAST_POINTS:
        return AlphaBeta(points=len(set(x)), reason=f"{len(set(x))} sizes: a line by size needs {LEAST_POINTS}")
    if x.max() / x.min() < LEAST_SPAN:
        return AlphaBeta(
            points=len(x), reason=f"sizes from {x.min():.0f} to {x.max():.0f} bytes: the largest must be {LEAST_SPAN:.0f} times the smallest"
        )  # fmt: skip
    from scipy.optimize import least_squares  # takes a while to import: only who fits pays

    # In units of the data, so that both parameters are near one.
    scale = np.array([y.min(), max((y / x).min(), 1e-30)])
    solved = least_squares(
        lambda p: (p[0] * scale[0] + p[1] * scale[1] * x) / y - 1,
        x0=[1.0, 1.0],
        bounds=([0.0, 1e-12], [np.inf, np.inf]),
        loss="soft_l1",
        f_scale=0.1,
        x_scale=[1.0, 1.0],
    )
    alpha, beta = solved.x * scale
    residual = float(np.sqrt(np.mean(((alpha + beta * x) / y - 1) ** 2)))
    if residual > MOST_RESIDUAL:
        reason = f"the times of {len(x)} sizes do not fit a line: the best one misses them by {residual:.0%}, more than {MOST_RESIDUAL:.0%}"
        return AlphaBeta(residual=residual, points=len(x), reason=reason)
    return AlphaBeta(float(alpha), float(beta), residual, len(x))


def thinned(samples: Sequence[float], kept: int) -> list[float]:
    """Return the samples as they are, or of more than ``kept`` those with the ranks (i + 1/2) / kept, in their order.

    The ranks keep the median and the spread (every second sample of a series that alternates would not), the order keeps
    where a level shifted.
    """
    return [float(samples[place]) for place in kept_places(samples, kept)]


def kept_places(samples: Sequence[float] | np.ndarray, kept: int) -> Sequence[int]:
    """Return where the samples stand that ``thinned`` keeps."""
    if len(samples) <= kept:
        return range(len(samples))
    places = np.argsort(np.asarray(samples, dtype=float), kind="stable")
    return np.sort(places[((np.arange(kept) + 0.5) * len(samples) / kept).astype(int)]).tolist()  # type: ignore[no-any-return]
