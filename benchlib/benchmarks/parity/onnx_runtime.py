"""The model through ONNX Runtime, on a CPU or an NVIDIA GPU. Letters: B rows, S tokens."""

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

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_ERRORS_ONLY = 3


class Session:
    """A session on one provider; see ``benchlib.benchmarks.parity.executor.Executor``. It has no gradients and no hooks."""

    module = None
    hooks = False

    def __init__(self, session: Any, where: torch.device, description: dict[str, Any]) -> None:
        self._session, self._where, self.description = session, where, description
        self._takes = [argument.name for argument in session.get_inputs()]

    def forward(self, inputs: Inputs) -> Logits:
        """Return (start, end), float32 (B, S) each, on the CPU."""
        start, end = self._session.run(onnx_file.OUTPUTS, {name: inputs[name].numpy() for name in self._takes})
        return torch.from_numpy(start), torch.from_numpy(end)

    def timed(self, inputs: Inputs) -> Callable[[], None]:
        """Return a call that does one forward pass, on inputs and outputs that are on the device, and waits for it."""
        runtime = require_package("onnxruntime")
        place = (self._where.type, self._where.index or 0)
        binding = self._session.io_binding()
        for name in self._takes:
            binding.bind_ortvalue_input(name, runtime.OrtValue.ortvalue_from_numpy(inputs[name].numpy(), *place))
        for name in onnx_file.OUTPUTS:
            binding.bind_output(name, *place)

        def once() -> None:
            self._session.run_with_iobinding(binding)
            binding.synchronize_outputs()

        return once

    def close(self) -> None:
        """End the session."""
        self._session = None


def make(model: Any, member: Member, where: torch.device, example: Inputs, folder: Path) -> Session:
    """Export ``model`` to ``folder`` and open a session on it; see ``benchlib.benchmarks.parity.executor.Make``.

    Raises ``BackendUnavailable`` where the packages are lacking, and as ``start`` does.
    """
    require_fp32(member)
    _provider(require_package("onnxruntime"), where)
    return start(onnx_file.write(model.to("cpu"), example, folder), member, where)


def start(file: onnx_file.OnnxFile, member: Member, where: torch.device) -> Session:
    """Open a session on ``where``.

    Raises ``BackendUnavailable`` where the provider of ``where`` is lacking or does not start: ONNX Runtime by itself
    falls back to the CPU without an error.
    """
    runtime = require_package("onnxruntime")
    provider = _provider(runtime, where)
    begin = time.monotonic()
    session = runtime.InferenceSession(
        str(file.path), _options(runtime), providers=[(provider, _provider_options(member, where))]
    )
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
        "tf32": where.type == "cuda" and member.mode == "native",
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


def _options(runtime: Any) -> Any:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = _ERRORS_ONLY
    return options


def _provider_options(member: Member, where: torch.device) -> dict[str, Any]:
    """Return the provider's options. TF32 is its default; a member in exact mode goes without."""
    if where.type != "cuda":
        return {}
    return {"device_id": where.index or 0, "use_tf32": int(member.mode == "native")}
