"""A recording: what one member computed from the golden inputs, in a folder that is whole or absent.

recording.json          who, where, how, and all that is no tensor
outputs.safetensors     CASE/start, CASE/end (B, S), dev/start, dev/end (T,); float32, float64 of the fp64 reference
gradients.safetensors   parameter name -> gradient, where the member trains
layers.safetensors      000 -> hidden states behind the embeddings, 001 behind layer 0, and so on
"""

import contextlib
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from benchlib.core.errors import UserError
from benchlib.core.files import atomic_path, not_written, read_object, write_json
from benchlib.results.run import with_numbers
from benchlib.runtime import checkpoint

NAME = "recording.json"
OUTPUTS, GRADIENTS, LAYERS = "outputs.safetensors", "gradients.safetensors", "layers.safetensors"
_REQUIRED = {"member": str, "backend": str, "precision": str, "model_sha256": str, "inputs_sha256": str}
_TYPES = (np.float32, np.float64)
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Recording:
    """One member's recording. ``meta`` is ``recording.json``; tensors are read when they are asked for."""

    folder: Path
    meta: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> "Recording":
        """Read a recording; ``UserError`` for one that is missing, cut, or of a later benchlib."""
        return cls(folder, with_numbers(read_object(folder / NAME, _REQUIRED)))

    def tensors(self, file: str) -> dict[str, Callable[[], np.ndarray]]:
        """Return a function that reads each tensor of a file, by its name; nothing where there is no such file."""
        path = self.folder / file
        if not path.exists():
            return {}
        try:
            handle = safe_open(path, framework="numpy")
            return {name: lambda name=name: np.asarray(handle.get_tensor(name)) for name in sorted(handle.keys())}  # type: ignore[misc]
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: not a whole safetensors file ({error}); record it again") from None

    @cached_property
    def outputs(self) -> Arrays:
        """The logits: ``CASE/start`` and ``CASE/end`` (B, S), of the dev set (T,)."""
        return {name: read() for name, read in self.tensors(OUTPUTS).items()}


def write(
    folder: Path,
    meta: Mapping[str, Any],
    outputs: Arrays,
    gradients: Arrays | None = None,
    layers: Arrays | None = None,
) -> Recording:
    """Write a recording whose folder appears at once and whole; it must not be there before.

    ``meta`` needs member, backend, precision, model_sha256 and inputs_sha256. Other types than float32 and float64 are a
    ``ValueError``: rounding to them would be a difference of this file and not of the member.
    """
    if missing := [name for name in _REQUIRED if name not in meta]:
        raise ValueError(f"a recording needs {', '.join(missing)} in its meta")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: already exists; a recording is never overwritten")
    whole = {"schema_version": 1, "created_at": time.time(), **meta}
    temporary = folder.parent / f".{folder.name}.{os.getpid()}"
    try:
        with checkpoint.naming_storage_errors(folder):
            temporary.mkdir(parents=True)
            for file, arrays in ((OUTPUTS, outputs), (GRADIENTS, gradients or {}), (LAYERS, layers or {})):
                if arrays or file == OUTPUTS:
                    _save(temporary / file, arrays)
            write_json(temporary / NAME, _plain(whole))
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()  # an empty one: not every system renames onto it
            os.rename(temporary, folder)
    except OSError as error:
        raise not_written(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Recording(folder, whole)


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON, with words for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _save(path: Path, arrays: Arrays) -> None:
    whole = {name: np.asarray(arrays[name], order="C") for name in arrays}
    for name, array in whole.items():
        if array.dtype not in _TYPES:
            raise ValueError(f"{path.name}: {name} is {array.dtype}; a recording holds float32 and float64")
    with atomic_path(path) as file:
        save_file(whole, file)
