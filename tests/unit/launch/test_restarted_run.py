"""A run whose ranks were started again, or that was resumed, is whole, says so, and is no baseline."""

import json
from pathlib import Path
from typing import Any

import pytest
from make_run import make_run

from benchlib.core.errors import UserError
from benchlib.core.events import EventWriter
from benchlib.judge import baselines
from benchlib.judge.verdict import judged
from benchlib.launch.launch import write_lost
from benchlib.results.run import Run

FACTS = {"checksums": [["aa", "aa"]], "checksums_equal": True}
FAULT = {"checkpoint_faults": ["step-00000012: model.safetensors was altered"]}
AGAIN = r"was started again 1 time after failures.*run it again"
RESUMED = r"was resumed at step 8 of another run: its times hold only a part.*run it again"


def _run(folder: Path, restarts: int | None, facts: dict[str, Any] | None = None) -> Run:
    """Make a run that ``torchrun`` may start again; it did so ``restarts`` times, None: it could not."""
    launcher = {"launcher": "torchrun", "max_restarts": 2} if restarts is not None else {}
    path = make_run(folder, config=launcher, facts={**FACTS, **(facts or {})})
    if restarts is not None:
        status = json.loads((path / "status.json").read_text())
        attempts = [{"attempt": 1, "reason": "rank 1 was killed by SIGKILL"}] * restarts
        rows = {"restarts": restarts, "earlier_attempts": attempts}
        (path / "status.json").write_text(json.dumps({**status, **rows}))
    return Run(path)


@pytest.mark.parametrize(
    ("restarts", "facts", "name", "status", "refused"),
    [
        (0, {}, "no restart", "PASS", ""),
        (1, {}, "no restart", "AMBIGUOUS", AGAIN),
        (None, {}, "no restart", None, ""),
        (None, {"restarts": 1}, "no restart", "AMBIGUOUS", AGAIN),  # in the result alone: another node's status
        (None, {"resumed_step": 8}, "no restart", "AMBIGUOUS", RESUMED),
        (0, {**FAULT, "resumed_step": 8}, "newest checkpoint", "AMBIGUOUS", RESUMED),
        (0, {**FAULT, "resumed_step": 0}, "newest checkpoint", "AMBIGUOUS", ""),
    ],
)
def test_a_run_of_parts_is_reported_and_not_accepted(
    tmp_path: Path, restarts: int | None, facts: dict[str, Any], name: str, status: str | None, refused: str
) -> None:
    run = _run(tmp_path / "run", restarts, facts)
    verdict = judged(run, tmp_path / "baselines")
    checks = {check.name: check for check in verdict.checks}
    assert not verdict.broken
    assert (checks[name].status if name in checks else None) == status
    assert name not in checks or not checks[name].gates
    if refused:
        with pytest.raises(UserError, match=refused):
            baselines.require_acceptable(run)
    else:
        baselines.require_acceptable(run)


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
