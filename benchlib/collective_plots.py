"""Pictures of the bandwidth of collectives: by size beside the measured limits, and the share of each limit."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from benchlib import collective_series as series
from benchlib.bandwidth import NO_LIMIT
from benchlib.byte_axis import End, name_ends, plain_numbers, size_axis
from benchlib.collective_series import ROOTED, TOGETHER, share_text, words
from benchlib.collectives.sizes import size_text
from benchlib.curves import Records
from benchlib.metrics import quantity
from benchlib.picture import LIGHT, Picture, Theme, blank, finish, leave_empty

DASHES = {"memory copy": (0, (1, 1.5)), "claimed link": (0, (6, 3))}
SOCKET = (0, (4, 1.5, 1, 1.5))
NO_BANDWIDTH = "No bandwidth between ranks was measured: one rank exchanges nothing."
MOST_BARS = 12


def bandwidth(run: Records, theme: Theme = LIGHT) -> Picture:
    """Bus bandwidth by size of the operations in which all ranks send at once, beside the limits of the same run."""
    limits = ("memory copy", "tcp socket all ranks", "claimed link")
    return _bandwidth(run, theme, "collective-bandwidth", TOGETHER, limits)


def rooted_bandwidth(run: Records, theme: Theme = LIGHT) -> Picture:
    """Bus bandwidth by size of the operations with one source or target, beside the limits of the same run."""
    limits = ("memory copy", "tcp socket one way", "claimed link")
    return _bandwidth(run, theme, "rooted-bandwidth", ROOTED, limits)


def _bandwidth(run: Records, theme: Theme, name: str, operations: Sequence[str], limits: Sequence[str]) -> Picture:
    figure, axes = blank(name, theme, of_many=True)
    found = {key: frame for key, frame in series.lines(run, "busbw_gbps").items() if key[0] in operations}
    found = {key: frame for key, frame in found.items() if key[1] in ("library", "direct")}
    if not found:
        return leave_empty(figure, axes, theme, NO_BANDWIDTH)
    colours = dict(zip(operations, theme.series, strict=False))
    ends, sizes, wrong = list[End](), set[float](), dict.fromkeys(series.wrong(run), ", wrong")
    for (operation, variant), frame in sorted(found.items(), key=lambda item: operations.index(item[0][0])):
        style = "-" if variant == "library" else (0, (3, 1.2))
        axes.plot(frame["bytes"], frame["value"], color=colours[operation], linewidth=1.8, marker="o", markersize=3.5,
                  linestyle=style)  # fmt: skip
        ends.append(_end(frame, words(operation, variant) + wrong.get((operation, variant), ""), colours[operation]))
        sizes |= set(frame["bytes"])
    foreign, stated = _of_others(axes, run, colours)
    ends += foreign
    size_axis(axes, sizes | stated)
    ends += _limits(axes, theme, series.bounds(run), limits)
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)
    axes.margins(y=0.06)
    name_ends(axes, theme, ends)
    (operation, variant), top = max(
        ((key, row) for key, frame in found.items() for row in series.rows(frame)), key=lambda item: item[1]["value"]
    )
    title = f"{_upper(words(operation, variant))} reaches {quantity(top['value'])} Gbps at {size_text(top['bytes'])}"
    if wrong:
        title += f"; {len(wrong)} operation{'s' * (len(wrong) > 1)} with wrong results"
    told = "; ".join(f"{end.words} {quantity(end.y)}" for end in sorted(ends, key=lambda end: -end.y))
    return finish(figure, axes, theme, title, "bytes of the larger side", "bus bandwidth (Gbps)",
                  f"Gbps at the largest size: {told}.")  # fmt: skip


def _end(frame: pd.DataFrame, label: str, colour: str, column: str = "value") -> End:
    last = frame.iloc[-1]
    return End(float(last["bytes"]), float(last[column]), label, colour)


def _limits(axes: Axes, theme: Theme, bounds: dict[str, pd.DataFrame], wanted: Sequence[str]) -> list[End]:
    """Draw the limits as grey lines; one that holds for any size reaches over the whole axis."""
    low, high = axes.get_xlim()
    ends = []
    for name in wanted:
        frame = bounds.get(name)
        if frame is None:
            continue
        frame = frame[frame["bytes"].between(low, high)] if frame["bytes"].notna().any() else frame
        if frame.empty:
            continue
        x, y = frame["bytes"], frame["gbps"]
        if len(frame) == 1:
            x, y = pd.Series([low, high]), pd.Series([float(y.iloc[0])] * 2)
        axes.plot(x, y, color=theme.muted, linewidth=1.4, linestyle=DASHES.get(name, SOCKET))
        ends.append(End(float(x.iloc[-1]), float(y.iloc[-1]), name.replace("tcp", "TCP"), theme.muted))
    return ends


def _of_others(axes: Axes, run: Records, colours: dict[str, str]) -> tuple[list[End], set[float]]:
    """Draw what a file of nccl-tests states beside the run's own lines, with crosses: it was not measured here."""
    frame = series.table(run, "nccl_tests")
    frame = frame[(frame["busbw_gbps"] > 0) & (frame["bytes"] > 0) & frame["operation"].isin(list(colours))]
    ends = []
    for operation, group in frame.groupby("operation", sort=False):
        best = group[["bytes", "busbw_gbps"]].groupby("bytes").max().reset_index()  # of in place and out of place
        colour = colours[str(operation)]
        axes.plot(best["bytes"], best["busbw_gbps"], color=colour, linewidth=1, marker="x", markersize=5, linestyle=":")
        ends.append(_end(best, f"{words(str(operation))}\nnccl-tests (claimed)", colour, "busbw_gbps"))
    return ends, set(frame["bytes"])


