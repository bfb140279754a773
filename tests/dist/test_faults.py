"""Whatever happens to whom: the run ends in time, nothing stays behind, and the status says who did what."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import END_S, HERE, foreground, none_left, pid_at_step, prepare, status, until

from benchlib.core import run_folder
from benchlib.core.errors import UserError
from benchlib.core.events import Event, read_events
from benchlib.launch.launch import Launch, RankFailed, execute, settle
from benchlib.launch.processes import marked


@pytest.fixture(autouse=True)
def _find_faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def test_complete(tmp_path: Path) -> None:
    """Malformed events are skipped, and an error of the launching side finds neither process nor pipe left."""
    run_dir = prepare(tmp_path / "run", steps=5, step_s=0.01)
    launch, seen = Launch(run_dir, "faulty:strange"), []

    def look(event: Event) -> None:
        seen.append(event)
        if event["kind"] == "ended":
            until(lambda: not launch.running)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught, launch.start():
        consume(launch.events(), look)
    closed(launch)
    del caught  # whose traceback held the iterator: that alone would close it
    result = launch.wait()
    assert result["outcome"] == "complete", result["reason"]
    assert [row["returncode"] for row in result["ranks"]] == [0, 0]
    assert {event["source"] for event in seen if event["kind"] == "heartbeat"} == {"rank0", "rank1"}
    assert any(event["kind"] == "sensor" and event["rss_bytes_per_pid"] for event in seen)
    assert "skipped a malformed event: {" in (run_dir / "logs/supervisor.log").read_text()
    with pytest.raises(UserError, match="already executed"):
        Launch(run_dir, "faulty:run").start()


def consume(events: Iterator[Event], look: Callable[[Event], None]) -> None:
    for event in events:
        look(event)


def closed(launch: Launch) -> None:
    """Assert that a supervisor was waited for and the pipe to it closed."""
    process = launch._process
    assert process and process.stdin
    assert (process.returncode is not None, process.stdin.closed) == (True, True)


def test_an_error_while_the_ranks_are_at_work_ends_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of who looks at the events, and one that comes when the supervisor has only just been started."""
    run_dir, launches = prepare(tmp_path / "run"), []
    monkeypatch.setattr(Launch, "__enter__", lambda launch: launches.append(launch) or launch)
    with pytest.raises(ZeroDivisionError):
        execute(run_dir, lambda event: 1 // (event["kind"] != "heartbeat"), "faulty:run")
    closed(launches[0])
    none_left(run_dir)

    def interrupted(launch: Launch, held: int, start: Any = Launch._start) -> None:
        start(launch, held)
        raise KeyboardInterrupt

    monkeypatch.setattr(Launch, "_start", interrupted)
    early = Launch(prepare(tmp_path / "early"), "faulty:run")
    with pytest.raises(KeyboardInterrupt):
        early.start()
    closed(early)
    none_left(early.run_dir)


def test_rank_killed(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run")
    with Launch(run_dir, "faulty:run").start() as launch:
        os.kill(pid_at_step(run_dir, 1), signal.SIGKILL)
        result = launch.wait()
    assert result["reason"].startswith("rank 1 was killed by SIGKILL during phase train, step ")
    assert (result["outcome"], result["culprit"]) == ("failed", 1)
    assert [row["ended_by_supervisor"] for row in result["ranks"]] == [True, False]
    none_left(run_dir)


SPINS = {"fault": "spin_without_end"}
BOOM = "rank 1 raised ValueError during phase train, step 3: boom <script>"
NOT_AT_WORK = "rank 1 was not at work 10 s after the launch (start-up limit)"


@pytest.mark.parametrize(
    ("values", "function", "outcome", "culprit", "words"),
    [
        ({"fault": "segfault", "who": 0}, "run", "failed", 0, ["rank 0 was killed by SIGSEGV"]),
        ({**SPINS, "stall_timeout_s": 6}, "collective", "stalled", 1, ["spin_without_end", "rank 0 waited in torch"]),
        ({"fault": "boom"}, "collective", "failed", 1, [BOOM]),
        ({"startup_timeout_s": 10, "stall_timeout_s": 0.5}, "never_at_work", "timeout", 1, [NOT_AT_WORK]),
    ],
    ids=lambda value: value.get("fault", "limit") if isinstance(value, dict) else None,
)
def test_a_broken_run_names_who_and_how(
    tmp_path: Path, values: dict[str, Any], function: str, outcome: str, culprit: int | None, words: list[str]
) -> None:
    run_dir = prepare(tmp_path / "run", **values)
    with pytest.raises(RankFailed) as caught:
        execute(run_dir, benchmark=f"faulty:{function}")
    none_left(run_dir)
    result = caught.value.status
    assert result == status(run_dir)
    assert (result["outcome"], result["culprit"]) == (outcome, culprit)
    assert [word for word in words if word not in result["reason"]] == [], result["reason"]
    shown = "\n".join(caught.value._render_traceback_())
    if outcome == "stalled" and "fault" in values:  # the stacks of all are kept, and that of the culprit is shown
        assert "in spin_without_end" in result["ranks"][1]["stacks"] and "in spin_without_end" in shown
        assert "all_reduce" in result["ranks"][0]["stacks"]
    if words == [BOOM]:
        assert result["reason"] == BOOM and "in boom" in shown and "subprocess" not in shown
    if values.get("fault") == "segfault":
        assert "in segfault" in (run_dir / "logs/rank0.err").read_text()


def test_stopped_rank(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run", stall_timeout_s=4)
    with Launch(run_dir, "faulty:run").start() as launch:
        os.kill(pid_at_step(run_dir, 1), signal.SIGSTOP)
        result = launch.wait()
    assert result["culprit"] == 1
    assert "it did not answer the request for its Python stack" in result["reason"]
    none_left(run_dir)


def test_waiting_for_a_rank_at_work_is_no_hang(tmp_path: Path) -> None:
    result = execute(prepare(tmp_path / "run", stall_timeout_s=5), benchmark="faulty:long_work_of_one")
    assert result["outcome"] == "complete"


def test_stop_button(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run")
    with Launch(run_dir, "faulty:run").start() as launch:
        pid_at_step(run_dir, 0)
        result = launch.stop()
    assert result is not None
    assert (result["outcome"], result["reason"]) == ("stopped", "stopped by the user")
    none_left(run_dir)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_launching_process_gets(number: signal.Signals, tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run", fault="deaf", who=1)
    with foreground(run_dir) as process:
        pid_at_step(run_dir, 1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=END_S)
    none_left(run_dir)
    result = status(run_dir)
    assert result["outcome"] == "stopped"
    if number is signal.SIGINT:
        assert "KeyboardInterrupt" in errors
        assert result["reason"] == "stopped by the user"
    else:
        assert result["reason"] == "stopped: the launching process is gone"


@pytest.mark.parametrize(("launcher", "fault"), [("local", "deaf"), ("torchrun", "nothing")])
def test_supervisor_killed(tmp_path: Path, launcher: str, fault: str) -> None:
    run_dir = prepare(tmp_path / "run", launcher=launcher, fault=fault)
    with Launch(run_dir, "faulty:run").start() as launch:
        pid_at_step(run_dir, 1)
        assert launch.pid is not None
        until(lambda: len(marked(run_dir)) == 4)  # supervisor, two ranks, and a child or the agent: see none_left
        assert run_folder.is_running(run_dir)
        os.kill(launch.pid, signal.SIGKILL)
        if launcher == "torchrun":
            none_left(run_dir)  # before anybody on this side clears up
        with pytest.raises(RankFailed, match="supervisor was killed by SIGKILL"):
            launch.raise_for_status()
    none_left(run_dir)
    assert not run_folder.is_running(run_dir)
    assert "rank 1 was last heard of during phase train" in status(run_dir)["reason"]


def test_everybody_killed(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run")
    with foreground(run_dir) as process:
        pid_at_step(run_dir, 1)
        assert settle(run_dir) is None
        os.kill(process.pid, signal.SIGSTOP)  # so that it cannot notice the death of the other
        os.kill(read_events(run_dir, {"launched"})[0]["supervisor"], signal.SIGKILL)
        os.kill(process.pid, signal.SIGKILL)
    none_left(run_dir)
    until(lambda: not run_folder.is_running(run_dir))  # a process that ends gives its environment back before its files
    result = settle(run_dir)
    assert result is not None
    assert result["reason"].startswith("the run was cut off: its supervisor is gone")
    assert settle(run_dir) == status(run_dir)
