"""What this machine is, without torch: processor, memory, system, versions, load; and what makes runs comparable."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

import benchlib
from benchlib.drivers import drivers
from benchlib.errors import UserError

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "evaluate",
    "accelerate",
    "safetensors",
    "numpy",
    "pandas",
    "scipy",
    "pyarrow",
    "jupyterlab",
    "papermill",
    "nbconvert",
    "ipywidgets",
    "seaborn",
)
PROBE_TIMEOUT_S = 300


def usable_cores() -> int:
    """Return the CPU cores that this process may use: the affinity mask, cut by the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(cores, int(quota))) if quota else cores


def _cgroup_quota() -> float | None:
    path = Path("/sys/fs/cgroup/cpu.max")
    if not path.exists():
        return None
    limit, period = path.read_text().split()
    return None if limit == "max" else float(limit) / float(period)


def numa_nodes() -> int:
    """Return the memory nodes of the machine; 1 where the system does not say."""
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1


def cpu_model() -> str:
    """Return the processor's name as the system gives it."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.lower().startswith(("model name", "cpu model")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of benchlib, Python and the packages that are installed, without importing them."""
    found = {"benchlib": benchlib.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe(probe: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the facts about this machine that go into ``machine.json``.

    ``probe`` is what a worker reported about torch's devices (see ``probe_devices``).
    """
    memory = psutil.virtual_memory()
    return {
        "host": platform.node(),
        "cpu": {
            "model": cpu_model(),
            "architecture": platform.machine(),
            "usable_cores": usable_cores(),
            "logical_cores": os.cpu_count(),
            "numa_nodes": numa_nodes(),
        },
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "system": f"{platform.system()} {platform.release()}",
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "versions": versions(),
        "drivers": drivers(),
        "devices": probe or {},
    }


def probe_devices() -> dict[str, Any]:
    """Ask torch, in a process of its own, which backends it has; see ``benchlib.devices.probe`` for the answer.

    Raises ``UserError`` where torch cannot be loaded, with what it said.
    """
    command = [sys.executable, "-m", "benchlib.worker", "--probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"asking torch for its devices took over {PROBE_TIMEOUT_S} s: a driver may hang; try {' '.join(command)}"
        ) from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise UserError(
            f"torch could not be asked for its devices ({' '.join(command)}):\n{done.stderr.strip()[-2000:]}"
        )
    return json.loads(lines[-1])  # type: ignore[no-any-return]


def default_nproc(backend: str, probe: dict[str, Any]) -> int:
    """Return the ranks that a machine runs by default: one per device; on CPUs one per memory node, at least two."""
    if backend == "cpu":
        return min(usable_cores(), max(2, numa_nodes()))
    return max(1, int(probe.get("backends", {}).get(backend, {}).get("count", 0)))


def best_backend(probe: dict[str, Any]) -> str:
    """Return the backend that ``auto`` stands for: the first accelerator that torch reports, else the CPU."""
    found = probe.get("backends", {})
    return next((name for name in ("cuda", "rocm", "xpu", "tpu", "mps") if found.get(name, {}).get("available")), "cpu")
