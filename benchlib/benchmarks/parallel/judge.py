"""What a run means: strategies against one device, their losses beside each other, numbers against the possible, the reading."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchlib.benchmarks.parallel import bottleneck, scaling
from benchlib.benchmarks.parallel.config import PROOF_STEPS, ParallelConfig
from benchlib.core.stats import LEAST_FOR_INTERVAL
from benchlib.core.text import counted, quantity
from benchlib.judge.baselines import Comparison, regression_checks
from benchlib.judge.checks import (
    Ask,
    Check,
    agreement_check,
    asks,
    budget_check,
    finite_check,
    right_results_check,
    rule_check,
)
from benchlib.judge.impossible.claim import Claim, Collective, Compute, Learning, Speed
from benchlib.judge.impossible.own import Numbers, OwnClaims
from benchlib.judge.numbers import count, number, within
from benchlib.judge.regression import RegressionLimit
from benchlib.results.run import Run

SHOWN = ("learning rate", "below the peak", "right results")
LOSS_FP64, WEIGHT_FP64, FP32 = 1e-12, 1e-9, 1e-5  # how far from one device; rounding alone is 1e-15, 1e-11 and 5e-7
RECOMPUTED = 1e-12
# Losses of the measured model, as a share: sums in another order over some steps. Measured: below 1e-6, in bf16 2e-3.
LOSSES = {"fp32": 1e-4, "bf16": 2e-2}
Row = dict[str, Any]


def lacks(table: str, row: Mapping[str, Any], column: str) -> bool:
    """Say whether a null has a reason, row by row as ``measure``, ``proofs``, ``run`` and ``scaling`` write them."""
    match column:
        case "step_ci_low" | "step_ci_high" | "samples_per_s_low" | "samples_per_s_high":
            return within(row.get("n"), LEAST_FOR_INTERVAL - 1)
        case "loss_error" | "weight_error":
            return row.get("fp64") is False
        case "comm_hidden_share":
            return row.get("comm_s") == 0
        case "forward_s":
            return bool(row.get("schedule"))
        case "bubble_s" | "bubble_share":
            return not row.get("schedule") or row.get("pipeline") == 1
        case "predicted_step_s" | "compute_s":
            return bool(row.get("unpredicted"))
        case "alpha_s" | "beta_s_per_byte":
            return bool(row.get("reason"))
    return table == "batches" and column in ("peak_gb", "samples_per_s") and bool(row.get("reason"))


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
    config, stated = run.config, OwnClaims(Numbers.of_run(run))
    return [
        _ran(run),
        *_proofs(config, rows_of(run)),
        _losses(config, rows_of(run)),
        _counted(rows_of(run)),
        _recomputed(run),
        right_results_check(stated, config.world_size, "collectives right"),
        rule_check("learning rate", "Was the learning rate above zero in every step?", "learning rate", stated),
        finite_check(stated),
        rule_check("possible speed", "Is every strategy's FLOP rate below the measured peak?", "below the peak", stated),
        agreement_check(stated, SHOWN),
        *bottleneck.checks(run),
        budget_check(run),
        *regression_checks(run, limits(run), comparison),
    ]  # fmt: skip


@asks("strategies ran", "Did the strategies run that fit this machine?")
def _ran(ask: Ask, run: Run) -> Check:
    rows = rows_of(run, ran=False)
    done = [row["key"] for row in rows if row["status"] == "ok"]
    left = [f"{row['strategy']}: {row['reason']}" for row in rows if row["status"] != "ok"]
    reason = f"{len(done)} ran" + (f"; not these: {'; '.join(left)}" if left else "")
    return ask.fact(bool(done) and all(row["status"] in ("ok", "skipped") for row in rows), reason)


def _proofs(config: ParallelConfig, rows: list[Row]) -> list[Check]:
    weights = f"Are losses and weights those of a single device after {PROOF_STEPS} steps, up to the rounding of fp64?"
    gradients = "Are losses and gradients those of a single device, up to the rounding of fp32?"
    return [
        Ask("equal to one device in fp64", weights).by(_proved, config, rows, {"loss_error": LOSS_FP64, "weight_error": WEIGHT_FP64}),
        Ask("equal to one device in fp32", gradients).by(_proved, config, rows, {"loss_error_fp32": FP32, "gradient_error": FP32}),
    ]  # fmt: skip


def _proved(ask: Ask, config: ParallelConfig, rows: list[Row], limits: dict[str, float]) -> Check:
    """Check the differences of every strategy; one that ran without a proof fails, unless proofs were switched off."""
    if not config.prove:
        return ask.skipped("prove = false")
    if "weight_error" in limits:
        rows = [row for row in rows if row["fp64"] is not False]
    if not rows:
        return ask.skipped("no strategy ran in this precision")
    errors = [
        (row[column], limit, f"{row['key']}: {column.replace('_', ' ')}")
        for row in rows
        for column, limit in limits.items()
    ]
    wrong = [f"{what} {value:.2g}, at most {limit:g}" for value, limit, what in errors if not within(value, limit)]
    worst, _, where = max(errors, key=lambda error: error[0] / error[1])
    limit_text = ", ".join(f"{column.replace('_', ' ')} <= {limit:g}" for column, limit in limits.items())
    return ask.fact(
        not wrong, "; ".join(wrong) or f"{len(rows)} strategies, the farthest {where} {worst:.2g}", limit=limit_text
    )


@asks("same losses", "Do all strategies of a model compute the same losses in the measured steps?")
def _losses(ask: Ask, config: ParallelConfig, rows: list[Row]) -> Check:
    """Compare the losses of the measured steps: the same model on the same batches, spread in different ways."""
    if config.dropout:
        return ask.skipped("dropout draws other random numbers in each strategy")
    limit, first, apart = LOSSES[config.precision], dict[str, Row](), dict[str, float]()
    for row in rows:
        reference = first.setdefault(row["model"], row)
        pairs = list(zip(row["losses"], reference["losses"], strict=True))
        if row is not reference:
            apart[row["key"]] = max(abs(value / expected - 1) for value, expected in pairs)
    if not apart:
        return ask.skipped("one strategy ran")
    wrong = [key for key, share in apart.items() if not within(share, limit)]
    worst = max(apart.values())
    reason = f"apart by at most {worst:.1e} in {len(apart)} strategies" + (f": {', '.join(wrong)}" if wrong else "")
    return ask.fact(not wrong, reason, limit=f"<= {limit:g}", value=worst)


@asks("parameter count", "Do the ranks together hold as many parameters as the shape has?")
def _counted(ask: Ask, rows: list[Row]) -> Check:
    wrong = [
        f"{row['key']} holds {row['counted_parameters']:,} of {row['parameters']:,}"
        for row in rows
        if row["counted_parameters"] != row["parameters"]
    ]
    counts = {f"{row['model']}: {row['parameters']:,}" for row in rows}
    return ask.fact(bool(rows) and not wrong, "; ".join(wrong or sorted(counts)))


@asks("recomputed activations", "Are activations that are computed again the same ones, dropout included?")
def _recomputed(ask: Ask, run: Run) -> Check:
    assert isinstance(run.config, ParallelConfig) and run.result is not None
    if not run.config.checkpointing:
        return ask.skipped("checkpointing = false")
    error = run.result.facts["checkpointing_error"]
    return ask.fact(
        within(error, RECOMPUTED), f"gradients apart by {error:.2g}", limit=f"<= {RECOMPUTED:g}", value=error
    )


def claims(numbers: Numbers) -> Iterator[Claim]:
    """Yield what each strategy states: its rate, its FLOPs."""
    for row in numbers.rows("strategies"):
        if row["status"] != "ok":
            continue
        peaks = numbers.facts["machine_peaks"]
        rate = peaks["matmul_flops"][row["precision"]]
        if row["world"] == 1:
            rate = max(rate, peaks["matmul_flops_alone"])
        compute = Compute(
            flops_per_s=row["flops"] / row["step_s"], mfu=row["mfu"], ranks=row["world"], precision=row["precision"],
            peak_precision=row["precision"], peak_flops=rate * row["world"], peak_kind="measured",
        )  # fmt: skip
        # A batch is stated for all ranks together: in tensor and pipeline parallelism no rank has a share of its own.
        speed = Speed(
            samples_per_s=row["samples_per_s"], tokens_per_s=row["tokens_per_s"], ranks=1, batch_per_rank=row["batch_size"],
            step_s=row["steps_s"], batches_full=True, sequence_length=row["seq_len"],
        )  # fmt: skip
        yield Claim(subject=row["key"], compute=compute, speed=speed)
    if numbers.facts:  # accepted runs keep none
        yield Claim(
            subject="training",
            learning=Learning(learning_rate_min=number(numbers.facts["learning_rates"]["min"], "learning_rates.min")),
        )
    # The rows are counted anew: the total must not be able to hide them.
    rows = [count(row["wrong_elements"], "wrong_elements") for row in numbers.rows("alpha_beta")]
    total = numbers.count("exchange_wrong_elements")
    wrong = None if total is None else max(sum(rows), total)
    yield Claim(subject="links", collective=Collective(wrong_elements=wrong))


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
    assert run.result is not None
    return [
        *sentences,
        *_largest(run),
        *bottleneck.sentences(run),
        *filter(None, [scaling.forecast(run.result.tables)]),
    ]


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
