"""Pictures of an inference run: latencies as cumulative curves, single queries in time, the machine over the clock of the tests."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchlib.benchmarks.inference.rules import INVALID
from benchlib.benchmarks.inference.workers import sentences
from benchlib.core.text import seconds
from benchlib.results import frames
from benchlib.results.frames import Records
from benchlib.show.figures import (
    LIGHT,
    Picture,
    Theme,
    blank,
    draw_in_flight,
    finish,
    head,
    label_rows,
    leave_empty,
    note,
    panels,
    plain_numbers,
    styled,
)
from benchlib.show.history import over_runs

# Open loops and closed ones answer different questions and are in no common picture.
OPEN, CLOSED = ("Server", "Interactive"), ("SingleStream", "MultiStream")
PANELS = 3  # tests whose requests are drawn
POINTS = 400  # of a curve: more are not seen


def _cumulative(
    name: str, kind: str, words: str, limit: str, scenarios: tuple[str, ...] = OPEN
) -> Callable[..., Picture]:
    """Return a picture of the share of queries within a time, for each test of these scenarios; with the limits drawn in."""

    @styled
    def draw(run: Records, theme: Theme = LIGHT) -> Picture:
        figure, axes = blank(name, theme)
        samples, tests = frames.readable(run, "samples") or {}, frames.table(run, "tests")
        drawn, worst = [], []
        for place, row in enumerate(tests.to_dict("records") if len(tests) else []):
            if row["scenario"] not in scenarios:
                continue
            start = f"{kind}_s_{str(row['test']).lower()}_"
            values: list[float] = next(
                (list(raw) for key, raw in samples.items() if f"{key}_".removeprefix(INVALID).startswith(start)), []
            )
            if not values:
                continue
            ordered, words_of = 1e3 * np.sort(values), f"{row['test']}, n = {len(values):,}"
            picks = np.unique(np.linspace(0, len(ordered) - 1, min(POINTS, len(ordered))).round().astype(int))
            colour, shares = theme.series[place % len(theme.series)], (picks + 1) / len(ordered) * 100
            axes.step(ordered[picks], shares, where="post", color=colour, label=words_of)
            drawn.append(str(row["test"]))
            bound = row.get(limit)
            if bound and bound == bound:
                axes.axvline(1e3 * bound, color=colour, linestyle="--", linewidth=1)
                note(axes, f"limit {1e3 * bound:g} ms", (1e3 * bound, 50), (-4, 0), fontsize=8, color=theme.muted)
                high = ordered[min(int(len(ordered) * row["percentile"] / 100), len(ordered) - 1)]
                worst.append(f"{row['test']} p{row['percentile']:g} {seconds(high / 1e3)} of {seconds(bound)}")
        if not drawn:
            return leave_empty(figure, axes, theme, f"No {words} was recorded.")
        axes.set_xscale("log")
        plain_numbers(axes.xaxis)
        axes.set_ylim(0, 101)
        axes.legend(loc="best")
        title = f"{words}: {'; '.join(worst)}" if worst else f"{words} of {', '.join(drawn)}"
        alt = "One cumulative curve for each test; dashes: limits."
        return finish(figure, axes, theme, title, "ms", "% of queries within this time", alt)

    return draw


@styled
def timeline(run: Records, theme: Theme = LIGHT) -> Picture:
    """When the fastest, the median and the slowest query of a scenario had its first and its last token."""
    figure, axes = blank("query-timeline", theme)
    frame = frames.table(run, "timeline")
    if frame.empty:
        return leave_empty(figure, axes, theme, "No query streamed its tokens.")
    for place, row in enumerate(frame.to_dict("records")):
        first, last, issued = 1e3 * row["first_s"], 1e3 * row["last_s"], max(0.0, 1e3 * row["issued_s"])
        for begin, end, colour, words in ((issued, first, 1, "to the first token"), (first, last, 0, "tokens")):
            label = "" if place else words
            axes.barh(place, end - begin, left=begin, height=0.5, color=theme.series[colour], label=label)
        note(axes, f"{row['tokens']} tokens", (last, place), (4, 0), fontsize=8)
    label_rows(axes, [f"{row['scenario']}, {row['query']}" for row in frame.to_dict("records")])
    axes.set_xlim(0, 1.18e3 * float(frame["last_s"].max()))
    axes.legend(loc="upper right")
    slowest = frame.nlargest(1, "last_s").iloc[0]
    axes.set_xlabel("ms from the start of the query")
    title = f"Slowest query ({slowest['scenario']}): {seconds(slowest['last_s'])}, first token after {seconds(slowest['first_s'])}"
    if slowest.get("attempt", 1) > 1:  # runs of before have no such column
        title += f", sent {slowest['attempt']:.0f} times: the first token is the first that came"
    return head(figure, theme, title, "Bars: waiting for the first token, then tokens.")


@styled
def machine(run: Records, theme: Theme = LIGHT) -> Picture:
    """Processor, memory and device over the clock of the run, with the tests as shaded spans."""
    figure, axes = blank("machine-over-time", theme)
    events, tests = frames.readable(run, "events") or [], frames.table(run, "tests")
    readings = [event for event in events if event.get("kind") == "sensor"]
    if len(readings) < 2 or tests.empty:
        return leave_empty(figure, axes, theme, "No sensor was read during the tests.")
    zero = float(readings[0]["t"])

    def line(field: str) -> list[tuple[float, float]]:
        return [(event["t"] - zero, event[field]) for event in events if isinstance(event.get(field), (int, float))]

    memory, shown = line("rss_bytes"), 0
    most = max((value for _, value in memory), default=0)
    lines = {"processor, % of one core": line("cpu_percent")}
    if run.result.backend != "cpu":  # there the device is the processor
        lines["device, % utilised"] = line("utilization_percent")
    lines["memory of the test, % of its most"] = [(time, 100 * value / most) for time, value in memory]
    for place, (words, pairs) in enumerate(lines.items()):
        if len(pairs) > 1:
            axes.plot(*zip(*pairs, strict=True), label=words, color=theme.series[place % len(theme.series)])
            shown += 1
    for row in tests.to_dict("records"):
        if row.get("began") and row.get("ended"):
            axes.axvspan(row["began"] - zero, row["ended"] - zero, alpha=0.12, color=theme.muted, linewidth=0)
            looks: dict[str, Any] = {"fontsize": 8, "rotation": 90, "color": theme.muted, "cover": 1}
            at = ((row["began"] + row["ended"]) / 2 - zero, 0.02)
            note(axes, str(row["test"]), at, (0, 1), xycoords=axes.get_xaxis_transform(), **looks)
    if not shown:
        return leave_empty(figure, axes, theme, "No sensor gave two values.")
    axes.set_ylim(0, 1.35 * axes.get_ylim()[1])  # room for the legend above the lines
    axes.legend(loc="upper right")
    title = "The machine over the clock of the tests"
    return finish(figure, axes, theme, title, "s from the first reading", "%", "Shaded: tests.")


@styled
def in_flight(run: Records, theme: Theme = LIGHT) -> Picture:
    """Requests that each worker had in the tests that lost one, else in the first ones; marks where they were sent again."""
    frame = frames.typed(run, "inflight", {"test": "", "t_s": 0.0, "worker": 0.0, "open": 0.0})
    losses = frames.typed(run, "losses", {"test": "", "t_s": 0.0, "worker": 0.0, "event": "", "times": 0.0})
    tests = list(dict.fromkeys(frame["test"]))
    shown = ([name for name in tests if name in set(losses["test"])] or tests)[:PANELS]
    figure, drawn = panels("in-flight", theme, 1, max(1, len(shown)))
    if not shown:
        return leave_empty(figure, drawn[0], theme, "No worker was asked over a network.")
    for axes, name in zip(drawn, shown, strict=True):
        part = losses[losses["test"] == name]
        draw_in_flight(axes, theme, frame[frame["test"] == name], part)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("seconds")
    drawn[0].set_ylabel("requests in flight")
    drawn[-1].legend(fontsize=7.5, loc="upper right", ncols=2)
    again = int(losses.loc[losses["event"] == "requeued", "times"].sum())
    lost = int(((losses["event"] == "down") & (losses["t_s"] > 0)).sum())  # one that was not there is no loss
    title = f"Workers lost: {lost}, queries sent again: {again}" if len(losses) else "No worker was lost"
    return head(figure, theme, title, " ".join(sentences(run.result.tables)))


FIGURES: dict[str, Callable[..., Picture]] = {
    "first-token": _cumulative("first-token", "ttft", "time to the first token", "ttft_limit_s"),
    "time-per-token": _cumulative("time-per-token", "tpot", "time per output token", "tpot_limit_s"),
    "latency": _cumulative("latency", "latency", "end-to-end latency", "no_limit"),
    "latency-closed-loop": _cumulative(
        "latency-closed-loop", "latency", "latency in a closed loop", "no_limit", CLOSED
    ),
    "query-timeline": timeline,
    "machine-over-time": machine,
    "in-flight": in_flight,
    "over-runs": over_runs("total_s", "samples_per_s_offline"),
}
