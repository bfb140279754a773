"""Pictures of the bandwidth of collectives: by size beside the measured limits, and the share of each limit."""

from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from benchlib.benchmarks.collectives import figures_ranks
from benchlib.benchmarks.collectives import tables as series
from benchlib.benchmarks.collectives.tables import ROOTED, TOGETHER, share_text, words
from benchlib.core.definitions import BUS_FACTORS, NO_LIMIT, size_text
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

DASHES = {"memory copy": (0, (1, 1.5)), "claimed link": (0, (6, 3))}
SOCKET = (0, (4, 1.5, 1, 1.5))
NO_BANDWIDTH = "No bandwidth between ranks was measured: one rank exchanges nothing."
MOST_BARS = 12


def bandwidth(run: Records, theme: Theme = LIGHT) -> Picture:
    """Bus bandwidth by size of the operations in which all ranks send at once, beside the limits of the same run."""
    limits = ("memory copy", "tcp socket all ranks", "claimed link")
    return _bandwidth(run, theme, "collective-bandwidth", TOGETHER, limits)


def rooted_bandwidth(run: Records, theme: Theme = LIGHT) -> Picture:
    """Bus bandwidth by size of the operations with one source or target, beside the limits of the same run."""
    limits = ("memory copy", "tcp socket one way", "claimed link")
    return _bandwidth(run, theme, "rooted-bandwidth", ROOTED, limits)


def _bandwidth(run: Records, theme: Theme, name: str, operations: Sequence[str], limits: Sequence[str]) -> Picture:
    figure, axes = blank(name, theme, of_many=True)
    found = {key: frame for key, frame in series.series_lines(run, "busbw_gbps").items() if key[0] in operations}
    found = {key: frame for key, frame in found.items() if key[1] in ("library", "direct")}
    if not found:
        return leave_empty(figure, axes, theme, NO_BANDWIDTH)
    colours = dict(zip(operations, theme.series, strict=False))
    ends, sizes, wrong = list[End](), set[float](), dict.fromkeys(series.wrong(run), ", wrong")
    for (operation, variant), frame in sorted(found.items(), key=lambda item: operations.index(item[0][0])):
        style = "-" if variant == "library" else (0, (3, 1.2))
        axes.plot(frame["bytes"], frame["value"], color=colours[operation], linewidth=1.8, marker="o", markersize=3.5,
                  linestyle=style)  # fmt: skip
        ends.append(_end(frame, words(operation, variant) + wrong.get((operation, variant), ""), colours[operation]))
        sizes |= set(frame["bytes"])
    foreign, stated = _of_others(axes, run, colours)
    ends += foreign
    size_axis(axes, sizes | stated)
    ends += _limits(axes, theme, series.bounds(run), limits)
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)
    axes.margins(y=0.06)
    name_ends(axes, theme, ends)
    (operation, variant), top = max(
        ((key, row) for key, frame in found.items() for row in series.rows(frame)), key=lambda item: item[1]["value"]
    )
    title = f"{_upper(words(operation, variant))} reaches {quantity(top['value'])} Gbps at {size_text(top['bytes'])}"
    if wrong:
        title += f"; {len(wrong)} operation{'s' * (len(wrong) > 1)} with wrong results"
    told = "; ".join(f"{end.words} {quantity(end.y)}" for end in sorted(ends, key=lambda end: -end.y))
    return finish(figure, axes, theme, title, "bytes of the larger side", "bus bandwidth (Gbps)",
                  f"Gbps at the largest size: {told}.")  # fmt: skip


def _end(frame: pd.DataFrame, label: str, colour: str, column: str = "value") -> End:
    last = frame.iloc[-1]
    return End(float(last["bytes"]), float(last[column]), label, colour)


def _limits(axes: Axes, theme: Theme, bounds: dict[str, pd.DataFrame], wanted: Sequence[str]) -> list[End]:
    """Draw the limits as grey lines; one that holds for any size reaches over the whole axis."""
    low, high = axes.get_xlim()
    ends = []
    for name in wanted:
        frame = bounds.get(name)
        if frame is None:
            continue
        frame = frame[frame["bytes"].between(low, high)] if frame["bytes"].notna().any() else frame
        if frame.empty:
            continue
        x, y = frame["bytes"], frame["gbps"]
        if len(frame) == 1:
            x, y = pd.Series([low, high]), pd.Series([float(y.iloc[0])] * 2)
        axes.plot(x, y, color=theme.muted, linewidth=1.4, linestyle=DASHES.get(name, SOCKET))
        ends.append(End(float(x.iloc[-1]), float(y.iloc[-1]), name.replace("tcp", "TCP"), theme.muted))
    return ends


