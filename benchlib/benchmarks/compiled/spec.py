"""What a run of the compiled path states: whether the programs give torch's numbers, and which time pays when."""

from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

from benchlib.benchmarks.compiled.config import REFERENCE
from benchlib.core.text import stand_ins
from benchlib.spec.charts import Line, bars, lines
from benchlib.spec.checks import below, near
from benchlib.spec.spec import Bound, Metric, Show, Spec, each, run_metrics, run_table
from benchlib.spec.tables import Col, Ref, Rows, Table, cols, write
from benchlib.workloads.numerics import COSINE, CURVE, LOGITS, MAX_EASED, Limit, eased, limit

GRADIENTS = Limit(1e-6, "relative L2 norm over all gradients, of the requirement")
LOGITS_LIMIT, COSINE_LIMIT, CURVE_LIMIT = (limit("cpu", "fp32", name) for name in (LOGITS, COSINE, CURVE))
SLOWER = 0.5  # of the baseline's latency that XLA may lose
AT = "b{batch}_s{length}_{scope}"


def _eased(entry: Limit) -> list[Col]:
    """Return the reference's own distance to double precision, and the limit that it eases."""
    error = Col("reference_error", "error", "the reference's distance from fp64")
    return [error, Col("limit", "error", of=lambda own: eased(entry, "fp32", 0.0, own).value, needs="reference_error")]


def _pays(own_ms: list[float], ready_s: float, eager_ms: float, eager_ready_s: float) -> str:
    """Say after how many calls an executor's time to get ready is won back."""
    won = eager_ms - median(own_ms)
    return f"after {max(0.0, ready_s - eager_ready_s) * 1e3 / won:,.0f} calls" if won > 0 else "never"


differing = cols("max_abs one_minus_cos", "error")
programs = Table(
    "programs",
    "{program}",
    [
        *cols("program"),
        *cols("operations arguments", "count"),
        Col("text_bytes", "B", "text"),
        *cols("dot_flops formula_flops", "FLOP"),
        *cols("argument_bytes temporary_bytes", "B"),
        *cols("export_s convert_s compile_s", "s"),
        *differing,
        *_eased(LOGITS_LIMIT),
    ],
)
gradients = Table(
    "gradients",
    "{gradients}",
    [
        *cols("gradients"),
        *cols("replicas parameters", "count"),
        Col("unequal", "count", "gradients that differ between replicas"),
        Col("relative", "error", "relative difference", quality=1e-6),
        *_eased(GRADIENTS),
    ],
)
apart = Col("apart", "error", "difference", lambda own, other: abs(own - other), "xla eager", derived=False)
curve = Table("curve", "step {step}", [*cols("step eager xla", "number"), apart])
because = Col("because", "", "why", str, "reason")
runtimes = Table("runtimes", "{runtime}", [*cols("runtime what"), *differing, *cols("compile_s run_s", "s"), because])
targets = Table("targets", "{target}", [Col("target"), Col("module_bytes", "B", "module"), because])
executors = Table(
    "executors",
    "{executor} at {batch} x {length}",
    [
        *cols("executor what"),
        *cols("batch length", "number"),
        Col("wall_ms", "ms", "latency", samples=True),
        Col("cpu_ms", "ms", "CPU time", samples=True),
        Col("cpu_over_eager", "number", "CPU time over eager's", samples=True, derived=True),
        Col("ready_s", "s", "ready after"),
        *cols("eager_ms", "ms"),
        *cols("eager_ready_s", "s"),
        Col("pays", of=_pays, needs="wall_ms ready_s eager_ms eager_ready_s"),
        *differing,
        *_eased(LOGITS_LIMIT),
        Col("scope", of=str, needs="stand_in"),
        because,
    ],
)
run = run_table(*cols("jax stand_in"))
converted = programs.where(program=("bert", "encdec", "llama"))
one, all_ranks = gradients.where(replicas=1), gradients.unless(replicas=1)
ranks = gradients.pick(lambda run, rows: [row for row in rows if row.get("replicas") == run.world])
gating = executors.unless(gates=False)
xla = executors.where(executor="xla").ran()
others = executors.unless(executor=REFERENCE)


def _apart(table: Table, column: str, limit: Limit, *more: tuple[Ref, float]) -> list[tuple[Ref, Any]]:
    """Return how far a column may be apart; a reference that is itself farther off than any may be proves nothing."""
    return [(table[column], table["limit"]), (table["reference_error"], MAX_EASED * limit.value), *more]


def _logits(table: Table) -> list[tuple[Ref, Any]]:
    return _apart(table, "max_abs", LOGITS_LIMIT, (table["one_minus_cos"], COSINE_LIMIT.value))


def _relative(table: Table) -> list[tuple[Ref, Any]]:
    return _apart(table, "relative", GRADIENTS, (table["unequal"], 0.0))


