"""The workflows: their commands are commands, what one job hands over the next takes, and they hold against GitHub's schema.

The schema needs the extra: pip install -e '.[deploy]'."""

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


def steps(path):
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_script_calls_is_there(path):
    """What users type is no part of it: GitHub puts ${{ }} into its text before the shell reads it."""
    text, makefile = "\n".join(step.get("run", "") for step in steps(path)), (home() / "Makefile").read_text()
    assert "${{" not in text, "an input could add commands"
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


def test_each_action_has_one_version():
    used = {step["uses"] for path in WORKFLOWS for step in steps(path) if "uses" in step}
    names = [name.partition("@")[0] for name in used]
    assert len(names) == len(set(names)), sorted(used)
    artifacts = {name.rpartition("@")[2] for name in used if "-artifact@" in name}
    assert len(artifacts) == 1, "what one major version uploads, another cannot download"


def test_parity_hands_over_what_the_next_job_takes():
    workflow = yaml.safe_load((home() / ".github/workflows/parity.yml").read_text())

    def artifacts(job, way, key="name"):
        found = (step for step in workflow["jobs"][job]["steps"] if f"{way}load-artifact" in step.get("uses", ""))
        return [step["with"][key] for step in found]

    assert list(workflow["jobs"]) == ["record", "verify", "merge"]
    assert set(artifacts("verify", "down")) <= set(artifacts("record", "up")) and artifacts("verify", "down")
    (pattern,) = artifacts("merge", "down", "pattern")
    assert any(name.startswith(pattern.rstrip("*")) for name in artifacts("verify", "up"))
    inputs = workflow[True]["workflow_dispatch"]["inputs"]  # YAML reads the key `on` as true
    assert {name: value["type"] for name, value in inputs.items()} == {"backends": "string", "quick_mode": "boolean"}


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
