"""A run folder: who works in it, and what it held when the run ended.

One launch at a time works in a run folder, from before its first file until its supervisor has ended. It holds a lock of the
operating system on ``RUN_DIR/.lock``, which is free again when its process dies, however it dies, and which depends neither on
process ids nor on clocks.

``files.json`` has size and SHA-256 of what was measured, so that later damage is seen: a cut ``events-rank0.jsonl`` is still a
list of complete lines, and cut predictions may still be JSON. Who judges the run adds the verdict, so that none comes from
elsewhere. Notebook and report are not in it: they can be made again.
"""

import contextlib
import fcntl
import fnmatch
import hashlib
import os
import time
from pathlib import Path
from typing import Any

from benchlib.core.errors import UserError
from benchlib.core.files import read_bytes, read_object, sha256, write_json, writing

LOCK = ".lock"
TRY_S = 0.5  # ``is_running`` holds the lock for a moment as well
FILES = "files.json"
VERDICT = "verdict.json"
GROWING = "events-*.jsonl"  # an event may follow the list; what stood before it must not change
KEPT = (
    *("config.json", "machine.json", "job.json", "status.json", "result.json", VERDICT),
    *("samples.parquet", "predictions.json"),
)
SCHEMA = 2  # of files.json


def _lock(descriptor: int, shared: bool = False) -> bool:
    """Lock a file, or return False where another process has it; a file system without locks gives one to everybody."""
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def claim(run_dir: Path | str) -> int:
    """Claim a run folder and return the descriptor that holds it until it is closed, in all who inherited it.

    Raises ``UserError`` where another process works in the folder, ``StorageError`` where nothing can be written.
    """
    path, end = Path(run_dir) / LOCK, time.monotonic() + TRY_S
    with writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    while not _lock(descriptor):
        if time.monotonic() > end:
            os.close(descriptor)
            raise UserError(
                f"{run_dir} is in use: another process works on this run; wait for its end, or start another"
            )
        time.sleep(0.02)
    return descriptor


def is_running(run_dir: Path | str) -> bool:
    """Whether the ranks of a run folder are at work, or their supervisor still writes how they ended."""
    with contextlib.suppress(OSError), open(Path(run_dir) / LOCK, "rb") as handle:  # never claimed: no such file
        return not _lock(handle.fileno(), shared=True)
    return False


def record_files(run_dir: Path) -> None:
    names = sorted(path.name for path in run_dir.iterdir() if path.is_file() and _kept(path.name))
    write_json(run_dir / FILES, {"schema_version": SCHEMA, "files": {name: _entry(run_dir / name) for name in names}})


def record_verdict(run_dir: Path) -> None:
    """Add the verdict that was just written to ``files.json``, where the run has one."""
    with contextlib.suppress(UserError):  # a missing or damaged list stays one
        listed = read_object(run_dir / FILES, {"files": dict}, SCHEMA)
        listed["files"][VERDICT] = _entry(run_dir / VERDICT)
        write_json(run_dir / FILES, listed)


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def _kept(name: str) -> bool:
    return name in KEPT or fnmatch.fnmatch(name, GROWING)


def file_faults(run_dir: Path, verdict: bool = True) -> list[str] | None:
    """Return what is wrong with the files of a run, one sentence each; None where there is no ``files.json``.

    ``verdict`` includes that of the run, which whoever judges it again replaces.
    Raises ``UserError`` where ``files.json`` itself is damaged.
    """
    if not os.path.lexists(run_dir / FILES):
        return None
    if not (files := read_object(run_dir / FILES, {"files": dict}, SCHEMA)["files"]):
        return [f"{FILES} lists no file"]
    faults = {name: _fault(run_dir, name, entry) for name, entry in files.items()}
    # What the list leaves out could be anything.
    left_out = (name for name in KEPT if name not in files and (run_dir / name).exists())
    faults |= {name: f"{name} is not in {FILES}" for name in left_out}
    return [fault for name, fault in faults.items() if fault and (verdict or name != VERDICT)]


def _fault(run_dir: Path, name: str, entry: Any) -> str:
    if not _kept(name) or not isinstance(entry, dict) or type(entry.get("bytes")) is not int:
        raise UserError(f"{run_dir / FILES}: not a list of a run's files: {name[:40]!r}")
    if not (run_dir / name).exists():
        return f"{name} is missing"
    try:
        data = read_bytes(run_dir / name)
    except UserError as error:
        return str(error).replace(f"{run_dir}/", "")
    size = entry["bytes"]
    if len(data) < size:
        return f"{name} was cut or altered: {len(data):,} bytes of {size:,}"
    if fnmatch.fnmatch(name, GROWING):
        data = data[:size]
    if len(data) > size or hashlib.sha256(data).hexdigest() != entry.get("sha256"):
        return f"{name} was altered after the run"
    return ""
