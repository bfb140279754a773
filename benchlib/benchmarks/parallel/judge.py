"""What a run means: strategies against one device, their losses beside each other, numbers against the possible, the reading."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from benchlib.benchmarks.parallel import bottleneck
from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.core.text import counted, quantity
from benchlib.judge.baselines import Comparison, regression_checks
from benchlib.judge.checks import (
    Check,
    agreement_check,
    budget_check,
    fact_check,
    finite_check,
    right_results_check,
    rule_check,
)
from benchlib.judge.impossible.claim import Claim, Collective, Compute, Learning, Speed
from benchlib.judge.impossible.own import Numbers, OwnClaims
from benchlib.judge.regression import RegressionLimit
from benchlib.results.run import Run

SHOWN = ("learning rate", "below the peak", "right results")
LOSS_FP64, WEIGHT_FP64, FP32 = 1e-12, 1e-9, 1e-5  # how far from one device; rounding alone is 1e-15, 1e-11 and 5e-7
RECOMPUTED = 1e-12
# Losses of the measured model, as a share: sums in another order over some steps. Measured: below 1e-6, in bf16 2e-3.
LOSSES = {"fp32": 1e-4, "bf16": 2e-2}
Row = dict[str, Any]
# Where a null has its reason: few steps have no interval, and not every strategy has each part.
LACKS = {
    "strategies": (
        "step_ci_low",
        "step_ci_high",
        "comm_hidden_share",
        "bubble_s",
        "bubble_share",
        "predicted_step_s",
        "forward_s",
    ),
    "scaling": ("samples_per_s_low", "samples_per_s_high"),
    "facts": ("checkpointing_error", "largest_batch"),
}


def lacks(table: str, _row: Mapping[str, Any], column: str) -> bool:
    """Say whether a null has a reason."""
    return column in LACKS.get(table, ())


def rows_of(run: Run, ran: bool = True) -> list[Row]:
    """Return the main rows of the strategies, only those that ran."""
    assert run.result is not None
    rows = [row for row in run.result.tables.get("strategies", []) if not row.get("scaling")]
    return [row for row in rows if row["status"] == "ok"] if ran else rows


def limits(run: Run) -> list[RegressionLimit]:
    """Return how much worse each metric of a run may get than the baseline."""
    assert run.result is not None
    shares = {"samples_per_s_": 0.20, "peak_memory_gb_": 0.25}
    return [
        RegressionLimit(metric=metric.name, share=share)
        for metric in run.result.metrics
        for start, share in shares.items()
        if metric.name.startswith(start)
    ]


def checks(run: Run, comparison: Comparison) -> list[Check]:
    """Judge a run that has a result."""
    assert isinstance(run.config, ParallelConfig) and run.result is not None
    config, result, stated = run.config, run.result, OwnClaims(Numbers.of_run(run))
    return [
        _ran(run),
        _proved(
            config, rows_of(run), "equal to one device in fp64", {"loss_error": LOSS_FP64, "weight_error": WEIGHT_FP64},
            "Are losses and weights those of a single device after 6 steps, up to the rounding of fp64?",
        ),
        _proved(
            config, rows_of(run), "equal to one device in fp32", {"loss_error_fp32": FP32, "gradient_error": FP32},
            "Are losses and gradients those of a single device, up to the rounding of fp32?",
        ),
        _losses(config, rows_of(run)),
        _counted(rows_of(run)),
        _recomputed(config, result.facts.get("checkpointing_error")),
        right_results_check(stated, config.world_size, "collectives right"),
        rule_check("learning rate", "Was the learning rate above zero in every step?", "learning rate", stated),
        finite_check(stated),
        rule_check("possible speed", "Is every strategy's FLOP rate below the measured peak?", "below the peak", stated),
        agreement_check(stated, SHOWN),
        *bottleneck.checks(run),
        budget_check(run),
        *regression_checks(run, limits(run), comparison),
    ]  # fmt: skip


def _skipped(name: str, question: str, reason: str) -> Check:
    return Check(name=name, kind="sanity", question=question, status="SKIPPED", reason=reason, gates=False)


def _ran(run: Run) -> Check:
    rows = rows_of(run, ran=False)
    done = [row["key"] for row in rows if row["status"] == "ok"]
    left = [f"{row['strategy']}: {row['reason']}" for row in rows if row["status"] != "ok"]
    reason = f"{len(done)} ran" + (f"; not these: {'; '.join(left)}" if left else "")
    wrong = not done or any(row["status"] == "failed" for row in rows)
    return fact_check("strategies ran", "Did the strategies run that fit this machine?", not wrong, reason)


def _proved(config: ParallelConfig, rows: list[Row], name: str, limits: dict[str, float], question: str) -> Check:
    """Check the differences of every strategy; one that ran without a proof fails, unless proofs were switched off."""
    if not config.prove:
        return _skipped(name, question, "prove = false")
    worst, where, wrong = 0.0, "", []
    for row in rows:
        values = {column: row.get(column) for column in limits}
        if column := next((column for column, value in values.items() if value is None), ""):
            if row.get("gradient_error") is None:
                wrong.append(f"{row['key']}: no {column}")
            continue  # a device without fp64
        for column, limit in limits.items():
            value, what = float(values[column] or 0.0), column.replace("_", " ")
            share = value / limit if math.isfinite(value) else math.inf
            if share > 1:
                wrong.append(f"{row['key']}: {what} {value:.2g}, at most {limit:g}")
            if share >= worst:
                worst, where = share, f"{row['key']} ({what} {value:.2g})"
    limit_text = ", ".join(f"{column.replace('_', ' ')} <= {limit:g}" for column, limit in limits.items())
    reason = "; ".join(wrong) or f"{len(rows)} strategies, the farthest {where}"
    return fact_check(name, question, bool(rows) and not wrong, reason, limit=limit_text)


def _losses(config: ParallelConfig, rows: list[Row]) -> Check:
    """Compare the losses of the measured steps: the same model on the same batches, spread in different ways."""
    name, question = "same losses", "Do all strategies of a model compute the same losses in the measured steps?"
    limit, worst, wrong, compared = LOSSES[config.precision], 0.0, [], 0
    if config.dropout:
        return _skipped(name, question, "dropout draws other random numbers in each strategy")
    first: dict[str, Row] = {}
    for row in rows:
        reference = first.setdefault(row["model"], row)
        for value, expected in zip(row["losses"], reference["losses"], strict=True):
            apart = abs(value / expected - 1) if value is not None and math.isfinite(value) else math.inf
            worst, compared = max(worst, apart), compared + (row is not reference)
            if apart > limit and row["key"] not in wrong:
                wrong.append(row["key"])
    reason = f"apart by at most {worst:.1e} in {compared} comparisons" + (f": {', '.join(wrong)}" if wrong else "")
    if not compared and not wrong:
        return _skipped(name, question, "one strategy ran")
    return fact_check(name, question, not wrong, reason, limit=f"<= {limit:g}", value=min(worst, 1e9))


def _counted(rows: list[Row]) -> Check:
    wrong = [row["key"] for row in rows if row["counted_parameters"] != row["parameters"]]
    counts = {f"{row['model']}: {row['parameters']:,}" for row in rows}
    reason = f"not those of the shape: {', '.join(wrong)}" if wrong else "; ".join(sorted(counts))
    question = "Do the ranks together hold as many parameters as the shape has?"
    return fact_check("parameter count", question, bool(rows) and not wrong, reason)


def _recomputed(config: ParallelConfig, error: Any) -> Check:
    name = "recomputed activations"
    question = "Are activations that are computed again the same ones, dropout included?"
    if not config.checkpointing:
        return _skipped(name, question, "checkpointing = false")
    good = isinstance(error, int | float) and error <= RECOMPUTED
    return fact_check(name, question, good, f"gradients apart by {error}", limit=f"<= {RECOMPUTED:g}")


def claims(numbers: Numbers) -> Iterator[Claim]:
    """Yield what each strategy states: its rate, its FLOPs."""
    peaks = numbers.facts.get("machine_peaks") or {}
    for row in numbers.tables.get("strategies", []):
        if row.get("status") != "ok":
            continue
        rate = (peaks.get("matmul_flops") or {}).get(row["precision"])
        if row["world"] == 1 and rate:
            rate = max(rate, peaks.get("matmul_flops_alone") or 0.0)
        compute = Compute(
            flops_per_s=row["flops"] / row["step_s"], mfu=row.get("mfu"), ranks=row["world"], precision=row["precision"],
            peak_precision=row["precision"], peak_flops=rate * row["world"] if rate else None, peak_kind="measured",
        )  # fmt: skip
        # A batch is stated for all ranks together: in tensor and pipeline parallelism no rank has a share of its own.
        speed = Speed(
            samples_per_s=row["samples_per_s"], tokens_per_s=row.get("tokens_per_s"), ranks=1, batch_per_rank=row["batch_size"],
            step_s=row["steps_s"], batches_full=True, sequence_length=row["seq_len"],
        )  # fmt: skip
        yield Claim(subject=row["key"], compute=compute, speed=speed)
    rates = numbers.facts.get("learning_rates")
    lowest = rates.get("min") if isinstance(rates, dict) else None
    yield Claim(subject="training", learning=Learning(learning_rate_min=lowest))
    yield Claim(subject="links", collective=Collective(wrong_elements=numbers.count("exchange_wrong_elements")))


def missed(run: Run) -> dict[str, list[str]]:
    """Return the strategies that did not run."""
    return {"strategies": [row["strategy"] for row in rows_of(run, ran=False) if row["status"] != "ok"]}


def reading(run: Run) -> list[str]:
    """Return sentences: the fastest way, what the others cost, bottleneck and advice."""
    rows = rows_of(run)
    if not rows:
        return []
    sentences = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = sorted((row for row in rows if row["model"] == model), key=lambda row: -float(row["samples_per_s"]))
        best, single = own[0], next((row for row in own if row["strategy"] == "single"), None)
        text = (
            f"{model} ({best['parameters']:,} parameters) trains fastest by {bottleneck.name(best)}: {quantity(best['samples_per_s'])} "
            f"samples/s, {quantity(best['tokens_per_s'])} tokens/s on {counted(best['world'], 'rank')}"
        )
        if single and single is not best:
            ratio = best["samples_per_s"] / single["samples_per_s"]
            text += f", {ratio:.2f} × one device ({ratio / best['world']:.0%} of {best['world']} times)"
        if len(own) > 1:
            text += f"; the slowest is {bottleneck.name(own[-1])} with {quantity(own[-1]['samples_per_s'])} samples/s"
        sentences.append(text + ".")
    return [*sentences, *_largest(run), *bottleneck.sentences(run)]


def _largest(run: Run) -> list[str]:
    largest = run.result.facts.get("largest_batch") if run.result else None
    if not largest:
        return []
    if not largest["batch"]:
        none = "Not even one sample fits one device."
        return [none if largest["complete"] else "The search for the largest batch found none in its time."]
    more = "" if largest["complete"] else "; the search ended with its share of the budget"
    return [
        f"{largest['batch']:,} samples are the largest batch of one device that was found, {largest['below']:,} do not fit or were not tried{more}."
    ]
