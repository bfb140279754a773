"""Events of a run as JSON lines, and the progress that they tell. One file per writer, so that lines are never torn or mixed.

An event is ``{"t": unix seconds, "source": writer, "kind": word, ...}``. The notebook, the terminal, the supervisor
and the report all read the same files.
"""

import contextlib
import heapq
import json
import os
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from benchlib.core.errors import UserError
from benchlib.core.files import read_bytes, unmarked, writing

Event = dict[str, Any]
EVENT: dict[str, Any] = {"t": (int, float), "kind": str, "source": str}
NEEDED = {"plan": "planned_steps", "phase": "name", "step": "step", "progress": "done total", "start": "pid"}
LONG_S = 5.0
MIN_SPAN_S = 0.2  # of the steps that a rate is of
RATE_WINDOW = 20  # steps that the shown rate is averaged over
# Words for the phases that benchmarks share; the event of another phase brings its own as ``text``.
PHASES = {
    "import": "loading torch",
    "init": "ranks meet",
    "data": "reading the data",
    "features": "tokenising",
    "model": "loading the model",
    "warmup": "measuring the speed",
    "train": "training",
    "measure": "measuring",
    "evaluate": "evaluating",
    "write": "writing results",
    "done": "done",
}


@dataclass(frozen=True)
class Moment:
    """A moment on both clocks: ``wall``, unix seconds, says when it was, ``monotonic`` how long ago.

    The wall clock may be set while a run goes on. The monotonic clock is the same for all processes of a machine.
    """

    wall: float
    monotonic: float

    @classmethod
    def now(cls) -> "Moment":
        return cls(time.time(), time.monotonic())

    @classmethod
    def at(cls, wall: float) -> "Moment":
        """Return a moment that only the wall clock knows, as if that had not been set since."""
        return cls(wall, time.monotonic() - (time.time() - wall))

    def since(self) -> float:
        return time.monotonic() - self.monotonic


