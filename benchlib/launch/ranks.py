"""The ranks of a run as their supervisor sees them: its processes, the agent's log, what each rank did, attempts."""

import contextlib
import dataclasses
import functools
import os
import platform
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchlib.core.events import Event
from benchlib.launch import diagnosis
from benchlib.launch.diagnosis import RankRecord
from benchlib.launch.jobs import Job
from benchlib.launch.processes import (
    MARK,
    SUPERVISOR_PID,
    adopt_orphans,
    descendants,
    die_with_parent,
    kill,
    signal_name,
)

TERM_S = 1.0  # between SIGTERM and SIGKILL
KILL_S = 6.0  # for killed processes to disappear
STACKS_S = 1.0  # that the ranks get to write their stacks
AGENT_NAMES = {"torchrun": "torchrun's agent", "mpirun": "mpirun"}
BROKEN = ("failed", "timeout", "stalled")  # outcomes of a run or an attempt
# What pods and job scripts export to say where ranks meet and which one this is. It is of another job: the ranks of this one
# get their own, and would wait there for ranks that never come.
STRAY = re.compile(r"(MASTER_(ADDR|PORT)|(LOCAL_)?(RANK|WORLD_SIZE)|(GROUP|NODE|ROLE)_.*|TORCHELASTIC_.*)$")
REGROUPED = "regrouped"  # an attempt that ended because a node came or went; torchrun does not count it as a failure


class Children:
    """The processes that a supervisor started, and whatever they started: ended as one family.

    ``living`` are the started processes by id, ``failure`` is the exit code of the first that failed, 0 while none
    did. All are started by the main thread: see ``die_with_parent``.
    """

    def __init__(self) -> None:
        adopt_orphans()
        self.living: dict[int, subprocess.Popen[bytes]] = {}
        self.failure = 0
        self._ended: list[tuple[int, int]] = []

    def start(self, job: Job, run_dir: Path) -> list[int]:
        """Start a job's processes, each in a session of its own with its output in ``logs/``; return their ids."""
        inherited = {name: value for name, value in os.environ.items() if not STRAY.match(name)}
        env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **inherited, **job.env, MARK: str(run_dir)}
        # In the child, before it becomes the program: the death signal outlives exec. There is one thread so far.
        tied = functools.partial(die_with_parent, os.getpid())
        more: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True, "preexec_fn": tied}
        env.pop(SUPERVISOR_PID, None)
        if job.remote:
            del env[MARK]  # marked processes may be killed at once; this agent first has to take its job back
        for index in range(1 if job.agent else job.ranks):
            own = {"RANK": str(index), "LOCAL_RANK": str(index), SUPERVISOR_PID: str(os.getpid())}
            base = run_dir / "logs" / ("agent" if job.agent else f"rank{index}")
            with base.with_suffix(".out").open("ab") as out, base.with_suffix(".err").open("ab") as err:
                variables = env if job.agent else env | own
                process = subprocess.Popen(job.command, stdout=out, stderr=err, env=variables, **more)
            self.living[process.pid] = process
        return list(self.living)

    def ended(self) -> list[tuple[int, int]]:
        """Return (id, exit code, negative for a signal) of the started processes that ended since the last call."""
        self._reap()
        ended, self._ended = self._ended, []
        return ended

    def _reap(self) -> bool:
        """Collect every dead child, the adopted ones too: else they stay as zombies. Return whether any lives.

        So the supervisor starts no other process: its exit code would be lost here.
        """
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return True
            if process := self.living.pop(pid, None):
                process.returncode = os.waitstatus_to_exitcode(status)
                self.failure = self.failure or process.returncode
                self._ended.append((pid, process.returncode))

    def end(self, agent_s: float | None = None) -> list[int]:
        """End the whole family, politely first; return the ids of those that remain even so.

        An agent that has a job on other machines to take back gets ``agent_s`` seconds for it.
        """
        if agent_s is not None:
            kill((process for process in descendants() if process.pid in self.living), signal.SIGTERM)
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
        while time.monotonic() < end and self._reap():  # orphans are adopted: who has no child has no descendant
            time.sleep(0.02)


class AgentReport:
    """The log of an agent, ``logs/agent.err``: of torchrun, mpirun, a cluster's client."""

    def __init__(self, job: Job, logs: Path) -> None:
        self.job, self.path = job, logs / "agent.err"
        self.name = AGENT_NAMES.get(job.name, f"the agent of launcher {job.name}")

    def text(self) -> str:
        return self.path.read_text("utf-8", "replace") if self.job.agent and self.path.exists() else ""

    def reason(self) -> str:
        """Return why the nodes cannot meet; '' where the agent left for another reason."""
        job = self.job
        return diagnosis.agent_reason(self.text(), job.endpoint, job.startup_s) if job.endpoint else ""

    def exit_reason(self, code: int) -> str:
        """Return why it left with an exit code (negative: a signal), as far as that is known."""
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"left with exit code {code} and named no rank"
        return self.reason() or f"{self.name} {how}; see logs/agent.err{self.last_line()}"

    def last_line(self) -> str:
        """Return the last line of the agent of a run elsewhere: the cluster's reason, where no rank could give one."""
        lines = [line.strip() for line in self.text().split("\n") if line.strip()] if self.job.remote else []
        return f": {lines[-1][:500]}" if lines else ""


