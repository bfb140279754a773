"""``benchlib doctor``: what this machine can run, which sensors and optional parts are there, and how to get what is missing."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from rich.text import Text

from benchlib.commands.output import show_table
from benchlib.core.errors import UserError
from benchlib.core.files import outputs
from benchlib.core.machine import BACKENDS, cpu_model, probe_devices, usable_cores, versions
from benchlib.core.sensors import Sensors
from benchlib.core.terminal import stacked
from benchlib.launch.kubernetes import KUBECTL
from benchlib.launch.launchers import SLURM, TORCHX

NOTEBOOKS = "pip install -e '.[notebooks]'"
OPTIONAL = (  # modules and programs
    ("jupyterlab", "notebooks by hand", NOTEBOOKS),
    ("papermill", "headless runs and reports", NOTEBOOKS),
    ("ipywidgets", "live progress in JupyterLab", NOTEBOOKS),
    ("pynvml", "power, temperature and energy of NVIDIA GPUs", "pip install -e '.[nvidia]'"),
    ("amdsmi", "power, temperature and energy of AMD GPUs", "install amd-smi-lib of ROCm and its Python package"),
    ("torch_xla", "TPUs", "pip install torch_xla[tpu] on a TPU machine"),
    ("pytest", "the tests", "pip install -e '.[test]'"),
    ("kubectl", "runs on Kubernetes", KUBECTL),
    ("sbatch", "runs on a SLURM cluster", SLURM),
    ("torchx", "runs through TorchX", TORCHX),
)
FREE_BYTES = 1e9  # of the disk of the runs
NEEDED = ("torch", "backend cpu", "outputs")  # without which nothing goes


Finding = tuple[bool, str, str] | tuple[bool, str, str, str]  # whether it is there, the part, what was seen, what to do


def examine() -> Iterator[Finding]:
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
        devices = ", ".join(dict.fromkeys(probed.get("names", []))) or "ready"
        seen = devices if name == "cpu" else f"{probed.get('count', 1)} x {devices}"
        reason = probed.get("reason") or f"torch does not report it: {backend.install}"  # ends with what to install
        yield bool(probed.get("available")), f"backend {name}", seen if probed.get("available") else reason
    for name, reason in probe.get("libraries", {}).items():
        yield not reason, f"collective {name}", reason or "ready"
    sensors = Sensors([os.getpid()])
    readings, missing = sensors.read(), sensors.reasons
    yield True, "sensors", ", ".join(sorted(readings.keys() - missing.keys())) or "none"
    for name, reason in sorted(missing.items()):
        yield False, f"sensor {name}", reason
    for name, use, install in OPTIONAL:
        yield bool(importlib.util.find_spec(name) or shutil.which(name)), name, use, install
    hub = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cached = any((hub / "datasets").glob("*squad*")) or any((hub / "hub").glob("datasets--*squad*"))
    seen = "in the datasets cache" if cached else "not downloaded yet (the quick tier does not need it)"
    remedy = "run once with internet access, or give --set train_file=F --set eval_file=G"
    yield cached, "rajpurkar/squad", seen, remedy
    folder = outputs()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free, writable = shutil.disk_usage(existing).free, os.access(existing, os.W_OK)
    seen = f"{folder}: {free / 1e9:.0f} GB free{'' if writable else ', not writable'}"
    yield writable and free > FREE_BYTES, "outputs", seen, "choose another folder with --out DIR"


@click.command()
def verb() -> None:
    """Show what this machine can run, what is missing and how to install it."""
    lacking, rows = False, list[dict[str, Text | str]]()
    for there, part, seen, *remedy in examine():
        lacking |= not there and part in NEEDED
        ready = Text("yes", "green") if there else Text("no", "red" if part in NEEDED else "yellow")
        rows.append({"ready": ready, "part": part, "what was seen": stacked(seen, "" if there else "".join(remedy))})
    show_table(rows)
    sys.exit(2 if lacking else 0)
