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
    agrees,
    figure,
    finding,
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
        count, how = float(it.samples_counted), f"{it.samples_counted:,} samples counted"
    elif it.features is not None and it.epochs is not None:
        count = it.features * it.epochs
        how = f"{it.features:,} features × {it.epochs:g} epochs = {count:,.0f} samples"
    elif steps is not None and batch is not None and ranks is not None:
        count, how = float(steps * batch * ranks), f"{steps:,} steps × {batch:,} samples × {ranks} ranks"
    else:
        return None
    expected, unit = count / it.wall_s, it.unit
    if it.stands_for == "one rank":
        if ranks is None:
            return Finding("SKIPPED", f"the rate is that of one rank, and the number of ranks is not stated: {how}")
        expected, how = expected / ranks, f"{how}, over {ranks} ranks"
    reason = f"{figure(it.samples_per_s, unit)} stated, {figure(expected, unit)} by {how} in {figure(it.wall_s, 's')}"
    wrong = "nothing was processed"
    if expected > 0:
        ratio = it.samples_per_s / expected
        planned_per_run = planned / steps if planned and steps else 0
        mistakes = {
            f"the rate counts the {planned or 0:,} planned steps, of which {steps or 0:,} ran": planned_per_run,
            f"the rate was multiplied by the {steps or 0:,} steps": steps,
            f"it is the rate of one of the {ranks} ranks, not of all": 1 / ranks if ranks else 0,
            f"it was multiplied by the {ranks} ranks once too often": ranks,
        }
        fitting = (text for text, factor in mistakes.items() if factor and factor != 1 and _near(ratio, factor))
        wrong = next(fitting, f"{ratio:.3g} times what was processed")
    shortest, longest = it.wall_s_span or (it.wall_s, it.wall_s)
    good = agrees(it.samples_per_s, expected * it.wall_s / longest, expected * it.wall_s / shortest, RATE_SLACK)
    return finding(good, reason, wrong=wrong, value=it.samples_per_s, unit=unit)


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
    steps = len(it.step_s)
    times = (statistics.fmean(it.step_s), statistics.median(it.step_s)) if steps else it.step_s_span
    rates = [it.batch_per_rank * together / value for value in times]
    if steps:
        rates.append(statistics.median(it.batch_per_rank * together / value for value in it.step_s))
    rates.sort()
    by_steps = rates[0] if steps else rates[-1]
    reason = (
        f"{figure(it.samples_per_s, it.unit)} stated, {'' if it.batches_full else 'at most '}{figure(by_steps, it.unit)} by "
        f"{f'the raw times of {steps:,} steps' if steps else 'the median time of the steps,'} "
        f"of {it.batch_per_rank * together:,} samples"
    )
    ratio = it.samples_per_s / by_steps
    multiplied = steps > 1 and _near(ratio, steps)
    wrong = f"it was multiplied by the {steps:,} steps" if multiplied else f"{ratio:.3g} times what the steps give"
    good = agrees(it.samples_per_s, rates[0] if it.batches_full else 0.0, rates[-1], RATE_SLACK)
    return finding(good, reason, wrong=wrong, value=it.samples_per_s, unit=it.unit)


@rule("speed", "tokens and samples", "samples_per_s tokens_per_s")
def tokens_and_samples(it: Any) -> Finding | None:
    """Tokens per second that are not samples per second × length."""
    low, high = span(it.samples_per_s)
    stated, samples = f"{figure(it.tokens_per_s)} tokens/s", figure(it.samples_per_s, it.unit)
    if it.sequence_length is not None:
        product = figure(it.samples_per_s * it.sequence_length)
        reason = f"{stated} beside {samples} × {it.sequence_length:,} tokens = {product}"
        good = agrees(it.tokens_per_s, low * it.sequence_length, high * it.sequence_length)
        return finding(good, reason, wrong=f"it would need {figure(it.tokens_per_s / it.sequence_length, it.unit)}")
    if it.longest_sequence is None or it.samples_per_s <= 0:
        return None
    mean = it.tokens_per_s / it.samples_per_s
    reason = f"{stated} beside {samples} are {mean:.1f} tokens per sample, which has 1 to {it.longest_sequence:,}"
    least, most = span(it.tokens_per_s)
    good = (1 - RATE_SLACK) * low <= most and least <= high * it.longest_sequence * (1 + RATE_SLACK)
    return finding(good, reason, wrong="no sample is that short or long")


