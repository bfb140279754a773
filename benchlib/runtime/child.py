"""A piece of work in a process of its own, with a time-out, signs of life and last words: what crashes or hangs there ends nothing here.

    ended = run(work, *args, timeout_s=60, tell=print)      # calls work(*args, tell), a function of a module

On Linux a child is forked by multiprocessing's fork server, which loads torch and the module of the work once and opens no
device; elsewhere each starts from a new interpreter.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from benchlib.core.errors import BackendUnavailable, StorageError
from benchlib.core.files import storage_error
from benchlib.launch.diagnosis import main_stack
from benchlib.launch.processes import kill_marked, signal_name

MARK = "BENCHLIB_CHILD"  # in the environment of all that a child starts: how it is identified
SILENT_S = 3.0  # between signs of life of a child that reports no progress
STACKS_S = 3.0  # for a child whose time is over to write where it is
STACK = "(most recent call first)"  # how faulthandler begins the stack of a thread
LAST_LINES = 3
BLAS = "OPENBLAS_NUM_THREADS"
SERVER = threading.Lock()  # held while the fork server starts in an environment of its own


@dataclass(frozen=True)
class Ended:
    """How a child ended: with the ``value`` that the work returned, or the ``reason`` why there is none; ``seconds`` of the process."""

    status: Literal["done", "unavailable", "crashed", "timeout"]
    value: Any
    reason: str
    seconds: float


def run(
    work: Callable[..., Any], *args: Any, timeout_s: float, tell: Callable[[Any], None], log: Path | None = None
) -> Ended:
    """Call ``work(*args, tell)`` in a process of its own and wait for it, at most ``timeout_s``.

    What the work tells reaches ``tell`` here, and None every few seconds of silence. Its output goes to ``log``.out and .err, from
    which the reason of a crash or time-out says where it was. When this returns or is interrupted, nothing that the
    child started is left. ``BackendUnavailable`` becomes the status unavailable. Raises ``StorageError`` where the work could not
    write a file: the next one could not either.
    """
    began, mark, err = time.monotonic(), str(Path(uuid.uuid4().hex).resolve()), Path(f"{log}.err")
    for kind in ("out", "err") if log else ():
        Path(f"{log}.{kind}").unlink(missing_ok=True)
    context = serve([work.__module__])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(work, args, there, log, mark))
    try:
        process.start()
        there.close()
        status, value = _watch(here, process.sentinel, began + timeout_s, tell)
        if status == "timeout":
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
            end, seen = time.monotonic() + STACKS_S, ""
            # To the end of what it writes: the main thread comes last.
            while log and (STACK not in seen or seen != _text(err)) and time.monotonic() < end:
                seen = _text(err)
                time.sleep(0.05)
            value = f"not done after {timeout_s:g} s{_last(err)}"
        elif status == "died":
            process.join()
            code = process.exitcode
            value = (f"ended by {signal_name(-code)}" if code < 0 else f"exit code {code}") + _last(err)
    finally:
        if process.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            kill_marked(mark, mark=MARK)  # also what is in a session of its own
        here.close()
    if status == "storage":
        raise StorageError(*value)
    ends: Any = "crashed" if status == "died" else status
    done, reason = (value, "") if status == "done" else (None, value)
    return Ended(ends, done, reason, time.monotonic() - began)


def serve(modules: Sequence[str]) -> Any:
    """Start the server where none runs, and return the context that children start by: it loads torch and the ``modules`` meanwhile."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    with SERVER:
        forkserver.set_forkserver_preload(["torch", *modules])
        before = os.environ.pop(BLAS, None)
        # A fork keeps only the thread that forks, and numpy's library starts threads when it is loaded.
        os.environ[BLAS] = "1"
        try:
            forkserver.ensure_running()
        finally:
            os.environ.pop(BLAS)
            os.environ |= {BLAS: before} if before is not None else {}
    return multiprocessing.get_context("forkserver")


def _watch(here: Connection, sentinel: int, end: float, tell: Callable[[Any], None]) -> tuple[str, Any]:
    """Pass on what the child tells until it ends; return how, and with what."""
    while (left := end - time.monotonic()) > 0:
        if not wait([here, sentinel], min(SILENT_S, left)):
            tell(None)
            continue
        try:
            status, value = here.recv() if here.poll() else ("died", None)
        except EOFError:
            return "died", None
        if status != "progress":
            return status, value
        tell(value)
    return "timeout", None


def _text(err: Path) -> str:
    return err.read_text(encoding="utf-8", errors="replace") if err.exists() else ""


def _last(err: Path) -> str:
    """Return the last words as the end of a sentence: where a crash or a hang was, else the last lines."""
    lines = [line.strip() for line in _text(err).splitlines() if line.strip()]
    if frames := main_stack(_text(err)):
        lines = [*(line for line in lines if line.startswith("Fatal Python error")), str(frames[0])]
    return ": " + " | ".join(lines[-LAST_LINES:])[-500:] if lines else ""


def _main(work: Callable[..., Any], args: Any, pipe: Connection, log: Path | None, mark: str) -> None:
    os.setsid()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ[MARK] = mark
    message: tuple[str, Any]
    try:
        for descriptor, kind in ((1, "out"), (2, "err")) if log else ():
            os.dup2(os.open(f"{log}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), descriptor)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        message = "done", work(*args, lambda progress: pipe.send(("progress", progress)))
    except BackendUnavailable as error:
        message = "unavailable", " ".join(str(error).split())
    except BaseException as error:
        message = "crashed", " ".join(f"{type(error).__name__}: {error}".split())[:500]
        if full := storage_error(error):
            message = "storage", (" ".join(str(full).split()), full.errno, full.strerror)
        with contextlib.suppress(OSError):
            traceback.print_exc()
    with contextlib.suppress(OSError):
        pipe.send(message)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # they may lie on a full disk
            stream.flush()
    os._exit(0)  # without the second that torch needs to take itself apart, and whatever threads are left


def _die_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os.killpg(0, signal.SIGKILL)
