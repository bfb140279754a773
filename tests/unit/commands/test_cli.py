"""The command line: wrong input ends before anything starts, and the way to the help is short."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchlib.benchmarks import BENCHMARKS
from benchlib.cli import main
from benchlib.commands import output
from benchlib.commands import run as runner
from benchlib.commands.list import budget_s
from benchlib.config.schema import read_params
from benchlib.core.text import duration
from benchlib.judge.checks import Check, verdict_of
from benchlib.launch import plan
from benchlib.results.run import Result, save_result

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
        (["run", "squad", "--backend", "cudda"], "did you mean cuda"),
        (["run", "squad", "--set", "epoch=2"], "did you mean epochs"),
        (["run", "squad", "--set", "epochs"], "NAME=VALUE"),
        (["run", "squad", "--set", "lr=1"], "did you mean learning_rate"),
        (["run", "squad", "epochs=2", "seed=3"], "unexpected extra arguments (epochs=2 seed=3)"),
        (["run", "squad", "--set", "epochs=-1"], "Input should be greater than 0"),
        (["run", "squad", "--set", "x=1;print('INJECTED')#=2"], "unknown parameter"),
        (["run", "quick", "--set", "nonsense=1"], "unknown parameter"),
        (["run", "quick", "--tier", "nightly"], "is a tier itself"),
    ],
)
def test_wrong_input_is_told_before_any_process_starts(call, monkeypatch, tmp_path, arguments, words):
    monkeypatch.setattr(plan, "probe_devices", lambda: pytest.fail("asked torch although the input is wrong"))
    result = call(*arguments, "--out", str(tmp_path))
    assert result.exit_code == 2
    assert words in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_shows_everything_and_starts_nothing(call, tmp_path):
    result = call("run", "squad", "--tier", "quick", "--set", "epochs=2", "--dry-run", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "benchlib.runtime.worker" in result.output
    assert "set by hand" in result.output
    assert "expected work" in result.output
    assert "checkpoint_every" not in result.output and len(result.output.splitlines()) < 60
    whole = call("run", "squad", "--tier", "quick", "--dry-run", "--all")
    assert "checkpoint_every" in whole.output
    assert list(tmp_path.iterdir()) == []


def test_max_restarts_takes_torchrun_unless_a_launcher_is_set(call):
    result = call("run", "squad", "--max-restarts", "2", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "torch.distributed.run" in result.output
    assert "--max-restarts 2" in result.output
    assert "from the last whole checkpoint" in result.output
    result = call("run", "squad", "--max-restarts", "2", "--set", "launcher=local", "--dry-run")
    assert result.exit_code == 2
    assert "max_restarts = 2 with launcher=local" in result.output


def test_a_dry_run_of_a_tier_is_a_table_and_with_all_every_benchmark_in_full(call, tmp_path):
    result = call("run", "quick", "--dry-run", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert len(lines) < 50
    rows = {line.split()[0]: line.split() for line in lines if not line.startswith(" ")}
    names = [name for name in BENCHMARKS if name in read_params("tiers", "quick")]
    assert [name for name in rows if name in BENCHMARKS] == names
    assert "120" in rows["squad"] and "45" in rows["machine"], "the budgets"
    whole = call("run", "quick", "--dry-run", "--all")
    assert whole.output.index("machine, tier quick") < whole.output.index("squad, tier quick")
    assert "checkpoint_every" in whole.output


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


@pytest.mark.parametrize(
    ("members", "missed"), [({}, False), ({"members": "eager"}, False), ({"members": "eager,bf16"}, True)]
)
def test_a_member_that_was_named_and_skipped_is_exit_code_3(tmp_path, members, missed):
    chosen = plan.plan("parity", "smoke", "cpu", members, PROBE)
    rows = [{"member": "eager", "status": "ok"}, {"member": "bf16", "status": "skipped"}]
    run_dir = plan.prepare(chosen, tmp_path)
    save_result(run_dir, Result.of(chosen.config, status="complete", tables={"members": rows}))
    passed = Check(name="parity of eager", kind="target", question="?", status="PASS", reason="equal")
    assert runner._missed(chosen, run_dir, verdict_of([passed])) is missed


def test_list_names_everything(call):
    output = call("list").output
    for name in ("squad", "machine", "quick", "weekend", "cuda", "rocm", "xpu", "tpu", "mps"):
        assert name in output
    assert f"at most {duration(budget_s(read_params('tiers', 'quick')))}" in " ".join(output.split())


def test_the_help_imports_little():
    """Its time is that of its imports."""
    code = "import atexit, sys; atexit.register(lambda: print(*sys.modules)); from benchlib.cli import main; main(['--help'])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = {name.partition(".")[0] for name in said.splitlines()[-1].split()}
    slow = {"torch", "numpy", "pandas", "matplotlib", "IPython", "transformers", "aiohttp", "psutil", "yaml"}
    assert "click" in loaded and not loaded & slow


def test_a_relative_folder_of_runs_is_relative_to_where_the_user_stands(monkeypatch, tmp_path):
    """The notebook is executed elsewhere: a relative path would lead to another place there."""
    seen = []
    monkeypatch.setattr(plan, "plans", lambda *arguments: [])
    monkeypatch.setattr(runner, "run_all", lambda plans, out, *more: seen.append(out) or 0)
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(main, ["run", "squad", "--out", "here"])
    assert seen == [tmp_path / "here"]


def test_an_unexpected_error_is_one_sentence_with_a_file_and_exit_code_2(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("benchlib.commands.judge.judge_files", None)
    shown = CliRunner().invoke(main, ["judge", str(Path(__file__))])
    (log,) = tmp_path.glob("benchlib-error-*.log")
    assert shown.exit_code == 2 and "Traceback" not in shown.output and str(log) in shown.output.replace("\n", "")
    assert "TypeError: 'NoneType' object is not callable" in log.read_text()


@pytest.mark.parametrize(
    "words",
    [
        ("run", "squad", "--out", ""),
        ("run", "squad", "-b", ""),
        ("list", "--runs", "--out="),
        ("parity", "merge", "--to", ""),
        ("report", ""),
    ],
)
def test_an_empty_word_means_nothing_else(words):
    """An unset variable of a shell must not stand for a default, nor for the working folder."""
    answer = CliRunner().invoke(main, words)
    assert answer.exit_code == 2 and "an empty" in answer.output and "give one, or leave it out" in answer.output


@pytest.mark.parametrize(
    "words",
    [
        ("run", "squad", "--backend", "cpu", "--out", "NAME"),
        ("compare", "NAME", "NAME"),
        ("judge", "NAME"),
        ("run", "squad", "--set", "cluster=NAME.yaml"),
    ],
)
@pytest.mark.parametrize("name", ["x" * 256, "ü" * 128])
def test_a_name_that_no_file_system_takes_is_one_sentence(words, name):
    answer = CliRunner().invoke(main, [word.replace("NAME", name) for word in words])
    assert answer.exit_code == 2 and "Traceback" not in answer.output and "fault of benchlib" not in answer.output
    assert "bytes; most file systems take 255: shorten it" in answer.output


def test_braces_in_a_path_are_no_places_for_parameters():
    from papermill.parameterize import parameterize_path

    from benchlib.show.headless import _literal

    path = Path("/runs/{tier}/{0}/{{x}}/{unknown!r}")
    assert parameterize_path(_literal(path), {"tier": "smoke"}) == str(path)
