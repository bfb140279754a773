"""The collective operations as a table: what each rank gives, what it has to get, and how the library is asked.

n ranks, E elements on the larger side (S bytes), c = E / n elements of a part. torch's all-reduce, broadcast and reduce
work in place: out of place they are a copy and the operation, and the copy is timed. The others work in place on a part
of the larger side. Rooted operations have rank 0 for root; send/recv goes from rank 0 to rank 1 only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchlib import p2p
from benchlib.collectives import patterns

REDUCTIONS = {name: operation for operation, name, _ in p2p.REDUCTIONS}
ROOT = 0
# torch 2.13 renamed both and warns of the old names.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Place:
    """Where an operation runs: this rank of n, on a device, in a group (None: all ranks)."""

    rank: int
    ranks: int
    device: torch.device
    group: Group = None


@dataclass(frozen=True)
class Data:
    """What a rank gives and what it has to get; None where it gives nothing or what it gets is not defined."""

    give: torch.Tensor | None
    get: torch.Tensor | None


@dataclass(frozen=True)
class Op:
    """One operation. ``data`` and ``call`` are (dtype, reduction, elements, place) and (give, get, reduction, place, async)."""

    name: str
    data: Callable[[str, str, int, Place], Data]
    call: Callable[..., Any]
    parts_given: bool = False  # the input is the larger side, with a part for each rank
    parts_got: bool = False  # the output is the larger side, with a part of each rank
    reduces: bool = False
    placements: tuple[bool, ...] = (False, True)  # in place or not; the first is the one that headline figures are of
    least_ranks: int = 1

    def elements(self, size_bytes: int, dtype: str, ranks: int) -> int:
        """Return the elements of the larger side nearest below a size, at least one for each part."""
        parts = ranks if self.parts_given or self.parts_got else 1
        width = patterns.DTYPES[dtype].itemsize
        return parts * max(1, size_bytes // width // parts)

    def start(self, give: torch.Tensor, get: torch.Tensor, reduction: str, place: Place, asynchronous: bool) -> Any:
        """Ask the library for the operation; returns what to wait for where it is asynchronous.

        Raises ``ValueError`` for a tensor that is not contiguous: gloo corrupts such tensors without a word.
        """
        require_contiguous(give, get)
        return self.call(give, get, reduction, place, asynchronous)


def require_contiguous(give: torch.Tensor, get: torch.Tensor) -> None:
    """Raise ``ValueError`` for a tensor whose elements do not lie one after the other."""
    p2p.flat(give, "input")
    p2p.flat(get, "output")


def _all_reduce_data(dtype: str, reduction: str, elements: int, at: Place) -> Data:
    return Data(
        patterns.contribution(reduction, dtype, elements, at.rank, at.ranks, at.device),
        patterns.reduced(reduction, dtype, elements, at.ranks, at.device),
    )


def _reduce_data(dtype: str, reduction: str, elements: int, at: Place) -> Data:
    both = _all_reduce_data(dtype, reduction, elements, at)
    return both if at.rank == ROOT else Data(both.give, None)


def _reduce_scatter_data(dtype: str, reduction: str, elements: int, at: Place) -> Data:
    both = _all_reduce_data(dtype, reduction, elements, at)
    assert both.get is not None
    return Data(both.give, both.get.chunk(at.ranks)[at.rank].clone())


def _pattern(dtype: str, elements: int, source: int, target: int, at: Place) -> torch.Tensor:
    return patterns.moved(dtype, elements, source, target, at.ranks, at.device)


def _broadcast_data(dtype: str, reduction: str, elements: int, at: Place) -> Data:
    pattern = _pattern(dtype, elements, ROOT, 0, at)
    return Data(pattern if at.rank == ROOT else None, pattern)


def _all_gather_data(dtype: str, reduction: str, elements: int, at: Place) -> Data:
    each = [_pattern(dtype, elements // at.ranks, source, 0, at) for source in range(at.ranks)]
    return Data(each[at.rank], patterns.joined(each))


def _gather_data(dtype: str, reduction: str, elements: int, at: Place) -> Data:
    both = _all_gather_data(dtype, reduction, elements, at)
    return both if at.rank == ROOT else Data(both.give, None)


def _scatter_data(dtype: str, reduction: str, elements: int, at: Place) -> Data:
    each = [_pattern(dtype, elements // at.ranks, ROOT, target, at) for target in range(at.ranks)]
    return Data(patterns.joined(each) if at.rank == ROOT else None, each[at.rank])


def _all_to_all_data(dtype: str, reduction: str, elements: int, at: Place) -> Data:
    part = elements // at.ranks
    return Data(
        patterns.joined([_pattern(dtype, part, at.rank, target, at) for target in range(at.ranks)]),
        patterns.joined([_pattern(dtype, part, source, at.rank, at) for source in range(at.ranks)]),
    )


def _no_data(dtype: str, reduction: str, elements: int, at: Place) -> Data:
    return Data(None, None)


def _in_place(
    operate: Callable[[torch.Tensor, str, Place, bool], Any],
) -> Callable[[torch.Tensor, torch.Tensor, str, Place, bool], Any]:
    """Make the call of an operation that torch has in place only: given another output, the input is copied first."""

    def call(give: torch.Tensor, get: torch.Tensor, reduction: str, at: Place, asynchronous: bool) -> Any:
        if give.data_ptr() != get.data_ptr():
            get.copy_(give)
        return operate(get, reduction, at, asynchronous)

    return call


def _gather(give: torch.Tensor, get: torch.Tensor, reduction: str, at: Place, asynchronous: bool) -> Any:
    parts = list(get.chunk(at.ranks)) if at.rank == ROOT else None
    return dist.gather(give, parts, dst=ROOT, group=at.group, async_op=asynchronous)


def _scatter(give: torch.Tensor, get: torch.Tensor, reduction: str, at: Place, asynchronous: bool) -> Any:
    parts = list(give.chunk(at.ranks)) if at.rank == ROOT else None
    return dist.scatter(get, parts, src=ROOT, group=at.group, async_op=asynchronous)


class Several:
    """What to wait for where an operation is several messages."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self.works:
            work.wait()


