"""What a run measures beside the curves: pairs of ranks, what hides behind computing, the gradients of a training."""

from collections.abc import Collection, Sequence

import numpy as np

from benchlib import gradients, process_group
from benchlib.bandwidth import algbw_gbps
from benchlib.collectives.bench import Bench, Row
from benchlib.collectives.cases import Case, Kind
from benchlib.collectives.config import CollectivesConfig
from benchlib.collectives.exercise import Exercise
from benchlib.collectives.measure import Series, take
from benchlib.collectives.ops import OPS, message
from benchlib.collectives.sizes import size_text
from benchlib.metrics import derived, not_available
from benchlib.overlap import Overlap, overlapped
from benchlib.timing import all_reduce_bandwidth

PAIR_SHARE = 0.3  # of the time of a series that a pair gets
LATENCY_BYTES = 8
# What training hides behind its computation: gradients, and the parts of sharded weights.
OVERLAPPED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
OVERLAP_BYTES = 16 << 20
OVERLAP_SERIES = 8  # series of an operation that ``overlapped`` takes as long as
GRADIENTS = "gradient_allreduce_gbps"


def measure_pairs(bench: Bench) -> None:
    """Send a message from each rank to each other one, pair by pair, into the table ``pairs``. A collective."""
    rows: list[Row] = []
    size, ranks = bench.config.pair_bytes, bench.world.size
    pairs = [(source, target) for source in range(ranks) for target in range(ranks) if source != target]
    if bench.config.pairs and pairs and bench.fits(f"the matrix of {len(pairs)} pairs", size, 2 * len(pairs)):
        for source, target in pairs:
            small, large = (_message(bench, source, target, each) for each in (LATENCY_BYTES, size))
            rows.append(
                {
                    "source": source,
                    "target": target,
                    "bytes": large.bytes,
                    "gbps": algbw_gbps(large.bytes, float(np.median(large.seconds))),
                    "latency_us": 1e6 * float(np.median(small.seconds)),
                }
            )
    bench.tables["pairs"] = rows
    bench.step()


def _message(bench: Bench, source: int, target: int, size: int) -> Series:
    case = Case("send_recv", "library", "uint8", "", False, size)
    exercise = Exercise(case, bench.place, bench.fault, message(source, target))
    series = take(exercise, bench.world.device, bench.pace(PAIR_SHARE * bench.config.seconds))
    bench.tally(f"rank {source} to rank {target}, {size_text(size)}", series, exercise)
    return series


def measure_overlap(bench: Bench, cases: Sequence[Case]) -> None:
    """Run each operation beside matrix products of the same length, into the table ``overlap``. A collective."""
    rows: list[Row] = []
    for case in cases:
        if bench.fits(f"the overlap of {case.label()}", case.bytes, OVERLAP_SERIES):
            exercise = Exercise(case, bench.place, bench.fault)
            found, wrong, checked = _overlapped(exercise, bench)
            rows.append(
                {
                    "operation": case.operation,
                    "bytes": exercise.bytes,
                    "alone_us": 1e6 * found.alone_s,
                    "compute_us": 1e6 * found.compute_s,
                    "together_us": 1e6 * found.together_s,
                    "hidden_share": found.hidden_share,
                }
            )
            bench.count(f"overlapped {case.label()}", *_over_ranks(wrong, checked), exercise.first_wrong)
        bench.step()
    bench.tables["overlap"] = rows


def _overlapped(exercise: Exercise, bench: Bench) -> tuple[Overlap, int, int]:
    """Return the times of an operation beside a computation, and this rank's wrong and checked elements of all its runs."""
    counts: list[tuple[int, int]] = []

    def verify() -> None:
        counts.append(exercise.check())

    found = overlapped(exercise.start, device=bench.world.device, prepare=exercise.restore, verify=verify)
    return found, sum(count[0] for count in counts), sum(count[1] for count in counts)


def overlap_cases(config: CollectivesConfig, lacking: Collection[Kind]) -> list[Case]:
    """Return the operations that run beside a computation: those between all ranks, in the headline type."""
    if "overlap" not in config.variants:
        return []
    size = min(config.size_list[-1], OVERLAP_BYTES)
    found = []
    for operation in config.operations:
        if operation in OVERLAPPED:
            reduction = config.reductions[0] if OPS[operation].reduces else ""
            found.append(Case(operation, "async", config.dtypes[0], reduction, OPS[operation].placements[0], size))
    return [case for case in found if case.kind not in lacking]


def measure_gradients(bench: Bench) -> None:
    """Time the all-reduce of the gradient buckets one after the other, as a training step has them. A collective."""
    config, total = bench.config, sum(bench.config.bucket_bytes)
    told = f"{len(config.bucket_bytes)} buckets of {size_text(min(config.bucket_bytes))} to {size_text(max(config.bucket_bytes))}, one after the other"
    if bench.world.size == 1:
        metric = not_available(GRADIENTS, "Gbps", "higher", "one rank has nobody to exchange with")
    elif not bench.fits("the gradient buckets", total):
        metric = not_available(GRADIENTS, "Gbps", "higher", bench.cut[-1])
    else:
        found = all_reduce_bandwidth(
            config.bucket_bytes, bench.world.device, 3 * config.seconds, least=5, slowdown=config.planted_slowdown,
            fault=bench.fault,
        )  # fmt: skip
        runs = len(found.busbw_gbps)
        bench.count("the gradient buckets", *_over_ranks(found.wrong, runs * sum(found.bucket_bytes) // 4))
        metric = derived(
            GRADIENTS, found.busbw_gbps, "Gbps", "higher", f"bus bandwidth of {told}: bytes over time of all"
        )
    bench.metrics.append(metric)
    bench.step()


def _over_ranks(wrong: int, checked: int) -> tuple[int, int]:
    counts = process_group.all_gather_objects((wrong, checked))
    return sum(one[0] for one in counts), sum(one[1] for one in counts)


def compare_gradients(bench: Bench) -> None:
    """Train a small model over each library and compare the gradients, into the table ``gradients``. A collective.

    The library that the run itself uses is one of them.
    """
    named = bench.config.compare_gradients
    names: list[str] = list(dict.fromkeys([*named, bench.world.collective])) if named else []
    bench.tables["gradients"] = gradients.compare(bench.world, names) if names else []
    bench.step()
