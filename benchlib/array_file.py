"""Named numpy arrays in one file that is mapped into memory when read, with a checksum that detects damage.

The file is a line of JSON (magic, place and type of each array, free metadata, SHA-256 of the rest), then the arrays,
each at a multiple of 64 bytes. Unlike a zip of ``.npy`` files it maps without a copy, and it unpickles nothing.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchlib.files import atomic_path

MAGIC = "benchlib arrays 1"
_ALIGN = 64
_HEADER_LIMIT = 1 << 20

Arrays = dict[str, np.ndarray]


class DamagedFile(ValueError):
    """The file is cut, altered or not of this format; the text says which."""


def write_arrays(path: Path | str, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> None:
    """Write ``arrays`` and the JSON values of ``meta`` atomically."""
    table, position = [], 0
    digest = hashlib.sha256()
    chunks: list[memoryview | bytes] = []
    for name, array in arrays.items():
        data = np.ascontiguousarray(array)
        table.append({"name": name, "dtype": data.dtype.str, "shape": list(np.shape(array)), "at": position})
        padding = bytes(-data.nbytes % _ALIGN)
        for chunk in (data.reshape(-1).view(np.uint8).data, padding):
            digest.update(chunk)
            chunks.append(chunk)
        position += data.nbytes + len(padding)
    header = {"magic": MAGIC, "arrays": table, "meta": dict(meta), "bytes": position, "sha256": digest.hexdigest()}
    line = json.dumps(header).encode()
    line += b" " * (-(len(line) + 1) % _ALIGN) + b"\n"
    with atomic_path(path) as temporary, temporary.open("wb") as handle:
        handle.write(line)
        for chunk in chunks:
            handle.write(chunk)


def read_arrays(path: Path | str) -> tuple[Arrays, dict[str, Any]]:
    """Map the arrays of ``path``, read-only, and return them with the metadata.

    Raises ``DamagedFile`` when the content is not what was written, ``FileNotFoundError`` when there is none.
    """
    source = Path(path)
    with source.open("rb") as handle:
        line = handle.readline(_HEADER_LIMIT)
    try:
        header = json.loads(line)
        known = header["magic"] == MAGIC
        expected = len(line) + int(header["bytes"])
    except (ValueError, KeyError, TypeError):
        known, expected = False, 0
    if not known:
        raise DamagedFile(f"{source}: not an array file of this version")
    if source.stat().st_size != expected:
        raise DamagedFile(f"{source}: cut or extended: {source.stat().st_size} bytes, {expected} were written")
    raw = np.asarray(np.memmap(source, dtype=np.uint8, mode="r"))[len(line) :]
    if hashlib.sha256(raw.data).hexdigest() != header["sha256"]:
        raise DamagedFile(f"{source}: altered: its checksum does not match")
    arrays: Arrays = {}
    for entry in header["arrays"]:
        dtype = np.dtype(entry["dtype"])
        size = int(np.prod(entry["shape"], dtype=np.int64)) * dtype.itemsize
        arrays[entry["name"]] = raw[entry["at"] : entry["at"] + size].view(dtype).reshape(entry["shape"])
    return arrays, header["meta"]
