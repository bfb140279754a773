"""Rules of training: rates follow from what was counted, no device exceeds its peak, something is learnt."""

import math
import statistics
from typing import Any

from benchlib.core.definitions import token_flops
from benchlib.core.text import quantity
from benchlib.judge.impossible.claim import Compute
from benchlib.judge.impossible.findings import (
    PEAK_SLACK,
    RATE_SLACK,
    SCALING_SLACK,
    Finding,
    figure,
    finding,
    follows,
    none_wrong,
    rule,
    span,
)
from benchlib.judge.references import vendor_peak

FLOP = "FLOP/s"
FLOPS_SLACK = 0.1  # between FLOP/s and tokens × parameters: embeddings are counted or not
CONVERGED = 0.05  # share of the loss by which a training that had converged before may end above its start
MAX_ATTENTION = 2.0  # times the FLOPs of the matrix products with weights: longer sequences than that are not common


@rule("speed", "rate from counts", "samples_per_s wall_s")
def rate_from_counts(it: Any) -> Finding | None:
    """A rate that the counted samples do not give: planned steps, one rank for all."""
    ranks, steps, planned, batch = it.ranks, it.steps_run, it.steps_planned, it.batch_per_rank
    if it.samples_counted is not None:
        count, how = it.samples_counted, f"{it.samples_counted:,} samples counted"
    elif it.features is not None and it.epochs is not None:
        count = it.features * it.epochs
        how = f"{it.features:,} features × {it.epochs:g} epochs = {count:,.0f} samples"
    elif None not in (steps, batch, ranks):
        count, how = steps * batch * ranks, f"{steps:,} steps × {batch:,} samples × {ranks} ranks"
    else:
        return None
    if it.stands_for == "one rank":
        if ranks is None:
            return Finding("SKIPPED", f"the rate is that of one rank, and the number of ranks is not stated: {how}")
        count, how = count / ranks, f"{how}, over {ranks} ranks"
    ratio = it.samples_per_s * it.wall_s / count if count else math.inf
    mistakes = {
        f"the rate counts the {planned or 0:,} planned steps, of which {steps or 0:,} ran": (planned or 0)
        / (steps or 1),
        f"the rate was multiplied by the {steps or 0:,} steps": steps,
        f"it is the rate of one of the {ranks} ranks, not of all": 1 / (ranks or 1),
    }
    wrong = next((text for text, factor in mistakes.items() if factor and factor != 1 and _near(ratio, factor)), "")
    ends = [count / end for end in it.wall_s_span or (it.wall_s, it.wall_s)]
    how = f"{how} in {figure(it.wall_s, 's')}"
    return follows(it.samples_per_s, count / it.wall_s, how, it.unit, ends, RATE_SLACK, wrong=wrong)


def _near(ratio: float, factor: float) -> bool:
    return abs(ratio / factor - 1) <= RATE_SLACK


@rule("speed", "sample count", "samples_counted")
def sample_count(it: Any) -> Finding | None:
    """Samples that are not those of the planned work."""
    # Up to a batch per epoch off, as features and epochs say.
    if it.samples_planned is not None:
        reason = f"{it.samples_counted:,} samples seen, {it.samples_planned:,} planned"
        good, limit = it.samples_counted == it.samples_planned, f"= {it.samples_planned:,}"
        return finding(good, reason, value=it.samples_counted, unit="samples", limit=limit)
    if it.features is None or it.epochs is None:
        return None
    planned = round(it.features * it.epochs)
    reason = f"{it.samples_counted:,} samples counted, {it.features:,} features × {it.epochs:g} epochs = {planned:,}"
    # The last batch of an epoch may be filled up or left out.
    batches = math.ceil(it.epochs) * (it.batch_per_rank or 0) * (it.ranks or 1)
    good = _near(it.samples_counted, max(planned, 1)) or 0 < abs(it.samples_counted - planned) < batches
    return finding(good, reason, wrong="not the stated amount of work")


