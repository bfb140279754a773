"""The family of a process, while members of it come and go; and a supervisor that is found again."""

import json
import platform
import signal
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
        assert [process.pid for process in processes.descendants()] == [staying.pid]
        staying.kill()


@pytest.mark.parametrize("set_back_s", [0, 7200, -7200])
def test_a_supervisor_is_known_by_its_command_whatever_the_clock_says_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_back_s: int
) -> None:
    """Where a file system has no locks. After SIGSTOP it neither watches nor ends: it would outlive its run for ever."""
    monkeypatch.setattr(run_folder, "claimed", lambda run_dir: None)
    words = [sys.executable, "-c", "print(flush=True); input()", launch.SUPERVISOR, str(tmp_path)]
    with psutil.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout.readline(), "it has its command line now"
        event = {"t": time.time() - set_back_s, "kind": "launched", "supervisor": supervisor.pid}
        event |= {"source": "supervisor", "host": platform.node()}
        (tmp_path / "events-supervisor.jsonl").write_text(json.dumps(event) + "\n")
        assert not launch._supervisor_lives(tmp_path / "other", event)
        for act, stopped in (
            (lambda: supervisor.send_signal(signal.SIGSTOP), True),
            (lambda: launch.settle(tmp_path), False),
        ):
            act()
            while (supervisor.status() == psutil.STATUS_STOPPED) != stopped:
                time.sleep(0.01)
        supervisor.communicate(b"\n")
        assert not launch._supervisor_lives(tmp_path, event)
