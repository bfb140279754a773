"""Figures of a training run: loss, speed, where a step's time goes, and the ranks beside each other.

Each function takes a run and returns a figure with its finding as title and an alt text.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from benchlib.core.stats import LEAST_FOR_P95, drift_text, quarters, smoothing_window
from benchlib.core.text import counted, quantity, seconds
from benchlib.judge.changepoints import disturbance
from benchlib.results import frames
from benchlib.results.frames import Records
from benchlib.show.figures import (
    DASHED,
    LIGHT,
    Picture,
    Theme,
    blank,
    finish,
    label_rows,
    leave_empty,
    note,
    styled,
)

SAME = 0.005  # share within which a reading is the peak itself
MANY_RANKS = 8  # more lines than this cannot be told apart


def _step_axis(axes: Axes, steps: pd.Series) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if steps.min() == steps.max():
        axes.set_xlim(float(steps.min()) - 1, float(steps.max()) + 1)


def _unit(value_s: float) -> tuple[float, str]:
    """Return the factor and the name of the unit in which a time is drawn."""
    return (1e3, "ms") if value_s < 1 else (1.0, "s")


@styled
def loss_curve(run: Records, theme: Theme = LIGHT) -> Picture:
    """Loss of each step (light) and its moving average, with the first and the last value written out."""
    figure, axes = blank("loss-curve", theme)
    frame = frames.steps(run)[["step", "loss"]].dropna()
    if frame.empty:
        return leave_empty(figure, axes, theme, "No training step was recorded.")
    width = smoothing_window(len(frame))
    axes.plot(frame["step"], frame["loss"], alpha=0.32, linewidth=0.9, marker="." if len(frame) < 40 else "")
    # From the first full window on: there the check of a falling loss starts as well.
    steps, smoothed = frame["step"].iloc[width - 1 :], frames.smooth(frame["loss"]).iloc[width - 1 :]
    axes.plot(steps, smoothed, color=theme.series[0], linewidth=2.2, marker="o" if len(frame) == 1 else "")
    first, last = float(smoothed.iloc[0]), float(smoothed.iloc[-1])
    highest = float(max(frame["loss"].max(), smoothed.max()))
    for place, align in ((0, "left"), (-1, "right"))[: len(smoothed)]:
        value = smoothed.iloc[place]
        # The end of a falling line has room below it, unless it is at the foot of the picture.
        shift = -20 if place and value > 0.2 * highest else 14
        note(axes, f"{value:.3g}", (steps.iloc[place], value), (0, shift), ha=align, fontsize=10, fontweight="bold")
    done, plan = int(frame["step"].iloc[-1]), frames.plan(run)
    planned, total = (int(plan.get(name) or 0) for name in ("planned_steps", "total_steps"))
    axes.set_ylim(min(0.0, float(frame["loss"].min())), 1.15 * highest if highest > 0 else None)
    _step_axis(axes, frame["step"])
    of = ""
    if max(planned, total) > done:
        of = f" of {planned:,} planned" if planned > done else f" of {total:,} in the whole training"
    verb = "fell" if last < first else "did not fall: it went"
    title = f"Loss {verb} from {first:.3g} to {last:.3g} in {done:,} steps"
    if len(frame) == 1:
        title = f"One step only: loss {last:.3g}"
    alt = f"Light: each step; bold: mean over {width} step{'s' * (width != 1)}."
    return finish(
        figure, axes, theme, title, f"step ({done:,}{of})" if of else "step", "loss (mean over the global batch)", alt
    )


@styled
def throughput(run: Records, theme: Theme = LIGHT) -> Picture:
    """Samples per second of each step; the steps left out of the statistics are shaded."""
    figure, axes = blank("throughput", theme)
    frame = frames.throughput(run)
    if frame.empty:
        return leave_empty(figure, axes, theme, "No step time was recorded.")
    counted = frame[frame["steady"]] if frame["steady"].any() else frame
    median, many = float(counted["samples_per_s"].median()), len(frame) > 1
    axes.plot(frame["step"], frame["samples_per_s"], ".", alpha=0.4 if many else 1, markersize=3.5 if many else 12)
    width = smoothing_window(len(counted))
    smoothed = frames.smooth(counted["samples_per_s"]).iloc[width - 1 :]
    axes.plot(counted["step"].iloc[width - 1 :], smoothed, color=theme.series[0], linewidth=2)
    axes.axhline(median, color=theme.muted, linewidth=1, linestyle=DASHED)
    # Right of the axes, where no step can lie on it.
    note(axes, f"median\n{quantity(median)}", (1, median), xycoords=("axes fraction", "data"), annotation_clip=False)
    excluded = frame[(~frame["steady"]) & (frame["step"] < counted["step"].min())]
    if len(excluded):
        shaded = (float(excluded["step"].min()) - 0.5, float(counted["step"].min()) - 0.5)
        axes.axvspan(*shaded, color=theme.muted, alpha=0.16, linewidth=0)
    shift = disturbance(counted["samples_per_s"].to_numpy(), "higher")
    for start, end in shift.parts if shift else ():
        axes.axvspan(*counted["step"].iloc[[start, end - 1]], color=theme.series[3], alpha=0.14, linewidth=0)
    axes.set_ylim(0, 1.12 * float(frame["samples_per_s"].max()))
    _step_axis(axes, frame["step"])
    # Where no window was recorded (a run that broke) or too few steps, nothing says that the speed had settled.
    n, rates = len(counted), counted["samples_per_s"].tolist()
    settled = " in the steady state" if frames.steady(run) and quarters(rates) else f", median of {n} steps"
    title = f"{quantity(median)} samples/s" + (" in the one step measured" if n == 1 else settled)
    if moved := drift_text(rates):
        title = f"Throughput {moved} samples/s: no steady state"
    alt = f"Median of {n} steps; {len(excluded)} first steps are shaded and not counted."
    alt += f" In {shift.share:.0%} of the steps, tinted, the level shifted by {shift.ratio - 1:+.0%}." if shift else ""
    tints = [*(["shaded: not counted"] if len(excluded) else []), *(["tinted: level shifted"] if shift else [])]
    below = f"step ({', '.join(tints)})" if tints else "step"
    return finish(figure, axes, theme, title, below, "samples per second", alt)


@styled
def step_times(run: Records, theme: Theme = LIGHT) -> Picture:
    """Histogram of the step times (the slowest rank of each step), with median and, from twenty steps on, 95th percentile."""
    figure, axes = blank("step-times", theme)
    slowest = frames.step_times(run)
    if len(slowest) < 2:
        return leave_empty(figure, axes, theme, "Fewer than two steps were timed: there is no distribution.")
    scale, unit = _unit(slowest.median())
    median, p95 = float(slowest.median()), float(slowest.quantile(0.95))
    marks = [(median, "median", theme.series[1], -4)]
    title, alt = f"Median of {len(slowest)} steps: {seconds(median)}", "Histogram with the median."
    if len(slowest) >= LEAST_FOR_P95:
        marks.append((p95, "p95", theme.series[3], 4))
        title = f"Median step {seconds(median)}; p95 is {p95 / median:.2f} × the median"
        alt = "Histogram with median and 95th percentile."
    bins = min(40, max(8, int(len(slowest) ** 0.5) * 2))
    axes.hist(slowest * scale, bins=bins, edgecolor=theme.card)
    axes.set_ylim(0, 1.28 * axes.dataLim.y1)
    # Above the bars, and each on its own side of its line, so that the two never lie on each other.
    for value, word, colour, side in marks:
        axes.axvline(value * scale, color=colour, linewidth=1.6)
        note(axes, f"{word} {seconds(value)}", (value * scale, 0.99), (side, 0), xycoords=("data", "axes fraction"),
             va="top", color=colour, fontweight="bold")  # fmt: skip
    axes.margins(x=0.16)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    below = f"step time of the slowest rank ({unit}), n = {len(slowest):,}"
    return finish(figure, axes, theme, title, below, "steps", alt)


@styled
def time_split(run: Records, theme: Theme = LIGHT) -> Picture:
    """Where a step's time goes: the parts in the order of execution, each starting where the one before it ends."""
    figure, axes = blank("time-split", theme)
    parts = frames.split(run)
    whole = sum(parts.values())
    if not parts or whole <= 0:
        return leave_empty(figure, axes, theme, "No split of the step time was recorded.")
    (scale, unit), top, left = _unit(whole), max(parts, key=lambda part: parts[part]), 0.0
    for row, (part, value) in enumerate(parts.items()):
        colour = theme.muted if part == "other" else theme.series[0]
        axes.barh(row, value * scale, left=left * scale, height=0.62, color=colour, alpha=1.0 if part == top else 0.55)
        after = left + value < 0.66 * whole
        place = (left + value if after else left) * scale
        note(axes, f"{seconds(value)} · {100 * value / whole:.0f}%", (place, row), (5 if after else -5, 0))
        left += value
    label_rows(axes, ["gradient\nexchange" if part == "exchange" else part for part in parts])
    axes.set_xlim(0, whole * scale * 1.02)
    title = f"{100 * parts[top] / whole:.0f}% of a step is {'gradient exchange' if top == 'exchange' else top}"
    alt = ", ".join(f"{part} {seconds(value)}" for part, value in parts.items())
    return finish(figure, axes, theme, title, f"time within a step ({unit}), medians", "", alt)


