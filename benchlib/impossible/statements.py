"""Rules of what is said about numbers: ratios, announcements, limits and their sources, values below zero."""

import math
import statistics

from benchlib.impossible.claim import AccuracyLimit, Claim
from benchlib.impossible.finding import Finding, agrees, figure, found, span

FAR_OFF = 2.0  # an announcement that is off by more than a factor of two describes another run
RATIO_SLACK = 0.02  # of a speed-up, beside the rounding of the three numbers


def speedup_is_the_ratio(claim: Claim) -> list[Finding]:
    """A speed-up is the ratio of the two runs that it names."""
    findings = []
    for one in claim.speedups:
        (new_low, new_high), (old_low, old_high) = span(one.new), span(one.old)
        good = agrees(one.stated, new_low / old_high, new_high / max(old_low, 1e-12), RATIO_SLACK)
        reason = f"{one.stated:g} × stated, {figure(one.new, one.unit)} / {figure(one.old, one.unit)} = {one.new / one.old:.3g} ×"
        if one.others:
            best = max(one.others)
            reason += f" ({one.new / best:.3g} × against the better of the others, {figure(best, one.unit)})"
        findings.append(found(good, reason, wrong="it is not the ratio of these runs", value=one.stated))
    return findings


def announcement_fits_measurement(claim: Claim) -> list[Finding]:
    """What was announced and what was measured on the same machine overlap within a factor of two."""
    findings = []
    for one in claim.expectations:
        low, high = min(one.announced), max(one.announced)
        least, most = min(one.measured), max(one.measured)
        reason = f"{one.name}: {_range(low, high, one.unit)} announced, {_range(least, most, one.unit)} measured"
        if min(low, least) <= 0:
            findings.append(Finding("SKIPPED", f"{reason}; a ratio needs values above zero"))
            continue
        logs = [0.5 * (math.log(first) + math.log(second)) for first, second in ((low, high), (least, most))]
        ratio = math.exp(max(-600.0, min(600.0, logs[0] - logs[1])))  # of the middles of both ranges
        good = low / FAR_OFF <= most and least <= high * FAR_OFF
        side = f"{ratio:.3g} times what was" if ratio >= 1 else f"1/{1 / ratio:.3g} of what was"
        findings.append(
            found(good, reason, wrong=f"the announcement is {side} measured; the measurement holds", value=ratio)
        )
    return findings


def _range(low: float, high: float, unit: str) -> str:
    return figure(low, unit) if low == high else f"{figure(low)} to {figure(high, unit)}"


def limits_have_a_source(claim: Claim) -> list[Finding]:
    """A limit of accuracy carries its source and version, and is the one that the checker enforces."""
    findings = []
    by_metric: dict[str, list[AccuracyLimit]] = {}
    for limit in claim.accuracy_limits:
        by_metric.setdefault(limit.metric, []).append(limit)
    for metric, limits in by_metric.items():
        enforced = next((limit for limit in limits if limit.enforced), None)
        wrong = [
            f"{limit.value:g} has no {'source' if not limit.source else 'version'}"
            for limit in limits
            if not (limit.source and limit.version)
        ]
        against = enforced or limits[0]
        wrong += [
            f"{limit.value:g} of {_from(limit)} is not {'the enforced ' if enforced else ''}{against.value:g} of {_from(against)}"
            for limit in limits
            if not agrees(limit.value, against.value, against.value)
        ]
        reason = f"{metric}: " + ("; ".join(wrong) or f"{against.value:g} of {_from(against)}")
        findings.append(found(not wrong, reason, wrong="two limits for one question: state source and version"))
    return findings


def _from(limit: AccuracyLimit) -> str:
    return " ".join(part for part in (limit.source, limit.version) if part) or "an unnamed source"


def quantities_are_possible(claim: Claim) -> list[Finding]:
    """Every value is a finite number, none is below zero, and a median is that of its samples."""
    if not claim.quantities:
        return []
    wrong = [f"{one.name} is not a finite number" for one in claim.quantities if one.value is None]
    wrong += [
        f"{one.name} = {figure(min([one.value, *one.samples]), one.unit)} is below zero"
        for one in claim.quantities
        if one.value is not None and min([one.value, *one.samples]) < 0
    ]
    return [
        found(not wrong, "; ".join(wrong) or f"all {len(claim.quantities)} values are finite and none is below zero")
    ]


def medians_are_of_their_samples(claim: Claim) -> list[Finding]:
    """A value that is stated to be the median of raw samples is."""
    stated = [
        (one, one.value) for one in claim.quantities if one.median_of_samples and one.samples and one.value is not None
    ]
    if not stated:
        return []
    medians = [(one, value, statistics.median(one.samples)) for one, value in stated]
    wrong = [
        f"{one.name} {figure(value, one.unit)} stated, the median of its {len(one.samples):,} raw samples is {figure(median, one.unit)}"
        for one, value, median in medians
        if abs(value - median) > 1e-6 * max(abs(value), abs(median))
    ]
    return [found(not wrong, "; ".join(wrong) or f"all {len(stated)} medians are those of their raw samples")]
