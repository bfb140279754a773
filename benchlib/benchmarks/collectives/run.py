"""The collectives benchmark as each rank executes it: what is supported, the curves, the limits, the pairs, the types.

The plan is fitted into the tier's time by what its first runs took: rounds are cut first, then cases from its end.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

import torch.distributed as dist

from benchlib.benchmarks.collectives.config import COMPARABLE_US, NO_BUS, PLACEMENTS
from benchlib.benchmarks.collectives.curves import crossover_rows, curves, fit_rows, ratio_rows
from benchlib.benchmarks.collectives.gradients import compare
from benchlib.benchmarks.collectives.overlap import overlapped
from benchlib.benchmarks.collectives.plan import Schedule, Weight, headline, overlap_cases, plan, share_cases
from benchlib.benchmarks.collectives.sockets import ALL_RANKS, BOUND_OF, ONE_WAY, sockets
from benchlib.config import cluster
from benchlib.core.definitions import busbw_gbps
from benchlib.runtime.group import all_gather_objects, transports
from benchlib.runtime.measurement import Rank, Tables
from benchlib.workloads import collective_timing as timing
from benchlib.workloads.collective_ops import DTYPES, Place
from benchlib.workloads.collective_timing import Case, Exercise, Kind, Pace, Timed
from benchlib.workloads.operations import OPS

# Of the budget, after which nothing more of a part is begun; the rest is for writing, and for what takes longer.
UNTIL, EXTRAS_UNTIL = {"curves": 0.4, "other ways": 0.7, "other types": 0.85}, 0.75
BRIEF = {"least": 3, "warmup": 1}  # of a series of another type
PAIR_SHARE, PAIR_BYTES = 0.3, 1 << 20  # of the time of a series that a pair gets, and the message of a pair
TRIAL_BYTES = 64
TRIAL_S = 20  # what raises on one rank only leaves the others waiting this long, and not the run
OVERLAP_SERIES = 8  # series of an operation that ``overlapped`` takes as long as
KIND = Case._fields[:5]  # of ``Case.kind``
NO_CLAIM = "no profile of the machines claims what a link carries; set cluster=NAME or FILE"
T = TypeVar("T")
Row = dict[str, Any]


def measure(rank: Rank) -> Tables:
    """Measure as one rank; the rows are the same on every rank but for ``nccl_tests``, which rank 0 has."""
    config, ranks = rank.config, rank.world.size
    foreign = []
    if config.nccl_tests and rank.world.main:  # before anything is measured: only the first node needs to have the file
        from benchlib.benchmarks.collectives.foreign import read

        foreign = read(Path(config.nccl_tests))
    bench, several, planned = Bench(rank), ranks > 1, plan(config)
    missing = lacking(planned, bench.place)
    cases, shares, overlaps = (
        [case for case in chosen if case.kind not in missing]
        for chosen in (planned, several * share_cases(config), several * overlap_cases(config))
    )
    bounds = [(bound, size) for size in config.size_list for bound in (ONE_WAY, ALL_RANKS) if several]
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b and config.pairs]
    bench.total = len(cases) + len(bounds) + len(shares) + len(pairs) + len(overlaps) + several

    series = _series(bench, "curves", [case for case in cases if case.share == 1 and case.variant == "library"])
    tables = _limits(bench, bounds, shares)
    series += _series(bench, "other ways", [case for case in cases if case.share == 1 and case.variant != "library"])
    tables |= {"pairs": _pairs(bench, pairs), "overlap": _overlap(bench, overlaps), "buckets": _buckets(bench)}
    named = config.compare_gradients
    tables["gradients"] = compare(rank.world, dict.fromkeys([*named, rank.world.collective])) if named else []
    tables["series"] = series + _series(bench, "other types", [case for case in cases if case.share < 1])

    compared = [row for rows in tables.values() for row in rows if "checked_elements" in row]
    lines = curves(tables["series"])
    ratios = ratio_rows(lines, ranks)
    claims = cluster.load(config.cluster).links
    gbps, source = claims.claimed(config.nnodes == 1)
    claim = {"gbps": gbps, "source": source, "why": {"bytes": "it holds for any"}}
    return tables | {
        "run": [{name: sum(row[name] for row in compared) for name in ("wrong_elements", "checked_elements")}],
        "fits": fit_rows(lines, ranks),
        "ratios": ratios,
        "crossover": crossover_rows(ratios),
        "links": [{"bound": "link"} | (claim if gbps else {"status": "skipped", "reason": source or NO_CLAIM})],
        "ways": [{"way": way, "rdma": claims.inter_node_rdma} for way in transports(rank.run_dir, rank.world)],
        "plan": bench.plan,
        "unsupported": [dict(zip(KIND, kind, strict=True)) | {"reason": reason} for kind, reason in missing.items()],
        "nccl_tests": [row | _here(row, tables["series"], ranks) for row in foreign],
    }


def lacking(cases: Sequence[Case], at: Place) -> dict[Kind, str]:
    """Return why a kind of case cannot be measured here, for those that cannot. A collective."""
    mine: dict[Kind, str] = {}
    group = _trial_group(at)
    for kind in dict.fromkeys(case.kind for case in cases):
        began = time.monotonic()
        mine[kind] = _try(kind, at._replace(group=group))
        failed, waited = bool(mine[kind]), time.monotonic() - began > TRIAL_S / 2
        some_failed, some_ran, in_vain = timing.slowest([failed, not failed, failed and waited], at.device)
        if in_vain or (some_failed and some_ran):
            group = _trial_group(at)  # the ranks are at different points of the old one, which nobody can tell apart
    everybody, reasons = all_gather_objects(mine), dict[Kind, str]()
    for rank, theirs in enumerate(everybody):
        for kind, reason in theirs.items():
            alike = all(others[kind] == reason for others in everybody)
            if reason:
                reasons.setdefault(kind, reason if alike else f"{reason} (rank {rank})")
    return reasons


def _trial_group(at: Place) -> dist.ProcessGroup | None:
    return dist.new_group(timeout=timedelta(seconds=TRIAL_S)) if at.ranks > 1 else None


def _try(kind: Kind, at: Place) -> str:
    """Return why a kind fails on this rank, '' where it runs; whether it is right is for the measurement to say."""
    if at.ranks < OPS[kind[0]].least_ranks:
        return "one rank has nobody to send to"
    try:
        trial = Exercise(Case(*kind, bytes=TRIAL_BYTES), at)
        trial.restore()
        trial.run()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        if kind[3] == "avg" and not DTYPES[kind[2]].is_floating_point:  # a sum that is divided has a fraction
            return "it does not average whole numbers"
        return " ".join(str(error).split())[:200] or type(error).__name__
    return ""


class Bench:
    """What the parts of a run share: this rank, the time that is left, and what of the plan it held."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.config, self.device = rank, rank.config, rank.world.device
        self.place = Place(rank.world.rank, rank.world.size, self.device)
        self.schedule = Schedule(self.config.seconds)
        self.plan: list[Row] = []
        self.done = self.total = self.rounds = 0

    def exercise(self, case: Case, place: Place | None = None) -> Exercise:
        """Return a case with its tensors; the rank of an injected fault alters its results."""
        return Exercise(case, place or self.place, self.place.rank == self.config.planted_fault_rank)

    def left_s(self, share: float) -> float:
        """Return the seconds until this share of the budget is used, the same on every rank. A collective."""
        return timing.slowest([self.rank.left_s(share)], self.device)[0]

    def fitting(self, part: str, items: Mapping[T, Weight]) -> Iterator[tuple[T, Pace]]:
        """Yield the items that the time holds, each with its pace; ``plan`` gets a row of how many. A collective."""
        weights, granted, left_out = list(items.values()), list[float](), list[int]()
        until = UNTIL.get(part, EXTRAS_UNTIL)
        left_s = self.left_s(until)
        for index, (item, weight) in enumerate(items.items()):
            seconds = self.schedule.pace(weights[index:], left_s)
            if seconds is None:
                left_out.append(weight.bytes)
            else:
                granted.append(seconds / (self.config.seconds * weight.share))
                before_s, self.rounds = left_s, 0
                yield item, Pace(seconds, self.config.planted_slowdown)
                left_s = self.left_s(until)
                if self.rounds:
                    self.schedule.learn(weight.bytes, (before_s - left_s) / self.rounds)
            self.done += 1
            self.rank.progress(self.done, self.total)
        row: Row = {"part": part, "planned": len(items), "measured": len(granted)}
        row |= {"cut_from_bytes": min(left_out, default=0), "cut_to_bytes": max(left_out, default=0)}
        share = {"time_share": fmean(granted)} if granted else {"why": {"time_share": "nothing fitted"}}
        self.plan += [row | share] if items else []

    def timed(self, things: Mapping[str, Timed], pace: Pace) -> Row:
        """Time things interleaved; returns their times by column, and what was compared. A collective."""
        every = timing.interleaved(list(things.values()), self.device, pace)
        self.rounds += len(every[0].seconds) + pace.warmup
        self.rank.events.emit("heartbeat")  # a matrix of many pairs takes longer than the stall limit
        times = {name: series.times_us for name, series in zip(things, every, strict=True)}
        return {"bytes": every[0].bytes} | times | every[0].counts(*every[1:])


