"""How far apart are the attention kernels of this machine, and where does it come from?

Question: which part of a difference between two kernels is the order of additions, which the rounding to bfloat16, and
what does each kernel and each runtime make of a query that may attend to nothing?

Method: `benchlib.benchmarks.parity.attention` runs every kernel that torch has for the device on the inputs of BERT-base's heads,
against float64 and against the math kernel. Then attention is computed here in tiles with a running maximum, as flash
kernels do it, and one step after the other is done less exactly: the order (size of the tiles), the weights that are
multiplied with the values, the sum. Last, `benchlib.benchmarks.parity.attention` runs one graph through all runtimes.

    python scripts/measure_attention.py                                  # prints the tables, a minute
    python scripts/measure_attention.py --write docs/attention.md        # puts them between the markers of the page
    python scripts/measure_attention.py --backend cuda --lengths 512 2048
"""

import argparse
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchlib.benchmarks.parity import attention, logits
from benchlib.benchmarks.parity.attention import DTYPES, Case, inputs, kernels, truth
from benchlib.core.files import write_text
from benchlib.core.machine import cpu_model
from benchlib.runtime import devices

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
    name = cpu_model() if where.type == "cpu" else torch.get_device_module(where).get_device_name(where)
    load = f", load average {os.getloadavg()[0]:.1f} meanwhile" if hasattr(os, "getloadavg") else ""
    return [
        f"Measured on {name} ({where.type}; instructions of the CPU: {torch.backends.cpu.get_cpu_capability()}, "
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
        yield f"| {dtype} | {words} | {number(logits.max_abs(output, exact))} | {number(logits.one_minus_cosine(output, exact))} |"
    rounded = torch.tensor(truth(Case("bf16", SOURCES_LENGTH)).output).bfloat16().double().numpy()
    exact = truth(Case("bf16", SOURCES_LENGTH)).output
    yield f"| bf16 | exactly, the output rounded to bf16 | {number(logits.max_abs(rounded, exact))} | {number(logits.one_minus_cosine(rounded, exact))} |"
    apart = logits.max_abs(found[TILES[0]], found[TILES[-1]])
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
    yield f"| runtime (CPU, fp32) | attention | {' | '.join(attention.MASKED_ROWS)} |"
    yield "|---|---|---|---|---|"
    with tempfile.TemporaryDirectory() as folder:
        for row in attention.table(Path(folder)):
            words = [row[kind] or "SKIPPED" for kind in attention.MASKED_ROWS]
            yield f"| {row['runtime']} | {row['form']} | {' | '.join(words)} |" + (
                f" {row['reason']}" if row["reason"] else ""
            )
    yield ""


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
