"""The rules of impossible numbers, and what they say of claims.

Collectives by the definitions of nccl-tests: algbw = S/t, busbw = algbw × the factor of the operation. Serving: latencies and
requests. What is said about numbers: ratios, values below zero. Training: rates follow from what was counted, no
device exceeds its peak, something is learnt.
"""

import itertools
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchlib.core.definitions import BUS_FACTORS, algbw_gbps
from benchlib.core.text import quantity
from benchlib.judge.impossible.ceilings import below_ceiling as below_ceiling
from benchlib.judge.impossible.claim import Claim, Collective, Compute, Speed
from benchlib.judge.impossible.findings import (
    PEAK_SLACK,
    RATE_SLACK,
    RULES,
    SCALING_SLACK,
    Finding,
    Rule,
    figure,
    finding,
    follows,
    half_unit,
    none_wrong,
    rule,
    span,
    suspicious,
)
from benchlib.judge.references import vendor_peak

# Collectives.

GB = "GB/s"
BITS = 8
MIN_TRANSFER_S = 1e-8  # 3 m of light; a store from one core to another takes longer
MAX_BYTES_PER_S = 10e12  # algbw; B200 and MI355X claim 8e12 for their memory
MAX_LINK = 1800.0  # GB/s of a device one way: half of the 3.6 TB/s that NVIDIA claims for NVLink 6, twice NVLink 5
DECIMALS = 0.0051  # GB/s: small bandwidths are printed with two decimals
PRINTED = 2e-3  # beside the rounding: nccl-tests derives both bandwidths from one time, others round in between
SWITCHED = ("NVLS", "COLLNET", "SHARP")  # algorithms of NCCL in which a switch adds


@rule("collective", "algbw is S/t", "size_bytes seconds algbw_gbytes_per_s")
def algbw(it: Any) -> Finding | None:
    """An algorithm bandwidth that is not size over time."""
    # S is the bytes of the larger side. What some tools print, 2S/t, is no algbw.
    if not it.seconds:
        return None
    expected, *ends = (algbw_gbps(it.size_bytes, max(t, 1e-12)) / BITS for t in (it.seconds, *span(it.seconds)))
    by = f"{it.size_bytes:,} bytes / {figure(1e6 * it.seconds, 'us')}"
    return follows(it.algbw_gbytes_per_s, expected, by, GB, ends, PRINTED, absolute=DECIMALS)


@rule("collective", "transfer takes time", "size_bytes seconds")
def possible_transfer(it: Any) -> Finding | None:
    """Transfers faster than light or than any memory."""
    # No signal crosses to another device in less than 10 ns, and no memory moves more than 10 TB/s.
    if not it.size_bytes or it.ranks == 1:
        return None
    rate = it.size_bytes / max(it.seconds, 1e-12)
    reason = f"{it.size_bytes:,} bytes in {figure(1e6 * it.seconds, 'us')}"
    wrong = "neither light nor a device's memory is that fast; it was not waited for"
    return finding(it.seconds >= MIN_TRANSFER_S and rate <= MAX_BYTES_PER_S, reason, wrong=wrong)


@rule("collective", "busbw factor", "operation ranks algbw_gbytes_per_s busbw_gbytes_per_s")
def busbw_factor(it: Any) -> Finding | None:
    """A bus bandwidth with another operation's or rank count's factor."""
    if it.operation not in BUS_FACTORS:
        return None
    factor, rate = BUS_FACTORS[it.operation](it.ranks), it.algbw_gbytes_per_s
    by = f"{figure(rate, GB)} of algbw × {factor:.4g}, the factor of {it.operation} over {it.ranks} ranks"
    ends = [factor * end for end in span(rate)]
    return follows(it.busbw_gbytes_per_s, factor * rate, by, GB, ends, PRINTED, absolute=2 * DECIMALS)


def wire_rate(it: Collective) -> float:
    """Return the least rate in GB/s that a rank's links carried.

    With NVLS the switch adds, and an all-reduce of S bytes moves (n+1)/n·S over a link; busbw is then no wire rate.
    Where the algorithm is not known, the one that asks least of the links counts.
    """
    busbw, ranks = it.busbw_gbytes_per_s or 0.0, it.ranks or 1
    switched = not it.algorithm or any(name in it.algorithm.upper() for name in SWITCHED)
    if it.operation != "all_reduce" or ranks < 2 or not switched:
        return busbw
    return min(busbw, busbw / BUS_FACTORS["all_reduce"](ranks) * (ranks + 1) / ranks)