def _series(bench: Bench, part: str, cases: Sequence[Case]) -> list[Row]:
    rows = []
    for case, pace in bench.fitting(part, {case: Weight(case.bytes, case.share) for case in cases}):
        own_pace = pace._replace(**BRIEF) if part == "other types" else pace
        row = dict(zip(KIND, case.kind, strict=True)) | bench.timed({"times_us": bench.exercise(case)}, own_pace)
        row["curve"] = case.kind == headline(bench.config, case.operation, case.variant, case.bytes).kind
        if case.operation == "barrier":
            row |= {"dtype": "", "why": {"busbw_gbps": "a barrier moves no data"}}
        elif bench.place.ranks == 1:
            row |= {"why": {"busbw_gbps": NO_BUS}}
        rows.append(row)
    return rows


def _limits(bench: Bench, bounds: Sequence[tuple[str, int]], cases: Sequence[Case]) -> dict[str, list[Row]]:
    """Measure every bound at every size, then each case interleaved with its bound."""
    rows, shares = list[Row](), list[Row]()
    with sockets(bench.place) as over_sockets:
        if isinstance(over_sockets, str):
            gone = [{"bound": bound, "status": "skipped", "reason": over_sockets} for bound in (ONE_WAY, ALL_RANKS)]
            return {"bounds": gone, "shares": []}
        for (bound, size), pace in bench.fitting("bounds", {item: Weight(item[1]) for item in bounds}):
            rows.append({"bound": bound} | bench.timed({"times_us": over_sockets(bound, size)}, pace))
        for case, pace in bench.fitting("shares", {case: Weight(case.bytes, series=2) for case in cases}):
            op, exercise = OPS[case.operation], bench.exercise(case)
            bound = BOUND_OF[op.ends]
            row: Row = {"operation": case.operation, "variant": case.variant, "bound": bound}
            row |= bench.timed({"times_us": exercise, "bound_times_us": over_sockets(bound, exercise.bytes)}, pace)
            asked = case.variant == op.target and exercise.bytes >= op.target_bytes
            target = getattr(bench.config, f"target_share_{op.name}") if asked else None
            shares.append(row | ({"target": target} if target else {"why": {"target": "none is set"}}))
    return {"bounds": rows, "shares": shares}


