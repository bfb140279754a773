"""Seven kinds of picture. Each takes columns of a spec; its title is a finding, and its alt text has every value.

A title is a format string over the row that the picture is about (by default the one with the largest number), or a
function of the rows where it compares several. What is missing or not finite is left out and counted. Matplotlib is
imported when something is drawn.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchlib.core.definitions import share_text
from benchlib.spec.tables import Ref, Row, Rows, Table, write

MAX_ROWS = 14
MAX_CELLS = 160  # of a grid with numbers in them
LINE = 30  # letters that fit below an axis
Point = tuple[float, float, Row]
Title = str | Callable[[Rows], str]
About = Table | None
Smooth = Callable[[list[float]], Any]


@dataclass(frozen=True)
class Chart:
    """A picture. ``paint(on, run, figure, axes)`` returns it, None where nothing was recorded; ``empty`` says so then.

    ``on`` is ``benchlib.show.figures``. One that is not for the ``report`` is for the notebook alone.
    """

    name: str
    empty: str
    paint: Callable[..., Any]
    report: bool = True

    def draw(self, run: Rows) -> Any:
        """Return the picture; one that damaged numbers cannot give says so in its place."""
        from benchlib.show import figures as on

        with on.in_style():
            figure, axes = on.blank(of_many=True)
            try:
                return self.paint(on, run, figure, axes) or on.leave_empty(figure, axes, self.empty)
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                figure, axes = on.blank(of_many=True)
                words = f"The numbers of this picture are damaged ({type(error).__name__})."
                on.leave_empty(figure, axes, words).empty = False  # a reader has to see it
                return figure


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

    def curves(self, run: Rows, x: str) -> dict[str, list[Point]]:
        """Return the points of each curve by its name, in the order of x; x is nan where a limit holds for any."""
        curves: dict[str, list[Point]] = {}
        for row in self.ref.table.rows(run):
            at, value = self.ref.table[x].finite(row, run), self.ref.finite(row, run)
            if value is not None and value > 0 and (at or self.look == "limit"):
                name = ", ".join(filter(None, (self.ref.table[column].text(row, run) for column in self.by.split())))
                curves.setdefault(name or self.ref.col.heading, []).append((at or math.nan, value, row))
        return {name: sorted(points, key=lambda point: point[0]) for name, points in curves.items()}


def _values(ref: Ref, run: Rows, least: bool = False) -> list[tuple[Row, float]]:
    """Return the rows with a finite number, the largest (``least``: smallest) first."""
    pairs = [(row, value) for row in ref.table.rows(run) if (value := ref.finite(row, run)) is not None]
    return sorted(pairs, key=lambda pair: pair[1] if least else -pair[1])[:MAX_ROWS]


def _title(title: Title, ref: Ref, about: About, row: Row, run: Rows) -> str:
    row = next(iter(about.rows(run) if about else ()), row)
    return title(run) if callable(title) else ref.table.text(title, row, run)


def _alt(ref: Ref, rows: Sequence[Row], run: Rows, *more: Ref) -> str:
    """Write the name and the numbers of each row, and how many rows are not shown."""
    cells = list[str]()
    for row in rows:
        numbers = [f"{one.col.heading} " * bool(more) + one.text(row, run) for one in (ref, *more)]
        cells.append(f"{ref.table.name_of(row, run)} {', '.join(numbers)}")
    hidden = len(ref.table.rows(run)) - len(rows)
    return f"{'; '.join(cells)}." + f" {hidden} more are not shown." * (hidden > 0)


def _heading(ref: Ref) -> str:
    unit = {"us": "µs", "ratio": "", "number": "", "count": "", "error": ""}.get(ref.col.unit, ref.col.unit)
    return f"{ref.col.heading} ({unit})" if unit and unit != ref.col.heading else ref.col.heading


def lines(
    name: str,
    *layers: Line,
    title: Title,
    empty: str,
    x: str = "bytes",
    y: str = "",
    about: About = None,
    log: bool = True,
    even: bool = False,
) -> Chart:
    """Curves by size on a logarithmic axis, named at their ends; limits and claims of other tables lie behind them.

    ``y`` is written at its axis: by default the heading of the first layer's column. ``even``: places in an order, from 1.
    Without ``log`` y begins at 0, but for ``even`` places.
    """
    y = y or _heading(layers[0].ref)

    def paint(on: Any, run: Rows, figure: Any, axes: Any) -> Any:
        curves = [(layer, words, points) for layer in layers for words, points in layer.curves(run, x).items()]
        own = [point for layer, _, points in curves for point in points if layer.look == "line"]
        if not own:
            return None
        ref, colours = layers[0].ref, dict[Any, str]()
        at = ref.table[x].col
        places = [point[0] for layer, _, points in curves for point in points if layer.look != "limit"]
        if even:
            axes.set_xlim(min(places) - 0.1, max(places) + 0.1)
            axes.locator_params(axis="x", integer=True)
        else:
            on.size_axis(axes, places)
        if at.unit != "B" and not even:
            ticks = sorted(set(places))
            axes.set_xticks(ticks, [f"{place:.3g}" if place % 1 else f"{place:,.0f}" for place in ticks])
        ends = []
        for layer, words, points in curves:
            key = points[0][2].get(layer.colour) if layer.colour else words
            if layer.look != "limit":
                colours.setdefault(key, on.PALETTE.series[len(colours) % len(on.PALETTE.series)])
            ends.append(_curve(on, axes, layer, words, points, colours.get(key, on.PALETTE.muted)))
        if log:
            on.log_values(axes)
        elif not even:
            axes.set_ylim(bottom=0)
        on.name_ends(axes, ends)
        words = _title(title, ref, about, max(own, key=lambda point: point[1])[2], run)
        values = "; ".join(f"{end.words} {write(end.y, ref.col.unit)}" for end in ends)
        return on.finish(figure, axes, words, at.heading, y, f"{y} at the largest {at.heading}: {values}.")

    return Chart(name, empty, paint)


def _curve(on: Any, axes: Any, layer: Line, words: str, points: list[Point], colour: str) -> Any:
    looks: dict[str, Any] = {"linestyle": (0, (3, 1.2)) if layer.dashed(points[0][2]) else "-"}
    if layer.look == "limit":
        low, high = axes.get_xlim()
        points = [point for point in points if math.isnan(point[0]) or low <= point[0] <= high] or points
        if len(points) == 1:
            points = [(low, *points[0][1:]), (high, *points[0][1:])]
        colour, looks = on.PALETTE.muted, {"marker": "", "linewidth": 1.4, "linestyle": on.DASHED}
    elif layer.look == "claim":
        words, looks = f"{words}\n({layer.words})", {"linewidth": 1, "marker": "x", "markersize": 5, "linestyle": ":"}
    xs, ys, _ = zip(*points, strict=True)
    return on.draw_line(axes, xs, ys, words, colour, **looks)


def _mark(on: Any, axes: Any, mark: Ref | None, rows: Sequence[Row], run: Rows) -> list[float]:
    """Draw a line across each bar at another number of its row, and return these numbers."""
    places = [(place, at) for place, row in enumerate(rows) if mark and (at := mark.finite(row, run)) is not None]
    for place, at in places:
        axes.plot([at] * 2, [place - 0.42, place + 0.42], color=on.PALETTE.text, linewidth=2.2)
    return [at for _, at in places]


def bars(
    name: str,
    ref: Ref,
    *others: Ref,
    title: Title,
    empty: str,
    mark: Ref | None = None,
    ends: tuple[Ref, Ref] | None = None,
    line: float | None = None,
    mute: Callable[[Row], bool] = lambda row: False,
    about: About = None,
) -> Chart:
    """Horizontal bars, the longest on top: ``others`` are further bars of the row, ``mark`` is a line at another number of it.

    ``ends`` is its interval, ``line`` a value across all rows, ``mute`` says which rows are grey.
    """

    def paint(on: Any, run: Rows, figure: Any, axes: Any) -> Any:
        rows = [row for row, _ in _values(ref, run)]
        if not rows:
            return None
        numbers = {one.col.heading: [one.finite(row, run) for row in rows] for one in (ref, *others)}
        series = {key: [math.nan if value is None else value for value in values] for key, values in numbers.items()}
        groups, marks = on.grouped_bars(axes, series), _mark(on, axes, mark, rows, run)
        longest = [line or 0.0, *marks, *(value for values in numbers.values() for value in values if value)]
        for place, (bar, row) in enumerate(zip(groups[0], rows, strict=True)):
            if not others:
                bar.set_color(on.PALETTE.muted if mute(row) else on.PALETTE.series[0])
            span = [end.finite(row, run) for end in ends or ()]
            if span and None not in span:
                axes.plot(span, [place, place], color=on.PALETTE.text, linewidth=1.4, solid_capstyle="butt")
                longest += span  # type: ignore[arg-type]
            beside = (max(bar.get_width(), *(value or 0.0 for value in span), 0.0), bar.get_y() + bar.get_height() / 2)
            on.note(axes, ref.text(row, run), beside, (5, 0), fontsize=8)
        if line is not None:
            axes.axvline(line, color=on.PALETTE.muted, linewidth=1, linestyle=on.DASHED)
        on.label_rows(axes, [ref.table.name_of(row, run) for row in rows])
        axes.set_xlim(0, 1.2 * max(longest) or 1.0)
        on.short_numbers(axes.xaxis)
        axes.set_xlabel(_heading(ref) + (f"; black: {mark.col.heading}" if mark and marks else ""))
        if others:
            figure.legend(ncols=4, loc="outside lower center")
        return on.head(figure, _title(title, ref, about, rows[0], run), _alt(ref, rows, run, *others))

    return Chart(name, empty, paint)


def stacked(
    name: str, *parts: Ref, title: Title, empty: str, x: str, mark: Ref | None = None, about: About = None
) -> Chart:
    """One bar for each row, of its parts one behind the other; ``mark`` is a line at another number of the row."""

    def paint(on: Any, run: Rows, figure: Any, axes: Any) -> Any:
        rows = [row for row in parts[0].table.rows(run) if any(part.finite(row, run) for part in parts)][:MAX_ROWS]
        if not rows:
            return None
        left = [0.0] * len(rows)
        for number, part in enumerate(parts):
            wide = [max(part.finite(row, run) or 0.0, 0.0) for row in rows]
            again, colour = divmod(number, len(on.PALETTE.series))
            looks = {"color": on.PALETTE.series[colour], "hatch": "///" * again, "edgecolor": on.PALETTE.card}
            if any(wide):
                axes.barh(range(len(rows)), wide, 0.6, left=left, linewidth=0.5, label=part.col.heading, **looks)
            left = [begin + value for begin, value in zip(left, wide, strict=True)]
        _mark(on, axes, mark, rows, run)
        on.label_rows(axes, [parts[0].table.name_of(row, run) for row in rows])
        axes.set_xlabel(x + (f"; black: {mark.col.heading}" if mark else ""))
        figure.legend(ncols=4, loc="outside lower center")
        alt = _alt(parts[0], rows, run, *parts[1:], *([mark] if mark else []))
        return on.head(figure, _title(title, parts[0], about, rows[0], run), alt)

    return Chart(name, empty, paint)


def dots(name: str, ref: Ref, *, title: Title, empty: str, about: About = None) -> Chart:
    """The median of each row's samples with its interval, on a logarithmic axis, the smallest on top."""

    def paint(on: Any, run: Rows, figure: Any, axes: Any) -> Any:
        from benchlib.core.stats import summary

        pairs = [(row, value) for row, value in _values(ref, run, least=True) if value > 0]
        if not pairs:
            return None
        axes.set_xscale("log")
        for place, (row, value) in enumerate(pairs):
            stats, colour = summary(ref.numbers(row, run)), on.PALETTE.series[0]
            if None not in (ends := (stats.ci_low, stats.ci_high)):
                axes.plot(ends, [place, place], color=colour, alpha=0.35, linewidth=5)
            axes.plot([value], [place], "o", color=colour, markersize=6)
            on.note(axes, ref.text(row, run), (1.01, place), xycoords=("axes fraction", "data"), annotation_clip=False)
        on.plain_numbers(axes.xaxis)
        rows = [row for row, _ in pairs]
        on.label_rows(axes, [ref.table.name_of(row, run) for row in rows])
        axes.set_xlabel(f"{_heading(ref)}: median, 95% interval")
        return on.head(figure, _title(title, ref, about, rows[0], run), _alt(ref, rows, run))

    return Chart(name, empty, paint)


