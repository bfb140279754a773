"""A recording: what one member computed from the golden inputs, in a folder that is whole or absent.

    recording.json          who, where, how, and all that is no tensor
    outputs.safetensors     CASE/start, CASE/end (B, S), dev/start, dev/end (T,); float32, float64 of the truth
    gradients.safetensors   parameter name -> gradient, where the member trains
    layers.safetensors      000|bert.embeddings -> activation in the order of the forward pass, where hooks run

Numbers that are not finite are null in the JSON and counted under ``nonfinite``, by place; tensors keep them.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from benchlib.core.errors import UserError
from benchlib.core.files import atomic_path, not_written, read_object, write_json
from benchlib.runtime import checkpoint

NAME = "recording.json"
OUTPUTS, GRADIENTS, LAYERS = "outputs.safetensors", "gradients.safetensors", "layers.safetensors"
_REQUIRED = {"member": str, "backend": str, "precision": str, "model_sha256": str, "inputs_sha256": str}
_TYPES = (np.float32, np.float64)


class Arrays(Mapping[str, np.ndarray]):
    """The tensors of a safetensors file by name, each read when it is asked for. Empty where there is no file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _open(self) -> Any:
        if not self.path.exists():
            return None
        try:
            return safe_open(self.path, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise self._damaged(error) from None

    @cached_property
    def _names(self) -> list[str]:
        return sorted(self._open.keys()) if self._open is not None else []

    def _damaged(self, error: Exception) -> UserError:
        return UserError(f"{self.path}: not a whole safetensors file ({error}); record it again")

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        try:
            return np.asarray(self._open.get_tensor(name))
        except SafetensorError as error:
            raise self._damaged(error) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Recording:
    """One member's recording. ``meta`` is ``recording.json``; the tensors are mapped when they are asked for."""

    folder: Path
    meta: dict[str, Any]

    @classmethod
    def open(cls, folder: Path | str) -> "Recording":
        """Read a recording; ``UserError`` for one that is missing, cut, or of a later benchlib."""
        return cls(Path(folder), read_object(Path(folder) / NAME, _REQUIRED))

    def outputs(self) -> Mapping[str, np.ndarray]:
        """Return the logits: ``CASE/start`` and ``CASE/end`` (B, S), of the dev set (T,)."""
        return Arrays(self.folder / OUTPUTS)

    def gradients(self) -> Mapping[str, np.ndarray]:
        """Return the gradient of each parameter, in the parameter's shape; empty where the member does not train."""
        return Arrays(self.folder / GRADIENTS)

    def layers(self) -> Mapping[str, np.ndarray]:
        """Return the output of each hooked module, ``000|bert.embeddings`` first; empty where no hooks ran."""
        return Arrays(self.folder / LAYERS)


def write(
    folder: Path | str,
    meta: Mapping[str, Any],
    outputs: Mapping[str, np.ndarray],
    gradients: Mapping[str, np.ndarray] | None = None,
    layers: Mapping[str, np.ndarray] | None = None,
) -> Recording:
    """Write a recording whose folder appears at once and whole; it must not be there before.

    ``meta`` needs member, backend, precision, model_sha256 and inputs_sha256. Numbers in it that are not finite become
    null; they and those of the tensors are counted in ``nonfinite``. Other types than float32 and float64 are a
    ``ValueError``: rounding to them would be a difference of this file and not of the member.
    """
    target = Path(folder)
    missing = [name for name in _REQUIRED if name not in meta]
    if missing:
        raise ValueError(f"a recording needs {', '.join(missing)} in its meta")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: already exists; a recording is never overwritten")
    nonfinite: dict[str, int] = dict(meta.get("nonfinite", {}))
    plain = _plain({name: value for name, value in meta.items() if name != "nonfinite"}, "", nonfinite)
    nonfinite.pop("layers", None)  # norms of digests, whose tensors are counted themselves
    parts = {OUTPUTS: outputs, GRADIENTS: gradients or {}, LAYERS: layers or {}}
    for file, arrays in parts.items():
        nonfinite |= count_nonfinite(arrays, file.partition(".")[0])
    whole = {"schema_version": 1, "created_at": time.time(), **plain, "nonfinite": nonfinite}
    temporary = target.parent / f".{target.name}.{os.getpid()}"
    try:
        with checkpoint.naming_storage_errors(target):
            temporary.mkdir(parents=True)
            for file, arrays in parts.items():
                if arrays or file == OUTPUTS:
                    _save(temporary / file, arrays)
            write_json(temporary / NAME, whole)
            with contextlib.suppress(FileNotFoundError):
                target.rmdir()  # an empty one: not every system renames onto it
            os.rename(temporary, target)
    except OSError as error:
        raise not_written(target, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Recording(target, whole)


def layer_digests(layers: Mapping[str, np.ndarray], kinds: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return ``[{index, name, kind, sha256, norm, absmax}]`` of activations named ``000|bert.embeddings``.

    ``kinds`` gives the class of each module by its name without the index. The digest is of type, shape and bytes: two
    recordings with equal digests have equal activations, also where the tensors themselves were not kept.
    """
    rows = []
    for key in sorted(layers):
        number, _, name = key.partition("|")
        array = np.asarray(layers[key], order="C")
        wide = array.astype(np.float64)
        digest = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
        digest.update(array.tobytes())
        rows.append(
            {
                "index": int(number),
                "name": name,
                "kind": kinds.get(name, ""),
                "sha256": digest.hexdigest(),
                "norm": float(np.linalg.norm(wide)),
                "absmax": float(np.max(np.abs(wide), initial=0.0)),
            }
        )
    return rows


def count_nonfinite(arrays: Mapping[str, np.ndarray], where: str) -> dict[str, int]:
    """Return how many numbers of each tensor are NaN or infinite, ``outputs len8-batch1/start``: 2, only where there are."""
    counts = {f"{where} {name}": int((~np.isfinite(array)).sum()) for name, array in arrays.items()}
    return {name: count for name, count in counts.items() if count}


def _plain(value: Any, path: str, nonfinite: dict[str, int]) -> Any:
    """Return ``value`` as JSON, with null for numbers that are not finite, counted by the name of their field."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item, path or str(name), nonfinite) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, path, nonfinite) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite[path] = nonfinite.get(path, 0) + 1
        return None
    json.dumps(value)  # a TypeError here names the type; later it would leave half a folder to clean up
    return value


def _save(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    whole = {name: np.asarray(arrays[name], order="C") for name in arrays}
    for name, array in whole.items():
        if array.dtype not in _TYPES:
            raise ValueError(f"{path.name}: {name} is {array.dtype}; a recording holds float32 and float64")
    with atomic_path(path) as file:
        save_file(whole, file)
