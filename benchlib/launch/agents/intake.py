"""What pods may bring home: what ranks measure and log, in pieces, and nothing that steers or judges the run here."""

import base64
import binascii
import hashlib
import os
import re
import threading
from pathlib import Path, PurePosixPath
from typing import Any

from benchlib.launch.agents.pod import LARGEST_BYTES, PIECE_BYTES

LINE_BYTES = 2 * PIECE_BYTES  # of a piece as a line of JSON: base64 is a third longer than its data
EVENTS_BYTES = 256 << 20  # of one rank
TOTAL_BYTES = 4 << 30  # of a run
EVENTS = re.compile(r"events-rank\d{1,6}\.jsonl")
DATA = frozenset((".json", ".jsonl", ".parquet", ".csv", ".txt", ".log", ".npy", ".npz", ".png", ".svg"))
LOGS = DATA | {".out", ".err", ".stacks"}
# Data by their endings, but written here, in the course of a run: by the supervisor, the judge and the report.
RESERVED = frozenset(
    ("config.json", "job.json", "status.json", "verdict.json", "files.json", "store.json", "peers.json", "repeats.json")
)
REPLACED = frozenset(("machine.json",))  # told from here first, then by rank 0 of its own machine


class NotTaken(Exception):
    """A file that a pod has no say in; the others are taken all the same."""


class Intake:
    """Takes the files of a run's pods into its folder. Several threads may call it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._lock = run_dir.resolve(), threading.Lock()
        self._ours: set[Path] = set()  # made here, out of pieces
        self._total = 0

    def take(self, line: dict[str, Any], source: str) -> None:
        """Write one piece of a file. A file that comes whole appears at its end, if its digest is right.

        Raises ``NotTaken`` for a file that is not a pod's, and ``ValueError`` for a piece that does not continue what is
        there, for too many bytes, and for a file that did not arrive as it was sent.
        """
        with self._lock:
            self._take(line, source)

    def _take(self, line: dict[str, Any], source: str) -> None:
        target = self._place(str(line["path"]))
        offset, data = int(line["offset"]), _decoded(line["data"])
        events = bool(EVENTS.fullmatch(line["path"]))
        place = target if events else target.with_name(f".{target.name}.{source}.part")
        known = place.stat().st_size if place in self._ours else 0
        limit = EVENTS_BYTES if events else LARGEST_BYTES
        if not 0 <= offset <= known:
            raise ValueError(f"{line['path']}: a piece at byte {offset} does not continue the {known} that are there")
        if offset + len(data) > limit or self._total + len(data) > TOTAL_BYTES:
            raise ValueError(f"{line['path']}: more than {limit} bytes, or all files more than {TOTAL_BYTES}")
        target.parent.mkdir(parents=True, exist_ok=True)
        if place not in self._ours:
            place.unlink(missing_ok=True)  # left by somebody else
            self._ours.add(place)
        self._total += len(data)
        with place.open("r+b" if place.exists() else "w+b") as handle:
            handle.seek(offset)
            handle.write(data)
        if "sha256" in line and not events:
            self._finish(place, target, line)

    def _finish(self, place: Path, target: Path, line: dict[str, Any]) -> None:
        with place.open("r+b") as handle:
            handle.truncate(int(line["offset"]))
            found = hashlib.file_digest(handle, "sha256").hexdigest()
        if found != line["sha256"]:
            raise ValueError(f"{line['path']} arrived damaged")
        os.replace(place, target)
        self._ours.discard(place)
        self._ours.add(target)

    def _place(self, name: str) -> Path:
        """Return where a file of a pod belongs. Raises ``NotTaken``."""
        path = PurePosixPath(name)
        target = self._run_dir / path
        if (
            name != path.as_posix()
            or path.is_absolute()
            or ".." in path.parts
            or self._run_dir not in target.resolve().parents
        ):
            raise NotTaken(f"{name!r} was not taken: it is not in the run folder")
        logs = path.parts[0] == "logs"
        hidden = any(part.startswith(".") for part in path.parts)
        own = len(path.parts) == 1 and (name in RESERVED or re.match(r"config-|events-(?!rank)", name))
        if hidden or own or path.suffix not in (LOGS if logs else DATA) or not name.isprintable():
            raise NotTaken(f"{name!r} was not taken: it is written here, or is no data")
        if target.exists() and target not in self._ours and name not in REPLACED:
            raise NotTaken(f"{name!r} was not taken: the run folder has a file of that name that came from no pod")
        return target


def _decoded(text: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"a piece that is not base64: {error}") from None
    if len(data) > PIECE_BYTES:
        raise ValueError(f"a piece of {len(data)} bytes")
    return data
