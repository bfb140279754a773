"""Bandwidths of collectives as nccl-tests defines them.

S is the bytes of the larger side of an operation over n ranks that takes t seconds: algbw = S / t, and busbw = algbw
times a factor that makes it comparable with the speed of a link, whatever n is. Gbps are 1e9 bits per second.
"""

from collections.abc import Callable

# A share of a limit that was measured in turns with the operation exceeds 1 by noise, not by more than this: above it
# what was taken for the limit is none, since the library drives the same network faster than one stream of a socket.
NO_LIMIT = 1.05
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "send_recv": lambda n: 1.0,
}


def algbw_gbps(size_bytes: float, seconds: float) -> float:
    """Return the algorithm bandwidth in Gbps (gigabits per second)."""
    if seconds <= 0:
        raise ValueError(f"{seconds} s for {size_bytes} bytes: a time must be above zero")
    return 8e-9 * size_bytes / seconds


def busbw_gbps(operation: str, size_bytes: float, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth in Gbps; ``operation`` is a name of ``BUS_FACTORS``. One rank has no bus: 0."""
    return BUS_FACTORS[operation](ranks) * algbw_gbps(size_bytes, seconds)
