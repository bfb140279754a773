"""Rules of training: rates follow from what was counted, no device exceeds its peak, something is learnt."""

import math
import statistics
from collections.abc import Sequence

from benchlib.core.definitions import token_flops
from benchlib.core.text import quantity
from benchlib.judge.impossible.claim import Compute, Learning, Speed
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


@rule("speed", "rate from counts", "a rate that the counted samples do not give: planned steps, one rank for all")
def rate_from_counts(item: Speed, samples_per_s: float, wall_s: float) -> Finding | None:
    """Samples per second = samples over all ranks / their time; else planned steps, single ranks or sums were taken."""
    ranks, steps, planned, batch = item.ranks, item.steps_run, item.steps_planned, item.batch_per_rank
    if item.samples_counted is not None:
        count, how = float(item.samples_counted), f"{item.samples_counted:,} samples counted"
    elif item.features is not None and item.epochs is not None:
        count = item.features * item.epochs
        how = f"{item.features:,} features × {item.epochs:g} epochs = {count:,.0f} samples"
    elif steps is not None and batch is not None and ranks is not None:
        count, how = float(steps * batch * ranks), f"{steps:,} steps × {batch:,} samples × {ranks} ranks"
    else:
        return None
    expected, unit = count / wall_s, item.unit
    if item.stands_for == "one rank":
        if ranks is None:
            return Finding("SKIPPED", f"the rate is that of one rank, and the number of ranks is not stated: {how}")
        expected, how = expected / ranks, f"{how}, over {ranks} ranks"
    reason = f"{figure(samples_per_s, unit)} stated, {figure(expected, unit)} by {how} in {figure(wall_s, 's')}"
    wrong = "nothing was processed"
    if expected > 0:
        ratio = samples_per_s / expected
        planned_per_run = planned / steps if planned and steps else 0
        mistakes = {
            f"the rate counts the {planned or 0:,} planned steps, of which {steps or 0:,} ran": planned_per_run,
            f"the rate was multiplied by the {steps or 0:,} steps": steps,
            f"it is the rate of one of the {ranks} ranks, not of all": 1 / ranks if ranks else 0,
            f"it was multiplied by the {ranks} ranks once too often": ranks,
        }
        fitting = (text for text, factor in mistakes.items() if factor and factor != 1 and _near(ratio, factor))
        wrong = next(fitting, f"{ratio:.3g} times what was processed")
    shortest, longest = item.wall_s_span or (wall_s, wall_s)
    good = agrees(samples_per_s, expected * wall_s / longest, expected * wall_s / shortest, RATE_SLACK)
    return finding(good, reason, wrong=wrong, value=samples_per_s, unit=unit)


def _near(ratio: float, factor: float) -> bool:
    return abs(ratio / factor - 1) <= RATE_SLACK


@rule("speed", "sample count", "samples that are not those of the planned work")
def sample_count(
    samples_counted: int,
    samples_planned: int | None = None,
    features: int | None = None,
    epochs: float | None = None,
    batch_per_rank: int | None = None,
    ranks: int | None = None,
) -> Finding | None:
    """Exactly as many samples were seen as the planned steps need, or up to a batch per epoch as features and epochs."""
    if samples_planned is not None:
        reason = f"{samples_counted:,} samples seen, {samples_planned:,} planned"
        good, limit = samples_counted == samples_planned, f"= {samples_planned:,}"
        return finding(good, reason, value=samples_counted, unit="samples", limit=limit)
    if features is None or epochs is None:
        return None
    planned = round(features * epochs)
    reason = f"{samples_counted:,} samples counted, {features:,} features × {epochs:g} epochs = {planned:,}"
    # The last batch of an epoch may be filled up or left out.
    batches = math.ceil(epochs) * (batch_per_rank or 0) * (ranks or 1)
    good = _near(samples_counted, max(planned, 1)) or 0 < abs(samples_counted - planned) < batches
    return finding(good, reason, wrong="not the stated amount of work")


@rule("speed", "steps that ran", "steps counted that were planned and never ran")
def steps_that_ran(item: Speed, steps_planned: int, steps_run: int) -> Finding | None:
    """A rate counts only steps that ran; fewer than planned is no fault as long as the rate does not count them."""
    if steps_run > steps_planned:
        return finding(False, f"{steps_run:,} steps ran, but only {steps_planned:,} were planned")
    rate, wall_s, batch, ranks = item.samples_per_s, item.wall_s, item.batch_per_rank, item.ranks
    if rate is None or wall_s is None or batch is None or ranks is None:
        return None
    by_planned, by_run = (steps * batch * ranks / wall_s for steps in (steps_planned, steps_run))
    ran = f"{steps_run:,} of {steps_planned:,} planned steps ran, which gives {figure(by_run, item.unit)}"
    good = steps_run == steps_planned or abs(rate - by_planned) >= abs(rate - by_run)
    wrong = f"that is the rate of the planned steps ({figure(by_planned, item.unit)})"
    return finding(good, f"{ran}; {figure(rate, item.unit)} is stated", wrong=wrong)


