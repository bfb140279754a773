"""Pictures of where results diverge: layer by layer, parameter by parameter, step by step of a training."""

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from benchlib import parity_series as series
from benchlib.byte_axis import End, name_ends
from benchlib.curves import Records
from benchlib.parity_axes import beside, label, listed, looks, mark, name_rows, placed, powers, tall, titled, tone
from benchlib.parity_series import difference, short
from benchlib.picture import HEIGHT_IN, LIGHT, Picture, Theme, blank, head, leave_empty, panels

MOST_LAYERS = 16  # written along the axis
NAME_IN = 0.13  # height of a name of 8 points
TOLERANCE = (0, (6, 3))


def depth(run: Records, theme: Theme = LIGHT) -> Picture:
    """Relative L2 distance of each layer's output from the reference's, and the first layer beyond tolerance."""
    figure, axes = blank("divergence-by-depth", theme, of_many=True)
    found = series.layers(run)
    if not found:
        return leave_empty(figure, axes, theme, "No layer was compared.")
    limits = _limits(run, found)
    tall(figure, len(found) + len(limits), 0.19, least_in=HEIGHT_IN)
    everything = [value for frame in found.values() for value in frame["relative_l2"]]
    zero = powers(axes.yaxis, [*everything, *limits])
    ends, names = list[End](), series.ordered(run, found)
    for name in names:
        frame, (colour, style) = found[name], looks(theme, names.index(name))
        values = placed(frame["relative_l2"], zero)
        axes.plot(frame["index"], values, color=colour, linestyle=style, linewidth=1.5, marker="o", markersize=2.5)
        known = [(x, y) for x, y in zip(frame["index"], values, strict=True) if math.isfinite(y)]
        if known:
            ends.append(End(float(known[-1][0]), float(known[-1][1]), name, colour))
    _layer_axis(axes, found)
    for limit, words in limits.items():
        axes.axhline(limit, color=theme.muted, linewidth=1.4, linestyle=TOLERANCE)
        ends.append(End(axes.get_xlim()[1], limit, words, theme.muted))
    _mark_first(axes, theme, series.first_beyond(run), zero)
    name_ends(axes, theme, ends)
    title, alt = _where(run, found)
    label(axes, theme, "encoder layer, modules in forward order", "relative L2 distance")
    return head(figure, theme, titled(title, series.scope(run)), alt)


def _limits(run: Records, found: dict[str, pd.DataFrame]) -> dict[float, str]:
    """Return the tolerances with their names: by precision where there are several."""
    precision = {row["member"]: row["precision"] for row in series.rows(series.table(run, "members"))}
    kinds: dict[float, list[str]] = {}
    for name, frame in found.items():
        for limit in frame["limit"].dropna().unique():
            kinds.setdefault(float(limit), []).append(precision.get(name, ""))
    if len(kinds) == 1:
        return dict.fromkeys(kinds, "tolerance")
    return {limit: f"tolerance\n{', '.join(dict.fromkeys(words))}".strip() for limit, words in kinds.items()}


