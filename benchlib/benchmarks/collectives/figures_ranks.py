"""Figures of the ranks and the algorithms of collectives: pairs, the last rank, crossover, and overlap with computation."""

import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle

from benchlib.benchmarks.collectives import tables as series
from benchlib.benchmarks.collectives.tables import VARIANTS, words
from benchlib.core.definitions import hidden_share, size_text
from benchlib.core.text import quantity, seconds
from benchlib.results.frames import Records, row_dicts
from benchlib.show.figures import (
    DASHED,
    LIGHT,
    End,
    Picture,
    Theme,
    blank,
    draw_line,
    finish,
    label_rows,
    leave_empty,
    log_values,
    name_ends,
    note,
    size_axis,
    styled,
)

BY_BYTES = "bytes of the larger side"
WITH_NUMBERS = 16  # ranks up to which a number fits into a cell
WITH_NAMES = 20  # ranks up to which each has its tick
MOST_ROWS = 6
STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
MANY_RANKS = 16
SHOWN = 8  # of many ranks: those that are last most and least often


@styled
def heat_map(run: Records, theme: Theme = LIGHT) -> Picture:
    """Bandwidth from each rank (row) to each other (column) at the largest size, and the slowest pair as a frame."""
    figure, axes = blank("pairs", theme, of_many=True)
    frame = series.table(run, "pairs").dropna(subset=["source", "target", "gbps"])
    frame = frame[(frame["source"] != frame["target"]) & (frame["gbps"] > 0)]
    if frame.empty:
        return leave_empty(figure, axes, theme, "No pair of ranks was measured.")
    sizes = frame["bytes"].dropna()
    if len(sizes):
        frame = frame[frame["bytes"] == sizes.max()]
    ranks = int(frame[["source", "target"]].max().max()) + 1
    grid = np.full((ranks, ranks), np.nan)
    grid[frame["source"].astype(int), frame["target"].astype(int)] = frame["gbps"]
    low, middle, high = (float(part(grid)) for part in (np.nanmin, np.nanmedian, np.nanmax))
    scale = LinearSegmentedColormap.from_list("pairs", [theme.series[1], theme.grid, theme.series[0]])
    form = ".0f" if ranks > 8 or low >= 100 else ".1f"
    size = 11 if ranks <= 4 else 9 if ranks <= 8 else 5.5
    floor = min(low, 0.8 * high)  # pairs that are alike get like colours
    cells = axes.pcolormesh(grid, cmap=scale, vmin=floor, vmax=high)
    axes.set_aspect("equal")
    axes.invert_yaxis()
    figure.colorbar(cells, label="Gbps", shrink=0.9, pad=0.03).outline.set_visible(False)
    step = 1 if ranks <= WITH_NAMES else 8
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([rank + 0.5 for rank in range(0, ranks, step)], [str(rank) for rank in range(0, ranks, step)])
    dark, bright = sorted((theme.card, theme.text))
    for (row, column), value in np.ndenumerate(grid) if ranks <= WITH_NUMBERS else ():
        if np.isfinite(value):
            light = np.dot(cells.to_rgba(value)[:3], (0.299, 0.587, 0.114)) > 0.42
            axes.text(
                column + 0.5, row + 0.5, f"{value:{form}}", ha="center", va="center", fontsize=size,
                color=dark if light else bright,
            )  # fmt: skip
    axes.tick_params(rotation=0, labelsize=9 if ranks <= 10 else 7.5)
    axes.grid(False)
    slow = np.unravel_index(np.nanargmin(grid), grid.shape)
    alike = low >= 0.95 * high
    if not alike:
        width = 2.2 if ranks <= WITH_NUMBERS else 1.4
        corner = (float(slow[1]), float(slow[0]))
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=theme.text, linewidth=width, clip_on=False))
    span = " to ".join(dict.fromkeys((quantity(low), quantity(high))))
    title = f"All pairs of ranks reach {span} Gbps"
    if not alike:
        title = f"Rank {slow[0]} to {slow[1]} is the slowest pair: {quantity(low)} Gbps, median {quantity(middle)}"
    at, each = (f" at {size_text(sizes.max())}", f" ({size_text(sizes.max())} each way)") if len(sizes) else ("", "")
    alt = f"{len(frame):,} pairs of {ranks} ranks{at}: {quantity(low)} to {quantity(high)} Gbps, median {quantity(middle)}."
    alt += " Pairs are timed for a shorter time than send/recv by size, one after the other."
    return finish(figure, axes, theme, title, f"to rank{each}", "from rank", alt, 30)


