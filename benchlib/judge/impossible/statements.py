"""Rules of what is said about numbers: ratios, announcements, limits and their sources, values below zero."""

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchlib.judge.impossible.claim import AccuracyLimit, Claim
from benchlib.judge.impossible.findings import RATE_SLACK, Finding, agrees, figure, finding, none_wrong, rule, span

FAR_OFF = 2.0  # an announcement that is off by more than a factor of two describes another run
EQUAL = 1e-6  # of numbers that were written in full
RATIO_SLACK = 0.02  # of a speed-up, beside the rounding of the three numbers
RATIO_ROUNDING = 0.1  # of a speed-up, which is written with one digit or two
CENT = 0.005  # half of the last digit of most prices
PART_SLACK = 0.02  # two clocks, or a median beside another: parts are seldom measured with their whole
SCORE = r"^(eval_|test_|best_|final_)?(f1|exact_match|accuracy|em|rouge_?(1|2|l|lsum)|bleu|mmlu)(_score|_percent)?$"
# What the name of a value says of its range: least, most, and the reason.
RANGES = tuple(
    (re.compile(pattern), bounds)
    for pattern, bounds in (
        (SCORE, (0.0, 100.0, "a score is at most 100")),
        (r"perplexity|(^|_)ppl($|_)", (1.0, math.inf, "a perplexity is at least 1")),
        (r"(^|_)(gpu|device|memory)_utili[sz]ation", (0.0, 100.0, "a device is used to 100% at most")),
        (r"(^|_)energy(_|$).*|_joules?$", (1e-12, math.inf, "work takes energy; a sensor that reads 0 is none")),
    )
)


@rule("speedups", "speed-up", "a ratio that is not that of the named runs")
def speed_up(stated: float, new: float, old: float, others: Sequence[float] = (), unit: str = "") -> Finding:
    """A speed-up is the ratio of the two runs that it names."""
    (new_low, new_high), (old_low, old_high) = span(new), span(old)
    good = agrees(stated, new_low / old_high, new_high / max(old_low, 1e-12), RATIO_SLACK, rounding=RATIO_ROUNDING)
    reason = f"{stated:g} × stated, {figure(new, unit)} / {figure(old, unit)} = {new / old:.3g} ×"
    if others:
        best = max(others)
        reason += f" ({new / best:.3g} × against the better of the others, {figure(best, unit)})"
    return finding(good, reason, wrong="it is not the ratio of these runs", value=stated)


@rule("cost", "costs agree", "costs that prices, times and rates do not give")
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
    span_s = wall_s_span or (wall_s or 0.0, wall_s or 0.0)
    thousands = [[1e3 * price / samples_per_s] * 2 for price in prices if samples_per_s]
    if not thousands and total and samples_counted:
        thousands = [[1e3 * total / samples_counted] * 2]
    sentences, good = [], True
    totals = [[price * end for end in span_s] for price in prices if wall_s]
    millions = [[1e6 * price / tokens_per_s] * 2 for price in prices if tokens_per_s]
    for name, stated, ends in (
        ("total", total, totals),
        ("per 1,000 samples", per_thousand_samples, thousands),
        ("per million tokens", per_million_tokens, millions),
    ):
        if stated is not None and ends:
            good &= any(agrees(stated, low, high, RATE_SLACK, CENT) for low, high in ends)
            results = " or ".join(dict.fromkeys(figure(sum(pair) / 2) for pair in ends))
            sentences.append(f"{name} {figure(stated)} stated, {results} by price, time and rate")
    return finding(good, "; ".join(sentences), wrong="the costs contradict each other") if sentences else None


@rule("expectations", "announced and measured", "announcements far from the measurement")
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


@rule("", "limits have a source", "accuracy limits that differ by source or have none")
def sourced_limit(accuracy_limits: Sequence[AccuracyLimit]) -> list[Finding]:
    """A limit of accuracy carries its source and version, and is the one that the checker enforces."""
    findings = []
    for metric in dict.fromkeys(limit.metric for limit in accuracy_limits):
        limits = [limit for limit in accuracy_limits if limit.metric == metric]
        holds = next((limit for limit in limits if limit.enforced), limits[0])
        wrong = [
            f"{limit.value:g} has no {'version' if limit.source else 'source'}"
            for limit in limits
            if not (limit.source and limit.version)
        ]
        wrong += [
            f"{limit.value:g} of {_from(limit)} is not {'the enforced ' * holds.enforced}{holds.value:g} of {_from(holds)}"
            for limit in limits
            if not agrees(limit.value, holds.value, holds.value)
        ]
        good, why = f"{holds.value:g} of {_from(holds)}", "two limits for one question: state source and version"
        findings.append(none_wrong(wrong, good, why, f"{metric}: "))
    return findings


def _from(limit: AccuracyLimit) -> str:
    return " ".join(filter(None, (limit.source, limit.version))) or "an unnamed source"


