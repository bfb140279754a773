"""``files.json``: size and SHA-256 of what a run measured, written when it ended, so that later damage is seen.

A cut ``events-rank0.jsonl`` is still a list of whole lines, and cut predictions may still be JSON: only what was written
down before tells. Notebook, verdict and report are left out, since they are made again from the rest.
"""

import fnmatch
import hashlib
import os
import stat
from pathlib import Path
from typing import Any

from benchlib.errors import UserError
from benchlib.files import read_bytes, read_object, sha256, write_json

NAME = "files.json"
_MAGIC = b"PAR1"  # begins and ends a Parquet file
GROWING = "events-*.jsonl"  # a last event may follow the manifest: what was there before must still be there
KEPT = ("config.json", "machine.json", "job.json", "status.json", "result.json", "samples.parquet", "predictions.json")


def write(run_dir: Path) -> None:
    """Write down what a run folder holds now."""
    names = sorted(path.name for path in run_dir.iterdir() if path.is_file() and _kept(path.name))
    files = {name: {"bytes": (run_dir / name).stat().st_size, "sha256": sha256(run_dir / name)} for name in names}
    write_json(run_dir / NAME, {"schema_version": 1, "files": files})


def _kept(name: str) -> bool:
    return name in KEPT or fnmatch.fnmatch(name, GROWING)


def faults(run_dir: Path) -> list[str] | None:
    """Return what is wrong with the files of a run, a sentence each; None where nothing was written down.

    Raises ``UserError`` where ``files.json`` itself is damaged.
    """
    path = run_dir / NAME
    if not path.exists():
        return None
    files = read_object(path, {"files": dict})["files"]
    return [fault for name, wanted in files.items() if (fault := _fault(run_dir, name, wanted, path))]


def _fault(run_dir: Path, name: str, wanted: Any, manifest: Path) -> str:
    if not _kept(name) or not isinstance(wanted, dict) or type(wanted.get("bytes")) is not int:
        raise UserError(f"{manifest}: not a list of a run's files: {name[:40]!r}")
    if not (run_dir / name).exists():
        return f"{name} is missing"
    try:
        data = read_bytes(run_dir / name)
    except UserError as error:
        return str(error).replace(f"{run_dir}/", "")
    size = wanted["bytes"]
    if len(data) < size:
        return f"{name} was cut: {len(data):,} of {size:,} bytes are left"
    if fnmatch.fnmatch(name, GROWING):
        data = data[:size]
    if len(data) > size or hashlib.sha256(data).hexdigest() != wanted.get("sha256"):
        return f"{name} was altered after the run"
    return ""


def size_fault(folder: str, manifest: dict[str, Any]) -> str:
    """Return the first file that is missing or has another size than was written down; '' where sizes agree.

    For lists of thousands of runs: it opens none of the files, and leaves the growing ones to :func:`faults`.
    """
    for name, wanted in manifest["files"].items():
        if name not in KEPT:
            continue
        try:
            size = os.stat(f"{folder}/{name}").st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if size != wanted["bytes"]:
            return f"{name} has {size:,} bytes, {wanted['bytes']:,} when the run ended"
    return ""


def samples_fault(path: str) -> str:
    """Return what is wrong with a Parquet file as far as its two ends tell; '' where they are in order."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait
        return "expected a file"
    with open(path, "rb") as handle:
        begin = handle.read(len(_MAGIC))
        size = handle.seek(0, os.SEEK_END)
        handle.seek(max(0, size - len(_MAGIC)))
        whole = size >= 3 * len(_MAGIC) and begin == _MAGIC == handle.read()
    return "" if whole else "not a Parquet file, or cut"
