"""``benchlib judge``: apply the rules of impossible numbers to files of others and of the kit, and show what they say."""

import json
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from benchlib.core import terminal
from benchlib.core.errors import UserError
from benchlib.judge.foreign.readers import UnknownFormat, expected, read_claims
from benchlib.judge.impossible.rules import Judgement, judge_claims

EXIT_POSSIBLE, EXIT_IMPOSSIBLE, EXIT_UNREADABLE, EXIT_NO_RULE = 0, 1, 2, 3
MOST_REASONS = 3
COLOURS = {"PASS": "green", "FAIL": "red", "SKIPPED": "yellow"}
console = terminal.console(least_width=120)
errors = terminal.console(stderr=True)


def judge_files(paths: tuple[Path, ...], as_json: bool) -> int:
    """Judge each file, print what was found, and return the worst exit code: 2, else 1, else 3, else 0."""
    codes, documents, unknown = [], list[dict[str, Any]](), False
    for path in paths:
        try:
            name, claims = read_claims(path)
            judgements = judge_claims(claims)
        except UserError as error:
            codes.append(EXIT_UNREADABLE)
            documents.append({"file": str(path), "exit_code": EXIT_UNREADABLE, "error": str(error)})
            if not as_json:
                errors.print(f"[red bold]error:[/] {escape(str(error))}", soft_wrap=True)
            unknown = unknown or isinstance(error, UnknownFormat)
            continue
        code = exit_code(judgements)
        codes.append(code)
        sentence = closing(judgements, len(claims))
        documents.append(document(path, name, code, sentence, judgements))
        if not as_json:
            _show(path, name, judgements, sentence, code)
    if unknown and not as_json:
        errors.print(f"Files that can be judged: {escape(expected())}.", soft_wrap=True)
    if as_json:
        print(json.dumps(documents, indent=2, ensure_ascii=False))
    return next((code for code in (EXIT_UNREADABLE, EXIT_IMPOSSIBLE, EXIT_NO_RULE) if code in codes), EXIT_POSSIBLE)


def exit_code(judgements: list[Judgement]) -> int:
    """Return 1 where something is impossible, 0 where rules applied and nothing is, 3 where none applied."""
    if any(judgement.failures for judgement in judgements):
        return EXIT_IMPOSSIBLE
    return EXIT_POSSIBLE if any(judgement.passed for judgement in judgements) else EXIT_NO_RULE


def closing(judgements: list[Judgement], statements: int) -> str:
    """Say in a sentence what all rules together say."""
    failed = [judgement.rule.name for judgement in judgements if judgement.failures]
    applied = sum(judgement.status != "SKIPPED" for judgement in judgements)
    of = f"{statements:,} statement{'s' * (statements != 1)}"
    if failed:
        return f"Impossible: {', '.join(failed)}. {applied} rule{'s' * (applied != 1)} applied to {of}."
    if applied:
        return f"Nothing impossible in {of}; {applied} rule{'s' * (applied != 1)} applied."
    return f"No rule could be applied to {of}: the file does not state enough to judge it."


def document(path: Path, name: str, code: int, sentence: str, judgements: list[Judgement]) -> dict[str, Any]:
    """Return what was found for a machine to read: every failing and skipped statement with its reason."""
    return {
        "file": str(path),
        "format": name,
        "exit_code": code,
        "sentence": sentence,
        "findings": [
            {
                "rule": judgement.rule.name,
                "catches": judgement.rule.catches,
                "status": judgement.status,
                "passed": judgement.passed,
                "failures": list(judgement.failures),
                "skipped": list(judgement.skipped),
            }
            for judgement in judgements
        ],
    }


def _show(path: Path, name: str, judgements: list[Judgement], sentence: str, code: int) -> None:
    console.print(f"[bold]{escape(str(path))}[/]  {escape(name)}", soft_wrap=True)
    table = Table(
        Column("rule", no_wrap=True), Column("status", no_wrap=True), "what was found",
        box=None, padding=(0, 2), header_style="bold",
    )  # fmt: skip
    for judgement in sorted(judgements, key=lambda judgement: judgement.status):
        status = f"[{COLOURS[judgement.status]}]{judgement.status}[/]"
        table.add_row(escape(judgement.rule.name), status, escape(_reason(judgement)))
    if judgements:
        console.print(table)
    colour = {EXIT_POSSIBLE: "green", EXIT_IMPOSSIBLE: "red"}.get(code, "yellow")
    console.print(f"[{colour}]{escape(sentence)}[/]\n", soft_wrap=True)


def _reason(judgement: Judgement) -> str:
    if judgement.failures:
        more = len(judgement.failures) - MOST_REASONS
        shown = "\n".join(judgement.failures[:MOST_REASONS])
        rest = f"\nand {more:,} more (--json lists all)" if more > 0 else ""
        return shown + rest + _possible(judgement.passed)
    if judgement.passed:
        return judgement.example + (f" (and {judgement.passed - 1:,} more)" if judgement.passed > 1 else "")
    return judgement.skipped[0] + (f" (and {len(judgement.skipped) - 1:,} more)" if len(judgement.skipped) > 1 else "")


def _possible(passed: int) -> str:
    return f"\n{passed:,} other{'s are' if passed != 1 else ' is'} possible" if passed else ""
