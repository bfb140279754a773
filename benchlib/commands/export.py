"""``benchlib export``: stored runs for other tools."""

from pathlib import Path

import click

from benchlib.commands import OUT
from benchlib.core.files import outputs
from benchlib.core.text import shortened
from benchlib.results.shared import load_runs
from benchlib.show.exports import EXPORTS
from benchlib.show.exports import export as write

HELP = "Write stored runs for other tools. RUN is a run folder, a folder of runs or a report.html. [default: all]"
FORMATS = "\n".join(f"{name:<12} {entry.what}" for name, entry in EXPORTS.items())


@click.command(help=f"{HELP}\n\n\b\n{FORMATS}")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--to", "name", required=True, metavar="FORMAT", help="One of the formats above.")
@click.option("--output", "-o", default="", help="File, folder or store to write; - is the standard output.")
@click.option("--samples", is_flag=True, help="csv and parquet: one row per raw sample instead of one row per metric.")
@OUT
def verb(runs: tuple[str, ...], name: str, output: str, samples: bool, out: Path | None) -> None:
    chosen = [run for path in runs or [out or outputs()] for run in load_runs(path)]
    sentence = write(chosen, name, output, samples)
    if sentence:
        click.echo(sentence)
    if damaged := [run.run for run in chosen if run.word == "DAMAGED"]:
        click.echo(f"damaged, exported as they stand: {shortened(damaged, 3)}", err=True)
