"""Pictures of their own kind: the waterfall of a step, kernels under the roofline, and the stages of a pipeline.

``benchlib.spec.charts.Chart`` calls them and says what they return. Their bars begin anywhere: seaborn has no such picture.
"""

from functools import partial
from typing import Any

import pandas as pd
import seaborn
from matplotlib.axes import Axes

from benchlib.benchmarks.parallel.analysis import PARTS
from benchlib.core.text import quantity, seconds
from benchlib.show import figures as on
from benchlib.show.figures import Drawing
from benchlib.spec.tables import Rows, Table

# Colours of the parts of a step: the work in the first ones, waste in those that stand out; others are grey.
COLOURS = {"compute": 0, "elementwise": 5, "optimizer": 2, "data": 4, "communication": 1, "waiting": 3}
PHASES = {"forward": "Forward", "backward": "Backward", "weight": "Gradients of weights"}
TIME, INTENSITY, RATE = "time (ms)", "operational intensity (FLOP per byte)", "GFLOP/s of a rank"


def waterfall(run: Rows, table: Table) -> Drawing:
    row = next(iter(table.whole(run)), None)
    if row is None:
        return Drawing(pd.DataFrame())
    parts = {part: 1e3 * row[f"{part}_part_s"] for part in PARTS}  # ms
    step, worst = sum(parts.values()), row["bottleneck"]
    labels = {PARTS[part].removeprefix("the ").capitalize(): part for part in parts}
    frame = pd.DataFrame({"part": list(labels), TIME: list(parts.values())})
    frame["share of the step"] = frame[TIME] / step
    frame = frame[frame["share of the step"] > 0.002]
    title = f"{row['model']} {row['way']}: {parts[worst] / step:.0%} of a step is {PARTS[worst]}"
    title += f"; at most {row['faster_without']:.2f} × without" if worst != "compute" else ""
    alt = "; ".join(f"{part} {seconds(time / 1e3)}, {share:.0%}" for part, time, share in frame.itertuples(index=False))
    return Drawing(frame, partial(_paint_waterfall, names=labels), title, "time of a step (ms)", "", f"{alt}.")


def _paint_waterfall(axes: Axes, frame: pd.DataFrame, names: dict[str, str]) -> None:
    left = 0.0
    for place, (part, value, share) in enumerate(frame.itertuples(index=False)):
        name = names[part]
        colour = on.PALETTE.series[COLOURS[name]] if name in COLOURS else on.PALETTE.muted
        axes.barh(place, value, 0.66, left, color=colour, hatch="///" * (name == "bubble"))
        inward = left > 0.5 * frame[TIME].sum()
        words = f"{seconds(value / 1e3)}, {share:.0%}"
        on.note(axes, words, (left + value * (not inward), place), (5 - 10 * inward, 0), fontsize=8)
        left += value
    on.label_rows(axes, frame["part"])
    axes.set_xlim(0, left)


def roofline(run: Rows, table: Table, kernels: Table) -> Drawing:
    """Prepare the roofs of memory and matrix products, both measured, and the kernels of the first row under them."""
    keys = [row["key"] for row in table.rows(run)][:1]
    timed = [item for item in kernels.rows(run) if item["key"] in keys and item["flops"] and item["time_s"]]
    kinds = sorted(timed, key=lambda item: -item["time_s"])[: len(on.PALETTE.series)]
    if not kinds:
        return Drawing(pd.DataFrame())
    copy, rate = run.run["copy_bytes_per_s"], run.run["rank_flops"]
    columns = {"kernels": [item["class"] for item in kinds], TIME: [1e3 * item["time_s"] for item in kinds]}
    frame = pd.DataFrame(columns)
    frame[INTENSITY] = [item["flops"] / item["bytes"] for item in kinds]
    frame[RATE] = [item["flops"] / item["time_s"] / 1e9 for item in kinds]
    frame["share of its roof"] = 1e9 * frame[RATE] / (frame[INTENSITY] * copy).clip(upper=rate)
    reached = [
        # What is far above the roof of memory had its data in caches.
        f"{share:.0%} of its roof" if share <= 1.05 else "from caches"
        for share in frame["share of its roof"]
    ]
    paint = partial(_paint_roofline, copy=copy / 1e9, rate=rate / 1e9, precision=run.run["precision"], reached=reached)
    first = frame.iloc[0]
    title = f"{first['kernels']} kernels take most of the time and reach {first['share of its roof']:.0%} of their roof"
    points = zip(frame[RATE], frame["kernels"], reached, strict=True)
    alt = "; ".join(f"{quantity(1e9 * value, 'FLOP/s')}: {kernel}, {words}" for value, kernel, words in points)
    return Drawing(frame, paint, title, INTENSITY, RATE, alt)


