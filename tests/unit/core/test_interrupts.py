"""Signals that end a program: the first may raise, later ones are noted, and a run's end is not disturbed."""

import os
import signal

import pytest

from benchlib.core.interrupts import Interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_the_first_signal_raises_and_later_ones_are_noted(number):
    # Under nohup and a shell's & signals are ignored.
    outside = signal.signal(number, signal.default_int_handler)
    try:
        with Interrupts() as interrupts:
            with pytest.raises(KeyboardInterrupt), interrupts.allowed():
                os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            assert interrupts.seen
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, outside)


def test_a_signal_before_the_work_raises_at_its_beginning():
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            pytest.fail("the work began")


def test_what_is_ignored_stays_ignored():
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts, interrupts.allowed():
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupts.seen
    finally:
        signal.signal(signal.SIGHUP, old)
