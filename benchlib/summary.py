"""What a terminal shows of a run that was judged."""

import contextlib
import shlex
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from benchlib import baselines, terminal
from benchlib.checks import Verdict
from benchlib.metrics import quantity
from benchlib.results import Run

console = terminal.console(least_width=120)
NARROW = 100  # columns; below, limits stand behind what was found and not in a column of their own
COLOURS = {
    "PASS": "green",
    "FAIL": "red",
    "AMBIGUOUS": "yellow",
    "SKIPPED": "yellow",
    "NO_BASELINE": "blue",
    "NOT_COMPARABLE": "blue",
}


def summarise(run_dir: Path, verdict: Verdict, report: Path | None) -> None:
    """Print the checks, what was not judged or compared, and the verdict of a run."""
    narrow = console.width < NARROW
    heads = ["check", "status", "what was found"] + ([] if narrow else ["limit"])
    table = Table(*heads, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for check in verdict.checks:
        if check.status in ("SKIPPED", "NO_BASELINE", "NOT_COMPARABLE"):
            continue  # what was not judged stands in a line below, with all reasons in the report
        word, colour = check.status.replace("_", " ").lower(), COLOURS.get(check.status, "white")
        if not check.gates and check.status == "FAIL":
            word, colour = "differs", "yellow"
        limit = f" (limit: {check.limit})" if narrow and check.limit else ""
        cells = [check.name, f"[{colour}]{word}[/]", escape(check.reason + limit), escape(check.limit)]
        table.add_row(*cells[: len(heads)])
    if table.row_count:
        console.print(table)
    skipped = [check for check in verdict.checks if check.status == "SKIPPED"]
    if skipped:
        names = ", ".join(
            check.name + (f" ({quantity(check.value, check.unit)})" if check.value is not None else "")
            for check in skipped
        )
        console.print(f"[yellow]not judged[/]  {escape(names)}", soft_wrap=True)
    open_ = [check for check in verdict.checks if check.status in ("NO_BASELINE", "NOT_COMPARABLE")]
    if open_:
        why = open_[0].reason.partition("; ")[2] or open_[0].reason
        console.print(f"[blue]no comparison[/]  for {len(open_)} metrics: {escape(why)}", soft_wrap=True)
        run = Run(run_dir)
        if verdict.verdict == "PASS" and (count := baselines.restarts(run)):
            why = f"it was started again {count} time{'s' * (count != 1)}, its speed is that of a part of it"
            console.print(f"[dim]this run cannot become a baseline: {why}; run it again undisturbed[/]", soft_wrap=True)
        elif verdict.verdict == "PASS" and not run.config.planted_slowdown:
            again = f'benchlib baseline accept {shlex.quote(_short(run_dir))} --reason "..."'
            console.print(f"[dim]to compare later runs with this one: {escape(again)}[/]", soft_wrap=True)
    if verdict.gate:
        console.print(f"[dim]{escape(verdict.gate['sentence'])}[/]", soft_wrap=True)
    word = "BROKEN" if verdict.broken else verdict.verdict
    colour = COLOURS.get(verdict.verdict, "white")
    console.print(f"[bold {colour}]{word}[/]  {escape(verdict.sentence)}", soft_wrap=True)
    if report is not None:
        console.print(f"report: {shown(report)}\n", soft_wrap=True)


def shown(path: Path) -> str:
    """Return a path for the console: relative where it lies below the working folder, on one line, its signs escaped."""
    return escape(terminal.one_line(_short(path)))


def _short(path: Path) -> str:
    with contextlib.suppress(ValueError):
        path = path.resolve().relative_to(Path.cwd())
    return str(path)
