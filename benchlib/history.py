"""The past of a folder of runs, in the order of time.

Of each run only a few small files are read (``benchlib.run_reader``); of samples only the two ends, of events nothing.
What was read is kept in a cache that may be deleted at any time (``benchlib.history_cache``).
"""

import contextlib
import gc
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchlib import history_cache
from benchlib.run_reader import Reader
from benchlib.stored_run import DAY, RUN, StoredRun

if TYPE_CHECKING:
    import pandas


def run_folders(store: Path) -> Iterable[str]:
    """Return the folders that lie where runs lie: two levels below ``store``, hidden ones left out.

    They are texts and no paths: putting paths together takes as long as reading the files.
    """
    for day in sorted(store.iterdir()) if store.is_dir() else []:
        if day.is_dir() and DAY.match(day.name):
            with os.scandir(day) as items:
                yield from (item.path for item in items if item.is_dir() and not item.name.startswith("."))


def read(store: Path | str) -> list[StoredRun]:
    """Return all runs of a folder of runs, the oldest first; none where there is no such folder."""
    store = Path(store)
    with _no_collection():
        known = history_cache.load(store)
        reader, found = Reader(), dict[str, tuple[list[int], StoredRun]]()
        fresh = 0
        for folder in run_folders(store):
            path = "/".join(folder.rsplit("/", 2)[-2:])
            stamp = history_cache.stamp(folder)
            if path in known and known[path][0] == stamp:
                found[path] = known[path]
            else:
                found[path] = (stamp, reader.read(folder))
                fresh += 1
        history_cache.save(store, found, fresh, len(known))
    runs = sorted((run for _, run in found.values()), key=lambda run: (run.started, run.path))
    _mark_copies(runs)
    return runs


def _mark_copies(runs: Iterable[StoredRun]) -> None:
    """Say of folders that hold the same run which one counts, and of the others what they are copies of."""
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        if run.digest:
            groups.setdefault(run.digest, []).append(run)
    for same in groups.values():
        if len(same) > 1:
            first, *others = sorted(same, key=_originality)
            for run in others:
                run.copy_of = first.path if run.name == first.name else first.name


def _originality(run: StoredRun) -> tuple[bool, bool, int, str]:
    # Who copies a folder adds to its name ("-copy", "Copy of ").
    return bool(run.damaged), not RUN.match(run.name), len(run.name), run.path


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    # Hundreds of thousands of small objects and no cycle among them: looking for garbage takes a fifth of the time.
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def frame(runs: Iterable[StoredRun]) -> "pandas.DataFrame":
    """Return runs as one table with a row for each metric; a run without metrics has one row without a metric."""
    import pandas as pd

    rows = []
    for run in runs:
        place = {name: run.facts.get(name, "") for name in ("host", "benchlib", "torch")}
        common = {
            "run": run.name, "started": run.moment, "benchmark": run.benchmark, "tier": run.tier,
            "backend": run.backend, "machine": run.hardware, **place, "series": run.series, "verdict": run.word,
            "sentence": run.sentence, "damaged": run.damaged, "planted": run.planted,
        }  # fmt: skip
        rows += [
            common | {"metric": m.name, "value": m.value, "low": m.low, "high": m.high, "unit": m.unit}
            for m in run.metrics
        ] or [common]
    return pd.DataFrame(rows)
