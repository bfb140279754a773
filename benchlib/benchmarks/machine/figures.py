"""Pictures of a machine run: matrix products by size and precision, all-reduce bandwidth by message size."""

from collections.abc import Callable

import pandas as pd

from benchlib.core.definitions import size_text
from benchlib.core.text import quantity
from benchlib.results.frames import Records
from benchlib.show.figures import LIGHT, Picture, Theme, blank, finish, leave_empty


def _table(run: Records, name: str) -> pd.DataFrame:
    rows = run.result.tables.get(name, []) if run.result else []
    return pd.DataFrame(rows)


def peaks(run: Records, theme: Theme = LIGHT) -> Picture:
    """FLOP/s of square matrix products, all ranks at once, by n and precision."""
    figure, axes = blank("matmul-peaks", theme)
    frame = _table(run, "matmul")
    if frame.empty:
        return leave_empty(figure, axes, theme, "No matrix product was measured.")
    sums = frame.groupby(["precision", "n"])["together_flops"].sum().unstack("precision") / 1e9
    width = 0.8 / len(sums.columns)
    for number, precision in enumerate(sums.columns):
        places = [index + (number - (len(sums.columns) - 1) / 2) * width for index in range(len(sums))]
        bars = axes.bar(
            places, sums[precision], width * 0.92, color=theme.series[number % len(theme.series)], label=precision
        )
        labels = [quantity(value) for value in sums[precision]]
        axes.bar_label(bars, labels, fontsize=8, color=theme.text, padding=2)
    axes.set_xticks(range(len(sums)), [f"{size:,}" for size in sums.index])
    axes.margins(y=0.3)
    axes.legend(frameon=False, labelcolor=theme.muted, fontsize=9, ncols=len(sums.columns), loc="upper left")
    precision = str(sums.max().idxmax())
    top = float(sums.max().max())
    title = f"Matrix products reach {quantity(top, 'GFLOP/s')} in {precision}"
    return finish(
        figure,
        axes,
        theme,
        title,
        "n of n × n matrices",
        "GFLOP/s, all ranks at once",
        "Bars: median by size and precision.",
    )


def allreduce(run: Records, theme: Theme = LIGHT) -> Picture:
    """Bus and algorithm bandwidth of the all-reduce by message size, on a logarithmic axis of bytes."""
    figure, axes = blank("allreduce", theme)
    frame = _table(run, "allreduce")
    if frame.empty or frame["busbw_gbps"].isna().all():
        return leave_empty(figure, axes, theme, "One rank exchanges nothing.")
    frame = frame.sort_values("bytes")
    for number, (column, label) in enumerate((("busbw_gbps", "bus bandwidth"), ("algbw_gbps", "algorithm bandwidth"))):
        # At two ranks both are the same number: the dashes let the lower line show.
        style = "-" if number == 0 else "--"
        axes.plot(
            frame["bytes"], frame[column], style, marker="o", markersize=4, color=theme.series[number], label=label
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    ticks = list(frame["bytes"])
    axes.set_xticks(ticks, [size_text(value) for value in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False, labelcolor=theme.muted, fontsize=9, loc="upper left")
    rows = list(zip(frame["busbw_gbps"].astype(float), frame["bytes"].astype(float), strict=True))
    top, size = max(rows)
    title = f"The all-reduce reaches {quantity(top)} Gbps of bus bandwidth at {size_text(size)}"
    return finish(figure, axes, theme, title, "bytes of the buffer", "Gbps", "Points: median by message size.")


FIGURES: dict[str, Callable[..., Picture]] = {"matmul-peaks": peaks, "allreduce": allreduce}
