"""Findings of the rules, and when two numbers that were rounded for print still agree."""

import math
import statistics
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from benchlib.core.text import quantity
from benchlib.judge.impossible.claim import AccuracyLimit, Claim

PEAK_SLACK = 1.05  # a peak is itself measured: a value may exceed it by noise, not by more
SCALING_SLACK = 1.05  # n devices do not do more than n times the work of one, but for noise
RATE_SLACK = 0.05  # between a stated rate and counts over time: the ends of a window are seldom sharp
ROUNDING = 2e-4  # of values that follow from each other exactly, beside the rounding of each for print


@dataclass(frozen=True)
class Finding:
    """What a rule says of a claim. ``value`` and ``limit`` are those of the check that it may become."""

    status: Literal["PASS", "FAIL", "SKIPPED"]
    reason: str
    value: float | None = None
    unit: str = ""
    limit: str = ""


def found(
    passed: bool, reason: str, *, wrong: str = "", value: float | None = None, unit: str = "", limit: str = ""
) -> Finding:
    """Make a finding of a fact that holds or not; where it does not, ``wrong`` is added to the reason."""
    text = reason if passed or not wrong else f"{reason}: {wrong}"
    return Finding("PASS" if passed else "FAIL", text, value, unit, limit)


def half_unit(value: float) -> float:
    """Return half of the last digit that a value was written with: 156.2 -> 0.05, 8000 -> 500 (zeros may be rounding)."""
    digits = Decimal(repr(float(value))).normalize()
    exponent = digits.as_tuple().exponent
    return 0.5 * 10.0**exponent if value and isinstance(exponent, int) else 0.0


def span(value: float) -> tuple[float, float]:
    """Return the values that print as this one."""
    half = half_unit(value)
    return value - half, value + half


def agrees(stated: float, low: float, high: float, slack: float = ROUNDING, absolute: float = 0.0) -> bool:
    """Tell whether a stated value, as rounded, can lie between ``low`` and ``high``.

    ``slack`` is a share (5e-4: 0.05 %); ``absolute`` is for small values that were printed with fixed decimals.
    """
    below, above = span(stated)
    margin = slack * max(abs(low), abs(high), abs(stated)) + absolute
    return above >= low - margin and below <= high + margin


def figure(value: float, unit: str = "") -> str:
    """Write a number so that what was compared can be seen: up to six digits."""
    if not math.isfinite(value):
        return f"{value} {unit}".strip()
    if unit == "FLOP/s":
        return quantity(value, unit)
    size = abs(value)
    text = (
        f"{value:,.0f}" if size >= 1e4 and value == round(value) else f"{value:,.6g}" if size < 1e15 else f"{value:.4g}"
    )
    if "e" in text:
        text = f"{value:,.1f}" if 1 <= size < 1e12 else f"{value:.4g}"
    return f"{text} {unit}".strip()


# Rules of what is said about numbers: ratios, announcements, limits and their sources, values below zero.


FAR_OFF = 2.0  # an announcement that is off by more than a factor of two describes another run
SAME = 1e-6  # of numbers that were written in full
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
    return [found(not wrong, "; ".join(wrong) or _all_possible(len(claim.quantities)))]


def _all_possible(number: int) -> str:
    one, more = "the value is finite and not below zero", f"all {number:,} values are finite and none is below zero"
    return one if number == 1 else more


def medians_are_of_their_samples(claim: Claim) -> list[Finding]:
    """A value that is stated to be the median of raw samples is, or lies between the quantiles beside the median."""
    judged, wrong = 0, []
    for one in claim.quantities:
        if one.value is None:
            continue
        if one.median_of_samples and one.samples:
            low = high = statistics.median(one.samples)
            told = f"the median of its {len(one.samples):,} raw samples is {figure(low, one.unit)}"
        elif one.median_span:
            low, high = min(one.median_span), max(one.median_span)
            told = f"the quantiles of its samples put the median at {_range(low, high, one.unit)}"
        else:
            continue
        judged += 1
        margin = SAME * max(abs(one.value), abs(low), abs(high))
        if not low - margin <= one.value <= high + margin:
            wrong.append(f"{one.name} {figure(one.value, one.unit)} stated, {told}")
    if not judged:
        return []
    return [
        found(
            not wrong,
            "; ".join(wrong)
            or f"{counted(judged, 'median')} {'is that' if judged == 1 else 'are those'} of the raw samples",
        )
    ]


def intervals_hold_their_values(claim: Claim) -> list[Finding]:
    """A value lies within the interval that is stated with it."""
    stated = [
        one for one in claim.quantities if one.value is not None and (one.low is not None or one.high is not None)
    ]
    if not stated:
        return []
    wrong = []
    for one in stated:
        value = one.value or 0.0
        low, high = (value if end is None else end for end in (one.low, one.high))
        margin = SAME * max(abs(value), abs(low), abs(high))
        if not low - margin <= value <= high + margin:
            wrong.append(
                f"{one.name} {figure(value, one.unit)} is not within its interval, {figure(low)} to {figure(high, one.unit)}"
            )
    good = f"{counted(len(stated), 'value')} {'lies' if len(stated) == 1 else 'lie'} within the stated interval"
    return [found(not wrong, "; ".join(wrong) or good)]


def units_are_those_of_names(claim: Claim) -> list[Finding]:
    """A name that stands for a unit, as in ``_gbps``, is stated in that unit."""
    stated = [one for one in claim.quantities if one.unit_of_name is not None]
    if not stated:
        return []
    wrong = [
        f"{one.name} is stated in {one.unit or 'no unit'}, its name stands for {one.unit_of_name or 'a number without unit'}"
        for one in stated
        if one.unit != one.unit_of_name
    ]
    good = f"{counted(len(stated), 'unit')} {'is that' if len(stated) == 1 else 'are those'} of the names"
    return [found(not wrong, "; ".join(wrong) or good)]


def statements_agree(claim: Claim) -> list[Finding]:
    """What is stated in two places is the same in both."""
    if not claim.restated:
        return []
    wrong = [
        f"{one.name}: {one.stated} stated, {one.other}{f' by {one.source}' if one.source else ''}"
        for one in dict.fromkeys(claim.restated)  # each contradiction once
        if one.stated != one.other
    ]
    names = ", ".join(dict.fromkeys(one.name for one in claim.restated))
    return [found(not wrong, "; ".join(wrong) or f"the same wherever it is stated: {names}")]


def counted(number: int, noun: str) -> str:
    """Write a count with its noun: ``1 value``, ``3 values``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
