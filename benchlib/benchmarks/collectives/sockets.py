"""What the machine reaches without a collective library, between the same processes in the same run: plain TCP sockets.

One way from rank 0 to rank 1, and all ranks at once, each sending S bytes to the next one and receiving S bytes from the
one before (two ranks: both ways at once). What arrives is compared like every other result.
"""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from benchlib.launch import nodes
from benchlib.runtime import group
from benchlib.workloads import collective_ops
from benchlib.workloads.collective_ops import Place
from benchlib.workloads.collective_timing import first_of

ONE_WAY, ALL_RANKS = "socket_one_way", "socket_all_ranks"
# The bound of an operation's bus bandwidth: whether every rank sends and receives at once, or one rank is at one end.
BOUND_OF: Mapping[str, str] = {"all": ALL_RANKS, "root": ONE_WAY, "pair": ONE_WAY}
INLINE = 1 << 15  # bytes that surely fit the socket's buffer: sent before receiving, without a second thread
CONNECT_S, TRANSFER_S = 20.0, 120.0
CPU = torch.device("cpu")


class Wire:
    """S bytes over connected sockets: ``out`` to the next rank, ``into`` from the one before, or both at the same time."""

    is_limit = True

    def __init__(self, links: Mapping[str, socket.socket], size: int, here: int, before: int) -> None:
        self.out, self.into, self.bytes, self.rank = links.get("out"), links.get("into"), size, here
        self.first_wrong = ""
        self._sent = collective_ops.moved("uint8", size, here, 0, 1, CPU)
        self._expected = collective_ops.moved("uint8", size, before, 0, 1, CPU)
        self._received = torch.empty_like(self._expected)
        self._pool = ThreadPoolExecutor(1) if self.out and self.into and size > INLINE else None

    def restore(self) -> None:
        """Fill the buffer with what must not be in it."""
        self._received.copy_(self._expected).bitwise_not_()

    def run(self) -> None:
        """Send and receive."""
        data, buffer = self._sent.numpy().data, self._received.numpy().data
        sending: Future[None] | None = None
        if self.out is not None and self._pool:
            sending = self._pool.submit(self.out.sendall, data)
        elif self.out is not None:
            self.out.sendall(data)
        at = 0
        while self.into is not None and at < self.bytes:
            count = self.into.recv_into(buffer[at:])
            if not count:
                raise ConnectionError("the other rank closed its socket in the middle of a measurement")
            at += count
        if sending is not None:
            sending.result()

    def check(self) -> tuple[int, int]:
        """Compare what arrived."""
        if self.into is None:
            return 0, 0
        wrong = collective_ops.wrong_places(self._received, self._expected)
        if len(wrong) and not self.first_wrong:
            self.first_wrong = f"byte {int(wrong[0]):,} of {self.bytes:,} on rank {self.rank}"
        return len(wrong), self.bytes


@contextlib.contextmanager
def sockets(place: Place) -> Iterator[Callable[[str, int], Wire] | str]:
    """Connect each rank to the next one by TCP; yields what makes the wire of a bound and a size. A collective.

    Yields the reason on every rank where one of them could not connect, or is alone.
    """
    rank, ranks = place.rank, place.ranks
    if ranks < 2:
        yield "one rank has nobody to talk to"
        return
    address, links, reason = own_address(), dict[str, socket.socket](), ""
    with contextlib.ExitStack() as stack:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = stack.enter_context(socket.create_server((address, 0), family=family))
        listener.settimeout(CONNECT_S)
        places = group.all_gather_objects((address, listener.getsockname()[1]))
        try:
            next_place = places[(rank + 1) % ranks]
            links["out"] = stack.enter_context(socket.create_connection(next_place, timeout=CONNECT_S))
            links["into"] = stack.enter_context(listener.accept()[0])
        except OSError as error:
            reason = f"rank {rank} at {address} cannot connect to the others: {error}"
        for item in links.values():
            item.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            item.settimeout(TRANSFER_S)
        of_pair = {name: link for name, link in links.items() if rank == {"out": 0, "into": 1}[name]}

        def wire(bound: str, size: int) -> Wire:
            return Wire(links if bound == ALL_RANKS else of_pair, size, rank, (rank - 1) % ranks)

        yield first_of(reason) or wire


def own_address() -> str:
    """Return this rank's address: of the interface that gloo was told, else one that others reach."""
    name, addresses = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0], nodes.own_addresses()
    named = [address for address, interface in addresses.items() if interface == name and ":" not in address]
    others = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    return min(named or others, key=lambda address: ":" in address, default="127.0.0.1")
