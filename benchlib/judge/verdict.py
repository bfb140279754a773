"""From a run folder to its verdict: complete runs go to the checks of their benchmark, for others the reason is stated."""

import time
from pathlib import Path
from typing import Any

import benchlib
from benchlib.benchmarks import BENCHMARKS
from benchlib.core import run_folder
from benchlib.core.errors import UserError
from benchlib.core.files import read_object, write_json
from benchlib.judge import baselines
from benchlib.judge.checks import UNREADABLE, Ask, Check, Verdict, save_verdict, verdict_of
from benchlib.judge.regression import repeats
from benchlib.launch import nodes
from benchlib.results.record import load
from benchlib.results.run import Result, Run, save_result

ENDED = Ask("run completed", "Did every rank finish its work?", "outcome")
JUDGED_BEFORE = Ask("judged by this version", "Do this version's definitions hold for the run?", "outcome")
NOTEBOOK_ERROR = "logs/notebook.error.json"
PLAIN = {"DeadKernelError": "its kernel died", "TimeoutError": ""}  # '' is an error's message alone


def judge(run_dir: Path | str, baselines_root: Path | None = None) -> Verdict:
    """Check a run, write ``verdict.json`` and return it. A damaged or unfinished run gets a verdict that says so."""
    run = Run(run_dir)
    verdict = judged(run, baselines_root)
    save_verdict(run.path, verdict)
    return verdict


def judged(run: Run, baselines_root: Path | None = None) -> Verdict:
    """Return the verdict of a run without writing anything."""
    try:
        return _judge(run, baselines_root)
    except UserError as error:
        status = load(run.path, whole=False).status
        how = f"{status['reason']}; " if status and status["outcome"] not in ("complete", "stopped") else ""
        return _broken([], f"{how}{error}")


def final(run: Run) -> Verdict:
    """Return the verdict that the notebook stored; judge the run where the notebook did not get that far, or stopped later."""
    try:
        stored, stopped = run.verdict, _notebook_error(run)
    except UserError:
        return judged(run)
    return judged(run) if stored is None or stopped is not None else stored


def _judge(run: Run, baselines_root: Path | None) -> Verdict:
    result, status = run.result, run.status
    if result is not None and result.status == "skipped":
        return verdict_of([], skipped=result.reason)
    if result is None and run.config.nnodes > 1 and status is not None and status["outcome"] == "complete":
        return _elsewhere(run)
    if broken := _why_broken(run):
        return _broken([], broken, status is not None and status["outcome"] == "stopped")
    faults = run_folder.file_faults(run.path, verdict=False)
    if not faults and (stored := _of_an_earlier_version(run)):
        return stored
    comparison, ranks = baselines.find(run, baselines_root), run.config.world_size
    ended = f"all {ranks} ranks exited normally" if ranks > 1 else "the rank exited normally"
    checks = [ENDED.answer("PASS", ended), *_restart_check(run)]
    if faults is not None:  # an older run has no files.json
        reason = "; ".join(faults) or "sizes and checksums match files.json"
        question = "Are the files unchanged since the run ended?"
        checks.append(Ask("files intact", question, "outcome").fact(not faults, reason))
    # A damaged file of the gate fails the run and leaves its other checks.
    if comparison.refused:
        checks.append(
            Ask("baseline readable", "Can the accepted runs be used?", "outcome").fact(False, comparison.refused)
        )
    checks += _own_checks(run, comparison)
    if stopped := _notebook_error(run):
        return _broken(checks, f"the measurement is complete, but the notebook failed: {stopped['message']}")
    verdict = verdict_of(checks, runs=1 + len(repeats(run)))
    if measured := comparison.calibration:
        verdict.gate = {"sentence": measured.sentence(), "method": measured.method(), "rows": measured.rows()}
    return verdict


