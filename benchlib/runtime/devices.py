"""Devices as torch reports them: which are available, how to wait for one, its memory, its precisions.

Everything that differs between CPUs and accelerators is asked here, so that no other module compares device names.
"""

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import resource
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchlib.core.errors import BackendUnavailable, UserError
from benchlib.core.machine import BACKENDS
from benchlib.core.machine import cache_bytes as cache_of_cpus
from benchlib.core.text import counted

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Accelerators whose torch module has synchronize, memory statistics and timed events under the same names.
_EVENT_TYPES = ("cuda", "xpu")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc


def probe() -> dict[str, Any]:
    """Return what torch can use here: ``{"backends": {name: {available, count, names, reason, memory_bytes, lacks}}, "versions": {...}}``.

    ``count`` is the number of devices, ``names`` their names, ``reason`` says why a backend is not available. ``memory_bytes`` is
    that of each accelerator with memory of its own. ``lacks`` holds the precisions that the device does not support, each with the reason.
    """
    backends = {}
    for name in BACKENDS:
        names, reason = _available(name)
        backends[name] = {"available": not reason, "count": len(names), "names": names, "reason": reason}
        if not reason:
            where = torch.device(BACKENDS[name].device_type)
            reasons = {precision: lacking(precision, where) for precision in DTYPES}
            if has_events(where):
                module = torch.get_device_module(where)
                every = map(module.get_device_properties, range(len(names)))
                backends[name]["memory_bytes"] = [properties.total_memory for properties in every]
            backends[name]["lacks"] = {precision: why for precision, why in reasons.items() if why}
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "rocm": torch.version.hip} | _libraries()
    return {"backends": backends, "versions": {name: value for name, value in versions.items() if value}}


def _libraries() -> dict[str, str]:
    versions = {}
    if torch.cuda.is_available():
        versions["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
        versions["cudnn"] = str(torch.backends.cudnn.version() or "")
    if torch.xpu.is_available() and torch.xpu.device_count():
        versions["xpu_driver"] = str(torch.xpu.get_device_properties(0).driver_version)
    return versions


def _available(backend: str) -> tuple[list[str], str]:
    """Return the names of a backend's devices, and why there are none (empty where there are)."""
    install = BACKENDS[backend].install
    if backend == "cpu":
        return ["cpu"], ""
    if backend == "tpu":
        return _tpu(install)
    if backend == "mps":
        if torch.backends.mps.is_built() and torch.backends.mps.is_available():
            return ["Apple GPU"], ""
        state = "has MPS but sees no device" if torch.backends.mps.is_built() else "is built without MPS"
        return [], f"this torch ({torch.__version__}) {state}: needs {install}"
    if backend == "xpu":
        # Every wheel has torch.xpu, and a CPU wheel answers some of its questions: only a counted device is one.
        names = [torch.xpu.get_device_name(index) for index in range(torch.xpu.device_count())]
        return names, "" if names else f"torch ({torch.__version__}) sees no Intel GPU: {install}"
    kind, tool = ("ROCm", "rocminfo") if backend == "rocm" else ("CUDA", "nvidia-smi")
    hides = "HIP_VISIBLE_DEVICES" if backend == "rocm" else "CUDA_VISIBLE_DEVICES"
    if backend == "cuda" and torch.version.hip:
        return [], f"this torch is a ROCm build ({torch.__version__}): use backend rocm, or install the CUDA wheel"
    if backend == "rocm" and not torch.version.hip:
        return [], f"this torch ({torch.__version__}) is not a ROCm build: {install}"
    if not torch.backends.cuda.is_built():
        return [], f"this torch ({torch.__version__}) is built without CUDA: {install}"
    if not torch.cuda.is_available() or not torch.cuda.device_count():
        return [], f"torch has {kind} but sees no device: check the driver with `{tool}`, and {hides}"
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())], ""


def _tpu(install: str) -> tuple[list[str], str]:
    if importlib.util.find_spec("torch_xla") is None:
        return [], f"torch_xla is not installed: {install}"
    # It is compiled against torch's C++ interface: of another release its import ends in a missing symbol, if not in a crash.
    own, needs = (".".join(importlib.metadata.version(name).split(".")[:2]) for name in ("torch", "torch_xla"))
    if own != needs:
        return [], f"torch_xla {needs} does not work with torch {own}: {install}"
    try:
        # Imported by name: the package exists on TPU machines only, and it starts the runtime.
        runtime = importlib.import_module("torch_xla.runtime")
        kind, count = runtime.device_type(), runtime.global_runtime_device_count()
    except Exception as error:  # the runtime raises what it likes when no chip answers
        return [], f"torch_xla {importlib.metadata.version('torch_xla')} finds no TPU: {error}"
    if kind != "TPU":
        return [], f"torch_xla runs on {kind}, not on a TPU: set PJRT_DEVICE=TPU on a TPU machine"
    return ["TPU"] * count, ""


