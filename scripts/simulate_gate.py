"""How often the gate is wrong or undecided, by the number of accepted runs: the rule before and the rule now, side by side.

Question: of one new run against 1 to 10 accepted ones, how often does an unchanged one FAIL or stay AMBIGUOUS, and how often is
a loss found?
Method: made-up runs of 200 samples (``noise.py``: steady, autocorrelated, heavy-tailed, drifting, with a
neighbour), whose levels differ by 3 or 4%; a limit of 20%. Comparisons draw their runs from a pool of ``--pool`` runs. The
rule now is the gate's own code (``compared`` and ``ruling``). The rule before was: threshold is the limit or the A/A band,
whichever is wider; FAIL where the whole 98% interval lies beyond it, PASS where it lies within; the interval is the wider of
the bootstrap of the medians and of Student's t with the spread between these runs alone, from two degrees of freedom on.

    python scripts/simulate_gate.py [--comparisons 2000] [--pool 600] [--between 0.03,0.04] [--seed 0]

A whole night: how often does any gated metric of an unchanged tier FAIL, and is a loss of 30% in one of them still found? The
metrics with their limits, directions and scatter within runs are those of the stored runs below a folder; they scatter between
runs as these do (or by ``--spread``), independently: neighbours that slow several metrics at once make red nights rarer. Each
benchmark is repeated up to ``--repeat`` times while it is undecided. The rule before took 98% intervals whatever the number of
metrics. The stored runs themselves are compared as well, those of each night with those of all others.

    python scripts/simulate_gate.py --night outputs [--nights 1000] [--repeat 5] [--spread 0.04]
"""

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from noise import KINDS, runs_of
from scipy.stats import t

from benchlib.judge.change import CHANCE, LOG, Reading, Scale, Spread, compared, moderated, own_spread, readings
from benchlib.judge.regression import (
    FALSE_ALARMS,
    RegressionLimit,
    chance_of_each,
    default_spread,
    regression_check,
    ruling,
    scale_of,
    side_of,
)
from benchlib.results.metrics import Direction, measured
from benchlib.results.record import limits_of, load
from benchlib.results.run import Run, find_runs

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


def now(runs: Sequence[Reading], new: int, old: Sequence[int], loss: float, others: float = 0.0) -> str:
    """Return what the gate says where ``others`` took a share of the processors."""
    item, move = runs[new], math.log1p(-loss)
    slower = replace(item, value=item.value + move, whole=item.whole + move)
    default = default_spread(measured("rate", 1.0, "samples/s", "higher"), LIMIT, LOG, others)
    result = compared([slower], [runs[place] for place in old], default=default)
    return ruling(result, LIMIT, "higher", 100.0)[0]