@rule("speed", "steps that ran", "steps_planned steps_run")
def steps_that_ran(it: Any) -> Finding | None:
    """Steps counted that were planned and never ran."""
    # Fewer than planned is no fault as long as the rate does not count them.
    if it.steps_run > it.steps_planned:
        return finding(False, f"{it.steps_run:,} steps ran, but only {it.steps_planned:,} were planned")
    rate, wall_s, batch, ranks = it.samples_per_s, it.wall_s, it.batch_per_rank, it.ranks
    if rate is None or wall_s is None or batch is None or ranks is None:
        return None
    by_planned, by_run = (steps * batch * ranks / wall_s for steps in (it.steps_planned, it.steps_run))
    ran = f"{it.steps_run:,} of {it.steps_planned:,} planned steps ran, which gives {figure(by_run, it.unit)}"
    good = it.steps_run == it.steps_planned or abs(rate - by_planned) >= abs(rate - by_run)
    wrong = f"that is the rate of the planned steps ({figure(by_planned, it.unit)})"
    return finding(good, f"{ran}; {figure(rate, it.unit)} is stated", wrong=wrong)


@rule("speed", "rate from raw steps", "samples_per_s batch_per_rank")
def rate_from_steps(it: Any) -> Finding | None:
    """A rate that the raw step times do not give: multiplied by steps or ranks."""
    # Between the rates of the mean step, of the median step and the median of the steps' own rates. Without raw times the ends of
    # the median count; where some batches were smaller, the rate may be lower.
    together = it.ranks if it.stands_for == "all ranks" else 1
    if together is None or not (it.step_s or it.step_s_span):
        return None
    samples, by = it.batch_per_rank * together, f"the raw times of {len(it.step_s):,} steps"
    if it.step_s:
        rates = sorted(samples / middle(it.step_s) for middle in (statistics.fmean, statistics.median))
        rates.append(statistics.median(samples / value for value in it.step_s))
        expected = min(rates)
    else:
        rates, by = [samples / value for value in it.step_s_span], "the median time of the steps,"
        expected = max(rates)
    by, ends = f"{by} of {samples:,} samples", rates if it.batches_full else [0.0, *rates]
    return follows(it.samples_per_s, expected, by, it.unit, ends, RATE_SLACK)


@rule("speed", "tokens and samples", "samples_per_s tokens_per_s")
def tokens_and_samples(it: Any) -> Finding | None:
    """Tokens per second that are not samples per second × length."""
    ends, samples = span(it.samples_per_s), figure(it.samples_per_s, it.unit)
    if it.sequence_length is not None:
        by, lengths = f"{samples} × {it.sequence_length:,} tokens", [end * it.sequence_length for end in ends]
        return follows(it.tokens_per_s, it.samples_per_s * it.sequence_length, by, "tokens/s", lengths)
    if it.longest_sequence is None or it.samples_per_s <= 0:
        return None
    mean, (least, most) = it.tokens_per_s / it.samples_per_s, span(it.tokens_per_s)
    good = (1 - RATE_SLACK) * ends[0] <= most and least <= ends[1] * it.longest_sequence * (1 + RATE_SLACK)
    reason = f"{figure(it.tokens_per_s)} tokens/s beside {samples} are {mean:.1f} tokens per sample"
    return finding(good, f"{reason}, which has 1 to {it.longest_sequence:,}", wrong="no sample is that short or long")


@rule("speed", "scaling", "samples_per_s one_device_samples_per_s ranks")
def scaling(it: Any) -> Finding:
    """More than n times the rate of one device on n devices."""
    total, alone = it.samples_per_s * (it.ranks if it.stands_for == "one rank" else 1), it.one_device_samples_per_s
    efficiency = total / alone / it.ranks
    reason = (
        f"{figure(total, it.unit)} on {it.ranks} devices are {total / alone:.3g} times the {figure(alone, it.unit)} of one"
        f"{f' ({it.one_device})' if it.one_device else ''}, an efficiency of {efficiency:.2f}"
    )
    # The stated rates are rounded: only what no rounding explains is impossible.
    least = span(total)[0] / span(alone)[1] / it.ranks
    wrong = f"{it.ranks} devices cannot do more than {it.ranks} times the work of one"
    good = min(least, efficiency) <= SCALING_SLACK
    return finding(good, reason, wrong=wrong, value=efficiency, limit=f"<= {SCALING_SLACK}")


