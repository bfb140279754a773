"""``outputs/index.html``: all runs of a folder by day, the newest first, with verdict, key numbers and trends.

Of each run only ``verdict.json`` and ``result.json`` are read, once: the page of thousands of runs takes seconds. A folder
that cannot be read is listed as what it is.
"""

import datetime
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from benchlib import markup
from benchlib.files import write_text
from benchlib.labels import HEADLINES, LABELS, MARKS, duration
from benchlib.metrics import quantity

TEMPLATES = Path(__file__).resolve().parent / "templates"
NAME = "index.html"
TREND = 40  # runs in a sparkline
SHOWN = 4  # key numbers of a row
_FOLDER = re.compile(r"(?P<tier>.+)-(?P<day>\d{8})$")
_RUN = re.compile(r"(?P<benchmark>.+?)-(?P<backend>[a-z]+)-(?P<time>\d{6})-\w+$")


@dataclass
class Row:
    """One run as the page lists it. ``numbers`` are (label, text) and ``values`` the same metrics as numbers."""

    name: str
    link: str
    benchmark: str
    tier: str
    backend: str
    started: float
    word: str = "UNFINISHED"
    sentence: str = ""
    took: str = ""
    ranks: str = ""
    numbers: list[tuple[str, str]] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)

    @property
    def mark(self) -> str:
        """The sign of the verdict."""
        return MARKS.get(self.word, "?")

    @property
    def moment(self) -> datetime.datetime:
        """Local start of the run."""
        return datetime.datetime.fromtimestamp(self.started).astimezone()


@dataclass
class Trend:
    """The latest runs of one benchmark, tier and backend: their last row and a line of the first key number."""

    last: Row
    runs: int
    label: str
    line: Markup


def _read(path: Path) -> dict[str, Any] | None:
    """Return a JSON object, or None where there is no such file. Raises ValueError for a damaged one."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content


def _started(folder: Path, day: str, clock: str) -> float:
    try:
        return datetime.datetime.strptime(day + clock, "%Y%m%d%H%M%S").timestamp()
    except ValueError:
        return folder.stat().st_mtime


def read_row(folder: Path, outputs: Path) -> Row:
    """Read one run folder; what is damaged is said in the row's sentence."""
    named, run = _FOLDER.match(folder.parent.name), _RUN.match(folder.name)
    link = quote(str((folder / "report.html").relative_to(outputs))) if (folder / "report.html").exists() else ""
    started = _started(folder, named["day"] if named else "", run["time"] if run else "")
    tier, benchmark, backend = (
        named["tier"] if named else "?",
        run["benchmark"] if run else "?",
        run["backend"] if run else "?",
    )
    row = Row(folder.name, link, benchmark, tier, backend, started)
    try:
        verdict = _read(folder / "verdict.json")
        result = _read(folder / "result.json")
        if verdict is not None:
            row.word = "BROKEN" if verdict.get("broken") else str(verdict["verdict"])
            row.sentence = str(verdict.get("sentence", ""))
        elif not (folder / "config.json").exists():
            row.word, row.sentence = "DAMAGED", "the folder has no config.json"
        if result is not None:
            _fill(row, result)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        row.word, row.sentence = "DAMAGED", f"not readable: {error}"
    return row


def _fill(row: Row, result: dict[str, Any]) -> None:
    row.benchmark, row.tier, row.backend = (str(result[name]) for name in ("benchmark", "tier", "backend"))
    row.started, ended = float(result["started_at"]), result.get("ended_at")
    row.took = duration(float(ended) - row.started) if ended else ""
    row.ranks = str(result.get("world_size", ""))
    metrics = [metric for metric in result["metrics"] if isinstance(metric.get("value"), (int, float))]
    wanted = HEADLINES.get(row.benchmark) or [metric["name"] for metric in metrics[:SHOWN]]
    for prefix in wanted:
        found = next((m for m in metrics if m["name"] == prefix or m["name"].startswith(prefix + "_")), None)
        if found and len(row.numbers) < SHOWN:
            label = LABELS.get(prefix, prefix.replace("_", " "))
            row.numbers.append((label, quantity(found["value"], found["unit"])))
            row.values[found["name"]] = float(found["value"])


def run_folders(outputs: Path) -> Iterable[Path]:
    """Return the folders that lie where runs lie: two levels below ``outputs``, hidden ones left out."""
    for day in sorted(outputs.iterdir()) if outputs.is_dir() else []:
        if day.is_dir() and _FOLDER.match(day.name):
            yield from (Path(item.path) for item in os.scandir(day) if item.is_dir() and not item.name.startswith("."))


def sparkline(values: list[float], label: str) -> Markup:
    """Return a line of the values as inline SVG, the last one marked; nothing for fewer than two values."""
    if len(values) < 2:
        return Markup("")
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    points = [
        (100 * i / (len(values) - 1), 22 - 20 * ((value - low) / span if high > low else 0.5))
        for i, value in enumerate(values)
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    said = f"{label} of the last {len(values)} runs: from {quantity(values[0])} to {quantity(values[-1])}, lowest {quantity(low)}, highest {quantity(high)}"
    return Markup(
        '<svg class="spark" viewBox="-2 0 104 24" role="img" aria-label="{}"><polyline points="{}" fill="none" stroke="currentColor" '
        'stroke-width="1.5" vector-effect="non-scaling-stroke"/><circle cx="{:.1f}" cy="{:.1f}" r="2.2" fill="currentColor"/></svg>'
    ).format(said, line, *points[-1])


def trends(rows: list[Row]) -> list[Trend]:
    """Return one trend for each benchmark, tier and backend, from rows that are sorted with the newest first."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.benchmark, row.tier, row.backend), []).append(row)
    out = []
    for members in groups.values():
        # The first key number of the newest run that has one; other names are other quantities.
        name, label = next(((next(iter(row.values)), row.numbers[0][0]) for row in members if row.values), ("", ""))
        values = [row.values[name] for row in members[:TREND] if name in row.values][::-1]
        out.append(Trend(members[0], len(members), label, sparkline(values, label)))
    return sorted(out, key=lambda trend: (trend.last.benchmark, trend.last.tier, trend.last.backend))


def render(outputs: Path | str) -> Path:
    """Write ``index.html`` into a folder of runs and return its path. An empty folder gives a page that says so."""
    outputs = Path(outputs)
    rows = sorted(
        (read_row(folder, outputs) for folder in run_folders(outputs)), key=lambda row: row.started, reverse=True
    )
    days: dict[str, list[Row]] = {}
    for row in rows:
        days.setdefault(row.moment.strftime("%Y-%m-%d"), []).append(row)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([TEMPLATES, TEMPLATES / "report"]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["signs"] = markup.signs
    style = Markup((TEMPLATES / "style.css").read_text(encoding="utf-8"))
    page = environment.get_template("runs.html.j2").render(days=days, count=len(rows), trends=trends(rows), style=style)
    path = outputs / NAME
    write_text(path, page)
    return path
