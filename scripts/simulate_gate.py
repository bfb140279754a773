"""How often the gate is wrong or undecided, by the number of accepted runs.

Question: of one new run against 1 to 10 accepted ones, how often does an unchanged one FAIL or stay AMBIGUOUS, and how often is
a loss of throughput detected? The last question is of a run half of which takes twice as long.
Method: simulated runs (``noise.py``: steady, autocorrelated, heavy-tailed, drifting, stalling, with a neighbour), whose levels
differ by 3 or 4%; a limit of 20%. Comparisons draw their runs from a pool of ``--pool`` runs and are judged by the gate's own code,
as ``benchlib run --repeat`` judges them: at most ``--repeat`` new runs.

    python scripts/simulate_gate.py [--comparisons 1000] [--pool 600] [--between 0.03,0.04] [--repeat 1] [--seed 0]

A whole night: how often does any gated metric of an unchanged tier FAIL, and is a loss of 30% in one of them still detected? The
metrics with their limits, directions and scatter within runs are those of the stored runs below a folder; they scatter between
runs as these do (or by ``--spread``), independently: neighbours that slow several metrics at once make red nights rarer. Each
benchmark is repeated up to ``--repeat`` times.

    python scripts/simulate_gate.py --night notebooks/demo-machine --spread 0.04 [--nights 400] [--repeat 5]
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from measuring import options_of
from noise import KINDS, runs_of, windows_of

from benchlib.judge.regression import (
    FALSE_ALARMS,
    LOG,
    RegressionLimit,
    Scale,
    Side,
    Spread,
    default_spread,
    moderated,
    own_spread,
    regression_check,
    scale_of,
    side_of,
)
from benchlib.results.metrics import measured
from benchlib.results.record import limits_of, load, load_all
from benchlib.results.run import Run

Rates = tuple[float, ...]
LIMIT = RegressionLimit(metric="rate", share=0.2)
THROUGHPUT = measured("rate", 1.0, "samples/s", "higher", average="harmonic")
ACCEPTED = (1, 2, 3, 4, 6, 10)


def less(share: float) -> Callable[[Rates], Rates]:
    """Return what makes each rate of a run less by a share."""
    return lambda rates: tuple((1 - share) * rate for rate in rates)


def partly(rates: Rates) -> Rates:
    """Let the second half of a run take twice as long: a loss of 33%."""
    half = len(rates) // 2
    return (*rates[:half], *(rate / 2 for rate in rates[half:]))


QUESTIONS = (("unchanged", less(0.0), "FAIL"), ("unchanged", less(0.0), "AMBIGUOUS"), ("loss of 10%", less(0.1), "FAIL"),
             ("loss of 30%", less(0.3), "FAIL"), ("loss of 30%", less(0.3), "PASS"), ("loss of 45%", less(0.45), "FAIL"),
             ("half twice as long", partly, "FAIL"), ("half twice as long", partly, "PASS"))  # fmt: skip


def repeated(statuses: Iterator[str]) -> str:
    """Return the last status that ``--repeat`` asks for, of those after one new run, two and so on."""
    status = next(statuses)
    again = status != "PASS"  # what FAILs alone runs again, too
    while again and (following := next(statuses, None)) is not None:
        status = following
        again = status == "AMBIGUOUS"
    return status


def first_and_last(statuses: Iterator[str]) -> tuple[str, str]:
    """Return the status after one new run, and the last that ``--repeat`` asks for."""
    first = next(statuses)
    return first, repeated(chain([first], statuses))


def said(new: Sequence[Rates], old: Sequence[Rates], others: Sequence[float] | None = None) -> str:
    """Return what the gate says of runs; ``others``: what sensors saw that others took of the processors, new and old."""
    taken = others or (0.0, 0.0)
    after, before = (
        Side(THROUGHPUT, tuple(runs), share, bool(others)) for runs, share in zip((new, old), taken, strict=True)
    )
    return regression_check(LIMIT, after, before).status


def show(
    heading: str, runs: Sequence[Rates], comparisons: int, seed: int, repeat: int = 1, stolen: np.ndarray | None = None
) -> None:
    """Print a table of the share of comparisons that answer each question; ``stolen``: what others took during each run."""
    print(f"\n{heading}, by accepted runs\n")
    print("| | " + " | ".join(map(str, ACCEPTED)) + " |\n|---|" + "---|" * len(ACCEPTED))
    generator, answers = np.random.default_rng(seed), dict[object, list[Counter[str]]]()
    draws = {
        count: [generator.choice(len(runs), count + repeat, replace=False).tolist() for _ in range(comparisons)]
        for count in ACCEPTED
    }
    for question, change, status in QUESTIONS:
        if change not in answers:
            answers[change] = []
            for accepted, of_count in draws.items():
                words = Counter[str]()
                for drawn in of_count:
                    old, new = drawn[:accepted], drawn[accepted:]
                    words[
                        repeated(
                            said(
                                [change(runs[place]) for place in new[:count]],
                                [runs[place] for place in old],
                                None
                                if stolen is None
                                else [float(np.median(stolen[part])) for part in (new[:count], old)],
                            )
                            for count in range(1, repeat + 1)
                        )
                    ] += 1
                answers[change].append(words)
        cells = [f"{100 * words[status] / comparisons:.1f}" for words in answers[change]]
        print(f"| {question}: {status}, % | {' | '.join(cells)} |", flush=True)


NIGHTS = ((1, 0), (3, 0), (5, 0), (3, 11), (10, 11))  # accepted runs, degrees of freedom of stored ones
LOST = "train_samples_per_s"  # the metric that loses 30%


@dataclass(frozen=True)
class Gated:
    """A gated metric: a run of it, and how much runs scatter, on the scale of the gate."""

    limit: RegressionLimit
    side: Side
    scale: Scale
    spread: float

    def draw(self, generator: np.random.Generator, runs: int, move: float = 0.0) -> Side:
        """Return simulated runs whose level is moved."""
        moves = self.spread * generator.standard_normal(runs) + move
        drawn = [self.scale.to(self.side.runs[-1]) + shift for shift in moves]
        samples = [np.exp(run) if self.scale is LOG else run for run in drawn]
        return Side(self.side.metric, tuple(tuple(run.tolist()) for run in samples))


def stored_nights(store: Path, tier: str) -> dict[str, list[Run]]:
    """Return the complete runs of a tier by benchmark, the oldest first; all have the fingerprint of the newest."""
    runs: dict[str, list[Run]] = {}
    for record in load_all(store)[::-1]:
        run = Run(record.folder)
        if run.config.tier == tier and run.result is not None and run.result.status == "complete":
            members = runs.setdefault(run.config.benchmark, [])
            if not members or members[0].fingerprint == run.fingerprint:
                members.append(run)
    return {name: members[::-1] for name, members in runs.items()}


def gated(runs: Sequence[Run], spread: float | None) -> list[Gated]:
    """Return the gated metrics of a benchmark. What few runs tell of their spread is filled up with the default, as in the gate."""
    records, metrics = [load(run.path) for run in runs], list[Gated]()
    for limit in limits_of(runs[-1]):
        side = side_of(records, limit.metric)
        if side is None or not side.runs:
            continue
        scale = scale_of(limit, side.lowest)
        pooled = moderated(own_spread(side.readings(scale)), default_spread(side.metric, limit, scale))
        s = spread if spread is not None and scale is LOG else pooled.s if pooled else 0.0
        metrics.append(Gated(limit, side, scale, s))
    return metrics


def statuses_of(metrics: Sequence[Gated], accepted: int, dof: int, repeat: int, lost: bool, seed: int) -> Iterator[str]:
    """Yield what the gate says after one new run, two and so on; ``lost``: ``LOST`` lost 30%."""
    generator, sides = np.random.default_rng(seed), []
    for item in metrics:
        move = math.log(0.7) if lost and item.limit.metric.startswith(LOST) else 0.0
        known = Spread(item.spread * math.sqrt(generator.chisquare(dof) / dof), dof) if dof else None
        sides.append((item.limit, item.draw(generator, repeat, move), item.draw(generator, accepted), known))
    chance = FALSE_ALARMS / sum(1 + bool(item.side.levels) for item in metrics)
    for count in range(1, repeat + 1):
        words = {
            regression_check(limit, Side(new.metric, new.runs[:count]), old, known, chance, known).status
            for limit, new, old, known in sides
        }
        yield next(word for word in ("FAIL", "AMBIGUOUS", "PASS") if word in words)


def show_nights(store: Path, tier: str, nights: int, repeat: int, spread: float | None) -> None:
    """Print how often an unchanged night goes red, and how often a loss of 30% is detected."""
    runs = stored_nights(store, tier)
    metrics = [gated_metrics for members in runs.values() if (gated_metrics := gated(members, spread))]
    if not metrics:
        raise SystemExit(f"no complete run of the tier {tier} below {store} has gated metrics")
    count = sum(map(len, metrics))
    spreads = [item.spread for of_benchmark in metrics for item in of_benchmark if item.scale is LOG and item.spread]
    print(f"{count} gated metrics of {len(metrics)} benchmarks; between runs: median {np.median(spreads):.1%}")
    heads = ("accepted, stored", "repeat", "red nights, %", "30% less: FAIL, %", "30% less: FAIL or undecided, %")
    print(f"\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    losing = next(items for items in metrics if any(item.limit.metric.startswith(LOST) for item in items))
    for accepted, dof in NIGHTS:
        red, lost = Counter[int](), Counter[tuple[int, str]]()
        for night in range(nights):
            options = (accepted, dof, repeat)
            ends = [
                first_and_last(statuses_of(items, *options, False, 97 * night + place))
                for place, items in enumerate(metrics)
            ]
            for place, words in enumerate(zip(*ends, strict=True)):
                red[place] += "FAIL" in words
            lost.update(enumerate(first_and_last(statuses_of(losing, *options, True, 97 * night))))
        for place, runs_each in enumerate((1, repeat)):
            failed = lost[place, "FAIL"]
            cells = [red[place], failed, failed + lost[place, "AMBIGUOUS"]]
            text = " | ".join(f"{100 * cell / nights:.1f}" for cell in cells)
            print(f"| {accepted}, {dof + 1 if dof else 0} | {runs_each} | {text} |", flush=True)


def main() -> None:
    """Print a table for each kind of noise."""
    parser = options_of(__doc__)
    parser.add_argument("--comparisons", type=int, default=1000, help="of each cell of a table")
    parser.add_argument("--pool", type=int, default=600, help="simulated runs that they draw from")
    parser.add_argument("--between", default="0.03,0.04", help="standard deviations between runs")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of noise within runs")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers")
    parser.add_argument(
        "--night", type=Path, metavar="STORE", help="simulate nights of the runs below this folder instead"
    )
    parser.add_argument("--tier", default="quick", help="of these runs")
    parser.add_argument("--nights", type=int, default=400, help="that are simulated")
    parser.add_argument("--repeat", type=int, help="runs of what is not decided, at most; 1, of nights 5")
    parser.add_argument("--spread", type=float, help="between runs, instead of what the stored ones show")
    options = parser.parse_args()
    if options.night:
        show_nights(options.night, options.tier, options.nights, options.repeat or 5, options.spread)
        return
    repeat = options.repeat or 1
    for between in map(float, options.between.split(",")):
        for kind in options.kinds.split(","):
            runs = windows_of(runs_of(kind, between, options.pool, options.seed))
            show(f"{kind}, {between:.0%} between runs", runs, options.comparisons, options.seed + 1, repeat)
    stolen = np.random.default_rng(options.seed).uniform(0, 0.5, options.pool)
    runs = windows_of(runs_of("steady", 0.04, options.pool, options.seed) * (1 - stolen[:, None]))
    for heading, sensed in (("sensors off", None), ("sensors on", stolen)):
        heading = f"others take up to half of the processors, {heading}"
        show(heading, runs, options.comparisons // 4, options.seed, repeat, sensed)


if __name__ == "__main__":
    main()
