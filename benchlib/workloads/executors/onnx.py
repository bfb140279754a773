"""The model through runtimes that read an ONNX file: ONNX Runtime on a CPU or an NVIDIA GPU, OpenVINO on a CPU.

OpenVINO by default computes in bfloat16 on a CPU that has the instructions, without saying so: here it is held to f32.

Notation: B rows, S tokens.
"""

import time
from pathlib import Path
from typing import Any

import torch

from benchlib.core.errors import BackendUnavailable
from benchlib.workloads.executors import Member
from benchlib.workloads.executors.eager import Executor, Inputs, Logits, require_package
from benchlib.workloads.stablehlo.export import exported, quiet

OUTPUTS = ["start", "end"]
_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
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


class Graph(Executor):
    """What both runtimes share: a loaded graph, whose inputs have ``names``."""

    def __init__(self, loaded: Any, names: list[str], where: torch.device, description: dict[str, Any]) -> None:
        super().__init__(where, description)
        self._loaded, self._names = loaded, names

    def close(self) -> None:
        self._loaded = None


class Session(Graph):
    """A session of ONNX Runtime on one provider."""

    def forward(self, inputs: Inputs) -> Logits:
        start, end = self._loaded.run(OUTPUTS, {name: inputs[name].numpy() for name in self._names})
        return torch.from_numpy(start), torch.from_numpy(end)

    def place(self, inputs: Inputs) -> Any:
        """Bind inputs and outputs that are on the device."""
        runtime = require_package("onnxruntime")
        place = (self.where.type, self.where.index or 0)
        binding = self._loaded.io_binding()
        for name in self._names:
            binding.bind_ortvalue_input(name, runtime.OrtValue.ortvalue_from_numpy(inputs[name].numpy(), *place))
        for name in OUTPUTS:
            binding.bind_output(name, *place)
        return binding

    def run(self, placed: Any) -> None:
        self._loaded.run_with_iobinding(placed)
        placed.synchronize_outputs()


def onnxruntime(model: Any, member: Member, where: torch.device, example: Inputs, folder: Path) -> Session:
    """Export to ``folder`` and open a session on ``where``, on a GPU without TF32; see ``eager.Make``.

    Raises ``BackendUnavailable`` where the packages or the provider of ``where`` are lacking, and where that does not start:
    ONNX Runtime by itself falls back to the CPU without an error.
    """
    runtime = require_package("onnxruntime")
    provider, has = _PROVIDERS.get(where.type, f"provider for {where.type}"), runtime.get_available_providers()
    if provider not in has:
        gpu = "pip uninstall onnxruntime, then pip install onnxruntime-gpu"
        remedy = gpu if where.type == "cuda" else "use cpu or cuda"
        raise BackendUnavailable(
            f"onnxruntime {runtime.__version__} has no {provider} (it has {', '.join(has)}): {remedy}"
        )
    path = folder / "model.onnx"
    description = write_onnx(model, example, path)
    begin = time.monotonic()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = _ERRORS_ONLY
    settings = {"device_id": where.index or 0, "use_tf32": 0} if where.type == "cuda" else {}
    session = runtime.InferenceSession(str(path), options, providers=[(provider, settings)])
    active = session.get_providers()
    if active[0] != provider:
        raise BackendUnavailable(
            f"onnxruntime {runtime.__version__} has {provider} but it did not start (active: {', '.join(active)}): "
            "install the CUDA and cuDNN libraries of its version, for instance with "
            "pip install 'onnxruntime-gpu[cuda,cudnn]'"
        )
    description |= {
        "runtime": f"ONNX Runtime {runtime.__version__}, {provider}",
        "precision": "fp32",
        "threads": torch.get_num_threads(),
        "load_s": time.monotonic() - begin,
    }
    return Session(session, [argument.name for argument in session.get_inputs()], where, description)


class Request(Graph):
    """A compiled model of OpenVINO with one request."""

    def forward(self, inputs: Inputs) -> Logits:
        outputs = self._loaded({name: inputs[name].numpy() for name in self._names})
        start, end = (torch.from_numpy(outputs[name].copy()) for name in OUTPUTS)
        return start.float(), end.float()

    def place(self, inputs: Inputs) -> Any:
        runtime = require_package("openvino")
        request = self._loaded.create_infer_request()
        for name in self._names:
            request.set_tensor(name, runtime.Tensor(inputs[name].numpy()))
        return request

    def run(self, placed: Any) -> None:
        placed.infer(share_outputs=True)  # waits; without sharing it would copy the outputs


def openvino(model: Any, member: Member, where: torch.device, example: Inputs, folder: Path) -> Request:
    """Export to ``folder`` and compile it for the CPU, held to f32; see ``eager.Make``.

    Raises ``BackendUnavailable`` where the packages are lacking, and for a device that is no CPU.
    """
    if where.type != "cpu":
        raise BackendUnavailable(f"OpenVINO is compared on CPUs, not on {where.type}: use backend cpu")
    runtime, path = require_package("openvino"), folder / "model.onnx"
    description = write_onnx(model, example, path)
    begin = time.monotonic()
    core = runtime.Core()
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(core.read_model(path), "CPU", settings)
    hint = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    description |= {
        "runtime": f"OpenVINO {runtime.get_version()}",
        "precision": {"f32": "fp32"}.get(hint, hint),
        "threads": int(compiled.get_property("INFERENCE_NUM_THREADS")),
        "load_s": time.monotonic() - begin,
    }
    return Request(compiled, [argument.any_name for argument in compiled.inputs], where, description)
