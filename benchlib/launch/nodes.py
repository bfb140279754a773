"""Where a rank is among the others, this machine's addresses, and the other nodes of a run. No torch."""

import contextlib
import dataclasses
import ipaddress
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchlib.core.errors import UserError
from benchlib.core.files import read_object, write_json

LAUNCH = "BENCHLIB_LAUNCH"  # in the environment of the ranks: the id of the launch that they belong to
FILE = "peers.json"
DEFAULT_PORT = 29400  # torchrun's, where an endpoint names none
# Per launcher: rank, world size, local rank, local world size. Ours and torchrun's names are the same. SLURM's are
# those of the step, which may have fewer tasks than its job.
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
    """Return this process's place; without a launcher it is the only rank.

    Raises ``UserError`` where the environment names a rank that cannot be.
    """
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

    torchrun's own count does not go up when ranks are started again because a node came or went, so the place where
    they meet, a new port each time, is a part of it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    return " ".join(os.environ.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"))


# This machine's addresses


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, ``[IPv6]:PORT`` or ``HOST``."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdigit() or (":" in host and not host.startswith("[")):
        return endpoint.strip("[]"), DEFAULT_PORT
    return host.strip("[]"), int(port)


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


def local_address(host: str, port: int = DEFAULT_PORT) -> str:
    """Return the address of ours by which ``host`` is reached; '' where no way leads there. Sends nothing."""
    for address in resolve(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, port))  # of a datagram socket: the kernel looks up the way and that is all
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


# The nodes of a run


@dataclass(frozen=True)
class Node:
    """One node of a run: ``launch`` is the id of its supervisor's launch, '' where it has none."""

    launch: str
    host: str
    address: str
    ranks: tuple[int, ...]

    def label(self) -> str:
        return f"{self.host} ({self.address})" if self.address else self.host

    def words(self) -> str:
        return f"node {self.label()} with rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"


def launch_id() -> str:
    """Return the id of the launch that this process belongs to; '' without a supervisor."""
    return os.environ.get(LAUNCH, "")


def group_ranks(rows: Iterable[tuple[int, str, str, str]]) -> list[Node]:
    """Return the nodes of ranks, by their lowest rank. Rows are (rank, launch, host name, address).

    Two machines may have one host name, and a launch is of one machine.
    """
    members: dict[tuple[str, str, str], list[int]] = {}
    for rank, launch, host, address in sorted(rows):
        members.setdefault((launch, host, address), []).append(rank)
    return [Node(*place, tuple(ranks)) for place, ranks in members.items()]


def rank_hosts(nodes: Sequence[Node]) -> tuple[str, ...]:
    """Return the host name of each rank, by rank, or its node's address where two nodes share the name."""
    hosts = [node.host for node in nodes]
    places = sorted((rank, node.host, node.address) for node in nodes for rank in node.ranks)
    return tuple(address if hosts.count(host) > 1 and address else host for _, host, address in places)


def write(run_dir: Path, nodes: Iterable[Node]) -> None:
    write_json(run_dir / FILE, {"nodes": [dataclasses.asdict(node) for node in nodes]})


def read(run_dir: Path) -> list[Node]:
    """Return the nodes of a run; none before its ranks met."""
    with contextlib.suppress(UserError, KeyError, TypeError):
        rows = read_object(run_dir / FILE, {"nodes": list})["nodes"]
        return [Node(**{**row, "ranks": tuple(row["ranks"])}) for row in rows]
    return []
