"""What a training on SQuAD states: learning, scores and targets, speed, the exchange of gradients, the split."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import methodcaller
from pathlib import Path, PurePath
from typing import Any

from benchlib.config.schema import EMBEDDED_MODEL
from benchlib.core.definitions import algbw_samples, busbw_samples
from benchlib.core.errors import UserError
from benchlib.core.files import read_object
from benchlib.core.text import counted, listing, stand_ins
from benchlib.judge.checks import Check as Judged
from benchlib.judge.references import registry
from benchlib.spec.charts import bars
from benchlib.spec.checks import Check, below, compare, near, reached, rule, zero
from benchlib.spec.spec import Published, Show, Spec, each
from benchlib.spec.tables import Col, Ref, Row, Rows, Table, cols
from benchlib.workloads import model_files
from benchlib.workloads import training_spec as training
from benchlib.workloads.training_spec import higher, lower, series

F1_TOLERANCE = 0.5  # points around the published F1; the spread by seed is 0.16 to 0.24, so less would be noise
DISTANCE = 1.1  # times the best split; measured over many splits the two nearest to the best are within it
PREDICTED = 0.25  # of a rank's compute time; beyond it the training plans again
BASE = "bert-base-uncased"
BASE_MINUTES = 45.0  # goal for its whole training; references.yaml has the times that others report
FORMULA = "counted by torch, forward and backward, on the padded shapes: what the device does"
# Hub names and the parameters of the matrix products of their layers, L (4 h² + 2 h f): a folder's name alone proves nothing.
MODELS = {
    BASE: ("BERT-base uncased", 12 * (4 * 768**2 + 2 * 768 * 3072)),
    "bert-large-uncased": ("BERT-large uncased", 24 * (4 * 1024**2 + 2 * 1024 * 4096)),
}
DATA = {"squad": "SQuAD v1.1", "minisquad": "generated questions", "files": "the user's files"}
PARAMETERS_SLACK = 0.02  # the head and the pooler are counted by some and not by others


def _whole(value: float, share: float) -> float | None:
    return value if share >= 1 else None


BUS, RATE = partial(busbw_samples, "all_reduce"), "collective.{}_gbytes_per_s".format
run = training.run_of_training(
    *cols("data checkpoint_faults"),
    *cols("train_questions eval_questions shared_questions matmul_parameters bucket_bytes", "count"),
    Col("f1", "points", "F1", role="learning.f1", quality=0.5),
    Col("exact_match", "points", "exact match", role="learning.exact_match", quality=0.5),
    Col("whole_f1", "points", "F1", _whole, "f1 epoch_share"),
    Col("whole_loss", "number", "final loss", _whole, "loss_final epoch_share"),
    Col("whole_minutes", "min", "whole training", lambda s, share: _whole(s / 60, share), "train_s epoch_share"),
    *cols("features_s evaluate_s", "s"),
    series("exchange_us", "us", "all-reduce"),
    Col("message_bytes", "B", "gradients"),
    Col("wrong_elements", "count", role="collective.wrong_elements"),
    series("busbw_gbps", "Gbps", "bus bandwidth", BUS, "message_bytes exchange_us world", role=RATE("busbw")),
    series("algbw_gbps", "Gbps", "algorithm bandwidth", algbw_samples, "message_bytes exchange_us", role=RATE("algbw")),
    Col("buckets", "", "", lambda sizes: ", ".join(f"{size / 1e6:.1f}" for size in sizes), "bucket_bytes"),
)


misses = Table("misses", "{question}", [*cols("id question prediction answers"), Col("f1", "points", "F1")])


def _idle(samples: int, most: int) -> str:
    """Say why a rank gets no samples; '' where it gets some."""
    if samples:
        return ""
    return "its memory does not hold one sample" if not most else "one sample alone would take it longer than a step"


of_rank = [
    *cols("rank", "number"),
    *cols("device"),
    *cols("threads", "count"),
    Col("work", "count", "work in the last step"),
    *cols("samples micro_batches most", "count"),
    Col("trained", "count", "samples trained on in a step"),
    *cols("expected_s own_s idle_s", "s"),
    Col("even_s", "s", "even, before the training"),
    *cols("step_s batch_s sample_s token_s", "s"),
    Col("off", "ratio", "compute time over predicted, less 1", lambda own, was: abs(own / was - 1), "own_s expected_s"),
    Col("idle", "", "", _idle, "samples most"),
]
shares = Table("shares", "rank {rank}", of_rank)
of_split = [
    *cols("from_step shares drifted", "count"),
    *cols("expected_s", "s"),
    Col("factor", "number"),
    Col("samples", "", "samples by rank", lambda counts: "+".join(map(str, counts)), "shares"),
    Col("first", "count", "", lambda step: step + 1, "from_step"),
]
splits = Table("splits", "from step {from_step}", of_split)
LAST = "best_s other_split_s"
of_last = [
    Col("best_s", "s", "the best split"),
    # Differences of measured times, which noise may turn.
    Col("other_split_s", "s", "another split than the best", signed=True),
    Col("differing_steps_s", "s", "steps that differ"),
    Col("exchange_s", "s", "exchange and the rest", signed=True),
    Col("calibration_s", "s", "calibration"),
    series("wait_shares", "ratio", "waiting for the slowest rank", derived=True),
    Col("distance", "number", "slowest rank over the best split", lambda best, more: 1 + more / best, LAST),
]
balance = Table("balance", "the last split", of_last)


def _target(name: str, ask: str, ref: Ref, asked: str, of: Callable[[Any], str] = lambda _: "", **more: Any) -> Check:
    """Ask for a target. It is left open for what stands in for the real thing, and where the user cut the training."""

    def why(rows: Rows) -> str:
        if getattr(rows.config, asked) is None:
            return ""
        if scope := of(rows.config):
            return f"the target is for a real model on SQuAD v1.1, not for {scope.strip('_').replace('_', ', ')}"
        short = ref.col.name.startswith("whole_") and rows.run.get("cut_by") == "max_steps"
        return "max_steps ended the training early; the target is for the whole training" if short else ""

    return reached(name, ask, ref, asked, unless=why, **more)


def _in_time(check: Check, rows: Rows) -> Judged:
    """Compare the time of the whole training with the target in minutes or, as information, with the goal for BERT-base."""
    config, ref, minutes = rows.config, run["whole_minutes"], rows.config.target_minutes
    asked = minutes is not None
    if not asked and (config.quality_scope() or PurePath(config.model).name != BASE):
        goal = f"the goal of {BASE_MINUTES:g} minutes is for BERT-base on the whole of SQuAD v1.1"
        return check.answer("SKIPPED", goal)
    limit, source = (minutes, f"target of the {config.tier} tier") if asked else (BASE_MINUTES, check.source)
    judged = compare(replace(check, over=[(ref, limit)], source=source), rows)
    return judged.model_copy(update={"limit": check.bound(limit, ref), "gates": asked})


def _no_stand_in(config: Any) -> str:
    """The target of the stand-in is that of its own weights."""
    return "" if config.quality_scope() == "_minisquad_tiny" else str(config.quality_scope())


QUALITY, SPEED_OF = methodcaller("quality_scope"), methodcaller("scope")
LOSS, FAST = "Is the final smoothed loss low enough?", "Is training throughput high enough?"
F1, SPEED_S = run["whole_f1"], training.TABLES[0]["samples_per_s"]
SPECIFIED = "specification of this benchmark; informs, since published trainings do not reach it"
FAST_ENOUGH, GOAL = "Does the whole training end within its target?", "goal of this benchmark for BERT-base"
SUM, MEMORY = "Is the all-reduce of the gradients fast enough?", "Does each rank stay within the memory target?"
LEARNT = "Did the model learn to match questions with their sentences?"
EMBEDDED = {"when": lambda config: config.data == "minisquad", "source": "target for the stand-in, not for BERT"}
TARGETS = [
    _target("final loss", LOSS, run["whole_loss"], "target_loss", QUALITY, sign="<", informs=True, source=SPECIFIED),
    _target("F1 target", "Does F1 on SQuAD v1.1 reach the target?", F1, "target_f1", QUALITY),
    _target("all-reduce throughput", SUM, run["busbw_gbps"], "target_allreduce_gbps", sign=">"),
    _target("training throughput", FAST, SPEED_S, "target_samples_per_s", SPEED_OF, sign=">"),
    replace(
        _target("training time", FAST_ENOUGH, run["whole_minutes"], "target_minutes", QUALITY, sign="<=", source=GOAL),
        judge=_in_time,
    ),
    _target("device memory", MEMORY, run["device_memory_gb"], "target_memory_gb", sign="<"),
    _target("F1 on embedded data", LEARNT, F1, "target_f1_embedded", _no_stand_in, **EMBEDDED),
]


def _reference(check: Check, rows: Rows) -> Judged:
    """Compare F1 with the published one: informative, since the seed alone moves it by 0.2 points."""
    row, published = rows.run, rows.config.reference_f1
    if row["quality"] or published is None:
        return check.answer("SKIPPED", "only a whole training on SQuAD v1.1 is compared, with reference_f1")
    inside = abs(row["f1"] - published) <= F1_TOLERANCE
    cited = registry().cite_value("f1", published) or "reference_f1 of the config; no figure of the registry"
    reason = f"{row['f1']:.2f} is {row['f1'] - published:+.2f} from the published {published:.2f}"
    limit = f"{published:.1f} ± {F1_TOLERANCE}"
    return check.answer("PASS" if inside else "FAIL", reason, value=row["f1"], limit=limit, source=cited)


def _newest(check: Check, rows: Rows) -> Judged:
    """Name newer checkpoints that were damaged: what was trained after the one that is left was trained again."""
    faults, step = rows.run["checkpoint_faults"], rows.run["resumed_step"]
    begun = f"the training went on from step {step:,}" if step else "the training started from the beginning"
    if not faults:
        return check.answer("PASS", begun)
    return check.answer("AMBIGUOUS", f"{begun}, since newer checkpoints are damaged: {'; '.join(map(str, faults))}")


def _warnings(rows: Rows) -> list[str]:
    config, row, sentences = rows.config, rows.run, []
    if config.planted_work:
        times = ",".join(map(str, config.planted_work))
        turned = f", in reverse order after {config.planted_drift_step} steps" if config.planted_drift_step else ""
        sentences.append(f"The ranks did their work {times} times on purpose{turned}, and counted it once.")
    if row.get("shared_questions"):
        of_all = "The model trained on {shared_questions} of {eval_questions} evaluation questions"
        sentences.append(run.text(f"{of_all}: of these, the scores say what was memorised.", row, rows))
    if row.get("restarts"):
        started = counted(row["restarts"], "time")
        sentences.append(f"The ranks were started again {started}: total_s has the failures in it, no speed has.")
    return [*stand_ins(str(row.get("quality")).split("_")), *sentences, *training.warnings(rows)]


def _split(rows: Rows) -> list[str]:
    """Say what the split gives, and what it saves."""
    parts = [shares.text("rank {rank} {samples}", row, rows) for row in shares.rows(rows)]
    sentences = [f"Of each global batch the split gives {listing(parts)} samples."] if parts else []
    seconds = [
        max((shares[name].finite(row, rows) or 0.0 for row in shares.rows(rows)), default=0) for name in EVEN_OWN_S
    ]
    if all(seconds):
        words = "The slowest rank works {1:.3g} s of a step; with even shares it took {0:.3g} s before the training."
        sentences.append(words.format(*seconds))
    return sentences


def _losses(rows: Rows) -> list[str]:
    """Say where published trainings end, if the final loss is compared with the specification's."""
    if rows.config.target_loss is None or rows.config.quality_scope():
        return []
    early, late = (
        [registry().figure(f"bert-base-loss-{name}-{epochs}") for name in ("arun", "newcomb")] for epochs in (2, 3)
    )
    words = [" and ".join(item.text for item in items) for items in (early, late)]
    cited = listing([registry().sources[item.source].title for item in late])
    return [
        f"Published losses of {BASE} on SQuAD v1.1 are {words[0]} after 2 of 3 epochs, {words[1]} after 3 ({cited})."
    ]


