"""The demo: files that repo2docker accepts, of versions that the kit is tested with, measured by what can count."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from urllib.parse import parse_qs, unquote, urlsplit

import jinja2
import nbformat
import pytest

from benchlib.core.files import home

BINDER = home() / "binder"
# What repo2docker 2026.4 has a base image for, of the versions that the kit runs on.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
JUPYTER = re.compile(r"(jupyter\w*|notebook|ipykernel|nbclassic|tornado)\b", re.IGNORECASE)


def script(name):
    spec = importlib.util.spec_from_file_location(name, home() / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def requirements():
    lines = [line.strip() for line in (BINDER / "requirements.txt").read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def project():
    return tomllib.loads((home() / "pyproject.toml").read_text())["project"]


def test_the_versions_are_those_of_the_constraints_and_torch_has_no_cuda():
    locked = dict(
        line.split("==") for line in (home() / "constraints.txt").read_text().splitlines() if line[:1].isalpha()
    )
    pins = dict(line.split("==") for line in requirements() if not line.startswith("-"))
    assert pins.pop("torch") == locked["torch"] + "+cpu"
    assert len(pins) >= 5
    assert pins == {name: locked[name] for name in pins}
    assert not [name for name in pins if JUPYTER.match(name)], "the server is the image's own"
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in requirements()


def test_the_kit_is_installed_from_the_checkout_with_extras_that_exist():
    editable = [re.fullmatch(r"-e \.\[([\w,]+)\]", line) for line in requirements() if line.startswith("-e")]
    assert len(editable) == 1, "notebooks/ and params/ are found beside the package only"
    known = project()["optional-dependencies"]
    extras = set(editable[0][1].split(","))
    assert extras <= set(known)
    assert "notebooks" in extras or any("benchlib[notebooks]" in known[extra] for extra in extras)


def test_the_python_is_one_that_the_kit_and_repo2docker_have():
    version = re.fullmatch(r"python-(\d+\.\d+)", (BINDER / "runtime.txt").read_text().strip())[1]
    assert version in PYTHONS
    least = project()["requires-python"].removeprefix(">=")
    assert tuple(map(int, version.split("."))) >= tuple(map(int, least.split(".")))


def test_post_build_is_a_script_that_stops_at_the_first_error():
    path = BINDER / "postBuild"
    assert path.stat().st_mode & 0o111 == 0o111
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    subprocess.run(["bash", "-n", path], check=True)


def test_repo2docker_accepts_the_folder(tmp_path):
    found = shutil.which("jupyter-repo2docker")
    if not found:
        pytest.skip("repo2docker is not installed: pip install jupyter-repo2docker")
    shutil.copytree(BINDER, tmp_path / "repo" / "binder")
    shutil.copy(home() / "pyproject.toml", tmp_path / "repo")
    command = [found, "--no-build", "--debug", str(tmp_path / "repo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-2000:]
    assert 'pip install --no-cache-dir -r "binder/requirements.txt"' in said
    assert "./binder/postBuild" in said
    assert "environment.py-3.12" in said.replace("-2e", ".").replace("-2d", "-")


def links():
    page = (BINDER / "README.md").read_text()
    return sorted(set(re.findall(r"https://mybinder\.org/v2/gh/[^\s)`]+", page)))


def test_the_links_open_notebooks_that_are_there():
    paths = [unquote(parse_qs(urlsplit(link).query)["urlpath"][0]) for link in links()]
    assert {path.split("/")[0] for path in paths} == {"lab", "voila", "files"}
    made = re.findall(r"^cp \S+ (\S+)$", (BINDER / "postBuild").read_text(), re.MULTILINE)
    for path in paths:
        name = path.removeprefix("lab/tree/").removeprefix("voila/render/").removeprefix("files/")
        assert (home() / name).is_file() or name in made, path


def test_the_page_of_the_explorer_shows_what_leads_to_it_last():
    cells, section, tagged = nbformat.read(home() / "notebooks/90_history.ipynb", 4).cells, "", {}
    for cell in cells:
        if cell.source.startswith("## "):
            section = cell.source.splitlines()[0]
        tagged.setdefault(section, set()).add("method" in cell.metadata.get("tags", []))
    assert {name for name, tags in tagged.items() if tags != {False}} == {"## Parameters", "## Setup", "## Run"}
    assert all(tagged[name] == {True} for name in ("## Parameters", "## Setup", "## Run"))
    template = (BINDER / "page/voila/templates/benchlib/index.html.j2").read_text()
    assert ":has(.celltag_method) { order: 1; }" in template
    setting = json.loads((BINDER / "page/jupyter_server_config.json").read_text())["VoilaConfiguration"]
    assert setting["template"] == "benchlib"
    assert setting["resources"]["report"].removeprefix("files/") in (BINDER / "postBuild").read_text()
    assert "binder/page/jupyter_server_config.json" in (BINDER / "postBuild").read_text()


def test_the_page_of_the_explorer_asks_no_other_host_for_styles():
    voila = (
        "{% block notebook_css %}<link rel='stylesheet' href='https://cdn.jsdelivr.net/npm/icons@^5/css/all.min.css'>"
    )
    voila += "<style>.kept {}</style>{% endblock %}{% block body_header %}{% endblock %}"
    folder = BINDER / "page/voila/templates/benchlib"
    parent = jinja2.DictLoader({"voila/templates/lab/index.html.j2": voila})
    loader = jinja2.ChoiceLoader([parent, jinja2.FileSystemLoader(folder)])
    page = jinja2.Environment(loader=loader).get_template("index.html.j2").render(resources={})
    assert ".kept {}" in page
    assert "celltag_method" in page
    assert not re.findall(r"https?://", page)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PSS and fork as on Linux, where Binder runs")
def test_shared_memory_is_counted_once_and_children_are_counted():
    """A parent with 60 MB and a forked child that shares them and has 30 MB of its own are 90 MB together, not 150."""
    program = (
        "import os, sys\n"
        "shared = bytearray(os.urandom(1) * 60_000_000)\n"
        "if os.fork() == 0:\n"
        "    own = bytearray(os.urandom(1) * 30_000_000)\n"
        "    print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        memory = script("measure_demo").Memory(process.pid)
        memory.sample()
        assert 90e6 < memory.peak < 125e6
        assert len(memory.seen) == 2
        assert set(memory.by_kind) == {"others"}
    finally:
        process.stdin.close()  # the end of its input ends both
        process.wait(120)
        process.stdout.close()
