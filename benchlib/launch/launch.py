"""Start a run's ranks under a supervisor, follow its events, and leave no process behind. No torch.

    status = execute(run_dir, on_event=print)

The supervisor lives in a session of its own and holds one end of a pipe: when this process goes, however it goes, the
supervisor ends the ranks. When the supervisor goes, the ranks die with it, and this side clears up what they left.
"""

import contextlib
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from benchlib.core import files, run_folder
from benchlib.core.errors import RunBroken, StorageError, UserError
from benchlib.core.events import Event, EventFollower, read_events
from benchlib.launch.diagnosis import EXIT_STORAGE, RankRecord
from benchlib.launch.jobs import Job, Limits, already_executed
from benchlib.launch.launchers import LAUNCHERS
from benchlib.launch.processes import MARK, free_shared_memory, kill_marked, signal_name

Status = dict[str, Any]

SUPERVISOR = "benchlib.launch.supervise"
POLL_S = 0.1
TICK_S = 1.0
STOP_S = 14.0  # the supervisor needs at most its stages' sum
BROKEN = ("failed", "timeout", "stalled")


class RankFailed(RunBroken):
    """A run was ended because of a rank. ``status`` is the content of ``status.json``.

    Its text, and what a notebook shows, is the reason and the failing rank's own traceback: the frames of the
    launching side say nothing about the cause.
    """

    def __init__(self, status: Status) -> None:
        self.status = status
        super().__init__("\n".join(self._lines()))

    def _lines(self) -> list[str]:
        lines = [str(self.status["reason"])]
        for row in self.status["ranks"]:
            if row["rank"] != self.status["culprit"]:
                continue
            if row["error"] and row["error"]["traceback"]:
                lines += ["", f"Traceback of rank {row['rank']}:", *row["error"]["traceback"].rstrip().splitlines()]
            elif row["stacks"]:
                lines += [
                    "",
                    f"Python stacks of rank {row['rank']} when it was ended:",
                    *row["stacks"].rstrip().splitlines(),
                ]
        return lines

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {line}" if not index else line for index, line in enumerate(self._lines())]


class Launch:
    """One run in progress. ``stop`` may be called from any thread; leaving a ``with`` block stops the run."""

    def __init__(self, run_dir: Path | str, benchmark: str = "") -> None:
        """``benchmark``: ``module:function`` to run instead of the benchmark that the config names."""
        self.run_dir = Path(run_dir).resolve()
        self.benchmark = benchmark
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stop_s = STOP_S
        self._status: Status | None = None

    def start(self) -> "Launch":
        """Start the supervisor, which starts the ranks.

        Raises ``UserError`` where the folder has no config, is in use or was executed before: old events and ports would
        be taken for new ones.
        """
        if self._process:
            raise UserError(already_executed(self.run_dir))
        held = run_folder.claim(self.run_dir)
        try:
            self._start(held)
        except OSError as error:
            raise files.not_written(self.run_dir, error) from error
        finally:
            os.close(held)  # the supervisor has inherited the claim, and with its end the folder is free
        return self

    def _start(self, held: int) -> None:
        if (self.run_dir / "status.json").exists() or any(self.run_dir.glob("events-*.jsonl")):
            raise UserError(already_executed(self.run_dir))
        job = self._job()
        if lack := job.lacks():
            raise UserError(f"launcher {job.name}: {lack}")
        self._stop_s = STOP_S + job.stop_s
        logs = self.run_dir / "logs"
        logs.mkdir(exist_ok=True)
        for name, content in job.files.items():
            files.write_text(self.run_dir / name, content)
        files.write_json(self.run_dir / "job.json", job.as_json())
        env = {**os.environ, MARK: str(self.run_dir), "PYTHONUNBUFFERED": "1"}
        package = Path(__file__).resolve().parents[2]
        if package.name not in ("site-packages", "dist-packages"):  # a checkout: found from any working folder
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package), env.get("PYTHONPATH")]))
        command = [sys.executable, "-m", SUPERVISOR, str(self.run_dir), "--claim", str(held)]
        with (logs / "supervisor.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
                pass_fds=[held],
            )

    def _job(self) -> Job:
        if self.benchmark:
            from types import SimpleNamespace

            values = files.read_json(self.run_dir / "config.json")
            defaults = {
                "launcher": "local",
                "nproc": 1,
                "nnodes": 1,
                "rdzv_endpoint": "",
                "max_restarts": 0,
                "startup_timeout_s": 120.0,
                "benchmark": self.benchmark,
                "backend": "cpu",
                "collective": "",
                "cluster": "",
                "hard_limit_s": Limits.of(values).wall_s,
            }
            config: Any = SimpleNamespace(**{**defaults, **values})
        else:
            from benchlib.config.schema import load_config

            config = load_config(self.run_dir)
        return LAUNCHERS[config.launcher](config, self.run_dir, self.benchmark)

    @property
    def pid(self) -> int | None:
        """The supervisor's process id."""
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        """Whether the supervisor is at work."""
        return self._process is not None and self._process.poll() is None

    def events(self) -> Iterator[Event]:
        """Yield the events of all writers until the run has ended, and a ``tick`` in each second without one.

        Closing the iterator early stops the run.
        """
        follower, last = EventFollower(self.run_dir), time.monotonic()
        try:
            while True:
                running = self.running  # asked before reading, so that the last events are not missed
                self._continue()
                new = follower.poll()
                yield from new
                if not running:
                    break
                if new or time.monotonic() - last >= TICK_S:
                    last = time.monotonic()
                    if not new:
                        yield {"t": time.time(), "source": "launch", "kind": "tick"}
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
        self._continue()
        with self._lock:
            self._send_stop(process.stdin)
        try:
            process.wait(self._stop_s)
        except subprocess.TimeoutExpired:
            process.kill()
        return self.wait()

    def _continue(self) -> None:
        """Let the supervisor go on if it was stopped (SIGSTOP): it would keep no limit, and end neither the ranks nor itself."""
        if self._process:
            self._process.send_signal(signal.SIGCONT)

    @staticmethod
    def _send_stop(pipe: IO[bytes] | None) -> None:
        if pipe is not None and not pipe.closed:
            with contextlib.suppress(OSError):
                pipe.write(b"q")
                pipe.flush()
            with contextlib.suppress(OSError):
                pipe.close()

    def wait(self) -> Status:
        """Wait for the end of the run and return its status."""
        if self._process is None:
            raise UserError("the run was not started: call start() first")
        self._process.wait()
        with self._lock:
            self._send_stop(self._process.stdin)
            if self._status is None:
                self._status = self._final_status()
        return self._status

    def _final_status(self) -> Status:
        assert self._process is not None
        if (self.run_dir / "status.json").exists():
            return files.read_json(self.run_dir / "status.json")  # type: ignore[no-any-return]
        code = self._process.returncode
        if code == EXIT_STORAGE:
            return write_lost(self.run_dir, f"{self.run_dir} cannot be written: the disk is full or read-only")
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        log = (self.run_dir / "logs" / "supervisor.log").read_text(errors="replace").strip()
        return write_lost(
            self.run_dir,
            f"the supervisor {how} before the run was over; its ranks were ended" + (f"\n{log[-2000:]}" if log else ""),
        )

    def raise_for_status(self) -> None:
        """Raise ``RankFailed`` unless the run was complete, skipped or stopped."""
        status = self.wait()
        if status["outcome"] in BROKEN:
            raise RankFailed(status)

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_: object) -> None:
        if self.running:
            self.stop()


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


