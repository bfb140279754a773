"""What a supervisor makes of silence, and of a failure without a cause on its machine."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchlib.launch.diagnosis import RankRecord
from benchlib.launch.jobs import Job
from benchlib.launch.supervise import Supervisor


@pytest.fixture
def supervise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Supervisor]]:
    """Make supervisors that leave this process's children alone."""
    monkeypatch.setattr("benchlib.launch.ranks.adopt_orphans", lambda: None)
    there: list[Supervisor] = []

    def make(**job: object) -> Supervisor:
        there.append(Supervisor(tmp_path, Job("x", [], **job)))  # type: ignore[arg-type]
        return there[-1]

    yield make
    for supervisor in there:
        supervisor.writer.close()


WAITS = 'Thread 1 (most recent call first):\n  File "/x/torch/distributed/distributed_c10d.py", line 1 in barrier\n'
BUSY = 'Thread 1 (most recent call first):\n  File "/x/train.py", line 1 in work\n'


@pytest.mark.parametrize(
    ("looks", "culprit"),
    [
        ([BUSY], 0),
        ([WAITS, WAITS, WAITS], None),  # for a rank at work
        ([WAITS, BUSY], None),  # it may have gone on the moment before
        ([WAITS, BUSY, BUSY], 0),
        ([WAITS, BUSY, WAITS, BUSY], None),
    ],
)
def test_who_waited_for_a_rank_at_work_gets_time_to_say_that_it_went_on(
    supervise: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch, looks: list[str], culprit: int | None
) -> None:
    """One look after the other, each when the whole limit has passed since the one before; rank 1 is heard all the time."""
    supervisor, long_ago = supervise(ranks=2, stall_s=5.0), time.monotonic() - 100.0
    supervisor.since = long_ago
    supervisor.ranks.records = {0: RankRecord(0), 1: RankRecord(1, heard_at=time.monotonic() + 100.0)}
    quiet = supervisor.ranks.records[0]
    endings = []
    for stacks in looks:
        monkeypatch.setattr(supervisor.ranks, "dump_stacks", lambda stacks=stacks: setattr(quiet, "stacks", stacks))
        quiet.waited_at = min(quiet.waited_at, long_ago)
        endings.append(supervisor._stalled())
    assert [ending and ending.culprit for ending in endings] == [None] * (len(looks) - 1) + [culprit]
