"""Rules of rates: they follow from what was counted and timed, and n devices do the work of n."""

import statistics

from benchlib.core.definitions import token_flops
from benchlib.core.text import quantity
from benchlib.judge.impossible.claim import Claim, Compute, Speed
from benchlib.judge.impossible.findings import (
    PEAK_SLACK,
    RATE_SLACK,
    SCALING_SLACK,
    Finding,
    agrees,
    figure,
    found,
    half_unit,
    span,
)
from benchlib.judge.references import vendor_peak


def rate_follows_from_counts(claim: Claim) -> list[Finding]:
    """Samples per second = samples over all ranks / their time; else planned steps, single ranks or sums were taken."""
    speed = claim.speed
    counted = _counted(speed) if speed else None
    if speed is None or counted is None or speed.samples_per_s is None or speed.wall_s is None:
        return []
    count, how = counted
    true = count / speed.wall_s
    stated = speed.samples_per_s
    if speed.stands_for == "one rank":
        if speed.ranks is None:
            return [Finding("SKIPPED", f"the rate is of one rank and it is not said of how many: {how}")]
        true, how = true / speed.ranks, f"{how}, over {speed.ranks} ranks"
    reason = f"{figure(stated, speed.unit)} stated, {figure(true, speed.unit)} by {how} in {figure(speed.wall_s, 's')}"
    good = agrees(stated, true, true, RATE_SLACK)
    return [found(good, reason, wrong=_cause(speed, stated, true), value=stated, unit=speed.unit)]


def _counted(speed: Speed) -> tuple[float, str] | None:
    if speed.samples_counted is not None:
        return speed.samples_counted, f"{speed.samples_counted:,} samples counted"
    if speed.features is not None and speed.epochs is not None:
        product = speed.features * speed.epochs
        return product, f"{speed.features:,} features × {speed.epochs:g} epochs = {product:,.0f} samples"
    if speed.steps_run is not None and speed.batch_per_rank is not None and speed.ranks is not None:
        product = speed.steps_run * speed.batch_per_rank * speed.ranks
        return product, f"{speed.steps_run:,} steps × {speed.batch_per_rank:,} samples × {speed.ranks} ranks"
    return None


def _cause(speed: Speed, stated: float, true: float) -> str:
    """Name the mistake that gives the stated rate, where one of the known ones does."""
    if true <= 0:
        return "nothing was processed"
    ratio = stated / true

    def near(factor: float | None) -> bool:
        return factor is not None and factor > 0 and factor != 1 and abs(ratio / factor - 1) <= RATE_SLACK

    planned = speed.steps_planned / speed.steps_run if speed.steps_planned and speed.steps_run else None
    if near(planned):
        return f"the rate counts the {speed.steps_planned:,} planned steps, of which {speed.steps_run:,} ran"
    if near(speed.steps_run):
        return f"the rate was multiplied by the {speed.steps_run:,} steps"
    if speed.ranks and speed.ranks > 1 and near(1 / speed.ranks):
        return f"it is the rate of one of the {speed.ranks} ranks, not of all"
    if speed.ranks and speed.ranks > 1 and near(float(speed.ranks)):
        return f"it was multiplied by the {speed.ranks} ranks once too often"
    return f"{ratio:.3g} times of what was processed"


def samples_are_those_planned(claim: Claim) -> list[Finding]:
    """As many samples were processed as the planned steps, or the features and epochs, need."""
    speed = claim.speed
    if speed is None or speed.samples_counted is None:
        return []
    seen = speed.samples_counted
    if speed.samples_planned is not None:
        planned = speed.samples_planned
        reason = f"{seen:,} samples seen, {planned:,} planned"
        return [found(seen == planned, reason, value=seen, unit="samples", limit=f"= {planned:,}")]
    if speed.features is not None and speed.epochs is not None:
        planned = round(speed.features * speed.epochs)
        reason = f"{seen:,} samples counted, {speed.features:,} features × {speed.epochs:g} epochs = {planned:,}"
        # The last batch of an epoch may be filled up or left out.
        return [found(abs(seen / max(planned, 1) - 1) <= RATE_SLACK, reason, wrong="another work than the stated one")]
    return []


