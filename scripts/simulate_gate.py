"""How often the gate is wrong or undecided, by the number of accepted runs: the rule before and the rule now, side by side.

Question: of one new run against 1 to 10 accepted ones, how often does an unchanged one FAIL or stay AMBIGUOUS, and how often is
a loss found?
Method: made-up runs of 200 samples (``benchlib.judge.noise``: steady, autocorrelated, heavy-tailed, drifting, with a
neighbour), whose levels differ by 3 or 4%; a limit of 20%. Comparisons draw their runs from a pool of ``--pool`` runs. The
rule now is the gate's own code (``compared`` and ``status_of``). The rule before was: threshold is the limit or the A/A band,
whichever is wider; FAIL where the whole 98% interval lies beyond it, PASS where it lies within; the interval is the wider of
the bootstrap of the medians and of Student's t with the spread between these runs alone, from two degrees of freedom on.

    python scripts/simulate_gate.py [--comparisons 2000] [--pool 600] [--between 0.03,0.04] [--seed 0]
"""

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.stats import t

from benchlib.judge.change import Reading, compared, reading
from benchlib.judge.noise import KINDS, runs_of
from benchlib.judge.regression import RegressionLimit, default_spread, status_of
from benchlib.results.metrics import measured

LIMIT = RegressionLimit(metric="rate", share=0.2)
ACCEPTED = (1, 2, 3, 4, 5, 7, 10)
RESAMPLES = 1000
QUESTIONS = (("unchanged: FAIL", 0.0, ("FAIL",)), ("unchanged: undecided", 0.0, ("AMBIGUOUS",)),
             ("loss of 10%: FAIL", 0.1, ("FAIL",)), ("loss of 30%: FAIL", 0.3, ("FAIL",)),
             ("loss of 30%: FAIL or undecided", 0.3, ("FAIL", "AMBIGUOUS")), ("loss of 45%: FAIL", 0.45, ("FAIL",)))  # fmt: skip


def before(boot: np.ndarray, medians: np.ndarray, new: int, old: Sequence[int], loss: float) -> str:
    """Return what the former rule said. ``boot`` holds (R, RESAMPLES) logarithms of resampled medians."""
    move = math.log1p(-loss)
    value = medians[new] + move - medians[old].mean()
    low, high = np.percentile(boot[new] + move - boot[old].mean(axis=0), [1, 99])
    band, count = 0.0, len(old)
    if count > 1:
        s = float(medians[old].std(ddof=1))
        band = 1.96 * math.sqrt(2) * s
        if count > 2:
            half = t.ppf(0.99, count - 1) * s * math.sqrt(1 + 1 / count)
            low, high = min(low, value - half), max(high, value + half)
    bound = min(math.log(0.8), -band)
    if value >= 0 or low >= bound:
        return "PASS"
    return "FAIL" if high < bound else "AMBIGUOUS"


def now(readings: Sequence[Reading], new: int, old: Sequence[int], loss: float, others: float = 0.0) -> str:
    """Return what the gate says where ``others`` took a share of the processors."""
    item, move = readings[new], math.log1p(-loss)
    slower = replace(item, value=item.value + move, whole=item.whole + move)
    default = default_spread(measured("rate", 1.0, "samples/s", "higher"), LIMIT, "ratio", others)
    result = compared([slower], [readings[place] for place in old], kind="ratio", known=None, default=default)
    return status_of(result, LIMIT, "higher", 100.0)


def table(
    kind: str, between: float, comparisons: int, pool: int, seed: int
) -> dict[str, dict[int, tuple[float, float]]]:
    """Return by question and number of accepted runs the shares of the rule before and of the rule now."""
    runs = runs_of(kind, between, pool, seed)
    readings = [reading(tuple(run), "ratio", "higher") for run in runs]
    generator = np.random.default_rng(seed + 1)
    places = generator.integers(runs.shape[1], size=(pool, RESAMPLES, runs.shape[1]), dtype=np.int16)
    boot = np.log([np.median(run[place], axis=1) for run, place in zip(runs, places, strict=True)])
    medians = np.log(np.median(runs, axis=1))
    found: dict[str, dict[int, tuple[float, float]]] = {question: {} for question, *_ in QUESTIONS}
    for count in ACCEPTED:
        draws = [generator.choice(pool, count + 1, replace=False).tolist() for _ in range(comparisons)]
        for loss in {loss for _, loss, _ in QUESTIONS}:
            old = Counter(before(boot, medians, draw[0], draw[1:], loss) for draw in draws[: comparisons // 2])
            new = Counter(now(readings, draw[0], draw[1:], loss) for draw in draws)
            for question, at, words in QUESTIONS:
                if at == loss:
                    shares = [sum(counted[word] for word in words) / counted.total() for counted in (old, new)]
                    found[question][count] = (shares[0], shares[1])
    return found


def at_will(comparisons: int, pool: int, seed: int) -> dict[str, dict[int, tuple[float, float]]]:
    """Return by question what the gate says without and with the readings of a machine whose others take what they like.

    They take from nothing to half of the processors during a whole run, which is slower by that: 20% between runs.
    """
    generator = np.random.default_rng(seed)
    taken = generator.uniform(0, 0.5, pool)
    runs = runs_of("steady", 0.04, pool, seed) * (1 - taken[:, None])
    readings = [reading(tuple(run), "ratio", "higher") for run in runs]
    found: dict[str, dict[int, tuple[float, float]]] = {question: {} for question, *_ in QUESTIONS}
    for count in ACCEPTED:
        draws = [generator.choice(pool, count + 1, replace=False).tolist() for _ in range(comparisons)]
        for question, loss, words in QUESTIONS:
            shares = []
            for seen in (0.0, 1.0):
                busy = [seen * max(taken[draw[0]], float(np.median(taken[draw[1:]]))) for draw in draws]
                said = [now(readings, draw[0], draw[1:], loss, share) for draw, share in zip(draws, busy, strict=True)]
                shares.append(sum(word in words for word in said) / comparisons)
            found[question][count] = (shares[0], shares[1])
    return found


def show(heading: str, found: dict[str, dict[int, tuple[float, float]]]) -> None:
    """Print a table in Markdown."""
    print(f"\n{heading}, by accepted runs\n")
    print("| | " + " | ".join(map(str, ACCEPTED)) + " |\n|---|" + "---|" * len(ACCEPTED))
    for question, shares in found.items():
        cells = " | ".join(f"{100 * old:.1f} / {100 * new:.1f}" for old, new in shares.values())
        print(f"| {question}, % | {cells} |")


def main() -> None:
    """Print a table for each kind of noise."""
    parser = argparse.ArgumentParser(
        description=f"{__doc__.splitlines()[0]} All tables take about 6 minutes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--comparisons", type=int, default=2000, help="of each cell of a table")
    parser.add_argument("--pool", type=int, default=600, help="made-up runs that they draw from")
    parser.add_argument("--between", default="0.03,0.04", help="standard deviations between runs")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of noise within runs")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers")
    asked = parser.parse_args()
    for between in map(float, asked.between.split(",")):
        for kind in asked.kinds.split(","):
            found = table(kind, between, asked.comparisons, asked.pool, asked.seed)
            show(f"{kind}, {between:.0%} between runs; before / now", found)
    heading = "others take up to half of the processors; without / with what the sensors say of them"
    show(heading, at_will(asked.comparisons // 4, asked.pool, asked.seed))


if __name__ == "__main__":
    main()
