"""A moment on both clocks: the wall clock says when it was, the monotonic one how long ago.

The wall clock of a machine may be set while a run goes on, by hours even; no duration may come from it.
"""

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Moment:
    """``wall`` is unix seconds; ``monotonic`` is comparable among the processes of one machine since its start."""

    wall: float
    monotonic: float

    @classmethod
    def now(cls) -> "Moment":
        """Return this moment."""
        return cls(time.time(), time.monotonic())

    @classmethod
    def at(cls, wall: float) -> "Moment":
        """Return a moment that only the wall clock knows, as if that had not been set since."""
        return cls(wall, time.monotonic() - (time.time() - wall))

    def since(self) -> float:
        """Return the seconds that have passed since."""
        return time.monotonic() - self.monotonic
