"""Inline SVG for the list of runs, each picture with words for all that it shows.

A lane is a machine over time: which versions it had, and how its runs ended. A sparkline is a trend at text height: its band,
its changes and the runs outside the band.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from benchlib.core.text import badness, look, quantity
from benchlib.judge.trends import LevelChange, Trend, spanned
from benchlib.results.record import Record

TREND = 40  # runs in a sparkline, the newest
_HIGH, _WIDE = 24.0, 100.0
SIGNS = {"worse": "▼", "better": "▲", "other": "◆"}
LANES = 8  # more machines are taken together by hardware, and then the busiest are shown
PLACES = 30  # marks on a lane: what falls together shows its worst verdict
NAMED = ("torch", "cuda", "rocm", "benchlib")


@dataclass(frozen=True)
class Stretch:
    """Consecutive runs of a machine with the same versions; ``left`` and ``width`` are shares of the whole time."""

    versions: str
    first: Record
    runs: int
    left: float
    width: float


@dataclass(frozen=True)
class Lane:
    """A machine: its label, its runs, its stretches of equal versions, and (place, word, count) of its marks."""

    label: str
    runs: list[Record]
    stretches: list[Stretch]
    marks: list[tuple[float, str, int]]

    @property
    def description(self) -> str:
        """What the lane shows, in words."""
        words = Counter(run.word for run in self.runs)
        ends = ", ".join(f"{count} {word.replace('_', ' ')}" for word, count in words.most_common())
        versions = "; ".join(f"from {item.first.moment:%Y-%m-%d} {item.versions}" for item in self.stretches[-6:])
        return f"{self.label}: {len(self.runs)} runs, {ends}; {versions}"


def versions(run: Record) -> str:
    """Return the versions that a lane shows."""
    names = [*NAMED, *(name for name in run.setup if name.startswith("driver "))]
    return ", ".join(f"{name} {run.setup[name]}" for name in names if name in run.setup) or "versions not recorded"


def lanes(runs: Sequence[Record]) -> tuple[list[Lane], int]:
    """Return the lanes of runs (the oldest first), the busiest machines first, and how many machines are left out.

    A machine is a host with its hardware. Where there are more than ``LANES``, hosts of equal hardware share a lane.
    """
    placed = [run for run in runs if run.hardware]
    groups: dict[tuple[str, str], list[Record]] = {}
    for run in placed:
        groups.setdefault((run.hardware, run.host), []).append(run)
    if len(groups) > LANES:
        hardware: dict[str, list[Record]] = {}
        for run in placed:
            hardware.setdefault(run.hardware, []).append(run)
        groups = {(name, f"{len({run.host for run in members})} hosts"): members for name, members in hardware.items()}
    ranked = sorted(groups.items(), key=lambda item: -len(item[1]))
    start, end = (placed[0].started_at, placed[-1].started_at) if placed else (0.0, 0.0)
    shown = [
        _lane(f"{name}, {host}" if host else name, members, start, end) for (name, host), members in ranked[:LANES]
    ]
    return shown, len(ranked) - len(shown)


def _lane(label: str, runs: list[Record], start: float, end: float) -> Lane:
    span = end - start

    def place(run: Record) -> float:
        return (run.started_at - start) / span if span > 0 else 0.5

    stretches: list[Stretch] = []
    begin = 0
    for index in range(1, len(runs) + 1):
        if index < len(runs) and versions(runs[index]) == versions(runs[begin]):
            continue
        left = place(runs[begin])
        right = place(runs[index]) if index < len(runs) else place(runs[-1])
        stretches.append(Stretch(versions(runs[begin]), runs[begin], index - begin, left, right - left))
        begin = index
    bins: dict[int, list[str]] = {}
    for run in runs:
        bins.setdefault(min(PLACES - 1, int(place(run) * PLACES)), []).append(run.word)
    marks = [((number + 0.5) / PLACES, min(words, key=badness), len(words)) for number, words in sorted(bins.items())]
    return Lane(label[:120], runs, stretches[-40:], marks)


def picture(lane: Lane) -> Markup:
    """Return a lane as SVG that takes the width it gets: stretches as boxes with their versions, marks below them."""
    parts = [Markup('<svg class="lane" width="100%" height="46" role="img" aria-label="{}">').format(lane.description)]
    for number, item in enumerate(lane.stretches):
        left, width = 100 * item.left, max(0.8, 100 * item.width)
        box = Markup('<svg x="{:.2f}%" y="0" width="{:.2f}%" height="22"><title>{}</title>').format(
            min(left, 99.2), width, f"{item.versions}, {item.runs} runs from {item.first.moment:%Y-%m-%d}"
        )
        shade = Markup('<rect class="stretch {}" width="100%" height="22" rx="3"/>').format("odd" if number % 2 else "")
        words = Markup('<text x="6" y="15.5">{}</text>').format(item.versions) if width > 7 else Markup("")
        parts.append(box + shade + words + Markup("</svg>"))
    for left, word, count in lane.marks:
        parts.append(
            Markup('<text class="{}" x="{:.2f}%" y="41" text-anchor="middle">{}<title>{}</title></text>').format(
                look(word).tone, 100 * left, look(word).mark, f"{word}, {count} run{'s' * (count > 1)}"
            )
        )
    return Markup("").join(parts) + Markup("</svg>")


def sparkline(trend: Trend) -> Markup:
    """Return the last runs of a trend as a line; nothing for fewer than two values."""
    first = max(0, len(trend.values) - TREND)
    values = trend.values[first:]
    if len(values) < 2:
        return Markup("")
    bands = [level for level in trend.levels.levels if level.end > first]
    low = min([*values, *(level.low for level in bands)])
    high = max([*values, *(level.high for level in bands)])

    def x(index: float) -> float:
        return _WIDE * (index - first) / (len(values) - 1)

    def y(value: float) -> float:
        return 2 + (_HIGH - 4) * (1 - ((value - low) / (high - low) if high > low else 0.5))

    parts = [
        Markup('<svg class="spark" viewBox="-3 0 106 24" role="img" aria-label="{}">').format(describe_trend(trend))
    ]
    for level in bands:
        left, right = x(max(level.start - 0.5, first)), x(min(level.end - 0.5, len(trend.values) - 1))
        box = (left, y(level.high), right - left, max(0.6, y(level.low) - y(level.high)))
        parts.append(Markup('<rect class="band" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(*box))
    line = " ".join(f"{x(first + place):.1f},{y(value):.1f}" for place, value in enumerate(values))
    parts.append(Markup('<polyline points="{}"/>').format(line))
    for change in trend.changes:
        if change.index >= first:
            at = x(change.index - 0.5) if change.index > first else x(first)
            parts.append(
                Markup('<path class="{}" d="M{:.1f} 0V24"/>').format(f"change {change.word}", at) + _sign(change, at)
            )
    for index in trend.outside:
        if index >= first:
            a, b = x(index), y(trend.values[index])
            parts.append(Markup('<path class="off" d="M{:.1f} {:.1f}l4 4m0 -4l-4 4"/>').format(a - 2, b - 2))
    parts.append(Markup('<circle cx="{:.1f}" cy="{:.1f}" r="2.2"/></svg>').format(_WIDE, y(values[-1])))
    return Markup("").join(parts)


def _sign(change: LevelChange, at: float) -> Markup:
    """Return the shape of a change: a triangle that points down for worse and up for better, a diamond otherwise."""
    shapes = {
        "worse": "M{:.1f} 24l-3.4 -6h6.8z",
        "better": "M{:.1f} 0l-3.4 6h6.8z",
        "other": "M{:.1f} 9l3 3l-3 3l-3 -3z",
    }
    return Markup('<path class="{}" d="{}"/>').format(f"sign {change.word}", shapes[change.word].format(at))


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
    """Return what the line shows, in words."""
    first = max(0, len(trend.values) - TREND)
    values = trend.values[first:]
    level = trend.levels.levels[-1]
    ends = f"from {quantity(values[0])} to {quantity(values[-1])}, lowest {quantity(min(values))}, highest {quantity(max(values))}"
    words = [f"{trend.label} of the last {len(values)} runs: {ends}"]
    if level.low < level.high:
        words.append(f"band {spanned(level.low, level.high, trend.unit)}")
    words += [describe_change(change, trend.unit) for change in trend.changes if change.index >= first]
    off = sum(index >= first for index in trend.outside)
    words += [f"{off} run{'s' * (off > 1)} outside the band"] if off else []
    return "; ".join(words)
