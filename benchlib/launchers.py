"""Who starts the ranks: pure functions from a config to a description of the job, which a dry run can show."""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class HasRanks(Protocol):
    """The part of a config that a launcher reads."""

    @property
    def nproc(self) -> int: ...
    @property
    def nnodes(self) -> int: ...
    @property
    def rdzv_endpoint(self) -> str: ...
    @property
    def startup_timeout_s(self) -> float: ...
    @property
    def benchmark(self) -> str: ...


@dataclass(frozen=True)
class Job:
    """What the supervisor starts: one process per command.

    ``env`` is added to the environment of all, ``process_env[i]`` to that of ``commands[i]``. ``agent`` is true where
    the commands are launchers that start the ranks themselves; else command i is local rank i. ``ranks`` is how many
    ranks this job has on this machine.
    """

    name: str
    commands: list[list[str]]
    env: dict[str, str]
    notes: list[str] = field(default_factory=list)
    process_env: list[dict[str, str]] = field(default_factory=list)
    agent: bool = False
    ranks: int = 1

    def as_json(self) -> dict[str, Any]:
        """Return the job as plain values; ``Job(**values)`` reads it back."""
        return dataclasses.asdict(self)


def _worker(run_dir: Path | str, benchmark: str) -> list[str]:
    extra = ["--benchmark", benchmark] if benchmark else []
    return ["-m", "benchlib.worker", str(run_dir), *extra]


def local_ranks(nproc: int, run_dir: Path | str, benchmark: str = "") -> Job:
    """Describe ``nproc`` ranks on this machine, each a child of the supervisor."""
    command = [sys.executable, *_worker(run_dir, benchmark)]
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(nproc)]
    env = {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
    notes = [
        "rank i has RANK=i and LOCAL_RANK=i; the ranks meet through a free port that rank 0 writes to the run folder"
    ]
    return Job("local", [list(command) for _ in range(nproc)], env, notes, ranks, ranks=nproc)


def local(config: HasRanks, run_dir: Path | str, benchmark: str = "") -> Job:
    """Start the ranks on this machine, under the supervisor alone."""
    return local_ranks(config.nproc, run_dir, benchmark)


def torchrun(config: HasRanks, run_dir: Path | str, benchmark: str = "") -> Job:
    """Start this node's ranks through torchrun's agent; the same command runs on every node.

    The rendezvous is c10d, and its store is not shared with the ranks: with a shared one a new attempt reads the
    addresses of the dead one (https://github.com/pytorch/pytorch/issues/135712).
    """
    notes = []
    if config.rdzv_endpoint:
        timeout = int(max(1, config.startup_timeout_s))
        meet = [
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            config.rdzv_endpoint,
            "--rdzv-id",
            f"benchlib-{config.benchmark}",
            "--rdzv-conf",
            f"join_timeout={timeout},last_call_timeout=1",
        ]
        notes.append(
            f"start this command on each of the {config.nnodes} nodes, each with its own copy of the config; {config.rdzv_endpoint} must be one of them. The node that rank 0 is on has the result."
        )
    else:
        meet = ["--standalone"]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", str(config.nnodes), "--nproc-per-node", str(config.nproc),
        *meet, "--max-restarts", "0", "--monitor-interval", "0.2", *_worker(run_dir, benchmark),
    ]  # fmt: skip
    env = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCHELASTIC_ERROR_FILE": str(Path(run_dir) / "logs" / "agent.error.json"),
    }
    return Job("torchrun", [command], env, notes, [{}], agent=True, ranks=config.nproc)


LAUNCHERS: dict[str, Callable[..., Job]] = {"local": local, "torchrun": torchrun}
