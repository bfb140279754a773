"""What all figures share: themes, a figure with an alt text, axes of sizes and rows, its PNG bytes and its display.

Figures are drawn on Agg canvases of their own, without pyplot. A theme is a style of matplotlib that holds
while ``styled`` functions draw, one at a time, and leaves nothing changed. ``png`` gives the same bytes for the same
figure, so committed notebooks do not change when they are executed again. Colours are Okabe and Ito's, which stay apart
for colour-blind readers, on paper and in both themes.
"""

import base64
import contextlib
import functools
import io
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ParamSpec

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullLocator
from PIL import Image

from benchlib.core.definitions import size_text

WIDTH_IN, HEIGHT_IN, DPI = 5.3, 3.3, 150
OF_MANY_COLOURS, OF_MANY_DPI = 32, 120  # for pages with many pictures: half the bytes
SAME = 12  # steps of 256 between two colours that are told apart
DASHED: Any = (0, (4, 3))
_P = ParamSpec("_P")
_ONE_AT_A_TIME = threading.RLock()  # matplotlib has one set of parameters for all threads


@dataclass(frozen=True)
class Theme:
    """Colours of one appearance; ``card`` is what the report paints behind a picture."""

    card: str
    text: str
    muted: str
    grid: str
    series: tuple[str, ...]

    @property
    def style(self) -> Any:
        """The theme as parameters for ``matplotlib.rc_context``."""
        return {
            "figure.facecolor": self.card, "axes.facecolor": self.card, "text.color": self.text, "font.size": 9,
            "axes.titlecolor": self.text, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
            "axes.titlepad": 10, "figure.titlesize": 11, "figure.titleweight": "bold",
            "axes.labelcolor": self.muted, "axes.labelsize": 9, "axes.edgecolor": self.grid, "axes.axisbelow": True,
            "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False,
            "axes.grid": True, "axes.grid.axis": "y", "grid.color": self.grid, "grid.linewidth": 0.8,
            "xtick.color": self.muted, "xtick.labelsize": 9, "xtick.major.size": 0, "xtick.major.pad": 5,
            "ytick.color": self.muted, "ytick.labelsize": 9, "ytick.major.size": 0, "ytick.major.pad": 5,
            "axes.prop_cycle": cycler(color=self.series), "lines.linewidth": 1.8, "lines.markersize": 4,
            "legend.frameon": False, "legend.fontsize": 9, "legend.labelcolor": self.text, "legend.handlelength": 1.2,
        }  # fmt: skip


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
    theme: Theme = LIGHT


@contextlib.contextmanager
def _style(theme: Theme) -> Iterator[None]:
    with _ONE_AT_A_TIME, matplotlib.rc_context(theme.style):
        yield


def styled(draw: Callable[_P, Picture]) -> Callable[_P, Picture]:
    """Let a function that takes a ``Theme`` (else ``LIGHT``) draw in its style."""

    @functools.wraps(draw)
    def drawn(*args: _P.args, **named: _P.kwargs) -> Picture:
        with _style(next((value for value in (*args, *named.values()) if isinstance(value, Theme)), LIGHT)):
            return draw(*args, **named)

    return drawn


def blank(name: str, theme: Theme, of_many: bool = False) -> tuple[Picture, Axes]:
    """Return an empty figure with its axes; ``of_many`` is for pages with many pictures: fewer pixels and colours."""
    figure, axes = _paper(name, theme, of_many, 1, 1)
    return figure, axes[0]


def panels(name: str, theme: Theme, rows: int = 1, columns: int = 1, **more: Any) -> tuple[Picture, list[Axes]]:
    """Return an empty figure of a page with many pictures, and its axes row by row; ``more`` goes to ``Figure.subplots``."""
    return _paper(name, theme, True, rows, columns, **more)