def message(source: int, target: int) -> Op:
    """Return the operation of a message from one rank to another; the other ranks give and get nothing."""

    def data(dtype: str, reduction: str, elements: int, at: Place) -> Data:
        pattern = _pattern(dtype, elements, source, target, at)
        return Data(pattern if at.rank == source else None, pattern if at.rank == target else None)

    def call(give: torch.Tensor, get: torch.Tensor, reduction: str, at: Place, asynchronous: bool) -> Several | None:
        into = [(get, source)] if at.rank == target else []
        out = [(give, target)] if at.rank == source else []
        several = Several(p2p.peers(at.group).start(into, out))
        if asynchronous:
            return several
        several.wait()
        return None

    return Op("send_recv", data, call, placements=(False,), least_ranks=2)


OPS = {
    op.name: op
    for op in (
        Op("all_reduce", _all_reduce_data, _in_place(lambda tensor, reduction, at, later: dist.all_reduce(
            tensor, REDUCTIONS[reduction], group=at.group, async_op=later)), reduces=True, placements=(True, False)),
        Op("all_gather", _all_gather_data, lambda give, get, reduction, at, later: ALL_GATHER(
            get, give, group=at.group, async_op=later), parts_got=True),
        Op("reduce_scatter", _reduce_scatter_data, lambda give, get, reduction, at, later: REDUCE_SCATTER(
            get, give, REDUCTIONS[reduction], group=at.group, async_op=later), parts_given=True, reduces=True),
        Op("broadcast", _broadcast_data, _in_place(lambda tensor, reduction, at, later: dist.broadcast(
            tensor, ROOT, group=at.group, async_op=later)), placements=(True, False)),
        Op("reduce", _reduce_data, _in_place(lambda tensor, reduction, at, later: dist.reduce(
            tensor, ROOT, REDUCTIONS[reduction], group=at.group, async_op=later)), reduces=True, placements=(True, False)),
        Op("gather", _gather_data, _gather, parts_got=True),
        Op("scatter", _scatter_data, _scatter, parts_given=True),
        Op("all_to_all", _all_to_all_data, lambda give, get, reduction, at, later: dist.all_to_all_single(
            get, give, group=at.group, async_op=later), parts_given=True, parts_got=True, placements=(False,)),
        message(0, 1),
        Op("barrier", _no_data, lambda give, get, reduction, at, later: dist.barrier(
            group=at.group, async_op=later), placements=(False,)),
    )
}  # fmt: skip
