"""A description of a job: what a launcher makes of a config, what the supervisor starts and a dry run shows."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from typing import Any, Protocol

# A node that is silent for HEARTBEAT_S x HEARTBEATS is out of the rendezvous, and only then can another take its place.
# Heartbeats carry the clock of their node: the clocks of the nodes must agree to a few seconds.
HEARTBEAT_S, HEARTBEATS = 2, 5


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
    @property
    def backend(self) -> str: ...
    @property
    def collective(self) -> str: ...
    @property
    def max_restarts(self) -> int: ...
    @property
    def cluster(self) -> str: ...
    @property
    def hard_limit_s(self) -> float: ...


@dataclass(frozen=True)
class Job:
    """What the supervisor starts: one process per command.

    ``env`` is added to the environment of all, ``process_env[i]`` to that of ``commands[i]``. ``agent`` is true where
    the commands are launchers that start the ranks themselves; else command i is local rank i. ``ranks`` is how many
    ranks this job has on this machine: 0 for a job that runs elsewhere.

    ``files`` (path in the run folder: content) are written before the start; ``submits`` is the one of them that is
    handed to a cluster. ``needs`` are programs of this machine, each with how to get it. ``queue_s`` is how long the
    first rank may let wait for itself (0: any time); the limits of a run elsewhere count from then on. ``stop_s`` is
    what the agent gets to take a job back when it is ended. ``restarts`` is how often the agent starts ranks again.
    """

    name: str
    commands: list[list[str]]
    env: dict[str, str]
    notes: list[str] = field(default_factory=list)
    process_env: list[dict[str, str]] = field(default_factory=list)
    agent: bool = False
    ranks: int = 1
    files: dict[str, str] = field(default_factory=dict)
    submits: str = ""
    needs: dict[str, str] = field(default_factory=dict)
    queue_s: float = 0.0
    stop_s: float = 1.0
    restarts: int = 0

    @property
    def remote(self) -> bool:
        """Whether the ranks are on other machines."""
        return self.ranks == 0

    def lacks(self) -> str:
        """Return what this machine lacks to start the job, with the remedy; '' where nothing."""
        missing = [
            f"{program} is not on the PATH: {remedy}" for program, remedy in self.needs.items() if not which(program)
        ]
        return "; ".join(missing)

    def as_json(self) -> dict[str, Any]:
        """Return the job as plain values; ``Job(**values)`` reads it back."""
        return dataclasses.asdict(self)


def worker_command(run_dir: Path | str, benchmark: str = "") -> list[str]:
    """Return the arguments of Python that run a rank of the run."""
    extra = ["--benchmark", benchmark] if benchmark else []
    return ["-m", "benchlib.worker", str(run_dir), *extra]


def log_dir(run_dir: Path | str) -> str:
    """Return where torchrun keeps its ranks' error files: left alone it leaves a folder in /tmp for each run."""
    return f"{str(run_dir).rstrip('/')}/logs/torchrun"
