"""Axes of sizes in bytes on a logarithmic scale, and names at the ends of lines instead of a legend."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchlib.collectives.sizes import size_text
from benchlib.picture import Theme

TICKS = 6
LINE_HEIGHT = 0.062  # of the axes: what a line of 8 points needs


@dataclass(frozen=True)
class End:
    """The last point of a line, and what it shows; ``line`` is the share of the axes' height that a line of words takes."""

    x: float
    y: float
    words: str
    colour: str
    line: float = LINE_HEIGHT

    @property
    def height(self) -> float:
        """Share of the axes' height that the words take."""
        return self.line * (self.words.count("\n") + 1)


def size_axis(axes: Axes, sizes: Iterable[float]) -> None:
    """Make x logarithmic with at most ``TICKS`` of the sizes written; one size stands in the middle."""
    known = sorted({size for size in sizes if size > 0})
    axes.set_xscale("log", base=2)
    if not known:
        return
    axes.set_xlim(known[0] / 1.5, known[-1] * 1.5)
    apart = (known[-1] / known[0]) ** (1 / TICKS)
    kept = known[-1:]  # the largest is always written
    for size in known[-2::-1]:
        if size * apart <= kept[-1]:
            kept.append(size)
    axes.set_xticks(kept, [size_text(size) for size in kept])
    axes.minorticks_off()


def plain_numbers(axis: Axis, subs: Sequence[float] = (1.0,)) -> None:
    """Write plain numbers along a logarithmic axis: 0.01, 1, 100; ``subs`` (1, 2, 5) where it spans few decades."""
    axis.set_major_locator(LogLocator(10, subs=subs, numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"))
    axis.set_minor_locator(NullLocator())


def name_ends(axes: Axes, theme: Theme, ends: Sequence[End]) -> None:
    """Write each line's name right of its end, moved apart where names would lie on each other.

    To be called when the limits of the axes are final.
    """
    low, high = axes.get_ylim()
    to_axes = axes.transScale + axes.transLimits
    ordered = sorted(ends, key=lambda end: end.y)
    points = [to_axes.transform((end.x, min(max(end.y, low), high))) for end in ordered]
    places = spread([float(point[1]) for point in points], [end.height for end in ordered])
    for end, point, place in zip(ordered, points, places, strict=True):
        # A thin line leads from the end of the line to its name, which may have been moved.
        leader = {"arrowstyle": "-", "color": end.colour, "linewidth": 0.6, "alpha": 0.6, "shrinkA": 1, "shrinkB": 3,
                  "relpos": (0, 0.5)}  # fmt: skip
        axes.annotate(
            end.words,
            (min(float(point[0]), 1.0), float(point[1])),
            (1.06, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            ha="left",
            color=end.colour,
            fontsize=8,
            annotation_clip=False,
            arrowprops=leader,
        )


def spread(places: Sequence[float], heights: Sequence[float], top: float = 1.0) -> list[float]:
    """Move middles of words (in order) as little as it takes until none lie on each other, and none above ``top``."""
    gaps = [(one + other) / 2 for one, other in pairwise(heights)]
    offsets = [0.0, *accumulate(gaps)]
    groups: list[list[float]] = []  # of each: the sum of the wanted places, how many
    for place, offset in zip(places, offsets, strict=False):
        groups.append([place - offset, 1])
        # The mean of a group is where it wants to be; two that would overlap become one.
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] > groups[-1][0] / groups[-1][1]:
            total, count = groups.pop()
            groups[-1] = [groups[-1][0] + total, groups[-1][1] + count]
    firsts = [total / count for total, count in groups for _ in range(int(count))]
    most = top - offsets[-1]
    return [min(first, most) + offset for first, offset in zip(firsts, offsets, strict=False)]
