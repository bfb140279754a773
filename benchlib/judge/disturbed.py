"""Where the level of a run's speed shifted, when that was, and what the sensors saw meanwhile: sentences for its report.

A neighbour, throttling or a clock shows as a level that shifts within the run (``changepoints.disturbance``). The time of a
sample is known where each stands for a training step; others have a place among the samples only.
"""

import datetime
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from benchlib.benchmarks import spec_of
from benchlib.core.events import read_events
from benchlib.core.stats import kept_places
from benchlib.core.text import listing, with_unit
from benchlib.judge.changepoints import Disturbance, disturbance
from benchlib.judge.regression import faster, shift_text
from benchlib.results.record import KEPT_SAMPLES, Record

# What may explain a shift: (name of a reading, words, unit, change that counts as a share of the undisturbed part).
SEEN = (
    ("frequency_mhz", "clock", "MHz", 0.05),
    ("temperature_c", "temperature", "°C", 0.05),
    ("power_w", "power", "W", 0.10),
    ("others_percent", "processor time of others", "%", 0.10),
    ("load_1m", "load", "", 0.25),
    ("cpu_percent", "processor time of the ranks", "%", 0.10),
    ("utilization_percent", "utilisation", "%", 0.10),
)
NOTICED = 0.15  # share of the processors that others took, from which the assumed spread follows it
MOST = 3  # sentences: many metrics of one run shift together


def disturbances(run: Record) -> list[str]:
    """Return a sentence on others that took the processors all the time, and for each gated speed whose level shifted."""
    sentences, seen = list[str](), set[tuple[Any, ...]]()
    events = read_events(run.folder)
    if run.others >= NOTICED:
        sentences.append(
            f"Others took {run.others:.0%} of the processors while this ran: its speeds are those of the rest."
        )
    for limit in run.limits:
        metric = run.metric(limit.metric)
        samples = np.asarray(run.samples.get(limit.metric, []), dtype=float)
        if metric is None or not faster(metric) or not np.isfinite(samples).all():
            continue
        places = kept_places(samples, KEPT_SAMPLES)  # as the gate looks at them
        shift = disturbance(samples[places], faster(metric))
        if shift is None or shift.parts in seen:
            continue
        seen.add(shift.parts)
        every = _times(events, len(samples))
        times = [every[place] for place in places] if every else []
        span = f" ({listing(_clock(times, shift))})" if times else ""
        sentences.append(
            f"{spec_of(run.benchmark).label(metric.name)}: {shift_text(shift)}{span}. The gate takes the undisturbed part and asks the whole run too."
            + (f" Meanwhile {seen_text}." if times and (seen_text := _seen(events, times, shift)) else "")
        )
    return sentences[:MOST]


def _times(events: Sequence[Any], samples: int) -> list[float]:
    """Return the unix time of each sample, where the samples are those of the last training steps; else none."""
    times = {event["step"]: float(event["t"]) for event in events if event["kind"] == "step" and "step" in event}
    return [times[step] for step in sorted(times)][-samples:] if len(times) >= samples else []


def _clock(times: Sequence[float], shift: Disturbance) -> list[str]:
    ends = [[datetime.datetime.fromtimestamp(times[place]) for place in (a, b - 1)] for a, b in shift.parts]
    return [f"{first:%H:%M:%S} to {last:%H:%M:%S}" for first, last in ends]


def _seen(events: Sequence[Any], times: Sequence[float], shift: Disturbance) -> str:
    """Return which readings were others than in the undisturbed part, or that none was."""
    inside: dict[str, list[float]] = {}
    outside: dict[str, list[float]] = {}
    for event in events:
        if event["kind"] != "sensor" or not times[0] <= event["t"] <= times[-1]:
            continue
        disturbed = any(times[start] <= event["t"] <= times[end - 1] for start, end in shift.parts)
        for name, *_ in SEEN:
            if isinstance(event.get(name), (int, float)):
                (inside if disturbed else outside).setdefault(name, []).append(float(event[name]))
    both = [row for row in SEEN if inside.get(row[0]) and outside.get(row[0])]
    parts = []
    for name, words, unit, least in both:
        here, usual = fmean(inside[name]), fmean(outside[name])
        if abs(here - usual) > max(least * abs(usual), 0.5 if unit != "%" else 10.0):
            parts.append(f"{words} {with_unit(f'{here:.3g}', unit)} instead of {with_unit(f'{usual:.3g}', unit)}")
    if parts:
        return ", ".join(parts)
    return f"{listing([words for _, words, *_ in both])} stayed the same" if both else ""
