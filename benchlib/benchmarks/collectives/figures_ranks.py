"""The picture of all pairs of ranks: who reaches whom how fast."""

import math

import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap

from benchlib.benchmarks.collectives import tables as series
from benchlib.benchmarks.collectives.tables import ROOTED, TOGETHER, VARIANTS, words
from benchlib.core.definitions import size_text
from benchlib.core.text import quantity, seconds
from benchlib.results.frames import Records
from benchlib.show.figures import (
    LIGHT,
    End,
    Picture,
    Theme,
    blank,
    finish,
    leave_empty,
    name_ends,
    plain_numbers,
    size_axis,
)

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


# Pictures of how collectives are made: algorithms of the kit beside the library's, and exchange beside computation.


MOST_ROWS = 6
STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def crossover(run: Records, theme: Theme = LIGHT) -> Picture:
    """Time of each algorithm's all-reduce over the library's by size; below 1 it is faster, and where it crosses is marked."""
    figure, axes = blank("crossover", theme, of_many=True)
    found = series.ratios(run)
    if not found:
        return leave_empty(figure, axes, theme, "No algorithm was timed beside the library's all-reduce.")
    size_axis(axes, [size for frame in found.values() for size in frame["bytes"]])
    axes.set_yscale("log")
    axes.axhline(1, color=theme.text, linewidth=1.4)
    ends = [End(axes.get_xlim()[1], 1.0, "library", theme.text)]
    for number, (name, frame) in enumerate(found.items()):
        colour = theme.series[number]
        axes.plot(frame["bytes"], frame["ratio"], color=colour, linewidth=1.8, marker="o", markersize=4)
        ends.append(
            End(
                float(frame["bytes"].iloc[-1]),
                float(frame["ratio"].iloc[-1]),
                VARIANTS[name].replace(" + ", "\n+ "),
                colour,
            )
        )
    values = [value for frame in found.values() for value in frame["ratio"]]
    low, high = min([*values, 0.8]) / 1.25, max([*values, 1.25]) * 1.25
    axes.set_ylim(low, high)
    kept = [step for step in STEPS if low <= step <= high]
    axes.set_yticks(kept, [f"{step:g} ×" for step in kept])
    axes.minorticks_off()
    crossings = series.table(run, "crossover").query("against == 'library'")
    crossings = crossings[crossings["algorithm"].isin(list(found))]
    told: list[str] = []
    for number, name in enumerate(found):
        for size in crossings.loc[crossings["algorithm"] == name, "bytes"].dropna():
            if not axes.get_xlim()[0] <= size <= axes.get_xlim()[1]:
                continue
            axes.axvline(size, color=theme.series[number], linewidth=1, linestyle=(0, (2, 2)))
            axes.annotate(_about(size), (size, 0.02 + 0.07 * number), (3, 0), xycoords=("data", "axes fraction"), textcoords="offset points",
                          color=theme.series[number], fontsize=8)  # fmt: skip
            told.append(f"the {VARIANTS[name]} crosses the library at {_about(size)}")
    name_ends(axes, theme, ends)
    reasons = [f"{VARIANTS[row['algorithm']]}: {row['reason']}" for row in series.rows(crossings) if row["reason"]]
    name, best = min(
        ((name, row) for name, frame in found.items() for row in series.rows(frame)), key=lambda item: item[1]["ratio"]
    )
    if best["ratio"] < 1:
        title = f"{_upper(VARIANTS[name])} takes {best['ratio']:.2f} × the library's time at {size_text(best['bytes'])}"
    else:
        title = f"The library is fastest at every size; {VARIANTS[name]} comes nearest ({best['ratio']:.2f} ×)"
    alt = "; ".join([*told, *reasons]) or "No crossing was found"
    return finish(
        figure, axes, theme, title, "bytes of the all-reduce", "time / time of the library", f"{_upper(alt)}."
    )


def _about(size: float) -> str:
    """Write a size that lies between two measured ones with two digits: the rest is not known."""
    number, unit = size_text(size).split()
    return f"{float(number):.0f} {unit}" if float(number) >= 10 else f"{float(number):.2g} {unit}"