def _refuse(config: Any) -> None:
    """Raise ``UserError`` for a model folder that is not whole, and for a run that cannot be resumed."""
    model_files.check(config.model, weights=config.init != "random")
    if not config.resume:
        return
    folder = Path(config.resume)
    benchmark = read_object(folder / "config.json", {"benchmark": str})["benchmark"]
    place = f"resume = {folder}: "
    if benchmark != config.benchmark:
        raise UserError(f"{place}a run of {benchmark}; give the folder of an interrupted run of {config.benchmark}")
    if not (folder / "checkpoints").is_dir():
        raise UserError(f"{place}this run left no checkpoint; start a new one (checkpoint_every=N stores some)")
    if (status := folder / "status.json").exists() and read_object(status, {"outcome": str})["outcome"] == "complete":
        raise UserError(f"{place}this run is finished, nothing is left to train; start a new run without --resume")


def _trained(row: Row, rows: Rows) -> Row:
    """Return the conditions of a score; the batch that counts is the one of a step, over all devices."""
    config, missing = rows.config, []
    if row["epoch_share"] < 1:
        missing.append(f"cut by {'the ' * (row['cut_by'] == 'budget')}{row['cut_by']} to {row['epoch_share']:.0%}")
    if config.epochs < 1:
        missing.append(f"{config.epochs:g} epochs")
    if config.data != "minisquad" and (config.train_questions or config.eval_questions):
        missing.append("shortened set")
    whole = "generated set" if config.data == "minisquad" else "whole"
    return {**_work(row, rows), "training": ", ".join(missing) or whole, "batch": config.global_batch}


