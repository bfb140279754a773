"""What people see of a history: pictures of trends, machines and curves, then what its notebook shows of a store."""

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
from matplotlib.ticker import FuncFormatter, MaxNLocator

import benchlib
from benchlib.core.text import UNITS, look, quantity, seconds
from benchlib.judge.trends import History, Trend, label, spanned
from benchlib.results import frames
from benchlib.results.record import Record
from benchlib.results.run import Run
from benchlib.show import lines
from benchlib.show.figures import (
    LIGHT,
    WIDTH_IN,
    Picture,
    Theme,
    blank,
    finish,
    leave_empty,
)
from benchlib.show.lines import describe_change

MOST_DAYS = 6  # days written along the axis of a trend
OVERLAID = 6  # runs with a colour of their own
PICTURES = 6  # trends drawn, those with changes first
DESCRIBED = 5  # changes described in words
ROWS = 200  # of a table
MARKERS = {"worse": "v", "better": "^", "other": "D"}


def trend(shown: Trend, theme: Theme = LIGHT, runs: Sequence[Record] = ()) -> Picture:
    """A metric over the runs of its series: band, level, changes and the runs outside. ``runs`` get a ring."""
    figure, axes = blank("trend", theme)
    places = range(len(shown.values))
    for level in shown.levels.levels:
        ends = (level.start - 0.5, level.end - 0.5)
        axes.fill_between(ends, level.low, level.high, color=theme.series[0], alpha=0.14, linewidth=0)
        axes.plot(ends, (level.median, level.median), color=theme.series[0], linewidth=1.2, alpha=0.8)
    many = len(shown.values) > 120
    axes.plot(places, shown.values, ".", color=theme.series[0], markersize=3 if many else 6, alpha=0.5 if many else 1)
    _cross_outside(axes, shown, theme, many)
    _mark_changes(axes, shown, theme)
    picked = {run.path for run in runs}
    rings = [index for index, run in enumerate(shown.runs) if run.path in picked]
    axes.plot(rings, [shown.values[i] for i in rings], "o", mfc="none", mec=theme.text, markersize=10, linestyle="none")
    _days_below(axes, shown.runs)
    unit = UNITS.get(shown.unit, shown.unit)
    if unit == "FLOP/s":  # as the values are written elsewhere: with the prefix that fits
        unit = quantity(shown.levels.levels[-1].median, unit).split()[-1]
        scale = {"G": 1e9, "T": 1e12, "P": 1e15}.get(unit[0], 1e6)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / scale:.4g}"))
    axes.margins(y=0.14)
    place = f"{shown.last.benchmark}, {shown.last.tier}, {shown.last.hardware}"
    axis = f"run of {place[:60]}, n = {len(shown.values):,}"
    return finish(
        figure, axes, theme, _title(shown), axis, f"{shown.label} ({unit})" if unit else shown.label, _words(shown)
    )


def _cross_outside(axes: Axes, shown: Trend, theme: Theme, many: bool) -> None:
    values = [shown.values[index] for index in shown.outside]
    axes.plot(shown.outside, values, "x", color=theme.series[4], markersize=5 if many else 8, markeredgewidth=1.6)


