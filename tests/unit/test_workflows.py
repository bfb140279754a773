"""The workflows: their commands are commands, and they hold against GitHub's schema (`pip install -e '.[deploy]'`)."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from benchlib.cli import main
from benchlib.core.errors import UserError
from benchlib.core.files import home
from benchlib.core.machine import BACKENDS

sys.path.insert(0, str(home() / "scripts"))
import parity_runners

WORKFLOWS = sorted((home() / ".github" / "workflows").glob("*.yml"))
VALIDATOR = Path(sys.executable).parent / "check-jsonschema"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_script_calls_exists(path):
    jobs, makefile = yaml.safe_load(path.read_text())["jobs"].values(), (home() / "Makefile").read_text()
    text = "\n".join(step.get("run", "") for job in jobs for step in job["steps"])
    assert "${{" not in text, "an input could add commands: GitHub puts it into the text before the shell reads it"
    commands = re.findall(r"\.venv/bin/benchlib ([^|>;\n]*)", text)
    assert commands
    for words in map(shlex.split, commands):
        command = main
        while isinstance(command, click.Group):
            command = command.get_command(click.Context(command), words.pop(0))
        command.make_context("x", words, resilient_parsing=False)  # refuses an unknown option and a missing argument
    for target in re.findall(r"\bmake ([a-z]+)", text):
        assert re.search(rf"^(?:[a-z ]+ )?{target}(?: [a-z ]+)?:", makefile, re.MULTILINE), target
    for script in re.findall(r"[\w./-]*scripts/[\w./-]+|\.ci/\w+", text):
        assert (home() / script).exists(), script


def test_every_backend_has_a_runner_and_an_unknown_one_is_refused():
    rows = {row["backend"]: row["labels"] for row in parity_runners.runners(",".join([" cpu", *BACKENDS]))}
    assert list(rows) == list(BACKENDS)
    assert (rows["cpu"], rows["rocm"]) == ("ubuntu-latest", ["self-hosted", "rocm"])
    for wrong in ("", " , ", "cpu;cuda", 'cpu"], "x'):
        with pytest.raises(UserError):
            parity_runners.runners(wrong)


@pytest.mark.skipif(not VALIDATOR.exists(), reason="pip install -e '.[deploy]'")
def test_workflows_hold_against_the_published_schema_which_can_refuse(tmp_path):
    bad = tmp_path / "parity.yml"
    bad.write_text((WORKFLOWS[0].parent / "parity.yml").read_text().replace("runs-on:", "run-on:", 1))
    for path in (*WORKFLOWS, bad):
        command = [VALIDATOR, "--builtin-schema", "vendor.github-workflows", path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == (path == bad), done.stdout
