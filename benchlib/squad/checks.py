"""What a SQuAD run is judged by: outcome, sanity, targets, the published reference, budget and baseline."""

from typing import Any

from benchlib.baselines import Comparison, regression_checks
from benchlib.checks import Check, agreement_check, budget_check, fact_check, finite_check, limit_check, rule_check
from benchlib.impossible import own
from benchlib.impossible.claim import Claim
from benchlib.impossible.numbers import Numbers
from benchlib.impossible.restated import equal
from benchlib.impossible.rules import RULES
from benchlib.metrics import Metric, quantity
from benchlib.references import registry
from benchlib.regression import RegressionLimit
from benchlib.results import Result, Run
from benchlib.squad.config import SquadConfig
from benchlib.stats import smoothing_window

F1_TOLERANCE = 0.5  # points around the published F1; the spread by seed is 0.16 to 0.24, so less would be noise


def regression_limits(config: SquadConfig, quality: str) -> list[RegressionLimit]:
    """Return how much worse each metric may get than the baseline. ``quality`` is the suffix of loss and F1."""
    speed = config.scope()
    return [
        RegressionLimit(metric=f"loss_final{quality}", share=0.20),
        RegressionLimit(metric=f"f1{quality}", amount=1.0),
        RegressionLimit(metric="allreduce_gbps", share=0.15),
        RegressionLimit(metric=f"train_samples_per_s{speed}", share=0.20),
        RegressionLimit(metric="device_memory_gb", share=0.25),
        RegressionLimit(metric="resident_memory_gb", share=0.25),
    ]


def limits(run: Run) -> list[RegressionLimit]:
    """Return the regression limits of a run, with the names of its metrics."""
    assert isinstance(run.config, SquadConfig)
    return regression_limits(run.config, _quality(run))


def _quality(run: Run) -> str:
    assert run.result is not None and isinstance(run.config, SquadConfig)
    return run.config.quality_scope(float(run.result.facts.get("epoch_share", 1.0)))


def checks(run: Run, comparison: Comparison) -> list[Check]:
    """Judge a run that has a result."""
    config, result = run.config, run.result
    assert isinstance(config, SquadConfig) and result is not None
    return [
        *_sanity(config, result, run.samples),
        *_targets(config, result, _quality(run)),
        budget_check(run, result.value("total_s") or 0.0),
        *regression_checks(run, limits(run), comparison),
    ]


# The rules that a check of its own shows; "numbers agree" stands for all others.
SHOWN = ("sample count", "learning rate", "loss falls", "possible scores", "possible values", "below the peak")


def _sanity(config: SquadConfig, result: Result, samples: dict[str, list[float]]) -> list[Check]:
    facts = result.facts
    numbers = Numbers.of(result, samples, config)
    learnt = Claim(learning=own.learning(numbers))
    operations = Claim(compute=own.compute(numbers))
    counted = Claim(speed=own.whole_training(numbers))
    return [
        _loss_decreases(learnt, len(samples.get("loss", []))),
        _ranks_equal(config, facts),
        rule_check(
            "sample count",
            "Were as many samples trained as the planned steps need?",
            RULES["sample count"].judge(counted),
        ),
        rule_check(
            "learning rate",
            "Was the learning rate above zero in every step?",
            RULES["learning rate"].judge(learnt),
        ),
        finite_check(result),
        _quality_is_possible(learnt),
        _whole_training(config, result),
        rule_check(
            "possible speed",
            "Is the achieved FLOP rate below the measured peak?",
            RULES["below the peak"].judge(operations),
            missing=_why_no_rate(result, config.scope()),
        ),
        agreement_check(own.own_claims(numbers), SHOWN),
    ]


def _ranks_equal(config: SquadConfig, facts: dict[str, Any]) -> Check:
    """Compare the checksums anew: that they were equal is no fact beside the checksums themselves."""
    rows = facts["checksums"]
    same = bool(facts["checksums_equal"]) and equal(rows)
    compared = f"{len(rows)} comparison{'s' * (len(rows) != 1)}"
    ranks = f"{config.world_size} rank{'s' * (config.world_size > 1)}"
    return fact_check(
        "ranks equal",
        "Did every rank hold the same weights at every epoch's end?",
        same,
        f"{compared} of weight checksums over {ranks}" + ("" if same else ": they differ"),
    )


def _loss_decreases(learnt: Claim, steps: int) -> Check:
    name, question = "loss decreases", "Is the smoothed loss lower at the end than at the start?"
    if steps < 2:
        return fact_check(name, question, False, f"{steps} steps are too few to tell")
    if learnt.learning is None or learnt.learning.loss_last is None:
        return fact_check(
            name, question, False, f"the raw losses of {steps} steps are not those that the result counts"
        )
    width = smoothing_window(steps)
    check = rule_check(name, question, RULES["loss falls"].judge(learnt))
    return check.model_copy(update={"reason": f"{check.reason}, means over {width} step{'s' * (width > 1)}"})


