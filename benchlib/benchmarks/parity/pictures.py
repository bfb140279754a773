"""Pictures of a run as a whole: each member's outcome on every machine, and its latency.

First come the axes that these and the pictures of differences share: powers of ten with a place for zero, one row per
member, the looks of a member.
"""

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator

from benchlib.benchmarks.parity import matrix as outcomes
from benchlib.benchmarks.parity import tables
from benchlib.benchmarks.parity.config import MEMBERS
from benchlib.benchmarks.parity.matrix import SIGNS, WHOLE
from benchlib.benchmarks.parity.tables import difference
from benchlib.core.text import listing
from benchlib.results.frames import Records, row_dicts
from benchlib.show.figures import LIGHT, WIDTH_IN, Picture, Theme, blank, head, leave_empty, plain_numbers

MOST_TICKS = 6
FEW_DPI, FEW_COLOURS = 112, 16
ROW_IN = 0.235  # height of a row with a name
LINES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
TONES = {"PASS": 2, "FAIL": 1, "DIFFERS": 4, "NOT COMPARED": 4}  # series of the theme; others are muted
MOST_COLUMNS = 8
OTHERS = "Other runs and machines"
GAP = 0.25  # between this run's column and the others
UPRIGHT = 3  # columns up to which their names stand upright, in several lines
ROOM = (40, 40, 22, 13, 8, 6, 0)  # letters beside the sign, by the number of columns
TINT = 0.3
EDGE = 3.0  # factor between the axis's end and its outermost value


