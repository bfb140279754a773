"""Pictures of the time of collectives: by size, of the smallest messages, and split into start-up and bandwidth."""

import pandas as pd

from benchlib import collective_series as series
from benchlib.bandwidth import BUS_FACTORS
from benchlib.byte_axis import End, name_ends, plain_numbers, size_axis
from benchlib.collective_series import ROOTED, TOGETHER, words
from benchlib.collectives.sizes import size_text
from benchlib.curves import Records
from benchlib.labels import seconds
from benchlib.metrics import quantity
from benchlib.picture import LIGHT, Picture, Theme, blank, finish, leave_empty

SMALL_BYTES = 2**20


def latency(run: Records, theme: Theme = LIGHT) -> Picture:
    """Median time of each operation by size, the maximum over ranks of each round; the barrier has no size."""
    figure, axes = blank("collective-latency", theme, of_many=True)
    found = {key: frame for key, frame in series.lines(run, "median_us").items() if key[1] == "library"}
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


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