@rule("speed", "rate from raw steps", "a rate that the raw step times do not give: multiplied by steps or ranks")
def rate_from_steps(
    samples_per_s: float,
    batch_per_rank: int,
    unit: str = "samples/s",
    stands_for: str = "all ranks",
    ranks: int | None = None,
    step_s: Sequence[float] = (),
    step_s_span: Sequence[float] = (),
    batches_full: bool = True,
) -> Finding | None:
    """Samples per second lie where the step times put them: between those of the mean step, of the median step and the
    median of the steps' own rates, which for an even number of steps is the mean of the middle two.

    Without the raw times the ends of the median count; where some batches were smaller, the rate may be lower.
    """
    together = ranks if stands_for == "all ranks" else 1
    if together is None or not (step_s or step_s_span):
        return None
    steps = len(step_s)
    times = (statistics.fmean(step_s), statistics.median(step_s)) if steps else step_s_span
    rates = [batch_per_rank * together / value for value in times]
    if steps:
        rates.append(statistics.median(batch_per_rank * together / value for value in step_s))
    rates.sort()
    by_steps = rates[0] if steps else rates[-1]
    reason = (
        f"{figure(samples_per_s, unit)} stated, {'' if batches_full else 'at most '}{figure(by_steps, unit)} by "
        f"{f'the raw times of {steps:,} steps' if steps else 'the median time of the steps,'} "
        f"of {batch_per_rank * together:,} samples"
    )
    ratio = samples_per_s / by_steps
    multiplied = steps > 1 and _near(ratio, steps)
    wrong = f"it was multiplied by the {steps:,} steps" if multiplied else f"{ratio:.3g} times what the steps give"
    good = agrees(samples_per_s, rates[0] if batches_full else 0.0, rates[-1], RATE_SLACK)
    return finding(good, reason, wrong=wrong, value=samples_per_s, unit=unit)


@rule("speed", "tokens and samples", "tokens per second that are not samples per second × length")
def tokens_and_samples(
    samples_per_s: float,
    tokens_per_s: float,
    unit: str = "samples/s",
    sequence_length: int | None = None,
    longest_sequence: int | None = None,
) -> Finding | None:
    """Tokens per second = samples per second × length where all samples have one length, else at most × the longest."""
    low, high = span(samples_per_s)
    stated, samples = f"{figure(tokens_per_s)} tokens/s", figure(samples_per_s, unit)
    if sequence_length is not None:
        product = figure(samples_per_s * sequence_length)
        reason = f"{stated} beside {samples} × {sequence_length:,} tokens = {product}"
        good = agrees(tokens_per_s, low * sequence_length, high * sequence_length)
        return finding(good, reason, wrong=f"it would need {figure(tokens_per_s / sequence_length, unit)}")
    if longest_sequence is None or samples_per_s <= 0:
        return None
    mean = tokens_per_s / samples_per_s
    reason = f"{stated} beside {samples} are {mean:.1f} tokens per sample, which has 1 to {longest_sequence:,}"
    least, most = span(tokens_per_s)
    good = (1 - RATE_SLACK) * low <= most and least <= high * longest_sequence * (1 + RATE_SLACK)
    return finding(good, reason, wrong="no sample is that short or long")


