"""Pictures of differences: how large they are, where results diverge, and how far attention kernels are apart.

Distributions by member; layer by layer, parameter by parameter and step by step of a training; attention kernels against
fp64 and against the math kernel.
"""

import math
from collections.abc import Callable
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from benchlib.benchmarks.parity import pictures, tables, tolerances
from benchlib.benchmarks.parity.matrix import SIGNS
from benchlib.benchmarks.parity.matrix import word as word_of
from benchlib.benchmarks.parity.pictures import (
    LINES,
    beside,
    label,
    listed,
    looks,
    mark,
    name_rows,
    placed,
    powers,
    tall,
    titled,
    tone,
)
from benchlib.benchmarks.parity.tables import difference, short
from benchlib.results.frames import Records, row_dicts
from benchlib.show.figures import HEIGHT_IN, LIGHT, End, Picture, Theme, blank, head, leave_empty, name_ends, panels

WIDE_ROW_IN = 0.3
MOST_LAYERS = 16  # written along the axis
NAME_IN = 0.13  # height of a name of 8 points
TOLERANCE = (0, (6, 3))
KERNELS = ("math", "flash", "efficient", "cudnn")
MARKERS = ("o", "s", "^", "D", "v")
MOST_LENGTHS = 6
SEEN = 0.002  # share of a member's values that a bin needs to widen the axis


def histograms(run: Records, theme: Theme = LIGHT) -> Picture:
    """Distribution of the differences of the logits by member, with the tolerance, and what exceeds it."""
    figure, axes = blank("difference-histograms", theme, of_many=True)
    frame = tables.table(run, "histogram").dropna(subset=["low", "high"]).query("count > 0")
    names = tables.ordered(run, frame["member"])
    if not names:
        return leave_empty(figure, axes, theme, "No differences of logits were counted.")
    tall(figure, len(names), WIDE_ROW_IN)
    judged = tables.table(run, "quantities")
    judged = judged[judged["quantity"] == tolerances.LOGITS]
    standings = {
        row["member"]: row for row in row_dicts(judged) if row["member"] in names and math.isfinite(row["limit"])
    }
    # A few values far below all others would press the rest together; they are drawn where there is room for them.
    seen = frame[frame["count"] >= SEEN * frame.groupby("member")["count"].transform("sum")]
    ends = [*seen["high"], *seen.loc[seen["low"] > 0, "low"]]
    zero = powers(axes.xaxis, [*ends, *(row["limit"] for row in standings.values())])
    most = tables.table(run, "logits").groupby("member")["max_abs"].max()
    sentences = []
    for row, name in enumerate(names):
        part, verdict = frame[frame["member"] == name], standings.get(name, {})
        over = verdict.get("status") == "FAIL"
        limit = verdict.get("limit", math.inf)
        word = word_of(verdict.get("status", ""), bool(verdict.get("gates", True)), True)
        for item in row_dicts(part):
            begin, end = (item["low"], item["high"]) if item["high"] > 0 else (zero / 1.4, zero * 1.4)
            height = 0.78 * item["count"] / part["count"].max()
            axes.bar(begin or zero, -height, end - begin, row + 0.4, align="edge", linewidth=0,
                     color=tone(theme, word) if over and end > limit * 1.0001 else theme.series[0])  # fmt: skip
        if math.isfinite(limit):
            axes.plot([limit], [row], **mark(theme))
        largest = float(most.get(name, part["high"].max()))
        beside(
            axes, row, f"{SIGNS.get(word, '')} {difference(largest)}".strip(), tone(theme, word) if over else theme.text
        )
        equal = part.loc[part["high"] == 0, "count"].sum() / part["count"].sum()
        sentences.append(f"{name} at most {difference(largest)}, {100 * equal:.0f}% are equal")
    name_rows(axes, theme, names)
    label(axes, theme, "|logit - the reference's|; bar: tolerance; right: the largest")
    return head(figure, theme, titled(_finding(standings), tables.scope(run)), f"{'; '.join(sentences)}.")