@rule("collective", "busbw below the links", "operation busbw_gbytes_per_s")
def busbw_bound(it: Any) -> Finding | None:
    """A bus bandwidth above what the links carry, or any link that is built."""
    bound, source = (
        it.bound_gbytes_per_s or MAX_LINK,
        it.bound_source or "no link is faster" * (not it.bound_gbytes_per_s),
    )
    wire, most, source = wire_rate(it), bound * PEAK_SLACK, f" ({source})" if source else ""
    if it.bound_gbytes_per_s is None and (wire <= most or it.ranks == 1):
        return None
    reason = f"busbw {figure(it.busbw_gbytes_per_s, GB)}, at least {figure(wire, GB)} on the wire; "
    reason += f"at most {figure(bound, GB)} can be moved{source}"
    wrong = "the operation was timed before it had ended, or the size is not what was moved"
    return finding(wire <= most, reason, wrong=wrong, value=wire, unit=GB, limit=f"<= {figure(most, GB)}")


@rule("collective", "right results", "wrong_elements")
def right_results(it: Any) -> Finding:
    """Speed of wrong results."""
    wrong, count = "the speed of a wrong result does not count", it.wrong_elements
    return finding(count == 0, f"{count:,.0f} wrong elements", wrong=wrong, value=count, unit="elements", limit="= 0")


# Serving.

OVER_TARGET = 2.0  # times the rate that was asked for: a few queries may happen to be sent that fast
EQUAL = 1e-9  # share by which two percentiles may be out of order
MOST = 0.8


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
    zero, wrong = times.count(0), "first tokens were not reported, or all tokens came at once"
    return finding(not zero, f"{it.name}: {zero} of {len(times)} times are zero", wrong=wrong) if times else None


@rule("latencies", "percentiles in order")
def percentiles_in_order(it: Any) -> Finding | None:
    """Percentiles that fall or are none, a mean outside the ends or too low for them."""
    # minimum <= p50 <= p90 <= … <= maximum, and the mean lies between the ends.
    chains = [[name for name in it.stated if name != "mean"], ["minimum", "mean", "maximum"]]
    pairs = [
        pair
        for chain in chains
        for pair in itertools.pairwise((name, it.stated[name]) for name in chain if name in it.stated)
    ]
    if not pairs:
        return None
    wrong = [f"p{key:g} is no percentile" for key in it.percentiles_s if not 0 <= key <= 100]
    wrong += [
        f"{low} {first:.6g} s above {high} {second:.6g} s"
        for (low, first), (high, second) in pairs
        if first - second > EQUAL * abs(second)
    ]
    # Of times above zero the share above a percentile alone gives a part of the mean; MOST allows for how percentiles are taken.
    if it.mean_s is not None and not wrong and min(it.stated.values()) >= 0:
        wrong += [
            f"mean {it.mean_s:.6g} s, of which the times from p{key:g} on are at least {(1 - key / 100) * value:.6g} s"
            for key, value in it.percentiles_s.items()
            if it.mean_s < MOST * (1 - key / 100) * value
        ]
    stated = ", ".join(f"{name} {value:.4g} s" for name, value in it.stated.items())
    return none_wrong(wrong, f"{stated}, in order", about=f"{it.name}: ")


@rule("requests", "requests add up")
def requests_add_up(it: Any) -> Finding | None:
    """Failed requests counted as fast ones."""
    # Completed and failed ones were issued, and only completed requests have a latency.
    counts = {"issued": it.issued, "completed": it.completed, "failed": it.failed, "in the latency": it.in_latency}
    stated = [f"{value:,} {name}" for name, value in counts.items() if value is not None]
    most = it.completed if it.issued is None or it.completed is not None else it.issued - (it.failed or 0)
    wrong = list[str]()
    if it.issued is not None and it.issued < (it.completed or 0) + (it.failed or 0):
        wrong.append("more than were issued")
    if it.in_latency is not None and most is not None and it.in_latency > most:
        wrong.append(f"{it.in_latency:,} are in the latency, {most:,} completed: failed ones make it look shorter")
    return finding(not wrong, ", ".join(stated), wrong="; ".join(wrong)) if len(stated) > 1 else None


