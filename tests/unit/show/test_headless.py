"""How long a notebook gets at its limit: one that computes some more, one that hangs none."""

import time

import pytest

from benchlib.show import headless


class Kernel:
    """Uses ``share`` of a core."""

    def __init__(self, share):
        self.share, self.began = share, time.monotonic()

    def used_s(self):
        return self.share * (time.monotonic() - self.began)

    def stopped(self):
        return False


@pytest.mark.parametrize(
    ("share", "ends_at", "waits"),
    [(0.0, 99, 1), (0.9, 99, 4), (0.9, 3, 3)],
    ids=["hangs", "computes", "computes and ends"],
)
def test_only_a_kernel_that_computes_gets_more_time(monkeypatch, share, ends_at, waits):
    now, waited = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Ended:
        def wait(self, seconds):
            waited.append(seconds)
            now[0] += seconds
            return len(waited) == ends_at

    monkeypatch.setattr(headless, "WATCH_S", 0.25)
    assert headless._ended_at_work(Kernel(share), Ended(), 1.0) == (ends_at == waits)
    assert waited == waits * [0.25]
