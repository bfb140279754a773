"""Markdown for the summary page of a GitHub job, which takes at most 1 MiB a step.

https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands#adding-a-job-summary
"""

import html
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchlib.core.errors import UserError
from benchlib.core.text import MARKS, NOT_EVALUATED, UNJUDGED, counted, duration, quantity
from benchlib.judge.checks import Check
from benchlib.judge.snapshot import Snapshot
from benchlib.show.digest import cards
from benchlib.show.exports import put

VARIABLE = "GITHUB_STEP_SUMMARY"
MOST_BYTES = 1024 * 1024
CELL_CHARACTERS = 400
ROWS = 200
# What Markdown would take for itself; underscores inside a word and punctuation inside a line it leaves alone.
_SPECIAL = re.compile(r"([\\`*\[\]#|~$@]|(?<!\w)_|_(?!\w)|:(?=//)|(?<=www)\.|^[-+])")
_NUMBERED = re.compile(r"^(\d+)([.)])(?=\s|$)")


def write(runs: Sequence[Snapshot], output: str) -> str:
    """Append to the file of ``$GITHUB_STEP_SUMMARY``, or write to ``output``, or print."""
    named = os.environ.get(VARIABLE, "")
    if output or not named:
        return put(text(runs), output, f"Summary of {counted(len(runs), 'run')}")
    path = Path(named)
    left = MOST_BYTES - (path.stat().st_size if path.exists() else 0)
    if left < 1000:
        raise UserError(
            f"{path} is full: GitHub takes {MOST_BYTES:,} bytes a step; write the summary in a step of its own"
        )
    with path.open("a", encoding="utf-8") as handle:
        handle.write(text(runs, left))
    return f"Summary of {counted(len(runs), 'run')} added to {path}"


def text(runs: Sequence[Snapshot], most_bytes: int = MOST_BYTES) -> str:
    """Return the summary, what failed first; what would not fit is counted instead of shown."""
    order = ["DAMAGED", "BROKEN", "FAIL", "UNFINISHED", "STOPPED", "RUNNING", "AMBIGUOUS", "SKIPPED", "PASS"]
    ranked = sorted(runs, key=lambda run: order.index(run.word) if run.word in order else 0)
    parts, size = [], 0
    for shown, run in enumerate(ranked):
        part = _run(run)
        size += len(part.encode())
        if size > most_bytes - 300:
            parts.append(
                f"\n{counted(len(ranked) - shown, 'more run')} left out: the summary of a step ends at 1 MiB.\n"
            )
            break
        parts.append(part)
    return "".join(parts)


def escaped(words: object) -> str:
    """Return text that Markdown shows as it is, on one line, at most 400 characters of it."""
    line = " ".join(str(words).split())
    line = line if len(line) <= CELL_CHARACTERS else line[: CELL_CHARACTERS - 1] + "…"
    return _NUMBERED.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", html.escape(line, quote=False)))


def _run(run: Snapshot) -> str:
    word = run.word
    seconds = run.ended_at - run.started_at if run.started_at and run.ended_at else None
    where = [run.benchmark, f"{run.tier} tier", run.backend, str(run.machine.get("host") or "")]
    where += [duration(seconds)] if seconds is not None and seconds >= 0 else []
    lines = [
        f"### {MARKS.get(word, '?')} {escaped(word)}: {escaped(', '.join(part for part in where if part))}",
        "",
        escaped(run.sentence),
        "",
        f"Run {escaped(run.run)}",
        "",
    ]
    if run.problems and word != "DAMAGED":
        lines += ["Damaged parts, left out:", "", *(f"- {escaped(problem)}" for problem in run.problems[:20]), ""]
    if run.result:
        rows = [(card["label"], f"{card['value']} {card['unit']}".strip(), card["note"]) for card in cards(run.result)]
        lines += _table(("Key number", "Value", "Note"), rows)
    checks = run.verdict.checks if run.verdict else []
    judged = [check for check in checks if check.word not in UNJUDGED]
    lines += _table(("Status", "Check", "Result", "Limit"), (_row(check) for check in judged))
    left = [check for check in checks if check.word in UNJUDGED]
    if left:
        lines += [f"<details><summary>{counted(len(left), 'check')} {NOT_EVALUATED}</summary>", ""]
        lines += [*_table(("Status", "Check", "Reason", "Limit"), (_row(check) for check in left)), "</details>", ""]
    return "\n".join(lines) + "\n"


def _row(check: Check) -> tuple[str, ...]:
    result = check.reason or (quantity(check.value, check.unit) if check.value is not None else "")
    return f"{MARKS.get(check.word, '?')} {check.word.replace('_', ' ')}", check.name, result, check.limit


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    listed = list(rows)
    if not listed:
        return []
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(escaped(value) for value in row)} |" for row in listed[:ROWS]]
    if len(listed) > ROWS:
        lines += ["", f"{len(listed) - ROWS:,} more rows are in the report."]
    return [*lines, ""]
