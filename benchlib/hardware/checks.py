"""What a machine run is judged by: that its collectives are right, its numbers possible, and its peaks not lower than accepted."""

from benchlib.baselines import Comparison, regression_checks
from benchlib.checks import Check, budget_check, fact_check, finite_check
from benchlib.regression import RegressionLimit
from benchlib.results import Run

PEAK_SHARE = 0.20  # of the accepted peak that a shared machine's noise may cost


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
    wrong = int(result.facts["allreduce_wrong_elements"])
    return [
        fact_check(
            "all-reduce right",
            "Is every element of every timed all-reduce what it has to be?",
            wrong == 0,
            f"{wrong:,} wrong elements over all ranks and sizes",
            limit="= 0",
            value=wrong,
            unit="elements",
        ),
        finite_check(result),
        budget_check(run, result.value("total_s") or 0.0),
        *regression_checks(run, limits(run), comparison),
    ]
