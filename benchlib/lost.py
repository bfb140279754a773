"""Runs whose supervisor died without a word: their ranks are ended, and what is known is written for it."""

import contextlib
import platform
import time
from pathlib import Path
from typing import Any

from benchlib import files, run_lock, shared_memory
from benchlib.diagnosis import RankRecord
from benchlib.errors import StorageError, UserError
from benchlib.events import Event, read_events
from benchlib.processes import kill_marked


def settle(run_dir: Path | str) -> dict[str, Any] | None:
    """Return the status of a run; for one whose supervisor died without a word, end its ranks and write one first.

    None while the run is going on, and for a folder in which no run was started, or one on another machine.
    """
    path = Path(run_dir).resolve()
    if (path / "status.json").exists():
        return files.read_json(path / "status.json")  # type: ignore[no-any-return]
    launched = read_events(path, {"launched"})
    if not launched or launched[-1].get("host") != platform.node() or _at_work(path, launched[-1]):
        return None
    return write_lost(path, "the run was cut off: its supervisor is gone and left no word")


def _at_work(run_dir: Path, launched: Event) -> bool:
    """Whether the supervisor of a launch lives: by the claim on the folder, else by its process id."""
    running = run_lock.taken(run_dir)
    pid = launched.get("supervisor")
    if running is not None or not isinstance(pid, int):
        return bool(running)
    import psutil

    try:
        process = psutil.Process(pid)
        # A younger process only got its number.
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= launched["t"] + 1.0
    except (psutil.Error, ValueError, OverflowError):
        return False


def write_lost(run_dir: Path, reason: str) -> dict[str, Any]:
    """End what is left of a run and write its ``status.json`` from the events; return it even where nothing can be
    written."""
    left = kill_marked(run_dir)
    if not left:
        shared_memory.free(run_dir)
    events = read_events(run_dir)
    records: dict[int, RankRecord] = {}
    for event in events:
        source = event["source"]
        if source.startswith("rank") and source[4:].isdecimal():
            rank = int(source[4:])
            if event["kind"] == "start":  # again, after a failure: what its earlier process did is past
                records[rank] = RankRecord(rank)
            with contextlib.suppress(KeyError, TypeError, ValueError):  # a foreign line
                records.setdefault(rank, RankRecord(rank)).hear(event)
    for record in records.values():
        error = run_dir / "logs" / f"rank{record.rank}.error.json"
        with contextlib.suppress(UserError):
            record.error = files.read_object(error, {"type": str, "message": str, "traceback": str})
    where = "; ".join(f"rank {rank} was last heard of{records[rank].where()}" for rank in sorted(records))
    reason += (f"; {where}" if where else "") + (f"; processes {left} could not be ended" if left else "")
    times = [event["t"] for event in events] or [time.time()]
    status: dict[str, Any] = {
        "outcome": "failed", "reason": reason, "culprit": None, "ranks": [records[rank].as_json() for rank in sorted(records)],
        "started_at": times[0], "ended_at": times[-1],
    }  # fmt: skip
    with contextlib.suppress(StorageError):  # the caller has it, and the next one finds out again
        files.write_json(run_dir / "status.json", status)
    return status
