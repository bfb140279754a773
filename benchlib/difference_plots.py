"""Pictures of how large the differences are: their distribution by member, and who is nearer to the truth."""

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from benchlib import parity_series as series
from benchlib.curves import Records
from benchlib.parity_axes import beside, label, listed, mark, name_rows, powers, tall, titled, tone
from benchlib.parity_series import SIGNS, difference
from benchlib.picture import LIGHT, Picture, Theme, blank, head, leave_empty

AS_CLOSE = 2.0  # factor within which a distance to the truth is the reference's own
SHOWN = 16.0  # factor from the reference's distance that the axis reaches to both sides
WIDE_ROW_IN = 0.3
SEEN = 0.002  # share of a member's values that a bin needs to widen the axis


def histograms(run: Records, theme: Theme = LIGHT) -> Picture:
    """Distribution of the differences of the logits by member, with the tolerance, and what lies beyond it."""
    figure, axes = blank("difference-histograms", theme, of_many=True)
    frame = series.table(run, "histogram").dropna(subset=["low", "high"]).query("count > 0")
    names = series.ordered(run, frame["member"])
    if not names:
        return leave_empty(figure, axes, theme, "No differences of logits were counted.")
    tall(figure, len(names), WIDE_ROW_IN)
    judged = series.table(run, "quantities").query("quantity == 'logits max difference'")
    known = {
        row["member"]: row for row in series.rows(judged) if row["member"] in names and math.isfinite(row["limit"])
    }
    # A few values far below all others would press the rest together; they are drawn where there is room for them.
    seen = frame[frame["count"] >= SEEN * frame.groupby("member")["count"].transform("sum")]
    ends = [*seen["high"], *seen.loc[seen["low"] > 0, "low"]]
    zero = powers(axes.xaxis, [*ends, *(row["limit"] for row in known.values())])
    most = series.table(run, "logits").groupby("member")["max_abs"].max()
    told = []
    for row, name in enumerate(names):
        part, verdict = frame[frame["member"] == name], known.get(name, {})
        over = verdict.get("status") == "FAIL"
        limit = verdict.get("limit", math.inf)
        word = series.word(verdict.get("status", ""), bool(verdict.get("gates", True)), True)
        for item in series.rows(part):
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
        told.append(f"{name} at most {difference(largest)}, {100 * equal:.0f} % are equal")
    name_rows(axes, theme, names)
    label(axes, theme, "|logit - the reference's|; bar: tolerance; right: the largest")
    return head(figure, theme, titled(_finding(known), series.scope(run)), f"{'; '.join(told)}.")


def _finding(known: dict[str, dict[str, Any]]) -> str:
    beyond = [name for name, row in known.items() if row["status"] == "FAIL"]
    if beyond:
        return f"Logits of {listed(beyond)} differ by more than the tolerance"
    shares = {
        name: row["value"] / row["limit"] for name, row in known.items() if row["limit"] > 0 and row["value"] >= 0
    }
    if not shares:
        return "Differences of the logits"
    near = max(shares, key=lambda name: shares[name])
    return f"Logits differ by less than the tolerance; {near} comes nearest, to {difference(shares[near])} of it"


def closeness(run: Records, theme: Theme = LIGHT) -> Picture:
    """Different or worse: each member's distance to the fp64 truth over the reference's own, case by case."""
    figure, axes = blank("different-or-worse", theme, of_many=True)
    found = {name: frame for name, frame in series.closeness(run).items() if len(frame)}
    if not found:
        return leave_empty(figure, axes, theme, "Nothing was compared with an fp64 truth.")
    tall(figure, len(found))
    verdicts = {row["member"]: row["verdict"] for row in series.rows(series.table(run, "truth"))}
    axes.set_xscale("log", base=2)
    axes.set_xlim(1 / SHOWN, SHOWN)
    axes.axvspan(1 / AS_CLOSE, AS_CLOSE, color=theme.muted, alpha=0.16, linewidth=0)
    axes.axvline(1, color=theme.text, linewidth=1.2)
    told = []
    for row, (name, frame) in enumerate(found.items()):
        ratios = frame["own"] / frame[series.REFERENCE]
        colour = {"farther": tone(theme, "FAIL"), "closer": tone(theme, "PASS")}.get(
            verdicts.get(name, ""), theme.series[0]
        )
        inside = ratios[ratios.between(1 / SHOWN, SHOWN)]
        axes.plot(inside, [row] * len(inside), "o", color=colour, markersize=5, alpha=0.6, markeredgewidth=0)
        _outside(axes, row, ratios, colour)
        worst = float(ratios.max())
        own = float(frame["own"].max())
        beside(axes, row, f"{verdicts.get(name, '')}, {difference(own)}".removeprefix(", "), colour, 8)
        told.append(f"{name} {difference(own)} ({difference(worst)} × the reference's at worst)")
    name_rows(axes, theme, list(found))
    axes.set_xticks([1 / 16, 1 / 4, 1 / 2, 1, 2, 4, 16], ["1/16", "1/4", "1/2", "1", "2", "4", "16"])
    axes.minorticks_off()
    label(axes, theme, "distance to fp64 / the reference's; right: the largest")
    farther = [name for name in found if verdicts.get(name) == "farther"]
    title = (
        f"Farther from the truth than the reference: {listed(farther)}"
        if farther
        else "No member is farther from the truth than the reference"
    )
    return head(figure, theme, titled(title, series.scope(run)),
                f"Largest distance to the fp64 truth: {'; '.join(told)}. Shaded: within a factor of 2.")  # fmt: skip


def _outside(axes: Axes, row: int, ratios: pd.Series, colour: str) -> None:
    """Point at what lies beyond the axis, with the farthest ratio in words."""
    for far, place, sign, step in (
        (ratios[ratios > SHOWN], 0.985, ">", -5),
        (ratios[ratios < 1 / SHOWN], 0.015, "<", 5),
    ):
        if not len(far):
            continue
        end = float(far.max() if sign == ">" else far.min())
        axes.plot([place], [row], sign, color=colour, markersize=5, transform=axes.get_yaxis_transform(), clip_on=False)
        axes.annotate(f"× {difference(end)}", (place, row), (step, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                      ha="right" if sign == ">" else "left", va="center", color=colour, fontsize=7.5)  # fmt: skip
