"""The command line: wrong input ends before anything starts, and the way to the help is short."""

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchlib.benchmarks import BENCHMARKS
from benchlib.cli import main
from benchlib.commands import output
from benchlib.commands import run as runner
from benchlib.commands.kit import budget_s
from benchlib.config import cluster
from benchlib.config.schema import read_params, tier_names
from benchlib.core.machine import BACKENDS
from benchlib.core.text import duration
from benchlib.judge.checks import Check, verdict_of
from benchlib.launch import plan

PROBE = {
    "backends": {
        "cpu": {"available": True, "count": 1, "names": ["cpu"], "reason": ""},
        "cuda": {"available": False, "count": 0, "reason": "no driver"},
    },
    "versions": {},
}


@pytest.fixture
def call(monkeypatch):
    """Call the command line in this process, with torch's answer given."""
    monkeypatch.setattr(plan, "probe_devices", lambda: PROBE)
    monkeypatch.setattr(output.console, "width", 200)

    def run(*arguments):
        return CliRunner().invoke(main, arguments)

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "sqad"], "did you mean squad"),
        (["run", "squad", "--tier", "quik"], "did you mean quick"),
        (["run", "squad", "--set", "epochs"], "NAME=VALUE"),
        (["run", "squad", "--set", "tier=nightly"], "use --tier"),
        (["run", "squad", "--set", "lr=1"], "did you mean learning_rate"),
        (["run", "squad", "epochs=2"], "unexpected extra argument (epochs=2)"),
        (["run", "squad", "--set", "epochs=-1"], "Input should be greater than 0"),
        (["run", "squad", "--backend", "gpu"], "'gpu' is not one of 'auto', 'cpu', 'cuda'"),
        (["run", "quick", "--set", "nonsense=1"], "unknown parameter"),
        (["run", "squad", "--set", "limits.trian_samples=0.1"], "did you mean train_samples_per_s"),
        (["run", "smoke", "--set", "limits.nonsense=0.1"], "no metric with a limit has this name"),
        (["run", "quick", "--tier", "nightly"], "is a tier itself"),
    ],
)
def test_wrong_input_is_told_before_any_process_starts(call, monkeypatch, tmp_path, arguments, words):
    monkeypatch.setattr(plan, "probe_devices", lambda: pytest.fail("asked torch although the input is wrong"))
    result = call(*arguments, "--out", str(tmp_path))
    assert result.exit_code == 2
    assert words in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_shows_what_would_start_and_starts_nothing(call, tmp_path):
    words = ("run", "squad", "--tier", "quick", "--set", "epochs=2", "--max-restarts", "2", "--dry-run")
    shown = call(*words, "--out", str(tmp_path))
    assert shown.exit_code == 0, shown.output
    for text in ("torch.distributed.run", "--max-restarts 2", "set by hand", "expected work", "doc_stride"):
        assert text in shown.output
    assert list(tmp_path.iterdir()) == []
    refused = call(*words, "--set", "launcher=local")
    assert refused.exit_code == 2 and "max_restarts = 2 with launcher=local" in refused.output


def test_a_dry_run_of_a_tier_is_a_table(call):
    lines = call("run", "quick", "--dry-run").output.splitlines()
    rows = {line.split()[0]: line.split() for line in lines if not line.startswith(" ")}
    names = [name for name in BENCHMARKS if name in read_params("tiers", "quick")]
    assert [name for name in rows if name in BENCHMARKS] == names
    assert "300" in rows["squad"] and "120" in rows["machine"], "the budgets"


def test_a_missing_backend_is_skipped_with_its_reason_and_a_report(call, tmp_path):
    result = call("run", "squad", "--backend", "cuda", "--out", str(tmp_path))
    assert result.exit_code == 3, "a backend that was named and is not there must not look like a pass"
    assert "SKIPPED" in result.output
    assert "no driver" in result.output
    run_dir = next(tmp_path.glob("smoke-*/squad-cuda-*"))
    assert json.loads((run_dir / "result.json").read_text())["status"] == "skipped"
    assert "no driver" in (run_dir / "report.html").read_text()
    assert (tmp_path / "index.html").exists()
    assert call("run", "smoke", "--backend", "cuda", "--out", str(tmp_path)).exit_code == 3


