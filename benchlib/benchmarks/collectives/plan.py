"""What a run measures, the most important first, and how it is fitted into the available time."""

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchlib.benchmarks.collectives.config import CollectivesConfig, parse_sizes
from benchlib.workloads.collective_timing import MAX_WALL, MIN_ROUNDS, WARMUP, Case, Kind
from benchlib.workloads.operations import OPS, TOGETHER, VARIANTS

TYPE_SHARE = 0.2  # of the time of a series that one of the other types gets
STARTUP_BYTES = 1 << 16  # up to here the start of an operation takes most of its time
OVERLAP_BYTES = 16 << 20


def headline(config: CollectivesConfig, operation: str, variant: str, size: int) -> Case:
    """Return the case of an operation in the type, reduction and placement of which headline figures are."""
    op = OPS[operation]
    reduction = config.reductions[0] if op.reduces else ""
    return Case(operation, variant, config.dtypes[0], reduction, op.placements[0], size if op.ends != "none" else 0)


def plan(config: CollectivesConfig) -> list[Case]:
    """Return every case of a run, the most important first; what comes to the same elements is measured once."""
    unique: dict[tuple[Kind, int], Case] = {}
    for case in (*_curves(config), *_types(config)):
        elements = OPS[case.operation].elements(case.bytes, case.dtype, config.world_size)
        unique.setdefault((case.kind, elements), case)
    return list(unique.values())


def _curves(config: CollectivesConfig) -> Iterator[Case]:
    """Yield the first type and reduction at all sizes; the other placement, and ``async``, at both ends of the range."""
    sizes = config.size_list
    ends = sorted({sizes[0], sizes[-1]})
    ways = [("library", 0, sizes), ("library", 1, ends)]
    ways += [(way, 0, ends if way == "async" else sizes) for way in VARIANTS if way not in ("library", "overlap")]
    for variant, place, at in ways:
        for size, operation in itertools.product(at, config.operations):
            placements, case = OPS[operation].placements, headline(config, operation, variant, size)
            if operation == "barrier":
                if (variant, place, size) == ("library", 0, sizes[0]):
                    yield case
            elif variant in config.variants and operation in VARIANTS[variant].operations and place < len(placements):
                yield case._replace(in_place=placements[place])


def _types(config: CollectivesConfig) -> Iterator[Case]:
    """Yield of a few sizes every type, then every reduction, then the other placement, then the other ways with one of both."""
    kinds = sorted(_kinds(config), key=operator.itemgetter(0))
    yield from (Case(*kind, size, TYPE_SHARE) for size in parse_sizes(config.type_sizes) for _, kind in kinds)


def _kinds(config: CollectivesConfig) -> Iterator[tuple[int, Kind]]:
    """Yield what is measured of each operation in each type, with its place in the order."""
    for name, dtype in itertools.product(config.operations, config.dtypes):
        op, (first, *others) = OPS[name], OPS[name].placements
        reductions = config.reductions if op.reduces else [""] * (op.ends != "none")
        for reduction in reductions:
            other_reduction = reduction != reductions[0]
            if "library" in config.variants:
                yield int(other_reduction), (name, "library", dtype, reduction, first)
                for where in others:
                    yield 2, (name, "library", dtype, reduction, where)
            for variant in config.variants:
                own = VARIANTS[variant].own and name in VARIANTS[variant].operations
                if own and (dtype == config.dtypes[0] or not other_reduction):
                    yield 3, (name, variant, dtype, reduction, first)


def share_cases(config: CollectivesConfig) -> list[Case]:
    """Return the cases whose share of the sockets is measured: at the largest size and at ``share_sizes`` in the range."""
    last = config.size_list[-1]
    return [
        headline(config, operation, variant, size)
        for size in sorted({last, *(size for size in parse_sizes(config.share_sizes) if size <= last)})
        for operation in config.operations
        for variant in ("library", "direct")
        if variant in config.variants and operation in VARIANTS[variant].operations and operation != "barrier"
    ]


def overlap_cases(config: CollectivesConfig) -> list[Case]:
    """Return the operations that run beside a computation: those between all ranks."""
    size = min(config.size_list[-1], OVERLAP_BYTES)
    chosen = [name for name in config.operations if name in TOGETHER and "overlap" in config.variants]
    return [headline(config, name, "async", size) for name in chosen]


class Weight(NamedTuple):
    """What a measurement takes: so many series of some bytes, and the share of the time of a series that they get."""

    bytes: int
    share: float = 1.0
    series: int = 1


class Schedule:
    """Fits series of ``seconds`` each into the time that is left, by what the runs so far took.

    ``left_s`` is rank 0's, so all ranks agree.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.per_run_s: dict[int, float] = {}

    def learn(self, size_bytes: int, per_run_s: float) -> None:
        """Note what a run of this size took, preparation and comparison included; the longest counts."""
        self.per_run_s[size_bytes] = max(per_run_s, self.per_run_s.get(size_bytes, 0.0))

    def least_s(self, weight: Weight) -> float:
        """Return what a measurement takes with as few runs as there may be."""
        nearest = max((size for size in self.per_run_s if size <= weight.bytes), default=None)
        if nearest is None:
            return 0.0
        grows = weight.bytes / nearest if nearest > STARTUP_BYTES else 1.0
        return weight.series * (WARMUP + MIN_ROUNDS) * self.per_run_s[nearest] * max(1.0, grows)

    def pace(self, rest: Sequence[Weight], left_s: float) -> float | None:
        """Return the seconds for a series of the first of the rest, None where even its least does not fit.

        Where not all fit with their full time, each gets an equal share of what is left beside the least of all.
        """
        if self.least_s(rest[0]) > left_s:
            return None
        least = sum(self.least_s(each) for each in rest)
        wanted = sum(MAX_WALL * self.seconds * each.share * each.series for each in rest)
        share = min(1.0, max(0.0, left_s - least) / wanted) if wanted else 1.0
        return self.seconds * rest[0].share * share
