"""The model through OpenVINO on a CPU, held to f32 or as it comes.

As it comes OpenVINO computes in bfloat16 on a CPU that has the instructions, without saying so: the member in native
mode leaves it its choice, and the description says what was chosen. Letters: B rows, S tokens.
"""

import collections
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchlib.benchmarks.parity import onnx_file
from benchlib.benchmarks.parity.config import Member
from benchlib.benchmarks.parity.executor import Inputs, Logits
from benchlib.benchmarks.parity.exporting import require_fp32, require_package
from benchlib.core.errors import BackendUnavailable

_NAMES = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}


class Request:
    """A compiled model with one request; see ``benchlib.benchmarks.parity.executor.Executor``. No gradients and no hooks."""

    module = None
    hooks = False

    def __init__(self, compiled: Any, description: dict[str, Any]) -> None:
        self._compiled, self.description = compiled, description
        self._takes = [argument.any_name for argument in compiled.inputs]

    def forward(self, inputs: Inputs) -> Logits:
        """Return (start, end), float32 (B, S) each."""
        found = self._compiled({name: inputs[name].numpy() for name in self._takes})
        start, end = (torch.from_numpy(found[name].copy()) for name in onnx_file.OUTPUTS)
        return start.float(), end.float()

    def timed(self, inputs: Inputs) -> Callable[[], None]:
        """Return a call that does one forward pass; the inputs are set before."""
        runtime = require_package("openvino")
        request = self._compiled.create_infer_request()
        for name in self._takes:
            request.set_tensor(name, runtime.Tensor(inputs[name].numpy()))

        def once() -> None:
            request.infer(share_outputs=True)  # waits; without sharing it would copy the outputs

        return once

    def close(self) -> None:
        """Drop the compiled model."""
        self._compiled = None


def make(model: Any, member: Member, where: torch.device, example: Inputs, folder: Path) -> Request:
    """Export ``model`` to ``folder`` and compile it; see ``benchlib.benchmarks.parity.executor.Make``.

    Raises ``BackendUnavailable`` where the packages are lacking, and for a device that is no CPU.
    """
    require_fp32(member)
    if where.type != "cpu":
        raise BackendUnavailable(f"OpenVINO is compared on CPUs, not on {where.type}: use backend cpu")
    require_package("openvino")
    return start(onnx_file.write(model.to("cpu"), example, folder), member)


def start(file: onnx_file.OnnxFile, member: Member) -> Request:
    """Compile a file for the CPU: held to f32 in exact mode, else in the precision that OpenVINO takes."""
    runtime = require_package("openvino")
    begin = time.monotonic()
    core = runtime.Core()
    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    if member.mode == "exact":
        settings["INFERENCE_PRECISION_HINT"] = "f32"
    compiled = core.compile_model(core.read_model(file.path), "CPU", settings)
    hint = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    description = file.description | {
        "runtime": f"OpenVINO {runtime.get_version()}",
        "precision": _NAMES.get(hint, hint),
        "precision_set": settings.get("INFERENCE_PRECISION_HINT", "no: OpenVINO's choice"),
        "operations": _operations(compiled),
        "cpu_offers": list(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")),
        "threads": int(compiled.get_property("INFERENCE_NUM_THREADS")),
        "load_s": time.monotonic() - begin,
    }
    return Request(compiled, description)


def _operations(compiled: Any) -> dict[str, int]:
    """Return how many operations of the compiled graph run in which precision, which the hint alone does not tell."""
    precisions = (
        str(node.get_rt_info()["runtimePrecision"].astype(str))
        for node in compiled.get_runtime_model().get_ordered_ops()
        if "runtimePrecision" in node.get_rt_info()
    )
    return dict(collections.Counter(precisions).most_common())