def require(backend: str, devices: int = 1) -> None:
    """Raise ``BackendUnavailable`` with the reason unless ``backend`` has at least ``devices`` devices here.

    One that is visible is enough: a launcher may give each rank its own (``srun --gpus-per-task=1``). ``shared`` tells if it did.
    """
    names, reason = _available(backend)
    if reason:
        raise BackendUnavailable(f"backend {backend} is not available: {reason}")
    own = BACKENDS[backend].device_type in _EVENT_TYPES and len(names) == 1
    if backend != "cpu" and len(names) < devices and not own:
        raise BackendUnavailable(
            f"backend {backend} has {counted(len(names), 'device')} here and {devices} ranks need one each: set nproc={len(names)}"
        )


def device(backend: str, local_rank: int = 0) -> torch.device:
    """Return the device of a rank, and make it the current one: LOCAL_RANK is its number, if more than one is visible."""
    kind = BACKENDS[backend].device_type
    if kind in ("cpu", "mps"):
        return torch.device(kind)
    if kind == "xla":
        return importlib.import_module("torch_xla").device()  # type: ignore[no-any-return]
    own = torch.device(kind, 0 if torch.get_device_module(kind).device_count() == 1 else local_rank)
    torch.get_device_module(own).set_device(own)
    return own


def identity(where: torch.device) -> str:
    """Return the UUID of a GPU, or of the part of one (MIG) that this process may use; '' where none is known."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if where.type not in _EVENT_TYPES or visible.startswith("MIG-"):
        return visible.split(",")[where.index or 0] if where.type == "cuda" else ""
    return str(getattr(torch.get_device_module(where).get_device_properties(where), "uuid", ""))


def shared(owners: Sequence[tuple[str, str]]) -> str:
    """Return which two ranks have one device, of (host, UUID) by rank; '' where each has its own or a UUID is not known."""
    first = dict[tuple[str, str], int]()
    for rank, owner in enumerate(owners):
        if owner[1] and first.setdefault(owner, rank) != rank:
            host, name = owner
            remedy = "give each rank one of its own (srun --gpus-per-task=1, CUDA_VISIBLE_DEVICES), or set nproc to their number"
            return f"ranks {first[owner]} and {rank} on {host} have one device, {name}: {remedy}"
    return ""


def has_events(where: torch.device) -> bool:
    """Return whether time on this device is taken by events in its queue, else by waiting for it."""
    return where.type in _EVENT_TYPES


def synchronize(where: torch.device) -> None:
    """Wait until the device has done all that was asked of it. Nothing to wait for on a CPU."""
    if where.type == "xla":
        importlib.import_module("torch_xla").sync(wait=True)
    elif has_events(where):
        torch.get_device_module(where).synchronize(where)
    elif where.type != "cpu":
        torch.get_device_module(where).synchronize()


def synchronize_stream(where: torch.device) -> None:
    """Wait for what was asked of the current stream, and not for other streams as those of exchanges; elsewhere for all."""
    if has_events(where):
        torch.get_device_module(where).current_stream(where).synchronize()
    else:
        synchronize(where)


def moved(tensor: torch.Tensor, where: torch.device) -> torch.Tensor:
    """Return a tensor of the host on a device. The host does not wait where the device has a queue: it would, for pageable memory."""
    return tensor.pin_memory().to(where, non_blocking=True) if has_events(where) else tensor.to(where)


def reset_peak_memory(where: torch.device) -> None:
    """Reset the peak memory, on devices that count it."""
    if where.type in _EVENT_TYPES:
        torch.get_device_module(where).reset_peak_memory_stats(where)


def peak_memory_bytes(where: torch.device) -> tuple[float | None, str]:
    """Return the most bytes that tensors held on the device since the last reset, or None and the reason."""
    if where.type in _EVENT_TYPES:
        return float(torch.get_device_module(where).max_memory_allocated(where)), ""
    if where.type == "cpu":
        return None, "a CPU has no device memory of its own; see resident_memory_gb"
    return None, f"torch counts no peak memory on {where.type}"


def cache_bytes(where: torch.device) -> int:
    """Return the bytes of the device's last-level cache that its driver states, of a CPU those of all together; 0: not known."""
    if where.type not in _EVENT_TYPES:
        return cache_of_cpus() if where.type == "cpu" else 0
    return int(getattr(torch.get_device_module(where).get_device_properties(where), "L2_cache_size", 0))