def _token_rate(item: Compute) -> tuple[float, str]:
    """Return the FLOP/s of the matrix products that this rate of tokens needs, 0 where it is not known, and their terms."""
    if item.tokens_per_s is None or item.parameters is None:
        return 0.0, ""
    training = item.work == "training"
    rate = item.tokens_per_s * token_flops(item.parameters, training=training)
    return rate, f"{item.tokens_per_s:,.1f} tokens/s × {6 if training else 2} × {item.parameters:.3g} parameters"


def _dense_peak(item: Compute, precision: str = "") -> tuple[float, str] | None:
    """Return the dense peak that the vendor of a known device claims for all ranks, and its name."""
    vendor, precision = vendor_peak(item.device), precision or item.precision or "bf16"
    if vendor is None or precision not in vendor.dense_flops:
        return None
    peak = vendor.dense_flops[precision] * item.ranks
    return peak, f"the claimed dense {precision} peak of {item.ranks} × {vendor.name}"


def _flops(value: float) -> str:
    return quantity(value, FLOP)


@rule("compute", "below the peak")
def below_peak(it: Any) -> Finding | None:
    """More operations per second than the device can do."""
    # The dense peak of a registered device holds, whatever peak is stated; a lower one that was measured holds more.
    by_tokens, how = _token_rate(it)
    rate = by_tokens if it.flops_per_s is None else it.flops_per_s
    if it.flops_per_s is None and not how:
        return None
    how = f"({how}) " if it.flops_per_s is None else ""
    source = f"the {it.peak_kind or 'stated'} peak" + (f" ({it.peak_source})" if it.peak_source else "")
    stated, dense = None if it.peak_sparse else it.peak_flops, _dense_peak(it)
    if dense and stated and stated > dense[0] * PEAK_SLACK:
        rate, peak, reason = stated, dense[0], f"{source} of {_flops(stated)} is above {dense[1]} of {_flops(dense[0])}"
    elif peaks := [*([(stated, source)] if stated else []), *([dense] if dense else [])]:
        peak, source = min(peaks)
        reason = f"{_flops(rate)} {how}are {rate / peak:.1%} of {source} of {_flops(peak)}"
    else:
        return Finding("SKIPPED", f"{_flops(rate)} {how}: no peak of {it.device or 'this device'} is known")
    limit, wrong = f"<= {_flops(peak * PEAK_SLACK)}", "no device exceeds its peak"
    tensor_cores = _dense_peak(it, "tf32") if it.precision == "fp32" else None
    if tensor_cores and rate <= tensor_cores[0] * PEAK_SLACK:
        wrong += " (if the products ran in TF32, the precision is tf32)"
    return finding(rate <= peak * PEAK_SLACK, reason, wrong=wrong, value=rate, unit=FLOP, limit=limit)


@rule("compute", "operations of tokens", "tokens_per_s parameters")
def flops_of_tokens(it: Any) -> Finding | None:
    """FLOP/s or MFU that tokens and parameters do not give."""
    # At least those of tokens × parameters, and with attention at most twice as many.
    (counted, how), dense = _token_rate(it), _dense_peak(it)
    peak = dense[0] if dense else None if it.peak_sparse else it.peak_flops
    stated = it.mfu * peak if it.flops_per_s is None and it.mfu is not None and peak else it.flops_per_s
    ends = [counted * (1 - FLOPS_SLACK), counted * MAX_ATTENTION * (1 + FLOPS_SLACK)]
    return None if stated is None else follows(stated, counted, how, FLOP, ends, 0.0)


