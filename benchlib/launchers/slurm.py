"""Ranks on the nodes of a SLURM cluster, from a batch script in the run folder, which all nodes share.

srun starts the ranks themselves: it binds them to their cores and devices, forwards signals to all of them and ends
the step when one fails; the ranks read their place from SLURM's names and meet through the run folder. Only a run
that may be restarted (``max_restarts``) has torchrun's agent between, one on each node: srun cannot start ranks again.
"""

import re
import shlex
import sys
from pathlib import Path

from benchlib import cluster as clusters
from benchlib.cluster import Cluster, Slurm
from benchlib.errors import UserError
from benchlib.launchers.job import HasRanks, Job, worker_command
from benchlib.launchers.kubernetes import job_name
from benchlib.launchers.rendezvous import ENV, agent_command
from benchlib.processes import MARK

SCRIPT = "slurm.sh"
LOG = "logs/slurm.out"
STOP_S = 15.0  # for scancel, and for the ranks to go
SLURM = "log in to a node that submits jobs, or install SLURM's client (apt-get install slurm-client)"
END_S = 120  # that SLURM grants beyond the run's own limit


def slurm(config: HasRanks, run_dir: Path | str, benchmark: str = "") -> Job:
    """Describe the run as a batch script, and the agent that submits it, waits for it and cancels it."""
    profile = clusters.load(config.cluster)
    command = [
        sys.executable, "-m", "benchlib.agents.submit", "--id", r"^(\d+)", "--cancel", "scancel {id}",
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
        needs=dict.fromkeys(("sbatch", "scontrol", "scancel"), SLURM), queue_s=profile.queue_s, stop_s=STOP_S,
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
