"""Whatever happens to whom: the run ends in time, nothing stays behind, and the status says who did what."""

import os
import signal
from pathlib import Path

import pytest
from harness import BOOM, at_step, failed, foreground, none_left, prepare, status
from waiting import END_S, until

from benchlib.core import run_folder
from benchlib.core.errors import UserError
from benchlib.core.events import read_events
from benchlib.launch.launch import Launch, RankFailed, execute, settle
from benchlib.launch.processes import marked
from benchlib.runtime.libraries import LIBRARIES

MPI = pytest.mark.skipif(bool(LIBRARIES["mpi"].missing()), reason=LIBRARIES["mpi"].missing())
OVER_MPI = {"collective": "mpi", "launcher": "mpirun", "fault": "nothing"}


def test_complete(tmp_path):
    run_dir, seen = prepare(tmp_path / "run", steps=5, step_s=0.01), []
    result = execute(run_dir, seen.append, "faulty:run")
    assert result["outcome"] == "complete", result["reason"]
    assert [row["returncode"] for row in result["ranks"]] == [0, 0]
    assert {event["source"] for event in seen if event["kind"] == "heartbeat"} == {"rank0", "rank1"}
    assert any(event["kind"] == "sensor" and event["rss_bytes_per_pid"] for event in seen)


def test_an_error_of_the_launching_side_ends_the_ranks(tmp_path, monkeypatch):
    launches = []
    monkeypatch.setattr(Launch, "__enter__", lambda launch: launches.append(launch) or launch)
    with pytest.raises(ZeroDivisionError):
        execute(prepare(tmp_path / "run"), lambda event: 1 // (event["kind"] != "heartbeat"), "faulty:run")

    (launch,) = launches
    process = launch._process
    assert process.returncode is not None and process.stdin.closed
    none_left(launch.run_dir)


@pytest.mark.parametrize(
    ("number", "values", "words"),
    [
        (signal.SIGKILL, {}, "rank 1 was killed by SIGKILL during phase train, step "),
        (signal.SIGSTOP, {"stall_timeout_s": 4}, "it did not answer the request for its Python stack"),
    ],
    ids=["killed", "stopped"],
)
def test_a_rank_that_is_lost(tmp_path, number, values, words):
    run_dir = prepare(tmp_path / "run", **values)
    with Launch(run_dir, "faulty:run").start() as launch:
        os.kill(at_step(run_dir, 1), number)
        result = launch.wait()
    none_left(run_dir)
    assert words in result["reason"] and result["culprit"] == 1
    if not values:
        assert [row["ended_by_supervisor"] for row in result["ranks"]] == [True, False]


SPINS = {"fault": "spin_without_end", "stall_timeout_s": 6}
NOT_AT_WORK = "rank 1 was not at work 10 s after the launch (start-up limit)"


@pytest.mark.parametrize(
    ("values", "function", "outcome", "culprit", "words"),
    [
        (SPINS, "collective", "stalled", 1, ["spin_without_end", "rank 0 waited in torch"]),
        ({"fault": "boom"}, "collective", "failed", 1, [BOOM]),
        ({"fault": "boom", "launcher": "torchrun"}, "collective", "failed", 1, [BOOM]),
        ({"startup_timeout_s": 10, "stall_timeout_s": 0.5}, "never_at_work", "timeout", 1, [NOT_AT_WORK]),
    ],
    ids=["spins", "boom", "boom under torchrun", "limit"],
)
def test_a_broken_run_names_who_and_how(tmp_path, values, function, outcome, culprit, words):
    run_dir = prepare(tmp_path / "run", **values)
    error = failed(run_dir, function)
    result, shown = error.status, "\n".join(error._render_traceback_())
    assert result == status(run_dir)
    assert (result["outcome"], result["culprit"]) == (outcome, culprit)
    assert [word for word in words if word not in result["reason"]] == [], result["reason"]
    if values is SPINS:  # the stacks of all are kept, and that of the culprit is shown
        assert "in spin_without_end" in result["ranks"][1]["stacks"] and "in spin_without_end" in shown
        assert "all_reduce" in result["ranks"][0]["stacks"]
    if words == [BOOM]:
        assert result["reason"] == BOOM and "in boom" in shown and "subprocess" not in shown


def test_a_folder_is_for_one_launch_until_it_is_stopped(tmp_path):
    run_dir = prepare(tmp_path / "run")
    with Launch(run_dir, "faulty:run").start() as launch:
        at_step(run_dir, 1)
        before = {process.pid for process in marked(run_dir)}
        with pytest.raises(UserError, match="is in use: another process works on this run"):
            Launch(run_dir, "faulty:run").start()
        assert settle(run_dir) is None
        assert before <= {process.pid for process in marked(run_dir)}  # the first one's ranks live on
        result = launch.stop()
    none_left(run_dir)
    assert result and (result["outcome"], result["reason"]) == ("stopped", "stopped by the user")
    with pytest.raises(UserError, match="already executed"):
        Launch(run_dir, "faulty:run").start()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_launching_process_gets(number, tmp_path):
    run_dir = prepare(tmp_path / "run", fault="deaf", who=1)
    with foreground(run_dir) as process:
        at_step(run_dir, 1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=END_S)
    none_left(run_dir)
    interrupted = number is signal.SIGINT
    reason = "stopped by the user" if interrupted else "stopped: the launching process is gone"
    assert (status(run_dir)["outcome"], status(run_dir)["reason"]) == ("stopped", reason)
    assert ("KeyboardInterrupt" in errors) == interrupted


@pytest.fixture
def shared_memory():
    """Remove what a killed mpirun leaves: segments that it would have removed at its end."""
    before = set(Path("/dev/shm").glob("sm_segment.*"))
    yield
    for path in set(Path("/dev/shm").glob("sm_segment.*")) - before:
        path.unlink()


@pytest.mark.parametrize(
    "values",
    [{"fault": "deaf"}, {"launcher": "torchrun", "fault": "nothing"}, pytest.param(OVER_MPI, marks=MPI)],
    ids=["local", "torchrun", "mpirun"],
)
@pytest.mark.usefixtures("shared_memory")
def test_supervisor_killed(tmp_path, values):
    run_dir = prepare(tmp_path / "run", **values)
    with Launch(run_dir, "faulty:collective" if "collective" in values else "faulty:run").start() as launch:
        at_step(run_dir, 1)
        until(lambda: len(marked(run_dir)) >= 4)  # supervisor, two ranks, and a child or the agent: see none_left
        assert run_folder.is_running(run_dir)
        os.kill(launch.pid, signal.SIGKILL)
        if "launcher" in values:
            none_left(run_dir)  # before anybody on this side clears up
        with pytest.raises(RankFailed, match="supervisor was killed by SIGKILL"):
            launch.raise_for_status()
    none_left(run_dir)
    assert not run_folder.is_running(run_dir)
    assert "rank 1 was last heard of during phase train" in status(run_dir)["reason"]


def test_everybody_killed(tmp_path):
    """The next reader writes the status."""
    run_dir = prepare(tmp_path / "run")
    with foreground(run_dir) as process:
        at_step(run_dir, 1)
        assert settle(run_dir) is None
        os.kill(process.pid, signal.SIGSTOP)  # so that it cannot notice the death of the other
        os.kill(read_events(run_dir, {"launched"})[0]["supervisor"], signal.SIGKILL)
        os.kill(process.pid, signal.SIGKILL)
    none_left(run_dir)
    until(lambda: not run_folder.is_running(run_dir))  # a process gives its environment back before its files
    result = settle(run_dir)
    assert result and result["reason"].startswith("the run was cut off: its supervisor is gone")
    assert settle(run_dir) == status(run_dir)
