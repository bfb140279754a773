"""What all figures share: their style, a figure with an alt text, axes of sizes and rows, its PNG bytes and its display.

seaborn draws them on Agg canvases of their own, without pyplot, in a style that holds while ``styled`` functions draw and
leaves nothing changed. ``png`` gives the same bytes for the same figure, so committed notebooks do not change when they are
executed again. A picture is drawn once, on white: where a reader wants a dark page, ``style.css`` inverts its lightness and
keeps its hues. The colours are Okabe and Ito's, which stay apart for colour-blind readers, on paper and in both appearances.
"""

import base64
import io
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullLocator
from PIL import Image

if TYPE_CHECKING:
    import pandas

WIDTH_IN, HEIGHT_IN, DPI, DPI_OF_MANY = 5.3, 3.3, 150, 120
COLOURS = 128  # that a PNG keeps: a palette makes it three times smaller
MAX_LETTERS, HANDLE = 82, 6  # of a row of a legend, and what the line of an entry takes of it
LINE_HEIGHT = 0.062  # of the axes: what a line of 8 points needs
FACET: Any = {"fontsize": 9, "pad": 4}
DASHED: Any = (0, (4, 3))


TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
STYLE: Any = matplotlib.rc_params_from_file(TEMPLATES / "pictures.mplstyle", use_default_template=False)
# Under it are matplotlib's own looks and not the user's, so that a picture has the same bytes on any machine.
_LOOKS = ("axes", "errorbar", "figure", "font", "grid", "hatch", "image", "legend", "lines", "markers", "mathtext", "patch", "path", "scatter", "text", "xtick", "ytick")  # fmt: skip
_BASE = {name: value for name, value in matplotlib.rcParamsDefault.items() if name.split(".")[0] in _LOOKS}
PAPER, TEXT, MUTED = "#ffffff", STYLE["text.color"], STYLE["axes.labelcolor"]
SERIES: tuple[str, ...] = tuple(STYLE["axes.prop_cycle"].by_key()["color"])
styled = matplotlib.rc_context(_BASE | dict(STYLE))  # a decorator: what it decorates draws in the style


class Picture(Figure):
    """A figure that can say what it shows. ``empty`` is True where the run recorded nothing to draw."""

    alt: str = ""
    empty: bool = False


@dataclass(frozen=True)
class Drawing:
    """A picture before it is drawn: ``paint(axes, frame)`` draws a tidy frame, once for each value of the column ``facet``.

    ``about`` is the row that the title is about, or the title. ``x`` and ``y`` stand at the axes; without a y the title is over
    the whole figure. A frame without rows is not drawn, and needs no more.
    """

    frame: "pandas.DataFrame"
    paint: "Callable[[Axes, pandas.DataFrame], None]" = lambda axes, frame: None
    about: Mapping[str, Any] | str = ""
    x: str = ""
    y: str = ""
    alt: str = ""
    facet: str = ""