@styled
def crossover(run: Records, theme: Theme = LIGHT) -> Picture:
    """Time of each algorithm's all-reduce over the library's by size; below 1 it is faster, and crossings are marked."""
    figure, axes = blank("crossover", theme, of_many=True)
    ratios = series.ratios(run)
    if not ratios:
        return leave_empty(figure, axes, theme, "No algorithm was timed beside the library's all-reduce.")
    every = pd.concat(ratios, names=["algorithm"]).reset_index("algorithm")
    size_axis(axes, every["bytes"])
    first, last = axes.get_xlim()
    axes.axhline(1, color=theme.text, linewidth=1.4)
    colours = dict(zip(ratios, theme.series, strict=False))
    ends = [End(last, 1.0, "library", theme.text)]
    for name, frame in ratios.items():
        label = VARIANTS[name].replace(" + ", "\n+ ")
        ends.append(draw_line(axes, frame["bytes"], frame["ratio"], label, colours[name]))
    # At least from 0.5 to 2, so that the axis has more ticks than 1.
    low, high = min(every["ratio"].min(), 0.6) / 1.25, max(every["ratio"].max(), 1.7) * 1.25
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    kept = [step for step in STEPS if low <= step <= high]
    axes.set_yticks(kept, [f"{step:g} ×" for step in kept])
    axes.minorticks_off()
    crossings = series.table(run, "crossover").query("against == 'library' and algorithm in @ratios")
    facts = []
    for row in row_dicts(crossings[crossings["bytes"].between(first, last)]):
        name, colour, about = row["algorithm"], colours[row["algorithm"]], _about(row["bytes"])
        axes.axvline(row["bytes"], color=colour, linewidth=1, linestyle=(0, (2, 2)))
        height = 0.98 - 0.07 * list(ratios).index(name)  # above: the names at the ends are right and below
        note(axes, about, (row["bytes"], height), (-3, 0), xycoords=("data", "axes fraction"), va="top", ha="right",
             color=colour, fontsize=8)  # fmt: skip
        facts.append(f"the {VARIANTS[name]} crosses the library at {about}")
    name_ends(axes, theme, ends)
    facts += [f"{VARIANTS[row['algorithm']]}: {row['reason']}" for row in row_dicts(crossings) if row["reason"]]
    best = every.nsmallest(1, "ratio").iloc[0]
    name = VARIANTS[best["algorithm"]]
    title = f"The library is fastest at every size; {name} comes nearest ({best['ratio']:.2f} ×)"
    if best["ratio"] < 1:
        title = f"{name} takes {best['ratio']:.2f} × the library's time at {size_text(best['bytes'])}"
    alt = "; ".join(facts) or "no crossing"
    return finish(
        figure,
        axes,
        theme,
        title,
        "bytes of the all-reduce",
        "time / time of the library",
        f"{alt[0].upper()}{alt[1:]}.",
    )


def _about(size: float) -> str:
    """Write a size that lies between two measured ones with two digits: the rest is not known."""
    number, unit = size_text(size).split()
    return f"{float(f'{float(number):.2g}'):g} {unit}"


@styled
def overlap(run: Records, theme: Theme = LIGHT) -> Picture:
    """Exchange and computation one after the other and together: what is hidden is time that training does not wait for."""
    figure, axes = blank("overlap", theme, of_many=True)
    frame = series.table(run, "overlap").dropna(subset=["alone_us", "compute_us", "together_us"])
    if frame.empty:
        return leave_empty(figure, axes, theme, "No exchange was timed beside a computation.")
    frame = frame.sort_values(["operation", "bytes"]).tail(MOST_ROWS).reset_index(drop=True)
    apart = frame["alone_us"] + frame["compute_us"]
    longest = max(apart.max(), frame["together_us"].max())
    scale, unit = (1e-6, "s") if longest >= 1e6 else (1e-3, "ms") if longest >= 1e3 else (1.0, "µs")
    compute, alone, together = (frame[name] * scale for name in ("compute_us", "alone_us", "together_us"))
    upper, lower = frame.index - 0.2, frame.index + 0.2
    axes.barh(upper, compute, height=0.34, color=theme.muted, alpha=0.6, label="computation")
    axes.barh(upper, alone, left=compute, height=0.34, color=theme.series[1], label="exchange")
    axes.barh(lower, together, height=0.34, color=theme.series[0], label="together")
    for places, times in ((upper, apart), (lower, frame["together_us"])):
        for place, value in zip(places, times, strict=True):
            note(axes, seconds(1e-6 * value), (value * scale, place), (3, 0), fontsize=8.5)
    items = row_dicts(frame)
    label_rows(axes, [f"{words(item['operation'])}\n{size_text(item['bytes'])}" for item in items])
    axes.set_xlim(0, 1.18 * longest * scale)
    figure.legend(*axes.get_legend_handles_labels(), ncols=3, loc="outside lower center", handlelength=1)
    title = "Exchange and computation, one after the other and together"
    shares = [(hidden_share(item["alone_us"], item["compute_us"], item["together_us"]), item) for item in items]
    if measured := [(share or 0.0, item) for (share, kind), item in shares if kind != "disturbed"]:
        share, best = max(measured, key=lambda pair: pair[0])
        amount = f"{100 * share:.0f}%" if share > 0 else "Nothing"
        title = f"{amount} of the {words(best['operation'])} of {size_text(best['bytes'])} is hidden"
    alt = "; ".join(
        f"{words(item['operation'])} of {size_text(item['bytes'])}: computation {seconds(1e-6 * item['compute_us'])}, "
        f"exchange {seconds(1e-6 * item['alone_us'])}, together {seconds(1e-6 * item['together_us'])}"
        for item in items
    )
    alt += ". Timed in turns, apart from the series by size."
    return finish(figure, axes, theme, title, f"time ({unit}), medians in turns", "", alt, 46)


