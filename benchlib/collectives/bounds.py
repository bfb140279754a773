"""What the machine reaches without a collective library, measured between the same processes in the same run.

Plain TCP sockets: one way from rank 0 to rank 1, and all ranks at once, each sending S bytes to the next one and
receiving S bytes from the one before (two ranks: both ways at once). And copies within the memory, all ranks at once.
What arrives is compared like every other result.
"""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import torch

from benchlib import network, process_group
from benchlib.collectives import patterns
from benchlib.collectives.ops import Place

ONE_WAY, ALL_RANKS, COPY, CLAIMED = "tcp socket one way", "tcp socket all ranks", "memory copy", "claimed link"
INLINE = 1 << 15  # bytes that surely fit the socket's buffer: sent before receiving, without a second thread
CONNECT_S = 20.0
TRANSFER_S = 120.0
CPU = torch.device("cpu")
# The bound of each operation by bus bandwidth: whether every rank sends and receives at once, or one rank is at one end.
BOUND_OF = {
    "all_reduce": ALL_RANKS, "all_gather": ALL_RANKS, "reduce_scatter": ALL_RANKS, "all_to_all": ALL_RANKS,
    "broadcast": ONE_WAY, "reduce": ONE_WAY, "gather": ONE_WAY, "scatter": ONE_WAY, "send_recv": ONE_WAY,
}  # fmt: skip


class Wire:
    """S bytes over sockets that are already connected: out of one, into the other, at the same time where both are there."""

    is_limit = True

    def __init__(self, out: socket.socket | None, into: socket.socket | None, ends: tuple[int, int], size: int) -> None:
        """``ends`` are the ranks that the data come from and go to: this one's receiving and sending neighbours."""
        self.out, self.into, self.bytes = out, into, size
        here, there = ends
        self._sent = patterns.moved("uint8", size, here, 0, 1, CPU)
        self._expected = patterns.moved("uint8", size, there, 0, 1, CPU)
        self._received = torch.empty_like(self._expected)
        self._pool = ThreadPoolExecutor(1) if out and into and size > INLINE else None

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
        return len(patterns.wrong_places(self._received, self._expected)), self.bytes


class Sockets:
    """The connected sockets of this rank: to the next rank and from the one before, and those of ranks 0 and 1 alone."""

    def __init__(self, place: Place, pair: dict[str, socket.socket], ring: dict[str, socket.socket]) -> None:
        self.place, self._pair, self._ring = place, pair, ring

    def wire(self, bound: str, size: int) -> Wire:
        """Return the transfer of S bytes of a bound: ``ONE_WAY`` or ``ALL_RANKS``."""
        rank, ranks = self.place.rank, self.place.ranks
        used = self._pair if bound == ONE_WAY else self._ring
        before = 0 if bound == ONE_WAY else (rank - 1) % ranks
        return Wire(used.get("out"), used.get("into"), (rank, before), size)


class NoSockets(Exception):
    """Says why the ranks could not connect; raised on all of them."""


@contextlib.contextmanager
def sockets(place: Place) -> Iterator[Sockets]:
    """Connect the ranks by TCP over the addresses that their groups use. A collective.

    Raises ``NoSockets`` on every rank where one of them could not connect, or is alone.
    """
    if place.ranks < 2:
        raise NoSockets("one rank has nobody to talk to")
    address = own_address()
    with contextlib.ExitStack() as stack:
        pair = _connected(place, {0: 1}, address, stack)
        ring = _connected(place, {rank: (rank + 1) % place.ranks for rank in range(place.ranks)}, address, stack)
        yield Sockets(place, pair, ring)


def _connected(
    place: Place, targets: dict[int, int], address: str, stack: contextlib.ExitStack
) -> dict[str, socket.socket]:
    """Connect each rank to its target; returns this rank's sockets, ``out`` to the target and ``into`` from a source."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = stack.enter_context(socket.create_server((address, 0), family=family))
    listener.settimeout(CONNECT_S)
    places = process_group.all_gather_objects((address, listener.getsockname()[1]))
    found: dict[str, socket.socket] = {}
    reason = ""
    try:
        if place.rank in targets:
            found["out"] = socket.create_connection(places[targets[place.rank]], timeout=CONNECT_S)
        if place.rank in targets.values():
            found["into"] = listener.accept()[0]
    except OSError as error:
        reason = f"rank {place.rank} at {address} cannot connect to the others: {error}"
    for one in found.values():
        stack.enter_context(one)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.settimeout(TRANSFER_S)
    reason = next((text for text in process_group.all_gather_objects(reason) if text), "")
    if reason:
        raise NoSockets(reason)
    return found


def own_address() -> str:
    """Return the address of this rank that the others reach: of the interface that gloo was told, else one of its own.

    A collective. Where all ranks are on one machine that is the loopback.
    """
    mine = _interface_address()
    if len(set(process_group.all_gather_objects((socket.gethostname(), mine)))) == 1:
        return mine or "127.0.0.1"
    others = [address for address in network.own_addresses() if not ipaddress.ip_address(address).is_loopback]
    plain = [address for address in others if ":" not in address]
    return mine or next(iter([*plain, *others]), "127.0.0.1")


def _interface_address() -> str:
    """Return the IPv4 address of the interface in GLOO_SOCKET_IFNAME, '' where none is named or it has none."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    addresses = psutil.net_if_addrs().get(name, [])
    return next((address.address for address in addresses if address.family == socket.AF_INET), "")


class Copy:
    """A copy of S bytes within the memory of the rank's device."""

    is_limit = True

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = size
        self._source = patterns.moved("uint8", size, 0, 0, 1, device)
        self._target = torch.empty_like(self._source)

    def restore(self) -> None:
        """Fill the target with what must not be in it."""
        self._target.copy_(self._source).bitwise_not_()

    def run(self) -> None:
        """Copy."""
        self._target.copy_(self._source)

    def check(self) -> tuple[int, int]:
        """Compare the copy with its source."""
        return len(patterns.wrong_places(self._target, self._source)), self.bytes
