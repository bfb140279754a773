"""What the machine reaches without a collective library, measured between the same processes in the same run.

Plain TCP sockets: one way from rank 0 to rank 1, and all ranks at once, each sending S bytes to the next one and
receiving S bytes from the one before (two ranks: both ways at once). What arrives is compared like every other result.
"""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import torch

from benchlib.benchmarks.collectives.bench import Bench, Row
from benchlib.benchmarks.collectives.config import CollectivesConfig
from benchlib.config import cluster
from benchlib.core.definitions import algbw_gbps, busbw_gbps, parse_sizes, size_text
from benchlib.launch import nodes
from benchlib.results.metrics import Metric, derived
from benchlib.runtime import group
from benchlib.workloads import collective_ops
from benchlib.workloads.collective_ops import OPS, Place
from benchlib.workloads.collective_timing import VARIANTS, Case, Exercise, Series, take, take_in_turns

ONE_WAY, ALL_RANKS, CLAIMED = "tcp socket one way", "tcp socket all ranks", "claimed link"
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
        self._sent = collective_ops.moved("uint8", size, here, 0, 1, CPU)
        self._expected = collective_ops.moved("uint8", size, there, 0, 1, CPU)
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
        return len(collective_ops.wrong_places(self._received, self._expected)), self.bytes


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
    places = group.all_gather_objects((address, listener.getsockname()[1]))
    links: dict[str, socket.socket] = {}
    reason = ""
    try:
        if place.rank in targets:
            links["out"] = socket.create_connection(places[targets[place.rank]], timeout=CONNECT_S)
        if place.rank in targets.values():
            links["into"] = listener.accept()[0]
    except OSError as error:
        reason = f"rank {place.rank} at {address} cannot connect to the others: {error}"
    for item in links.values():
        stack.enter_context(item)
        item.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        item.settimeout(TRANSFER_S)
    reason = next((text for text in group.all_gather_objects(reason) if text), "")
    if reason:
        raise NoSockets(reason)
    return links


def own_address() -> str:
    """Return the address of this rank that the others reach: of the interface that gloo was told, else one of its own.

    A collective. Where all ranks are on one machine that is the loopback.
    """
    mine = _interface_address()
    if len(set(group.all_gather_objects((socket.gethostname(), mine)))) == 1:
        return mine or "127.0.0.1"
    others = [address for address in nodes.own_addresses() if not ipaddress.ip_address(address).is_loopback]
    plain = [address for address in others if ":" not in address]
    return mine or next(iter([*plain, *others]), "127.0.0.1")