def steps(name: str, ref: Ref, *, title: Title, empty: str, x: str = "step", smooth: Smooth = list) -> Chart:
    """The samples of each row in their order, for instance losses. ``smooth`` leaves them light behind it."""
    return _of_samples(name, ref, title, empty, x, _heading(ref), smooth=smooth)


def cumulative(name: str, ref: Ref, *, title: Title, empty: str, limit: Ref | None = None) -> Chart:
    """The share of each row's samples that is at most a value, on a logarithmic axis; a line at its ``limit``, of the row, too."""
    return _of_samples(name, ref, title, empty, _heading(ref), "share of all", limit=limit)


def _of_samples(
    name: str,
    ref: Ref,
    title: Title,
    empty: str,
    x: str,
    y: str,
    smooth: Smooth | None = None,
    limit: Ref | None = None,
) -> Chart:
    def paint(on: Any, run: Rows, figure: Any, axes: Any) -> Any:
        rows = [row for row in ref.table.rows(run) if any(map(math.isfinite, ref.numbers(row, run)))][:MAX_ROWS]
        ends = []
        for place, row in enumerate(rows):
            samples = list(filter(math.isfinite, ref.numbers(row, run)))
            order, colour = range(1, len(samples) + 1), on.PALETTE.series[place % len(on.PALETTE.series)]
            xs, ys = (order, smooth(samples)) if smooth else (sorted(samples), [at / len(samples) for at in order])
            if smooth:
                axes.plot(order, samples, color=colour, alpha=0.3, linewidth=0.9)
            words = write(ys[-1], ref.col.unit) if smooth and len(rows) == 1 else ref.table.name_of(row, run)
            marker = "" if len(samples) > 1 else "o"
            ends.append(on.draw_line(axes, xs, ys, words, colour, marker=marker))
            if limit and (at := limit.finite(row, run)) is not None:
                axes.axvline(at, color=colour, linewidth=1, linestyle=on.DASHED)
        if not rows:
            return None
        if not smooth:
            axes.set_xscale("log")
            on.plain_numbers(axes.xaxis)
        on.name_ends(axes, ends)
        words = _title(title, ref, None, rows[0], run)
        alt = f"{'Medians and limits' if limit else 'Medians'}: {_alt(ref, rows, run, *([limit] if limit else []))}"
        return on.finish(figure, axes, words, x, y, alt)

    return Chart(name, empty, paint)


