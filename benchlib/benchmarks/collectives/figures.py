"""Figures of the bandwidth and the time of collectives by size, beside the measured limits and the fitted line."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from benchlib.benchmarks.collectives import figures_ranks
from benchlib.benchmarks.collectives import tables as series
from benchlib.benchmarks.collectives.figures_ranks import BY_BYTES
from benchlib.benchmarks.collectives.tables import LEAST_FOR_P99, ROOTED, TOGETHER, share_text, words
from benchlib.core.definitions import BUS_FACTORS, NO_LIMIT, size_text
from benchlib.core.stats import LEAST_FOR_P95
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
    grouped_bars,
    label_rows,
    leave_empty,
    log_values,
    name_ends,
    note,
    plain_numbers,
    size_axis,
    styled,
)

CLAIMED: Any = (0, (6, 3))
SOCKET: Any = (0, (4, 1.5, 1, 1.5))
MOST_BARS = 12
SMALL_BYTES = 2**20


def bandwidth(run: Records, theme: Theme = LIGHT) -> Picture:
    """Bus bandwidth by size of the operations in which all ranks send at once, beside the limits of the same run."""
    limits = ("tcp socket all ranks", series.CLAIMED)
    return _bandwidth(run, theme, "collective-bandwidth", TOGETHER, limits)


def rooted_bandwidth(run: Records, theme: Theme = LIGHT) -> Picture:
    """Bus bandwidth by size of the operations with one source or target, beside the limits of the same run."""
    limits = ("tcp socket one way", series.CLAIMED)
    return _bandwidth(run, theme, "rooted-bandwidth", ROOTED, limits)


@styled
def _bandwidth(run: Records, theme: Theme, name: str, operations: Sequence[str], limits: Sequence[str]) -> Picture:
    figure, axes = blank(name, theme, of_many=True)
    measured = {
        key: frame
        for key, frame in series.series_lines(run, "busbw_gbps").items()
        if key[0] in operations and key[1] in ("library", "direct")
    }
    if not measured:
        missing = "No bandwidth between ranks was measured: one rank exchanges nothing."
        return leave_empty(figure, axes, theme, missing)
    colours = dict(zip(operations, theme.series, strict=False))
    ends, wrong = list[End](), dict.fromkeys(series.wrong(run), ", wrong")
    for (operation, variant), frame in sorted(measured.items(), key=lambda item: operations.index(item[0][0])):
        label = words(operation, variant) + wrong.get((operation, variant), "")
        dashes = "-" if variant == "library" else (0, (3, 1.2))
        ends.append(draw_line(axes, frame["bytes"], frame["value"], label, colours[operation], linestyle=dashes))
    claims = _claimed(axes, run, colours)
    size_axis(axes, [*pd.concat(measured.values())["bytes"], *(end.x for end in claims)])
    ends += claims + _limits(axes, theme, series.bounds(run), limits)
    log_values(axes)
    name_ends(axes, theme, ends)
    (operation, variant), top = max(
        ((key, row) for key, frame in measured.items() for row in row_dicts(frame)), key=lambda item: item[1]["value"]
    )
    title = f"{words(operation, variant)} reaches {quantity(top['value'])} Gbps at {size_text(top['bytes'])}"
    if wrong:
        title += f"; {len(wrong)} operation{'s' * (len(wrong) > 1)} with wrong results"
    values = "; ".join(f"{end.words} {quantity(end.y)}" for end in sorted(ends, key=lambda end: -end.y))
    return finish(figure, axes, theme, title, BY_BYTES, "bus bandwidth (Gbps)", f"Gbps at the largest size: {values}.")


def _limits(axes: Axes, theme: Theme, bounds: dict[str, pd.DataFrame], wanted: Sequence[str]) -> list[End]:
    """Draw the limits as grey lines; one that holds for any size reaches over the whole axis."""
    low, high = axes.get_xlim()
    ends = []
    for name in wanted:
        frame = bounds.get(name, pd.DataFrame(columns=["bytes", "gbps"]))
        frame = frame[frame["bytes"].between(low, high)] if frame["bytes"].notna().any() else frame
        if len(frame) == 1:
            frame = pd.DataFrame({"bytes": [low, high], "gbps": float(frame["gbps"].iloc[0])})
        if len(frame):
            looks = {"marker": "", "linewidth": 1.4, "linestyle": CLAIMED if name == series.CLAIMED else SOCKET}
            label = name.replace("tcp", "TCP")
            ends.append(draw_line(axes, frame["bytes"], frame["gbps"], label, theme.muted, **looks))
    return ends


def _claimed(axes: Axes, run: Records, colours: dict[str, str]) -> list[End]:
    """Draw what a file of nccl-tests states beside the run's own lines, with crosses: it was not measured here."""
    frame = series.table(run, "nccl_tests")
    frame = frame[(frame["busbw_gbps"] > 0) & (frame["bytes"] > 0) & frame["operation"].isin(list(colours))]
    ends = []
    for operation, group in frame.groupby("operation", sort=False):
        best = group.groupby("bytes", as_index=False)["busbw_gbps"].max()  # of in place and out of place
        looks = {"linewidth": 1, "marker": "x", "markersize": 5, "linestyle": ":"}
        label, colour = f"{words(str(operation))}\nnccl-tests (claimed)", colours[str(operation)]
        ends.append(draw_line(axes, best["bytes"], best["busbw_gbps"], label, colour, **looks))
    return ends


