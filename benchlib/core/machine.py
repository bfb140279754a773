"""The backends of the kit and the facts about this machine: processor, memory, system, versions, drivers, load. No torch:
it is asked for its devices in a process of its own."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import benchlib
from benchlib.core.checkout import code
from benchlib.core.errors import UserError


@dataclass(frozen=True)
class Backend:
    """Where work can run.

    ``device_type`` is torch's name for it, ``collective`` its library for exchanging gradients, ``install`` what a user
    must do to get it.
    """

    name: str
    device_type: str
    collective: str
    install: str


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("cpu", "cpu", "gloo", "every torch wheel has it"),
        Backend("cuda", "cuda", "nccl", "pip install torch (the CUDA wheel) and NVIDIA's driver"),
        Backend("rocm", "cuda", "nccl", "pip install torch from PyTorch's ROCm index and AMD's driver"),
        Backend("mps", "mps", "gloo", "a Mac with Apple silicon and macOS 14 or newer"),
        Backend("xpu", "xpu", "xccl", "pip install torch from PyTorch's XPU index and Intel's GPU driver"),
        Backend(
            "tpu",
            "xla",
            "xla",
            "torch and torch_xla[tpu] of one release on a TPU machine, as docs/parity-cloud.md says",
        ),
    )
}

# The types of device, by torch's names, whose tensors each collective library moves.
MOVES: dict[str, tuple[str, ...]] = {
    "gloo": ("cpu", "cuda", "mps"),  # of MPS what it shares with the CPU
    "nccl": ("cuda",),
    "xccl": ("xpu",),
    "mpi": ("cpu",),
    "ucc": ("cpu", "cuda"),
    "xla": ("xla",),
    "hierarchical": ("cpu", "cuda"),  # by each rank's own library, and over gloo between those that cannot talk
}

PACKAGES = (
    *("torch", "transformers", "tokenizers", "datasets", "accelerate", "safetensors"),
    *("numpy", "pandas", "scipy", "pyarrow", "jupyterlab", "papermill", "ipywidgets"),
)
PROBE_TIMEOUT_S = 300
NVIDIA = Path("/proc/driver/nvidia/version")
AMD = Path("/sys/module/amdgpu/version")
CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Return the CPU cores that this process may use: the affinity mask, cut by the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([cores, *_quotas()])))


def _quotas() -> Iterator[float]:
    """Yield the CPU quotas in cores of this process's control groups, in either version of cgroups."""
    for folder in _groups(""):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no quota
            limit, period = (folder / "cpu.max").read_text().split()
            yield int(limit) / int(period)
    for folder in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):
            limit, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(limit) > 0:  # -1: no quota
                yield int(limit) / int(period)


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folder of this process's control group and of those above it; ``controller`` is one of version 1, '' stands for version 2.

    A container may see its own group as the root, whatever name the kernel gives (cgroup_namespaces(7)); so the root counts, too.
    """
    own = dict[str, str]()  # the group by controllers
    with contextlib.suppress(OSError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own |= dict.fromkeys(controllers.split(","), path)
    names = [name for name in own.get(controller, "").split("/") if name]
    deepest = 0 if ".." in names else len(names)  # what is above a namespace's root is not shown
    mounts = [CGROUPS / mount for mount in ("cpu", "cpu,cpuacct")] if controller == "cpu" else [CGROUPS / controller]
    for mount in mounts:
        yield from (mount.joinpath(*names[:depth]) for depth in range(deepest + 1))


def numa_nodes() -> int:
    """Return the memory nodes of the machine; 1 where the system does not say."""
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1


def cache_bytes(cpus: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the bytes of the processors' last-level caches, all together; 0 where the system does not say."""
    caches = dict[tuple[int, str], int]()
    for folder in cpus.glob("cpu[0-9]*/cache/index[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            level, shared, size = ((folder / name).read_text().strip() for name in ("level", "shared_cpu_list", "size"))
            caches[int(level), shared] = int(size.removesuffix("K")) << 10
    last = max((level for level, _ in caches), default=0)
    return sum(size for (level, _), size in caches.items() if level == last)


def cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.lower().startswith(("model name", "cpu model")))
    return next(names, "") or platform.processor() or platform.machine()


def is_virtual(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Tell whether a hypervisor is below: other guests then share caches, memory and clocks, and no sensor here sees them."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return any("hypervisor" in line.split() for line in lines if line.startswith("flags"))


def versions() -> dict[str, str]:
    """Return the versions of benchlib, Python and the packages that are installed, without importing them."""
    installed = {"benchlib": benchlib.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def memory_bytes() -> int:
    """Return the memory that this machine has, or that its container may take."""
    import psutil  # here: the help of the command line imports the backends

    limits = [int(psutil.virtual_memory().total)]
    files = [folder / "memory.max" for folder in _groups("")]
    files += [folder / "memory.limit_in_bytes" for folder in _groups("memory")]
    for path in files:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
            limits.append(int(path.read_text()))
    return min(limits)


def describe(probe: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the facts about this machine that go into ``machine.json``.

    ``probe`` is what a worker reported about torch's devices (see ``probe_devices``).
    """
    import psutil  # here: the help of the command line imports the backends

    memory = psutil.virtual_memory()
    return {
        "host": platform.node(),
        "cpu": {
            "model": cpu_model(),
            "architecture": platform.machine(),
            "usable_cores": usable_cores(),
            "logical_cores": os.cpu_count(),
            "numa_nodes": numa_nodes(),
            "virtual": is_virtual(),
        },
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "system": f"{platform.system()} {platform.release()}",
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "versions": versions(),
        "code": code(),
        "drivers": drivers(),
        "devices": probe or {},
    }


def drivers() -> dict[str, str]:
    """Return the versions of the accelerators' kernel drivers by name; they are recorded, not part of the fingerprint."""
    installed = {}
    for name, path in (("nvidia", NVIDIA), ("amdgpu", AMD)):
        with contextlib.suppress(OSError):
            if match := re.search(r"\d+(\.\d+)+", path.read_text(encoding="utf-8", errors="replace")):
                installed[name] = match[0]
    return installed


def probe_devices() -> dict[str, Any]:
    """Ask torch, in a process of its own, which backends it has; see ``benchlib.runtime.devices.probe`` for the answer.

    Where torch is not installed there is the CPU, for work that needs no torch. Raises ``UserError`` where it cannot be
    loaded, with what it said.
    """
    if importlib.util.find_spec("torch") is None:
        why = "torch is not installed: a client of servers needs none, everything else does"
        missing = {name: {"available": False, "count": 0, "names": [], "reason": why} for name in BACKENDS}
        here = {"available": True, "count": 1, "names": ["cpu"], "reason": "", "lacks": {}}
        return {"backends": missing | {"cpu": here}, "versions": {}, "libraries": {}}
    command = [sys.executable, "-m", "benchlib.runtime.worker", "--probe"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PROBE_TIMEOUT_S, check=False
        )
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
    devices = probe.get("backends", {})
    return next(
        (name for name in ("cuda", "rocm", "xpu", "tpu", "mps") if devices.get(name, {}).get("available")), "cpu"
    )
