"""The model through runtimes that read an ONNX file: ONNX Runtime on a CPU or an NVIDIA GPU, OpenVINO on a CPU.

OpenVINO by default computes in bfloat16 on a CPU that has the instructions, without saying so: here it is held to f32.

Notation: B rows, S tokens.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchlib.core.errors import BackendUnavailable
from benchlib.workloads.executors import Member
from benchlib.workloads.executors.eager import Executor, Inputs, require_package
from benchlib.workloads.stablehlo.export import exported, quiet

OUTPUTS = ["start", "end"]
_ERRORS_ONLY = 3


def write_onnx(model: torch.nn.Module, example: Inputs, path: Path) -> dict[str, Any]:
    """Write a file for any B and S, its weights beside it; return the begin of an executor's description.

    Inputs bear the names of the model's arguments, outputs those of ``OUTPUTS``. Raises ``BackendUnavailable`` where the
    exporter's packages are lacking.
    """
    for name in ("onnx", "onnxscript"):
        require_package(name)
    begin = time.monotonic()
    program = exported(model.to("cpu"), example, torch.device("cpu"))
    with torch.no_grad(), quiet():
        converted = torch.onnx.export(
            program, dynamo=True, input_names=list(example), output_names=OUTPUTS, verbose=False
        )
        assert converted is not None  # only the old exporter returns nothing
        converted.save(str(path), external_data=True)
    return {
        "export_s": time.monotonic() - begin,
        "opset": int(converted.model.opset_imports[""]),
        "dynamic": "batch and length",
        "onnx": require_package("onnx").__version__,
    }


class _FromFile(Executor):
    """What computes from an exported file; ``load`` opens it and says what runs."""

    package = ""

    def __init__(self, model: Any, member: Member, where: torch.device, example: Inputs, folder: Path) -> None:
        """See ``eager.Make``."""
        self._runtime, path = require_package(self.package), folder / "model.onnx"
        super().__init__(where, write_onnx(model, example, path))
        begin = time.monotonic()
        self.description |= self.load(path) | {"load_s": time.monotonic() - begin}

    def load(self, path: Path) -> dict[str, Any]:
        """Open the file; return runtime, precision and threads."""
        raise NotImplementedError


class OnnxRuntime(_FromFile):
    """A session of ONNX Runtime on one provider, on a GPU without TF32."""

    package = "onnxruntime"

    def load(self, path: Path) -> dict[str, Any]:
        """ONNX Runtime by itself falls back to the CPU with no more than a warning: here it is an error."""
        options = self._runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = _ERRORS_ONLY
        gpu = {"device_id": self.where.index or 0, "use_tf32": 0}
        provider = ("CPUExecutionProvider", {}) if self.where.type == "cpu" else ("CUDAExecutionProvider", gpu)
        with quiet():
            self._session = self._runtime.InferenceSession(str(path), options, providers=[provider])
        active = self._session.get_providers()[0]
        if active != provider[0]:
            raise BackendUnavailable(
                f"onnxruntime {self._runtime.__version__} computes by {active} and not by {provider[0]}: install "
                "onnxruntime-gpu in place of onnxruntime, with the CUDA and cuDNN libraries of its version: "
                "pip install 'onnxruntime-gpu[cuda,cudnn]'"
            )
        runtime = f"ONNX Runtime {self._runtime.__version__}, {active}"
        return {"runtime": runtime, "precision": "fp32", "threads": torch.get_num_threads()}

    def place(self, inputs: Inputs) -> Any:
        """Bind inputs and outputs that are on the device."""
        place, binding = (self.where.type, self.where.index or 0), self._session.io_binding()
        for argument in self._session.get_inputs():
            value = self._runtime.OrtValue.ortvalue_from_numpy(inputs[argument.name].numpy(), *place)
            binding.bind_ortvalue_input(argument.name, value)
        for name in OUTPUTS:
            binding.bind_output(name, *place)
        return binding

    def run(self, placed: Any) -> Sequence[Any]:
        self._session.run_with_iobinding(placed)
        return placed.copy_outputs_to_cpu()  # type: ignore[no-any-return]


class OpenVino(_FromFile):
    """A model compiled by OpenVINO for the CPU, held to f32."""

    package = "openvino"

    def load(self, path: Path) -> dict[str, Any]:
        core = self._runtime.Core()
        settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
        self._compiled = core.compile_model(core.read_model(path), "CPU", settings)
        hint = self._compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        threads = int(self._compiled.get_property("INFERENCE_NUM_THREADS"))
        runtime = f"OpenVINO {self._runtime.get_version()}"
        return {"runtime": runtime, "precision": {"f32": "fp32"}.get(hint, hint), "threads": threads}

    def place(self, inputs: Inputs) -> Any:
        request = self._compiled.create_infer_request()
        for argument in self._compiled.inputs:
            request.set_tensor(argument.any_name, self._runtime.Tensor(inputs[argument.any_name].numpy()))
        return request

    def run(self, placed: Any) -> Sequence[Any]:
        outputs = placed.infer(share_outputs=True)  # waits; without sharing it would copy the outputs
        return [outputs[name] for name in OUTPUTS]
