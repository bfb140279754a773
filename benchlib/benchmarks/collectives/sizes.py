"""Sizes as a user writes them: ``1KiB:256MiB`` (each twice the one before), ``1KiB:256MiB:8``, ``1KiB,1MiB``, ``100``."""

import re

UNITS = {
    "": 1, "b": 1,
    "k": 2**10, "m": 2**20, "g": 2**30,  # as nccl-tests reads them
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
MAX_SIZES = 64
MAX_BYTES = 2**40
FORMS = "write sizes as 1KiB:256MiB (each twice the one before), 1KiB:256MiB:8 (eight times), 1KiB,1MiB or plain bytes"
KNOWN = "B, KiB, MiB, GiB, TiB (of 1024), KB, MB, GB, TB (of 1000) and K, M, G (of 1024, as in nccl-tests)"


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read a list of sizes or ranges of sizes, in bytes, rising and without repetition; ``ValueError`` says what is wrong.

    A range holds its first size, each next one by the factor (2), and its last, whether or not the factor leads there.
    """
    sizes = {size for part in str(text).split(",") for size in _range(part)}
    if len(sizes) > MAX_SIZES:
        raise ValueError(f"{text!r} are {len(sizes)} sizes, at most {MAX_SIZES} can be measured: use a larger factor")
    return tuple(sorted(sizes))


def _range(text: str) -> list[int]:
    first, *rest = text.split(":")
    if not rest:
        return [_size(first)]
    if len(rest) > 2:
        raise ValueError(f"{text!r} is not a range of sizes: {FORMS}")
    sizes, last = [_size(first)], _size(rest[0])
    factor = rest[1].strip() if rest[1:] else "2"
    if not re.fullmatch(r"\d+(\.\d+)?", factor) or float(factor) <= 1:
        raise ValueError(f"{text!r}: the factor must be a number above 1, as in {first}:{rest[0]}:8")
    if sizes[0] > last:
        raise ValueError(f"{text!r}: the range ends below its beginning; write it as {rest[0]}:{first}")
    size = float(sizes[0])
    while (size := size * float(factor)) < last and len(sizes) <= MAX_SIZES:
        sizes.append(int(size))
    return [*sizes, last]


def _size(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match:
        raise ValueError(f"{text!r} is not a size: {FORMS}")
    if match[2].lower() not in UNITS:
        raise ValueError(f"{text!r}: {match[2]} is not a unit of size; known: {KNOWN}")
    size = float(match[1]) * UNITS[match[2].lower()]
    if size != int(size) or not 1 <= size <= MAX_BYTES:
        raise ValueError(f"{text!r} is {size:g} bytes: a size is a whole number of bytes from 1 to 1 TiB")
    return int(size)
