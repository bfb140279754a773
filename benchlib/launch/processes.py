"""Processes of a run: tied to their parent, marked as belonging to it, ended all together.

On Linux the kernel does the first part (parent death signal, child subreaper). Elsewhere a thread watches the parent.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

MARK = "BENCHLIB_RUN_DIR"  # in the environment of every process of a run: how they are found when all else is lost
SUPERVISOR_PID = "BENCHLIB_SUPERVISOR_PID"
# What numeric libraries read for their number of threads, once, when they are loaded.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
WATCH_EVERY_S = 0.5
KILL_S = 5.0  # for killed processes to disappear
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Arrange that this process gets a signal when its parent dies; end it at once where ``parent`` is already gone.

    The check of the parent's id after the request closes the race between the two. On Linux the signal follows the
    *thread* that started this process, so a launcher must start its children from its main thread.
    """
    if sys.platform.startswith("linux"):
        _prctl(_PR_SET_PDEATHSIG, number)
    else:
        threading.Thread(target=_watch_parent, args=(parent, number), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def leave_with_parent() -> None:
    """Leave by ``SystemExit`` on a polite signal and when the parent dies, so that what has to be taken back is.

    Signals that come while the process is leaving do not disturb it: a parent's death may come as several signals.
    """

    def leave(received: int, _: object) -> None:
        for number in polite:
            signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + received)

    polite = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in polite:
        signal.signal(number, leave)
    die_with_parent(os.getppid(), signal.SIGTERM)


def _watch_parent(parent: int, number: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_EVERY_S)
    os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Become the parent of grandchildren whose parent dies, so that no process of a run gets out of sight (Linux)."""
    if sys.platform.startswith("linux"):
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9; ``signal 99`` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def memory_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes the kernel killed since it started because memory was used up; 0 where it does not count them."""
    with contextlib.suppress(OSError, ValueError):
        counts = dict(line.split() for line in vmstat.read_text().splitlines())
        return int(counts.get("oom_kill", 0))
    return 0


def descendants() -> list["psutil.Process"]:
    """Return all living children of this process and theirs, zombies excluded."""
    import psutil

    living = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # one that ends meanwhile must not hide the others
            if child.status() != psutil.STATUS_ZOMBIE:
                living.append(child)
    return living


def marked(place: Path | str, mark: str = MARK) -> list["psutil.Process"]:
    """Return the living processes of this machine with the mark of a run, or another path's, but for the caller."""
    import psutil

    path, processes = str(Path(place).resolve()), []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            here = process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE
            if not here and process.environ().get(mark) == path:
                processes.append(process)
    return processes


def kill(processes: Iterable["psutil.Process"], number: int = signal.SIGKILL) -> None:
    """Send a signal to processes and to the groups they lead; those that are gone are passed over."""
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == process.pid:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)


def kill_marked(place: Path | str, mark: str = MARK) -> list[int]:
    """Kill every process with the mark of a run, or another path's; return the ids of those left in the end."""
    end = time.monotonic() + KILL_S
    while (left := marked(place, mark)) and time.monotonic() < end:
        kill(left)
        time.sleep(0.05)
    return [process.pid for process in left]
