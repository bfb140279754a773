"""Sizes as a user writes them: ``1KiB:256MiB`` (each twice the one before), ``1KiB:256MiB:8``, ``1KiB,1MiB``, ``100``."""

import re
from typing import Annotated

from pydantic import ByteSize, Field, TypeAdapter, ValidationError

MAX_SIZES = 64
SIZE = TypeAdapter(Annotated[ByteSize, Field(ge=1, le=2**40)])
FORMS = "write sizes as 1KiB:256MiB (each twice the one before), 1KiB:256MiB:8 (eight times), 1KiB,1MiB or plain bytes"
UNITS = "B, KiB, MiB, GiB, TiB (of 1024), KB, MB, GB, TB (of 1000) and K, M, G (of 1024, as in nccl-tests)"


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
    try:
        return SIZE.validate_python(re.sub(r"(?i)([kmg])\s*$", r"\1iB", text))
    except ValidationError:
        raise ValueError(f"{text!r} is not a size from 1 B to 1 TiB: {FORMS}; units are {UNITS}") from None