@styled
def shares(run: Records, theme: Theme = LIGHT) -> Picture:
    """Share of each limit that the operations reach at their largest size, with the targets as marks."""
    figure, axes = blank("limit-shares", theme, of_many=True)
    frame = series.shares(run)
    frame = frame[frame["bytes"] == frame.groupby(["operation", "variant"])["bytes"].transform("max")]
    frame = frame.assign(
        kind=["TCP socket" if name.startswith("tcp") else name for name in frame["bound"]],
        case=[words(*case) for case in zip(frame["operation"], frame["variant"], strict=True)],
    )
    kinds = [kind for kind in ("TCP socket", series.CLAIMED) if kind in set(frame["kind"])]
    if not kinds:
        return leave_empty(figure, axes, theme, "No operation was measured beside a limit.")
    first = frame[frame["kind"] == kinds[0]].sort_values("share", ascending=False)
    cases = list(dict.fromkeys(first["case"]))[:MOST_BARS]
    # A limit that only some of the operations have a share of would look like a bandwidth of zero.
    covered = frame.groupby("kind")["case"].agg(set)
    kinds = [kind for kind in kinds if set(cases) <= covered[kind]]
    bars = frame.drop_duplicates(["kind", "case"])
    items = {kind: bars[bars["kind"] == kind].set_index("case").loc[cases] for kind in kinds}
    groups = grouped_bars(axes, {kind: rows["share"].tolist() for kind, rows in items.items()}, across=True)
    for kind, drawn in zip(kinds, groups, strict=True):
        for bar, (_, item) in zip(drawn, items[kind].iterrows(), strict=True):
            middle = bar.get_y() + bar.get_height() / 2
            if kind == kinds[0] or len(kinds) * len(cases) <= MOST_BARS:  # more numbers would lie on each other
                note(axes, share_text(item["share"]), (item["share"], middle), (3, 0), fontsize=7.5, cover=1)
            if item["target"] > 0:
                axes.plot(
                    [item["target"]] * 2, [bar.get_y(), bar.get_y() + bar.get_height()], color=theme.text, linewidth=2
                )
    axes.axvline(1, color=theme.muted, linewidth=1, linestyle=DASHED)
    label_rows(axes, cases)
    longest = float(frame["share"].max())
    axes.set_xlim(0, (1.35 if longest > NO_LIMIT else 1.15) * max(1.0, longest))  # with room for what stands behind it
    marks = list(axes.get_legend_handles_labels()[0])
    aimed = frame.dropna(subset=["target"])
    if len(aimed):
        marks.append(Line2D([], [], color=theme.text, linestyle="none", marker="|", markersize=10, label="target"))
    figure.legend(handles=marks, ncols=4, loc="outside lower center", handlelength=1)
    met = int((aimed["share"] >= aimed["target"]).sum())
    best = first.iloc[0]
    title = f"{best['case']} reaches {share_text(best['share'])} of the {kinds[0]}"
    if best["share"] > NO_LIMIT:
        title = f"{best['case']} is {best['share']:.2f} × as fast as the {kinds[0]}, which is no limit here"
    if len(aimed):
        title += f"; {met} of {len(aimed)} targets met"
    sizes = [size_text(size) for size in sorted({frame["bytes"].min(), frame["bytes"].max()})]
    below = f"bus bandwidth / limit at the largest size ({' to '.join(sizes)})"
    values = ", ".join(
        f"{row['case']} {share_text(row['share'])} of {row['bound'].replace('tcp', 'TCP')}" for row in row_dicts(frame)
    )
    alt = f"{values}. Sockets in turns with the operation, the others by size."
    return finish(figure, axes, theme, title, below, "", alt, 40)