def _interface_address() -> str:
    """Return the IPv4 address of the interface in GLOO_SOCKET_IFNAME, '' where none is named or it has none."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    addresses = psutil.net_if_addrs().get(name, [])
    return next((address.address for address in addresses if address.family == socket.AF_INET), "")


# The limits of a machine and which share of them the operations reach, measured in turns: one run of each, again and again.
#
# The bounds of an operation by bus bandwidth are those of ``BOUND_OF``. A share is the median over the rounds of the
# operation's bus bandwidth over the rate of the bound in the same round, so that a noisy neighbour hits both.


MIB = 1 << 20
TARGET_BYTES = {"all_reduce": 16 * MIB}  # of other operations 64 MiB; at this size and above the target holds
TARGET_VARIANT = {"all_gather": "direct", "reduce_scatter": "direct"}
HOW = {
    ONE_WAY: "TCP socket from rank 0 to rank 1, S bytes",
    ALL_RANKS: "TCP sockets of all ranks at once, each sends S bytes to the next and receives S from the one before; of one direction",
}


def measure_bounds(bench: Bench, wires: Sockets | str) -> None:
    """Measure every bound at every size into the table ``bounds``. A collective.

    ``wires`` is a sentence where there are no sockets.
    """
    rows, config = [], bench.config
    for size in config.size_list:
        for bound in (ONE_WAY, ALL_RANKS):
            if not isinstance(wires, str) and bench.fits(f"{bound} at {size_text(size)}", size):
                series = take(wires.wire(bound, size), bench.world.device, bench.pace(config.seconds))
                bench.tally(f"{bound}, {size_text(size)}", series)
                rows.append(_bound_row(bound, series))
        bench.step()
    if isinstance(wires, str):
        rows += [_no_bound(bound, "not_available", wires) for bound in (ONE_WAY, ALL_RANKS)]
    bench.tables["bounds"] = [*rows, _claimed(config)]


def _bound_row(bound: str, series: Series) -> Row:
    median = float(np.median(series.seconds))
    return {
        "bound": bound,
        "bytes": series.bytes,
        "gbps": algbw_gbps(series.bytes, median),
        "latency_us": 1e6 * median,
        "provenance": "measured",
        "source": HOW[bound],
    }


def _claimed(config: CollectivesConfig) -> Row:
    gbps, source = cluster.load(config.cluster).links.claimed(config.nnodes == 1)
    reason = source or "no profile of the machines claims one; set cluster=NAME or FILE"
    return _no_bound(CLAIMED, "not_available" if gbps is None else "claimed", reason) | {"gbps": gbps}


def _no_bound(bound: str, provenance: str, source: str) -> Row:
    return {
        "bound": bound, "bytes": None, "gbps": None, "latency_us": None, "provenance": provenance, "source": source
    }  # fmt: skip


def share_sizes(config: CollectivesConfig) -> list[int]:
    """Return the sizes at which shares are measured: the largest, and those of ``share_sizes`` in the range."""
    last = config.size_list[-1]
    return sorted({last, *(size for size in parse_sizes(config.share_sizes) if size <= last)})


def share_cases(config: CollectivesConfig, lacking: Sequence[tuple[Any, ...]]) -> list[Case]:
    """Return the cases of which shares are measured, in the headline type, reduction and placement."""
    chosen = []
    for size in share_sizes(config):
        for operation in config.operations:
            for variant in ("library", "direct"):
                if variant not in config.variants or operation not in VARIANTS[variant] or operation == "barrier":
                    continue
                reduction = config.reductions[0] if OPS[operation].reduces else ""
                case = Case(operation, variant, config.dtypes[0], reduction, OPS[operation].placements[0], size)
                if case.kind not in lacking:
                    chosen.append(case)
    return chosen


def measure_shares(bench: Bench, wires: Sockets | str, cases: Sequence[Case]) -> None:
    """Measure each case and its bound in turns into the table ``shares``, empty without sockets. A collective."""
    rows: list[Row] = []
    samples: dict[tuple[str, str, int], list[float]] = {}
    for case in cases:
        if not isinstance(wires, str) and bench.fits(
            f"the share of {case.label()} at {size_text(case.bytes)}", 2 * case.bytes
        ):
            exercise = Exercise(case, bench.place, bench.fault)
            bound = BOUND_OF[case.operation]
            wire = wires.wire(bound, exercise.bytes)
            own, limit = take_in_turns([exercise, wire], bench.world.device, bench.pace(bench.config.seconds))
            bench.tally(f"{case.label()}, {size_text(own.bytes)}", own, exercise)
            bench.tally(f"{bound}, {size_text(limit.bytes)}", limit)
            shares = paired_shares(case.operation, own, limit)
            samples[case.operation, case.variant, own.bytes] = shares
            rows.append(_share_row(case, own, limit, shares, _target(bench.config, case, own.bytes)))
        bench.step()
    bench.tables["shares"] = rows
    bench.metrics += _metrics(samples)


def paired_shares(operation: str, own: Series, limit: Series) -> list[float]:
    """Return the share of each round: bus bandwidth of the operation over the rate of the bound."""
    ranks = own.times_s.shape[1]
    return [
        busbw_gbps(operation, own.bytes, mine, ranks) / algbw_gbps(limit.bytes, theirs)
        for mine, theirs in zip(own.seconds, limit.seconds, strict=True)
    ]


def _share_row(case: Case, own: Series, limit: Series, shares: list[float], target: float | None) -> Row:
    ranks = own.times_s.shape[1]
    return {
        "operation": case.operation,
        "variant": case.variant,
        "bytes": own.bytes,
        "busbw_gbps": busbw_gbps(case.operation, own.bytes, float(np.median(own.seconds)), ranks),
        "bound": BOUND_OF[case.operation],
        "bound_gbps": algbw_gbps(limit.bytes, float(np.median(limit.seconds))),
        "share": float(np.median(shares)),
        "rounds": len(shares),
        "target": target,
    }


def _target(config: CollectivesConfig, case: Case, size_bytes: int) -> float | None:
    """Return the share that the case has to reach, None where no target is set for its variant or size."""
    wanted = getattr(config, f"target_share_{case.operation}", None)
    large = size_bytes >= TARGET_BYTES.get(case.operation, 64 * MIB)
    return wanted if large and case.variant == TARGET_VARIANT.get(case.operation, "library") else None


def _metrics(samples: dict[tuple[str, str, int], list[float]]) -> Iterator[Metric]:
    """Yield the share of each operation at its largest size, in the variant that the targets are of."""
    for operation in ("all_reduce", "broadcast", "send_recv", "all_gather", "reduce_scatter"):
        variant = TARGET_VARIANT.get(operation, "library")
        sizes = [size for name, way, size in samples if (name, way) == (operation, variant)]
        if sizes:
            size = max(sizes)
            name = operation.replace("all_reduce", "allreduce") + ("_direct" if variant == "direct" else "")
            basis = f"of the rate of {BOUND_OF[operation]}, at {size_text(size)}, measured in turns"
            yield derived(f"{name}_socket_share", samples[operation, variant, size], "ratio", "higher", basis)
