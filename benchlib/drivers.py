"""Versions of the accelerators' kernel drivers, without torch: worth knowing where two runs differ, no part of a fingerprint."""

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

NVIDIA = Path("/proc/driver/nvidia/version")
AMD = Path("/sys/module/amdgpu/version")
_NUMBER = re.compile(r"\d+\.\d+(\.\d+)*")


def drivers(nvidia: Path = NVIDIA, amd: Path = AMD, library: ModuleType | Any | None = None) -> dict[str, str]:
    """Return the version of each driver that the system tells, by name; empty where there is none.

    NVIDIA's comes from the kernel module's own file, else from NVML (``library`` replaces pynvml; without the file, as
    under WSL). AMD's is told where the module was built apart from the kernel; else it is the kernel's version.
    """
    found = {"nvidia": _nvidia(nvidia, library), "amdgpu": _first_number(amd)}
    return {name: version for name, version in found.items() if version}


def _first_number(path: Path) -> str:
    try:
        match = _NUMBER.search(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return match[0] if match else ""


def _nvidia(path: Path, library: ModuleType | Any | None) -> str:
    told = _first_number(path)
    if told:
        return told
    try:
        nvml = library or importlib.import_module("pynvml")
        nvml.nvmlInit()
        version = nvml.nvmlSystemGetDriverVersion()
        nvml.nvmlShutdown()
    except Exception:  # no package, no driver, or a driver that does not answer: each library raises its own kind
        return ""
    return version.decode() if isinstance(version, bytes) else str(version)
