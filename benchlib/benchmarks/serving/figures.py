"""Figures of the serving benchmark: load against latency with the knee, scaling by workers, requests in flight over a loss."""

from collections.abc import Callable
from typing import Any

from benchlib.core.text import quantity
from benchlib.results import frames
from benchlib.results.frames import Records
from benchlib.show.figures import (
    DASHED,
    LIGHT,
    Picture,
    Theme,
    blank,
    draw_in_flight,
    finish,
    head,
    leave_empty,
    log_values,
    note,
    panels,
    styled,
)
from benchlib.show.history import over_runs

TIMES = {"ttft": "first token", "tpot": "each further token"}
NUMBERS = dict.fromkeys(
    ("rate", "queries", "samples_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "concurrency", "tokens_per_s", "latency_p50_ms"), 0.0
)  # fmt: skip


def _limits(run: Records) -> dict[str, float]:
    config = frames.readable(run, "config")
    return {name: value for name in TIMES if (value := getattr(config, f"{name}_ms", None))}


@styled
def load_latency(run: Records, theme: Theme = LIGHT) -> Picture:
    """Open loop: p50 and p99 of both times over the rate that was sent, the limits, and the knee."""
    figure, axes = panels("load-latency", theme, 1, 2, sharex=True)
    frame = frames.typed(run, "load", {"phase": "", "why": "", "client": "", **NUMBERS}).sort_values("rate")
    frame = frame[frame["client"] == ""]
    if frame.empty:
        axes[1].set_axis_off()
        return leave_empty(figure, axes[0], theme, "No rate was measured with a client on time.")
    knee = frame[(frame["phase"] == "confirmation") & (frame["why"] == "")]
    points = frame[frame["phase"] != "confirmation"]
    limits = _limits(run)
    for drawn, (name, words) in zip(axes, TIMES.items(), strict=True):
        for part, looks, colour in ((99, "-", theme.series[1]), (50, "-", theme.series[0])):
            drawn.plot(points["rate"], points[f"{name}_p{part}_ms"], looks, marker="o", color=colour, label=f"p{part}")
        missed = frame[frame["why"] != ""]
        drawn.plot(missed["rate"], missed[f"{name}_p99_ms"], "x", color=theme.text, markersize=7, label="limits missed")
        log_values(drawn, 0.15)
        if name in limits:
            drawn.axhline(limits[name], color=theme.muted, linestyle=DASHED, linewidth=1)
            at: dict[str, Any] = {
                "xycoords": ("axes fraction", "data"),
                "ha": "left",
                "fontsize": 7.5,
                "color": theme.muted,
            }
            note(drawn, f"limit {limits[name]:g} ms", (0.02, limits[name]), (0, 3), **at)
        if len(knee):
            drawn.axvline(float(knee["rate"].iloc[-1]), ymax=0.75, color=theme.series[2], linewidth=1.2, label="knee")
        drawn.set_xlim(left=0)
        low, high = drawn.get_ylim()
        drawn.set_ylim(low, high * (high / low) ** 0.4)  # room for the legend above all curves
        drawn.set_title(words, fontsize=9)
        drawn.set_xlabel("queries/s sent")
    axes[0].set_ylabel("ms")
    axes[1].legend(fontsize=7.5, loc="upper center", ncols=2)
    if len(knee):
        last = knee.iloc[-1]
        title = f"Both limits hold up to {quantity(last['rate'])} queries/s"
        alt = f"At it TTFT p99 is {last['ttft_p99_ms']:.0f} ms and TPOT p99 {last['tpot_p99_ms']:.1f} ms, of {last['queries']:.0f} queries."
    else:
        title, alt = "No rate met both limits in the longer run", ""
    values = "; ".join(
        f"{row['rate']:.3g}/s: TTFT p99 {row['ttft_p99_ms']:.0f} ms, TPOT p99 {row['tpot_p99_ms']:.1f} ms"
        for _, row in points.iterrows()
    )
    return head(figure, theme, title, f"{alt} Sweep, open loop: {values}.")


@styled
def concurrency(run: Records, theme: Theme = LIGHT) -> Picture:
    """Closed loop: throughput against the time that a user waits, a point for each concurrency."""
    figure, axes = blank("concurrency", theme, of_many=True)
    frame = frames.typed(run, "closed", NUMBERS).sort_values("concurrency")
    if frame.empty:
        return leave_empty(figure, axes, theme, "No closed loop was run.")
    axes.plot(frame["latency_p50_ms"], frame["samples_per_s"], marker="o", color=theme.series[0])
    for _, row in frame.iterrows():
        at = row["latency_p50_ms"], row["samples_per_s"]
        note(axes, f"{row['concurrency']:.0f} at once", at, (5, -6), fontsize=8)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.15)
    best = frame.nlargest(1, "samples_per_s").iloc[0]
    title = f"{best['concurrency']:.0f} queries at once give {quantity(best['samples_per_s'])} queries/s"
    values = "; ".join(
        f"{row['concurrency']:.0f} at once: {row['samples_per_s']:.3g} queries/s at {row['latency_p50_ms']:.0f} ms"
        for _, row in frame.iterrows()
    )
    across = "ms from sending to the last token, median"
    return finish(figure, axes, theme, title, across, "queries/s", f"Closed loop: {values}.")


