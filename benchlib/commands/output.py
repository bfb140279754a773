"""What commands print: lines and tables on one console, foreign text as it is and without control characters."""

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from benchlib.core import terminal

console = terminal.console(least_width=140)
errors = terminal.console(stderr=True)


def say(*parts: object, style: str = "", fold: bool = False) -> None:
    """Print a line; a long one is folded at words only where ``fold`` says so. A part with a style is a pair (text, style)."""
    words = [part if isinstance(part, (tuple, Text)) else str(part) for part in parts]
    console.print(Text.assemble(*words, style=style), soft_wrap=not fold)


def show_table(rows: Iterable[Mapping[str, Any]], **columns: Any) -> None:
    """Print records as a table, see ``terminal.table``; nothing where there are none."""
    if records := list(rows):
        console.print(terminal.table(records, **columns))


def place(path: Path) -> str:
    """Return a path for a reader: on one line, relative where it lies below the working folder."""
    with contextlib.suppress(ValueError):
        path = path.resolve().relative_to(Path.cwd())
    return terminal.one_line(str(path))
