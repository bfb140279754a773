"""Pods: how a pod ends, and what is fetched of what it hands over."""

import base64
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time

import pytest

from benchlib.core.files import home
from benchlib.launch.agents import pod
from benchlib.launch.agents.kubernetes import add_events, unpack


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return path


def archive_of(folder, *files):
    """Return an archive with files as somebody else might write it: (name, content)."""
    archive, source = folder / "theirs.tar.gz", folder / "source"
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in files:
            source.write_bytes(content)
            member = tar.gettarinfo(source)
            member.name, member.mtime = name, time.time() + 1
            with source.open("rb") as file:
                tar.addfile(member, file)
    source.unlink()
    return archive


def command(run_dir, *options):
    config = ["--config", str(home() / "pyproject.toml")]
    return [sys.executable, "-m", "benchlib.launch.agents.pod", str(run_dir), *config, *options]


def test_a_pod_ends_on_sigterm_while_its_ranks_run(run_dir):
    env = {**os.environ, "PYTHONPATH": str(home()), "JOB_COMPLETION_INDEX": "1"}
    with subprocess.Popen(command(run_dir, "--", "sleep", "100"), stdout=subprocess.PIPE, env=env) as process:
        while not (run_dir / "config.json").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 143


def test_a_connected_node_takes_its_files_gives_its_results_and_ends_with_the_connection(run_dir):
    files = b'{"config.json": {"seed": 3}}\n'
    words = [sys.executable, "-m", "benchlib.launch.agents.pod", str(run_dir), "--config", "-", "--"]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": {**os.environ, "PYTHONPATH": str(home())}}
    with subprocess.Popen([*words, "touch", str(run_dir / "result.json")], **options) as node:
        node.stdin.write(files)
        node.stdin.flush()
        line = json.loads(node.stdout.readline().removeprefix(pod.LINE.encode()))
        assert node.wait(90) == 0 == line["returncode"]
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(line["archive"]))) as tar:
        assert tar.getnames() == ["result.json"]
    assert json.loads((run_dir / "config.json").read_text()) == {"seed": 3}
    with subprocess.Popen([*words, "sleep", "100"], **options) as node:
        node.communicate(files, timeout=90)  # which ends the input
        assert node.returncode == 143


def test_a_pod_hands_over_what_was_measured_and_logged(run_dir, tmp_path, monkeypatch):
    """Not what is large, hidden or of the pod itself; events are never too large."""
    monkeypatch.setattr(pod, "MAX_BYTES", 4)
    names = {"result.json", "logs/rank0.err", "logs/torchrun/agent.log", "events-rank0.jsonl"}
    for name in (*names, "config.json", "checkpoints/model.json", ".lock", "large.json"):
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text("12345" if name in ("large.json", "events-rank0.jsonl") else "1234")
    (run_dir / "linked.json").symlink_to(run_dir / "result.json")
    archive = tmp_path / "results.tar.gz"
    pod.pack(run_dir, archive)
    with tarfile.open(archive) as tar:
        assert set(tar.getnames()) == names


def test_events_continue_what_is_there(run_dir, tmp_path):
    """A log is read from its start again, may have lost its beginning, and the archive has what it did not carry."""
    name = "events-rank3.jsonl"
    for offset, data in ((0, b"{}\n"), (0, b"{}\n"), (6, b"[]\n"), (3, b"()\n")):
        add_events(run_dir / name, offset, data)
    assert (run_dir / name).read_bytes() == b"{}\n()\n"
    unpack(archive_of(tmp_path, (name, b"{}\n()\n[]\n")), run_dir)
    assert (run_dir / name).read_bytes() == b"{}\n()\n[]\n"
