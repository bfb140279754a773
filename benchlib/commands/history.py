"""``benchlib history``: execute the history notebook headless and render it as ``history.html`` beside the list of runs."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from benchlib.commands import FOLDER, SET
from benchlib.commands.output import place, say
from benchlib.config.schema import nearest, parse_overrides
from benchlib.core.errors import UserError
from benchlib.core.files import home, not_written, outputs, write_text
from benchlib.core.interrupts import Interrupts
from benchlib.core.text import counted, look
from benchlib.judge import trends
from benchlib.judge.checks import Verdict
from benchlib.judge.trends import History
from benchlib.show.headless import execute, parameters_of

NAME = "history.html"
NOTEBOOK = home() / "notebooks" / "90_history.ipynb"
TIMEOUT_S = 600.0
PICTURES_LIMIT = 900_000  # base64 characters: they are what the page is there for


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
    import nbformat

    from benchlib.show import markup
    from benchlib.show.report import forms

    values = parameters(store, pairs)
    # Read and judged here first: a wrong filter is reported at once, and the exit code needs no notebook.
    history = trends.read_history(**values)
    verdict = trends.judge_history(history)
    # Beside the runs that were read; the demo runs of the kit are no place to write into.
    folder = Path(values["store"]) if values.get("store") else outputs()
    page, executed = folder / NAME, folder / ".history" / "notebook.ipynb"
    try:
        executed.parent.mkdir(parents=True, exist_ok=True)
        with Interrupts() as interrupts, interrupts.allowed():
            execute(NOTEBOOK, executed, values, TIMEOUT_S)
    except OSError as error:
        raise not_written(executed, error) from None
    except Exception as error:  # a failing cell, a dead kernel, a time-out
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"the history notebook stopped: {lines[-1]}; see {executed}") from None
    cells, about = nbformat.read(executed, as_version=4), heading(history, verdict)
    write_text(page, markup.page("history.html.j2", nb=cells, shown=forms(PICTURES_LIMIT, {}), run=about))
    show(history, verdict, page)
    return verdict.exit_code()


def heading(history: History, verdict: Verdict) -> dict[str, Any]:
    days = [f"{run.moment:%Y-%m-%d}" for run in (history.runs[0], history.runs[-1])] if history.runs else []
    return {
        "word": verdict.verdict,
        "sentence": verdict.sentence,
        "store": "the demo runs of the kit" if history.demo else history.store.name,
        "runs": counted(len(history.runs), "run"),
        "span": " to ".join(dict.fromkeys(days)),
        "asked": ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in vars(history.asked).items() if value),
    }


def show(history: History, verdict: Verdict, page: Path) -> None:
    head = heading(history, verdict)
    say((head["store"], "bold"), f"  {head['runs']}  {head['span']}")
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