@rule("compute", "share of the peak", "mfu")
def share_of_peak(it: Any) -> Finding | None:
    """An MFU above 1, or of another device's or precision's peak."""
    dense, unknown = _dense_peak(it) or (0.0, ""), vendor_peak(it.device) is None
    other = it.peak_precision if it.precision and it.peak_precision != it.precision else ""
    mfu, peak = f"MFU {it.mfu:.1%}", it.peak_flops or 0.0
    if not 0 <= it.mfu <= PEAK_SLACK:
        mistakes = {
            f"the peak is that of {other}, while the work ran in {it.precision}": other,
            f"the peak of {_flops(peak)} is not that of {it.device}, which is not known": it.device and unknown,
            f"the peak of {_flops(peak)} is not {dense[1]}, {_flops(dense[0])}": peak and dense[0] > peak * PEAK_SLACK,
        }
        default = "the peak is another device's or another precision's, or the work was counted twice"
        wrong = next((text for text, holds in mistakes.items() if holds), default)
        return finding(False, f"{mfu} is impossible", wrong=wrong, value=it.mfu, limit="<= 1")
    if other:
        return finding(False, f"{mfu} is of the {other} peak, but the work ran in {it.precision}")
    if it.peak_sparse:
        return Finding(
            "SKIPPED", f"{mfu} is of a sparse peak, twice the dense one; of that it would be {2 * it.mfu:.1%}"
        )
    if not peak and unknown:
        return Finding("SKIPPED", f"MFU is not available: no peak of {it.device or 'this device'} is known")
    if it.flops_per_s is None or not peak:
        return None
    share, by = it.flops_per_s / peak, f"{_flops(it.flops_per_s)} / {_flops(peak)}"
    return follows(it.mfu, share, by, "of the peak", absolute=max(RATE_SLACK * share, 0.005))


@rule("learning", "learning rate")
def learning_rate(it: Any) -> Finding | None:
    """Training with a learning rate of zero."""
    # A warm-up from zero and a decay to zero are the field's defaults.
    if not it.learning_rates:
        if it.learning_rate_min is None:
            return None
        reason, good = (
            f"the smallest learning rate of all steps is {it.learning_rate_min:.3g}",
            it.learning_rate_min > 0,
        )
        return finding(good, reason, wrong="nothing is trained at zero", value=it.learning_rate_min, limit="> 0")
    steps, zero = len(it.learning_rates), [step for step, rate in enumerate(it.learning_rates, 1) if rate <= 0]
    if below := sum(rate < 0 for rate in it.learning_rates):
        return finding(False, f"the learning rate is below zero in {below:,} of {steps:,} steps")
    if 2 * len(zero) <= steps and len(zero) < steps:
        at_ends = f", zero in {len(zero):,}" if zero else ""
        return finding(True, f"the learning rate is above zero in {steps - len(zero):,} of {steps:,} steps{at_ends}")
    reason = f"the learning rate is zero from step {zero[0]:,} of {steps:,}"
    wrong = "nothing was trained" if len(zero) == steps else f"{len(zero):,} steps trained nothing"
    return finding(False, reason, wrong=wrong, value=0.0, limit="> 0")


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
    """Scores and shares outside their bounds."""
    scores = [(name, value) for name, value in (("F1", it.f1), ("exact match", it.exact_match)) if value is not None]
    wrong = [f"{name} = {value:.2f} is not within 0 and 100" for name, value in scores if not 0 <= value <= 100]
    if it.f1 is not None and it.exact_match is not None and it.exact_match > it.f1 + 1e-9:
        wrong.append(f"exact match {it.exact_match:.2f} above F1 {it.f1:.2f}")
    shares = it.shares.items()
    wrong += [f"{name} = {share:.4g} is not within 0 and 1" for name, share in shares if not 0 <= share <= 1 + 1e-9]
    stated = ", ".join(f"{name} {value:.2f}" for name, value in scores)
    good = f"{stated}: exact match <= F1 <= 100, shares at most 1" if stated else "shares at most 1"
    return none_wrong(wrong, good) if scores or shares else None
