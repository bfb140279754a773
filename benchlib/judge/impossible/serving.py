"""Rules of serving: latencies and requests, and summaries of MLPerf LoadGen."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from benchlib.judge.impossible.claim import Latency, Requests
from benchlib.judge.impossible.early_stopping import queries_needed, set_aside
from benchlib.judge.impossible.findings import PEAK_SLACK, Finding, agrees, figure, finding, none_wrong, rule
from benchlib.judge.references import vendor_peak

OVERTAKEN = 1.2  # by which LoadGen's rate may exceed the one of the raw samples: a tail of queries
CENT = 0.01  # samples/s: LoadGen prints rates with two decimals
IN_FLIGHT = 0.05  # share of the requests that may be under way at the end, where it is not stated
SAMPLES_SLACK = 5e-3  # of a latency that was printed with three digits
EQUAL = 1e-9  # share by which two percentiles may be out of order
# Names of the time to the first token, and of that to the last one.
FIRST = ("first token", "time to first token", "ttft")
WHOLE = ("latency", "end to end", "end-to-end", "end-to-end latency", "e2e", "e2el", "request latency")


@rule("latencies", "no time below zero", "negative latencies")
def no_negative_time(item: Latency) -> Finding | None:
    """A time below zero is the difference of two clocks, or of two events that were mixed up."""
    times = {**item.stated, **{f"sample {place:,}": value for place, value in enumerate(item.samples_s, 1)}}
    wrong = [f"{what} {value:.4g} s" for what, value in times.items() if value < 0]
    why = "a time cannot be negative; clocks or events were mixed up"
    return none_wrong(wrong[:3], f"{len(times)} times, none below zero", why, f"{item.name}: ") if times else None


@rule("latencies", "tokens take time", "first tokens that were never reported, tokens that came all at once")
def tokens_take_time(
    of_tokens: bool,
    name: str = "latency",
    samples_s: Sequence[float] = (),
    percentiles_s: Mapping[float, float] | None = None,
) -> Finding | None:
    """A first token, or the next one, takes time: zero means that it was never reported, or came with others."""
    times = [*samples_s, *(percentiles_s or {}).values()]
    if not of_tokens or not times:
        return None
    zero = sum(value == 0 for value in times)
    reason = f"{name}: {zero} of {len(times)} times are zero" if zero else f"{name}: {len(times)} times, none zero"
    return finding(not zero, reason, wrong="first tokens were not reported, or all tokens came at once")


@rule("latencies", "percentiles in order", "percentiles that fall or are none, a mean outside the ends")
def percentiles_in_order(item: Latency) -> Finding | None:
    """minimum <= p50 <= p90 <= … <= maximum, and the mean lies between the ends. A percentile is one of 0 to 100."""
    if wrong := [f"p{key:g} is no percentile" for key in item.percentiles_s if not 0 <= key <= 100]:
        return finding(False, f"{item.name}: {'; '.join(wrong)}")
    ladder = [(step, value) for step, value in item.stated.items() if step != "mean"]
    mean = item.mean_s
    if not ladder or (len(ladder) < 2 and mean is None):
        return None
    wrong = [
        f"{low} {first:.6g} s above {high} {second:.6g} s"
        for (low, first), (high, second) in itertools.pairwise(ladder)
        if first > second * (1 + EQUAL) and second >= 0
    ]
    low_s, high_s = item.min_s or 0.0, math.inf if item.max_s is None else item.max_s
    if mean is not None and not low_s * (1 - EQUAL) <= mean <= high_s * (1 + EQUAL):
        wrong.append(f"mean {mean:.6g} s is not between the ends, {low_s:.6g} s and {high_s:.6g} s")
    (first_name, first), (last_name, last) = ladder[0], ladder[-1]
    good = f"{first_name} {first:.4g} s to {last_name} {last:.4g} s, in order"
    return none_wrong(wrong, good, about=f"{item.name}: ")


@rule("latencies", "latency of raw times", "latencies that the raw times do not give")
def latency_of_samples(item: Latency, samples_s: Sequence[float]) -> Finding | None:
    """What is stated is that of the raw times: a percentile lies between the two times around its rank, however it is taken."""
    times, mean = sorted(samples_s), statistics.fmean(samples_s)
    spans = {"minimum": (times[0], times[0]), "maximum": (times[-1], times[-1]), "mean": (mean, mean)}
    for key in item.percentiles_s:
        place = key / 100 * (len(times) - 1)
        low, high = (min(max(int(place) + shift, 0), len(times) - 1) for shift in (-1, 2))
        spans[f"p{key:g}"] = (times[low], times[high])
    wrong = []
    for what, value in item.stated.items():
        low_s, high_s = spans[what]
        if not agrees(value, low_s, high_s, SAMPLES_SLACK):
            by = f"{low_s:.6g}{f' to {high_s:.6g}' if low_s < high_s else ''} s by the {len(times):,} raw times"
            wrong.append(f"{what} {value:.6g} s stated, {by}")
    good = f"{', '.join(item.stated)} are those of the raw times"
    return none_wrong(wrong, good, about=f"{item.name}: ") if item.stated else None


@rule("", "first token before last", "a first token after the end of its answer")
def first_before_last(latencies: Sequence[Latency]) -> Finding | None:
    """A first token is not later than the last one: at every percentile, and in the mean, of the same requests."""
    firsts = [item for item in latencies if item.name.lower() in FIRST]
    wholes = [item for item in latencies if item.name.lower() in WHOLE]
    wrong, count = list[str](), 0
    for first, whole in itertools.product(firsts, wholes):
        for what in first.stated.keys() & whole.stated.keys():
            early, late, count = first.stated[what], whole.stated[what], count + 1
            if early > late * (1 + EQUAL):
                wrong.append(f"{what} of {first.name} {early:.4g} s above that of {whole.name} {late:.4g} s")
    good = f"first tokens come before the ends of their answers, {count} figures"
    return none_wrong(sorted(wrong), good, "the first token is a part of the whole") if count else None


@rule("", "latency of requests", "latencies of no completed request")
def latencies_of_requests(latencies: Sequence[Latency], requests: Requests) -> Finding | None:
    """Without a completed request there is no latency."""
    counts = {"completed": requests.completed, "in the latency": requests.in_latency}
    stated = {what: count for what, count in counts.items() if count is not None}
    named = [item.name for item in latencies if item.percentiles_s or item.mean_s is not None or item.samples_s]
    reason = f"{', '.join(named)} of {', '.join(f'{count:,} {what}' for what, count in stated.items())}"
    return finding(0 not in stated.values(), reason, wrong="a latency of no request") if named and stated else None


@rule("decode", "decode below the memory", "tokens for which the weights cannot be read often enough")
def decode_bandwidth(
    tokens_per_s: float,
    weights_bytes: float,
    batch: int = 1,
    tokens_per_step: float = 1.0,
    memory_bytes_per_s: float | None = None,
    memory_source: str = "",
    device: str = "",
    ranks: int = 1,
) -> Finding:
    """Each step of decoding reads all weights once: steps/s × bytes of the weights do not exceed the memory's bandwidth."""
    read = tokens_per_s / batch / tokens_per_step * weights_bytes
    how = f"{figure(tokens_per_s)} tokens/s at batch {batch:,} read {figure(read / 1e9, 'GB/s')} of weights"
    vendor = vendor_peak(device)
    bounds = [(memory_bytes_per_s, memory_source or "stated")] if memory_bytes_per_s else []
    if vendor and vendor.memory_gbytes_per_s:
        bounds.append((1e9 * vendor.memory_gbytes_per_s * ranks, f"{ranks} × {vendor.name}, claimed"))
    if not bounds:
        return Finding("SKIPPED", f"{how}: no memory bandwidth of {device or 'this device'} is known")
    most, source = min(bounds)
    reason = f"{how}, {read / most:.1%} of the memory's {figure(most / 1e9, 'GB/s')} ({source})"
    limit = f"<= {figure(most * PEAK_SLACK / 1e9, 'GB/s')}"
    wrong = "weights cannot be read that often"
    return finding(read <= most * PEAK_SLACK, reason, wrong=wrong, value=read, unit="B/s", limit=limit)


