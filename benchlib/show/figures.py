"""The paper that pictures are drawn on: themes, a figure with an alt text, its PNG bytes and its display.

Figures are drawn on Agg canvases of their own, without pyplot: no backend is chosen, nothing global changes, and two
threads may draw at once. ``png`` gives the same bytes for the same figure, so committed notebooks do not change when
they are executed again. Colours are Okabe and Ito's, which stay apart for colour-blind readers, on paper and in both
themes.
"""

import base64
import io
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from PIL import Image

from benchlib.core.definitions import size_text

WIDTH_IN, HEIGHT_IN, DPI = 5.3, 3.3, 150
OF_MANY_COLOURS, OF_MANY_DPI = 32, 120  # for pages with many pictures: half the bytes
SAME = 12  # steps of 256 between two colours that are told apart


@dataclass(frozen=True)
class Theme:
    """Colours of one appearance; ``card`` is what the report paints behind a picture."""

    card: str
    text: str
    muted: str
    grid: str
    series: tuple[str, ...]


LIGHT = Theme(
    "#ffffff", "#1c2430", "#5b6675", "#e3e7ec", ("#0072b2", "#d55e00", "#009e73", "#b0578d", "#b8860b", "#3d8fc4")
)
DARK = Theme(
    "#171c24", "#e6eaf0", "#9aa5b4", "#2b333f", ("#56b4e9", "#f08a4b", "#2fc79a", "#dd94bd", "#e6b94d", "#9ccdf0")
)


class Picture(Figure):
    """A figure that can say what it shows. ``empty`` is True where the run recorded nothing to draw.

    ``colours`` is how many a PNG of it keeps: few make it smaller, and lines and bars need few. ``kept`` are those that it
    has to keep beside them.
    """

    name: str = ""
    alt: str = ""
    empty: bool = False
    colours: int = 96
    kept: tuple[str, ...] = ()


def blank(name: str, theme: Theme, of_many: bool = False) -> tuple[Picture, Axes]:
    """Return an empty figure with its axes; ``of_many`` is for pages with many pictures: fewer pixels and colours."""
    figure = _paper(name, theme, of_many)
    return figure, dressed(figure.add_subplot(), theme)


def panels(name: str, theme: Theme, rows: int = 1, columns: int = 1, **more: Any) -> tuple[Picture, list[Axes]]:
    """Return an empty figure of a page with many pictures, and its axes row by row; ``more`` goes to ``Figure.subplots``."""
    figure = _paper(name, theme, of_many=True)
    return figure, [dressed(axes, theme) for axes in figure.subplots(rows, columns, squeeze=False, **more).flat]


def _paper(name: str, theme: Theme, of_many: bool) -> Picture:
    dpi = OF_MANY_DPI if of_many else DPI
    figure = Picture(figsize=(WIDTH_IN, HEIGHT_IN), dpi=dpi, layout="constrained", facecolor=theme.card)
    FigureCanvasAgg(figure)
    figure.name = name
    if of_many:
        figure.colours, figure.kept = OF_MANY_COLOURS, (theme.card, theme.text, theme.muted, *theme.series)
    return figure


def dressed(axes: Axes, theme: Theme) -> Axes:
    """Return axes after giving them the looks of the theme."""
    axes.set_facecolor(theme.card)
    axes.tick_params(colors=theme.muted, labelsize=9, length=0, pad=5)
    axes.spines[:].set_visible(False)
    axes.spines["bottom"].set(visible=True, color=theme.grid)
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def finish(
    figure: Picture, axes: Axes, theme: Theme, title: str, x: str, y: str, alt: str = "", wide: int = 54
) -> Picture:
    """Write title and axes. ``wide`` is how many letters of the title fit right of the left edge of the axes."""
    axes.set_title(textwrap.fill(title, wide), loc="left", color=theme.text, fontsize=11, fontweight="bold", pad=10)
    axes.set_xlabel(x, color=theme.muted, fontsize=9)
    axes.set_ylabel(y, color=theme.muted, fontsize=9)
    figure.alt = f"{title}. {alt}".strip()
    return figure


def head(figure: Picture, theme: Theme, title: str, alt: str = "", wide: int = 54) -> Picture:
    """Write the title over the whole figure: for several axes, and for long names left of them."""
    figure.suptitle(textwrap.fill(title, wide), x=0.012, ha="left", color=theme.text, fontsize=11, fontweight="bold")
    figure.alt = f"{title}. {alt}".strip()
    return figure


def leave_empty(figure: Picture, axes: Axes, theme: Theme, what: str) -> Picture:
    axes.set_axis_off()
    axes.text(0.5, 0.5, what, ha="center", va="center", color=theme.muted, fontsize=11, transform=axes.transAxes)
    figure.alt, figure.empty = what, True
    return figure


def _few_colours(image: Image.Image, picture: Picture | type[Picture]) -> Image.Image:
    """Reduce the colours of an image; a line's own colour is not to become the one of its neighbour."""
    few = image.quantize(picture.colours, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    if not picture.kept:
        return few
    flat = (few.getpalette() or [])[: 3 * picture.colours]
    palette = [tuple(flat[place : place + 3]) for place in range(0, len(flat), 3)]
    for colour in picture.kept:
        exact = tuple(int(colour[place : place + 2], 16) for place in (1, 3, 5))
        # An entry beside the exact one could be taken in its place: Pillow looks entries up by rounded colours.
        palette = [exact if _distance(entry, exact) < SAME else entry for entry in palette]
        if exact not in palette:
            palette.append(exact)
    few.putpalette([value for entry in palette for value in entry])
    return image.quantize(palette=few, dither=Image.Dither.NONE)


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def png(figure: Figure) -> bytes:
    """Encode a figure as PNG. The palette of its ``colours`` makes it four times smaller; same figure, same bytes."""
    canvas = figure.canvas
    if not isinstance(canvas, FigureCanvasAgg):
        canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")
    buffer = io.BytesIO()
    _few_colours(image, figure if isinstance(figure, Picture) else Picture).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def show(figure: Figure, alt: str = "") -> None:
    """Display a figure in a notebook as PNG with its alt text, which is also the text/plain form of the output."""
    from IPython.display import display

    words = alt or str(getattr(figure, "alt", "")) or "a figure"
    data: dict[str, Any] = {"image/png": base64.b64encode(png(figure)).decode(), "text/plain": words}
    width = int(figure.get_figwidth() * 110)
    display(data, raw=True, metadata={"image/png": {"alt": words, "width": width}})  # type: ignore[no-untyped-call]


# Axes of sizes in bytes on a logarithmic scale, and names at the ends of lines instead of a legend.


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
