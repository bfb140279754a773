"""A model as an ONNX file, for the runtimes that read one. Letters: B rows, S tokens."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchlib.benchmarks.parity.executor import Inputs
from benchlib.benchmarks.parity.exporting import export, quiet, require_package

OUTPUTS = ["start", "end"]


@dataclass(frozen=True)
class OnnxFile:
    """A file whose inputs bear the names of the model's arguments and whose outputs are those of ``OUTPUTS``."""

    path: Path
    description: dict[str, Any]


def write(model: torch.nn.Module, example: Inputs, folder: Path) -> OnnxFile:
    """Write ``folder/model.onnx``, its weights beside it, for any B and S.

    Raises ``BackendUnavailable`` where the exporter's packages are lacking.
    """
    for name in ("onnx", "onnxscript"):
        require_package(name)
    path = folder / "model.onnx"
    begin = time.monotonic()
    program = export(model, example, torch.device("cpu"))
    with torch.no_grad(), quiet():
        converted = torch.onnx.export(
            program, dynamo=True, input_names=list(example), output_names=OUTPUTS, verbose=False
        )
        assert converted is not None  # only the old exporter returns nothing
        converted.save(str(path), external_data=True)
    return OnnxFile(
        path,
        {
            "export_s": time.monotonic() - begin,
            "opset": int(converted.model.opset_imports[""]),
            "file_bytes": sum(file.stat().st_size for file in folder.glob("model.onnx*")),
            "dynamic": "batch and length",
            "onnx": require_package("onnx").__version__,
            "onnxscript": require_package("onnxscript").__version__,
        },
    )
