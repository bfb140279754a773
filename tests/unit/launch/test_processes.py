"""The family of a process, while members of it come and go."""

import subprocess
import sys

import psutil
import pytest

from benchlib.launch import processes


def test_a_child_that_ends_while_it_is_looked_at_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleep) as short, subprocess.Popen(sleep) as staying:
        listed = [psutil.Process(short.pid), psutil.Process(staying.pid)]
        short.kill()
        short.wait()
        monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: listed)
        assert [process.pid for process in processes.descendants()] == [staying.pid]
        staying.kill()
