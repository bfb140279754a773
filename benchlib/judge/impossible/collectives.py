"""Rules of collectives, by the definitions of nccl-tests: algbw = S/t, busbw = algbw × the factor of the operation."""

import statistics
from collections.abc import Sequence

from benchlib.core.definitions import BUS_FACTORS, algbw_gbps
from benchlib.judge.impossible.findings import PEAK_SLACK, Finding, agrees, figure, finding, rule, span

GB = "GB/s"
BITS = 8
MIN_TRANSFER_S = 1e-8  # 3 m of light; a store from one core to another takes longer
MAX_BYTES_PER_S = 10e12  # algbw; B200 and MI355X claim 8e12 for their memory
DECIMALS = 0.0051  # GB/s: small bandwidths are printed with two decimals
PRINTED = 2e-3  # beside the rounding: nccl-tests derives both bandwidths from one time, others round in between
SWITCHED = ("NVLS", "COLLNET", "SHARP")  # algorithms of NCCL in which a switch adds


@rule("collective", "algbw is S/t", "an algorithm bandwidth that is not size over time")
def algbw(size_bytes: int, seconds: float, algbw_gbytes_per_s: float) -> Finding:
    """algbw = S/t with S the bytes of the larger side. What some tools print, 2S/t, is no algbw."""
    if seconds <= 0:
        return finding(False, f"{size_bytes:,} bytes in {seconds:g} s", wrong="a time is above zero")
    shortest, longest = span(seconds)
    low, expected, high = (algbw_gbps(size_bytes, max(t, 1e-12)) / BITS for t in (longest, seconds, shortest))
    reason = (
        f"algbw {figure(algbw_gbytes_per_s, GB)} stated, {size_bytes:,} bytes / {figure(1e6 * seconds, 'us')} "
        f"= {figure(expected, GB)}"
    )
    ratio = algbw_gbytes_per_s / expected if expected else 0.0
    wrong = "it is 2·S/t under the name of algbw" if abs(ratio - 2) < 0.05 else f"{ratio:.3g} times S/t"
    return finding(agrees(algbw_gbytes_per_s, low, high, PRINTED, DECIMALS), reason, wrong=wrong)


@rule("collective", "transfer takes time", "transfers faster than light or than any memory")
def possible_transfer(size_bytes: int, seconds: float, ranks: int | None = None, operation: str = "") -> Finding | None:
    """No signal crosses to another device in less than 10 ns (3 m of light), and no memory moves more than 10 TB/s."""
    if not size_bytes or (ranks is not None and ranks < 2) or seconds <= 0:
        return None
    rate = size_bytes / seconds
    reason = f"{size_bytes:,} bytes in {figure(1e6 * seconds, 'us')} = {figure(rate / 1e9, GB)}"
    if seconds < MIN_TRANSFER_S:
        return finding(False, reason, wrong="light needs longer to another device and back; it was not waited for")
    wrong = f"no device's memory moves more than {figure(MAX_BYTES_PER_S / 1e9, GB)}; it was not waited for"
    return finding(rate <= MAX_BYTES_PER_S, reason, wrong=wrong)


@rule("collective", "busbw factor", "a bus bandwidth with another operation's or rank count's factor")
def busbw_factor(ranks: int, algbw_gbytes_per_s: float, busbw_gbytes_per_s: float, operation: str = "") -> Finding:
    """busbw / algbw is the factor of the operation for its ranks; where the operation is not known, any of them."""
    if operation and operation not in BUS_FACTORS:
        return Finding("SKIPPED", f"{operation}: no factor is defined for it")
    factors = {BUS_FACTORS[name](ranks) for name in ([operation] if operation else BUS_FACTORS)}
    good = any(_has_factor(busbw_gbytes_per_s, algbw_gbytes_per_s, factor) for factor in factors)
    reason = (
        f"busbw {figure(busbw_gbytes_per_s, GB)}, algbw {figure(algbw_gbytes_per_s, GB)}; the factor of "
        f"{operation or 'the operation, which is not named,'} over {ranks} ranks is "
        f"{' or '.join(f'{factor:.4g}' for factor in sorted(factors))}"
    )
    ratio = busbw_gbytes_per_s / algbw_gbytes_per_s if algbw_gbytes_per_s else 0.0
    return finding(good, reason, wrong=f"their ratio is {ratio:.4g}")


