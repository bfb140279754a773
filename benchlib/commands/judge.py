"""``benchlib judge``: apply the rules of impossible numbers to files of any origin, and show the findings."""

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from benchlib.commands.output import errors, say, show_table
from benchlib.core.errors import UserError
from benchlib.core.text import counted
from benchlib.judge.foreign.readers import UnknownFormat, expected, not_read, read_claims
from benchlib.judge.impossible.rules import Judgement, judge_claims

POSSIBLE, IMPOSSIBLE, UNREADABLE, NO_RULE = 0, 1, 2, 3  # exit codes
WORST = (UNREADABLE, IMPOSSIBLE, NO_RULE, POSSIBLE)
MAX_REASONS = 3
COLOURS = {"PASS": "green", "FAIL": "red", "SKIPPED": "yellow"}


def judge_files(paths: tuple[Path, ...], as_json: bool) -> int:
    """Judge each file, print the findings, and return the worst exit code: 2, else 1, else 3, else 0."""
    documents, unknown = list[dict[str, Any]](), False
    for path in paths:
        try:
            name, claims = read_claims(path)
            judgements, unread = judge_claims(claims), not_read(path, name)
        except (UserError, OverflowError) as error:
            reason = str(error) if isinstance(error, UserError) else f"{path}: a number too large ({error})"
            documents.append({"file": str(path), "exit_code": UNREADABLE, "error": reason})
            unknown |= isinstance(error, UnknownFormat)
            if not as_json:
                errors.print(Text.assemble(("error: ", "bold red"), reason), soft_wrap=True)
            continue
        code, sentence = _conclusion(judgements, len(claims))
        if any(claim.loadgen and claim.loadgen.valid is False for claim in claims):
            sentence += " LoadGen calls the run INVALID: it is no result."
        sentence += f" Not read: {', '.join(unread)}." if unread else ""
        document = {"file": str(path), "format": name, "exit_code": code, "sentence": sentence, "not_read": unread}
        documents.append(document | {"findings": [_finding(judgement) for judgement in judgements]})
        if not as_json:
            _show(path, name, judgements, sentence, code)
    if unknown and not as_json:
        errors.print(Text(f"Files that can be judged: {expected()}."), soft_wrap=True)
    if as_json:
        print(json.dumps(documents, indent=2, ensure_ascii=False))
    return min((document["exit_code"] for document in documents), key=WORST.index)


def _finding(judgement: Judgement) -> dict[str, Any]:
    named = {"rule": judgement.rule.name, "catches": judgement.rule.catches}
    return named | {name: getattr(judgement, name) for name in ("status", "passed", "failures", "skipped")}


def _conclusion(judgements: list[Judgement], statements: int) -> tuple[int, str]:
    failed = [judgement.rule.name for judgement in judgements if judgement.failures]
    applied = sum(judgement.status != "SKIPPED" for judgement in judgements)
    of, rules = counted(statements, "statement"), f"{counted(applied, 'rule')} applied"
    if failed:
        return IMPOSSIBLE, f"Impossible: {', '.join(failed)}. {rules} to {of}."
    if applied:
        return POSSIBLE, f"Nothing impossible in {of}; {rules}."
    return NO_RULE, f"No rule could be applied to {of}: the file does not state enough to judge it."


def _show(path: Path, name: str, judgements: list[Judgement], sentence: str, code: int) -> None:
    say((str(path), "bold"), f"  {name}")
    rows = [
        {"rule": item.rule.name, "status": Text(item.status, COLOURS[item.status]), "finding": _reason(item)}
        for item in sorted(judgements, key=lambda item: item.status)
    ]
    show_table(rows, whole=("rule", "status"))
    say(sentence, "\n", style={POSSIBLE: "green", IMPOSSIBLE: "red"}.get(code, "yellow"))


def _reason(judgement: Judgement) -> str:
    failures, passed = judgement.failures, judgement.passed
    if failures:
        more = [f"and {len(failures) - MAX_REASONS:,} more (--json lists all)"] * (len(failures) > MAX_REASONS)
        others = [f"{passed:,} other{'s are' if passed != 1 else ' is'} possible"] * (passed > 0)
        return "\n".join([*failures[:MAX_REASONS], *more, *others])
    first, count = (judgement.example, passed) if passed else (judgement.skipped[0], len(judgement.skipped))
    return first + (f" (and {count - 1:,} more)" if count > 1 else "")


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def verb(files: tuple[Path, ...], as_json: bool) -> None:
    """Look for impossible numbers in results of any origin.

    FILE is output of nccl-tests (text or JSON), an MLPerf LoadGen summary, a throughput table (CSV, TSV, Markdown),
    a run folder, report or JSON of the kit, or a claim in neutral JSON.

    \b
    Exit codes: 0 nothing impossible, 1 something is, 2 a file cannot be read, 3 it reports too little to be judged.
    """
    sys.exit(judge_files(files, as_json))