@rule("requests", "requests add up", "failed requests counted as fast ones")
def requests_add_up(
    issued: int | None = None,
    completed: int | None = None,
    failed: int | None = None,
    in_latency: int | None = None,
    in_flight: int | None = None,
) -> Finding | None:
    """Issued = completed + failed, but for those in flight at the end, and only completed requests have a latency."""
    counts = {"issued": issued, "completed": completed, "failed": failed, "in the latency": in_latency}
    stated, wrong = [f"{value:,} {name}" for name, value in counts.items() if value is not None], list[str]()
    if issued is not None and completed is not None and failed is not None:
        rest = issued - completed - failed
        if rest < 0:
            wrong.append(f"{issued:,} issued are not {completed:,} completed + {failed:,} failed")
        elif rest > IN_FLIGHT * issued if in_flight is None else rest != in_flight:
            wrong.append(f"{rest:,} of {issued:,} issued are neither completed nor failed")
        elif rest:
            stated.append(f"{rest:,} in flight at the end")
    elif issued is not None and completed is not None and completed > issued:
        wrong.append(f"{completed:,} completed of {issued:,} issued")
    elif issued is not None and failed is not None:
        completed = issued - failed  # at most
    if in_latency is not None and completed is not None and in_latency > completed:
        only = f"{in_latency:,} are in the latency, {completed:,} completed"
        wrong.append(f"{only}: failed requests make it look shorter")
    return none_wrong(wrong, ", ".join(stated)) if len(stated) > 1 else None


