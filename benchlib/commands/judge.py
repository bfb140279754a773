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
from benchlib.judge.foreign.readers import not_read, read_claims
from benchlib.judge.impossible.rules import Judgement, judge_claims

POSSIBLE, IMPOSSIBLE, UNREADABLE, NO_RULE = 0, 1, 2, 3  # exit codes
WORST = (UNREADABLE, IMPOSSIBLE, NO_RULE, POSSIBLE)
MAX_REASONS = 3
COLOURS = {"PASS": "green", "FAIL": "red", "SKIPPED": "yellow"}


def judge_files(paths: tuple[Path, ...], as_json: bool) -> int:
    """Judge each file, print the findings, and return the worst exit code: 2, else 1, else 3, else 0."""
    documents = [_judged(path, as_json) for path in paths]
    if as_json:
        print(json.dumps(documents, indent=2, ensure_ascii=False))
    return min((document["exit_code"] for document in documents), key=WORST.index)


def _judged(path: Path, quiet: bool) -> dict[str, Any]:
    """Judge a file, show the findings unless ``quiet``, and return them."""
    try:
        name, claims = read_claims(path)
        judgements, unread = judge_claims(claims), not_read(path, name)
    except UserError as error:
        if not quiet:
            errors.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        return {"file": str(path), "exit_code": UNREADABLE, "error": str(error)}
    failed = [judgement.rule.name for judgement in judgements if judgement.failures]
    applied = sum(judgement.status != "SKIPPED" for judgement in judgements)
    of, rules = counted(len(claims), "statement"), counted(applied, "rule")
    code = IMPOSSIBLE if failed else POSSIBLE if applied else NO_RULE
    sentence = {
        IMPOSSIBLE: f"Impossible: {', '.join(failed)}. {rules} applied to {of}.",
        POSSIBLE: f"Nothing impossible in {of}; {rules} applied.",
        NO_RULE: f"No rule could be applied to {of}: the file does not state enough to judge it.",
    }[code]
    sentence += f" Not read: {', '.join(unread)}." if unread else ""
    if not quiet:
        say((str(path), "bold"), f"  {name}")
        rows = [
            {"rule": item.rule.name, "status": Text(item.status, COLOURS[item.status]), "finding": _reason(item)}
            for item in sorted(judgements, key=lambda item: item.status)
        ]
        show_table(rows, whole=("rule", "status"))
        say(sentence, "\n", style={POSSIBLE: "green", IMPOSSIBLE: "red"}.get(code, "yellow"))
    findings = [
        {"rule": item.rule.name, "catches": item.rule.catches, "status": item.status, "passed": item.passed}
        | {"failures": item.failures, "skipped": item.skipped}
        for item in judgements
    ]
    document = {"file": str(path), "format": name, "exit_code": code, "sentence": sentence, "not_read": unread}
    return document | {"findings": findings}


def _reason(item: Judgement) -> str:
    if item.failures:
        more = f"and {len(item.failures) - MAX_REASONS:,} more (--json lists all)"
        passed = f"{item.passed:,} other{'s are' if item.passed != 1 else ' is'} possible"
        lines = [*item.failures[:MAX_REASONS], more * (len(item.failures) > MAX_REASONS), passed * (item.passed > 0)]
        return "\n".join(filter(None, lines))
    first, count = (item.example, item.passed) if item.passed else (item.skipped[0], len(item.skipped))
    return first + (f" (and {count - 1:,} more)" if count > 1 else "")


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def verb(files: tuple[Path, ...], as_json: bool) -> None:
    """Look for impossible numbers in results of any origin.

    FILE is output of nccl-tests, an MLPerf LoadGen summary, a throughput table (CSV, TSV, Markdown),
    a run folder, report or JSON of the kit, or a claim in neutral JSON.

    \b
    Exit codes: 0 nothing impossible, 1 something is, 2 a file cannot be read, 3 it reports too little to be judged.
    """
    sys.exit(judge_files(files, as_json))
