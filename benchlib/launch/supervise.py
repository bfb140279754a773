"""The supervisor: owns the ranks of a run on this machine and ends all of them, whatever happens.

    python -m benchlib.launch.supervise RUN_DIR [--nproc N]

Its standard input is a liveness pipe: end of file means that the launching process is gone, ``q`` means stop. It
runs ``RUN_DIR/job.json`` (see ``jobs.Job``), or N local ranks. It ends the run at the first failure of a rank, on
SIGINT, SIGTERM and SIGHUP, and at the limits of ``config.json``: ``startup_timeout_s`` until every rank is at work,
``stall_timeout_s`` without a sign of life, ``wall_limit_s`` in all. It leaves ``status.json``. Exit code: 0 complete,
77 skipped, 74 nothing can be written (a full disk), 1 otherwise. It imports neither torch nor the benchmark. Linux and
macOS.

Where the job's agent starts ranks again (``restarts``), a failure ends the attempt and not the run, and a rank that hangs
is killed so that the agent sees a failure. Where the run has other nodes, their supervisors are asked for a sign of life
when ranks here fail or hang without a cause of their own.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from pathlib import Path
from typing import Any

from benchlib.core import run_folder
from benchlib.core.errors import StorageError, UserError
from benchlib.core.events import Event, EventFollower, EventWriter
from benchlib.core.files import read_json, write_json
from benchlib.core.sensors import Sensors
from benchlib.launch import diagnosis, nodes
from benchlib.launch.diagnosis import EXIT_SKIPPED, EXIT_STORAGE, RankRecord
from benchlib.launch.jobs import Job, Limits, already_executed
from benchlib.launch.launchers import local_ranks
from benchlib.launch.nodes import Lost, Node
from benchlib.launch.processes import descendants, die_with_parent, go_on_without_parent, kill, signal_name
from benchlib.launch.ranks import AgentReport, Attempts, Children, Ending, RankTable

GRACE_S = 1.0  # after the first failure, for the peers' error files
AGENT_S = 10.0  # for torchrun to leave after all its ranks are done
TICK_S = 0.1
SENSOR_S = 1.0


class Lifeline:
    """What tells a supervisor to stop: its standard input, whose other end the launching process holds, and signals.

    ``stop_reason`` is empty as long as the run may go on.
    """

    def __init__(self) -> None:
        """Install the signal handlers of this process; for its main thread."""
        self.stop_reason = ""
        self._sources = [0]
        # A dead child must end the wait in ``listen`` at once: every signal writes a byte to this pipe.
        self._wake, write = os.pipe()
        for descriptor in (self._wake, write):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        self.stop_reason = self.stop_reason or f"stopped: the supervisor received {signal_name(number)}"

    def listen(self, timeout_s: float) -> None:
        """Wait until something happens, at most ``timeout_s``."""
        for source in select.select([self._wake, *self._sources], [], [], timeout_s)[0]:
            data = b""
            with contextlib.suppress(BlockingIOError):
                data = os.read(source, 4096)
            if source == 0 and not data:
                self._sources = []
                self.stop_reason = self.stop_reason or "stopped: the launching process is gone"
            elif source == 0 and b"q" in data:
                self.stop_reason = self.stop_reason or "stopped by the user"


class Neighbours:
    """The other nodes: they can ask whether this one is there, and are asked when ranks here fail.

    ``introduction`` is what the ranks here are to tell the others about this node (``nodes.NODE``).
    """

    def __init__(self, run_dir: Path, launch: str, endpoint: str) -> None:
        """``endpoint`` is where the nodes meet; '' for a run of one node."""
        self.run_dir, self.launch, self.endpoint = run_dir, launch, endpoint
        self.introduction, self.address = launch, ""
        self._lost: list[Lost] | None = None
        self._listening: socket.socket | None = None
        if endpoint and (address := nodes.local_address(*nodes.split_endpoint(endpoint))):
            with contextlib.suppress(OSError):  # then the others cannot tell whether this node is there
                self._listening = nodes.listen(address)
                self.address = address
                self.introduction = f"{launch} {address} {self._listening.getsockname()[1]}"

    def answer(self) -> None:
        """Close the connections of nodes that asked whether this one is there."""
        if self._listening:
            nodes.hang_up(self._listening)

    def close(self) -> None:
        """Close the socket that shows that this node is there."""
        if self._listening:
            self._listening.close()

    def forget(self) -> None:
        """Forget who was lost: another attempt began."""
        self._lost = None

    def look(self, afresh: bool = False) -> list[Lost]:
        """Return the nodes of the present attempt that are not there any more.

        Who was lost at the first look stays lost; with ``afresh``, or where all were there, it is asked again.
        """
        if afresh or not self._lost:
            self._lost = nodes.lost_nodes(self._others())
        return self._lost

    def _others(self) -> list[Node]:
        return [node for node in nodes.read(self.run_dir) if node.launch != self.launch] if self.endpoint else []

    def blame(self, ending: Ending, afresh: bool = False) -> Ending:
        """Return the ending with the nodes that were lost as its cause, where some were."""
        lost = self.look(afresh)
        if lost:
            words = "; ".join(node.words() for node in lost) + self._held_store(lost) + self._own_link()
            rows = [node.as_json() for node in lost]
            reason = f"{words}; {ending.reason}" if ending.reason else words
            return dataclasses.replace(ending, reason=reason, culprit=min(lost[0].node.ranks), lost=rows)
        others = self._others()
        if not others:
            return ending
        there = ", ".join(node.words() for node in others[:4]) + (", ..." if len(others) > 4 else "")
        return dataclasses.replace(
            ending, reason=f"{ending.reason}; the cause may lie on another node, see the status of {there}"
        )

    def _own_link(self) -> str:
        name = nodes.link_down(self.address) if self.address else ""
        return f"; the link of {name} is down, here or at its other end" if name else ""

    def _held_store(self, lost: list[Lost]) -> str:
        addresses = nodes.resolve(nodes.split_endpoint(self.endpoint)[0])
        if self.address not in addresses and any(item.node.address in addresses for item in lost):
            return f"; it held the rendezvous store ({self.endpoint}), so the nodes cannot meet again without it"
        return ""


class Supervisor:
    """Holds the processes of one run. ``run`` returns the exit code."""

    def __init__(self, run_dir: Path, job: Job, config: dict[str, Any]) -> None:
        self.run_dir, self.logs, self.job = run_dir, run_dir / "logs", job
        self.limits, self.backend = Limits.of(config), str(config.get("backend", "cpu"))
        endpoint = str(config.get("rdzv_endpoint", "")) if job.agent else ""
        self.id = uuid.uuid4().hex[:16]
        self.attempts = Attempts(job.restarts)
        self.neighbours = Neighbours(run_dir, self.id, endpoint)
        self.agent = AgentReport(job, self.logs, endpoint, self.limits.startup_s)
        self.ranks = RankTable(self.logs, self.id)
        self.children = Children()
        self.failed_at: float | None = None
        self.failed_code = 0
        self.agent_due: float | None = None
        self.final: Ending | None = None  # by a failure that another attempt would not mend
        self.heard_first: float | None = None  # from when on the limits of a run on other machines count
        # Limits and durations are by the monotonic clock: the wall clock may be set while the run goes on.
        self.stall_from = 0.0
        self.started_at, self.began = time.time(), time.monotonic()
        self.over = False
        self.writer = EventWriter(run_dir, "supervisor")
        self.follower = EventFollower(run_dir)
        self.lifeline = Lifeline()

    def run(self) -> int:
        """Start the job, watch it to its end, end what is left of it and write ``status.json``."""
        try:
            self._start()
            threading.Thread(target=self._sample_sensors, daemon=True).start()
            ending = self._watch()
        except StorageError as error:
            ending = Ending("failed", str(error))
        except BaseException:
            ending = Ending("failed", f"the supervisor itself failed: {traceback.format_exc()}")
        left = self._end_all(ending)
        if left:
            ending.reason += f"; processes {left} did not go after SIGKILL (they may hang in a driver)"
        self.over = True
        ending.reason += self.attempts.used_up(ending)
        try:
            self._write_status(ending)
            self.writer.emit("ended", outcome=ending.outcome, reason=ending.reason)
            run_folder.record_files(self.run_dir)
            self.neighbours.close()
        except StorageError as error:
            with contextlib.suppress(OSError):  # the log may lie on the same full disk
                print(error, file=sys.stderr, flush=True)
            return EXIT_STORAGE
        return {"complete": 0, "skipped": EXIT_SKIPPED}.get(ending.outcome, 1)

    def _start(self) -> None:
        pids = self.children.start(self.job, self.run_dir, self.neighbours.introduction)
        if not self.job.agent:
            self.ranks.started(pids)
        limits = vars(self.limits)
        self.writer.emit(
            "launched",
            ranks=pids,
            job=self.job.name,
            supervisor=os.getpid(),
            host=self.ranks.host,
            launch=self.id,
            limits=limits,
            monotonic=time.monotonic(),
        )

    # Watching

    def _watch(self) -> Ending:
        while True:
            self.lifeline.listen(TICK_S)
            self._reap()
            self._follow()
            self.neighbours.answer()
            if not self.run_dir.is_dir():
                self.final = self.final or Ending("failed", f"{self.run_dir} was deleted or moved during the run")
            if self.job.restarts:  # as long as the agent lives, its log alone reports a killed rank
                self.ranks.ended(self.agent.new_exits())
            ending = self._stopped() or self.final or self._over() or self._at_limit()
            if ending and not self._again(ending):
                return ending

    def _reap(self) -> None:
        for pid, code in self.children.ended():
            record = self.ranks.processes.get(pid)
            if record:
                record.returncode, record.ended_at = code, time.time()
            rank, name = record.rank if record else None, signal_name(-code) if code < 0 else None
            self.writer.emit("exited", rank=rank, pid=pid, returncode=code, signal=name)
            if code:
                self.failed_at, self.failed_code = self.failed_at or time.monotonic(), self.failed_code or code

    def _follow(self) -> None:
        for event in self.follower.poll():
            source = str(event["source"])
            if source.startswith("rank") and source[4:].isdecimal():
                try:
                    self._hear(int(source[4:]), event)
                except (KeyError, TypeError, ValueError):
                    print(f"skipped a malformed event: {json.dumps(event)[:500]}", file=sys.stderr, flush=True)

    def _hear(self, rank: int, event: Event) -> None:
        if event["kind"] == "start" and self.job.agent and self.attempts.begins(event, self.ranks.records.get(rank)):
            self._begin_again()
        record = self.ranks.hear(rank, event, self.job.agent)
        self.heard_first = self.heard_first or record.heard_at
        if event["kind"] != "error" or not record.error:
            return
        if record.echoes:
            self.ranks.take_in_dead()
            self.neighbours.look()  # now: those who only echo the failure as well will soon be gone
        if self.job.restarts and diagnosis.no_restart_helps(record.error):
            self.final = self._failed()

    # Attempts

    def _again(self, ending: Ending) -> bool:
        """Whether the agent will start the ranks again after this; a rank that hangs is killed, so that it does."""
        if ending.outcome not in ("failed", "stalled", "timeout") or not self.attempts.left or self.attempts.ending:
            return False
        culprit = None if ending.culprit is None else self.ranks.records.get(ending.culprit)
        if self.final or not self.children.living or self._wall_is_reached():
            return False
        if ending.outcome != "failed":
            here = [record for record in self.ranks.here() if record.alive]
            if not here:
                return False  # the agent itself is late
            chosen = culprit if culprit in here else here[0]
            kill(process for process in descendants() if process.pid == chosen.pid)
        self.attempts.fail(ending)
        self.writer.emit("attempt_failed", attempt=len(self.attempts.past) + 1, **dataclasses.asdict(ending))
        return True

    def _begin_again(self) -> None:
        if self.attempts.ending is None and self.ranks.failed_here():
            self.attempts.fail(self._failed())
        row = self.attempts.close(self.ranks.records)
        self.ranks.records = {}
        self.agent_due, self.stall_from = None, time.monotonic()
        self.neighbours.forget()
        facts = {name: row[name] for name in ("outcome", "reason", "culprit", "lost")}
        self.writer.emit("restarted", attempt=len(self.attempts.past) + 1, **facts)

    # Judging

    def _stopped(self) -> Ending | None:
        return Ending("stopped", self.lifeline.stop_reason) if self.lifeline.stop_reason else None

    def _over(self) -> Ending | None:
        now = time.monotonic()
        if self.failed_at and (now - self.failed_at > GRACE_S or not self.children.living):
            return self._failed()
        if not self.children.living:
            return Ending("complete", "every rank ended with exit code 0")
        return self._agent_over(now) if self.job.agent else None

    def _agent_over(self, now: float) -> Ending | None:
        """Decide without the agent where its ranks have ended and it stays.

        The agent of a run on other machines has results to bring back: only failed ranks are a reason to go without it.
        """
        if self.attempts.ending:  # torchrun itself gives up after the start-up limit
            return self._not_again() if now > self.attempts.failed_at + self.limits.startup_s + AGENT_S else None
        remote = self.job.remote
        here = self.ranks.all() if remote else self.ranks.here()
        failed = any(record.returncode for record in here)
        ended = not remote and len(here) >= self.job.ranks and not any(record.alive for record in here)
        if failed or ended:
            agent_s = AGENT_S + self.job.stop_s if remote else AGENT_S
            self.agent_due = self.agent_due or now + (GRACE_S if failed and self.attempts.left else agent_s)
            if now > self.agent_due:
                if failed:
                    return self._failed()
                return Ending("complete", f"every rank ended with exit code 0; {self.agent.name} had to be ended")
        return None

    def _failed(self) -> Ending:
        self.ranks.read_errors(self.agent)
        if self.attempts.ending:
            return self._not_again()
        records = self.ranks.all()
        culprit = diagnosis.first_failure(records)
        if culprit is None:
            return self.neighbours.blame(Ending("failed", self.agent.exit_reason(self.failed_code)))
        if culprit.error and culprit.error.get("exit_code") == EXIT_SKIPPED:
            return Ending("skipped", str(culprit.error.get("message", "")), culprit.rank)
        ending = Ending("failed", diagnosis.failure_text(culprit, records), culprit.rank)
        if not culprit.echoes:
            return ending
        if self.failed_code and (why := self.agent.reason()):
            ending.reason += f"; {why}"
        return self.neighbours.blame(ending)

    def _not_again(self) -> Ending:
        """Return the end of a run whose last failure was to be followed by another attempt, and was not."""
        ending = self.attempts.ending
        assert ending is not None
        why = f"they were not there after {self.limits.startup_s:.0f} s"
        if self.failed_code:
            why = self.agent.exit_reason(self.failed_code)
        missing = ", ".join(f"node {node['host']} ({node['address']})" for node in ending.lost)
        instead = f"; no node took the place of {missing}" if missing else ""
        reason = f"{ending.reason}; the ranks could not be started again: {why}{instead}"
        return dataclasses.replace(ending, outcome="failed", reason=reason)

    def _at_limit(self) -> Ending | None:
        if self.failed_at or (self.agent_due and not self.attempts.ending):
            return None
        now, records = time.monotonic(), self.ranks.all()
        if self.job.remote and self.heard_first is None:
            return self._queued(now)
        if self._wall_is_reached():
            self.ranks.dump_stacks()
            where = "; ".join(f"rank {record.rank} was at work{record.where()}" for record in records if record.alive)
            return Ending("timeout", f"the run was ended after {self.limits.wall_s:.0f} s (wall limit); {where}")
        if self.attempts.ending:
            return None
        late = [record for record in records if not record.at_work and record.alive]
        if late or len(self.ranks.here()) < self.job.ranks:
            self.stall_from = now
            began = max(self._began(), self.attempts.began)
            return self._late(late, records) if now - began > self.limits.startup_s > 0 else None
        limit = self.limits.stall_s
        quiet = [
            record for record in records if record.alive and now - max(record.heard_at, self.stall_from) > limit > 0
        ]
        due = [record for record in quiet if now - record.waited_at > limit]
        return self._stalled(due, quiet, now) if due else None

    def _began(self) -> float:
        return self.heard_first if self.job.remote and self.heard_first else self.began

    def _wall_is_reached(self) -> bool:
        return bool(self.limits.wall_s) and time.monotonic() - self._began() > self.limits.wall_s

    def _queued(self, now: float) -> Ending | None:
        limit = self.job.queue_s
        if not 0 < limit < now - self.began:
            return None
        text = f"no rank was started in {limit:.0f} s (queue_s of the cluster's profile); see logs/agent.out"
        return Ending("timeout", text + self.agent.last_line())

    def _late(self, late: list[RankRecord], records: list[RankRecord]) -> Ending:
        if not late:
            text = f"only {len(records)} of {self.job.ranks} ranks were started in {self.limits.startup_s:.0f} s (start-up limit); see logs/agent.err"
            return Ending("timeout", text + self.agent.meeting_hint())
        self.ranks.dump_stacks()
        culprit = diagnosis.hanging(late) or late[0]
        return Ending("timeout", diagnosis.late_text(culprit, self.limits.startup_s), culprit.rank)

    def _stalled(self, due: list[RankRecord], quiet: list[RankRecord], now: float) -> Ending | None:
        """Decide whether ranks hang that were quiet for the whole limit, or only wait for one that is still at work.

        Who is seen waiting has the whole limit again: it may go on the moment after, and needs time to say so.
        """
        records = self.ranks.all()
        self.ranks.dump_stacks()
        lively = [record for record in records if record.alive and record not in quiet]
        if lively and all(diagnosis.is_waiting(diagnosis.main_stack(record.stacks or "")) for record in due):
            for record in due:
                record.waited_at = now
            return None
        culprit = diagnosis.hanging(due if lively else quiet) or due[0]
        self.writer.emit("stall", ranks=[record.rank for record in quiet], culprit=culprit.rank)
        silent_s = now - max(culprit.heard_at, self.began)
        ending = Ending("stalled", diagnosis.hang_text(culprit, records, silent_s, "stall limit"), culprit.rank)
        waits = diagnosis.is_waiting(diagnosis.main_stack(culprit.stacks or ""))
        return self.neighbours.blame(ending, afresh=True) if waits else ending

    # Sensors

    def _sample_sensors(self) -> None:
        """Run in a thread of its own: a driver that hangs in a query must not stop the supervision."""
        sensors = Sensors([], backend=self.backend, devices=self.job.ranks)
        if self.job.remote:  # what this machine's sensors say is not what the run used
            reason = "the ranks are on other machines: their sensors are not read"
            self.writer.emit("sensors", availability=dict.fromkeys(sensors.read(), reason))
            return
        self.writer.emit("sensors", availability=sensors.availability())
        while not self.over:
            sensors.pids = [record.pid for record in self.ranks.here() if record.pid and record.alive]
            with contextlib.suppress(StorageError):  # the ranks write as well, and say so
                self.writer.emit("sensor", **sensors.read())
            time.sleep(SENSOR_S)

    # Ending

    def _end_all(self, ending: Ending) -> list[int]:
        """End every process of the run; return the ids of those that remain."""
        try:  # what is still to be written down must not keep anything alive, on a full disk say
            with contextlib.suppress(StorageError):
                self.writer.emit("stop", reason=ending.reason)
            living = [record for record in self.ranks.all() if record.alive]
            if living and ending.outcome == "failed":
                self.ranks.dump_stacks()
            for record in living:
                record.ended_by_us = True
        finally:
            left = self.children.end(self.job.stop_s if self.job.remote else None)
        with contextlib.suppress(StorageError):
            self._reap()
        self._follow()
        self.ranks.read_errors(self.agent)
        return left

    def _write_status(self, ending: Ending) -> None:
        times = {"started_at": self.started_at, "ended_at": self.started_at + time.monotonic() - self.began}
        again = {"restarts": len(self.attempts.past), "earlier_attempts": self.attempts.past}
        write_json(
            self.run_dir / "status.json",
            {**dataclasses.asdict(ending), "ranks": self.ranks.as_json(), **times, **again},
        )


def main(argv: list[str] | None = None) -> int:
    """Run the command line of the module's docstring."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--tied-to"]:  # the death signal outlives exec, so the agent inherits it
        die_with_parent(int(argv[1]))
        os.execvp(argv[3], argv[3:])
    parser = argparse.ArgumentParser(
        prog="python -m benchlib.launch.supervise", description="Own the ranks of a run and end them all."
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--claim", type=int, help="descriptor by which the launching process claimed RUN_DIR")
    parser.add_argument("--nproc", type=int, default=1, help="local ranks, where RUN_DIR has no job.json")
    options = parser.parse_args(argv)
    run_dir = options.run_dir.resolve()
    go_on_without_parent()
    try:
        run_folder.claim(run_dir) if options.claim is None else os.set_inheritable(options.claim, False)
        return _supervise(run_dir, options.nproc)
    except UserError as error:
        with contextlib.suppress(OSError):
            print(error, file=sys.stderr, flush=True)
        return EXIT_STORAGE if isinstance(error, StorageError) else 2


def _supervise(run_dir: Path, nproc: int) -> int:
    if (run_dir / "events-supervisor.jsonl").exists():
        print(already_executed(run_dir), file=sys.stderr)
        return 2
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    config = read_json(run_dir / "config.json")
    described = run_dir / "job.json"
    job = Job(**read_json(described)) if described.exists() else local_ranks(nproc, run_dir)
    return Supervisor(run_dir, job, config).run()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # not to wait for a sensor thread that hangs in a driver
