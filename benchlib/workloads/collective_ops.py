"""Data that show a wrong result: every contribution and every position can be told from the others.

n ranks, E elements. Reductions get whole numbers that are exact in their type, whatever the order in which they are
combined; operations that only move data get bit patterns that use every bit of the type. All data repeat with a period
of a prime number of elements (65537, for bytes of moved data 257), so that the segments and chunks in which libraries
work never fall onto their like. Two results are compared bit by bit.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchlib.workloads.collectives import exchange
from benchlib.workloads.operations import OPS, TYPES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, kind) for name, (kind, _) in TYPES.items()}
# The largest whole number up to which all are exact in the type; kept small where the type would allow much more.
EXACT = {"fp32": 2**24, "fp16": 2**11, "bf16": 2**8, "int32": 2**24, "int64": 2**24, "uint8": 2**8 - 1}
PERIOD = 65537
BYTE_PERIOD = 257
FACTORS = 4  # ranks at most whose factors of a product are above one, at each position
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIERS = {1: 37, 2: 40503, 4: 2654435761, 8: -7046029254386353131}  # odd: the golden ratio's, by width
_STRIDE = 37

COMBINE: Any = {"sum": torch.sum, "avg": torch.sum, "min": torch.amin, "max": torch.amax, "product": torch.prod}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as whole numbers, so that every bit counts and NaN equals itself."""
    return tensor.view(_BITS[tensor.element_size()])


