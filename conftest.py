"""What holds for all tests: no hub, no display, runs that stay out of the checkout's outputs, and what runs beside what.

``make test`` runs two tests at a time (``-n 2``). A file stays on one worker, and so do all files of tests/dist: they
start several processes each and wait for them most of the time, while the other worker has the rest of the tests to
itself. A test that compares times is marked ``alone``: nothing else of the suite runs while it does.
"""

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# Set before anything is imported, and inherited by every process that a test starts.
os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "BENCHLIB_HEADLESS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MPLBACKEND": "agg",
    }
)
os.environ.pop("COLUMNS", None)  # tables in tests are as wide as in a pipe
_outputs = tempfile.mkdtemp(prefix="benchlib-test-outputs-")
atexit.register(shutil.rmtree, _outputs, ignore_errors=True)
os.environ["BENCHLIB_OUTPUTS"] = _outputs
# Of the process that was started first; its workers inherit the name.
_turns = Path(os.environ.setdefault("BENCHLIB_TEST_TURNS", _outputs))


@contextlib.contextmanager
def _locked(name: str, how: int) -> Iterator[None]:
    with (_turns / name).open("w") as file:
        fcntl.flock(file, how)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a child that was forked may have the file open


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let tests that are marked ``alone`` run alone. Waiting is not part of the test's time limit."""
    alone = item.get_closest_marker("alone") is not None
    with contextlib.ExitStack() as stack:
        with _locked("door", fcntl.LOCK_EX):  # who waits to be alone holds the door: nobody goes in meanwhile
            stack.enter_context(_locked("room", fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Say which tests one worker runs, one after the other. (``--dist loadgroup`` loses its groups under pytest 9.2.)"""
    from xdist.scheduler import LoadFileScheduling

    class Streams(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/dist" if nodeid.startswith("tests/dist/") else super()._split_scope(nodeid)

    config.option.loadscopereorder = False  # xdist puts the most tests first; tests/dist are few and take longest
    return Streams(config, log)
