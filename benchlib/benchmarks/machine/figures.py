"""Figures of a machine run: matrix products by size and precision, all-reduce bandwidth by message size."""

from collections.abc import Callable

from benchlib.core.definitions import size_text
from benchlib.core.text import quantity
from benchlib.results import frames
from benchlib.results.frames import Records
from benchlib.show.figures import LIGHT, Picture, Theme, blank, finish, grouped_bars, leave_empty, size_axis, styled


@styled
def peaks(run: Records, theme: Theme = LIGHT) -> Picture:
    """FLOP/s of square matrix products, all ranks at once, by n and precision."""
    figure, axes = blank("matmul-peaks", theme)
    frame = frames.table(run, "matmul")
    if frame.empty:
        return leave_empty(figure, axes, theme, "No matrix product was measured.")
    frame = frame.assign(gflops=frame["best_flops"] / 1e9)
    ranks_together = frame.pivot_table(index="n", columns="precision", values="gflops", aggfunc="sum")
    for bars in grouped_bars(axes, {str(name): column.tolist() for name, column in ranks_together.items()}):
        axes.bar_label(bars, fmt=quantity, fontsize=8, padding=2)  # type: ignore[arg-type]
    axes.set_xticks(range(len(ranks_together)), [f"{n:.0f}" for n in ranks_together.index])
    axes.margins(y=0.3)
    axes.legend(ncols=len(axes.containers), loc="upper left")
    best = frame.groupby(["precision", "n"], as_index=False).agg({"gflops": "sum"}).nlargest(1, "gflops").iloc[0]
    title = (
        f"Matrix products reach {quantity(best['gflops'], 'GFLOP/s')} in {best['precision']} at n = {best['n']:,.0f}"
    )
    alt = "Bars: best samples of the ranks by size and precision, summed."
    return finish(figure, axes, theme, title, "n of n × n matrices", "GFLOP/s, all ranks at once", alt)


@styled
def allreduce(run: Records, theme: Theme = LIGHT) -> Picture:
    """Bus and algorithm bandwidth of the all-reduce by message size, on a logarithmic axis of bytes."""
    figure, axes = blank("allreduce", theme)
    frame = frames.table(run, "allreduce")
    if frame.empty or frame["busbw_gbps"].isna().all():
        return leave_empty(figure, axes, theme, "One rank exchanges nothing.")
    frame = frame.sort_values("bytes")
    axes.plot(frame["bytes"], frame["busbw_gbps"], marker="o", label="bus bandwidth")
    # At two ranks both are the same number: the dashes let the lower line show.
    axes.plot(frame["bytes"], frame["algbw_gbps"], "--", marker="o", label="algorithm bandwidth")
    size_axis(axes, frame["bytes"])
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    best = frame.astype({"busbw_gbps": float}).nlargest(1, "busbw_gbps").iloc[0]
    title = f"The all-reduce reaches {quantity(best['busbw_gbps'])} Gbps of bus bandwidth at {size_text(best['bytes'])}"
    return finish(figure, axes, theme, title, "bytes of the buffer", "Gbps", "Points: median by message size.", 50)


FIGURES: dict[str, Callable[..., Picture]] = {"matmul-peaks": peaks, "allreduce": allreduce}
