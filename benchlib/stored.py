"""Where runs are stored: run folders, folders of them, and shared reports, all read into snapshots."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from benchlib.embedded import read_report
from benchlib.errors import UserError
from benchlib.results import Run, is_run
from benchlib.snapshot import Snapshot, snapshot


def run_folders(path: Path) -> list[Path]:
    """Return the run folders that ``path`` stands for: itself, or those one or two levels below it, by name."""
    return [path] if is_run(path) else sorted(_below(path, 2))


def _below(folder: Path, levels: int) -> Iterator[Path]:
    for child in folder.iterdir():
        if child.is_dir() and not child.name.startswith("."):
            if is_run(child):
                yield child
            elif levels > 1:
                yield from _below(child, levels - 1)


def load(path: Path | str) -> list[Snapshot]:
    """Read what ``path`` names: a run folder, a folder of runs (a day, or all), or a ``report.html``.

    Damaged runs are among them and say so; ``UserError`` for a path that is not there or holds no run, and for a report
    that is damaged.
    """
    path = Path(path)
    if path.is_file():
        return [read_report(path).model_copy(update={"report": str(path)})]
    if not path.is_dir():
        raise UserError(f"{path}: no such run, folder or report; `benchlib list --runs` shows the stored runs")
    folders = run_folders(path)
    if not folders:
        raise UserError(f"{path} holds no runs: give a run folder, a folder of runs or a report.html")
    return [snapshot(Run(folder)) for folder in folders]


def load_all(paths: Iterable[Path | str]) -> list[Snapshot]:
    """Read several arguments into one list, in their order."""
    return [run for path in paths for run in load(path)]