def _pairs(bench: Bench, pairs: Sequence[tuple[int, int]]) -> list[Row]:
    """Send messages from each rank to each other one, pair by pair."""
    rows, case = [], Case("send_recv", "library", "uint8", "", False, PAIR_BYTES)
    for ends, pace in bench.fitting("pairs", dict.fromkeys(pairs, Weight(PAIR_BYTES, PAIR_SHARE))):
        message = bench.exercise(case, bench.place._replace(ends=ends))
        rows.append({"source": ends[0], "target": ends[1]} | bench.timed({"times_us": message}, pace))
    return rows


def _overlap(bench: Bench, cases: Sequence[Case]) -> list[Row]:
    """Run each operation beside matrix products of the same length."""
    rows = []
    for case, _ in bench.fitting("overlap", {case: Weight(case.bytes, 1, OVERLAP_SERIES) for case in cases}):
        exercise = bench.exercise(case)
        rows.append({"operation": case.operation, "bytes": exercise.bytes} | overlapped(exercise, bench.device))
    return rows


def _buckets(bench: Bench) -> list[Row]:
    """Time the all-reduce of the gradient buckets one after the other, as a training step has them."""
    sizes = tuple(bench.config.bucket_bytes) if bench.place.ranks > 1 else ()
    why = f"no time in the budget of {bench.config.budget_s:g} s" if sizes else "one rank has nobody to exchange with"
    row: Row = {"status": "skipped", "reason": why}
    for _, pace in bench.fitting("buckets", {sizes: Weight(sum(sizes))} if sizes else {}):
        series = timing.time_all_reduce(sizes, bench.device, pace, bench.place.rank == bench.config.planted_fault_rank)
        row = {"buckets": len(sizes), "least_bytes": min(sizes), "most_bytes": max(sizes), "bytes": series.bytes}
        row |= series.counts() | {"times_us": series.times_us}
    return [row]


def _here(row: Row, series: list[Row], ranks: int) -> Row:
    """Return the bandwidth of this run at the size and in the placement of a row of nccl-tests, and why no ratio follows."""
    of_size = [each for each in series if (each["operation"], each["bytes"]) == (row["operation"], row["bytes"])]
    own = [each for each in of_size if each["variant"] == "library"] if ranks > 1 else []
    kinds = [(each["dtype"], each["reduction"]) for each in own if each["curve"]]
    own = [each for each in own if (each["dtype"], each["reduction"]) in kinds]
    same = [each for each in own if PLACEMENTS[each["in_place"]] == row["placement"]]
    if not same:
        reason = "measured in the other placement alone" if own else "not measured at this size"
        return {"why": row["why"] | {"here_gbps": reason}}
    if row.get("time_us", COMPARABLE_US) < COMPARABLE_US:
        row["why"]["ratio"] = f"an operation takes less than {COMPARABLE_US:.0f} us"
    return {"here_gbps": busbw_gbps(row["operation"], row["bytes"], 1e-6 * median(same[0]["times_us"]), ranks)}
