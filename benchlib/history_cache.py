"""What ``benchlib.history`` read, kept in ``.cache/history.json`` of the store, so that the next reading is quick.

An entry holds as long as its files keep their inode, size and times of change: a run that was judged again has
another ``verdict.json``. The file begins with a digest of the rest and with the state of the code that wrote it: one that
is cut, foreign or of another version is not used, and one that cannot be written is done without.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from benchlib.errors import UserError
from benchlib.files import write_bytes
from benchlib.paths import PACKAGE
from benchlib.stored_run import CHECKED, Measured, StoredRun

NAME = ".cache/history.json"
WORTH = 100  # runs read anew before the cache is written: fewer are read in the time that writing takes
Entries = dict[str, tuple[list[int], StoredRun]]


def stamp(folder: str) -> list[int]:
    """Return what tells whether a run folder changed: inode, size and times of the files that are read."""
    found = []
    for name in (*CHECKED, "report.html"):
        try:
            state = os.stat(f"{folder}/{name}")
            # The report's content does not matter, only whether there is one to link to.
            found += (
                [state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns] if name != "report.html" else [1]
            )
        except OSError:
            found.append(0)
    return found


@functools.cache
def _code() -> str:
    """Return a digest of the state of this package's code: what other code read may mean something else."""
    states = sorted((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in PACKAGE.rglob("*.py"))
    return hashlib.sha256(repr(states).encode()).hexdigest()[:16]


def load(store: Path) -> Entries:
    """Return the entries of a store's cache by path; none where it is missing, damaged, foreign or outdated."""
    try:
        head, _, body = (store / NAME).read_bytes().partition(b"\n")
        if head.decode() != _head(body):
            return {}
        content = from_json(body)
        facts = content["facts"]
        names, units, directions = zip(*content["labels"], strict=True) if content["labels"] else ((), (), ())
        entries = {}
        for path, (state, values, place, metrics) in content["runs"].items():
            run = StoredRun(path, **values, facts=facts[place])
            run.regressions = [(name, reason) for name, reason in run.regressions]
            run.metrics = [
                Measured(names[kind], value, low, high, units[kind], directions[kind])
                for kind, value, low, high in metrics
            ]
            entries[path] = (state, run)
        return entries
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return {}


def _head(body: bytes) -> str:
    return f"{_code()} {hashlib.sha256(body).hexdigest()}"


def save(store: Path, entries: Entries, fresh: int, known: int) -> None:
    """Write the cache where enough changed to be worth it; a store that cannot be written to stays without."""
    if fresh + abs(known + fresh - len(entries)) < WORTH:
        return
    facts: dict[int, int] = {}  # runs share the mappings that are equal
    shared: list[dict[str, str]] = []
    labels: dict[tuple[str, str, str], int] = {}
    runs = {}
    for path, (state, run) in entries.items():
        values = {item.name: getattr(run, item.name) for item in dataclasses.fields(run)}
        for name in ("path", "facts", "metrics"):
            del values[name]
        if id(run.facts) not in facts:
            facts[id(run.facts)] = len(shared)
            shared.append(run.facts)
        metrics = [
            (labels.setdefault((m.name, m.unit, m.direction), len(labels)), m.value, m.low, m.high) for m in run.metrics
        ]
        runs[path] = (state, values, facts[id(run.facts)], metrics)
    content: dict[str, Any] = {"facts": shared, "labels": list(labels), "runs": runs}
    with contextlib.suppress(OSError, ValueError, UserError):  # ValueError: a folder's name that is no text
        body = to_json(content)
        write_bytes(store / NAME, _head(body).encode() + b"\n" + body)
