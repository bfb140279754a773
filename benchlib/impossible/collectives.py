"""Rules of collectives, by the definitions of nccl-tests: algbw = S/t, busbw = algbw × the factor of the operation."""

import statistics

from benchlib.bandwidth import BUS_FACTORS, algbw_gbps
from benchlib.impossible.claim import Claim, Collective
from benchlib.impossible.finding import PEAK_SLACK, Finding, agrees, figure, found, span

GB = "GB/s"
BITS = 8
DECIMALS = 0.0051  # GB/s: small bandwidths are printed with two decimals
PRINTED = 2e-3  # beside the rounding: nccl-tests derives both bandwidths from one time, others round in between


def algbw_is_size_over_time(claim: Claim) -> list[Finding]:
    """algbw = S/t with S the bytes of the larger side. 2S/t, as some tools print, is another thing."""
    one = claim.collective
    if one is None or one.size_bytes is None or one.seconds is None or one.algbw_gbytes_per_s is None:
        return []
    if one.seconds <= 0:
        return [found(False, f"{one.size_bytes:,} bytes in {one.seconds:g} s", wrong="a time is above zero")]
    low_s, high_s = span(one.seconds)
    high = algbw_gbps(one.size_bytes, max(low_s, 1e-12)) / BITS
    low, true = (algbw_gbps(one.size_bytes, seconds) / BITS for seconds in (high_s, one.seconds))
    reason = f"algbw {figure(one.algbw_gbytes_per_s, GB)} stated, {one.size_bytes:,} bytes / {figure(1e6 * one.seconds, 'us')} = {figure(true, GB)}"
    ratio = one.algbw_gbytes_per_s / true if true else 0.0
    wrong = "it is 2·S/t under the name of algbw" if abs(ratio - 2) < 0.05 else f"{ratio:.3g} times of S/t"
    return [found(agrees(one.algbw_gbytes_per_s, low, high, PRINTED, DECIMALS), reason, wrong=wrong)]


def _has_factor(busbw: float, algbw: float, factor: float) -> bool:
    low, high = span(algbw)
    return agrees(busbw, factor * low, factor * high, PRINTED, 2 * DECIMALS)


def busbw_has_its_factor(claim: Claim) -> list[Finding]:
    """busbw / algbw is the factor of the operation for its ranks; where the operation is not known, any of them."""
    one = claim.collective
    if one is None or one.ranks is None or one.algbw_gbytes_per_s is None or one.busbw_gbytes_per_s is None:
        return []
    if one.operation and one.operation not in BUS_FACTORS:
        return [Finding("SKIPPED", f"{one.operation}: no factor is defined for it")]
    names = [one.operation] if one.operation else sorted(BUS_FACTORS)
    factors = {BUS_FACTORS[name](one.ranks) for name in names}
    good = any(_has_factor(one.busbw_gbytes_per_s, one.algbw_gbytes_per_s, factor) for factor in factors)
    what = one.operation or "the operation, which is not named,"
    told = " or ".join(f"{factor:.4g}" for factor in sorted(factors))
    reason = f"busbw {figure(one.busbw_gbytes_per_s, GB)}, algbw {figure(one.algbw_gbytes_per_s, GB)}; the factor of {what} over {one.ranks} ranks is {told}"
    ratio = one.busbw_gbytes_per_s / one.algbw_gbytes_per_s if one.algbw_gbytes_per_s else 0.0
    return [found(good, reason, wrong=f"their ratio is {ratio:.4g}")]


SWITCHED = ("NVLS", "COLLNET", "SHARP")  # algorithms of NCCL in which a switch adds


def possible_operations(one: Collective) -> list[str]:
    """Return the operation, or where it is not named those whose factor the two bandwidths have; all where none has."""
    if one.operation:
        return [one.operation]
    every = sorted(BUS_FACTORS)
    if one.ranks is None or one.algbw_gbytes_per_s is None or one.busbw_gbytes_per_s is None:
        return every
    busbw, algbw, ranks = one.busbw_gbytes_per_s, one.algbw_gbytes_per_s, one.ranks
    fitting = [name for name in every if _has_factor(busbw, algbw, BUS_FACTORS[name](ranks))]
    return fitting or every


