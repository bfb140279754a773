"""Formulas that the field fixed: floating point operations, bandwidths of collectives, sizes of messages.

FLOPs: L layers, h hidden, f intermediate, S tokens of a sequence, B sequences; a multiply-add counts as two. Source: PaLM
appendix B and the arithmetic of a transformer's matrix products.

Bandwidths, as nccl-tests defines them: S is the bytes of the larger side of an operation over n ranks that takes t seconds;
algbw = S / t, and busbw = algbw times a factor that makes it comparable with the speed of a link, whatever n is. Gbps are 1e9
bits per second.

Sizes, as a user writes them: ``1KiB:256MiB``, ``1KiB:256MiB:8``, ``1KiB,1MiB``, ``100``.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence


def encoder_forward_flops(layers: int, hidden: int, intermediate: int, length: int) -> float:
    """Return the FLOPs of one sequence of S tokens through an encoder: ``L [2S(4h² + 2hf) + 4S²h]``.

    Embeddings are look-ups and the QA head (2 outputs) is negligible; both are left out.
    """
    products = 2 * length * (4 * hidden**2 + 2 * hidden * intermediate)
    attention = 4 * length**2 * hidden
    return float(layers * (products + attention))


def encoder_train_flops(layers: int, hidden: int, intermediate: int, shapes: Iterable[tuple[int, int]]) -> float:
    """Return the FLOPs of training (three times the forward pass) on batches of ``shapes`` (B, S) as processed.

    Padding is counted: it is work that the device does.
    """
    return 3 * sum(batch * encoder_forward_flops(layers, hidden, intermediate, length) for batch, length in shapes)


def encoder_decoder_forward_flops(
    d_model: int, encoder_layers: int, decoder_layers: int, feedforward: int, vocabulary: int, source: int, target: int
) -> float:
    """Return the FLOPs of one pair of S source and T target tokens through an encoder and decoder with an output layer.

    ``L_e [2S(4h² + 2hf) + 4S²h] + L_d [2T(4h² + 2hf) + 4T²h + 2(2Th² + 2Sh²) + 4TSh] + 2ThV``: the decoder's second term
    attends to itself, the third and fourth to the encoder. A causal mask is not deducted, embeddings are look-ups.
    """
    h, s, t = d_model, source, target
    cross = 2 * (2 * t * h**2 + 2 * s * h**2) + 4 * t * s * h
    decoder = encoder_forward_flops(1, h, feedforward, t) + cross
    return (
        encoder_forward_flops(encoder_layers, h, feedforward, s) + decoder_layers * decoder + 2.0 * t * h * vocabulary
    )


def encoder_decoder_parameters(
    d_model: int, encoder_layers: int, decoder_layers: int, feedforward: int, vocabulary: int, sequence: int
) -> int:
    """Return the parameters of torch's ``nn.Transformer`` with the embeddings and the output layer around it.

    An attention has 4h² + 4h, a feed-forward part 2hf + f + h, a norm 2h: an encoder's layer has one, one and two of them, a
    decoder's two, one and three; each stack ends with a norm. Around it one embedding of V tokens for both sides, one of S
    positions, and an output layer hV + V of its own.
    """
    h, f = d_model, feedforward
    attention, dense, norm = 4 * h * h + 4 * h, 2 * h * f + f + h, 2 * h
    encoder = encoder_layers * (attention + dense + 2 * norm) + norm
    decoder = decoder_layers * (2 * attention + dense + 3 * norm) + norm
    return encoder + decoder + vocabulary * h + sequence * h + h * vocabulary + vocabulary


def token_flops(parameters: float, *, training: bool) -> float:
    """Return the least FLOPs of one token through ``parameters`` of matrix products: 2N forward, 6N with the backward pass.

    Attention adds to it with the length; for the question whether a rate is possible at all, less is on the safe side.
    """
    return (6 if training else 2) * parameters


# A share of a limit that was measured in turns with the operation exceeds 1 by noise, but not by more than this. Above it the
# limit was not one: the library drives the network faster than one stream of a socket.
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


def algbw_samples(size_bytes: float, times_us: Sequence[float]) -> list[float]:
    """Return the algorithm bandwidth in Gbps of each time in microseconds."""
    return [algbw_gbps(size_bytes, 1e-6 * time) for time in times_us]


def busbw_samples(operation: str, size_bytes: float, times_us: Sequence[float], ranks: int) -> list[float] | None:
    """Return the bus bandwidth in Gbps of each time in microseconds; None where one rank, or a barrier, has none."""
    if operation not in BUS_FACTORS or ranks < 2:
        return None
    return [busbw_gbps(operation, size_bytes, 1e-6 * time, ranks) for time in times_us]


UNITS = {
    "": 1, "b": 1,
    "k": 2**10, "m": 2**20, "g": 2**30,  # as nccl-tests reads them
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
MOST_SIZES = 64
LARGEST = 2**40
FORMS = "write sizes as 1KiB:256MiB (each twice the one before), 1KiB:256MiB:8 (eight times), 1KiB,1MiB or plain bytes"
KNOWN = "B, KiB, MiB, GiB, TiB (of 1024), KB, MB, GB, TB (of 1000) and K, M, G (of 1024, as in nccl-tests)"
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Read one size in bytes; ``ValueError`` says what is wrong and which forms there are."""
    match = _SIZE.fullmatch(text)
    if match and match[2].lower() not in UNITS:
        raise ValueError(f"{text!r}: {match[2]} is not a unit of size; known: {KNOWN}")
    if not match:
        raise ValueError(f"{text!r} is not a size: {FORMS}")
    size = float(match[1]) * UNITS[match[2].lower()]
    if size != int(size) or not 1 <= size <= LARGEST:
        raise ValueError(f"{text!r} is {size:g} bytes: a size is a whole number of bytes from 1 to 1 TiB")
    return int(size)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read a list of sizes or ranges of sizes, in bytes, rising and without repetition.

    A range holds its first size, each next one by the factor (2), and its last, whether or not the factor leads there.
    """
    sizes: set[int] = set()
    for part in str(text).split(","):
        sizes.update(_range(part) if ":" in part else [parse_size(part)])
    if len(sizes) > MOST_SIZES:
        raise ValueError(f"{text!r} are {len(sizes)} sizes, at most {MOST_SIZES} can be measured: use a larger factor")
    return tuple(sorted(sizes))


def _range(text: str) -> list[int]:
    ends = text.split(":")
    if len(ends) not in (2, 3):
        raise ValueError(f"{text!r} is not a range of sizes: {FORMS}")
    first, last = parse_size(ends[0]), parse_size(ends[1])
    factor = float(ends[2]) if len(ends) == 3 and re.fullmatch(r"\s*\d+(\.\d+)?\s*", ends[2]) else 2.0
    if len(ends) == 3 and (factor <= 1 or not re.fullmatch(r"\s*\d+(\.\d+)?\s*", ends[2])):
        raise ValueError(f"{text!r}: the factor must be a number above 1, as in {ends[0]}:{ends[1]}:8")
    if first > last:
        raise ValueError(f"{text!r}: the range ends below its beginning; write it as {ends[1]}:{ends[0]}")
    sizes: list[int] = []
    size = float(first)
    while size < last and len(sizes) <= MOST_SIZES:
        sizes.append(int(size))
        size *= factor
    return [*sizes, last]


def hidden_share(alone: float, compute: float, together: float) -> tuple[float | None, str]:
    """Return the part of the shorter of two times that costs nothing when both run together, in any unit of time.

    1 where the shorter one is hidden, 0 where they run one after the other. Outside 0 to 1 there is no share: None with
    ``slower`` (together they take longer than one after the other) or ``disturbed`` (less than the longer one alone).
    """
    share = (alone + compute - together) / min(alone, compute)
    return (None, "slower") if share < 0 else (None, "disturbed") if share > 1 else (share, "")


def share_text(share: float) -> str:
    """Write a share of a limit: ``59%``, ``0.9%``."""
    return f"{100 * share:.0f}%" if abs(share) >= 0.01 else f"{100 * share:.1g}%"


def size_text(size_bytes: float) -> str:
    """Write a size for a reader, rounded: ``1 KiB``, ``1.5 KiB``, ``16 MiB``, ``100 B``."""
    for unit in ("tib", "gib", "mib", "kib"):
        if UNITS[unit] <= size_bytes < math.inf:
            amount = size_bytes / UNITS[unit]
            return f"{round(amount, 1 if amount < 10 else None):g} {unit[0].upper()}iB"
    return f"{size_bytes:.4g} B"
