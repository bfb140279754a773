"""Ranks on this machine, each a child of the supervisor."""

import sys
from pathlib import Path

from benchlib.launchers.job import HasRanks, Job, worker_command


def local_ranks(nproc: int, run_dir: Path | str, benchmark: str = "") -> Job:
    """Describe ``nproc`` ranks on this machine, each a child of the supervisor."""
    command = [sys.executable, *worker_command(run_dir, benchmark)]
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(nproc)]
    env = {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
    notes = [
        "rank i has RANK=i and LOCAL_RANK=i; the ranks meet through a free port that rank 0 writes to the run folder"
    ]
    return Job("local", [list(command) for _ in range(nproc)], env, notes, ranks, ranks=nproc)


def local(config: HasRanks, run_dir: Path | str, benchmark: str = "") -> Job:
    """Start the ranks on this machine, under the supervisor alone."""
    return local_ranks(config.nproc, run_dir, benchmark)
