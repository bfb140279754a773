"""Ranks on a full disk, two launches in one folder, a clock that jumps: real processes, in the end none of them is left."""

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from harness import END_S, HERE, prepare, status
from small_disk import on_small_disk

from benchlib.core import run_folder
from benchlib.core.errors import UserError
from benchlib.core.events import read_events
from benchlib.launch.launch import execute

ROOT = HERE.parents[1]


@pytest.fixture(autouse=True)
def _find_faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def test_the_command_line_on_a_disk_that_is_too_small(tmp_path: Path) -> None:
    output = on_small_disk(
        tmp_path / "disk",
        "4m",
        """
        from harness import none_left
        from make_run import make_run
        from benchlib.show import index
        out = disk / "a store"
        old = make_run(out / "quick-20261121" / "squad-cpu-101500-aaaaaa", steps=5)
        index.render(out)
        before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
        command = [sys.executable, "-m", "benchlib.cli", "run", "squad", "--out", str(out), "--backend", "cpu"]
        command += ["--set", "nproc=1", "--set", "train_questions=32", "--set", "eval_questions=8"]
        done = subprocess.run(command, capture_output=True, text=True)
        print(done.stdout, done.stderr)
        print("CODE", done.returncode)
        run_dir = next(out.glob("smoke-*/squad-*"))
        none_left(run_dir)
        print("SAME", before == {path: path.read_bytes() for path in old.rglob("*") if path.is_file()})
        print("TMP", [path.name for path in out.rglob("*.tmp")])
        print("INDEX", "aaaaaa" in (out / "index.html").read_text())
        """,
    )
    words = " ".join(output.split())
    assert "CODE 2 SAME True TMP [] INDEX True" in words
    assert "no space left on device; free some space on this disk" in words
    assert "Traceback" not in output


def test_launches_that_race_for_a_folder(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run", steps=20)
    outcomes: list[str] = []

    def start() -> None:
        try:
            outcomes.append(execute(run_dir, benchmark="faulty:run")["outcome"])
        except UserError as error:
            outcomes.append("in use" if "in use" in str(error) or "already executed" in str(error) else str(error))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["complete", "in use", "in use", "in use"]
    assert run_folder.file_faults(run_dir) == []
    assert len(read_events(run_dir, {"launched"})) == 1


def test_a_clock_that_is_set_during_a_run_ends_nothing(tmp_path: Path) -> None:
    # Only the supervisor's clock can be set from here: it is the one that limits and durations are taken by.
    run_dir = prepare(tmp_path / "run", steps=30, step_s=0.05, wall_limit_s=600, stall_timeout_s=600)
    code = f"""
        import dataclasses, sys, time
        from pathlib import Path
        real, began = time.time, Path({str(run_dir / "events-rank0.jsonl")!r})
        time.time = lambda: real() + (7200 if began.exists() else 0)
        from benchlib.config.schema import BaseConfig
        from benchlib.launch.launchers import LAUNCHERS
        from benchlib.launch import supervise
        from benchlib.core.files import write_json
        config = BaseConfig(benchmark="faulty", nproc=2, wall_limit_s=600, stall_timeout_s=600)
        job = LAUNCHERS["local"](config, {str(run_dir)!r}, "faulty:run")
        write_json({str(run_dir / "job.json")!r}, dataclasses.asdict(job))
        sys.exit(supervise.main([{str(run_dir)!r}]))
    """
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])},
    ) as supervisor:
        assert supervisor.wait(END_S) == 0
        took = time.monotonic() - began
    final = status(run_dir)
    assert final["outcome"] == "complete"
    assert 1.0 < final["ended_at"] - final["started_at"] < took
    assert json.loads((run_dir / "files.json").read_text())["files"].keys() >= {"status.json", "events-rank0.jsonl"}
