"""Attempts of a run: torchrun's agent may start the ranks again after a failure, and what each attempt came to is kept."""

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchlib.diagnosis import RankRecord
from benchlib.events import Event

REGROUPED = "regrouped"  # an attempt that ended because a node came or went; torchrun does not count it as a failure


@dataclass
class Ending:
    """How a run or an attempt ended. ``outcome`` is complete, failed, stopped, skipped, timeout or stalled.

    ``lost`` are the nodes that went away, see ``peers.Lost.as_json``.
    """

    outcome: str
    reason: str = ""
    culprit: int | None = None
    lost: list[dict[str, object]] = field(default_factory=list)


class Attempts:
    """The attempts so far. ``ending`` says how the present one failed while its successor is awaited, else None.

    ``began`` is by the monotonic clock; ``past`` are the rows of earlier attempts in ``status.json``.
    """

    def __init__(self, restarts: int) -> None:
        self.restarts = restarts
        self.past: list[dict[str, Any]] = []
        self.key = ""
        self.began, self.began_at = time.monotonic(), time.time()
        self.ending: Ending | None = None
        self.failed_at = 0.0

    @property
    def left(self) -> bool:
        """Whether the ranks will be started again after a failure."""
        return self.used < self.restarts

    @property
    def used(self) -> int:
        """Restarts after failures so far; a node that came or went costs none."""
        return sum(row["outcome"] != REGROUPED for row in self.past)

    def used_up(self, ending: Ending) -> str:
        """Return what to add to the reason of a run that failed although it was started again as often as allowed."""
        if ending.outcome not in ("failed", "stalled", "timeout") or not self.restarts or self.left:
            return ""
        return f"; all {self.restarts} restarts were used" if self.restarts > 1 else "; the 1 restart was used"

    def begins(self, event: Event, record: RankRecord | None) -> bool:
        """Whether a rank's start belongs to a new attempt; ``record`` is what is known of the rank in the present one."""
        key = str(event.get("attempt", ""))
        again = record is not None and record.pid not in (None, event.get("pid"))
        new = bool(self.key) and (again or key != self.key)
        self.key = key
        return new

    def fail(self, ending: Ending) -> None:
        """Take down how the present attempt failed; from now on its successor is awaited."""
        self.ending, self.failed_at = ending, time.monotonic()

    def close(self, ranks: Mapping[int, RankRecord]) -> dict[str, Any]:
        """End the present attempt, begin the next one and return the row of the one that ended."""
        ending = self.ending or Ending(REGROUPED, "torchrun started the ranks again because a node came or went")
        for record in ranks.values():
            record.ended_by_us = record.ended_by_us or (record.returncode is None and record.error is None)
        row = {
            "attempt": len(self.past) + 1,
            **dataclasses.asdict(ending),
            "ranks": [ranks[rank].as_json() for rank in sorted(ranks)],
            "started_at": self.began_at,
            "ended_at": time.time(),
        }
        self.past.append(row)
        self.began, self.began_at, self.ending, self.failed_at = time.monotonic(), time.time(), None, 0.0
        return row
