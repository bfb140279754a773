"""Runs that other machines carry: through stand-ins for kubectl that run pods here, and through SLURM and TorchX
themselves where they are."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import one_slurm
import pytest
from harness import HERE, free_port, prepare, until

from benchlib.core.events import read_events
from benchlib.launch.launch import Launch, RankFailed, execute
from benchlib.launch.processes import marked


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in for kubectl on the PATH; return its folder."""
    root, programs = tmp_path / "cluster", tmp_path / "bin"
    root.mkdir()
    program(programs / "kubectl", f'exec {sys.executable} {HERE / "standin_kubectl.py"} "$@"')
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STANDIN", str(root))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parents[1]), str(HERE)]))
    return root


def program(path: Path, text: str) -> None:
    """Write a shell script that can be run."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def calls(root: Path) -> list[str]:
    """Return the commands that kubectl was given, without those that only look."""
    lines = [json.loads(line) for line in (root / "calls.jsonl").read_text().splitlines()]
    verbs = [next(word for word in line if word in ("create", "get", "cp", "logs", "delete")) for line in lines]
    return [verb for verb in verbs if verb != "get"]


def pods_left(root: Path) -> list[int]:
    """Return the processes of pods and of their followers that are still there."""
    processes = marked(root, "STANDIN")
    return [process.pid for process in processes if process.is_running() and process.ppid() != os.getpid()]


@pytest.fixture
def direct(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in, with pods that start their rank without torchrun."""
    monkeypatch.setenv("STANDIN_DIRECT", "1")
    return cluster


def test_two_pods_meet_and_their_results_come_home(cluster: Path, tmp_path: Path) -> None:
    profile = tmp_path / "two.yaml"
    profile.write_text(f"links: {{inter_node_gbps: 100, inter_node_source: a sheet}}\nport: {free_port()}\n")
    run_dir = prepare(tmp_path / "run", launcher="kubernetes", nnodes=2, nproc=1, cluster=str(profile))
    status = execute(run_dir, benchmark="faulty:checksums")
    assert status["outcome"] == "complete", status["reason"]
    assert sorted(event["source"] for event in read_events(run_dir, {"start"})) == ["rank0", "rank1"]
    assert {(rank["rank"], rank["last_phase"]) for rank in status["ranks"]} == {(0, "done"), (1, "done")}
    seen = [json.loads((run_dir / f"seen{rank}.json").read_text()) for rank in (0, 1)]
    assert [facts["place"][:2] for facts in seen] == [[0, 2], [1, 2]], "one world over two pods"
    assert json.loads((run_dir / "machine.json").read_text())["host"], "written by rank 0 in its pod"
    assert json.loads((run_dir / "config.json").read_text())["cluster"] == str(profile), "the own config is kept"
    assert calls(cluster)[0] == "create" and calls(cluster)[-1] == "delete" and calls(cluster).count("cp") == 2
    assert (cluster / "deleted").read_text() == (cluster / "created.yaml").read_text(), "removed is what was created"
    assert not list(run_dir.rglob(".results*"))
    assert not read_events(run_dir, {"sensor"}), "this machine's sensors say nothing about the pods"
    (sensors,) = read_events(run_dir, {"sensors"})
    assert set(sensors["availability"].values()) == {"the ranks are on other machines: their sensors are not read"}
    assert pods_left(cluster) == []


