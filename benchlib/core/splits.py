"""Predicted rates of workers that share a set of samples, from the rate of each worker alone. Nothing is measured here.

With equal shares n workers need as long as the slowest one for its share, so the joint rate is n · min(r). With shares in
proportion to the rates all end together, at Σ r, which is the most that the workers can reach. Efficiency is the joint rate
over Σ r. Network, dispatcher and the start-up are not part of the prediction.
"""

from collections.abc import Sequence

from benchlib.core.text import quantity

HOUR_S = 3600


def split_rates(rates: Sequence[float]) -> dict[str, list[float]]:
    """Return the rate in samples/s that each worker contributes, by split; ``rates``: samples/s of each worker alone, (n,)."""
    return {"equal shares": [min(rates)] * len(rates), "weighted shares": list(rates)}


def row(split: str, rate: float, most: float, samples: int, each: Sequence[float] = ()) -> dict[str, str]:
    """Return a line of the table: ``rate`` and ``most`` (Σ r) in samples/s, ``each``: the rate that each worker contributes."""
    shares = ", ".join(f"{samples * own / rate:,.0f}" for own in each)
    hours = quantity(samples / rate / HOUR_S, "h")
    return {
        "split": split,
        "joint rate": quantity(rate, "samples/s"),
        f"time for {samples:,} samples": hours,
        "efficiency": f"{rate / most:.1%}",
        "samples of each worker": shares,
    }


def rows(rates: Sequence[float], samples: int) -> list[dict[str, str]]:
    """Return the predicted lines: equal shares, then shares in proportion to ``rates`` (samples/s, each above 0)."""
    return [
        row(f"{name} (predicted)", sum(each), sum(rates), samples, each) for name, each in split_rates(rates).items()
    ]