def table(
    kind: str, between: float, comparisons: int, pool: int, seed: int
) -> dict[str, dict[int, tuple[float, float]]]:
    """Return by question and number of accepted runs the shares of the rule before and of the rule now."""
    runs = runs_of(kind, between, pool, seed)
    read = readings(runs, LOG, "higher")
    generator = np.random.default_rng(seed + 1)
    places = generator.integers(runs.shape[1], size=(pool, RESAMPLES, runs.shape[1]), dtype=np.int16)
    boot = np.log([np.median(run[place], axis=1) for run, place in zip(runs, places, strict=True)])
    medians = np.log(np.median(runs, axis=1))
    found: dict[str, dict[int, tuple[float, float]]] = {question: {} for question, *_ in QUESTIONS}
    for count in ACCEPTED:
        draws = [generator.choice(pool, count + 1, replace=False).tolist() for _ in range(comparisons)]
        for loss in {loss for _, loss, _ in QUESTIONS}:
            old = Counter(before(boot, medians, draw[0], draw[1:], loss) for draw in draws[: comparisons // 2])
            new = Counter(now(read, draw[0], draw[1:], loss) for draw in draws)
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
    read = readings(runs, LOG, "higher")
    found: dict[str, dict[int, tuple[float, float]]] = {question: {} for question, *_ in QUESTIONS}
    for count in ACCEPTED:
        draws = [generator.choice(pool, count + 1, replace=False).tolist() for _ in range(comparisons)]
        for question, loss, words in QUESTIONS:
            shares = []
            for seen in (0.0, 1.0):
                busy = [seen * max(taken[draw[0]], float(np.median(taken[draw[1:]]))) for draw in draws]
                said = [now(read, draw[0], draw[1:], loss, share) for draw, share in zip(draws, busy, strict=True)]
                shares.append(sum(word in words for word in said) / comparisons)
            found[question][count] = (shares[0], shares[1])
    return found


NIGHTS = ((1, 0), (3, 0), (5, 0), (3, 11), (10, 11))  # accepted runs, degrees of freedom that stored ones tell
LOST = "train_samples_per_s"  # the metric that loses 30%


@dataclass(frozen=True)
class Gated:
    """A gated metric: how far the ends of its interval within a run lie, and how much runs scatter, on the scale of the gate."""

    limit: RegressionLimit
    direction: Direction
    scale: Scale
    value: float
    default: float | None
    spread: float
    below: float
    above: float

    def draw(self, generator: np.random.Generator, runs: int, move: float = 0.0) -> list[Reading]:
        """Return made-up runs whose level is moved."""
        values = self.spread * generator.standard_normal(runs) + move
        return [Reading(value, self.below, self.above, value, 1) for value in values.tolist()]


def stored_nights(store: Path, tier: str) -> dict[str, list[Run]]:
    """Return the complete runs of a tier by benchmark, the oldest first; all have the fingerprint of the newest."""
    runs: dict[str, list[Run]] = {}
    for path in find_runs(store):
        run = Run(path)
        if run.config.tier == tier and run.result is not None and run.result.status == "complete":
            members = runs.setdefault(run.config.benchmark, [])
            if not members or members[0].fingerprint == run.fingerprint:
                members.append(run)
    return {name: members[::-1] for name, members in runs.items()}


def gated(runs: Sequence[Run], spread: float | None) -> list[Gated]:
    """Return the gated metrics of a benchmark. What few runs tell of their spread is filled up with the default, as in the gate."""
    limits = limits_of(runs[-1])
    records, found = [load(run.path) for run in runs], list[Gated]()
    for limit in limits:
        side = side_of(records, limit.metric)
        if side is None or not side.runs:
            continue
        scale = scale_of(limit, side.lowest)
        read, default = side.readings(scale), default_spread(side.metric, limit, scale)
        known = moderated(own_spread(read), default)
        s = spread if spread is not None and scale is LOG else known.s if known else 0.0
        ends = [float(np.mean([getattr(item, end) for item in read])) for end in ("below", "above")]
        found.append(Gated(limit, side.metric.direction, scale, side.value(scale), default, s, *ends))
    return found


def said(metrics: Sequence[Gated], accepted: int, dof: int, repeat: int, lost: bool, each: bool, seed: int) -> str:
    """Return what the gate says of the metrics of a benchmark: FAIL, AMBIGUOUS after all repetitions, or PASS.

    ``each``: every metric by its own 98% interval, the rule before. ``lost``: ``LOST`` has lost 30%.
    """
    generator, sides = np.random.default_rng(seed), []
    for item in metrics:
        move = math.log(0.7) if lost and item.limit.metric.startswith(LOST) else 0.0
        known = Spread(item.spread * math.sqrt(generator.chisquare(dof) / dof), dof) if dof else None
        sides.append((item, item.draw(generator, accepted), item.draw(generator, repeat, move), known))
    chance = CHANCE if each else FALSE_ALARMS / len(metrics)
    for runs in range(1, repeat + 1):
        words = set()
        for item, old, new, known in sides:
            change = compared(new[:runs], old, item.scale, known=known, default=item.default, chance=chance)
            words.add(ruling(change, item.limit, item.direction, item.value)[0])
        if "AMBIGUOUS" not in words or "FAIL" in words:
            break
    return "FAIL" if "FAIL" in words else "AMBIGUOUS" if "AMBIGUOUS" in words else "PASS"


def show_nights(store: Path, tier: str, nights: int, repeat: int, spread: float | None) -> None:
    """Print how often an unchanged night goes red, and how often a loss of 30% is found, by what is known."""
    runs = stored_nights(store, tier)
    metrics = {name: found for name, members in runs.items() if (found := gated(members, spread))}
    count = sum(map(len, metrics.values()))
    spreads = [item.spread for each in metrics.values() for item in each if item.scale is LOG and item.spread]
    print(f"{count} gated metrics of {len(metrics)} benchmarks; between runs: median {np.median(spreads):.1%}")
    heads = ("accepted, stored", "repeat", "red nights, %", "30% less: FAIL, %", "30% less: FAIL or undecided, %")
    print(f"\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    losing = next(found for found in metrics.values() if any(item.limit.metric.startswith(LOST) for item in found))
    for accepted, dof in NIGHTS:
        for most in (1, repeat):
            cells = []
            for each in (True, False):
                red = [
                    any(said(found, accepted, dof, most, False, each, 97 * night + place) == "FAIL"
                        for place, found in enumerate(metrics.values()))
                    for night in range(nights)
                ]  # fmt: skip
                lost = Counter(said(losing, accepted, dof, most, True, each, 97 * night) for night in range(nights))
                cells.append([sum(red), lost["FAIL"], lost["FAIL"] + lost["AMBIGUOUS"]])
            text = " | ".join(
                f"{100 * old / nights:.1f} / {100 * new / nights:.1f}" for old, new in zip(*cells, strict=True)
            )
            print(f"| {accepted}, {dof + 1 if dof else 0} | {most} | {text} |", flush=True)
    stored = range(min(map(len, runs.values())))
    for each in (True, False):
        failed = [len(_failed(runs, night, each)) for night in stored]
        print(f"\nstored nights, each against the others, rule {'before' if each else 'now'}: {failed} metrics fail")


def _failed(runs: dict[str, list[Run]], night: int, each: bool) -> list[str]:
    """Return the metrics of a stored night that fail against those of all other nights."""
    failed = []
    for members in runs.values():
        limits = limits_of(members[night])
        records = [load(run.path) for run in members]
        latest, others = records[night], records[:night] + records[night + 1 :]
        chance = CHANCE if each else chance_of_each(limits, latest.metrics)
        for limit in limits:
            new, old = side_of([latest], limit.metric), side_of(others, limit.metric)
            if new and old and regression_check(limit, new.undisturbed(), old, None, chance).status == "FAIL":
                failed.append(limit.metric)
    return failed


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
    parser.add_argument(
        "--night", type=Path, metavar="STORE", help="simulate nights of the runs below this folder instead"
    )
    parser.add_argument("--tier", default="quick", help="of these runs")
    parser.add_argument("--nights", type=int, default=1000, help="that are simulated")
    parser.add_argument("--repeat", type=int, default=5, help="runs of an undecided benchmark, at most")
    parser.add_argument("--spread", type=float, help="between runs, instead of what the stored ones show")
    asked = parser.parse_args()
    if asked.night:
        show_nights(asked.night, asked.tier, asked.nights, asked.repeat, asked.spread)
        return
    for between in map(float, asked.between.split(",")):
        for kind in asked.kinds.split(","):
            found = table(kind, between, asked.comparisons, asked.pool, asked.seed)
            show(f"{kind}, {between:.0%} between runs; before / now", found)
    heading = "others take up to half of the processors; without / with what the sensors say of them"
    show(heading, at_will(asked.comparisons // 4, asked.pool, asked.seed))


if __name__ == "__main__":
    main()