def wrong_places(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the positions at which two tensors of a type and length differ in any bit, rising."""
    if torch.equal(bits(actual), bits(expected)):
        return torch.empty(0, dtype=torch.int64)
    return (bits(actual) != bits(expected)).nonzero().flatten().cpu()


def moved(dtype: str, elements: int, source: int, target: int, ranks: int, device: torch.device) -> torch.Tensor:
    """Return the (E,) bit pattern that rank ``source`` sends to rank ``target`` (0 where all get the same)."""
    width = DTYPES[dtype].itemsize
    period = BYTE_PERIOD if width == 1 else PERIOD
    first = _STRIDE * (source + ranks * target)
    places = (torch.arange(min(elements, period), dtype=torch.int64) + first) % period
    # The product wraps around in 64 bits; its lowest bits are the pattern. Up to two bytes a prime modulus spreads them.
    numbers = (places + 1) * _MULTIPLIERS[width]
    numbers = numbers % period if width <= 2 else numbers
    lowest = numbers.view(_BITS[width])[:: 8 // width].contiguous()  # the machine is little-endian, as torch asks for
    return _repeated(lowest.view(DTYPES[dtype]), elements).to(device)


def _repeated(block: torch.Tensor, elements: int) -> torch.Tensor:
    """Repeat a block of one period up to (E,)."""
    return block.repeat(-(-elements // len(block)))[:elements].contiguous()


def numbers(reduction: str, dtype: str, rank: int, ranks: int, places: torch.Tensor) -> torch.Tensor:
    """Return one rank's whole numbers at ``places`` (int64) of a reduction, as int64.

    Sum, average, minimum, maximum: 1 + p(i) + step * ((rank + i) mod q), with p different at neighbouring positions and
    q ranks told apart. Product: a factor from 2 up at some ranks (at most ``FACTORS``) that move with the position, 1 at the others.
    No partial result exceeds ``EXACT``: with very many ranks only some contribute at each position of a small type.
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


def contribution(how: str, dtype: str, elements: int, rank: int, ranks: int, device: torch.device) -> torch.Tensor:
    """Return the (E,) data of one rank for a reduction, exact in the type."""
    places = torch.arange(min(elements, PERIOD), dtype=torch.int64)
    return _repeated(numbers(how, dtype, rank, ranks, places).to(DTYPES[dtype]), elements).to(device)


def reduced(reduction: str, dtype: str, elements: int, ranks: int, device: torch.device) -> torch.Tensor:
    """Return the (E,) result that every order of combining the contributions of all ranks has to give."""
    places = torch.arange(min(elements, PERIOD), dtype=torch.int64)
    parts = torch.stack([numbers(reduction, dtype, rank, ranks, places) for rank in range(ranks)])
    whole = COMBINE[reduction](parts, 0) // (ranks if reduction == "avg" else 1)
    return _repeated(whole.to(DTYPES[dtype]), elements).to(device)


# What each rank gives and has to get in an operation of n ranks and E elements on the larger side (c = E / n in a part). Out
# of place torch's all-reduce, broadcast and reduce are a copy and the operation, and the copy is timed.

REDUCE = {name: operation for operation, name, _ in exchange.REDUCTIONS}
ROOT = 0
# torch 2.13 renamed both and warns of the old names.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Place(NamedTuple):
    """Where an operation runs: this rank of n, on a device, in a group (None: all ranks); a message goes between two ``ends``."""

    rank: int
    ranks: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    ends: tuple[int, int] = (0, 1)


class Data(NamedTuple):
    """What a rank gives and what it has to get; None where it gives nothing or what it gets is not defined."""

    give: torch.Tensor | None
    get: torch.Tensor | None


def data(operation: str, dtype: str, reduction: str, elements: int, at: Place) -> Data:
    """Return the tensors of this rank: (E,) on the larger side, else (c,)."""
    op, rank, ranks, is_root = OPS[operation], at.rank, at.ranks, at.rank == ROOT
    part = elements // ranks

    def pattern(source: int, target: int = 0, length: int = part) -> torch.Tensor:
        return moved(dtype, length, source, target, ranks, at.device)

    if op.reduces:
        whole = reduced(reduction, dtype, elements, ranks, at.device)
        mine = whole.chunk(ranks)[rank].clone() if op.parts_given else whole
        give = contribution(reduction, dtype, elements, rank, ranks, at.device)
        return Data(give, mine if op.ends == "all" or is_root else None)
    if operation == "broadcast":
        whole = pattern(ROOT, length=elements)
        return Data(whole if is_root else None, whole)
    if operation == "send_recv":
        whole = pattern(*at.ends, elements)
        return Data(*(whole if rank == end else None for end in at.ends))
    if operation == "scatter":
        each = [pattern(ROOT, target) for target in range(ranks)]
        return Data(torch.cat(each) if is_root else None, each[rank])
    if operation == "all_to_all":
        out, into = zip(*((pattern(rank, other), pattern(other, rank)) for other in range(ranks)), strict=True)
        return Data(torch.cat(out), torch.cat(into))
    if operation == "barrier":
        return Data(None, None)
    each = [pattern(source) for source in range(ranks)]  # all_gather, gather
    return Data(each[rank], torch.cat(each) if op.ends == "all" or is_root else None)


def start(operation: str, give: torch.Tensor, get: torch.Tensor, reduction: str, at: Place, asynchronous: bool) -> Any:
    """Ask the library for an operation; returns what to wait for where it is asynchronous.

    Raises ``ValueError`` for a tensor that is not contiguous: gloo silently corrupts such tensors.
    """
    exchange.flat(give, "input")
    exchange.flat(get, "output")
    how: Any = REDUCE.get(reduction)
    more: Any = {"group": at.group, "async_op": asynchronous}
    match operation:
        case "all_reduce":
            return dist.all_reduce(copied(give, get), how, **more)
        case "all_gather":
            return ALL_GATHER(get, give, **more)
        case "reduce_scatter":
            return REDUCE_SCATTER(get, give, how, **more)
        case "broadcast":
            return dist.broadcast(copied(give, get), ROOT, **more)
        case "reduce":
            return dist.reduce(copied(give, get), ROOT, how, **more)
        case "gather":
            return dist.gather(give, _parts(get, at), dst=ROOT, **more)
        case "scatter":
            return dist.scatter(get, _parts(give, at), src=ROOT, **more)
        case "all_to_all":
            return dist.all_to_all_single(get, give, **more)
        case "send_recv":
            return _message(give, get, at, asynchronous)
        case "barrier":
            return dist.barrier(**more)


def copied(give: torch.Tensor, get: torch.Tensor) -> torch.Tensor:
    """Return the output of an operation that works in place, with the input copied into it where it is another."""
    return get if give.data_ptr() == get.data_ptr() else get.copy_(give)


def _parts(whole: torch.Tensor, at: Place) -> list[torch.Tensor] | None:
    return list(whole.chunk(at.ranks)) if at.rank == ROOT else None


def _message(give: torch.Tensor, get: torch.Tensor, at: Place, asynchronous: bool) -> dist.Work:
    source, target = at.ends
    into = [(get, source)] if at.rank == target else []
    out = [(give, target)] if at.rank == source else []
    works = exchange.peers(at.group).start(into, out)
    pending = exchange.Pending(lambda: exchange.wait_all(works))
    if not asynchronous:
        pending.wait()
    return pending
