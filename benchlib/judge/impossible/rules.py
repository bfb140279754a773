"""The table of rules, and what all of them say of a set of claims. Adding a rule is a function and a row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchlib.judge.impossible import findings as statements
from benchlib.judge.impossible import serving, training
from benchlib.judge.impossible import serving as collectives
from benchlib.judge.impossible import serving as loadgen
from benchlib.judge.impossible.claim import Claim
from benchlib.judge.impossible.findings import Finding


@dataclass(frozen=True)
class Rule:
    """``judge`` gives a finding for each statement that the rule applies to, none where the claim states nothing.

    ``catches`` is the class of mistakes, in the words of a reader.
    """

    name: str
    catches: str
    judge: Callable[[Claim], list[Finding]]


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("rate from counts", "a rate that the counted samples do not give: planned steps, one rank for all", training.rate_follows_from_counts),
        Rule("sample count", "samples that are not those of the planned work", training.samples_are_those_planned),
        Rule("rate from raw steps", "a rate that the raw step times do not give: multiplied by steps or ranks", training.rate_follows_from_steps),
        Rule("steps that ran", "steps counted that were planned and never ran", training.steps_were_run),
        Rule("scaling", "n devices that are faster than n times one", training.scaling_is_possible),
        Rule("tokens and samples", "tokens per second that are not samples per second × length", training.tokens_follow_from_samples),
        Rule("below the peak", "more operations per second than the device can do", training.rate_is_below_peak),
        Rule("share of the peak", "an MFU above 1, of another device's or precision's peak", training.share_is_possible),
        Rule("learning rate", "training with a learning rate of zero", training.learning_rate_is_above_zero),
        Rule("loss falls", "training that learns nothing", training.loss_falls),
        Rule("possible scores", "scores and shares outside their bounds", training.scores_are_possible),
        Rule("algbw is S/t", "an algorithm bandwidth that is not size over time", collectives.algbw_is_size_over_time),
        Rule("busbw factor", "a bus bandwidth with another operation's or rank count's factor", collectives.busbw_has_its_factor),
        Rule("busbw below the links", "a bus bandwidth above what the links carry", collectives.busbw_is_below_bound),
        Rule("right results", "speed of wrong results", collectives.every_element_is_right),
        Rule("average busbw", "an average that is not that of the rows", collectives.average_is_of_the_rows),
        Rule("no time below zero", "negative latencies", serving.latency_is_not_negative),
        Rule("percentiles in order", "percentiles that fall", serving.percentiles_are_in_order),
        Rule("requests add up", "failed requests counted as fast ones", serving.requests_add_up),
        Rule("LoadGen verdict", "VALID with an unmet constraint, or a result that is INVALID", loadgen.verdict_follows_from_constraints),
        Rule("LoadGen duration", "runs shorter than their minimum", loadgen.duration_is_long_enough),
        Rule("LoadGen latency", "a percentile above the target latency", loadgen.latency_keeps_its_target),
        Rule("LoadGen samples", "a rate that samples and time do not give", loadgen.samples_follow_from_rate),
        Rule("early stopping", "too few queries for a percentile", loadgen.early_stopping_counts),
        Rule("speed-up", "a ratio that is not that of the named runs", statements.speedup_is_the_ratio),
        Rule("announced and measured", "announcements far from the measurement", statements.announcement_fits_measurement),
        Rule("limits have a source", "accuracy limits that differ by source or have none", statements.limits_have_a_source),
        Rule("possible values", "values that are not finite or below zero", statements.quantities_are_possible),
        Rule("raw samples", "values that are not those of their raw samples", statements.medians_are_of_their_samples),
        Rule("intervals", "values outside of their own interval", statements.intervals_hold_their_values),
        Rule("units", "values in another unit than their name says", statements.units_are_those_of_names),
        Rule("stated twice", "counts, names and times that contradict each other", statements.statements_agree),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Judgement:
    """What one rule says of all claims. ``failures`` and ``skipped`` are sentences with their subject."""

    rule: Rule
    passed: int
    failures: tuple[str, ...]
    skipped: tuple[str, ...]
    example: str  # the reason of the last claim that passed: of a sweep, the largest size

    @property
    def status(self) -> str:
        """FAIL where any claim failed, PASS where at least one passed, else SKIPPED."""
        return "FAIL" if self.failures else "PASS" if self.passed else "SKIPPED"


def judge_claims(claims: Sequence[Claim]) -> list[Judgement]:
    """Apply every rule to every claim; rules that no claim states anything for are left out."""
    judgements = []
    for rule in RULES.values():
        findings = [(claim.subject, finding) for claim in claims for finding in rule.judge(claim)]
        if not findings:
            continue

        def told(status: str, findings: list[tuple[str, Finding]] = findings) -> tuple[str, ...]:
            chosen = [(subject, finding) for subject, finding in findings if finding.status == status]
            if status == "FAIL":  # the gravest first, where findings have a value
                chosen.sort(key=lambda pair: -abs(pair[1].value or 0.0))
            return tuple(f"{subject}: {finding.reason}" if subject else finding.reason for subject, finding in chosen)

        passed = told("PASS")
        judgements.append(Judgement(rule, len(passed), told("FAIL"), told("SKIPPED"), passed[-1] if passed else ""))
    return judgements
