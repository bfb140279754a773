"""Rules of what is said about numbers: ratios, announcements, limits and their sources, values below zero."""

import math
import re
import statistics
from collections.abc import Iterator
from typing import Any

from benchlib.judge.impossible.claim import AccuracyLimit
from benchlib.judge.impossible.findings import (
    RATE_SLACK,
    Finding,
    agrees,
    figure,
    finding,
    follows,
    half_unit,
    none_wrong,
    rule,
    span,
)

FAR_OFF = 2.0  # an announcement that is off by more than a factor of two describes another run
EQUAL = 1e-6  # of numbers that were written in full
RATIO_SLACK = 0.02  # of a speed-up, beside the rounding of the three numbers
RATIO_ROUNDING = 0.1  # of a speed-up, which is written with one digit or two
CENT = 0.005  # half of the last digit of most prices
PART_SLACK = 0.02  # two clocks, or a median beside another: parts are seldom measured with their whole
SCORE = r"^(eval_|test_|best_|final_)?(f1|exact_match|accuracy|em|rouge_?(1|2|l|lsum)|bleu|mmlu)(_score|_percent)?$"
# What the name of a value says of its range: least, most, and the reason.
RANGES = {
    re.compile(SCORE): (0.0, 100.0, "a score is at most 100"),
    re.compile(r"perplexity|(^|_)ppl($|_)"): (1.0, math.inf, "a perplexity is at least 1"),
    re.compile(r"(^|_)(gpu|device|memory)_utili[sz]ation"): (0.0, 100.0, "a device is used to 100% at most"),
    re.compile(r"(^|_)energy(_|$).*|_joules?$"): (1e-12, math.inf, "work takes energy; a sensor that reads 0 is none"),
}


@rule("speedups", "speed-up")
def speed_up(it: Any) -> Finding:
    """A ratio that is not that of the named runs."""
    (new_low, new_high), (old_low, old_high) = span(it.new), span(it.old)
    # It is written with one digit or two.
    half = half_unit(it.stated, RATIO_ROUNDING) - half_unit(it.stated)
    by = f"{figure(it.new, it.unit)} / {figure(it.old, it.unit)}"
    if it.others:
        best = max(it.others)
        by += f" ({it.new / best:.3g} × against the better of the others, {figure(best, it.unit)})"
    ends = [new_low / old_high, new_high / max(old_low, 1e-12)]
    return follows(it.stated, it.new / it.old, by, "×", ends, RATIO_SLACK, absolute=half)


@rule("cost", "costs agree")
def costs_agree(it: Any) -> Finding | None:
    """Costs that prices, times and rates do not give."""
    hours = {"all ranks": [1], "one rank": [it.ranks]}.get(it.per_hour_of, [1, it.ranks])
    prices = [it.per_hour * count / 3600 for count in hours] if it.per_hour else []
    span_s = it.wall_s_span or [it.wall_s or 0.0]
    totals = [[price * end for end in span_s] for price in prices if it.wall_s]
    thousands = [[1e3 * price / it.samples_per_s] for price in prices if it.samples_per_s]
    if not thousands and it.total and it.samples_counted:
        thousands = [[1e3 * it.total / it.samples_counted]]
    millions = [[1e6 * price / it.tokens_per_s] for price in prices if it.tokens_per_s]
    sentences, good = [], True
    for name, stated, choices in (
        ("total", it.total, totals),
        ("per 1,000 samples", it.per_thousand_samples, thousands),
        ("per million tokens", it.per_million_tokens, millions),
    ):
        if stated is not None and choices:
            good &= any(agrees(stated, ends, RATE_SLACK, CENT) for ends in choices)
            results = " or ".join(dict.fromkeys(figure(statistics.fmean(ends)) for ends in choices))
            sentences.append(f"{name} {figure(stated)} stated, {results} by price, time and rate")
    return finding(good, "; ".join(sentences), wrong="the costs contradict each other") if sentences else None


@rule("expectations", "announced and measured")
def announcement(it: Any) -> Finding:
    """Announcements far from the measurement."""
    low, high, least, most = min(it.announced), max(it.announced), min(it.measured), max(it.measured)
    reason = f"{it.name}: {_range(low, high, it.unit)} announced, {_range(least, most, it.unit)} measured"
    if min(low, least) <= 0:
        return Finding("SKIPPED", f"{reason}; a ratio needs values above zero")
    ratio = math.sqrt(low / least) * math.sqrt(high / most)  # of the middles
    wrong = f"the announcement is {ratio:.3g} times what was measured; the measurement holds"
    return finding(low / FAR_OFF <= most and least <= high * FAR_OFF, reason, wrong=wrong, value=ratio)


def _range(low: float, high: float, unit: str) -> str:
    return figure(low, unit) if low == high else f"{figure(low)} to {figure(high, unit)}"


