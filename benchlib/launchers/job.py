"""A description of a job: what a launcher makes of a config, what the supervisor starts and a dry run shows."""

import dataclasses
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


def worker_command(run_dir: Path | str, benchmark: str = "") -> list[str]:
    """Return the arguments of Python that run a rank of the run."""
    extra = ["--benchmark", benchmark] if benchmark else []
    return ["-m", "benchlib.worker", str(run_dir), *extra]
