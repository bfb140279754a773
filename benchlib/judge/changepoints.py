"""Where a series of runs changed its level, how much its runs scatter, and the band in which an unchanged run lies.

Values above zero are compared in logarithms, so that a change is a ratio; a series that touches zero is compared in its
own unit. Method, in this order:

1. The spread s of one run is estimated from neighbours, which share a level whatever happened elsewhere:
   s = 1.4826 MAD(x[i+1] - x[i]) / sqrt 2.
2. A run further than 4 s from the median of the five around it is an outlier and takes part as that median (Hampel 1974).
   One or two odd runs therefore never make a level: a change has to last ``MIN_LEVEL_RUNS`` runs.
3. The levels are the segmentation with the least sum of squares plus ``PENALTY`` s² log n for each change (PELT, Killick,
   Fearnhead and Eckley 2012, in the implementation of ruptures).
4. A change stays where a t test between the levels on its two sides gives p < ``ALPHA``. The penalty alone is too
   lenient for series of a dozen runs, in which s is hardly known.

Penalty and ALPHA were set so that unchanged series of 6 to 1,000 runs whose noise is independent show less than one change
in 1,000 runs (``scripts/bench_changes.py`` measures it). Runs of a host that drifts or has neighbours show more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_LEVEL_RUNS = 3  # runs of a level
SCATTER = 5  # runs of a series from which on its band means something
PENALTY = 4.0  # times s² log n
ALPHA = 5e-4
OUTLIER = 4.0  # times s, from the median of the five runs around
MIN_SPREAD = 1e-3  # of a value: rounding, and what nobody would call a change
TINY = 1e-100  # what is smaller counts as 0: its square would be
COVERAGE = 0.95  # of unchanged runs lie within the band


@dataclass(frozen=True)
class Level:
    """Runs ``start`` to ``end`` (not included) of a series: their median and the band of a further unchanged run.

    ``low`` and ``high`` equal the median where fewer than ``SCATTER`` runs say how much runs scatter.
    """

    start: int
    end: int
    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Levels:
    """A series as levels in order of time. ``spread`` is the standard deviation of one run about its level.

    It is of log values where ``ratio`` is True, so 0.02 stands for 2%, and in the series' unit otherwise. ``free`` is
    the number of runs that it was estimated from, less one for each level.
    """

    levels: tuple[Level, ...]
    spread: float
    free: int
    ratio: bool


def levels(values: Sequence[float]) -> Levels:
    """Split a series of finite values, in order of time, where its level changed. No values raise ``ValueError``."""
    raw = np.asarray(values, dtype=float)
    if raw.size == 0 or not np.isfinite(raw).all():
        raise ValueError("levels need at least one value, all of them finite")
    ratio = bool(raw.min() > 0)
    x = np.log(raw) if ratio else raw
    least = MIN_SPREAD if ratio else MIN_SPREAD * (float(np.abs(x).max()) if np.abs(x).max() > TINY else 1.0)
    spread = max(_spread_of_neighbours(x), least)
    clean = _without_outliers(x, spread)
    ends = _confirmed(clean, _segment_ends(clean, spread), least)
    starts = [0, *ends[:-1]]
    around = np.concatenate([clean[a:b] - np.median(clean[a:b]) for a, b in zip(starts, ends, strict=True)])
    free = len(x) - len(ends)
    if free > 0:
        spread = max(math.sqrt(float(np.square(around).sum()) / free), least)
    back = np.exp if ratio else np.asarray
    levels = []
    for start, end in zip(starts, ends, strict=True):
        median = float(back(np.median(clean[start:end])))
        has_spread = free >= SCATTER - 1
        low, high = _band(median, spread, end - start, free, ratio) if has_spread else (median, median)
        levels.append(Level(start, end, median, low, high))
    return Levels(tuple(levels), spread, free, ratio)


def _spread_of_neighbours(x: np.ndarray) -> float:
    if len(x) < 2:
        return 0.0
    steps = np.abs(np.diff(x))
    # Half of the differences may be zero (scores of few questions): their mean then says how far the others scatter.
    return float(1.4826 * np.median(steps) or math.sqrt(math.pi / 2) * steps.mean()) / math.sqrt(2)


def _without_outliers(x: np.ndarray, spread: float) -> np.ndarray:
    if len(x) < 2 * MIN_LEVEL_RUNS - 1:
        return x
    reach = MIN_LEVEL_RUNS - 1
    # At both ends the five outermost runs judge: two odd ones there are a minority as well, three are a level.
    around = np.lib.stride_tricks.sliding_window_view(x, 2 * reach + 1)
    middle = np.pad(np.median(around, axis=1), reach, mode="edge")
    return np.where(np.abs(x - middle) > OUTLIER * spread, middle, x)


def _segment_ends(x: np.ndarray, spread: float) -> list[int]:
    if len(x) < 2 * MIN_LEVEL_RUNS:
        return [len(x)]
    from ruptures import KernelCPD  # half a second to import: only who has a history pays

    search = KernelCPD(kernel="linear", min_size=MIN_LEVEL_RUNS).fit(x.reshape(-1, 1))
    return [int(end) for end in search.predict(pen=PENALTY * spread**2 * math.log(len(x)))]


def _confirmed(x: np.ndarray, ends: list[int], least: float) -> list[int]:
    """Drop the least certain change until a t test confirms all that stay."""
    ends = list(ends)
    while len(ends) > 1:
        edges = [0, *ends]
        chances = [_chance(x[a:b], x[b:c], least) for a, b, c in zip(edges, edges[1:], edges[2:], strict=False)]
        worst = int(np.argmax(chances))
        if chances[worst] < ALPHA:
            break
        del ends[worst]
    return ends


def _chance(item: np.ndarray, other: np.ndarray, least: float) -> float:
    """Return p of the two-sided t test with pooled variance, each side scattering by ``least`` or more."""
    from scipy.stats import ttest_ind_from_stats

    sides = [(side.mean(), max(float(side.std(ddof=1)), least), len(side)) for side in (item, other)]
    return float(ttest_ind_from_stats(*sides[0], *sides[1]).pvalue)


def _band(median: float, spread: float, runs: int, free: int, ratio: bool) -> tuple[float, float]:
    """Return the band of a further run, half as wide as t s sqrt(1 + pi / 2n): the spread of a run and of the median."""
    from scipy.special import stdtrit

    half = float(stdtrit(free, (1 + COVERAGE) / 2)) * spread * math.sqrt(1 + math.pi / (2 * runs))
    return (median * math.exp(-half), median * math.exp(half)) if ratio else (median - half, median + half)
