"""Statistics of the samples of one run: medians, percentiles, 95% bootstrap intervals of the median, and whether they drift.

Samples are in the order in which they were taken. Neighbours that resemble each other say less than independent samples do.
"""

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

# How several samples make one number. Rates of equal work average harmonically, which is all work over all time: T. Hoefler and
# R. Belli, "Scientific Benchmarking of Parallel Computing Systems", 2015, rule 3. A median of rates is that of the typical step.
Average = Literal["median", "mean", "harmonic"]

RESAMPLES = 2000
WINDOWS = (
    40  # of equal work: enough to tell stalls from the undisturbed rate, and few enough to hold several steps each
)
FASTEST = 0.1  # of the windows of a run: those that nothing disturbed, wherever a tenth of it was left alone
MIN_FOR_LEVEL = 20  # windows: a tenth of fewer is a single one
MIN_FOR_INTERVAL = 5  # samples: the range of n holds the median with 1 - 2^(1 - n), 75% for three and 94% for five
MIN_PER_QUARTER = 5  # samples: with fewer, one slow step makes a quarter differ
MIN_DRIFT = 1.1  # of the largest median of a quarter over the smallest: less is noise to a reader


def description(samples: Sequence[float]) -> dict[str, float]:
    """Return mean, sample standard deviation, minimum, maximum and percentiles of samples, in their unit; empty for none."""
    if not len(samples):
        return {}
    deviation = float(np.std(samples, ddof=1)) if len(samples) > 1 else math.nan
    ends = {"mean": float(np.mean(samples)), "deviation": deviation, "minimum": min(samples), "maximum": max(samples)}
    return ends | {f"p{percent}": percentile(samples, percent / 100) for percent in (50, 90, 95, 99)}


def _inverse(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):  # a rate of zero makes the whole rate zero
        return 1 / values


# Each averages over the last axis.
AVERAGES: Mapping[Average, Callable[[np.ndarray], np.ndarray]] = {
    "median": lambda values: np.asarray(np.median(values, axis=-1)),
    "mean": lambda values: np.asarray(np.mean(values, axis=-1)),
    "harmonic": lambda values: np.asarray(1 / np.mean(_inverse(values), axis=-1)),
}


def average(samples: Sequence[float], kind: Average = "median") -> float:
    """Return one number for samples, in their unit; ``ValueError`` for none. One that is not a number makes the mean none, too."""
    if kind == "median" or not samples:
        return statistics.median(samples)
    return float(AVERAGES[kind](np.asarray(samples, dtype=float)))


