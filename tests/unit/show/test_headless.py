"""How long a notebook gets at its limit: one that computes some more, one that hangs none."""

import threading
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


@pytest.mark.parametrize(("share", "waits"), [(0.0, 1), (0.9, 4)], ids=["hangs", "computes"])
def test_only_a_kernel_that_computes_gets_more_time(monkeypatch, share, waits):
    now, waited = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Ended:
        def wait(self, seconds):
            waited.append(seconds)
            now[0] += seconds
            return False

    monkeypatch.setattr(headless, "WATCH_S", 0.25)
    assert not headless._ended_at_work(Kernel(share), Ended(), 1.0)
    assert waited == waits * [0.25]


def test_a_kernel_that_ends_meanwhile_is_not_killed(monkeypatch):
    monkeypatch.setattr(headless, "WATCH_S", 0.02)
    ended = threading.Event()
    threading.Timer(0.1, ended.set).start()
    assert headless._ended_at_work(Kernel(0.9), ended, 5.0)
