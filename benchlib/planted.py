"""A slow-down that is planted on purpose: timed work is really made longer, so that a gate can be tested for finding it."""

import time


def hold(seconds: float) -> None:
    """Wait for ``seconds`` and keep the core busy, as slower work would: a core that sleeps speeds up its neighbours.

    What was queued on a device must have been waited for before.
    """
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
