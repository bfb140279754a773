"""A recording: what one member computed from the golden inputs, in a folder of its own.

recording.json          who, where, how, and all that is no tensor
outputs.safetensors     CASE/start, CASE/end (B, S), dev/start, dev/end (T,); float32, float64 of the fp64 reference
gradients.safetensors   parameter name -> gradient, where the member trains
layers.safetensors      000 -> hidden states behind the embeddings, 001 behind layer 0, and so on
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_json
from safetensors.numpy import load_file, save_file

from benchlib.core.files import read_object
from benchlib.results.run import with_numbers
from benchlib.runtime import checkpoint

NAME = "recording.json"
OUTPUTS, GRADIENTS, LAYERS = "outputs.safetensors", "gradients.safetensors", "layers.safetensors"
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Recording:
    """One member's recording. ``meta`` is ``recording.json``; tensors are read when they are asked for."""

    folder: Path
    meta: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> "Recording":
        """Read a recording; ``UserError`` for one that is missing, cut, or of a later benchlib."""
        return cls(folder, with_numbers(read_object(folder / NAME, {})))

    def _arrays(self, file: str) -> Arrays:
        """Return the arrays of a file by name, sorted; none where there is no such file."""
        path = self.folder / file
        return dict(sorted(load_file(path).items())) if path.exists() else {}

    outputs = cached_property(lambda self: self._arrays(OUTPUTS))  # CASE/start and CASE/end (B, S), of the dev set (T,)
    gradients = cached_property(lambda self: self._arrays(GRADIENTS))
    layers = cached_property(lambda self: self._arrays(LAYERS))


def write(folder: Path, meta: Mapping[str, Any], outputs: Arrays, gradients: Arrays, layers: Arrays) -> Recording:
    """Write a recording into a new folder; ``meta`` needs member, backend, precision, model_sha256 and inputs_sha256."""
    whole = {"schema_version": 1, **meta}
    with checkpoint.naming_storage_errors(folder):
        folder.mkdir(parents=True)
        for file, arrays in ((OUTPUTS, outputs), (GRADIENTS, gradients), (LAYERS, layers)):
            if arrays:
                save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / file)
        (folder / NAME).write_bytes(to_json(whole, indent=2, inf_nan_mode="strings"))
    return Recording(folder, whole)
