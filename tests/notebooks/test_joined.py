"""A benchmark of another package, found by its entry point: every command takes it, and no file of benchlib names it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

JOINED = Path(__file__).parents[1] / "fixtures" / "joined"
PARAMETERS = 'tier: str = "smoke"\nbackend: str = "auto"\noverrides: dict = {}\nrun_dir: str = ""'
CELLS = [
    'from benchlib import session\n\nrun = session.open_run("tally", run_dir, tier, backend, overrides)',
    "run = session.execute(run)",
    "verdict = session.judge(run)\nsession.checks_table(verdict)",
    "session.reading(run)",
]


@pytest.fixture(scope="module")
def call(tmp_path_factory):
    """Call the command line where the benchmark is installed; its runs go into a store of their own."""
    folder = shutil.copytree(JOINED, tmp_path_factory.mktemp("site") / "joined")
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    notebook.cells = [nbformat.v4.new_code_cell(text) for text in [PARAMETERS, *CELLS]]
    notebook.cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(notebook, folder / "tally" / "95_tally.ipynb")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "BENCHLIB_OUTPUTS": str(folder / "outputs"), "COLUMNS": "200"}

    def call(*words):
        command = [sys.executable, "-m", "benchlib.cli", *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    call.outputs = folder / "outputs"
    return call


@pytest.fixture(scope="module")
def runs(call):
    for _ in range(2):
        assert "PASS" in call("run", "tally", "--backend", "cpu", "--set", "numbers=500")
    return sorted(call.outputs.glob("smoke-*/tally-cpu-*"), key=lambda run: run.stat().st_mtime)


def test_a_run_has_its_config_checks_and_report(runs):
    assert json.loads((runs[0] / "config.json").read_text())["numbers"] == 500
    verdict = json.loads((runs[0] / "verdict.json").read_text())
    assert {check["name"]: check["status"] for check in verdict["checks"]}["right sum"] == "PASS"
    report = (runs[0] / "report.html").read_text()
    assert "Speed of adding" in report
    assert "A rank adds" in report


def test_every_command_takes_it(call, runs):
    assert "How fast does a rank add?" in call("list")
    assert all(run.name in call("list", "--runs") for run in runs)
    assert "additions_per_s" in call("compare", *map(str, runs))
    call("history")
    assert "tally" in (call.outputs / "history.html").read_text()
    rows = call("export", "--to", "csv")
    assert rows.count("additions_per_s") == 2
    index = (call.outputs / "index.html").read_text()
    assert "Speed of adding" in index
    call("report", str(runs[0]))
    assert "numbers" in call("run", "tally", "--dry-run")


def test_a_wrong_parameter_names_the_nearest_one(call):
    with pytest.raises(AssertionError, match="numbers"):
        call("run", "tally", "--set", "number=5", "--dry-run")
