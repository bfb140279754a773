"""What the collective library has: each kind of case is tried on a few elements before anything is measured.

All ranks try the same in the same order and then agree, so that what one of them lacks, none of them measures.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchlib.benchmarks.collectives.config import CollectivesConfig
from benchlib.benchmarks.collectives.plan import Schedule
from benchlib.core.events import EventWriter, Moment
from benchlib.results.metrics import Metric
from benchlib.runtime import group
from benchlib.runtime import group as process_group
from benchlib.workloads.collective_ops import OPS, Group, Place
from benchlib.workloads.collective_timing import (
    LEAST_ROUNDS,
    MOST_WALL,
    WARMUP,
    Case,
    Exercise,
    Kind,
    Pace,
    Series,
    slowest,
    take,
)

TRIAL_BYTES = 64
TRIAL_S = 20  # an operation that raises on one rank only leaves the others waiting this long, and not the run


def lacking(cases: Sequence[Case], at: Place) -> dict[Kind, str]:
    """Return why a kind of case cannot be measured here, for those that cannot. A collective."""
    mine: dict[Kind, str] = {}
    group = _trial_group(at)
    for kind in dict.fromkeys(case.kind for case in cases):
        began = time.monotonic()
        mine[kind] = _try(kind, Place(at.rank, at.ranks, at.device, group))
        if group is not None and _left_unequal(bool(mine[kind]), time.monotonic() - began, at):
            group = _trial_group(at)  # the ranks are at different points of the old one, which nobody can tell apart
    reasons: dict[Kind, str] = {}
    everybody = process_group.all_gather_objects(mine)
    for rank, theirs in enumerate(everybody):
        for kind, reason in theirs.items():
            if reason:
                alike = all(others[kind] == reason for others in everybody)
                reasons.setdefault(kind, reason if alike else f"{reason} (rank {rank})")
    return reasons


def _trial_group(at: Place) -> Group:
    """Return a group of all ranks that gives up soon; None for one rank."""
    return dist.new_group(timeout=timedelta(seconds=TRIAL_S)) if at.ranks > 1 else None


def _left_unequal(failed: bool, seconds: float, at: Place) -> bool:
    """Tell whether some ranks failed and others did not, or one waited in vain. A collective."""
    flags = [float(failed), float(not failed), float(failed and seconds > TRIAL_S / 2)]
    some_failed, some_ran, some_waited = slowest(flags, at.device)
    return bool(some_waited or (some_failed and some_ran))


def _try(kind: Kind, at: Place) -> str:
    """Return why a kind fails on this rank, '' where it runs; whether it is right is for the measurement to say."""
    if at.ranks < OPS[kind[0]].least_ranks:
        return "one rank has nobody to send to"
    try:
        trial = Exercise(Case(*kind, bytes=TRIAL_BYTES), at)
        trial.restore()
        trial.run()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        if kind[3] == "avg" and "can't be cast" in message:  # torch divides the sum, and has nowhere to put a fraction
            return "it does not average whole numbers"
        return message[:200]
    return ""


def rows(reasons: dict[Kind, str]) -> list[dict[str, Any]]:
    """Return the table ``unsupported``: a row for each operation, type and reduction that is missing."""
    return [
        {
            "operation": operation,
            "variant": variant,
            "dtype": dtype,
            "reduction": reduction,
            "in_place": in_place,
            "reason": reason,
        }
        for (operation, variant, dtype, reduction, in_place), reason in reasons.items()
    ]


# What every measurement of a run needs, and where it leaves what it found.


Row = dict[str, Any]
EXTRAS_SHARE = 0.75  # of the budget, after which limits, pairs and the like are left out
BRIEF_ROUNDS = 3
WRONG_CASES = 20  # that are kept with their first wrong element


@dataclass(frozen=True)
class Taken:
    """A case, its series and the elements of its larger side."""

    case: Case
    series: Series
    elements: int


@dataclass
class Bench:
    """The world, the config, a place to report progress, and what was found so far; the same on every rank."""

    world: group.World
    config: CollectivesConfig
    events: EventWriter
    began: Moment
    total: int = 0
    done: int = 0
    taken: list[Taken] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    shortened: dict[str, float] = field(default_factory=dict)  # part of the plan: mean share of the time of its series
    wrong: list[Row] = field(default_factory=list)
    wrong_elements: int = 0
    checked_elements: int = 0
    tables: dict[str, list[Row]] = field(default_factory=dict)
    metrics: list[Metric] = field(default_factory=list)
    schedule: Schedule = field(init=False)

    def __post_init__(self) -> None:
        self.schedule = Schedule(self.config.seconds, WARMUP + LEAST_ROUNDS, MOST_WALL)

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

    def fits(self, what: str, size_bytes: int, series: int = 1, share: float = EXTRAS_SHARE) -> bool:
        """Tell whether there is time for so many series of a size, and note what there is none for. A collective."""
        fits = series * self.schedule.least_s(size_bytes) <= self.left_s(share)
        if not fits:
            self.cut.append(f"{what}: no time in the budget of {self.config.budget_s:g} s")
        return fits

    def pace(self, seconds: float, brief: bool = False) -> Pace:
        """Return how a series is taken here; a brief one may be of fewer rounds."""
        slowdown = self.config.planted_slowdown
        return Pace(seconds, slowdown, BRIEF_ROUNDS, warmup=1) if brief else Pace(seconds, slowdown)

    def tally(self, what: str, series: Series, exercise: Exercise | None = None) -> None:
        """Count the wrong and the checked elements of a series, and keep which was the first. A collective."""
        self.count(what, series.wrong, series.checked, exercise.first_wrong if exercise else "")

    def count(self, what: str, wrong: int, checked: int, first_wrong: str = "") -> None:
        """Count elements over all ranks; ``first_wrong`` is this rank's. A collective."""
        self.events.emit("heartbeat")  # a matrix of many pairs takes longer than the stall limit
        self.wrong_elements += wrong
        self.checked_elements += checked
        if wrong and len(self.wrong) < WRONG_CASES:  # the counts are the same on every rank, so all of them come here
            first = next((text for text in group.all_gather_objects(first_wrong) if text), "")
            self.wrong.append({"case": what, "wrong_elements": wrong, "checked_elements": checked, "first": first})

    def time(self, case: Case, pace: Pace) -> Taken:
        """Measure one case. A collective."""
        exercise = Exercise(case, self.place, self.fault)
        series = take(exercise, self.world.device, pace)
        self.tally(f"{case.label()}, {series.bytes:,} bytes", series, exercise)
        return Taken(case, series, exercise.elements)