@rule("loadgen", "LoadGen verdict", "VALID with an unmet constraint, a result that is INVALID or of an accuracy run")
def loadgen_verdict(valid: bool, satisfied: Mapping[str, str] | None = None, mode: str = "") -> Finding:
    """A run is VALID when no constraint is unmet; one that LoadGen calls INVALID, or of accuracy alone, is no result."""
    if mode == "AccuracyOnly":
        return finding(False, "a run in mode AccuracyOnly", wrong="no rate of it is a result: run PerformanceOnly")
    unmet = ", ".join(name for name, word in (satisfied or {}).items() if word.upper() == "NO")
    if not valid:
        reason = f"LoadGen calls the run INVALID; not satisfied: {unmet or 'not stated'}"
        return finding(False, reason, wrong="it is no result")
    return finding(
        not unmet, f"VALID although not satisfied: {unmet}" if unmet else "VALID, every constraint is satisfied"
    )


def _admitted(constraint: str, satisfied: Mapping[str, str] | None, valid: bool | None) -> bool:
    """Return whether a summary admits that a constraint (by the start of its name) is not satisfied."""
    word = next((word for name, word in (satisfied or {}).items() if name.lower().startswith(constraint)), "")
    return word.upper() != "YES" if word else valid is not True


@rule("loadgen", "LoadGen errors", "VALID with errors in the log")
def loadgen_errors(errors: int, valid: bool | None = None) -> Finding:
    """LoadGen calls a run VALID whatever errors it logged: completions that came twice, first tokens that never came."""
    reason = f"{errors:,} errors in the log" + (", VALID all the same" if errors and valid else "")
    return finding(not errors, reason, wrong="queries were not answered as they must be")


