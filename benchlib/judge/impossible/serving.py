"""Rules of serving: latencies and requests, and summaries of MLPerf LoadGen."""

import itertools
import math
import statistics
from typing import Any

from benchlib.judge.impossible.claim import LoadGen
from benchlib.judge.impossible.early_stopping import queries_needed, set_aside
from benchlib.judge.impossible.findings import (
    PEAK_SLACK,
    ROUNDING,
    Finding,
    agrees,
    figure,
    finding,
    follows,
    none_wrong,
    rule,
    span,
)
from benchlib.judge.references import vendor_peak

OVERTAKEN = 1.2  # by which LoadGen's rate may exceed the one of the raw samples: a tail of queries
OVER_TARGET = 2.0  # times the target rate: a few queries may happen to be sent that fast
CENT = 0.01  # samples/s: LoadGen prints rates with two decimals
IN_FLIGHT = 0.05  # share of the requests that may be under way at the end, where it is not stated
SAMPLES_SLACK = 5e-3  # of a latency that was printed with three digits
EQUAL = 1e-9  # share by which two percentiles may be out of order
# Names of the time to the first token, and of that to the last one.
FIRST = ("first token", "time to first token", "ttft")
WHOLE = ("latency", "end to end", "end-to-end", "end-to-end latency", "e2e", "e2el", "request latency")


@rule("latencies", "no time below zero")
def no_negative_time(it: Any) -> Finding | None:
    """Negative latencies."""
    times = it.stated | {f"sample {place:,}": value for place, value in enumerate(it.samples_s, 1)}
    wrong = [f"{what} {value:.4g} s" for what, value in times.items() if value < 0]
    why = "a time cannot be negative; clocks or events were mixed up"
    return none_wrong(wrong[:3], f"{len(times)} times, none below zero", why, f"{it.name}: ") if times else None


@rule("latencies", "tokens take time", "of_tokens")
def tokens_take_time(it: Any) -> Finding | None:
    """First tokens that were never reported, tokens that came all at once."""
    times = [*it.samples_s, *it.percentiles_s.values()]
    if not it.of_tokens or not times:
        return None
    zero, wrong = times.count(0), "first tokens were not reported, or all tokens came at once"
    return finding(not zero, f"{it.name}: {zero} of {len(times)} times are zero", wrong=wrong)


@rule("latencies", "percentiles in order")
def percentiles_in_order(it: Any) -> Finding | None:
    """Percentiles that fall or are none, a mean outside the ends."""
    # minimum <= p50 <= p90 <= … <= maximum, and the mean lies between the ends.
    wrong = [f"p{key:g} is no percentile" for key in it.percentiles_s if not 0 <= key <= 100]
    ladder, mean = [pair for pair in it.stated.items() if pair[0] != "mean"], it.mean_s
    if not ladder or (len(ladder) < 2 and mean is None):
        return None
    wrong += [
        f"{low} {first:.6g} s above {high} {second:.6g} s"
        for (low, first), (high, second) in itertools.pairwise(ladder)
        if first > second * (1 + EQUAL) and second >= 0
    ]
    low_s, high_s = it.min_s or 0.0, math.inf if it.max_s is None else it.max_s
    if mean is not None and not low_s * (1 - EQUAL) <= mean <= high_s * (1 + EQUAL):
        wrong.append(f"mean {mean:.6g} s is not between the ends, {low_s:.6g} s and {high_s:.6g} s")
    (first_name, first), (last_name, last) = ladder[0], ladder[-1]
    good = f"{first_name} {first:.4g} s to {last_name} {last:.4g} s, in order"
    return none_wrong(wrong, good, about=f"{it.name}: ")


@rule("latencies", "latency of raw times", "samples_s")
def latency_of_samples(it: Any) -> Finding | None:
    """Latencies that the raw times do not give."""
    # A percentile lies between the two times around its rank, however it is taken.
    times = sorted(it.samples_s)
    spans = {"minimum": times[:1], "maximum": times[-1:], "mean": [statistics.fmean(times)]}
    for key in it.percentiles_s:
        place = int(key / 100 * (len(times) - 1))
        spans[f"p{key:g}"] = times[min(max(place - 1, 0), len(times) - 1) : place + 3]
    wrong = [
        f"{what} {value:.6g} s stated, {min(spans[what]):.6g} to {max(spans[what]):.6g} s by {len(times):,} raw times"
        for what, value in it.stated.items()
        if not agrees(value, spans[what], SAMPLES_SLACK)
    ]
    good = f"{', '.join(it.stated)} are those of the raw times"
    return none_wrong(wrong, good, about=f"{it.name}: ") if it.stated else None


