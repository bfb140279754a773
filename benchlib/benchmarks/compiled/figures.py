"""The pictures of a run: the graph by layer, operations, latency, parity, the loss curve, and when compiling pays."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from benchlib.benchmarks.compiled.config import REFERENCE
from benchlib.results import frames
from benchlib.results.frames import Records
from benchlib.show import programs
from benchlib.show.figures import LIGHT, Picture, Theme, blank, finish, label_rows, leave_empty, note, styled

_MOST_BARS = 12


@styled
def layers(run: Records, theme: Theme = LIGHT) -> Picture:
    """The first model's program by layer."""
    rows, edges = (frames.table(run, name) for name in ("layers", "edges"))
    first = rows["program"].iloc[0] if len(rows) else ""
    chosen = rows[rows["program"] == first].to_dict("records") if len(rows) else []
    passed = edges[edges["program"] == first][["from", "to", "values"]].to_numpy().tolist() if len(edges) else []
    return programs.layers(chosen, passed, theme)  # type: ignore[arg-type]


@styled
def operations(run: Records, theme: Theme = LIGHT) -> Picture:
    """How often each operation stands in the first model's program."""
    figure, axes = blank("operations", theme)
    frame = frames.table(run, "operations")
    if frame.empty:
        return leave_empty(figure, axes, theme, "No program was converted.")
    own = frame[frame["program"] == frame["program"].iloc[0]]
    shown = own.head(_MOST_BARS)
    axes.barh(range(len(shown)), shown["count"], height=0.6, color=theme.series[0], alpha=0.7)
    for row, count in enumerate(shown["count"]):
        note(axes, f"{count}", (count, row), (4, 0))
    label_rows(axes, list(shown["operation"]))
    title = f"{own['count'].sum():,} operations of {len(own)} kinds in {own['program'].iloc[0]}"
    return finish(figure, axes, theme, title, "times in the text", "", "Bars: operations, the most frequent first.", 40)


def _timed(run: Records) -> pd.DataFrame:
    frame = frames.table(run, "executors")
    if frame.empty or "wall_ms" not in frame:
        return pd.DataFrame()
    frame = frame[frame["status"] == "timed"].copy()
    several = len(frame[["batch", "length"]].drop_duplicates()) > 1
    shape = [
        f" {batch:.0f}×{length:.0f}" if several else ""
        for batch, length in zip(frame["batch"], frame["length"], strict=True)
    ]
    frame["label"] = frame["executor"] + shape
    return frame


@styled
def latency(run: Records, theme: Theme = LIGHT) -> Picture:
    """Latency by executor and shape, with the interval of the median."""
    figure, axes = blank("latency", theme)
    frame = _timed(run)
    if frame.empty:
        return leave_empty(figure, axes, theme, "Nothing was timed.")
    for row, item in enumerate(frame.to_dict("records")):
        colour = theme.series[1 if item["executor"] == REFERENCE else 0]
        axes.plot(item["wall_ms"], row, "o", color=colour, markersize=6)
        if pd.notna(item["ci_low"]):
            axes.hlines(row, item["ci_low"], item["ci_high"], color=colour, linewidth=2)
        note(
            axes,
            f"{item['wall_ms']:.3g}",
            (item["ci_high"] if pd.notna(item["ci_high"]) else item["wall_ms"], row),
            (8, 0),
        )
    label_rows(axes, list(frame["label"]))
    axes.set_xlim(0, 1.2 * frame[["wall_ms", "ci_high"]].max().max())
    best = frame.sort_values("wall_ms").iloc[0]
    title = f"Fastest: {best['label']}, {best['wall_ms']:.3g} ms"
    return finish(figure, axes, theme, title, "ms per call", "", "Points: medians; lines: 95% intervals.", 40)


@styled
def parity(run: Records, theme: Theme = LIGHT) -> Picture:
    """The largest difference from eager torch, by executor."""
    figure, axes = blank("parity", theme)
    frame = _timed(run)
    frame = frame[frame["executor"] != REFERENCE] if len(frame) else frame
    if frame.empty:
        return leave_empty(figure, axes, theme, "One executor ran: there is nothing to compare.")
    values = np.maximum(frame["max_abs"].to_numpy(dtype=float), 1e-9)
    axes.plot(values, range(len(frame)), "o", color=theme.series[0], markersize=7)
    for row, value in enumerate(values):
        note(axes, f"{value:.0e}", (value, row), (8, 0))
    label_rows(axes, list(frame["label"]))
    axes.set_xscale("log")
    axes.set_xlim(1e-8, 1)
    title = f"All are within {values.max():.0e} of eager torch"
    return finish(
        figure, axes, theme, title, "largest difference of logits (logarithmic)", "", "Points: executors.", 40
    )


@styled
def curve(run: Records, theme: Theme = LIGHT) -> Picture:
    """Loss of training through XLA and in eager torch, from the same weights."""
    figure, axes = blank("curve", theme)
    frame = frames.table(run, "curve")
    if frame.empty:
        return leave_empty(figure, axes, theme, "Nothing was trained: train_steps = 0.")
    axes.plot(frame["step"], frame["eager"], color=theme.series[1], linewidth=4, alpha=0.4, label="eager")
    axes.plot(frame["step"], frame["xla"], color=theme.series[0], marker="o", label="XLA")
    axes.legend()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    apart = (frame["eager"] - frame["xla"]).abs().max()
    title = f"Losses of {len(frame)} steps {f'are within {apart:.0e}' if apart else 'are equal'}"
    return finish(
        figure, axes, theme, title, "step", "loss", "Two lines: training by gradients of XLA, and of autograd."
    )


@styled
def payback(run: Records, theme: Theme = LIGHT) -> Picture:
    """Time to get ready and n calls, by executor: where the lines cross compiling pays."""
    figure, axes = blank("payback", theme)
    frame = _timed(run)
    if frame.empty:
        return leave_empty(figure, axes, theme, "Nothing was timed.")
    first = frame[(frame["batch"] == frame["batch"].iloc[0]) & (frame["length"] == frame["length"].iloc[0])]
    most = float(first["ready_s"].max() / first["wall_ms"].min() * 1e3) * 10 + 10
    calls = np.logspace(0, np.log10(most), 60)
    for place, item in enumerate(first.to_dict("records")):
        total: Any = item["ready_s"] + calls * item["wall_ms"] * 1e-3
        axes.plot(calls, total, color=theme.series[place % len(theme.series)], label=item["executor"])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend()
    shape = f"{first['batch'].iloc[0]:.0f} × {first['length'].iloc[0]:.0f}"
    title = f"Time to compile against time to run, {shape}"
    return finish(
        figure,
        axes,
        theme,
        title,
        "calls",
        "s, ready and all calls",
        "Lines: executors; where two cross, compiling pays.",
    )


FIGURES: dict[str, Callable[..., Picture]] = {
    "layers": layers,
    "operations": operations,
    "latency": latency,
    "parity": parity,
    "curve": curve,
    "payback": payback,
}
