"""Checks and verdicts: named questions with a status, a reason and the numbers behind it."""

import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchlib.core import run_folder
from benchlib.core.errors import UserError
from benchlib.core.files import write_json
from benchlib.core.text import capitalized, counted, shortened
from benchlib.judge.impossible.claim import Claim
from benchlib.judge.impossible.rules import ask, judge_claims
from benchlib.judge.numbers import InvalidNumber, within
from benchlib.results.run import Run
from benchlib.results.verdict import Check as Check
from benchlib.results.verdict import Kind as Kind
from benchlib.results.verdict import Status as Status
from benchlib.results.verdict import Verdict as Verdict

FINITE = "finite"  # the name of the check that lists every missing and impossible value
AGREE = "numbers agree"
VALUES = ("possible values", "physical ceiling")  # the rules of single values

# What a result lacks or holds in another form: it was cut by hand, is foreign, or of another version.
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError)


class Ask(NamedTuple):
    """The question of a check. Its methods answer it."""

    name: str
    question: str
    kind: Kind = "sanity"

    def answer(self, status: Status, reason: str, **more: Any) -> Check:
        """Answer; ``more`` are value, unit, limit, source and gates."""
        return Check(**self._asdict(), status=status, reason=reason, **more)

    def fact(self, passed: bool, reason: str, **numbers: Any) -> Check:
        return self.answer("PASS" if passed else "FAIL", reason, **numbers)

    def skipped(self, reason: str, gates: bool = False, **numbers: Any) -> Check:
        """Answer that nothing could be evaluated, and why."""
        return self.answer("SKIPPED", reason, gates=gates, **numbers)

    def by(self, answer: Callable[..., Check], *args: Any, **options: Any) -> Check:
        """Let a function answer; a number that it reads and that is missing or not finite is a FAIL that names it."""
        try:
            return answer(self, *args, **options)
        except InvalidNumber as error:
            return self.fact(False, f"cannot be evaluated: {error}")
        except UNREADABLE as error:
            if isinstance(error, UserError):
                raise
            why = f"cannot be evaluated ({type(error).__name__}: {error})"
            return self.fact(False, f"{why}: the result is foreign, altered or of another version")


MAX_REASON = 240  # letters
_NARROWER = "More accepted runs (accept --add), a calibration or a quieter machine narrow the interval."


def verdict_of(
    checks: list[Check],
    broken: str = "",
    skipped: str = "",
    stopped: str = "",
    runs: int = 1,
    remedy: str | None = None,
) -> Verdict:
    """Combine the checks of a run. ``broken``, ``skipped`` and ``stopped`` are why it has no complete result.

    ``runs`` is the number of repetitions that are judged together. What is no run has a ``remedy`` of its own where it is
    AMBIGUOUS.
    """

    def verdict(word: Any, sentence: str) -> Verdict:
        return Verdict(verdict=word, sentence=sentence, checks=checks)

    def names(chosen: list[Check]) -> str:
        return ", ".join(check.name for check in chosen)

    if broken or stopped:
        return verdict("BROKEN" if broken else "STOPPED", capitalized(broken or stopped))
    if skipped:
        return verdict("SKIPPED", f"Nothing ran: {skipped}")
    if failed := [check for check in checks if check.gates and check.status == "FAIL"]:
        first, *others = failed
        rest = f". Also: {names(others)}" if others else ""
        why = textwrap.shorten(first.reason, MAX_REASON, placeholder=" …").rstrip(".")
        return verdict("FAIL", f"{counted(len(failed), 'check')} failed: {first.name}: {why}{rest}.")
    passed = [check for check in checks if check.status == "PASS"]
    if unsure := [check for check in checks if check.gates and check.status == "AMBIGUOUS"]:
        if remedy is not None:
            return verdict("AMBIGUOUS", f"Open: {names(unsure)}. {remedy}".strip())
        remedy = _NARROWER if runs > 1 else "--repeat 5 runs it again until it is decided."
        undecided = f"{counted(len(unsure), 'check')} undecided" + f" after {runs} runs" * (runs > 1)
        return verdict("AMBIGUOUS", f"Noise leaves {undecided}: {names(unsure)}. {remedy}")
    incomplete = [check for check in checks if check.word == "INCOMPLETE"]
    if all(check.kind in ("outcome", "budget") or check.name in (FINITE, AGREE) for check in passed):
        # That a run completed in time with possible numbers says nothing about what it was for.
        why = f": {incomplete[0].name}: {incomplete[0].reason}" if incomplete else ""
        return verdict("SKIPPED", f"Nothing that the run was for could be evaluated{why}.")
    alone = sum(check.status in ("NO_BASELINE", "NOT_COMPARABLE") for check in checks)
    rest = f"; {alone} not compared (no comparable baseline)" * bool(alone)
    rest += f"; incomplete: {names(incomplete)}" * bool(incomplete)
    aims = [check for check in checks if check.kind == "target" and check.word == "SKIPPED" and check.limit]
    rest += f"; target not judged: {names(aims)}" * bool(aims)
    return verdict("PASS", f"{counted(len(passed), 'check')} passed{rest}.")