def _mark_changes(axes: Axes, shown: Trend, theme: Theme) -> None:
    colours = {"worse": theme.series[1], "better": theme.series[2], "other": theme.muted}
    for number, change in enumerate(shown.changes[-6:]):
        at, colour = change.index - 0.5, colours[change.word]
        axes.axvline(at, color=colour, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.plot(
            [at], [1.0], marker=MARKERS[change.word], color=colour, transform=axes.get_xaxis_transform(), clip_on=False
        )
        ratio = f"× {change.ratio:.3g}" if change.ratio is not None else "changed"
        cause = f"{change.factors[0][0]} {change.factors[0][2]}" if change.factors else "nothing recorded"
        right = change.index > 0.7 * len(shown.values)
        axes.annotate(
            f"{ratio}, {change.run.moment:%Y-%m-%d}\n{cause[:22]}",
            (at, 0.97 - 0.14 * (number % 3)),
            (-4 if right else 4, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="right" if right else "left",
            va="top",
            color=colour,
            fontsize=8.5,
            bbox={"facecolor": theme.card, "alpha": 0.8, "linewidth": 0, "pad": 1},
        )  # fmt: skip


def _days_below(axes: Axes, runs: Sequence[Record]) -> None:
    """Write the day at the first run of a day, as many as fit; runs of one day get their time."""
    moments = [run.moment for run in runs]
    pattern = "%Y-%m-%d" if len({moment.date() for moment in moments}) > 1 else "%H:%M"
    texts = [moment.strftime(pattern) for moment in moments]
    apart, shown = len(runs) / MOST_DAYS, list[int]()
    for index, text in enumerate(texts):
        if (index == 0 or text != texts[index - 1]) and (not shown or index - shown[-1] >= apart):
            shown.append(index)
    axes.set_xticks(shown, [texts[i] for i in shown])
    axes.set_xlim(-0.8, len(runs) - 0.2)


def _title(shown: Trend) -> str:
    level = shown.levels.levels[-1]
    if shown.changes:
        change = shown.changes[-1]
        size = f" × {change.ratio:.3g}" if change.ratio is not None else ""
        return f"{shown.label}: {'changed' if change.word == 'other' else change.word},{size}"
    if level.low == level.high:
        return f"{shown.label}: too few runs for a band"
    return f"{shown.label}: no change in {len(shown.values):,} runs"


def _words(shown: Trend) -> str:
    level = shown.levels.levels[-1]
    band = f"Band of 95%: {spanned(level.low, level.high, shown.unit)}. " if level.low < level.high else ""
    changes = "".join(f"{describe_change(change, shown.unit)}. " for change in shown.changes)
    return f"{len(shown.values)} runs. {band}{changes}{len(shown.outside)} outside the band."


def machines(runs: Sequence[Record], theme: Theme = LIGHT) -> Picture:
    """Machines as lanes: stretches of equal versions as bars, the verdict of each run as its sign."""
    figure, axes = blank("machines", theme)
    shown, others = lines.lanes(runs)
    if not shown:
        return leave_empty(figure, axes, theme, "No run says on which machine it ran.")
    # matplotlib counts days; a minute keeps an axis where all runs began at once.
    start, end = (float(date2num(run.moment.replace(tzinfo=None))) for run in (runs[0], runs[-1]))  # type: ignore[no-untyped-call]
    span = max(end - start, 1 / 1440)
    figure.set_size_inches(WIDTH_IN, 0.9 + 0.6 * len(shown))
    colours = {"good": theme.series[2], "bad": theme.series[1]}
    for row, lane in enumerate(shown):
        for number, item in enumerate(lane.stretches):
            left, width = start + item.left * span, max(item.width, 0.006) * span
            axes.barh(row + 0.16, width, left=left, height=0.3, color=theme.series[0], alpha=(0.35, 0.16)[number % 2])
            if item.width > 0.16:
                axes.text(
                    left,
                    row + 0.16,
                    " " + item.versions[: int(90 * item.width)],
                    va="center",
                    fontsize=7.5,
                    color=theme.text,
                )
        for place, word, _ in lane.marks:
            axes.text(start + place * span, row - 0.2, look(word).mark, ha="center", va="center", fontsize=9,
                      color=colours.get(look(word).tone, theme.series[4]), family="DejaVu Sans")  # fmt: skip
        axes.text(
            start,
            row + 0.36,
            f"{lane.label[:70]} ({len(lane.runs):,} runs)",
            fontsize=8.5,
            color=theme.text,
            va="bottom",
        )
    axes.set_yticks([])
    axes.set_ylim(-0.5, len(shown) - 0.5 + 0.25)
    axes.set_xlim(start - 0.02 * span, start + 1.04 * span)
    axes.grid(False)
    axes.xaxis_date()
    locator = AutoDateLocator(maxticks=6)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, show_offset=False))
    count = len(shown) + others
    title = f"{len(runs):,} runs on {count} machine{'s' * (count > 1)}"
    days = " to ".join(dict.fromkeys(run.moment.strftime("%Y-%m-%d") for run in (runs[0], runs[-1])))
    return finish(
        figure,
        axes,
        theme,
        title,
        f"{days}; ✓ PASS, ✗ FAIL, ! DAMAGED: the worst at each place",
        "",
        "; ".join(lane.description for lane in shown),
    )


