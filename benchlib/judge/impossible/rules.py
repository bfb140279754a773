"""What the rules say of claims."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchlib.judge.impossible import collectives, serving, statements, training  # noqa: F401  their rules join RULES
from benchlib.judge.impossible.claim import Claim
from benchlib.judge.impossible.findings import RULES, Finding, Rule


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
