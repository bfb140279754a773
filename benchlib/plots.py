"""Pictures of a run: each function takes a run and returns a figure with its finding as title and an alt text.

``FIGURES`` is the table of them, in the order of the report. ``show`` displays one in a notebook.
"""

from collections.abc import Callable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from benchlib import (
    algorithm_plots,
    attention_plots,
    collective_plots,
    curves,
    depth_plots,
    difference_plots,
    latency_plots,
    pair_plots,
    parity_plots,
    peak_plots,
    skew_plots,
)
from benchlib.curves import Records
from benchlib.labels import seconds
from benchlib.picture import DARK, LIGHT, Picture, Theme, blank, finish, leave_empty, png, show
from benchlib.rank_plots import memory, rank_skew
from benchlib.stats import smoothing_window

__all__ = [
    "DARK",
    "FIGURES",
    "LIGHT",
    "Picture",
    "Theme",
    "loss_curve",
    "memory",
    "png",
    "rank_skew",
    "show",
    "step_times",
    "throughput",
    "time_split",
]


def _step_axis(axes: Axes, steps: pd.Series) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if steps.min() == steps.max():
        axes.set_xlim(float(steps.min()) - 1, float(steps.max()) + 1)


def loss_curve(run: Records, theme: Theme = LIGHT) -> Picture:
    """Loss of each step (light) and its moving average, with the first and the last value written out."""
    figure, axes = blank("loss-curve", theme)
    frame = curves.steps(run)[["step", "loss"]].dropna()
    if frame.empty:
        return leave_empty(figure, axes, theme, "No training step was recorded.")
    width = smoothing_window(len(frame))
    # From the first full window on: there the check of a falling loss starts as well.
    smoothed = curves.smooth(frame["loss"]).iloc[width - 1 :]
    axes.plot(
        frame["step"],
        frame["loss"],
        color=theme.series[0],
        alpha=0.32,
        linewidth=0.9,
        marker="." if len(frame) < 40 else "",
    )
    axes.plot(
        frame["step"].iloc[width - 1 :],
        smoothed,
        color=theme.series[0],
        linewidth=2.2,
        marker="o" if len(frame) == 1 else "",
    )
    first, last = float(smoothed.iloc[0]), float(smoothed.iloc[-1])
    ends = ((frame["step"].iloc[width - 1], first), (frame["step"].iloc[-1], last))
    for (step, value), align in zip(ends[-len(smoothed) :], ("left", "right"), strict=False):
        away = (0, 14)
        axes.annotate(
            f"{value:.3g}",
            (step, value),
            away,
            textcoords="offset points",
            ha=align,
            color=theme.text,
            fontsize=10,
            fontweight="bold",
            bbox={"facecolor": theme.card, "alpha": 0.8, "linewidth": 0, "pad": 1},
        )
    done, plan = int(frame["step"].iloc[-1]), curves.plan(run)
    planned, total = (int(plan.get(name) or 0) for name in ("planned_steps", "total_steps"))
    axes.set_ylim(bottom=min(0.0, float(frame["loss"].min())))
    _step_axis(axes, frame["step"])
    of = (
        f" of {planned:,} planned" if planned > done else f" of {total:,} in the whole training" if total > done else ""
    )
    if len(frame) == 1:
        title = f"One step only: loss {last:.3g}"
    else:
        verb = "fell" if last < first else "did not fall: it went"
        title = f"Loss {verb} from {first:.3g} to {last:.3g} in {done:,} steps"
    return finish(
        figure,
        axes,
        theme,
        title,
        f"step ({done:,}{of})",
        "loss (mean over the global batch)",
        f"Light: each step; bold: mean over {width} step{'s' * (width != 1)}.",
    )


def throughput(run: Records, theme: Theme = LIGHT) -> Picture:
    """Samples per second of each step; the steps left out of the statistics are shaded."""
    figure, axes = blank("throughput", theme)
    frame = curves.throughput(run)
    if frame.empty:
        return leave_empty(figure, axes, theme, "No step time was recorded.")
    counted = frame[frame["steady"]] if frame["steady"].any() else frame
    median = float(counted["samples_per_s"].median())
    axes.plot(
        frame["step"],
        frame["samples_per_s"],
        ".",
        color=theme.series[0],
        alpha=0.4 if len(frame) > 1 else 1.0,
        markersize=3.5 if len(frame) > 1 else 12,
    )
    width = smoothing_window(len(counted))
    axes.plot(
        counted["step"].iloc[width - 1 :],
        curves.smooth(counted["samples_per_s"]).iloc[width - 1 :],
        color=theme.series[0],
        linewidth=2,
    )
    axes.axhline(median, color=theme.muted, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"median {median:.3g}",
        (1, median),
        (0, 5),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        color=theme.text,
        fontsize=9,
        bbox={"facecolor": theme.card, "alpha": 0.8, "linewidth": 0, "pad": 1},
    )
    excluded = frame[(~frame["steady"]) & (frame["step"] < counted["step"].min())]
    if len(excluded):
        axes.axvspan(
            float(excluded["step"].min()) - 0.5,
            float(counted["step"].min()) - 0.5,
            color=theme.muted,
            alpha=0.16,
            linewidth=0,
        )
    axes.set_ylim(0, 1.12 * float(frame["samples_per_s"].max()))
    _step_axis(axes, frame["step"])
    n = len(counted)
    # Where no window was recorded (a run that broke), nothing says that the speed had settled.
    title = f"{median:.3g} samples/s" + (
        " in the one step measured"
        if n == 1
        else " in the steady state"
        if curves.steady(run)
        else f", median of {n} steps"
    )
    alt = f"Median of {n} steps; {len(excluded)} first steps are shaded and not counted."
    return finish(
        figure, axes, theme, title, "step (shaded: not counted)" if len(excluded) else "step", "samples per second", alt
    )


