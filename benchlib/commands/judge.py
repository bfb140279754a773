"""``benchlib judge``: apply the rules of impossible numbers to files of any origin, and show the findings."""

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.text import Text

from benchlib.commands import user_errors
from benchlib.core import terminal
from benchlib.core.errors import UserError
from benchlib.judge.foreign.readers import UnknownFormat, expected, not_read, read_claims
from benchlib.judge.impossible.rules import Judgement, judge_claims

EXIT_POSSIBLE, EXIT_IMPOSSIBLE, EXIT_UNREADABLE, EXIT_NO_RULE = 0, 1, 2, 3
MOST_REASONS = 3
COLOURS = {"PASS": "green", "FAIL": "red", "SKIPPED": "yellow"}
console = terminal.console(least_width=120)
errors = terminal.console(stderr=True)


def judge_files(paths: tuple[Path, ...], as_json: bool) -> int:
    """Judge each file, print the findings, and return the worst exit code: 2, else 1, else 3, else 0."""
    documents, unknown = list[dict[str, Any]](), False
    for path in paths:
        try:
            name, claims = read_claims(path)
            judgements, unread = judge_claims(claims), not_read(path, name)
        except (UserError, OverflowError) as problem:
            error = problem if isinstance(problem, UserError) else UserError(f"{path}: a number too large ({problem})")
            documents.append({"file": str(path), "exit_code": EXIT_UNREADABLE, "error": str(error)})
            unknown = unknown or isinstance(error, UnknownFormat)
            if not as_json:
                errors.print(f"[red bold]error:[/] {escape(str(error))}", soft_wrap=True)
            continue
        code, sentence = _conclusion(judgements, len(claims))
        sentence += f" Not read: {', '.join(unread)}." if unread else ""
        findings = [
            {
                "rule": judgement.rule.name,
                "catches": judgement.rule.catches,
                "status": judgement.status,
                "passed": judgement.passed,
                "failures": judgement.failures,
                "skipped": judgement.skipped,
            }
            for judgement in judgements
        ]
        documents.append(
            {
                "file": str(path),
                "format": name,
                "exit_code": code,
                "sentence": sentence,
                "not_read": unread,
                "findings": findings,
            }
        )
        if not as_json:
            _show(path, name, judgements, sentence, code)
    if unknown and not as_json:
        errors.print(f"Files that can be judged: {escape(expected())}.", soft_wrap=True)
    if as_json:
        print(json.dumps(documents, indent=2, ensure_ascii=False))
    codes = {document["exit_code"] for document in documents}
    return next((code for code in (EXIT_UNREADABLE, EXIT_IMPOSSIBLE, EXIT_NO_RULE) if code in codes), EXIT_POSSIBLE)


def _conclusion(judgements: list[Judgement], statements: int) -> tuple[int, str]:
    """Return the exit code of a file, and a sentence that says why."""
    failed = [judgement.rule.name for judgement in judgements if judgement.failures]
    applied = sum(judgement.status != "SKIPPED" for judgement in judgements)
    of, rules = f"{statements:,} statement{'s' * (statements != 1)}", f"{applied} rule{'s' * (applied != 1)} applied"
    if failed:
        return EXIT_IMPOSSIBLE, f"Impossible: {', '.join(failed)}. {rules} to {of}."
    if applied:
        return EXIT_POSSIBLE, f"Nothing impossible in {of}; {rules}."
    return EXIT_NO_RULE, f"No rule could be applied to {of}: the file does not state enough to judge it."


def _show(path: Path, name: str, judgements: list[Judgement], sentence: str, code: int) -> None:
    console.print(f"[bold]{escape(str(path))}[/]  {escape(name)}", soft_wrap=True)
    rows = [
        {"rule": item.rule.name, "status": Text(item.status, COLOURS[item.status]), "finding": _reason(item)}
        for item in sorted(judgements, key=lambda item: item.status)
    ]
    if rows:
        console.print(terminal.table(rows, whole=("rule", "status")))
    colour = {EXIT_POSSIBLE: "green", EXIT_IMPOSSIBLE: "red"}.get(code, "yellow")
    console.print(f"[{colour}]{escape(sentence)}[/]\n", soft_wrap=True)


def _reason(judgement: Judgement) -> str:
    failures, passed = judgement.failures, judgement.passed
    if failures:
        lines = list(failures[:MOST_REASONS])
        if len(failures) > MOST_REASONS:
            lines.append(f"and {len(failures) - MOST_REASONS:,} more (--json lists all)")
        if passed:
            lines.append(f"{passed:,} other{'s are' if passed != 1 else ' is'} possible")
        return "\n".join(lines)
    first, count = (judgement.example, passed) if passed else (judgement.skipped[0], len(judgement.skipped))
    return first + (f" (and {count - 1:,} more)" if count > 1 else "")


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@user_errors
def verb(files: tuple[Path, ...], as_json: bool) -> None:
    """Look for impossible numbers in results of any origin.

    FILE is output of nccl-tests (text or JSON), an MLPerf LoadGen summary, a throughput table (CSV, TSV, Markdown),
    a run folder, report or JSON of the kit, or a claim in neutral JSON.

    \b
    Exit codes: 0 nothing impossible, 1 something is, 2 a file cannot be read, 3 it reports too little to be judged.
    """
    sys.exit(judge_files(files, as_json))
