"""Start a run's ranks under a supervisor, follow its events, and leave no process behind. No torch.

    status = execute(run_dir, on_event=print)

The supervisor lives in a session of its own and holds one end of a pipe: when this process goes, however it goes, the
supervisor ends the ranks. When the supervisor goes, the ranks die with it, and this side clears up what they left.
"""

import contextlib
import dataclasses
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchlib.config.schema import BaseConfig, load_config, validated
from benchlib.core import files, run_folder
from benchlib.core.errors import RunBroken, StorageError, UserError
from benchlib.core.events import Event, EventFollower, read_events
from benchlib.launch.diagnosis import EXIT_STORAGE
from benchlib.launch.launchers import LAUNCHERS
from benchlib.launch.processes import MARK, kill_marked, signal_name
from benchlib.launch.ranks import BROKEN, RankTable, rank_of

Status = dict[str, Any]

POLL_S = 0.1
TICK_S = 1.0
STOP_S = 14.0  # the supervisor needs at most its stages' sum


class RankFailed(RunBroken):
    """A run was ended because of a rank. ``status`` is the content of ``status.json``.

    Its text, and what a notebook shows, is the reason and the failing rank's own traceback: the frames of the
    launching side say nothing about the cause.
    """

    def __init__(self, status: Status) -> None:
        self.status = status
        super().__init__("\n".join(self._lines()))

    def _lines(self) -> list[str]:
        rank = self.status["culprit"]
        culprit: Status = next((row for row in self.status["ranks"] if row["rank"] == rank), {})
        traceback = (culprit.get("error") or {}).get("traceback")
        heading = f"Traceback of rank {rank}:" if traceback else f"Python stacks of rank {rank} when it was ended:"
        shown = (traceback or culprit.get("stacks") or "").rstrip().splitlines()
        return [str(self.status["reason"]), *(["", heading, *shown] if shown else [])]

    def _render_traceback_(self) -> list[str]:
        return f"{type(self).__name__}: {self}".splitlines()


class _OwnConfig(BaseConfig, extra="allow"):
    """The config of a function of one's own: what a launcher reads is checked, and the rest is the function's."""


class Launch:
    """One run in progress. ``stop`` may be called from any thread; leaving a ``with`` block stops the run."""

    def __init__(self, run_dir: Path | str, benchmark: str = "", config: BaseConfig | None = None) -> None:
        """``benchmark``: ``module:function`` to run instead of the benchmark that the config names.

        ``config``: what ``config.json`` holds, of a caller who has read it.
        """
        self.run_dir = Path(run_dir).resolve()
        self.benchmark, self._config = benchmark, config
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stop_s = STOP_S
        self._status: Status | None = None

    def start(self) -> "Launch":
        """Start the supervisor, which starts the ranks.

        Raises ``UserError`` where the folder has no config, is in use or was executed before: old events and ports
        would be taken for new ones.
        """
        held = run_folder.claim(self.run_dir)
        try:
            self._start(held)
        except BaseException as error:  # one that comes when the supervisor is there: an interrupt, say
            self.stop()
            if isinstance(error, OSError):
                raise files.not_written(self.run_dir, error) from error
            raise
        finally:
            os.close(held)  # the supervisor has inherited the claim, and with its end the folder is free
        return self

    def _start(self, held: int) -> None:
        if (self.run_dir / "status.json").exists() or any(self.run_dir.glob("events-*.jsonl")):
            again = "rerun the Setup cell, or start `benchlib run` again, for a new run"
            raise UserError(f"{self.run_dir} was already executed: {again}")
        config = self._config or self._read()
        job = LAUNCHERS[config.launcher](config, self.run_dir, self.benchmark)
        if lack := job.lacks():
            raise UserError(f"launcher {job.name}: {lack}")
        self._stop_s = STOP_S + job.stop_s
        logs = self.run_dir / "logs"
        logs.mkdir(exist_ok=True)
        for name, content in job.files.items():
            files.write_text(self.run_dir / name, content)
        files.write_json(self.run_dir / "job.json", dataclasses.asdict(job))
        # What the processes of a run write is read as UTF-8, whatever this terminal has.
        utf_8 = {"PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8:replace"}
        env = {**os.environ, **utf_8, MARK: str(self.run_dir), "PYTHONUNBUFFERED": "1"}
        package = Path(__file__).resolve().parents[2]
        if package.name not in ("site-packages", "dist-packages"):  # a checkout: found from any working folder
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package), env.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "benchlib.launch.supervise", str(self.run_dir), str(held)]
        with (logs / "supervisor.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env, start_new_session=True, pass_fds=[held]
            )

    def _read(self) -> BaseConfig:
        if not self.benchmark:
            return load_config(self.run_dir)
        return validated(_OwnConfig, {"benchmark": self.benchmark, **files.read_json(self.run_dir / "config.json")})

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def events(self) -> Iterator[Event]:
        """Yield the events of all writers until the run has ended, and a ``tick`` in each second without one.

        Closing the iterator early stops the run.
        """
        follower, last, running = EventFollower(self.run_dir), time.monotonic(), True
        try:
            while running:
                running = self.running  # asked before reading, so that the last events are not missed
                new = follower.poll()
                if not new and time.monotonic() - last >= TICK_S:
                    new = [{"t": time.time(), "source": "launch", "kind": "tick"}]
                yield from new
                last = time.monotonic() if new else last
                time.sleep(POLL_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> Status | None:
        """End the run now and return its status; None before the start. No process stays.

        Interrupted a second time it gives up waiting, and the supervisor still ends the ranks.
        """
        process = self._process
        if process is None:
            return None
        self._send_stop()
        try:
            process.wait(self._stop_s)
        except subprocess.TimeoutExpired:
            process.kill()
        return self.wait()

    def close(self) -> None:
        """End the run unless it has ended; let go of the supervisor and of its pipe, also where that fails."""
        try:
            if self.running:
                self.stop()
        finally:
            self._send_stop()

    def _send_stop(self) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):  # it is gone, or was told before
            if self._process and self._process.stdin:
                self._process.stdin.write(b"q")
                self._process.stdin.close()

    def wait(self) -> Status:
        if self._process is None:
            raise UserError("the run was not started: call start() first")
        code = self._process.wait()
        self._send_stop()
        with self._lock:
            self._status = self._status or _status(self.run_dir) or write_lost(self.run_dir, self._why(code))
        return self._status

    def _why(self, code: int) -> str:
        """Return why the supervisor wrote no status."""
        if code == EXIT_STORAGE:
            return f"{self.run_dir} cannot be written: the disk is full or read-only"
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        log = (self.run_dir / "logs" / "supervisor.log").read_text("utf-8", "replace").strip()
        return f"the supervisor {how} before the run was over; its ranks were ended\n{log[-2000:]}".strip()

    def raise_for_status(self) -> None:
        """Raise ``RankFailed`` unless the run was complete, skipped or stopped."""
        status = self.wait()
        if status["outcome"] in BROKEN:
            raise RankFailed(status)

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _status(run_dir: Path) -> Status | None:
    path = run_dir / "status.json"
    return files.read_json(path) if path.exists() else None


