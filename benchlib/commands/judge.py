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
from benchlib.judge.foreign.readers import IMPOSSIBLE, POSSIBLE, WORST, judged
from benchlib.judge.published import listed
from benchlib.judge.references import registry

COLOURS = {
    "PASS": "green",
    "FAIL": "red",
    "AMBIGUOUS": "yellow",
    "SKIPPED": "yellow",
    "unconfirmed": "yellow",
    "invalid": "red",
}


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

    FILE is output of nccl-tests or rccl-tests, a summary or detail log of MLPerf LoadGen, a throughput table
    (CSV, TSV, Markdown), a run folder, report or JSON of the kit, or a claim in neutral JSON.

    \b
    Exit codes: 0 nothing impossible (what is rare is called suspicious), 1 something is, 2 a file cannot be read, 3 it reports too little to be judged,
    4 the run calls itself INVALID.
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
    matches, figures = list(listed(metric, device)), registry()
    if not matches:
        near = nearest(device or metric, [*figures.quantities, *figures.devices])
        raise UserError(f"no figure of metric {metric!r} and device {device!r}: {near}")
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