def _of_others(axes: Axes, run: Records, colours: dict[str, str]) -> tuple[list[End], set[float]]:
    """Draw what a file of nccl-tests states beside the run's own lines, with crosses: it was not measured here."""
    frame = series.table(run, "nccl_tests")
    frame = frame[(frame["busbw_gbps"] > 0) & (frame["bytes"] > 0) & frame["operation"].isin(list(colours))]
    ends = []
    for operation, group in frame.groupby("operation", sort=False):
        best = group[["bytes", "busbw_gbps"]].groupby("bytes").max().reset_index()  # of in place and out of place
        colour = colours[str(operation)]
        axes.plot(best["bytes"], best["busbw_gbps"], color=colour, linewidth=1, marker="x", markersize=5, linestyle=":")
        ends.append(_end(best, f"{words(str(operation))}\nnccl-tests (claimed)", colour, "busbw_gbps"))
    return ends, set(frame["bytes"])


def shares(run: Records, theme: Theme = LIGHT) -> Picture:
    """Share of each limit that the operations reach at their largest size, with the targets as marks."""
    figure, axes = blank("limit-shares", theme, of_many=True)
    frame = series.shares(run)
    largest = frame.groupby(["operation", "variant"])["bytes"].transform("max")
    frame = frame[frame["bytes"] == largest].copy()
    frame["kind"] = ["TCP socket" if name.startswith("tcp") else name for name in frame["bound"]]
    kinds = [kind for kind in ("TCP socket", "memory copy", "claimed link") if kind in set(frame["kind"])]
    if not kinds:
        return leave_empty(figure, axes, theme, "No operation was measured beside a limit.")
    first = frame[frame["kind"] == kinds[0]].sort_values("share", ascending=False)
    cases = list(dict.fromkeys(zip(first["operation"], first["variant"], strict=True)))[:MOST_BARS]
    # A limit that only some of the operations have a share of would look like a bandwidth of zero.
    covered = {kind: set(zip(part["operation"], part["variant"], strict=True)) for kind, part in frame.groupby("kind")}
    kinds = [kind for kind in kinds if set(cases) <= covered[kind]]
    thick, paper = (
        0.8 / len(kinds),
        {"facecolor": theme.card, "alpha": 0.8 * (len(kinds) == 1), "linewidth": 0, "pad": 0.3},
    )
    for number, kind in enumerate(kinds):
        part = (
            frame[frame["kind"] == kind].drop_duplicates(["operation", "variant"]).set_index(["operation", "variant"])
        )
        for row, case in enumerate(cases):
            item, place = part.loc[case], row + (number - (len(kinds) - 1) / 2) * thick
            axes.barh(place, item["share"], height=thick * 0.88, color=theme.series[number])
            axes.annotate(share_text(item["share"]), (item["share"], place), (3, 0), textcoords="offset points", va="center",
                          color=theme.text, fontsize=7.5, bbox=paper)  # fmt: skip
            if item["target"] > 0:
                axes.plot([item["target"]] * 2, [place - thick / 2, place + thick / 2], color=theme.text, linewidth=2)
    axes.axvline(1, color=theme.muted, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(cases)), [f"{words(*case)}" for case in cases])
    axes.set_ylim(len(cases) - 0.4, -0.6)
    longest = float(frame["share"].max())
    axes.set_xlim(0, (1.35 if longest > NO_LIMIT else 1.15) * max(1.0, longest))  # with room for what stands behind it
    axes.grid(False)
    axes.grid(axis="x", color=theme.grid, linewidth=0.8)
    marks = [Line2D([], [], color=theme.series[number], linewidth=6, label=kind) for number, kind in enumerate(kinds)]
    aimed = frame.dropna(subset=["target"])
    if len(aimed):
        marks.append(
            Line2D([], [], color=theme.text, linewidth=2, linestyle="none", marker="|", markersize=10, label="target")
        )
    figure.legend(
        handles=marks,
        frameon=False,
        fontsize=8.5,
        labelcolor=theme.text,
        ncols=4,
        loc="outside lower center",
        handlelength=1,
    )
    met = int((aimed["share"] >= aimed["target"]).sum())
    best = first.iloc[0]
    title = _upper(words(best["operation"], best["variant"]))
    if best["share"] > NO_LIMIT:
        title += f" is {best['share']:.2f} × as fast as the {kinds[0]}, which is no limit here"
    else:
        title += f" reaches {share_text(best['share'])} of the {kinds[0]}"
    if len(aimed):
        title += f"; {met} of {len(aimed)} targets met"
    sizes = sorted(set(frame["bytes"]))
    at = size_text(sizes[0]) if len(sizes) == 1 else f"{size_text(sizes[0])} to {size_text(sizes[-1])}"
    told = ", ".join(
        f"{words(row['operation'], row['variant'])} {share_text(row['share'])} of {row['bound'].replace('tcp', 'TCP')}"
        for row in series.rows(frame)
    )
    return finish(figure, axes, theme, title, f"bus bandwidth / limit at the largest size ({at})", "", f"{told}.", 40)


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


