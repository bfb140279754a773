"""Where MPI's launcher is. No torch, no MPI."""

import shutil
import sys
from pathlib import Path


def mpirun() -> str:
    """Return the mpirun of this Python's environment, where the wheels of MPI put it, else the one on PATH, else ''."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun") or ""