@rule("speed", "scaling", "n devices that are faster than n times one")
def scaling(
    samples_per_s: float,
    one_device_samples_per_s: float,
    ranks: int,
    unit: str = "samples/s",
    stands_for: str = "all ranks",
    one_device: str = "",
) -> Finding:
    """n devices are not faster than n times one, but for 5% of noise."""
    total = samples_per_s * (ranks if stands_for == "one rank" else 1)
    efficiency = total / one_device_samples_per_s / ranks
    reason = (
        f"{figure(total, unit)} on {ranks} devices are {efficiency * ranks:.3g} times the "
        f"{figure(one_device_samples_per_s, unit)} of one{f' ({one_device})' if one_device else ''}, "
        f"an efficiency of {efficiency:.2f}"
    )
    # The stated rates are rounded: only what no rounding explains is impossible.
    least = span(total)[0] / span(one_device_samples_per_s)[1] / ranks
    wrong = (
        f"{ranks} devices cannot do more than {ranks} times the work of one; samples were counted that were not "
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


@rule("compute", "below the peak", "more operations per second than the device can do")
def below_peak(item: Compute) -> Finding | None:
    """FLOP/s, stated or by tokens × FLOPs of a token, do not exceed the peak (5% slack: peaks are measured too).

    The dense peak of a registered device holds, whatever peak is stated; a lower one that was measured holds more.
    """
    by_tokens, rate, how = _token_rate(item), item.flops_per_s, ""
    if rate is None:
        if by_tokens is None:
            return None
        rate, how = by_tokens[0], f"({by_tokens[1]}) "
    source = f"the {item.peak_kind or 'stated'} peak" + (f" ({item.peak_source})" if item.peak_source else "")
    stated, dense = None if item.peak_sparse else item.peak_flops, _dense_peak(item)
    wrong = "no device exceeds its peak"
    if dense and stated and stated > dense[0] * PEAK_SLACK:
        reason, limit = f"{source} of {_flops(stated)} is above {dense[1]} of {_flops(dense[0])}", dense[0]
        return _bounded(False, reason, wrong, stated, limit)
    peaks = [(stated, source)] if stated else []
    if not (peaks := [*peaks, *([dense] if dense else [])]):
        return Finding("SKIPPED", f"{_flops(rate)} {how}: {_unknown_peak(item.device)}")
    peak, source = min(peaks)
    reason = f"{_flops(rate)} {how}are {rate / peak:.1%} of {source} of {_flops(peak)}"
    tensor_cores = _dense_peak(item, "tf32") if item.precision == "fp32" else None
    if tensor_cores and rate <= tensor_cores[0] * PEAK_SLACK:
        wrong += " (if the products ran in TF32, the precision is tf32)"
    return _bounded(rate <= peak * PEAK_SLACK, reason, wrong, rate, peak)


def _flops(value: float) -> str:
    return quantity(value, FLOP)


def _bounded(good: bool, reason: str, wrong: str, value: float, peak: float) -> Finding:
    return finding(good, reason, wrong=wrong, value=value, unit=FLOP, limit=f"<= {_flops(peak * PEAK_SLACK)}")


@rule("compute", "operations of tokens", "FLOP/s or MFU that tokens and parameters do not give")
def flops_of_tokens(item: Compute, tokens_per_s: float, parameters: float) -> Finding | None:
    """FLOP/s, or MFU × peak, are those of tokens × parameters: at least these, and with attention at most twice as many."""
    counted, how = _token_rate(item) or (0.0, "")
    dense = _dense_peak(item)
    peak = dense[0] if dense else None if item.peak_sparse else item.peak_flops
    if item.flops_per_s is not None:
        stated, name = item.flops_per_s, f"{_flops(item.flops_per_s)} stated"
    elif item.mfu is not None and peak:
        stated, name = item.mfu * peak, f"MFU {item.mfu:.1%} of {_flops(peak)} = {_flops(item.mfu * peak)}"
    else:
        return None
    if counted <= 0:
        return None
    ratio = stated / counted
    good = 1 - FLOPS_SLACK <= ratio <= MAX_ATTENTION * (1 + FLOPS_SLACK)
    wrong = f"{ratio:.3g} times what the tokens need" + (", which attention does not explain" if ratio > 1 else "")
    return finding(good, f"{name}, {_flops(counted)} by {how}", wrong=wrong, value=ratio)


@rule("compute", "share of the peak", "an MFU above 1, or of another device's or precision's peak")
def share_of_peak(item: Compute, mfu: float) -> Finding | None:
    """MFU is FLOP/s over the dense peak of this very device in the precision of the work; it does not exceed 1."""
    dense, precision = _dense_peak(item), item.precision
    other = item.peak_precision if precision and item.peak_precision != precision else ""
    if mfu < 0:
        return finding(False, f"MFU {mfu:.1%}", wrong="below zero")
    if mfu > PEAK_SLACK:
        peak = f"the peak of {_flops(item.peak_flops)}" if item.peak_flops else "the peak it was taken of"
        wrong = f"{peak} is another device's or another precision's, or the work was counted twice"
        if other:
            wrong = f"{peak} is that of {other}, while the work ran in {precision}"
        elif item.device and vendor_peak(item.device) is None:
            wrong = f"{peak} is not that of {item.device}, whose peak is not known; MFU is not available"
        elif dense and item.peak_flops and dense[0] > item.peak_flops * PEAK_SLACK:
            wrong = f"{peak} is not {dense[1]}, {_flops(dense[0])}"
        return finding(False, f"MFU {mfu:.1%} is impossible", wrong=wrong, value=mfu, limit="<= 1")
    if other:
        reason = f"MFU {mfu:.1%} is of the {other} peak, but the work ran in {precision}"
        return finding(False, reason, wrong="another precision has another peak")
    if item.peak_sparse:
        sparse = f"MFU {mfu:.1%} is of a sparse peak, twice the dense one: MFU is not available"
        return Finding("SKIPPED", f"{sparse}; of the dense peak it would be {2 * mfu:.1%}")
    if item.peak_flops is None and vendor_peak(item.device) is None:
        return Finding("SKIPPED", f"MFU is not available: {_unknown_peak(item.device)}")
    if item.flops_per_s is None or item.peak_flops is None:
        return None
    share = item.flops_per_s / item.peak_flops
    rates = f"{_flops(item.flops_per_s)} / {_flops(item.peak_flops)}"
    good = abs(mfu - share) <= max(RATE_SLACK * share, 0.005)
    reason = f"MFU {mfu:.1%} stated, {rates} = {share:.1%}"
    return finding(good, reason, wrong="the share does not follow from the two rates", value=mfu)


@rule("learning", "learning rate", "training with a learning rate of zero")
def learning_rate(
    learning_rates: Sequence[float] = (), learning_rate_min: float | None = None, f1: float | None = None
) -> Finding | None:
    """Most steps train with a rate above zero. A warm-up from zero and a decay to zero are the field's defaults."""
    if not learning_rates:
        if learning_rate_min is None:
            return None
        reason = f"the smallest learning rate of all steps is {learning_rate_min:.3g}"
        wrong = "nothing is trained at zero"
        return finding(learning_rate_min > 0, reason, wrong=wrong, value=learning_rate_min, limit="> 0")
    steps = len(learning_rates)
    below = sum(rate < 0 for rate in learning_rates)
    if below:
        return finding(False, f"the learning rate is below zero in {below:,} of {steps:,} steps")
    zero = [index for index, rate in enumerate(learning_rates, 1) if rate == 0]
    if len(zero) == steps:
        reason = f"the learning rate is {learning_rates[0]:g} in all {steps:,} steps"
        return finding(False, reason, wrong="nothing was trained")
    if 2 * len(zero) <= steps:
        at_ends = f", zero in {len(zero):,}" if zero else ""
        return finding(True, f"the learning rate is above zero in {steps - len(zero):,} of {steps:,} steps{at_ends}")
    score = f"; the F1 of {f1:g} is that of a training that stopped there" if f1 is not None else ""
    reason = f"the learning rate is zero from step {zero[0]:,} of {steps:,}"
    wrong = f"the schedule is shorter than the training, and {len(zero):,} steps trained nothing{score}"
    return finding(False, reason, wrong=wrong, value=0.0, limit="> 0")


@rule("learning", "loss falls", "training that learns nothing")
def loss_falls(loss_first: float, loss_last: float) -> Finding:
    """The loss at the end is below that of the start; one that stays within 5% may have converged before."""
    reason = f"loss from {loss_first:.3f} to {loss_last:.3f}"
    change = loss_last - loss_first
    # A constant loss falls by the rounding of its smoothing.
    if 1e-9 * abs(loss_first) < change <= CONVERGED * abs(loss_first):
        return Finding("SKIPPED", f"{reason}: a converged loss moves like this, and so does one that learns nothing")
    fell = -change > 1e-9 * abs(loss_first)
    return finding(fell, reason, wrong="nothing was learnt", value=loss_last, limit=f"< {quantity(loss_first)}")


@rule("learning", "possible scores", "scores and shares outside their bounds")
def possible_scores(item: Learning) -> Finding | None:
    """By definition exact match <= F1 <= 100, and a share lies between 0 and 1."""
    scores = [
        (name, value) for name, value in (("F1", item.f1), ("exact match", item.exact_match)) if value is not None
    ]
    wrong = [f"{name} = {value:.2f} is not within 0 and 100" for name, value in scores if not 0 <= value <= 100]
    if item.f1 is not None and item.exact_match is not None and item.exact_match > item.f1 + 1e-9:
        wrong.append(f"exact match {item.exact_match:.2f} above F1 {item.f1:.2f}")
    shares = item.shares.items()
    wrong += [f"{name} = {share:.4g} is not within 0 and 1" for name, share in shares if not 0 <= share <= 1 + 1e-9]
    stated = ", ".join(f"{name} {value:.2f}" for name, value in scores)
    good = f"{stated}: exact match <= F1 <= 100, shares at most 1" if stated else "shares at most 1"
    return none_wrong(wrong, good) if scores or shares else None