@styled
def last_rank(run: Records, theme: Theme = LIGHT) -> Picture:
    """How often each rank is the last to finish a round, beside the even share."""
    figure, axes = blank("last-rank", theme, of_many=True)
    shares = 100 * series.last_shares(run)
    if len(shares) < 2:
        return leave_empty(figure, axes, theme, "No times of several ranks were recorded.")
    ranked, even = shares.sort_values(ascending=False, kind="stable"), 100 / len(shares)
    many = len(ranked) > MANY_RANKS
    shown = pd.concat([ranked.head(SHOWN), ranked.tail(SHOWN)]) if many else shares
    worst, most = int(ranked.index[0]), float(ranked.iloc[0])
    colours = [theme.series[int(rank == worst and most > 1.5 * even)] for rank in shown.index]
    axes.barh(range(len(shown)), shown, height=0.66, color=colours)
    for row, share in enumerate(shown):
        note(axes, "< 1%" if 0 < share < 1 else f"{share:.0f}%", (share, row), fontsize=8.5)
    axes.axvline(even, color=theme.text, linewidth=1.2, linestyle=DASHED)
    label_rows(axes, [f"rank {rank}" for rank in shown.index])
    axes.set_xlim(0, 1.15 * max(most, even))
    title = f"Rank {worst} is the last in {most:.0f}% of the rounds; an even share is {even:.3g}%"
    alt = ", ".join(f"rank {rank} {share:.0f}%" for rank, share in shares.items())
    if many:
        alt = f"{len(shown)} of {len(shares)} ranks are shown."
    below = "rounds in which this rank finished last (%); dashed: an even share"
    return finish(figure, axes, theme, title, below, "", alt, 48)


@styled
def rounds(run: Records, theme: Theme = LIGHT, operation: str = "all_reduce") -> Picture:
    """Interval between the first and the last rank of an operation in each round: the distribution by size."""
    figure, axes = blank("rank-rounds", theme, of_many=True)
    frame = series.apart(run, operation)
    if frame.empty:
        return leave_empty(figure, axes, theme, f"No times of each rank and round of the {words(operation)} were kept.")
    for low, high, alpha in (("p05", "p95", 0.35), ("p25", "p75", 1.0)):
        axes.vlines(frame["bytes"], frame[low], frame[high], color=theme.series[0], alpha=alpha, linewidth=6)
    axes.plot(frame["bytes"], frame["p50"], "_", color=theme.card, markersize=6, markeredgewidth=1.5)
    looks = {"marker": "", "linewidth": 1.4, "linestyle": DASHED}
    end = draw_line(axes, frame["bytes"], frame["time_us"], "median time", theme.muted, **looks)
    size_axis(axes, frame["bytes"])
    log_values(axes)
    name_ends(axes, theme, [end])
    last = frame.iloc[-1]
    share = 100 * last["p50"] / last["time_us"]
    title = f"Ranks end {seconds(1e-6 * last['p50'])} apart in the {words(operation)} of {size_text(last['bytes'])}: {share:.0f}% of its time"
    alt = (
        f"Bars: 5 to 95% and 25 to 75% of the rounds, with the median, at {len(frame)} sizes. Dashed: the median time."
    )
    return finish(figure, axes, theme, title, BY_BYTES, "slowest - fastest rank of a round (µs)", alt)
