"""Who starts the ranks: a table of pure functions from a config to a description of the job."""

from collections.abc import Callable

from benchlib.launchers.job import HasRanks, Job
from benchlib.launchers.local import local, local_ranks
from benchlib.launchers.torchrun import torchrun

__all__ = ["LAUNCHERS", "HasRanks", "Job", "local_ranks"]

LAUNCHERS: dict[str, Callable[..., Job]] = {"local": local, "torchrun": torchrun}
