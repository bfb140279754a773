"""Trends in words and as a line at text height (inline SVG that takes the space it gets), and machines as lanes over time."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup

from benchlib.core.text import badness, counted, quantity
from benchlib.judge.trends import Change, Trend, spanned
from benchlib.results.record import Record

NEWEST = 40  # runs in the line of a trend
LANES = 8  # more machines are taken together by hardware, and then the busiest are shown
PLACES = 30  # marks on a lane: what falls together shows its worst verdict
STRETCHES = 40  # on a lane, the newest
NAMED = ("torch", "cuda", "rocm", "benchlib")  # versions of a lane, beside those of drivers
SIGNS = {"worse": "▼", "better": "▲", "other": "◆"}
LOOKS = Markup('fill="none" stroke="currentColor" stroke-width="1.5" vector-effect="non-scaling-stroke"')
Band = tuple[float, float, float, float]  # first and last place, low, high
Mark = tuple[str, float, float | None]  # class, place, value; None is a line over the whole height


def svg(values: Sequence[float], words: str, bands: Sequence[Band] = (), marks: Iterable[Mark] = ()) -> Markup:
    """Draw values as a line with a dot at its end, over bands and below marks; nothing for fewer than two."""
    if len(values) < 2:
        return Markup("")
    ends = [*values, *(end for band in bands for end in band[2:])]
    low, span = min(ends), (max(ends) - min(ends)) or 1.0

    def y(value: float) -> float:
        return round(100 - 100 * (value - low) / span, 1)

    begin = '<svg class="spark" viewBox="0 0 {} 100" width="100%" height="100%" preserveAspectRatio="none" role="img" aria-label="{}">'
    parts = [Markup(begin).format(len(values) - 1, words)]
    for first, last, least, most in bands:
        box = '<rect class="band" x="{}" y="{}" width="{}" height="{}"/>'
        parts.append(Markup(box).format(first, y(most), last - first, max(1.0, y(least) - y(most))))
    points = " ".join(f"{place},{y(value)}" for place, value in enumerate(values))
    parts.append(Markup('<polyline {} points="{}"/>').format(LOOKS, points))
    for kind, place, value in [*marks, ("dot", len(values) - 1, values[-1])]:
        path = f"M{place} 0V100" if value is None else f"M{place} {y(value)}h0"
        parts.append(Markup('<path class="{}" d="{}"/>').format(kind, path))
    return Markup("").join(parts) + Markup("</svg>")


def sparkline(trend: Trend) -> Markup:
    """Draw the newest runs of a trend with its band, its changes and the runs outside the band."""
    start = max(0, len(trend.values) - NEWEST)
    last = len(trend.values) - 1 - start
    bands = [
        (max(level.start - 0.5 - start, 0), min(level.end - 0.5 - start, last), level.low, level.high)
        for level in trend.levels.levels
        if level.end > start
    ]
    changes: list[Mark] = [(f"change {item.word}", max(item.index - 0.5 - start, 0), None) for item in _recent(trend)]
    outside: list[Mark] = [("off", index - start, trend.values[index]) for index in trend.outside if index >= start]
    return svg(trend.values[start:], describe_trend(trend), bands, [*changes, *outside])


def _recent(trend: Trend) -> list[Change]:
    return [change for change in trend.changes if change.index >= len(trend.values) - NEWEST]


def describe_change(change: Change, unit: str = "") -> str:
    """Return a change in a line: its sign and word, the levels, the ratio, the day and what else changed there."""
    size = f"× {change.ratio:.3g}" if change.ratio is not None else "changed"
    levels = spanned(change.before, change.after, unit, " → ")
    factors = "; ".join(f"{name} {old} → {new}" for name, old, new in change.factors[:3])
    more = f" and {len(change.factors) - 3} more" if len(change.factors) > 3 else ""
    why = f"with {factors}{more}" if factors else "nothing recorded changed with it"
    word = {"other": "changed"}.get(change.word, change.word)
    return f"{SIGNS[change.word]} {word}, {size} on {change.run.moment:%Y-%m-%d}: {levels}; {why}"


def describe_trend(trend: Trend) -> str:
    """Return what the line shows, in words."""
    values, level = trend.values[-NEWEST:], trend.levels.levels[-1]
    first, last, low, high = map(quantity, (values[0], values[-1], min(values), max(values)))
    words = [f"{trend.label} of the last {len(values)} runs: from {first} to {last}, lowest {low}, highest {high}"]
    if level.low < level.high:
        words.append(f"band {spanned(level.low, level.high, trend.unit)}")
    words += [describe_change(change, trend.unit) for change in _recent(trend)]
    off = sum(index >= len(trend.values) - NEWEST for index in trend.outside)
    return "; ".join(words + [f"{counted(off, 'run')} outside the band"] * bool(off))


class Stretch(NamedTuple):
    """Consecutive runs of a machine with the same versions; ``left`` and ``width`` are shares of the whole time."""

    versions: str
    first: Record
    left: float
    width: float


class Lane(NamedTuple):
    """A machine: its runs, its stretches of equal versions, and (place, word, count) of its marks."""

    label: str
    runs: list[Record]
    stretches: list[Stretch]
    marks: list[tuple[float, str, int]]

    def __str__(self) -> str:
        words = Counter(run.word.replace("_", " ") for run in self.runs)
        ends = ", ".join(f"{count} {word}" for word, count in words.most_common())
        versions = "; ".join(f"from {item.first.moment:%Y-%m-%d} {item.versions}" for item in self.stretches[-6:])
        return f"{self.label}: {counted(len(self.runs), 'run')}, {ends}; {versions}"


def lanes(runs: Sequence[Record]) -> list[Lane]:
    """Return the lanes of runs (the oldest first), the busiest first: a machine is a host with its hardware.

    Of more than ``LANES`` machines those of equal hardware share a lane; what are still more are left out.
    """
    placed = [run for run in runs if run.hardware]
    machines, kinds = dict[str, list[Record]](), dict[str, list[Record]]()
    for run in placed:
        machines.setdefault(", ".join(filter(None, (run.hardware, run.host))), []).append(run)
        kinds.setdefault(run.hardware, []).append(run)
    if len(machines) > LANES:
        machines = {f"{name}, {len({run.host for run in members})} hosts": members for name, members in kinds.items()}
    busiest = sorted(machines.items(), key=lambda item: -len(item[1]))[:LANES]
    return [_lane(label[:120], members, placed[0].started_at, placed[-1].started_at) for label, members in busiest]


def _lane(label: str, runs: list[Record], start: float, end: float) -> Lane:
    places = [(run.started_at - start) / (end - start) if end > start else 0.5 for run in runs]
    stretches, left, marks = list[Stretch](), places[0], dict[int, list[str]]()
    for versions, group in itertools.groupby(
        zip(runs, places[1:] + places[-1:], strict=True), lambda pair: _versions(pair[0])
    ):
        members = list(group)
        stretches.append(Stretch(versions, members[0][0], left, members[-1][1] - left))
        left = members[-1][1]
    for run, place in zip(runs, places, strict=True):
        marks.setdefault(min(PLACES - 1, int(place * PLACES)), []).append(run.word)
    worst = [((place + 0.5) / PLACES, min(words, key=badness), len(words)) for place, words in sorted(marks.items())]
    return Lane(label, runs, stretches[-STRETCHES:], worst)


def _versions(run: Record) -> str:
    names = [*NAMED, *(name for name in run.setup if name.startswith("driver "))]
    return ", ".join(f"{name} {run.setup[name]}" for name in names if name in run.setup) or "versions not recorded"
