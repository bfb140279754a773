"""Named numpy arrays in one file that is mapped into memory when read, with a checksum that detects damage.

The file is a line of JSON (magic, place and type of each array, free metadata, SHA-256 of all of it and of the rest), then
the arrays, each at a multiple of 64 bytes. Unlike a zip of ``.npy`` files it maps without a copy, and it unpickles nothing.
"""

import hashlib
import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchlib.files import atomic_path

MAGIC = "benchlib arrays 2"
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
    described = {"arrays": table, "meta": dict(meta), "bytes": position}
    digest.update(json.dumps(described).encode())
    header = {"magic": MAGIC, **described, "sha256": digest.hexdigest()}
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
    if not stat.S_ISREG(source.stat().st_mode):  # to open a pipe would wait for its other end
        raise DamagedFile(f"{source}: no regular file")
    with source.open("rb") as handle:
        line = handle.readline(_HEADER_LIMIT)
    try:
        header = json.loads(line)
        known = header["magic"] == MAGIC
        described = {name: header[name] for name in ("arrays", "meta", "bytes")}
        expected = len(line) + int(header["bytes"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedFile(f"{source}: not an array file of this version") from None
    if not known:
        raise DamagedFile(f"{source}: not an array file of this version")
    if source.stat().st_size != expected:
        raise DamagedFile(f"{source}: cut or extended: {source.stat().st_size} bytes, {expected} were written")
    raw = np.asarray(np.memmap(source, dtype=np.uint8, mode="r"))[len(line) :]
    digest = hashlib.sha256(raw.data)
    digest.update(json.dumps(described).encode())
    if digest.hexdigest() != header.get("sha256"):
        raise DamagedFile(f"{source}: altered: its checksum does not match")
    arrays: Arrays = {}
    for entry in header["arrays"]:
        dtype = np.dtype(entry["dtype"])
        size = int(np.prod(entry["shape"], dtype=np.int64)) * dtype.itemsize
        arrays[entry["name"]] = raw[entry["at"] : entry["at"] + size].view(dtype).reshape(entry["shape"])
    return arrays, header["meta"]
