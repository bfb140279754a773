"""The picture of all pairs of ranks: who reaches whom how fast."""

import math

import numpy as np
from matplotlib.colors import LinearSegmentedColormap

from benchlib import collective_series as series
from benchlib.collectives.sizes import size_text
from benchlib.curves import Records
from benchlib.metrics import quantity
from benchlib.picture import LIGHT, Picture, Theme, blank, finish, leave_empty

WITH_NUMBERS = 16  # ranks up to which a number fits into a cell
WITH_NAMES = 20  # ranks up to which each has its tick


def heat_map(run: Records, theme: Theme = LIGHT) -> Picture:
    """Bandwidth from each rank (row) to each other (column) at the largest size, and the slowest pair as a ring."""
    figure, axes = blank("pairs", theme, of_many=True)
    frame = series.table(run, "pairs").dropna(subset=["source", "target", "gbps"])
    frame = frame[(frame["source"] != frame["target"]) & (frame["gbps"] > 0)]
    if frame.empty:
        return leave_empty(figure, axes, theme, "No pair of ranks was measured.")
    sizes = frame["bytes"].dropna()
    if len(sizes):
        frame = frame[frame["bytes"] == sizes.max()]
    ranks = int(max(frame["source"].max(), frame["target"].max())) + 1
    grid = np.full((ranks, ranks), np.nan)
    grid[frame["source"].astype(int), frame["target"].astype(int)] = frame["gbps"]
    low, high = float(np.nanmin(grid)), float(np.nanmax(grid))
    scale = LinearSegmentedColormap.from_list("pairs", [theme.series[1], theme.grid, theme.series[0]]).with_extremes(
        bad=theme.card
    )
    # Pairs that are alike get like colours: the scale never shows less than a fifth of the fastest.
    floor = min(low, 0.8 * high)
    image = axes.imshow(grid, cmap=scale, vmin=floor, vmax=high, aspect="equal", interpolation="nearest")
    _ticks(axes, ranks)
    if ranks <= WITH_NUMBERS:
        _numbers(axes, grid, theme, floor, high)
    slow = np.unravel_index(np.nanargmin(grid), grid.shape)
    if low < 0.95 * high:
        axes.add_patch(_ring(slow, theme, ranks))
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.03)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(colors=theme.muted, labelsize=8.5, length=0)
    bar.set_label("Gbps", color=theme.muted, fontsize=9)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    middle = float(np.nanmedian(grid))
    if grid[~np.isnan(grid)].size == 1 or low >= 0.95 * high:
        ends = quantity(low) if quantity(low) == quantity(high) else f"{quantity(low)} to {quantity(high)}"
        title = f"All pairs of ranks reach {ends} Gbps"
    else:
        title = f"Rank {slow[0]} to {slow[1]} is the slowest pair: {quantity(low)} Gbps, median {quantity(middle)}"
    at = f" at {size_text(sizes.max())}" if len(sizes) else ""
    alt = f"{len(frame):,} pairs of {ranks} ranks{at}: {quantity(low)} to {quantity(high)} Gbps, median {quantity(middle)}."
    return finish(
        figure,
        axes,
        theme,
        title,
        f"to rank ({size_text(sizes.max())} each way)" if at else "to rank",
        "from rank",
        alt,
        30,
    )


def _ticks(axes, ranks: int) -> None:  # type: ignore[no-untyped-def]
    step = 1 if ranks <= WITH_NAMES else 8
    places = list(range(0, ranks, step))
    axes.set_xticks(places, [str(place) for place in places])
    axes.set_yticks(places, [str(place) for place in places])
    if ranks > 10:
        axes.tick_params(labelsize=7.5)


def _numbers(axes, grid: np.ndarray, theme: Theme, floor: float, high: float) -> None:  # type: ignore[no-untyped-def,type-arg]
    ranks = len(grid)
    size = 11 if ranks <= 4 else 9 if ranks <= 8 else 5.5
    for (source, target), value in np.ndenumerate(grid):
        if math.isnan(value):
            continue
        # Both ends of the scale are dark on paper and bright on a dark page; its middle is the opposite.
        far = abs((value - floor) / (high - floor or 1.0) - 0.5) > 0.2
        words = f"{value:.0f}" if value >= 100 or ranks > 8 else f"{value:.1f}"
        axes.text(
            target, source, words, ha="center", va="center", fontsize=size, color=theme.card if far else theme.text
        )


def _ring(place, theme: Theme, ranks: int):  # type: ignore[no-untyped-def]
    from matplotlib.patches import Rectangle

    width = 2.2 if ranks <= WITH_NUMBERS else 1.4
    return Rectangle(
        (place[1] - 0.5, place[0] - 0.5), 1, 1, fill=False, edgecolor=theme.text, linewidth=width, clip_on=False
    )