def peak_resident_bytes() -> float:
    """Return the most bytes of RAM that this process held so far.

    Linux carries ``ru_maxrss`` over from the process that started this one; VmHWM begins with the program (proc(5)).
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024.0 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def lacking(precision: str, where: torch.device) -> str:
    """Return why the device has no matrix products in ``precision``; '' where it has.

    On a CPU bf16 also runs where the instructions are missing, but slower than fp32: that is not supported here.
    """
    if precision == "tf32":
        if where.type != "cuda" or torch.version.hip:
            return f"tf32 is a mode of NVIDIA's tensor cores, and the device is {'rocm' if torch.version.hip else where.type}"
        old = torch.cuda.get_device_capability(where) < (8, 0)
        return f"{torch.cuda.get_device_name(where)} is older than tf32 (compute capability 8.0)" if old else ""
    if precision == "fp16" and where.type == "cpu":
        return "fp16 needs an accelerator (its gradient scaler is slow on a CPU): use bf16 or fp32"
    if precision == "fp16" and where.type not in ("cuda", "xpu"):
        return f"fp16 with a gradient scaler is not supported on {where.type}: use bf16 or fp32"
    if precision == "bf16" and where.type == "cpu":
        has = torch.cpu.get_capabilities()
        if not any(has.get(name) for name in ("avx512_bf16", "amx_bf16", "amx_tile", "bf16")):
            return "this CPU has no bf16 instructions (AVX512_BF16, AMX or Arm BF16): use fp32"
    if precision == "bf16" and where.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return f"{torch.cuda.get_device_name(where)} has no bf16 units: use fp16 or fp32"
    return ""


def products_in(precision: str, where: torch.device) -> str:
    """Return the precision that matrix products run in if the work asks for ``precision``: fp32 ones may run in tf32.

    The process decides (``torch.backends``, or ``TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1``, which NVIDIA's containers set) unless
    NVIDIA_TF32_OVERRIDE decides for NVIDIA's libraries.
    """
    asked = torch.backends.cuda.matmul.fp32_precision == "tf32"
    allowed = {"0": False, "1": True}.get(os.environ.get("NVIDIA_TF32_OVERRIDE", ""), asked)
    return "tf32" if precision == "fp32" and allowed and not lacking("tf32", where) else precision


@contextlib.contextmanager
def products_held(precision: str, where: torch.device) -> Iterator[None]:
    """Make fp32 mean fp32 and tf32 mean tf32, whatever the process has set."""
    if where.type != "cuda":
        yield
        return
    rules = torch.backends.cuda.matmul
    before, rules.fp32_precision = rules.fp32_precision, "tf32" if precision == "tf32" else "ieee"
    try:
        yield
    finally:
        rules.fp32_precision = before


def require_precision(precision: str, where: torch.device) -> None:
    if reason := lacking(precision, where):
        raise UserError(f"precision = {precision}: {reason}")


def mixed_precision(where: torch.device) -> str:
    """Return the precision of matrix products that the device is made for: bf16, else fp16, else fp32."""
    return next(name for name in ("bf16", "fp16", "fp32") if not lacking(name, where))


def compiler(where: torch.device) -> str:
    """Return the compiler that torch.compile calls for a device. Raises ``BackendUnavailable`` where it is lacking.

    Inductor writes C++ for a CPU (CXX, else the system's own). For a GPU Triton writes a launcher in C (CC, else gcc or clang),
    with the header files of Python.
    """
    variable, names, package = "CC", ["gcc", "clang"], "gcc libc6-dev"
    if where.type not in _EVENT_TYPES:
        variable, names, package = "CXX", ["clang++" if sys.platform == "darwin" else "g++"], "g++"
    if chosen := os.environ.get(variable):
        names = [chosen]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise BackendUnavailable(
            f"torch.compile needs a compiler and there is no {' or '.join(names)}: install it (Debian: apt install {package}; "
            f"macOS: xcode-select --install), or name another one in {variable}"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if where.type in _EVENT_TYPES and not header.exists():
        raise BackendUnavailable(
            f"torch.compile needs {header}: install Python's header files (Debian: apt install python3-dev)"
        )
    return found


def autocast(precision: str, where: torch.device) -> contextlib.AbstractContextManager[Any]:
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(where.type, dtype=DTYPES[precision])


def grad_scaler(precision: str, where: torch.device) -> torch.amp.GradScaler:
    """Return the loss scaler that fp16 needs so that small gradients do not vanish, else one that does nothing."""
    return torch.amp.GradScaler(where.type, enabled=precision == "fp16")


def keep_freed_memory(keep: bool = True) -> bool:
    """Let the C library keep freed memory instead of giving it back to the system; False where it cannot.

    A training step allocates the same blocks again and again; without this each of them is mapped and cleared page by
    page every time, a tenth of a step on a CPU. For worker processes only: the process never shrinks. ``keep=False`` sets
    what glibc comes to by itself: blocks above 32 MiB are given back at once.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # a C library without it (musl)
    large, free = (1 << 30, 2**31 - 1) if keep else (32 << 20, 64 << 20)
    return bool(mallopt(_M_MMAP_THRESHOLD, large)) and bool(mallopt(_M_TRIM_THRESHOLD, free))
