"""What people see of a history: pictures of trends and curves, then what its notebook shows of a store."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

import benchlib
from benchlib.core.stats import smoothed
from benchlib.core.text import UNITS, counted, quantity, seconds
from benchlib.judge.trends import History, Trend, judge_history
from benchlib.results.record import Record
from benchlib.results.run import Run
from benchlib.show import lines
from benchlib.show.figures import (
    DASHED,
    DPI,
    MUTED,
    SERIES,
    TEXT,
    Drawing,
    Picture,
    draw,
    note,
    placeholder,
    short_numbers,
)
from benchlib.show.light import seaborn
from benchlib.show.notebook import Shown

MAX_DAYS = 6  # written along the axis of a trend
MAX_CHANGES = 6  # marked in the picture of a trend, the newest
OVERLAID = 6  # runs with a colour of their own
PICTURES = 6  # trends drawn, those with changes first
DESCRIBED = 5  # changes described in words
ROWS = 200  # of a table
MANY = 120  # runs of a trend, which get small points
BLUE, _, _, _, AMBER, _ = SERIES
MIN_SPREAD = 0.002  # of runs about their level; numbers that scatter less say little
OF_CHANGES = {"worse": ("v", SERIES[1]), "better": ("^", SERIES[2]), "other": ("D", MUTED)}


def trend(shown: Trend, runs: Sequence[Record] = ()) -> Picture:
    """A metric over the runs of its series: band, level, changes and the runs outside. ``runs`` get a ring."""
    values, many, picked = shown.values, len(shown.values) > MANY, {run.path for run in runs}
    unit, last = UNITS.get(shown.unit, shown.unit), shown.last
    y = f"{shown.label} ({unit})" if unit else shown.label
    frame = pd.DataFrame({"run": range(len(values)), y: values, "picked": [run.path in picked for run in shown.runs]})
    frame["outside"] = frame["run"].isin(shown.outside)

    def paint(axes: Axes, frame: pd.DataFrame) -> None:
        for level in shown.levels.levels:
            ends = (level.start - 0.5, level.end - 0.5)
            axes.fill_between(ends, level.low, level.high, color=BLUE, alpha=0.14, linewidth=0)
            axes.plot(ends, (level.median, level.median), color=BLUE, linewidth=1.2, alpha=0.8)
        looks: dict[str, Any] = {"palette": {False: BLUE, True: AMBER}, "markers": {False: "o", True: "X"}}
        looks |= {"sizes": {False: 6 if many else 20, True: 40 if many else 80}, "alpha": 0.5 if many else 1}
        looks |= dict.fromkeys(("hue", "size", "style"), "outside") | {"linewidth": 0, "legend": False}
        seaborn.scatterplot(frame, x="run", y=y, ax=axes, **looks)
        for number, change in enumerate(shown.changes[-MAX_CHANGES:]):
            (marker, colour), at = OF_CHANGES[change.word], change.index - 0.5
            axes.axvline(at, color=colour, linewidth=1.2, linestyle=DASHED)
            axes.plot([at], [1.0], marker, color=colour, transform=axes.get_xaxis_transform(), clip_on=False)
            ratio = f"× {change.ratio:.3g}" if change.ratio is not None else "changed"
            cause = f"{change.factors[0][0]} {change.factors[0][2]}" if change.factors else "nothing recorded"
            words, side = f"{ratio}, {change.run.moment:%Y-%m-%d}\n{cause[:22]}", -4 if at > 0.7 * len(values) else 4
            place: Any = {"xycoords": ("data", "axes fraction"), "va": "top", "color": colour, "fontsize": 8.5}
            note(axes, words, (at, 0.97 - 0.14 * (number % 3)), (side, 0), **place)
        rings = frame[frame["picked"]]
        axes.plot(rings["run"], rings[y], "o", mfc="none", mec=TEXT, markersize=10)
        _days_below(axes, shown.runs)
        short_numbers(axes.yaxis)
        axes.margins(y=0.14)

    x = f"run of {f'{last.benchmark}, {last.tier}, {last.hardware}'[:60]}, n = {len(values):,}"
    return draw(Drawing(frame, paint, x=x, y=y, alt=lines.describe_trend(shown)), _title(shown), DPI)


def _days_below(axes: Axes, runs: Sequence[Record]) -> None:
    """Write the day at the first run of a day, as many as fit; runs of one day get their time."""
    moments = [run.moment for run in runs]
    pattern = "%Y-%m-%d" if len({moment.date() for moment in moments}) > 1 else "%H:%M"
    texts, shown = [moment.strftime(pattern) for moment in moments], list[int]()
    for index in [texts.index(text) for text in dict.fromkeys(texts)]:
        if not shown or index - shown[-1] >= len(runs) / MAX_DAYS:
            shown.append(index)
    axes.set_xticks(shown, [texts[index] for index in shown])
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


CURVES = {  # of a run: the axes
    "loss": ("step", "loss (moving average)"),
    "throughput": ("step", "samples per second (moving average)"),
    "step times": ("step time of the slowest rank (s)", "share of steps that took no longer"),
}


def _curve(curve: str, run: Run) -> pd.DataFrame:
    """Return what is drawn of a run, smoothed as the checks do: picture and verdict show the same number.

    A step that was done again counts as it was done last. Of step times it is the raw samples, or all steps if there are none.
    """
    rows = [event for event in run.events if event.get("kind") == "step" and event.get("step") is not None]
    frame = pd.DataFrame(rows, columns=pd.Index(["step", "loss", "samples", "step_s"]))
    frame = frame.apply(pd.to_numeric, errors="coerce").dropna(subset=["step"])
    frame = frame.drop_duplicates("step", keep="last").sort_values("step", ignore_index=True)
    x, y = CURVES[curve]
    if curve == "step times":
        raw = next((values for name, values in run.samples.items() if f"{name}_".startswith("step_s_")), None)
        return pd.DataFrame({x: pd.Series(raw or frame["step_s"], dtype=float).dropna()})
    speed = frame["samples"] / frame["step_s"].where(frame["step_s"] > 0)
    values = (frame["loss"] if curve == "loss" else speed).dropna()
    return pd.DataFrame({x: frame["step"][values.index], y: smoothed(values.tolist())})


def overlay(curve: str, runs: Sequence[tuple[str, Run]]) -> Picture:
    """One curve of several runs, overlaid, each with its name; more than six share the muted colour."""
    (x, y), curves = CURVES[curve], {name: _curve(curve, run) for name, run in runs}
    curves, of_times = {name: part for name, part in curves.items() if len(part)}, curve == "step times"
    if not curves:
        return placeholder("No run is picked." if not runs else f"None of the picked runs recorded its {curve}.")

    def paint(axes: Axes, frame: pd.DataFrame) -> None:
        for place, (name, part) in enumerate(frame.groupby("run", sort=False)):
            colour = SERIES[place] if place < OVERLAID else MUTED
            looks: Any = {"color": colour, "linestyle": ("-", "--", ":", "-.")[place % 4], "label": name, "ax": axes}
            more = {"y": y, "estimator": None, "marker": "." if len(part) < 40 else "", "markeredgewidth": 0}
            seaborn.ecdfplot(part, x=x, **looks) if of_times else seaborn.lineplot(part, x=x, **looks, **more)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.legend(fontsize=8)

    medians = [f"{name}: median {seconds(part[x].median())}" for name, part in curves.items()]
    ends = [f"{name} ends at {quantity(part.to_numpy()[-1, -1])}" for name, part in curves.items()]
    alt = "; ".join((medians if of_times else ends)[:OVERLAID])
    drawing = Drawing(pd.concat(curves, names=["run"]).reset_index("run"), paint, x=x, y=y, alt=alt)
    return draw(drawing, f"{curve.capitalize()} of {counted(len(curves), 'run')}", DPI)


def shown(past: History) -> Shown:
    """Return what the notebook shows: trends with changes first, then one of each series in turn."""
    store = "the demo runs of the kit" if past.demo else past.store.name
    filters = {name: value or "all" for name, value in vars(past.asked).items()}
    runs, trends = past.runs, past.trends
    facts = {
        "store": store,
        "runs": f"{len(runs):,} of {past.stored:,}",
        "from": _when(runs[0]) if runs else "",
        "to": _when(runs[-1]) if runs else "",
        "read by": f"benchlib {benchlib.__version__}",
        "again": "benchlib history" + "".join(f" --set {k}={v}" for k, v in vars(past.asked).items() if v),
    }
    series = [
        {
            "series": f"{members[-1].benchmark}, {members[-1].tier}, {members[-1].backend}",
            "machine": members[-1].hardware,
            "ranks": members[-1].ranks,
            "runs": len(members),
            "first": _when(members[0]),
            "last": _when(members[-1]),
            "newest verdict": members[-1].word,
        }
        for members in past.series
    ]
    happened = [
        {"when": _when(event.run), "run": event.run.run, "metric": event.metric, "what happened": event.text}
        for event in lines.events(trends, runs)[:ROWS]
    ]
    excluded = [
        {"when": _when(run), "run": run.run, "verdict": run.word, "reason": why}
        for run, why in past.excluded[: -ROWS - 1 : -1]
    ]
    filters |= {
        "metric": past.asked.metric or "key numbers",
        "store": store + ", since no run is stored yet" * past.demo,
    }
    tables: dict[str, list[Any]] = {"series": series, "machines": lines.machines(runs)}
    tables |= {"changes and regressions": happened, "excluded runs": excluded}
    return Shown(
        asked=filters,
        tables=tables,
        figures={"trends": lambda: [trend(item) for item in _informative(trends)[:PICTURES]]},
        reading=_reading(past),
        provenance=[{"": name, "value": value} for name, value in facts.items()],
        judge=lambda: judge_history(past),
        about=lines.about(past),
    )


def _when(run: Record) -> str:
    return run.moment.strftime("%Y-%m-%d %H:%M")


def _informative(trends: Sequence[Trend]) -> list[Trend]:
    turns, ranked = Counter[str](), list[tuple[bool, bool, int, Trend]]()
    for trend in trends:
        turns[trend.last.series] += 1
        # Quality hardly ever moves; where nothing changed, the numbers that scatter tell more.
        ranked.append((not trend.changes, trend.levels.spread < MIN_SPREAD, turns[trend.last.series], trend))
    return [trend for *_, trend in sorted(ranked, key=lambda item: item[:-1])]


def _reading(past: History) -> list[str]:
    demo = "These are the demo runs of the kit: no run is stored yet. `benchlib run quick` makes the first."
    words = [demo] * past.demo + [f"{len(past.runs):,} of {past.stored:,} stored runs in {len(past.series)} series."]
    for trend in past.trends:
        level, last = trend.levels, trend.last
        if level.free >= 4 and level.spread >= MIN_SPREAD and trend.label in ("Training throughput", "Step time"):
            spread = f"{level.spread:.1%}" if level.ratio else quantity(level.spread, trend.unit)
            work = f"{last.benchmark}, {last.tier}, {counted(last.ranks, 'rank')}"
            words.append(
                f"{trend.label} of {work}: one run scatters by {spread} about its level ({len(trend.values)} runs)."
            )
    moved = [(trend, change) for trend in past.trends for change in trend.changes]
    count = Counter(change.word for _, change in moved)
    words.append(f"Changes of level: {count['worse']} worse, {count['better']} better, {count['other']} neutral.")
    newest = sorted(moved, key=lambda pair: pair[1].run.started_at, reverse=True)[:DESCRIBED]
    return words + [
        f"{trend.label} of {trend.last.benchmark}, {trend.last.tier}: {lines.describe_change(change, trend.unit)}."
        for trend, change in newest
    ]
