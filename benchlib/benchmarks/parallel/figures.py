"""The pictures of a run: strategies side by side, where a step goes, the roofline, memory, scaling, stages of a pipeline."""

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from benchlib.benchmarks.parallel import bottleneck, scaling
from benchlib.benchmarks.parallel.tables import GB, lines, modelled
from benchlib.core.text import listing, quantity, seconds
from benchlib.results import frames
from benchlib.show.figures import (
    DASHED,
    LIGHT,
    End,
    Picture,
    Theme,
    blank,
    finish,
    head,
    label_rows,
    leave_empty,
    name_ends,
    note,
    panels,
    plain_numbers,
    styled,
)

ROWS, CURVES = 14, 4  # most rows of a picture of strategies, most curves of one
# Colours of the parts of a step: the work in the first ones, waste in those that stand out.
_PART_COLOURS = {
    "compute": 0, "elementwise": 5, "optimizer": 2, "launch": None, "data": 4, "communication": 1, "waiting": 3, "bubble": None,
}  # fmt: skip
_MEMORY_COLOURS = {"parameters": 0, "gradients": 5, "optimizer": 2, "activations": 1, "buffers": 3}


def _rows(run: Any) -> list[Any]:
    return bottleneck.main_rows(run) if frames.readable(run, "result") else []


def _labels(rows: Sequence[Any]) -> list[str]:
    """The names of rows, with their models where there are several."""
    several = len({row["model"] for row in rows}) > 1
    return [f"{row['model']} " * several + bottleneck.name(row).replace("_", " ") for row in rows]


def _shown(run: Any) -> list[Any]:
    """The fastest rows of a run, the fastest first, as many as fit a picture."""
    return sorted(_rows(run), key=lambda row: (row["model"], -row["samples_per_s"]))[:ROWS]


def _label_all(axes: Any, rows: Sequence[Any]) -> None:
    label_rows(axes, _labels(rows))
    axes.tick_params(axis="y", labelsize=8 if len(rows) < 11 else 7)


def _main(run: Any) -> Any:
    """The row that the reading speaks of: the fastest over several ranks."""
    rows = _rows(run)
    spread = [row for row in rows if row["world"] > 1] or rows
    return max(spread, key=lambda row: row["samples_per_s"], default=None)


@styled
def strategies(run: Any, theme: Theme = LIGHT) -> Picture:
    """Samples per second of each strategy with the interval of its median."""
    figure, axes = blank("strategies", theme)
    rows = _shown(run)
    if not rows:
        return leave_empty(figure, axes, theme, "No strategy was measured.")
    ends = [
        [row["batch_size"] / (row.get(end) or row["step_s"]) for end in ("step_ci_high", "step_ci_low")] for row in rows
    ]
    for place, (row, (low, high)) in enumerate(zip(rows, ends, strict=True)):
        rate, colour = row["samples_per_s"], theme.muted if row["strategy"] == "single" else theme.series[0]
        axes.barh(place, rate, height=0.62, color=colour, alpha=0.6)
        axes.plot([low, high], [place, place], color=theme.text, linewidth=1.4, solid_capstyle="butt")
        note(axes, quantity(rate), (max(high, rate), place), (6, 0), fontsize=8)
    _label_all(axes, rows)
    axes.set_xlim(0, 1.18 * max(max(row["samples_per_s"], high) for row, (_, high) in zip(rows, ends, strict=True)))
    axes.set_xlabel("samples per second, all devices")
    ranked = sorted(zip(rows, _labels(rows), strict=True), key=lambda pair: -pair[0]["samples_per_s"])
    (best, words), rate = ranked[0], quantity(ranked[0][0]["samples_per_s"])
    title = f"{words}{' is fastest' if len(rows) > 1 else ''}: {rate} samples/s"
    if alike := [label for row, label in ranked[1:] if row["model"] == best["model"] and bottleneck.same(row, best)]:
        title = f"{listing([words, *alike])}: equal within the noise, up to {rate} samples/s"
    return head(figure, theme, title, "Bars: medians; lines: 95% intervals; grey: one device.")


