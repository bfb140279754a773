"""Rules of latencies and requests: no time below zero, percentiles in order, no failed request in a latency."""

import functools
import itertools
import math
import statistics
from collections.abc import Iterator

from benchlib.core.definitions import BUS_FACTORS, algbw_gbps
from benchlib.judge.impossible.claim import Claim, Collective, Latency, LoadGen
from benchlib.judge.impossible.findings import PEAK_SLACK, Finding, agrees, figure, found, span


def latency_is_not_negative(claim: Claim) -> list[Finding]:
    """A time below zero is the difference of two clocks, or of two events that were mixed up."""
    findings = []
    for latency in claim.latencies:
        values = dict(_values(latency))
        if not values:
            continue
        wrong = [f"{name} {value:.4g} s" for name, value in values.items() if value < 0]
        reason = f"{latency.name}: " + (", ".join(wrong[:3]) or f"{len(values)} times, none below zero")
        findings.append(
            found(not wrong, reason, wrong="nothing takes less than no time; clocks or events were mixed up")
        )
    return findings


def _values(latency: Latency) -> Iterator[tuple[str, float]]:
    for name, value in (("minimum", latency.min_s), ("mean", latency.mean_s), ("maximum", latency.max_s)):
        if value is not None:
            yield name, value
    for percentile, value in latency.percentiles_s.items():
        yield f"p{percentile:g}", value
    for index, value in enumerate(latency.samples_s, 1):
        yield f"sample {index:,}", value


def percentiles_are_in_order(claim: Claim) -> list[Finding]:
    """minimum <= p50 <= p90 <= … <= maximum, and the mean lies between the ends."""
    findings = []
    for latency in claim.latencies:
        ladder = [("minimum", latency.min_s)] if latency.min_s is not None else []
        ladder += [(f"p{key:g}", value) for key, value in sorted(latency.percentiles_s.items())]
        ladder += [("maximum", latency.max_s)] if latency.max_s is not None else []
        steps = [(name, value) for name, value in ladder if value is not None]
        if len(steps) < 2:
            continue
        wrong = [
            f"{low} {first:.6g} s above {high} {second:.6g} s"
            for (low, first), (high, second) in itertools.pairwise(steps)
            if first > second * (1 + 1e-9) and second >= 0
        ]
        if latency.mean_s is not None and not steps[0][1] * (1 - 1e-9) <= latency.mean_s <= steps[-1][1] * (1 + 1e-9):
            bounded = latency.min_s is not None and latency.max_s is not None
            wrong += (
                [f"mean {latency.mean_s:.6g} s outside {steps[0][1]:.6g} to {steps[-1][1]:.6g} s"] if bounded else []
            )
        names = f"{steps[0][0]} {steps[0][1]:.4g} s to {steps[-1][0]} {steps[-1][1]:.4g} s"
        findings.append(found(not wrong, f"{latency.name}: " + ("; ".join(wrong) or f"{names}, in order")))
    return findings


def requests_add_up(claim: Claim) -> list[Finding]:
    """Issued = completed + failed, and only completed requests have a latency: failing fast is not being fast."""
    requests = claim.requests
    if requests is None:
        return []
    wrong = []
    issued, completed, failed, counted = requests.issued, requests.completed, requests.failed, requests.in_latency
    if issued is not None and completed is not None and failed is not None and issued != completed + failed:
        wrong.append(f"{issued:,} issued are not {completed:,} completed + {failed:,} failed")
    if issued is not None and failed is None and completed is not None and completed > issued:
        wrong.append(f"{completed:,} completed of {issued:,} issued")
    if completed is None and issued is not None and failed is not None:
        completed = issued - failed
    if counted is not None and completed is not None and counted > completed:
        wrong.append(f"{counted:,} are in the latency, {completed:,} completed: failed requests make it look shorter")
    known = {"issued": issued, "completed": completed, "failed": failed, "in the latency": counted}
    told = [f"{value:,} {name}" for name, value in known.items() if value is not None]
    if len(told) < 2:
        return []
    return [found(not wrong, "; ".join(wrong) or ", ".join(told))]


# Rules of MLPerf LoadGen summaries: VALID follows from the constraints, and these from the printed figures.


def verdict_follows_from_constraints(claim: Claim) -> list[Finding]:
    """A run is VALID when no constraint is unmet; one that LoadGen calls INVALID is no result."""
    run = claim.loadgen
    if run is None or run.valid is None:
        return []
    unmet = [name for name, word in run.satisfied.items() if word.upper() == "NO"]
    if run.valid:
        reason = "VALID" + (
            f" although not satisfied: {', '.join(unmet)}" if unmet else ", and every constraint is satisfied"
        )
        return [found(not unmet, reason)]
    return [
        found(
            False,
            f"LoadGen calls the run INVALID; not satisfied: {', '.join(unmet) or 'not told'}",
            wrong="it is no result",
        )
    ]


