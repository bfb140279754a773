"""``benchlib judge``: the rules of impossible numbers applied to files of any origin; ``references``: the published figures."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from benchlib.commands.output import errors, say, show_table
from benchlib.core.errors import UserError, nearest
from benchlib.core.terminal import stacked
from benchlib.core.text import counted
from benchlib.judge.foreign.readers import not_read, read_claims
from benchlib.judge.impossible.rules import Judgement, judge_claims
from benchlib.judge.published import listed
from benchlib.judge.references import registry

POSSIBLE, IMPOSSIBLE, UNREADABLE, NO_RULE = 0, 1, 2, 3  # exit codes
WORST = (UNREADABLE, IMPOSSIBLE, NO_RULE, POSSIBLE)
MAX_REASONS = 3
COLOURS = {"PASS": "green", "FAIL": "red", "SKIPPED": "yellow", "unconfirmed": "yellow", "invalid": "red"}


def judged(path: Path) -> dict[str, Any]:
    """Judge a file and return the findings as JSON has them."""
    try:
        name, claims = read_claims(path)
        judgements, unread = judge_claims(claims), not_read(path, name)
    except UserError as error:
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
    findings = [
        {"rule": item.rule.name, "catches": item.rule.catches, "status": item.status, "finding": _finding(item)}
        | {"passed": item.passed, "failures": item.failures, "skipped": item.skipped}
        for item in sorted(judgements, key=lambda item: item.status)
    ]
    document = {"file": str(path), "format": name, "exit_code": code, "sentence": sentence, "not_read": unread}
    return document | {"findings": findings}


def _finding(item: Judgement) -> str:
    if item.failures:
        more = f"and {len(item.failures) - MAX_REASONS:,} more (--json lists all)"
        return "\n".join([*item.failures[:MAX_REASONS], *[more] * (len(item.failures) > MAX_REASONS)])
    first, count = (item.example, item.passed) if item.passed else (item.skipped[0], len(item.skipped))
    return first + (f" (and {count - 1:,} more)" if count > 1 else "")


def _show(document: dict[str, Any]) -> None:
    if "error" in document:
        errors.print(Text.assemble(("error: ", "bold red"), document["error"]), soft_wrap=True)
        return
    say((document["file"], "bold"), f"  {document['format']}")
    show_table(
        (
            {"rule": row["rule"], "status": Text(row["status"], COLOURS[row["status"]]), "finding": row["finding"]}
            for row in document["findings"]
        ),
        whole=("rule", "status"),
    )
    code = document["exit_code"]
    say(document["sentence"], "\n", style={POSSIBLE: "green", IMPOSSIBLE: "red"}.get(code, "yellow"))


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def judge(files: tuple[Path, ...], as_json: bool) -> None:
    """Look for impossible numbers in results of any origin.

    FILE is output of nccl-tests, an MLPerf LoadGen summary, a throughput table (CSV, TSV, Markdown),
    a run folder, report or JSON of the kit, or a claim in neutral JSON.

    \b
    Exit codes: 0 nothing impossible, 1 something is, 2 a file cannot be read, 3 it reports too little to be judged.
    """
    documents = list(map(judged, files))
    if as_json:
        click.echo(json.dumps(documents, indent=2, ensure_ascii=False))
    else:
        for document in documents:
            _show(document)
    sys.exit(min((document["exit_code"] for document in documents), key=WORST.index))


@click.command()
@click.option("--metric", "-m", default="", help="Only figures of this metric, such as f1 or matmul_flops.")
@click.option("--device", "-d", default="", help="Only figures of devices with this in their name, such as h100.")
def references(metric: str, device: str) -> None:
    """List the published figures that runs are placed beside, with conditions, source and validity."""
    quantities = registry().quantities
    if metric and not any(name.startswith(metric) for name in quantities):
        raise UserError(f"no figure of metric {metric!r}: {nearest(metric, quantities)}")
    matches = list(listed(metric, device))
    heads, rows = ("published", "holds for", "source", "validity"), list[dict[str, str | Text]]()
    for metric, group in itertools.groupby(matches, lambda match: match[0].metric):
        rows.append(dict.fromkeys(heads, "") | {"holds for": Text(metric.replace("_", " "), "bold")})
        for item, cells in group:
            conditions, source = stacked(cells["conditions"], cells["notes"]), stacked(cells["source"], cells["date"])
            validity = Text(item.validity, COLOURS.get(item.validity, ""))
            rows.append(dict(zip(heads, (cells["published"], conditions, source, validity), strict=True)))
    show_table(rows, right=("published",), whole=("validity",))
    words = "claimed by their sources; none was measured here. Invalid ones are never compared with."
    say(f"\n{counted(len(matches), 'figure')}, {words}")
