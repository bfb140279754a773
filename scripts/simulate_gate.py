"""How often the gate is wrong or undecided, by the number of accepted runs.

Question: of one new run against 1 to 10 accepted ones, how often does an unchanged one FAIL or stay AMBIGUOUS, and how often is
a loss detected?
Method: simulated runs of 200 samples (``noise.py``: steady, autocorrelated, heavy-tailed, drifting, with a neighbour), whose levels
differ by 3 or 4%; a limit of 20%. Comparisons draw their runs from a pool of ``--pool`` runs and are judged by the gate's own code.

    python scripts/simulate_gate.py [--comparisons 2000] [--pool 600] [--between 0.03,0.04] [--seed 0]

A whole night: how often does any gated metric of an unchanged tier FAIL, and is a loss of 30% in one of them still detected? The
metrics with their limits, directions and scatter within runs are those of the stored runs below a folder; they scatter between
runs as these do (or by ``--spread``), independently: neighbours that slow several metrics at once make red nights rarer. Each
benchmark is repeated up to ``--repeat`` times while it is undecided. Beside the rule stands one that gives every metric its own 98%
interval.

    python scripts/simulate_gate.py --night outputs [--nights 1000] [--repeat 5] [--spread 0.04]
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from measuring import options_of
from noise import KINDS, runs_of

from benchlib.judge.regression import (
    CHANCE,
    FALSE_ALARMS,
    LOG,
    Reading,
    RegressionLimit,
    Scale,
    Spread,
    compared,
    default_spread,
    moderated,
    own_spread,
    reading,
    ruling,
    scale_of,
    side_of,
)
from benchlib.results.metrics import Direction, measured
from benchlib.results.record import limits_of, load, load_all
from benchlib.results.run import Run

LIMIT = RegressionLimit(metric="rate", share=0.2)
ACCEPTED = (1, 2, 3, 4, 5, 7, 10)
QUESTIONS = (("unchanged: FAIL", 0.0, ("FAIL",)), ("unchanged: undecided", 0.0, ("AMBIGUOUS",)),
             ("loss of 10%: FAIL", 0.1, ("FAIL",)), ("loss of 30%: FAIL", 0.3, ("FAIL",)),
             ("loss of 30%: FAIL or undecided", 0.3, ("FAIL", "AMBIGUOUS")), ("loss of 45%: FAIL", 0.45, ("FAIL",)))  # fmt: skip


def said(runs: Sequence[Reading], new: int, accepted: Sequence[int], loss: float, others: float = 0.0) -> str:
    """Status of a run that lost a share, where other programs took ``others`` of the processors."""
    run, move = runs[new], math.log1p(-loss)
    slower = replace(run, value=run.value + move)
    default = default_spread(measured("rate", 1.0, "samples/s", "higher"), LIMIT, LOG, others)
    change = compared([slower], [runs[place] for place in accepted], default=default)
    return ruling(change, LIMIT, "higher", 100.0)[0]


def show(heading: str, runs: np.ndarray, comparisons: int, seed: int, stolen: np.ndarray | None = None) -> None:
    """Print a table of the share of comparisons that answer each question; ``stolen``: what others took during each run."""
    print(f"\n{heading}, by accepted runs\n")
    print("| | " + " | ".join(map(str, ACCEPTED)) + " |\n|---|" + "---|" * len(ACCEPTED))
    read, generator = [reading(tuple(run)) for run in runs.tolist()], np.random.default_rng(seed)
    draws = [
        [generator.choice(len(runs), count + 1, replace=False).tolist() for _ in range(comparisons)]
        for count in ACCEPTED
    ]
    for question, loss, statuses in QUESTIONS:
        cells = []
        for of_count in draws:
            hits = 0
            for new, *accepted in of_count:
                others = 0.0 if stolen is None else max(stolen[new], float(np.median(stolen[accepted])))
                hits += said(read, new, accepted, loss, others) in statuses
            cells.append(f"{100 * hits / comparisons:.1f}")
        print(f"| {question}, % | {' | '.join(cells)} |", flush=True)


NIGHTS = ((1, 0), (3, 0), (5, 0), (3, 11), (10, 11))  # accepted runs, degrees of freedom of stored ones
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
        """Return simulated runs whose level is moved."""
        values = self.spread * generator.standard_normal(runs) + move
        return [Reading(value, self.below, self.above, 1) for value in values.tolist()]


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
    limits = limits_of(runs[-1])
    records, metrics = [load(run.path) for run in runs], list[Gated]()
    for limit in limits:
        side = side_of(records, limit.metric)
        if side is None or not side.runs:
            continue
        scale = scale_of(limit, side.lowest)
        read, default = side.readings(scale), default_spread(side.metric, limit, scale)
        pooled = moderated(own_spread(read), default)
        s = spread if spread is not None and scale is LOG else pooled.s if pooled else 0.0
        ends = [float(np.mean([getattr(item, end) for item in read])) for end in ("below", "above")]
        metrics.append(Gated(limit, side.metric.direction, scale, side.value(scale), default, s, *ends))
    return metrics


def status_of(metrics: Sequence[Gated], accepted: int, dof: int, repeat: int, lost: bool, each: bool, seed: int) -> str:
    """FAIL, AMBIGUOUS after all repetitions, or PASS. ``each``: every metric by its own 98% interval; ``lost``: ``LOST`` lost 30%."""
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
        for runs_each in (1, repeat):
            cells = []
            for each in (True, False):
                options = (accepted, dof, runs_each)
                red = sum(
                    any(
                        status_of(items, *options, False, each, 97 * night + place) == "FAIL"
                        for place, items in enumerate(metrics)
                    )
                    for night in range(nights)
                )
                lost = Counter(status_of(losing, *options, True, each, 97 * night) for night in range(nights))
                cells.append([red, lost["FAIL"], lost["FAIL"] + lost["AMBIGUOUS"]])
            text = " | ".join(
                f"{100 * old / nights:.1f} / {100 * new / nights:.1f}" for old, new in zip(*cells, strict=True)
            )
            print(f"| {accepted}, {dof + 1 if dof else 0} | {runs_each} | {text} |", flush=True)


def main() -> None:
    """Print a table for each kind of noise."""
    parser = options_of(__doc__)
    parser.add_argument("--comparisons", type=int, default=2000, help="of each cell of a table")
    parser.add_argument("--pool", type=int, default=600, help="simulated runs that they draw from")
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
    options = parser.parse_args()
    if options.night:
        show_nights(options.night, options.tier, options.nights, options.repeat, options.spread)
        return
    for between in map(float, options.between.split(",")):
        for kind in options.kinds.split(","):
            runs = runs_of(kind, between, options.pool, options.seed)
            show(f"{kind}, {between:.0%} between runs", runs, options.comparisons, options.seed + 1)
    stolen = np.random.default_rng(options.seed).uniform(0, 0.5, options.pool)
    runs = runs_of("steady", 0.04, options.pool, options.seed) * (1 - stolen[:, None])
    for heading, sensed in (("sensors off", None), ("sensors on", stolen)):
        heading = f"others take up to half of the processors, {heading}"
        show(heading, runs, options.comparisons // 4, options.seed, sensed)


if __name__ == "__main__":
    main()
