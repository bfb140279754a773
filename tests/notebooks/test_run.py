"""Whole runs through the command line: what is left when the runner, the kernel or a rank is interrupted or killed.

What is killed is a light benchmark whose ranks only add; tests/dist kills ranks that train.
"""

import contextlib
import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from waiting import END_S, until

from benchlib.core.errors import UserError
from benchlib.core.events import read_events
from benchlib.core.files import home
from benchlib.launch.processes import marked

LONG = ["numbers=300000", "rounds=1000000", "budget_s=900", "stall_timeout_s=300", "nproc=1"]


def run_dir_of(out):
    return until(lambda: next(out.glob("*/*-cpu-*"), None))


@pytest.fixture
def begun(joined, tmp_path):
    """Begin a run of one rank that would take an hour; whatever a test leaves is ended."""
    processes = []

    def begin(*settings):
        command = [sys.executable, "-m", "benchlib.cli", "run", "tally", "--backend", "cpu", "--out", str(tmp_path)]
        command += [word for setting in (*LONG, *settings) for word in ("--set", setting)]
        options = {"env": joined.env, "text": True, "start_new_session": True}
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options))
        return processes[-1]

    yield begin
    left = [process for run_dir in tmp_path.glob("*/tally-*") for process in marked(run_dir)]
    for process in [*left, *(one for begun in processes for one in _family(begun))]:
        process.kill()
    for process in processes:
        process.communicate()


@pytest.fixture
def adding(begun, tmp_path):
    """A run of two ranks that is in the middle of its work."""
    process = begun("nproc=2")
    run_dir = run_dir_of(tmp_path)
    until(lambda: {event["source"] for event in read_events(run_dir, ["progress"])} == {"rank0", "rank1"})
    return process, run_dir


def _family(process):
    if not psutil.pid_exists(process.pid):
        return []
    return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]


def kernel_of(process):
    """Return the kernel of a program, None while it has none."""
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.Error):
            if "ipykernel_launcher" in child.cmdline():
                return child
    return None


def over(run_dir, family=()):
    """Wait until nothing of a run is left; return how it ended."""

    def gone():
        there = [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        return not there and not marked(run_dir)

    until(gone)
    return json.loads((run_dir / "status.json").read_text())["outcome"]


def says_stopped(text):
    """Whether a text says that the run was stopped; of several interrupts one may end the kernel before it can say by whom."""
    return "Stopped by the user" in text or "topped: the launching process is gone" in text


def report_of(run_dir):
    return (run_dir / "report.html").read_text()


@pytest.mark.parametrize(
    ("file", "numbers"),
    [
        ("", [signal.SIGINT]),  # while torch is asked what is here
        ("events-rank0.jsonl", [signal.SIGTERM, signal.SIGINT, signal.SIGINT]),
    ],
)
def test_every_interrupt_is_130_and_a_run_that_began_has_status_and_report(begun, tmp_path, file, numbers):
    """Also a request to end, which interrupts meanwhile do not change."""
    process = begun()
    until(lambda: list(tmp_path.glob(f"*/*/{file}")) if file else psutil.Process(process.pid).children())
    family = _family(process)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.2)
    output, _ = process.communicate(timeout=END_S)
    assert process.returncode == 130, output
    assert says_stopped(output), output
    for run_dir in tmp_path.glob("*/tally-*"):
        assert over(run_dir, family) == "stopped"
        assert says_stopped(report_of(run_dir))


def test_a_killed_runner_leaves_no_process_and_the_next_report_tells(adding, joined):
    process, run_dir = adding
    family = _family(process)
    process.kill()
    assert over(run_dir, family) == "stopped"
    assert not (run_dir / "report.html").exists()
    command = [sys.executable, "-m", "benchlib.cli", "report", str(run_dir), "--out", str(run_dir.parents[1])]
    done = subprocess.run(command, env=joined.env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "launching process is gone" in report_of(run_dir)


def test_a_killed_kernel_is_named_in_terminal_and_report(adding):
    process, run_dir = adding
    family = _family(process)
    kernel_of(process).kill()
    output, _ = process.communicate(timeout=END_S)
    assert process.returncode == 2
    assert over(run_dir, family) == "failed"
    assert "BROKEN" in report_of(run_dir) and "kernel died" in report_of(run_dir)
    assert "kernel died" in " ".join(output.split())


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"tire": "quick"}, "did you mean tier"),
        ({"epochs": 2}, r'-y "\{overrides: \{epochs: 2\}\}"'),
    ],
    ids=str,
)
def test_papermill_by_hand_refuses_an_unknown_parameter_before_any_rank(tmp_path, monkeypatch, parameters, words):
    monkeypatch.setenv("BENCHLIB_OUTPUTS", str(tmp_path / "outputs"))
    notebook = load_notebook_node(str(home() / "notebooks" / "10_squad.ipynb"))
    shell = InteractiveShell()  # what a kernel runs cells with
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    for cell in parameterize_notebook(notebook, parameters).cells:
        if cell.cell_type == "code" and not (done := shell.run_cell(cell.source, store_history=True)).success:
            break
    with pytest.raises(UserError, match=words):
        done.raise_error()
    assert not (tmp_path / "outputs").exists()


# What every interpreter reads at its start: the extra `notebooks` looks as if it was not installed.
HIDE = """
from importlib.machinery import PathFinder
HIDDEN = "IPython ipykernel ipywidgets jupyter_client jupyter_core latex2mathml matplotlib mistune nbclient nbconvert nbformat nh3 papermill"
found = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, *more: None if name.split(".")[0] in HIDDEN.split() else found(name, *more))
"""


def test_without_jupyter_a_run_is_judged_and_a_line_says_that_there_is_no_report(joined, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    env = joined.env | {"PYTHONPATH": f"{tmp_path}:{joined.env['PYTHONPATH']}"}

    def call(*words):
        command = [sys.executable, "-m", "benchlib.cli", *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=170, check=False)

    done = call("run", "tally", "--backend", "cpu", "--out", str(tmp_path / "out"))
    run_dir = run_dir_of(tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no report" in done.stdout and "pip install 'benchlib[notebooks]'" in done.stdout
    assert json.loads((run_dir / "verdict.json").read_text())["verdict"] == "PASS"
    assert not (run_dir / "report.html").exists() and not (run_dir / "notebook.ipynb").exists()
    asked = call("report", str(run_dir))
    assert (asked.returncode, asked.stderr.count("not installed: pip install 'benchlib[notebooks]'")) == (2, 1)
    assert "a fault of benchlib itself" not in asked.stderr