def _quality_is_possible(learnt: Claim) -> Check:
    """Check the bounds that hold by definition: exact match <= F1 <= 100, and no share above one."""
    name, question = "possible quality", "Is no score or share above what it can be?"
    stated = learnt.learning
    if stated is None or stated.f1 is None or stated.exact_match is None:
        return fact_check(name, question, False, "F1 and exact match have no value")
    return rule_check(name, question, RULES["possible scores"].judge(learnt))


def _why_no_rate(result: Result, scope: str) -> str:
    metrics = [result.metric(name) for name in (f"flops_per_s{scope}", "matmul_peak_flops")]
    reasons = [metric.reason for metric in metrics if metric is not None and metric.value is None]
    return f"not measured: {reasons[0] if reasons else 'the run has no such metric'}"


def _whole_training(config: SquadConfig, result: Result) -> Check:
    """Say whether the planned training was cut; a cut by the measured speed gates, one that the user set does not."""
    share = float(result.facts["epoch_share"])
    question = "Did the whole training fit?"
    if share >= 1:
        return fact_check("whole training", question, True, f"{result.facts['total_steps']:,} steps, all of them")
    reason = f"{share:.0%} of the training: {result.facts['plan_reason']}"
    name, gates = "whole training", not config.max_steps
    return Check(name=name, kind="sanity", question=question, status="SKIPPED", reason=reason, value=share, gates=gates)


def _targets(config: SquadConfig, result: Result, quality: str) -> list[Check]:
    tier = f"target of the {config.tier} tier"
    none = f"the {config.tier} tier sets no target for {config.backend}"
    scope = config.scope()
    # The targets hold for a whole training; what a training is that was cut is told apart from what stands in for it.
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
        return limit_check(name, question, metric, limit, source=tier, strict=strict)

    real, other = _words(scope), _words(kind)
    found = [
        target("final loss", "Is the final smoothed loss low enough?", loss, config.target_loss, other, strict=True),
        target("F1 target", "Is F1 on SQuAD v1.1 reached?", f1, config.target_f1, other),
        target(
            "all-reduce throughput", "Do the gradients travel fast enough?",
            result.metric("allreduce_gbps"), config.target_allreduce_gbps, "", strict=True,
        ),
        target(
            "training throughput", "Are enough samples trained per second?",
            result.metric(f"train_samples_per_s{scope}"), config.target_samples_per_s, real, strict=True,
        ),
        target(
            "device memory", "Does a rank stay within the memory target?",
            result.metric("device_memory_gb"), config.target_memory_gb, "", strict=True,
        ),
    ]  # fmt: skip
    if config.data == "minisquad":
        question = "Did the model learn to match questions with their sentences?"
        other_start = "" if kind == "_minisquad_tiny" else other
        found.append(target("F1 on embedded data", question, f1, config.target_f1_embedded, other_start))
    return [*found, _reference(config, result, quality)]


def _words(scope: str) -> str:
    return scope.strip("_").replace("_", ", ")


def _cut_short(
    name: str, question: str, metric: Metric | None, limit: float, result: Result, config: SquadConfig, tier: str
) -> Check:
    """Make the check of a target that a cut training could not show; it gates unless the user asked for the cut."""
    share = float(result.facts["epoch_share"])
    shown = metric.text if metric else "nothing"
    return Check(
        name=name,
        kind="target",
        question=question,
        status="SKIPPED",
        reason=f"{shown} after {share:.0%} of the training, of which the target asks the whole",
        value=metric.value if metric else None,
        limit=quantity(limit),
        source=tier,
        gates=not config.max_steps,
    )


def _reference(config: SquadConfig, result: Result, quality: str) -> Check:
    """Place F1 beside the published one: informative, since a seed alone moves it by 0.2 points."""
    name, question = "F1 reference", "Is F1 where it was published to be?"
    f1 = result.value(f"f1{quality}")
    if quality or config.reference_f1 is None or f1 is None:
        why = (
            "only a whole training on SQuAD v1.1 is comparable with published F1"
            if quality
            else "no published F1 is known for this config"
        )
        return Check(name=name, kind="reference", question=question, status="SKIPPED", reason=why, gates=False)
    inside = abs(f1 - config.reference_f1) <= F1_TOLERANCE
    return Check(
        name=name,
        kind="reference",
        question=question,
        status="PASS" if inside else "FAIL",
        gates=False,
        value=f1,
        reason=f"{f1:.2f} is {f1 - config.reference_f1:+.2f} from the published {config.reference_f1:.2f}",
        limit=f"{config.reference_f1:.1f} ± {F1_TOLERANCE}",
        source=registry().cite_value("f1", config.reference_f1)
        or "reference_f1 of the config; no figure of the registry",
    )