def save_verdict(run_dir: Path | str, verdict: Verdict) -> None:
    """Write ``verdict.json``, and its checksum to the list of the run's files."""
    write_json(Path(run_dir) / "verdict.json", verdict.model_dump(mode="json"))
    run_folder.record_verdict(Path(run_dir))


def budget_check(run: Run) -> Check:
    ask = Ask("time budget", "Did the run stay within its tier's time budget?", kind="budget")
    budget, result = run.config.allowed_s, run.result
    total_s, startup_s = (result.value(name) if result else None for name in ("total_s", "startup_s"))
    if total_s is None or startup_s is None:
        return ask.fact(False, "the run does not say how long it took (startup_s, total_s)")
    spent_s = total_s - startup_s
    in_time = within(spent_s, budget)
    duration = f"{spent_s:.0f} s" if in_time else f"{spent_s:.1f} s"  # 60.2 s are not 60 s of 60 s
    reason = f"{duration} of {budget:.0f} s from the start-up of the ranks to their result"
    return ask.fact(in_time, reason, limit=f"<= {budget:.0f} s", value=spent_s, unit="s")


def finite_check(claims: Iterable[Claim], faults: Sequence[str] = ()) -> Check:
    """Check that every measured metric is a finite number, not below zero, and within its physical ceiling; every run measures some."""
    to = Ask(FINITE, "Are all values finite, non-negative and physically possible?")
    # Of faults no claims can be made.
    return to.fact(False, shortened(faults, between="; ")) if faults else to.by(_finite, claims)


def _finite(to: Ask, claims: Iterable[Claim]) -> Check:
    findings = [finding for rule in VALUES for _, finding in ask(rule, claims)]
    wrong = [finding for finding in findings if finding.status == "FAIL"]
    counts = Counter(finding.reason for finding in wrong or findings)
    reasons = [f"{reason} ({count:,})" if count > 1 else reason for reason, count in counts.items()]
    return to.fact(bool(findings) and not wrong, "; ".join(reasons) or "no value was measured")


def agreement_check(claims: Iterable[Claim], shown: Collection[str], faults: Sequence[str]) -> Check:
    """Check that all other numbers of a run follow from each other: every rule but those ``shown`` by checks of their own."""
    to = Ask(AGREE, "Are rates, counts, times and shares consistent with each other and with the raw samples?")
    return to.fact(False, shortened(faults, between="; ")) if faults else to.by(_agreement, claims, shown)


def _agreement(to: Ask, claims: Iterable[Claim], shown: Collection[str]) -> Check:
    judged = [judgement for judgement in judge_claims(claims) if judgement.rule.name not in shown]
    failures = [reason for judgement in judged for reason in judgement.failures]
    held = [judgement.rule.name for judgement in judged if judgement.status == "PASS"]
    # Without a rule that applies the metrics were compared with their rows all the same: those are the faults.
    return to.fact(not failures, "; ".join(failures) or f"consistent: {', '.join(held) or 'metrics and their rows'}")
