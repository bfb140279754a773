"""Message sizes as a user writes them: ``1KiB:256MiB``, ``1KiB:256MiB:8``, ``1KiB,1MiB``, ``100``."""

import re

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
        raise ValueError(f"{text!r}: {match[2]} is no unit of a size; there are {KNOWN}")
    if not match:
        raise ValueError(f"{text!r} is no size: {FORMS}")
    size = float(match[1]) * UNITS[match[2].lower()]
    if size != int(size) or not 1 <= size <= LARGEST:
        raise ValueError(f"{text!r} is {size:g} bytes: a size is a whole number of bytes from 1 to 1 TiB")
    return int(size)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read a list of sizes or ranges of sizes, in bytes, rising and without repetition.

    A range holds its first size, each next one by the factor (2), and its last, whether or not the factor leads there.
    """
    found: set[int] = set()
    for part in str(text).split(","):
        found.update(_range(part) if ":" in part else [parse_size(part)])
    if len(found) > MOST_SIZES:
        raise ValueError(f"{text!r} are {len(found)} sizes, at most {MOST_SIZES} can be measured: use a larger factor")
    return tuple(sorted(found))


def _range(text: str) -> list[int]:
    ends = text.split(":")
    if len(ends) not in (2, 3):
        raise ValueError(f"{text!r} is no range of sizes: {FORMS}")
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


def size_text(size_bytes: float) -> str:
    """Write a size for a reader: ``1 KiB``, ``16 MiB``, ``100 B``."""
    for unit in ("tib", "gib", "mib", "kib"):
        if size_bytes >= UNITS[unit]:
            return f"{size_bytes / UNITS[unit]:.4g} {unit[0].upper()}iB"
    return f"{size_bytes:.4g} B"
