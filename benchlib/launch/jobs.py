"""Jobs: what a launcher makes of a config, what the supervisor starts and a dry run shows; and torchrun's command."""

import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the supervisor reads jobs and no configs
    from benchlib.config.cluster import Cluster
    from benchlib.config.schema import BaseConfig

# A node that is silent for HEARTBEAT_S x HEARTBEATS is out of the rendezvous, and only then can another take its place.
# Heartbeats carry the clock of their node: the clocks of the nodes must agree to a few seconds.
HEARTBEAT_S, HEARTBEATS = 2, 5
# For every torchrun: with a store shared with the ranks, a new attempt reads the addresses of the dead one
# (https://github.com/pytorch/pytorch/issues/135712).
TORCHRUN_ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

STOP_S = 20.0  # for an agent to cancel a job, and for the ranks to go
NAME_MAX = 48  # characters after "benchlib-": with an index a host name has at most 63


@dataclass(frozen=True)
class Job:
    """What the supervisor starts: ``command`` once where it is an agent that starts the ranks itself, else for each
    rank.

    ``ranks`` are those on this machine: 0 for a job that runs elsewhere. ``files`` (path in the run folder: content)
    is what is handed to a cluster, written before the start. ``needs`` are programs
    of this machine, each with how to get it. Limits are in seconds, 0 is none: ``startup_s`` until every rank is at
    work, ``stall_s`` without a sign of life, ``wall_s`` in all, ``queue_s`` until a job elsewhere has its first rank,
    from which the others count. ``stop_s`` is what the agent gets to take a job back. ``endpoint`` is where the nodes
    meet, '' where there is one node or a cluster sees to it. ``restarts`` is how often the agent starts ranks again.
    """

    name: str
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    agent: bool = True
    ranks: int = 0
    files: dict[str, str] = field(default_factory=dict)
    needs: dict[str, str] = field(default_factory=dict)
    startup_s: float = 0.0
    stall_s: float = 0.0
    wall_s: float = 0.0
    queue_s: float = 0.0
    stop_s: float = 1.0
    endpoint: str = ""
    restarts: int = 0
    backend: str = "cpu"

    @classmethod
    def of(
        cls, config: "BaseConfig", name: str, command: list[str], profile: "Cluster | None" = None, **more: Any
    ) -> "Job":
        """Describe a job with the limits of a config; ``profile`` is of the cluster that runs it elsewhere."""
        if profile:
            more |= {"queue_s": profile.queue_s, "stop_s": STOP_S}
        more |= {"startup_s": config.startup_timeout_s, "stall_s": config.stall_timeout_s}
        more |= {"wall_s": config.hard_limit_s, "restarts": config.max_restarts, "backend": config.backend}
        return cls(name, command, **more)

    @property
    def remote(self) -> bool:
        """Whether the ranks are on other machines."""
        return self.ranks == 0

    def lacks(self) -> str:
        """Return what this machine lacks to start the job, with the remedy; '' where nothing."""
        missing = (name for name in self.needs if not shutil.which(name))
        return "; ".join(f"{name} is not on the PATH: {self.needs[name]}" for name in missing)


def job_name(run_dir: Path | str) -> str:
    """Return the name of a run's job: what its folder is called, as a part of a host name."""
    text = re.sub(r"[^a-z0-9]+", "-", Path(run_dir).name.lower()).strip("-") or "run"
    return f"benchlib-{text[-NAME_MAX:].strip('-')}"


def worker_command(run_dir: Path | str, benchmark: str = "") -> list[str]:
    extra = ["--benchmark", benchmark] if benchmark else []
    return ["-m", "benchlib.runtime.worker", str(run_dir), *extra]


def torchrun_command(
    config: "BaseConfig", python: str, run_dir: Path | str, benchmark: str, meets: str | None = None, *options: str
) -> list[str]:
    """Return the torchrun command that each node of a run executes; ``run_dir`` is the run's folder there.

    ``meets`` is the name under which the nodes meet, '' for a node that is alone; without one it follows from the
    folder. Where they meet, and which of them opens the store, is in the environment: see ``rendezvous``.
    """
    meets = (job_name(run_dir) if config.nnodes > 1 else "") if meets is None else meets
    meeting = ["--rdzv-backend", "c10d", "--rdzv-id", meets] if meets else ["--standalone"]
    size = ["--nnodes", str(config.nnodes), "--nproc-per-node", str(config.nproc)]
    watch = ["--max-restarts", str(config.max_restarts), "--monitor-interval", "0.2"]
    logs = ["--log-dir", f"{str(run_dir).rstrip('/')}/logs/torchrun"]  # without one torchrun leaves a folder in /tmp
    agent = [python, "-m", "torch.distributed.run", *size, *meeting, *options, *watch, *logs]
    return agent + worker_command(run_dir, benchmark)


def rendezvous(endpoint: str, timeout_s: float, is_host: str = "") -> dict[str, str]:
    """Return where the nodes meet and how long they wait for each other, as torchrun reads it from its environment.

    ``endpoint`` is HOST:PORT. ``is_host`` is 1 on the node that opens the store and 0 elsewhere, '' where torchrun
    finds that out. Both may be expressions of the shell that a node starts torchrun with: it knows what is different
    there.
    """
    settings = {
        "join_timeout": max(1, int(timeout_s)),
        "last_call_timeout": 1,
        "keep_alive_interval": HEARTBEAT_S,
        "keep_alive_max_attempt": HEARTBEATS,
    } | ({"is_host": is_host} if is_host else {})
    conf = ",".join(f"{name}={value}" for name, value in settings.items())
    return {"PET_RDZV_ENDPOINT": endpoint, "PET_RDZV_CONF": conf}


def mpirun_path() -> str:
    """Return the mpirun of this Python's environment, where the wheels of MPI put it, else the one on PATH, else ''."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun") or ""