@rule("speed", "scaling", "samples_per_s one_device_samples_per_s ranks")
def scaling(it: Any) -> Finding:
    """More than n times the rate of one device on n devices."""
    total = it.samples_per_s * (it.ranks if it.stands_for == "one rank" else 1)
    efficiency = total / it.one_device_samples_per_s / it.ranks
    reason = (
        f"{figure(total, it.unit)} on {it.ranks} devices are {efficiency * it.ranks:.3g} times the "
        f"{figure(it.one_device_samples_per_s, it.unit)} of one{f' ({it.one_device})' if it.one_device else ''}, "
        f"an efficiency of {efficiency:.2f}"
    )
    # The stated rates are rounded: only what no rounding explains is impossible.
    least = span(total)[0] / span(it.one_device_samples_per_s)[1] / it.ranks
    wrong = (
        f"{it.ranks} devices cannot do more than {it.ranks} times the work of one; samples were counted that were not "
        "processed, or the two did different work"
    )
    good = min(least, efficiency) <= SCALING_SLACK
    return finding(good, reason, wrong=wrong, value=efficiency, limit=f"<= {SCALING_SLACK}")


def _token_rate(item: Compute) -> tuple[float, str] | None:
    """Return the FLOP/s of the matrix products that this rate of tokens needs, and how they were computed."""
    if item.tokens_per_s is None or item.parameters is None:
        return None
    training = item.work == "training"
    rate = item.tokens_per_s * token_flops(item.parameters, training=training)
    return rate, f"{item.tokens_per_s:,.1f} tokens/s × {6 if training else 2} × {item.parameters:.3g} parameters"


def _dense_peak(item: Compute, precision: str = "") -> tuple[float, str] | None:
    """Return the dense peak that the vendor of a known device claims for all ranks, and its name."""
    vendor, precision = vendor_peak(item.device), precision or item.precision or "bf16"
    dense = vendor.dense_flops.get(precision) if vendor else None
    if vendor is None or dense is None:
        return None
    return dense * item.ranks, f"the claimed dense {precision} peak of {item.ranks} × {vendor.name}"


def _unknown_peak(device: str) -> str:
    return f"no peak of {device!r} is known" if device else "no peak of this device is known"


@rule("compute", "below the peak")
def below_peak(it: Any) -> Finding | None:
    """More operations per second than the device can do."""
    # The dense peak of a registered device holds, whatever peak is stated; a lower one that was measured holds more.
    by_tokens, rate, how = _token_rate(it), it.flops_per_s, ""
    if rate is None:
        if by_tokens is None:
            return None
        rate, how = by_tokens[0], f"({by_tokens[1]}) "
    source = f"the {it.peak_kind or 'stated'} peak" + (f" ({it.peak_source})" if it.peak_source else "")
    stated, dense = None if it.peak_sparse else it.peak_flops, _dense_peak(it)
    wrong = "no device exceeds its peak"
    if dense and stated and stated > dense[0] * PEAK_SLACK:
        reason, limit = f"{source} of {_flops(stated)} is above {dense[1]} of {_flops(dense[0])}", dense[0]
        return _bounded(False, reason, wrong, stated, limit)
    peaks = [(stated, source)] if stated else []
    if not (peaks := [*peaks, *([dense] if dense else [])]):
        return Finding("SKIPPED", f"{_flops(rate)} {how}: {_unknown_peak(it.device)}")
    peak, source = min(peaks)
    reason = f"{_flops(rate)} {how}are {rate / peak:.1%} of {source} of {_flops(peak)}"
    tensor_cores = _dense_peak(it, "tf32") if it.precision == "fp32" else None
    if tensor_cores and rate <= tensor_cores[0] * PEAK_SLACK:
        wrong += " (if the products ran in TF32, the precision is tf32)"
    return _bounded(rate <= peak * PEAK_SLACK, reason, wrong, rate, peak)


def _flops(value: float) -> str:
    return quantity(value, FLOP)


def _bounded(good: bool, reason: str, wrong: str, value: float, peak: float) -> Finding:
    return finding(good, reason, wrong=wrong, value=value, unit=FLOP, limit=f"<= {_flops(peak * PEAK_SLACK)}")


