"""The kinds of picture, as ``charts.Chart`` calls them. What is missing or not finite is left out and counted.

Each returns a tidy frame, one row an observation, and what paints this frame: samples stay samples until seaborn draws them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from benchlib.core.stats import Average, average, summary
from benchlib.show import figures as on
from benchlib.show.figures import Drawing
from benchlib.show.light import seaborn
from benchlib.spec.charts import Line
from benchlib.spec.tables import Ref, Row, Rows, fields, write

Rule = Callable[[Row], bool]
MAX_ROWS = 14
MAX_CELLS = 160  # of a grid with numbers in them
MAX_TICKS, FEW_TICKS = 6, 2  # sizes written along an axis, and along each of several
LETTERS = 30  # that fit below an axis
BEYOND = 1.6  # of the longest bar: samples above it are counted and not shown
BAND = ("pi", 80)  # of the samples of a curve
LOOKS: dict[Any, dict[str, Any]] = {
    "measured": {"marker": "o", "markersize": 4, "markeredgewidth": 0, "errorbar": BAND},
    "limit": {"linestyle": on.DASHED, "linewidth": 1.4, "errorbar": None},
}
NUMBERS: dict[Average, str] = {"median": "Medians", "mean": "Means", "harmonic": "All work over all time"}
CLAIM: dict[str, Any] = {"linestyle": ":", "linewidth": 1, "marker": "x", "markersize": 5, "errorbar": None}


def _drawable(ref: Ref, run: Rows) -> list[Row]:
    """Return the rows with a finite number, the largest first."""
    pairs = [(row, value) for row in ref.table.rows(run) if (value := ref.finite(row, run)) is not None]
    return [row for row, _ in sorted(pairs, key=lambda pair: -pair[1])]


def alt(ref: Ref, rows: Sequence[Row], run: Rows, *more: Ref | None) -> str:
    """Write the name and the numbers of each row, and how many rows are not shown."""
    refs, cells = [ref, *filter(None, more)], list[str]()
    for row in rows:
        numbers = [f"{one.col.heading} " * (len(refs) > 1) + one.text(row, run) for one in refs]
        cells.append(f"{ref.table.name_of(row, run)} {', '.join(numbers)}")
    hidden = len(ref.table.rows(run)) - len(rows)
    return f"{'; '.join(cells)}." + f" {hidden} more are not shown." * (hidden > 0)


def _tidy(records: Iterable[Row], value: str) -> pd.DataFrame:
    """Return a frame with a row for each sample of records that hold lists of them in ``value``."""
    frame = pd.DataFrame(map(dict, records))
    return (
        frame if frame.empty else frame.explode(value, ignore_index=True).dropna(subset=[value]).astype({value: float})
    )


def _observed(refs: Sequence[Ref], rows: Sequence[Row], run: Rows, *more: Ref | None) -> pd.DataFrame:
    """Return a frame of all samples of some columns: beside each the name of its row, what this is made of, and ``more``.

    Several columns share one, with their headings in the column ``kind``.
    """
    table, records, value = refs[0].table, list[Row](), refs[0].titled
    for row in rows:
        parts = [(part, part.raw(row, run)) for part in map(table.__getitem__, fields(table.title))]
        named = {part.titled: part.text(row, run) if isinstance(cell, (str, list)) else cell for part, cell in parts}
        named = {"name": table.name_of(row, run)} | named | {one.titled: one.finite(row, run) for one in more if one}
        for ref in refs:
            kind = {"kind": ref.col.heading} if refs[1:] else {}
            records.append(named | kind | {value: list(filter(math.isfinite, ref.numbers(row, run)))})
    return _tidy(records, value)


def _colours(names: Iterable[Any]) -> dict[Any, str]:
    return {name: on.SERIES[number % len(on.SERIES)] for number, name in enumerate(names)}


def interval(samples: "pd.Series[float]", kind: Average = "median") -> tuple[float, float]:
    """Return the ends of the kit's interval of the average; nan for samples that have none."""
    _, low, high = summary(samples.tolist(), kind)
    return (np.nan, np.nan) if low is None or high is None else (low, high)


