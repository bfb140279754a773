"""Inside a pod: whose config counts where the folder is shared, and how a pod ends."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from benchlib.config import cluster
from benchlib.core.files import home
from benchlib.launch.agents import pod


def test_each_kind_of_node_keeps_its_own_config_on_a_shared_folder(tmp_path):
    mounted, shared = tmp_path / "etc", tmp_path / "outputs" / "run"
    mounted.mkdir()
    shared.mkdir(parents=True)
    submitted = {"backend": "cuda", "cluster": "/home/me/own.yaml"}
    (shared / "config.json").write_text(json.dumps(submitted))
    (mounted / "cluster.yaml").write_text("links: {inter_node_gbps: 100, inter_node_source: a sheet}\n")
    for name, backend in (("nvidia", "cuda"), ("amd", "rocm")):
        (mounted / f"{name}.json").write_text(json.dumps({"backend": backend, "cluster": "cluster.yaml"}))
    found = [json.loads(pod.prepare(shared, mounted / f"{name}.json").read_text()) for name in ("nvidia", "amd")]
    assert [one["backend"] for one in found] == ["cuda", "rocm"]
    for one in found:
        assert cluster.load(one["cluster"]).links.inter_node_gbps == 100, "the profile is the one that travelled"
    assert json.loads((shared / "config.json").read_text()) == submitted, "who submitted the run keeps its own"
    assert pod.leavings(shared) == []


def test_a_rank_reads_the_config_of_its_pod(tmp_path):
    """The second of two pods that share a folder: its rank is told of its own file."""
    shared, config = tmp_path / "run", tmp_path / "amd.json"
    shared.mkdir()
    (shared / "config.json").write_text('{"backend": "cuda", "text": "of another kind"}')
    config.write_text('{"backend": "rocm", "text": "of its own"}')
    (tmp_path / "told.py").write_text(
        "from pathlib import Path\n\ndef run(config, run_dir, events):\n"
        "    Path(run_dir, 'told.txt').write_text(f'{config.backend} {config.text}')\n"
    )
    worker = [sys.executable, "-m", "benchlib.runtime.worker", str(shared), "--benchmark", "told:run"]
    command = [
        sys.executable,
        "-m",
        "benchlib.launch.agents.pod",
        "run",
        str(shared),
        "--config",
        str(config),
        "--",
        *worker,
    ]
    path = os.pathsep.join([str(home()), str(tmp_path)])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, timeout=60, check=False)
    assert done.returncode == 0
    assert (shared / "told.txt").read_text() == "rocm of its own"


@pytest.mark.parametrize(
    ("options", "command", "code"),
    [
        (["--hold", "100"], ["sh", "-c", "exit 3"], 3),
        ([], ["sleep", "100"], 143),
        (["--meet", "127.0.0.1:9", "--meet-s", "100"], ["sh", "-c", "exit 3"], 143),
    ],
    ids=["while its results are fetched", "while its ranks run", "before they start"],
)
def test_a_pod_ends_when_it_is_told_to(tmp_path, options, command, code):
    config = tmp_path / "node.json"
    config.write_text("{}")
    head = [sys.executable, "-m", "benchlib.launch.agents.pod", "run", str(tmp_path / "run"), "--config", str(config)]
    with subprocess.Popen([*head, *options, "--", *command]) as process:
        end = time.monotonic() + 20
        while not (tmp_path / "run" / "config-node.json").exists() and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == code
