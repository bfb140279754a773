"""Data that show a wrong result: every contribution and every position can be told from the others.

n ranks, E elements. Reductions get whole numbers that are exact in their type, whatever the order in which they are
combined; operations that only move data get bit patterns that use every bit of the type. All data repeat with a period
of a prime number of elements (65537, for bytes of moved data 257), so that the segments and chunks in which libraries
work never fall onto their like. Two results are compared bit by bit.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchlib.runtime import exchange

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}
# The largest whole number up to which all are exact in the type; kept small where the type would allow much more.
EXACT = {"fp32": 2**24, "fp16": 2**11, "bf16": 2**8, "int32": 2**24, "int64": 2**24, "uint8": 2**8 - 1}
PERIOD = 65537
BYTE_PERIOD = 257
FACTORS = 4  # ranks at most whose factors of a product are above one, at each position
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIERS = {1: 37, 2: 40503, 4: 2654435761, 8: -7046029254386353131}  # odd: the golden ratio's, by width
_STRIDE = 37

Combine = Callable[[torch.Tensor], torch.Tensor]
COMBINE: dict[str, Combine] = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.sum(0) // len(parts),
    "min": lambda parts: parts.amin(0),
    "max": lambda parts: parts.amax(0),
    "product": lambda parts: parts.prod(0),
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as whole numbers, so that every bit counts and NaN equals itself."""
    return tensor.view(_BITS[tensor.element_size()])


