"""Find UCC, compile the group over it (``group.cpp``) and tell torch of it.

    python -m benchlib.runtime.ucc.library      # compile now, not in the first run

torch's wheels have no UCC, and no wheel brings one: its headers come with the system, or from a build that UCC_HOME
names (and UCX_HOME its transport library). The compiled module is kept per version of torch and of the source.
"""

import ctypes
import fcntl
import functools
import hashlib
import importlib
import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "libucc"  # torch keeps "ucc" for a build with UCC in it
SOURCES = Path(__file__).parent
STEPS = (
    "on Debian testing or sid apt-get install libucc-dev libucx-dev g++ ninja-build; elsewhere build UCX and UCC "
    "(https://github.com/openucx/ucc) and set UCC_HOME and UCX_HOME to their prefixes; scripts/ucc_root.sh runs the kit "
    "with Debian's UCC on any Debian"
)


def home() -> Path | None:
    """Return the prefix that has UCC's headers: UCC_HOME, /usr/local or /usr; None where none has."""
    places = [os.environ["UCC_HOME"]] if os.environ.get("UCC_HOME") else ["/usr/local", "/usr"]
    return next((path for path in map(Path, places) if (path / "include/ucc/api/ucc.h").exists()), None)


def missing() -> str:
    """Return '' where UCC can be used or compiled for, else what is missing and how to get it."""
    if home() is None:
        where = f"UCC_HOME = {os.environ['UCC_HOME']}" if os.environ.get("UCC_HOME") else "/usr/local and /usr"
        return f"UCC's headers (include/ucc/api/ucc.h) are not in {where}: {STEPS}"
    needed = [os.environ.get("CXX", "c++"), "ninja"]
    absent = [name for name in needed if shutil.which(name) is None]
    if absent:
        return f"the group over UCC is compiled on first use, and {' and '.join(absent)} is missing: {STEPS}"
    return ""


def load() -> None:
    """Tell torch of the backend; the first time on a machine this compiles it, some 30 seconds."""
    module = _module()
    if BACKEND.upper() in dist.Backend._plugins:
        return

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return module.create(store, rank, size, timeout.total_seconds())

    dist.Backend.register_backend(BACKEND, create, devices=["cpu"])


def version() -> str:
    """Return the version of the UCC library."""
    return str(_module().version())


@functools.cache
def _module() -> Any:
    prefix = home()
    assert prefix is not None
    if ucx := os.environ.get("UCX_HOME"):
        ctypes.CDLL(str(Path(ucx) / "lib" / "libucp.so"), mode=ctypes.RTLD_GLOBAL)
    sources = [SOURCES / "group.cpp", SOURCES / "team.h"]
    text = b"".join(path.read_bytes() for path in sources) + f"{torch.__version__} {prefix}".encode()
    name = f"benchlib_ucc_{hashlib.sha256(text).hexdigest()[:12]}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "benchlib" / name
    cache.mkdir(parents=True, exist_ok=True)
    # torch's own lock is a file that a killed process leaves behind, and then everybody waits for ever.
    with (cache.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (cache / "lock").unlink(missing_ok=True)
        extension = importlib.import_module("torch.utils.cpp_extension")
        library = prefix / "lib"
        return extension.load(
            name=name,
            sources=[str(sources[0])],
            extra_include_paths=[str(prefix / "include")],
            extra_cflags=["-O2"],
            extra_ldflags=[f"-L{library}", f"-Wl,-rpath,{library}", "-lucc"],
            build_directory=str(cache),
        )


if __name__ == "__main__":
    reason = missing()
    print(reason or f"UCC {version()} is ready")
    raise SystemExit(bool(reason))
