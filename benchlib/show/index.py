"""``outputs/index.html``: the runs by day, how the key numbers went, what changed, and on which machines.

A folder that cannot be read is listed as what it is. The page stays small however many runs there are: it lists the newest
ones and says how to see the others.
"""

from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from benchlib.core.files import write_text
from benchlib.core.text import duration, quantity
from benchlib.judge import trends
from benchlib.results.record import DAY, VERSIONS, Record, load_all
from benchlib.show import lines, machine_page, markup

NAME = "index.html"
SHOWN = 4  # key numbers of a run
SERIES = 12  # with trends on the page, those with the newest runs
FACTORS = 4  # named of a series that looks like another one
EVENTS = 12  # changes and regressions on the page
PAGES = 6  # of the machine, one for each tier and day
LISTED = 250  # runs on the page


def groups(runs: list[Record]) -> list[dict[str, Any]]:
    """Return the series of runs (the oldest first) with the trends of their key numbers, sorted by name.

    Only the ``SERIES`` with the newest runs are looked at.
    """
    newest = sorted(trends.series(runs).values(), key=lambda members: -members[-1].started_at)[:SERIES]
    lasts = [members[-1] for members in newest]
    return [
        {
            "last": members[-1],
            "runs": len(members),
            "trends": list(filter(None, (trends.trend(key, members) for key in trends.key_metrics(members)[:SHOWN]))),
            "apart": _apart(members[-1], lasts),
        }
        for members in sorted(newest, key=lambda members: _seen(members[-1]))
    ]


def _seen(run: Record) -> tuple[str, ...]:
    return run.benchmark, run.tier, run.backend, run.hardware, str(run.ranks)


def _apart(run: Record, others: list[Record]) -> str:
    """Return the factors in which the series of a run differs from those that look like it."""
    alike, own = [other.fingerprint for other in others if _seen(other) == _seen(run)], run.fingerprint
    names = sorted(name for name in set().union(*alike) if len({each.get(name) for each in alike}) > 1)
    words = [f"{name.removeprefix('config.')} {own.get(name, 'absent')}" for name in names if name not in VERSIONS]
    return ", ".join(words[:FACTORS] + ["…"] * (len(words) > FACTORS)).replace('"', "")


def _pages(store: Path) -> list[Path]:
    """Return the newest pages of the machine, by the day in the name of their folder."""
    pages = [page for page in store.glob(f"*-*/{machine_page.NAME}") if DAY.match(page.parent.name)]
    return sorted(pages, key=lambda page: (page.parent.name.rpartition("-")[2], page.parent.name), reverse=True)[:PAGES]


def render(outputs: Path | str) -> Path:
    path, runs = Path(outputs) / NAME, load_all(outputs)
    series = groups(runs)
    happened = lines.events((trend for group in series for trend in group["trends"]), runs)
    by_day = groupby(runs[: -LISTED - 1 : -1], key=lambda run: run.moment.strftime("%Y-%m-%d"))
    page = markup.page(
        "runs.html.j2",
        count=len(runs),
        day_count=len({run.moment.date() for run in runs}),
        days={day: list(of_day) for day, of_day in by_day},
        older=max(0, len(runs) - LISTED),
        groups=series,
        series_left=len(trends.series(runs)) - len(series),
        events=happened[:EVENTS],
        events_left=max(0, len(happened) - EVENTS),
        machines=lines.machines(runs),
        pages=[quote(f"{page.parent.name}/{page.name}") for page in _pages(Path(outputs))],
        lines=lines,
        spanned=trends.spanned,
        quantity=quantity,
        duration=duration,
        shown=SHOWN,
    )
    write_text(path, page)
    return path
