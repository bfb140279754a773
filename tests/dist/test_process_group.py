"""How ranks meet: place, threads, checksums of weights; and under a launcher that is not ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import END_S, HERE, none_left, prepare

from benchlib.launch.launch import execute


def test_two_ranks_and_their_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # what the environment says does not count
    run_dir = prepare(tmp_path / "run", threads=1)
    assert execute(run_dir, benchmark="faulty:checksums")["outcome"] == "complete"
    for rank in range(2):
        seen = json.loads((run_dir / f"seen{rank}.json").read_text())
        assert seen["place"] == [rank, 2, rank, "cpu", "gloo"]
        assert (seen["threads"], seen["omp"]) == (1, "1")
        assert seen["same"] == seen["wrapped"]
        assert seen["same"][1] is True
        assert seen["other"][1] is False
        assert seen["other"][0][0] == seen["same"][0][0] != seen["other"][0][1]
    none_left(run_dir)


def test_a_rank_without_any_launcher(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run", who=5, steps=1, nproc=1)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    command = [sys.executable, "-m", "benchlib.runtime.worker", str(run_dir), "--benchmark", "faulty:collective"]
    subprocess.run(command, env=env, check=True, timeout=END_S)
    assert json.loads((run_dir / "store.json").read_text())["port"] > 0