def _paint_roofline(
    axes: Axes, frame: pd.DataFrame, copy: float, rate: float, precision: str, reached: list[str]
) -> None:
    looks: dict[str, Any] = {"hue": "kernels", "size": TIME, "sizes": (30, 150), "palette": list(on.PALETTE.series)}
    looks["palette"] = looks["palette"][: len(frame)]
    seaborn.scatterplot(frame, x=INTENSITY, y=RATE, alpha=0.85, legend=False, ax=axes, **looks)
    places, heights = frame[INTENSITY], frame[RATE]
    knee = rate / copy
    low, high = min(0.5 * knee, *places) / 3, max(4 * knee, *places) * 3
    axes.plot([low, knee, high], [low * copy, rate, rate], color=on.PALETTE.text, linewidth=1.6)
    on.note(axes, f"{precision} {quantity(1e9 * rate, 'FLOP/s')}", (high, rate), (-4, 5), fontsize=8)
    on.note(axes, f"memory {quantity(copy, 'GB/s')}", (0.3 * knee, 0.3 * rate), (-6, 4), fontsize=8)
    lowest, highest = min(low * copy, *heights) / 4, 4 * max(rate, *heights)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(lowest, highest))
    on.plain_numbers(axes.xaxis)
    on.plain_numbers(axes.yaxis)
    kernels = [f"{kernel},\n{words}" for kernel, words in zip(frame["kernels"], reached, strict=True)]
    on.name_ends(axes, list(map(on.End, places, heights, kernels, on.PALETTE.series)))


def stages(run: Rows, table: Table, steps: Table) -> Drawing:
    """Prepare one step of a pipeline: which micro-batch each rank works on and when; what is empty is the bubble."""
    # A pipeline alone before a hybrid.
    piped = sorted((row for row in table.whole(run) if row["schedule"]), key=lambda row: row["strategy"] != "pipeline")
    passes = [row for row in steps.rows(run) if piped and row["key"] == piped[0]["key"]]
    frame = pd.DataFrame(
        {
            "rank": row["rank"],
            "phase": PHASES[row["phase"].replace("input", "backward")],
            "micro-batch": row["micro_batch"],
            "start (ms)": 1e3 * row["start_s"],
            "end (ms)": 1e3 * row["end_s"],
        }
        for row in passes
    )
    if frame.empty:
        return Drawing(frame)
    title = f"{piped[0]['way']}: the bubble is {piped[0]['bubble_share']:.0%} of the step"
    alt = f"{len(frame)} bars: micro-batches on {frame['rank'].nunique()} ranks by phase; gaps: idle time."
    return Drawing(frame, _paint_stages, title, "time of a step (ms); numbers: micro-batches", "", alt)


def _paint_stages(axes: Axes, frame: pd.DataFrame) -> None:
    ranks, span = sorted(frame["rank"].unique()), frame["end (ms)"].max()
    for phase, colour in zip(PHASES.values(), on.PALETTE.series, strict=False):
        part = frame[frame["phase"] == phase]
        places, widths = list(map(ranks.index, part["rank"])), part["end (ms)"] - part["start (ms)"]
        looks: Any = {"color": colour, "edgecolor": on.PALETTE.card, "linewidth": 0.8, "label": phase}
        bars = axes.barh(places, widths, 0.7, part["start (ms)"], **looks) if len(part) else []
        for bar, batch in zip(bars, part["micro-batch"], strict=True):
            if bar.get_width() > 0.03 * span:
                axes.text(*bar.get_center(), str(batch), ha="center", va="center", color=on.PALETTE.card, fontsize=7.5)
    on.label_rows(axes, [f"rank {rank}" for rank in ranks])
    axes.set_xlim(0, span)
    on.legend_below(axes.figure)