@styled
def latency(run: Records, theme: Theme = LIGHT) -> Picture:
    """Median time of each operation by size, the maximum over ranks of each round; the barrier has no size."""
    figure, axes = blank("collective-latency", theme, of_many=True)
    lines = {name: frame for (name, kind), frame in series.series_lines(run, "median_us").items() if kind == "library"}
    # Large messages are a matter of bandwidth; they would press the small ones together.
    small = {name: frame[frame["bytes"] <= SMALL_BYTES] for name, frame in lines.items()}
    if all(len(frame) > 1 for frame in small.values()):
        lines = small
    names = [name for name in (*TOGETHER, *ROOTED) if name in lines]
    if not names:
        return leave_empty(figure, axes, theme, "No time of a collective was recorded.")
    ends = []
    for number, name in enumerate(names):
        frame, colour = lines[name], theme.series[number % len(theme.series)]
        looks = {"linewidth": 1.6, "markersize": 3, "linestyle": "-" if number < len(theme.series) else (0, (3, 1.2))}
        ends.append(draw_line(axes, frame["bytes"], frame["value"], words(name), colour, **looks))
    size_axis(axes, pd.concat(lines.values())["bytes"])
    waits = series.table(run, "series").query("operation == 'barrier'")["median_us"].dropna()
    if len(waits):
        axes.axhline(float(waits.iloc[0]), color=theme.muted, linewidth=1.4, linestyle=(0, (6, 3)))
        ends.append(End(axes.get_xlim()[1], float(waits.iloc[0]), "barrier", theme.muted))
    log_values(axes)
    name_ends(axes, theme, ends)
    first = {name: lines[name].iloc[0] for name in names}
    name = "all_reduce" if "all_reduce" in first else min(first, key=lambda name: first[name]["value"])
    title = f"{words(name)} of {size_text(first[name]['bytes'])} takes {seconds(1e-6 * first[name]['value'])}"
    values = ", ".join(f"{words(name)} {seconds(1e-6 * point['value'])}" for name, point in first.items())
    alt = f"Medians at the smallest size: {values}."
    return finish(figure, axes, theme, title, BY_BYTES, "median time (µs)", alt)


@styled
def small_messages(run: Records, theme: Theme = LIGHT) -> Picture:
    """Time of the smallest size of each operation: the median, and how far the slowest 5% and 1% reach."""
    figure, axes = blank("small-messages", theme, of_many=True)
    frame = series.main(run)
    frame = frame[(frame["median_us"] > 0) & frame["variant"].isin(["library", "direct"])].sort_values("bytes")
    frame = frame.groupby(["operation", "variant"], as_index=False).first().sort_values("median_us", ignore_index=True)
    if frame.empty:
        return leave_empty(figure, axes, theme, "No time of a collective was recorded.")
    for row, item in enumerate(row_dicts(frame)):
        least = {"median_us": 1, "p95_us": LEAST_FOR_P95, "p99_us": LEAST_FOR_P99}
        reach = [item[name] for name, rounds in least.items() if item[name] > 0 and item["rounds"] >= rounds]
        reach = reach or [item["median_us"]]
        looks: Any = {"color": theme.series[0], "linestyle": "none"}
        axes.plot(
            [reach[0], reach[-1]],
            [row, row],
            "-",
            color=theme.series[0],
            alpha=0.35,
            linewidth=5,
            solid_capstyle="butt",
        )
        axes.plot(reach[:1], [row], marker="o", markersize=6, **looks)
        axes.plot(reach[1:2], [row] * len(reach[1:2]), marker="|", markersize=9, markeredgewidth=1.6, **looks)
        note(axes, seconds(1e-6 * reach[0]), (1.01, row), xycoords=("axes fraction", "data"), annotation_clip=False)
    axes.set_xscale("log")
    plain_numbers(axes.xaxis)
    axes.spines["bottom"].set_visible(False)
    labels = [words(entry, kind) for entry, kind in zip(frame["operation"], frame["variant"], strict=True)]
    label_rows(axes, labels)
    sizes = frame.loc[frame["bytes"] > 0, "bytes"]
    of = f" of {size_text(sizes.min())}" if len(sizes) else ""
    times = [seconds(1e-6 * value) for value in frame["median_us"]]
    alt = ", ".join(f"{label} {time}" for label, time in zip(labels, times, strict=True))
    below = f"time (µs): dot median; tick 95% (from {LEAST_FOR_P95} rounds), bar to 99% (from {LEAST_FOR_P99})"
    return finish(
        figure, axes, theme, f"Smallest messages{of}: {times[0]} to {times[-1]}", below, "", f"Medians: {alt}.", 40
    )


