"""Axes of the pictures of parity: powers of ten with a place for zero, a row a member, the looks of a member."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import NullLocator

from benchlib.picture import WIDTH_IN, Picture, Theme

MOST_TICKS = 6
FEW_DPI, FEW_COLOURS = 112, 16
ROW_IN = 0.235  # height of a row with a name
LINES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
TONES = {"PASS": 2, "FAIL": 1, "DIFFERS": 4, "NOT COMPARED": 4}  # series of the theme; others are muted
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
    known = [value for value in values if math.isfinite(value)]
    axes, across = axis.axes, axis is axis.axes.xaxis
    (axes.set_xscale if across else axes.set_yscale)("log")
    above = [value for value in known if value > 0] or [1e-7]
    low, high = math.floor(math.log10(min(above))), math.ceil(math.log10(max(above)))
    step = max(1, -(-(high - low) // most))
    ticks = {10.0**power: f"1e{power}" for power in range(low, high + 1) if (power - high) % step == 0}
    begin, zero = min(above) / EDGE, 10.0 ** (low - max(1, 0.12 * (high - low)))
    if any(value == 0 for value in known):
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
    return {"marker": "|", "markersize": 15, "markeredgewidth": 1.8, "color": theme.text, "linestyle": "none"}


def label(axes: Axes, theme: Theme, x: str, y: str = "") -> None:
    """Write what the axes show."""
    axes.set_xlabel(x, color=theme.muted, fontsize=9)
    axes.set_ylabel(y, color=theme.muted, fontsize=9)


def listed(names: Sequence[str], most: int = 3) -> str:
    """Write names for a sentence: ``a, b and 4 more``."""
    if len(names) <= most:
        return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)
    return ", ".join(names[: most - 1]) + f" and {len(names) - most + 1} more"


def titled(words: str, scope: str) -> str:
    """Return a title that says what stands in for real weights."""
    return f"{words} ({scope})" if scope else words
