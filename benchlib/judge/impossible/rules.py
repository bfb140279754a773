"""The table of rules, and what they say of claims.

A rule is a function of plain numbers. Its parameters have the names of the fields of one part of a claim (``item`` is the part
itself); it is asked where the claim states all that have no default, and returns None where what is stated does not suffice.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchlib.judge.impossible import collectives, serving, statements, training
from benchlib.judge.impossible.claim import Claim
from benchlib.judge.impossible.findings import Finding


@dataclass(frozen=True)
class Rule:
    """``part`` is the field of a claim whose fields ``judge`` takes, '' for a rule of the claim's own fields.

    ``catches`` is the class of mistakes, in the words of a reader.
    """

    name: str
    catches: str
    part: str
    judge: Callable[..., Finding | list[Finding] | None]

    @functools.cached_property
    def fields(self) -> dict[str, bool]:
        """The fields that the rule takes, and whether it needs them."""
        parameters = inspect.signature(self.judge).parameters.values()
        return {parameter.name: parameter.default is parameter.empty for parameter in parameters}

    def findings(self, claim: Claim) -> Iterator[Finding]:
        """Yield a finding for each statement of the claim that the rule applies to."""
        stated = getattr(claim, self.part) if self.part else claim
        for part in stated if isinstance(stated, list) else [stated] if stated else []:
            values = {name: part if name == "item" else getattr(part, name) for name in self.fields}
            if any(needed and values[name] in (None, [], "") for name, needed in self.fields.items()):
                continue
            answer = self.judge(**values)
            yield from answer if isinstance(answer, list) else [answer] if answer else []


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("rate from counts", "a rate that the counted samples do not give: planned steps, one rank for all", "speed", training.rate_from_counts),
        Rule("sample count", "samples that are not those of the planned work", "speed", training.sample_count),
        Rule("rate from raw steps", "a rate that the raw step times do not give: multiplied by steps or ranks", "speed", training.rate_from_steps),
        Rule("steps that ran", "steps counted that were planned and never ran", "speed", training.steps_that_ran),
        Rule("scaling", "n devices that are faster than n times one", "speed", training.scaling),
        Rule("tokens and samples", "tokens per second that are not samples per second × length", "speed", training.tokens_and_samples),
        Rule("below the peak", "more operations per second than the device can do", "compute", training.below_peak),
        Rule("share of the peak", "an MFU above 1, or of another device's or precision's peak", "compute", training.share_of_peak),
        Rule("operations of tokens", "FLOP/s or MFU that tokens and parameters do not give", "compute", training.flops_of_tokens),
        Rule("learning rate", "training with a learning rate of zero", "learning", training.learning_rate),
        Rule("loss falls", "training that learns nothing", "learning", training.loss_falls),
        Rule("possible scores", "scores and shares outside their bounds", "learning", training.possible_scores),
        Rule("scores of answers", "scores that the stored answers do not give", "learning", training.scores_of_answers),
        Rule("algbw is S/t", "an algorithm bandwidth that is not size over time", "collective", collectives.algbw),
        Rule("transfer takes time", "transfers faster than light or than any memory", "collective", collectives.possible_transfer),
        Rule("busbw factor", "a bus bandwidth with another operation's or rank count's factor", "collective", collectives.busbw_factor),
        Rule("busbw below the links", "a bus bandwidth above what the links carry", "collective", collectives.busbw_bound),
        Rule("right results", "speed of wrong results", "collective", collectives.right_results),
        Rule("average busbw", "an average that is not that of the rows", "collective", collectives.average_busbw),
        Rule("no time below zero", "negative latencies", "latencies", serving.no_negative_time),
        Rule("tokens take time", "first tokens that were never reported, tokens that came all at once", "latencies", serving.tokens_take_time),
        Rule("percentiles in order", "percentiles that fall or are none, a mean outside the ends", "latencies", serving.percentiles_in_order),
        Rule("latency of raw times", "latencies that the raw times do not give", "latencies", serving.latency_of_samples),
        Rule("first token before last", "a first token after the end of its answer", "", serving.first_before_last),
        Rule("latency of requests", "latencies of no completed request", "", serving.latencies_of_requests),
        Rule("decode below the memory", "tokens for which the weights cannot be read often enough", "decode", serving.decode_bandwidth),
        Rule("requests add up", "failed requests counted as fast ones", "requests", serving.requests_add_up),
        Rule("LoadGen verdict", "VALID with an unmet constraint, a result that is INVALID or of an accuracy run", "loadgen", serving.loadgen_verdict),
        Rule("LoadGen errors", "VALID with errors in the log", "loadgen", serving.loadgen_errors),
        Rule("LoadGen rate", "a rate up to the end of the last issued query, or above the rate at which queries were sent", "loadgen", serving.loadgen_rate),
        Rule("LoadGen duration", "runs shorter than their minimum", "loadgen", serving.loadgen_duration),
        Rule("LoadGen latency", "a percentile above the target latency", "loadgen", serving.loadgen_latency),
        Rule("LoadGen samples", "a rate that samples and time do not give", "loadgen", serving.loadgen_samples),
        Rule("early stopping", "too few queries for a percentile", "loadgen", serving.early_stopping),
        Rule("speed-up", "a ratio that is not that of the named runs", "speedups", statements.speed_up),
        Rule("costs agree", "costs that prices, times and rates do not give", "cost", statements.costs_agree),
        Rule("announced and measured", "announcements far from the measurement", "expectations", statements.announcement),
        Rule("limits have a source", "accuracy limits that differ by source or have none", "", statements.sourced_limit),
        Rule("rates above zero", "rates, ratios, counts and times below zero", "", statements.no_negative_figure),
        Rule("possible ranges", "scores above 100, perplexities below 1, more use or memory than there is, work without energy", "quantities", statements.possible_range),
        Rule("parts of a whole", "parts that are larger than their whole: a forward pass longer than its step", "wholes", statements.parts_of_whole),
        Rule("possible values", "values that are not finite or below zero", "quantities", statements.possible_value),
        Rule("raw samples", "values that are not the median of their raw samples", "quantities", statements.raw_samples),
        Rule("recorded samples", "raw samples that another record of the same steps does not have", "quantities", statements.recorded_samples),
        Rule("intervals", "values outside their own interval", "quantities", statements.interval),
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


def ask(rule: str, claims: Sequence[Claim]) -> list[tuple[str, Finding]]:
    """Return the subject and the finding of each statement of ``claims`` that a rule applies to."""
    return [(claim.subject, finding) for claim in claims for finding in RULES[rule].findings(claim)]


def judge_claims(claims: Sequence[Claim]) -> list[Judgement]:
    """Apply every rule to every claim; rules that no claim states anything for are left out."""
    judgements = []
    for rule in RULES.values():
        sentences: dict[str, list[str]] = {"PASS": [], "FAIL": [], "SKIPPED": []}
        # The gravest failure comes first, where findings have a value.
        order = sorted(ask(rule.name, claims), key=lambda pair: -abs(pair[1].value or 0.0) * (pair[1].status == "FAIL"))
        for subject, finding in order:
            sentences[finding.status].append(f"{subject}: {finding.reason}" if subject else finding.reason)
        passed, failures, skipped = sentences.values()
        if order:
            example = passed[-1] if passed else ""
            judgements.append(Judgement(rule, len(passed), tuple(failures), tuple(skipped), example))
    return judgements
