"""Whatever happens to whom: the run ends in time, nothing stays behind, and the status says who did what."""

import os
import signal
from pathlib import Path

import pytest
from harness import END_S, HERE, foreground, none_left, pid_at_step, prepare, status, until

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


def _broken(run_dir: Path, function: str = "run") -> RankFailed:
    with pytest.raises(RankFailed) as caught:
        execute(run_dir, benchmark=f"faulty:{function}")
    none_left(run_dir)
    assert caught.value.status == status(run_dir)
    return caught.value


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


def test_rank_killed(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run")
    with Launch(run_dir, "faulty:run").start() as launch:
        os.kill(pid_at_step(run_dir, 1), signal.SIGKILL)
        result = launch.wait()
    assert result["reason"].startswith("rank 1 was killed by SIGKILL during phase train, step ")
    assert (result["outcome"], result["culprit"]) == ("failed", 1)
    assert [row["ended_by_supervisor"] for row in result["ranks"]] == [True, False]
    none_left(run_dir)


def test_crash_in_native_code(tmp_path: Path) -> None:
    error = _broken(prepare(tmp_path / "run", fault="segfault", who=0))
    assert "rank 0 was killed by SIGSEGV" in str(error)
    assert "in segfault" in (tmp_path / "run/logs/rank0.err").read_text()


def test_exit_without_a_word(tmp_path: Path) -> None:
    assert "rank 1 left with exit code 3 and no error" in str(_broken(prepare(tmp_path / "run", fault="leave")))


def test_hang_that_ignores_sigterm_and_has_children(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run", fault="deaf", stall_timeout_s=4)
    error = _broken(run_dir)
    assert "rank 1 sent no sign of life for" in str(error)
    assert "inside spin_without_end" in error.status["reason"]
    assert error.status["outcome"] == "stalled"
    assert "in spin_without_end" in error.status["ranks"][1]["stacks"]


def test_hang_while_others_wait_in_a_collective(tmp_path: Path) -> None:
    error = _broken(prepare(tmp_path / "run", fault="spin_without_end", stall_timeout_s=6), "collective")
    assert error.status["culprit"] == 1
    assert "spin_without_end" in error.status["reason"]
    assert "rank 0 waited in torch for it" in error.status["reason"]
    assert "all_reduce" in error.status["ranks"][0]["stacks"]


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


def test_exception_is_shown_and_not_its_echo(tmp_path: Path) -> None:
    error = _broken(prepare(tmp_path / "run", fault="boom"), "collective")
    assert error.status["reason"] == "rank 1 raised ValueError during phase train, step 3: boom <script>"
    shown = "\n".join(error._render_traceback_())
    assert "ValueError: boom" in shown
    assert "in boom" in shown
    assert "subprocess" not in shown


def test_a_rank_that_its_peer_aborts_is_not_blamed(tmp_path: Path) -> None:
    error = _broken(prepare(tmp_path / "run", fault="no_file"), "watched")
    assert error.status["culprit"] == 1
    assert error.status["reason"].startswith("rank 1 raised FileNotFoundError during phase train, step 3")
    assert "/mnt/nccl-data/" in error.status["reason"]


def test_rank_that_left_early_is_named(tmp_path: Path) -> None:
    error = _broken(prepare(tmp_path / "run", stall_timeout_s=4), "wait_for_other")
    assert error.status["culprit"] == 1
    assert "rank 0 had already ended (exit code 0)" in error.status["reason"]


def test_start_up_limit(tmp_path: Path) -> None:
    error = _broken(prepare(tmp_path / "run", startup_timeout_s=10, stall_timeout_s=0.5), "never_at_work")
    assert error.status["reason"].startswith("rank 1 was not at work 10 s after the launch (start-up limit)")
    assert error.status["outcome"] == "timeout"
    assert "spin_without_end" in error.status["reason"]


def test_wall_limit(tmp_path: Path) -> None:
    error = _broken(prepare(tmp_path / "run", wall_limit_s=10))
    assert "wall limit" in error.status["reason"]
    assert "rank 0 was at work during phase train, step" in error.status["reason"]


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


def test_supervisor_killed(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run", fault="deaf")
    with Launch(run_dir, "faulty:run").start() as launch:
        pid_at_step(run_dir, 1)
        assert launch.pid is not None
        until(lambda: len(marked(run_dir)) == 4)  # supervisor, two ranks and the child: what none_left looks for
        os.kill(launch.pid, signal.SIGKILL)
        with pytest.raises(RankFailed, match="supervisor was killed by SIGKILL"):
            launch.raise_for_status()
    none_left(run_dir)
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
        asked = client.execute(code.format(str(runs[0])))
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