def overlap(run: Records, theme: Theme = LIGHT) -> Picture:
    """Exchange and computation one after the other and together: what is hidden is time that training does not wait for."""
    figure, axes = blank("overlap", theme, of_many=True)
    frame = series.table(run, "overlap").dropna(subset=["alone_us", "compute_us", "together_us"])
    if frame.empty:
        return leave_empty(figure, axes, theme, "No exchange was timed beside a computation.")
    items = series.rows(frame.sort_values(["operation", "bytes"]).tail(MOST_ROWS))
    longest = max(max(item["alone_us"] + item["compute_us"], item["together_us"]) for item in items)
    scale, unit = (1e-6, "s") if longest >= 1e6 else (1e-3, "ms") if longest >= 1e3 else (1.0, "µs")
    for row, item in enumerate(items):
        first = row == 0
        axes.barh(
            row - 0.2,
            item["compute_us"] * scale,
            height=0.34,
            color=theme.muted,
            alpha=0.6,
            label="computation" if first else None,
        )
        axes.barh(row - 0.2, item["alone_us"] * scale, left=item["compute_us"] * scale, height=0.34, color=theme.series[1],
                  label="exchange" if first else None)  # fmt: skip
        axes.barh(
            row + 0.2,
            item["together_us"] * scale,
            height=0.34,
            color=theme.series[0],
            label="together" if first else None,
        )
        for place, value in ((row - 0.2, item["compute_us"] + item["alone_us"]), (row + 0.2, item["together_us"])):
            axes.annotate(seconds(1e-6 * value), (value * scale, place), (3, 0), textcoords="offset points", va="center",
                          color=theme.text, fontsize=8.5)  # fmt: skip
    names = [f"{words(item['operation'])}\n{size_text(item['bytes'])}" for item in items]
    axes.set_yticks(range(len(items)), names)
    axes.set_ylim(len(items) - 0.45, -0.55)
    axes.set_xlim(0, 1.18 * longest * scale)
    axes.grid(False)
    axes.grid(axis="x", color=theme.grid, linewidth=0.8)
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=9, labelcolor=theme.text, ncols=3,
                  loc="outside lower center", handlelength=1)  # fmt: skip
    known = [item for item in items if item["hidden_share"] == item["hidden_share"]]
    if not known:
        title = "Exchange and computation, one after the other and together"
    else:
        best = max(known, key=lambda item: item["hidden_share"])
        hidden = f"{100 * best['hidden_share']:.0f} %" if best["hidden_share"] > 0 else "Nothing"
        title = f"{hidden} of the {words(best['operation'])} of {size_text(best['bytes'])} is hidden"
    told = "; ".join(
        f"{words(item['operation'])} of {size_text(item['bytes'])}: computation {seconds(1e-6 * item['compute_us'])}, "
        f"exchange {seconds(1e-6 * item['alone_us'])}, together {seconds(1e-6 * item['together_us'])}"
        for item in items
    )
    return finish(figure, axes, theme, title, f"time ({unit}), medians", "", f"{told}.", 46)


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


# Pictures of the ranks of a collective: who is the last to finish, and how far they are apart.


MANY_RANKS = 16
SHOWN = 8  # of many ranks: those that are last most and least often


def last_rank(run: Records, theme: Theme = LIGHT) -> Picture:
    """How often each rank is the last to finish a round, beside the even share."""
    figure, axes = blank("last-rank", theme, of_many=True)
    shares = series.last_shares(run)
    if len(shares) < 2:
        return leave_empty(figure, axes, theme, "No times of several ranks were recorded.")
    ranked = shares.sort_values(ascending=False, kind="stable")
    many = len(ranked) > MANY_RANKS
    shown = pd.concat([ranked.head(SHOWN), ranked.tail(SHOWN)]) if many else shares
    rows, even = range(len(shown)), 1 / len(shares)
    worst = int(ranked.index[0])
    colours = [
        theme.series[1] if rank == worst and ranked.iloc[0] > 1.5 * even else theme.series[0] for rank in shown.index
    ]
    axes.barh(rows, 100 * shown, height=0.66, color=colours)
    paper = {"facecolor": theme.card, "alpha": 0.8, "linewidth": 0, "pad": 0.5}
    for row, share in zip(rows, shown, strict=True):
        axes.annotate(f"{100 * share:.0f} %" if share >= 0.01 or share == 0 else "< 1 %", (100 * share, row), (4, 0),
                      textcoords="offset points", va="center", color=theme.text, fontsize=8.5, bbox=paper)  # fmt: skip
    axes.axvline(100 * even, color=theme.text, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set_yticks(rows, [f"rank {rank}" for rank in shown.index])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.15 * max(100 * float(shown.max()), 100 * even))
    axes.grid(False)
    axes.grid(axis="x", color=theme.grid, linewidth=0.8)
    title = (
        f"Rank {worst} is the last in {100 * ranked.iloc[0]:.0f} % of the rounds; an even share is {100 * even:.3g} %"
    )
    alt = (
        f"{len(shown)} of {len(shares)} ranks are shown."
        if many
        else ", ".join(f"rank {rank} {100 * share:.0f} %" for rank, share in shares.items())
    )
    return finish(
        figure, axes, theme, title, "rounds in which this rank finished last (%); dashed: an even share", "", alt, 48
    )


