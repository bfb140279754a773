"""Data that show a wrong result: every contribution and every position can be told from the others.

n ranks, E elements. Reductions get whole numbers that are exact in their type, whatever the order in which they are
combined; operations that only move data get bit patterns that use every bit of the type. All data repeat with a period
of a prime number of elements (65537, for bytes of moved data 257), so that the segments and chunks in which libraries
work never fall onto their like. Two results are compared bit by bit.
"""

import math
from collections.abc import Callable, Sequence

import torch

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
    found = 1 + _position(places, spread) + step * ((rank + places) % apart)
    if taking_part < ranks:
        found = torch.where((rank - places) % ranks < taking_part, found, 0)
    return found


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
