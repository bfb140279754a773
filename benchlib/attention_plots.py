"""The picture of attention kernels side by side: how far each is from the truth and from the math kernel."""

import textwrap

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from benchlib import parity_series as series
from benchlib.curves import Records
from benchlib.parity_axes import LINES, label, listed, powers, tall, titled
from benchlib.parity_series import difference
from benchlib.picture import LIGHT, Picture, Theme, blank, head, leave_empty, panels

NAME = "attention-kernels"
KERNELS = ("math", "flash", "efficient", "cudnn")
MARKERS = ("o", "s", "^", "D", "v")
MOST_LENGTHS = 6


def kernels(run: Records, theme: Theme = LIGHT) -> Picture:
    """Largest error of each attention kernel by length and type: against fp64, and against the math kernel.

    Of the inputs with the smallest scale: peaked ones are in the table.
    """
    frame = series.table(run, "attention")
    ran = frame[(frame["status"] != "SKIPPED") & (frame["length"] > 0) & frame["max_abs_truth"].notna()]
    if ran.empty:
        missing = textwrap.fill(lacking(frame) or "No attention kernels were compared.", 56, max_lines=6)
        return leave_empty(*blank(NAME, theme, of_many=True), theme, missing)
    figure, (left, right) = panels(NAME, theme, 1, 2, sharey=True)
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
        right.text(
            0.5, 0.5, "nothing beside math ran", ha="center", color=theme.muted, fontsize=9, transform=right.transAxes
        )
    missing = lacking(frame)
    _legend(figure, theme, colours, types, missing)
    title = titled(_finding(worst, names), "random inputs")
    told = "; ".join(
        f"{row['kernel']} {row['dtype']} {difference(row['max_abs_truth'])} at {row['length']:.0f} tokens"
        for row in series.rows(worst.sort_values("length").groupby(["kernel", "dtype"], sort=False).tail(1))
    )
    return head(figure, theme, title, f"Largest errors against fp64: {told}. {missing}".strip())


def _lengths(axes: Axes, lengths: pd.Series) -> None:
    known = sorted(set(lengths))
    axes.set_xscale("log", base=2)
    step = -(-len(known) // MOST_LENGTHS)
    kept = known[::-1][::step]
    axes.set_xticks(kept, [f"{length:,.0f}" for length in kept])
    axes.set_xlim(known[0] / 1.4, known[-1] * 1.4)
    axes.minorticks_off()


def _legend(figure: Picture, theme: Theme, colours: dict[str, str], types: list[str], missing: str) -> None:
    """Write what colours and lines stand for, under what is missing."""
    lines = [Line2D([], [], color=colour, linewidth=4, label=name) for name, colour in colours.items()]
    lines += [
        Line2D([], [], color=theme.muted, linewidth=1.5, linestyle=LINES[place % len(LINES)], label=name, markersize=4.5,
               marker=MARKERS[place % len(MARKERS)])
        for place, name in enumerate(types)
    ]  # fmt: skip
    note = "\n".join(textwrap.wrap(missing, 92, max_lines=3, placeholder=" …"))
    legend = figure.legend(handles=lines, frameon=False, fontsize=8.5, labelcolor=theme.text, ncols=min(6, len(lines)),
                           loc="outside lower center", handlelength=2.2, title=note or None, title_fontsize=7.5)  # fmt: skip
    legend.get_title().set_color(theme.muted)


def lacking(frame: pd.DataFrame) -> str:
    """Name the kernels (and types) that ran in no case and those that broke, with their reasons; '' where there are none."""
    where = ", ".join(dict.fromkeys(frame["device"])) or "this device"
    nowhere = frame.groupby(["kernel", "dtype"])["status"].transform(lambda status: (status == "SKIPPED").all())
    told = [
        f"{names}{f' ({reason})' if reason else ''}" for reason, names in _by_reason(frame[nowhere.astype(bool)], frame)
    ]
    broke = [f"{names} ({reason})" for reason, names in _by_reason(frame[frame["status"] == "FAIL"], frame)]
    parts = [f"Not on {where}: {'; '.join(told)}."] * bool(told) + [f"Failed: {'; '.join(broke)}."] * bool(broke)
    return " ".join(parts)


def _by_reason(part: pd.DataFrame, frame: pd.DataFrame) -> list[tuple[str, str]]:
    """Return (reason, kernels): a kernel with the types that are meant, where it is not all of them."""
    found: dict[str, list[str]] = {}
    for kernel, rows in part.groupby("kernel", sort=False):
        types = list(dict.fromkeys(rows["dtype"]))
        every = len(types) == frame.loc[frame["kernel"] == kernel, "dtype"].nunique()
        reason = str(rows["reason"].iloc[0]).strip().rstrip(".")
        found.setdefault(reason, []).append(str(kernel) if every else f"{kernel} in {listed(types)}")
    return [(reason, listed(names)) for reason, names in found.items()]


def _finding(worst: pd.DataFrame, names: list[str]) -> str:
    others = [name for name in names if name != "math"]
    apart = worst[worst["kernel"].isin(others)].dropna(subset=["max_abs_math"])
    if apart.empty:
        return "Only the math kernel ran here" if names == ["math"] else "Errors of the attention kernels"
    far = series.rows(apart.sort_values("max_abs_math").tail(1))[0]
    return f"{far['kernel']} is at most {difference(far['max_abs_math'])} from math ({far['dtype']}, {far['length']:,.0f} tokens)"
