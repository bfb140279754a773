"""Pictures that compare the ranks of a run: memory over time, and whose work takes longest."""

import pandas as pd
from matplotlib.ticker import MaxNLocator

from benchlib import curves
from benchlib.curves import Records
from benchlib.labels import seconds
from benchlib.picture import LIGHT, Picture, Theme, blank, finish, leave_empty

MANY_RANKS = 8  # more lines than this cannot be told apart


def memory(run: Records, theme: Theme = LIGHT) -> Picture:
    """Resident memory of each rank over the run (with many ranks the largest and the smallest) and that of the devices."""
    figure, axes = blank("memory", theme)
    frame = curves.memory(run)
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
    devices = curves.memory(run, "device_memory_bytes")
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
    frame = curves.ranks(run)
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
