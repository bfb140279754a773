"""The program as a process: pipes whose reader goes, and Ctrl+C while its modules are imported."""

import os
import signal
import subprocess
import sys

import pytest

from benchlib.core import interrupts
from benchlib.core.terminal import open_ended


def test_a_reader_that_goes_is_no_error():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", encoding="utf-8") as stream:
        open_to_nowhere = open_ended(stream)
        print("text" * 10_000, file=open_to_nowhere, flush=True)
        assert not open_to_nowhere.isatty()


@pytest.mark.parametrize("words", [["list"], ["nonsense"]], ids=" ".join)
def test_a_closed_pipe_changes_no_exit_code(words):
    command = [sys.executable, "-m", "benchlib", *words]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=write, timeout=60, check=False)
    os.close(write)
    assert done.returncode == (0 if words == ["list"] else 2)


SLOW = "import os, signal, sys; os.kill(os.getpid(), signal.SIGINT)"


def test_an_interrupt_in_an_import_ends_the_program_with_one_line(tmp_path):
    (tmp_path / "slow_library.py").write_text(f"try:\n    {SLOW}\nexcept BaseException:\n    pass\n")
    code = "from benchlib.core import interrupts\nwith interrupts.ending():\n    import slow_library\nprint('went on')"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Stopped by the user\n")


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN])
def test_after_an_import_an_interrupt_is_what_it_was(before):
    old = signal.signal(signal.SIGINT, before)
    try:
        with interrupts.ending():
            assert (signal.getsignal(signal.SIGINT) is before) == (before is signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, old)