def wrong_places(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the positions at which two tensors of a type and length differ in any bit, rising."""
    if torch.equal(bits(got), bits(expected)):
        return torch.empty(0, dtype=torch.int64)
    return (bits(got) != bits(expected)).nonzero().flatten().cpu()


def moved(dtype: str, elements: int, source: int, target: int, ranks: int, device: torch.device) -> torch.Tensor:
    """Return the (E,) bit pattern that rank ``source`` sends to rank ``target`` (0 where all get the same)."""
    width = torch.empty(0, dtype=DTYPES[dtype]).element_size()
    period = BYTE_PERIOD if width == 1 else PERIOD
    first = _STRIDE * (source + ranks * target)
    places = (torch.arange(min(elements, period), dtype=torch.int64) + first) % period
    # The product wraps around in 64 bits; its lowest bits are the pattern. Up to two bytes a prime modulus spreads them.
    numbers = (places + 1) * _MULTIPLIERS[width]
    numbers = numbers % period if width <= 2 else numbers
    return _repeated(_lowest_bits(numbers, width).view(DTYPES[dtype]), elements).to(device)


def _lowest_bits(numbers: torch.Tensor, width: int) -> torch.Tensor:
    """Return the lowest ``width`` bytes of 64-bit numbers as whole numbers of that width."""
    if width == 8:
        return numbers
    return numbers.view(_BITS[width])[:: 8 // width].contiguous()  # the machine is little-endian, as torch asks for


def _repeated(block: torch.Tensor, elements: int) -> torch.Tensor:
    """Repeat a block of one period up to (E,)."""
    if elements <= len(block):
        return block[:elements].clone()
    times = -(-elements // len(block))
    return block.repeat(times)[:elements].contiguous()


def numbers(reduction: str, dtype: str, rank: int, ranks: int, places: torch.Tensor) -> torch.Tensor:
    """Return one rank's whole numbers at ``places`` (int64) of a reduction, as int64.

    Sum, average, minimum, maximum: 1 + p(i) + step * ((rank + i) mod q), with p different at neighbouring positions and
    q ranks told apart. Product: a factor from 2 up at some ranks (at most ``FACTORS``) that move with the position, 1 at the others.
    No partial result exceeds ``EXACT``: with very many ranks a type of few digits has only some of them contribute at
    each position.
    """
    if reduction == "product":
        return _factors(dtype, rank, ranks, places)
    most = EXACT[dtype]
    adding = reduction in ("sum", "avg")
    taking_part = min(ranks, max(1, most // 2)) if adding else ranks
    if reduction == "avg" and taking_part < ranks:
        raise ValueError(f"the average over {ranks} ranks has no exact numbers in {dtype}: use fp32 or fewer ranks")
    room = most // taking_part if adding else most
    step = 2 if reduction == "avg" else 1  # so that the sum over the ranks is a multiple of their number
    apart = max(q for q in range(1, min(ranks, max(1, (room + 1) // (2 * step))) + 1) if ranks % q == 0)
    spread = min(room - step * (apart - 1), PERIOD)
    values = 1 + _position(places, spread) + step * ((rank + places) % apart)
    if taking_part < ranks:
        values = torch.where((rank - places) % ranks < taking_part, values, 0)
    return values


def _position(places: torch.Tensor, spread: int) -> torch.Tensor:
    """Return p(i) from 0 to spread - 1: the next position has the next number, and no two runs of them are alike."""
    return (places + (places // spread) * 40503 % PERIOD) % spread


def _factors(dtype: str, rank: int, ranks: int, places: torch.Tensor) -> torch.Tensor:
    # As many ranks as leave each of them five factors or more, 2 to 6.
    window = max(count for count in range(1, min(ranks, FACTORS) + 1) if count == 1 or _root(dtype, count) >= 6)
    choices = min(_root(dtype, window), PERIOD) - 1
    turn = (rank - places) % ranks
    factor = 2 + ((places + 1) * (turn + 1) * 40503 % PERIOD) % choices
    return torch.where(turn < window, factor, 1)


def _root(dtype: str, degree: int) -> int:
    """Return the largest whole number whose power is still exact in the type."""
    return math.floor(EXACT[dtype] ** (1 / degree) + 1e-9)


def contribution(
    reduction: str, dtype: str, elements: int, rank: int, ranks: int, device: torch.device
) -> torch.Tensor:
    """Return the (E,) data of one rank for a reduction, exact in the type."""
    places = torch.arange(min(elements, PERIOD), dtype=torch.int64)
    return _repeated(numbers(reduction, dtype, rank, ranks, places).to(DTYPES[dtype]), elements).to(device)


def reduced(reduction: str, dtype: str, elements: int, ranks: int, device: torch.device) -> torch.Tensor:
    """Return the (E,) result that every order of combining the contributions of all ranks has to give."""
    places = torch.arange(min(elements, PERIOD), dtype=torch.int64)
    parts = torch.stack([numbers(reduction, dtype, rank, ranks, places) for rank in range(ranks)])
    return _repeated(COMBINE[reduction](parts).to(DTYPES[dtype]), elements).to(device)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors one after the other."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


# The collective operations as a table: what each rank gives, what it has to get, and how the library is asked.
#
# n ranks, E elements on the larger side (S bytes), c = E / n elements of a part. torch's all-reduce, broadcast and reduce
# work in place: out of place they are a copy and the operation, and the copy is timed. The others work in place on a part
# of the larger side. Rooted operations have rank 0 for root; send/recv goes from rank 0 to rank 1 only.


REDUCTIONS = {name: operation for operation, name, _ in exchange.REDUCTIONS}
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
        width = DTYPES[dtype].itemsize
        return parts * max(1, size_bytes // width // parts)

    def start(self, give: torch.Tensor, get: torch.Tensor, reduction: str, place: Place, asynchronous: bool) -> Any:
        """Ask the library for the operation; returns what to wait for where it is asynchronous.

        Raises ``ValueError`` for a tensor that is not contiguous: gloo silently corrupts such tensors.
        """
        require_contiguous(give, get)
        return self.call(give, get, reduction, place, asynchronous)


def require_contiguous(give: torch.Tensor, get: torch.Tensor) -> None:
    """Raise ``ValueError`` for a tensor whose elements do not lie one after the other."""
    exchange.flat(give, "input")
    exchange.flat(get, "output")


def _all_reduce_data(dtype: str, reduction: str, elements: int, at: Place) -> Data:
    return Data(
        contribution(reduction, dtype, elements, at.rank, at.ranks, at.device),
        reduced(reduction, dtype, elements, at.ranks, at.device),
    )


def _reduce_data(dtype: str, reduction: str, elements: int, at: Place) -> Data:
    both = _all_reduce_data(dtype, reduction, elements, at)
    return both if at.rank == ROOT else Data(both.give, None)


def _reduce_scatter_data(dtype: str, reduction: str, elements: int, at: Place) -> Data:
    both = _all_reduce_data(dtype, reduction, elements, at)
    assert both.get is not None
    return Data(both.give, both.get.chunk(at.ranks)[at.rank].clone())


def _pattern(dtype: str, elements: int, source: int, target: int, at: Place) -> torch.Tensor:
    return moved(dtype, elements, source, target, at.ranks, at.device)


def _broadcast_data(dtype: str, reduction: str, elements: int, at: Place) -> Data:
    pattern = _pattern(dtype, elements, ROOT, 0, at)
    return Data(pattern if at.rank == ROOT else None, pattern)


def _all_gather_data(dtype: str, reduction: str, elements: int, at: Place) -> Data:
    each = [_pattern(dtype, elements // at.ranks, source, 0, at) for source in range(at.ranks)]
    return Data(each[at.rank], joined(each))


def _gather_data(dtype: str, reduction: str, elements: int, at: Place) -> Data:
    both = _all_gather_data(dtype, reduction, elements, at)
    return both if at.rank == ROOT else Data(both.give, None)


def _scatter_data(dtype: str, reduction: str, elements: int, at: Place) -> Data:
    each = [_pattern(dtype, elements // at.ranks, ROOT, target, at) for target in range(at.ranks)]
    return Data(joined(each) if at.rank == ROOT else None, each[at.rank])


def _all_to_all_data(dtype: str, reduction: str, elements: int, at: Place) -> Data:
    part = elements // at.ranks
    return Data(
        joined([_pattern(dtype, part, at.rank, target, at) for target in range(at.ranks)]),
        joined([_pattern(dtype, part, source, at.rank, at) for source in range(at.ranks)]),
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
        several = Several(exchange.peers(at.group).start(into, out))
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
