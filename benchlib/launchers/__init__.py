"""Who starts the ranks: a table of pure functions from a config to a description of the job."""

from collections.abc import Callable

from benchlib.launchers.job import HasRanks, Job
from benchlib.launchers.kubernetes import kubernetes
from benchlib.launchers.local import local, local_ranks
from benchlib.launchers.mpirun import mpirun
from benchlib.launchers.slurm import slurm
from benchlib.launchers.torchrun import torchrun
from benchlib.launchers.torchx import torchx

__all__ = ["LAUNCHERS", "HasRanks", "Job", "local_ranks"]

LAUNCHERS: dict[str, Callable[..., Job]] = {
    "local": local,
    "torchrun": torchrun,
    "slurm": slurm,
    "kubernetes": kubernetes,
    "torchx": torchx,
    "mpirun": mpirun,
}