@rule("requests", "no errors logged", "logged_errors")
def no_errors_logged(it: Any) -> Finding:
    """Results beside errors in the log: requests answered twice, first tokens that never came."""
    wrong = "requests were not answered as they must be"
    return finding(not it.logged_errors, f"{it.logged_errors:,} errors in the log", wrong=wrong)


@rule("requests", "requests under way", "completed_per_s at_once mean_latency_s")
def requests_under_way(it: Any) -> Finding:
    """More requests under way than the stated number, by Little's law."""
    rate, latency = min(it.completed_per_s), it.mean_latency_s
    by = f"{figure(rate)} requests/s of {figure(latency, 's')} each are {figure(rate * latency)} at once"
    good = span(rate)[0] * span(latency)[0] <= it.at_once * (1 + RATE_SLACK)
    return finding(good, by, wrong=f"{it.at_once:,} are stated", value=rate * latency, limit=f"<= {it.at_once}")


@rule("requests", "rates of requests", "completed_per_s")
def rates_of_requests(it: Any) -> Finding | None:
    """More requests answered than were sent, a rate that is stated twice and differs."""
    # LoadGen divides the same requests by the time when the last one was due, and by the time when all were answered.
    rates, due = it.completed_per_s, it.due_per_s
    wrong = [
        f"{figure(min(values))} and {figure(max(values))} {what}/s are stated of the same run"
        for what, values in (("requests", rates), ("tokens", it.tokens_per_s))
        if values and span(max(values))[0] > span(min(values))[1]
    ]
    if due is not None and span(max(rates))[0] > span(due)[1]:
        wrong.append(f"{figure(max(rates))} requests/s answered of {figure(due)} sent")
    if it.asked_per_s and span(max([*rates, due or 0.0]))[0] > OVER_TARGET * it.asked_per_s:
        wrong.append(f"{figure(max([*rates, due or 0.0]))} requests/s sent, {figure(it.asked_per_s)} were asked for")
    stated = len(rates) + len(it.tokens_per_s) + (due is not None)
    return none_wrong(wrong, f"{stated} rates, none contradicts another") if stated > 1 else None


@rule("limits", "limits met")
def limits_met(it: Any) -> Finding:
    """A constraint called satisfied that its number misses, a part that takes longer than its whole."""
    good = it.value_s >= it.limit_s if it.at_least else it.value_s <= it.limit_s
    word = "least" if it.at_least else "most"
    reason = f"{it.name} {figure(it.value_s, 's')}, at {word} {figure(it.limit_s, 's')}"
    return finding(good, reason, wrong=it.wrong)


@rule("verdict", "valid verdict")
def valid_verdict(it: Any) -> Finding | None:
    """A run called VALID whose constraints are not satisfied."""
    wrong = [f"{name} not satisfied" for name in it.unmet]
    return none_wrong(wrong, "no constraint is called not satisfied", "the run is called VALID") if it.valid else None


# What is said about numbers.

RATIO_SLACK = 0.02  # of a speed-up, beside the rounding of the three numbers
RATIO_ROUNDING = 0.1  # of a speed-up, which is written with one digit or two


@rule("speedups", "speed-up")
def speed_up(it: Any) -> Finding:
    """A ratio that is not that of the named runs."""
    if it.new is None or it.old is None:
        return Finding("SKIPPED", f"{figure(it.stated, '×')} stated, but not of which two runs")
    (new_low, new_high), (old_low, old_high) = span(it.new), span(it.old)
    # It is written with one digit or two.
    half = half_unit(it.stated, RATIO_ROUNDING if it.stated >= 1 else 1.0) - half_unit(it.stated)
    by = f"{figure(it.new, it.unit)} / {figure(it.old, it.unit)}" + (f", compared with {it.base}" if it.base else "")
    ends = [new_low / old_high, new_high / max(old_low, 1e-12)]
    return follows(it.stated, it.new / it.old, by, "×", ends, RATIO_SLACK, absolute=half)


