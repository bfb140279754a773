"""``outputs/index.html``: how the key numbers went, what changed, on which machines, and the runs by day.

A folder that cannot be read is listed as what it is. The page stays small however many runs there are: it lists the newest
ones and says how to see the others.
"""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

from benchlib.benchmarks import spec_of
from benchlib.core.files import write_text
from benchlib.core.text import duration, quantity
from benchlib.judge import trends
from benchlib.judge.trends import Trend
from benchlib.results.record import READABLE, VERSIONS, Record, load_all
from benchlib.show import lines, markup

NAME = "index.html"
SHOWN = 4  # key numbers of a run
SERIES = 12  # with trends on the page, those with the newest runs
FACTORS = 4  # named of a series that looks like another one
EVENTS = 12  # changes and regressions on the page
LISTED = 250  # runs on the page; damaged ones among the others are listed as well
DAMAGED = 50


@dataclass
class Row:
    """One run as the page lists it. ``numbers`` are (label, text)."""

    run: Record
    link: str
    numbers: list[tuple[str, str]] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Benchmark and tier."""
        return f"{_short(self.run.benchmark)}, {_short(self.run.tier)}"

    @property
    def sentence(self) -> str:
        """What the verdict says, or why the run cannot be read."""
        copied = f"Copy of {self.run.copy_of}: excluded. " if self.run.copy_of else ""
        return _short(copied + self.run.sentence, 400)

    @property
    def took(self) -> str:
        """How long the run took."""
        return duration(self.run.ended_at - self.run.started_at) if self.run.ended_at else ""

    @property
    def id(self) -> str:
        """The end of the folder's name."""
        return _short(self.run.run.rsplit("-", 1)[-1], 40)


@dataclass(frozen=True)
class Event:
    """Something that deserves a look: a change of level, a regression against an accepted run, a damaged baseline."""

    when: float
    row: Row
    metric: str
    word: str
    text: str


def _short(words: str, most: int = 60) -> str:
    # Names of folders may hold bytes that are no text in any encoding.
    words = os.fsencode(words).decode("utf-8", "replace") if any("\ud800" <= c <= "\udfff" for c in words) else words
    return words if len(words) <= most else words[: most - 1] + "…"


def row(run: Record, shown: int | None = SHOWN) -> Row:
    """Return a run as the page lists it, with at most ``shown`` key numbers (None: all)."""
    link = quote(os.fsencode(f"{'/'.join(Path(run.folder).parts[-2:])}/report.html")) if run.report else ""
    own = spec_of(run.benchmark)
    first = own.first(metric.name for metric in run.measured)
    numbers = [(label, metric.text) for name, label in first.items() if (metric := run.metric(name))][:shown]
    return Row(run, link, numbers)


@dataclass(frozen=True)
class Group:
    """The trends of one series, its newest run, and in which factors it differs from series that look the same."""

    last: Row
    runs: int
    trends: list[Trend]
    apart: str = ""

    @property
    def name(self) -> tuple[str, ...]:
        """What a reader sees of it: benchmark, tier, backend, ranks and hardware."""
        run = self.last.run
        return run.benchmark, run.tier, run.backend, str(run.ranks), run.hardware


def groups(runs: list[Record]) -> list[Group]:
    """Return the series of runs (the oldest first) with the trends of their key numbers, sorted by name.

    Only the ``SERIES`` with the newest runs are looked at.
    """
    newest = sorted(trends.series(runs).values(), key=lambda members: -members[-1].started_at)[:SERIES]
    out = []
    for members in newest:
        names = trends.key_metrics(members)[:SHOWN]
        drawn = [trend for trend in (trends.trend(name, members) for name in names) if trend]
        out.append(Group(row(members[-1]), len(members), drawn))
    return sorted(out, key=lambda g: (g.last.run.benchmark, g.last.run.tier, g.last.run.backend, g.last.run.hardware))


def told_apart(shown: list[Group]) -> list[Group]:
    """Return the groups; those of equal names with the factors in which their newest runs differ."""
    alike: dict[tuple[str, ...], list[Group]] = {}
    for group in shown:
        alike.setdefault(group.name, []).append(group)
    words = {}
    for same in alike.values():
        factors = [_factors(group.last.run) for group in same if len(same) > 1]
        names = sorted(
            name
            for name in {name for each in factors for name in each}
            if len({each.get(name) for each in factors}) > 1
        )
        for group, each in zip(same, factors, strict=False):
            listed = [f"{name.removeprefix('config.')} {each.get(name, 'absent')}" for name in names[:FACTORS]]
            words[group.last.run.path] = ", ".join([*listed, *["…"] * (len(names) > FACTORS)])
    return [replace(group, apart=words.get(group.last.run.path, "")) for group in shown]


def _factors(run: Record) -> dict[str, str]:
    return {name: value.strip('"') for name, value in run.fingerprint.items() if name not in VERSIONS}


def events(shown: list[Group], runs: list[Record]) -> list[Event]:
    """Return the changes of level, the regressions and the baselines that could not be read, the newest first."""
    changes = [
        Event(
            change.run.started_at, row(change.run), trend.label, change.word, lines.describe_change(change, trend.unit)
        )
        for group in shown
        for trend in group.trends
        for change in trend.changes
    ]
    failed = [
        Event(run.started_at, row(run), trends.label(metric), "regression", f"✗ regression: {_short(reason, 300)}")
        for run in runs
        if not (run.planted or run.problems or run.copy_of)
        for metric, reason in run.failed()
    ]
    unreadable = [
        Event(
            run.started_at,
            row(run),
            "baseline",
            "other",
            f"! not readable, nothing compared: {_short(reason, 300)}",
        )
        for run in runs
        if not (run.problems or run.copy_of)
        for _, reason in run.failed(READABLE)
    ]
    return sorted(changes + failed + unreadable, key=lambda event: -event.when)


def days(runs: list[Record]) -> dict[str, list[Row]]:
    """Return the newest ``LISTED`` runs by day, the newest first."""
    by_day: dict[str, list[Row]] = {}
    for run in runs[: -LISTED - 1 : -1]:
        by_day.setdefault(run.moment.strftime("%Y-%m-%d"), []).append(row(run))
    return by_day


def render(outputs: Path | str) -> Path:
    """Write ``index.html`` into a folder of runs and return its path. An empty folder gives a page that says so."""
    outputs = Path(outputs)
    runs = load_all(outputs)
    series = told_apart(groups(runs))
    happened = events(series, runs)
    shown, others = lines.lanes(runs)
    older = runs[:-LISTED]
    page = markup.page(
        "runs.html.j2",
        count=len(runs),
        day_count=len({run.moment.date() for run in runs}),
        groups=series,
        series_left=len(trends.series(runs)) - len(series),
        events=happened[:EVENTS],
        events_left=max(0, len(happened) - EVENTS),
        lanes=[(lane, lines.picture(lane)) for lane in shown],
        lanes_left=others,
        span=(runs[0].moment, runs[-1].moment) if runs else None,
        days=days(runs),
        older=len(older),
        damaged=[row(run) for run in older if run.problems][: -DAMAGED - 1 : -1],
        sparkline=lines.sparkline,
        describe_change=lines.describe_change,
        spanned=trends.spanned,
        quantity=quantity,
    )
    path = outputs / NAME
    write_text(path, page)
    return path