def shares(run: Records, theme: Theme = LIGHT) -> Picture:
    """Share of each limit that the operations reach at their largest size, with the targets as marks."""
    figure, axes = blank("limit-shares", theme, of_many=True)
    frame = series.shares(run)
    largest = frame.groupby(["operation", "variant"])["bytes"].transform("max")
    frame = frame[frame["bytes"] == largest].copy()
    frame["kind"] = ["TCP socket" if name.startswith("tcp") else name for name in frame["bound"]]
    kinds = [kind for kind in ("TCP socket", "memory copy", "claimed link") if kind in set(frame["kind"])]
    if not kinds:
        return leave_empty(figure, axes, theme, "No operation was measured beside a limit.")
    first = frame[frame["kind"] == kinds[0]].sort_values("share", ascending=False)
    cases = list(dict.fromkeys(zip(first["operation"], first["variant"], strict=True)))[:MOST_BARS]
    # A limit that only some of the operations have a share of would look like a bandwidth of zero.
    covered = {kind: set(zip(part["operation"], part["variant"], strict=True)) for kind, part in frame.groupby("kind")}
    kinds = [kind for kind in kinds if set(cases) <= covered[kind]]
    thick, paper = (
        0.8 / len(kinds),
        {"facecolor": theme.card, "alpha": 0.8 * (len(kinds) == 1), "linewidth": 0, "pad": 0.3},
    )
    for number, kind in enumerate(kinds):
        part = (
            frame[frame["kind"] == kind].drop_duplicates(["operation", "variant"]).set_index(["operation", "variant"])
        )
        for row, case in enumerate(cases):
            item, place = part.loc[case], row + (number - (len(kinds) - 1) / 2) * thick
            axes.barh(place, item["share"], height=thick * 0.88, color=theme.series[number])
            axes.annotate(share_text(item["share"]), (item["share"], place), (3, 0), textcoords="offset points", va="center",
                          color=theme.text, fontsize=7.5, bbox=paper)  # fmt: skip
            if item["target"] > 0:
                axes.plot([item["target"]] * 2, [place - thick / 2, place + thick / 2], color=theme.text, linewidth=2)
    axes.axvline(1, color=theme.muted, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(cases)), [f"{words(*case)}" for case in cases])
    axes.set_ylim(len(cases) - 0.4, -0.6)
    longest = float(frame["share"].max())
    axes.set_xlim(0, (1.35 if longest > NO_LIMIT else 1.15) * max(1.0, longest))  # with room for what stands behind it
    axes.grid(False)
    axes.grid(axis="x", color=theme.grid, linewidth=0.8)
    marks = [Line2D([], [], color=theme.series[number], linewidth=6, label=kind) for number, kind in enumerate(kinds)]
    aimed = frame.dropna(subset=["target"])
    if len(aimed):
        marks.append(
            Line2D([], [], color=theme.text, linewidth=2, linestyle="none", marker="|", markersize=10, label="target")
        )
    figure.legend(
        handles=marks,
        frameon=False,
        fontsize=8.5,
        labelcolor=theme.text,
        ncols=4,
        loc="outside lower center",
        handlelength=1,
    )
    met = int((aimed["share"] >= aimed["target"]).sum())
    best = first.iloc[0]
    title = _upper(words(best["operation"], best["variant"]))
    if best["share"] > NO_LIMIT:
        title += f" is {best['share']:.2f} × as fast as the {kinds[0]}, which is no limit here"
    else:
        title += f" reaches {share_text(best['share'])} of the {kinds[0]}"
    if len(aimed):
        title += f"; {met} of {len(aimed)} targets met"
    sizes = sorted(set(frame["bytes"]))
    at = size_text(sizes[0]) if len(sizes) == 1 else f"{size_text(sizes[0])} to {size_text(sizes[-1])}"
    told = ", ".join(
        f"{words(row['operation'], row['variant'])} {share_text(row['share'])} of {row['bound'].replace('tcp', 'TCP')}"
        for row in series.rows(frame)
    )
    return finish(figure, axes, theme, title, f"bus bandwidth / limit at the largest size ({at})", "", f"{told}.", 40)


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