@rule("averages", "average of its rows")
def average_of_rows(it: Any) -> Finding:
    """An average that its rows do not give, a headline that its row does not."""
    ends = [statistics.fmean(end) for end in zip(*map(span, it.values), strict=True)]
    by = f"the {'value of its row' if len(it.values) == 1 else f'mean of {len(it.values):,} values'} ({it.name})"
    absolute = DECIMALS * (it.unit == GB)
    found = follows(it.stated, statistics.fmean(it.values), by, it.unit, ends, PRINTED, absolute=absolute)
    if found.status == "FAIL" and not it.weights_known and min(it.values) <= it.stated <= max(it.values):
        return suspicious(
            found.reason, "only weights or another kind of mean explain it", value=it.stated, unit=it.unit
        )
    return found


@rule("quantities", "possible values")
def possible_value(it: Any) -> Finding:
    """Values that are not finite or below zero."""
    if it.value is None:
        return finding(False, f"{it.name} is not a finite number")
    if it.value < 0:
        return finding(False, f"{it.name} = {figure(it.value, it.unit)} is below zero")
    return finding(True, "finite and not below zero")


# Training.

FLOP = "FLOP/s"
FLOPS_SLACK = 0.1  # between FLOP/s and tokens × parameters: embeddings are counted or not
CONVERGED = 0.05  # share of the loss by which a training that had converged before may end above its start
SUPERLINEAR = 1.5  # times n: caches, states that no longer spill or larger batches explain less than that
ADAPTER = 4 / 6  # of the operations of a training are left where the parameters are frozen, all but an adapter
RECOMPUTED = 4 / 3  # times the operations of a training where the forward pass is computed again
MAX_ATTENTION = 2.0  # times the FLOPs of the matrix products with weights: longer sequences than that are not common


@rule("speed", "rate from counts", "samples_per_s wall_s")
def rate_from_counts(it: Any) -> Finding | None:
    """A rate that the counted samples do not give: planned steps, one rank for all."""
    ranks, full = it.ranks, (it.steps_run, it.batch_per_rank, it.ranks)
    if it.samples_counted is not None:
        count, how = it.samples_counted, f"{it.samples_counted:,} samples {it.samples_source}"
    elif (count := _planned(it)) is not None:
        how = f"{it.features:,} features × {it.epochs:g} epochs = {count:,.0f} samples"
    elif None not in full:
        count, how = math.prod(full), f"{it.steps_run:,} steps × {it.batch_per_rank:,} samples × {ranks} ranks"
    else:
        return None
    if it.stands_for == "one rank":
        if ranks is None:
            return Finding("SKIPPED", f"the rate is that of one rank, and the number of ranks is not stated: {how}")
        count, how = count / ranks, f"{how}, over {ranks} ranks"
    ends = [count / end for end in it.wall_s_span or [it.wall_s]]
    by = f"{how} in {figure(it.wall_s, 's')}"
    return follows(it.samples_per_s, count / it.wall_s, by, it.unit, ends, RATE_SLACK)


def _planned(it: Speed) -> float | None:
    return None if it.features is None or it.epochs is None else it.features * it.epochs


@rule("speed", "sample count", "samples_counted")
def sample_count(it: Any) -> Finding | None:
    """Samples that are not those of the planned work."""
    counted, planned = it.samples_counted, it.samples_planned
    if planned is not None:
        reason, limit = f"{counted:,} samples seen, {planned:,} planned", f"= {planned:,}"
        return finding(counted == planned, reason, value=counted, unit="samples", limit=limit)
    if (whole := _planned(it)) is None:
        return None
    reason = f"{counted:,} samples counted, {it.features:,} features × {it.epochs:g} epochs = {whole:,.0f}"
    # The last batch of an epoch may be filled up or left out.
    batches = math.ceil(it.epochs) * (it.batch_per_rank or 0) * (it.ranks or 1)
    good = abs(counted - whole) <= RATE_SLACK * whole or abs(counted - whole) < batches
    return finding(good, reason, wrong="not the stated amount of work")


