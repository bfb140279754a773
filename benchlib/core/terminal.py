"""What goes to a terminal. Stored files, folder names and messages are foreign text: they may set no colour, move no cursor
and change no title."""

import os
import re
from collections.abc import Collection, Iterable, Mapping

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

# Control characters (C0 but tab and line feed, C1), and the marks that turn the direction of writing or break lines: they make
# a line read as something else.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """Return text without control characters; bytes that are not UTF-8 become question marks."""
    return _CONTROL.sub("", text).encode(errors="replace").decode()


def one_line(text: str) -> str:
    """Return a name as one harmless line: a line feed or tab in it shows as a space."""
    return harmless(" ".join(text.split()))


class _Console(Console):
    """Cleans the text of all that is printed; rich's own colours travel beside the text and stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for part in super().render(renderable, options):
            yield part if part.control or part.text.isprintable() else Segment(harmless(part.text), part.style)


def console(*, stderr: bool = False, least_width: int = 0) -> Console:
    """Return a console of harmless text; in a pipe tables are ``least_width`` wide, unless COLUMNS is set."""
    result = _Console(highlight=False, stderr=stderr)
    if not result.is_terminal:  # settled here: rich would look at the variable again for each line
        result.width = result.width if "COLUMNS" in os.environ else max(result.width, least_width)
    return result


def table(rows: Iterable[Mapping[str, object]], right: Collection[str] = (), whole: Collection[str] = ()) -> Table:
    """Return records as a table, a column for each name in the first: ``right`` ones aligned so, ``whole`` ones never wrapped.

    A cell is shown as its text, without markup; a ``Text`` has styles of its own.
    """
    records = list(rows)
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in records[0] if records else ():
        look = {"no_wrap": True} if name in whole else {"overflow": "fold"}
        grid.add_column(escape(name), justify="right" if name in right else "left", **look)  # type: ignore[arg-type]
    for record in records:
        grid.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in record.values()))
    return grid


def stacked(first: str | Text, second: str) -> Text:
    """Return a cell of two lines, the second one dim; without it a cell of one."""
    return Text.assemble(first, (f"\n{second}" if second else "", "dim"))
