"""Files that are whole or absent: written to a temporary neighbour, synced, then renamed."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchlib.errors import UserError


def _sync_folder(folder: Path) -> None:
    # Without this a power cut may forget the rename although the file's bytes are on disk. Not every file system
    # lets a folder be opened or synced (Windows, some network mounts); the rename itself is still atomic there.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; when the block ends without an error it replaces ``path`` at once.

    For writers that take a path of their own (parquet, safetensors). On an error the temporary file is removed and
    an existing ``path`` stays as it was.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        # mkstemp makes private files; results are meant to be shared, as far as the umask allows.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write ``data`` to ``path`` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path | str, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, atomically."""
    write_bytes(path, text.encode())


def write_json(path: Path | str, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically. NaN and infinity raise ``ValueError``: they are not JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path | str) -> Any:
    """Read a JSON file; a missing, cut or foreign file is a ``UserError`` that names it and the reason."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON ({error.msg} at line {error.lineno}); the file may be cut") from None


def sha256(path: Path | str) -> str:
    """Return the SHA-256 of a file's content as 64 hex digits."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
