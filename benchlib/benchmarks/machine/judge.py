"""What a machine run is judged by: that its collectives are right, its numbers possible, and its peaks not lower than accepted."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchlib.benchmarks.machine.config import MachineConfig
from benchlib.core.definitions import size_text
from benchlib.core.text import quantity
from benchlib.judge.baselines import Comparison, regression_checks
from benchlib.judge.checks import Check, agreement_check, budget_check, finite_check, right_results_check, rule_check
from benchlib.judge.impossible.claim import Claim, Collective, Speed
from benchlib.judge.impossible.own import Numbers, OwnClaims
from benchlib.judge.numbers import count
from benchlib.judge.published import Measured, device_name, summary
from benchlib.judge.regression import RegressionLimit
from benchlib.results.metrics import Metric
from benchlib.results.run import Run

PEAK_SHARE = 0.20  # of the accepted peak that a shared machine's noise may cost
# The rules that a check of its own shows; "numbers agree" stands for all others.
SHOWN = ("right results", "scaling", "possible values")


def lacks(table: str, _row: Mapping[str, Any], column: str) -> bool:
    """Say whether a null has a reason: one rank alone multiplies at the best size only."""
    return (table, column) == ("matmul", "alone_flops")


def limits(run: Run) -> list[RegressionLimit]:
    """Return a limit for every rate of the run: each peak may fall by a fifth."""
    assert run.result is not None
    return [
        RegressionLimit(metric=metric.name, share=PEAK_SHARE)
        for metric in run.result.metrics
        if metric.direction == "higher"
    ]


def claims(numbers: Numbers) -> Iterator[Claim]:
    """Yield what the peaks state: the all-reduce, and all ranks at once beside the best of one."""
    value, positive = numbers.value, numbers.positive
    busbw, algbw = value("allreduce_gbps"), value("allreduce_algbw_gbps")
    library = str(numbers.facts.get("collective", ""))
    # The rows are counted anew: the total must not be able to hide them.
    rows = [count(row["wrong_elements"], "wrong_elements") for row in numbers.rows("allreduce")]
    total = numbers.count("allreduce_wrong_elements")  # accepted runs keep no facts
    exchange = Collective(
        operation="all_reduce",
        algorithm=library if library != "nccl" else "",  # only NCCL lets a switch add
        ranks=numbers.world_size,
        algbw_gbytes_per_s=algbw / 8 if algbw is not None else None,
        busbw_gbytes_per_s=busbw / 8 if busbw is not None else None,
        wrong_elements=None if total is None else max(sum(rows), total),
    )
    yield Claim(subject="all-reduce", collective=exchange)
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        together, best = (positive(f"matmul_{precision}{kind}_flops") for kind in ("", "_best"))
        if together and best:
            products = Speed(
                samples_per_s=together,
                unit="FLOP/s",
                ranks=numbers.world_size,
                one_device_samples_per_s=best,
                one_device="the best sample of a rank",
            )
            yield Claim(subject=f"{precision} products", speed=products)


def checks(run: Run, comparison: Comparison) -> list[Check]:
    """Judge a run that has a result."""
    result, stated = run.result, OwnClaims(Numbers.of_run(run))
    assert result is not None
    return [
        right_results_check(stated, run.config.world_size),
        rule_check(
            "possible scaling",
            "Are all ranks together at most as fast as the best rank times their number?",
            "scaling",
            stated,
        ),
        finite_check(stated),
        agreement_check(stated, SHOWN),
        budget_check(run),
        *regression_checks(run, limits(run), comparison),
    ]


# What the peaks of a machine say, in sentences.


def reading(run: Run) -> list[str]:
    """Return a sentence for each peak of this run, with its size, and where they stand beside published figures."""
    config, result = run.config, run.result
    assert isinstance(config, MachineConfig) and result is not None
    peaks = [(name, result.metric(f"matmul_{name}_peak_flops")) for name in config.precisions]
    sentences = [
        f"Matrix products in {name} peak at {metric.text} in this run ({metric.reason}){_beside(result.metric(f'matmul_{name}_highest_flops'))}."
        for name, metric in peaks
        if metric and metric.value is not None
    ]
    copies = [metric for metric in result.metrics if metric.name.startswith("copy_") and metric.value is not None]
    if copies:
        fastest = max(copies, key=lambda metric: metric.value or 0.0)
        sentences.append(f"The fastest copies reach {fastest.text} ({fastest.reason}).")
    rows = result.tables.get("allreduce", [])
    if rows:
        best = max(rows, key=lambda row: row["busbw_gbps"])
        text = f"The all-reduce reaches {quantity(best['busbw_gbps'], 'Gbps')} of bus bandwidth at {size_text(best['bytes'])}"
        largest, metric = max(rows, key=lambda row: row["bytes"]), result.metric("allreduce_gbps")
        if largest is not best and metric:
            text += f", and {metric.text} at {size_text(largest['bytes'])}, the largest message"
        sentences.append(text + ".")
    sentences.append("These are the best of this run and no bounds: other sizes, or a quieter machine, may show more.")
    return [*sentences, stands] if (stands := summary(run)) else sentences


def _beside(highest: Metric | None) -> str:
    """Return what stands behind a peak: the highest of all runs of this machine, where there are others."""
    if highest is None or highest.value is None:
        return ""
    return f"; the highest of this machine's runs, of which utilisation is stated, is {highest.text} ({highest.reason})"


# The values of a machine run under the names and conditions of the published figures.


def published(run: Run) -> list[Measured]:
    """Return the matrix products of one device alone, by precision, and the all-reduce of the largest message."""
    config, result = run.config, run.result
    assert isinstance(config, MachineConfig) and result is not None
    device = device_name(run.machine, config.backend, config.nproc)
    values = []
    for precision in config.precisions:
        rate = result.value(f"matmul_{precision}_alone_flops")
        if rate is not None:
            label = f"matrix products in {precision}"
            values.append(Measured("matmul_flops", label, rate, device, {"precision": precision, "devices": 1}))
    rate = result.value("allreduce_gbps")
    if rate is not None:
        conditions = {
            "definition": "bus bandwidth",
            "devices": config.world_size,
            "nodes": config.nnodes,
            "message_bytes": max(config.allreduce_sizes),
        }
        values.append(Measured("allreduce_gbps", "all-reduce", rate, device, conditions))
    return values