def grid(name: str, ref: Ref, *, x: str, y: str, title: Title, empty: str, about: About = None) -> Chart:
    """A heat map: one field for each value of two columns, with its number while there is room."""

    def paint(on: Any, run: Rows, figure: Any, axes: Any) -> Any:
        import pandas as pd

        numbers = [(row, ref.finite(row, run)) for row in ref.table.rows(run)]
        cells = [(row[y], row[x], value, row) for row, value in numbers if value is not None]
        if not cells:
            return None
        field = pd.DataFrame([cell[:3] for cell in cells]).pivot_table(index=0, columns=1, values=2)
        figure.colorbar(axes.imshow(field, cmap="Blues", aspect="auto"), ax=axes, label=_heading(ref))
        columns = list(map(str, field.columns))
        slanted = {"rotation": 30, "ha": "right"} if len("".join(columns)) > LINE else {}
        axes.set_xticks(range(len(columns)), columns, **slanted)
        axes.set_yticks(range(len(field)), list(map(str, field.index)))
        axes.grid(False)
        middle = (field.min().min() + field.max().max()) / 2
        for place, values in enumerate(field.to_numpy() if field.size <= MAX_CELLS else ()):
            for column, value in enumerate(values):
                if math.isfinite(value):
                    colour = "#ffffff" if value > middle else "#000000"
                    words = share_text(value) if ref.col.unit == "ratio" else f"{value:.3g}"
                    axes.text(column, place, words, ha="center", va="center", fontsize=8, color=colour)
        least = min(cells, key=lambda cell: cell[2])[3]
        words, alt = _title(title, ref, about, least, run), _alt(ref, [cell[3] for cell in cells], run)
        return on.finish(figure, axes, words, ref.table[x].col.heading, ref.table[y].col.heading, alt)

    return Chart(name, empty, paint)
