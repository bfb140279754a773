"""What a run measures, as a list in the order of its worth, and how it is fitted into the time that there is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchlib.benchmarks.collectives.config import CollectivesConfig
from benchlib.core.definitions import parse_sizes
from benchlib.workloads.collective_ops import OPS
from benchlib.workloads.collective_timing import VARIANTS, Case, Kind

TYPE_SHARE = 0.2  # of the time of a series that one of the other types gets
STARTUP_BYTES = 1 << 16  # up to here the start of an operation takes most of its time


def plan(config: CollectivesConfig) -> list[Case]:
    """Return every case of a run, the most important first: curves, other ways of the same, then the other types.

    What comes to the same elements is measured once, as what it is first: two series of one case would be told apart
    by nothing, in the ledger, the tables and the pictures.
    """
    unique: dict[tuple[Kind, int], Case] = {}
    for case in (*_curves(config), *_variants(config), *_types(config)):
        barrier = case.operation == "barrier"
        elements = 0 if barrier else OPS[case.operation].elements(case.bytes, case.dtype, config.world_size)
        unique.setdefault((case.kind, elements), case)
    return list(unique.values())


def _reductions(config: CollectivesConfig, operation: str) -> list[str]:
    return list(config.reductions) if OPS[operation].reduces else [""]


def _curves(config: CollectivesConfig) -> Iterator[Case]:
    """Yield the first type and reduction at all sizes; the other placement at the smallest and the largest."""
    dtype = config.dtypes[0]
    for place in (0, 1) if config.in_place else (0,):
        sizes = config.size_list if place == 0 else sorted({config.size_list[0], config.size_list[-1]})
        for size in sizes:
            for operation in config.operations:
                if operation == "barrier":
                    if size == config.size_list[0] and place == 0:
                        yield Case("barrier", "library", dtype, "", False, 0)
                elif place < len(OPS[operation].placements) and "library" in config.variants:
                    where = OPS[operation].placements[place]
                    yield Case(operation, "library", dtype, _reductions(config, operation)[0], where, size)


def _variants(config: CollectivesConfig) -> Iterator[Case]:
    """Yield the other ways of the same operation at all sizes; started and waited for at the ends of the range only."""
    ends = sorted({config.size_list[0], config.size_list[-1]})
    for variant, operations in VARIANTS.items():
        if variant == "library" or variant not in config.variants:
            continue
        for size in ends if variant == "async" else config.size_list:
            for operation in config.operations:
                if operation in operations and operation != "barrier":
                    where = OPS[operation].placements[0]
                    yield Case(operation, variant, config.dtypes[0], _reductions(config, operation)[0], where, size)


def _types(config: CollectivesConfig) -> Iterator[Case]:
    """Yield all types with all reductions at a few sizes, in place and out of place; other ways with one of both.

    Of a size every type comes first, then every reduction, then the other placement, then the other ways: what the time
    does not hold is at the end.
    """
    for size in parse_sizes(config.type_sizes):
        sized = [
            (worth, Case(*kind, size, TYPE_SHARE))
            for operation in config.operations
            if operation != "barrier"
            for dtype in config.dtypes
            for worth, kind in _kinds(config, operation, dtype)
        ]
        yield from (case for _, case in sorted(sized, key=lambda pair: pair[0]))


def _kinds(config: CollectivesConfig, operation: str, dtype: str) -> Iterator[tuple[int, Kind]]:
    """Yield what is measured of an operation in a type, each with its place in the order."""
    reductions = _reductions(config, operation)
    for reduction in reductions:
        first, *others = OPS[operation].placements
        other_reduction = reduction != reductions[0]
        if "library" in config.variants:
            yield (1 if other_reduction else 0), (operation, "library", dtype, reduction, first)
            for where in others if config.in_place else ():
                yield 2, (operation, "library", dtype, reduction, where)
        for variant in config.variants:
            own = variant not in ("library", "async") and operation in VARIANTS.get(variant, ())
            if own and (dtype == config.dtypes[0] or not other_reduction):
                yield 3, (operation, variant, dtype, reduction, first)


@dataclass
class Schedule:
    """Fits cases into the time that is left, by what the runs so far took. ``left_s`` is rank 0's, so all agree.

    ``runs`` is how many runs of a case there are at least (warm-up and timed), ``wall`` how many times its timed seconds
    a case takes in all.
    """

    seconds: float
    runs: int
    wall: float
    per_run_s: dict[int, float] = field(default_factory=dict)

    def learn(self, size_bytes: int, per_run_s: float) -> None:
        """Note what a run of this size took, preparation and comparison included; the longest counts."""
        self.per_run_s[size_bytes] = max(per_run_s, self.per_run_s.get(size_bytes, 0.0))

    def least_s(self, size_bytes: int) -> float:
        """Return what a series of this size takes with as few runs as there may be."""
        measured = [size for size in self.per_run_s if size <= size_bytes]
        if not measured:
            return 0.0
        nearest = max(measured)
        grows = size_bytes / nearest if nearest > STARTUP_BYTES else 1.0
        return self.runs * self.per_run_s[nearest] * max(1.0, grows)

    def pace(self, rest: Sequence[Case], left_s: float) -> float | None:
        """Return the seconds for the first case of the rest, None where even its least does not fit.

        Where not all fit with their full time, each gets an equal share of what is left beside the least of all.
        """
        case = rest[0]
        if self.least_s(case.bytes) > left_s:
            return None
        least = sum(self.least_s(each.bytes) for each in rest)
        wanted = sum(self.wall * self.seconds * each.share for each in rest)
        share = min(1.0, max(0.0, left_s - least) / wanted) if wanted else 1.0
        return self.seconds * case.share * share
