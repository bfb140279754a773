"""Texts, workflows and the demo: their commands are commands, and the files, targets and versions that they name are there."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import click
import jinja2
import pytest
import yaml

from benchlib.cli import main
from benchlib.core.errors import UserError
from benchlib.core.files import home
from benchlib.core.machine import BACKENDS

sys.path.insert(0, str(home() / "scripts"))
import parity_runners

BINDER = home() / "binder"
WORKFLOWS = sorted((home() / ".github" / "workflows").glob("*.yml"))
TEXTS = ["README.md", "CONTRIBUTING.md", "binder/README.md", "deploy/README.md", "outputs/README.md"]
TEXTS += [f"docs/{path.name}" for path in sorted((home() / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:^\$ |&& |do |\bbin/|`)benchlib ([a-z][^`#|&;>\n]*)", re.MULTILINE)
FOLDERS = "benchlib|tests|scripts|params|notebooks|docs|deploy"
VALIDATOR = Path(sys.executable).parent / "check-jsonschema"


def check_commands(text, whole=False):
    """Assert that commands, their options and make targets exist; of ``whole`` commands also that no argument is missing."""
    for line in COMMAND.findall(text):
        words, command = shlex.split(line), main
        while isinstance(command, click.Group) and words:
            name = words.pop(0)
            command = command.get_command(click.Context(command), name)
            assert command, f"benchlib {line}: no command {name}"
        options = {text for option in command.params if isinstance(option, click.Option) for text in option.opts}
        assert {word for word in words if re.fullmatch(r"--?[a-z][a-z-]*", word)} <= options, f"benchlib {line}"
        if whole:
            command.make_context("x", [word.replace("$BACKEND", "cpu") for word in words])
    makefile = (home() / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:`|\$ |^|/)make ([a-z]+)", text, re.MULTILINE):
        assert re.search(rf"^(?:[a-z ]+ )?{target}(?: [a-z ]+)?:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_text_names_exists(name):
    page = home() / name
    text = page.read_text(encoding="utf-8")
    check_commands(text)
    paths = [page.parent / target for target in re.findall(r"\]\(((?!https?:|#|\.\./\.\./)[^)#]+)", text)]
    paths += [home() / path for path in re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", text)]
    assert [str(path) for path in paths if not path.exists()] == []


def test_a_clone_has_outputs_without_the_runs_in_it(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    shutil.copy(home() / ".gitignore", tmp_path)
    (tmp_path / "outputs" / "quick-20261126").mkdir(parents=True)
    shutil.copy(home() / "outputs" / "README.md", tmp_path / "outputs")
    for name in ("index.html", "quick-20261126/README.md"):
        (tmp_path / "outputs" / name).touch()
    listed = subprocess.check_output(["git", "ls-files", "-o", "--exclude-standard"], cwd=tmp_path, text=True)
    assert listed.split() == [".gitignore", "outputs/README.md"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_calls_exists(path):
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    text = "\n".join(step.get("run", "") for job in jobs for step in job["steps"])
    assert "${{" not in text, "an input could add commands: GitHub puts it into the text before the shell reads it"
    assert COMMAND.search(text)
    check_commands(text, whole=True)
    for script in re.findall(r"[\w./-]*scripts/[\w./-]+|\.ci/\w+", text):
        assert (home() / script).exists(), script


@pytest.mark.skipif(not VALIDATOR.exists(), reason="pip install -e '.[deploy]'")
def test_workflows_hold_against_the_published_schema_which_can_refuse(tmp_path):
    bad = tmp_path / "parity.yml"
    bad.write_text((WORKFLOWS[0].parent / "parity.yml").read_text().replace("runs-on:", "run-on:", 1))
    for path in (*WORKFLOWS, bad):
        command = [VALIDATOR, "--builtin-schema", "vendor.github-workflows", path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == (path == bad), done.stdout


def test_every_backend_has_a_runner_and_an_unknown_one_is_refused():
    rows = {row["backend"]: row["labels"] for row in parity_runners.runners(",".join([" cpu", *BACKENDS]))}
    assert list(rows) == list(BACKENDS)
    assert (rows["cpu"], rows["rocm"]) == ("ubuntu-latest", ["self-hosted", "rocm"])
    for wrong in ("", " , ", "cpu;cuda", 'cpu"], "x'):
        with pytest.raises(UserError):
            parity_runners.runners(wrong)


def test_the_demo_has_the_versions_of_the_constraints_and_torch_without_cuda():
    def pins(path):
        return dict(re.findall(r"^([a-z][\w.-]*)==(\S+)", path.read_text(), re.MULTILINE | re.IGNORECASE))

    demo, locked = pins(BINDER / "requirements.txt"), pins(home() / "constraints.txt")
    assert demo.pop("torch") == locked["torch"] + "+cpu"
    assert demo and demo == {name: locked[name] for name in demo}
    text = (BINDER / "requirements.txt").read_text()
    assert "\n--extra-index-url https://download.pytorch.org/whl/cpu" in text
    assert "\n-e .[" in text, "notebooks/ stand beside an editable package only"


def test_the_links_of_the_demo_open_notebooks_that_are_there():
    links = re.findall(r"https://mybinder\.org/v2/gh/[^\s)`]+", (BINDER / "README.md").read_text())
    paths = [unquote(parse_qs(urlsplit(link).query)["urlpath"][0]) for link in links]
    assert {path.split("/")[0] for path in paths} == {"lab", "voila", "files"}
    subprocess.run(["bash", "-n", BINDER / "postBuild"], check=True)
    copied = re.findall(r"^cp \S+ (\S+)$", (BINDER / "postBuild").read_text(), re.MULTILINE)
    for path in paths:
        name = re.sub(r"^(lab/tree|voila/render|files)/", "", path)
        assert (home() / name).is_file() or name in copied, path


def test_the_page_of_the_explorer_asks_no_other_host_for_styles():
    voila = (
        "{% block notebook_css %}<link rel='stylesheet' href='https://cdn.jsdelivr.net/npm/icons@^5/css/all.min.css'>"
        "<style>.stays {}</style>{% endblock %}{% block body_header %}{% endblock %}"
    )
    parent = jinja2.DictLoader({"voila/templates/lab/index.html.j2": voila})
    folder = jinja2.FileSystemLoader(BINDER / "page/voila/templates/benchlib")
    environment = jinja2.Environment(loader=jinja2.ChoiceLoader([parent, folder]))
    page = environment.get_template("index.html.j2").render(resources={})
    assert ".stays {}" in page and "celltag_method" in page
    assert not re.findall(r"https?://", page)
