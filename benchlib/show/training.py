"""Pictures that compare the ranks of a run: memory over time, and whose work takes longest."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from benchlib.core.stats import smoothing_window
from benchlib.core.text import seconds
from benchlib.results import frames
from benchlib.results.frames import Records
from benchlib.show.figures import LIGHT, Picture, Theme, blank, finish, leave_empty

MANY_RANKS = 8  # more lines than this cannot be told apart


def memory(run: Records, theme: Theme = LIGHT) -> Picture:
    """Resident memory of each rank over the run (with many ranks the largest and the smallest) and that of the devices."""
    figure, axes = blank("memory", theme)
    frame = frames.memory(run)
    if frame.empty:
        return leave_empty(figure, axes, theme, "No memory reading was recorded.")
    wide = frame.pivot_table(index="seconds", columns="rank", values="gb", aggfunc="last")
    lines = {f"rank {rank}": wide[rank].dropna() for rank in wide}
    if len(lines) > MANY_RANKS:
        lines = {"largest rank": wide.max(axis=1), "smallest rank": wide.min(axis=1)}
    for position, (word, line) in enumerate(lines.items()):
        axes.plot(line.index, line, color=theme.series[position % len(theme.series)], linewidth=1.8, label=word)
    highest = int(frame["gb"].argmax())
    peak, rank = float(frame["gb"].iloc[highest]), int(frame["rank"].iloc[highest])
    title = f"Resident memory peaks at {peak:.3g} GB on rank {rank}"
    devices = frames.memory(run, "device_memory_bytes")
    if len(devices):
        title += f", devices at {devices['gb'].max():.3g} GB"
        axes.plot(
            devices["seconds"],
            devices["gb"],
            color=theme.text,
            linewidth=1.8,
            linestyle=(0, (5, 2)),
            label="devices, sum",
        )
        lines["devices"] = devices["gb"]
    axes.set_ylim(0, 1.15 * max(peak, float(devices["gb"].max()) if len(devices) else 0.0))
    if len(lines) > 1:
        axes.legend(frameon=False, fontsize=9, labelcolor=theme.text, ncols=4, loc="lower right", handlelength=1.2)
    return finish(
        figure,
        axes,
        theme,
        title,
        "seconds since the launch",
        "memory in use (GB)",
        f"{wide.shape[1]} ranks, one reading a second.",
    )


def rank_skew(run: Records, theme: Theme = LIGHT) -> Picture:
    """Median step time of each rank, split into its own work and the rest: exchange, and waiting for slower ranks."""
    figure, axes = blank("rank-skew", theme)
    frame = frames.ranks(run)
    if len(frame) < 2:
        return leave_empty(figure, axes, theme, "No step times of several ranks were recorded.")
    many = len(frame) > 2 * MANY_RANKS
    shown = pd.concat([frame.head(MANY_RANKS), frame.tail(MANY_RANKS)], ignore_index=True) if many else frame
    scale, unit = (1e3, "ms") if frame["step_s"].median() < 1 else (1.0, "s")
    told = bool(frame["own_s"].notna().all())
    rows, own = range(len(shown)), shown["own_s"] if told else shown["step_s"]
    axes.barh(
        rows, shown["step_s"] * scale, height=0.62, color=theme.series[0], alpha=0.3, label="exchange and waiting"
    )
    axes.barh(rows, own * scale, height=0.62, color=theme.series[0], label="own work")
    axes.set_yticks(
        rows, [f"rank {rank:.0f}: {seconds(value)}" for rank, value in zip(shown["rank"], own, strict=True)]
    )
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.grid(False)
    axes.grid(axis="x", color=theme.grid, linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    if told:
        axes.legend(
            frameon=False,
            fontsize=9,
            labelcolor=theme.text,
            ncols=2,
            loc="upper left",
            bbox_to_anchor=(0, -0.18),
            handlelength=1,
        )
    share = float(own.iloc[0] / own.iloc[-1]) - 1
    what = "has the most work" if told else "is the slowest"
    title = f"Rank {shown['rank'].iloc[0]:.0f} {what}: {100 * share:.1f} % above rank {shown['rank'].iloc[-1]:.0f}"
    alt = f"{len(shown)} of {len(frame)} ranks are shown." if many else f"{len(frame)} ranks."
    return finish(figure, axes, theme, title, f"median step time ({unit})", "", alt)


# Pictures of a run: each function takes a run and returns a figure with its finding as title and an alt text.
#
# ``FIGURES`` is the table of them, in the order of the report. ``show`` displays one in a notebook.


def _step_axis(axes: Axes, steps: pd.Series) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if steps.min() == steps.max():
        axes.set_xlim(float(steps.min()) - 1, float(steps.max()) + 1)


def loss_curve(run: Records, theme: Theme = LIGHT) -> Picture:
    """Loss of each step (light) and its moving average, with the first and the last value written out."""
    figure, axes = blank("loss-curve", theme)
    frame = frames.steps(run)[["step", "loss"]].dropna()
    if frame.empty:
        return leave_empty(figure, axes, theme, "No training step was recorded.")
    width = smoothing_window(len(frame))
    # From the first full window on: there the check of a falling loss starts as well.
    smoothed = frames.smooth(frame["loss"]).iloc[width - 1 :]
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
    done, plan = int(frame["step"].iloc[-1]), frames.plan(run)
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
    frame = frames.throughput(run)
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
        frames.smooth(counted["samples_per_s"]).iloc[width - 1 :],
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
        if frames.steady(run)
        else f", median of {n} steps"
    )
    alt = f"Median of {n} steps; {len(excluded)} first steps are shaded and not counted."
    return finish(
        figure, axes, theme, title, "step (shaded: not counted)" if len(excluded) else "step", "samples per second", alt
    )


def step_times(run: Records, theme: Theme = LIGHT) -> Picture:
    """Histogram of the step times (the slowest rank of each step), with median and 95th percentile."""
    figure, axes = blank("step-times", theme)
    slowest = frames.step_times(run)
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
    parts = frames.split(run)
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
