"""Pictures of their own kind: the waterfall of a step, kernels under the roofline, and the stages of a pipeline.

``benchlib.spec.charts.Chart`` calls them and says what they return.
"""

from typing import Any

from benchlib.benchmarks.parallel.analysis import PARTS
from benchlib.core.text import quantity, seconds
from benchlib.show import figures as on
from benchlib.spec.tables import Rows, Table

# Colours of the parts of a step: the work in the first ones, waste in those that stand out; others are grey.
COLOURS = {"compute": 0, "elementwise": 5, "optimizer": 2, "data": 4, "communication": 1, "waiting": 3}
PHASES = {"forward": "Forward", "backward": "Backward", "weight": "Gradients of weights"}


def waterfall(run: Rows, axes: Any, table: Table) -> Any:
    row, left, words = next(iter(table.whole(run)), None), 0.0, list[str]()
    if row is None:
        return None
    parts = {part: 1e3 * row[f"{part}_part_s"] for part in PARTS}  # ms
    step, worst = sum(parts.values()), row["bottleneck"]
    shown = {part: value for part, value in parts.items() if value > 0.002 * step}
    for place, (part, value) in enumerate(shown.items()):
        colour = on.PALETTE.series[COLOURS[part]] if part in COLOURS else on.PALETTE.muted
        axes.barh(place, value, 0.66, left, color=colour, hatch="///" * (part == "bubble"))
        words.append(f"{seconds(value / 1e3)}, {value / step:.0%}")
        inward = left > 0.5 * step
        on.note(axes, words[-1], (left + value * (not inward), place), (5 - 10 * inward, 0), fontsize=8)
        left += value
    labels = [PARTS[part].removeprefix("the ").capitalize() for part in shown]
    on.label_rows(axes, labels)
    axes.set_xlim(0, step)
    title = f"{row['model']} {row['way']}: {parts[worst] / step:.0%} of a step is {PARTS[worst]}"
    title += f"; at most {row['faster_without']:.2f} × without" if worst != "compute" else ""
    alt = "; ".join(map(" ".join, zip(labels, words, strict=True)))
    return title, "time of a step (ms)", "", f"{alt}."


def roofline(run: Rows, axes: Any, table: Table, kernels: Table) -> Any:
    """Draw the roofs of memory and matrix products, both measured, and the kernels of the first row under them."""
    keys = [row["key"] for row in table.rows(run)][:1]
    timed = [item for item in kernels.rows(run) if item["key"] in keys and item["flops"] and item["time_s"]]
    drawn = sorted(timed, key=lambda item: -item["time_s"])
    if not drawn:
        return None
    facts, ends, shares = run.run, list[Any](), list[float]()
    copy, rate = facts["copy_bytes_per_s"], facts["rank_flops"]
    for item, colour in zip(drawn, on.PALETTE.series, strict=False):
        x, y = item["flops"] / item["bytes"], item["flops"] / item["time_s"]
        size = 5 + 7 * (item["time_s"] / drawn[0]["time_s"]) ** 0.5
        axes.plot([x], [y], "o", color=colour, markersize=size, alpha=0.85)
        shares.append(y / min(rate, x * copy))
        # What is far above the roof of memory had its data in caches.
        reached = f"{shares[-1]:.0%} of its roof" if shares[-1] <= 1.05 else "from caches"
        ends.append(on.End(x, y, f"{item['class']},\n{reached}", colour))
    knee, places, heights = rate / copy, [end.x for end in ends], [end.y for end in ends]
    low, high = min(0.5 * knee, *places) / 3, max(4 * knee, *places) * 3
    axes.plot([low, knee, high], [low * copy, rate, rate], color=on.PALETTE.text, linewidth=1.6)
    on.note(axes, f"{facts['precision']} {quantity(rate, 'FLOP/s')}", (high, rate), (-4, 5), fontsize=8)
    on.note(axes, f"memory {quantity(copy / 1e9, 'GB/s')}", (0.3 * knee, 0.3 * rate), (-6, 4), fontsize=8)
    lowest, highest = min(low * copy, *heights) / 4, 4 * max(rate, *heights)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(lowest, highest))
    on.plain_numbers(axes.xaxis)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1e9:,.3g}")
    axes.minorticks_off()
    on.name_ends(axes, ends)
    title = f"{drawn[0]['class']} kernels take most of the time and reach {shares[0]:.0%} of their roof"
    alt = "; ".join(f"{quantity(end.y, 'FLOP/s')}: {' '.join(end.words.split())}" for end in ends)
    return title, "operational intensity (FLOP per byte)", "GFLOP/s of a rank", alt


def stages(run: Rows, axes: Any, table: Table, steps: Table) -> Any:
    """Draw one step of a pipeline: which micro-batch each rank works on and when; what is empty is the bubble."""
    # A pipeline alone before a hybrid.
    piped = sorted((row for row in table.whole(run) if row["schedule"]), key=lambda row: row["strategy"] != "pipeline")
    passes = [row for row in steps.rows(run) if piped and row["key"] == piped[0]["key"]]
    if not passes:
        return None
    ranks, span = sorted({row["rank"] for row in passes}), 1e3 * max(row["end_s"] for row in passes)
    for phase, colour in zip(PHASES, on.PALETTE.series, strict=False):
        drawn = [row for row in passes if row["phase"].replace("input", "backward") == phase]
        if drawn:
            places, begins = [ranks.index(row["rank"]) for row in drawn], [1e3 * row["start_s"] for row in drawn]
            widths = [1e3 * (row["end_s"] - row["start_s"]) for row in drawn]
            looks: Any = {"color": colour, "edgecolor": on.PALETTE.card, "linewidth": 0.8, "label": PHASES[phase]}
            bars = axes.barh(places, widths, 0.7, begins, **looks)
            numbers = [
                str(row["micro_batch"]) * (width > 0.03 * span) for row, width in zip(drawn, widths, strict=True)
            ]
            axes.bar_label(bars, numbers, label_type="center", color=on.PALETTE.card, fontsize=7.5)
    on.label_rows(axes, [f"rank {rank}" for rank in ranks])
    axes.set_xlim(0, span)
    axes.figure.legend(loc="outside lower center", ncols=3, fontsize=7.5)
    title = f"{piped[0]['way']}: the bubble is {piped[0]['bubble_share']:.0%} of the step"
    alt = f"{len(passes)} bars: micro-batches on {len(ranks)} ranks by phase; gaps: idle time."
    return title, "time of a step (ms); numbers: micro-batches", "", alt