@styled
def waterfall(run: Any, theme: Theme = LIGHT) -> Picture:
    """The parts of a step of the fastest strategy over several devices, one after the other."""
    figure, axes = blank("waterfall", theme)
    row = _main(run)
    if row is None:
        return leave_empty(figure, axes, theme, "No strategy was measured.")
    parts = bottleneck.waterfall(row, bottleneck.kernels_of(run, row["key"]))
    worst, left = bottleneck.bottleneck(parts), 0.0
    shown = [name for name, value in parts.items() if value > 0.002 * row["step_s"]]
    for place, name in enumerate(shown):
        colour, width = _PART_COLOURS[name], 1e3 * parts[name]
        looks: Any = {
            "color": theme.muted if colour is None else theme.series[colour],
            "hatch": "///" * (name == "bubble"),
        }
        axes.barh(place, width, left=left, height=0.66, edgecolor=theme.card, linewidth=0.5, **looks)
        share = f"{seconds(parts[name])}, {parts[name] / row['step_s']:.0%}"
        right = left > 0.5e3 * row["step_s"]
        note(axes, share, (left if right else left + width, place), (-5 if right else 5, 0), fontsize=8)
        left += width
    axes.set_xlim(0, 1e3 * row["step_s"])
    label_rows(axes, [bottleneck.PARTS[name].removeprefix("the ").capitalize() for name in shown])
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("time of a step (ms)")
    words = f"{row['model']} {bottleneck.name(row).replace('_', ' ')}"
    title = f"{words}: {worst.share:.0%} of a step is {bottleneck.PARTS[worst.part]}"
    if worst.part != "compute":
        title += f"; at most {worst.bound:.2f} × without"
    return head(figure, theme, title, "Bars: parts of a step, one after the other.", 62)


def _legend(figure: Picture, theme: Theme, colours: dict[str, str]) -> None:
    handles = [Patch(facecolor=colour, edgecolor=theme.card, label=name) for name, colour in colours.items()]
    looks: Any = {"ncols": min(4, len(handles)), "fontsize": 7.5, "labelcolor": theme.text}
    figure.legend(handles=handles, loc="outside lower center", **looks)


@styled
def roofline(run: Any, theme: Theme = LIGHT) -> Picture:
    """The roofs of memory and of matrix products, both measured, and the kernel classes of the fastest strategy under them."""
    figure, axes = blank("roofline", theme)
    row = _main(run)
    peaks = (run.result.facts if row else {}).get("machine_peaks") or {}
    copy, rate = peaks.get("copy_bytes_per_s"), (peaks.get("matmul_flops") or {}).get(row["precision"] if row else "")
    kernels = bottleneck.kernels_of(run, row["key"]) if row else []
    kernels = [item for item in kernels if item["flops"] and item["bytes"] and item["time_s"]]
    if not copy or not rate or not kernels:
        return leave_empty(figure, axes, theme, "No peaks or no kernels were measured.")
    points = [(item["class"], item["flops"] / item["bytes"], item["flops"] / item["time_s"]) for item in kernels]
    low = min(0.5 * rate / copy, *(x for _, x, _ in points)) / 3
    high = max(4 * rate / copy, *(x for _, x, _ in points)) * 3
    knee = rate / copy
    axes.plot([low, knee, high], [low * copy, rate, rate], color=theme.text, linewidth=1.6)
    for other, value in (peaks.get("matmul_flops") or {}).items():
        if other != row["precision"] and value:
            axes.plot([value / copy, high], [value, value], color=theme.muted, linewidth=1, linestyle=DASHED)
            note(axes, other, (high, value), (-4, 4), fontsize=8, color=theme.muted)
    note(axes, f"{row['precision']} {quantity(rate, 'FLOP/s')}", (high, rate), (-4, 5), fontsize=8)
    note(axes, f"memory {quantity(copy / GB, 'GB/s')}", (0.3 * knee, 0.3 * rate), (-6, 4), fontsize=8)
    times = {item["class"]: item["time_s"] for item in kernels}
    points.sort(key=lambda point: -times[point[0]])
    longest, ends = times[points[0][0]], []
    for place, (name, x, y) in enumerate(points):
        colour = theme.series[place % len(theme.series)]
        axes.plot([x], [y], "o", color=colour, markersize=5 + 7 * (times[name] / longest) ** 0.5, alpha=0.85)
        # What is far above the roof of memory had its data in caches.
        share = y / min(rate, x * copy)
        reached = f"{share:.0%} of its roof" if share <= 1.05 else "from caches"
        ends.append(End(x, y, f"{name},\n{reached}", colour))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(min(min(y for _, _, y in points), low * copy) / 4, 4 * max(rate, *(y for _, _, y in points)))
    plain_numbers(axes.xaxis)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e9:,.3g}"))
    axes.minorticks_off()
    name_ends(axes, theme, ends)
    name, x, y = points[0]
    title = f"{name} kernels take most of the time and reach {y / min(rate, x * copy):.0%} of their roof"
    alt = "Lines: roofs of memory copy and matrix products, measured; dots: kernel classes, larger with more time."
    return finish(figure, axes, theme, title, "operational intensity (FLOP per byte)", "GFLOP/s of a rank", alt, 40)


