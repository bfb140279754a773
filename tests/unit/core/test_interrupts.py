"""Signals that end a program: the first may raise, later ones are noted, and a run's end is not disturbed."""

import os
import signal

import pytest

from benchlib.core.interrupts import Interrupts


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def number(request):
    """A signal that ends the program; under nohup and a shell's & it would be ignored."""
    outside = signal.signal(request.param, signal.default_int_handler)
    yield request.param
    signal.signal(request.param, outside)


def test_the_first_signal_raises_and_later_ones_are_noted(number):
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert interrupts.seen
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            pytest.fail("the work began after the signal")
    assert signal.getsignal(number) is signal.default_int_handler
