"""What pages say of runs: where a report lies, trends as a line and in words, what happened, and on which machines."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from benchlib.benchmarks import spec_of
from benchlib.core.text import counted, quantity
from benchlib.judge.trends import History, LevelChange, Trend, spanned
from benchlib.results.record import Record
from benchlib.results.verdict import GATE

NEWEST = 40  # runs in the line of a trend
MACHINES = 8  # listed, the busiest
STRETCHES = 6  # of equal versions, the newest of a machine
NAMED = ("torch", "cuda", "rocm", "benchlib")  # versions of a machine, beside those of drivers
SIGNS = {"worse": "▼", "better": "▲", "other": "◆"}


def link(run: Record, levels: int) -> str:
    """Return the address of a run's report for a page that lies so many folders above it; '' where it has none."""
    place = "/".join([*Path(run.folder).parts[-levels:], "report.html"])
    return quote(os.fsencode(place)) if run.report else ""


def about(past: History) -> list[str]:
    """Return what a history is on: the store, its runs, their days and what was asked for."""
    days = [f"{run.moment:%Y-%m-%d}" for run in (past.runs[0], past.runs[-1])] if past.runs else []
    words = ["the demo runs of the kit" if past.demo else past.store.name, counted(len(past.runs), "run")]
    words += [" to ".join(dict.fromkeys(days))] * bool(days)
    asked = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in vars(past.asked).items() if value)
    return words + [f"only {asked}"] * bool(asked)


def points(trend: Trend) -> list[str]:
    """Return the newest values as points of a line, 100 high."""
    values = trend.values[-NEWEST:]
    low, span = min(values), (max(values) - min(values)) or 1.0
    return [f"{place},{100 - 100 * (value - low) / span:.1f}" for place, value in enumerate(values)]


def describe_change(change: LevelChange, unit: str = "") -> str:
    """Return a change in a line: its sign and word, the levels, the ratio, the day and what else changed there."""
    size = f"× {change.ratio:.3g}" if change.ratio is not None else "changed"
    levels = spanned(change.before, change.after, unit, " → ")
    factors = "; ".join(f"{name} {old} → {new}" for name, old, new in change.factors[:3])
    more = f" and {len(change.factors) - 3} more" if len(change.factors) > 3 else ""
    why = f"with {factors}{more}" if factors else "nothing recorded changed with it"
    word = {"other": "changed"}.get(change.word, change.word)
    return f"{SIGNS[change.word]} {word}, {size} on {change.run.moment:%Y-%m-%d}: {levels}; {why}"


def describe_trend(trend: Trend) -> str:
    values, level = trend.values[-NEWEST:], trend.levels.levels[-1]
    first, last, low, high = map(quantity, (values[0], values[-1], min(values), max(values)))
    words = [f"{trend.label} of the last {len(values)} runs: from {first} to {last}, lowest {low}, highest {high}"]
    if level.low < level.high:
        words.append(f"band {spanned(level.low, level.high, trend.unit)}")
    words += [describe_change(item, trend.unit) for item in trend.changes if item.index >= len(trend.values) - NEWEST]
    off = sum(index >= len(trend.values) - NEWEST for index in trend.outside)
    return "; ".join(words + [f"{counted(off, 'run')} outside the band"] * bool(off))


class Event(NamedTuple):
    """Something that a run began: ``word`` is worse, better or other for a change of level, else regression."""

    run: Record
    metric: str
    word: str
    text: str


def events(trends: Iterable[Trend], runs: Iterable[Record]) -> list[Event]:
    """Return the changes of level and the regressions, the newest first."""
    changes = [
        Event(change.run, trend.label, change.word, describe_change(change, trend.unit))
        for trend in trends
        for change in trend.changes
    ]
    failed = [
        Event(
            run,
            spec_of(run.benchmark).label(check.name.removesuffix(GATE)),
            "regression",
            f"✗ regression: {check.reason}",
        )
        for run in runs
        if run.verdict and not (run.problems or run.copy_of or run.injected)
        for check in run.verdict.checks
        if check.status == "FAIL" and check.gates and check.name.endswith(GATE)
    ]
    return sorted(changes + failed, key=lambda event: -event.run.started_at)


def machines(runs: Sequence[Record]) -> list[dict[str, str]]:
    """Return a row for each machine (a host with its hardware), the busiest first: its runs, how they ended, its versions.

    ``runs`` are the oldest first; those that do not say where they ran are left out.
    """
    members = dict[str, list[Record]]()
    for run in runs:
        if run.hardware:
            members.setdefault(", ".join(filter(None, (run.hardware, run.host))), []).append(run)
    busiest = sorted(members.items(), key=lambda item: -len(item[1]))[:MACHINES]
    return [
        {
            "machine": name,
            "runs": f"{len(those):,}",
            "ended": ", ".join(f"{count} {word}" for word, count in Counter(run.word for run in those).most_common()),
            "versions": "; ".join(
                f"from {first.moment:%Y-%m-%d} {versions}"
                for versions, first in [(key, next(group)) for key, group in groupby(those, _versions)][-STRETCHES:]
            ),
        }
        for name, those in busiest
    ]


def _versions(run: Record) -> str:
    names = [*NAMED, *(name for name in run.setup if name.startswith("driver "))]
    return ", ".join(f"{name} {run.setup[name]}" for name in names if name in run.setup) or "versions not recorded"