def duration_is_long_enough(claim: Claim) -> list[Finding]:
    """The run lasted the minimum that it claims to have satisfied."""
    run = claim.loadgen
    if run is None or run.duration_s is None or run.min_duration_s is None:
        return []
    satisfied = next((word for name, word in run.satisfied.items() if name.lower().startswith("min duration")), "")
    enough = run.duration_s >= run.min_duration_s * (1 - 1e-9)
    reason = f"{run.duration_s:,.1f} s of at least {run.min_duration_s:,.1f} s"
    claims = satisfied.upper() == "YES" or (not satisfied and run.valid is True)
    return [found(enough or not claims, reason, wrong="it is shorter than the minimum that it calls satisfied")]


def latency_keeps_its_target(claim: Claim) -> list[Finding]:
    """In the Server scenario the target percentile lies under the target latency where the constraint is satisfied."""
    run = claim.loadgen
    if run is None or run.scenario != "Server" or not run.target_latency_s or run.target_percentile_s is None:
        return []
    satisfied = next((word for name, word in run.satisfied.items() if name.lower().startswith("performance")), "")
    claims = satisfied.upper() == "YES" or (not satisfied and run.valid is True)
    met = run.target_percentile_s <= run.target_latency_s
    reason = f"p{run.target_percentile or 99:g} of {1e3 * run.target_percentile_s:,.1f} ms, target {1e3 * run.target_latency_s:,.1f} ms"
    return [found(met or not claims, reason, wrong="the constraint is called satisfied")]


def samples_follow_from_rate(claim: Claim) -> list[Finding]:
    """Offline: samples per second × the time of the last sample = the samples of the query."""
    run = claim.loadgen
    if run is None or run.samples_per_s is None or run.samples is None or not run.duration_s:
        return []
    true = run.samples / run.duration_s
    reason = f"{figure(run.samples_per_s)} samples/s stated, {run.samples:,} samples in {run.duration_s:,.3f} s = {figure(true)}"
    return [found(agrees(run.samples_per_s, true, true, 1e-3), reason, wrong="it is another rate")]


def early_stopping_counts(claim: Claim) -> list[Finding]:
    """The queries that early stopping asks for and sets aside are those of its formula (confidence 99 %)."""
    run = claim.loadgen
    if run is None or run.processed is None or (run.at_least is None and run.short_of is None):
        return []
    share = (run.target_percentile or (90 if run.scenario == "SingleStream" else 99)) / 100
    wrong = []
    if run.short_of is not None and run.short_of > 0 and run.valid:
        wrong.append(f"VALID although {run.short_of:,} queries are missing")
    if run.at_least is not None:
        need = queries_needed(share, 1)
        if run.at_least != need:
            wrong.append(f"asks for {run.at_least:,} queries, the formula for {need:,}")
        if run.processed < need and run.valid:
            wrong.append(f"{run.processed:,} queries are fewer than the {need:,} that p{100 * share:g} takes")
        aside = discarded(share, run.processed)
        if run.discarded is not None and aside is not None and run.discarded != aside:
            wrong.append(f"sets {run.discarded:,} latencies aside, the formula {aside:,}")
    reason = f"{run.processed:,} queries" + _told(run)
    return [found(not wrong, reason, wrong="; ".join(wrong))]


def _told(run: LoadGen) -> str:
    told = f", at least {run.at_least:,} needed" if run.at_least is not None else ""
    told += f", {run.discarded:,} set aside" if run.discarded is not None else ""
    return told + (f", {run.short_of:,} missing" if run.short_of else "")


# Rules of collectives, by the definitions of nccl-tests: algbw = S/t, busbw = algbw × the factor of the operation.


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


# How many queries a percentile takes, as MLPerf LoadGen counts them (early stopping, confidence 99 %, tolerance 0).
#
# Of h + t queries t may be over the latency if the odds of as few, were the true share of the percentile p not
# reached, are at most 1 %: BetaRegularized(p; h, t + 1) <= 0.01. Source: mlcommons/inference, loadgen/early_stopping.cc.


CONFIDENCE = 0.99


@functools.lru_cache(maxsize=4096)
def queries_needed(percentile: float, over_latency: int) -> int:
    """Return the least queries h + t that prove ``percentile`` (0 to 1, open) with t = ``over_latency`` above the limit."""
    if not 0 < percentile < 1 or over_latency < 0:
        raise ValueError(f"percentile {percentile} and {over_latency} queries: expected 0 < p < 1 and t >= 0")
    from scipy.special import betainc

    def proves(within: int) -> bool:
        return float(betainc(within, over_latency + 1, percentile)) <= 1 - CONFIDENCE + 1e-12

    high = max(1, math.ceil(math.log(1 - CONFIDENCE) / math.log(percentile)))
    while not proves(high):
        high *= 2
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if proves(middle) else (middle, high)
    return high + over_latency


def discarded(percentile: float, queries: int) -> int | None:
    """Return how many of the highest latencies a run of ``queries`` sets aside; None where it is too short for any.

    LoadGen takes the largest t whose need the run meets and reports t - 1 as discarded.
    """
    if queries < queries_needed(percentile, 1):
        return None
    low, high = 1, 2
    while queries >= queries_needed(percentile, high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if queries >= queries_needed(percentile, middle) else (low, middle)
    return low - 1
