"""What a run means: do the programs give torch's numbers, within parity's tolerances, and which time pays when."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchlib.benchmarks import BENCHMARKS
from benchlib.benchmarks.compiled.config import REFERENCE, CompiledConfig, members
from benchlib.core.text import quantity
from benchlib.judge.baselines import Comparison, regression_checks
from benchlib.judge.checks import Check, agreement_check, budget_check, fact_check, finite_check
from benchlib.judge.impossible.own import Numbers, OwnClaims
from benchlib.judge.regression import RegressionLimit
from benchlib.results.run import Result, Run

# Relative L2 norm over all gradients, of the requirement; eased as parity's limits are: by the reference's own error in fp32.
GRADIENTS = 1e-6
EASED, MOST = 3, 10
SHOWN = ("possible values",)
# Where a null has its reason: the joint program is not exported alone.
LACKS = {
    "programs": ("export_s",),
}


def lacks(table: str, _row: Mapping[str, Any], column: str) -> bool:
    """Say whether a null has a reason."""
    return column in LACKS.get(table, ())


def limits(run: Run) -> list[RegressionLimit]:
    """Return how much slower each executor may get."""
    assert run.result is not None
    return [
        RegressionLimit(metric=metric.name, share=0.5)
        for metric in run.result.metrics
        if metric.name.startswith("latency_ms_xla")
    ]


def _result(run: Run) -> Result:
    assert run.result is not None
    return run.result


def eased(limit: float, reference_error: float) -> float:
    """Return a limit that is at least three times the reference's own distance to double precision, at most ten times the given one."""
    return max(limit, min(EASED * reference_error, MOST * limit))


def tolerance(quantity_name: str) -> float:
    """Return parity's limit of an fp32 member on a CPU."""
    return float(BENCHMARKS["parity"].part("tolerances", "limit")("cpu", "fp32", quantity_name).value)


def checks(run: Run, comparison: Comparison) -> list[Check]:
    """Judge a run that has a result."""
    result, config, stated = _result(run), run.config, OwnClaims(Numbers.of_run(run))
    assert isinstance(config, CompiledConfig)
    tables = result.tables
    return [
        _programs(tables.get("programs", []), config.models),
        _flops(tables.get("programs", [])),
        _gradients(
            "gradients",
            "Does the joint program give autograd's gradients?",
            [row for row in tables.get("gradients", []) if row["replicas"] == 1],
        ),
        _replicas(tables.get("gradients", []), config.world_size),
        _curve(tables.get("curve", []), config.train_steps),
        _runtimes(tables.get("runtimes", []), config.runtimes),
        _executors(tables.get("executors", []), config),
        finite_check(stated),
        agreement_check(stated, SHOWN),
        budget_check(run),
        *regression_checks(run, limits(run), comparison),
    ]


def _skipped(name: str, question: str, reason: str) -> Check:
    return Check(name=name, kind="sanity", question=question, status="SKIPPED", reason=reason, gates=False)


def _programs(rows: Sequence[Mapping[str, Any]], models: Sequence[str]) -> Check:
    """Compare each converted model in XLA with eager torch: largest difference and cosine."""
    name, question = "programs", "Does XLA give torch's numbers from the text of every model?"
    by_name = {row["program"]: row for row in rows if "max_abs" in row}
    missing = [model for model in models if model not in by_name]
    if missing:
        return fact_check(name, question, False, f"no result of {', '.join(missing)}")
    logits, cosine = tolerance("logits max difference"), tolerance("logits cosine")
    wrong = [
        model for model in models
        if not by_name[model]["max_abs"] <= eased(logits, by_name[model]["reference_error"]) or not by_name[model]["one_minus_cos"] <= cosine
    ]  # fmt: skip
    worst = max(models, key=lambda model: by_name[model]["max_abs"])
    row = by_name[worst]
    reason = (
        f"at most {row['max_abs']:.1e} apart ({worst}; eager itself is {row['reference_error']:.1e} from double precision), "
        f"1 - cosine at most {max(by_name[model]['one_minus_cos'] for model in models):.0e}"
    )
    reason += f"; beyond: {', '.join(wrong)}" if wrong else ""
    return fact_check(
        name, question, not wrong, reason, limit=f"<= {logits:g} and {cosine:g}, eased", value=row["max_abs"]
    )


def _flops(rows: Sequence[Mapping[str, Any]]) -> Check:
    name, question = "FLOPs", "Does the text have the FLOPs of dots that the formula gives?"
    counted = next((row for row in rows if row.get("formula_flops")), None)
    if counted is None:
        return _skipped(name, question, "BERT is not among the models")
    joint = next((row["dot_flops"] for row in rows if row["program"] == "joint"), None)
    same = counted["dot_flops"] == counted["formula_flops"] and joint == 3 * counted["dot_flops"]
    reason = f"forward {counted['dot_flops']:,} (formula {counted['formula_flops']:,.0f}), forward and backward {joint or 0:,}: three times as many"
    return fact_check(name, question, same, reason if same else reason.replace(": three times as many", ""))


def _gradients(name: str, question: str, rows: Sequence[Mapping[str, Any]]) -> Check:
    if not rows:
        return fact_check(name, question, False, "no gradients were computed")
    row = rows[0]
    limit = eased(GRADIENTS, row["reference_error"])
    equal = row.get("replicas_equal", True)
    reason = f"{row['relative']:.1e} apart over {row['parameters']} parameters (the reference itself {row['reference_error']:.1e} from double precision)"
    reason += "" if equal else "; replicas differ from each other"
    return fact_check(
        name, question, row["relative"] <= limit and equal, reason, limit=f"<= {limit:.1e}", value=row["relative"]
    )