def _paper(name: str, theme: Theme, of_many: bool, rows: int, columns: int, **more: Any) -> tuple[Picture, list[Axes]]:
    with _style(theme):
        dpi = OF_MANY_DPI if of_many else DPI
        figure = Picture(figsize=(WIDTH_IN, HEIGHT_IN), dpi=dpi, layout="constrained")
        FigureCanvasAgg(figure)
        figure.name, figure.theme = name, theme
        if of_many:
            figure.colours, figure.kept = OF_MANY_COLOURS, (theme.card, theme.text, theme.muted, *theme.series)
        drawn = list(figure.subplots(rows, columns, squeeze=False, **more).flat)
        for axes in drawn:  # ticks are made later, perhaps outside of the style
            axes.tick_params(colors=theme.muted, labelsize=9, length=0, pad=5)
        return figure, drawn


def finish(
    figure: Picture, axes: Axes, theme: Theme, title: str, x: str, y: str, alt: str = "", wide: int = 50
) -> Picture:
    """Write title and axes. ``wide`` is how many letters of the title fit right of the left edge of the axes."""
    title = title[:1].upper() + title[1:]
    with _style(theme):
        axes.set_title(textwrap.fill(title, wide))
        axes.set_xlabel(x)
        axes.set_ylabel(y)
    figure.alt = f"{title}. {alt}".strip()
    return figure


def head(figure: Picture, theme: Theme, title: str, alt: str = "", wide: int = 54) -> Picture:
    """Write the title over the whole figure: for several axes, and for long names left of them."""
    with _style(theme):
        figure.suptitle(textwrap.fill(title, wide), x=0.012, ha="left")
    figure.alt = f"{title}. {alt}".strip()
    return figure


def leave_empty(figure: Picture, axes: Axes, theme: Theme, what: str) -> Picture:
    """Say in the place of the axes what was not recorded."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, what, ha="center", va="center", color=theme.muted, fontsize=11, transform=axes.transAxes)
    figure.alt, figure.empty = what, True
    return figure


def note(axes: Axes, words: str, xy: tuple[Any, Any], away: tuple[float, float] = (4, 0), **more: Any) -> None:
    """Write words beside a point, ``away`` from it in points and aligned towards it, on the colour of the paper.

    ``more`` goes to ``Axes.annotate``: ``xycoords``, ``color``, ``fontsize`` ...; ``cover`` is how much the paper hides.
    """
    x, y = away
    cover = more.pop("cover", 0.8)
    more.setdefault("ha", "left" if x > 0 else "right" if x < 0 else "center")
    more.setdefault("va", "bottom" if y > 0 else "top" if y < 0 else "center")
    paper = {"facecolor": axes.get_facecolor(), "alpha": cover, "linewidth": 0, "pad": 0.5}
    axes.annotate(words, xy, away, textcoords="offset points", bbox=paper, **more)


def label_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Give each label a row, the first on top, and draw the lines of the grid across the rows."""
    axes.set_yticks(range(len(labels)), list(labels))
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(False)
    axes.grid(axis="x")


def grouped_bars(axes: Axes, series: Mapping[str, Sequence[float]], across: bool = False) -> list[BarContainer]:
    """Draw the bars of several series side by side, at 0, 1, 2 ... of the axis; ``across`` lays them to the right.

    Values are numbers, NaN where a series has none.
    """
    thick, drawn = 0.8 / max(1, len(series)), []
    for number, (name, values) in enumerate(series.items()):
        places = [place - 0.4 + (number + 0.5) * thick for place in range(len(values))]
        drawn.append((axes.barh if across else axes.bar)(places, values, thick, label=name))
    return drawn


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


def _distance(item: tuple[int, ...], other: tuple[int, ...]) -> int:
    return max(abs(a - b) for a, b in zip(item, other, strict=True))


