"""Workers on this machine: each a process of ``benchlib.workloads.llm.server`` on a free port of loopback, with one token.

    with Pool(folder, [{"engine": "sim"}, {"engine": "sim", "step_ms": 20}]) as pool:
        pool.urls, pool.token

To be used by the main thread: the workers end with the thread that started them.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchlib.config.addresses import TOKEN
from benchlib.core.errors import BackendUnavailable, RunBroken
from benchlib.core.files import read_json
from benchlib.core.machine import usable_cores
from benchlib.launch.diagnosis import EXIT_SKIPPED
from benchlib.launch.processes import THREAD_VARIABLES, signal_name

POLL_S = 0.01
LAST = 500  # characters of a worker's errors that a message holds


class Pool:
    """Some workers. ``ready_s`` are the seconds that each took to get ready. They share the cores."""

    def __init__(self, folder: Path, options: Sequence[Mapping[str, Any]], start_s: float = 120.0) -> None:
        self.folder, self.options, self.start_s = folder, list(options), start_s
        # Workers share the cores: with all of them each, two would wait for each other at every product. Nor may they spin.
        share = max(1, usable_cores() // max(1, len(options)))
        self._environment = {"OMP_WAIT_POLICY": "PASSIVE", **dict.fromkeys(THREAD_VARIABLES, str(share))}
        self.token = secrets.token_urlsafe(24)
        self.urls = [""] * len(options)
        self.ready_s = [0.0] * len(options)
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * len(options)

    def __enter__(self) -> "Pool":
        try:
            for index in range(len(self.options)):
                self.start(index)
            for index in range(len(self.options)):
                self.wait(index)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self.processes:
            if process and process.poll() is None:
                process.send_signal(signal.SIGCONT)  # one that was halted
                process.terminate()
        end = time.monotonic() + 5
        for process in self.processes:
            if process:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, end - time.monotonic()))
                process.kill()
                process.wait()

    def start(self, index: int) -> None:
        """Start a worker, again on the port that it had."""
        self.folder.mkdir(parents=True, exist_ok=True)
        announce = self._file(index)
        announce.unlink(missing_ok=True)
        port = int(self.urls[index].rpartition(":")[2] or 0)
        more = {"port": port, "announce": str(announce), "with_parent": True, "drain_s": 2}
        command = [sys.executable, "-m", "benchlib.workloads.llm.server", json.dumps({**self.options[index], **more})]
        with (self.folder / f"worker-{index}.log").open("ab") as log:
            environment = {**os.environ, **self._environment, TOKEN: self.token}
            self.processes[index] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )
        self.ready_s[index] = -time.monotonic()

    def wait(self, index: int) -> None:
        """Wait until a worker takes requests. Raises ``RunBroken`` for one that ends or takes too long."""
        process, announce = self.processes[index], self._file(index)
        assert process
        while not announce.exists():
            if (code := process.poll()) is not None:
                words = self._last_words(index)
                if code == EXIT_SKIPPED:
                    raise BackendUnavailable(words)
                how = f"by {signal_name(-code)}" if code < 0 else f"with exit code {code}"
                raise RunBroken(f"worker {index} ended {how}: {words}")
            if self.ready_s[index] + time.monotonic() > self.start_s:
                raise RunBroken(f"worker {index} was not ready within {self.start_s:g} s: {self._last_words(index)}")
            time.sleep(POLL_S)
        self.ready_s[index] += time.monotonic()
        self.urls[index] = str(read_json(announce)["url"])

    def signal(self, index: int, number: signal.Signals) -> None:
        """Send a signal to a worker; after SIGKILL it is gone when this returns."""
        process = self.processes[index]
        assert process
        process.send_signal(number)
        if number == signal.SIGKILL:
            process.wait()

    def _file(self, index: int) -> Path:
        return self.folder / f"worker-{index}.json"

    def _last_words(self, index: int) -> str:
        text = (self.folder / f"worker-{index}.log").read_text(errors="replace").strip()
        return text[-LAST:] or "no output"