@rule("", "limits have a source", "accuracy_limits")
def sourced_limit(it: Any) -> list[Finding]:
    """Accuracy limits that differ by source or have none."""
    findings, why = [], "two limits for one question: state source and version"
    for metric in dict.fromkeys(limit.metric for limit in it.accuracy_limits):
        first, *others = sorted((i for i in it.accuracy_limits if i.metric == metric), key=lambda i: not i.enforced)
        holds, wrong = f"{'the enforced ' * first.enforced}{first.value:g} of {_from(first)}", list[str]()
        for limit in (first, *others):
            wrong += [f"{limit.value:g} has no source or version"] * (not (limit.source and limit.version))
            wrong += [f"{limit.value:g} of {_from(limit)} is not {holds}"] * (not agrees(limit.value, [first.value]))
        findings.append(none_wrong(wrong, holds, why, f"{metric}: "))
    return findings


def _from(limit: AccuracyLimit) -> str:
    return " ".join(filter(None, (limit.source, limit.version))) or "an unnamed source"


@rule("", "rates above zero")
def no_negative_figure(it: Any) -> Finding | None:
    """Rates, ratios, counts and times below zero."""
    # Nothing is said of good ones.
    parts = [part for part in (it.speed, it.compute, it.collective, it.loadgen) if part]
    wrong = [text for part in (*parts, *it.speedups, *it.expectations) for text in _below_zero(part)]
    return none_wrong(wrong, "", "below zero") if wrong else None


def _below_zero(part: object) -> Iterator[str]:
    for name, value in vars(part).items():
        numbers = [item for item in (value if isinstance(value, list) else [value]) if type(item) in (int, float)]
        if numbers and min(numbers) < 0:
            yield f"{name} = {figure(min(numbers))}"


@rule("quantities", "possible values")
def possible_value(it: Any) -> Finding:
    """Values that are not finite or below zero."""
    if it.value is None:
        return finding(False, f"{it.name} is not a finite number")
    least = min([it.value, *it.samples])
    return _about(it, least >= 0, "finite and not below zero", f"= {figure(least, it.unit)} is below zero")


def _about(it: Any, good: bool, right: str, wrong: str) -> Finding:
    """Say of good quantities only what they are, of others which one it is."""
    return finding(good, right if good else f"{it.name} {wrong}")


@rule("quantities", "possible ranges", "value")
def possible_range(it: Any) -> Finding | None:
    """Scores above 100, perplexities below 1, more use or memory than there is, work without energy."""
    bounds = next((bounds for pattern, bounds in RANGES.items() if pattern.search(it.name.lower())), None)
    if it.most is not None:
        bounds = 0.0, it.most, f"at most {figure(it.most, it.unit)} is possible"
    if bounds is None:
        return None
    low, high, what = bounds
    good = low <= it.value <= high * (1 + EQUAL)
    return _about(it, good, "within its range", f"= {figure(it.value, it.unit)}: {what}")


@rule("quantities", "raw samples", "value samples")
def raw_samples(it: Any) -> Finding | None:
    """Values that are not the median of their raw samples."""
    if not it.median_of_samples:
        return None
    median = statistics.median(it.samples)
    by = f"the median of its {len(it.samples):,} raw samples is {figure(median, it.unit)}"
    good, stated = math.isclose(it.value, median, rel_tol=EQUAL), f"{figure(it.value, it.unit)} stated"
    return _about(it, good, "the median of its raw samples", f"{stated}, {by}")


@rule("quantities", "intervals", "value")
def interval(it: Any) -> Finding | None:
    """Values outside their own interval."""
    if it.low is None and it.high is None:
        return None
    low, high = (it.value if end is None else end for end in (it.low, it.high))
    margin = EQUAL * max(abs(it.value), abs(low), abs(high))
    ends = f"is not within its interval, {figure(low)} to {figure(high, it.unit)}"
    good = low - margin <= it.value <= high + margin
    return _about(it, good, "within its interval", f"{figure(it.value, it.unit)} {ends}")


@rule("quantities", "recorded samples", "samples recorded")
def recorded_samples(it: Any) -> Finding:
    """Raw samples that another record of the same steps does not have."""
    count = min(len(it.samples), len(it.recorded))
    pairs = zip(it.samples[-count:], it.recorded[-count:], strict=True)
    other = [pair for pair in pairs if not math.isclose(*pair, rel_tol=EQUAL)]
    here, there = max(other, key=lambda pair: abs(pair[0] - pair[1]), default=(0.0, 0.0))
    such = f"such as {figure(here, it.unit)} for {figure(there, it.unit)}"
    words = f": {len(other):,} of {count:,} samples are not the recorded ones, {such}"
    if count == 1:
        words = f" is {figure(here, it.unit)}, its row says {figure(there, it.unit)}"
    return finding(not other, f"{it.name}{words}" if other else "as recorded")


@rule("wholes", "parts of a whole")
def parts_of_whole(it: Any) -> Finding:
    """Parts that are larger than their whole: a forward pass longer than its step."""
    most, size = span(it.whole)[1] * (1 + PART_SLACK), figure(it.whole, it.unit)
    wrong = [
        f"{part} {figure(value, it.unit)} is {'below zero' if value < 0 else f'more than {it.name}, {size}'}"
        for part, value in it.parts.items()
        if value < 0 or span(value)[0] > most
    ]
    if it.apart and not wrong and sum(span(value)[0] for value in it.parts.values()) > most:
        together = figure(sum(it.parts.values()), it.unit)
        wrong = [f"{', '.join(it.parts)} are {together} together, {it.name} is {size}"]
    return none_wrong(wrong, f"{it.name} {size} has room for {', '.join(it.parts)}")