@rule("", "first token before last", "latencies")
def first_before_last(it: Any) -> Finding | None:
    """A first token after the end of its answer."""
    # At every percentile, and in the mean, of the same requests.
    kinds = ([item for item in it.latencies if item.name.lower() in names] for names in (FIRST, WHOLE))
    pairs = [(what, a, b) for a, b in itertools.product(*kinds) for what in sorted(a.stated.keys() & b.stated.keys())]
    wrong = [
        f"{what} of {first.name} {first.stated[what]:.4g} s above that of {whole.name} {whole.stated[what]:.4g} s"
        for what, first, whole in pairs
        if first.stated[what] > whole.stated[what] * (1 + EQUAL)
    ]
    good = f"first tokens come before the ends of their answers, {len(pairs)} figures"
    return none_wrong(wrong, good, "the first token is a part of the whole") if pairs else None


@rule("", "latency of requests", "latencies requests")
def latencies_of_requests(it: Any) -> Finding | None:
    """Latencies of no completed request."""
    counts = {"completed": it.requests.completed, "in the latency": it.requests.in_latency}
    stated = {what: count for what, count in counts.items() if count is not None}
    named = [item.name for item in it.latencies if item.percentiles_s or item.mean_s is not None or item.samples_s]
    reason = f"{', '.join(named)} of {', '.join(f'{count:,} {what}' for what, count in stated.items())}"
    return finding(0 not in stated.values(), reason, wrong="a latency of no request") if named and stated else None


@rule("decode", "decode below the memory", "tokens_per_s weights_bytes")
def decode_bandwidth(it: Any) -> Finding:
    """Tokens for which the weights cannot be read often enough."""
    # Each step of decoding reads all weights once.
    read = it.tokens_per_s / it.batch / it.tokens_per_step * it.weights_bytes
    how = f"{figure(it.tokens_per_s)} tokens/s at batch {it.batch:,} read {figure(read / 1e9, 'GB/s')} of weights"
    vendor = vendor_peak(it.device)
    bounds = [(it.memory_bytes_per_s, it.memory_source or "stated")] if it.memory_bytes_per_s else []
    if vendor and vendor.memory_gbytes_per_s:
        bounds.append((1e9 * vendor.memory_gbytes_per_s * it.ranks, f"{it.ranks} × {vendor.name}, claimed"))
    if not bounds:
        return Finding("SKIPPED", f"{how}: no memory bandwidth of {it.device or 'this device'} is known")
    most, source = min(bounds)
    reason = f"{how}, {read / most:.1%} of the memory's {figure(most / 1e9, 'GB/s')} ({source})"
    limit = f"<= {figure(most * PEAK_SLACK / 1e9, 'GB/s')}"
    wrong = "weights cannot be read that often"
    return finding(read <= most * PEAK_SLACK, reason, wrong=wrong, value=read, unit="B/s", limit=limit)


@rule("requests", "requests add up")
def requests_add_up(it: Any) -> Finding | None:
    """Failed requests counted as fast ones."""
    # Issued = completed + failed, but for those in flight at the end, and only completed requests have a latency.
    counts = {"issued": it.issued, "completed": it.completed, "failed": it.failed, "in the latency": it.in_latency}
    stated = [f"{value:,} {name}" for name, value in counts.items() if value is not None]
    most = it.completed if it.issued is None or it.completed is not None else it.issued - (it.failed or 0)
    wrong = list[str]()
    if it.issued is not None and it.completed is not None:
        rest = it.issued - it.completed - (it.failed or 0)
        if rest < 0:
            wrong.append("more than were issued")
        elif it.failed is not None and (rest > IN_FLIGHT * it.issued if it.in_flight is None else rest != it.in_flight):
            wrong.append(f"{rest:,} are neither completed nor failed")
    if it.in_latency is not None and most is not None and it.in_latency > most:
        wrong.append(f"{it.in_latency:,} are in the latency, {most:,} completed: failed ones make it look shorter")
    return finding(not wrong, ", ".join(stated), wrong="; ".join(wrong)) if len(stated) > 1 else None


@rule("loadgen", "LoadGen verdict", "valid")
def loadgen_verdict(it: Any) -> Finding:
    """VALID with an unmet constraint."""
    # A run that is no result is possible all the same.
    unmet = ", ".join(name for name, word in it.satisfied.items() if word.upper() == "NO")
    if it.mode == "AccuracyOnly":
        return Finding("SKIPPED", "a run in mode AccuracyOnly: no rate of it is a result, run PerformanceOnly")
    if not it.valid:
        invalid = "LoadGen calls the run INVALID, it is no result; not satisfied"
        return Finding("SKIPPED", f"{invalid}: {unmet or 'not stated'}")
    return finding(not unmet, "VALID", wrong=f"not satisfied: {unmet}")


