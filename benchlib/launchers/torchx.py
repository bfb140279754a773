"""Ranks through TorchX: the run becomes an application of one role, a replica a node, each torchrun's agent.

The component is written to the run folder and names nothing but TorchX's own types, so that the ``torchx`` program may
come from an environment of its own: its pins (urllib3 below 2) do not agree with benchlib's.
"""

import shlex
import sys
from pathlib import Path

from benchlib import cluster as clusters
from benchlib.cluster import Cluster
from benchlib.launchers.job import HasRanks, Job
from benchlib.launchers.kubernetes import job_name
from benchlib.launchers.rendezvous import ENV, agent_command
from benchlib.processes import MARK

COMPONENT = "torchx_app.py"
STOP_S = 20.0  # for TorchX to cancel, and for the ranks to go
TORCHX = "install it in an environment of its own, which may be any on the PATH: pipx install torchx==0.7.0 (its urllib3 is not benchlib's)"

_FILE = '''\
"""A run of benchlib as a TorchX application: torchx run --scheduler {scheduler} {path}:app"""

import torchx.specs as specs

ARGUMENTS = {arguments}


def app() -> specs.AppDef:
    """Describe the run: a replica a node."""
    first, node = "$${{" + specs.macros.rank0_env + ":=localhost}}", specs.macros.replica_id
    command = ARGUMENTS.replace("FIRST:", first + ":").replace("is_host=HOST", f"is_host=$$(({{node}} == 0))")
    role = specs.Role(
        name="node",
        image={image!r},
        entrypoint="bash",
        args=["-c", command],
        num_replicas={nodes},
        resource=specs.resource({resource}),
        env={env!r},
        mounts=specs.parse_mounts({mounts}),
        port_map={{"c10d": {port}}},
    )
    return specs.AppDef(name={name!r}, roles=[role])
'''


def torchx(config: HasRanks, run_dir: Path | str, benchmark: str = "") -> Job:
    """Describe the run as a component, and the agent that has TorchX run it and cancels it."""
    profile = clusters.load(config.cluster)
    own = profile.torchx
    # The local schedulers would keep the replicas' output in a folder of their own below /tmp.
    options = {"log_dir": f"{run_dir}/logs/torchx"} if own.scheduler.startswith("local") else {}
    options |= own.cfg
    cfg = ["-cfg", ",".join(f"{name}={value}" for name, value in options.items())] if options else []
    command = [
        sys.executable, "-m", "benchlib.agents.submit", "--id", r"^(\w+://\S+)", "--cancel", "torchx cancel {id}",
        "--", "torchx", "run", "--wait", "--log", "--workspace", "", "--scheduler", own.scheduler, *cfg,
        f"{Path(run_dir) / COMPONENT}:app",
    ]  # fmt: skip
    notes = [f"{Path(run_dir)} has to be on a folder that all nodes share, under the same path"]
    return Job(
        "torchx", [command], {}, notes, [{}], agent=True, ranks=0, restarts=config.max_restarts,
        files={COMPONENT: component(config, profile, str(run_dir), benchmark)}, submits=COMPONENT,
        needs={"torchx": TORCHX}, queue_s=profile.queue_s, stop_s=STOP_S,
    )  # fmt: skip


def component(config: HasRanks, profile: Cluster, run_dir: str, benchmark: str = "") -> str:
    """Return the module that describes the run to TorchX."""
    own = profile.torchx
    name = job_name(run_dir)
    command = agent_command(
        config, own.python or sys.executable, f"FIRST:{profile.port}", name, "HOST", run_dir, benchmark
    )
    # A dollar of the command itself is not one of TorchX's macros.
    arguments = "exec " + shlex.join(command).replace("$", "$$")
    wanted = {"cpu": own.cpu or 2, "gpu": own.gpu, "memMB": own.memory_mb or 1024}
    return _FILE.format(
        scheduler=own.scheduler, path=COMPONENT, arguments=repr(arguments), image=own.image or run_dir,
        mounts=list(own.mounts),
        nodes=config.nnodes, resource=", ".join(f"{key}={value}" for key, value in wanted.items()),
        env={MARK: run_dir, "PYTHONUNBUFFERED": "1", **ENV}, port=profile.port, name=name,
    )  # fmt: skip
