"""``benchlib report``, ``page`` and ``export``: stored runs are judged, drawn and written again; nothing is measured."""

import sys
from pathlib import Path

import click

from benchlib.benchmarks import BENCHMARKS
from benchlib.commands import OUT
from benchlib.commands.output import place, say
from benchlib.commands.run import keep, settled
from benchlib.core import run_folder
from benchlib.core.errors import UserError, unexpected
from benchlib.core.files import outputs
from benchlib.core.options import Finite
from benchlib.core.terminal import one_line
from benchlib.core.text import look, shortened
from benchlib.judge import verdict as judging
from benchlib.results.record import DAY, load
from benchlib.results.run import PARTS, Run, no_runs
from benchlib.results.shared import load_runs, run_folders
from benchlib.results.verdict import EXIT_BROKEN, EXIT_PASS
from benchlib.show import exports

FORMS = "markdown writes report.md and pictures/ beside report.html."


def judge_again(run_dir: Path, form: str = "html") -> None:
    """Judge and render one run; with the form ``markdown`` as Markdown, too."""
    if sum((Run(run_dir).path / name).exists() for name in PARTS) < 2:  # one alone may be another program's
        raise UserError("not a run folder of benchlib: nothing is written there")
    benchmark = BENCHMARKS.get(load(run_dir, whole=False).benchmark)
    if benchmark and benchmark.fault:  # what cannot be judged is not called broken
        raise UserError(benchmark.fault)
    if run_folder.is_running(run_dir):
        say(f"RUNNING  {place(run_dir)}: still going on, nothing changed")
        return
    settled(run_dir)
    verdict = judging.judged(Run(run_dir))
    word = load(run_dir, False, verdict).word
    say((word, look(word).colour), f"  {place(run_dir / 'report.html')}")
    if verdict.verdict != "PASS":
        say(f"  {one_line(verdict.sentence)}")
    keep(run_dir, verdict)
    if form == "markdown":
        from benchlib.show import markdown

        say(f"  {place(markdown.render(run_dir))}")


@click.command()
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--format", "form", type=click.Choice(["html", "markdown"]), default="html", show_default=True, help=FORMS
)
@OUT
def report(runs: tuple[Path, ...], form: str, out: Path | None) -> None:
    """Judge and render stored RUNS again, without running anything. [default: all]"""
    from benchlib.show import index

    folder = out or outputs()
    chosen = list(runs) or run_folders(folder)
    if not chosen:
        raise UserError(no_runs(folder))
    code = EXIT_PASS
    for run_dir in chosen:
        try:
            judge_again(run_dir, form)
        except Exception as error:  # the others are reported all the same
            reason = str(error) if isinstance(error, (UserError, OSError)) else unexpected(error)
            say(("error", "red"), f"  {place(run_dir)}: {reason.removeprefix(f'{run_dir}: ')}")
            code = EXIT_BROKEN
    # A run in STORE/<tier>-<day>/<run> changes the list of its own store. A copy elsewhere has no list.
    days = {run_dir.resolve().parent for run_dir in chosen}
    for store in sorted({day.parent for day in days if DAY.match(day.name)}):
        say(f"index: {place(index.render(store))}")
    sys.exit(code)


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--price", type=Finite(0, min_open=True), metavar="USD", help="Of a device (CPU: machine) hour.")
def page(folder: Path, price: float | None) -> None:
    """Write FOLDER/report.html: whether this machine is right, fast and worth its price.

    FOLDER is the day of a tier, such as outputs/quick-20261126. The newest run of each
    benchmark counts; one that was changed on purpose or skipped only where there is no other.
    """
    from benchlib.show import machine_page

    if not machine_page.newest(folder):
        raise UserError(f"{folder} holds no run: name the day of a tier, such as outputs/quick-20261126")
    say(f"page: {place(machine_page.render(folder, usd_per_hour=price))}")


HELP = "Write stored runs for other tools. RUN is a run folder, a folder of runs or a report.html. [default: all]"
FORMATS = "\n".join(f"{name:<12} {entry.what}" for name, entry in exports.EXPORTS.items())


@click.command(help=f"{HELP}\n\n\b\n{FORMATS}")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--to", "name", required=True, metavar="FORMAT", help="One of the formats above.")
@click.option("--output", "-o", default="", help="File, folder or store to write; - is the standard output.")
@click.option("--samples", is_flag=True, help="csv and parquet: one row per raw sample instead of one row per metric.")
@OUT
def export(runs: tuple[str, ...], name: str, output: str, samples: bool, out: Path | None) -> None:
    chosen = [run for path in runs or [out or outputs()] for run in load_runs(path)]
    if sentence := exports.export(chosen, name, output, samples):
        click.echo(sentence)
    if damaged := [run.run for run in chosen if run.word == "DAMAGED"]:
        click.echo(f"damaged, exported as they stand: {shortened(damaged, 3)}", err=True)