@styled
def memory(run: Any, theme: Theme = LIGHT) -> Picture:
    """Memory of the fullest rank: the parts of the model stacked, and what was measured."""
    figure, axes = blank("memory", theme)
    rows = [row for row in _shown(run) if modelled(run, row)]
    if not rows:
        return leave_empty(figure, axes, theme, "No strategy was measured.")
    explained = []
    largest = max(max(max(row.get("peak_bytes") or [0.0]), getattr(modelled(run, row), "total", 0.0)) for row in rows)
    unit, size = ("GB", GB) if largest >= GB else ("MB", 1e6)
    for place, row in enumerate(rows):
        left, model = 0.0, modelled(run, row)
        assert model is not None
        for name, value in vars(model).items():
            axes.barh(place, value / size, left=left, height=0.6, color=theme.series[_MEMORY_COLOURS[name]], alpha=0.8)
            left += value / size
        if measured := max(row.get("peak_bytes") or [0.0]):
            axes.plot([measured / size] * 2, [place - 0.42, place + 0.42], color=theme.text, linewidth=2.2)
            explained.append(model.total / measured)
    _label_all(axes, rows)
    axes.set_xlabel(f"{unit} of the fullest rank (black line: measured)")
    _legend(figure, theme, {name.capitalize(): theme.series[place] for name, place in _MEMORY_COLOURS.items()})
    if not explained:
        return head(figure, theme, "Estimated memory; nothing was measured", "Stacked bars: the model's parts.")
    ends = list(dict.fromkeys(f"{share:.0%}" for share in (min(explained), max(explained))))
    title = f"The model explains {' to '.join(ends)} of the measured memory"
    return head(figure, theme, title, "Stacked bars: the model's parts; black lines: measured peaks.")


@styled
def curves(run: Any, theme: Theme = LIGHT) -> Picture:
    """Efficiency by the number of devices: measured with bands, the model's prediction, and its extrapolation."""
    result = frames.readable(run, "result")
    points = scaling.points(result.tables) if result else []
    kinds = [kind for kind in ("strong", "weak") if any(point.kind == kind and point.world > 1 for point in points)]
    if not kinds:
        figure, axes = blank("scaling", theme)
        return leave_empty(figure, axes, theme, "Scaling was not measured: scaling=both does.")
    largest = max(point.world for point in points)
    last = [point for point in points if point.world == largest]
    names = [point.key for point in sorted(last, key=lambda point: -point.samples_per_s)]
    names = list(dict.fromkeys(names))[:CURVES]
    top = max(1.1, *(min(point.high, 1.5) for point in points if point.key in names))
    figure, drawn = panels("scaling", theme, 1, len(kinds), sharey=True)
    more = lines(run)
    for axes, kind in zip(drawn, kinds, strict=True):
        for place, key in enumerate(names):
            own = [point for point in points if point.key == key and point.kind == kind]
            _curve(axes, theme.series[place], own, more.get((key, kind), []))
        axes.axhline(1, color=theme.muted, linewidth=0.8)
        axes.set_xscale("log", base=2)
        worlds = sorted({point.world for point in points} | {n for key in names for n, _ in more.get((key, kind), [])})
        kept = [n for n in worlds if n in (1, 2, 4, 8, 64, 1024)] or worlds
        axes.set_xticks(kept, [f"{n:,}" for n in kept], fontsize=7.5)
        axes.minorticks_off()
        axes.set_ylim(0, top)
        axes.set_xlabel(f"devices, {kind} scaling")
    if shown := scaling.predicts(result.tables):
        looks: Any = {"xycoords": "axes fraction", "fontsize": 7.5, "color": theme.muted}
        note(drawn[-1], "dashed: model\ndotted: model alone", (1, 1), (-2, -3), **looks)
    drawn[0].set_ylabel("efficiency")
    several = len({point.model for point in points}) > 1
    words = [name if several else name.split(" ", 1)[-1].replace("_", " ") for name in names]
    _legend(figure, theme, dict(zip(words, theme.series, strict=False)))
    best = max(last, key=lambda point: point.efficiency)
    title = f"{best.efficiency:.0%} efficiency on {largest} devices at best"
    if here := scaling.off(result.tables):
        title += f"; {'' if shown else 'no prediction, '}the model's step is off by {here[0]:.0%} (median)"
    alt = "Lines with bands: measured efficiency"
    alt += "; dashed: the model's prediction before the run; dotted: its extrapolation, not measured." if shown else "."
    return head(figure, theme, title, alt)


