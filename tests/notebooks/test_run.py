"""Whole runs through the command line: what passes, and what is left when the runner or the kernel is killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import nbformat
import psutil
import pytest

from benchlib.core.events import read_events
from benchlib.launch.processes import marked

END_S = 15.0
LONG = ["--set", "train_questions=2000", "--set", "epochs=200", "--set", "budget_s=900", "--set", "stall_timeout_s=30"]


def start(out, *arguments, **options):
    command = [sys.executable, "-m", "benchlib.cli", "run", "squad", "--backend", "cpu", "--out", str(out), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def until(condition, within_s=60.0):
    end = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return found


def run_dir_of(out):
    return until(lambda: next(out.glob("*/squad-*"), None))


@pytest.fixture
def training(tmp_path):
    """A run that is in the middle of its training; whatever a test leaves is ended."""
    process = start(tmp_path, *LONG, start_new_session=True)
    run_dir = run_dir_of(tmp_path)
    until(lambda: read_events(run_dir, ["step"]))
    yield process, run_dir
    for left in [*marked(run_dir), *_family(process)]:
        left.kill()
    process.communicate()


def _family(process):
    if not psutil.pid_exists(process.pid):
        return []
    return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]


def kernel_of(process):
    return next(
        child
        for child in psutil.Process(process.pid).children()
        if any("ipykernel" in word for word in child.cmdline())
    )


def assert_over(run_dir, family):
    end = time.monotonic() + END_S
    while left := [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] + marked(
        run_dir
    ):
        assert time.monotonic() < end, [one.cmdline() for one in left]
        time.sleep(0.1)


def report_of(run_dir):
    return (run_dir / "report.html").read_text()


def test_a_smoke_run_passes_and_leaves_everything(tmp_path):
    process = start(tmp_path, env=os.environ | {"COLUMNS": "160"})
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    run_dir = run_dir_of(tmp_path)
    for name in (
        "config.json",
        "origins.json",
        "machine.json",
        "samples.parquet",
        "result.json",
        "verdict.json",
        "summary.json",
        "notebook.ipynb",
        "predictions.json",
        "status.json",
    ):
        assert (run_dir / name).exists(), name
    verdict = json.loads((run_dir / "verdict.json").read_text())
    assert verdict["verdict"] == "PASS"
    for name in ("loss decreases", "ranks equal", "sample count", "learning rate", "time budget", "possible speed"):
        assert next(check for check in verdict["checks"] if check["name"] == name)["status"] == "PASS", name
    injected = json.loads((run_dir / "notebook.ipynb").read_text())["metadata"]["papermill"]["parameters"]
    assert injected == {"tier": "smoke", "backend": "cpu", "run_dir": str(run_dir)}, "config.json is the hand-over"
    result = json.loads((run_dir / "result.json").read_text())
    assert result["world_size"] == 2
    assert {metric["name"] for metric in result["metrics"]} >= {
        "f1_minisquad_tiny",
        "train_samples_per_s_minisquad_tiny",
        "allreduce_gbps",
    }
    html = report_of(run_dir)
    assert "PASS" in html
    assert len(html) < 500_000
    assert not re.search(r"<script|https?://[^\s\"'<]+\.(js|css|png)", html)
    assert "report.html" in output
    assert run_dir.name in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupt_ends_the_run_in_order(training, number):
    process, run_dir = training
    family = _family(process)
    process.send_signal(number)
    process.communicate(timeout=END_S + 15)
    assert process.returncode == 130
    assert_over(run_dir, family)
    assert "Stopped by the user" in report_of(run_dir)


@pytest.mark.parametrize("delays", [[1.0], [2.0, 0.2], ["folder"], ["folder", 0.1, 0.5], ["kernel", 0.2, 1.0]], ids=str)
def test_every_interrupt_is_130_and_a_run_that_began_has_status_and_report(tmp_path, delays):
    process = start(tmp_path, *LONG)
    for delay in delays:
        if delay == "folder":
            until(lambda: list(tmp_path.glob("*/squad-*/machine.json")))
        elif delay == "kernel":
            until(lambda: list(tmp_path.glob("*/squad-*/logs/kernel.err")))
        else:
            time.sleep(delay)
        process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=3 * END_S + 15)
    assert process.returncode == 130, output
    assert "Stopped by the user" in output
    for run_dir in tmp_path.glob("*/squad-*"):
        assert json.loads((run_dir / "status.json").read_text())["outcome"] == "stopped"
        assert "Stopped by the user" in report_of(run_dir)
        assert_over(run_dir, [])


def test_a_second_interrupt_while_the_ranks_are_ended_changes_nothing(training):
    process, run_dir = training
    family = _family(process)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.4)
    process.communicate(timeout=END_S + 15)
    assert process.returncode == 130
    assert_over(run_dir, family)
    assert json.loads((run_dir / "status.json").read_text())["outcome"] == "stopped"
    assert "Stopped by the user" in report_of(run_dir)


@pytest.mark.parametrize("cell", ["os.kill(os.getpid(), signal.SIGSTOP)", "signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"], ids=["stopped", "deaf"])  # fmt: skip
def test_a_kernel_that_does_not_answer_is_killed_at_the_limit_of_the_whole_run(tmp_path, cell):
    path = tmp_path / "book.ipynb"
    quick = nbformat.v4.new_code_cell("import os, pathlib, signal, time; print(os.getpid())")
    nbformat.write(nbformat.v4.new_notebook(cells=[quick, nbformat.v4.new_code_cell(cell)]), path)
    words = "import pathlib, sys; from benchlib.show.headless import execute; execute(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), {}, 20.0)"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", words, str(path), str(tmp_path / "executed.ipynb")], capture_output=True, text=True, check=False, timeout=90
    )  # fmt: skip
    assert "TimeoutError: no end within 20 s" in done.stderr
    assert time.monotonic() - began < 20 + 3 * END_S
    kernel = int(nbformat.read(tmp_path / "executed.ipynb", 4).cells[0].outputs[0].text)
    assert not psutil.pid_exists(kernel)


def test_a_killed_runner_leaves_no_process_and_the_next_report_tells(training):
    process, run_dir = training
    family = _family(process)
    process.kill()
    assert_over(run_dir, family)
    assert not (run_dir / "report.html").exists()
    done = subprocess.run(
        [sys.executable, "-m", "benchlib.cli", "report", str(run_dir), "--out", str(run_dir.parents[1])],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "launching process is gone" in report_of(run_dir)


def test_a_killed_kernel_ends_the_run_with_a_report(training):
    process, run_dir = training
    family = _family(process)
    kernel_of(process).kill()
    process.communicate(timeout=END_S + 15)
    assert process.returncode == 2
    assert_over(run_dir, family)
    assert "launching process is gone" in report_of(run_dir)


def test_a_killed_rank_is_named_in_terminal_and_report(training):
    process, run_dir = training
    victim = next(event["pid"] for event in read_events(run_dir, ["start"]) if event["source"] == "rank1")
    os.kill(victim, signal.SIGKILL)
    output, _ = process.communicate(timeout=END_S + 15)
    assert process.returncode == 2
    assert "rank 1 was killed by SIGKILL" in " ".join(output.split())
    assert "rank 1 was killed by SIGKILL" in report_of(run_dir)
    assert marked(run_dir) == []


def test_papermill_by_hand_refuses_an_unknown_parameter_before_any_rank(tmp_path, monkeypatch):
    import papermill
    from papermill.exceptions import PapermillExecutionError

    from benchlib.core.files import home
    from benchlib.show.headless import kernel_manager

    monkeypatch.setenv("BENCHLIB_OUTPUTS", str(tmp_path / "outputs"))
    notebook = home() / "notebooks" / "10_squad.ipynb"
    for parameters, words in (
        ({"tire": "quick"}, "did you mean tier"),
        ({"epochs": 2}, r'-y "\{overrides: \{epochs: 2\}\}"'),
        ({"tier": "quik"}, "did you mean quick"),
        ({"seed": "x"}, "expected a whole number"),
    ):
        with pytest.raises(PapermillExecutionError, match=words):
            papermill.execute_notebook(
                str(notebook), str(tmp_path / "out.ipynb"), parameters=parameters, progress_bar=False, kernel_manager_class=kernel_manager()
            )  # fmt: skip
    assert not (tmp_path / "outputs").exists()