def _admitted(constraint: str, it: LoadGen) -> bool:
    """Return whether a summary admits that a constraint (by the start of its name) is not satisfied."""
    word = next((word for name, word in it.satisfied.items() if name.lower().startswith(constraint)), "")
    return word.upper() != "YES" if word else it.valid is not True


@rule("loadgen", "LoadGen errors", "errors")
def loadgen_errors(it: Any) -> Finding:
    """VALID with errors in the log."""
    # Completions that came twice, first tokens that never came: LoadGen calls such a run VALID all the same.
    reason = f"{it.errors:,} errors in the log" + (", VALID all the same" if it.errors and it.valid else "")
    return finding(not it.errors, reason, wrong="queries were not answered as they must be")


@rule("loadgen", "LoadGen rate", "samples_per_s")
def loadgen_rate(it: Any) -> Finding | None:
    """A rate up to the end of the last issued query, or above the rate at which queries were sent or asked for."""
    # It counts up to the end of the last *issued* query; none ends before it is due, so the scheduled rate is a bound.
    raw, due, target = it.raw_samples_per_s, it.scheduled_per_s, it.target_per_s or None
    bounds = [
        (due, due and span(due)[1] + CENT, "were due", "queries cannot end before they are sent"),
        (target, target and OVER_TARGET * target, "are the target", "queries are sent at the target rate"),
        (raw, raw and OVERTAKEN * raw, "by the raw samples", "others still ran when the last issued query ended"),
    ]
    stated = [bound for bound in bounds if bound[0] is not None]
    reason = ", ".join(f"{figure(value)} {what}" for value, _, what, _ in stated)
    wrong = [why for _, most, _, why in stated if span(it.samples_per_s)[0] > most * (1 + ROUNDING)]
    reason = f"{figure(it.samples_per_s)} samples/s stated, {reason}"
    return finding(not wrong, reason, wrong="; ".join(wrong)) if stated else None


@rule("loadgen", "LoadGen duration", "duration_s min_duration_s")
def loadgen_duration(it: Any) -> Finding:
    """Runs shorter than their minimum."""
    good = it.duration_s >= it.min_duration_s * (1 - 1e-9) or _admitted("min duration", it)
    reason = f"{it.duration_s:,.1f} s of at least {it.min_duration_s:,.1f} s"
    return finding(good, reason, wrong="it is shorter than the minimum that it calls satisfied")


@rule("loadgen", "LoadGen latency", "scenario target_latency_s target_percentile_s")
def loadgen_latency(it: Any) -> Finding | None:
    """A percentile above the target latency."""
    if it.scenario != "Server" or not it.target_latency_s:
        return None
    good = it.target_percentile_s <= it.target_latency_s or _admitted("performance", it)
    target = f"target {1e3 * it.target_latency_s:,.1f} ms"
    reason = f"p{it.target_percentile or 99:g} of {1e3 * it.target_percentile_s:,.1f} ms, {target}"
    return finding(good, reason, wrong="the constraint is called satisfied")


@rule("loadgen", "LoadGen samples", "samples_per_s samples duration_s")
def loadgen_samples(it: Any) -> Finding | None:
    """A rate that samples and time do not give."""
    # Offline: samples per second × the time of the last sample = the samples of the query.
    if not it.duration_s:
        return None
    by = f"{it.samples:,} samples in {it.duration_s:,.3f} s"
    return follows(it.samples_per_s, it.samples / it.duration_s, by, "samples/s", slack=1e-3)


@rule("loadgen", "early stopping", "processed")
def early_stopping(it: Any) -> Finding | None:
    """Too few queries for a percentile."""
    share = (it.target_percentile or (90 if it.scenario == "SingleStream" else 99)) / 100
    stated = {"needed": it.at_least, "set aside": it.discarded, "missing": it.short_of}
    reason = [f"{it.processed:,} queries", *(f"{count:,} {what}" for what, count in stated.items() if count)]
    wrong = ["VALID although queries are missing"] if it.short_of and it.valid else []
    if it.at_least is not None:
        need, aside = queries_needed(share, 1), set_aside(share, it.processed)
        if it.at_least != need:
            wrong.append(f"the formula asks for {need:,}")
        if it.processed < need and it.valid:
            wrong.append(f"{it.processed:,} queries are fewer than the {need:,} that p{100 * share:g} takes")
        if it.discarded is not None and aside is not None and it.discarded != aside:
            wrong.append(f"the formula sets {aside:,} aside")
    asked = (it.at_least, it.short_of) != (None, None)
    return finding(not wrong, ", ".join(reason), wrong="; ".join(wrong)) if asked else None
