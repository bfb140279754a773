"""Members that go wrong, for the tests of a run: ``record`` computes one by ``make`` in place of its executor."""

import dataclasses
import os
import signal

from benchlib.benchmarks.parity import exercise
from benchlib.core.errors import BackendUnavailable
from benchlib.workloads.executors import MEMBERS


def record(run_dir, name, work, tell):
    MEMBERS[name] = dataclasses.replace(MEMBERS[name], executor="parity_faults:make")
    exercise.record(run_dir, name, work, tell)


def make(model, member, where, example, folder):
    """Crash as a driver does, or miss a library, by the member's name."""
    if member.name == "sdpa_math":
        os.kill(os.getpid(), signal.SIGSEGV)
    raise BackendUnavailable("its library is not installed: pip install it")
