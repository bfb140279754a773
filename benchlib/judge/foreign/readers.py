"""The formats that can be judged, how a file of each is recognised, and what it states. Benchmarks add those of their programs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from benchlib.benchmarks import loadable, of_run
from benchlib.core.errors import UserError, explained
from benchlib.core.files import read_json, read_text
from benchlib.core.run_folder import file_faults
from benchlib.core.text import counted, shortened
from benchlib.judge.baselines import Baseline, config_of
from benchlib.judge.impossible.claim import Claim, ClaimFile, Quantity
from benchlib.judge.impossible.own import Numbers
from benchlib.judge.impossible.rules import Judgement, judge_claims
from benchlib.results.run import Result, Run
from benchlib.results.shared import is_report, read_html

POSSIBLE, IMPOSSIBLE, UNREADABLE, NO_RULE, INVALID = 0, 1, 2, 3, 4  # exit codes
WORST = (UNREADABLE, IMPOSSIBLE, INVALID, NO_RULE, POSSIBLE)
MAX_REASONS = 3
UNKNOWN = 'not a format that can be judged, see `benchlib judge --help`; a claim file begins with "claim_version": 1'


class Reader(NamedTuple):
    """``read(path, content)`` returns the claims of a file or raises ``UserError``; the content is one of the ``model``, else text.

    JSON is of this format where it has all of ``keys``, text where ``sniff(path, text)`` says so. ``unread(path, text)`` says what
    no rule saw.
    """

    what: str
    read: Callable[[Path, Any], list[Claim]]
    keys: str = ""
    sniff: Callable[[Path, str], bool] | None = None
    model: type[BaseModel] | None = None
    unread: Callable[[Path, str], list[str]] | None = None

    def fits(self, path: Path, content: Any) -> bool:
        if isinstance(content, dict):
            return bool(self.keys) and set(self.keys.split()) <= content.keys()
        return self.sniff is not None and self.sniff(path, content)


def _run(folder: Path) -> list[Claim]:
    result = Run(folder).result
    if result is None:
        raise UserError(
            f"{folder}: no run folder with a result.json; a run that broke has none, and of a folder of runs each is named"
        )
    return _result(folder / "result.json", result)


def _result(path: Path, result: Result) -> list[Claim]:
    """Return what a result states; in its folder, whose files and rows have to agree with it, with samples and config."""
    if faults := file_faults(path.parent):
        raise UserError(f"{path.parent}: changed since the run ended: {'; '.join(faults)}")
    if not _in_its_folder(path):
        return Numbers(result).claims
    run, own = Run(path.parent), of_run(result.benchmark)
    if own and (faults := own.spec.disagreements(run)):
        raise UserError(f"{path.parent}: changed since the run ended: {shortened(faults)}")
    return Numbers.of_run(run).claims


def _in_its_folder(path: Path) -> bool:
    return (path.parent / "config.json").exists()


def _alone(path: Path, _: str) -> list[str]:
    alone = "raw samples, from which its metrics follow; judge the run's folder"
    return [] if _in_its_folder(path) else [alone]


def _report(path: Path, text: str) -> list[Claim]:
    """Return what the run of a shared report states; long series of raw samples are thinned in it."""
    try:
        run = read_html(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if run.result is None:
        raise UserError(f"{path}: the report of a run that left no result ({run.sentence})")
    return Numbers(run.result, run.samples, config_of(run.benchmark, run.config)).claims


CLAIM = Reader("a claim file (docs/claims.md)", lambda _, file: file.claims, "claim_version", model=ClaimFile)
RESULT = Reader(
    "the kit's result.json", _result, "schema_version benchmark world_size metrics", model=Result, unread=_alone
)
BASELINE = Reader(
    "the kit's baseline file", lambda _, file: file.claims(), "schema_version runs limits", model=Baseline
)
REPORT = Reader("the kit's shared report.html", _report, sniff=lambda _, text: is_report(text), unread=_alone)


def readers() -> dict[str, Reader]:
    """Return all readers by format, in the order of asking: those with unmistakable marks first."""
    formats = {"claim": CLAIM, "result": RESULT, "baseline": BASELINE, "report": REPORT}
    for benchmark in loadable():
        formats |= benchmark.part("foreign", "READERS", {})
    return formats


def read_claims(path: Path) -> tuple[str, list[Claim]]:
    """Return the format of a file and what it states. A folder is taken as a run of the kit. Raises ``UserError``."""
    if path.is_dir():
        return "run", _run(path)
    text = _text(path)
    content = read_json(path) if text.lstrip().startswith("{") else text
    name, reader = next((pair for pair in readers().items() if pair[1].fits(path, content)), ("", CLAIM))
    if not name:
        raise UserError(f"{path}: {UNKNOWN}")
    try:
        claims = reader.read(path, reader.model.model_validate(content) if reader.model else content)
    except ValidationError as error:
        if reader is not CLAIM or not (claims := _below_zero(error)):
            raise _invalid(path, reader, error) from None
    except UserError:
        raise
    except (ValueError, OverflowError) as error:  # such as a number with thousands of digits
        raise _invalid(path, reader, error) from None
    if not claims:
        raise UserError(f"{path}: {reader.what} without a single result; the file may be cut")
    return name, claims


def _invalid(path: Path, reader: Reader, error: Exception) -> UserError:
    reason = explained(error, reader.model) if isinstance(error, ValidationError) else f"a number: {error}"
    return UserError(f"{path}: {reader.what} with an invalid value ({reason})")


def _below_zero(error: ValidationError) -> list[Claim]:
    """Return what a claim file states below zero, where nothing else is wrong with it: such a file is impossible, not invalid."""
    faults = error.errors(include_url=False)
    if any(not item["type"].startswith("greater_than") or item["input"] >= 0 for item in faults):
        return []
    return [Claim(quantities=[Quantity(name=".".join(map(str, item["loc"])), value=item["input"])]) for item in faults]


def _text(path: Path) -> str:
    text = read_text(path)
    if not text.strip():
        raise UserError(f"{path}: the file is empty")
    return text


def judged(path: Path) -> dict[str, Any]:
    """Judge a file and return the findings as JSON has them."""
    try:
        name, claims = read_claims(path)
        judgements, reader = judge_claims(claims), readers().get(name)
        unread = reader.unread(path, _text(path)) if reader and reader.unread else []
    except UserError as error:
        return {"file": str(path), "exit_code": UNREADABLE, "error": str(error)}
    failed = [judgement.rule.name for judgement in judgements if judgement.failures]
    rare = [f"{judgement.rule.name} ({text})" for judgement in judgements for text in judgement.suspicious]
    applied = sum(judgement.status != "SKIPPED" for judgement in judgements)
    of, rules = counted(len(claims), "statement"), counted(applied, "rule")
    invalid = [claim for claim in claims if claim.verdict and not claim.verdict.valid]
    code = IMPOSSIBLE if failed else INVALID if invalid else POSSIBLE if applied else NO_RULE
    nothing = f"Nothing impossible in {of}; {rules} applied."
    sentence = {
        IMPOSSIBLE: f"Impossible: {', '.join(failed)}. {rules} applied to {of}.",
        POSSIBLE: nothing,
        INVALID: nothing,
        NO_RULE: f"No rule could be applied to {of}: the file does not state enough to judge it.",
    }[code]
    for claim in invalid:
        subject = claim.subject.removesuffix(", INVALID")
        unmet = ", ".join(claim.verdict.unmet if claim.verdict else []) or "not stated"
        sentence = f"INVALID, so that it is no result: {subject} (not satisfied: {unmet}). {sentence}"
    skipped = [f"{judgement.rule.name} ({text})" for judgement in judgements for text in judgement.skipped]
    sentence += f" Suspicious: {shortened(rare)}." if rare else ""
    sentence += f" Not checked: {shortened(skipped)}." if skipped else ""
    sentence += f" Not read: {', '.join(unread)}." if unread else ""
    findings = [
        {"rule": item.rule.name, "catches": item.rule.catches, "status": item.status, "finding": _finding(item)}
        | {"passed": item.passed, "failures": item.failures, "suspicious": item.suspicious, "skipped": item.skipped}
        for item in sorted(judgements, key=lambda item: item.status)
    ]
    document = {"file": str(path), "format": name, "exit_code": code, "sentence": sentence, "not_read": unread}
    return document | {"findings": findings}


def _finding(item: Judgement) -> str:
    if wrong := item.failures or item.suspicious:
        more = f"and {len(wrong) - MAX_REASONS:,} more (--json lists all)"
        return "\n".join([*wrong[:MAX_REASONS], *[more] * (len(wrong) > MAX_REASONS)])
    first, count = (item.example, item.passed) if item.passed else (item.skipped[0], len(item.skipped))
    return first + (f" (and {count - 1:,} more)" if count > 1 else "")