def _finding(standings: dict[str, dict[str, Any]]) -> str:
    beyond = [name for name, row in standings.items() if row["status"] == "FAIL"]
    if beyond:
        return f"Logits of {listed(beyond)} differ by more than the tolerance"
    shares = {
        name: row["value"] / row["limit"] for name, row in standings.items() if row["limit"] > 0 and row["value"] >= 0
    }
    if not shares:
        return "Differences of the logits"
    near = max(shares, key=lambda name: shares[name])
    return f"Logits differ by less than the tolerance; {near} comes closest, at {difference(shares[near])} of it"


def depth(run: Records, theme: Theme = LIGHT) -> Picture:
    """Relative L2 distance of each layer's output from the reference's, and the first layer beyond tolerance."""
    figure, axes = blank("divergence-by-depth", theme, of_many=True)
    layers = tables.layers(run)
    if not layers:
        return leave_empty(figure, axes, theme, "No layer was compared.")
    limits = _limits(run, layers)
    tall(figure, len(layers) + len(limits), 0.19, least_in=HEIGHT_IN)
    everything = [value for frame in layers.values() for value in frame["relative_l2"]]
    zero = powers(axes.yaxis, [*everything, *limits])
    ends, names = list[End](), tables.ordered(run, layers)
    for name in names:
        frame, (colour, style) = layers[name], looks(theme, names.index(name))
        values = placed(frame["relative_l2"], zero)
        axes.plot(
            frame["index"],
            values,
            color=colour,
            linestyle=style,
            linewidth=1.5,
            marker="o",
            markersize=2.5,
            gid="member",
        )
        finite = [(x, y) for x, y in zip(frame["index"], values, strict=True) if math.isfinite(y)]
        if finite:
            ends.append(End(float(finite[-1][0]), float(finite[-1][1]), name, colour))
    _layer_axis(axes, layers)
    for limit, words in limits.items():
        axes.axhline(limit, color=theme.muted, linewidth=1.4, linestyle=TOLERANCE, gid="tolerance")
        ends.append(End(axes.get_xlim()[1], limit, words, theme.muted))
    _mark_first(axes, theme, tables.first_beyond(run), zero)
    name_ends(axes, theme, ends)
    title, alt = _where(run, layers)
    label(axes, theme, "encoder layer, modules in forward order", "relative L2 distance")
    return head(figure, theme, titled(title, tables.scope(run)), alt)


def _limits(run: Records, layers: dict[str, pd.DataFrame]) -> dict[float, str]:
    """Return the tolerances with their names: by precision where there are several."""
    precision = {row["member"]: row["precision"] for row in row_dicts(tables.table(run, "members"))}
    kinds: dict[float, list[str]] = {}
    for name, frame in layers.items():
        for limit in frame["limit"].dropna().unique():
            kinds.setdefault(float(limit), []).append(precision.get(name, ""))
    if len(kinds) == 1:
        return dict.fromkeys(kinds, "tolerance")
    return {limit: f"tolerance\n{', '.join(dict.fromkeys(words))}".strip() for limit, words in kinds.items()}


