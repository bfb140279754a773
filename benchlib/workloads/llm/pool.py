"""Workers on this machine: each a process of ``benchlib.workloads.llm.server`` on a free port of loopback, with one token.

    with Pool(folder, [{"engine": "sim"}, {"engine": "sim", "step_ms": 20}]) as pool:
        pool.urls, pool.token

To be used by the main thread: the workers end with the thread that started them.
"""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
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
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._began: dict[int, float] = {}

    def __enter__(self) -> "Pool":
        try:
            for index in range(len(self.options)):
                self.start(index)
            for index in range(len(self.options)):
                self.wait(index)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for index in self.processes:
            self.kill(index)

    def start(self, index: int) -> None:
        """Start a worker, again on the port that it had."""
        self.folder.mkdir(parents=True, exist_ok=True)
        announce = self._file(index, "json")
        announce.unlink(missing_ok=True)
        port = int(self.urls[index].rpartition(":")[2] or 0)
        options = {**self.options[index], "port": port, "announce": str(announce)}
        command = [sys.executable, "-m", "benchlib.workloads.llm.server", json.dumps(options)]
        env = {**os.environ, **self._environment, TOKEN: self.token}
        with self._file(index, "log").open("ab") as log:
            self.processes[index] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        self._began[index] = time.monotonic()

    def wait(self, index: int) -> None:
        """Wait until a worker takes requests. Raises ``RunBroken`` for one that ends or takes too long."""
        announce = self._file(index, "json")
        while not announce.exists():
            if (code := self.processes[index].poll()) is not None:
                words = self._last_words(index)
                if code == EXIT_SKIPPED:
                    raise BackendUnavailable(words)
                how = f"by {signal_name(-code)}" if code < 0 else f"with exit code {code}"
                raise RunBroken(f"worker {index} ended {how}: {words}")
            if time.monotonic() - self._began[index] > self.start_s:
                raise RunBroken(f"worker {index} was not ready within {self.start_s:g} s: {self._last_words(index)}")
            time.sleep(POLL_S)
        self.ready_s[index] = time.monotonic() - self._began[index]
        self.urls[index] = str(read_json(announce)["url"])

    def kill(self, index: int) -> None:
        """End a worker at once; it is gone when this returns."""
        self.processes[index].kill()
        self.processes[index].wait()

    def _file(self, index: int, kind: str) -> Path:
        return self.folder / f"worker-{index}.{kind}"

    def _last_words(self, index: int) -> str:
        return self._file(index, "log").read_text(errors="replace").strip()[-LAST:] or "no output"
