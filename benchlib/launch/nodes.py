"""Where a rank is among the others, this machine's addresses, and the other nodes of a run. No torch."""

import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from benchlib.core.errors import UserError
from benchlib.core.files import read_json

FILE = "hosts.json"
# Per launcher: rank, world size, local rank, local world size. SLURM's are of the step, which may have fewer tasks than its job.
_PLACE_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    # Open MPI's and MPICH's mpirun, before SLURM: in a job of SLURM they start ranks that inherit one task's names.
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
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
        return self.local_size == self.size

    def threads(self, wanted: int = 0) -> int:
        """Return the CPU threads of this rank: ``wanted``, or its share of the usable cores where that is 0."""
        from benchlib.core.machine import usable_cores

        return wanted or max(1, usable_cores() // self.local_size)


def place() -> Place:
    """Return this process's place, by default the only one; ``UserError`` where the environment names a rank that cannot be."""
    names = next((row for row in _PLACE_VARIABLES if row[0] in os.environ and row[1] in os.environ), None)
    if names is None:
        return Place()
    values = [os.environ.get(name, "") for name in names]
    try:
        rank, size = int(values[0]), int(values[1])
        local_rank = int(values[2] or rank)
        # SLURM writes ``4(x3)`` for four ranks on each of three nodes. Without any, all ranks are taken to be here.
        local_size = int(values[3].partition("(x")[0] or size)
        if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
            raise ValueError
    except ValueError:
        variables = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        remedy = "start the ranks with one launcher only, as many on each node"
        raise UserError(f"{variables}: not the place of a rank: {remedy}") from None
    return Place(rank, size, local_rank, local_size)


def attempt() -> str:
    """Return an id of this start of the ranks by torchrun; '' under another launcher.

    torchrun does not count a start because a node came or went, so the place where ranks meet, a new port each time, is a part.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    return " ".join(os.environ.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"))


def endpoint_host(endpoint: str) -> str:
    """Return the host of ``HOST:PORT`` or ``[IPv6]:PORT``."""
    return endpoint.rpartition(":")[0].strip("[]")


def own_addresses() -> dict[str, str]:
    """Return the interface of each IPv4 and IPv6 address of this machine (of this network namespace)."""
    import psutil

    return {
        address.address.partition("%")[0]: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }


def resolve(host: str) -> list[str]:
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)]
    except (OSError, UnicodeError):
        return []


def local_address(host: str) -> str:
    """Return the address of ours by which ``host`` is reached; '' where no way leads there. Sends nothing."""
    for address in resolve(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))  # of a datagram socket: the kernel looks up the way and that is all
                return str(probe.getsockname()[0])
            except OSError:
                continue
    return ""


def hosts_store(host: str) -> bool | None:
    """Whether torchrun's rendezvous store is to be opened here. None where torchrun finds that out by itself.

    It compares with the addresses of this machine's name, so it does not know a second network card or a namespace.
    Where it knows, it also copes with a second agent on the same machine, which a plain yes would not.
    """
    addresses = resolve(host)
    if not addresses:
        return None
    named = {host, *addresses} & {"localhost", socket.gethostname(), *resolve(socket.gethostname())}
    if named or any(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        return None
    return bool(set(addresses) & set(own_addresses()))


def hosts(run_dir: Path) -> list[str]:
    """Return the host of each rank of a run over several nodes; none before its ranks met."""
    path = run_dir / FILE
    return list(read_json(path)) if path.exists() else []
