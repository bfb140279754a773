"""Speed of the compiled path on BERT-base: conversion, and XLA beside eager torch.

Method: random weights at BERT-base's shape, 1 x 128 tokens, fp32. Calls of eager (fused attention, torch's own choice) and XLA are
interleaved, weights placed before; CPU time of all threads, median of the ratios of each round. ``products_over_eager`` bounds it:
the model's matrix products at the rate of the best large one of either library, in CPU time. Threads wait passively, or CPU time
would count their spinning. Conversion is the minimum of five, without torch.export.

    python scripts/bench_compiled.py                    # 2 threads, 20 rounds
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from measuring import interleaved, options_of

from benchlib.workloads.stablehlo import export, runtimes
from benchlib.workloads.stablehlo.convert import convert
from benchlib.workloads.stablehlo.inspection import inspect

LENGTH = 128
PEAK_SIZE = 1024  # of a square product: larger ones are no faster


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def eager(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        model(**inputs)


def best_rate() -> float:
    """FLOP per CPU second of a large matrix product, the better one of torch and XLA."""
    inputs = {"input": torch.randn(PEAK_SIZE, PEAK_SIZE)}
    layer = torch.nn.Linear(PEAK_SIZE, PEAK_SIZE, bias=False).eval()
    converted = convert(export.forward(layer, inputs))
    program = runtimes.Xla(converted.text, converted.manifest)
    placed = program.place(runtimes.arguments(program.manifest, converted.weights, inputs))
    calls = (lambda: eager(layer, inputs), lambda: program.run(placed))
    return 2 * PEAK_SIZE**3 / min(timed(call)[1] for call in interleaved(calls, 6))


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if "OMP_WAIT_POLICY" not in os.environ:  # OpenMP has read it before this line
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"OMP_WAIT_POLICY": "PASSIVE"})
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = transformers.BertConfig()
    model = transformers.AutoModelForQuestionAnswering.from_config(config, attn_implementation="sdpa").eval()
    ids = torch.randint(0, 30000, (1, LENGTH))
    mask = torch.ones(1, LENGTH, dtype=torch.int64)
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    program = export.forward(export.Answers(model), inputs)
    conversions = [timed(lambda: convert(program))[1] for _ in range(5)]
    converted = convert(program)
    with tempfile.TemporaryDirectory() as folder:
        converted.manifest.write(Path(folder) / "bert.mlir", converted.text)
        runtime = runtimes.load("xla", Path(folder) / "bert.mlir")
    placed = runtime.place(runtimes.arguments(runtime.manifest, converted.weights, inputs))
    calls: dict[str, Callable[[], object]] = {
        "eager": lambda: eager(model, inputs),
        "xla": lambda: runtime.run(placed),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for name in interleaved(list(calls), options.rounds + 1):
        times[name].append(timed(calls[name]))
    pairs = list(zip(times["xla"], times["eager"], strict=True))[1:]  # the first round warms up
    eager_s = statistics.median(eager[1] for _, eager in pairs)
    rate_flops = best_rate()
    measured = {
        "cpu_xla_over_eager": statistics.median(xla[1] / eager[1] for xla, eager in pairs),
        "wall_xla_over_eager": statistics.median(xla[0] / eager[0] for xla, eager in pairs),
        "eager_cpu_ms": 1e3 * eager_s,
        "xla_cpu_ms": 1e3 * statistics.median(xla[1] for xla, _ in pairs),
        "products_over_eager": (inspect(converted.text).dot_flops or 0) / rate_flops / eager_s,
        "gflops_per_cpu_s": rate_flops / 1e9,
        "convert_cpu_s": min(conversions),
        "compile_s": runtime.compile_s,
    }
    print(json.dumps({name: round(value, 4) for name, value in measured.items()}, indent=1))


if __name__ == "__main__":
    main()