def png(figure: Figure) -> bytes:
    """Encode a figure as PNG. The palette of its ``colours`` makes it four times smaller; same figure, same bytes."""
    canvas = figure.canvas
    if not isinstance(canvas, FigureCanvasAgg):
        canvas = FigureCanvasAgg(figure)
    with _style(figure.theme) if isinstance(figure, Picture) else contextlib.nullcontext():
        canvas.draw()
    image = Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")
    buffer = io.BytesIO()
    _few_colours(image, figure if isinstance(figure, Picture) else Picture).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def data_url(picture: Picture) -> str:
    """Return a picture as the address of an image in a page."""
    return f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}"


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
    positive = sorted({size for size in sizes if size > 0})
    axes.set_xscale("log", base=2)
    if not positive:
        return
    axes.set_xlim(positive[0] / 1.5, positive[-1] * 1.5)
    apart = (positive[-1] / positive[0]) ** (1 / TICKS)
    kept = positive[-1:]  # the largest is always written
    for size in positive[-2::-1]:
        if size * apart <= kept[-1]:
            kept.append(size)
    axes.set_xticks(kept, [size_text(size) for size in kept])
    axes.minorticks_off()


class _Ticks(LogLocator):
    """Powers of ten; below two decades 1, 2 and 5 of each, so that an axis has more than one tick."""

    def tick_values(self, vmin: float, vmax: float) -> Any:
        few = vmax < 100 * vmin
        self.set_params(subs=(1.0, 2.0, 5.0) if few else (1.0,))
        return super().tick_values(vmin, vmax)


def plain_numbers(axis: Axis) -> None:
    """Write plain numbers along a logarithmic axis: 0.01, 1, 100; with 2 and 5 where it spans few decades."""
    axis.set_major_locator(_Ticks(10, numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"))
    axis.set_minor_locator(NullLocator())


def short_numbers(axis: Axis) -> None:
    """Write large numbers along an axis with a prefix: 200 G in place of 2, with 1e11 at the end of the axis."""
    if max(map(abs, axis.get_view_interval())) >= 1e5:
        axis.set_major_formatter(EngFormatter())


def log_values(axes: Axes, room: float = 0.06) -> None:
    """Make y logarithmic with plain numbers and ``room`` (a share of the height) above and below."""
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)
    axes.margins(y=room)


def draw_line(axes: Axes, x: Any, y: Any, words: str, colour: str, **looks: Any) -> End:
    """Draw a line with its points and return its end, for ``name_ends``. ``x`` and ``y`` are columns of a frame."""
    points: Any = {"marker": "o", "markersize": 3.5}
    axes.plot(x, y, color=colour, **(points | looks))
    return End(float(x.iloc[-1]), float(y.iloc[-1]), words, colour)


def name_ends(axes: Axes, theme: Theme, ends: Sequence[End]) -> None:
    """Write each line's name right of its end, moved apart where names would lie on each other.

    To be called when the limits of the axes are final.
    """
    low, high = axes.get_ylim()
    to_axes = axes.transScale + axes.transLimits
    ordered = sorted(ends, key=lambda end: end.y)
    points = [to_axes.transform((end.x, min(max(end.y, low), high))) for end in ordered]
    places = spread([float(point[1]) for point in points], [end.height for end in ordered])
    # A thin line leads from the end of the line to its name, which may have been moved.
    starts = [(min(float(x), 1.0) + 0.01, float(y)) for x, y in points]
    leaders = [(start, (1.05, place)) for start, place in zip(starts, places, strict=True)]
    looks: Any = {"linewidths": 0.6, "alpha": 0.6, "transform": axes.transAxes, "clip_on": False}
    axes.add_collection(LineCollection(leaders, colors=[end.colour for end in ordered], **looks), autolim=False)
    for end, place in zip(ordered, places, strict=True):
        axes.text(1.06, place, end.words, transform=axes.transAxes, va="center", color=end.colour, fontsize=8)


def spread(places: Sequence[float], heights: Sequence[float], top: float = 1.0) -> list[float]:
    """Move middles of words (in order) as little as it takes until none lie on each other, and none above ``top``."""
    gaps = [(item + other) / 2 for item, other in pairwise(heights)]
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
