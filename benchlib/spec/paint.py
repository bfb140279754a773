"""The kinds of picture, as ``charts.Chart`` calls them. What is missing or not finite is left out and counted."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchlib.core.stats import summary
from benchlib.show import figures as on
from benchlib.spec.charts import Line
from benchlib.spec.tables import Ref, Row, Rows, write

MAX_ROWS = 14
MAX_CELLS = 160  # of a grid with numbers in them
LINE = 30  # letters that fit below an axis
LOOKS: dict[str, dict[str, Any]] = {
    "line": {"linestyle": "-"},
    "limit": {"linestyle": on.DASHED, "linewidth": 1.4, "marker": ""},
    "claim": {"linestyle": ":", "linewidth": 1, "marker": "x", "markersize": 5},
}
Drawn = tuple[Row, str, str, str] | None  # the row that the picture is about, what stands at x and y, the alt text


def _drawable(ref: Ref, run: Rows) -> list[Row]:
    """Return the rows with a finite number, the largest first."""
    pairs = [(row, value) for row in ref.table.rows(run) if (value := ref.finite(row, run)) is not None]
    return [row for row, _ in sorted(pairs, key=lambda pair: -pair[1])]


def _numbers(ref: Ref, rows: Sequence[Row], run: Rows) -> Any:
    return np.array([ref.finite(row, run) for row in rows], dtype=float)  # None becomes nan


def alt(ref: Ref, rows: Sequence[Row], run: Rows, *more: Ref | None) -> str:
    """Write the name and the numbers of each row, and how many rows are not shown."""
    refs, cells = [ref, *filter(None, more)], list[str]()
    for row in rows:
        numbers = [f"{one.col.heading} " * (len(refs) > 1) + one.text(row, run) for one in refs]
        cells.append(f"{ref.table.name_of(row, run)} {', '.join(numbers)}")
    hidden = len(ref.table.rows(run)) - len(rows)
    return f"{'; '.join(cells)}." + f" {hidden} more are not shown." * (hidden > 0)


def heading(ref: Ref) -> str:
    unit = {"us": "µs", "ratio": "", "number": "", "count": "", "error": ""}.get(ref.col.unit, ref.col.unit)
    return f"{ref.col.heading} ({unit})" if unit and unit != ref.col.heading else ref.col.heading


def colour(number: int) -> str:
    return on.PALETTE.series[number % len(on.PALETTE.series)]


def lines(
    run: Rows, axes: Any, *layers: Line, x: str = "bytes", y: str = "", log: bool = True, even: bool = False
) -> Drawn:
    """Curves by size on a logarithmic axis, named at their ends; limits and claims of other tables lie behind them.

    ``y`` is written at its axis: by default the heading of the first layer's column. ``even``: places in an order, from 1.
    Without ``log`` y begins at 0, but for ``even`` places.
    """
    curves = [(layer, words, points) for layer in layers for words, points in layer.curves(run, x).items()]
    own = [point for layer, _, points in curves for point in points if layer.look == "line"]
    if not own:
        return None
    at, y, colours, ends = layers[0].table[x].col, y or heading(layers[0].ref), dict[Any, str](), list[Any]()
    places = [point[0] for layer, _, points in curves for point in points if layer.look != "limit"]
    if even:
        axes.set_xlim(min(places) - 0.1, max(places) + 0.1)
        axes.locator_params(axis="x", integer=True)
    else:
        on.size_axis(axes, places, partial(write, unit="B" if at.unit == "B" else "number"))
    for layer, words, points in curves:
        looks = LOOKS[layer.look] | ({"linestyle": (0, (3, 1.2))} if layer.dashed(points[0][2]) else {})
        key = points[0][2].get(layer.colour) if layer.colour else words
        if layer.look != "limit":
            colours.setdefault(key, colour(len(colours)))
        elif len(points) == 1:
            points = [(end, *points[0][1:]) for end in axes.get_xlim()]
        xs, ys, _ = zip(*points, strict=True)
        words += f"\n({layer.words})" * (layer.look == "claim")
        ends.append(on.draw_line(axes, xs, ys, words, colours.get(key, on.PALETTE.muted), **looks))
    if log:
        on.log_values(axes)
    elif not even:
        axes.set_ylim(bottom=0)
    on.name_ends(axes, ends)
    values = "; ".join(f"{end.words} {write(end.y, layers[0].ref.col.unit)}" for end in ends)
    row = max(own, key=lambda point: point[1])[2]
    return row, at.heading, y, f"{y} at the largest {at.heading}: {values}."


def _by_row(axes: Any, rows: Sequence[Row], run: Rows, *refs: Ref, mark: Ref | None = None) -> str:
    """Name the rows, draw a line across each bar at another number of its row, and return what x says of that."""
    places, ats = np.arange(len(rows)), _numbers(mark, rows, run) if mark else np.full(len(rows), np.nan)
    axes.vlines(ats, places - 0.42, places + 0.42, color=on.PALETTE.text, linewidth=2.2)
    on.label_rows(axes, [refs[0].table.name_of(row, run) for row in rows])
    if refs[1:]:
        axes.figure.legend(ncols=4, loc="outside lower center")
    return f"; black: {mark.col.heading}" if mark and np.isfinite(ats).any() else ""


def bars(
    run: Rows,
    axes: Any,
    *refs: Ref,
    mark: Ref | None = None,
    line: float | None = None,
    mute: Callable[[Row], bool] = lambda row: False,
    least: bool = False,
) -> Drawn:
    """Horizontal bars, the longest on top (``least``: the shortest), one for each of ``refs``; one of samples has its interval.

    ``mark`` is a line at another number of the row, ``line`` a value across all rows, ``mute`` says which rows are grey.
    """
    if not (rows := _drawable(refs[0], run)[:: -1 if least else 1][:MAX_ROWS]):
        return None
    series = {ref.col.heading: _numbers(ref, rows, run) for ref in refs}
    stats = np.array([summary(refs[0].numbers(row, run)) for row in rows], dtype=float)  # the median and its interval
    errors = None if refs[1:] else abs(stats[:, 1:] - stats[:, :1]).T
    first, *_ = on.grouped_bars(axes, series, xerr=errors)
    axes.bar_label(first, [refs[0].text(row, run) for row in rows], padding=5, fontsize=8)
    for bar, row in zip(first, rows, strict=True):
        if mute(row):
            bar.set_color(on.PALETTE.muted)
    words = _by_row(axes, rows, run, *refs, mark=mark)
    if line is not None:
        axes.axvline(line, color=on.PALETTE.muted, linewidth=1, linestyle=on.DASHED)
    axes.set_xlim(0, 1.2 * axes.dataLim.x1 or 1.0)
    on.short_numbers(axes.xaxis)
    return rows[0], heading(refs[0]) + words, "", alt(refs[0], rows, run, *refs[1:])


def stacked(run: Rows, axes: Any, *parts: Ref, x: str, mark: Ref | None = None) -> Drawn:
    """One bar for each row, of its parts one behind the other; ``mark`` is a line at another number of the row."""
    rows = [row for row in parts[0].table.rows(run) if any(part.finite(row, run) for part in parts)][:MAX_ROWS]
    if not rows:
        return None
    left = np.zeros(len(rows))
    for number, part in enumerate(parts):
        wide = np.fmax(_numbers(part, rows, run), 0.0)
        looks = {"color": colour(number), "hatch": "///" * (number // len(on.PALETTE.series)), "linewidth": 0.5}
        if wide.any():
            axes.barh(range(len(rows)), wide, 0.6, left, label=part.col.heading, edgecolor=on.PALETTE.card, **looks)
        left += wide
    words = _by_row(axes, rows, run, *parts, mark=mark)
    return rows[0], x + words, "", alt(parts[0], rows, run, *parts[1:], mark)


def grid(run: Rows, axes: Any, ref: Ref, *, x: str, y: str) -> Drawn:
    """A heat map: one field for each value of two columns, with its number while there is room."""
    import pandas as pd

    rows = _drawable(ref, run)
    if not rows:
        return None
    cells = pd.DataFrame([(row[y], row[x], ref.finite(row, run)) for row in rows])
    field = cells.pivot_table(index=0, columns=1, values=2)
    axes.figure.colorbar(axes.imshow(field, cmap="Blues", aspect="auto"), ax=axes, label=heading(ref))
    slanted = {"rotation": 30, "ha": "right"} if len("".join(map(str, field.columns))) > LINE else {}
    axes.set_xticks(range(len(field.columns)), field.columns, **slanted)
    axes.set_yticks(range(len(field)), field.index)
    axes.grid(False)
    middle, unit = (cells[2].min() + cells[2].max()) / 2, "ratio" if ref.col.unit == "ratio" else "number"
    for (place, column), value in np.ndenumerate(field) if field.size <= MAX_CELLS else ():
        if math.isfinite(value):
            looks = {"ha": "center", "va": "center", "fontsize": 8, "color": "white" if value > middle else "black"}
            axes.text(column, place, write(value, unit), **looks)
    return rows[-1], ref.table[x].col.heading, ref.table[y].col.heading, alt(ref, rows, run)
