"""The ranks of a run as its supervisor knows them: from their events, from what they and the agent left, from stacks."""

import contextlib
import platform
import time
from pathlib import Path
from typing import Any

from benchlib import stacks
from benchlib.agent import AgentReport
from benchlib.diagnosis import RankRecord
from benchlib.errors import UserError
from benchlib.events import Event
from benchlib.files import read_json
from benchlib.processes import descendants


class RankTable:
    """``records`` are the ranks of the present attempt by number. ``launch`` is the id of the supervisor's launch: host
    names would not do, since two machines may have the same.
    """

    def __init__(self, logs: Path, launch: str) -> None:
        self.logs, self.launch, self.host = logs, launch, platform.node()
        self.records: dict[int, RankRecord] = {}

    def all(self) -> list[RankRecord]:
        """Return all ranks that were heard of; safe for other threads."""
        return list(self.records.values())

    def here(self) -> list[RankRecord]:
        """Return the ranks of this node: of this launch and, where an agent took its id elsewhere, of this host."""
        return [one for one in self.all() if one.launch == self.launch and one.host == self.host]

    def failed_here(self) -> bool:
        """Whether a rank of this node ended with an error."""
        return any(record.returncode for record in self.here())

    def started(self, pids: list[int]) -> None:
        """Take in the ranks that the supervisor started itself, by number."""
        for rank, pid in enumerate(pids):
            self.records[rank] = RankRecord(rank, pid, self.host, self.launch)

    def hear(self, rank: int, event: Event, agent: bool) -> RankRecord:
        """Take in an event of a rank; ``agent``: somebody else reaps it, so its own word has to do for its end."""
        record = self.records.setdefault(rank, RankRecord(rank))
        record.hear(event)
        record.heard_at = time.monotonic()  # by our clock: another node's may differ
        if agent and record.alive:
            if event["kind"] == "phase" and event.get("name") == "done":
                record.returncode, record.ended_at = 0, event["t"]
            elif event["kind"] == "error":
                record.returncode, record.ended_at = int(event.get("exit_code", 1)), event["t"]
        return record

    def ended(self, codes: dict[int, int]) -> None:
        """Take in the exit codes of processes of this node."""
        for record in self.here():
            if record.alive and record.pid in codes:
                record.returncode, record.ended_at = codes[record.pid], time.time()

    def read_errors(self, agent: AgentReport) -> None:
        """Take in the errors that the ranks left as files, and the ranks that the agent's last report names."""
        for record in self.all():
            path = self.logs / f"rank{record.rank}.error.json"
            if record.error is None and path.exists():
                with contextlib.suppress(UserError):
                    found = read_json(path)
                    if record.pid in (None, found.get("pid")):  # not of an earlier attempt
                        record.error = found
        for rank, code, pid, root in agent.failures():
            record = self.records.setdefault(rank, RankRecord(rank, pid))
            if pid and record.pid not in (None, pid):
                continue
            record.returncode, record.ended_at = code, record.ended_at or time.time()
            record.ended_by_us = record.ended_by_us or not (root or record.error)  # torchrun ends the others

    def dump_stacks(self) -> None:
        """Keep the newest Python stacks of all living ranks of this machine."""
        family = {process.pid for process in descendants()}
        asked = [record for record in self.here() if record.alive and record.pid in family]
        texts = stacks.collect([(record.pid or 0, self.logs / f"rank{record.rank}.stacks") for record in asked])
        for record, text in zip(asked, texts, strict=True):
            record.stacks = text

    def as_json(self) -> list[dict[str, Any]]:
        """Return the rows of ``status.json``."""
        return [self.records[rank].as_json() for rank in sorted(self.records)]
