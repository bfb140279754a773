"""``benchlib doctor``: what this machine can run, which sensors and optional parts are there, and how to get what is missing."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
from rich.text import Text

from benchlib.commands.output import show_table
from benchlib.core.errors import UserError
from benchlib.core.files import outputs
from benchlib.core.machine import BACKENDS, cpu_model, probe_devices, usable_cores, versions
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


class Finding(NamedTuple):
    """A part, whether it is there, what was seen, what to do where it is not, and whether nothing goes without it."""

    part: str
    ok: bool
    seen: str
    remedy: str = ""
    needed: bool = False


def examine() -> Iterator[Finding]:
    named = ("python", "torch", "transformers", "benchlib")
    yield Finding("processor", True, f"{cpu_model()}, {usable_cores()} cores")
    yield Finding("versions", True, ", ".join(f"{name} {text}" for name, text in versions().items() if name in named))
    try:
        probe = probe_devices()
    except UserError as error:
        yield Finding("torch", False, str(error), "pip install --constraint constraints.txt torch", needed=True)
        return
    for name, backend in BACKENDS.items():
        probed = probe["backends"].get(name, {})
        devices = ", ".join(dict.fromkeys(probed.get("names", []))) or "ready"
        seen = devices if name == "cpu" else f"{probed.get('count', 1)} x {devices}"
        reason = probed.get("reason") or f"torch does not report it: {backend.install}"  # ends with what to install
        there = bool(probed.get("available"))
        yield Finding(f"backend {name}", there, seen if there else reason, needed=name == "cpu")
    for name, reason in probe.get("libraries", {}).items():
        yield Finding(f"collective {name}", not reason, reason or "ready")
    yield from _sensors()
    for name, use, install in OPTIONAL:
        yield Finding(name, bool(importlib.util.find_spec(name) or shutil.which(name)), use, install)
    yield from _files()


def _sensors() -> Iterator[Finding]:
    from benchlib.core.sensors import Sensors

    sensors = Sensors([os.getpid()])
    readings, missing = sensors.read(), sensors.reasons
    yield Finding("sensors", True, ", ".join(sorted(readings.keys() - missing.keys())) or "none")
    for name, reason in sorted(missing.items()):
        yield Finding(f"sensor {name}", False, reason)


def _files() -> Iterator[Finding]:
    hub = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cached = any((hub / "datasets").glob("*squad*")) or any((hub / "hub").glob("datasets--*squad*"))
    seen = "in the datasets cache" if cached else "not downloaded yet (the quick tier does not need it)"
    remedy = "run once with internet access, or give --set train_file=F --set eval_file=G"
    yield Finding("rajpurkar/squad", cached, seen, remedy)
    folder = outputs()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free, writable = shutil.disk_usage(existing).free, os.access(existing, os.W_OK)
    seen = f"{folder}: {free / 1e9:.0f} GB free{'' if writable else ', not writable'}"
    remedy = "choose another folder with --out DIR"
    yield Finding("outputs", writable and free > FREE_BYTES, seen, remedy, needed=True)


@click.command()
def verb() -> None:
    """Show what this machine can run, what is missing and how to install it."""
    findings = list(examine())
    rows = [
        {
            "ready": Text("yes", "green") if item.ok else Text("no", "red" if item.needed else "yellow"),
            "part": item.part,
            "what was seen": stacked(item.seen, "" if item.ok else item.remedy),
        }
        for item in findings
    ]
    show_table(rows)
    sys.exit(2 if any(item.needed and not item.ok for item in findings) else 0)