@rule("speed", "rate from raw steps", "samples_per_s batch_per_rank step_s")
def rate_from_steps(it: Any) -> Finding | None:
    """A rate that the raw step times do not give: multiplied by steps or ranks."""
    # Between the rates of the mean step, of the median step and the median of the steps' own rates; where some batches were
    # smaller, the rate may be lower.
    together = it.ranks if it.stands_for == "all ranks" else 1
    if together is None:
        return None
    samples = it.batch_per_rank * together
    rates = [samples / middle(it.step_s) for middle in (statistics.fmean, statistics.median)]
    rates.append(statistics.median(samples / value for value in it.step_s))
    by = f"the raw times of {len(it.step_s):,} steps of {samples:,} samples"
    ends = rates if it.batches_full else [0.0, *rates]
    return follows(it.samples_per_s, min(rates), by, it.unit, ends, RATE_SLACK)


@rule("speed", "tokens and samples", "samples_per_s tokens_per_s sequence_length")
def tokens_and_samples(it: Any) -> Finding:
    """Tokens per second that are not samples per second × length."""
    by = f"{figure(it.samples_per_s, it.unit)} × {it.sequence_length:,} tokens"
    expected, *ends = (rate * it.sequence_length for rate in (it.samples_per_s, *span(it.samples_per_s)))
    found = follows(it.tokens_per_s, expected, by, "tokens/s", ends)
    other = it.tokens_per_s < expected or abs(it.tokens_per_s - 2 * expected) <= RATE_SLACK * expected
    if found.status == "FAIL" and not it.tokens_padded and other:
        return Finding("SKIPPED", f"{found.reason}; padding may be left out, or both sides of a pair counted")
    return found


@rule("speed", "scaling", "ranks")
def scaling(it: Any) -> Finding | None:
    """Far more than n times the rate of one device on n devices; a little more is suspicious."""
    if it.samples_per_s is None or it.one_device_samples_per_s is None:
        stated = it.efficiency
        return (
            None
            if stated is None
            else _efficiency(f"an efficiency of {stated:.2f} stated for {it.ranks} devices", stated, span(stated)[0])
        )
    total, alone = it.samples_per_s * (it.ranks if it.stands_for == "one rank" else 1), it.one_device_samples_per_s
    efficiency = total / alone / it.ranks
    reason = (
        f"{figure(total, it.unit)} on {it.ranks} devices are {total / alone:.3g} times the {figure(alone, it.unit)} of one"
        f"{f' ({it.one_device})' if it.one_device else ''}, an efficiency of {efficiency:.2f}"
    )
    # The stated rates are rounded: only what no rounding explains is impossible.
    return _efficiency(reason, efficiency, span(total)[0] / span(alone)[1] / it.ranks)


def _efficiency(reason: str, efficiency: float, least: float) -> Finding:
    """Judge an efficiency, of which rounding leaves at least ``least``."""
    if SCALING_SLACK < least <= SUPERLINEAR:
        why = "n devices do more than n times the work of one only by caches, memory that no longer spills or larger batches"
        return suspicious(reason, why, value=efficiency, limit=f"<= {SCALING_SLACK}")
    wrong = f"n devices cannot do more than {SUPERLINEAR} n times the work of one"
    return finding(least <= SCALING_SLACK, reason, wrong=wrong, value=efficiency, limit=f"<= {SUPERLINEAR}")


def _token_rate(it: Compute) -> tuple[float, str]:
    """Return the least FLOP/s of the matrix products that this rate of tokens needs, 0 where it is not known, and their terms.

    A token takes 2N forward, 6N with the backward pass; attention adds to it with the length.
    """
    if it.tokens_per_s is None or it.parameters is None:
        return 0.0, ""
    times = 6 if it.work == "training" else 2
    words = f"{it.tokens_per_s:,.1f} tokens/s × {times} × {it.parameters:.3g} parameters"
    return it.tokens_per_s * times * it.parameters, words


def _dense_peak(it: Compute) -> tuple[float, str]:
    """Return the dense peak that the vendor of a known device claims for all ranks, 0 where it is not known, and its name."""
    vendor, precision = vendor_peak(it.device), it.precision or "bf16"
    if vendor is None or precision not in vendor.dense_flops:
        return 0.0, ""
    peak = vendor.dense_flops[precision] * it.ranks
    return peak, f"the claimed dense {precision} peak of {it.ranks} × {vendor.name}"


