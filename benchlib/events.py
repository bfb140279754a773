"""What happened in a run, as JSON lines: one file per writer, so that lines are never torn or mixed.

An event is ``{"t": unix seconds, "source": writer, "kind": word, ...}``. The notebook, the terminal, the supervisor
and the report all read the same files.
"""

import contextlib
import heapq
import json
import math
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeGuard

from benchlib.errors import UserError
from benchlib.files import not_written, parse_json, read_bytes

Event = dict[str, Any]


class EventWriter:
    """Appends events to ``RUN_DIR/events-<name>.jsonl``.

    Each event is one ``write`` call on a file opened for appending: it is whole in the file even when the process is
    killed right after, and no buffer is lost.
    """

    def __init__(self, run_dir: Path | str, name: str) -> None:
        self.name = name
        self.path = Path(run_dir) / f"events-{name}.jsonl"
        try:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise not_written(self.path, error) from error

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event. ``fields`` must be plain JSON values; NaN and infinity are written as text.

        A full disk is a ``StorageError``, and the file ends with the last whole line.
        """
        event = {"t": time.time(), "source": self.name, "kind": kind, **fields}
        try:
            line = json.dumps(event, allow_nan=False)
        except ValueError:
            line = json.dumps(_finite(event), allow_nan=False)
        data = line.encode() + b"\n"
        try:
            written = os.write(self._descriptor, data)
            while written < len(data):  # the disk took a part: the next call gets the rest in, or the reason
                try:
                    written += os.write(self._descriptor, data[written:])
                except OSError:
                    with contextlib.suppress(OSError):
                        os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
                    raise
        except OSError as error:
            raise not_written(self.path, error) from error

    def close(self) -> None:
        """Close the file; further events raise ``OSError``."""
        os.close(self._descriptor)
        self._descriptor = -1  # the number may soon be another file's


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _parse(data: bytes, kinds: Collection[str] | None) -> list[Event]:
    events = []
    for line in data.split(b"\n"):  # JSON has no bare line feed; splitlines() would also split at other characters
        try:
            event = parse_json(line.decode()) if line.strip() else None
        except ValueError:
            continue  # a damaged line must not hide the others
        if _is_event(event) and (kinds is None or event["kind"] in kinds):
            events.append(event)
    return events


def _is_event(event: Any) -> TypeGuard[Event]:
    return (
        isinstance(event, dict)
        and isinstance(event.get("t"), (int, float))
        and math.isfinite(event["t"])
        and isinstance(event.get("kind"), str)
        and isinstance(event.get("source"), str)
    )


def _in_order(files: list[list[Event]]) -> list[Event]:
    # Merged, not sorted: what one process wrote keeps its order even where the clock was set back meanwhile.
    return list(heapq.merge(*files, key=lambda event: event["t"]))


def read_events(run_dir: Path | str, kinds: Collection[str] | None = None) -> list[Event]:
    """Return all events of a run folder in the order of time; cut or foreign lines and files are passed over."""
    files = []
    for path in sorted(Path(run_dir).glob("events-*.jsonl")):
        with contextlib.suppress(UserError):
            files.append(_parse(read_bytes(path), kinds))
    return _in_order(files)


def restarts(run_dir: Path | str) -> int:
    """Return how often torchrun started the ranks of a run folder again."""
    return max(0, len({str(event.get("attempt", "")) for event in read_events(run_dir, {"start"})}) - 1)


class EventFollower:
    """Reads the events that were added since the last look, from all files of a run folder."""

    def __init__(self, run_dir: Path | str) -> None:
        self.run_dir = Path(run_dir)
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[Event]:
        """Return the new events in the order of time; a line that is still being written waits for the next poll."""
        files = []
        for path in sorted(self.run_dir.glob("events-*.jsonl")):
            offset = self._offsets.get(path, 0)
            with path.open("rb") as handle:
                handle.seek(offset)
                data = handle.read()
            whole = data.rfind(b"\n") + 1
            self._offsets[path] = offset + whole
            files.append(_parse(data[:whole], None))
        return _in_order(files)
