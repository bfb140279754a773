"""Members in processes of their own: a crash, a hang or a missing library of one is its own result, not the run's end.

A member that computes on a CPU with torch alone is forked by multiprocessing's fork server, which has loaded torch and
transformers once and touches no device, so that a start takes no seconds. Others start from a new interpreter.
"""

import contextlib
import errno
import functools
import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from benchlib.benchmarks.parity import golden, member
from benchlib.benchmarks.parity.ahead import warm_up
from benchlib.benchmarks.parity.config import MEMBERS
from benchlib.benchmarks.parity.member import ALLOWED, TEMPORARY
from benchlib.core.errors import StorageError
from benchlib.core.events import EventWriter
from benchlib.core.files import not_written, read_json
from benchlib.launch.diagnosis import EXIT_SKIPPED, EXIT_STORAGE
from benchlib.launch.processes import THREAD_VARIABLES, die_with_parent, kill_marked, signal_name

log = logging.getLogger(__name__)

MEMBER_MARK = "BENCHLIB_PARITY_PROCESS"  # in the environment of all that a member starts: how they are identified
BEAT_S = 3.0  # between signs of life of a silent member
POLL_S = 0.02
STACKS_S = 0.5  # for a member that is ended to write where it is
STARTED_S = 45.0  # for the fork server to load its libraries: below the time after which the frame ends a silent rank
LAST_LINES = 3
_STACK = "most recent call first"  # how faulthandler begins the stack of a thread


@dataclass(frozen=True)
class Ended:
    """How a member's process ended. ``reason`` is empty for ``done``; ``seconds`` are those of the whole process."""

    status: Literal["done", "unavailable", "crashed", "timeout"]
    reason: str
    seconds: float


def run(run_dir: Path, name: str, events: EventWriter, timeout_s: float, executor: str = "") -> Ended:
    """Compute member ``name`` in a process of its own and wait for it, at most ``timeout_s``.

    Its output goes to ``logs/member-NAME.out`` and ``.err``; its progress becomes events of this rank, and a silent
    member's life too. When this returns, nothing that the member started is left. To be called by the main thread:
    the member dies with the thread that started it. Another ``executor`` than the table's is a function ``module:name``.
    Raises ``StorageError`` where the member could not write: the next one could not either.
    """
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    out, err = logs / f"member-{name}.out", logs / f"member-{name}.err"
    began = time.monotonic()
    out.write_bytes(b"")
    err.write_bytes(b"")
    variables = {MEMBER_MARK: str(logs.resolve() / name), ALLOWED: str(timeout_s), **_variables(name)}
    process = _start(run_dir, name, executor, variables, out, err)
    assert process.pid
    try:
        in_time = _watch(process, name, out, events, began + timeout_s)
        if not in_time:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)  # it writes where it is
            process.join(STACKS_S)
    finally:
        _end(process, logs / name)
        clear(run_dir, name)
    seconds = time.monotonic() - began
    if not in_time:
        return Ended("timeout", f"not done after {timeout_s:g} s{_last(err)}", seconds)
    code, lines = process.exitcode, _lines(err)
    assert code is not None, "it was joined"
    if code == 0:
        return Ended("done", "", seconds)
    if code == EXIT_SKIPPED:
        return Ended("unavailable", lines[-1] if lines else "no reason given", seconds)
    if code == EXIT_STORAGE:
        full = not_written(f"a file of member {name}", OSError(errno.ENOSPC, ""))
        raise StorageError(lines[-1] if lines else str(full))
    how = f"ended by {signal_name(-code)}" if code < 0 else f"exit code {code}"
    return Ended("crashed", f"{how}{_last(err)}", seconds)


def clear(run_dir: Path, name: str = "") -> None:
    """Remove what members that were killed had begun to write; of all where no name is given.

    These are hidden folders: the one that an executor works in, and recordings that were not whole yet.
    """
    folder = golden.place(run_dir, "")
    unfinished = f".{name}.*" if name else ".*"
    for path in [
        *run_dir.glob(f"{TEMPORARY}{name}-*" if name else f"{TEMPORARY}*"),
        *(run_dir / "members").glob(unfinished),
        *folder.glob(unfinished),
    ]:
        shutil.rmtree(path, ignore_errors=True)


@functools.cache
def _can_fork() -> bool:
    """Wait for the fork server and return whether it can be used: a fork keeps only the thread that forks."""
    if sys.platform != "linux":
        return False
    warm_up()
    probe = multiprocessing.get_context("forkserver").Process(target=_count_threads)
    probe.start()
    probe.join(STARTED_S)
    if probe.exitcode is None:
        probe.kill()
    if probe.exitcode != 1:
        log.warning("members start one by one, none is forked: the libraries of the fork server started threads")
    return probe.exitcode == 1


