"""The report of a run as Markdown, for wikis and merge requests: verdict, checks, tables and pictures as files beside it."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchlib.core.files import write_text
from benchlib.core.terminal import one_line
from benchlib.results.run import Run
from benchlib.show import report
from benchlib.show.digest import Problems
from benchlib.show.exports import pictures

NAME = "report.md"
MARKS = re.compile(r"([\\`*_\[\]<>|~#])")  # what Markdown would read as markup
CHECK = {"check": "name", "status": "word", "value": "value", "limit": "limit", "reason": "reason"}


def text(value: Any) -> str:
    """Return a value as one line that Markdown shows as it is."""
    return MARKS.sub(r"\\\1", one_line(str(value)))


def table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table whose columns are the keys of ``rows``."""
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([row.get(name, "") for name in names] for row in rows)]
    lines = [f"| {' | '.join(map(text, line))} |" for line in cells]
    return [lines[0], "|---" * len(names) + "|", *lines[1:], ""]


def lines(said: Mapping[str, Any]) -> list[str]:
    """Return the lines of a report with the content of ``report.html``; its pictures are files of ``pictures/``."""
    run = said["record"]
    parts = [f"# {text(run.benchmark)}: {text(run.word)}", "", text(run.sentence), ""]
    parts += [f"Question: {text(said['question'])}", ""] if said["question"] else []
    about = {"run": run.run, "tier": run.tier, "backend": run.backend, "machine": said["hardware"]}
    parts += table([about | {"started": said["started"], "duration": said["duration"]}])
    for heading in ("warnings", "problems", "reading"):
        if said[heading]:
            parts += [f"## {heading.capitalize()}", "", *(f"- {text(line)}" for line in said[heading]), ""]
    numbers = [{"key number": card["label"], "value": f"{card['value']} {card['unit']}"} for card in said["cards"]]
    groups = [*said["checks"], *said["passed"], *said["unjudged"]]
    judged = [{head: row[name] for head, name in CHECK.items()} for _, rows in groups for row in rows]
    tables = {"Key numbers": numbers, "Checks": judged, **said["tables"]}
    for heading, rows in tables.items():
        parts += [f"## {text(heading)}", "", *table(rows)] if rows else []
    images = [f"![{text(picture['alt'])}](pictures/{picture['name']}.png)\n" for picture in said["pictures"]]
    parts += ["## Pictures", "", *images] if images else []
    return [*parts, "## Run it again", "", f"    {said['command']}"] if said["command"] else parts


def render(run_dir: Path) -> Path:
    """Write ``report.md`` and ``pictures/`` into a run folder, which may lack any part, and return the path of the report."""
    run = Run(run_dir)
    said = report.content(run, Problems())
    pictures.save(said, run.path / "pictures")
    write_text(run.path / NAME, "\n".join(lines(said)).rstrip() + "\n")
    return run.path / NAME