@styled
def memory(run: Records, theme: Theme = LIGHT) -> Picture:
    """Resident memory of each rank over the run (with many ranks the largest and the smallest) and that of the devices."""
    figure, axes = blank("memory", theme)
    frame, devices = frames.memory(run), frames.memory(run, "device_memory_bytes")
    if frame.empty:
        return leave_empty(figure, axes, theme, "No memory reading was recorded.")
    ranks = frame.pivot_table(index="seconds", columns="rank", values="gb", aggfunc="last").add_prefix("rank ")
    if (many := ranks.shape[1]) > MANY_RANKS:
        ranks = pd.DataFrame({"largest rank": ranks.max(axis=1), "smallest rank": ranks.min(axis=1)})
    for name, line in ranks.items():
        axes.plot(line.dropna(), label=name)
    highest = frame.nlargest(1, "gb").iloc[0]
    title, top = f"Resident memory peaks at {highest['gb']:.3g} GB", highest["gb"]
    result = frames.readable(run, "result")
    whole = result.metric("resident_memory_gb") if result else None
    if (
        whole and whole.value
    ):  # of the kernel, which keeps a peak between two readings; up to the result, as in the key numbers
        title = f"Resident memory peaks at {whole.text}"
        if abs(top / whole.value - 1) < SAME:
            title += f" on rank {highest['rank']:.0f}"
        elif top > whole.value:
            title += f", and at {top:.3g} GB while the results are written"
        axes.axhline(whole.value, color=theme.muted, linewidth=1.2, linestyle=DASHED, label="peak of the largest rank")
        top = max(top, whole.value)
    if len(devices):
        title, top = f"{title}, devices at {devices['gb'].max():.3g} GB", max(top, devices["gb"].max())
        axes.plot(devices["seconds"], devices["gb"], color=theme.text, linestyle=(0, (5, 2)), label="devices, sum")
    axes.set_ylim(0, 1.15 * top)
    if len(axes.lines) > 1:
        axes.legend(ncols=4, loc="lower right")
    alt = f"{many} ranks, one reading a second."
    return finish(figure, axes, theme, title, "seconds since the launch", "memory in use (GB)", alt)


