"""Whatever happens to whom: the run ends in time, nothing stays behind, and the status says who did what."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import END_S, HERE, foreground, none_left, pid_at_step, prepare, status, until

from benchlib.core import run_folder
from benchlib.core.errors import UserError
from benchlib.core.events import read_events
from benchlib.judge.verdict import judged
from benchlib.launch.launch import Launch, RankFailed, execute, settle
from benchlib.launch.processes import marked
from benchlib.results.run import Run
from benchlib.show.widgets import watch


@pytest.fixture(autouse=True)
def _find_faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def test_complete(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run", steps=5, step_s=0.01)
    seen = []
    result = execute(run_dir, seen.append, "faulty:run")
    assert result["outcome"] == "complete"
    assert [row["returncode"] for row in result["ranks"]] == [0, 0]
    assert {event["source"] for event in seen if event["kind"] == "heartbeat"} == {"rank0", "rank1"}
    assert any(event["kind"] == "sensor" and event["rss_bytes_per_pid"] for event in seen)
    assert seen[-1]["kind"] == "ended"
    with pytest.raises(UserError, match="already executed"):
        Launch(run_dir, "faulty:run").start()


def test_strange_events_are_skipped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = prepare(tmp_path / "run", steps=5, step_s=0.01)
    result = watch(Launch(run_dir, "faulty:strange").start())
    assert result["outcome"] == "complete", result["reason"]
    assert [row["returncode"] for row in result["ranks"]] == [0, 0]
    assert "malformed events skipped" in capsys.readouterr().out
    assert "skipped a malformed event: {" in (run_dir / "logs/supervisor.log").read_text()


@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_rank_killed(tmp_path: Path, launcher: str) -> None:
    run_dir = prepare(tmp_path / "run", launcher=launcher)
    with Launch(run_dir, "faulty:run").start() as launch:
        os.kill(pid_at_step(run_dir, 1), signal.SIGKILL)
        result = launch.wait()
    assert result["reason"].startswith("rank 1 was killed by SIGKILL during phase train, step ")
    assert (result["outcome"], result["culprit"]) == ("failed", 1)
    assert [row["ended_by_supervisor"] for row in result["ranks"]] == [True, False]
    none_left(run_dir)


SPINS = {"fault": "spin_without_end"}
LEFT = "rank 0 had already ended (exit code 0)"
BOOM = "rank 1 raised ValueError during phase train, step 3: boom <script>"
NOT_AT_WORK = "rank 1 was not at work 10 s after the launch (start-up limit)"
AT_WORK = "rank 0 was at work during phase train, step"


@pytest.mark.parametrize(
    ("values", "function", "outcome", "culprit", "words"),
    [
        ({"fault": "segfault", "who": 0}, "run", "failed", 0, ["rank 0 was killed by SIGSEGV"]),
        ({"fault": "leave"}, "run", "failed", 1, ["rank 1 left with exit code 3 and no error"]),
        # It ignores SIGTERM and has a child in a session of its own.
        ({"fault": "deaf", "stall_timeout_s": 4}, "run", "stalled", 1, ["no sign of life for", "spin_without_end"]),
        ({**SPINS, "stall_timeout_s": 6}, "collective", "stalled", 1, ["spin_without_end", "rank 0 waited in torch"]),
        ({"fault": "boom"}, "collective", "failed", 1, [BOOM]),
        ({"fault": "no_space"}, "run", "failed", 1, ["cannot be written: no space left on device; free some space"]),
        # The peer is aborted without a word, as by NCCL's watchdog.
        ({"fault": "no_file"}, "watched", "failed", 1, ["rank 1 raised FileNotFoundError", "/mnt/nccl-data/"]),
        ({"stall_timeout_s": 4}, "wait_for_other", "stalled", 1, [LEFT]),
        ({"startup_timeout_s": 10, "stall_timeout_s": 0.5}, "never_at_work", "timeout", 1, [NOT_AT_WORK]),
        ({"wall_limit_s": 10}, "run", "timeout", None, ["wall limit", AT_WORK]),
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
        assert function == "run" or "all_reduce" in result["ranks"][0]["stacks"]
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


def test_missing_backend_is_a_skip(tmp_path: Path) -> None:
    result = execute(prepare(tmp_path / "run", fault="unavailable"), benchmark="faulty:run")
    assert (result["outcome"], result["reason"]) == ("skipped", "no such device here")
    none_left(tmp_path / "run")


def test_stop_button(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run")
    launch = Launch(run_dir, "faulty:run").start()
    pid_at_step(run_dir, 0)
    result = launch.stop()
    assert result is not None
    assert (result["outcome"], result["reason"]) == ("stopped", "stopped by the user")
    none_left(run_dir)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_launching_process_gets(number: signal.Signals, tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run", fault="deaf", who=1)
    process = foreground(run_dir)
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
        assert run_folder.claimed(run_dir) is True
        os.kill(launch.pid, signal.SIGKILL)
        if launcher == "torchrun":
            none_left(run_dir)  # before anybody on this side clears up
        with pytest.raises(RankFailed, match="supervisor was killed by SIGKILL"):
            launch.raise_for_status()
    none_left(run_dir)
    assert run_folder.claimed(run_dir) is False
    assert "rank 1 was last heard of during phase train" in status(run_dir)["reason"]


def test_a_stopped_supervisor_goes_on_and_keeps_the_limits(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run", wall_limit_s=10)
    stops = 0
    with Launch(run_dir, "faulty:run").start() as launch:
        pid_at_step(run_dir, 1)
        assert launch.pid is not None
        for _ in launch.events():
            if stops < 20:
                stops += 1
                os.kill(launch.pid, signal.SIGSTOP)
        with pytest.raises(RankFailed, match="wall limit"):
            launch.raise_for_status()
    none_left(run_dir)


def test_a_stopped_supervisor_ends_with_its_launching_process(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run")
    process = foreground(run_dir)
    pid_at_step(run_dir, 1)
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(read_events(run_dir, {"launched"})[0]["supervisor"], signal.SIGSTOP)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=END_S)
    none_left(run_dir)
    assert status(run_dir)["reason"] == "stopped: the launching process is gone"


def test_a_deleted_run_folder_ends_the_run(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run")
    with Launch(run_dir, "faulty:run").start() as launch:
        pid_at_step(run_dir, 1)
        run_dir.rename(tmp_path / "moved")
        with pytest.raises(RankFailed, match="was deleted or moved during the run"):
            launch.raise_for_status()
    none_left(run_dir)
    assert "deleted or moved" in judged(Run(run_dir)).sentence


def test_everybody_killed(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run")
    process = foreground(run_dir)
    pid_at_step(run_dir, 1)
    assert settle(run_dir) is None
    os.kill(process.pid, signal.SIGSTOP)  # so that it cannot notice the death of the other
    os.kill(read_events(run_dir, {"launched"})[0]["supervisor"], signal.SIGKILL)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=END_S)
    none_left(run_dir)
    result = settle(run_dir)
    assert result is not None
    assert result["reason"].startswith("the run was cut off: its supervisor is gone")
    assert settle(run_dir) == status(run_dir)


def test_kernel_interrupt_and_death(tmp_path: Path) -> None:
    manager = pytest.importorskip("jupyter_client").KernelManager(
        kernel_name="python3", transport="ipc", ip=str(tmp_path / "k")
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)])}
    runs = [prepare(tmp_path / name) for name in ("interrupted", "orphaned")]
    manager.start_kernel(env=env)
    try:
        client = manager.blocking_client()
        client.start_channels()
        client.wait_for_ready(timeout=END_S)
        code = "from benchlib.launch.launch import execute; execute({!r}, benchmark='faulty:run')"
        # By default an error also aborts the requests that wait behind it.
        asked = client.execute(code.format(str(runs[0])), stop_on_error=False)
        pid_at_step(runs[0], 1)
        manager.interrupt_kernel()
        # On a busy machine the kernel is asked more than once whether it is ready: later answers come first.
        while (reply := client.get_shell_msg(timeout=END_S))["parent_header"]["msg_id"] != asked:
            pass
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        none_left(runs[0])
        client.execute(code.format(str(runs[1])))
        pid_at_step(runs[1], 1)
        client.stop_channels()
        os.kill(manager.provisioner.pid, signal.SIGKILL)
    finally:
        manager.shutdown_kernel(now=True)
    none_left(runs[1])
    assert status(runs[1])["reason"] == "stopped: the launching process is gone"
