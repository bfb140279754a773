"""``benchlib report``: judge and render stored runs again, without running anything."""

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
from benchlib.core.terminal import one_line
from benchlib.core.text import look
from benchlib.judge import verdict as judging
from benchlib.results.record import DAY, load
from benchlib.results.run import PARTS, Run, no_runs
from benchlib.results.shared import run_folders
from benchlib.results.verdict import EXIT_BROKEN, EXIT_PASS
from benchlib.show import index


def report(run_dir: Path) -> None:
    """Judge and render one run."""
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


@click.command()
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path))
@OUT
def verb(runs: tuple[Path, ...], out: Path | None) -> None:
    """Judge and render stored RUNS again, without running anything. [default: all]"""
    folder = out or outputs()
    chosen = list(runs) or run_folders(folder)
    if not chosen:
        raise UserError(no_runs(folder))
    code = EXIT_PASS
    for run_dir in chosen:
        try:
            report(run_dir)
        except Exception as error:  # the others are reported all the same
            reason = str(error) if isinstance(error, (UserError, OSError)) else unexpected(error)
            say(("error", "red"), f"  {place(run_dir)}: {reason.removeprefix(f'{run_dir}: ')}")
            code = EXIT_BROKEN
    # A run in STORE/<tier>-<day>/<run> changes the list of its own store. A copy elsewhere has no list.
    days = {run_dir.resolve().parent for run_dir in chosen}
    for store in sorted({day.parent for day in days if DAY.match(day.name)}):
        say(f"index: {place(index.render(store))}")
    sys.exit(code)