@styled
def rank_skew(run: Records, theme: Theme = LIGHT) -> Picture:
    """Median step time of each rank, split into its own work and the rest: exchange, and waiting for slower ranks."""
    figure, axes = blank("rank-skew", theme)
    frame = frames.ranks(run)
    if len(frame) < 2:
        return leave_empty(figure, axes, theme, "No step times of several ranks were recorded.")
    many = len(frame) > 2 * MANY_RANKS
    shown = pd.concat([frame.head(MANY_RANKS), frame.tail(MANY_RANKS)], ignore_index=True) if many else frame
    split = bool(frame["own_s"].notna().all())
    (scale, unit), own = _unit(frame["step_s"].median()), shown["own_s"] if split else shown["step_s"]
    for values, alpha, word in ((shown["step_s"], 0.3, "exchange and waiting"), (own, 1.0, "own work")):
        axes.barh(shown.index, values * scale, height=0.62, color=theme.series[0], alpha=alpha, label=word)
    label_rows(axes, [f"rank {rank:.0f}: {seconds(value)}" for rank, value in zip(shown["rank"], own, strict=True)])
    axes.xaxis.set_major_locator(MaxNLocator(6))
    if split:
        axes.legend(ncols=2, loc="upper left", bbox_to_anchor=(0, -0.18), handlelength=1)
    share = float(own.iloc[0] / own.iloc[-1]) - 1
    what = "has the most work" if split else "is the slowest"
    title = f"Rank {shown['rank'].iloc[0]:.0f} {what}: {100 * share:.1f}% above rank {shown['rank'].iloc[-1]:.0f}"
    alt = f"{len(shown)} of {len(frame)} ranks are shown." if many else f"{counted(len(frame), 'rank')}."
    return finish(figure, axes, theme, title, f"median step time ({unit})", "", alt, 44)