def test_a_failing_rank_in_a_pod_is_named(direct: Path, tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run", launcher="kubernetes", nproc=1, fault="boom", who=0)
    with pytest.raises(RankFailed) as caught:
        execute(run_dir, benchmark="faulty:run")
    assert caught.value.status["reason"] == "rank 0 raised ValueError during phase train, step 3: boom <script>"
    assert "in boom" in str(caught.value), "its traceback came along"
    assert calls(direct)[-1] == "delete"
    assert pods_left(direct) == []


def test_an_agent_takes_its_job_back_when_its_supervisor_is_killed(direct: Path, tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run", launcher="kubernetes", nproc=1)
    with Launch(run_dir, "faulty:run").start() as launch:
        until(lambda: any(event.get("step", 0) >= 3 for event in read_events(run_dir, {"heartbeat"})))
        assert launch.pid
        os.kill(launch.pid, signal.SIGKILL)
        assert launch.wait()["outcome"] == "failed"
    until((direct / "deleted").exists)
    until(lambda: not pods_left(direct))


def test_a_connection_that_breaks_is_opened_again(
    direct: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_MODE", "cut")
    run_dir = prepare(tmp_path / "run", launcher="kubernetes", nproc=1, steps=60)
    status = execute(run_dir, benchmark="faulty:run")
    assert status["outcome"] == "complete", status["reason"]
    assert calls(direct).count("logs") == 2
    steps = [event["step"] for event in read_events(run_dir, {"heartbeat"}) if "step" in event]
    assert steps == sorted(set(steps)) and steps[-1] >= 59, "no event twice, none lost"


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("image", 'cannot start: ImagePullBackOff: Back-off pulling image "benchlib:cpu"'),
        ("refused", "jobs.batch is forbidden"),
        ("lost", "-0 is gone: evicted, or the job was removed by somebody"),
    ],
)
def test_a_cluster_that_cannot_run_it_says_why(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, words: str
) -> None:
    monkeypatch.setenv("STANDIN_MODE", mode)
    run_dir = prepare(tmp_path / "run", launcher="kubernetes", nproc=1)
    with pytest.raises(RankFailed) as caught:
        execute(run_dir, benchmark="faulty:run")
    assert words in caught.value.status["reason"]
    assert calls(cluster)[-1] == "delete"


@pytest.mark.parametrize(
    ("sbatch", "starts", "ends"),
    [
        ("echo 77; exec sleep 100", "no rank was started in 2 s (queue_s of the cluster's profile)", ""),
        ("echo '88;main'; echo gone >&2; exit 9", "the agent of launcher slurm left with exit code 9", ": gone"),
    ],
    ids=["stays in the queue", "ends without a rank"],
)
def test_a_job_without_a_rank(cluster: Path, tmp_path: Path, sbatch: str, starts: str, ends: str) -> None:
    program(tmp_path / "bin" / "sbatch", sbatch)
    program(tmp_path / "bin" / "scancel", f'echo "$1" > {tmp_path / "cancelled"}')
    program(tmp_path / "bin" / "squeue", "true")
    profile = tmp_path / "busy.yaml"
    profile.write_text("queue_s: 1.5\n")
    run_dir = prepare(tmp_path / "run", launcher="slurm", cluster=str(profile))
    with pytest.raises(RankFailed) as caught:
        execute(run_dir, benchmark="faulty:run")
    reason = caught.value.status["reason"]
    assert reason.startswith(starts) and reason.endswith(ends)
    assert ends or (tmp_path / "cancelled").read_text() == "77\n"


@pytest.mark.skipif(bool(one_slurm.missing()), reason=one_slurm.missing())
def test_slurm_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes: srun starts the ranks, or torchrun's agents that meet; one that fails is named; nothing stays in the queue."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parents[1]), str(HERE)]))
    with one_slurm.running(tmp_path / "slurm") as conf:
        monkeypatch.setenv("SLURM_CONF", str(conf))
        profile = tmp_path / "own.yaml"
        profile.write_text(f"port: {free_port()}\n")
        for restarts in (0, 1):
            values = {"nnodes": 2, "nproc": 1, "max_restarts": restarts, "cluster": str(profile)}
            run_dir = prepare(tmp_path / f"run{restarts}", launcher="slurm", **values)
            status = execute(run_dir, benchmark="faulty:checksums")
            assert status["outcome"] == "complete", status["reason"]
            places = [json.loads((run_dir / f"seen{rank}.json").read_text())["place"][:3] for rank in (0, 1)]
            assert places == [[0, 2, 0], [1, 2, 0]], "each is the only rank of its node"
        broken = prepare(tmp_path / "broken", launcher="slurm", nproc=2, fault="boom")
        with pytest.raises(RankFailed) as caught:
            execute(broken, benchmark="faulty:run")
        assert caught.value.status["reason"] == "rank 1 raised ValueError during phase train, step 3: boom <script>"
        queue = subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True)
        assert "R " not in queue.stdout


@pytest.mark.skipif(not shutil.which("torchx"), reason="no torchx on the PATH: pipx install torchx==0.7.0")
def test_torchx_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parents[1]), str(HERE)]))
    profile = tmp_path / "two.yaml"
    profile.write_text(f"port: {free_port()}\ntorchx: {{cfg: {{log_dir: {tmp_path / 'logs'}}}}}\n")
    run_dir = prepare(tmp_path / "run", launcher="torchx", nproc=1, nnodes=2, cluster=str(profile))
    status = execute(run_dir, benchmark="faulty:checksums")
    assert status["outcome"] == "complete", status["reason"]
    assert sorted(event["source"] for event in read_events(run_dir, {"start"})) == ["rank0", "rank1"]