# Pictures of the time of collectives: by size, of the smallest messages, and split into start-up and bandwidth.


SMALL_BYTES = 2**20


def latency(run: Records, theme: Theme = LIGHT) -> Picture:
    """Median time of each operation by size, the maximum over ranks of each round; the barrier has no size."""
    figure, axes = blank("collective-latency", theme, of_many=True)
    found = {key: frame for key, frame in series.series_lines(run, "median_us").items() if key[1] == "library"}
    # Large messages are a matter of bandwidth; they would press the small ones together.
    small = {key: frame[frame["bytes"] <= SMALL_BYTES] for key, frame in found.items()}
    if all(len(frame) > 1 for frame in small.values()):
        found = small
    if not found:
        return leave_empty(figure, axes, theme, "No time of a collective was recorded.")
    ends = []
    names = [name for name in (*TOGETHER, *ROOTED) if (name, "library") in found]
    for number, name in enumerate(names):
        frame = found[name, "library"]
        colour = theme.series[number % len(theme.series)]
        style = "-" if number < len(theme.series) else (0, (3, 1.2))
        axes.plot(
            frame["bytes"], frame["value"], color=colour, linewidth=1.6, linestyle=style, marker="o", markersize=3
        )
        ends.append(End(float(frame["bytes"].iloc[-1]), float(frame["value"].iloc[-1]), words(name), colour))
    size_axis(axes, [size for frame in found.values() for size in frame["bytes"]])
    waits = series.table(run, "series").query("operation == 'barrier'")["median_us"].dropna()
    if len(waits):
        axes.axhline(float(waits.iloc[0]), color=theme.muted, linewidth=1.4, linestyle=(0, (6, 3)))
        ends.append(End(axes.get_xlim()[1], float(waits.iloc[0]), "barrier", theme.muted))
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)
    axes.margins(y=0.06)
    name_ends(axes, theme, ends)
    first = {name: found[name, "library"].iloc[0] for name in names}
    shown = "all_reduce" if "all_reduce" in first else min(first, key=lambda name: first[name]["value"])
    title = (
        f"{_upper(words(shown))} of {size_text(first[shown]['bytes'])} takes {seconds(1e-6 * first[shown]['value'])}"
    )
    told = ", ".join(f"{words(name)} {seconds(1e-6 * point['value'])}" for name, point in first.items())
    return finish(figure, axes, theme, title, "bytes of the larger side", "median time (µs)",
                  f"Medians at the smallest size: {told}.")  # fmt: skip