def _has_factor(busbw: float, algbw: float, factor: float) -> bool:
    low, high = span(algbw)
    return agrees(busbw, factor * low, factor * high, PRINTED, 2 * DECIMALS)


def possible_operations(
    operation: str, ranks: int | None, algbw_gbytes_per_s: float | None, busbw_gbytes_per_s: float
) -> list[str]:
    """Return the operation, or where it is not named those whose factor the two bandwidths have; all where none has."""
    if operation:
        return [operation]
    every = sorted(BUS_FACTORS)
    if ranks is None or algbw_gbytes_per_s is None:
        return every
    fitting = [name for name in every if _has_factor(busbw_gbytes_per_s, algbw_gbytes_per_s, BUS_FACTORS[name](ranks))]
    return fitting or every


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


@rule("collective", "busbw below the links", "a bus bandwidth above what the links carry")
def busbw_bound(
    busbw_gbytes_per_s: float,
    bound_gbytes_per_s: float,
    bound_source: str = "",
    operation: str = "",
    algorithm: str = "",
    ranks: int | None = None,
    algbw_gbytes_per_s: float | None = None,
) -> Finding:
    """No link carries more than it can (5% slack): what exceeds it was not waited for."""
    operations = possible_operations(operation, ranks, algbw_gbytes_per_s, busbw_gbytes_per_s)
    wire, by = wire_rate(busbw_gbytes_per_s, ranks, algorithm, operations)
    most = bound_gbytes_per_s * PEAK_SLACK
    reason = f"busbw {figure(busbw_gbytes_per_s, GB)}"
    if wire != busbw_gbytes_per_s:
        reason += f", {'' if algorithm else 'at least '}{figure(wire, GB)} on the wire ({by}: algbw × (n+1)/n)"
    source = f" ({bound_source})" if bound_source else ""
    reason += f"; at most {figure(bound_gbytes_per_s, GB)} can be moved{source}"
    if wire > most and not operation and (ranks is None or len(operations) > 1):
        unknown = "operation and the number of ranks are" if ranks is None else "operation is"
        return Finding("SKIPPED", f"{reason}; the {unknown} not stated, and what the links carried depends on it")
    wrong = "the operation was timed before it had ended, or the size is not what was moved"
    limit = f"<= {figure(most, GB)}"
    return finding(wire <= most, reason, wrong=wrong, value=wire, unit=GB, limit=limit)


@rule("collective", "right results", "speed of wrong results")
def right_results(wrong_elements: float) -> Finding:
    """A speed counts only where the result was right."""
    reason, wrong = f"{wrong_elements:,.0f} wrong elements", "the speed of a wrong result does not count"
    good = wrong_elements == 0
    return finding(good, reason, wrong=wrong, value=wrong_elements, unit="elements", limit="= 0")


@rule("collective", "average busbw", "an average that is not that of the rows")
def average_busbw(average_busbw_gbytes_per_s: float, all_busbw_gbytes_per_s: Sequence[float]) -> Finding:
    """The stated average bus bandwidth is the mean of the rows, both placements and all sizes."""
    rows, average = all_busbw_gbytes_per_s, average_busbw_gbytes_per_s
    mean = statistics.fmean(rows)
    # Each row is printed with two decimals or fewer.
    margin = max(0.01, *(span(row)[1] - row for row in rows))
    reason = f"average busbw {figure(average, GB)} stated, the mean of {len(rows)} rows is {figure(mean, GB)}"
    good = agrees(average, mean - margin, mean + margin, PRINTED)
    return finding(good, reason, wrong="rows were left out or changed")