def rounds(run: Records, theme: Theme = LIGHT, operation: str = "all_reduce") -> Picture:
    """How far the first and the last rank of an operation are apart in each round: the distribution by size."""
    figure, axes = blank("rank-rounds", theme, of_many=True)
    frame = series.apart(run, operation)
    if frame.empty:
        return leave_empty(figure, axes, theme, f"No times of each rank and round of the {words(operation)} were kept.")
    for item in series.rows(frame):
        x = item["bytes"]
        axes.plot(
            [x, x], [item["p05"], item["p95"]], color=theme.series[0], alpha=0.35, linewidth=6, solid_capstyle="butt"
        )
        axes.plot([x, x], [item["p25"], item["p75"]], color=theme.series[0], linewidth=6, solid_capstyle="butt")
        axes.plot([x], [item["p50"]], "_", color=theme.card, markersize=6, markeredgewidth=1.5)
    axes.plot(frame["bytes"], frame["time_us"], color=theme.muted, linewidth=1.4, linestyle=(0, (4, 3)))
    size_axis(axes, frame["bytes"])
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)
    axes.margins(y=0.06)
    end = frame.iloc[-1]
    name_ends(axes, theme, [End(float(end["bytes"]), float(end["time_us"]), "median time", theme.muted)])
    last = series.rows(frame)[-1]
    share = 100 * last["p50"] / last["time_us"]
    title = f"Ranks end {seconds(1e-6 * last['p50'])} apart in the {words(operation)} of {size_text(last['bytes'])}: {share:.0f} % of its time"
    alt = f"Bars: 5 to 95 % and 25 to 75 % of the rounds, with the median, at {len(frame)} sizes. Dashed: the median time."
    return finish(figure, axes, theme, title, "bytes of the larger side", "slowest - fastest rank of a round (µs)", alt)


def spread(run: Records, theme: Theme = LIGHT) -> Picture:
    """How far the first and the last rank of a round are apart, by size: the median over rounds of max - min."""
    figure, axes = blank("rank-spread", theme, of_many=True)
    found = {key: frame for key, frame in series.series_lines(run, "skew_us").items() if key[1] == "library"}
    if not found:
        return leave_empty(figure, axes, theme, "No differences between ranks were recorded.")
    times = series.series_lines(run, "median_us")
    names = [name for name in (*TOGETHER, *ROOTED) if (name, "library") in found]
    ends = []
    for number, name in enumerate(names):
        frame, colour = found[name, "library"], theme.series[number % len(theme.series)]
        style = "-" if number < len(theme.series) else (0, (3, 1.2))
        axes.plot(
            frame["bytes"], frame["value"], color=colour, linewidth=1.6, marker="o", markersize=3, linestyle=style
        )
        ends.append(End(float(frame["bytes"].iloc[-1]), float(frame["value"].iloc[-1]), words(name), colour))
    size_axis(axes, [size for frame in found.values() for size in frame["bytes"]])
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)
    axes.margins(y=0.06)
    name_ends(axes, theme, ends)
    name = names[0]
    last = found[name, "library"].iloc[-1]
    whole = times[name, "library"].set_index("bytes")["value"].get(last["bytes"])
    title = f"Ranks of the {words(name)} end {seconds(1e-6 * last['value'])} apart at {size_text(last['bytes'])}"
    alt = f"That is {100 * last['value'] / whole:.0f} % of its time." if whole else ""
    return finish(figure, axes, theme, title, "bytes of the larger side", "slowest - fastest rank (µs), median", alt)
