"""The workflows: their commands are commands, their actions are of one version, and they hold against GitHub's schema.

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


def workflow(name):
    return yaml.safe_load((home() / ".github" / "workflows" / name).read_text())


def steps(path):
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        yield from job["steps"]


def lines(path):
    for step in steps(path):
        yield from step.get("run", "").splitlines()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_commands_are_commands(path):
    found = [match[1] for line in lines(path) for match in re.finditer(r"\.venv/bin/benchlib ([^|>;]*)", line)]
    assert found
    for text in found:
        words = shlex.split(text)
        command = main
        while isinstance(command, click.Group):
            command = command.get_command(click.Context(command), words.pop(0))
        command.make_context("x", words, resilient_parsing=False)  # refuses an unknown option and a missing argument


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_make_targets_and_scripts_exist(path):
    makefile = (home() / "Makefile").read_text()
    for line in lines(path):
        for target in re.findall(r"\bmake ([a-z]+)", line):
            assert re.search(rf"^(?:[a-z ]+ )?{target}(?: [a-z ]+)?:", makefile, re.MULTILINE), target
        for script in re.findall(r"[\w./-]*scripts/[\w./-]+|\.ci/\w+", line):
            assert (home() / script).exists(), script


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_users_type_is_no_part_of_a_script(path):
    """GitHub puts ${{ }} into the text of a script before the shell reads it: an input could add commands."""
    assert [line for line in lines(path) if "${{" in line] == []


def test_each_action_has_one_version():
    used = {step["uses"] for path in WORKFLOWS for step in steps(path) if "uses" in step}
    names = [name.partition("@")[0] for name in used]
    assert len(names) == len(set(names)), sorted(used)
    artifacts = {name.rpartition("@")[2] for name in used if "-artifact@" in name}
    assert len(artifacts) == 1, "what one major version uploads, another cannot download"


def test_parity_hands_over_what_the_next_job_takes():
    jobs = workflow("parity.yml")["jobs"]
    assert list(jobs) == ["record", "verify", "merge"]
    up = {step["with"]["name"] for step in jobs["record"]["steps"] if "upload-artifact" in step.get("uses", "")}
    down = [step["with"]["name"] for step in jobs["verify"]["steps"] if "download-artifact" in step.get("uses", "")]
    assert set(down) <= up and down
    (pattern,) = [
        step["with"]["pattern"] for step in jobs["merge"]["steps"] if "download-artifact" in step.get("uses", "")
    ]
    given = {step["with"]["name"] for step in jobs["verify"]["steps"] if "upload-artifact" in step.get("uses", "")}
    assert any(name.startswith(pattern.rstrip("*")) for name in given)
    inputs = workflow("parity.yml")[True]["workflow_dispatch"]["inputs"]  # YAML reads the key `on` as true
    assert {name: value["type"] for name, value in inputs.items()} == {"backends": "string", "quick_mode": "boolean"}


def test_every_backend_has_a_runner_and_an_unknown_one_is_refused():
    rows = parity_runners.runners(" cpu, rocm,cpu")
    assert rows == [
        {"backend": "cpu", "labels": "ubuntu-latest"},
        {"backend": "rocm", "labels": ["self-hosted", "rocm"]},
    ]
    assert [row["backend"] for row in parity_runners.runners(",".join(BACKENDS))] == list(BACKENDS)
    for wrong in ("", " , ", "cpu;cuda", 'cpu"], "x'):
        with pytest.raises(UserError):
            parity_runners.runners(wrong)


def validate(path):
    return subprocess.run(
        [VALIDATOR, "--builtin-schema", "vendor.github-workflows", path], capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(not VALIDATOR.exists(), reason="pip install -e '.[deploy]'")
def test_workflows_hold_against_the_published_schema_which_can_refuse(tmp_path):
    for path in WORKFLOWS:
        assert validate(path).returncode == 0, validate(path).stdout
    bad = tmp_path / "parity.yml"
    bad.write_text((WORKFLOWS[0].parent / "parity.yml").read_text().replace("runs-on:", "run-on:", 1))
    assert validate(bad).returncode == 1
