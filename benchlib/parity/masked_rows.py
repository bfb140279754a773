"""What a query that may attend to nothing gets, from each runtime and for each way to say so in a mask.

No standard says what it is. One graph holds the attention with three masks that mean the same: False, -inf, and the
least finite number; each runtime takes that graph once. Letters as in ``benchlib.parity.attention``.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchlib.errors import BackendUnavailable
from benchlib.parity.attention import MASKED_ROWS, Case, inputs, truth, word
from benchlib.parity.exporting import built, quiet, require_compiler, require_package

CASE, ROW = Case("fp32", 16), 3
NEAR = 8 * torch.finfo(torch.bfloat16).eps  # a runtime may compute in bfloat16
Tensors = tuple[torch.Tensor, ...]
Outputs = list[np.ndarray]


def by_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return torch's own attention."""
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def by_softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return attention written out: softmax(q k^T / sqrt(D) + mask) v."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    masked = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(masked, dim=-1) @ v


FORMS = {"scaled_dot_product_attention": by_sdpa, "softmax written out": by_softmax}


class ThreeMasks(torch.nn.Module):
    """The same attention under each mask of ``MASKED_ROWS``."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.attend = FORMS[form]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: torch.Tensor) -> Tensors:
        """Return an output for each mask, (B, H, S, D) each."""
        return tuple(self.attend(q, k, v, mask) for mask in masks)


def masks() -> Tensors:
    """Return the masks, (S, S) each, that leave query ``ROW`` without a key: in the order of ``MASKED_ROWS``."""
    added = []
    for value in (-math.inf, torch.finfo(torch.float32).min):
        mask = torch.zeros(CASE.length, CASE.length)
        mask[ROW] = value
        added.append(mask)
    return (added[0] == 0, *added)


def table(folder: Path) -> list[dict[str, str]]:
    """Return a row for each runtime and form: what the row without a key gets, by the kind of mask.

    ``folder`` is empty, for exported files. A runtime that is not there has its reason instead.
    """
    rows = []
    for form in FORMS:
        for name, run in RUNTIMES.items():
            place = folder / f"{name}-{form}".replace(" ", "-")
            place.mkdir()
            row = {"runtime": name, "form": form, "reason": ""} | dict.fromkeys(MASKED_ROWS, "")
            try:
                row |= _words(run(ThreeMasks(form).eval(), place))
            except BackendUnavailable as error:
                row["reason"] = str(error)
            rows.append(row)
    return rows


def _words(outputs: Outputs) -> dict[str, str]:
    (_, _, v), _ = inputs(CASE)
    unmasked = truth(CASE).output[:, :, ROW]
    return {
        kind: word(output[:, :, ROW].astype(np.float64), v.double().numpy(), unmasked, NEAR)
        for kind, output in zip(MASKED_ROWS, outputs, strict=True)
    }


def _given() -> Tensors:
    tensors, _ = inputs(CASE)
    return (*tensors, *masks())


def _eager(module: torch.nn.Module, folder: Path) -> Outputs:
    with torch.no_grad():
        return [output.numpy() for output in module(*_given())]


def _compiled(module: torch.nn.Module, folder: Path) -> Outputs:
    require_compiler()
    torch.compiler.reset()
    with quiet(), built():
        module.compile()
        return _eager(module, folder)


def _packaged(module: torch.nn.Module, folder: Path) -> Outputs:
    require_compiler()
    path = str(folder / "rows.pt2")
    with torch.no_grad(), quiet(), built():
        torch._inductor.aoti_compile_and_package(torch.export.export(module, _given()), package_path=path)
        return [output.numpy() for output in torch._inductor.aoti_load_package(path)(*_given())]


def _onnx(module: torch.nn.Module, folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    for name in ("onnx", "onnxscript"):
        require_package(name)
    names = ["q", "k", "v", *(f"mask{number}" for number in range(len(MASKED_ROWS)))]
    with torch.no_grad(), quiet():
        program = torch.export.export(module, _given())
        converted: Any = torch.onnx.export(program, dynamo=True, input_names=names, verbose=False)
        converted.save(str(folder / "rows.onnx"))
    return folder / "rows.onnx", {name: tensor.numpy() for name, tensor in zip(names, _given(), strict=True)}


def _onnx_runtime(module: torch.nn.Module, folder: Path) -> Outputs:
    runtime = require_package("onnxruntime")
    path, given = _onnx(module, folder)
    return list(runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, given))


def _openvino(settings: dict[str, str]) -> Callable[[torch.nn.Module, Path], Outputs]:
    def run(module: torch.nn.Module, folder: Path) -> Outputs:
        runtime = require_package("openvino")
        path, given = _onnx(module, folder)
        found = runtime.Core().compile_model(path, "CPU", settings)(given)
        return [np.array(output) for output in found.values()]

    return run


RUNTIMES: dict[str, Callable[[torch.nn.Module, Path], Outputs]] = {
    "torch": _eager,
    "torch.compile": _compiled,
    "AOTInductor": _packaged,
    "ONNX Runtime": _onnx_runtime,
    "OpenVINO f32": _openvino({"INFERENCE_PRECISION_HINT": "f32"}),
    "OpenVINO as it comes": _openvino({}),
}
