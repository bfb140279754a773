"""A picture of a compiler's program: its layers in order, what each does, and which values pass between them."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchlib.core.text import quantity
from benchlib.show.figures import LIGHT, Picture, Theme, blank, head, leave_empty, styled

MAX_BOXES = 14  # of a deeper model the layers in the middle are one
WIDE, HIGH = 0.62, 0.72


def shortened(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return layers (layer, operations, dot_flops, weight_bytes) with those in the middle joined where they are too many to draw."""
    listed, half = [dict(row) for row in rows], MAX_BOXES // 2
    if len(listed) <= MAX_BOXES:
        return listed
    middle = listed[half : 1 - half]
    joined = {name: sum(row[name] for row in middle) for name in ("operations", "dot_flops", "weight_bytes")}
    return [*listed[:half], {"layer": f"{middle[0]['layer']} … {middle[-1]['layer']}", **joined}, *listed[1 - half :]]


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
    colours = [(theme.series[0], 0.12 + 0.4 * row["dot_flops"] / most) for row in drawn]
    axes.barh(range(len(drawn)), WIDE, HIGH, left=0.02, color=colours)
    arrow: dict[str, Any] = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0}
    for number, row in enumerate(drawn):
        flops = f", {quantity(row['dot_flops'] / 1e6)} MFLOP" if row["dot_flops"] else ""
        axes.text(0.04, number, row["layer"], va="center", fontsize=8)
        axes.text(0.8, number, f"{row['operations']:,} operations{flops}", va="center", color=theme.muted, fontsize=8)
        if number:
            ends = ((0.1, number - HIGH / 2), (0.1, number - 1 + HIGH / 2))
            axes.annotate("", *ends, arrowprops=arrow | {"color": theme.muted, "mutation_scale": 7})
    place = {row["layer"]: number for number, row in enumerate(drawn)}
    bent = {"color": theme.series[1], "alpha": 0.45, "linewidth": 0.8, "connectionstyle": "arc3,rad=-0.25"}
    for begin, end in [(place[a], place[b]) for a, b, *_ in edges if a in place and b in place]:
        if end - begin > 1:
            axes.annotate("", (0.02 + WIDE, end), (0.02 + WIDE, begin), arrowprops=arrow | bent | {"mutation_scale": 6})
    title = f"{sum(row['operations'] for row in drawn):,} operations in {len(rows)} layers"
    alt = (
        "Boxes: layers from top to bottom, darker with their FLOPs; curved arrows: values that pass by the next layer."
    )
    return head(figure, theme, title, alt)