@pytest.mark.parametrize(
    ("of_tier", "backend", "checks", "missed"),
    [
        (False, "auto", 1, True),
        (False, "cpu", 0, True),
        (True, "auto", 1, False),
        (True, "auto", 0, False),
        (True, "cpu", 1, False),
        (True, "cpu", 0, True),
    ],
)
def test_what_was_named_and_skipped_is_exit_code_3_and_a_tier_may_skip(tmp_path, of_tier, backend, checks, missed):
    chosen = plan.plan("parity", "smoke", backend, {}, PROBE)
    chosen = dataclasses.replace(chosen, of_tier=of_tier)
    skipped = Check(name="parity", kind="target", question="?", status="SKIPPED", reason="nothing was compared")
    verdict = verdict_of([skipped] * checks, skipped="" if checks else "no device")
    assert verdict.verdict == "SKIPPED"
    assert runner._missed(chosen, plan.prepare(chosen, tmp_path), verdict) is missed
    outcome = runner.Outcome(Path("run"), verdict, False, missed)
    assert outcome.exit_code() == (3 if missed else 0)
    assert dataclasses.replace(outcome, interrupted=True).exit_code() == 130


def test_list_names_everything(call):
    output = call("list").output
    assert all(name in output for name in (*BENCHMARKS, *tier_names(), *BACKENDS, *cluster.names()))
    assert f"at most {duration(budget_s(read_params('tiers', 'quick')))}" in " ".join(output.split())


def test_the_budget_of_a_tier_counts_the_default_of_what_it_sets_none_for():
    """60 s of a config, 120 s of a section; what is no part of the tier does not count."""
    assert budget_s({"squad": None, "machine": {"budget_s": 120}}) == 180
    assert budget_s({"all": {"budget_s": 30}, "squad": {"epochs": 2}, "machine": {"budget_s": 120}}) == 150


CLAIM = {
    "claim_version": 1,
    "source": "here",
    "claims": [
        {
            "subject": "a \u2013 b \u00d7",
            "speed": {"samples_per_s": 19667, "ranks": 8, "features": 88641, "epochs": 2, "wall_s": 24.08},
        }
    ],
}


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", "a ? b ?"), ("latin-1", "a ? b \u00d7"), ("utf-8", "a \u2013 b \u00d7")]
)
def test_what_the_encoding_of_a_pipe_lacks_shows_as_a_question_mark(tmp_path, encoding, shown):
    """In a table and in an error; the file begins with a mark of the byte order."""
    path = tmp_path / "claim.json"
    path.write_text(json.dumps(CLAIM, ensure_ascii=False), encoding="utf-8-sig")
    for code, *words in ((1, path), (2, "a \u2013 b \u00d7")):
        answer = CliRunner(charset=encoding).invoke(main, ["judge", *map(str, words)])
        assert (answer.exit_code, shown in answer.output_bytes.decode(encoding)) == (code, True), answer.output


def test_an_unexpected_error_is_one_sentence_with_a_file_and_exit_code_2(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("benchlib.commands.judge.judged", None)
    shown = CliRunner().invoke(main, ["judge", str(Path(__file__))])
    (log,) = tmp_path.glob("benchlib-error-*.log")
    assert shown.exit_code == 2 and "Traceback" not in shown.output and str(log) in shown.output.replace("\n", "")
    assert "TypeError: 'NoneType' object is not callable" in log.read_text()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("serve", "--engine", "sim", "--step-ms", "nan"), "nan is not a finite number"),
        (("serve", "--engine", "sim", "--step-ms", "inf"), "not in the range 0<=x<=60000"),
        (("serve", "--engine", "sim", "--drain-s", "nan"), "nan is not a finite number"),
        (("serve", "--engine", "sim", "--slots", "99999999999"), "not in the range 1<=x<=65536"),
        (("page", ".", "--price", "inf"), "inf is not a finite number"),
    ],
)
def test_a_number_that_no_machine_can_wait_for_or_hold_is_refused(call, words, reason):
    result = call(*words)
    assert result.exit_code == 2 and reason in result.output


def test_a_verb_with_a_slip_is_answered_with_the_nearest(call):
    result = call("rum", "quick")
    assert result.exit_code == 2 and "no verb 'rum': did you mean run?" in result.output


def test_more_ranks_than_memory_holds_are_refused(call, monkeypatch):
    monkeypatch.setattr(plan, "memory_bytes", lambda: 4 * 2**30)
    result = call("run", "machine", "--tier", "smoke", "--backend", "cpu", "--set", "nproc=17", "--dry-run")
    assert result.exit_code == 2 and "17 take 4 GiB, and this machine has 4 GiB: set nproc=16 or less" in result.output
    assert (
        call("run", "machine", "--tier", "smoke", "--backend", "cpu", "--set", "nproc=16", "--dry-run").exit_code == 0
    )
