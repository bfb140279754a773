"""A run whose ranks were started again is whole, says so, and is no baseline."""

import json
from pathlib import Path

import pytest
from make_run import make_run

from benchlib.commands.run import summarise
from benchlib.core.errors import UserError
from benchlib.core.events import EventWriter
from benchlib.judge import baselines
from benchlib.judge.checks import Check, Verdict
from benchlib.judge.verdict import judged
from benchlib.launch.launch import write_lost
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
        assert check.reason.startswith("restarted 1 time: rank 1 was killed by SIGKILL; ")


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


@pytest.mark.parametrize("restarts", [0, 1])
def test_the_terminal_offers_no_baseline_that_would_be_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], restarts: int
) -> None:
    run = _restarted(tmp_path / "run", restarts)
    open_ = Check(name="speed", kind="regression", question="?", status="NO_BASELINE", reason="no run")
    summarise(run.path, Verdict(verdict="PASS", sentence="1 check passed.", checks=[open_]), None)
    output = " ".join(capsys.readouterr().out.split())
    assert ("benchlib baseline accept" in output) == (not restarts)
    assert ("cannot become a baseline: it was restarted 1 time" in output) == bool(restarts)


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