@rule("compute", "below the peak")
def below_peak(it: Any) -> Finding | None:
    """More operations per second than the device can do."""
    # The dense peak of a registered device holds, whatever peak is stated; a lower one that was measured holds more.
    rate, how = _token_rate(it) if it.flops_per_s is None else (it.flops_per_s, "")
    if it.flops_per_s is None and not how:
        return None
    reason = figure(rate, FLOP) + (f" ({how})" if how else "")
    source = f"the {it.peak_kind or 'stated'} peak" + (f" ({it.peak_source})" if it.peak_source else "")
    stated, dense = it.peak_flops or 0.0, _dense_peak(it)
    peaks = [(value, name) for value, name in ((stated, source), dense) if value]
    if not peaks:
        return Finding("SKIPPED", f"{reason}: no peak of {it.device or 'this device'} is known")
    peak, name = min(peaks)
    # Where only an adapter is trained, fewer operations suffice.
    least = ADAPTER * rate if how and it.work == "training" else rate
    if stated > dense[0] * PEAK_SLACK > 0:
        rate = least = stated
        reason = f"{source} of {figure(stated, FLOP)} is above {name} of {figure(peak, FLOP)}"
    else:
        reason += f" are {rate / peak:.1%} of {name} of {figure(peak, FLOP)}"
    most = peak * PEAK_SLACK
    limit = f"<= {figure(most, FLOP)}"
    if least <= most < rate:
        why = "it is possible only if nearly all parameters are frozen (4 operations each)"
        return suspicious(reason, why, value=rate, unit=FLOP, limit=limit)
    return finding(rate <= most, reason, wrong="no device exceeds its peak", value=rate, unit=FLOP, limit=limit)


@rule("compute", "operations of tokens", "tokens_per_s parameters")
def flops_of_tokens(it: Any) -> Finding | None:
    """FLOP/s or MFU that tokens and parameters do not give."""
    # At least those of tokens × parameters. Attention adds 12 × layers × width × length a token (PaLM, appendix B), a third of the
    # rest where it is inference; a forward pass that is computed again adds a third. Without layers, width and length there is no end.
    counted, how = _token_rate(it)
    peak = _dense_peak(it)[0] or it.peak_flops
    stated = it.mfu * peak if it.flops_per_s is None and it.mfu is not None and peak else it.flops_per_s
    if stated is None:
        return None
    training, shape = it.work == "training", (it.layers, it.hidden, it.sequence_length)
    least, most = (
        counted * (ADAPTER if training else 1.0) * (1 - FLOPS_SLACK),
        counted * MAX_ATTENTION * (1 + FLOPS_SLACK),
    )
    if None not in shape:
        attention = (12 if training else 4) * math.prod(shape) * it.tokens_per_s
        how = f"{how} and {figure(attention, FLOP)} of attention"
        counted += attention
        most = counted * (RECOMPUTED if training else 1.0) * (1 + FLOPS_SLACK)
    elif stated > most:
        why = "state layers, hidden and sequence_length: only attention over long sequences takes so many"
        return suspicious(
            f"{figure(stated, FLOP)} stated, {figure(counted, FLOP)} by {how}", why, value=stated, unit=FLOP
        )
    return follows(stated, counted, how, FLOP, [least, most], 0.0)


@rule("compute", "share of the peak", "mfu")
def share_of_peak(it: Any) -> Finding | None:
    """An MFU above 1, or of another device's or precision's peak."""
    mfu, peak = f"MFU {it.mfu:.1%}", it.peak_flops or _dense_peak(it)[0]
    other = it.peak_precision if it.precision and it.peak_precision != it.precision else ""
    if other:
        return finding(False, mfu, wrong=f"the peak is that of {other}, while the work ran in {it.precision}")
    if not 0 <= it.mfu <= PEAK_SLACK:
        wrong = "the peak is another device's or another precision's, or the work was counted twice"
        return finding(False, mfu, wrong=wrong, value=it.mfu, limit="<= 1")
    if not peak and vendor_peak(it.device) is None:
        return Finding("SKIPPED", f"MFU is not available: no peak of {it.device or 'this device'} is known")
    if it.flops_per_s is None or not peak:
        return None
    share, by = it.flops_per_s / peak, f"{figure(it.flops_per_s, FLOP)} / {figure(peak, FLOP)}"
    return follows(it.mfu, share, by, "of the peak", absolute=max(RATE_SLACK * share, 0.005))


