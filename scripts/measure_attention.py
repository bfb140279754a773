"""How far apart are the attention kernels of this machine, and where does it come from?

Question: which part of a difference between two kernels is the order of additions, which the rounding to bfloat16, and
what does each kernel and each runtime make of a query that may attend to nothing?

Method: `benchlib.benchmarks.parity.attention` runs every kernel that torch has for the device on the inputs of BERT-base's heads,
against float64 and against the math kernel. Then attention is computed here in tiles with a running maximum, as flash
kernels do it, and one step after the other is done less exactly: the order (size of the tiles), the weights that are
multiplied with the values, the sum. Last, each runtime takes one graph that holds attention with three
masks that mean the same.

    python scripts/measure_attention.py                                  # prints the tables, a minute
    python scripts/measure_attention.py --write docs/attention.md        # puts them between the markers of the page
    python scripts/measure_attention.py --backend cuda --lengths 512 2048
"""

import argparse
import functools
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchlib.benchmarks.parity.attention import DTYPES, MASKED_ROWS, Case, inputs, kernels, truth, word
from benchlib.benchmarks.parity.executors import built, device_name, quiet, require_compiler, require_package
from benchlib.core.errors import BackendUnavailable
from benchlib.core.files import write_text
from benchlib.runtime import devices
from benchlib.workloads import distances

BEGIN, END = "<!-- measured: begin, by scripts/measure_attention.py -->", "<!-- measured: end -->"
TILES = (16, 64, 512)
SOURCES_LENGTH = 512


def tiled(case: Case, tile: int, weights: torch.dtype, total: torch.dtype, work: torch.dtype) -> np.ndarray:
    """Return attention (B, H, S, D) in float64 numbers, computed tile by tile of keys with a running maximum.

    ``work`` is the type of scores, exponentials and products, ``weights`` what the exponentials are rounded to before they
    are multiplied with v, ``total`` what the running sum of outputs is rounded to after each tile.
    """
    q, k, v = (tensor.to(work) for tensor in inputs(case)[0])
    top = torch.full((*q.shape[:-1], 1), -math.inf, dtype=work)
    norm, out = torch.zeros_like(top), torch.zeros_like(q)
    for begin in range(0, case.length, tile):
        part = slice(begin, begin + tile)
        scores = q @ k[:, :, part].transpose(-2, -1) / math.sqrt(q.shape[-1])
        higher = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        shrink, exponentials = torch.exp(top - higher), torch.exp(scores - higher)
        norm = norm * shrink + exponentials.sum(dim=-1, keepdim=True)
        out = (out * shrink + exponentials.to(weights).to(work) @ v[:, :, part]).to(total).to(work)
        top = higher
    return np.asarray((out / norm).double().numpy())


def machine(where: torch.device) -> list[str]:
    """Say in Markdown what was measured on."""
    load = f", load average {os.getloadavg()[0]:.1f} meanwhile" if hasattr(os, "getloadavg") else ""
    return [
        f"Measured on {device_name(where)} ({where.type}; instructions of the CPU: {torch.backends.cpu.get_cpu_capability()}, "
        f"threads: {torch.get_num_threads()}{load}), torch {torch.__version__}.",
        "",
    ]


