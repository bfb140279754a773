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
    words = [sys.executable, "-c", "print(flush=True); input()", launch.SUPERVISOR, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout and supervisor.stdout.readline(), "it has its command line now"
        assert launch._supervisor_lives(tmp_path, {**event, "supervisor": supervisor.pid})
        assert not launch._supervisor_lives(tmp_path / "other", {**event, "supervisor": supervisor.pid})
        supervisor.communicate(b"\n")
        assert not launch._supervisor_lives(tmp_path, {**event, "supervisor": supervisor.pid})


FAMILY = """
import subprocess, sys
from benchlib.launch import ranks
scans = []
ranks.descendants = lambda: scans.append(1) or []
children = ranks.Children()
grandchild = "import time; time.sleep(0.5); print('the grandchild ends', flush=True)"
child = subprocess.Popen([sys.executable, "-c", f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {grandchild!r}])"])
children.living[child.pid] = child
children._wait(60.0)
print(children.ended() == [(child.pid, 0)], scans)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_the_end_of_a_family_is_awaited_without_a_scan_of_all_processes() -> None:
    done = subprocess.run([sys.executable, "-c", FAMILY], capture_output=True, text=True, check=True)
    assert done.stdout == "the grandchild ends\nTrue []\n"
