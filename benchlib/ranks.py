"""A rank's place among the others, read from the environment that its launcher gave it. No torch."""

import os
from dataclasses import dataclass

from benchlib.errors import UserError

# Per launcher: rank, world size, local rank, local world size. Ours and torchrun's names are the same.
_NAMES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


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
    for names in _NAMES:
        if names[0] in os.environ and names[1] in os.environ:
            rank, size = int(os.environ[names[0]]), int(os.environ[names[1]])
            local_rank = int(os.environ.get(names[2], rank))
            # SLURM writes "4" or, for a job that asked for none, nothing: then all tasks are taken to be here.
            local_size = int(os.environ.get(names[3], "").partition("(")[0] or size)
            found = Place(rank, size, local_rank, local_size)
            if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
                values = ", ".join(f"{name}={os.environ.get(name, '')}" for name in names)
                raise UserError(f"{values}: a rank must be below its size: start the ranks with one launcher only")
            return found
    return Place()
