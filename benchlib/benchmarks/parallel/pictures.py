"""Pictures of their own kind: the waterfall of a step, kernels under the roofline, and the stages of a pipeline.

``benchlib.spec.charts.Chart`` calls them and says what they return. seaborn has no such pictures.
"""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from benchlib.benchmarks.parallel.analysis import PARTS
from benchlib.core.text import quantity, seconds
from benchlib.show import figures as on
from benchlib.show.figures import Drawing
from benchlib.spec.tables import Rows, Table

# Colours of the parts of a step: the work in the first ones, waste in those that stand out; others are grey.
COLOURS = {"compute": 0, "elementwise": 5, "optimizer": 2, "data": 4, "communication": 1, "waiting": 3}
PHASES = {"forward": "Forward", "backward": "Backward", "weight": "Gradients of weights"}
TIME, SHARE, INTENSITY, RATE = "time (ms)", "share", "operational intensity (FLOP per byte)", "GFLOP/s of a rank"


def waterfall(run: Rows, table: Table) -> Drawing:
    row = next(iter(table.whole(run)), None)
    if row is None:
        return Drawing(pd.DataFrame())
    parts = {part: 1e3 * row[f"{part}_part_s"] for part in PARTS}  # ms
    step, worst = sum(parts.values()), row["bottleneck"]
    names = {PARTS[part].removeprefix("the ").capitalize(): part for part in parts}
    frame = pd.DataFrame({"part": list(names), TIME: parts.values(), SHARE: [part / step for part in parts.values()]})
    frame = frame[frame[SHARE] > 0.002]
    frame["words"] = [
        f"{seconds(1e-3 * time)}, {share:.0%}" for time, share in zip(frame[TIME], frame[SHARE], strict=True)
    ]

    def paint(axes: Axes, frame: pd.DataFrame) -> None:
        left = 0.0
        for place, (part, value, _, words) in enumerate(frame.itertuples(index=False)):
            colour = on.SERIES[COLOURS[names[part]]] if names[part] in COLOURS else on.MUTED
            axes.barh(place, value, 0.66, left, color=colour, hatch="///" * (names[part] == "bubble"))
            inward = left > 0.5 * step
            on.note(axes, words, (left + value * (not inward), place), (5 - 10 * inward, 0), fontsize=8)
            left += value
        on.label_rows(axes, list(frame["part"]))
        axes.set_xlim(0, step)

    title = f"{row['model']} {row['way']}: {parts[worst] / step:.0%} of a step is {PARTS[worst]}"
    title += f"; at most {row['faster_without']:.2f} × without" if worst != "compute" else ""
    return Drawing(
        frame, paint, title, "time of a step (ms)", "", f"{'; '.join(frame['part'] + ' ' + frame['words'])}."
    )


