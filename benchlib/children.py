"""The processes that a supervisor started, and whatever they started: begun, collected and ended as one family."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchlib.launchers import Job
from benchlib.peers import NODE
from benchlib.processes import MARK, SUPERVISOR_PID, adopt_orphans, descendants, kill

TERM_S = 1.0  # between SIGTERM and SIGKILL
KILL_S = 6.0  # for killed processes to disappear


class Children:
    """``living`` are the started processes by id. All are started by the main thread: see ``die_with_parent``."""

    def __init__(self) -> None:
        adopt_orphans()
        self.living: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: list[tuple[int, int]] = []

    def start(self, job: Job, run_dir: Path, node: str = "") -> list[int]:
        """Start a job's processes, each in a session of its own with its output in ``logs/``; return their ids.

        ``node`` is what they are told about this node (``peers.NODE``).
        """
        pids = []
        for index, command in enumerate(job.commands):
            env = {
                **os.environ,
                **job.env,
                **(job.process_env[index] if job.process_env else {}),
                MARK: str(run_dir),
                NODE: node,
            }
            env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order in which the sensors count the devices
            env.pop(SUPERVISOR_PID, None)
            name = "agent" if job.agent else f"rank{index}"
            if job.remote:
                del env[MARK]  # who clears up by the mark kills at once; this agent first has to take its job back
            if job.agent:  # it knows nothing of us: a shim ties its life to ours before it becomes the agent
                command = [sys.executable, "-m", "benchlib.supervise", "--tied-to", str(os.getpid()), "--", *command]
            else:
                env[SUPERVISOR_PID] = str(os.getpid())
            base = run_dir / "logs" / name
            with base.with_suffix(".out").open("ab") as out, base.with_suffix(".err").open("ab") as err:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, start_new_session=True
                )
            self.living[process.pid] = process
            pids.append(process.pid)
        return pids

    def ended(self) -> list[tuple[int, int]]:
        """Return (id, exit code, negative for a signal) of the started processes that ended since the last call."""
        self._reap()
        ended, self._ended = self._ended, []
        return ended

    def _reap(self) -> None:
        """Collect every dead child, the adopted ones too: else they stay as zombies."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if process := self.living.pop(pid, None):
                process.returncode = os.waitstatus_to_exitcode(status)
                self._ended.append((pid, process.returncode))

    def end(self, agent_s: float | None = None) -> list[int]:
        """End the whole family, politely first; return the ids of those that remain even so.

        Agents that have a job on other machines to take back get ``agent_s`` seconds for it, with their helpers.
        """
        if agent_s is not None:
            kill((one for one in descendants() if one.pid in self.living), signal.SIGTERM)
            self._wait(agent_s)
        kill(descendants(), signal.SIGTERM)
        self._wait(TERM_S)
        end = time.monotonic() + KILL_S
        while (left := descendants()) and time.monotonic() < end:
            kill(left)
            self._wait(0.1)
        self._reap()
        return [process.pid for process in left]

    def _wait(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            self._reap()
            if not descendants():
                return
            time.sleep(0.02)