def _blank(dpi: int, height_in: float = HEIGHT_IN) -> Picture:
    figure = Picture(figsize=(WIDTH_IN, height_in), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


@styled
def draw(drawing: Drawing, title: str, dpi: int = DPI_OF_MANY) -> Picture:
    """Draw a picture; its title is over the axes, or over the whole figure if there are several or no y.

    Facets are two or three in a row, all of one scale, and rows of the frame without a facet are in each.
    """
    frame, facet, x, y = drawing.frame, drawing.facet, textwrap.fill(drawing.x, 60), drawing.y
    names = [name for name in frame[facet].unique() if name] if facet else [""]
    across = 1 if not facet else 2 if len(names) <= 4 else 3
    down = -(-len(names) // across)
    figure = _blank(dpi, 1.1 + 1.25 * down if facet else HEIGHT_IN)
    title = title[:1].upper() + title[1:] if y else title
    figure.alt = f"{title}. {drawing.alt}".strip()
    entries: dict[str, Any] = {}
    places = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flat
    for number, (axes, name) in enumerate(zip_longest(places, names)):
        if name is None:
            axes.remove()
            continue
        is_lowest = number + across >= len(names)
        drawing.paint(axes, frame[frame[facet].isin([name, ""])] if facet else frame)
        axes.tick_params(labelbottom=is_lowest)
        axes.set(xlabel=x * is_lowest, ylabel="" if facet else y)
        axes.set_title(name if facet else textwrap.fill(title, 50) if y else "", **FACET if facet else {})
        entries |= {
            " ".join(words.split()): line for line, words in zip(*axes.get_legend_handles_labels(), strict=True)
        }
    if facet:
        figure.supylabel(y, color=MUTED)
        legend_below(figure, entries)
    if facet or not y:
        figure.suptitle(textwrap.fill(title, 54), x=0.012, ha="left")
    return figure


@styled
def placeholder(what: str, empty: bool = True) -> Picture:
    """Return a picture that says in the place of the axes what was not recorded."""
    figure = _blank(DPI_OF_MANY)
    figure.text(0.5, 0.5, what, ha="center", va="center", color=MUTED, fontsize=11)
    figure.alt, figure.empty = what, empty
    return figure


def note(axes: Axes, words: str, xy: tuple[Any, Any], away: tuple[float, float] = (4, 0), **more: Any) -> None:
    """Write words beside a point, ``away`` from it in points and aligned towards it, on the colour of the paper.

    ``more`` goes to ``Axes.annotate``: ``xycoords``, ``color``, ``fontsize`` ...
    """
    x, y = away
    more.setdefault("ha", "left" if x > 0 else "right" if x < 0 else "center")
    more.setdefault("va", "bottom" if y > 0 else "top" if y < 0 else "center")
    paper = {"facecolor": axes.get_facecolor(), "alpha": 0.8, "linewidth": 0, "pad": 0.5}
    axes.annotate(words, xy, away, textcoords="offset points", bbox=paper, **more)


def label_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Give each label a row, the first on top, and draw the lines of the grid across the rows."""
    axes.set_yticks(range(len(labels)), list(labels))
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(False)
    axes.grid(axis="x")


def legend_below(figure: Any, entries: Mapping[str, Any]) -> None:
    """Write what lines and colours mean below all axes."""
    if entries:
        longest, letters = max(map(len, entries)), sum(len(words) + HANDLE for words in entries)
        columns = len(entries) if letters <= MAX_LETTERS else MAX_LETTERS // (longest + HANDLE)
        figure.legend(entries.values(), entries, ncols=max(1, columns), columnspacing=1.2, loc="outside lower center")


def patches(colours: Mapping[Any, str]) -> dict[Any, Patch]:
    return {name: Patch(color=colour) for name, colour in colours.items()}


@styled
def png(figure: Picture) -> bytes:
    """Encode a picture as PNG with a palette; same picture, same bytes."""
    canvas: Any = figure.canvas
    canvas.draw()
    image = Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")
    buffer = io.BytesIO()
    image.quantize(COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def data_url(picture: Picture) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}"


def show(picture: Picture) -> None:
    """Display a picture in a notebook as PNG with its alt text, which is also the text/plain form of the output."""
    from IPython.display import display

    data = {"image/png": base64.b64encode(png(picture)).decode(), "text/plain": picture.alt}
    looks = {"image/png": {"alt": picture.alt, "width": int(WIDTH_IN * 110)}}
    display(data, raw=True, metadata=looks)  # type: ignore[no-untyped-call]


def size_axis(axes: Axes, sizes: Iterable[float], text: Callable[[float], str], most: int) -> None:
    """Make x logarithmic with about ``most`` of the sizes written as ``text``; one size stands in the middle."""
    positive = sorted(set(sizes))
    axes.set_xscale("log", base=2)
    axes.set_xlim(positive[0] / 1.5, positive[-1] * 1.5)
    apart = (positive[-1] / positive[0]) ** (1 / most)
    written = positive[-1:]  # the largest is always written
    for size in positive[-2::-1]:
        if size * apart <= written[-1]:
            written.append(size)
    axes.set_xticks(written, [text(size) for size in written])
    axes.minorticks_off()


def plain_numbers(axis: Axis) -> None:
    """Write plain numbers along a logarithmic axis: 0.01, 1, 100; below two decades 2 and 5 as well.

    To be called when its limits are final.
    """
    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0) if high < 100 * low else (1.0,), numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"))
    axis.set_minor_locator(NullLocator())


def short_numbers(axis: Axis) -> None:
    """Write large numbers along an axis with a prefix: 200 G in place of 2, with 1e11 at the end of the axis."""
    if max(map(abs, axis.get_view_interval())) >= 1e5:
        axis.set_major_formatter(EngFormatter())


def log_values(axes: Axes) -> None:
    """Make y logarithmic with plain numbers."""
    axes.set_yscale("log")
    axes.margins(y=0.06)
    plain_numbers(axes.yaxis)


def name_ends(axes: Axes) -> None:
    """Write the label of each line right of its end, moved apart as little as it takes for names that would lie on each other.

    To be called when the limits of the axes are final.
    """
    lines: list[Any] = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    if not lines:
        return
    lines.sort(key=lambda line: line.get_ydata()[-1])
    (low, high), ends = axes.get_ylim(), [line.get_xydata()[-1] for line in lines]
    inside = [(at, min(max(height, low), high)) for at, height in ends]
    x, y = (axes.transScale + axes.transLimits).transform(inside).T
    heights = [LINE_HEIGHT * (line.get_label().count("\n") + 1) for line in lines]
    offsets = np.array([0.0, *accumulate((lower + upper) / 2 for lower, upper in pairwise(heights))])
    y0 = y - offsets
    rising = (np.maximum.accumulate(y0) + np.minimum.accumulate(y0[::-1])[::-1]) / 2  # the farthest is moved the least
    places = np.minimum(rising, 1.0 - offsets[-1]) + offsets
    for line, at, place in zip(lines, zip(np.minimum(x, 1.0) + 0.01, y, strict=True), places, strict=True):
        colour = line.get_color()
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.6, "shrinkA": 0, "shrinkB": 0}
        looks: Any = {"va": "center", "color": colour, "fontsize": 8, "annotation_clip": False, "arrowprops": leader}
        axes.annotate(line.get_label(), at, (1.06, place), axes.transAxes, axes.transAxes, **looks)
