"""The collectives benchmark as each rank executes it: what is supported, the curves, the limits, the pairs, the types.

The plan is in the order of its worth and is fitted into the tier's time by what its first runs took: rounds are cut
first, then cases from its end, and what was cut is told.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from benchlib import process_group
from benchlib.clock import Moment
from benchlib.collectives import outcome, support
from benchlib.collectives.cases import Case, Schedule, plan
from benchlib.collectives.config import CollectivesConfig
from benchlib.collectives.exercise import Exercise
from benchlib.collectives.measure import LEAST_ROUNDS, MOST_WALL, WARMUP, Pace, take
from benchlib.collectives.ops import Place
from benchlib.collectives.outcome import Row, Taken
from benchlib.collectives.sizes import size_text
from benchlib.config import BaseConfig
from benchlib.errors import UserError
from benchlib.events import EventWriter
from benchlib.metrics import Metric, measured
from benchlib.results import Result, save_result

PLAN_SHARE = 0.85  # of the budget, that the plan may use; the rest is for writing and for what takes longer than it did
CURVES_SHARE = 0.5  # of the budget, after which no further curve is begun


@dataclass
class Bench:
    """What every measurement needs: the world, the config, a place to report progress, and what was found so far."""

    world: process_group.World
    config: CollectivesConfig
    events: EventWriter
    began: Moment
    total: int = 0
    done: int = 0
    taken: list[Taken] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    tables: dict[str, list[Row]] = field(default_factory=dict)
    metrics: list[Metric] = field(default_factory=list)

    @property
    def place(self) -> Place:
        """This rank among all."""
        return Place(self.world.rank, self.world.size, self.world.device)

    @property
    def fault(self) -> bool:
        """Whether this rank alters its results on purpose."""
        return self.world.rank == self.config.planted_fault_rank

    def step(self, steps: int = 1) -> None:
        """Report that measurements were done, or left out."""
        self.done += steps
        self.events.emit("progress", phase="measure", done=self.done, total=self.total, unit="measurements")

    def left_s(self, share: float) -> float:
        """Return the seconds until this share of the budget is used, by the clock of rank 0. A collective."""
        left = torch.tensor(share * self.config.budget_s - self.began.since(), device=self.world.device)
        dist.broadcast(left, 0)
        return float(left)

    def pace(self, seconds: float, least: int = LEAST_ROUNDS) -> Pace:
        """Return how a series is taken here."""
        return Pace(seconds, self.config.planted_slowdown, least)


def run(config: BaseConfig, run_dir: Path, events: EventWriter) -> None:
    """Measure as one rank; rank 0 leaves ``result.json``, ``samples.parquet`` and ``ledger.parquet``."""
    if not isinstance(config, CollectivesConfig):
        raise UserError(f"benchmark = {config.benchmark}: this is the collectives benchmark")
    began = Moment.at(psutil.Process().create_time())  # the import of torch is part of the start-up
    events.emit("phase", name="init")
    with process_group.world(config, run_dir) as world:
        bench = Bench(world, config, events, began)
        startup_s = max(process_group.all_gather_objects(began.since()))
        events.emit("phase", name="measure")
        _measure(bench)
        events.emit("phase", name="write")
        if world.main:
            _write(bench, run_dir, startup_s)


def _measure(bench: Bench) -> None:
    cases = plan(bench.config)
    missing = support.lacking(cases, bench.place)
    bench.tables["unsupported"] = support.rows(missing)
    cases = [case for case in cases if case.kind not in missing]
    bench.total = len(cases)
    schedule = Schedule(bench.config.seconds, WARMUP + LEAST_ROUNDS, MOST_WALL)
    curves = [case for case in cases if case.share == 1]
    _take(bench, schedule, curves, CURVES_SHARE, "curves")
    _take(bench, schedule, cases[len(curves) :], PLAN_SHARE, "other types and reductions")


def _take(bench: Bench, schedule: Schedule, cases: Sequence[Case], share: float, what: str) -> None:
    """Measure the cases one after the other, and tell what the time did not allow."""
    left_out: list[Case] = []
    for index, case in enumerate(cases):
        left_s = bench.left_s(share)
        seconds = schedule.pace(cases[index:], left_s)
        if seconds is None:
            left_out.append(case)
        else:
            bench.taken.append(timed(bench, case, bench.pace(seconds)))
            rounds = len(bench.taken[-1].series.times_s) + WARMUP
            schedule.learn(case.bytes, (left_s - bench.left_s(share)) / rounds)
        bench.step()
    if left_out:
        sizes = sorted({case.bytes for case in left_out})
        bench.cut.append(
            f"{len(left_out)} of {len(cases)} {what}, of {size_text(sizes[0])} to {size_text(sizes[-1])}: the budget of {bench.config.budget_s:g} s does not hold them"
        )


def timed(bench: Bench, case: Case, pace: Pace) -> Taken:
    """Measure one case. A collective."""
    exercise = Exercise(case, bench.place, bench.fault)
    series = take(exercise, bench.world.device, pace)
    first = ""
    if series.wrong:  # the same on every rank, so all of them come here
        first = next((text for text in process_group.all_gather_objects(exercise.first_wrong) if text), "")
    return Taken(case, series, exercise.elements, first)


def _write(bench: Bench, run_dir: Path, startup_s: float) -> None:
    config, dtype, ranks = bench.config, bench.config.dtypes[0], bench.world.size
    lines = outcome.curves(bench.taken, dtype)
    fits = outcome.fit_rows(lines, dtype)
    bench.tables |= {
        "series": [outcome.series_row(taken) for taken in bench.taken],
        "ranks": [row for taken in bench.taken for row in outcome.rank_rows(taken)],
        "fits": fits,
        "crossover": outcome.crossover_rows(lines),
    }
    outcome.save_ledger(run_dir, bench.taken)
    found = outcome.metrics(lines, fits, ranks) + bench.metrics
    found.append(measured("startup_s", startup_s, "s", "lower"))
    found.append(measured("total_s", bench.began.since(), "s", "lower"))
    facts = {
        "wrong_elements": sum(taken.series.wrong for taken in bench.taken),
        "checked_elements": sum(taken.series.checked for taken in bench.taken),
        "collective": bench.world.collective,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cut": bench.cut,
    }
    result = Result.of(
        config,
        status="complete",
        started_at=bench.began.wall,
        ended_at=bench.began.wall + bench.began.since(),
        metrics=found,
        facts=facts,
        tables=bench.tables,
        notes=[f"Cut: {text}." for text in bench.cut],
    )
    save_result(run_dir, result)
