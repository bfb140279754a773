"""From a run folder to its verdict: whole runs go to their benchmark's checks, others say why they are not whole."""

import time
from pathlib import Path
from typing import Any

import psutil

from benchlib import baselines
from benchlib.checks import Check, Verdict, save_verdict, verdict_of
from benchlib.errors import UserError
from benchlib.files import read_json, write_json
from benchlib.registry import BENCHMARKS
from benchlib.results import Result, Run, save_result

NOTEBOOK_ERROR = "logs/notebook.error.json"


def judge(run_dir: Path | str, baselines_root: Path | None = None) -> Verdict:
    """Check a run, write ``verdict.json`` and return it. A damaged or unfinished run gets a verdict that says so."""
    run = Run(run_dir)
    try:
        verdict = _judge(run, baselines_root)
    except UserError as error:
        verdict = _broken([], str(error))
    save_verdict(run.path, verdict)
    return verdict


def _judge(run: Run, baselines_root: Path | None) -> Verdict:
    benchmark = BENCHMARKS[run.config.benchmark]
    result = run.result
    if result is not None and result.status == "skipped":
        return verdict_of([], skipped=result.reason)
    if result is None and run.config.nnodes > 1 and run.status is not None and run.status["outcome"] == "complete":
        return verdict_of([], skipped="the ranks of this node ended in order; the node of rank 0 holds the result")
    broken = _why_broken(run)
    if broken:
        return _broken([], broken)
    comparison = baselines.find(run, baselines_root)
    checks: list[Check] = [
        Check(
            name="run completed",
            kind="outcome",
            question="Did every rank finish its work?",
            status="PASS",
            reason=f"{run.config.world_size} of {run.config.world_size} ranks ended in order",
        ),
        *benchmark.load("checks")(run, comparison),
    ]
    error = run.path / NOTEBOOK_ERROR
    if error.exists():
        return _broken(checks, f"the measurement is whole, but the notebook stopped: {read_json(error)['message']}")
    verdict = verdict_of(checks)
    measured = comparison.calibration
    if measured is not None:
        verdict.gate = {"sentence": measured.sentence(), "rows": measured.rows()}
    return verdict


def _broken(checks: list[Check], reason: str) -> Verdict:
    outcome = Check(
        name="run completed", kind="outcome", question="Did every rank finish its work?", status="FAIL", reason=reason
    )
    return verdict_of([outcome, *(check for check in checks if check.name != outcome.name)], broken=reason)


def _why_broken(run: Run) -> str:
    """Return why a run has no complete result, in plain words; '' for a whole run."""
    status, result = run.status, run.result
    if status is not None and status["outcome"] != "complete":
        error = run.path / NOTEBOOK_ERROR
        dead = error.exists() and read_json(error)["type"] == "DeadKernelError"
        return ("the notebook's kernel died; " if dead else "") + str(status["reason"])
    if result is not None and result.status == "complete" and status is not None:
        return ""
    if status is None:
        last = run.events[-1] if run.events else None
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last["t"])) if last else None
        what = (
            f"its last sign of life was {last['kind']} from {last['source']} at {when}"
            if last
            else "no rank was started"
        )
        return f"the run was cut off and nobody was left to say why; {what}"
    return "every rank ended, but no complete result was written"


def is_running(run_dir: Path | str) -> bool:
    """Tell whether a process on this machine still works on the run folder."""
    path = str(Path(run_dir).resolve())
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(word.endswith(("benchlib.supervise", "benchlib.worker")) for word in words) and path in {
            str(Path(w).resolve()) for w in words if "/" in w
        }:
            return True
    return False


def mark_skipped(run: Run, reason: str) -> None:
    """Write the result of a run whose backend is not there."""
    save_result(run.path, Result.of(run.config, status="skipped", reason=reason, ended_at=time.time()))


def mark_notebook_error(run_dir: Path, error: BaseException) -> None:
    """Keep the error that stopped the notebook beside the run."""
    message = str(getattr(error, "evalue", "") or error).strip().splitlines()
    name = getattr(error, "ename", "") or type(error).__name__
    write_json(run_dir / NOTEBOOK_ERROR, {"type": name, "message": f"{name}: {message[0] if message else ''}"})


def summary_rows(verdict: Verdict) -> list[dict[str, Any]]:
    """Return the checks as rows for a table: name, status, reason, limit."""
    return [
        {"check": check.name, "status": check.status, "reason": check.reason, "limit": check.limit}
        for check in verdict.checks
    ]