def _layer_axis(axes: Axes, found: dict[str, pd.DataFrame]) -> None:
    """Write the number of each encoder layer at its first module."""
    places: dict[str, float] = {}
    for frame in found.values():
        for index, layer in zip(frame["index"], frame["layer"], strict=True):
            number = series.layer_number(layer)
            if number is not None:
                places[str(number)] = min(index, places.get(str(number), index))
    step = -(-len(places) // MOST_LAYERS) or 1
    kept = [item for item in places.items() if int(item[0]) % step == 0]
    axes.set_xticks([place for _, place in kept], [word for word, _ in kept])
    last = max(float(frame["index"].max()) for frame in found.values())
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
        axes.plot([index] * len(names), heights, "o", mfc="none", mec=theme.text, markersize=9, markeredgewidth=1.5)
        # Left of the point is no line yet; where there is no room the name stands below the line to its right.
        left = index > low + 0.5 * (high - low)
        axes.annotate(f"{listed(names, 2)}: {short(layer)}", (index, max(heights)), (-9 if left else 5, -11 - 12 * number),
                      textcoords="offset points", ha="right" if left else "left", va="center", color=theme.text, fontsize=8,
                      fontweight="bold", bbox={"facecolor": theme.card, "alpha": 0.85, "linewidth": 0, "pad": 0.8})  # fmt: skip


def _where(run: Records, found: dict[str, pd.DataFrame]) -> tuple[str, str]:
    first = series.first_beyond(run)
    worst = {name: float(frame["relative_l2"].max()) for name, frame in found.items()}
    told = "; ".join(
        f"{name} at most {difference(worst[name])}"
        + (f", beyond its tolerance first at {first[name]['layer']}" if name in first else "")
        for name in found
    )
    if first:
        name = next(iter(first))
        count = len(first) - 1
        more = f"; {count} more member{'s leave theirs' if count > 1 else ' leaves its own'}" if count else ""
        return f"{name} leaves its tolerance at {short(first[name]['layer'])}{more}", f"{told}."
    name = max(worst, key=lambda key: worst[key])
    of = f"in {len(found)} members" if len(found) > 1 else f"of {name}"
    return f"No layer {of} is beyond tolerance", f"{told}."


def gradients(run: Records, theme: Theme = LIGHT) -> Picture:
    """Relative L2 distance of each parameter's gradient from the reference's, the worst of each member named."""
    figure, axes = blank("gradient-differences", theme, of_many=True)
    frame = series.table(run, "gradients").query("parameter != ''").dropna(subset=["relative_l2"])
    names = series.ordered(run, frame["member"])
    if not names:
        return leave_empty(figure, axes, theme, "No gradients were compared.")
    tall(figure, len(names), 0.36)
    zero = powers(axes.xaxis, [*frame["relative_l2"], *frame["limit"].dropna()])
    beyond, told = [], []
    for row, name in enumerate(names):
        part = frame[frame["member"] == name]
        worst = series.rows(part.sort_values("relative_l2").tail(1))[0]
        wrong = bool(part["beyond"].any())
        colour = tone(theme, "FAIL") if wrong else theme.series[0]
        axes.plot(placed(part["relative_l2"], zero), [row] * len(part), "|", color=colour, markersize=8, alpha=0.6)
        axes.plot(part["limit"].dropna().iloc[:1], [row] * int(part["limit"].notna().any()), **mark(theme))
        axes.annotate(short(worst["parameter"]), (0.995, row), (0, -11.5), xycoords=("axes fraction", "data"),
                      textcoords="offset points", ha="right", va="center", color=theme.muted, fontsize=7)  # fmt: skip
        beside(axes, row, difference(worst["relative_l2"]), colour if wrong else theme.text)
        beyond += [name] if wrong else []
        told.append(f"{name} {difference(worst['relative_l2'])} ({worst['parameter']})")
    name_rows(axes, theme, names)
    title = (
        f"Gradients of {listed(beyond)} are beyond tolerance" if beyond else "Every gradient is within its tolerance"
    )
    label(axes, theme, "relative L2 distance by parameter; bar: tolerance; named: the worst")
    return head(figure, theme, titled(title, series.scope(run)), f"Worst parameters: {'; '.join(told)}.")


def losses(run: Records, theme: Theme = LIGHT) -> Picture:
    """Loss of the same training steps by member, and how far each is from the reference's."""
    frame = series.table(run, "curves").dropna(subset=["step", "loss"])
    names = series.ordered(run, frame["member"])
    if not names:
        return leave_empty(*blank("loss-curves", theme, of_many=True), theme, "No training steps were compared.")
    figure, (upper, lower) = panels("loss-curves", theme, 2, 1, sharex=True, height_ratios=[2, 5])
    tall(figure, len(names) + 2, 0.27, least_in=HEIGHT_IN)
    found = {name: frame[frame["member"] == name].sort_values("step") for name in names}
    base = found[names[0]].dropna(subset=["reference_loss"])
    upper.plot(base["step"], base["reference_loss"], color=theme.text, linewidth=3, alpha=0.35)
    lines = {name: (part["loss"] - part["reference_loss"]).abs() for name, part in found.items()}
    truth = (base["truth_loss"] - base["reference_loss"]).abs()
    zero = powers(lower.yaxis, [*(value for line in lines.values() for value in line), *truth.dropna()], 4)
    line = NAME_IN / ((figure.get_figheight() - 1.2) * 5 / 7)  # of the lower axes
    ends = list[End]()
    for place, (name, part) in enumerate(found.items()):
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
    told = "; ".join(f"{name} {difference(value)}" for name, value in last.items())
    return head(
        figure, theme, titled(title, series.scope(run)), f"Distance from the reference's loss at the last step: {told}."
    )