def lines(
    run: Rows, *layers: Line, x: str = "bytes", y: str = "", log: bool = True, even: bool = False, facet: str = ""
) -> Drawing:
    """Curves by size on a logarithmic axis; limits and claims of other tables lie behind them.

    A curve of samples goes through their medians, in a band that holds 80% of them. ``y`` is written at its axis: by default
    the heading of the first layer's column. ``even``: places in an order, from 1. Without ``log`` y begins at 0, but for ``even``
    places. Each value of the column ``facet`` has axes for its curves, else curves are named at their ends.
    """
    at, value = layers[0].table[x], layers[0].ref
    x, y = at.titled, y or value.titled
    points = [(layer, *point) for layer in layers for point in layer.points(run, at.col.name, y, facet)]
    own = [(layer.ref.finite(row, run) or 0.0, row) for layer, row, _ in points if layer.look == "line"]
    frame = _tidy([record for *_, record in points] if own else [], y)
    if frame.empty:
        return Drawing(frame)
    measured, sized = frame[frame["kind"] == "measured"], frame.loc[frame["kind"] != "limit", x].tolist()
    facet = facet if facet and measured[facet].nunique() > 1 else ""
    colours, limits = _colours(measured["curve"].unique()), frame.loc[frame["kind"] == "limit", "curve"].unique()
    ends = []
    for _, part in frame.groupby([*filter(None, [facet]), "curve", "kind"], sort=False):
        last = part[part[x] == part[x].max()] if part[x].notna().any() else part
        name, kind = last[["curve", "kind"]].iloc[0]
        words = filter(None, [last[facet].iloc[0] if facet else "", name + f" ({kind})" * (kind not in LOOKS)])
        ends.append(f"{', '.join(words)} {write(last[y].median(), value.col.unit)}")

    def paint(axes: Axes, frame: pd.DataFrame) -> None:
        if even:
            axes.set_xlim(min(sized) - 0.1, max(sized) + 0.1)
            axes.locator_params(axis="x", integer=True)
        else:
            text, most = partial(write, unit="B" if at.col.unit == "B" else "number"), FEW_TICKS if facet else MAX_TICKS
            on.size_axis(axes, sized, text, most)
        for _, part in frame.groupby(["curve", "kind"], sort=False):
            name, kind = part[["curve", "kind"]].iloc[0]
            if kind == "limit" and part[x].nunique() < 2:  # it holds for any
                part = pd.DataFrame({x: axes.get_xlim(), y: part[y].median()})
            colour = colours.get(name, on.MUTED)
            looks = LOOKS.get(kind, CLAIM) | {"color": colour, "markeredgecolor": colour}
            looks["label"] = name + f"\n({kind})" * (kind not in LOOKS)
            if facet and name in limits[1:]:  # without a name at its end
                looks["linestyle"] = "-."
            seaborn.lineplot(part, x=x, y=y, estimator="median", legend=False, ax=axes, **looks)
        if log:
            on.log_values(axes)
        elif not even:
            axes.set_ylim(bottom=0)
        if not facet:
            on.name_ends(axes)

    about = max(own, key=lambda pair: pair[0])[1]
    return Drawing(
        frame, paint, about, at.col.heading, y, f"{y} at the largest {at.col.heading}: {'; '.join(ends)}.", facet
    )


