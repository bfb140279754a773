"""Rules of training: rates follow from what was counted, no device exceeds its peak, something is learnt."""

import math
import statistics
from collections.abc import Mapping, Sequence

from benchlib.core.definitions import token_flops
from benchlib.core.text import quantity
from benchlib.judge.impossible.findings import (
    PEAK_SLACK,
    RATE_SLACK,
    SCALING_SLACK,
    Finding,
    agrees,
    figure,
    finding,
    span,
)
from benchlib.judge.references import vendor_peak

FLOP = "FLOP/s"
FLOPS_SLACK = 0.1  # between FLOP/s and tokens × parameters: embeddings are counted or not
CONVERGED = 0.05  # share of the loss by which a training that had converged before may end above its start
MOST_ATTENTION = 2.0  # times the FLOPs of the matrix products with weights: longer sequences than that are not common


def rate_from_counts(
    samples_per_s: float,
    wall_s: float,
    unit: str = "samples/s",
    stands_for: str = "all ranks",
    ranks: int | None = None,
    samples_counted: int | None = None,
    wall_s_span: Sequence[float] = (),
    features: int | None = None,
    epochs: float | None = None,
    steps_run: int | None = None,
    steps_planned: int | None = None,
    batch_per_rank: int | None = None,
) -> Finding | None:
    """Samples per second = samples over all ranks / their time; else planned steps, single ranks or sums were taken."""
    if samples_counted is not None:
        count, how = float(samples_counted), f"{samples_counted:,} samples counted"
    elif features is not None and epochs is not None:
        count = features * epochs
        how = f"{features:,} features × {epochs:g} epochs = {count:,.0f} samples"
    elif steps_run is not None and batch_per_rank is not None and ranks is not None:
        count = float(steps_run * batch_per_rank * ranks)
        how = f"{steps_run:,} steps × {batch_per_rank:,} samples × {ranks} ranks"
    else:
        return None
    expected = count / wall_s
    if stands_for == "one rank":
        if ranks is None:
            return Finding("SKIPPED", f"the rate is that of one rank, and the number of ranks is not stated: {how}")
        expected, how = expected / ranks, f"{how}, over {ranks} ranks"
    reason = f"{figure(samples_per_s, unit)} stated, {figure(expected, unit)} by {how} in {figure(wall_s, 's')}"
    wrong = "nothing was processed"
    if expected > 0:
        ratio = samples_per_s / expected
        mistakes = {
            f"the rate counts the {steps_planned or 0:,} planned steps, of which {steps_run or 0:,} ran": (
                steps_planned / steps_run if steps_planned and steps_run else None
            ),
            f"the rate was multiplied by the {steps_run or 0:,} steps": steps_run,
            f"it is the rate of one of the {ranks} ranks, not of all": 1 / ranks if ranks else None,
            f"it was multiplied by the {ranks} ranks once too often": ranks,
        }
        fitting = (text for text, factor in mistakes.items() if factor and factor != 1 and _near(ratio, factor))
        wrong = next(fitting, f"{ratio:.3g} times what was processed")
    shortest, longest = wall_s_span or (wall_s, wall_s)
    good = agrees(samples_per_s, expected * wall_s / longest, expected * wall_s / shortest, RATE_SLACK)
    return finding(good, reason, wrong=wrong, value=samples_per_s, unit=unit)


def _near(ratio: float, factor: float) -> bool:
    return abs(ratio / factor - 1) <= RATE_SLACK


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


def steps_that_ran(
    steps_planned: int,
    steps_run: int,
    samples_per_s: float | None = None,
    wall_s: float | None = None,
    batch_per_rank: int | None = None,
    ranks: int | None = None,
    unit: str = "samples/s",
) -> Finding | None:
    """A rate counts only steps that ran; fewer than planned is no fault as long as the rate does not count them."""
    if steps_run > steps_planned:
        return finding(False, f"{steps_run:,} steps ran, but only {steps_planned:,} were planned")
    if samples_per_s is None or wall_s is None or batch_per_rank is None or ranks is None:
        return None
    by_planned, by_run = (steps * batch_per_rank * ranks / wall_s for steps in (steps_planned, steps_run))
    closer_to_planned = abs(samples_per_s - by_planned) < abs(samples_per_s - by_run)
    reason = (
        f"{steps_run:,} of {steps_planned:,} planned steps ran, which gives {figure(by_run, unit)}; "
        f"{figure(samples_per_s, unit)} is stated"
    )
    good = steps_run == steps_planned or not closer_to_planned
    return finding(good, reason, wrong=f"that is the rate of the planned steps ({figure(by_planned, unit)})")


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


