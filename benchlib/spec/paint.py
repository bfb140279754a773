"""The kinds of picture, as ``charts.Chart`` calls them. What is missing or not finite is left out and counted.

Each returns a tidy frame, one row an observation, and what paints this frame: raw samples stay samples until seaborn draws.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import seaborn
from matplotlib.axes import Axes

from benchlib.core.stats import summary
from benchlib.show import figures as on
from benchlib.show.figures import Drawing
from benchlib.spec.charts import Line
from benchlib.spec.tables import Ref, Row, Rows, fields, write

MAX_ROWS = 14
MAX_CELLS = 160  # of a grid with numbers in them
FEW_TICKS = 2  # of each of several axes
LINE = 30  # letters that fit below an axis
BEYOND = 1.6  # of the longest bar: samples above it are counted and not shown
MEASURED = "measured"
LOOKS: dict[str, dict[str, Any]] = {
    MEASURED: {"marker": "o", "markersize": 4, "markeredgewidth": 0, "errorbar": ("pi", 80)},
    "limit": {"linestyle": on.DASHED, "linewidth": 1.4, "errorbar": None},
}
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


def _named(ref: Ref, row: Row, run: Rows, *more: Ref | None) -> dict[str, Any]:
    """Return the name of a row, what it is made of, and ``more`` numbers, each in a column."""
    parts = [ref.table[name] for name in fields(ref.table.title)]
    cells = {part.titled: part.raw(row, run) for part in parts}
    words = {part.titled: part.text(row, run) for part in parts if isinstance(cells[part.titled], str)}
    numbers = {one.titled: one.finite(row, run) for one in more if one}
    return {"name": ref.table.name_of(row, run)} | cells | words | numbers


def _colours(names: Iterable[Any]) -> dict[Any, str]:
    series = on.PALETTE.series
    return {name: series[number % len(series)] for number, name in enumerate(names)}


def interval(samples: "pd.Series[float]") -> tuple[float, float]:
    """Return the ends of the kit's interval of the median; nan for samples that have none."""
    _, low, high = summary(samples.tolist())
    return (np.nan, np.nan) if low is None or high is None else (low, high)


def lines(
    run: Rows,
    *layers: Line,
    x: str = "bytes",
    y: str = "",
    log: bool = True,
    even: bool = False,
    facet: str = "",
) -> Drawing:
    """Curves by size on a logarithmic axis; limits and claims of other tables lie behind them.

    A curve of samples goes through their medians, in a band that holds 80% of them. ``y`` is written at its axis: by default
    the heading of the first layer's column. ``even``: places in an order, from 1. Without ``log`` y begins at 0, but for ``even``
    places. Each value of the column ``facet`` has axes for its curves, else curves are named at their ends.
    """
    at, value = layers[0].table[x], layers[0].ref
    y = y or value.titled
    points = [(layer, *point) for layer in layers for point in layer.points(run, x, y, facet)]
    own = [(layer.ref.finite(row, run) or 0.0, row) for layer, row, _ in points if layer.look == "line"]
    frame = pd.DataFrame([record for *_, records in points for record in records] if own else [])
    if frame.empty:
        return Drawing(frame)
    if facet and frame.loc[frame["kind"] == MEASURED, facet].nunique() < 2:
        facet = ""
    ends = _ends(frame, at.titled, y, facet)
    values = "; ".join(f"{end.words} {write(end.y, value.col.unit)}" for end in ends)
    colours = _colours(frame.loc[frame["kind"] == MEASURED, "curve"].unique())
    places = frame.loc[frame["kind"] != "limit", at.titled].tolist()
    looks = {
        "x": at.titled,
        "y": y,
        "places": places,
        "unit": at.col.unit,
        "log": log,
        "even": even,
        "named": not facet,
    }
    words = f"{y} at the largest {at.col.heading}: {values}."
    row = max(own, key=lambda pair: pair[0])[1]
    return Drawing(frame, partial(_paint_lines, colours=colours, **looks), row, at.col.heading, y, words, facet)


def _ends(frame: pd.DataFrame, x: str, y: str, facet: str = "") -> list[on.End]:
    """Return the last point of each curve, the median if it has several, with the name of the curve."""
    ends = []
    by = [facet, "curve", "kind"] if facet else ["curve", "kind"]
    for (*names, kind), part in frame.groupby(by, sort=False):
        last = part[part[x] == part[x].max()] if part[x].notna().any() else part
        words = ", ".join(filter(None, names)) + f"\n({kind})" * (kind not in LOOKS)
        ends.append(on.End(float(last[x].iloc[0]), float(last[y].median()), words, ""))
    return ends


