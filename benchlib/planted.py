"""A slow-down that is planted on purpose: timed work is really made longer, so that a gate can be tested for finding it."""

import time

_SPIN_S = 2e-3  # sleeping is only this exact, what is left is waited for busily


def hold(seconds: float) -> None:
    """Wait for ``seconds``, to a few microseconds. What was queued on a device must have been waited for before."""
    end = time.perf_counter() + seconds
    if seconds > _SPIN_S:
        time.sleep(seconds - _SPIN_S)
    while time.perf_counter() < end:
        pass