@styled
def fit(run: Records, theme: Theme = LIGHT, operation: str = "all_reduce") -> Picture:
    """Measured times of an operation by size, the line t = α + S·factor/B through them, and its residuals."""
    figure, axes = blank("alpha-beta", theme, of_many=True)
    fits = series.table(run, "fits").query("variant == 'library'").dropna(subset=["alpha_us", "bandwidth_gbps"])
    fits = fits[fits["bandwidth_gbps"] > 0]
    if fits.empty:
        return leave_empty(figure, axes, theme, "No start-up time and bandwidth were fitted.")
    own = fits[fits["operation"] == operation]
    chosen = (own if len(own) else fits).iloc[0]
    name, alpha, rate = chosen["operation"], float(chosen["alpha_us"]), float(chosen["bandwidth_gbps"])
    points = series.main(run)
    points = points[(points["operation"] == name) & (points["variant"] == "library") & (points["median_us"] > 0)]
    factor = BUS_FACTORS[name](series.ranks(run)) if name in BUS_FACTORS else 1.0
    sizes = [size for size in (chosen["from_bytes"], chosen["to_bytes"], *points["bytes"]) if size > 0]
    if not sizes:
        return leave_empty(figure, axes, theme, "No size was recorded with the fit.")

    def modelled(size: Any) -> Any:
        return alpha + 8e-3 * size * factor / rate

    along = np.geomspace(min(sizes), max(sizes), 61)
    axes.plot(along, modelled(along), color=theme.series[1])
    axes.plot(points["bytes"], points["median_us"], "o", color=theme.series[0], markersize=6)
    size_axis(axes, sizes)
    log_values(axes, 0.12)
    for point in row_dicts(points):
        off = point["median_us"] / modelled(point["bytes"]) - 1
        note(axes, f"{100 * off:+.0f}%", (point["bytes"], point["median_us"]), (0, 8), color=theme.muted, fontsize=7.5)
    formula = f"t = α + {'S' if factor == 1 else f'{factor:.3g}·S'}/B"
    lines = [formula, f"α = {seconds(1e-6 * alpha)}, B = {quantity(rate)} Gbps"]
    if factor and alpha > 0:
        lines.append(f"half of B at {size_text(alpha * rate / (8e-3 * factor))}")
    if chosen["residual"] >= 0:
        lines.append(f"residual {100 * chosen['residual']:.2g}% rms")
    axes.text(0.03, 0.97, "\n".join(lines), transform=axes.transAxes, va="top", linespacing=1.4)
    title = f"{words(name)}: {seconds(1e-6 * alpha)} to start, then {quantity(rate)} Gbps"
    alt = f"{len(points)} measured points, with their distance from the line. {' '.join(lines)}."
    return finish(figure, axes, theme, title, BY_BYTES, "median time (µs)", alt)


FIGURES: dict[str, Callable[..., Picture]] = {
    "collective-bandwidth": bandwidth,
    "rooted-bandwidth": rooted_bandwidth,
    "limit-shares": shares,
    "collective-latency": latency,
    "pairs": figures_ranks.heat_map,
    "crossover": figures_ranks.crossover,
    "overlap": figures_ranks.overlap,
    "last-rank": figures_ranks.last_rank,
}
MORE = {"small-messages": small_messages, "fit": fit, "rounds": figures_ranks.rounds}  # of the notebook alone
