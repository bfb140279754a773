"""Pictures of raw samples, as ``benchlib.spec.charts.Chart`` calls them: in their order, and how many are below a value."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from benchlib.spec.charts import Chart
from benchlib.spec.tables import Ref, Row, Rows, write

steps, cumulative = (partial(Chart, f"{__name__}:paint_{kind}") for kind in ["steps", "cumulative"])


def paint_steps(run: Rows, axes: Any, ref: Ref, x: str = "step", smooth: Callable[[list[float]], Any] = list) -> Any:
    """The samples of each row in their order, for instance losses. ``smooth`` leaves them light behind it."""
    from benchlib.spec import paint

    rows = _of_samples(run, axes, ref, smooth)
    return (rows[0], x, paint.heading(ref), f"Medians: {paint.alt(ref, rows, run)}") if rows else None


def paint_cumulative(run: Rows, axes: Any, ref: Ref, limit: Ref | None = None) -> Any:
    """The share of each row's samples that is at most a value, on a logarithmic axis; a line at its ``limit``, of the row, too."""
    from benchlib.spec import paint

    rows, words = _of_samples(run, axes, ref, limit=limit), "Medians and limits" if limit else "Medians"
    return (
        (rows[0], paint.heading(ref), "share of all", f"{words}: {paint.alt(ref, rows, run, limit)}") if rows else None
    )


def _of_samples(
    run: Rows, axes: Any, ref: Ref, smooth: Callable[[list[float]], Any] | None = None, limit: Ref | None = None
) -> list[Row]:
    from benchlib.show import figures as on
    from benchlib.spec import paint

    rows = [row for row in ref.table.rows(run) if any(map(math.isfinite, ref.numbers(row, run)))][: paint.MAX_ROWS]
    ends = []
    for place, row in enumerate(rows):
        samples = list(filter(math.isfinite, ref.numbers(row, run)))
        order, colour = range(1, len(samples) + 1), paint.colour(place)
        xs, ys = (order, smooth(samples)) if smooth else (sorted(samples), [at / len(samples) for at in order])
        if smooth:
            axes.plot(order, samples, color=colour, alpha=0.3, linewidth=0.9)
        words = write(ys[-1], ref.col.unit) if smooth and len(rows) == 1 else ref.table.name_of(row, run)
        ends.append(on.draw_line(axes, xs, ys, words, colour, marker="" if len(samples) > 1 else "o"))
        if limit and (at := limit.finite(row, run)) is not None:
            axes.axvline(at, color=colour, linewidth=1, linestyle=on.DASHED)
    if not smooth:
        axes.set_xscale("log")
        on.plain_numbers(axes.xaxis)
    on.name_ends(axes, ends)
    return rows