@rule(
    "loadgen",
    "LoadGen rate",
    "a rate up to the end of the last issued query, or above the rate at which queries were sent",
)
def loadgen_rate(
    samples_per_s: float, raw_samples_per_s: float | None = None, scheduled_per_s: float | None = None
) -> Finding | None:
    """The completed rate counts up to the end of the last *issued* query: one that overtakes the others makes it too high.

    No query ends before it is due, so that even this rate is at most the scheduled one, which counts the same queries.
    """
    reason, good, wrong = f"{figure(samples_per_s)} samples/s stated", True, ""
    if scheduled_per_s is not None:
        reason += f", {figure(scheduled_per_s)} were due"
        good = samples_per_s <= scheduled_per_s or agrees(samples_per_s, 0.0, scheduled_per_s, absolute=CENT)
        wrong = "queries cannot end before they are sent"
    if good and raw_samples_per_s is not None:
        reason += f", the raw samples give {figure(raw_samples_per_s)}"
        good, wrong = (
            samples_per_s <= OVERTAKEN * raw_samples_per_s,
            "others were still running when the last issued query ended",
        )
    return finding(good, reason, wrong=wrong) if wrong else None


@rule("loadgen", "LoadGen duration", "runs shorter than their minimum")
def loadgen_duration(
    duration_s: float, min_duration_s: float, satisfied: Mapping[str, str] | None = None, valid: bool | None = None
) -> Finding:
    """The run lasted the minimum that it claims to have satisfied."""
    good = duration_s >= min_duration_s * (1 - 1e-9) or _admitted("min duration", satisfied, valid)
    reason = f"{duration_s:,.1f} s of at least {min_duration_s:,.1f} s"
    return finding(good, reason, wrong="it is shorter than the minimum that it calls satisfied")


@rule("loadgen", "LoadGen latency", "a percentile above the target latency")
def loadgen_latency(
    scenario: str,
    target_latency_s: float,
    target_percentile_s: float,
    target_percentile: float | None = None,
    satisfied: Mapping[str, str] | None = None,
    valid: bool | None = None,
) -> Finding | None:
    """In the Server scenario the target percentile lies under the target latency where the constraint is satisfied."""
    if scenario != "Server" or not target_latency_s:
        return None
    good = target_percentile_s <= target_latency_s or _admitted("performance", satisfied, valid)
    target = f"target {1e3 * target_latency_s:,.1f} ms"
    reason = f"p{target_percentile or 99:g} of {1e3 * target_percentile_s:,.1f} ms, {target}"
    return finding(good, reason, wrong="the constraint is called satisfied")


@rule("loadgen", "LoadGen samples", "a rate that samples and time do not give")
def loadgen_samples(samples_per_s: float, samples: int, duration_s: float) -> Finding | None:
    """Offline: samples per second × the time of the last sample = the samples of the query."""
    if not duration_s:
        return None
    rate = samples / duration_s
    reason = f"{figure(samples_per_s)} samples/s stated, {samples:,} samples in {duration_s:,.3f} s = {figure(rate)}"
    return finding(agrees(samples_per_s, rate, rate, 1e-3), reason, wrong="the stated rate does not follow")


@rule("loadgen", "early stopping", "too few queries for a percentile")
def early_stopping(
    processed: int,
    at_least: int | None = None,
    short_of: int | None = None,
    discarded: int | None = None,
    scenario: str = "",
    target_percentile: float | None = None,
    valid: bool | None = None,
) -> Finding | None:
    """The queries that early stopping asks for and sets aside are those of its formula (confidence 99%)."""
    share = (target_percentile or (90 if scenario == "SingleStream" else 99)) / 100
    wrong, reason = list[str](), f"{processed:,} queries"
    if short_of and valid:
        wrong.append(f"VALID although {short_of:,} queries are missing")
    if at_least is not None:
        reason += f", at least {at_least:,} needed"
        need, aside = queries_needed(share, 1), set_aside(share, processed)
        if at_least != need:
            wrong.append(f"asks for {at_least:,} queries, the formula for {need:,}")
        if processed < need and valid:
            wrong.append(f"{processed:,} queries are fewer than the {need:,} that p{100 * share:g} takes")
        if discarded is not None and aside is not None and discarded != aside:
            wrong.append(f"sets {discarded:,} latencies aside, the formula {aside:,}")
    reason += f", {discarded:,} set aside" if discarded is not None else ""
    reason += f", {short_of:,} missing" if short_of else ""
    return finding(not wrong, reason, wrong="; ".join(wrong)) if (at_least, short_of) != (None, None) else None
