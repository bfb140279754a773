"""Progress of a run, folded from its events: which phase, how far, how fast, how long still."""

import time
from dataclasses import dataclass, field

from benchlib.events import Event

RATE_WINDOW = 20  # steps that the shown rate is averaged over

PHASES = {
    "import": "loading torch",
    "init": "ranks meet",
    "data": "reading questions",
    "features": "tokenising",
    "model": "loading the model",
    "warmup": "measuring the speed",
    "train": "training",
    "measure": "measuring",
    "reference": "computing the reference",
    "members": "computing and comparing members",
    "evaluate": "evaluating",
    "write": "writing results",
    "done": "done",
}


@dataclass
class Progress:
    """What an onlooker wants to know. ``rate`` is samples per second over the last steps, ``left_s`` the time left.

    ``part`` names who is at work, and at what, in a phase whose parts have a count of their own.
    """

    phase: str = "starting"
    done: int = 0
    total: int = 0
    planned: int = 0
    loss: float | None = None
    rate: float | None = None
    left_s: float | None = None
    part: str = ""
    started: float = field(default_factory=time.monotonic)
    _recent: list[tuple[float, int, float]] = field(default_factory=list, repr=False)

    def update(self, event: Event) -> bool:
        """Take one event in; return whether something that is shown has changed."""
        kind = event["kind"]
        if kind == "phase" and event["source"] == "rank0":
            self.phase, self.done, self.left_s, self.part = str(event.get("name", "")), 0, None, ""
            self.total = self.planned if self.phase == "train" else 0
            self._recent.clear()
        elif kind == "plan":
            self.planned = int(event["planned_steps"])
        elif kind == "step" and event["source"] == "rank0":
            self.done = int(event["step"])
            # A loss that is not finite was written as text, since JSON has no such number.
            self.loss = None if event.get("loss") is None else float(event["loss"])
            self._timed(event["t"], float(event.get("samples") or 0))
        elif kind == "progress" and event["source"] == "rank0":
            self.done, self.total = int(event["done"]), int(event["total"])
            self.part = f"{event['member']}: {event['unit']}" if "member" in event else ""
            if not self.part:  # the time left of a part says nothing about the phase
                self._timed(event["t"], 0.0)
        else:
            return False
        return True

    def _timed(self, now: float, samples: float) -> None:
        if self._recent and self.done < self._recent[-1][1]:
            self._recent.clear()  # another count of the same phase has begun
        self._recent = [*self._recent, (now, self.done, samples)][-RATE_WINDOW - 1 :]
        first_t, first_done, _ = self._recent[0]
        span, advanced = now - first_t, self.done - first_done
        if span <= 0 or advanced <= 0:
            return
        seen = sum(count for _, _, count in self._recent[1:])
        self.rate = seen / span if seen else self.rate
        # By what was done, not by the number of events: progress is reported in leaps.
        self.left_s = max(0, self.total - self.done) * span / advanced if self.total else None

    def line(self) -> str:
        """Return one line for a terminal."""
        parts = [PHASES.get(self.phase, self.phase)]
        if self.part:
            parts.append(self.part)
        if self.total:
            parts.append(f"{self.done:,}/{self.total:,}")
        if self.phase == "train" and self.loss is not None:
            parts.append(f"loss {self.loss:.3f}")
        if self.phase == "train" and self.rate:
            parts.append(f"{self.rate:,.1f} samples/s")
        if self.left_s is not None and self.done < self.total:
            parts.append(f"{self.left_s:.0f} s left")
        return "  ".join(parts)
