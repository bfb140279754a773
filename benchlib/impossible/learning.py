"""Rules of training: a learning rate moves the weights, the loss falls, scores keep to their bounds."""

from benchlib.impossible.claim import Claim
from benchlib.impossible.finding import Finding, found
from benchlib.metrics import quantity


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
