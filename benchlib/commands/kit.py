"""``benchlib list``: benchmarks, tiers, backends and clusters, or the stored runs; ``doctor``: which of them this machine has."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from benchlib.benchmarks import BENCHMARKS, Benchmark, loadable
from benchlib.commands import OUT
from benchlib.commands.output import say, show_table
from benchlib.config import cluster
from benchlib.config.schema import read_params, tier_names
from benchlib.core.errors import UserError
from benchlib.core.files import outputs
from benchlib.core.machine import BACKENDS, cpu_model, probe_devices, usable_cores, versions
from benchlib.core.sensors import Sensors
from benchlib.core.terminal import one_line, stacked
from benchlib.core.text import duration, look
from benchlib.launch.kubernetes import KUBECTL
from benchlib.launch.launchers import SLURM, TORCHX
from benchlib.results.record import load_all
from benchlib.results.run import no_runs

NOTEBOOKS = "pip install -e '.[notebooks]'"
OPTIONAL = (  # modules and programs
    ("papermill", "headless runs and reports", NOTEBOOKS),
    ("ipywidgets", "live progress in JupyterLab", NOTEBOOKS),
    ("pynvml", "power, temperature and energy of NVIDIA GPUs", "pip install -e '.[nvidia]'"),
    ("amdsmi", "power, temperature and energy of AMD GPUs", "install amd-smi-lib of ROCm and its Python package"),
    ("mlperf_loadgen", "inference: MLPerf's load generator", "pip install -e '.[inference]' (Linux)"),
    ("rouge_score", "inference: scores of summaries", "pip install -e '.[inference]'"),
    ("jax", "compiled, parity: XLA", "pip install -e '.[xla]'"),
    ("iree.compiler", "compiled: IREE, a second compiler of the same program", "pip install -e '.[compiled]'"),
    ("onnxruntime", "parity: ONNX Runtime", "pip install -e '.[parity]'"),
    ("openvino", "parity: OpenVINO", "pip install -e '.[parity]'"),
    ("triton", "parallel: the fused loss on a GPU", "comes with torch's wheels for CUDA and ROCm"),
    ("mpi4py", "collective=mpi", "pip install -e '.[mpi]'"),
    ("mlflow", "benchlib export --to mlflow", "pip install -e '.[export]'"),
    ("kubectl", "runs on Kubernetes", KUBECTL),
    ("sbatch", "runs on a SLURM cluster", SLURM),
    ("torchx", "runs through TorchX", TORCHX),
)
FREE_BYTES = 1e9  # of the disk of the runs
NEEDED = ("torch", "backend cpu", "outputs")  # without which nothing goes


def budget_s(tier: Mapping[str, Any]) -> float:
    """Return the seconds that the benchmarks of a tier may take, with the defaults of those that it sets no budget for."""
    total_s = 0.0
    for benchmark in loadable():
        if benchmark.name in tier:
            default_s = benchmark.config.model_fields["budget_s"].default
            total_s += ({"budget_s": default_s} | tier.get("all", {}) | (tier[benchmark.name] or {}))["budget_s"]
    return total_s


def _row(benchmark: Benchmark, tiers: dict[str, Any]) -> dict[str, Any]:
    names = ", ".join(name for name in tiers if benchmark.name in tiers[name])
    if not benchmark.fault:
        return {"benchmark": benchmark.name, "question": benchmark.question, "tiers": names}
    fault = Text.assemble(("not loadable", "red"), f": {benchmark.fault}")
    return {"benchmark": benchmark.name, "question": fault, "tiers": names}


def show_kit() -> None:
    tiers = {name: read_params("tiers", name) for name in tier_names()}
    show_table(_row(benchmark, tiers) for benchmark in BENCHMARKS.values())
    budget = "time budget of all its benchmarks"
    show_table(
        {"tier": name, "what it is": content.get("description", ""), budget: f"at most {duration(budget_s(content))}"}
        for name, content in tiers.items()
    )
    for benchmark in loadable():
        for what, names in benchmark.spec.choices.items():
            heading = f"{what} of {benchmark.name}"
            show_table(({heading: name, "what it is": words} for name, words in names.items()), whole=(heading,))
    words = {name: read_params("backends", name).get("description", "") for name in BACKENDS}
    show_table({"backend": name, "what it is": words[name], "needs": BACKENDS[name].install} for name in BACKENDS)
    show_table({"cluster": name, "what it is": cluster.load(name).description} for name in cluster.names())
    say("\n`benchlib doctor` tells which of them this machine has.")


@click.command()
@click.option("--runs", is_flag=True, help="List the stored runs instead, the newest first.")
@OUT
def show(runs: bool, out: Path | None) -> None:
    """List benchmarks, tiers, backends, clusters and what benchmarks have by name (models), or the stored runs."""
    if not runs:
        show_kit()
        return
    if not (stored := load_all(out or outputs())):
        raise UserError(no_runs(out or outputs()))
    for run in reversed(stored):
        number = "".join(f"  {label} {metric.text}" for label, metric in run.key_numbers[:1])
        say(f"{one_line(run.path)}  ", (run.word, look(run.word).colour), f"  {run.moment:%H:%M}  {one_line(number)}")
        if run.word != "PASS" or run.copy_of:
            say(f"    {f'copy of {run.copy_of}: ' * bool(run.copy_of)}{one_line(run.sentence)}", style="dim", fold=True)


def examine() -> Iterator[tuple[Any, ...]]:
    """Yield whether a part is there, its name, what was seen, and what to do where it is not."""
    named = ("python", "torch", "transformers", "benchlib")
    yield True, "processor", f"{cpu_model()}, {usable_cores()} cores"
    yield True, "versions", ", ".join(f"{name} {text}" for name, text in versions().items() if name in named)
    try:
        probe = probe_devices()
    except UserError as error:
        yield False, "torch", str(error), "pip install --constraint constraints.txt torch"
        return
    for name, backend in BACKENDS.items():
        probed = probe["backends"].get(name, {})
        if probed.get("available"):
            names = ", ".join(dict.fromkeys(probed["names"])) or "ready"
            yield True, f"backend {name}", names if name == "cpu" else f"{probed['count']} x {names}"
        else:
            reason = probed.get("reason") or f"torch does not report it: {backend.install}"  # ends with what to install
            yield False, f"backend {name}", reason
    for name, reason in probe.get("libraries", {}).items():
        yield not reason, f"collective {name}", reason or "ready"
    sensors = Sensors([os.getpid()])
    readings, missing = sensors.read(), sensors.reasons
    yield True, "sensors", ", ".join(sorted(readings.keys() - missing.keys()))
    for name, reason in sorted(missing.items()):
        yield False, f"sensor {name}", reason
    for name, use, install in OPTIONAL:
        yield _installed(name), name, use, install
    folder = outputs()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free, writable = shutil.disk_usage(existing).free, os.access(existing, os.W_OK)
    seen = f"{folder}: {free / 1e9:.0f} GB free{'' if writable else ', not writable'}"
    yield writable and free > FREE_BYTES, "outputs", seen, "choose another folder with --out DIR"


def _installed(name: str) -> bool:
    """Tell whether a module or a program of this name is there."""
    try:
        return bool(importlib.util.find_spec(name) or shutil.which(name))
    except ModuleNotFoundError:  # the package that the module lies in
        return False


@click.command()
def doctor() -> None:
    """Show what this machine can run, what is missing and how to install it."""
    lacking, rows = False, list[dict[str, Text | str]]()
    for there, part, seen, *remedy in examine():
        lacking |= not there and part in NEEDED
        ready = Text("yes", "green") if there else Text("no", "red" if part in NEEDED else "yellow")
        rows.append({"ready": ready, "part": part, "what was seen": stacked(seen, "" if there else "".join(remedy))})
    show_table(rows)
    sys.exit(2 if lacking else 0)