def step_times(run: Records, theme: Theme = LIGHT) -> Picture:
    """Histogram of the step times (the slowest rank of each step), with median and 95th percentile."""
    figure, axes = blank("step-times", theme)
    slowest = curves.step_times(run)
    if len(slowest) < 2:
        return leave_empty(figure, axes, theme, "Fewer than two steps were timed: there is no distribution.")
    scale, unit = (1e3, "ms") if slowest.median() < 1 else (1.0, "s")
    median, p95 = float(slowest.median()), float(slowest.quantile(0.95))
    bins = min(40, max(8, int(len(slowest) ** 0.5) * 2))
    heights, _, _ = axes.hist(
        slowest * scale, bins=bins, color=theme.series[0], alpha=0.85, edgecolor=theme.card, linewidth=0.7
    )
    axes.set_ylim(0, 1.28 * float(max(heights)))
    marks = ((median, "median", theme.series[1], "right"), (p95, "p95", theme.series[3], "left"))
    for value, word, colour, align in marks:
        axes.axvline(value * scale, color=colour, linewidth=1.6)
        # Above the bars, and each on its own side of its line, so that the two never lie on each other.
        axes.annotate(
            f" {word} {seconds(value)} ",
            (value * scale, 0.99),
            xycoords=("data", "axes fraction"),
            ha=align,
            va="top",
            color=colour,
            fontsize=9,
            fontweight="bold",
        )
    axes.margins(x=0.16)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    title = f"Median step {seconds(median)}; p95 is {p95 / median:.2f} × the median"
    return finish(
        figure,
        axes,
        theme,
        title,
        f"step time of the slowest rank ({unit}), n = {len(slowest):,}",
        "steps",
        "Histogram with median and 95th percentile.",
    )


def time_split(run: Records, theme: Theme = LIGHT) -> Picture:
    """Where a step's time goes: the parts in the order of execution, each starting where the one before it ends."""
    figure, axes = blank("time-split", theme)
    parts = curves.split(run)
    whole = sum(parts.values())
    if not parts or whole <= 0:
        return leave_empty(figure, axes, theme, "No split of the step time was recorded.")
    words = {"exchange": "gradient\nexchange"}
    scale, unit = (1e3, "ms") if whole < 1 else (1.0, "s")
    top = max(parts, key=lambda part: parts[part])
    left = 0.0
    for row, (part, value) in enumerate(parts.items()):
        colour = theme.muted if part == "other" else theme.series[0]
        axes.barh(row, value * scale, left=left * scale, height=0.62, color=colour, alpha=1.0 if part == top else 0.55)
        label = f"{seconds(value)} · {100 * value / whole:.0f} %"
        after = left + value < 0.66 * whole
        place, align = ((left + value) * scale, "left") if after else (left * scale, "right")
        axes.annotate(
            label,
            (place, row),
            (5 if after else -5, 0),
            textcoords="offset points",
            va="center",
            ha=align,
            color=theme.text,
            fontsize=9,
        )
        left += value
    axes.set_yticks(range(len(parts)), [words.get(part, part) for part in parts])
    axes.invert_yaxis()
    axes.set_xlim(0, whole * scale * 1.02)
    axes.grid(False)
    axes.grid(axis="x", color=theme.grid, linewidth=0.8)
    title = f"{100 * parts[top] / whole:.0f} % of a step is {'gradient exchange' if top == 'exchange' else top}"
    alt = ", ".join(f"{part} {seconds(value)}" for part, value in parts.items())
    return finish(figure, axes, theme, title, f"time within a step ({unit}), medians", "", alt)


FIGURES: dict[str, Callable[..., Picture]] = {
    "loss-curve": loss_curve,
    "throughput": throughput,
    "step-times": step_times,
    "time-split": time_split,
    "memory": memory,
    "rank-skew": rank_skew,
    "matmul-peaks": peak_plots.peaks,
    "allreduce": peak_plots.allreduce,
    "collective-bandwidth": collective_plots.bandwidth,
    "rooted-bandwidth": collective_plots.rooted_bandwidth,
    "limit-shares": collective_plots.shares,
    "collective-latency": latency_plots.latency,
    "pairs": pair_plots.heat_map,
    "crossover": algorithm_plots.crossover,
    "overlap": algorithm_plots.overlap,
    "last-rank": skew_plots.last_rank,
    "backend-matrix": parity_plots.matrix,
    "quantities": parity_plots.quantities,
    "difference-histograms": difference_plots.histograms,
    "different-or-worse": difference_plots.closeness,
    "divergence-by-depth": depth_plots.depth,
    "gradient-differences": depth_plots.gradients,
    "loss-curves": depth_plots.losses,
    "attention-kernels": attention_plots.kernels,
    "latency-by-member": parity_plots.latency,
}
