"""What a run means: do the programs give torch's numbers, within parity's tolerances, and which time pays when."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchlib.benchmarks.compiled.config import REFERENCE, CompiledConfig, members
from benchlib.core.text import quantity
from benchlib.judge.baselines import Comparison, regression_checks
from benchlib.judge.checks import Ask, Check, agreement_check, asks, budget_check, finite_check
from benchlib.judge.impossible.own import Numbers, OwnClaims
from benchlib.judge.numbers import within
from benchlib.judge.regression import RegressionLimit
from benchlib.results.run import Result, Run
from benchlib.workloads import numerics

GRADIENTS = 1e-6  # relative L2 norm over all gradients, of the requirement
SHOWN = ("possible values",)
Rows = Sequence[Mapping[str, Any]]


def lacks(table: str, row: Mapping[str, Any], column: str) -> bool:
    """Say whether a null has a reason, which its row states."""
    if table == "programs":  # that of the replicas is the graph of the joint program
        return column == "export_s" and row.get("program") == "replicas"
    if table in ("runtimes", "targets"):
        return row.get("status") in ("SKIPPED", "FAIL") and bool(row.get("reason"))
    few = row.get("ci_low") is None and row.get("ci_high") is None  # rounds have no interval
    return table == "executors" and column in ("ci_low", "ci_high") and few


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


def _parity(name: str) -> Any:
    return getattr(numerics, {"MOST_EASED": "MAX_EASED"}.get(name, name))


def tolerance(quantity_name: str) -> float:
    """Return parity's limit of an fp32 member on a CPU; ``LOGITS``, ``COSINE`` or ``CURVE`` of its tolerances."""
    return float(_parity("limit")("cpu", "fp32", _parity(quantity_name)).value)


def eased(limit: float, reference_error: float) -> float:
    """Return a limit that the reference's own distance to double precision eases, as far as parity's limits are."""
    return float(max(limit, min(_parity("TRUTH_FACTOR") * reference_error, _parity("MOST_EASED") * limit)))


def _holds(difference: float, limit: float, reference_error: float) -> bool:
    """Whether a difference is within its eased limit; a reference that is itself farther off than any proves nothing."""
    return within(reference_error, _parity("MOST_EASED") * limit) and within(difference, eased(limit, reference_error))


def checks(run: Run, comparison: Comparison) -> list[Check]:
    """Judge a run that has a result."""
    result, config, stated = _result(run), run.config, OwnClaims(Numbers.of_run(run))
    assert isinstance(config, CompiledConfig)
    tables = result.tables
    gradients = Ask("gradients", "Does the joint program give autograd's gradients?")
    return [
        _programs(tables.get("programs", []), config.models),
        _flops(tables.get("programs", [])),
        gradients.by(_gradients, tables.get("gradients", []), 1),
        _replicas(tables.get("gradients", []), config.world_size),
        _curve(tables.get("curve", []), config.train_steps),
        _runtimes(tables.get("runtimes", [])),
        _executors(tables.get("executors", []), config),
        finite_check(stated),
        agreement_check(stated, SHOWN),
        budget_check(run),
        *regression_checks(run, limits(run), comparison),
    ]


@asks("programs", "Does XLA give torch's numbers from the text of every model?")
def _programs(ask: Ask, rows: Rows, models: Sequence[str]) -> Check:
    """Compare each converted model in XLA with eager torch: largest difference and cosine."""
    by_name = {row["program"]: row for row in rows if "max_abs" in row}
    missing = [model for model in models if model not in by_name]
    if missing:
        return ask.fact(False, f"no result of {', '.join(missing)}")
    return _logits(ask, {model: by_name[model] for model in models})


def _logits(ask: Ask, rows: Mapping[str, Mapping[str, Any]]) -> Check:
    """Compare logits of several names with eager torch's, within parity's limits."""
    logits, cosine = tolerance("LOGITS"), tolerance("COSINE")
    errors = {name: row.get("reference_error", 0.0) for name, row in rows.items()}  # unknown: nothing is eased
    wrong = [
        name
        for name, row in rows.items()
        if not _holds(row["max_abs"], logits, errors[name]) or not within(row["one_minus_cos"], cosine)
    ]
    worst = max(rows, key=lambda name: rows[name]["max_abs"])
    largest = rows[worst]["max_abs"]
    own = f"; eager itself is {errors[worst]:.1e} from double precision" if errors[worst] else ""
    cosines = max(row["one_minus_cos"] for row in rows.values())
    reason = f"at most {largest:.1e} apart ({worst}{own}), 1 - cosine at most {cosines:.0e}"
    reason += f"; beyond: {', '.join(wrong)}" if wrong else ""
    return ask.fact(not wrong, reason, limit=f"<= {logits:g} and {cosine:g}, eased", value=largest)


