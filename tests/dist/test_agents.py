"""Runs that other machines carry: through stand-ins for kubectl that run pods here, and through SLURM
itself where it is."""

import json
import os
import signal
import subprocess
import sys

import one_slurm
import pytest
from harness import BOOM, HERE, at_step, failed, free_port, prepare, seen
from waiting import until

from benchlib.core.events import read_events
from benchlib.launch.launch import Launch, execute
from benchlib.launch.processes import marked

PODS = {"launcher": "kubernetes", "nproc": 1}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Put the stand-in for kubectl on the PATH; return its folder."""
    root, programs = tmp_path / "cluster", tmp_path / "bin"
    root.mkdir()
    program(programs / "kubectl", f'exec {sys.executable} {HERE / "standin_kubectl.py"} "$@"')
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STANDIN", str(root))
    return root


def program(path, text):
    """Write a shell script that can be run."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def profile(folder, text):
    """Write the profile of a cluster; return the parameter that names it."""
    (folder / "profile.yaml").write_text(text)
    return {"cluster": str(folder / "profile.yaml")}


def calls(root):
    """Return the commands that kubectl was given, without those that only look."""
    lines = [json.loads(line) for line in (root / "calls.jsonl").read_text().splitlines()]
    return [word for line in lines for word in line if word in ("create", "cp", "logs", "delete")]


def pods_left(root):
    """Return the processes of pods and of their followers that are still there."""
    processes = marked(root, "STANDIN")
    return [process.pid for process in processes if process.is_running() and process.ppid() != os.getpid()]


def started(run_dir):
    return sorted(event["source"] for event in read_events(run_dir, {"start"}))


def test_two_pods_meet_and_their_results_come_home(cluster, tmp_path):
    own = profile(tmp_path, f"links: {{inter_node_gbps: 100, inter_node_source: a sheet}}\nport: {free_port()}\n")
    run_dir = prepare(tmp_path / "run", nnodes=2, **PODS, **own)
    status = execute(run_dir, benchmark="faulty:checksums")
    assert status["outcome"] == "complete", status["reason"]
    assert started(run_dir) == ["rank0", "rank1"]
    assert {(rank["rank"], rank["last_phase"]) for rank in status["ranks"]} == {(0, "done"), (1, "done")}
    assert [saw["place"][:2] for saw in seen(run_dir)] == [[0, 2], [1, 2]], "one world over two pods"
    assert json.loads((run_dir / "machine.json").read_text())["host"], "written by rank 0 in its pod"
    assert json.loads((run_dir / "config.json").read_text())["cluster"] == own["cluster"], "the own config is kept"
    assert calls(cluster)[0] == "create" and calls(cluster)[-1] == "delete" and calls(cluster).count("cp") == 2
    assert (cluster / "deleted").read_text() == (cluster / "created.yaml").read_text(), "removed is what was created"
    assert not list(run_dir.rglob(".results*"))
    assert not read_events(run_dir, {"sensor"}), "this machine's sensors say nothing about the pods"
    assert pods_left(cluster) == []


def test_an_agent_takes_its_job_back_when_its_supervisor_is_killed(cluster, tmp_path):
    run_dir = prepare(tmp_path / "run", **PODS)
    with Launch(run_dir, "faulty:run").start() as launch:
        at_step(run_dir, 0)
        os.kill(launch.pid, signal.SIGKILL)
        assert launch.wait()["outcome"] == "failed"
    until((cluster / "deleted").exists)
    until(lambda: not pods_left(cluster))


@pytest.mark.parametrize(
    ("mode", "values", "words"),
    [
        ("", {"fault": "boom", "who": 0}, BOOM.replace("rank 1", "rank 0")),
        ("image", {}, 'cannot start: ImagePullBackOff: Back-off pulling image "benchlib:cpu"'),
    ],
)
def test_a_pod_that_fails_or_cannot_run_says_why(cluster, tmp_path, monkeypatch, mode, values, words):
    monkeypatch.setenv("STANDIN_MODE", mode)
    error = failed(prepare(tmp_path / "run", **PODS, **values))
    assert words in error.status["reason"]
    assert mode or "in boom" in str(error), "its traceback came along"
    assert calls(cluster)[-1] == "delete" and pods_left(cluster) == []


@pytest.mark.usefixtures("cluster")
def test_a_job_that_stays_in_the_queue_is_cancelled(tmp_path):
    program(tmp_path / "bin" / "sbatch", "echo 77; exec sleep 100")
    program(tmp_path / "bin" / "scancel", f'echo "$1" > {tmp_path / "cancelled"}')
    program(tmp_path / "bin" / "squeue", "true")
    run_dir = prepare(tmp_path / "run", launcher="slurm", **profile(tmp_path, "queue_s: 1.5\n"))
    assert failed(run_dir).status["reason"].startswith("no rank was started in 2 s (queue_s of the cluster's profile)")
    assert (tmp_path / "cancelled").read_text() == "77\n"


@pytest.mark.skipif(bool(one_slurm.missing()), reason=one_slurm.missing())
def test_slurm_itself(tmp_path, monkeypatch):
    """Two nodes: srun starts the ranks; one that fails is named; nothing stays in the queue."""
    with one_slurm.running(tmp_path / "slurm") as conf:
        monkeypatch.setenv("SLURM_CONF", str(conf))
        run_dir = prepare(tmp_path / "run", launcher="slurm", nnodes=2, nproc=1)
        status = execute(run_dir, benchmark="faulty:checksums")
        assert status["outcome"] == "complete", status["reason"]
        assert [saw["place"][:3] for saw in seen(run_dir)] == [[0, 2, 0], [1, 2, 0]], (
            "each is the only rank of its node"
        )
        broken = prepare(tmp_path / "broken", launcher="slurm", nproc=2, fault="boom")
        assert failed(broken).status["reason"] == BOOM
        queue = subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True)
        assert "R " not in queue.stdout