def _paint_lines(
    axes: Axes,
    frame: pd.DataFrame,
    *,
    x: str,
    y: str,
    unit: str,
    places: Sequence[float],
    colours: dict[Any, str],
    log: bool,
    even: bool,
    named: bool,
) -> None:
    if even:
        axes.set_xlim(min(places) - 0.1, max(places) + 0.1)
        axes.locator_params(axis="x", integer=True)
    else:
        text = partial(write, unit="B" if unit == "B" else "number")
        on.size_axis(axes, places, text, on.MAX_TICKS if named else FEW_TICKS)
    ends = []
    curves = frame.groupby(["curve", "kind"], sort=False)
    for ((name, kind), part), end in zip(curves, _ends(frame, x, y), strict=True):
        colour = colours.get(name, on.PALETTE.muted)
        looks = LOOKS.get(kind, CLAIM) | {"color": colour, "markeredgecolor": colour}
        looks["label"] = end.words.replace("\n", " ")
        if kind == "limit" and part[x].nunique() < 2:  # it holds for any
            part = pd.DataFrame({x: axes.get_xlim(), y: end.y})
        seaborn.lineplot(part, x=x, y=y, estimator="median", legend=False, ax=axes, **looks)
        ends.append(end._replace(x=float(part[x].max()), colour=colour))
    if log:
        on.log_values(axes)
    elif not even:
        axes.set_ylim(bottom=0)
    if named:
        on.name_ends(axes, ends)


def _of_rows(axes: Axes, frame: pd.DataFrame, mark: str, reverse: bool = False) -> None:
    """Finish bars of the rows of a frame: a line across each at another number of its row, names and a legend."""
    names = frame["name"].unique()
    on.label_rows(axes, names)
    if mark:
        ats = frame.groupby("name", sort=False)[mark].first()
        axes.vlines(ats, np.arange(len(ats)) - 0.42, np.arange(len(ats)) + 0.42, color=on.PALETTE.text, linewidth=2.2)
    on.legend_below(axes.figure, reverse)
    axes.set(ylabel="")


def bars(
    run: Rows,
    *refs: Ref,
    mark: Ref | None = None,
    line: float | None = None,
    mute: Callable[[Row], bool] = lambda row: False,
    least: bool = False,
) -> Drawing:
    """Horizontal bars of medians, the longest on top (``least``: the shortest), one for each of ``refs``.

    Samples are ticks on their bar, with the interval of their median. ``mark`` is a line at another number of the row,
    ``line`` a value across all rows, ``mute`` says which rows are grey.
    """
    rows, x = _drawable(refs[0], run)[:: -1 if least else 1][:MAX_ROWS], refs[0].titled
    records = [
        _named(ref, row, run, mark) | {"kind": ref.col.heading, x: number}
        for row in rows
        for ref in refs
        for number in ref.samples(row, run)
    ]
    frame = pd.DataFrame(records)
    if frame.empty:
        return Drawing(frame)
    muted = {refs[0].table.name_of(row, run): on.PALETTE.muted for row in rows if mute(row)}
    colours = _colours(frame["kind"].unique())
    if len(colours) == 1:
        colours = dict.fromkeys(frame["name"], on.PALETTE.series[0]) | muted
    longest = BEYOND * frame.groupby(["name", "kind"])[x].median().max()
    marked = frame[mark.titled].max() if mark else 0.0
    end = 1.2 * max(min(longest, frame[x].max()), line or 0.0, np.nan_to_num(marked)) or 1.0
    looks = {"x": x, "unit": refs[0].col.unit, "colours": colours, "line": line, "end": end}
    words = [x]
    if frame.duplicated(["name", "kind"]).any():
        beyond = int((frame[x] > end).sum())
        words.append("|: one measurement" + f", {beyond} more beyond" * (beyond > 0))
    if mark and frame[mark.titled].notna().any():
        words.append(f"black: {mark.col.heading}")
    about = alt(refs[0], rows, run, *refs[1:])
    paint = partial(_paint_bars, mark=mark.titled if mark else "", **looks)
    return Drawing(frame, paint, rows[0], "; ".join(words), "", about)


