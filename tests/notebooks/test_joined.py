"""A benchmark of another package, found by its entry point: every command takes it, and no file of benchlib names it."""

import json
import re
import shutil
import subprocess
import sys

import pytest

# One process for all that is asked at once: each would import the same.
PROGRAM = """
import json, sys
from click.testing import CliRunner
from benchlib.cli import main
for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(main, words)
    print(json.dumps([done.exit_code, done.output]))
"""


@pytest.fixture(scope="module")
def runs(joined):
    """A run by the program itself, and a copy of it as a second one."""
    command = [sys.executable, "-m", "benchlib.cli", "run", "tally", "--backend", "cpu", "--set", "numbers=500"]
    command += ["--set", "nproc=1", "--set", "budget_s=86400"]  # PASS is not about speed
    done = subprocess.run(command, env=joined.env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout and "report.html" in done.stdout
    (run,) = joined.outputs.glob("smoke-*/tally-cpu-*")
    return [run, shutil.copytree(run, run.with_name("tally-cpu-235959-copied"))]


def test_a_run_leaves_everything(joined, runs):
    run = runs[0]
    for name in ("origins.json", "machine.json", "samples.parquet", "result.json", "status.json"):
        assert (run / name).exists(), name
    assert json.loads((run / "config.json").read_text())["numbers"] == 500
    verdict = json.loads((run / "verdict.json").read_text())
    assert verdict["verdict"] == "PASS"
    assert {check["name"]: check["status"] for check in verdict["checks"]}["right sum"] == "PASS"
    injected = json.loads((run / "notebook.ipynb").read_text())["metadata"]["papermill"]["parameters"]
    assert injected == {"tier": "smoke", "backend": "cpu", "run_dir": str(run)}, "config.json is the hand-over"
    report = (run / "report.html").read_text()
    assert "Speed of adding" in report
    assert "A rank adds" in report
    assert not re.search(r"<script|https?://[^\s\"'<]+\.(js|css|png)", report)
    assert run.name in (joined.outputs / "index.html").read_text()


def test_every_command_takes_it_and_names_the_parameter_nearest_to_a_wrong_one(joined, runs):
    commands = [
        ["list"], ["list", "--runs"], ["compare", *map(str, runs)], ["history"], ["export", "--to", "csv"],
        ["report", str(runs[0])], ["run", "tally", "--dry-run"], ["run", "tally", "--set", "number=5", "--dry-run"],
    ]  # fmt: skip
    program = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    done = subprocess.run(program, env=joined.env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    codes, outputs = zip(*map(json.loads, done.stdout.splitlines()), strict=True)
    assert codes == (0, 0, 0, 0, 0, 0, 0, 2), outputs
    names, listed, compared, _, rows, _, plan, refused = outputs
    assert "How fast does a rank add?" in names
    assert all(run.name in listed for run in runs)
    assert "additions_per_s" in compared
    assert "tally" in (joined.outputs / "history.html").read_text()
    assert rows.count("additions_per_s") == 2
    assert "Speed of adding" in (joined.outputs / "index.html").read_text()
    assert "numbers" in plan and "numbers" in refused, outputs
