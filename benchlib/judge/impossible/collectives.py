"""Rules of collectives, by the definitions of nccl-tests: algbw = S/t, busbw = algbw × the factor of the operation."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchlib.core.definitions import BUS_FACTORS, algbw_gbps
from benchlib.judge.impossible.claim import Collective
from benchlib.judge.impossible.findings import PEAK_SLACK, Finding, agrees, figure, finding, follows, rule, span

GB = "GB/s"
BITS = 8
MIN_TRANSFER_S = 1e-8  # 3 m of light; a store from one core to another takes longer
MAX_BYTES_PER_S = 10e12  # algbw; B200 and MI355X claim 8e12 for their memory
DECIMALS = 0.0051  # GB/s: small bandwidths are printed with two decimals
PRINTED = 2e-3  # beside the rounding: nccl-tests derives both bandwidths from one time, others round in between
SWITCHED = ("NVLS", "COLLNET", "SHARP")  # algorithms of NCCL in which a switch adds


@rule("collective", "algbw is S/t", "size_bytes seconds algbw_gbytes_per_s")
def algbw(it: Any) -> Finding:
    """An algorithm bandwidth that is not size over time."""
    # S is the bytes of the larger side. What some tools print, 2S/t, is no algbw.
    if it.seconds <= 0:
        return finding(False, f"{it.size_bytes:,} bytes in {it.seconds:g} s", wrong="a time is above zero")
    expected, *ends = (algbw_gbps(it.size_bytes, max(t, 1e-12)) / BITS for t in (it.seconds, *span(it.seconds)))
    by = f"{it.size_bytes:,} bytes / {figure(1e6 * it.seconds, 'us')}"
    wrong = "it is 2·S/t under the name of algbw" * (abs(it.algbw_gbytes_per_s - 2 * expected) < 0.05 * expected)
    return follows(it.algbw_gbytes_per_s, expected, by, GB, ends, PRINTED, absolute=DECIMALS, wrong=wrong)


@rule("collective", "transfer takes time", "size_bytes seconds")
def possible_transfer(it: Any) -> Finding | None:
    """Transfers faster than light or than any memory."""
    # No signal crosses to another device in less than 10 ns, and no memory moves more than 10 TB/s.
    if not it.size_bytes or it.ranks == 1 or it.seconds <= 0:
        return None
    rate = it.size_bytes / it.seconds
    reason = f"{it.size_bytes:,} bytes in {figure(1e6 * it.seconds, 'us')} = {figure(rate / 1e9, GB)}"
    wrong = f"no device's memory moves more than {figure(MAX_BYTES_PER_S / 1e9, GB)}; it was not waited for"
    if it.seconds < MIN_TRANSFER_S:
        wrong = "light needs longer to another device and back; it was not waited for"
    return finding(it.seconds >= MIN_TRANSFER_S and rate <= MAX_BYTES_PER_S, reason, wrong=wrong)


@rule("collective", "busbw factor", "ranks algbw_gbytes_per_s busbw_gbytes_per_s")
def busbw_factor(it: Any) -> Finding:
    """A bus bandwidth with another operation's or rank count's factor."""
    if it.operation and it.operation not in BUS_FACTORS:
        return Finding("SKIPPED", f"{it.operation}: no factor is defined for it")
    factors = sorted({BUS_FACTORS[name](it.ranks) for name in ([it.operation] if it.operation else BUS_FACTORS)})
    reason = (
        f"busbw {figure(it.busbw_gbytes_per_s, GB)}, algbw {figure(it.algbw_gbytes_per_s, GB)}; the factor of "
        f"{it.operation or 'the operation, which is not named,'} over {it.ranks} ranks is "
        f"{' or '.join(f'{factor:.4g}' for factor in factors)}"
    )
    ratio = it.busbw_gbytes_per_s / it.algbw_gbytes_per_s if it.algbw_gbytes_per_s else 0.0
    return finding(any(_has_factor(it, factor) for factor in factors), reason, wrong=f"their ratio is {ratio:.4g}")


def _has_factor(it: Any, factor: float) -> bool:
    ends = [factor * end for end in span(it.algbw_gbytes_per_s)]
    return agrees(it.busbw_gbytes_per_s, ends, PRINTED, 2 * DECIMALS)


def _possible_operations(it: Collective) -> list[str]:
    """Return the operation, or where it is not named those whose factor the two bandwidths have; all where none has."""
    names, ranks = sorted(BUS_FACTORS), it.ranks
    if ranks is None or it.algbw_gbytes_per_s is None or it.operation:
        return [it.operation] if it.operation else names
    return [name for name in names if _has_factor(it, BUS_FACTORS[name](ranks))] or names


def wire_rate(
    busbw_gbytes_per_s: float, ranks: int | None, algorithm: str, operations: Sequence[str]
) -> tuple[float, str]:
    """Return the least rate in GB/s that a rank's links carried, and by which algorithm.

    With NVLS the switch adds, and an all-reduce of S bytes moves (n+1)/n·S over a link; busbw is then no wire rate.
    Where the algorithm or the operation is not known, the one that asks least of the links counts.
    """
    ring = (busbw_gbytes_per_s, algorithm or "ring")
    if "all_reduce" not in operations or not ranks or ranks < 2:
        return ring
    by_switch = (busbw_gbytes_per_s / BUS_FACTORS["all_reduce"](ranks) * (ranks + 1) / ranks, "NVLS")
    switched = any(name in algorithm.upper() for name in SWITCHED)
    return min(ring, by_switch) if switched or not algorithm else ring


@rule("collective", "busbw below the links", "busbw_gbytes_per_s bound_gbytes_per_s")
def busbw_bound(it: Any) -> Finding:
    """A bus bandwidth above what the links carry."""
    operations = _possible_operations(it)
    wire, by = wire_rate(it.busbw_gbytes_per_s, it.ranks, it.algorithm, operations)
    most = it.bound_gbytes_per_s * PEAK_SLACK
    reason = f"busbw {figure(it.busbw_gbytes_per_s, GB)}"
    if wire != it.busbw_gbytes_per_s:
        reason += f", {'' if it.algorithm else 'at least '}{figure(wire, GB)} on the wire ({by}: algbw × (n+1)/n)"
    source = f" ({it.bound_source})" if it.bound_source else ""
    reason += f"; at most {figure(it.bound_gbytes_per_s, GB)} can be moved{source}"
    if wire > most and not it.operation and (it.ranks is None or len(operations) > 1):
        unknown = "operation and the number of ranks are" if it.ranks is None else "operation is"
        return Finding("SKIPPED", f"{reason}; the {unknown} not stated, and what the links carried depends on it")
    wrong = "the operation was timed before it had ended, or the size is not what was moved"
    return finding(wire <= most, reason, wrong=wrong, value=wire, unit=GB, limit=f"<= {figure(most, GB)}")


@rule("collective", "right results", "wrong_elements")
def right_results(it: Any) -> Finding:
    """Speed of wrong results."""
    wrong, count = "the speed of a wrong result does not count", it.wrong_elements
    return finding(count == 0, f"{count:,.0f} wrong elements", wrong=wrong, value=count, unit="elements", limit="= 0")


@rule("collective", "average busbw", "average_busbw_gbytes_per_s all_busbw_gbytes_per_s")
def average_busbw(it: Any) -> Finding:
    """An average that is not that of the rows."""
    rows, average = it.all_busbw_gbytes_per_s, it.average_busbw_gbytes_per_s
    # Each row is printed with two decimals or fewer.
    margin = max(0.01, *(span(row)[1] - row for row in rows))
    wrong = "rows were left out or changed"
    return follows(average, statistics.fmean(rows), f"{len(rows)} rows", GB, (), PRINTED, absolute=margin, wrong=wrong)
