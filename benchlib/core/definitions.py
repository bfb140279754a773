"""Formulas that the field fixed: floating point operations, bandwidths of collectives, sizes of messages.

FLOPs: L layers, h hidden, f intermediate, S tokens of a sequence, B sequences; a multiply-add counts as two. Source: PaLM
appendix B and the arithmetic of a transformer's matrix products.

Bandwidths, as nccl-tests defines them: S is the bytes of the larger side of an operation over n ranks that takes t seconds;
algbw = S / t, and busbw = algbw times a factor that makes it comparable with the speed of a link, whatever n is. Gbps are 1e9
bits per second.
"""

import math
from collections.abc import Callable, Sequence


def encoder_forward_flops(layers: int, hidden: int, intermediate: int, length: int) -> float:
    """Return the FLOPs of one sequence of S tokens through an encoder: ``L [2S(4h² + 2hf) + 4S²h]``.

    Embeddings are look-ups and the QA head (2 outputs) is negligible; both are left out.
    """
    products = 2 * length * (4 * hidden**2 + 2 * hidden * intermediate)
    attention = 4 * length**2 * hidden
    return float(layers * (products + attention))


BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), lambda n: (n - 1) / n),
    **dict.fromkeys(("broadcast", "reduce", "send_recv"), lambda n: 1.0),
}


def algbw_gbps(size_bytes: float, seconds: float) -> float:
    if seconds <= 0:
        raise ValueError(f"{seconds} s for {size_bytes} bytes: a time must be above zero")
    return 8e-9 * size_bytes / seconds


def busbw_gbps(operation: str, size_bytes: float, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth in Gbps; ``operation`` is a name of ``BUS_FACTORS``. One rank has no bus: 0."""
    return BUS_FACTORS[operation](ranks) * algbw_gbps(size_bytes, seconds)


def algbw_samples(size_bytes: float, times_us: Sequence[float]) -> list[float]:
    return [algbw_gbps(size_bytes, 1e-6 * time) for time in times_us]


def busbw_samples(operation: str, size_bytes: float, times_us: Sequence[float], ranks: int) -> list[float] | None:
    """Return the bus bandwidth in Gbps of each time in microseconds; None where one rank, or a barrier, has none."""
    if operation not in BUS_FACTORS or ranks < 2:
        return None
    return [busbw_gbps(operation, size_bytes, 1e-6 * time, ranks) for time in times_us]


def share_text(share: float) -> str:
    """Write a share of a limit: ``59%``, ``0.9%``."""
    return f"{100 * share:.0f}%" if abs(share) >= 0.01 else f"{100 * share:.1g}%"


def size_text(size_bytes: float) -> str:
    """Write a size for a reader, rounded: ``1 KiB``, ``1.5 KiB``, ``16 MiB``, ``100 B``."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if 1 <= (amount := size_bytes / 2 ** (10 * power)) < math.inf:
            return f"{round(amount, 1 if amount < 10 else None):g} {unit}"
    return f"{size_bytes:.4g} B"