def _of_an_earlier_version(run: Run) -> Verdict | None:
    """Return the stored verdict of a run that another minor version measured and judged; None for a run of this one.

    Between minor versions a number may have another definition, so this version's checks would call a right run wrong.
    """
    version = run.machine.get("versions", {}).get("benchlib", "")
    if run.verdict is None or not version or _minor(version) == _minor(benchlib.__version__):
        return None
    reason = f"benchlib {version} measured and judged this run; version {benchlib.__version__} may define its numbers otherwise"
    kept = [check for check in run.verdict.checks if check.name != JUDGED_BEFORE.name]
    note = JUDGED_BEFORE.answer("SKIPPED", f"{reason}, so its verdict stays", gates=False)
    return run.verdict.model_copy(update={"checks": [*kept, note]})


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _own_checks(run: Run, comparison: baselines.Comparison) -> list[Check]:
    try:
        return BENCHMARKS[run.config.benchmark].spec.judge(run, comparison)  # type: ignore[no-any-return]
    except UserError:
        raise
    except UNREADABLE as error:
        raise UserError(
            f"{run.path / 'result.json'} does not hold what the checks of {run.config.benchmark} need "
            f"({type(error).__name__}: {error}): it is foreign, altered or of another version"
        ) from error


def _elsewhere(run: Run) -> Verdict:
    """Return the verdict of a node without rank 0: its ranks exited normally, and rank 0 has the result."""
    where = next(iter(nodes.hosts(run.path)), "the node of rank 0")
    sentence = f"All ranks of this node exited normally; the result and the verdict are on {where}."
    return Verdict(verdict="SKIPPED", sentence=sentence, checks=[], elsewhere=where)


def _restart_check(run: Run) -> list[Check]:
    """Check for restarts and a resume: a run of parts may be judged by what it learnt, not by its speed."""
    how, question, reason = baselines.continued(run), "Did the ranks finish without a restart?", "no restart"
    if not run.config.max_restarts and not how:
        return []
    if how:
        failures = "; ".join(str(row.get("reason")) for row in (run.status or {}).get("earlier_attempts", []))
        part = "the times are of a part of the work, so the run cannot become a baseline"
        reason = f"{how}{f': {failures}' if failures else ''}; {part}"
    count = {"value": float(baselines.restarts(run)), "limit": "= 0", "gates": False}
    return [Ask("no restart", question, "outcome").answer("AMBIGUOUS" if how else "PASS", reason, **count)]


def _notebook_error(run: Run) -> dict[str, Any] | None:
    path = run.path / NOTEBOOK_ERROR
    return read_object(path, {"type": str, "message": str}) if path.exists() else None


def _broken(checks: list[Check], reason: str, stopped: bool = False) -> Verdict:
    listed = [ENDED.answer("FAIL", reason), *(check for check in checks if check.name != ENDED.name)]
    return verdict_of(listed, stopped=reason) if stopped else verdict_of(listed, broken=reason)


def _why_broken(run: Run) -> str:
    """Return why a run has no complete result; '' for a complete one."""
    status, result = run.status, run.result
    if status is not None and status["outcome"] != "complete":
        return str(status["reason"])
    if status is not None:
        complete = result is not None and result.status == "complete"
        return "" if complete else "every rank exited, but no complete result was written"
    what, stopped = "no rank was started", _notebook_error(run)
    if run.events:
        what = f"its last event was {run.events[-1]['kind']} from {run.events[-1]['source']}"
    elif stopped is not None:
        return f"{what}; the notebook failed: {stopped['message']}"
    return f"the run ended without a status: its supervisor was killed or the machine went down; {what}"


def mark_skipped(run: Run, reason: str) -> None:
    now = time.time()
    save_result(run.path, Result.of(run.config, status="skipped", reason=reason, started_at=now, ended_at=now))


def mark_notebook_error(run_dir: Path, error: BaseException) -> None:
    lines = str(getattr(error, "evalue", "") or error).strip().splitlines() or [""]
    name = getattr(error, "ename", "") or type(error).__name__
    message = (PLAIN[name] or lines[0]) if name in PLAIN else f"{name}: {lines[0]}"
    write_json(run_dir / NOTEBOOK_ERROR, {"type": name, "message": message})
