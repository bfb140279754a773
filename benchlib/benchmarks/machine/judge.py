"""What a machine run is judged by: that its collectives are right, its numbers possible, and its peaks not lower than accepted."""

from benchlib.benchmarks.machine.config import MachineConfig
from benchlib.judge.baselines import Comparison, regression_checks
from benchlib.judge.checks import Check, agreement_check, budget_check, finite_check, rule_check
from benchlib.judge.impossible import own
from benchlib.judge.impossible.claim import Claim
from benchlib.judge.impossible.numbers import Numbers
from benchlib.judge.impossible.rules import RULES
from benchlib.judge.published import Measured, device_name, placements, summary
from benchlib.judge.regression import RegressionLimit
from benchlib.results.run import Run

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


# What the peaks of a machine say, in sentences.


def reading(run: Run) -> list[str]:
    """Return a sentence for each rate that was measured, with what it bounds, and where they stand beside published figures."""
    result = run.result
    assert result is not None
    rates = [metric for metric in result.metrics if metric.direction == "higher" and metric.value is not None]
    best = {
        metric.unit: max((m for m in rates if m.unit == metric.unit), key=lambda m: m.value or 0.0) for metric in rates
    }
    bounds = [
        f"The highest rate in {unit} is {metric.text} ({metric.name.replace('_', ' ')}): no benchmark on this machine can honestly show more."
        for unit, metric in best.items()
    ]
    stands = summary(placements(run))
    return [*bounds, stands] if stands else bounds


# The values of a machine run under the names and conditions of the published figures.


def published(run: Run) -> list[Measured]:
    """Return the matrix products of one device alone, by precision, and the all-reduce of the largest message."""
    config, result = run.config, run.result
    assert isinstance(config, MachineConfig) and result is not None
    device = device_name(run.machine, config.backend, config.nproc)
    found = []
    for precision in config.precisions:
        rate = result.value(f"matmul_{precision}_alone_flops")
        if rate is not None:
            label = f"matrix products in {precision}"
            found.append(Measured("matmul_flops", label, rate, device, {"precision": precision, "devices": 1}))
    rate = result.value("allreduce_gbps")
    if rate is not None:
        conditions = {
            "definition": "bus bandwidth",
            "devices": config.world_size,
            "nodes": config.nnodes,
            "message_bytes": int(max(config.allreduce_mib) * 2**20),
        }
        found.append(Measured("allreduce_gbps", "all-reduce", rate, device, conditions))
    return found
