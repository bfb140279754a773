"""Atomic writers, readers that trust nothing, and the folders of the kit.

A file is complete or absent: it is written to a temporary file beside its place, synced, then renamed. What is read may be
cut, foreign, not a file at all, or unreadable: each of these is one sentence for the user, with the path and what to do, a
``UserError`` from the readers, a ``StorageError`` from the writers.
"""

import codecs
import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from benchlib.core.errors import StorageError, UserError, explained

PACKAGE = Path(__file__).resolve().parents[1]
Model = TypeVar("Model", bound=BaseModel)
MAX_BYTES = 2**30  # of a file that is read as a whole
_FULL = (errno.ENOSPC, errno.EDQUOT)
# What stands in the way of writing whatever the file's name is; other errors of a writer may be about other files.
_STORAGE = (*_FULL, errno.EROFS, errno.EIO, errno.EFBIG)


def not_written(path: Path | str, error: OSError) -> StorageError:
    """Return the error that says why ``path`` could not be written, and what to do."""
    if isinstance(error, StorageError):
        return error
    reason = (os.strerror(error.errno) if error.errno else str(error)).lower()
    remedy = "free some space on this disk" if error.errno in _FULL else "make it writable"
    return StorageError(
        f"{path} cannot be written: {reason}; {remedy}, or choose another place (for runs: --out DIR)",
        error.errno,
        reason,
    )


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Raise an ``OSError`` of the block, which writes ``path``, as the ``StorageError`` that names it."""
    try:
        yield
    except OSError as error:
        raise not_written(path, error) from error


def storage_error(error: BaseException, path: Path | str = "a file") -> StorageError | None:
    """Return what an error says of a disk that is full, read-only, too small for the file or failing; None for another one.

    ``path`` is what was written where the error does not know it.
    """
    if isinstance(error, StorageError):
        return error
    if not isinstance(error, OSError) or error.errno not in _STORAGE:
        return None
    return not_written(error.filename or path, error)


def sync(path: Path) -> None:
    """Put the bytes of a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; when the block ends without an error it replaces ``path`` at once.

    For writers that take a path of their own (parquet, safetensors). On an error the temporary file is removed and
    an existing ``path`` stays as it was. A full or read-only disk is a ``StorageError``.
    """
    target = Path(path)
    temporary = target.parent / f".{target.name[:100]}.{secrets.token_hex(8)}.tmp"
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        # With the permissions of any new file: those of mkstemp are private, and results are meant to be shared.
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        mode = stat.S_IMODE(temporary.stat().st_mode)
    try:
        yield temporary
        with writing(target):
            temporary.chmod(mode)  # a writer may have put a private file in its place
            sync(temporary)
            os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and storage_error(error):
            raise not_written(target, error) from error
        raise
    # Without this a power cut may forget the rename although the file's bytes are on disk. Not every file system
    # lets a folder be opened or synced (Windows, some network mounts); the rename itself is still atomic there.
    with contextlib.suppress(OSError):
        sync(target.parent)


def write_bytes(path: Path | str, data: bytes) -> None:
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path | str, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, atomically; bytes that are not UTF-8 become question marks."""
    write_bytes(path, text.encode(errors="replace"))


def write_json(path: Path | str, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically. What is not JSON raises ``ValueError``: NaN, half characters."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_bytes(path: Path | str, most: int = MAX_BYTES, start: int = 0) -> bytes:
    """Read a regular file of at most ``most`` bytes; ``UserError`` for a folder, a pipe, a device, and what cannot be read."""
    try:
        status = Path(path).stat()
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):  # a pipe would wait for its writer
            raise UserError(f"{path}: expected a file, found a pipe or a device")
        if status.st_size > most:
            raise UserError(f"{path}: {status.st_size / 2**20:,.0f} MiB; the limit is {most / 2**20:,.0f} MiB")
        with open(path, "rb") as handle:
            handle.seek(start)
            return handle.read()
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def unmarked(data: bytes) -> bytes:
    """Return the bytes of a text as UTF-8 without a mark of the byte order, which editors and shells of Windows put before it; those
    of UTF-16 are recognised by theirs. Raises ``ValueError`` for bytes that the mark does not fit."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16").encode()
    return data.removeprefix(codecs.BOM_UTF8)


def read_text(path: Path | str, most: int = MAX_BYTES) -> str:
    """Read a text file in UTF-8, or in UTF-16 with its mark; ``UserError`` for what is none."""
    try:
        return unmarked(read_bytes(path, most)).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not text (byte {error.start} is not {error.encoding.upper()})") from None


def read_yaml(path: Path | str) -> Any:
    """Read a YAML file of plain values; ``UserError`` where it is none, or has a name twice."""
    import yaml  # here: most commands read none

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            names = [name.value for name, _ in node.value]
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise UserError(f"{path}, line {node.start_mark.line + 1}: {twice} stands twice: keep one")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(read_text(path), Loader)
    except UserError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())[:300]}") from None


def read_json(path: Path | str) -> Any:
    """Read a JSON file; a missing, cut or foreign file is a ``UserError`` that names it and the reason."""
    data = read_bytes(path)
    try:
        return from_json(unmarked(data), allow_inf_nan=False)
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); the file may be cut") from None


def read_object(path: Path | str, required: Mapping[str, type], known_schema: int = 1) -> dict[str, Any]:
    """Read a JSON object that has these keys with values of these types.

    Another shape, or a ``schema_version`` above ``known_schema``, is a ``UserError``.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object")
    check_schema(path, value, known_schema)
    for name, kind in required.items():
        if not isinstance(value.get(name), kind):
            raise UserError(f"{path}: not a file of benchlib, or cut: {name} is missing or no {kind.__name__}")
    return value


def read_model(path: Path | str, model: type[Model], what: str, known_schema: int = 1) -> Model:
    """Read a JSON file into a pydantic model; ``UserError`` where it is cut, foreign or of a later schema."""
    value = read_json(path)
    check_schema(path, value, known_schema)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise UserError(f"{path}: not {what} ({explained(error)})") from None


def check_schema(path: Path | str, value: Any, newest: int) -> None:
    """Raise ``UserError`` for an object whose ``schema_version`` a later benchlib wrote."""
    version = value.get("schema_version", 1) if isinstance(value, dict) else 1
    if isinstance(version, int) and version > newest:
        raise UserError(
            f"{path}: written by a later benchlib (schema {version}, this one reads up to {newest}): update benchlib"
        )


def sha256(path: Path | str) -> str:
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def home() -> Path:
    """Return the checkout that holds ``notebooks/`` and ``params/``; ``UserError`` where the package has none."""
    root = PACKAGE.parent
    if not (root / "params").is_dir() or not (root / "notebooks").is_dir():
        raise UserError(
            f"{root} holds no notebooks/ and params/: install benchlib from its checkout with `pip install -e .`"
        )
    return root


def outputs() -> Path:
    """Return the default folder of runs: ``$BENCHLIB_OUTPUTS``, else ``outputs/`` of the checkout."""
    chosen = os.environ.get("BENCHLIB_OUTPUTS")
    return Path(chosen).resolve() if chosen else home() / "outputs"