@rule("", "rates above zero", "rates, ratios, counts and times below zero")
def no_negative_figure(item: Claim) -> Finding | None:
    """Rates, shares, ratios, counts and times of these parts are not below zero; nothing is said of good ones."""
    parts = [part for part in (item.speed, item.compute, item.collective, item.loadgen) if part]
    wrong = [text for part in (*parts, *item.speedups, *item.expectations) for text in _below_zero(part)]
    return none_wrong(wrong, "", "below zero") if wrong else None


def _below_zero(part: object) -> Iterator[str]:
    for name, value in vars(part).items():
        numbers = [one for one in (value if isinstance(value, list) else [value]) if type(one) in (int, float)]
        if numbers and min(numbers) < 0:
            yield f"{name} = {figure(min(numbers))}"


@rule("quantities", "possible values", "values that are not finite or below zero")
def possible_value(name: str, value: float | None = None, samples: Sequence[float] = (), unit: str = "") -> Finding:
    """Every value is a finite number, and none is below zero."""
    if value is None:
        return finding(False, f"{name} is not a finite number")
    least = min([value, *samples])
    return finding(
        least >= 0, "finite and not below zero" if least >= 0 else f"{name} = {figure(least, unit)} is below zero"
    )


@rule(
    "quantities",
    "possible ranges",
    "scores above 100, perplexities below 1, more use or memory than there is, work without energy",
)
def possible_range(name: str, value: float, unit: str = "", most: float | None = None) -> Finding | None:
    """A score in per cent is at most 100, a perplexity at least 1, a share of a device at most 100%, energy above zero.

    ``most`` is that of this very machine.
    """
    bounds = next((bounds for pattern, bounds in RANGES if pattern.search(name.lower())), None)
    if most is not None:
        bounds = 0.0, most, f"at most {figure(most, unit)} is possible"
    if bounds is None:
        return None
    low, high, what = bounds
    good = low <= value <= high * (1 + EQUAL)
    return finding(good, "within its range" if good else f"{name} = {figure(value, unit)}: {what}")


@rule("quantities", "raw samples", "values that are not the median of their raw samples")
def raw_samples(
    name: str, value: float, samples: Sequence[float], median_of_samples: bool, unit: str = ""
) -> Finding | None:
    """A value that is stated to be the median of raw samples is that."""
    if not median_of_samples:
        return None
    median = statistics.median(samples)
    good = abs(value - median) <= EQUAL * max(abs(value), abs(median))
    by = f"the median of its {len(samples):,} raw samples is {figure(median, unit)}"
    return finding(good, "the median of its raw samples" if good else f"{name} {figure(value, unit)} stated, {by}")


@rule("quantities", "intervals", "values outside their own interval")
def interval(
    name: str, value: float, unit: str = "", low: float | None = None, high: float | None = None
) -> Finding | None:
    """A value lies within the interval that is stated with it."""
    if low is None and high is None:
        return None
    low, high = (value if end is None else end for end in (low, high))
    margin = EQUAL * max(abs(value), abs(low), abs(high))
    good = low - margin <= value <= high + margin
    ends = f"{figure(low)} to {figure(high, unit)}"
    wrong = f"{name} {figure(value, unit)} is not within its interval, {ends}"
    return finding(good, "within its interval" if good else wrong)


@rule("quantities", "recorded samples", "raw samples that another record of the same steps does not have")
def recorded_samples(name: str, samples: Sequence[float], recorded: Sequence[float], unit: str = "") -> Finding:
    """The raw samples are those that another record of the same work has, where both reach."""
    count = min(len(samples), len(recorded))
    pairs = list(zip(samples[-count:], recorded[-count:], strict=True))
    other = [(here, there) for here, there in pairs if abs(here - there) > EQUAL * max(abs(here), abs(there))]
    if not other:
        return finding(True, "as recorded")
    here, there = max(other, key=lambda pair: abs(pair[0] - pair[1]))
    such = f"such as {figure(here, unit)} for {figure(there, unit)}"
    return finding(False, f"{name}: {len(other):,} of {count:,} samples are not the recorded ones, {such}")


@rule("wholes", "parts of a whole", "parts that are larger than their whole: a forward pass longer than its step")
def parts_of_whole(
    name: str, whole: float, parts: Mapping[str, float], apart: bool = False, unit: str = "s"
) -> Finding:
    """No part is larger than its whole or below zero, and parts that do not overlap are not larger together."""
    most, size = span(whole)[1] * (1 + PART_SLACK), figure(whole, unit)
    wrong = [
        f"{part} {figure(value, unit)} is {'below zero' if value < 0 else f'more than {name}, {size}'}"
        for part, value in parts.items()
        if value < 0 or span(value)[0] > most
    ]
    if apart and not wrong and sum(span(value)[0] for value in parts.values()) > most:
        wrong = [f"{', '.join(parts)} are {figure(sum(parts.values()), unit)} together, {name} is {size}"]
    return none_wrong(wrong, f"{name} {size} has room for {', '.join(parts)}")
