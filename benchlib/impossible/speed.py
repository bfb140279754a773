"""Rules of rates: they follow from what was counted and timed, and n devices do the work of n."""

import statistics

from benchlib.impossible.claim import Claim, Speed
from benchlib.impossible.finding import RATE_SLACK, SCALING_SLACK, Finding, agrees, figure, found, half_unit, span


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