def _layer_axis(axes: Axes, layers: dict[str, pd.DataFrame]) -> None:
    """Write the number of each encoder layer at its first module."""
    places: dict[str, float] = {}
    for frame in layers.values():
        for index, layer in zip(frame["index"], frame["layer"], strict=True):
            number = tables.layer_number(layer)
            if number is not None:
                places[str(number)] = min(index, places.get(str(number), index))
    step = -(-len(places) // MOST_LAYERS) or 1
    kept = [item for item in places.items() if int(item[0]) % step == 0]
    axes.set_xticks([place for _, place in kept], [word for word, _ in kept])
    last = max(float(frame["index"].max()) for frame in layers.values())
    axes.set_xlim(-0.02 * last - 0.5, 1.02 * last + 0.5)
    axes.grid(axis="x", color=axes.spines["bottom"].get_edgecolor(), linewidth=0.5)


def _mark_first(axes: Axes, theme: Theme, first: dict[str, dict[str, Any]], zero: float) -> None:
    """Ring the first layer beyond tolerance of each member, and name it once for all members that share it."""
    shared: dict[tuple[float, str], list[str]] = {}
    for name, row in first.items():
        if math.isfinite(row["relative_l2"]):
            shared.setdefault((row["index"], row["layer"]), []).append(name)
    low, high = axes.get_xlim()
    for number, ((index, layer), names) in enumerate(sorted(shared.items())):
        heights = [max(first[name]["relative_l2"], zero) for name in names]
        axes.plot(
            [index] * len(names),
            heights,
            "o",
            mfc="none",
            mec=theme.text,
            markersize=9,
            markeredgewidth=1.5,
            gid="first beyond",
        )
        # Left of the point is no line yet; where there is no room the name stands below the line to its right.
        left = index > low + 0.5 * (high - low)
        axes.annotate(f"{listed(names, 2)}: {short(layer)}", (index, max(heights)), (-9 if left else 5, -11 - 12 * number),
                      textcoords="offset points", ha="right" if left else "left", va="center", color=theme.text, fontsize=8,
                      fontweight="bold", bbox={"facecolor": theme.card, "alpha": 0.85, "linewidth": 0, "pad": 0.8})  # fmt: skip


def _where(run: Records, layers: dict[str, pd.DataFrame]) -> tuple[str, str]:
    first = tables.first_beyond(run)
    worst = {name: float(frame["relative_l2"].max()) for name, frame in layers.items()}
    distances = "; ".join(
        f"{name} at most {difference(worst[name])}"
        + (f", beyond its tolerance first at {first[name]['layer']}" if name in first else "")
        for name in layers
    )
    if first:
        name = next(iter(first))
        count = len(first) - 1
        more = (
            f"; {count} more member{'s exceed their tolerances' if count > 1 else ' exceeds its tolerance'}"
            if count
            else ""
        )
        return f"{name} exceeds its tolerance at {short(first[name]['layer'])}{more}", f"{distances}."
    name = max(worst, key=lambda key: worst[key])
    of = f"in {len(layers)} members" if len(layers) > 1 else f"of {name}"
    return f"No layer {of} is beyond tolerance", f"{distances}."


def gradients(run: Records, theme: Theme = LIGHT) -> Picture:
    """Relative L2 distance of each parameter's gradient from the reference's, the worst of each member named."""
    figure, axes = blank("gradient-differences", theme, of_many=True)
    frame = tables.table(run, "gradients").query("parameter != ''").dropna(subset=["relative_l2"])
    names = tables.ordered(run, frame["member"])
    if not names:
        return leave_empty(figure, axes, theme, "No gradients were compared.")
    tall(figure, len(names), 0.36)
    zero = powers(axes.xaxis, [*frame["relative_l2"], *frame["limit"].dropna()])
    beyond, sentences = [], []
    for row, name in enumerate(names):
        part = frame[frame["member"] == name]
        worst = row_dicts(part.sort_values("relative_l2").tail(1))[0]
        wrong = bool(part["beyond"].any())
        colour = tone(theme, "FAIL") if wrong else theme.series[0]
        axes.plot(placed(part["relative_l2"], zero), [row] * len(part), "|", color=colour, markersize=8, alpha=0.6)
        axes.plot(part["limit"].dropna().iloc[:1], [row] * int(part["limit"].notna().any()), **mark(theme))
        axes.annotate(short(worst["parameter"]), (0.995, row), (0, -11.5), xycoords=("axes fraction", "data"),
                      textcoords="offset points", ha="right", va="center", color=theme.muted, fontsize=7)  # fmt: skip
        beside(axes, row, difference(worst["relative_l2"]), colour if wrong else theme.text)
        beyond += [name] if wrong else []
        sentences.append(f"{name} {difference(worst['relative_l2'])} ({worst['parameter']})")
    name_rows(axes, theme, names)
    title = (
        f"Gradients of {listed(beyond)} are beyond tolerance" if beyond else "Every gradient is within its tolerance"
    )
    label(axes, theme, "relative L2 distance by parameter; bar: tolerance; named: the worst")
    return head(figure, theme, titled(title, tables.scope(run)), f"Worst parameters: {'; '.join(sentences)}.")


def losses(run: Records, theme: Theme = LIGHT) -> Picture:
    """Loss of the same training steps by member, and how far each is from the reference's."""
    frame = tables.table(run, "curves").dropna(subset=["step", "loss"])
    names = tables.ordered(run, frame["member"])
    if not names:
        return leave_empty(*blank("loss-curves", theme, of_many=True), theme, "No training steps were compared.")
    figure, (upper, lower) = panels("loss-curves", theme, 2, 1, sharex=True, height_ratios=[2, 5])
    tall(figure, len(names) + 2, 0.27, least_in=HEIGHT_IN)
    parts = {name: frame[frame["member"] == name].sort_values("step") for name in names}
    base = parts[names[0]].dropna(subset=["reference_loss"])
    upper.plot(base["step"], base["reference_loss"], color=theme.text, linewidth=3, alpha=0.35)
    lines = {name: (part["loss"] - part["reference_loss"]).abs() for name, part in parts.items()}
    truth = (base["truth_loss"] - base["reference_loss"]).abs()
    zero = powers(lower.yaxis, [*(value for line in lines.values() for value in line), *truth.dropna()], 4)
    line = NAME_IN / ((figure.get_figheight() - 1.2) * 5 / 7)  # of the lower axes
    ends = list[End]()
    for place, (name, part) in enumerate(parts.items()):
        colour, style = looks(theme, place)
        upper.plot(part["step"], part["loss"], color=colour, linestyle=style, linewidth=1)
        values = placed(lines[name], zero)
        lower.plot(part["step"], values, color=colour, linestyle=style, linewidth=1.5, marker="o", markersize=2.5)
        if math.isfinite(values.iloc[-1]):
            ends.append(End(float(part["step"].iloc[-1]), float(values.iloc[-1]), name, colour, line))
    if truth.notna().any():
        values = placed(truth, zero)
        lower.plot(base["step"], values, color=theme.muted, linewidth=1.4, linestyle=TOLERANCE)
        if math.isfinite(values.iloc[-1]):
            ends.append(End(float(base["step"].iloc[-1]), float(values.iloc[-1]), "fp64 truth", theme.muted, line))
    name_ends(lower, theme, ends)
    lower.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    label(upper, theme, "", "loss")
    label(lower, theme, "training step", "|loss - reference|")
    last = {name: float(line.iloc[-1]) for name, line in lines.items()}
    far = max(last, key=lambda name: last[name] if math.isfinite(last[name]) else math.inf)
    title = f"After {len(base)} steps the loss of {far} is {difference(last[far])} away"
    distances = "; ".join(f"{name} {difference(value)}" for name, value in last.items())
    return head(
        figure,
        theme,
        titled(title, tables.scope(run)),
        f"Distance from the reference's loss at the last step: {distances}.",
    )


def kernels(run: Records, theme: Theme = LIGHT) -> Picture:
    """Largest error of each attention kernel by length and type: against fp64, and against the math kernel.

    Of the inputs with the smallest scale: peaked ones, and kernels that did not run, are in the table.
    """
    frame = tables.table(run, "attention")
    ran = frame[(frame["status"] != "SKIPPED") & (frame["length"] > 0) & frame["max_abs_truth"].notna()]
    if ran.empty:
        return leave_empty(
            *blank("attention-kernels", theme, of_many=True), theme, "No attention kernels were compared."
        )
    figure, (left, right) = panels("attention-kernels", theme, 1, 2, sharey=True)
    tall(figure, 0, least_in=4.1)
    ran = ran[~(ran["scale"] > ran["scale"].min())]
    names = [name for name in (*KERNELS, *sorted(set(ran["kernel"]) - set(KERNELS))) if name in set(ran["kernel"])]
    colours = {name: theme.series[place] for place, name in enumerate(names)}
    types = list(dict.fromkeys(ran["dtype"]))
    zero = powers(left.yaxis, [*ran["max_abs_truth"], *ran["max_abs_math"].dropna()])
    worst = ran.groupby(["kernel", "dtype", "length"], as_index=False)[["max_abs_truth", "max_abs_math"]].max()
    for axes, column in ((left, "max_abs_truth"), (right, "max_abs_math")):
        for (kernel, dtype), part in worst.groupby(["kernel", "dtype"], sort=False):
            if column == "max_abs_math" and kernel == "math":
                continue
            part, place = part.dropna(subset=[column]), types.index(str(dtype))
            axes.plot(part["length"], part[column].clip(lower=zero), color=colours[str(kernel)], linewidth=1.5, markersize=4.5,
                      linestyle=LINES[place % len(LINES)], marker=MARKERS[place % len(MARKERS)])  # fmt: skip
        _lengths(axes, worst["length"])
    label(left, theme, "tokens", "largest error")
    label(right, theme, "tokens")
    for axes, words in ((left, "from fp64"), (right, "from the math kernel")):
        axes.set_title(words, loc="left", color=theme.text, fontsize=9)
    if ran.loc[ran["kernel"] != "math", "max_abs_math"].isna().all():
        right.text(0.5, 0.5, "only math ran", ha="center", color=theme.muted, fontsize=9, transform=right.transAxes)
    lines = [Line2D([], [], color=colour, linewidth=4, label=name) for name, colour in colours.items()]
    lines += [
        Line2D([], [], color=theme.muted, linewidth=1.5, linestyle=LINES[place % len(LINES)], label=name, markersize=4.5,
               marker=MARKERS[place % len(MARKERS)])
        for place, name in enumerate(types)
    ]  # fmt: skip
    figure.legend(handles=lines, frameon=False, fontsize=8.5, labelcolor=theme.text, ncols=min(6, len(lines)),
                  loc="outside lower center", handlelength=2.2)  # fmt: skip
    title = titled(_attention_finding(worst, names), "random inputs")
    errors = "; ".join(
        f"{row['kernel']} {row['dtype']} {difference(row['max_abs_truth'])} at {row['length']:.0f} tokens"
        for row in row_dicts(worst.sort_values("length").groupby(["kernel", "dtype"], sort=False).tail(1))
    )
    return head(figure, theme, title, f"Largest errors against fp64: {errors}.")


def _lengths(axes: Axes, lengths: pd.Series) -> None:
    ticks = sorted(set(lengths))
    axes.set_xscale("log", base=2)
    step = -(-len(ticks) // MOST_LENGTHS)
    kept = ticks[::-1][::step]
    axes.set_xticks(kept, [f"{length:,.0f}" for length in kept])
    axes.set_xlim(ticks[0] / 1.4, ticks[-1] * 1.4)
    axes.minorticks_off()


def _attention_finding(worst: pd.DataFrame, names: list[str]) -> str:
    others = [name for name in names if name != "math"]
    apart = worst[worst["kernel"].isin(others)].dropna(subset=["max_abs_math"])
    if apart.empty:
        return "Only the math kernel ran here" if names == ["math"] else "Errors of the attention kernels"
    far = row_dicts(apart.sort_values("max_abs_math").tail(1))[0]
    return f"{far['kernel']} is at most {difference(far['max_abs_math'])} from math ({far['dtype']}, {far['length']:,.0f} tokens)"


FIGURES: dict[str, Callable[..., Picture]] = {
    "backend-matrix": pictures.matrix,
    "difference-histograms": histograms,
    "divergence-by-depth": depth,
    "gradient-differences": gradients,
    "loss-curves": losses,
    "attention-kernels": kernels,
    "latency-by-member": pictures.latency,
}
