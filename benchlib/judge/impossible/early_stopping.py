"""How many queries a percentile takes: the early stopping of MLPerf LoadGen (confidence 99%, tolerance 0).

Of h + t queries t may be over the latency if the odds of as few, were the true share of the percentile p not reached, are
at most 1%: BetaRegularized(p; h, t + 1) <= 0.01. Source: mlcommons/inference, loadgen/early_stopping.cc.
"""

import functools
import math

CONFIDENCE = 0.99


@functools.lru_cache(maxsize=4096)
def queries_needed(percentile: float, over_latency: int) -> int:
    """Return the least queries h + t that prove ``percentile`` (0 to 1, open) with t = ``over_latency`` above the limit."""
    if not 0 < percentile < 1 or over_latency < 0:
        raise ValueError(f"percentile {percentile} and {over_latency} queries: expected 0 < p < 1 and t >= 0")
    from scipy.special import betainc

    def proves(within: int) -> bool:
        return float(betainc(within, over_latency + 1, percentile)) <= 1 - CONFIDENCE + 1e-12

    high = max(1, math.ceil(math.log(1 - CONFIDENCE) / math.log(percentile)))
    while not proves(high):
        high *= 2
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if proves(middle) else (middle, high)
    return high + over_latency


def set_aside(percentile: float, queries: int) -> int | None:
    """Return how many of the highest latencies a run of ``queries`` sets aside; None where it is too short for any.

    LoadGen takes the largest t whose need the run meets and reports t - 1 as discarded.
    """
    if queries < queries_needed(percentile, 1):
        return None
    low, high = 1, 2
    while queries >= queries_needed(percentile, high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if queries >= queries_needed(percentile, middle) else (low, middle)
    return low - 1
