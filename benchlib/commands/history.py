"""``benchlib history``: execute the history notebook headless and render it as ``history.html`` beside the list of runs."""

import sys
from collections.abc import Iterable
from pathlib import Path

import click

from benchlib.commands import FOLDER, SET
from benchlib.commands.output import place, say
from benchlib.config.schema import nearest, parse_overrides
from benchlib.core.errors import UserError
from benchlib.core.files import home, outputs
from benchlib.core.text import look
from benchlib.judge import trends
from benchlib.judge.checks import Verdict
from benchlib.judge.trends import History
from benchlib.show.headless import parameters_of
from benchlib.show.lines import about

NAME = "history.html"
NOTEBOOK = home() / "notebooks" / "90_history.ipynb"


def parameters(store: Path | None, pairs: Iterable[str]) -> dict[str, str]:
    """Return the notebook's parameters from the command line; an unknown name is a ``UserError`` with the nearest one."""
    values, available = parse_overrides(pairs), parameters_of(NOTEBOOK)
    for name in values:
        if name not in available:
            raise UserError(f"the history has no parameter {name!r}: {nearest(name, available)}")
    if place := store or values.get("store"):
        values["store"] = str(Path(place).expanduser().resolve())  # the notebook works in its own folder
    return values


def make(store: Path | None, pairs: Iterable[str]) -> int:
    """Judge a store, write its page into it, say where it is; return the exit code of the verdict."""
    from benchlib.show import report

    values = parameters(store, pairs)
    # Read and judged here first: a wrong filter is reported at once, and the exit code needs no notebook.
    history = trends.read_history(**values)
    verdict = trends.judge_history(history)
    # Beside the runs that were read; the demo runs of the kit are no place to write into.
    folder = Path(values["store"]) if values.get("store") else outputs()
    page = folder / NAME
    report.publish(NOTEBOOK, page.with_suffix(".ipynb"), page, values)
    show(history, verdict, page)
    return verdict.exit_code()


def show(history: History, verdict: Verdict, page: Path) -> None:
    store, *facts = about(history)
    say((store, "bold"), f"  {'  '.join(facts)}")
    for check in verdict.checks:
        if check.status in ("FAIL", "AMBIGUOUS"):
            say(f"  {check.status}  {check.name}: {check.reason}")
    say((verdict.verdict, f"bold {look(verdict.verdict).colour}"), f"  {verdict.sentence}\nhistory: {place(page)}")


@click.command()
@click.option("--store", type=FOLDER, help="Folder of runs. [default: outputs]")
@SET
def verb(store: Path | None, pairs: tuple[str, ...]) -> None:
    """Judge and draw the stored runs: trends, changes of level, machines. Writes history.html.

    Parameters are benchmark, tier, machine and metric.
    """
    sys.exit(make(store, pairs))
