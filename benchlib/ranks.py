"""A rank's place among the others, read from the environment that its launcher gave it. No torch."""

import os
from dataclasses import dataclass

from benchlib.errors import UserError

# Per launcher: rank, world size, local rank, local world size. Ours and torchrun's names are the same. SLURM's names
# of the step come before those of the job: a step may have fewer tasks than its job.
_NAMES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    # Open MPI's and MPICH's mpirun, before SLURM: in a job of SLURM they start ranks that inherit one task's names.
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)
_NODE = "SLURM_NODEID"  # which of the nodes this one is, where sizes are listed by node


@dataclass(frozen=True)
class Place:
    """``rank`` of ``size`` over all nodes, ``local_rank`` of ``local_size`` on this one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def one_node(self) -> bool:
        """Whether all ranks are on this machine."""
        return self.local_size == self.size

    def threads(self, wanted: int = 0) -> int:
        """Return the CPU threads of this rank: ``wanted``, or its share of the usable cores where that is 0."""
        from benchlib.machine import usable_cores

        return wanted or max(1, usable_cores() // self.local_size)


def place() -> Place:
    """Return this process's place; without a launcher it is the only rank.

    Raises ``UserError`` where the environment names a rank that cannot be.
    """
    known = [names for names in _NAMES if names[0] in os.environ and names[1] in os.environ]
    if known:
        # Of one launcher's rows the first that also tells how many ranks this node has.
        whole = [names for names in known if names[0] == known[0][0] and os.environ.get(names[3])]
        return _place((whole or known)[0])
    if int(os.environ.get("JOB_COMPLETION_INDEX", "0")):
        raise UserError(
            f"JOB_COMPLETION_INDEX={os.environ['JOB_COMPLETION_INDEX']} without RANK: a pod of an Indexed Job does not know "
            "its world; start the ranks by torchrun in each pod, as launcher=kubernetes does"
        )
    return Place()


def _place(names: tuple[str, str, str, str]) -> Place:
    values = [os.environ.get(name, "") for name in names]
    told = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
    try:
        rank, size = int(values[0]), int(values[1])
        local_rank = int(values[2] or rank)
        sizes = local_sizes(values[3])
        # A list holds one size for each node. Without any, all ranks are taken to be here.
        local_size = (sizes[int(os.environ.get(_NODE, "0"))] if len(sizes) > 1 else sizes[0]) if sizes else size
    except (ValueError, IndexError):
        raise UserError(f"{told}: not the place of a rank: start the ranks with one launcher only") from None
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise UserError(f"{told}: a rank must be below its size: start the ranks with one launcher only")
    return Place(rank, size, local_rank, local_size)


def local_sizes(text: str) -> list[int]:
    """Return the ranks of each node from SLURM's short form: ``"2(x3),1"`` is [2, 2, 2, 1].

    Raises ``ValueError`` for another form.
    """
    sizes: list[int] = []
    for part in filter(None, text.split(",")):
        count, _, repeated = part.partition("(x")
        sizes += [int(count)] * int(repeated.removesuffix(")") or 1)
    return sizes


def attempt() -> str:
    """Return what tells this start of the ranks by torchrun from the others; '' under another launcher.

    torchrun's own count does not go up when ranks are started again because a node came or went, so the place where they
    meet, a new port each time, is a part of it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    names = ("TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    return " ".join(os.environ.get(name, "") for name in names)
