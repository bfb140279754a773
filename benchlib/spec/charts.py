"""Pictures as a spec declares them: each takes columns, its title is a finding, and its alt text has every value.

There are four kinds, each a function of ``benchlib.spec.paint`` with its options; pictures of another kind name a function
of their own. Nothing is imported before something is drawn.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from benchlib.spec.tables import Ref, Row, Rows, Table

Point = tuple[float, float, Row]
Title = str | Callable[[Rows], str]


class Chart:
    """A picture: ``paint``, as ``module:function``, draws what the spec names in ``of``, with its ``options``.

    It is called with the rows of a run and the axes, and returns the row that the picture is about or a title,
    what stands at x and y, and the alt text; without a y the title is over the whole figure. It returns None where nothing
    was recorded, as ``empty`` says then. A title is a format string over the row (``about``: the first one of that table),
    or a function of the rows where it compares several.
    """

    def __init__(
        self, paint: str, name: str, *of: Any, empty: str, title: Title = "", about: Table | None = None, **options: Any
    ) -> None:
        self.paint, self.name, self.of, self.empty = paint, name, of, empty
        self.title, self.about, self.options = title, about, options

    def draw(self, run: Rows) -> Any:
        """Return the picture; one that damaged numbers cannot give says so in its place."""
        from benchlib.show import figures as on

        module, _, function = self.paint.partition(":")
        paint = getattr(importlib.import_module(module), function)
        with on.in_style():
            figure, axes = on.blank(of_many=True)
            try:
                if (drawn := paint(run, axes, *self.of, **self.options)) is None:
                    return on.draw_placeholder(figure, axes, self.empty)
                title, x, y, alt = drawn
                if callable(self.title):
                    title = self.title(run)
                elif self.title:
                    about = next(iter(self.about.rows(run) if self.about else ()), title)
                    title = (self.about or self.of[0].table).text(self.title, about, run)
                axes.set_xlabel(x)
                return on.finish(figure, axes, title, x, y, alt) if y else on.head(figure, title, alt)
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                figure, axes = on.blank(of_many=True)
                words = f"The numbers of this picture are damaged ({type(error).__name__})."
                on.draw_placeholder(figure, axes, words).empty = False  # a reader has to see it
                return figure


lines, bars, stacked, grid = (
    partial(Chart, f"benchlib.spec.paint:{kind}") for kind in ["lines", "bars", "stacked", "grid"]
)


@dataclass(frozen=True)
class Line:
    """Curves of one column: one for each value of the columns ``by``, which name it.

    A ``limit`` is grey and may hold for any size, a ``claim`` has crosses and ``words`` behind its name. Curves with the same
    value of the column ``colour`` share a colour.
    """

    ref: Ref
    by: str
    look: Literal["line", "limit", "claim"] = "line"
    dashed: Callable[[Row], bool] = lambda row: False
    words: str = "claimed"
    colour: str = ""

    @property
    def table(self) -> Table:
        return self.ref.table

    def curves(self, run: Rows, x: str) -> dict[str, list[Point]]:
        """Return the points of each curve by its name, in the order of x; x is nan where a limit holds for any."""
        curves: dict[str, list[Point]] = {}
        for row in self.table.rows(run):
            at, value = self.table[x].finite(row, run), self.ref.finite(row, run)
            if value is not None and value > 0 and (at or self.look == "limit"):
                name = ", ".join(filter(None, (self.table[column].text(row, run) for column in self.by.split())))
                curves.setdefault(name or self.ref.col.heading, []).append((at or math.nan, value, row))
        return {name: sorted(points, key=lambda point: point[0]) for name, points in curves.items()}