def _count_threads() -> None:
    """Exit with the number of threads of the process that forked this one."""
    os._exit(len(os.listdir(f"/proc/{os.getppid()}/task")))


def _start(run_dir: Path, name: str, executor: str, variables: dict[str, str], out: Path, err: Path) -> BaseProcess:
    """Start a member's process: forked from the warm one where possible, else from a new interpreter."""
    forked = not executor and _is_plain(run_dir, name) and _can_fork()
    process = multiprocessing.get_context("forkserver" if forked else "spawn").Process(  # type: ignore[attr-defined]
        target=_become, args=(run_dir, name, executor, {**_waiting(), **variables}, out, err)
    )
    process.start()
    return process  # type: ignore[no-any-return]


def _become(run_dir: Path, name: str, executor: str, variables: dict[str, str], out: Path, err: Path) -> None:
    """Be the member, in its process; does not return."""
    try:
        die_with_parent(os.getppid())
        rank = multiprocessing.parent_process()
        if rank and rank.is_alive():  # else it died before the line above
            os.setsid()
            for descriptor, path in ((1, out), (2, err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
            os.environ.update(variables)
            member.leave(member.run(run_dir, name, executor))
    finally:
        os._exit(1)


def _is_plain(run_dir: Path, name: str) -> bool:
    """Whether a member computes on a CPU with nothing but torch: a device or a runtime must not be forked."""
    config = read_json(run_dir / "config.json")
    backend = {golden.REFERENCE: config.get("reference"), golden.TRUTH: "cpu"}.get(name, config.get("backend"))
    return backend == "cpu" and not (name in MEMBERS and MEMBERS[name].slow)


def _waiting() -> dict[str, str]:
    """Return how threads wait for work: libgomp's spin, which on cores that others use makes a step ten times slower."""
    return {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY") or "PASSIVE"}  # also where it is set to nothing


def _variables(name: str) -> dict[str, str]:
    """Return what is set in the environment of a member beside what its rank has."""
    member = MEMBERS.get(name)
    variables = dict.fromkeys(THREAD_VARIABLES, str(member.threads)) if member and member.threads else {}
    if member is None or member.mode == "exact":
        # cuBLAS is deterministic only with a workspace of its own for each stream, and reads this when it starts.
        variables["CUBLAS_WORKSPACE_CONFIG"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return variables


def _watch(process: BaseProcess, name: str, out: Path, events: EventWriter, end: float) -> bool:
    """Pass progress on until the process ends; return whether that was in time."""
    last: dict[str, Any] = {"done": 0, "total": 1, "what": "starting"}
    offset, beat = 0, 0.0
    while True:
        ended = process.exitcode is not None
        progress, offset = _read_progress(out, offset)
        if progress or time.monotonic() > beat:
            last = progress[-1] if progress else last
            events.emit(
                "progress", phase="measure", member=name, done=last["done"], total=last["total"], unit=last["what"]
            )
            beat = time.monotonic() + BEAT_S
        if ended:
            return True
        if time.monotonic() > end:
            return False
        process.join(POLL_S)


def _read_progress(out: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Return the progress that was added to a member's output, and where its last whole line ends."""
    with out.open("rb") as handle:
        handle.seek(offset)
        data = handle.read()
    whole = data.rfind(b"\n") + 1
    progress = []
    for line in data[:whole].splitlines():
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict) and {"done", "total", "what"} <= value.keys():
                progress.append(value)
    return progress, offset + whole


def _end(process: BaseProcess, place: Path) -> None:
    """Kill what is left of a member: its process, its session, and what it started in sessions of their own."""
    assert process.pid
    process.kill()
    process.join()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    kill_marked(place, mark=MEMBER_MARK)


def _lines(err: Path) -> list[str]:
    text = err.read_text(encoding="utf-8", errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _last(err: Path) -> str:
    """Return what standard error says last as the end of a sentence: where a crash or hang was, else its last lines."""
    lines = _lines(err)
    stacks = [number for number, line in enumerate(lines) if _STACK in line and line.startswith(("Current", "Thread"))]
    if stacks:
        fatal = [line for line in lines[: stacks[0]] if line.startswith("Fatal Python error")]
        current = next((number for number in stacks if lines[number].startswith("Current")), stacks[-1])
        lines = [*fatal, *lines[current + 1 : current + 2]]
    return ": " + " | ".join(lines[-LAST_LINES:])[-500:] if lines else ""