def _work(row: Row, rows: Rows) -> Row:
    config = rows.config
    name, parameters = MODELS.get(PurePath(config.model).name, (config.model, None))
    if parameters and abs(row["matmul_parameters"] / parameters - 1) > PARAMETERS_SLACK:
        name = f"{config.model} with {row['matmul_parameters']:,} parameters"
    model = "the embedded stand-in" if config.model == EMBEDDED_MODEL else name
    return {
        "model": f"{model}, random weights" if config.init == "random" else model,
        "data": DATA[config.data],
        "sequence_length": config.max_length,
        "doc_stride": config.doc_stride,
        "precision": rows.run.get("precision", config.precision),
        "batch": config.batch_size * config.accumulation,
        "epochs": config.epochs,
        "learning_rate": config.learning_rate,
    }


def _places(rows: Rows) -> Row:
    return {"devices": rows.world, "nodes": rows.config.nnodes}


def _rate(row: Row, rows: Rows) -> Row:
    full = rows.config.engine == "trainer" and rows.config.trainer_padding == "max_length"
    padding = "to the full length" if full else "to the longest of a batch"
    return {**_work(row, rows), **_places(rows), "padding": padding, "window": "whole training"}


def _message(row: Row, rows: Rows) -> Row:
    return {**_places(rows), "definition": "bus bandwidth", "message_bytes": max(row["bucket_bytes"] or [0])}


