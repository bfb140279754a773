"""Shared memory in files: what the ranks of a run have mapped, so that it can be freed when they were killed.

MPI, NCCL and others exchange data on one machine through files under /dev/shm, which they remove at their end. A rank
that is killed together with its launcher cannot, and the memory would stay taken until the machine restarts. Linux only.
"""

import contextlib
import os
from pathlib import Path

FOLDER = "/dev/shm"


def mapped() -> list[str]:
    """Return the files under /dev/shm that this process has mapped and that still have a name."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if f" {FOLDER}/" in line}
    return sorted(path for path in paths if not path.endswith(" (deleted)"))


def note(run_dir: Path, rank: int) -> None:
    """Write down what this rank has mapped, in ``logs/rankN.shm``; nothing where it has none."""
    if paths := mapped():
        with contextlib.suppress(OSError):  # on a full disk the run has other things to say
            (run_dir / "logs" / f"rank{rank}.shm").write_text("\n".join(paths))


def free(run_dir: Path) -> None:
    """Remove what the ranks of a run noted; for a run of which no process lives any more."""
    for listed in (run_dir / "logs").glob("rank*.shm"):
        for path in listed.read_text(errors="replace").splitlines():
            if os.path.dirname(os.path.normpath(path)) == FOLDER:
                with contextlib.suppress(OSError):
                    os.unlink(path)