def wire_rate(one: Collective) -> tuple[float, str] | None:
    """Return the least rate in GB/s that a rank's links carried, and by which algorithm.

    With NVLS the switch adds, and an all-reduce of S bytes moves (n+1)/n·S over a link; busbw is then no wire rate.
    Where the algorithm or the operation is not known, the one that asks least of the links counts.
    """
    if one.busbw_gbytes_per_s is None:
        return None
    ring = (one.busbw_gbytes_per_s, one.algorithm or "ring")
    if "all_reduce" not in possible_operations(one) or not one.ranks or one.ranks < 2:
        return ring
    algbw = one.busbw_gbytes_per_s / BUS_FACTORS["all_reduce"](one.ranks)
    by_switch = (algbw * (one.ranks + 1) / one.ranks, "NVLS")
    switched = any(name in one.algorithm.upper() for name in SWITCHED)
    return min(ring, by_switch) if switched or not one.algorithm else ring


def busbw_is_below_bound(claim: Claim) -> list[Finding]:
    """No link carries more than it can (5 % slack): what exceeds it was not waited for."""
    one = claim.collective
    if one is None or one.bound_gbytes_per_s is None or one.busbw_gbytes_per_s is None:
        return []
    rate = wire_rate(one)
    assert rate is not None
    wire, algorithm = rate
    bound, source = one.bound_gbytes_per_s, f" ({one.bound_source})" if one.bound_source else ""
    reason = f"busbw {figure(one.busbw_gbytes_per_s, GB)}"
    if wire != one.busbw_gbytes_per_s:
        least = "" if one.algorithm else "at least "
        reason += f", {least}{figure(wire, GB)} on the wire ({algorithm}: algbw × (n+1)/n)"
    reason += f"; at most {figure(bound, GB)} can be moved{source}"
    if wire > bound * PEAK_SLACK and not one.operation and (one.ranks is None or len(possible_operations(one)) > 1):
        unknown = "which operation over how many ranks it is" if one.ranks is None else "which operation it is"
        return [Finding("SKIPPED", f"{reason}; {unknown} is not stated, and what the links carried depends on it")]
    wrong = "the operation was timed before it had ended, or the size is not what was moved"
    limit = f"<= {figure(bound * PEAK_SLACK, GB)}"
    return [found(wire <= bound * PEAK_SLACK, reason, wrong=wrong, value=wire, unit=GB, limit=limit)]


def every_element_is_right(claim: Claim) -> list[Finding]:
    """A speed counts only where the result was right."""
    one = claim.collective
    if one is None or one.wrong_elements is None:
        return []
    wrong = one.wrong_elements
    reason = f"{wrong:,.0f} wrong elements"
    return [found(wrong == 0, reason, wrong="a fast wrong answer is none", value=wrong, unit="elements", limit="= 0")]


def average_is_of_the_rows(claim: Claim) -> list[Finding]:
    """The stated average bus bandwidth is the mean of the rows, both placements and all sizes."""
    one = claim.collective
    if one is None or one.average_busbw_gbytes_per_s is None or not one.all_busbw_gbytes_per_s:
        return []
    rows = one.all_busbw_gbytes_per_s
    mean = statistics.fmean(rows)
    # Each row is printed with two decimals or fewer.
    margin = max(0.01, *(span(row)[1] - row for row in rows))
    good = agrees(one.average_busbw_gbytes_per_s, mean - margin, mean + margin, PRINTED)
    reason = f"average busbw {figure(one.average_busbw_gbytes_per_s, GB)} stated, the mean of {len(rows)} rows is {figure(mean, GB)}"
    return [found(good, reason, wrong="rows were left out or changed")]
