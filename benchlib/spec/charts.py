"""Pictures as a spec declares them: each takes columns, its title is a finding, and its alt text has every value.

There are six kinds, each a function of ``benchlib.spec.paint`` with its options; pictures of another kind name a function
of their own. Nothing is imported before something is drawn.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from benchlib.spec.tables import Ref, Row, Rows, Table

if TYPE_CHECKING:
    import pandas

    from benchlib.show.figures import Drawing, Picture

Title = str | Callable[[Rows], str]


class Chart:
    """A picture: ``kind``, as ``module:function``, prepares what the spec names in ``of``, with its ``options``.

    It is called with the rows of a run and returns a ``Drawing``, whose frame is empty if nothing was recorded, as
    ``empty`` says then. A title is a format string over the row (``about``: the first one of that table), or a function of the
    rows, for one that compares several.
    """

    def __init__(
        self, kind: str, name: str, *of: Any, empty: str, title: Title = "", about: Table | None = None, **options: Any
    ) -> None:
        self.kind, self.name, self.of, self.empty = kind, name, of, empty
        self.title, self.about, self.options = title, about, options

    def _prepare(self, run: Rows) -> "Drawing":
        module, _, function = self.kind.partition(":")
        drawing: Drawing = getattr(importlib.import_module(module), function)(run, *self.of, **self.options)
        return drawing

    def frame(self, run: Rows) -> "pandas.DataFrame":
        """Return what the picture is drawn from: a row is an observation, and columns are named with their units."""
        return self._prepare(run).frame

    def draw(self, run: Rows) -> "Picture":
        """Return the picture; one that damaged numbers cannot give says so in its place."""
        from benchlib.show import figures as on

        try:
            drawing = self._prepare(run)
            return on.placeholder(self.empty) if drawing.frame.empty else on.draw(drawing, self._title(drawing, run))
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            words = f"The numbers of this picture are damaged ({type(error).__name__})."
            return on.placeholder(words, empty=False)  # a reader has to see it

    def _title(self, drawing: "Drawing", run: Rows) -> str:
        if callable(self.title):
            return self.title(run)
        if isinstance(drawing.about, str):
            return drawing.about
        row = next(iter(self.about.rows(run) if self.about else ()), drawing.about)
        return (self.about or self.of[0].table).text(self.title, row, run)


bars, stacked, grid, lines, steps, cumulative = (
    partial(Chart, f"benchlib.spec.paint:{kind}")
    for kind in ("bars", "stacked", "grid", "lines", "steps", "cumulative")
)


@dataclass(frozen=True)
class Line:
    """Curves of one column: one for each value of the columns ``by``, which name it, or ``name`` if they are empty.

    A ``limit`` is grey and may hold for any size, a ``claim`` has crosses and ``words`` behind its name.
    """

    ref: Ref
    by: str
    look: Literal["line", "limit", "claim"] = "line"
    words: str = "claimed"
    name: str = ""

    @property
    def table(self) -> Table:
        return self.ref.table

    def points(self, run: Rows, x: str, y: str, facet: str = "") -> list[tuple[Row, Row]]:
        """Return each row with a record of its samples; x is nan for a limit that holds for any."""
        points, at = list[tuple[Row, Row]](), self.table[x]
        kind = {"line": "measured", "limit": "limit", "claim": self.words}[self.look]
        for row in self.table.rows(run):
            place, value = at.finite(row, run), self.ref.finite(row, run)
            if value is None or value <= 0 or not (place or self.look == "limit"):
                continue
            words = filter(None, (self.table[column].text(row, run) for column in self.by.split()))
            of = {facet: "" if self.look == "limit" else self.table[facet].text(row, run)} if facet else {}
            of |= {"curve": ", ".join(words) or self.name or self.ref.col.heading, "kind": kind}
            samples = [number for number in self.ref.numbers(row, run) if number > 0]
            points.append((row, of | {at.titled: place or math.nan, y: samples}))
        return points
