"""What a SQuAD run means: its checks and limits, the claims that the rules of impossible numbers test, the reading in
sentences, and the values that can stand beside published figures.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from benchlib.benchmarks.squad import judge_unlike, shares
from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.config.schema import EMBEDDED_MODEL
from benchlib.core import model_files, squad_score
from benchlib.core.errors import UserError
from benchlib.core.files import read_bytes, read_object
from benchlib.core.stats import LEAST_FOR_P95, drift_text, smoothed, smoothing_window
from benchlib.core.text import quantity, seconds
from benchlib.judge.baselines import Comparison, regression_checks
from benchlib.judge.checks import (
    Ask,
    Check,
    agreement_check,
    asks,
    budget_check,
    finite_check,
    limit_check,
    right_results_check,
    rule_check,
)
from benchlib.judge.impossible.claim import Claim, Collective, Compute, Latency, Learning, Speed, Whole
from benchlib.judge.impossible.own import Numbers, OwnClaims, steps_claim, too_few_steps
from benchlib.judge.numbers import count, number, within
from benchlib.judge.published import Measured, device_name, summary
from benchlib.judge.references import registry
from benchlib.judge.regression import RegressionLimit
from benchlib.results.metrics import Metric
from benchlib.results.run import Result, Run

PREDICTIONS, ANSWERS = "predictions.json", "answers.json"
F1_TOLERANCE = 0.5  # points around the published F1; the spread by seed is 0.16 to 0.24, so less would be noise
# The rules that a check of its own shows; "numbers agree" stands for all others.
SHOWN = (
    "sample count",
    "learning rate",
    "loss falls",
    "possible scores",
    "possible values",
    "below the peak",
    "right results",
)

# Hub names and the parameters of the matrix products of their layers, L (4 h² + 2 h f): a folder's name alone proves nothing.
MODELS = {
    "bert-base-uncased": ("BERT-base uncased", 12 * (4 * 768**2 + 2 * 768 * 3072)),
    "bert-large-uncased": ("BERT-large uncased", 24 * (4 * 1024**2 + 2 * 1024 * 4096)),
}
DATA = {"squad": "SQuAD v1.1", "minisquad": "generated questions", "files": "the user's files"}
PARAMETERS_SLACK = 0.02  # the head and the pooler are counted by some and not by others
TARGETS = {  # the parameter of each target, by the name of its check
    "final loss": "target_loss",
    "F1 target": "target_f1",
    "F1 on embedded data": "target_f1_embedded",
    "all-reduce throughput": "target_allreduce_gbps",
    "training throughput": "target_samples_per_s",
    "device memory": "target_memory_gb",
}


# Even steps before the training have numbers below zero; what is beyond a sum of parts may be, too.
SIGNED = ("step", "idle_s", "seconds")


def lacks(table: str, row: Mapping[str, Any], column: str) -> bool:
    """Say whether a null has a reason: a backend or sensor that tells nothing, an engine without phases, few steps."""
    if table == "ranks":
        return column in ("device_memory_gb", "own_work_s_median") or too_few_steps(row, column)
    return (table == "devices" and column != "device") or judge_unlike.lacks(table, row, column)


def refuse(config: SquadConfig) -> None:
    """Raise ``UserError`` for a model folder that is not whole, a plan that cannot be read, a run to resume of another benchmark,
    without checkpoints or finished."""
    model_files.check(config.model, weights=config.init != "random")
    if config.balance not in ("auto", "off"):
        shares.load(config.balance)  # check_whole compares it with the ranks, which are not known yet
    if not config.resume:
        return
    folder = Path(config.resume)
    benchmark = read_object(folder / "config.json", {"benchmark": str})["benchmark"]
    if benchmark != config.benchmark:
        raise UserError(
            f"resume = {folder}: a run of {benchmark}; give the folder of an interrupted run of {config.benchmark}"
        )
    if not (folder / "checkpoints").is_dir():
        raise UserError(
            f"resume = {folder}: this run left no checkpoint; start a new one (checkpoint_every=N stores some)"
        )
    if (status := folder / "status.json").exists() and read_object(status, {"outcome": str})["outcome"] == "complete":
        raise UserError(
            f"resume = {folder}: this run is finished, nothing is left to train; start a new run without --resume"
        )


def missed(run: Run) -> dict[str, list[str]]:
    """Return the targets that could not be judged, by parameter: of a stand-in, of a training that was cut, not measured."""
    if run.result is None:
        return {}
    (config, result), quality = _parts(run), _quality(run)
    skipped = [
        TARGETS[check.name]
        for check in _targets(config, result, quality)
        if check.status == "SKIPPED" and check.name in TARGETS
    ]
    return {name: [f"= {value:g}"] for name in skipped if (value := getattr(config, name)) is not None}


def limits(run: Run) -> list[RegressionLimit]:
    """Return how much worse each metric of a run may get than the baseline."""
    (config, _), quality = _parts(run), _quality(run)
    return [
        RegressionLimit(metric=f"loss_final{quality}", share=0.20),
        RegressionLimit(metric=f"f1{quality}", amount=1.0),
        RegressionLimit(metric="allreduce_gbps", share=0.15),
        RegressionLimit(metric=f"train_samples_per_s{config.scope()}", share=0.20),
        RegressionLimit(metric="device_memory_gb", share=0.25),
        RegressionLimit(metric="resident_memory_gb", share=0.25),
    ]


def _parts(run: Run) -> tuple[SquadConfig, Result]:
    assert isinstance(run.config, SquadConfig) and run.result is not None
    return run.config, run.result


def _share(result: Result) -> float:
    """Return the share of the planned samples that the training saw."""
    return number(result.facts.get("epoch_share", 1.0), "epoch_share")


def _quality(run: Run) -> str:
    """Return the suffix of the names of loss and F1."""
    config, result = _parts(run)
    return config.quality_scope(_share(result))


def checks(run: Run, comparison: Comparison) -> list[Check]:
    """Judge a run that has a result."""
    config, result = _parts(run)
    return [
        *_sanity(run),
        *_targets(config, result, _quality(run)),
        budget_check(run),
        *regression_checks(run, limits(run), comparison),
    ]


def _sanity(run: Run) -> list[Check]:
    (config, result), stated = _parts(run), OwnClaims(Numbers.of_run(run))
    return [
        _loss_decreases(stated, run.samples),
        _ranks_equal(config, result.facts),
        rule_check(
            "sample count", "Does the number of trained samples match the plan?", "sample count", stated, needed=True
        ),
        rule_check(
            "learning rate", "Was the learning rate above zero in every step?", "learning rate", stated, needed=True
        ),
        finite_check(stated),
        _possible_quality(result, _quality(run), stated),
        _whole_training(config, result),
        *_newest_checkpoint(result),
        right_results_check(stated, config.world_size),
        rule_check(
            "possible speed",
            "Is the achieved FLOP rate below the measured peak?",
            "below the peak",
            stated,
            missing=_why_no_rate(result, config.scope()),
        ),
        agreement_check(stated, SHOWN),
        *judge_unlike.checks(config, result),
    ]


@asks("ranks equal", "Did all ranks hold the same weights at the end of each epoch?")
def _ranks_equal(ask: Ask, config: SquadConfig, facts: Mapping[str, Any]) -> Check:
    """Compare the recorded checksums again instead of trusting the recorded result of the comparison."""
    rows = facts["checksums"]
    same = bool(facts["checksums_equal"] and rows)
    same &= all(len(row) == config.world_size and len(set(map(str, row))) == 1 for row in rows)
    compared = f"{len(rows)} comparison{'s' * (len(rows) != 1)}"
    ranks = f"{config.world_size} rank{'s' * (config.world_size > 1)}"
    return ask.fact(same, f"{compared} of weight checksums over {ranks}" + ("" if same else ": they differ"))


@asks("loss decreases", "Is the smoothed loss lower at the end than at the start?")
def _loss_decreases(ask: Ask, stated: Sequence[Claim], samples: Mapping[str, Sequence[float]]) -> Check:
    steps = len(samples["loss"])
    if steps < 2:
        return ask.fact(False, f"{steps} steps are too few to tell")
    missing = f"the {steps} raw losses are not as many as the result counts"
    check = rule_check(ask.name, ask.question, "loss falls", stated, missing=missing, needed=True)
    width = smoothing_window(steps)
    return check.model_copy(update={"reason": f"{check.reason}, means over {width} step{'s' * (width > 1)}"})


@asks("possible quality", "Are all scores within range?")
def _possible_quality(ask: Ask, result: Result, quality: str, stated: Sequence[Claim]) -> Check:
    """Check what holds by definition: exact match <= F1 <= 100, and no share above one."""
    if result.value(f"f1{quality}") is None or result.value(f"exact_match{quality}") is None:
        return ask.fact(False, "F1 and exact match have no value")
    return rule_check(ask.name, ask.question, "possible scores", stated)


def _why_no_rate(result: Result, scope: str) -> str:
    metrics = [result.metric(name) for name in (f"flops_per_s{scope}", "matmul_peak_flops")]
    reasons = [metric.reason for metric in metrics if metric is not None and metric.value is None]
    return f"not measured: {reasons[0] if reasons else 'the run has no such metric'}"


@asks("whole training", "Did the whole training fit the budget?")
def _whole_training(ask: Ask, config: SquadConfig, result: Result) -> Check:
    """Check that the planned training was not cut; a cut by the measured speed gates, one set by the user does not."""
    share = number(result.facts["epoch_share"], "epoch_share")
    if share >= 1:
        return ask.fact(
            within(share, most=1), f"{count(result.facts['total_steps'], 'total_steps'):,} steps, {share:.0%} of them"
        )
    reason = f"{share:.0%} of the training: {result.facts['plan_reason']}"
    return ask.skipped(reason, gates=not config.max_steps, value=share)


def _newest_checkpoint(result: Result) -> list[Check]:
    """List newer checkpoints that were damaged: what was trained after the one that is left was trained again."""
    faults, step = result.facts.get("checkpoints_passed_over"), result.facts.get("resumed_step") or 0
    if not faults:
        return []
    begun = f"the training went on from step {step:,}" if step else "the training was begun anew"
    question = "Was the newest checkpoint intact?"
    reason = f"{begun}, since newer checkpoints are damaged: {'; '.join(map(str, faults))}"
    return [
        Check(
            name="newest checkpoint", kind="outcome", question=question, status="AMBIGUOUS", reason=reason, gates=False
        )
    ]


def _targets(config: SquadConfig, result: Result, quality: str) -> list[Check]:
    tier = f"target of the {config.tier} tier"
    none = f"the {config.tier} tier sets no target for {config.backend}"
    scope = config.scope()
    # The targets hold for a whole training. A training that was cut and one of a stand-in are different cases.
    kind, cut = quality.removesuffix("_cut"), quality.endswith("_cut")
    f1, loss = result.metric(f"f1{quality}"), result.metric(f"loss_final{quality}")

    def target(
        name: str, question: str, metric: Metric | None, limit: float | None, stands_in: str, strict: bool = False
    ) -> Check:
        trained = name in ("final loss", "F1 target", "F1 on embedded data")
        if limit is None or stands_in:
            real = f"the target holds for a real model on SQuAD v1.1; this run's is {stands_in}"
            return limit_check(name, question, metric, None, source=none if limit is None else real)
        if trained and cut:
            return _cut_short(name, question, metric, limit, result, config, tier)
        of = "for the stand-in" if name == "F1 on embedded data" else ""
        return limit_check(name, question, metric, limit, source=tier, strict=strict, of=of)

    real, other = _words(scope), _words(kind)
    targets = [
        target("final loss", "Is the final smoothed loss low enough?", loss, config.target_loss, other, strict=True),
        target("F1 target", "Does F1 on SQuAD v1.1 reach the target?", f1, config.target_f1, other),
        target(
            "all-reduce throughput", "Is the all-reduce of the gradients fast enough?",
            result.metric("allreduce_gbps"), config.target_allreduce_gbps, "", strict=True,
        ),
        target(
            "training throughput", "Is training throughput high enough?",
            result.metric(f"train_samples_per_s{scope}"), config.target_samples_per_s, real, strict=True,
        ),
        target(
            "device memory", "Does each rank stay within the memory target?",
            result.metric("device_memory_gb"), config.target_memory_gb, "", strict=True,
        ),
    ]  # fmt: skip
    if config.data == "minisquad":
        question = "Did the model learn to match questions with their sentences?"
        other_start = "" if kind == "_minisquad_tiny" else other
        targets.append(target("F1 on embedded data", question, f1, config.target_f1_embedded, other_start))
    return [*targets, _reference(config, result, quality)]


def _words(scope: str) -> str:
    return scope.strip("_").replace("_", ", ")


def _cut_short(
    name: str, question: str, metric: Metric | None, limit: float, result: Result, config: SquadConfig, tier: str
) -> Check:
    """Skip the target of a whole training for one that was cut; it gates unless the user asked for the cut."""
    shown = metric.text if metric else "nothing"
    return Check(
        name=name,
        kind="target",
        question=question,
        status="SKIPPED",
        reason=f"{shown} after {_share(result):.0%} of the training; the target is for the whole training",
        value=metric.value if metric else None,
        limit=quantity(limit),
        source=tier,
        gates=not config.max_steps,
    )


@asks("F1 reference", "Does F1 match the published value?", kind="reference")
def _reference(ask: Ask, config: SquadConfig, result: Result, quality: str) -> Check:
    """Compare F1 with the published one: informative, since the seed alone moves it by 0.2 points."""
    f1 = result.value(f"f1{quality}")
    if quality or config.reference_f1 is None or f1 is None:
        return ask.skipped(
            "only a whole training on SQuAD v1.1 is comparable with published F1"
            if quality
            else "no published F1 is known for this config"
        )
    inside = within(f1, config.reference_f1 + F1_TOLERANCE, config.reference_f1 - F1_TOLERANCE)
    source = registry().cite_value("f1", config.reference_f1)
    check = ask.fact(
        inside,
        f"{f1:.2f} is {f1 - config.reference_f1:+.2f} from the published {config.reference_f1:.2f}",
        value=f1,
        limit=f"{config.reference_f1:.1f} ± {F1_TOLERANCE}",
    )
    cited = source or "reference_f1 of the config; no figure of the registry"
    return check.model_copy(update={"gates": False, "source": cited})


def claims(numbers: Numbers) -> Iterator[Claim]:
    """Yield what a training states: its whole, its counted steps, what it learnt, its operations, its exchange."""
    value, count = numbers.value, numbers.count
    seen, rate, ranks = count("samples_seen"), value("train_samples_per_s"), numbers.world_size
    if seen is not None:
        whole = Speed(
            # Of a resumed training the time covers a part of the samples only.
            samples_per_s=value("end_to_end_samples_per_s") if not count("resumed_step") else None,
            ranks=ranks,
            samples_counted=seen,
            samples_planned=count("samples_expected"),
            wall_s=numbers.positive("train_s"),
        )
        yield Claim(subject="whole training", speed=whole)
    if rate is not None:
        yield Claim(subject="counted steps", speed=_steady_steps(numbers, rate))
    losses, rates = numbers.raw("loss"), numbers.facts.get("learning_rates")
    curve = smoothed(losses) if len(losses) > 1 else None
    shares = {name: share for name in ("padding_share", "exchange_overlap") if (share := value(name)) is not None}
    learning = Learning(
        learning_rate_min=number(rates["min"], "learning_rates.min") if rates else None,
        loss_first=float(curve[smoothing_window(len(losses)) - 1]) if curve is not None else None,
        loss_last=float(curve[-1]) if curve is not None else None,
        f1=value("f1"),
        exact_match=value("exact_match"),
        **_of_answers(numbers),
        shares=shares,
    )
    compute = Compute(
        flops_per_s=value("flops_per_s"),
        mfu=value("mfu"),
        ranks=ranks,
        peak_flops=numbers.positive("matmul_peak_flops"),
        peak_kind="measured",
    )
    latencies, wholes = _rank_steps(numbers), _whole_time(numbers)
    yield Claim(subject="training", learning=learning, compute=compute, latencies=latencies, wholes=wholes)
    yield steps_claim(numbers)
    busbw, algbw = value("allreduce_gbps"), value("allreduce_algbw_gbps")
    exchange = Collective(
        operation="all_reduce",
        ranks=ranks,
        algbw_gbytes_per_s=algbw / 8 if algbw is not None else None,
        busbw_gbytes_per_s=busbw / 8 if busbw is not None else None,
        wrong_elements=count("allreduce_wrong_elements"),
    )
    yield Claim(subject="all-reduce", collective=exchange)


def _of_answers(numbers: Numbers) -> dict[str, Any]:
    """Return the scores that the stored predictions give with the gold answers, which the result names by their SHA-256."""
    folder, digest = numbers.folder, numbers.facts.get("answers_sha256")
    if folder is None or not digest:
        return {}
    gold = folder / ANSWERS
    if hashlib.sha256(read_bytes(gold)).hexdigest() != digest:
        raise UserError(f"{gold}: not the gold answers of this run (its SHA-256 is not the one in result.json)")
    predictions, answers = read_object(folder / PREDICTIONS, {}), read_object(gold, {})
    foreign = [name for name, text in predictions.items() if name not in answers or not isinstance(text, str)]
    if foreign:
        raise UserError(
            f"{folder / PREDICTIONS}: {len(foreign)} are no answers to its questions, such as {foreign[0][:40]!r}"
        )
    exact, f1 = squad_score.means(predictions, answers)
    return {"answers_f1": f1, "answers_exact_match": exact}


def _whole_time(numbers: Numbers) -> list[Whole]:
    """Return the time of the run with its parts, which follow each other, and the start with its own part."""
    value, wholes = numbers.value, []
    parts = {name: part for name in ("startup_s", "train_s", "evaluate_s") if (part := value(name)) is not None}
    if (total_s := numbers.positive("total_s")) and parts:
        wholes.append(Whole(name="the run", whole=total_s, parts=parts, apart=True))
    features_s, startup_s = value("features_s"), numbers.positive("startup_s")
    if startup_s and features_s is not None:
        wholes.append(Whole(name="the start", whole=startup_s, parts={"features_s": features_s}))
    return wholes


def _steady_steps(numbers: Numbers, rate: float) -> Speed:
    """Return the rates of the counted steps beside their raw times; times count where every step was a full batch."""
    batch = getattr(numbers.config, "global_batch", None)
    planned, expected = numbers.count("planned_steps"), numbers.count("samples_expected")
    full = batch is not None and planned is not None and expected == planned * batch
    times = [value for value in numbers.raw("step_s") if value > 0] if full else []
    median = numbers.metric("step_s")
    raw = numbers.raw("step_s")
    if median and median.ci_low is not None:
        ends = [median.ci_low, median.ci_high]
    else:  # too few steps for an interval: their range
        ends = [min(raw), max(raw)] if raw else [median.value] if median else []
    return Speed(
        samples_per_s=rate,
        tokens_per_s=numbers.value("train_tokens_per_s"),
        ranks=numbers.world_size,
        batch_per_rank=batch // numbers.world_size if batch else None,
        step_s=times,
        step_s_span=[end for end in ends if end is not None and end > 0] if not times else [],
        batches_full=full,
        longest_sequence=getattr(numbers.config, "max_length", None),
    )


def _rank_steps(numbers: Numbers) -> list[Latency]:
    median = numbers.metric("step_s")
    few = median is None or median.n < LEAST_FOR_P95
    percentiles = {5.0: "step_s_p05", 50.0: "step_s_median", 95.0: "step_s_p95"}
    return [
        Latency(
            name=f"steps of rank {row.get('rank')}",
            percentiles_s={key: row.get(name) for key, name in percentiles.items()},
        )
        for row in numbers.rows("ranks")
        if "step_s_p05" in row and not (few and too_few_steps(row, "step_s_p05"))
    ]


def reading(run: Run) -> list[str]:
    """Return sentences about learning, speed, exchange, published figures and what these must not be compared with."""
    config, result = _parts(run)
    share = _share(result)
    sentences = [
        _learning(config, result, share),
        _speed(config, result, drift_text(run.samples.get(f"train_samples_per_s{config.scope()}", []))),
        _split(run),
        _exchange(config, result),
        *judge_unlike.reading(config, result),
        summary(run),
        _validity(config, share, result.facts),
    ]
    return [sentence for sentence in sentences if sentence]


def _learning(config: SquadConfig, result: Result, share: float) -> str:
    scope = config.quality_scope(share)
    f1, match, first, last = (
        result.value(f"{name}{scope}") for name in ("f1", "exact_match", "loss_first", "loss_final")
    )
    if f1 is None or match is None or first is None or last is None:
        return ""
    verb = "fell" if last < first else "went"
    return (
        f"The loss {verb} from {first:.3f} to {last:.3f}, and the model answers {match:.1f}% of the questions exactly (F1 {f1:.1f}). "
        f"The bound is 100; BERT-base reaches F1 {registry().figure('bert-base-f1-paper').text} on SQuAD v1.1."
    )


def _speed(config: SquadConfig, result: Result, drift: str) -> str:
    names = (f"train_samples_per_s{config.scope()}", f"mfu{config.scope()}", "padding_share")
    rate, mfu, padding = (result.value(name) for name in names)
    if rate is None:
        return ""
    text = (
        f"Training throughput {drift} samples/s by quarter" if drift else f"Training runs at {quantity(rate)} samples/s"
    )
    text += f" on {config.world_size} rank{'s' * (config.world_size > 1)}" + (": no steady state" if drift else "")
    if mfu is not None:
        peak = result.metric("matmul_peak_flops")
        text += f", {mfu:.1%} of the measured {config.precision} matrix-product peak of this machine"
        text += f" ({peak.text}, {peak.reason.split(',')[0]})" if peak and peak.reason.startswith("n = ") else ""
    if padding is not None:
        text += f"; {padding:.1%} of the processed tokens are padding"
    return text + "."


def _split(run: Run) -> str:
    from benchlib.results import frames  # pandas takes a while to import

    parts = frames.split(run)
    if len(parts) < 2:
        return ""
    (name, most), whole = max(parts.items(), key=lambda item: item[1]), sum(parts.values())
    what = "waiting for the exchange of gradients" if name == "exchange" else name
    return (
        f"The largest part of a step goes to {what}: {seconds(most)} of {seconds(whole)} ({100 * most / whole:.0f}%)."
    )


def _exchange(config: SquadConfig, result: Result) -> str:
    rate, hidden = result.value("allreduce_gbps"), result.value("exchange_overlap")
    if rate is None:
        return "With one rank there is no gradient exchange." if config.world_size == 1 else ""
    text = f"Gradients are all-reduced at {quantity(rate)} Gbps bus bandwidth"
    if hidden is not None:
        text += f"; the backward pass hides {hidden:.0%} of the exchange"
    return text + "."


def _validity(config: SquadConfig, share: float, facts: dict[str, Any]) -> str:
    extent, text = _extent(config, share, facts), ""
    if config.data == "minisquad":
        text = (
            "The questions are generated: these results count only for the kit's own baselines, never for SQuAD v1.1."
        )
    elif config.quality_scope(share):
        text = (
            "F1 is not comparable with published figures: those are of pretrained models and the whole of SQuAD v1.1."
        )
    return f"{text} Training and evaluation: {extent}.".strip() if extent != "whole" else text


def published(run: Run) -> list[Measured]:
    """Return quality, throughput, the exchange of gradients and the counts of the data, each with its conditions."""
    config, result = _parts(run)
    facts, common, share = result.facts, _common(config, result.facts), _share(result)
    quality, speed = config.quality_scope(share), config.scope()
    # Of a score the batch that counts is the one of a step, over all devices.
    extent = _extent(config, share, facts)
    extent = "generated set" if (config.data, extent) == ("minisquad", "whole") else extent
    trained = common | {"training": extent, "batch": config.global_batch}
    padded = config.engine == "trainer" and config.trainer_padding == "max_length"
    padding = "to the full length" if padded else "to the longest of a batch"
    places = {"devices": config.world_size, "nodes": config.nnodes}
    exchange = places | {"definition": "bus bandwidth", "message_bytes": max(facts.get("bucket_bytes") or [0])}
    device = device_name(run.machine, config.backend, config.nproc)
    values = (
        ("f1", "F1", f"f1{quality}", trained),
        ("exact_match", "exact match", f"exact_match{quality}", trained),
        (
            "end_to_end_samples_per_s",
            "throughput",
            f"end_to_end_samples_per_s{speed}",
            common | places | {"padding": padding, "window": "whole training"},
        ),
        ("allreduce_gbps", "all-reduce", "allreduce_gbps", exchange),
    )
    measured = [
        Measured(kind, label, value, device, conditions)
        for kind, label, name, conditions in values
        if (value := result.value(name)) is not None
    ]
    return measured + _counts(config, facts, common)


def _common(config: SquadConfig, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": _model(config, facts),
        "data": DATA[config.data],
        "sequence_length": config.max_length,
        "doc_stride": config.doc_stride,
        "precision": config.precision,
        "batch": config.batch_size * config.accumulation,
        "epochs": config.epochs,
        "learning_rate": config.learning_rate,
    }


def _shortened(config: SquadConfig) -> bool:
    """Tell whether a part of the set is used; generated data have the size that was asked for, and no whole."""
    return config.data != "minisquad" and bool(config.train_questions or config.eval_questions)


def _extent(config: SquadConfig, share: float, facts: dict[str, Any]) -> str:
    """Return what was trained and evaluated on: ``whole``, or what is missing of it."""
    missing = []
    if share < 1:
        missing.append(f"{_cut_by(config, facts)} to {share:.0%}")
    if config.epochs < 1:
        missing.append(f"{config.epochs:g} epochs")
    if _shortened(config):
        missing.append("shortened set")
    return ", ".join(missing) or "whole"


def _cut_by(config: SquadConfig, facts: dict[str, Any]) -> str:
    """Return who cut the training: the user's ``max_steps``, or the budget."""
    return (
        "cut by max_steps"
        if config.max_steps and facts.get("planned_steps") == config.max_steps
        else "cut by the budget"
    )


def _counts(config: SquadConfig, facts: dict[str, Any], common: dict[str, Any]) -> list[Measured]:
    """Return how many questions and features the data gave: a wrong version or tokenizer shows here first."""
    if config.data != "squad" or _shortened(config):
        return []
    conditions = {name: common[name] for name in ("data", "sequence_length", "doc_stride")}
    if common["model"] in dict(MODELS.values()):
        conditions["tokenizer"] = "BERT uncased"
    labels = {"train": "to train on", "eval": "to evaluate on"}
    return [
        Measured(f"{part}_{kind}", f"{kind} {label}", float(facts[kind][part]), "", conditions)
        for kind in ("questions", "features")
        for part, label in labels.items()
        if part in facts.get(kind, {})
    ]


def _model(config: SquadConfig, facts: dict[str, Any]) -> str:
    if config.model == EMBEDDED_MODEL:
        return "the embedded stand-in"
    name, parameters = MODELS.get(PurePath(config.model).name, (config.model, None))
    counted = facts.get("matmul_parameters")
    if parameters and counted and abs(counted / parameters - 1) > PARAMETERS_SLACK:
        return f"{config.model} with {counted:,} parameters"
    return f"{name}, random weights" if config.init == "random" else name
