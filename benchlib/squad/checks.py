"""What a SQuAD run is judged by: outcome, sanity, targets, the published reference, budget and baseline."""

from benchlib.baselines import Comparison, regression_checks
from benchlib.checks import Check, budget_check, fact_check, finite_check, limit_check, peak_check
from benchlib.metrics import quantity
from benchlib.regression import RegressionLimit
from benchlib.results import Result, Run
from benchlib.squad.config import SquadConfig
from benchlib.stats import smoothed, smoothing_window

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


def _sanity(config: SquadConfig, result: Result, samples: dict[str, list[float]]) -> list[Check]:
    facts = result.facts
    seen, expected = sum(facts["samples_seen"]), facts["samples_expected"]
    rates = facts["learning_rates"]
    return [
        _loss_decreases(samples.get("loss", [])),
        fact_check(
            "ranks equal",
            "Did every rank hold the same weights at every epoch's end?",
            bool(facts["checksums_equal"]),
            f"{len(facts['checksums'])} comparison{'s' * (len(facts['checksums']) != 1)} of weight checksums over {config.world_size} rank{'s' if config.world_size > 1 else ''}"
            + ("" if facts["checksums_equal"] else ": they differ"),
        ),
        fact_check(
            "sample count",
            "Were as many samples trained as the planned steps need?",
            seen == expected,
            f"{seen:,} samples seen, {expected:,} planned",
            limit=f"= {expected:,}",
            value=seen,
            unit="samples",
        ),
        fact_check(
            "learning rate",
            "Was the learning rate above zero in every step?",
            rates["min"] > 0,
            f"from {rates['min']:.3g} to {rates['max']:.3g}, {rates['last']:.3g} in the last step",
            limit="> 0",
            value=rates["min"],
        ),
        finite_check(result),
        peak_check(
            "possible speed",
            "Is the achieved FLOP rate below the measured peak?",
            result.metric(f"flops_per_s{config.scope()}"),
            result.metric("matmul_peak_flops"),
        ),
    ]


def _loss_decreases(losses: list[float]) -> Check:
    question = "Is the smoothed loss lower at the end than at the start?"
    if len(losses) < 2:
        return fact_check("loss decreases", question, False, f"{len(losses)} steps are too few to tell")
    width = smoothing_window(len(losses))
    curve = smoothed(losses, width)
    first, last = float(curve[width - 1]), float(curve[-1])
    reason = f"from {first:.3f} to {last:.3f}, means over {width} step{'s' if width > 1 else ''}"
    return fact_check("loss decreases", question, last < first, reason, limit=f"< {quantity(first)}", value=last)


def _targets(config: SquadConfig, result: Result, quality: str) -> list[Check]:
    whole = quality == ""
    tier = f"target of the {config.tier} tier"
    no_target = f"the {config.tier} tier sets no target for {config.backend}"
    stand_in = (
        f"the target holds for a whole training on SQuAD v1.1; this run's is {quality.strip('_').replace('_', ', ')}"
    )
    f1, loss = result.metric(f"f1{quality}"), result.metric(f"loss_final{quality}")
    found = [
        limit_check(
            "final loss",
            "Is the final smoothed loss low enough?",
            loss,
            config.target_loss if whole else None,
            source=_why(whole, config.target_loss, tier, stand_in, no_target),
            strict=True,
        ),
        limit_check(
            "F1 target",
            "Is F1 on SQuAD v1.1 reached?",
            f1,
            config.target_f1 if whole else None,
            source=_why(whole, config.target_f1, tier, stand_in, no_target),
        ),
        limit_check(
            "all-reduce throughput",
            "Do the gradients travel fast enough?",
            result.metric("allreduce_gbps"),
            config.target_allreduce_gbps,
            source=tier if config.target_allreduce_gbps else f"{no_target}; its own baseline judges it",
            strict=True,
        ),
        limit_check(
            "training throughput",
            "Are enough samples trained per second?",
            result.metric(f"train_samples_per_s{config.scope()}"),
            None if config.scope() else config.target_samples_per_s,
            source=_why(
                not config.scope(),
                config.target_samples_per_s,
                tier,
                f"the target holds for a real model; this one is {config.scope().strip('_').replace('_', ', ')}",
                no_target,
            ),
            strict=True,
        ),
        limit_check(
            "device memory",
            "Does a rank stay within the memory target?",
            result.metric("device_memory_gb"),
            config.target_memory_gb,
            source=tier if config.target_memory_gb else no_target,
            strict=True,
        ),
    ]
    if config.data == "minisquad":
        embedded = config.target_f1_embedded if quality == "_minisquad_tiny" else None
        found.append(
            limit_check(
                "F1 on embedded data",
                "Did the model learn to match questions with their sentences?",
                f1,
                embedded,
                source=tier if embedded else no_target,
            )
        )
    return [*found, _reference(config, result, quality)]


def _why(applies: bool, target: float | None, tier: str, stand_in: str, no_target: str) -> str:
    return (tier if target is not None else no_target) if applies else stand_in


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
        source="google-research/bert, BERT-base uncased on the development set",
    )
