"""A run whose ranks were started again is whole, says so, and is no baseline."""

import json
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from make_run import make_run

from benchlib.commands.run import summarise
from benchlib.core.errors import UserError
from benchlib.core.events import EventWriter
from benchlib.judge import baselines
from benchlib.judge.checks import Check, Verdict
from benchlib.judge.verdict import judged
from benchlib.launch.launch import SUPERVISOR, continue_supervisor, write_lost
from benchlib.results.run import Run

FACTS = {"checksums": [["aa", "aa"]], "checksums_equal": True}


def _restarted(folder: Path, restarts: int) -> Run:
    path = make_run(folder, config={"launcher": "torchrun", "max_restarts": 2}, facts=FACTS)
    status = json.loads((path / "status.json").read_text())
    attempts = [{"attempt": 1, "reason": "rank 1 was killed by SIGKILL"}] * restarts
    (path / "status.json").write_text(json.dumps({**status, "restarts": restarts, "earlier_attempts": attempts}))
    return Run(path)


@pytest.mark.parametrize(("restarts", "status"), [(0, "PASS"), (1, "AMBIGUOUS")])
def test_the_verdict_reports_restarts(tmp_path: Path, restarts: int, status: str) -> None:
    run = _restarted(tmp_path / "run", restarts)
    verdict = judged(run, tmp_path / "baselines")
    (check,) = [check for check in verdict.checks if check.name == "no restart"]
    assert (check.status, check.gates, check.value) == (status, False, restarts)
    assert not verdict.broken
    if restarts:
        assert check.reason.startswith("started again 1 time after failures: rank 1 was killed by SIGKILL; ")


def test_a_run_that_could_not_be_restarted_says_nothing_of_it(tmp_path: Path) -> None:
    verdict = judged(Run(make_run(tmp_path / "run", facts=FACTS)), tmp_path / "baselines")
    assert not verdict.broken
    assert "no restart" not in {check.name for check in verdict.checks}


def test_it_is_not_accepted(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"was started again 1 time after failures.*run it again"):
        baselines.require_acceptable(_restarted(tmp_path / "again", 1))
    baselines.require_acceptable(_restarted(tmp_path / "once", 0))
    other = Run(make_run(tmp_path / "other", facts={"restarts": 2}))  # in the result alone: another node's status
    assert baselines.restarts(other) == 2


def test_a_resumed_run_follows_the_same_rule(tmp_path: Path) -> None:
    """Its speed is that of a part of the work, as that of a restarted run is."""
    run = Run(make_run(tmp_path / "run", facts={**FACTS, "resumed_step": 8}))
    with pytest.raises(
        UserError, match=r"was resumed at step 8 of another run: its times hold only a part.*run it again"
    ):
        baselines.require_acceptable(run)
    (check,) = [check for check in judged(run, tmp_path / "b").checks if check.name == "no restart"]
    assert (check.status, check.gates) == ("AMBIGUOUS", False) and "cannot become a baseline" in check.reason
    baselines.require_acceptable(Run(make_run(tmp_path / "whole", facts={**FACTS, "resumed_step": 0})))


def test_a_damaged_newest_checkpoint_is_in_the_verdict(tmp_path: Path) -> None:
    fault = "step-00000012: model.safetensors was altered"
    facts = {**FACTS, "resumed_step": 8, "checkpoint_faults": [fault]}
    for number, (given, begun) in enumerate(((8, "went on from step 8"), (0, "was begun anew"))):
        run = Run(
            make_run(
                tmp_path / f"run{number}",
                facts={**facts, "resumed_step": given},
                config={"launcher": "torchrun", "max_restarts": 2},
            )
        )
        (check,) = [check for check in judged(run, tmp_path / "b").checks if check.name == "newest checkpoint"]
        assert (check.status, check.gates) == ("AMBIGUOUS", False) and begun in check.reason and fault in check.reason


@pytest.mark.parametrize("restarts", [0, 1])
def test_the_terminal_offers_no_baseline_that_would_be_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], restarts: int
) -> None:
    run = _restarted(tmp_path / "run", restarts)
    open_ = Check(name="speed", kind="regression", question="?", status="NO_BASELINE", reason="no run")
    summarise(run.path, Verdict(verdict="PASS", sentence="1 check passed.", checks=[open_]), None)
    output = " ".join(capsys.readouterr().out.split())
    assert ("benchlib baseline accept" in output) == (not restarts)
    assert ("cannot become a baseline: it was started again 1 time after failures" in output) == bool(restarts)


def test_what_a_lost_run_tells_is_of_its_last_attempt(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, "rank0")
    writer.emit("start", pid=2_000_000_001, attempt="0 h 1")
    writer.emit("phase", name="train")
    writer.emit("heartbeat", step=7)
    writer.emit("error", type="RuntimeError", message="boom", traceback="", exit_code=1)
    writer.emit("start", pid=2_000_000_002, attempt="1 h 2")
    writer.emit("phase", name="data")
    writer.close()
    (row,) = write_lost(tmp_path, "cut off")["ranks"]
    assert (row["pid"], row["last_phase"], row["last_step"], row["error"]) == (2_000_000_002, "data", None, None)


def test_a_stopped_supervisor_goes_on(tmp_path: Path) -> None:
    """After SIGSTOP it neither watches nor ends: it would outlive its run for ever."""
    code = "import time; print(flush=True); time.sleep(600)"
    process = psutil.Popen([sys.executable, "-c", code, SUPERVISOR, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout.readline(), "it has its command line now"
    launched = {"t": time.time(), "source": "supervisor", "kind": "launched", "supervisor": process.pid}
    (tmp_path / "events-supervisor.jsonl").write_text(json.dumps({**launched, "host": platform.node()}) + "\n")
    try:
        for act, stopped in (
            (lambda: process.send_signal(signal.SIGSTOP), True),
            (lambda: continue_supervisor(tmp_path), False),
        ):
            act()
            end = time.monotonic() + 60
            while (process.status() == psutil.STATUS_STOPPED) != stopped:
                assert time.monotonic() < end
                time.sleep(0.01)
    finally:
        process.kill()
        process.communicate()
