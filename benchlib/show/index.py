"""``outputs/index.html``: how the key numbers went, what changed, on which machines, and the runs by day.

Runs are read by ``benchlib.results.store``; a folder that cannot be read is listed as what it is. The page stays small however
many runs there are: it lists the newest ones and says how to see the others.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from benchlib.benchmarks import view
from benchlib.core.files import write_text
from benchlib.core.text import MARKS, duration, quantity
from benchlib.judge import trends
from benchlib.judge.trends import Trend
from benchlib.results import store
from benchlib.results.store import StoredRun
from benchlib.show import lines, markup

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
NAME = "index.html"
SHOWN = 4  # key numbers of a run
SERIES = 12  # with trends on the page, those with the newest runs
EVENTS = 12  # changes and regressions on the page
LISTED = 250  # runs on the page; damaged ones among the others are listed as well
DAMAGED = 50
TONES = {"PASS": "good", "FAIL": "bad", "BROKEN": "bad", "DAMAGED": "bad", "AMBIGUOUS": "warn", "UNFINISHED": "warn"}


@dataclass
class Row:
    """One run as the page lists it. ``numbers`` are (label, text)."""

    run: StoredRun
    link: str
    numbers: list[tuple[str, str]] = field(default_factory=list)

    @property
    def mark(self) -> str:
        """The sign of the verdict."""
        return MARKS.get(self.run.word, "?")

    @property
    def title(self) -> str:
        """Benchmark and tier."""
        return f"{_short(self.run.benchmark)}, {_short(self.run.tier)}"

    @property
    def sentence(self) -> str:
        """What the verdict says, or why the run cannot be read."""
        copied = f"Copy of {self.run.copy_of}: excluded. " if self.run.copy_of else ""
        return _short(self.run.damaged or copied + self.run.sentence, 400)

    @property
    def took(self) -> str:
        """How long the run took."""
        return duration(self.run.ended - self.run.started) if self.run.ended else ""

    @property
    def id(self) -> str:
        """The end of the folder's name."""
        return _short(self.run.name.rsplit("-", 1)[-1], 40)


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


def row(run: StoredRun) -> Row:
    """Return a run as the page lists it."""
    link = quote(os.fsencode(f"{run.path}/report.html")) if run.report else ""
    own = view(run.benchmark)
    prefixes = own.headlines or [metric.name for metric in run.metrics[:SHOWN]]
    metrics = [(own.label(prefix), run.metric(prefix)) for prefix in prefixes]
    numbers = [(label, quantity(metric.value, metric.unit)) for label, metric in metrics if metric][:SHOWN]
    return Row(run, link, numbers)


@dataclass(frozen=True)
class Group:
    """The trends of one series, and its newest run."""

    last: Row
    runs: int
    trends: list[Trend]


def groups(runs: list[StoredRun]) -> list[Group]:
    """Return the series of runs (the oldest first) with the trends of their key numbers, sorted by name.

    Only the ``SERIES`` with the newest runs are looked at.
    """
    newest = sorted(trends.series(runs).values(), key=lambda members: -members[-1].started)[:SERIES]
    out = []
    for members in newest:
        names = trends.key_metrics(members)[:SHOWN]
        drawn = [trend for trend in (trends.trend(name, members) for name in names) if trend]
        out.append(Group(row(members[-1]), len(members), drawn))
    return sorted(out, key=lambda g: (g.last.run.benchmark, g.last.run.tier, g.last.run.backend, g.last.run.hardware))


def events(shown: list[Group], runs: list[StoredRun]) -> list[Event]:
    """Return the changes of level, the regressions and the baselines that could not be read, the newest first."""
    changes = [
        Event(change.run.started, row(change.run), trend.label, change.word, lines.describe_change(change, trend.unit))
        for group in shown
        for trend in group.trends
        for change in trend.changes
    ]
    failed = [
        Event(run.started, row(run), trends.label(metric), "regression", f"✗ regression: {_short(reason, 300)}")
        for run in runs
        if not (run.planted or run.damaged or run.copy_of)
        for metric, reason in run.regressions
    ]
    unreadable = [
        Event(
            run.started,
            row(run),
            "baseline",
            "other",
            f"! not readable, nothing compared: {_short(run.unreadable, 300)}",
        )
        for run in runs
        if run.unreadable and not (run.damaged or run.copy_of)
    ]
    return sorted(changes + failed + unreadable, key=lambda event: -event.when)


def days(runs: list[StoredRun]) -> dict[str, list[Row]]:
    """Return the newest ``LISTED`` runs by day, the newest first."""
    by_day: dict[str, list[Row]] = {}
    for run in runs[: -LISTED - 1 : -1]:
        by_day.setdefault(run.moment.strftime("%Y-%m-%d"), []).append(row(run))
    return by_day


def render(outputs: Path | str) -> Path:
    """Write ``index.html`` into a folder of runs and return its path. An empty folder gives a page that says so."""
    outputs = Path(outputs)
    runs = store.read(outputs)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([TEMPLATES, TEMPLATES / "report"]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["signs"] = markup.signs
    environment.globals |= {
        "sparkline": lines.sparkline,
        "describe_change": lines.describe_change,
        "spanned": trends.spanned,
        "quantity": quantity,
    }
    style = Markup((TEMPLATES / "style.css").read_text(encoding="utf-8"))
    series = groups(runs)
    happened = events(series, runs)
    shown, others = lines.lanes(runs)
    older = runs[:-LISTED]
    page = environment.get_template("runs.html.j2").render(
        count=len(runs),
        day_count=len({run.moment.date() for run in runs}),
        groups=series,
        series_left=len(trends.series(runs)) - len(series),
        events=happened[:EVENTS],
        events_left=max(0, len(happened) - EVENTS),
        lanes=[(lane, lines.picture(lane, TONES)) for lane in shown],
        lanes_left=others,
        span=(runs[0].moment, runs[-1].moment) if runs else None,
        days=days(runs),
        older=len(older),
        damaged=[row(run) for run in older if run.damaged][: -DAMAGED - 1 : -1],
        style=style,
    )
    path = outputs / NAME
    write_text(path, page)
    return path