class EventWriter:
    """Appends events to ``RUN_DIR/events-<name>.jsonl``.

    Each event is one ``write`` call on a file opened for appending: it is whole in the file even when the process is
    killed right after, and no buffer is lost.
    """

    def __init__(self, run_dir: Path | str, name: str) -> None:
        self.name = name
        self.path = Path(run_dir) / f"events-{name}.jsonl"
        with writing(self.path):
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event. ``fields`` must be plain JSON values; NaN and infinity are written as text.

        A full disk is a ``StorageError``; of the event there may be a part, which no reader takes.
        """
        line = json.dumps({"t": time.time(), "source": self.name, "kind": kind, **fields})
        if "NaN" in line or "Infinity" in line:  # JSON has no such numbers
            line = json.dumps(json.loads(line, parse_constant=str))
        data = line.encode() + b"\n"
        with writing(self.path):
            while data:  # the disk may take a part: the next call gets the rest in, or the reason
                data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        """Close the file; further events raise ``OSError``."""
        os.close(self._descriptor)
        self._descriptor = -1  # the number may soon be another file's


class EventFollower:
    """Reads the events that were added since the last look, from all files of a run folder or from that of one writer."""

    def __init__(self, run_dir: Path | str, writer: str = "*") -> None:
        self.run_dir, self.files = Path(run_dir), f"events-{writer}.jsonl"
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[Event]:
        """Return the new events in the order of time; a line that is still being written waits for the next poll.

        Cut or foreign lines and files, and events without what their kind needs, are passed over.
        """
        files = []
        for path in sorted(self.run_dir.glob(self.files)):
            with contextlib.suppress(UserError):
                offset = self._offsets.get(path, 0)
                data = read_bytes(path, start=offset)
                whole = data.rfind(b"\n") + 1
                self._offsets[path] = offset + whole
                files.append([*_events(data[:whole])])
        # Merged, not sorted: what one process wrote keeps its order even where the clock was set back meanwhile.
        return list(heapq.merge(*files, key=lambda event: event["t"]))


def _events(data: bytes) -> Iterator[Event]:
    for line in data.split(b"\n"):  # JSON has no bare line feed
        with contextlib.suppress(ValueError):
            event = from_json(unmarked(line), allow_inf_nan=False)
            whole = isinstance(event, dict) and all(isinstance(event.get(name), kind) for name, kind in EVENT.items())
            if whole and event.keys() >= {*NEEDED.get(event["kind"], "").split()}:
                yield event


def read_events(run_dir: Path | str, kinds: Collection[str] = (), writer: str = "*") -> list[Event]:
    """Return the events of a run folder, those of some ``kinds`` or of one ``writer``, in the order of time."""
    return [event for event in EventFollower(run_dir, writer).poll() if not kinds or event["kind"] in kinds]


def restarts(run_dir: Path | str) -> int:
    return max(0, len({event.get("attempt") for event in read_events(run_dir, {"start"})}) - 1)


@dataclass
class Progress:
    """The phase of a run, how far it is and how fast, folded from its events.

    ``began`` is when the phase did, monotonic: one of more than ``LONG_S`` that cannot tell the time left shows the time it
    has taken. ``rate`` is samples per second over the last steps, ``left_s`` the seconds left. ``text`` are the words
    for the phase.
    """

    phase: str = "starting"
    text: str = "starting"
    done: int = 0
    total: int = 0
    planned: int = 0
    loss: float | None = None
    rate: float | None = None
    left_s: float | None = None
    started: float = field(default_factory=time.monotonic)
    began: float = field(default_factory=time.monotonic)
    _recent: list[tuple[float, int, int]] = field(default_factory=list)

    def update(self, event: Event) -> None:
        """Take one event in; those of other ranks, and those that say nothing about progress, change nothing."""
        match event["kind"] if event["source"] == "rank0" else "":
            case "plan":
                self.planned = event["planned_steps"]
            case "phase":
                self.phase, self.done, self.left_s, self.began = event["name"], 0, None, time.monotonic()
                self.text = event.get("text") or PHASES.get(self.phase, self.phase)
                self.total = self.planned if self.phase == "train" else 0
                self._recent.clear()
            case "step":
                # A loss that is not finite was written as text, since JSON has no such number.
                self.done, self.loss = event["step"], float(event["loss"]) if event.get("loss") is not None else None
                self._timed(event["t"], event.get("samples") or 0)
            case "progress":
                self.done, self.total = event["done"], event["total"]
                self._timed(event["t"], 0)

    def _timed(self, now: float, samples: int) -> None:
        if self._recent and self.done < self._recent[-1][1]:
            self._recent.clear()  # another count of the same phase has begun
        self._recent = [*self._recent, (now, self.done, samples)][-RATE_WINDOW - 1 :]
        first_t, first_done, _ = self._recent[0]
        span, advanced = now - first_t, self.done - first_done
        if span > MIN_SPAN_S and advanced > 0:  # steps are reported several at a time
            self.rate = sum(count for _, _, count in self._recent[1:]) / span or self.rate
            # By what was done, not by the number of events: progress is reported in leaps.
            self.left_s = max(0, self.total - self.done) * span / advanced if self.total else None

    def line(self) -> str:
        train, elapsed = self.phase == "train", time.monotonic() - self.began
        left = f"{self.left_s:.0f} s left" if self.left_s is not None and self.done < self.total else ""
        parts = (
            self.text,
            self.total and f"{self.done:,}/{self.total:,}",
            train and self.loss is not None and f"loss {self.loss:.3f}",
            train and self.rate and f"{self.rate:,.1f} samples/s",
            left or (elapsed >= LONG_S and f"for {elapsed:.0f} s"),
        )
        return "  ".join(part for part in parts if part)


@contextlib.contextmanager
def keep_alive(events: EventWriter, most_s: float) -> Iterator[None]:
    """Tell every few seconds that a long step is under way: a compilation, or workers that load, take longer than the stall limit.

    Only for ``most_s`` seconds, as long as the start-up may take, so that a hang is still found.
    """
    done = threading.Event()

    def tell() -> None:
        end = time.monotonic() + most_s
        while not done.wait(5) and time.monotonic() < end:
            events.emit("heartbeat")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
