"""Rules of what is said about numbers: ratios, announcements, limits and their sources, values below zero."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence

from benchlib.judge.impossible.claim import (
    AccuracyLimit,
    Collective,
    Compute,
    Expectation,
    LoadGen,
    Part,
    Quantity,
    Speed,
    SpeedUp,
)
from benchlib.judge.impossible.findings import RATE_SLACK, Finding, agrees, figure, finding, span

FAR_OFF = 2.0  # an announcement that is off by more than a factor of two describes another run
EQUAL = 1e-6  # of numbers that were written in full
RATIO_SLACK = 0.02  # of a speed-up, beside the rounding of the three numbers
RATIO_ROUNDING = 0.1  # of a speed-up, which is written with one digit or two
CENT = 0.005  # half of the last digit of most prices
PART_SLACK = 0.02  # two clocks, or a median beside another: parts are seldom measured with their whole
# What the name of a value says of its range: least, most, and the reason.
RANGES: tuple[tuple[re.Pattern[str], tuple[float, float, str]], ...] = (
    (
        re.compile(
            r"^(eval_|test_|best_|final_)?(f1|exact_match|accuracy|em|rouge_?(1|2|l|lsum)|bleu|mmlu)(_score|_percent)?$"
        ),
        (0.0, 100.0, "a score is at most 100"),
    ),
    (re.compile(r"perplexity|(^|_)ppl($|_)"), (1.0, math.inf, "a perplexity is at least 1")),
    (re.compile(r"(^|_)(gpu|device|memory)_utili[sz]ation"), (0.0, 100.0, "a device is used to 100% at most")),
    (
        re.compile(r"(^|_)energy(_|$).*|_joules?$"),
        (1e-12, math.inf, "work takes energy; a sensor that reads 0 is none"),
    ),
)


def speed_up(stated: float, new: float, old: float, others: Sequence[float] = (), unit: str = "") -> Finding:
    """A speed-up is the ratio of the two runs that it names."""
    (new_low, new_high), (old_low, old_high) = span(new), span(old)
    good = agrees(stated, new_low / old_high, new_high / max(old_low, 1e-12), RATIO_SLACK, rounding=RATIO_ROUNDING)
    reason = f"{stated:g} × stated, {figure(new, unit)} / {figure(old, unit)} = {new / old:.3g} ×"
    if others:
        best = max(others)
        reason += f" ({new / best:.3g} × against the better of the others, {figure(best, unit)})"
    return finding(good, reason, wrong="it is not the ratio of these runs", value=stated)


def costs_agree(
    total: float | None = None,
    per_hour: float | None = None,
    per_hour_of: str = "",
    ranks: int = 1,
    wall_s: float | None = None,
    wall_s_span: Sequence[float] = (),
    samples_counted: int | None = None,
    samples_per_s: float | None = None,
    tokens_per_s: float | None = None,
    per_thousand_samples: float | None = None,
    per_million_tokens: float | None = None,
) -> Finding | None:
    """A run costs its hours at the price of an hour, and 1,000 samples or a million tokens the time that they take."""
    hours = {"all ranks": [1], "one rank": [ranks]}.get(per_hour_of, [1, ranks])
    prices = [per_hour * count / 3600 for count in hours] if per_hour else []
    shortest, longest = wall_s_span or (wall_s or 0.0, wall_s or 0.0)
    follows = {
        "total": (total, [(price * shortest, price * longest) for price in prices if wall_s]),
        "per 1,000 samples": (
            per_thousand_samples,
            [(1e3 * price / samples_per_s,) * 2 for price in prices if samples_per_s]
            or [(1e3 * total / samples_counted,) * 2 for _ in [1] if total and samples_counted],
        ),
        "per million tokens": (per_million_tokens, [(1e6 * price / tokens_per_s,) * 2 for price in prices if tokens_per_s]),
    }  # fmt: skip
    sentences, good = [], True
    for name, (stated, ends) in follows.items():
        if stated is not None and ends:
            good &= any(agrees(stated, low, high, RATE_SLACK, CENT) for low, high in ends)
            results = " or ".join(dict.fromkeys(figure(sum(pair) / 2) for pair in ends))
            sentences.append(f"{name} {figure(stated)} stated, {results} by price, time and rate")
    return finding(good, "; ".join(sentences), wrong="the costs contradict each other") if sentences else None


def announcement(name: str, announced: Sequence[float], measured: Sequence[float], unit: str = "") -> Finding:
    """What was announced and what was measured on the same machine overlap within a factor of two."""
    low, high, least, most = min(announced), max(announced), min(measured), max(measured)
    reason = f"{name}: {_range(low, high, unit)} announced, {_range(least, most, unit)} measured"
    if min(low, least) <= 0:
        return Finding("SKIPPED", f"{reason}; a ratio needs values above zero")
    log_ratio = 0.5 * (math.log(low) + math.log(high) - math.log(least) - math.log(most))  # of the middles
    ratio = math.exp(max(-600.0, min(600.0, log_ratio)))
    side = f"{ratio:.3g} times" if ratio >= 1 else f"1/{1 / ratio:.3g} of"
    wrong = f"the announcement is {side} what was measured; the measurement holds"
    return finding(low / FAR_OFF <= most and least <= high * FAR_OFF, reason, wrong=wrong, value=ratio)


def _range(low: float, high: float, unit: str) -> str:
    return figure(low, unit) if low == high else f"{figure(low)} to {figure(high, unit)}"


def sourced_limit(accuracy_limits: Sequence[AccuracyLimit]) -> list[Finding]:
    """A limit of accuracy carries its source and version, and is the one that the checker enforces."""
    findings = []
    for metric in dict.fromkeys(limit.metric for limit in accuracy_limits):
        limits = [limit for limit in accuracy_limits if limit.metric == metric]
        enforced = next((limit for limit in limits if limit.enforced), None)
        holds = enforced or limits[0]
        wrong = [
            f"{limit.value:g} has no {'source' if not limit.source else 'version'}"
            for limit in limits
            if not (limit.source and limit.version)
        ]
        wrong += [
            f"{limit.value:g} of {_from(limit)} is not {'the enforced ' if enforced else ''}{holds.value:g} of {_from(holds)}"
            for limit in limits
            if not agrees(limit.value, holds.value, holds.value)
        ]
        reason = f"{metric}: " + ("; ".join(wrong) or f"{holds.value:g} of {_from(holds)}")
        findings.append(finding(not wrong, reason, wrong="two limits for one question: state source and version"))
    return findings


def _from(limit: AccuracyLimit) -> str:
    return " ".join(part for part in (limit.source, limit.version) if part) or "an unnamed source"


def possible_values(quantities: Sequence[Quantity]) -> Finding:
    """Every value is a finite number, and none is below zero."""
    wrong = [f"{item.name} is not a finite number" for item in quantities if item.value is None]
    wrong += [
        f"{item.name} = {figure(min([item.value, *item.samples]), item.unit)} is below zero"
        for item in quantities
        if item.value is not None and min([item.value, *item.samples]) < 0
    ]
    every = f"all {len(quantities):,} values are" if len(quantities) > 1 else "the value is"
    return finding(not wrong, "; ".join(wrong) or f"{every} finite and not below zero")


def no_negative_figure(
    speed: Speed | None = None,
    compute: Compute | None = None,
    collective: Collective | None = None,
    loadgen: LoadGen | None = None,
    speedups: Sequence[SpeedUp] = (),
    expectations: Sequence[Expectation] = (),
) -> Finding | None:
    """Rates, shares, ratios, counts and times of these parts are not below zero; nothing is said of good ones."""
    parts: list[Part] = [part for part in (speed, compute, collective, loadgen) if part]
    wrong = []
    for part in [*parts, *speedups, *expectations]:
        for name in type(part).model_fields:
            value = getattr(part, name)
            numbers = [item for item in (value if isinstance(value, list) else [value]) if _is_number(item)]
            wrong += [f"{name} = {figure(min(numbers))}"] if numbers and min(numbers) < 0 else []
    return finding(False, "; ".join(wrong), wrong="below zero") if wrong else None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def possible_ranges(quantities: Sequence[Quantity]) -> Finding | None:
    """A score in per cent is at most 100, a perplexity at least 1, a share of a device at most 100%, energy above zero."""
    judged, wrong = 0, []
    for item in quantities:
        bounds = next((bounds for name, bounds in RANGES if name.search(item.name.lower())), None)
        if item.most is not None:  # of this very machine
            bounds = 0.0, item.most, f"at most {figure(item.most, item.unit)} is possible"
        if item.value is None or bounds is None:
            continue
        low, high, what = bounds
        judged += 1
        if not low <= item.value <= high * (1 + EQUAL):
            wrong.append(f"{item.name} = {figure(item.value, item.unit)}: {what}")
    return finding(not wrong, "; ".join(wrong) or f"within their ranges: {judged:,}") if judged else None


def raw_samples(quantities: Sequence[Quantity]) -> Finding | None:
    """A value that is stated to be the median of raw samples is that."""
    judged, wrong = 0, []
    for item in quantities:
        if item.value is None or not item.median_of_samples or not item.samples:
            continue
        judged += 1
        median = statistics.median(item.samples)
        if abs(item.value - median) > EQUAL * max(abs(item.value), abs(median)):
            wrong.append(
                f"{item.name} {figure(item.value, item.unit)} stated, "
                f"the median of its {len(item.samples):,} raw samples is {figure(median, item.unit)}"
            )
    return finding(not wrong, "; ".join(wrong) or f"medians of raw samples: {judged:,}") if judged else None


def intervals(quantities: Sequence[Quantity]) -> Finding | None:
    """A value lies within the interval that is stated with it."""
    judged, wrong = 0, []
    for item in quantities:
        if item.value is None or (item.low is None and item.high is None):
            continue
        judged += 1
        low, high = (item.value if end is None else end for end in (item.low, item.high))
        margin = EQUAL * max(abs(item.value), abs(low), abs(high))
        if not low - margin <= item.value <= high + margin:
            wrong.append(
                f"{item.name} {figure(item.value, item.unit)} is not within its interval, "
                f"{figure(low)} to {figure(high, item.unit)}"
            )
    return finding(not wrong, "; ".join(wrong) or f"values within their interval: {judged:,}") if judged else None


def parts_of_whole(
    name: str, whole: float, parts: Mapping[str, float], apart: bool = False, unit: str = "s"
) -> Finding:
    """No part is larger than its whole or below zero, and parts that do not overlap are not larger together."""
    most = span(whole)[1] * (1 + PART_SLACK)
    wrong = [
        f"{part} {figure(value, unit)} is more than {name}, {figure(whole, unit)}"
        for part, value in parts.items()
        if span(value)[0] > most
    ]
    wrong += [f"{part} {figure(value, unit)} is below zero" for part, value in parts.items() if value < 0]
    total = sum(parts.values())
    if apart and not wrong and sum(span(value)[0] for value in parts.values()) > most:
        wrong = [f"{', '.join(parts)} are {figure(total, unit)} together, {name} is {figure(whole, unit)}"]
    return finding(not wrong, "; ".join(wrong) or f"{name} {figure(whole, unit)} has room for {', '.join(parts)}")


def recorded_samples(quantities: Sequence[Quantity]) -> Finding | None:
    """The raw samples are those that another record of the same work has, where both reach."""
    judged, wrong = 0, []
    for item in quantities:
        count = min(len(item.samples), len(item.recorded))
        if not count:
            continue
        judged += 1
        pairs = list(zip(item.samples[-count:], item.recorded[-count:], strict=True))
        other = [(here, there) for here, there in pairs if abs(here - there) > EQUAL * max(abs(here), abs(there))]
        if other:
            here, there = max(other, key=lambda pair: abs(pair[0] - pair[1]))
            wrong.append(
                f"{item.name}: {len(other):,} of {count:,} samples are not the recorded ones, "
                f"such as {figure(here, item.unit)} for {figure(there, item.unit)}"
            )
    return finding(not wrong, "; ".join(wrong) or f"series that were recorded twice: {judged:,}") if judged else None
