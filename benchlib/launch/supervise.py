"""The supervisor: owns the ranks of a run on this machine and ends all of them, whatever happens.

    python -m benchlib.launch.supervise RUN_DIR [CLAIM]

Its standard input is a liveness pipe: end of file means that the launching process is gone, ``q`` means stop. It runs
``RUN_DIR/job.json`` (see ``jobs.Job``). It ends the run at the first failure of a rank, on SIGINT, SIGTERM and
SIGHUP, and at the limits of the job. It leaves ``status.json``. Exit code: 0 complete, 77 skipped, 74 nothing can be
written (a full disk), 1 otherwise. It imports neither torch nor the benchmark. Linux and macOS.

Where the job's agent starts ranks again (``restarts``), a failure ends the attempt and not the run, and a rank that
hangs is killed so that the agent sees a failure.
"""

import contextlib
import dataclasses
import math
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from benchlib.core import run_folder
from benchlib.core.errors import StorageError, UserError
from benchlib.core.events import Event, EventFollower, EventWriter, Moment
from benchlib.core.files import read_json, write_json
from benchlib.core.sensors import Sensors
from benchlib.core.text import shortened
from benchlib.launch import diagnosis, nodes
from benchlib.launch.diagnosis import EXIT_SKIPPED, EXIT_STORAGE
from benchlib.launch.jobs import Job
from benchlib.launch.processes import descendants, kill, memory_kills, signal_name
from benchlib.launch.ranks import BROKEN, AgentReport, Attempts, Children, Ending, RankTable, rank_of

GRACE_S = 1.0  # after the first failure, for what the peers say
AGENT_S = 10.0  # for torchrun to leave after all its ranks are done
TICK_S = 0.1
SENSOR_S = 1.0


class State(Enum):
    """Where a run stands: which limit counts now, and what it means when nothing happens until then."""

    QUEUED = "no rank of a job on other machines was heard yet"
    STARTING = "not every rank is at work yet"
    WORKING = "every rank is at work: who is silent for too long hangs"
    FAILING = "a process that the supervisor started failed: the others get a moment to say why"
    LEAVING = "a rank of an agent failed, or all have ended: the agent gets a moment to leave"
    AGAIN = "an attempt failed: the agent gets time to start the ranks again"
    OVER = "the run has ended"


UNDER_WAY = (State.STARTING, State.WORKING)