def _replicas(rows: Sequence[Mapping[str, Any]], ranks: int) -> Check:
    name, question = "data parallel", "Do replicas with all_reduce in the program give DDP's gradients?"
    if ranks == 1:
        return _skipped(name, question, "one rank has nobody to exchange with")
    return _gradients(name, question, [row for row in rows if row["replicas"] == ranks])


def _curve(rows: Sequence[Mapping[str, Any]], steps: int) -> Check:
    name, question = "training", "Does training through the program follow the loss curve of eager torch?"
    if not steps:
        return _skipped(name, question, "train_steps = 0")
    limit = tolerance("loss curve")
    if len(rows) != steps:
        return fact_check(name, question, False, f"{len(rows)} losses for {steps} steps")
    worst = max(rows, key=lambda row: abs(row["eager"] - row["xla"]))
    value = abs(worst["eager"] - worst["xla"])
    reason = f"at most {value:.1e} apart (step {worst['step']}), loss {rows[0]['xla']:.3f} to {rows[-1]['xla']:.3f}"
    return fact_check(name, question, value <= limit, reason, limit=f"<= {limit:g}", value=value)


def _runtimes(rows: Sequence[Mapping[str, Any]], asked: Sequence[str]) -> Check:
    name, question = "runtimes", "Do XLA, IREE and the reference interpreter give the same numbers from one file?"
    computed = [row for row in rows if row["status"] == "computed"]
    if not computed:
        reason = "; ".join(row["reason"] for row in rows) or "runtimes is empty"
        return _skipped(name, question, reason)
    limit, cosine = tolerance("logits max difference"), tolerance("logits cosine")
    wrong = [row["runtime"] for row in computed if not row["max_abs"] <= limit or not row["one_minus_cos"] <= cosine]
    reason = ", ".join(f"{row['runtime']} {row['max_abs']:.1e}" for row in computed)
    absent = [row["runtime"] for row in rows if row["status"] != "computed"]
    reason += f"; SKIPPED: {', '.join(absent)}" if absent else ""
    return fact_check(name, question, not wrong, reason, limit=f"<= {limit:g}")


def _executors(rows: Sequence[Mapping[str, Any]], config: CompiledConfig) -> Check:
    """Compare what the timed executors compute; one that does not gate in parity is shown there and not judged here."""
    name, question = "executors", "Do the timed executors compute the same?"
    timed = [row for row in rows if row["status"] == "timed" and members()[row["executor"]].gates]
    if len({(row["executor"], row["batch"], row["length"]) for row in timed}) < len(config.shapes):
        return fact_check(name, question, False, "an executor was not timed")
    limit = MOST * tolerance("logits max difference")  # of logits that reach 10: parity judges each member closely
    worst = max(timed, key=lambda row: row["max_abs"])
    return fact_check(
        name, question, worst["max_abs"] <= limit, f"at most {worst['max_abs']:.1e} from eager ({worst['executor']})", limit=f"<= {limit:g}",
        value=worst["max_abs"],
    )  # fmt: skip


def pays_after(row: Mapping[str, Any], base: Mapping[str, Any]) -> float | None:
    """Return the calls after which an executor's time to get ready is won back; None where a call is not faster."""
    won = base["wall_ms"] - row["wall_ms"]
    return max(0.0, row["ready_s"] - base["ready_s"]) * 1e3 / won if won > 0 else None


def reading(run: Run) -> list[str]:
    """Return what the numbers say."""
    result = _result(run)
    sentences = []
    rows = [row for row in result.tables.get("executors", []) if row["status"] == "timed"]
    for shape in dict.fromkeys((row["batch"], row["length"]) for row in rows):
        own = {row["executor"]: row for row in rows if (row["batch"], row["length"]) == shape}
        base = own[REFERENCE]
        for name, row in own.items():
            if name == REFERENCE:
                continue
            calls = pays_after(row, base)
            # The median over the rounds, as the tile has it: the ratio of the medians differs on a busy machine.
            begin = f"cpu_over_eager_{name}_b{shape[0]}_s{shape[1]}_"
            share = next((metric.value for metric in result.metrics if metric.name.startswith(begin)), None)
            of_eager = f"{quantity(share)} of eager's CPU time, " if share is not None else ""
            pays = "never pays: a call is not faster" if calls is None else f"pays after {calls:,.0f} calls"
            sentences.append(
                f"{name} at {shape[0]} x {shape[1]}: {quantity(row['wall_ms'])} ms, {of_eager}"
                f"ready after {quantity(row['ready_s'], 's')}, which {pays}; {row['peak_share']:.0%} of the measured peak."
            )
    if reduced := result.facts.get("all_reduce"):
        sentences.append(
            f"The text asks for {reduced['text']} all-reduces, one for each gradient and the loss; XLA merged them into {reduced['compiled']}."
        )
    sentences += [
        f"{row['executor']} did not run: {row['reason']}."
        for row in result.tables.get("executors", [])
        if row["status"] == "SKIPPED"
    ]
    sentences += [
        f"IREE for {row['target']}: {row['status']}{', ' + row['reason'] if row['reason'] else ''}."
        for row in result.tables.get("targets", [])
    ]
    return sentences