def steps_were_run(claim: Claim) -> list[Finding]:
    """A rate may count only steps that ran; fewer than planned is no fault as long as the rate does not count them."""
    speed = claim.speed
    if speed is None or speed.steps_planned is None or speed.steps_run is None:
        return []
    ran, planned = speed.steps_run, speed.steps_planned
    if ran > planned:
        return [found(False, f"{ran:,} steps ran, {planned:,} were planned", wrong="more than there can be")]
    if speed.samples_per_s is None or speed.wall_s is None or speed.batch_per_rank is None or speed.ranks is None:
        return []
    by_planned, by_run = (n * speed.batch_per_rank * speed.ranks / speed.wall_s for n in (planned, ran))
    closer = abs(speed.samples_per_s - by_planned) < abs(speed.samples_per_s - by_run)
    reason = (
        f"{ran:,} of {planned:,} planned steps ran, which gives {figure(by_run, speed.unit)}; "
        f"{figure(speed.samples_per_s, speed.unit)} is stated"
    )
    good = ran == planned or not closer
    return [found(good, reason, wrong=f"that is the rate of the planned steps ({figure(by_planned, speed.unit)})")]


def rate_follows_from_steps(claim: Claim) -> list[Finding]:
    """Samples per second lie where the step times put them: between those of the mean and of the median step.

    Without the raw times the ends of the median count; where some batches were smaller, the rate may be lower.
    """
    speed = claim.speed
    if speed is None or speed.samples_per_s is None or speed.batch_per_rank is None:
        return []
    if not speed.step_s and not speed.step_s_span:
        return []
    ranks = speed.ranks if speed.stands_for == "all ranks" else 1
    if ranks is None:
        return []
    steps = len(speed.step_s)
    times = (statistics.fmean(speed.step_s), statistics.median(speed.step_s)) if steps else speed.step_s_span
    rates = sorted(speed.batch_per_rank * ranks / value for value in times)
    good = agrees(speed.samples_per_s, rates[0] if speed.batches_full else 0.0, rates[-1], RATE_SLACK)
    how = f"the raw times of {steps:,} steps" if steps else "the median of the steps,"
    most = "" if speed.batches_full else "at most "
    shown = figure(rates[0] if steps else rates[-1], speed.unit)
    reason = (
        f"{figure(speed.samples_per_s, speed.unit)} stated, {most}{shown} by {how} "
        f"of {speed.batch_per_rank * ranks:,} samples"
    )
    ratio = speed.samples_per_s / (rates[0] if steps else rates[-1])
    times_steps = steps > 1 and abs(ratio / steps - 1) <= RATE_SLACK
    wrong = f"it was multiplied by the {steps:,} steps" if times_steps else f"{ratio:.3g} times of what the steps give"
    return [found(good, reason, wrong=wrong, value=speed.samples_per_s, unit=speed.unit)]


def tokens_follow_from_samples(claim: Claim) -> list[Finding]:
    """Tokens per second = samples per second × length where all samples have one length, else at most × the longest."""
    speed = claim.speed
    if speed is None or speed.samples_per_s is None or speed.tokens_per_s is None:
        return []
    low, high = span(speed.samples_per_s)
    stated = f"{figure(speed.tokens_per_s)} tokens/s"
    if speed.sequence_length is not None:
        length = speed.sequence_length
        reason = f"{stated} beside {figure(speed.samples_per_s, speed.unit)} × {length:,} tokens = {figure(speed.samples_per_s * length)}"
        good = agrees(speed.tokens_per_s, low * length, high * length)
        return [found(good, reason, wrong=f"it would need {figure(speed.tokens_per_s / length, speed.unit)}")]
    if speed.longest_sequence is not None and speed.samples_per_s > 0:
        longest, mean = speed.longest_sequence, speed.tokens_per_s / speed.samples_per_s
        reason = f"{stated} beside {figure(speed.samples_per_s, speed.unit)} are {mean:.1f} tokens a sample, which has 1 to {longest:,}"
        good = (1 - RATE_SLACK) * low <= speed.tokens_per_s + half_unit(speed.tokens_per_s)
        good = good and speed.tokens_per_s - half_unit(speed.tokens_per_s) <= high * longest * (1 + RATE_SLACK)
        return [found(good, reason, wrong="no sample is that short or long")]
    return []


