"""What each rank executes: its share of DDP's gradients; then rank 0 starts the compiled path and passes its events on."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from torch.nn.parallel import DistributedDataParallel

from benchlib.benchmarks.compiled import programs
from benchlib.benchmarks.compiled.config import DDP, CompiledConfig
from benchlib.core.errors import BackendUnavailable, RunBroken
from benchlib.core.events import EventWriter
from benchlib.launch.diagnosis import EXIT_SKIPPED
from benchlib.launch.nodes import place
from benchlib.launch.processes import THREAD_VARIABLES
from benchlib.runtime.group import world
from benchlib.runtime.steps import keep_alive
from benchlib.workloads.stablehlo import export


def run(config: CompiledConfig, run_dir: Path, events: EventWriter) -> None:
    """Compute DDP's gradients on all ranks, then everything else in a process that rank 0 waits for.

    Raises ``BackendUnavailable`` where that says so, ``RunBroken`` where it fails; its traceback is in the rank's log.
    """
    events.emit("phase", name="init")
    if config.backend != "cpu":
        raise BackendUnavailable(
            f"compiled simulates its replicas on a CPU and computes there: use backend cpu; for XLA on {config.backend} "
            f"run `benchlib run parity --backend {config.backend} --set members=xla`"
        )
    # It loads its libraries while the ranks compute.
    path = _start(run_dir) if place().rank == 0 else None
    try:
        with world(config, run_dir) as here:
            if here.size > 1:
                gradients = _ddp(config, here.rank)
                if here.main:
                    np.savez(run_dir / DDP, **gradients)  # type: ignore[arg-type]
        if path:
            _follow(path, config, run_dir, events)
    finally:
        if path:
            path.kill()
            path.wait()


def _start(run_dir: Path) -> "subprocess.Popen[str]":
    """Start the compiled path, which waits for a line before it works."""
    environment = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    environment["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY") or "PASSIVE"
    command = [sys.executable, "-m", "benchlib.benchmarks.compiled.path", str(run_dir), str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _follow(path: "subprocess.Popen[str]", config: CompiledConfig, run_dir: Path, events: EventWriter) -> None:
    """Let the path work and pass its events on until it ends."""
    message: dict[str, Any] = {}
    with keep_alive(events, config.budget_s), path:
        assert path.stdin is not None and path.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it ended: its exit code says how
            path.stdin.write("go\n")
            path.stdin.flush()
        phase = "convert"
        for line in path.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                print(line, end="", flush=True)  # of a library
                continue
            if "phase" in message:
                phase = message["phase"]
                events.emit("phase", name=phase)
            elif "done" in message:
                events.emit("progress", phase=phase, **message)
    (run_dir / DDP).unlink(missing_ok=True)
    if path.returncode == EXIT_SKIPPED:
        raise BackendUnavailable(message.get("unavailable", "the compiled path is not available"))
    if path.returncode:
        raise RunBroken(f"the compiled path ended with exit code {path.returncode}; its error is in the log of rank 0")


def _ddp(config: CompiledConfig, rank: int) -> dict[str, np.ndarray]:
    """Return the gradients that DDP gives to every rank, each with rows of its own."""
    loss = export.AnswerLoss(programs.bert(config.model, config.seed))
    shared = DistributedDataParallel(loss)
    shared(**programs.rows(config, rank, loss)).backward()
    return {
        name: parameter.grad.numpy().copy() for name, parameter in loss.named_parameters() if parameter.grad is not None
    }