def below_peak(
    flops_per_s: float | None = None,
    tokens_per_s: float | None = None,
    parameters: float | None = None,
    work: str = "training",
    device: str = "",
    ranks: int = 1,
    precision: str = "",
    peak_flops: float | None = None,
    peak_kind: str = "",
    peak_source: str = "",
    peak_sparse: bool = False,
) -> Finding | None:
    """FLOP/s, stated or by tokens × FLOPs of a token, do not exceed the peak (5% slack: peaks are measured too).

    The dense peak of a registered device holds, whatever peak is stated; a lower one that was measured holds more.
    """
    how = ""
    if flops_per_s is None:
        if tokens_per_s is None or parameters is None:
            return None
        flops_per_s, formula = _token_rate(tokens_per_s, parameters, work)
        how = f"({formula}) "
    source = f"the {peak_kind or 'stated'} peak" + (f" ({peak_source})" if peak_source else "")
    registered = _known_peak(device, precision, ranks)
    if registered and peak_flops and peak_flops > registered[0] * PEAK_SLACK and not peak_sparse:
        reason = f"{source} of {quantity(peak_flops, FLOP)} is above {registered[1]} of {quantity(registered[0], FLOP)}"
        limit = f"<= {quantity(registered[0] * PEAK_SLACK, FLOP)}"
        return finding(False, reason, wrong="no device exceeds its peak", value=peak_flops, unit=FLOP, limit=limit)
    peaks = [(peak_flops, source)] if peak_flops and not peak_sparse else []
    if not (peaks := [*peaks, *([registered] if registered else [])]):
        return Finding("SKIPPED", f"{quantity(flops_per_s, FLOP)} {how}: {_unknown_peak(device)}")
    peak, source = min(peaks)
    reason = f"{quantity(flops_per_s, FLOP)} {how}are {flops_per_s / peak:.1%} of {source} of {quantity(peak, FLOP)}"
    most = peak * PEAK_SLACK
    wrong, limit = "no device exceeds its peak", f"<= {quantity(most, FLOP)}"
    tensor_cores = _known_peak(device, "tf32", ranks) if precision == "fp32" else None
    if tensor_cores and flops_per_s <= tensor_cores[0] * PEAK_SLACK:
        wrong += " (if the products ran in TF32, the precision is tf32)"
    return finding(flops_per_s <= most, reason, wrong=wrong, value=flops_per_s, unit=FLOP, limit=limit)


def _token_rate(tokens_per_s: float, parameters: float, work: str) -> tuple[float, str]:
    """Return the FLOP/s of the matrix products that this rate of tokens needs, and how they were computed."""
    training = work == "training"
    rate = tokens_per_s * token_flops(parameters, training=training)
    return rate, f"{tokens_per_s:,.1f} tokens/s × {6 if training else 2} × {parameters:.3g} parameters"


def _known_peak(device: str, precision: str, ranks: int) -> tuple[float, str] | None:
    """Return the dense peak that the vendor of a known device claims for all ranks, and its name."""
    vendor = vendor_peak(device)
    dense = vendor.dense_flops.get(precision or "bf16") if vendor else None
    if vendor is None or dense is None:
        return None
    return dense * ranks, f"the claimed dense {precision or 'bf16'} peak of {ranks} × {vendor.name}"


def flops_of_tokens(
    tokens_per_s: float,
    parameters: float,
    work: str = "training",
    flops_per_s: float | None = None,
    mfu: float | None = None,
    peak_flops: float | None = None,
    device: str = "",
    ranks: int = 1,
    precision: str = "",
    peak_sparse: bool = False,
) -> Finding | None:
    """FLOP/s, or MFU × peak, are those of tokens × parameters: at least these, and with attention at most twice as many."""
    counted, how = _token_rate(tokens_per_s, parameters, work)
    registered = _known_peak(device, precision, ranks)
    peak = registered[0] if registered else None if peak_sparse else peak_flops
    if flops_per_s is not None:
        stated, name = flops_per_s, f"{quantity(flops_per_s, FLOP)} stated"
    elif mfu is not None and peak:
        stated, name = mfu * peak, f"MFU {mfu:.1%} of {quantity(peak, FLOP)} = {quantity(mfu * peak, FLOP)}"
    else:
        return None
    if counted <= 0:
        return None
    ratio = stated / counted
    good = 1 - FLOPS_SLACK <= ratio <= MOST_ATTENTION * (1 + FLOPS_SLACK)
    reason = f"{name}, {quantity(counted, FLOP)} by {how}"
    wrong = f"{ratio:.3g} times what the tokens need" + (", which attention does not explain" if ratio > 1 else "")
    return finding(good, reason, wrong=wrong, value=ratio)


