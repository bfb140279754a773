"""Predicted rates of workers that share a set of samples, from the rate of each worker alone. Nothing is measured here.

With equal shares n workers need as long as the slowest one for its share, so the joint rate is n · min(r). With shares in
proportion to the rates all end together, at Σ r, which is the most that the workers can reach. Efficiency is the joint rate
over Σ r. Network, dispatcher and the start-up are not part of the prediction.
"""

from collections.abc import Sequence

from benchlib.core.text import quantity

HOUR_S = 3600


def row(split: str, each: Sequence[float], most: float, samples: int) -> dict[str, str]:
    """Return a line of the table; ``each``: rates that add up to the joint rate, ``most``: Σ r, all in samples/s."""
    rate = sum(each)
    return {
        "split": split,
        "joint rate": quantity(rate, "samples/s"),
        f"time for {samples:,} samples": quantity(samples / rate / HOUR_S, "h"),
        "efficiency": f"{rate / most:.1%}",
        "samples of each worker": ", ".join(f"{samples * own / rate:,.0f}" for own in each) if each[1:] else "",
    }


def rows(rates: Sequence[float], samples: int) -> list[dict[str, str]]:
    """Return the predicted lines; ``rates``: samples/s of each worker alone, (n,), each above 0."""
    splits = {"equal shares (predicted)": [min(rates)] * len(rates), "weighted shares (predicted)": rates}
    return [row(name, each, sum(rates), samples) for name, each in splits.items()]