def bars(
    run: Rows, *refs: Ref, mark: Ref | None = None, line: float = 0.0, mute: Rule | None = None, least: bool = False
) -> Drawing:
    """Horizontal bars, the longest on top (``least``: the shortest), one for each of ``refs``, of the average of its column.

    Samples are ticks on their bar, with the interval of their average. ``mark`` is a line at another number of the row,
    ``line`` a value across all rows, if it is not 0, ``mute`` says which rows are grey.
    """
    rows, x = _drawable(refs[0], run)[:: -1 if least else 1][:MAX_ROWS], refs[0].titled
    frame = _observed(refs, rows, run, mark)
    if frame.empty:
        return Drawing(frame)
    hue, bar = ("kind", ["name", "kind"]) if refs[1:] else ("name", ["name"])
    colours = _colours(frame["kind"].unique()) if refs[1:] else dict.fromkeys(frame["name"], on.SERIES[0])
    colours |= {refs[0].table.name_of(row, run): on.MUTED for row in rows if mute and mute(row)}
    kind = refs[0].col.average

    def number(samples: "pd.Series[float]") -> float:
        return average(samples.tolist(), kind)

    sampled, numbers = frame.duplicated(bar).any(), frame.groupby(bar)[x].agg(number)
    marked = np.nan_to_num(frame[mark.titled].max()) if mark else 0.0
    end = 1.2 * max(min(frame[x].max(), BEYOND * numbers.max()), line, marked) or 1.0

    def paint(axes: Axes, frame: pd.DataFrame) -> None:
        looks = {"data": frame, "x": x, "y": "name", "hue": hue, "palette": colours, "legend": False, "ax": axes}
        light = {"saturation": 1, "alpha": 0.4 if sampled else 1, "err_kws": {"color": on.TEXT, "linewidth": 1.6}}
        seaborn.barplot(estimator=number, errorbar=partial(interval, kind=kind), **light, **looks)
        if sampled:
            ticks = {"marker": "|", "size": 9, "linewidth": 1.1, "jitter": False, "dodge": bool(refs[1:])}
            seaborn.stripplot(**ticks, **looks)
        if line:
            axes.axvline(line, color=on.MUTED, linewidth=1, linestyle=on.DASHED)
        above = 0.4 - 0.4 / len(refs)  # the first bar is above the middle of its row
        first = frame[frame["kind"] == refs[0].col.heading] if refs[1:] else frame
        for place, (_, samples) in enumerate(first.groupby("name", sort=False)[x]):
            right = min(end, np.nanmax([samples.max(), *interval(samples, kind)]))
            words = write(number(samples), refs[0].col.unit)
            on.note(axes, words, (right, place - above), (5, 0), fontsize=8)
        _finish_rows(axes, frame, mark, colours if refs[1:] else {})
        axes.set_xlim(0, end)
        on.short_numbers(axes.xaxis)

    beyond = int((frame[x] > end).sum())
    words = [x, "|: one measurement" * bool(sampled), f"{beyond} more beyond" * (beyond > 0), _black(frame, mark)]
    return Drawing(frame, paint, rows[0], "; ".join(filter(None, words)), "", alt(refs[0], rows, run, *refs[1:]))


def _black(frame: pd.DataFrame, mark: Ref | None) -> str:
    return f"black: {mark.col.heading}" if mark and frame[mark.titled].notna().any() else ""


def _finish_rows(axes: Axes, frame: pd.DataFrame, mark: Ref | None, colours: Mapping[Any, str]) -> None:
    """Name the rows of a frame and their colours, and draw a line across each at another number of it."""
    rows = frame.groupby("name", sort=False)
    on.label_rows(axes, list(map(str, rows.groups)))
    if mark:
        places = np.arange(len(rows))
        looks: dict[str, Any] = {"color": on.TEXT, "linewidth": 2.2}
        axes.vlines(rows[mark.titled].first(), places - 0.42, places + 0.42, **looks)
    on.legend_below(axes.figure, on.patches(colours))


def stacked(run: Rows, *parts: Ref, x: str, mark: Ref | None = None) -> Drawing:
    """One bar for each row, of its parts one behind the other; ``mark`` is a line at another number of the row."""
    rows = [row for row in parts[0].table.rows(run) if any(part.finite(row, run) for part in parts)][:MAX_ROWS]
    frame = _observed(parts, rows, run, mark).rename(columns={parts[0].titled: x, "kind": "part"})
    if frame.empty:
        return Drawing(frame)

    def paint(axes: Axes, frame: pd.DataFrame) -> None:
        medians = frame.groupby(["name", "part"], sort=False)[x].median().reset_index()
        colours = _colours(medians.loc[medians[x] > 0, "part"].unique())
        looks = {"multiple": "stack", "shrink": 0.7, "alpha": 1, "edgecolor": on.PAPER, "palette": colours}
        looks |= {"hue_order": list(reversed(colours)), "legend": False}  # seaborn begins with the last one
        seaborn.histplot(medians, y="name", weights=x, hue="part", ax=axes, **looks)
        _finish_rows(axes, frame, mark, colours)

    words = "; ".join(filter(None, [x, _black(frame, mark)]))
    return Drawing(frame, paint, rows[0], words, "", alt(parts[0], rows, run, *parts[1:], mark))