def roofline(run: Rows, table: Table, kernels: Table) -> Drawing:
    """The roofs of memory and matrix products, both measured, and the kernels of the first row under them."""
    keys = [row["key"] for row in table.rows(run)][:1]
    timed = [item for item in kernels.rows(run) if item["key"] in keys and item["flops"] and item["time_s"]]
    if not timed:
        return Drawing(pd.DataFrame())
    longest = pd.DataFrame(timed).sort_values("time_s", ascending=False, kind="stable")[: len(on.SERIES)]
    copy, rate = run.run["copy_bytes_per_s"] / 1e9, run.run["rank_flops"] / 1e9
    frame = pd.DataFrame({"kernels": longest["class"], TIME: 1e3 * longest["time_s"]})
    frame[INTENSITY] = longest["flops"] / longest["bytes"]
    frame[RATE] = longest["flops"] / longest["time_s"] / 1e9
    frame[SHARE] = frame[RATE] / (frame[INTENSITY] * copy).clip(upper=rate)
    # What is far above the roof of memory had its data in caches.
    frame["reached"] = [f"{share:.0%} of its roof" if share <= 1.05 else "from caches" for share in frame[SHARE]]

    def paint(axes: Axes, frame: pd.DataFrame) -> None:
        x, y = frame[INTENSITY], frame[RATE]
        for row, colour in zip(frame.to_dict("records"), on.SERIES, strict=False):
            looks = {"markersize": 5 + 7 * (row[TIME] / frame[TIME].max()) ** 0.5, "color": colour, "alpha": 0.85}
            axes.plot(row[INTENSITY], row[RATE], "o", label=f"{row['kernels']},\n{row['reached']}", **looks)
        knee = rate / copy
        low, high = min(0.5 * knee, *x) / 3, max(4 * knee, *x) * 3
        axes.plot([low, knee, high], [low * copy, rate, rate], color=on.TEXT, linewidth=1.6)
        words = f"{run.run['precision']} {quantity(1e9 * rate, 'FLOP/s')}"
        on.note(axes, words, (high, rate), (-4, 5), fontsize=8)
        on.note(axes, f"memory {quantity(copy, 'GB/s')}", (0.3 * knee, 0.3 * rate), (-6, 4), fontsize=8)
        limits = min(low * copy, *y) / 4, 4 * max(rate, *y)
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=limits)
        on.plain_numbers(axes.xaxis)
        on.plain_numbers(axes.yaxis)
        on.name_ends(axes)

    first = frame.iloc[0]
    title = f"{first['kernels']} kernels take most of the time and reach {first[SHARE]:.0%} of their roof"
    alt = [f"{quantity(1e9 * row[RATE], 'FLOP/s')}: {row['kernels']}, {row['reached']}" for _, row in frame.iterrows()]
    return Drawing(frame, paint, title, INTENSITY, RATE, "; ".join(alt))


def stages(run: Rows, table: Table, steps: Table) -> Drawing:
    """One step of a pipeline: which micro-batch each rank works on and when; what is empty is the bubble."""
    # A pipeline alone before a hybrid.
    piped = sorted((row for row in table.whole(run) if row["schedule"]), key=lambda row: row["strategy"] != "pipeline")
    passes = pd.DataFrame([dict(row) for row in steps.rows(run) if piped and row["key"] == piped[0]["key"]])
    if passes.empty:
        return Drawing(passes)
    frame = passes[["rank", "micro_batch"]].rename(columns={"micro_batch": "micro-batch"})
    frame["phase"] = passes["phase"].replace("input", "backward").map(PHASES)
    frame["start (ms)"], frame[TIME] = 1e3 * passes["start_s"], 1e3 * (passes["end_s"] - passes["start_s"])

    def paint(axes: Axes, frame: pd.DataFrame) -> None:
        ranks, span = sorted(frame["rank"].unique()), (frame["start (ms)"] + frame[TIME]).max()
        colours = dict(zip(PHASES.values(), on.SERIES, strict=False))
        for phase, part in frame.groupby("phase", sort=False):
            looks: Any = {"color": colours[str(phase)], "edgecolor": on.PAPER, "linewidth": 0.8}
            bars = axes.barh([ranks.index(rank) for rank in part["rank"]], part[TIME], 0.7, part["start (ms)"], **looks)
            numbers = part["micro-batch"].astype(str).where(part[TIME] > 0.03 * span, "")
            axes.bar_label(bars, list(numbers), label_type="center", color=on.PAPER, fontsize=7.5)
        on.label_rows(axes, [f"rank {rank}" for rank in ranks])
        axes.set_xlim(0, span)
        on.legend_below(axes.figure, on.patches({phase: colours[phase] for phase in frame["phase"].unique()}))

    title = f"{piped[0]['way']}: the bubble is {piped[0]['bubble_share']:.0%} of the step"
    alt = f"{len(frame)} bars: micro-batches on {frame['rank'].nunique()} ranks by phase; gaps: idle time."
    return Drawing(frame, paint, title, "time of a step (ms); numbers: micro-batches", "", alt)
