"""What a machine run is judged by: that its collectives are right, its numbers possible, and its peaks not lower than accepted."""

from benchlib.baselines import Comparison, regression_checks
from benchlib.checks import Check, agreement_check, budget_check, finite_check, rule_check
from benchlib.impossible import own
from benchlib.impossible.claim import Claim
from benchlib.impossible.numbers import Numbers
from benchlib.impossible.rules import RULES
from benchlib.regression import RegressionLimit
from benchlib.results import Run

PEAK_SHARE = 0.20  # of the accepted peak that a shared machine's noise may cost
# The rules that a check of its own shows; "numbers agree" stands for all others.
SHOWN = ("right results", "busbw below the links", "scaling", "possible values")


def limits(run: Run) -> list[RegressionLimit]:
    """Return a limit for every rate of the run: each peak may fall by a fifth."""
    assert run.result is not None
    return [
        RegressionLimit(metric=metric.name, share=PEAK_SHARE)
        for metric in run.result.metrics
        if metric.direction == "higher"
    ]


def checks(run: Run, comparison: Comparison) -> list[Check]:
    """Judge a run that has a result."""
    result = run.result
    assert result is not None
    numbers = Numbers.of(result, run.samples, run.config)
    exchange = Claim(subject="all-reduce", collective=own.all_reduce(numbers))
    together = [Claim(subject=name, speed=speed) for name, speed in own.products(numbers).items()]
    return [
        rule_check(
            "all-reduce right",
            "Is every element of every timed all-reduce what it has to be?",
            RULES["right results"].judge(exchange),
        ),
        rule_check(
            "possible all-reduce",
            "Does the all-reduce move no more than the memory can copy?",
            RULES["busbw below the links"].judge(exchange),
            missing="one rank has nobody to exchange with",
        ),
        rule_check(
            "possible scaling",
            "Do all ranks at once reach no more than so many times the best of one?",
            [finding for claim in together for finding in RULES["scaling"].judge(claim)],
        ),
        finite_check(result),
        agreement_check(own.own_claims(numbers), SHOWN),
        budget_check(run, result.value("total_s") or 0.0),
        *regression_checks(run, limits(run), comparison),
    ]