@asks("FLOPs", "Does the text have the FLOPs of dots that the formula gives?")
def _flops(ask: Ask, rows: Rows) -> Check:
    counted = next((row for row in rows if "formula_flops" in row), None)
    if counted is None:
        return ask.skipped("BERT is not among the models")
    forward, formula = counted["dot_flops"], counted["formula_flops"]
    joint = {row["program"]: row["dot_flops"] for row in rows}["joint"]
    reason = f"forward {forward:,} (formula {formula:,.0f}), forward and backward {joint:,}"
    same = forward == formula and joint == 3 * forward
    return ask.fact(same, reason + (": three times as many" if same else ""))


def _gradients(ask: Ask, rows: Rows, replicas: int) -> Check:
    row = next((row for row in rows if row["replicas"] == replicas), None)
    if row is None:
        return ask.fact(False, "no gradients were computed")
    relative, error, equal = row["relative"], row["reference_error"], row.get("replicas_equal", True)
    reason = f"{relative:.1e} apart over {row['parameters']} parameters (the reference itself {error:.1e} from double precision)"
    reason += "" if equal else "; replicas differ from each other"
    return ask.fact(
        _holds(relative, GRADIENTS, error) and equal, reason, limit=f"<= {eased(GRADIENTS, error):.1e}", value=relative
    )


@asks("data parallel", "Do replicas with all_reduce in the program give DDP's gradients?")
def _replicas(ask: Ask, rows: Rows, ranks: int) -> Check:
    if ranks == 1:
        return ask.skipped("one rank has nobody to exchange with")
    return _gradients(ask, rows, ranks)


@asks("training", "Does training through the program follow the loss curve of eager torch?")
def _curve(ask: Ask, rows: Rows, steps: int) -> Check:
    if not steps:
        return ask.skipped("train_steps = 0")
    limit = tolerance("CURVE")
    if len(rows) != steps:
        return ask.fact(False, f"{len(rows)} losses for {steps} steps")
    worst = max(rows, key=lambda row: abs(row["eager"] - row["xla"]))
    value = abs(worst["eager"] - worst["xla"])
    reason = f"at most {value:.1e} apart (step {worst['step']}), loss {rows[0]['xla']:.3f} to {rows[-1]['xla']:.3f}"
    return ask.fact(within(value, limit), reason, limit=f"<= {limit:g}", value=value)


@asks("runtimes", "Do XLA, IREE and the reference interpreter give the same numbers from one file?")
def _runtimes(ask: Ask, rows: Rows) -> Check:
    computed = [row for row in rows if row["status"] == "computed"]
    if not computed:
        return ask.skipped("; ".join(row["reason"] for row in rows) or "runtimes is empty")
    limit, cosine = tolerance("LOGITS"), tolerance("COSINE")
    same = all(within(row["max_abs"], limit) and within(row["one_minus_cos"], cosine) for row in computed)
    reason = ", ".join(f"{row['runtime']} {row['max_abs']:.1e}" for row in computed)
    absent = [row["runtime"] for row in rows if row["status"] != "computed"]
    reason += f"; SKIPPED: {', '.join(absent)}" if absent else ""
    return ask.fact(same, reason, limit=f"<= {limit:g}")


@asks("executors", "Do the timed executors compute the same, within parity's limits?")
def _executors(ask: Ask, rows: Rows, config: CompiledConfig) -> Check:
    """Compare what the timed executors compute; one that does not gate in parity is shown there and not judged here."""
    absent = {row["executor"] for row in rows if row["status"] == "SKIPPED"}
    names = [name for name in config.executors if members()[name].gates and name not in absent]
    timed = {(row["executor"], row["batch"], row["length"]): row for row in rows if row["status"] == "timed"}
    wanted = {
        f"{name} at {batch} x {length}": (name, batch, length) for name in names for batch, length in config.shapes
    }
    missing = [label for label, key in wanted.items() if key not in timed]
    if missing:
        return ask.fact(False, f"not timed: {', '.join(missing)}")
    return _logits(ask, {label: timed[key] for label, key in wanted.items()})


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