@styled
def scaling(run: Records, theme: Theme = LIGHT) -> Picture:
    """Rate by number of workers beside the sum of each alone, with the efficiency written at each."""
    figure, axes = blank("scaling", theme, of_many=True)
    columns = ("workers", "samples_per_s", "sum_of_alone_per_s", "efficiency")
    frame = frames.typed(run, "scaling", dict.fromkeys(columns, 0.0))
    if len(frame) < 2:
        return leave_empty(figure, axes, theme, "One worker: nothing to scale.")
    axes.plot(frame["workers"], frame["sum_of_alone_per_s"], "--", color=theme.muted, label="sum of each alone")
    axes.plot(frame["workers"], frame["samples_per_s"], marker="o", color=theme.series[0], label="together")
    for _, row in frame[frame["workers"] > 1].iterrows():
        note(axes, f"{row['efficiency']:.0%}", (row["workers"], row["samples_per_s"]), (0, -6), fontsize=8)
    axes.set_xticks(frame["workers"])
    axes.set_ylim(bottom=0)
    axes.margins(x=0.1)
    axes.legend(loc="upper left")
    last = frame.iloc[-1]
    title = f"{last['workers']:.0f} workers reach {last['efficiency']:.0%} of the sum of each alone"
    values = "; ".join(
        f"{row['workers']:.0f}: {row['samples_per_s']:.3g} of {row['sum_of_alone_per_s']:.3g} queries/s"
        for _, row in frame.iterrows()
    )
    return finish(figure, axes, theme, title, "workers", "queries/s at equal concurrency per worker", f"{values}.")


@styled
def inflight(run: Records, theme: Theme = LIGHT) -> Picture:
    """Requests in flight of each worker while one is killed and comes back; marks where queries were sent again."""
    figure, axes = blank("in-flight", theme, of_many=True)
    frame = frames.typed(run, "inflight", {"t_s": 0.0, "worker": 0.0, "open": 0.0})
    if frame.empty:
        return leave_empty(figure, axes, theme, "No worker was killed.")
    losses = frames.typed(run, "losses", {"t_s": 0.0, "worker": 0.0, "event": "", "times": 0.0})
    draw_in_flight(axes, theme, frame, losses)
    axes.legend(loc="upper right", fontsize=7.5, ncols=2)
    result = frames.readable(run, "result")
    recovery = result.facts.get("recovery", {}) if result else {}
    title = f"A worker is killed: {recovery.get('requeued', 0)} queries sent again, {recovery.get('failed', 0)} of {recovery.get('queries', 0)} lost"
    alt = f"Killed at {recovery.get('killed_s', 0):.1f} s, back at {recovery.get('back_s', 0):.1f} s, all answered at {recovery.get('end_s', 0):.1f} s."
    return finish(figure, axes, theme, title, "seconds", "requests in flight", alt)


FIGURES: dict[str, Callable[..., Picture]] = {
    "load-latency": load_latency, "concurrency": concurrency, "scaling": scaling, "in-flight": inflight,
    "over-runs": over_runs("total_s", "samples_per_s_all"),
}  # fmt: skip