def kernel_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Write the kernels that ran, a line for each input; then those that did not, with the reason."""
    yield "| type | tokens | mask | q, k × | kernel | fp64: max | fp64: 1 − cos | math: max | math: 1 − cos | gradients, fp64 | gradients, math | median µs |"
    yield "|---|---:|---|---:|---|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        if row["status"] == "SKIPPED":
            continue
        names = ("max_abs_truth", "one_minus_cosine_truth", "max_abs_math", "one_minus_cosine_math",
                 "gradient_max_abs_truth", "gradient_max_abs_math")  # fmt: skip
        cells = [row["dtype"], str(row["length"]), row["mask"], f"{row['scale']:g}", row["kernel"]]
        cells += [number(row[name]) for name in names]
        time = "" if row["median_us"] is None else f"{row['median_us']:,.0f}"
        yield f"| {' | '.join([*cells, time])} |" + (f" {row['status']}: {row['reason']}" if row["reason"] else "")
    yield ""
    reasons: dict[tuple[str, str], None] = {
        (row["kernel"], row["reason"]): None for row in rows if row["status"] == "SKIPPED"
    }
    yield from (f"- {kernel}: SKIPPED: {reason}" for kernel, reason in reasons)
    yield ""


def source_table() -> Iterator[str]:
    """Write what each step that a kernel does less exactly adds to the error, before the output itself is rounded."""
    yield "| inputs | computed | from fp64 | 1 − cos |"
    yield "|---|---|---:|---:|"
    single, half, double = torch.float32, torch.bfloat16, torch.float64
    ways = [("fp32", f"tiles of {tile} keys, all in fp32", tile, single, single, single) for tile in TILES]
    ways += [
        ("bf16", "tiles of 64 keys, all in fp64", 64, double, double, double),
        ("bf16", "tiles of 64 keys, all in fp32", 64, single, single, single),
        ("bf16", "the same, weights rounded to bf16", 64, half, single, single),
        ("bf16", "the same, the sum rounded to bf16 after each tile too", 64, half, half, single),
    ]
    found: dict[int, np.ndarray] = {}
    for dtype, words, tile, *types in ways:
        case = Case(dtype, SOURCES_LENGTH)
        exact, output = truth(case).output, tiled(case, tile, *types)
        if dtype == "fp32":
            found[tile] = output
        yield f"| {dtype} | {words} | {number(distances.max_abs(output, exact))} | {number(distances.one_minus_cosine(output, exact))} |"
    rounded = torch.tensor(truth(Case("bf16", SOURCES_LENGTH)).output).bfloat16().double().numpy()
    exact = truth(Case("bf16", SOURCES_LENGTH)).output
    yield f"| bf16 | exactly, the output rounded to bf16 | {number(distances.max_abs(rounded, exact))} | {number(distances.one_minus_cosine(rounded, exact))} |"
    apart = distances.max_abs(found[TILES[0]], found[TILES[-1]])
    yield ""
    yield f"In fp32 tiles of {TILES[0]} and of {TILES[-1]} keys are {number(apart)} apart: the same additions in another order."
    yield ""


def masked_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Write what a query without a key gets: from the kernels, then from the runtimes."""
    yield "| type | kernel | what a query without a key gets, by the kind of mask |"
    yield "|---|---|---|"
    told = {(row["dtype"], row["kernel"]): row["masked_row"] for row in rows if row["masked_row"]}
    yield from (f"| {dtype} | {kernel} | {text} |" for (dtype, kernel), text in told.items())
    yield ""
    yield f"| runtime (CPU, fp32) | attention | {' | '.join(MASKED_ROWS)} |"
    yield "|---|---|---|---|---|"
    with tempfile.TemporaryDirectory() as folder:
        for form, attend in FORMS.items():
            for name in RUNTIMES:
                place = Path(folder) / f"{name}-{form}".replace(" ", "-")
                words, reason = masked_rows(name, attend, place)
                yield f"| {name} | {form} | {' | '.join(words)} |" + reason
    yield ""