def small_messages(run: Records, theme: Theme = LIGHT) -> Picture:
    """Time of the smallest size of each operation: the median, and how far the slowest 5 % and 1 % reach."""
    figure, axes = blank("small-messages", theme, of_many=True)
    frame = series.main(run)
    frame = frame[(frame["median_us"] > 0) & frame["variant"].isin(["library", "direct"])]
    frame = (
        frame.sort_values("bytes").groupby(["operation", "variant"], as_index=False).first().sort_values("median_us")
    )
    if frame.empty:
        return leave_empty(figure, axes, theme, "No time of a collective was recorded.")
    rows = range(len(frame))
    for row, (_, item) in zip(rows, frame.iterrows(), strict=True):
        reach = [item[name] for name in ("median_us", "p95_us", "p99_us") if item[name] > 0]
        axes.plot(
            [reach[0], reach[-1]], [row, row], color=theme.series[0], alpha=0.35, linewidth=5, solid_capstyle="butt"
        )
        axes.plot(reach[:1], [row], "o", color=theme.series[0], markersize=6)
        axes.plot(reach[1:2], [row], "|", color=theme.series[0], markersize=9, markeredgewidth=1.6)
        axes.annotate(seconds(1e-6 * reach[0]), (1.02, row), xycoords=("axes fraction", "data"), va="center", color=theme.text,
                      fontsize=8.5, annotation_clip=False)  # fmt: skip
    spanned = frame["p99_us"].fillna(frame["median_us"]).max() / frame["median_us"].min()
    axes.set_xscale("log")
    plain_numbers(axes.xaxis, (1.0, 2.0, 5.0) if spanned < 100 else (1.0,))
    axes.spines["bottom"].set_visible(False)
    axes.set_yticks(rows, [words(one, kind) for one, kind in zip(frame["operation"], frame["variant"], strict=True)])
    axes.set_ylim(len(frame) - 0.4, -0.6)
    axes.grid(False)
    axes.grid(axis="x", color=theme.grid, linewidth=0.8)
    sizes = frame.loc[frame["bytes"] > 0, "bytes"]
    of = f" of {size_text(sizes.min())}" if len(sizes) else ""
    slow, fast = frame.iloc[-1], frame.iloc[0]
    quick, long = (seconds(1e-6 * item["median_us"]) for item in (fast, slow))
    title = f"Smallest messages{of}: {quick} to {long}"
    told = ", ".join(
        f"{words(row['operation'], row['variant'])} {seconds(1e-6 * row['median_us'])}" for row in series.rows(frame)
    )
    return finish(
        figure, axes, theme, title, "time (µs): dot median, tick 95 %, end of the bar 99 %", "", f"Medians: {told}.", 40
    )


def fit(run: Records, theme: Theme = LIGHT, operation: str = "all_reduce") -> Picture:
    """Measured times of an operation by size, the line t = α + S·factor/B through them, and what it leaves."""
    figure, axes = blank("alpha-beta", theme, of_many=True)
    fits = series.table(run, "fits").query("variant == 'library'").dropna(subset=["alpha_us", "bandwidth_gbps"])
    fits = fits[fits["bandwidth_gbps"] > 0]
    if fits.empty:
        return leave_empty(figure, axes, theme, "No start-up time and bandwidth were fitted.")
    own = fits[fits["operation"] == operation]
    chosen = (own if len(own) else fits).iloc[0]
    points = series.main(run)
    points = points[
        (points["operation"] == chosen["operation"]) & (points["variant"] == "library") & (points["median_us"] > 0)
    ]
    factor = BUS_FACTORS[chosen["operation"]](series.ranks(run)) if chosen["operation"] in BUS_FACTORS else 1.0
    ends = sorted(size for size in {chosen["from_bytes"], chosen["to_bytes"], *points["bytes"]} if size > 0)
    if not ends:
        return leave_empty(figure, axes, theme, "No size was recorded with the fit.")
    sizes = pd.Series([ends[0] * (ends[-1] / ends[0]) ** (step / 60) for step in range(61)])
    alpha, rate = float(chosen["alpha_us"]), float(chosen["bandwidth_gbps"])
    axes.plot(sizes, alpha + 8e-3 * sizes * factor / rate, color=theme.series[1], linewidth=1.8)
    axes.plot(points["bytes"], points["median_us"], "o", color=theme.series[0], markersize=6)
    size_axis(axes, ends)
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)
    axes.margins(y=0.12)
    for _, point in points.iterrows():
        off = point["median_us"] / (alpha + 8e-3 * point["bytes"] * factor / rate) - 1
        axes.annotate(f"{100 * off:+.0f} %", (point["bytes"], point["median_us"]), (0, 8), textcoords="offset points", ha="center",
                      color=theme.muted, fontsize=7.5)  # fmt: skip
    half = alpha * rate / (8e-3 * factor) if factor else 0.0
    told = (
        f"t = α + {'S' if factor == 1 else f'{factor:.3g}·S'}/B\nα = {seconds(1e-6 * alpha)}, B = {quantity(rate)} Gbps"
    )
    if half > 0:
        told += f"\nhalf of B at {size_text(half)}"
    told += f"\nresidual {100 * chosen['residual']:.2g} % rms" if chosen["residual"] >= 0 else ""
    axes.annotate(told, (0.03, 0.97), xycoords="axes fraction", va="top", color=theme.text, fontsize=9, linespacing=1.4)
    title = f"{_upper(words(chosen['operation']))}: {seconds(1e-6 * alpha)} to start, then {quantity(rate)} Gbps"
    return finish(figure, axes, theme, title, "bytes of the larger side", "median time (µs)",
                  f"{len(points)} measured points, with their distance from the line. {' '.join(told.split(chr(10)))}.")  # fmt: skip


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
