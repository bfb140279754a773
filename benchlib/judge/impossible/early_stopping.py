"""How many queries a percentile takes: the early stopping of MLPerf LoadGen (confidence 99%, tolerance 0).

Of h + t queries t may be over the latency if the odds of as few, were the true share of the percentile p not reached, are
at most 1%: P(Binomial(h + t, 1 - p) <= t) <= 0.01. Source: mlcommons/inference, loadgen/early_stopping.cc.
"""

import functools

CONFIDENCE = 0.99


@functools.lru_cache(maxsize=4096)
def queries_needed(percentile: float, over_latency: int) -> int:
    """Return the least queries h + t that prove ``percentile`` (0 to 1, open) with t = ``over_latency`` above the limit."""
    if not 0 < percentile < 1 or over_latency < 0:
        raise ValueError(f"percentile {percentile} and {over_latency} queries: expected 0 < p < 1 and t >= 0")
    from scipy.stats import nbinom

    # As many as bring one more over the limit with 99%.
    return int(nbinom.ppf(CONFIDENCE, over_latency + 1, 1 - percentile)) + over_latency + 1


def set_aside(percentile: float, queries: int) -> int | None:
    """Return how many of the highest latencies a run of ``queries`` sets aside; None where it is too short for any.

    LoadGen takes the largest t whose need the run meets and reports t - 1 as discarded.
    """
    from scipy.stats import binom

    aside = int(binom.ppf(1 - CONFIDENCE, queries, 1 - percentile)) - 2
    return aside if aside >= 0 else None