def scaling_is_possible(claim: Claim) -> list[Finding]:
    """n devices are not faster than n times one, but for 5 % of noise."""
    speed = claim.speed
    if speed is None or speed.one_device_samples_per_s is None or speed.samples_per_s is None or not speed.ranks:
        return []
    total = speed.samples_per_s * (speed.ranks if speed.stands_for == "one rank" else 1)
    times = total / speed.one_device_samples_per_s
    efficiency = times / speed.ranks
    where = f" ({speed.one_device})" if speed.one_device else ""
    reason = (
        f"{figure(total, speed.unit)} on {speed.ranks} devices are {times:.3g} times the "
        f"{figure(speed.one_device_samples_per_s, speed.unit)} of one{where}, an efficiency of {efficiency:.2f}"
    )
    # The stated rates are rounded: only what no rounding explains is impossible.
    low = span(total)[0] / span(speed.one_device_samples_per_s)[1] / speed.ranks
    return [
        found(
            min(low, efficiency) <= SCALING_SLACK,
            reason,
            wrong=f"{speed.ranks} devices cannot do more than {speed.ranks} times the work of one; samples were counted that were not processed, or the two did different work",
            value=efficiency,
            limit=f"<= {SCALING_SLACK}",
        )
    ]


# Rules of floating point work: no device does more than its peak, and a share needs the peak of that device.


FLOP = "FLOP/s"


def rate_is_below_peak(claim: Claim) -> list[Finding]:
    """FLOP/s, stated or by tokens × FLOPs of a token, do not exceed the peak (5 % slack: peaks are measured too)."""
    compute = claim.compute
    achieved = _achieved(compute) if compute else None
    if compute is None or achieved is None:
        return []
    rate, how = achieved
    peak = _peak(compute)
    if peak is None:
        return [Finding("SKIPPED", f"{quantity(rate, FLOP)} {how}: no peak of {_device(compute)} is known")]
    flops, what = peak
    reason = f"{quantity(rate, FLOP)} {how}are {rate / flops:.1%} of {what} of {quantity(flops, FLOP)}"
    good = rate <= flops * PEAK_SLACK
    limit = f"<= {quantity(flops * PEAK_SLACK, FLOP)}"
    return [found(good, reason, wrong="no device exceeds its peak", value=rate, unit=FLOP, limit=limit)]


def share_is_possible(claim: Claim) -> list[Finding]:
    """MFU is FLOP/s over the dense peak of this very device in the precision of the work; it does not exceed 1."""
    compute = claim.compute
    if compute is None or compute.mfu is None:
        return []
    share = compute.mfu
    if share < 0:
        return [found(False, f"MFU {share:.1%}", wrong="below zero")]
    if share > PEAK_SLACK:
        return [found(False, f"MFU {share:.1%} cannot be", wrong=_why_above(compute), value=share, limit="<= 1")]
    if compute.peak_precision and compute.precision and compute.peak_precision != compute.precision:
        other = f"MFU {share:.1%} is of the {compute.peak_precision} peak, but the work ran in {compute.precision}"
        return [found(False, other, wrong="another precision has another peak")]
    if compute.peak_sparse:
        dense = f"MFU {share:.1%} is of a sparse peak, twice the dense one: MFU is not available, of the dense peak it were {2 * share:.1%}"
        return [Finding("SKIPPED", dense)]
    known = vendor_peak(compute.device)
    if compute.peak_flops is None and known is None:
        return [Finding("SKIPPED", f"MFU is not available: no peak of {_device(compute)} is known")]
    if compute.flops_per_s is None or compute.peak_flops is None:
        return []
    true = compute.flops_per_s / compute.peak_flops
    reason = f"MFU {share:.1%} stated, {quantity(compute.flops_per_s, FLOP)} / {quantity(compute.peak_flops, FLOP)} = {true:.1%}"
    good = abs(share - true) <= max(RATE_SLACK * true, 0.005)
    return [found(good, reason, wrong="the share does not follow from the two rates", value=share)]


def _achieved(compute: Compute) -> tuple[float, str] | None:
    if compute.flops_per_s is not None:
        return compute.flops_per_s, ""
    if compute.tokens_per_s is not None and compute.parameters is not None:
        each = token_flops(compute.parameters, training=compute.work == "training")
        count = f"{compute.tokens_per_s:,.1f} tokens/s × {'6' if compute.work == 'training' else '2'} × {compute.parameters:.3g} parameters"
        return compute.tokens_per_s * each, f"({count}) "
    return None


def _peak(compute: Compute) -> tuple[float, str] | None:
    if compute.peak_flops is not None:
        kind = f"the {compute.peak_kind} peak" if compute.peak_kind else "the stated peak"
        source = f" ({compute.peak_source})" if compute.peak_source else ""
        return compute.peak_flops, kind + source
    known = vendor_peak(compute.device)
    dense = known.dense_flops.get(compute.precision or "bf16") if known else None
    if known is None or dense is None:
        return None
    precision = compute.precision or "bf16"
    return dense * compute.ranks, f"the claimed dense {precision} peak of {compute.ranks} × {known.name}"