def looks(theme: Theme, place: int) -> tuple[str, Any]:
    """Return colour and line style of the member at ``place``: apart from each other for 24 members."""
    colours = len(theme.series)
    return theme.series[place % colours], LINES[place // colours % len(LINES)]


def tone(theme: Theme, word: str) -> str:
    """Return the colour of an outcome."""
    return theme.series[TONES[word]] if word in TONES else theme.muted


def powers(axis: Axis, values: Iterable[float], most: int = MOST_TICKS) -> float:
    """Make the axis logarithmic over the values with powers of ten written out, and return the place of a zero.

    Where a value is 0, the axis has room for it at its lower end, written as 0; values that are no finite numbers do
    not count.
    """
    finite = [value for value in values if math.isfinite(value)]
    axes, across = axis.axes, axis is axis.axes.xaxis
    (axes.set_xscale if across else axes.set_yscale)("log")
    above = [value for value in finite if value > 0] or [1e-7]
    low = math.floor(math.log10(min(above)))
    high = max(low + 1, math.ceil(math.log10(max(above))))  # two ticks at least
    step = max(1, -(-(high - low) // most))
    ticks = {10.0**power: f"1e{power}" for power in range(low, high + 1) if (power - high) % step == 0}
    begin, zero = min(above) / EDGE, 10.0 ** (low - max(1, 0.12 * (high - low)))
    if any(value == 0 for value in finite):
        ticks = {zero: "0"} | {place: word for place, word in ticks.items() if place > 3 * zero}
        begin = zero / EDGE
    (axes.set_xlim if across else axes.set_ylim)(begin, max(above) * EDGE)
    axis.set_ticks(list(ticks), list(ticks.values()))
    axis.set_minor_locator(NullLocator())
    return zero


def placed(values: pd.Series, zero: float) -> pd.Series:
    """Return the values with zeros where the axis has their place."""
    return values.mask(values <= 0, zero)


def tall(figure: Picture, rows: int, row_in: float = ROW_IN, rest_in: float = 1.25, least_in: float = 0.0) -> None:
    """Make the figure as high as its rows need, curves at least ``least_in``, and its PNG small: a report has nine in two themes."""
    figure.set_size_inches(WIDTH_IN, max(least_in, rest_in + row_in * rows))
    figure.set_dpi(FEW_DPI)
    figure.colours = FEW_COLOURS


def name_rows(axes: Axes, theme: Theme, names: Sequence[str]) -> None:
    """Give each member its row, the first on top, with lines across for the values and none between."""
    axes.set_yticks(range(len(names)), list(names))
    axes.tick_params(axis="y", labelsize=8.5, labelcolor=theme.text)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(False)
    axes.grid(axis="x", color=theme.grid, linewidth=0.8)


def beside(axes: Axes, row: float, words: str, colour: str, size: float = 8.5) -> None:
    """Write words right of the axes, level with a row."""
    axes.annotate(words, (1.02, row), xycoords=("axes fraction", "data"), va="center", color=colour, fontsize=size,
                  annotation_clip=False)  # fmt: skip


def mark(theme: Theme) -> dict[str, Any]:
    """Return how a tolerance is drawn within a row."""
    return {
        "gid": "tolerance",
        "marker": "|",
        "markersize": 15,
        "markeredgewidth": 1.8,
        "color": theme.text,
        "linestyle": "none",
    }


def label(axes: Axes, theme: Theme, x: str, y: str = "") -> None:
    """Write what the axes show."""
    axes.set_xlabel(x, color=theme.muted, fontsize=9)
    axes.set_ylabel(y, color=theme.muted, fontsize=9)


def listed(names: Sequence[str], most: int = 3) -> str:
    """Write names for a sentence: ``a, b and 4 more``."""
    return listing(names if len(names) <= most else [*names[: most - 1], f"{len(names) - most + 1} more"])


def titled(words: str, scope: str) -> str:
    """Return a title that says what stands in for real weights."""
    return f"{words} ({scope})" if scope else words


def matrix(run: Records, theme: Theme = LIGHT) -> Picture:
    """Outcome of every member (row) in this run, and apart from it in other runs, by machine and backend (column).

    Cells give the largest difference. The title is about this run alone.
    """
    figure, axes = blank("backend-matrix", theme, of_many=True)
    frame = outcomes.around(run)
    if frame.empty:
        return leave_empty(figure, axes, theme, "No member was compared.")
    columns = list(dict.fromkeys(zip(frame["own"], frame["machine"], frame["backend"], strict=True)))
    shown = columns[:MOST_COLUMNS]
    own = sum(mine for mine, *_ in shown)
    apart = [x + (GAP if own and x >= own else 0) for x in range(len(shown))]
    frame["row"] = frame["member"].replace(WHOLE, "whole run")
    names = list(dict.fromkeys(sorted(frame["row"], key=_rank)))
    tall(figure, len(names), 0.25, 1.7)
    room = ROOM[min(len(shown), len(ROOM) - 1)]
    size = 8.5 if len(shown) < 5 else 7.0 if len(shown) < 8 else 5.8
    for row in row_dicts(frame):
        if (place := (row["own"], row["machine"], row["backend"])) in shown:
            words = f"{SIGNS.get(row['word'], '?')} {_number(row, room)}"
            x, y = apart[shown.index(place)], names.index(row["row"])
            colour = tone(theme, row["word"])
            axes.add_patch(Rectangle((x - 0.48, y - 0.45), 0.96, 0.9, facecolor=colour, alpha=TINT, linewidth=0))
            axes.text(x, y, words.strip(), ha="center", va="center", color=theme.text, fontsize=size)
    parts = [frame[(frame[["own", "machine", "backend"]] == list(place)).all(axis=1)] for place in shown]
    slanted = len(shown) > UPRIGHT
    heads = [_head(part, slanted, several=frame["model"].nunique() > 1) for part in parts]
    if any(head.endswith("*") for head in heads):
        label(axes, theme, "* tiny model or random weights")
    name_rows(axes, theme, names)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set_xlim(-0.55, apart[-1] + 0.55)
    axes.xaxis.tick_top()
    axes.set_xticks(apart, heads, rotation=38 if slanted else 0, ha="left" if slanted else "center")
    axes.tick_params(axis="x", length=0, pad=2, labelsize=7.5 if slanted else 8.5, labelcolor=theme.text)
    mine, others = frame[frame["own"]], frame[~frame["own"]]
    if len(others):
        tall(figure, len(names) + 1, 0.25, 1.7)
        axes.set_ylim(len(names) - 0.4, -1.6)
        for x, words in [(0, "This run")] * bool(own) + [(own, OTHERS)]:
            large = 8.5 if len(shown) < 5 else 6.5
            axes.text(apart[x] - 0.48, -1, words, va="center", color=theme.text, fontsize=large, fontweight="bold")
    alt = f"{_alt(mine)}." if len(mine) else ""
    alt += f" {OTHERS}: {_alt(others)}." if len(others) else ""
    alt += f" {len(columns) - len(shown)} more are not shown." if len(columns) > len(shown) else ""
    one_model = mine["model"].nunique() == 1
    return head(figure, theme, titled(_tally(mine), tables.scope(run) if one_model else ""), alt)


def _alt(frame: pd.DataFrame) -> str:
    return "; ".join(
        f"{row['row']} on {row['machine']} ({row['backend']}): {row['word']}, {_number(row, 200)}"
        for row in row_dicts(frame)
    )


def _rank(name: str) -> int:
    order = list(MEMBERS)
    return order.index(name) if name in order else -1 if name == "whole run" else len(order)


def _number(row: dict[str, Any], room: int) -> str:
    """Write what stands beside the sign: the largest difference, else what happened, in as many letters as there is room."""
    if not math.isnan(row["max_difference"]):
        return difference(row["max_difference"])
    text = str(row["reason"] or "failed") if row["word"] == "FAIL" else str(row["word"].lower())
    if len(text) > room and row["word"] == "FAIL" and room < 20:
        return "failed"
    return text if len(text) <= room else textwrap.shorten(text, room, placeholder=" …") if room > 8 else ""


def _head(part: pd.DataFrame, slanted: bool, several: bool) -> str:
    """Write machine, backend, age and, where machines ran several models, which, below each other or in a slanted line.

    In the line a star says that something stands in for real weights.
    """
    first, days = row_dicts(part)[0], int(part["age_days"].max())
    wide = 14 if slanted else 24
    machine = first["machine"] if len(first["machine"]) <= wide else first["machine"][: wide - 1] + "…"
    if slanted:
        return (
            f"{machine}, {first['backend']}"
            + f", {days} d" * bool(days)
            + " *" * bool(several and part["stand_in"].any())
        )
    age = f", {days} day{'s' if days != 1 else ''} old" if days else ""
    models = textwrap.shorten(" / ".join(dict.fromkeys(part["model"])), 26, placeholder="…")
    return "\n".join([machine, first["backend"] + age, *[models] * several])


def _tally(frame: pd.DataFrame) -> str:
    counted = frame["word"].value_counts()
    judged = int(sum(counted.get(word, 0) for word in ("PASS", "FAIL")))
    failed, apart = (list(dict.fromkeys(frame.loc[frame["word"] == word, "row"])) for word in ("FAIL", "DIFFERS"))
    if not judged and not apart:
        return "Nothing was compared: no member stands beside the reference"
    parts = [f"{counted.get('PASS', 0)} of {judged} match the reference"]
    parts += [f"{listed(failed)} fail{'s' if len(failed) == 1 else ''}"] if failed else []
    parts += [f"{listed(apart)} differ{'s' if len(apart) == 1 else ''} (informative)"] if apart else []
    return "; ".join(parts)


def latency(run: Records, theme: Theme = LIGHT) -> Picture:
    """Time of a forward pass by member, median to 99%, with the ratio to the reference's median."""
    figure, axes = blank("latency-by-member", theme, of_many=True)
    frame = tables.latencies(run).sort_values("p50_ms", kind="stable", ignore_index=True)
    if frame.empty:
        return leave_empty(figure, axes, theme, "No member was timed.")
    tall(figure, len(frame))
    reach = frame[["p50_ms", "p95_ms", "p99_ms"]]
    low, high = float(reach.min().min()), float(reach.max().max())
    if high > 30 * low:
        axes.set_xscale("log")
        plain_numbers(axes.xaxis)
        axes.set_xlim(low / 1.5, high * 1.5)
    else:
        axes.set_xlim(0, 1.06 * high)
    for row, item in enumerate(row_dicts(frame)):
        colour = theme.muted if item["is_reference"] else theme.series[0]
        ends = [item[name] for name in ("p50_ms", "p95_ms", "p99_ms") if item[name] > 0]
        axes.plot([ends[0], max(ends)], [row, row], color=colour, alpha=0.35, linewidth=5, solid_capstyle="butt")
        axes.plot(ends[:1], [row], "o", color=colour, markersize=6, gid="median")
        axes.plot(ends[1:2], [row], "|", color=colour, markersize=9, markeredgewidth=1.6)
        beside(axes, row, _time(item), theme.text)
    base = frame[frame["is_reference"]]
    if len(base):
        axes.axvline(float(base["p50_ms"].iloc[0]), color=theme.muted, linewidth=1.2, linestyle=(0, (4, 3)))
    name_rows(axes, theme, list(frame["member"]))
    first = row_dicts(frame)[0]
    of = (
        f" at batch {first['batch']:.0f}, {first['length']:.0f} tokens"
        if first["batch"] > 0 and first["length"] > 0
        else ""
    )
    label(axes, theme, f"ms{of} (dot median, tick 95%, end 99%)")
    fast = next((item for item in row_dicts(frame) if not item["is_reference"]), first)
    if fast["ratio"] > 1 and not fast["is_reference"]:
        title = f"No member is faster than the reference: {fast['member']} takes {fast['ratio']:.2f} × its time"
    else:
        title = f"{fast['member']} is fastest: {_ms(fast['p50_ms'])}"
        title += f", {fast['ratio']:.2f} × the reference" if fast["ratio"] > 0 and not fast["is_reference"] else ""
    medians = "; ".join(
        f"{item['member']} {_ms(item['p50_ms'])}, 99% {_ms(item['p99_ms'])}" for item in row_dicts(frame)
    )
    return head(figure, theme, titled(title, tables.scope(run)), f"Medians: {medians}.")


def _ms(value: float) -> str:
    return "?" if math.isnan(value) else f"{value:.3g} ms" if value < 1000 else f"{value:,.0f} ms"


def _time(item: dict[str, Any]) -> str:
    text = _ms(item["p50_ms"])
    return f"{text}, {item['ratio']:.2f} ×" if item["ratio"] > 0 and not item["is_reference"] else text
