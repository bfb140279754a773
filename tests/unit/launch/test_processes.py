"""The family of a process, while members of it come and go."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchlib.core import run_folder
from benchlib.launch import launch, processes


def test_a_child_that_ends_while_it_is_looked_at_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleep) as short, subprocess.Popen(sleep) as staying:
        listed = [psutil.Process(short.pid), psutil.Process(staying.pid)]
        short.kill()
        short.wait()
        monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: listed)
        assert [one.pid for one in processes.descendants()] == [staying.pid]
        staying.kill()


@pytest.mark.parametrize("set_back_s", [0, 7200, -7200])
def test_without_locks_a_supervisor_is_known_by_its_command_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_back_s: int
) -> None:
    monkeypatch.setattr(run_folder, "claimed", lambda run_dir: None)
    event = {"t": time.time() - set_back_s}
    words = [sys.executable, "-c", "input()", launch.SUPERVISOR, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as supervisor:
        assert launch._supervisor_lives(tmp_path, {**event, "supervisor": supervisor.pid})
        assert not launch._supervisor_lives(tmp_path / "other", {**event, "supervisor": supervisor.pid})
        supervisor.communicate(b"\n")
        assert not launch._supervisor_lives(tmp_path, {**event, "supervisor": supervisor.pid})
