"""``files.json``: size and SHA-256 of what a run measured, written when it ended, so that later damage is seen.

A cut ``events-rank0.jsonl`` is still a list of whole lines, and cut predictions may still be JSON: only what was written
down before tells. Notebook, verdict and report are left out, since they are made again from the rest.
"""

import fnmatch
import hashlib
from pathlib import Path
from typing import Any

from benchlib.errors import UserError
from benchlib.files import read_bytes, read_object, sha256, write_json

NAME = "files.json"
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