def _curve(axes: Any, colour: str, points: list[Any], line: list[tuple[int, float]]) -> None:
    points = sorted(points, key=lambda point: point.world)
    worlds, low, high = ([getattr(point, name) for point in points] for name in ("world", "low", "high"))
    axes.plot(worlds, [point.efficiency for point in points], "o-", color=colour)
    axes.fill_between(worlds, low, high, color=colour, alpha=0.15, linewidth=0)
    model = [(1, 1.0), *((point.world, point.predicted) for point in points if point.predicted is not None)]
    if len(model) > 1:
        axes.plot(*zip(*model, strict=True), color=colour, linestyle=DASHED, linewidth=1.1)
    if farther := [(n, value) for n, value in line if n > model[-1][0]]:
        looks: Any = {"linestyle": ":", "linewidth": 1.1, "marker": "x", "markersize": 4}
        axes.plot(*zip(model[-1], *farther, strict=True), color=colour, **looks)


@styled
def stages(run: Any, theme: Theme = LIGHT) -> Picture:
    """One step of a pipeline: which micro-batch each rank works on and when; what is empty is the bubble."""
    figure, axes = blank("stages", theme)
    frame = frames.table(run, "stages")
    if frame.empty:
        return leave_empty(figure, axes, theme, "No pipeline was measured.")
    keys = list(dict.fromkeys(frame["key"]))
    key = next((name for name in keys if " pipeline" in name), keys[0])
    own = frame[frame["key"] == key]
    ranks = sorted(own["rank"].unique())
    phases = {"forward": "Forward", "backward": "Backward", "weight": "Gradients of weights"}
    colours = dict(zip(phases, theme.series, strict=False))
    span = float(own["end_s"].max())
    looks: Any = {"ha": "center", "va": "center", "color": theme.card, "fontsize": 7.5}
    own = own.assign(phase=own["phase"].replace("input", "backward"))
    for item in own.itertuples():
        place, begin, width = ranks.index(item.rank), 1e3 * item.start_s, 1e3 * (item.end_s - item.start_s)
        paint: Any = {"color": colours[item.phase], "edgecolor": theme.card, "linewidth": 0.8}
        axes.barh(place, width, left=begin, height=0.7, **paint)
        if width > 0.03e3 * span:
            axes.text(begin + width / 2, place, str(item.micro_batch), **looks)
    label_rows(axes, [f"rank {rank}" for rank in ranks])
    axes.set_xlabel("time of a step (ms); numbers: micro-batches")
    axes.set_xlim(0, 1e3 * span)
    seen = set(own["phase"])
    _legend(figure, theme, {words: colours[phase] for phase, words in phases.items() if phase in seen})
    row = next((row for row in _rows(run) if row["key"] == key), None)
    share = row.get("bubble_share") if row else None
    words = key.split(" ", 1)[-1].replace("_", " ")
    title = f"{words}: the bubble is {share:.0%} of the step" if share is not None else f"{words}: one step"
    return head(figure, theme, title, "Bars: micro-batches on each rank by phase; gaps: idle time.")


FIGURES: dict[str, Callable[..., Picture]] = {
    "strategies": strategies, "waterfall": waterfall, "roofline": roofline, "memory": memory, "scaling": curves, "stages": stages,
}  # fmt: skip