def execute(run_dir: Path | str, on_event: Callable[[Event], None] | None = None, benchmark: str = "") -> Status:
    """Run the ranks of a prepared run folder to their end and return the status.

    An interrupt, and any error of ``on_event``, ends the ranks and is raised again. Raises ``RankFailed`` for a run
    that failed, stalled or took too long; a stopped or skipped one is returned.
    """
    with Launch(run_dir, benchmark) as launch:
        for event in launch.start().events():
            if on_event:
                on_event(event)
        launch.raise_for_status()
        return launch.wait()


def settle(run_dir: Path | str) -> Status | None:
    """Return the status of a run; for one whose supervisor died without writing it, end its ranks and write it from
    the events.

    None while the run is going on, and for a folder in which no run was started, or one on another machine.
    """
    path = Path(run_dir).resolve()
    if status := _status(path):
        return status
    launched = read_events(path, {"launched"}, "supervisor")
    if not launched or launched[-1].get("host") != platform.node() or run_folder.is_running(path):
        return None
    return write_lost(path, "the run was cut off: its supervisor is gone and wrote no status")


def blame_notebook(run_dir: Path, outcome: str, reason: str) -> None:
    """Say in the status of ranks that did not finish how their notebook ended: it died, or was killed at the limit.

    That they were stopped then, for want of who started them, explains nothing.
    """
    with contextlib.suppress(UserError):  # a damaged status.json: the verdict says so
        status = files.read_object(run_dir / "status.json", {"outcome": str, "reason": str})
        if status["outcome"] == "stopped":
            status |= {"outcome": outcome, "reason": reason}
        elif status["outcome"] in BROKEN:
            status["reason"] += f"; {reason}"
        else:
            return
        files.write_json(run_dir / "status.json", status)
        run_folder.record_files(run_dir)


def write_lost(run_dir: Path, reason: str, outcome: str = "failed") -> Status:
    """End what is left of a run and write its ``status.json`` from the events; return it even where nothing can be
    written."""
    left = kill_marked(run_dir)
    events, table = read_events(run_dir), RankTable(run_dir / "logs")
    for event in events:
        if (rank := rank_of(event)) is not None:
            if event["kind"] == "start":  # again, after a failure: what its earlier process did is past
                table.records.pop(rank, None)
            table.hear(rank, event, agent=False)
    ranks = sorted(table.all(), key=lambda record: record.rank)
    reason += "".join(f"; rank {record.rank} was last heard of{record.where()}" for record in ranks)
    reason += f"; processes {left} could not be ended" if left else ""
    times = [event["t"] for event in events] or [time.time()]
    status: Status = {"outcome": outcome, "reason": reason, "culprit": None, "ranks": table.as_json()}
    status |= {"started_at": times[0], "ended_at": times[-1]}
    with contextlib.suppress(StorageError):  # the caller has it, and the next reader works it out again
        files.write_json(run_dir / "status.json", status)
    return status
