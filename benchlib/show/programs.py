"""A picture of a compiler's program: its layers in order, what each does, and which values pass between them."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from benchlib.core.text import quantity
from benchlib.show.figures import LIGHT, Picture, Theme, blank, head, leave_empty, styled

MOST = 14  # boxes; of a deeper model the layers in the middle are one
_WIDE, _HIGH = 0.62, 0.72


def shortened(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return layers (layer, operations, dot_flops, weight_bytes) with those in the middle joined where they are too many to draw."""
    listed = [dict(row) for row in rows]
    if len(listed) <= MOST:
        return listed
    first, last = MOST // 2, len(listed) - MOST // 2 + 1
    middle = listed[first:last]
    joined = {name: sum(row[name] for row in middle) for name in ("operations", "dot_flops", "weight_bytes")}
    return [*listed[:first], {"layer": f"{middle[0]['layer']} … {middle[-1]['layer']}", **joined}, *listed[last:]]


@styled
def layers(
    rows: Sequence[Mapping[str, Any]], edges: Sequence[Sequence[Any]], theme: Theme = LIGHT, name: str = "layers"
) -> Picture:
    """Draw a box for each layer, darker with its share of the dots' FLOPs, and an arrow where values pass over a box.

    ``edges`` are (from, to, values).
    """
    figure, axes = blank(name, theme)
    drawn = shortened(rows)
    if not drawn:
        return leave_empty(figure, axes, theme, "The program has no manifest: nothing says which layer is which.")
    axes.set_axis_off()
    axes.set_xlim(0, 1.3)
    axes.set_ylim(len(drawn) - 0.4, -0.6)
    most = max(row["dot_flops"] for row in drawn) or 1
    place = {row["layer"]: number for number, row in enumerate(drawn)}
    for number, row in enumerate(drawn):
        share = row["dot_flops"] / most
        axes.add_patch(FancyBboxPatch((0.02, number - _HIGH / 2), _WIDE, _HIGH, boxstyle="round,pad=0,rounding_size=0.02",
                                      facecolor=theme.series[0], alpha=0.12 + 0.4 * share, edgecolor="none"))  # fmt: skip
        axes.text(0.04, number, row["layer"], va="center", color=theme.text, fontsize=8)
        words = f"{row['operations']:,} operations"
        if row["dot_flops"]:
            words += f", {quantity(row['dot_flops'] / 1e6)} MFLOP"
        axes.text(0.8, number, words, va="center", color=theme.muted, fontsize=8)
        if number:
            axes.add_patch(FancyArrowPatch((0.1, number - 1 + _HIGH / 2), (0.1, number - _HIGH / 2), arrowstyle="-|>",
                                           mutation_scale=7, color=theme.muted, shrinkA=0, shrinkB=0))  # fmt: skip
    skips = [(place[a], place[b]) for a, b, *_ in edges if a in place and b in place and place[b] - place[a] > 1]
    for begin, end in skips:
        axes.add_patch(FancyArrowPatch((0.02 + _WIDE, begin), (0.02 + _WIDE, end), connectionstyle="arc3,rad=-0.25", arrowstyle="-|>",
                                       mutation_scale=6, color=theme.series[1], alpha=0.45, linewidth=0.8))  # fmt: skip
    total = sum(row["operations"] for row in drawn)
    title = f"{total:,} operations in {len(rows)} layers"
    alt = (
        "Boxes: layers from top to bottom, darker with their FLOPs; curved arrows: values that pass by the next layer."
    )
    return head(figure, theme, title, alt)