def _why_above(compute: Compute) -> str:
    known = vendor_peak(compute.device)
    used = f"the peak of {quantity(compute.peak_flops, FLOP)}" if compute.peak_flops else "the peak it was taken of"
    if compute.peak_precision and compute.precision and compute.peak_precision != compute.precision:
        return f"{used} is that of {compute.peak_precision}, while the work ran in {compute.precision}"
    if known is None and compute.device:
        return f"{used} is not that of {compute.device}, whose peak is not known; MFU is not available"
    if known is not None and compute.peak_flops:
        dense = known.dense_flops.get(compute.precision or "bf16")
        if dense and dense * compute.ranks > compute.peak_flops * PEAK_SLACK:
            return f"{used} is not the dense {compute.precision or 'bf16'} peak of {known.name}, {quantity(dense * compute.ranks, FLOP)}"
    return f"{used} is another device's or another precision's, or the work was counted twice"


def _device(compute: Compute) -> str:
    return repr(compute.device) if compute.device else "this device"


# Rules of training: a learning rate moves the weights, the loss falls, scores keep to their bounds.


def learning_rate_is_above_zero(claim: Claim) -> list[Finding]:
    """No step but the last trains with a rate of zero: else the schedule ended before the training, or never began."""
    learning = claim.learning
    if learning is None:
        return []
    if learning.learning_rates:
        rates = learning.learning_rates
        return [_of_steps(rates, learning.f1)]
    if learning.learning_rate_min is None:
        return []
    least = learning.learning_rate_min
    reason = f"the smallest learning rate of all steps is {least:.3g}"
    return [found(least > 0, reason, wrong="nothing is trained at zero", value=least, limit="> 0")]


def _of_steps(rates: list[float], f1: float | None) -> Finding:
    # Schedules that reach zero with the last step are common and harmless; one step alone has no other.
    judged = rates[:-1] or rates
    zero = [index for index, rate in enumerate(judged, 1) if rate <= 0]
    if not zero:
        return found(True, f"the learning rate is above zero in all of {len(rates):,} steps, but for the last at most")
    if len(zero) == len(judged):
        return found(
            False, f"the learning rate is {rates[0]:g} in all of {len(rates):,} steps", wrong="nothing was trained"
        )
    score = f"; the F1 of {f1:g} is that of a training that stopped there" if f1 is not None else ""
    reason = f"the learning rate is zero from step {zero[0]:,} of {len(rates):,}"
    wrong = f"the schedule is shorter than the training, and {len(zero):,} steps trained nothing{score}"
    return found(False, reason, wrong=wrong, value=0.0, limit="> 0")


def loss_falls(claim: Claim) -> list[Finding]:
    """The loss at the end is below that of the start."""
    learning = claim.learning
    if learning is None or learning.loss_first is None or learning.loss_last is None:
        return []
    first, last = learning.loss_first, learning.loss_last
    reason = f"loss from {first:.3f} to {last:.3f}"
    # A constant loss falls by the rounding of its smoothing.
    fell = first - last > 1e-9 * abs(first)
    return [found(fell, reason, wrong="nothing was learnt", value=last, limit=f"< {quantity(first)}")]


def scores_are_possible(claim: Claim) -> list[Finding]:
    """By definition exact match <= F1 <= 100, and a share lies between 0 and 1."""
    learning = claim.learning
    if learning is None or (learning.f1 is None and learning.exact_match is None and not learning.shares):
        return []
    scores = {"F1": learning.f1, "exact match": learning.exact_match}
    wrong = [
        f"{name} = {value:.2f} is not within 0 and 100"
        for name, value in scores.items()
        if value is not None and not 0 <= value <= 100
    ]
    f1, match = learning.f1, learning.exact_match
    if f1 is not None and match is not None and match > f1 + 1e-9:
        wrong.append(f"exact match {match:.2f} above F1 {f1:.2f}")
    wrong += [
        f"{name} = {share:.4g} is not within 0 and 1"
        for name, share in learning.shares.items()
        if not 0 <= share <= 1 + 1e-9
    ]
    known = ", ".join(f"{name} {value:.2f}" for name, value in scores.items() if value is not None)
    good = f"{known}: exact match <= F1 <= 100, shares at most 1" if known else "shares at most 1"
    return [found(not wrong, "; ".join(wrong) or good)]
