"""The C++ part: compiled once per version of it and of torch, kept in the temporary folder of the user, and loaded."""

import ctypes
import getpass
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

SOURCE = Path(__file__).with_name("device.cpp")
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-DUSE_C10D_GLOO", "-DUSE_DISTRIBUTED")


def unavailable() -> str:
    """Return why no device can be simulated here, '' if one can."""
    if not sys.platform.startswith("linux"):
        return "the simulated device is built for Linux alone"
    if not _compiler():
        return "no C++ compiler (g++, or the one that CXX names)"
    if "+cpu" not in importlib.metadata.version("torch"):
        import torch

        if torch.version.cuda or torch.version.hip:
            return "torch has a device guard for CUDA of its own"
    return ""


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX") or "g++")


def library() -> Path:
    """Return the compiled library; compile it if there is none of this source, compiler and torch."""
    key = f"{SOURCE.read_text()} {FLAGS} {_compiler()} {importlib.metadata.version('torch')}"
    folder = Path(tempfile.gettempdir()) / f"benchlib-simulated-{getpass.getuser()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"device-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            _compile(path)
    return path


def _compile(path: Path) -> None:
    found = importlib.util.find_spec("torch")
    assert found and found.origin
    torch = Path(found.origin).parent
    include = torch / "include"
    half = path.with_suffix(".half")
    command = [
        str(_compiler()),
        *FLAGS,
        f"-I{include}",
        f"-I{include}/torch/csrc/api/include",
        str(SOURCE),
        "-o",
        str(half),
    ]
    subprocess.run([*command, f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"], check=True)
    half.rename(path)


def load() -> ctypes.CDLL:
    """Load the library, before torch is imported: torch asks for the hooks once."""
    loaded = ctypes.CDLL(str(library()))
    moment, span = ctypes.c_double, ctypes.c_double
    signatures: dict[str, tuple[object, tuple[object, ...]]] = {
        "start": (None, (ctypes.c_int, span)),
        "host": (moment, ()),
        "host_works": (None, (span,)),
        "host_waits_until": (None, (moment,)),
        "waits": (ctypes.c_int64, ()),
        "done_at": (moment, ()),
        "launch": (moment, (span,)),
        "stream_waits_until": (None, (moment,)),
        "copy": (None, (moment, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
        "busy": (span, (ctypes.c_int,)),
        "is_pinned": (ctypes.c_int, (ctypes.c_void_p,)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(loaded, f"simulated_{name}")
        function.restype, function.argtypes = result, arguments
        setattr(loaded, name, function)
    return loaded