class Supervisor:
    """Holds the processes of one run. ``run`` returns the exit code. ``stop_reason`` is '' as long as the run may go on."""

    def __init__(self, run_dir: Path, job: Job) -> None:
        self.run_dir, self.job = run_dir, job
        self.attempts = Attempts(job.restarts)
        self.agent = AgentReport(job, run_dir / "logs")
        self.ranks = RankTable(run_dir / "logs")
        self.children = Children()
        # Limits and durations are by the monotonic clock: the wall clock may be set while the run goes on.
        self.launched = Moment.now()
        self.state, self.since = State.QUEUED if job.remote else State.STARTING, self.launched.monotonic
        self.began = self.since  # from when on the wall limit counts
        self.writer = EventWriter(run_dir, "supervisor")
        self.follower = EventFollower(run_dir)
        self.stop_reason = ""
        self.memory_kills = memory_kills()

    def run(self) -> int:
        """Start the job, watch it to its end, end what is left of it and write ``status.json``; for the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        try:
            self._start()
            threading.Thread(target=self._sample_sensors, daemon=True).start()
            ending = self._watch()
        except StorageError as error:
            ending = Ending("failed", str(error))
        except BaseException:
            ending = Ending("failed", f"the supervisor itself failed: {traceback.format_exc()}")
        if left := self._end_all(ending):
            ending.reason += f"; processes {left} did not go after SIGKILL (they may hang in a driver)"
        self.state = State.OVER
        try:
            times = {"started_at": self.launched.wall, "ended_at": self.launched.wall + self.launched.since()}
            again = {"restarts": len(self.attempts.past), "earlier_attempts": self.attempts.past}
            rows = {**dataclasses.asdict(ending), "ranks": self.ranks.as_json()}
            write_json(self.run_dir / "status.json", {**rows, **times, **again})
            self.writer.emit("ended", outcome=ending.outcome, reason=ending.reason)
            run_folder.record_files(self.run_dir)
        except StorageError as error:
            with contextlib.suppress(OSError):  # the log may lie on the same full disk
                print(error, file=sys.stderr, flush=True)
            return EXIT_STORAGE
        return {"complete": 0, "skipped": EXIT_SKIPPED}.get(ending.outcome, 1)

    def _start(self) -> None:
        pids = self.children.start(self.job, self.run_dir)
        if not self.job.agent:
            self.ranks.started(pids)
        place = {"supervisor": os.getpid(), "host": self.ranks.host}
        self.writer.emit("launched", ranks=pids, job=self.job.name, **place, monotonic=self.launched.monotonic)

    # Watching

    def _watch(self) -> Ending:
        while True:
            self._listen()
            self._reap()
            self._follow()
            self._look()
            ending = self._ending()
            if ending and not self._again(ending):
                return ending

    def _on_signal(self, number: int, _frame: object) -> None:
        self.stop_reason = self.stop_reason or f"stopped: the supervisor received {signal_name(number)}"

    def _listen(self) -> None:
        """Wait a moment, or until the launching process says that the run is to stop, or is gone: it holds the other end."""
        if select.select([0], [], [], TICK_S)[0] and not self.stop_reason:
            self.stop_reason = "stopped by the user" if os.read(0, 1) else "stopped: the launching process is gone"

    def _enter(self, state: State, *before: State) -> None:
        """Enter a state from one of those ``before``; from another one nothing changes: a late rank is none in a failing run."""
        if self.state in before:
            self.state, self.since = state, time.monotonic()

    def _reap(self) -> None:
        for pid, code in self.children.ended():
            rank, name = self.ranks.reaped(pid, code), signal_name(-code) if code < 0 else None
            self.writer.emit("exited", rank=rank, pid=pid, returncode=code, signal=name)
            if code:
                self._enter(State.FAILING, State.QUEUED, *UNDER_WAY, State.LEAVING, State.AGAIN)

    def _follow(self) -> None:
        for event in self.follower.poll():
            if (rank := rank_of(event)) is not None:
                self._hear(rank, event)

    def _hear(self, rank: int, event: Event) -> None:
        if event["kind"] == "start" and self.job.agent and self.attempts.begins(event, self.ranks.records.get(rank)):
            self._begin_again()
        record = self.ranks.hear(rank, event, self.job.agent)
        if self.state is State.QUEUED:  # the limits of a run on other machines count from here on
            self.began = time.monotonic()
            self._enter(State.STARTING, State.QUEUED)
        if event["kind"] == "error" and record.echoes:
            self.ranks.collect_zombies()

    def _look(self) -> None:
        """See whether ranks are late, or have ended under an agent that is still there."""
        if self.job.restarts:  # as long as the agent lives, its log alone reports a killed rank
            self.ranks.ended(diagnosis.agent_exits(self.agent.text()))
        records, here = self.ranks.all(), self.ranks.here()
        if self.job.agent:
            # The agent of a run elsewhere has results to bring back: only failed ranks are a reason to go without it.
            failed = any(record.returncode for record in (records if self.job.remote else here))
            ended = not self.job.remote and len(here) >= self.job.ranks and not any(record.alive for record in here)
            if failed or ended:
                self._enter(State.LEAVING, *UNDER_WAY)
        late = any(record.alive and not record.active for record in records) or len(here) < self.job.ranks
        self._enter(*(State.STARTING, State.WORKING) if late else (State.WORKING, State.STARTING))

    # Attempts

    def _again(self, ending: Ending) -> bool:
        """Whether the agent will start the ranks again after this; a rank that hangs is killed, so that it does."""
        hopeless = self._hopeless() or self._wall_is_reached() or not self.children.living
        if hopeless or ending.outcome not in BROKEN or not self.attempts.left or self.attempts.ending:
            return False
        if ending.outcome != "failed":
            living = [record for record in self.ranks.here() if record.alive]
            if not living:
                return False  # the agent itself is late
            chosen = next((record for record in living if record.rank == ending.culprit), living[0])
            kill(process for process in descendants() if process.pid == chosen.pid)
        self.attempts.ending = ending
        self._enter(State.AGAIN, *UNDER_WAY, State.LEAVING)
        return True

    def _hopeless(self) -> bool:
        return any(diagnosis.no_restart_helps(record.error) for record in self.ranks.all())

    def _begin_again(self) -> None:
        if self.attempts.ending is None and any(record.returncode for record in self.ranks.here()):
            self.attempts.ending = self._failed()
        row = self.attempts.close(self.ranks)
        self._enter(State.STARTING, *UNDER_WAY, State.LEAVING, State.AGAIN)
        facts = {name: row[name] for name in ("outcome", "reason", "culprit")}
        self.writer.emit("restarted", attempt=len(self.attempts.past) + 1, **facts)

    # Judging

    def _ending(self) -> Ending | None:
        """Return how the run, or this attempt, ends now; None while it goes on."""
        if self.stop_reason:
            return Ending("stopped", self.stop_reason)
        if self.job.restarts and self._hopeless():
            return self._failed()
        if not self.children.living:
            return self._failed() if self.children.failure else Ending("complete", "every rank ended with exit code 0")
        if self._wall_is_reached():
            self.ranks.dump_stacks()
            living = (record for record in self.ranks.all() if record.alive)
            where = "; ".join(f"rank {record.rank} was at work{record.where()}" for record in living)
            return Ending("timeout", f"the run was ended after {self.job.wall_s:.0f} s (wall limit); {where}")
        limit_s, ending = self._limit()
        return ending() if time.monotonic() - self.since > limit_s else None

    def _limit(self) -> tuple[float, Callable[[], Ending | None]]:
        """Return how long the present state may last, in seconds, and what gives the ending then."""
        job, failed = self.job, any(record.returncode for record in self.ranks.all())
        agent_s = GRACE_S if failed and self.attempts.left else AGENT_S + (job.stop_s if job.remote else 0.0)
        return {
            State.QUEUED: (job.queue_s or math.inf, self._queued),
            State.STARTING: (job.startup_s or math.inf, self._late),
            State.WORKING: (job.stall_s or math.inf, self._stalled),
            State.FAILING: (GRACE_S, self._failed),
            State.LEAVING: (agent_s, self._failed if failed else self._agent_stays),
            State.AGAIN: (job.startup_s + AGENT_S, self._failed),  # torchrun itself gives up after the start-up limit
        }[self.state]

    def _queued(self) -> Ending:
        text = f"no rank was started in {self.job.queue_s:.0f} s (queue_s of the cluster's profile); see logs/agent.out"
        return Ending("timeout", text + self.agent.last_line())

    def _agent_stays(self) -> Ending:
        return Ending("complete", f"every rank ended with exit code 0; {self.agent.name} had to be ended")

    def _failed(self) -> Ending:
        self.ranks.hear_agent(self.agent.text())
        if last := self.attempts.ending:  # another attempt was to follow, and did not
            code, late = self.children.failure, f"they were not there after {self.job.startup_s:.0f} s"
            why = self.agent.exit_reason(code) if code else late
            return Ending("failed", f"{last.reason}; the ranks could not be started again: {why}", last.culprit)
        records = self.ranks.all()
        culprit = diagnosis.first_failure(records)
        if culprit is None:
            return self._elsewhere(Ending("failed", self.agent.exit_reason(self.children.failure)))
        if culprit.error and culprit.error.get("exit_code") == EXIT_SKIPPED:
            return Ending("skipped", str(culprit.error.get("message", "")), culprit.rank)
        ending = Ending(
            "failed", diagnosis.failure_text(culprit, records, memory_kills() - self.memory_kills), culprit.rank
        )
        if not culprit.echoes:
            return ending
        if self.children.failure and (why := self.agent.reason()):
            ending.reason += f"; {why}"
        return self._elsewhere(ending)

    def _elsewhere(self, ending: Ending) -> Ending:
        """Return the ending of ranks that had no cause of their own, with the hosts that may have had it."""
        own = {record.rank for record in self.ranks.here()}
        others = dict.fromkeys(host for rank, host in enumerate(nodes.hosts(self.run_dir)) if rank not in own)
        if others and self.job.endpoint:
            why = "the cause may lie on another node, see whether it is there and its status"
            ending.reason += f"; {why}: {shortened(list(others))}"
        return ending

    def _wall_is_reached(self) -> bool:
        limited = self.state in (State.STARTING, State.WORKING, State.AGAIN)
        return limited and time.monotonic() - self.began > (self.job.wall_s or math.inf)

    def _late(self) -> Ending:
        records, limit_s = self.ranks.all(), self.job.startup_s
        late = [record for record in records if record.alive and not record.active]
        if not late:
            text = f"only {len(records)} of {self.job.ranks} ranks were started in {limit_s:.0f} s (start-up limit)"
            endpoint = self.job.endpoint
            hint = f"; the nodes meet at {endpoint}: start this command on every one of them" if endpoint else ""
            return Ending("timeout", f"{text}; see logs/agent.err{hint}")
        self.ranks.dump_stacks()
        culprit = diagnosis.hanging(late)
        return Ending("timeout", diagnosis.late_text(culprit, limit_s), culprit.rank)

    def _stalled(self) -> Ending | None:
        """Decide whether ranks hang that were quiet for the whole limit, or only wait for one that is still at work.

        Who is seen waiting has the whole limit again, and once more when it is seen to have gone on: that may have
        been the moment before, and it needs time to say so.
        """
        now, limit_s = time.monotonic(), self.job.stall_s
        records = [record for record in self.ranks.all() if record.alive]
        quiet = [record for record in records if now - max(record.heard_at, self.since) > limit_s]
        due = [record for record in quiet if now - record.waited_at > limit_s]
        if not due:
            return None
        self.ranks.dump_stacks()
        lively = len(quiet) < len(records)
        if lively and all(record.waits or (record.waited_at and not record.went_on) for record in due):
            for record in due:
                record.waited_at, record.went_on = now, not record.waits
            return None
        culprit = diagnosis.hanging(due if lively else quiet)
        silent_s = now - max(culprit.heard_at, self.began)
        ending = Ending("stalled", diagnosis.hang_text(culprit, self.ranks.all(), silent_s), culprit.rank)
        return self._elsewhere(ending) if culprit.waits else ending

    # Sensors

    def _sample_sensors(self) -> None:
        """Run in a thread of its own: a driver that hangs in a query must not stop the supervision."""
        sensors, remote = Sensors([], backend=self.job.backend, devices=self.job.ranks), self.job.remote
        reason = "the ranks are on other machines: their sensors are not read"
        available = dict.fromkeys(sensors.read(), reason) if remote else sensors.reasons
        self.writer.emit("sensors", availability=available)
        while not (remote or self.state is State.OVER):
            sensors.pids = [record.pid for record in self.ranks.here() if record.pid and record.alive]
            with contextlib.suppress(StorageError):  # the ranks write as well, and say so
                self.writer.emit("sensor", **sensors.read())
            time.sleep(SENSOR_S)

    # Ending

    def _end_all(self, ending: Ending) -> list[int]:
        living = [record for record in self.ranks.all() if record.alive]
        for record in living:
            record.ended_by_us = True
        try:
            if living and ending.outcome == "failed":
                self.ranks.dump_stacks()
        finally:
            left = self.children.end(self.job.stop_s if self.job.remote else None)
        with contextlib.suppress(StorageError):
            self._reap()
        self._follow()
        self.ranks.hear_agent(self.agent.text())
        return left


def main(argv: list[str]) -> int:
    run_dir = Path(argv[0]).resolve()
    try:
        # CLAIM is the descriptor by which the launching process claimed the folder.
        os.set_inheritable(int(argv[1]), False) if len(argv) > 1 else run_folder.claim(run_dir)
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        return Supervisor(run_dir, Job(**read_json(run_dir / "job.json"))).run()
    except UserError as error:
        with contextlib.suppress(OSError):
            print(error, file=sys.stderr, flush=True)
        return EXIT_STORAGE if isinstance(error, StorageError) else 2


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # not to wait for a sensor thread that hangs in a driver
