"""The model through runtimes that read an ONNX file: ONNX Runtime on a CPU or an NVIDIA GPU, OpenVINO on a CPU.

OpenVINO by default computes in bfloat16 on a CPU that has the instructions, without saying so: the member in exact mode
is held to f32, the one in native mode leaves OpenVINO the choice, and its description says what was chosen.

Letters: B rows, S tokens.
"""

import collections
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchlib.benchmarks.parity.config import Member
from benchlib.benchmarks.parity.executors import Inputs, Logits, export, require_fp32, require_package
from benchlib.core.errors import BackendUnavailable
from benchlib.workloads.stablehlo.export import quiet

OUTPUTS = ["start", "end"]
_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_ERRORS_ONLY = 3
_NAMES = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}


@dataclass(frozen=True)
class OnnxFile:
    """A file whose inputs bear the names of the model's arguments and whose outputs are those of ``OUTPUTS``."""

    path: Path
    description: dict[str, Any]


def write_onnx(model: torch.nn.Module, example: Inputs, folder: Path) -> OnnxFile:
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


class Graph:
    """What both runtimes share; see ``benchlib.benchmarks.parity.executors.Executor``. No gradients and no hooks."""

    module = None
    hooks = False
    description: dict[str, Any]
    _made: Any

    def close(self) -> None:
        """Let go of the session or of the compiled model."""
        self._made = None


class Session(Graph):
    """A session of ONNX Runtime on one provider."""

    def __init__(self, session: Any, where: torch.device, description: dict[str, Any]) -> None:
        self._made, self._where, self.description = session, where, description
        self._takes = [argument.name for argument in session.get_inputs()]

    def forward(self, inputs: Inputs) -> Logits:
        """Return (start, end), float32 (B, S) each, on the CPU."""
        start, end = self._made.run(OUTPUTS, {name: inputs[name].numpy() for name in self._takes})
        return torch.from_numpy(start), torch.from_numpy(end)

    def timed(self, inputs: Inputs) -> Callable[[], None]:
        """Return a call that does one forward pass, on inputs and outputs that are on the device, and waits for it."""
        runtime = require_package("onnxruntime")
        place = (self._where.type, self._where.index or 0)
        binding = self._made.io_binding()
        for name in self._takes:
            binding.bind_ortvalue_input(name, runtime.OrtValue.ortvalue_from_numpy(inputs[name].numpy(), *place))
        for name in OUTPUTS:
            binding.bind_output(name, *place)

        def once() -> None:
            self._made.run_with_iobinding(binding)
            binding.synchronize_outputs()

        return once


def onnxruntime(model: Any, member: Member, where: torch.device, example: Inputs, folder: Path) -> Session:
    """Export ``model`` to ``folder`` and open a session on it; see ``benchlib.benchmarks.parity.executors.Make``.

    Raises ``BackendUnavailable`` where the packages are lacking, and as ``start_onnxruntime`` does.
    """
    require_fp32(member)
    _provider(require_package("onnxruntime"), where)
    return start_onnxruntime(write_onnx(model.to("cpu"), example, folder), member, where)


def start_onnxruntime(file: OnnxFile, member: Member, where: torch.device) -> Session:
    """Open a session on ``where``.

    Raises ``BackendUnavailable`` where the provider of ``where`` is lacking or does not start: ONNX Runtime by itself
    falls back to the CPU without an error.
    """
    runtime = require_package("onnxruntime")
    provider = _provider(runtime, where)
    begin = time.monotonic()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = _ERRORS_ONLY
    tf32 = (
        where.type == "cuda" and member.mode == "native"
    )  # the provider's default; a member in exact mode goes without
    settings = {"device_id": where.index or 0, "use_tf32": int(tf32)} if where.type == "cuda" else {}
    session = runtime.InferenceSession(str(file.path), options, providers=[(provider, settings)])
    active = session.get_providers()
    if active[0] != provider:
        raise BackendUnavailable(
            f"onnxruntime {runtime.__version__} has {provider} but it did not start (active: {', '.join(active)}): install the "
            "CUDA and cuDNN libraries of its version, for instance with pip install 'onnxruntime-gpu[cuda,cudnn]'"
        )
    description = file.description | {
        "runtime": f"ONNX Runtime {runtime.__version__}",
        "providers": active,
        "precision": "fp32",
        "tf32": tf32,
        "threads": torch.get_num_threads(),
        "load_s": time.monotonic() - begin,
    }
    return Session(session, where, description)


def _provider(runtime: Any, where: torch.device) -> str:
    wanted = _PROVIDERS.get(where.type, f"provider for {where.type}")
    has = runtime.get_available_providers()
    if wanted not in has:
        remedy = (
            "pip uninstall onnxruntime, then pip install onnxruntime-gpu" if where.type == "cuda" else "use cpu or cuda"
        )
        raise BackendUnavailable(
            f"onnxruntime {runtime.__version__} has no {wanted} (it has {', '.join(has)}): {remedy}"
        )
    return wanted


class Request(Graph):
    """A compiled model of OpenVINO with one request."""

    def __init__(self, compiled: Any, description: dict[str, Any]) -> None:
        self._made, self.description = compiled, description
        self._takes = [argument.any_name for argument in compiled.inputs]

    def forward(self, inputs: Inputs) -> Logits:
        """Return (start, end), float32 (B, S) each."""
        outputs = self._made({name: inputs[name].numpy() for name in self._takes})
        start, end = (torch.from_numpy(outputs[name].copy()) for name in OUTPUTS)
        return start.float(), end.float()

    def timed(self, inputs: Inputs) -> Callable[[], None]:
        """Return a call that does one forward pass; the inputs are set before."""
        runtime = require_package("openvino")
        request = self._made.create_infer_request()
        for name in self._takes:
            request.set_tensor(name, runtime.Tensor(inputs[name].numpy()))

        def once() -> None:
            request.infer(share_outputs=True)  # waits; without sharing it would copy the outputs

        return once


def openvino(model: Any, member: Member, where: torch.device, example: Inputs, folder: Path) -> Request:
    """Export ``model`` to ``folder`` and compile it; see ``benchlib.benchmarks.parity.executors.Make``.

    Raises ``BackendUnavailable`` where the packages are lacking, and for a device that is no CPU.
    """
    require_fp32(member)
    if where.type != "cpu":
        raise BackendUnavailable(f"OpenVINO is compared on CPUs, not on {where.type}: use backend cpu")
    require_package("openvino")
    return start_openvino(write_onnx(model.to("cpu"), example, folder), member)


def start_openvino(file: OnnxFile, member: Member) -> Request:
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
