"""Pictures of the ranks of a collective: who is the last to finish, and how far they are apart."""

import pandas as pd

from benchlib import collective_series as series
from benchlib.byte_axis import End, name_ends, plain_numbers, size_axis
from benchlib.collective_series import ROOTED, TOGETHER, words
from benchlib.collectives.sizes import size_text
from benchlib.curves import Records
from benchlib.labels import seconds
from benchlib.picture import LIGHT, Picture, Theme, blank, finish, leave_empty

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
    found = {key: frame for key, frame in series.lines(run, "skew_us").items() if key[1] == "library"}
    if not found:
        return leave_empty(figure, axes, theme, "No differences between ranks were recorded.")
    times = series.lines(run, "median_us")
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
