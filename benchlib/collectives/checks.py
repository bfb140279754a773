"""What a collectives run is judged by: right results, possible numbers, targets, budget and baseline."""

from benchlib.baselines import Comparison, regression_checks
from benchlib.checks import Check, agreement_check, budget_check, fact_check, finite_check
from benchlib.impossible import own
from benchlib.impossible.numbers import Numbers
from benchlib.regression import RegressionLimit
from benchlib.results import Run

SHOWN = ("possible values",)


def limits(run: Run) -> list[RegressionLimit]:
    """Return how much worse each metric may get than the baseline."""
    assert run.result is not None
    return [
        RegressionLimit(metric=metric.name, share=0.15 if metric.name.startswith("allreduce") else 0.25)
        for metric in run.result.metrics
        if metric.name.endswith("_busbw_gbps")
    ]


def checks(run: Run, comparison: Comparison) -> list[Check]:
    """Judge a run that has a result."""
    result = run.result
    assert result is not None
    wrong = int(result.facts["wrong_elements"])
    numbers = Numbers.of(result, run.samples, run.config)
    return [
        fact_check("right results", "Is every element right?", wrong == 0, f"{wrong:,} wrong elements"),
        finite_check(result),
        agreement_check(own.own_claims(numbers), SHOWN),
        budget_check(run, result.value("total_s") or 0.0),
        *regression_checks(run, limits(run), comparison),
    ]