ROWS, ROW = Case("fp32", 16), 3
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

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return an output for each mask, (B, H, S, D) each."""
        return tuple(self.attend(q, k, v, mask) for mask in masks)


def given() -> tuple[torch.Tensor, ...]:
    """Return q, k, v and the masks, (S, S) each, that leave query ``ROW`` without a key, in the order of ``MASKED_ROWS``."""
    infinite = torch.zeros(ROWS.length, ROWS.length)
    infinite[ROW] = -math.inf
    return (*inputs(ROWS)[0], infinite == 0, infinite, infinite.clamp(min=torch.finfo(torch.float32).min))


def masked_rows(runtime: str, attend: Callable[..., torch.Tensor], folder: Path) -> tuple[list[str], str]:
    """Return what the row without a key gets in a runtime, by the kind of mask, or the reason why it is not there."""
    folder.mkdir()
    try:
        outputs = RUNTIMES[runtime](ThreeMasks(attend).eval(), folder)
    except BackendUnavailable as error:
        return ["SKIPPED"] * len(MASKED_ROWS), f" {error}"
    values, unmasked = inputs(ROWS)[0][2].double().numpy(), truth(ROWS).output[:, :, ROW]
    near = 8 * torch.finfo(torch.bfloat16).eps  # a runtime may compute in bfloat16
    return [word(output[:, :, ROW].astype(np.float64), values, unmasked, near) for output in outputs], ""


def _eager(module: torch.nn.Module, folder: Path) -> Outputs:
    with torch.no_grad():
        return [output.numpy() for output in module(*given())]


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
        torch._inductor.aoti_compile_and_package(torch.export.export(module, given()), package_path=path)
        return [output.numpy() for output in torch._inductor.aoti_load_package(path)(*given())]


def _onnx(module: torch.nn.Module, folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    for name in ("onnx", "onnxscript"):
        require_package(name)
    names = ["q", "k", "v", *(f"mask{number}" for number in range(len(MASKED_ROWS)))]
    with torch.no_grad(), quiet():
        program = torch.export.export(module, given())
        converted: Any = torch.onnx.export(program, dynamo=True, input_names=names, verbose=False)
        converted.save(str(folder / "rows.onnx"))
    return folder / "rows.onnx", {name: tensor.numpy() for name, tensor in zip(names, given(), strict=True)}


def _onnx_runtime(module: torch.nn.Module, folder: Path) -> Outputs:
    runtime = require_package("onnxruntime")
    path, arrays = _onnx(module, folder)
    return list(runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, arrays))


def _openvino(module: torch.nn.Module, folder: Path, **settings: str) -> Outputs:
    runtime = require_package("openvino")
    path, arrays = _onnx(module, folder)
    return [np.array(output) for output in runtime.Core().compile_model(path, "CPU", settings)(arrays).values()]


RUNTIMES: dict[str, Callable[[torch.nn.Module, Path], Outputs]] = {
    "torch": _eager,
    "torch.compile": _compiled,
    "AOTInductor": _packaged,
    "ONNX Runtime": _onnx_runtime,
    "OpenVINO f32": functools.partial(_openvino, INFERENCE_PRECISION_HINT="f32"),
    "OpenVINO as it comes": _openvino,
}


def number(value: float | None) -> str:
    """Return a number as it stands in a table; '' for none."""
    return "" if value is None else f"{value:.1e}"


def put(path: Path, text: str) -> None:
    """Replace what lies between the markers of a page. ``ValueError`` where it has not both."""
    page = path.read_text(encoding="utf-8")
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"{path} needs each of these lines once: {BEGIN} and {END}")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    write_text(path, f"{before}{BEGIN}\n\n{text}\n{END}{after}")


def main() -> None:
    """Run the command line of the module's docstring."""
    parser = argparse.ArgumentParser(description="Attention kernels of this machine side by side.")
    parser.add_argument("--backend", default="cpu", help="cpu, cuda, rocm, mps or xpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024], help="tokens")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16", "fp16"], choices=list(DTYPES))
    parser.add_argument("--seconds", type=float, default=300.0, help="of the kernels, at most")
    parser.add_argument(
        "--threads", type=int, default=0, help="of the CPU; 0: as torch chooses. 1 where others are at work"
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables between the markers of this page")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    devices.require(options.backend)
    where = devices.device(options.backend)
    rows = kernels(where, options.dtypes, options.lengths, options.seconds)
    lines = [*machine(where), "### Kernels", "", *kernel_table(rows)]
    lines += [f"### Where it comes from ({SOURCES_LENGTH} tokens, no mask)", "", *source_table()]
    lines += ["### A query without a key", "", *masked_table(rows)]
    text = "\n".join(lines)
    print(text)
    if options.write:
        put(options.write, text)


if __name__ == "__main__":
    main()