def _latency(name: str, **more: Any) -> Iterator[Metric]:
    """Yield the metrics of one executor, or of all others by the name of the column."""
    table = executors.unless(executor=(REFERENCE, "xla")) if "{" in name else executors.where(executor=name)
    at = ", {batch} x {length}"
    yield Metric(f"latency_ms_{name}_{AT}", table["wall_ms"], f"Latency of {name}{at}", "{what}", "lower", **more)
    if name != REFERENCE:
        more.pop("may_lose", None)
        label = f"CPU time of {name} over eager's{at}"
        yield Metric(f"cpu_over_eager_{name}_{AT}", table["cpu_over_eager"], label, "by round", "lower", **more)


def _losses(run: Rows) -> str:
    most = max(curve["apart"].finite(row, run) or 0.0 for row in curve.rows(run))
    return f"Losses of {len(curve.rows(run))} steps are {'within ' + write(most, 'error') if most else 'equal'}"


def _absent(run: Rows) -> Iterator[str]:
    absent = {row["executor"]: row["reason"] for row in executors.where(status="skipped").rows(run)}
    yield from (f"{name} did not run: {reason}." for name, reason in absent.items())
    for row in targets.rows(run):
        yield f"IREE for {row['target']}: {row.get('reason') or targets['module_bytes'].text(row, run)}."
    for row in runtimes.where(status="skipped").rows(run):
        yield f"Not computed by {row['runtime']}: {row['reason']}."


def _warnings(run: Rows) -> list[str]:
    return stand_ins([run.run.get("stand_in")])


lower = partial(Metric, better="lower")
NO_BOUND = "no bound was measured; {cpu_over_eager} of eager's CPU time"
SPEC = Spec(
    tables=[programs, gradients, curve, runtimes, targets, executors, run],
    metrics=[
        *_latency("xla", headline=True, may_lose=SLOWER),
        *_latency(REFERENCE, headline=True),
        *_latency("{executor}"),
        lower(
            "convert_s_{program}",
            converted["convert_s"],
            "Conversion of {program}",
            "FX graph to text, without torch.export",
        ),
        lower("max_abs_{program}", converted["max_abs"], "{program}: difference", "XLA against eager, fp32"),
        lower("gradient_relative", one["relative"], "Gradients, relative difference", "{gradients}", headline=True),
        lower("ddp_gradient_relative", all_ranks["relative"], "Gradients against DDP", "{gradients}"),
        lower(
            "curve_max_abs",
            curve.most("apart")["apart"],
            "Loss curve, largest difference",
            "XLA against eager, step {step}",
        ),
        *run_metrics(run),
    ],
    checks=[
        below("programs", "Does XLA give torch's numbers from the text of every model?", *_logits(converted)),
        near(
            "FLOPs",
            "Does the text have the FLOPs of dots that the formula gives, forward and backward three times as many?",
            (programs["dot_flops"], programs["formula_flops"]),
        ),
        below("gradients", "Does the joint program give autograd's gradients?", *_relative(one)),
        below(
            "data parallel",
            "Do replicas with all_reduce in the program give DDP's gradients?",
            *_relative(ranks),
            unless=lambda run: "one rank has nobody to exchange with" if run.world == 1 else "",
        ),
        below(
            "training",
            "Does training through the program follow the loss curve of eager torch?",
            (curve["apart"], CURVE_LIMIT.value),
            unless=lambda run: "" if run.config.train_steps else "train_steps = 0",
        ),
        below(
            "runtimes",
            "Do XLA, IREE and the reference interpreter give the same numbers from one file?",
            (runtimes["max_abs"], LOGITS_LIMIT.value),
            (runtimes["one_minus_cos"], COSINE_LIMIT.value),
            unless=lambda run: "" if run.config.runtimes else "runtimes is empty",
        ),
        below("executors", "Do the timed executors compute the same, within parity's limits?", *_logits(gating)),
    ],
    says=[
        each(
            others.ran(),
            "{executor} at {batch} x {length}: {wall_ms}, {cpu_over_eager} of eager's CPU time, ready after {ready_s}, "
            "which pays {pays}.",
        ),
        _absent,
    ],
    shows=[
        Show(
            "Programs",
            programs,
            "program operations arguments text_bytes dot_flops temporary_bytes export_s convert_s compile_s max_abs",
        ),
        Show("Gradients", gradients, "gradients parameters relative reference_error limit"),
        Show("Executors", executors, "executor batch length wall_ms cpu_ms ready_s pays max_abs because"),
        Show("One file, several runtimes", runtimes),
        Show("Compiled for hardware that is not here", targets),
    ],
    charts=[
        bars(
            "latency",
            executors.ran()["wall_ms"],
            least=True,
            title="Fastest: {executor} at {batch} x {length}, {wall_ms}",
            empty="Nothing was timed.",
        ),
        lines(
            "curve",
            Line(curve["eager"], ""),
            Line(curve["xla"], ""),
            x="step",
            y="loss",
            title=_losses,
            empty="Nothing was trained: train_steps = 0.",
            log=False,
            even=True,
        ),
    ],
    verified=lambda run: ["logits, gradients, replicas and a loss curve against eager torch"],
    bounds=[Bound("XLA, one call of {batch} × {length}", xla["wall_ms"], None, NO_BOUND, "compiling pays {pays}")],
    warnings=_warnings,
    ways=("executors", "runtimes", "targets", "gelu", "rounds"),
)