def _loss(run: Run) -> tuple[pd.Series, pd.Series]:
    frame = frames.steps(run)[["step", "loss"]].dropna()
    return frame["step"], frames.smooth(frame["loss"]) if len(frame) else frame["loss"]


def _throughput(run: Run) -> tuple[pd.Series, pd.Series]:
    frame = frames.throughput(run)
    return frame["step"], frames.smooth(frame["samples_per_s"]) if len(frame) else frame["samples_per_s"]


def _step_times(run: Run) -> tuple[pd.Series, pd.Series]:
    values = frames.step_times(run).sort_values(ignore_index=True)
    return values, (values.index.to_series() + 1) / max(1, len(values))


# Curves of a run: words, axes, and the pair of series that is drawn.
CURVES: dict[str, tuple[str, str, str, Callable[[Run], tuple[pd.Series, pd.Series]]]] = {
    "loss": ("Loss", "step", "loss (moving average)", _loss),
    "throughput": ("Throughput", "step", "samples per second (moving average)", _throughput),
    "step times": (
        "Step times",
        "step time of the slowest rank (s)",
        "share of steps that took no longer",
        _step_times,
    ),
}


def overlay(curve: str, runs: Sequence[tuple[str, Run]], theme: Theme = LIGHT) -> Picture:
    """One curve of several runs, overlaid, each with its name; more than six share the muted colour."""
    title, x, y, series = CURVES[curve]
    figure, axes = blank("overlay", theme)
    drawn: list[str] = []
    for name, run in runs:
        across, up = series(run)
        if len(up) == 0:
            continue
        colour = theme.series[len(drawn)] if len(drawn) < OVERLAID else theme.muted
        style = ("-", "--", ":", "-.")[len(drawn) % 4]
        axes.plot(
            across, up, color=colour, linestyle=style, linewidth=1.8, marker="." if len(up) < 40 else "", label=name
        )
        drawn.append(
            f"{name} ends at {quantity(float(up.iloc[-1]))}"
            if curve != "step times"
            else f"{name}: median {seconds(float(across.median()))}"
        )
    if not drawn:
        words = "No run is picked." if not runs else f"None of the picked runs recorded its {title.lower()}."
        return leave_empty(figure, axes, theme, words)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.legend(fontsize=8, frameon=False, labelcolor=theme.text)
    return finish(
        figure, axes, theme, f"{title} of {len(drawn)} run{'s' * (len(drawn) > 1)}", x, y, "; ".join(drawn[:OVERLAID])
    )


# What the notebook shows, by `session`.


def asked(past: History) -> dict[str, str]:
    """Return the filters, and the store."""
    filters = {name: value or "all" for name, value in vars(past.asked).items()}
    store = "the demo runs of the kit, since no run is stored yet" if past.demo else past.store.name
    return filters | {"metric": past.asked.metric or "key numbers", "store": store}


def tables(past: History) -> dict[str, list[dict[str, Any]]]:
    """Return the series, and what happened in them, the newest first."""
    return {
        "series": summary(past),
        "changes of level": _newest(changes(past)),
        "regressions": _newest(regressions(past)),
        "excluded runs": _newest(excluded(past)),
    }


def _newest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["when"], reverse=True)[:ROWS]


def figures(past: History) -> dict[str, Callable[[], list[Picture]]]:
    """Return the trends, those with changes first, then one of each series in turn; and the machines as lanes."""
    return {
        "trends": lambda: [trend(item) for item in _informative(past)[:PICTURES]],
        "machines": lambda: [machines(past.runs)],
    }


def summary(past: History) -> list[dict[str, Any]]:
    """Return the series: how many runs, from when to when, and how their runs ended."""
    rows = [
        {
            "series": f"{members[-1].benchmark}, {members[-1].tier}, {members[-1].backend}",
            "machine": members[-1].hardware, "ranks": members[-1].ranks, "runs": len(members),
            "first": members[0].moment.strftime("%Y-%m-%d %H:%M"), "last": members[-1].moment.strftime("%Y-%m-%d %H:%M"),
            "newest verdict": members[-1].word,
        }
        for members in past.series
    ]  # fmt: skip
    return rows