class RankTable:
    """The ranks of the present attempt: from their events, from the agent's log, from stacks."""

    def __init__(self, logs: Path) -> None:
        self.logs, self.host = logs, platform.node()
        self.records: dict[int, RankRecord] = {}

    def all(self) -> list[RankRecord]:
        return list(self.records.values())

    def here(self) -> list[RankRecord]:
        return [record for record in self.all() if record.host == self.host]

    def started(self, pids: list[int]) -> None:
        for rank, pid in enumerate(pids):
            self.records[rank] = RankRecord(rank, pid, self.host)

    def reaped(self, pid: int, code: int) -> int | None:
        """Take in the end of a process that the supervisor started; return its rank, None for an agent."""
        self.ended({pid: code})
        return next((record.rank for record in self.here() if record.pid == pid), None)

    def hear(self, rank: int, event: Event, agent: bool) -> RankRecord:
        """Take in an event of a rank; ``agent``: an agent reaps it, so its events have to tell its end."""
        record = self.records.setdefault(rank, RankRecord(rank))
        record.hear(event)
        record.heard_at = time.monotonic()  # by our clock: another node's may differ
        if agent and record.alive:
            if event["kind"] == "phase" and event.get("name") == "done":
                record.end(0, event["t"])
            elif event["kind"] == "error":
                record.end(int(event.get("exit_code", 1)), event["t"])
        return record

    def ended(self, codes: dict[int, int]) -> None:
        for record in self.here():
            if record.alive and record.pid in codes:
                record.end(codes[record.pid])

    def collect_zombies(self) -> None:
        """Take in ranks of this node that died without an error and that their agent has not seen yet (Linux).

        Of two ranks that end between two looks, torchrun names the one with an error: the victim instead of the cause.
        """
        for record in self.here():
            if record.alive and record.pid:
                with contextlib.suppress(OSError):  # no such process, or no such file system
                    fields = Path(f"/proc/{record.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                    if fields[0] == "Z":
                        self.ended({record.pid: os.waitstatus_to_exitcode(int(fields[-1]))})

    def hear_agent(self, log: str) -> None:
        """Take in the ranks that failed by an agent's log."""
        for rank, code, pid, root in diagnosis.agent_failures(log):
            record = self.records.setdefault(rank, RankRecord(rank, pid))
            if pid and record.pid not in (None, pid):
                continue
            record.end(code, record.ended_at)
            record.ended_by_us = record.ended_by_us or not (root or record.error)  # torchrun ends the others

    def dump_stacks(self) -> None:
        """Keep the newest Python stacks of all living ranks of this machine; '' of one that does not answer.

        That has no handler yet, or is stopped. The worker makes the file after it has installed the handler; without one the
        signal would end the process, so it is not sent then.
        """
        family = {process.pid for process in descendants()}
        asked = [record for record in self.here() if record.alive and record.pid in family]
        paths = [self.logs / f"rank{record.rank}.stacks" for record in asked]

        def texts() -> list[str]:
            return [path.read_text("utf-8", "replace") if path.exists() else "" for path in paths]

        earlier = now = texts()
        for record, path in zip(asked, paths, strict=True):
            with contextlib.suppress(OSError):
                if path.exists():
                    os.kill(record.pid or 0, signal.SIGUSR1)
        end, answered = time.monotonic() + STACKS_S, False
        while not answered and time.monotonic() < end:
            time.sleep(0.05)
            before, now = now, texts()
            answered = now == before and all(len(new) > len(old) for new, old in zip(now, earlier, strict=True))
        for record, new, old in zip(asked, now, earlier, strict=True):
            record.stacks = new[len(old) :]

    def as_json(self) -> list[dict[str, Any]]:
        return [self.records[rank].as_json() for rank in sorted(self.records)]


def rank_of(event: Event) -> int | None:
    number = str(event["source"]).removeprefix("rank")
    return int(number) if number.isdecimal() and number != event["source"] else None


@dataclass
class Ending:
    """How a run or an attempt ended. ``outcome`` is complete, stopped, skipped, or one of ``BROKEN``."""

    outcome: str
    reason: str = ""
    culprit: int | None = None


class Attempts:
    """The attempts so far: torchrun's agent may start the ranks again after a failure.

    ``ending`` is how the present one failed while its successor is awaited, else None. ``past`` are the rows of earlier
    attempts in ``status.json``.
    """

    def __init__(self, restarts: int) -> None:
        self.restarts = restarts
        self.past: list[dict[str, Any]] = []
        self.ending: Ending | None = None
        self._key, self._began_at = "", time.time()

    @property
    def left(self) -> bool:
        """Whether the ranks will be started again after a failure; a node that came or went costs no restart."""
        return sum(row["outcome"] != REGROUPED for row in self.past) < self.restarts

    def begins(self, event: Event, record: RankRecord | None) -> bool:
        """Whether a rank's start belongs to a new attempt; ``record`` is that of the rank in the present one."""
        key = str(event.get("attempt", ""))
        again = record is not None and record.pid not in (None, event.get("pid"))
        new = bool(self._key) and (again or key != self._key)
        self._key = key
        return new

    def close(self, ranks: RankTable) -> dict[str, Any]:
        ending = self.ending or Ending(REGROUPED, "torchrun started the ranks again because a node came or went")
        for record in ranks.all():
            record.ended_by_us = record.ended_by_us or (record.returncode is None and record.error is None)
        now, facts = time.time(), {"attempt": len(self.past) + 1, **dataclasses.asdict(ending)}
        self.past.append({**facts, "ranks": ranks.as_json(), "started_at": self._began_at, "ended_at": now})
        ranks.records, self.ending, self._began_at = {}, None, now
        return self.past[-1]