def grid(run: Rows, ref: Ref, *, x: str, y: str) -> Drawing:
    """A heat map: one field for each value of two columns, with its number if there is room."""
    rows, across, down = _drawable(ref, run), ref.table[x].col.heading, ref.table[y].col.heading
    frame = pd.DataFrame({down: row[y], across: row[x], ref.titled: ref.finite(row, run)} for row in rows)
    if frame.empty:
        return Drawing(frame)

    def paint(axes: Axes, frame: pd.DataFrame) -> None:
        field = frame.pivot_table(index=down, columns=across, values=ref.titled)
        text = partial(write, unit="ratio" if ref.col.unit == "ratio" else "number")
        looks = {"cmap": "Blues", "cbar_kws": {"label": ref.titled}, "annot_kws": {"fontsize": 8}, "ax": axes}
        seaborn.heatmap(field, annot=field.map(text) if field.size <= MAX_CELLS else False, fmt="", **looks)
        axes.tick_params(axis="y", labelrotation=0)
        if len("".join(map(str, field.columns))) > LETTERS:
            axes.set_xticks(axes.get_xticks(), list(field.columns), rotation=30, ha="right")
        axes.grid(False)

    return Drawing(frame, paint, rows[-1], across, down, alt(ref, rows, run))


def _with_samples(ref: Ref, run: Rows) -> list[Row]:
    return [row for row in ref.table.rows(run) if any(map(math.isfinite, ref.numbers(row, run)))][:MAX_ROWS]


def steps(run: Rows, ref: Ref, x: str = "step", smooth: Callable[[list[float]], Any] | None = None) -> Drawing:
    """The samples of each row in their order, for instance losses. ``smooth`` leaves them light behind it."""
    y, rows = ref.titled, _with_samples(ref, run)
    frame = _observed([ref], rows, run)
    if frame.empty:
        return Drawing(frame)
    frame[x] = frame.groupby("name").cumcount() + 1
    drawn = f"{y}, smoothed" if smooth else y
    if smooth:
        frame[drawn] = frame.groupby("name")[y].transform(lambda samples: smooth(samples.tolist()))

    def paint(axes: Axes, frame: pd.DataFrame) -> None:
        colours = _colours(frame["name"].unique())
        for name, part in frame.groupby("name", sort=False):
            looks: Any = {"x": x, "color": colours[name], "estimator": None, "legend": False, "ax": axes}
            if smooth:
                seaborn.lineplot(part, y=y, alpha=0.3, linewidth=0.9, **looks)
            words = write(part[drawn].iloc[-1], ref.col.unit) if smooth and len(colours) == 1 else name
            seaborn.lineplot(part, y=drawn, label=words, marker="o" if len(part) == 1 else None, **looks)
        on.name_ends(axes)

    return Drawing(frame, paint, rows[0], x, y, f"{NUMBERS[ref.col.average]}: {alt(ref, rows, run)}")


def cumulative(run: Rows, ref: Ref, limit: Ref | None = None) -> Drawing:
    """The share of each row's samples that is at most a value, on a logarithmic axis; a line at its ``limit``, of the row, too."""
    x, rows = ref.titled, _with_samples(ref, run)
    frame = _observed([ref], rows, run, limit)
    if frame.empty:
        return Drawing(frame)

    def paint(axes: Axes, frame: pd.DataFrame) -> None:
        colours = _colours(frame["name"].unique())
        for name, part in frame.groupby("name", sort=False):
            looks: Any = {"color": colours[name], "label": name}
            seaborn.ecdfplot(part, x=x, log_scale=True, legend=False, ax=axes, **looks)
            for bound in part[limit.titled].dropna().unique() if limit else ():
                axes.axvline(bound, color=colours[name], linewidth=1, linestyle=on.DASHED)
                on.note(axes, "limit", (bound, 0.02), (-3, 4), fontsize=8, color=colours[name])
        on.plain_numbers(axes.xaxis)
        axes.set_ylim(0, 1.03)
        on.name_ends(axes)

    words = f"{'Medians and limits' if limit else 'Medians'}: {alt(ref, rows, run, limit)}"
    return Drawing(frame, paint, rows[0], x, "share of all", words)
