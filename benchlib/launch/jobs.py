"""Jobs: what a launcher makes of a config, what the supervisor starts and a dry run shows; torchrun's command, limits."""

import dataclasses
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

# A node that is silent for HEARTBEAT_S x HEARTBEATS is out of the rendezvous, and only then can another take its place.
# Heartbeats carry the clock of their node: the clocks of the nodes must agree to a few seconds.
HEARTBEAT_S, HEARTBEATS = 2, 5
# For every torchrun: with a store shared with the ranks, a new attempt reads the addresses of the dead one
# (https://github.com/pytorch/pytorch/issues/135712).
TORCHRUN_ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(frozen=True)
class Limits:
    """The time limits after which the supervisor ends a run, in seconds; 0 is no limit."""

    startup_s: float = 120.0
    stall_s: float = 60.0
    wall_s: float = 0.0

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Limits":
        """Read the limits of a raw config: its own wall limit, else twice the budget and the start-up."""
        startup = float(config.get("startup_timeout_s", cls.startup_s))
        wall = float(config.get("wall_limit_s", 0.0)) or (
            2 * float(config["budget_s"]) + startup if "budget_s" in config else 0.0
        )
        return cls(startup, float(config.get("stall_timeout_s", cls.stall_s)), wall)


def already_executed(run_dir: Path) -> str:
    """Return what to tell who starts a run in a folder that holds one: in a notebook, and in a terminal."""
    return f"{run_dir} was already executed: rerun the Setup cell, or start `benchlib run` again, for a new run"


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
            f"{program} is not on the PATH: {remedy}"
            for program, remedy in self.needs.items()
            if not shutil.which(program)
        ]
        return "; ".join(missing)

    def as_json(self) -> dict[str, Any]:
        """Return the job as plain values; ``Job(**values)`` reads it back."""
        return dataclasses.asdict(self)


def worker_command(run_dir: Path | str, benchmark: str = "") -> list[str]:
    """Return the arguments of Python that run a rank of the run."""
    extra = ["--benchmark", benchmark] if benchmark else []
    return ["-m", "benchlib.runtime.worker", str(run_dir), *extra]


def torchrun_command(
    config: HasRanks, python: str, rendezvous: list[str], run_dir: Path | str, benchmark: str = ""
) -> list[str]:
    """Return torchrun's command for one node; ``run_dir`` is the run's folder there."""
    # Without a log folder torchrun leaves one in /tmp for each run.
    logs = f"{str(run_dir).rstrip('/')}/logs/torchrun"
    return [
        python, "-m", "torch.distributed.run", "--nnodes", str(config.nnodes), "--nproc-per-node", str(config.nproc),
        *rendezvous, "--max-restarts", str(config.max_restarts), "--monitor-interval", "0.2", "--log-dir", logs,
        *worker_command(run_dir, benchmark),
    ]  # fmt: skip


def rendezvous(endpoint: str, identity: str, timeout_s: float, **more: Any) -> list[str]:
    """Return torchrun's options for nodes that meet at an endpoint (HOST:PORT) and wait ``timeout_s`` for each other.

    ``identity`` is the run's alone; ``more`` are further settings of the c10d rendezvous.
    """
    settings = {
        **more,
        "join_timeout": max(1, int(timeout_s)),
        "last_call_timeout": 1,
        "keep_alive_interval": HEARTBEAT_S,
        "keep_alive_max_attempt": HEARTBEATS,
    }
    return [
        "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", identity,
        "--rdzv-conf", ",".join(f"{name}={value}" for name, value in settings.items()),
    ]  # fmt: skip


def node_command(
    config: HasRanks,
    python: str,
    endpoint: str,
    identity: str,
    host: str,
    run_dir: str,
    benchmark: str,
    meet_s: float = 0.0,
) -> list[str]:
    """Return the torchrun command that every node of a cluster runs, whoever starts it there.

    ``endpoint`` is at the first node. ``host`` is what the node replaces by 1 on the first node and by 0 elsewhere: a
    node does not always know its own name. ``meet_s`` is how long the nodes wait for each other (0: the start-up limit).
    One node needs no meeting.
    """
    several = rendezvous(endpoint, identity, meet_s or config.startup_timeout_s, is_host=host)
    return torchrun_command(config, python, several if config.nnodes > 1 else ["--standalone"], run_dir, benchmark)


def mpirun_path() -> str:
    """Return the mpirun of this Python's environment, where the wheels of MPI put it, else the one on PATH, else ''."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun") or ""
