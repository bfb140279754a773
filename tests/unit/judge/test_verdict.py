"""One verdict a run: the notebook's where it made one, and the command line's where it did not."""

import json

import pytest
from click.testing import CliRunner
from make_run import make_run
from make_smoke import unpack

from benchlib.benchmarks import BENCHMARKS
from benchlib.cli import main
from benchlib.commands.run import KERNEL_DIED
from benchlib.core.run_folder import record_files
from benchlib.judge.verdict import final, judge, judged, mark_notebook_error
from benchlib.launch.launch import blame_notebook
from benchlib.results.record import load
from benchlib.results.run import Run
from benchlib.spec.tables import ColumnFault

FACTS = {"checksums": [["aa", "aa"]], "checksums_equal": True}


@pytest.fixture
def run_dir(tmp_path):
    """A complete run whose notebook stored a verdict that no judging would give."""
    path = make_run(tmp_path / "run", facts=FACTS)
    verdict = json.loads((path / "verdict.json").read_text())
    (path / "verdict.json").write_text(json.dumps(verdict | {"sentence": "As the notebook said."}))
    return path


def test_a_run_that_the_notebook_did_not_judge_is_judged(run_dir):
    (run_dir / "verdict.json").unlink()
    verdict = final(Run(run_dir))
    assert verdict.sentence != "As the notebook said." and not verdict.broken
    assert "run completed" in [check.name for check in verdict.checks]


def test_a_notebook_that_fails_after_its_verdict_breaks_the_run(run_dir):
    mark_notebook_error(run_dir, ValueError("no such column"))
    verdict = final(Run(run_dir))
    assert verdict.broken and verdict.exit_code() == 2
    assert verdict.sentence == "The measurement is complete, but the notebook failed: ValueError: no such column"
    assert len(verdict.checks) > 1, "what was measured stays judged"


def test_a_kernel_that_died_breaks_the_run_although_its_ranks_were_stopped(tmp_path):
    path = make_run(tmp_path / "run", outcome="stopped", reason="the launching process is gone", steps=5)
    mark_notebook_error(path, type("DeadKernelError", (Exception,), {})("Kernel died"))
    blame_notebook(path, "failed", KERNEL_DIED)
    verdict = final(Run(path))
    assert Run(path).status["outcome"] == "failed", "one word in every file"
    assert (verdict.verdict, verdict.sentence, verdict.exit_code()) == ("BROKEN", "The notebook's kernel died", 2)
    assert load(path).model_copy(update={"verdict": verdict}).word == "BROKEN"


def test_a_run_of_another_minor_version_keeps_its_verdict_and_an_edited_one_does_not(run_dir):
    """Its numbers may be right by the definitions that it was measured by, and wrong by today's."""
    machine = json.loads((run_dir / "machine.json").read_text())
    machine["versions"]["benchlib"] = "0.1.7"
    (run_dir / "machine.json").write_text(json.dumps(machine))
    verdict = judged(Run(run_dir))
    assert verdict.sentence == "As the notebook said."
    (note,) = [check for check in verdict.checks if check.name == "judged by this version"]
    assert (note.status, note.gates) == ("SKIPPED", False) and "benchlib 0.1.7 measured" in note.reason
    record_files(run_dir)
    (run_dir / "result.json").write_text((run_dir / "result.json").read_text().replace("}", "} ", 1))
    assert judged(Run(run_dir)).verdict == "FAIL"


def test_a_mistake_in_a_column_is_a_fault_of_the_kit_with_its_traceback(tmp_path, monkeypatch):
    """The machine is not blamed for it: no verdict is stored."""
    folder, spec = tmp_path / "machine-cpu-101500-abcdef", BENCHMARKS["machine"].spec
    column = next(table for table in spec.tables if table.name == "allreduce")["algbw_gbps"].col
    unpack("machine", folder)
    monkeypatch.setitem(column.__dict__, "of", lambda size, times: times.mean() / size)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ColumnFault, match="the column algbw_gbps of allreduce cannot be computed of"):
        judge(folder)
    assert not (folder / "verdict.json").exists()
    for verb in ("judge", "report"):
        answer = CliRunner().invoke(main, [verb, str(folder)])
        assert answer.exit_code == 2 and "a fault of benchlib itself (ColumnFault: the column" in answer.output
        (log,) = tmp_path.glob("benchlib-error-*.log")
        assert "times.mean() / size" in log.read_text() and "AttributeError: 'list' object" in log.read_text()
        log.unlink()
