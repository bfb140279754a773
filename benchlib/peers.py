"""The nodes of a run as each of them knows the others, and whether they are still there.

Each node's supervisor holds a listening socket. Nobody speaks on it: whether a connection is taken, refused or unanswered
is the kernel's word, and it holds for a supervisor that is busy, killed or cut off. The supervisor hangs up on whoever
called, since the kernel answers no more of them than fit its queue.
"""

import contextlib
import dataclasses
import errno
import os
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchlib.errors import UserError
from benchlib.files import read_object, write_json

# In the environment of the ranks: the id of the launch and, where there are other nodes, its supervisor's address and port.
NODE = "BENCHLIB_NODE"
NAME = "peers.json"
PROBE_S = 3.0
_BACKLOG = 128
_AT_ONCE = 64


@dataclass(frozen=True)
class Node:
    """One node of a run: ``launch`` is the id of its supervisor's launch, ``port`` 0 where no supervisor listens."""

    launch: str
    host: str
    address: str
    port: int
    ranks: tuple[int, ...]

    def label(self) -> str:
        """Return what a person calls it: ``vm (10.0.0.2)``."""
        return f"{self.host} ({self.address})" if self.address else self.host

    def words(self) -> str:
        """Return ``node vm (10.0.0.2) with ranks 2, 3``."""
        return f"node {self.label()} with rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"


@dataclass(frozen=True)
class Lost:
    """A node that is not there any more: ``how`` is gone (its processes ended) or unreachable (no answer at all)."""

    node: Node
    how: str

    def words(self) -> str:
        """Say which node it is and what is known of it."""
        known = {
            "gone": "its processes are gone",
            "unreachable": "it does not answer on the network",
        }
        return f"{self.node.words()} was lost ({known[self.how]})"

    def as_json(self) -> dict[str, object]:
        """Return the row of this node in ``status.json``."""
        return {"host": self.node.host, "address": self.node.address, "ranks": list(self.node.ranks), "how": self.how}


def listen(address: str) -> socket.socket:
    """Open the socket that tells the others that this node is there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    listening.setblocking(False)
    return listening


def hang_up(listening: socket.socket) -> None:
    """Close the connections that wait on a socket of ``listen``: at most as many as its queue holds, and never wait."""
    for _ in range(_BACKLOG):
        try:
            listening.accept()[0].close()
        except OSError:  # nobody waits, or the caller is gone again
            return


def state(node: Node, timeout_s: float = PROBE_S) -> str:
    """Return ``there``, ``gone``, ``unreachable`` or, where nobody listens for it, ``unknown``."""
    if not node.port:
        return "unknown"
    try:
        socket.create_connection((node.address, node.port), timeout_s).close()
        return "there"
    except ConnectionRefusedError:
        return "gone"
    except OSError as error:
        return "unknown" if error.errno in (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL) else "unreachable"


def lost(nodes: Iterable[Node]) -> list[Lost]:
    """Return those of the nodes that are not there any more, by rank. Takes ``PROBE_S`` at most for 64 nodes."""
    asked = sorted(nodes, key=lambda node: node.ranks)
    if not asked:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(asked))) as pool:
        states = list(pool.map(state, asked))
    return [Lost(node, how) for node, how in zip(asked, states, strict=True) if how in ("gone", "unreachable")]


def launch_id() -> str:
    """Return the id of the launch that this process belongs to; '' without a supervisor of ours."""
    return (os.environ.get(NODE, "").split() or [""])[0]


def group(rows: Iterable[tuple[int, str, str]]) -> list[Node]:
    """Return the nodes of ranks: rows of (rank, host name, the rank's ``NODE`` variable), by their lowest rank."""
    found: dict[tuple[str, ...], list[int]] = {}
    for rank, host, text in rows:
        launch, *place = text.split() or [""]
        address, port = place if len(place) == 2 else ("", "0")
        found.setdefault((launch, host, address, port), []).append(rank)
    nodes = [
        Node(launch, host, address, int(port), tuple(sorted(ranks)))
        for (launch, host, address, port), ranks in found.items()
    ]
    return sorted(nodes, key=lambda node: node.ranks)


def names(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Return what the node of each rank is called, by rank: its host name, or its address where two share the name."""
    nodes = list(nodes)
    hosts = [node.host for node in nodes]
    called = {
        rank: node.address if hosts.count(node.host) > 1 and node.address else node.host
        for node in nodes
        for rank in node.ranks
    }
    return tuple(called[rank] for rank in sorted(called))


def write(run_dir: Path, nodes: Iterable[Node]) -> None:
    """Write down the nodes of the run as it is now."""
    write_json(run_dir / NAME, {"nodes": [dataclasses.asdict(node) for node in nodes]})


def read(run_dir: Path) -> list[Node]:
    """Return the nodes of a run; none before its ranks met."""
    with contextlib.suppress(UserError, KeyError, TypeError):
        rows = read_object(run_dir / NAME, {"nodes": list})["nodes"]
        return [Node(**{**row, "ranks": tuple(row["ranks"])}) for row in rows]
    return []
