"""Helpers of the fault tests: prepared run folders, and the search for processes that were left behind."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import until

from benchlib.core.events import EventWriter, read_events
from benchlib.core.files import write_json
from benchlib.launch.launch import RankFailed, execute
from benchlib.launch.processes import marked

HERE = Path(__file__).parent
BOOM = "rank 1 raised ValueError during phase train, step 3: boom <script>"


def prepare(run_dir, **values):
    """Make a run folder for two ranks of the faulty benchmark."""
    run_dir.mkdir()
    limits = {"budget_s": 60, "startup_timeout_s": 60, "stall_timeout_s": 30}
    config = {"benchmark": "faulty", "nproc": 2, **limits, **values}
    (run_dir / "config.json").write_text(json.dumps(config))
    return run_dir


def failed(run_dir, function="run"):
    """Run the ranks of a prepared folder, which fail; return the error. No process stays."""
    with pytest.raises(RankFailed) as caught:
        execute(run_dir, benchmark=f"faulty:{function}")
    none_left(run_dir)
    return caught.value


def at_step(run_dir, rank="*", step=3):
    """Wait until a rank, or any, has reached a step and return its process id."""
    of_rank = f"rank{rank}"
    until(lambda: any(e.get("step", 0) >= step for e in read_events(run_dir, {"heartbeat"}, of_rank)))
    return next(int(event["pid"]) for event in read_events(run_dir, {"start"}, of_rank))


def none_left(run_dir):
    """Wait until all processes of a run have gone."""
    until(lambda: not marked(run_dir))


def status(run_dir):
    """Wait for the status of a run and return it."""
    until((run_dir / "status.json").exists)
    return json.loads((run_dir / "status.json").read_text())


def seen(run_dir, ranks=2):
    """Return what each rank of a benchmark of this folder wrote down."""
    return [json.loads((run_dir / f"seen{rank}.json").read_text()) for rank in range(ranks)]


@contextlib.contextmanager
def foreground(run_dir):
    """Start a process that executes a run as the command line does; it is gone in the end."""
    code = f"from benchlib.launch.launch import execute; execute({str(run_dir)!r}, benchmark='faulty:run')"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def in_this_process(run_dir):
    """Run the benchmark of a prepared folder here, as its one rank: what supervisor and ranks do has tests of its own."""
    from benchlib.benchmarks import BENCHMARKS
    from benchlib.config.schema import load_config
    from benchlib.runtime.measurement import executed

    config = load_config(run_dir)
    executed(BENCHMARKS[config.benchmark])(config, run_dir, EventWriter(run_dir, "rank0"))
    write_json(run_dir / "status.json", {"outcome": "complete", "reason": "", "ranks": [], "ended_at": time.time()})


def flip(path):
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def free_port():
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