def _informative(past: History) -> list[Trend]:
    seen: dict[str, int] = {}
    ranked: list[tuple[bool, bool, int, int, Trend]] = []
    for trend in past.trends:
        turn = seen[trend.last.series] = seen.get(trend.last.series, 0) + 1
        # Quality hardly ever moves; where nothing changed, the numbers that scatter tell more.
        ranked.append((not trend.changes, trend.levels.spread < 0.002, turn, len(ranked), trend))
    return [item[-1] for item in sorted(ranked, key=lambda item: item[:-1])]


def changes(past: History) -> list[dict[str, Any]]:
    """Return the changes of level."""
    rows = [
        {
            "when": change.run.moment.strftime("%Y-%m-%d %H:%M"), "run": change.run.run, "metric": trend.label,
            "before": quantity(change.before, trend.unit), "after": quantity(change.after, trend.unit),
            "ratio": "" if change.ratio is None else f"{change.ratio:.3g}", "is": change.word,
            "what changed with it": "; ".join(f"{name}: {old} → {new}" for name, old, new in change.factors) or "nothing recorded",
        }
        for trend in past.trends
        for change in trend.changes
    ]  # fmt: skip
    return rows


def regressions(past: History) -> list[dict[str, Any]]:
    """Return the regressions against an accepted run that the runs themselves found."""
    rows = [
        {"when": run.moment.strftime("%Y-%m-%d %H:%M"), "run": run.run, "metric": label(metric), "reason": reason}
        for run in past.runs
        if not run.planted
        for metric, reason in run.failed()
    ]
    return rows


def excluded(past: History) -> list[dict[str, Any]]:
    """Return the runs that are excluded from the trends, with the reason."""
    rows = [
        {"when": run.moment.strftime("%Y-%m-%d %H:%M"), "run": run.run, "verdict": run.word, "reason": why}
        for run, why in past.excluded
    ]
    return rows


def reading(past: History) -> list[str]:
    """Return what the past says."""
    moved = [(trend, change) for trend in past.trends for change in trend.changes]
    words = [f"{len(past.runs):,} of {past.stored:,} stored runs in {len(past.series)} series."]
    if past.demo:
        words.insert(
            0, "These are the demo runs of the kit: no run is stored yet. `benchlib run quick` makes the first."
        )
    for trend in (trend for trend in past.trends if trend.levels.free >= 4 and trend.levels.spread >= 0.002):
        spread = f"{trend.levels.spread:.1%}" if trend.levels.ratio else quantity(trend.levels.spread, trend.unit)
        if trend.label in ("Training throughput", "Step time"):
            words.append(f"{trend.label} of {trend.last.benchmark}, {trend.last.tier}, {trend.last.ranks} rank{'s' * (trend.last.ranks != 1)}: one run "
                         f"scatters by {spread} about its level ({len(trend.values)} runs).")  # fmt: skip
    count = {word: sum(change.word == word for _, change in moved) for word in ("worse", "better", "other")}
    words.append(f"Changes of level: {count['worse']} worse, {count['better']} better, {count['other']} neutral.")
    newest = sorted(moved, key=lambda pair: pair[1].run.started_at, reverse=True)[:DESCRIBED]
    words += [
        f"{trend.label} of {trend.last.benchmark}, {trend.last.tier}: {describe_change(change, trend.unit)}."
        for trend, change in newest
    ]
    return words


def provenance(past: History) -> list[dict[str, str]]:
    """Return from what the history was made."""
    ends = [run.moment.strftime("%Y-%m-%d %H:%M") for run in (past.runs[0], past.runs[-1])] if past.runs else ["", ""]
    facts = {
        "store": "the demo runs of the kit" if past.demo else past.store.name,
        "runs": f"{len(past.runs):,} of {past.stored:,}",
        "from": ends[0],
        "to": ends[1],
        "read by": f"benchlib {benchlib.__version__}",
        "again": "benchlib history" + "".join(f" --set {k}={v}" for k, v in vars(past.asked).items() if v),
    }
    return [{"": name, "value": value} for name, value in facts.items()]