def _paint_bars(
    axes: Axes,
    frame: pd.DataFrame,
    *,
    x: str,
    unit: str,
    colours: dict[Any, str],
    mark: str,
    line: float | None,
    end: float,
) -> None:
    hue = "kind" if frame["kind"].nunique() > 1 else "name"
    looks = {"x": x, "y": "name", "hue": hue, "palette": colours, "ax": axes}
    sampled = frame.duplicated(["name", "kind"]).any()
    black = {"color": on.PALETTE.text, "linewidth": 1.6}
    seaborn.barplot(
        frame,
        estimator="median",
        errorbar=interval,
        err_kws=black,
        saturation=1,
        alpha=0.4 if sampled else 1,
        legend=hue == "kind",
        **looks,
    )
    if sampled:
        ticks = {"marker": "|", "size": 9, "linewidth": 1.1, "jitter": False, "legend": False}
        seaborn.stripplot(frame, dodge=hue == "kind", **ticks, **looks)
    if line is not None:
        axes.axvline(line, color=on.PALETTE.muted, linewidth=1, linestyle=on.DASHED)
    _of_rows(axes, frame, mark)
    axes.set_xlim(0, end)
    on.short_numbers(axes.xaxis)
    first = frame[frame["kind"] == frame["kind"].iloc[0]].groupby("name", sort=False)[x]
    height = 0.4 - 0.4 / frame["kind"].nunique()  # of the first bar above the middle of its row
    for place, (_, samples) in enumerate(first):
        right = np.nanmax([samples.max(), *interval(samples)])
        on.note(axes, write(samples.median(), unit), (min(right, end), place - height), (5, 0), fontsize=8)


def stacked(run: Rows, *parts: Ref, x: str, mark: Ref | None = None) -> Drawing:
    """One bar for each row, of its parts one behind the other; ``mark`` is a line at another number of the row."""
    rows = [row for row in parts[0].table.rows(run) if any(part.finite(row, run) for part in parts)][:MAX_ROWS]
    records = [
        _named(part, row, run, mark) | {"part": part.col.heading, x: value}
        for row in rows
        for part in parts
        if (value := part.finite(row, run) or 0.0) > 0
    ]
    frame = pd.DataFrame(records)
    if frame.empty:
        return Drawing(frame)
    words = f"{x}; black: {mark.col.heading}" if mark and frame[mark.titled].notna().any() else x
    paint = partial(_paint_stacked, x=x, mark=mark.titled if mark else "")
    return Drawing(frame, paint, rows[0], words, "", alt(parts[0], rows, run, *parts[1:], mark))


def _paint_stacked(axes: Axes, frame: pd.DataFrame, *, x: str, mark: str) -> None:
    colours = _colours(frame["part"].unique())
    looks: dict[str, Any] = {"multiple": "stack", "shrink": 0.7, "alpha": 1, "edgecolor": on.PALETTE.card}
    order = list(reversed(colours))  # seaborn begins with the last one
    seaborn.histplot(frame, y="name", weights=x, hue="part", hue_order=order, palette=colours, ax=axes, **looks)
    _of_rows(axes, frame, mark, reverse=True)


def grid(run: Rows, ref: Ref, *, x: str, y: str) -> Drawing:
    """A heat map: one field for each value of two columns, with its number if there is room."""
    rows, across, down = _drawable(ref, run), ref.table[x].col.heading, ref.table[y].col.heading
    frame = pd.DataFrame([{down: row[y], across: row[x], ref.titled: ref.finite(row, run)} for row in rows])
    if frame.empty:
        return Drawing(frame)
    text = partial(write, unit="ratio" if ref.col.unit == "ratio" else "number")
    paint = partial(_paint_grid, x=across, y=down, value=ref.titled, text=text)
    return Drawing(frame, paint, rows[-1], across, down, alt(ref, rows, run))


