"""The limits of a machine and which share of them the operations reach, measured in turns: one run of each, again and again.

The bounds of an operation by bus bandwidth are those of ``bounds.BOUND_OF``. A share is the median over the rounds of the
operation's bus bandwidth over the rate of the bound in the same round, so that a noisy neighbour hits both.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchlib import cluster
from benchlib.bandwidth import busbw_gbps
from benchlib.collectives.bench import Bench, Row
from benchlib.collectives.bounds import ALL_RANKS, BOUND_OF, CLAIMED, COPY, ONE_WAY, Copy, Sockets
from benchlib.collectives.cases import VARIANTS, Case
from benchlib.collectives.config import CollectivesConfig
from benchlib.collectives.exercise import Exercise
from benchlib.collectives.measure import Series, Timed, take, take_in_turns
from benchlib.collectives.ops import OPS
from benchlib.collectives.sizes import parse_sizes, size_text
from benchlib.metrics import Metric, derived

MIB = 1 << 20
TARGET_BYTES = {"all_reduce": 16 * MIB}  # of other operations 64 MiB; at this size and above the target holds
TARGET_VARIANT = {"all_gather": "direct", "reduce_scatter": "direct"}
HOW = {
    ONE_WAY: "TCP socket from rank 0 to rank 1, S bytes",
    ALL_RANKS: "TCP sockets of all ranks at once, each sends S bytes to the next and receives S from the one before; of one direction",
    COPY: "copies of S bytes within the device's memory, read and written, sum over all ranks at once",
}


def measure_bounds(bench: Bench, wires: Sockets | str) -> None:
    """Measure every bound at every size into the table ``bounds``. A collective.

    ``wires`` is a sentence where there are no sockets.
    """
    rows, config = [], bench.config
    for size in config.size_list:
        for bound in (ONE_WAY, ALL_RANKS, COPY):
            if bound != COPY and isinstance(wires, str):
                continue
            if not bench.fits(f"{bound} at {size_text(size)}", size):
                continue
            if bound == COPY or isinstance(wires, str):
                thing: Timed = Copy(size, bench.world.device)
            else:
                thing = wires.wire(bound, size)
            series = take(thing, bench.world.device, bench.pace(config.seconds))
            bench.tally(f"{bound}, {size_text(size)}", series)
            rows.append(_bound_row(bound, series, bench.world.size))
        bench.step()
    if isinstance(wires, str):
        rows += [_no_bound(bound, "not_available", wires) for bound in (ONE_WAY, ALL_RANKS)]
    bench.tables["bounds"] = [*rows, _claimed(config)]


def rate_gbps(bound: str, size_bytes: int, seconds: float, ranks: int) -> float:
    """Return the rate of a bound in Gbps: of one direction of a socket, of all copies together read and written."""
    return 8e-9 * size_bytes / seconds * (2 * ranks if bound == COPY else 1)


def _bound_row(bound: str, series: Series, ranks: int) -> Row:
    median = float(np.median(series.seconds))
    return {
        "bound": bound,
        "bytes": series.bytes,
        "gbps": rate_gbps(bound, series.bytes, median, ranks),
        "latency_us": 1e6 * median,
        "provenance": "measured",
        "source": HOW[bound],
    }


def _claimed(config: CollectivesConfig) -> Row:
    gbps, source = cluster.load(config.cluster).links.claimed(config.nnodes == 1)
    reason = source or "no profile of the machines claims one; set cluster=NAME or FILE"
    return _no_bound(CLAIMED, "not_available" if gbps is None else "claimed", reason) | {"gbps": gbps}


def _no_bound(bound: str, provenance: str, source: str) -> Row:
    return {
        "bound": bound, "bytes": None, "gbps": None, "latency_us": None, "provenance": provenance, "source": source
    }  # fmt: skip


def share_sizes(config: CollectivesConfig) -> list[int]:
    """Return the sizes at which shares are measured: the largest, and those of ``share_sizes`` in the range."""
    last = config.size_list[-1]
    return sorted({last, *(size for size in parse_sizes(config.share_sizes) if size <= last)})


def share_cases(config: CollectivesConfig, lacking: Sequence[tuple[Any, ...]]) -> list[Case]:
    """Return the cases of which shares are measured, in the headline type, reduction and placement."""
    found = []
    for size in share_sizes(config):
        for operation in config.operations:
            for variant in ("library", "direct"):
                if variant not in config.variants or operation not in VARIANTS[variant] or operation == "barrier":
                    continue
                reduction = config.reductions[0] if OPS[operation].reduces else ""
                case = Case(operation, variant, config.dtypes[0], reduction, OPS[operation].placements[0], size)
                if case.kind not in lacking:
                    found.append(case)
    return found


def measure_shares(bench: Bench, wires: Sockets | str, cases: Sequence[Case]) -> None:
    """Measure each case and its bound in turns into the table ``shares``, empty without sockets. A collective."""
    rows: list[Row] = []
    samples: dict[tuple[str, str, int], list[float]] = {}
    for case in cases:
        if not isinstance(wires, str) and bench.fits(
            f"the share of {case.label()} at {size_text(case.bytes)}", 2 * case.bytes
        ):
            exercise = Exercise(case, bench.place, bench.fault)
            bound = BOUND_OF[case.operation]
            wire = wires.wire(bound, exercise.bytes)
            own, limit = take_in_turns([exercise, wire], bench.world.device, bench.pace(bench.config.seconds))
            bench.tally(f"{case.label()}, {size_text(own.bytes)}", own, exercise)
            bench.tally(f"{bound}, {size_text(limit.bytes)}", limit)
            shares = paired_shares(case.operation, own, limit)
            samples[case.operation, case.variant, own.bytes] = shares
            rows.append(_share_row(case, own, limit, shares, _target(bench.config, case, own.bytes)))
        bench.step()
    bench.tables["shares"] = rows
    bench.metrics += _metrics(samples)


def paired_shares(operation: str, own: Series, limit: Series) -> list[float]:
    """Return the share of each round: bus bandwidth of the operation over the rate of the bound."""
    ranks = own.times_s.shape[1]
    return [
        busbw_gbps(operation, own.bytes, mine, ranks) / rate_gbps("", limit.bytes, theirs, ranks)
        for mine, theirs in zip(own.seconds, limit.seconds, strict=True)
    ]


def _share_row(case: Case, own: Series, limit: Series, shares: list[float], target: float | None) -> Row:
    ranks = own.times_s.shape[1]
    return {
        "operation": case.operation,
        "variant": case.variant,
        "bytes": own.bytes,
        "busbw_gbps": busbw_gbps(case.operation, own.bytes, float(np.median(own.seconds)), ranks),
        "bound": BOUND_OF[case.operation],
        "bound_gbps": rate_gbps("", limit.bytes, float(np.median(limit.seconds)), ranks),
        "share": float(np.median(shares)),
        "rounds": len(shares),
        "target": target,
    }


def _target(config: CollectivesConfig, case: Case, size_bytes: int) -> float | None:
    """Return the share that the case has to reach, None where no target is set for its variant or size."""
    wanted = getattr(config, f"target_share_{case.operation}", None)
    large = size_bytes >= TARGET_BYTES.get(case.operation, 64 * MIB)
    return wanted if large and case.variant == TARGET_VARIANT.get(case.operation, "library") else None


def _metrics(samples: dict[tuple[str, str, int], list[float]]) -> Iterator[Metric]:
    """Yield the share of each operation at its largest size, in the variant that the targets are of."""
    for operation in ("all_reduce", "broadcast", "send_recv", "all_gather", "reduce_scatter"):
        variant = TARGET_VARIANT.get(operation, "library")
        sizes = [size for name, way, size in samples if (name, way) == (operation, variant)]
        if sizes:
            size = max(sizes)
            name = operation.replace("all_reduce", "allreduce") + ("_direct" if variant == "direct" else "")
            told = f"of the rate of {BOUND_OF[operation]}, at {size_text(size)}, measured in turns"
            yield derived(f"{name}_socket_share", samples[operation, variant, size], "ratio", "higher", told)