def share_of_peak(
    mfu: float,
    flops_per_s: float | None = None,
    device: str = "",
    ranks: int = 1,
    precision: str = "",
    peak_flops: float | None = None,
    peak_precision: str = "",
    peak_sparse: bool = False,
) -> Finding | None:
    """MFU is FLOP/s over the dense peak of this very device in the precision of the work; it does not exceed 1."""
    vendor = vendor_peak(device)
    other = peak_precision if precision and peak_precision != precision else ""
    if mfu < 0:
        return finding(False, f"MFU {mfu:.1%}", wrong="below zero")
    if mfu > PEAK_SLACK:
        peak = f"the peak of {quantity(peak_flops, FLOP)}" if peak_flops else "the peak it was taken of"
        registered = _known_peak(device, precision, ranks)
        dense = registered[0] if registered else 0.0
        if other:
            wrong = f"{peak} is that of {other}, while the work ran in {precision}"
        elif vendor is None and device:
            wrong = f"{peak} is not that of {device}, whose peak is not known; MFU is not available"
        elif vendor and peak_flops and dense > peak_flops * PEAK_SLACK:
            wrong = f"{peak} is not the dense {precision or 'bf16'} peak of {vendor.name}, {quantity(dense, FLOP)}"
        else:
            wrong = f"{peak} is another device's or another precision's, or the work was counted twice"
        return finding(False, f"MFU {mfu:.1%} is impossible", wrong=wrong, value=mfu, limit="<= 1")
    if other:
        reason = f"MFU {mfu:.1%} is of the {other} peak, but the work ran in {precision}"
        return finding(False, reason, wrong="another precision has another peak")
    if peak_sparse:
        return Finding(
            "SKIPPED",
            f"MFU {mfu:.1%} is of a sparse peak, twice the dense one: MFU is not available; "
            f"of the dense peak it would be {2 * mfu:.1%}",
        )
    if peak_flops is None and vendor is None:
        return Finding("SKIPPED", f"MFU is not available: {_unknown_peak(device)}")
    if flops_per_s is None or peak_flops is None:
        return None
    share = flops_per_s / peak_flops
    reason = f"MFU {mfu:.1%} stated, {quantity(flops_per_s, FLOP)} / {quantity(peak_flops, FLOP)} = {share:.1%}"
    good = abs(mfu - share) <= max(RATE_SLACK * share, 0.005)
    return finding(good, reason, wrong="the share does not follow from the two rates", value=mfu)


def _unknown_peak(device: str) -> str:
    return f"no peak of {device!r} is known" if device else "no peak of this device is known"


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


def loss_falls(loss_first: float, loss_last: float) -> Finding:
    """The loss at the end is below that of the start; one that stays within 5% may have converged before."""
    reason = f"loss from {loss_first:.3f} to {loss_last:.3f}"
    change = loss_last - loss_first
    # A constant loss falls by the rounding of its smoothing.
    if 1e-9 * abs(loss_first) < change <= CONVERGED * abs(loss_first):
        return Finding("SKIPPED", f"{reason}: a converged loss moves like this, and so does one that learns nothing")
    fell = -change > 1e-9 * abs(loss_first)
    return finding(fell, reason, wrong="nothing was learnt", value=loss_last, limit=f"< {quantity(loss_first)}")


def possible_scores(
    f1: float | None = None, exact_match: float | None = None, shares: Mapping[str, float] | None = None
) -> Finding | None:
    """By definition exact match <= F1 <= 100, and a share lies between 0 and 1."""
    scores = {name: value for name, value in {"F1": f1, "exact match": exact_match}.items() if value is not None}
    if not scores and not shares:
        return None
    wrong = [f"{name} = {value:.2f} is not within 0 and 100" for name, value in scores.items() if not 0 <= value <= 100]
    if f1 is not None and exact_match is not None and exact_match > f1 + 1e-9:
        wrong.append(f"exact match {exact_match:.2f} above F1 {f1:.2f}")
    wrong += [
        f"{name} = {share:.4g} is not within 0 and 1"
        for name, share in (shares or {}).items()
        if not 0 <= share <= 1 + 1e-9
    ]
    stated = ", ".join(f"{name} {value:.2f}" for name, value in scores.items())
    good = f"{stated}: exact match <= F1 <= 100, shares at most 1" if stated else "shares at most 1"
    return finding(not wrong, "; ".join(wrong) or good)


def scores_of_answers(
    f1: float | None = None,
    exact_match: float | None = None,
    answers_f1: float | None = None,
    answers_exact_match: float | None = None,
) -> Finding | None:
    """Stated scores are those that the stored answers give."""
    pairs = (("F1", f1, answers_f1), ("exact match", exact_match, answers_exact_match))
    stated_pairs = [(name, stated, own) for name, stated, own in pairs if stated is not None and own is not None]
    if not stated_pairs:
        return None
    reason = "; ".join(
        f"{name} {figure(stated)} stated, {figure(own)} by the answers" for name, stated, own in stated_pairs
    )
    good = all(agrees(stated, own, own, absolute=1e-6) for _, stated, own in stated_pairs)
    return finding(good, reason, wrong="the scores are of other answers")
