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


@pytest.mark.parametrize(("share", "more_s"), [(0.0, 60.0), (0.9, 0.3)], ids=["hangs", "computes"])
def test_only_a_kernel_that_computes_gets_more_time(monkeypatch, share, more_s):
    monkeypatch.setattr(headless, "WATCH_S", 0.02)
    began = time.monotonic()
    assert not headless._ended_at_work(Kernel(share), threading.Event(), more_s)
    assert (time.monotonic() - began >= more_s) == bool(share)


def test_a_kernel_that_ends_meanwhile_is_not_killed(monkeypatch):
    monkeypatch.setattr(headless, "WATCH_S", 0.02)
    ended = threading.Event()
    threading.Timer(0.1, ended.set).start()
    assert headless._ended_at_work(Kernel(0.9), ended, 5.0)