@rule("compute", "operations of tokens", "tokens_per_s parameters")
def flops_of_tokens(it: Any) -> Finding | None:
    """FLOP/s or MFU that tokens and parameters do not give."""
    # At least those of tokens × parameters, and with attention at most twice as many.
    counted, how = _token_rate(it) or (0.0, "")
    dense = _dense_peak(it)
    peak = dense[0] if dense else None if it.peak_sparse else it.peak_flops
    if it.flops_per_s is not None:
        stated, name = it.flops_per_s, f"{_flops(it.flops_per_s)} stated"
    elif it.mfu is not None and peak:
        stated, name = it.mfu * peak, f"MFU {it.mfu:.1%} of {_flops(peak)} = {_flops(it.mfu * peak)}"
    else:
        return None
    if counted <= 0:
        return None
    ratio = stated / counted
    good = 1 - FLOPS_SLACK <= ratio <= MAX_ATTENTION * (1 + FLOPS_SLACK)
    wrong = f"{ratio:.3g} times what the tokens need" + (", which attention does not explain" if ratio > 1 else "")
    return finding(good, f"{name}, {_flops(counted)} by {how}", wrong=wrong, value=ratio)


@rule("compute", "share of the peak", "mfu")
def share_of_peak(it: Any) -> Finding | None:
    """An MFU above 1, or of another device's or precision's peak."""
    dense, precision = _dense_peak(it), it.precision
    other = it.peak_precision if precision and it.peak_precision != precision else ""
    if it.mfu < 0:
        return finding(False, f"MFU {it.mfu:.1%}", wrong="below zero")
    if it.mfu > PEAK_SLACK:
        peak = f"the peak of {_flops(it.peak_flops)}" if it.peak_flops else "the peak it was taken of"
        wrong = f"{peak} is another device's or another precision's, or the work was counted twice"
        if other:
            wrong = f"{peak} is that of {other}, while the work ran in {precision}"
        elif it.device and vendor_peak(it.device) is None:
            wrong = f"{peak} is not that of {it.device}, whose peak is not known; MFU is not available"
        elif dense and it.peak_flops and dense[0] > it.peak_flops * PEAK_SLACK:
            wrong = f"{peak} is not {dense[1]}, {_flops(dense[0])}"
        return finding(False, f"MFU {it.mfu:.1%} is impossible", wrong=wrong, value=it.mfu, limit="<= 1")
    if other:
        reason = f"MFU {it.mfu:.1%} is of the {other} peak, but the work ran in {precision}"
        return finding(False, reason, wrong="another precision has another peak")
    if it.peak_sparse:
        sparse = f"MFU {it.mfu:.1%} is of a sparse peak, twice the dense one: MFU is not available"
        return Finding("SKIPPED", f"{sparse}; of the dense peak it would be {2 * it.mfu:.1%}")
    if it.peak_flops is None and vendor_peak(it.device) is None:
        return Finding("SKIPPED", f"MFU is not available: {_unknown_peak(it.device)}")
    if it.flops_per_s is None or it.peak_flops is None:
        return None
    share = it.flops_per_s / it.peak_flops
    rates = f"{_flops(it.flops_per_s)} / {_flops(it.peak_flops)}"
    good = abs(it.mfu - share) <= max(RATE_SLACK * share, 0.005)
    reason = f"MFU {it.mfu:.1%} stated, {rates} = {share:.1%}"
    return finding(good, reason, wrong="the share does not follow from the two rates", value=it.mfu)


@rule("learning", "learning rate")
def learning_rate(it: Any) -> Finding | None:
    """Training with a learning rate of zero."""
    # A warm-up from zero and a decay to zero are the field's defaults.
    if not it.learning_rates:
        if it.learning_rate_min is None:
            return None
        reason = f"the smallest learning rate of all steps is {it.learning_rate_min:.3g}"
        wrong = "nothing is trained at zero"
        return finding(it.learning_rate_min > 0, reason, wrong=wrong, value=it.learning_rate_min, limit="> 0")
    steps = len(it.learning_rates)
    below = sum(rate < 0 for rate in it.learning_rates)
    if below:
        return finding(False, f"the learning rate is below zero in {below:,} of {steps:,} steps")
    zero = [index for index, rate in enumerate(it.learning_rates, 1) if rate == 0]
    if len(zero) == steps:
        reason = f"the learning rate is {it.learning_rates[0]:g} in all {steps:,} steps"
        return finding(False, reason, wrong="nothing was trained")
    if 2 * len(zero) <= steps:
        at_ends = f", zero in {len(zero):,}" if zero else ""
        return finding(True, f"the learning rate is above zero in {steps - len(zero):,} of {steps:,} steps{at_ends}")
    score = f"; the F1 of {it.f1:g} is that of a training that stopped there" if it.f1 is not None else ""
    reason = f"the learning rate is zero from step {zero[0]:,} of {steps:,}"
    wrong = f"the schedule is shorter than the training, and {len(zero):,} steps trained nothing{score}"
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