AT = "at the gradient buckets of {buckets} MB, every sum checked"
INTACT = "Was the newest checkpoint intact?"
EVEN_OWN_S = ("even_s", "own_s")
EVEN_OWN, EVENLY = [shares[name] for name in EVEN_OWN_S], "The ranks share evenly: balance=auto gives each its part."
WORKS = "Rank {rank} worked {even_s} of an even step before the training; with {samples} samples it works {own_s}"
RIGHT = "Is every element of every timed exchange correct?"
AS_PLANNED = "Did each rank train on the samples that its split gives it?"
AS_PREDICTED = "Does each rank take the time that its speed predicts?"
BY_RANK = "rank device work samples micro_batches most expected_s own_s idle_s even_s batch_s sample_s token_s"
NEAR_BEST = "Is the compute time of the slowest rank near that of the best split at the speeds measured?"
CONTINUED: dict[str, Any] = {"when": lambda config: bool(config.resume or config.max_restarts)}
BALANCED: dict[str, Any] = {"when": lambda config: config.balance == "auto"}
SPEC = Spec(
    tables=[*training.TABLES, misses, shares, splits, balance, run],
    metrics=[
        higher("f1{quality}", run["f1"], "F1", "official rules, percent", amount=1.0, headline=True),
        higher("exact_match{quality}", run["exact_match"], "Exact match", "official rules, percent", headline=True),
        *training.metrics(run, FORMULA, loss_may_lose=0.20),
        higher("end_to_end_samples_per_s{speed_scope}", run["end_to_end"], "", "all samples over the whole training"),
        lower("padding_share", run["padding_share"], "Padding", "padding over processed tokens, all steps"),
        higher("allreduce_gbps", run["busbw_gbps"], "All-reduce (bus)", AT, may_lose=0.15, headline=True),
        higher("allreduce_algbw_gbps", run["algbw_gbps"], "All-reduce (algorithm)", AT),
        lower("features_s", run["features_s"], "Tokenising"),
        lower("evaluate_s", run["evaluate_s"], "Evaluation", "prediction, spans and scores"),
        lower("calibration_s", balance["calibration_s"], "Calibration", "all ranks at the same time"),
        lower("balance_distance", balance["distance"], "Split, times the best", "slowest rank over the best split"),
        lower("balance_wait_share", balance["wait_shares"], "Waiting for slower ranks", "mean over the ranks"),
    ],
    checks=[
        *training.checks("whole training"),
        rule("possible quality", "Are all scores within range?", "possible scores", needed=True),
        zero("all-reduce right", RIGHT, run["wrong_elements"], rule="right results"),
        Check("newest checkpoint", INTACT, judge=_newest, kind="outcome", informs=True, **CONTINUED),
        *TARGETS,
        Check("F1 reference", "Does F1 match the published value?", judge=_reference, kind="reference", informs=True),
        below("distance to the best split", NEAR_BEST, (balance["distance"], DISTANCE), **BALANCED),
        near("split as planned", AS_PLANNED, (shares["trained"], shares["samples"]), **BALANCED),
        below("predicted times", AS_PREDICTED, (shares["off"], PREDICTED), **BALANCED, kind="reference", informs=True),
    ],
    says=[
        each(
            run,
            "The smoothed loss goes from {loss_first} to {loss_final}; F1 is {f1}, exact match {exact_match}. "
            f"The bound is 100; BERT-base reaches F1 {registry().figure('bert-base-f1-paper').text} on SQuAD v1.1.",
        ),
        *training.SPEED,
        each(run.where(exchange_us=bool), "Gradients are all-reduced at {busbw_gbps} of bus bandwidth."),
        _losses,
        _split,
        each(shares.where(idle=bool), "Rank {rank} gets none: {idle}."),
        each(
            splits.where(drifted=lambda rank: rank >= 0),
            "From step {first} on the split is {samples}: rank {drifted} took {factor} × the time that was expected of it.",
        ),
    ],
    shows=[
        Show("Heterogeneous ranks", shares, BY_RANK),
        Show("Splits", splits, "from_step samples expected_s drifted factor"),
        Show("Where a step's time goes", balance.ran(), "best_s other_split_s differing_steps_s exchange_s"),
        Show("The worst misses", misses, "question prediction answers f1"),
        *training.SHOWS,
    ],
    verified=each(run, "{eval_questions} questions by the official rules, equal weights on all ranks"),
    bounds=[training.bound("SQuAD fine-tuning")],
    whole=training.whole,
    charts=[
        *training.charts(run),
        bars("heterogeneous-ranks", *EVEN_OWN, mark=shares["expected_s"], title=WORKS, empty=EVENLY),
    ],
    warnings=_warnings,
    missed=lambda rows: {
        check.asked: [f"= {getattr(rows.config, check.asked):g}"] for check in TARGETS if check.unless(rows)
    },
    published=[
        Published("f1", run["f1"], "F1", _trained),
        Published("exact_match", run["exact_match"], "exact match", _trained),
        Published("training_loss", run["loss_final"], "final loss", _trained),
        Published("end_to_end_samples_per_s", run["end_to_end"], "throughput", _rate),
        Published("allreduce_gbps", run["busbw_gbps"], "all-reduce", _message),
    ],
    refuse=_refuse,
    recorded=training.recorded,
    rate="train_samples_per_s",
    energy="energy_per_sample_j",
    batch=("batch_size", "accumulation"),
    ways=("engine", "attention", "compile", "fused_optimizer", "bucket_cap_mb", "balance"),
)
