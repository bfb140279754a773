"""How often history sees a change that is none, and how soon it sees one that is.

Method: ``benchlib.judge.changepoints.levels`` on simulated series whose log values scatter with the standard deviations that
public logs of GPU hosts show (1.5% on one host, 4.6% between hosts), normal, and with one run in 25 odd by 20%. False
change points are counted per 1,000 runs over series of 6 to 1,000 runs. A step is put behind 30 runs and counts as
detected where a change lies within three runs of it.

    python scripts/bench_changes.py
"""

import numpy as np
from measuring import options_of

from benchlib.judge.changepoints import levels

RUNS = 40_000  # simulated for each figure
SPREADS = (0.015, 0.046)
BEFORE = 30
TRIALS = 400


def series(rng: np.random.Generator, n: int, spread: float, odd: float) -> list[float]:
    """Return n values about 1 whose logs have the standard deviation ``spread``; a share ``odd`` is off by 20%."""
    x = rng.normal(0, spread, n)
    return list(np.exp(x + 0.2 * rng.choice([-1, 1], n) * (rng.random(n) < odd)))


def false_changes(n: int, spread: float, odd: float, runs: int = RUNS, seed: int = 1) -> float:
    """Return the change points per 1,000 runs in unchanged series of n runs."""
    rng = np.random.default_rng(seed)
    count = max(1, runs // n)
    return 1000 * sum(len(levels(series(rng, n, spread, odd)).levels) - 1 for _ in range(count)) / (count * n)


def detected(step: float, spread: float, after: int, odd: float = 0.0, trials: int = TRIALS, seed: int = 2) -> float:
    """Return the share of steps that are detected ``after`` runs behind them."""
    rng = np.random.default_rng(seed)
    hits = 0
    for _ in range(trials):
        values = series(rng, BEFORE + after, spread, odd)
        values[BEFORE:] = [value * (1 + step) for value in values[BEFORE:]]
        hits += any(abs(level.start - BEFORE) <= 3 for level in levels(values).levels[1:])
    return hits / trials


def main() -> None:
    options_of(__doc__).parse_args()
    print("false change points per 1,000 unchanged runs")
    for spread in SPREADS:
        for odd in (0.0, 0.04):
            row = "  ".join(f"n={n}: {false_changes(n, spread, odd):.2f}" for n in (6, 8, 12, 20, 50, 200, 1000))
            print(f"  spread {spread:.1%}, {odd:.0%} odd runs   {row}")
    print(f"share of steps detected after m runs ({BEFORE} runs before)")
    for spread in SPREADS:
        for step in (0.05, 0.15):
            row = "  ".join(f"m={m}: {detected(step, spread, m):.0%}" for m in (3, 4, 5, 7, 10, 15, 20, 30, 50))
            print(f"  spread {spread:.1%}, step {step:.0%}   {row}")


if __name__ == "__main__":
    main()