def _paint_grid(axes: Axes, frame: pd.DataFrame, *, x: str, y: str, value: str, text: Callable[[float], str]) -> None:
    field = frame.pivot_table(index=y, columns=x, values=value)
    numbers = field.map(text) if field.size <= MAX_CELLS else False
    looks: dict[str, Any] = {"cmap": "Blues", "cbar_kws": {"label": value}, "annot_kws": {"fontsize": 8}}
    seaborn.heatmap(field, annot=numbers, fmt="", ax=axes, **looks)
    if len("".join(map(str, field.columns))) > LINE:
        axes.set_xticks(axes.get_xticks(), field.columns, rotation=30, ha="right")
    axes.tick_params(axis="y", labelrotation=0)
    axes.grid(False)


def _of_samples(ref: Ref, run: Rows, **more: Callable[[Row, list[float]], Any]) -> tuple[list[Row], pd.DataFrame]:
    """Return the rows with samples, and a frame of them with ``more`` columns, each of the samples of a row."""
    rows = [row for row in ref.table.rows(run) if np.isfinite(ref.numbers(row, run)).any()][:MAX_ROWS]
    frames = []
    for row in rows:
        samples = [number for number in ref.numbers(row, run) if np.isfinite(number)]
        columns = {name: column(row, samples) for name, column in more.items()} | {ref.titled: samples}
        frames.append(pd.DataFrame(_named(ref, row, run) | columns))
    return rows, pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def steps(run: Rows, ref: Ref, x: str = "step", smooth: Callable[[list[float]], Any] | None = None) -> Drawing:
    """The samples of each row in their order, for instance losses. ``smooth`` leaves them light behind it."""
    smoothed = f"{ref.titled}, smoothed"
    more = {smoothed: lambda row, samples: smooth(samples)} if smooth else {}
    rows, frame = _of_samples(ref, run, **{x: lambda row, samples: range(1, len(samples) + 1)}, **more)
    if frame.empty:
        return Drawing(frame)
    paint = partial(_paint_steps, x=x, y=ref.titled, smoothed=smoothed if smooth else "", unit=ref.col.unit)
    return Drawing(frame, paint, rows[0], x, ref.titled, f"Medians: {alt(ref, rows, run)}")


def _paint_steps(axes: Axes, frame: pd.DataFrame, *, x: str, y: str, smoothed: str, unit: str) -> None:
    colours = _colours(frame["name"].unique())
    looks = {"x": x, "hue": "name", "palette": colours, "estimator": None, "legend": False, "ax": axes}
    if smoothed:
        seaborn.lineplot(frame, y=y, alpha=0.3, linewidth=0.9, **looks)
    marker = "o" if frame["name"].value_counts().min() == 1 else None
    seaborn.lineplot(frame, y=smoothed or y, marker=marker, **looks)
    last = frame.groupby("name", sort=False).last()
    ends = []
    for name, row in last.iterrows():
        height = float(row[smoothed or y])
        words = write(height, unit) if smoothed and len(last) == 1 else str(name)
        ends.append(on.End(float(row[x]), height, words, colours[name]))
    on.name_ends(axes, ends)


def cumulative(run: Rows, ref: Ref, limit: Ref | None = None) -> Drawing:
    """The share of each row's samples that is at most a value, on a logarithmic axis; a line at its ``limit``, of the row, too."""
    bound = f"limit of {ref.titled}"
    more = {bound: lambda row, samples: limit.finite(row, run)} if limit else {}
    rows, frame = _of_samples(ref, run, **more)
    if frame.empty:
        return Drawing(frame)
    words = f"{'Medians and limits' if limit else 'Medians'}: {alt(ref, rows, run, limit)}"
    paint = partial(_paint_cumulative, x=ref.titled, limit=bound if limit else "")
    return Drawing(frame, paint, rows[0], ref.titled, "share of all", words)


def _paint_cumulative(axes: Axes, frame: pd.DataFrame, *, x: str, limit: str) -> None:
    colours = _colours(frame["name"].unique())
    seaborn.ecdfplot(frame, x=x, hue="name", palette=colours, log_scale=True, legend=False, ax=axes)
    rows = frame.groupby("name", sort=False)
    for name, at in rows[limit].first().items() if limit else ():
        if np.isfinite(at):
            axes.axvline(at, color=colours[name], linewidth=1, linestyle=on.DASHED)
            on.note(axes, "limit", (at, 0.02), (-3, 4), fontsize=8, color=colours[name])
    on.plain_numbers(axes.xaxis)
    axes.set_ylim(0, 1.03)
    on.name_ends(axes, [on.End(at, 1.0, str(name), colours[name]) for name, at in rows[x].max().items()])
