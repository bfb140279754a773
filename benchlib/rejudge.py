"""`benchlib report`: judge and render stored runs again, and refresh the lists that they stand in."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.markup import escape

from benchlib import judge as judging
from benchlib import terminal
from benchlib.checks import EXIT_BROKEN, EXIT_PASS
from benchlib.errors import StorageError, UserError
from benchlib.paths import outputs
from benchlib.results import Run, find_runs
from benchlib.runner import keep, settled, write_index
from benchlib.summary import COLOURS, console, shown

_DAY = re.compile(r".+-\d{8}")


def report_all(runs: Iterable[Path], out: Path | None) -> int:
    """Judge and render stored runs again; the exit code is 2 where one could not be judged, or nothing be written."""
    folder = out or outputs()
    chosen = list(runs) or list(find_runs(folder))
    if not chosen:
        raise UserError(f"{folder} holds no runs yet: `benchlib run quick` makes the first")
    codes = [_report(run_dir) for run_dir in chosen]
    # A run lies in STORE/<tier>-<day>/<run>: its own store's list is the one that changes. A copy elsewhere has none.
    places = [run_dir.resolve().parent for run_dir in chosen]
    for store in sorted({place.parent for place in places if _DAY.fullmatch(place.name)}):
        codes.append(write_index(store))
    sys.stdout.flush()
    return max(codes)


def _report(run_dir: Path) -> int:
    """Judge and render one run; return the exit code."""
    try:
        run = Run(run_dir)
        if not run.recognised:
            raise UserError("not a run folder of benchlib: nothing is written there")
        if judging.is_running(run_dir):
            console.print(f"{shown(run_dir)}: still running, left alone", soft_wrap=True)
            return EXIT_PASS
        settled(run_dir)
        verdict = judging.judged(Run(run_dir))
    except (UserError, OSError) as error:
        text = str(error).removeprefix(f"{run_dir}: ")
        console.print(f"[red]error[/]  {shown(run_dir)}: {escape(text)}", soft_wrap=True)
        return EXIT_BROKEN
    word = "BROKEN" if verdict.broken else verdict.verdict
    try:
        place = shown(keep(run_dir, verdict))
        code = EXIT_PASS
    except StorageError as error:
        place, code = f"{shown(run_dir)}: {escape(verdict.sentence)}\n[red]error[/]  {escape(str(error))}", EXIT_BROKEN
    console.print(f"[{COLOURS.get(verdict.verdict, 'white')}]{word}[/]  {place}", soft_wrap=True)
    if verdict.verdict != "PASS" and code == EXIT_PASS:
        console.print(f"  {escape(terminal.one_line(verdict.sentence))}", soft_wrap=True)
    return code