def windows(work: Sequence[float], time_s: Sequence[float], count: int = WINDOWS) -> list[float]:
    """Return the rates of windows of equal work, per second: at most ``count``, and at most one a step.

    ``work`` and ``time_s`` are those of consecutive steps; the work of a step spreads evenly over its time. The harmonic mean of the
    rates is all work over all time. Work or times that are not above zero or not finite give one rate, that of all steps.
    """
    amounts, seconds = np.asarray(work, dtype=float), np.asarray(time_s, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = float(amounts.sum() / seconds.sum())
    if not (np.isfinite(amounts).all() and (amounts > 0).all() and np.isfinite(seconds).all() and (seconds > 0).all()):
        return [whole]
    number = min(count, len(amounts))
    done, ends_s = np.append(0.0, amounts.cumsum()), np.append(0.0, seconds.cumsum())
    marks_s = np.interp(np.linspace(0.0, done[-1], number + 1), done, ends_s)
    rates: list[float] = (done[-1] / number / np.diff(marks_s)).tolist()
    return rates


def undisturbed(rates: Sequence[float]) -> float | None:
    """Return the whole rate of the fastest tenth of the ``windows`` of a run, in their unit; None of fewer than twenty.

    What takes the machine for a part of a run lowers the rate of the run and not this one; slower work lowers both.
    """
    if len(rates) < MIN_FOR_LEVEL:
        return None
    return average(sorted(rates)[-round(FASTEST * len(rates)) :], "harmonic")


class Summary(NamedTuple):
    """Of samples, in their unit. The interval is None for fewer than five: not even their range holds the median so often."""

    value: float
    ci_low: float | None
    ci_high: float | None


def summary(samples: Sequence[float], kind: Average = "median") -> Summary:
    """Summarise finite samples; none, or one that is not finite, raises ``ValueError``."""
    values = finite(samples)
    ends = _interval(tuple(values), kind) if len(values) >= MIN_FOR_INTERVAL else (None, None)
    return Summary(average(values.tolist(), kind), *ends)


def average_interval(samples: Sequence[float] | np.ndarray, kind: Average = "median") -> tuple[float, float]:
    """Return the 95% bootstrap interval of the average of five or more samples in the order in which they were taken.

    Autocorrelated samples are resampled in blocks (``block_length``) of a circle: D. N. Politis and J. P. Romano, "A circular
    block-resampling procedure for stationary data", Exploring the Limits of Bootstrap, 1992. Fewer raise ``ValueError``.
    """
    values = finite(samples)
    if len(values) < MIN_FOR_INTERVAL:
        raise ValueError(f"{len(values)} samples have no interval of 95%: {MIN_FOR_INTERVAL} are needed")
    n, length = len(values), block_length(values)
    if length == 1:
        values = np.sort(values)  # one interval for any order
    starts = np.random.default_rng(0).integers(n, size=(RESAMPLES, math.ceil(n / length), 1))
    places = (starts + np.arange(length)).reshape(RESAMPLES, -1)[:, :n] % n
    return tuple(np.percentile(AVERAGES[kind](values[places]), [2.5, 97.5]).tolist())  # type: ignore[return-value]


_interval = functools.lru_cache(1024)(average_interval)  # the same series is summarised several times


def percentile(samples: Sequence[float] | np.ndarray, share: float) -> float:
    """Return a percentile by linear interpolation between the two samples next to it; NaN of no samples.

    ``share`` is from 0 to 1. It is numpy's default, definition 7 of R. J. Hyndman and Y. Fan, "Sample quantiles in statistical
    packages", The American Statistician 50, 1996: p50 is the median.
    """
    with np.errstate(invalid="ignore"):  # between two infinite samples there is no number
        return float(np.quantile(samples, share)) if len(samples) else math.nan


def loadgen_percentile(samples: Sequence[float] | np.ndarray, share: float) -> float:
    """Return ``sorted[int(n share)]``, a sample as MLPerf's LoadGen takes it, with ``share`` from 0 to 1; NaN of no samples."""
    ordered = np.sort(samples)
    return float(ordered[min(int(len(ordered) * share), len(ordered) - 1)]) if len(ordered) else math.nan


def queries_needed(share: float, late: int) -> int:
    """Return the least queries that show with 99% confidence that a ``share`` of all (0 to 1, open) is in time, ``late`` of them not.

    Of n independent queries so few are late by chance, P(Binomial(n, 1 - share) <= late) <= 0.01. It is the early stopping of MLPerf
    LoadGen without tolerance: mlcommons/inference, loadgen/early_stopping.cc.
    """
    from scipy.special import nbdtrik  # scipy.stats takes a second to import

    # As many as bring one more over the limit with 99%.
    return math.ceil(nbdtrik(0.99, late + 1, 1 - share)) + late + 1


def early_stopping_estimate(samples: Sequence[float] | np.ndarray, share: float) -> float:
    """Return a sample that bounds a percentile with 99% confidence; NaN of fewer samples than ``queries_needed(share, 1)``.

    It is MLPerf LoadGen's result of SingleStream (mlcommons/inference, loadgen/results.cc): ``sorted[n - late]`` with as many late
    ones as n samples allow. So it is the next sample above the least one that would do.
    """
    ordered, late = np.sort(samples), 0
    while queries_needed(share, late + 1) <= len(ordered):
        late += 1
    return float(ordered[-late]) if late else math.nan


def percentile_interval(samples: Sequence[float] | np.ndarray, share: float) -> tuple[float | None, float | None]:
    """Return the 95% interval of a percentile by its order statistics: binomial, no distribution is assumed.

    An end whose order statistic would lie outside the samples is None: 64 samples bound their p99 from below only, since all
    of them lie under it with 0.99^64 = 53%. The upper end of p99 takes 368.
    """
    from scipy.special import bdtr  # scipy.stats takes a second to import

    ordered, n = np.sort(samples), len(samples)
    low, high = np.searchsorted(bdtr(np.arange(n), n, share), (0.025, 0.975))
    return float(ordered[low - 1]) if low else None, float(ordered[high]) if high < n else None


def block_length(samples: Sequence[float] | np.ndarray) -> int:
    """Return the length of the blocks to resample samples in, from their autocorrelation; 1 where they have none.

    The rule for circular blocks of D. N. Politis and H. White, "Automatic block-length selection for the dependent
    bootstrap", Econometric Reviews 23, 2004, with the correction by Patton, Politis and White in volume 28, 2009. At most
    3 sqrt(n), and a third of the n samples.
    """
    n, (time, slope) = len(samples), _memory(samples)
    if time <= 0 or slope <= 0:  # independent, or neighbours alternate: that of independent samples is wide enough
        return 1
    length = (1.5 * (slope / time) ** 2 * n) ** (1 / 3)
    return max(1, min(round(length), math.ceil(3 * math.sqrt(n)), n // 3))


def _memory(samples: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Return how many samples say as much as one independent one, and the slope that the block length needs; (1, 0) without memory."""
    centred = finite(samples) - np.mean(samples)
    n = len(centred)
    near = 5  # lags that must all be small for the memory to have ended
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
    if n < MIN_FOR_INTERVAL:
        half = z * float(samples.std(ddof=1)) * math.sqrt(math.pi / 2 / n)
        return half, half
    half = min(0.5, z / 2 / math.sqrt(n / max(1.0, _memory(samples)[0])))
    low, middle, high = np.quantile(samples, [0.5 - half, 0.5, 0.5 + half])
    return float(middle - low), float(high - middle)


def average_end(samples: np.ndarray, z: float, kind: Average) -> float:
    """Return how far below and above the mean or harmonic mean of samples its interval ends, in their unit.

    z is the normal quantile of the confidence, the n samples say as much as m independent ones: z s / sqrt(m). The harmonic mean H
    varies as the mean of H² / x does (delta method: A. W. van der Vaart, Asymptotic Statistics, 1998, chapter 3).
    """
    whole = float(AVERAGES[kind](samples))
    if len(samples) < 2 or np.ptp(samples) == 0 or whole == 0:
        return 0.0
    parts = samples if kind == "mean" else whole**2 / samples
    return z * float(parts.std(ddof=1)) * math.sqrt(max(1.0, _memory(parts)[0]) / len(parts))


def drift(samples: Sequence[float]) -> str:
    """Say how a series moved, without the unit: ``rose from 63 to 114``; '' for a steady one and for fewer than twenty samples.

    It moved where the largest median of a quarter is more than 1.1 times the smallest and their 95% intervals do not
    overlap. Then no one number stands for the series.
    """
    if len(samples) < 4 * MIN_PER_QUARTER:
        return ""
    parts = np.array_split(finite(samples), 4)
    medians = [float(np.median(part)) for part in parts]
    least, most = int(np.argmin(medians)), int(np.argmax(medians))
    apart = average_interval(parts[least])[1] < average_interval(parts[most])[0]
    if medians[most] <= MIN_DRIFT * medians[least] or not apart:
        return ""
    if {least, most} == {0, 3}:
        return f"{'rose' if most == 3 else 'fell'} from {medians[0]:.3g} to {medians[3]:.3g}"
    return f"varied between {medians[least]:.3g} and {medians[most]:.3g}"


def smoothed(values: Sequence[float]) -> np.ndarray:
    """Return the trailing mean over ``smoothing_window`` samples, as many as went in."""
    import pandas as pd  # here: the terminal reads statistics and no frames

    return pd.Series(values, dtype=float).rolling(smoothing_window(len(values)), min_periods=1).mean().to_numpy()  # type: ignore[no-any-return]


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


def thinned(samples: Sequence[float], count: int) -> list[float]:
    """Return the samples as they are, or of more than ``count`` those with the ranks (i + 1/2) / count, in their order.

    The ranks keep the median and the spread (every second sample of a series that alternates would not), the order keeps
    where a level shifted.
    """
    values = np.asarray(samples, dtype=float)
    if len(values) > count:
        places = np.argsort(values, kind="stable")[((np.arange(count) + 0.5) * len(values) / count).astype(int)]
        values = values[np.sort(places)]
    return values.tolist()  # type: ignore[no-any-return]
