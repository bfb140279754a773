"""What happened in a run, as JSON lines: one file per writer, so that lines are never torn or mixed.

An event is ``{"t": unix seconds, "source": writer, "kind": word, ...}``. The notebook, the terminal, the supervisor
and the report all read the same files.
"""

import json
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class EventWriter:
    """Appends events to ``RUN_DIR/events-<name>.jsonl``.

    Each event is one ``write`` call on a file opened for appending: it is whole in the file even when the process is
    killed right after, and no buffer is lost.
    """

    def __init__(self, run_dir: Path | str, name: str) -> None:
        self.name = name
        self.path = Path(run_dir) / f"events-{name}.jsonl"
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event. ``fields`` must be plain JSON values; NaN and infinity are written as text."""
        event = {"t": time.time(), "source": self.name, "kind": kind, **fields}
        try:
            line = json.dumps(event, allow_nan=False)
        except ValueError:
            line = json.dumps(_finite(event), allow_nan=False)
        os.write(self._descriptor, line.encode() + b"\n")

    def close(self) -> None:
        """Close the file; further events raise ``OSError``."""
        os.close(self._descriptor)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _parse(lines: Iterator[bytes] | list[bytes], kinds: Collection[str] | None) -> list[Event]:
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue  # a damaged line must not hide the others
        if (
            isinstance(event, dict)
            and {"t", "kind", "source"} <= event.keys()
            and (kinds is None or event["kind"] in kinds)
        ):
            events.append(event)
    return events


def read_events(run_dir: Path | str, kinds: Collection[str] | None = None) -> list[Event]:
    """Return all events of a run folder in the order of time; cut or foreign lines are passed over."""
    events: list[Event] = []
    for path in sorted(Path(run_dir).glob("events-*.jsonl")):
        events += _parse(path.read_bytes().splitlines(), kinds)
    return sorted(events, key=lambda event: event["t"])


class EventFollower:
    """Reads the events that were added since the last look, from all files of a run folder."""

    def __init__(self, run_dir: Path | str) -> None:
        self.run_dir = Path(run_dir)
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[Event]:
        """Return the new events in the order of time; a line that is still being written waits for the next poll."""
        events: list[Event] = []
        for path in sorted(self.run_dir.glob("events-*.jsonl")):
            offset = self._offsets.get(path, 0)
            with path.open("rb") as handle:
                handle.seek(offset)
                data = handle.read()
            whole = data.rfind(b"\n") + 1
            self._offsets[path] = offset + whole
            events += _parse(data[:whole].splitlines(), None)
        return sorted(events, key=lambda event: event["t"])
