"""What this machine can run, which sensors and optional parts are there, and how to get what is missing."""

import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchlib.backends import BACKENDS
from benchlib.errors import UserError
from benchlib.launchers.kubernetes import KUBECTL
from benchlib.launchers.slurm import SLURM
from benchlib.launchers.torchx import TORCHX
from benchlib.machine import cpu_model, probe_devices, usable_cores, versions
from benchlib.paths import PACKAGE, outputs

OPTIONAL = (
    ("jupyterlab", "notebooks by hand", "pip install -e '.[notebooks]'"),
    ("papermill", "headless runs and reports", "pip install -e '.[notebooks]'"),
    ("nbconvert", "HTML reports", "pip install -e '.[notebooks]'"),
    ("ipywidgets", "live progress in JupyterLab", "pip install -e '.[notebooks]'"),
    ("pynvml", "power, temperature and energy of NVIDIA GPUs", "pip install -e '.[nvidia]'"),
    ("amdsmi", "power, temperature and energy of AMD GPUs", "install amd-smi-lib of ROCm and its Python package"),
    ("torch_xla", "TPUs", "pip install torch_xla[tpu] on a TPU machine"),
    ("pytest", "the tests", "pip install -e '.[test]'"),
)
PROGRAMS = (
    ("kubectl", "runs on Kubernetes", KUBECTL),
    ("sbatch", "runs on a SLURM cluster", SLURM),
    ("torchx", "runs through TorchX", TORCHX),
)


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: a part, whether it is there, what was seen and what to do."""

    part: str
    ok: bool
    seen: str
    remedy: str = ""
    needed: bool = False


def examine() -> list[Finding]:
    """Look at the machine. Asks torch in a process of its own."""
    findings = [
        Finding("processor", True, f"{cpu_model()}, {usable_cores()} cores"),
        Finding(
            "versions",
            True,
            ", ".join(
                f"{name} {version}"
                for name, version in versions().items()
                if name in ("python", "torch", "transformers", "benchlib")
            ),
        ),
    ]
    try:
        probe = probe_devices()
    except UserError as error:
        return [
            *findings,
            Finding("torch", False, str(error), "pip install --constraint constraints.txt torch", needed=True),
        ]
    findings += [_backend(name, probe["backends"].get(name, {})) for name in BACKENDS]
    findings += [_collective(name, reason) for name, reason in probe.get("collectives", {}).items()]
    findings += _sensors()
    for module, use, install in OPTIONAL:
        there = importlib.util.find_spec(module) is not None
        findings.append(Finding(module, there, use, "" if there else install))
    for program, use, install in PROGRAMS:
        findings.append(Finding(program, shutil.which(program) is not None, use, install))
    return [*findings, *_data(), _space()]


def _backend(name: str, found: dict[str, Any]) -> Finding:
    if found.get("available"):
        names = ", ".join(dict.fromkeys(found.get("names", []))) or "ready"
        return Finding(f"backend {name}", True, f"{found.get('count', 1)} x {names}" if name != "cpu" else names)
    return Finding(
        f"backend {name}",
        False,
        # The reason ends with what to install.
        str(found.get("reason") or f"torch does not report it: {BACKENDS[name].install}"),
        needed=name == "cpu",
    )


def _collective(name: str, reason: str) -> Finding:
    return Finding(f"collective {name}", not reason, reason or "ready")


def _sensors() -> list[Finding]:
    from benchlib.sensors import Sensors

    sensors = Sensors([os.getpid()])
    try:
        readings, missing = sensors.read(), sensors.availability()
    finally:
        sensors.close()
    there = sorted(name for name, value in readings.items() if value is not None and name not in missing)
    return [
        Finding("sensors", True, ", ".join(there) or "none"),
        *(Finding(f"sensor {name}", False, reason) for name, reason in sorted(missing.items())),
    ]


def _data() -> list[Finding]:
    hub = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cached = any((hub / "datasets").glob("*squad*")) or any((hub / "hub").glob("datasets--*squad*"))
    remedy = "" if cached else "run once with internet access, or give --set train_file=F --set eval_file=G"
    tiny = PACKAGE / "assets" / "tiny" / "model.safetensors"
    return [
        Finding(
            "rajpurkar/squad",
            cached,
            "in the datasets cache" if cached else "not downloaded yet (the quick tier does not need it)",
            remedy,
        ),
        Finding(
            "embedded model",
            tiny.exists(),
            f"{tiny.stat().st_size / 1e6:.1f} MB" if tiny.exists() else "missing",
            "" if tiny.exists() else "restore benchlib/assets/tiny",
            needed=True,
        ),
    ]


def _space() -> Finding:
    folder = outputs()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    writable = os.access(existing, os.W_OK)
    return Finding(
        "outputs",
        writable and free > 1e9,
        f"{folder}: {free / 1e9:.0f} GB free{'' if writable else ', not writable'}",
        "choose another folder with --out DIR",
        needed=True,
    )
