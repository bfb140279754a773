"""How ranks meet: place, threads, checksums of weights; and under a launcher that is not ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import END_S, HERE, none_left, prepare

from benchlib.launch.launch import execute

READS = """
import os, sys

def seen(event, args):
    if event == "open" and args[1] and str(args[0]).endswith("/config.json"):  # an opener is seen twice
        with open(os.environ["READS"], "a") as file:
            file.write(f"{sys.argv[0]}\\n")

sys.addaudithook(seen)
"""


def test_two_ranks_and_their_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads its config once; the supervisor hashes the file and reads nothing in it: its job says what it needs."""
    (tmp_path / "sitecustomize.py").write_text(READS)
    monkeypatch.setenv("READS", str(tmp_path / "reads"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(HERE)]))
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
    readers = [Path(line).name for line in (tmp_path / "reads").read_text().splitlines()]
    assert sorted(readers) == ["supervise.py", "worker.py", "worker.py"]


def test_a_rank_without_any_launcher(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run", who=5, steps=1, nproc=1)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    command = [sys.executable, "-m", "benchlib.runtime.worker", str(run_dir), "--benchmark", "faulty:collective"]
    subprocess.run(command, env=env, check=True, timeout=END_S)
    assert json.loads((run_dir / "store.json").read_text())["port"] > 0