def settle(run_dir: Path | str) -> dict[str, Any] | None:
    """Return the status of a run; for one whose supervisor died without writing it, end its ranks and write it from
    the events.

    None while the run is going on, and for a folder in which no run was started, or one on another machine.
    """
    path = Path(run_dir).resolve()
    if (path / "status.json").exists():
        return files.read_json(path / "status.json")  # type: ignore[no-any-return]
    launched = read_events(path, {"launched"})
    if not launched or launched[-1].get("host") != platform.node() or _supervisor_lives(path, launched[-1]):
        return None
    return write_lost(path, "the run was cut off: its supervisor is gone and wrote no status")


def continue_supervisor(run_dir: Path | str) -> None:
    """Let the supervisor of a run go on if it was stopped (SIGSTOP): then it sees that its launching process is gone, and ends."""
    path = Path(run_dir).resolve()
    launched = read_events(path, {"launched"})
    if launched and launched[-1].get("host") == platform.node() and _supervisor_lives(path, launched[-1]):
        with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
            os.kill(int(launched[-1]["supervisor"]), signal.SIGCONT)


def write_stopped(run_dir: Path, started_at: float) -> None:
    """Write the ``status.json`` of a run that was interrupted before its ranks were started."""
    reason = "stopped by the user before a rank was started"
    status: Status = {"outcome": "stopped", "reason": reason, "culprit": None, "ranks": []}
    files.write_json(run_dir / "status.json", {**status, "started_at": started_at, "ended_at": time.time()})


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


def _supervisor_lives(run_dir: Path, launched: Event) -> bool:
    """Whether the supervisor of a launch lives: by the claim on the folder, else by its process id."""
    running = run_folder.claimed(run_dir)
    pid = launched.get("supervisor")
    if running is not None or not isinstance(pid, int):
        return bool(running)
    import psutil

    try:  # another process may have got its number, and when it began no clock says that may be set meanwhile
        return {SUPERVISOR, str(run_dir)} <= set(psutil.Process(pid).cmdline())
    except (psutil.Error, ValueError, OverflowError):
        return False


def write_lost(run_dir: Path, reason: str) -> dict[str, Any]:
    """End what is left of a run and write its ``status.json`` from the events; return it even where nothing can be
    written."""
    left = kill_marked(run_dir)
    if not left:
        free_shared_memory(run_dir)
    events = read_events(run_dir)
    records: dict[int, RankRecord] = {}
    for event in events:
        source = event["source"]
        if source.startswith("rank") and source[4:].isdecimal():
            rank = int(source[4:])
            if event["kind"] == "start":  # again, after a failure: what its earlier process did is past
                records[rank] = RankRecord(rank)
            with contextlib.suppress(KeyError, TypeError, ValueError):  # a foreign line
                records.setdefault(rank, RankRecord(rank)).hear(event)
    for record in records.values():
        error = run_dir / "logs" / f"rank{record.rank}.error.json"
        with contextlib.suppress(UserError):
            record.error = files.read_object(error, {"type": str, "message": str, "traceback": str})
    where = "; ".join(f"rank {rank} was last heard of{records[rank].where()}" for rank in sorted(records))
    reason += (f"; {where}" if where else "") + (f"; processes {left} could not be ended" if left else "")
    times = [event["t"] for event in events] or [time.time()]
    status: dict[str, Any] = {
        "outcome": "failed", "reason": reason, "culprit": None, "ranks": [records[rank].as_json() for rank in sorted(records)],
        "started_at": times[0], "ended_at": times[-1],
    }  # fmt: skip
    with contextlib.suppress(StorageError):  # the caller has it, and the next reader works it out again
        files.write_json(run_dir / "status.json", status)
    return status
