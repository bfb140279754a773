"""A process that has loaded torch and transformers once, and becomes a member by forking: a start takes no seconds.

    python -m benchlib.benchmarks.parity.warm RUN_DIR

It computes nothing and touches no device, and it refuses to serve when its libraries have started threads: a fork keeps
only the thread that forks. Requests are lines of JSON on standard input, ``{"name", "out", "err", "env"}``; each is
answered with ``{"pid"}`` and, when that process has ended, with ``{"pid", "code"}`` (negative for a signal). It ends with
its input. What a member does is ``benchlib.benchmarks.parity.member``'s, as in a process that was started for it alone.
"""

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchlib.benchmarks.parity import member
from benchlib.launch.processes import die_with_parent

log = logging.getLogger(__name__)

TASKS = Path("/proc/self/task")
STARTED_S = 45.0  # below the time after which the frame ends a silent rank


def serve(run_dir: Path) -> None:
    """Answer requests until the input ends."""
    die_with_parent(int(os.environ[member.PARENT]))
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    _load()
    server = os.getpid()
    answer(threads=len(list(TASKS.iterdir())))
    gc.collect()
    gc.freeze()  # what is loaded stays shared with the members
    for line in requests:
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            os.close(requests.fileno())
            os.close(answers.fileno())
            _become(run_dir, request, server)
        answer(pid=pid)
        _, status = os.waitpid(pid, 0)
        answer(pid=pid, code=os.waitstatus_to_exitcode(status))


def _load() -> None:
    """Import what members of the table need on a CPU."""
    import importlib

    for name in ("weights", "exercise", "eager", "switches", "recording"):
        importlib.import_module(f"benchlib.parity.{name}")
    importlib.import_module("transformers.models.bert.modeling_bert")


def _become(run_dir: Path, request: Mapping[str, Any], server: int) -> None:
    """Be the member that was asked for; does not return."""
    try:
        os.setsid()
        for descriptor, path in ((1, request["out"]), (2, request["err"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
        os.environ.update(request["env"])
        os.environ[member.PARENT] = str(server)
        member.leave(member.run(run_dir, str(request["name"])))
    finally:
        os._exit(1)  # whatever went wrong, a second server must not go on


class Warm:
    """The other end: starts the server and asks it for members. ``ready`` waits until it can be used."""

    def __init__(self, run_dir: Path, env: Mapping[str, str]) -> None:
        """Start the server; it loads its libraries while the caller goes on. To be called by the main thread."""
        self.run_dir = run_dir
        self._answers = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchlib.benchmarks.parity.warm", str(run_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # numpy's OpenBLAS starts its threads when it is loaded; no member computes with it.
            env={**env, "OPENBLAS_NUM_THREADS": "1", member.PARENT: str(os.getpid())},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._ready: bool | None = None

    def ready(self) -> bool:
        """Wait until the server has loaded its libraries; False where it cannot serve."""
        if self._ready is None:
            found = self._wait_for(STARTED_S) or {}
            self._ready = found.get("threads") == 1
            if not self._ready:
                reason = f"its libraries started {found['threads'] - 1} threads" if found else "it did not start"
                log.warning("members are started one by one, none is forked from a warm process: %s", reason)
        return self._ready and self._process.poll() is None

    def start(self, name: str, out: Path, err: Path, env: Mapping[str, str]) -> "Forked | None":
        """Return the process of a member; None where the server is gone, and the member has to be started anew."""
        request = {"name": name, "out": str(out), "err": str(err), "env": dict(env)}
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return None
        found = self._wait_for(STARTED_S)
        return Forked(self, int(found["pid"])) if found else None

    def answer(self) -> dict[str, Any] | None:
        """Return the next answer that is there; None where there is none."""
        assert self._process.stdout is not None
        data = self._process.stdout.read()
        self._answers += data or b""
        line, found, rest = self._answers.partition(b"\n")
        if not found:
            return None
        self._answers = rest
        return dict(json.loads(line))

    def gone(self) -> bool:
        """Whether the server has ended."""
        return self._process.poll() is not None

    def _wait_for(self, timeout_s: float) -> dict[str, Any] | None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if found := self.answer():
                return found
            if self.gone():
                return self.answer()
            time.sleep(0.01)
        return None

    def stop(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Forked:
    """A member that the server forked, with the part of ``subprocess.Popen`` that is needed of it."""

    def __init__(self, server: Warm, pid: int) -> None:
        """``pid`` leads a session of its own."""
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it lives."""
        if self.returncode is None:
            found = self._server.answer()
            if found and "code" in found:
                self.returncode = int(found["code"])
            elif self._server.gone():
                self.returncode = -int(signal.SIGKILL)  # it died with the server
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired("member", timeout or 0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended already."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