@rule("learning", "learning rate")
def learning_rate(it: Any) -> Finding | None:
    """Training with a learning rate of zero."""
    # A warm-up from zero and a decay to zero are the field's defaults.
    rates, least = it.learning_rates, it.learning_rate_min
    if rates:
        low, steps = [step for step, rate in enumerate(rates, 1) if rate <= 0], len(rates)
        reason = f"the learning rate is above zero in {steps - len(low):,} of {steps:,} steps"
        wrong = f"the others, from step {low[0]:,} on, trained nothing" if low else ""
        good = min(rates) >= 0 and 2 * len(low) <= steps > len(low)
        return finding(good, reason, wrong=wrong, value=0.0, limit="> 0")
    if least is None:
        return None
    reason = f"the smallest learning rate of all steps is {least:.3g}"
    return finding(least > 0, reason, wrong="nothing is trained at zero", value=least, limit="> 0")


@rule("learning", "loss falls", "loss_first loss_last")
def loss_falls(it: Any) -> Finding:
    """Training that learns nothing."""
    # A loss that stays within 5% may have converged before.
    reason = f"loss from {it.loss_first:.3f} to {it.loss_last:.3f}"
    change = it.loss_last - it.loss_first
    # A constant loss falls by the rounding of its smoothing.
    if 1e-9 * abs(it.loss_first) < change <= CONVERGED * abs(it.loss_first):
        return Finding("SKIPPED", f"{reason}: a converged loss moves like this, and so does one that learns nothing")
    fell = -change > 1e-9 * abs(it.loss_first)
    return finding(fell, reason, wrong="nothing was learnt", value=it.loss_last, limit=f"< {quantity(it.loss_first)}")


@rule("learning", "possible scores")
def possible_scores(it: Any) -> Finding | None:
    """Scores outside their bounds."""
    named = {"F1": it.f1, "exact match": it.exact_match} | it.scores
    scores = [(name, value) for name, value in named.items() if value is not None]
    wrong = [f"{name} = {value:.2f} is not within 0 and 100" for name, value in scores if not 0 <= value <= 100]
    if it.f1 is not None and it.exact_match is not None and it.exact_match > it.f1 + 1e-9:
        wrong.append(f"exact match {it.exact_match:.2f} above F1 {it.f1:.2f}")
    stated = ", ".join(f"{name} {value:.2f}" for name, value in scores)
    return none_wrong(wrong, f"{stated}: exact match <= F1 <= 100") if scores else None


# What all of them say.


@dataclass(frozen=True)
class Judgement:
    """What one rule says of all claims. ``failures``, ``suspicious`` and ``skipped`` are sentences with their subject."""

    rule: Rule
    passed: int
    failures: tuple[str, ...]
    suspicious: tuple[str, ...]
    skipped: tuple[str, ...]
    example: str  # the reason of the last claim that passed: of a sweep, the largest size

    @property
    def status(self) -> str:
        kinds = {"FAIL": self.failures, "AMBIGUOUS": self.suspicious, "PASS": self.passed}
        return next((status for status, found in kinds.items() if found), "SKIPPED")


def ask(rule: str, claims: Iterable[Claim]) -> list[tuple[str, Finding]]:
    """Return the subject and the finding of each statement of ``claims`` that a rule applies to."""
    return [(claim.subject, finding) for claim in claims for finding in RULES[rule].findings(claim)]


def judge_claims(claims: Iterable[Claim]) -> list[Judgement]:
    """Apply every rule to every claim; rules that no claim states anything for are left out."""
    judgements = []
    for each in RULES.values():
        said: dict[str, list[str]] = {"PASS": [], "FAIL": [], "AMBIGUOUS": [], "SKIPPED": []}
        answers = ask(each.name, claims)
        # The gravest failure comes first, where findings have a value.
        answers.sort(key=lambda pair: -abs(pair[1].value or 0.0) * (pair[1].status == "FAIL"))
        for subject, what in answers:
            said[what.status].append(f"{subject}: {what.reason}" if subject else what.reason)
        passed, failed, rare, skipped = map(tuple, said.values())
        if answers:
            judgements.append(Judgement(each, len(passed), failed, rare, skipped, "".join(passed[-1:])))
    return judgements
