"""The demo: its versions are those that the kit is tested with, and its links and pages lead to what is there."""

import re
import subprocess
from urllib.parse import parse_qs, unquote, urlsplit

import jinja2

from benchlib.core.files import home

BINDER = home() / "binder"


def requirements():
    lines = [line.strip() for line in (BINDER / "requirements.txt").read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_the_versions_are_those_of_the_constraints_and_torch_has_no_cuda():
    locked = dict(
        line.split("==") for line in (home() / "constraints.txt").read_text().splitlines() if line[:1].isalpha()
    )
    pins = dict(line.split("==") for line in requirements() if not line.startswith("-"))
    assert pins.pop("torch") == locked["torch"] + "+cpu"
    assert pins and pins == {name: locked[name] for name in pins}
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in requirements()
    assert any(line.startswith("-e .[") for line in requirements()), "notebooks/ stand beside an editable package only"


def test_the_links_open_notebooks_that_are_there():
    links = re.findall(r"https://mybinder\.org/v2/gh/[^\s)`]+", (BINDER / "README.md").read_text())
    paths = [unquote(parse_qs(urlsplit(link).query)["urlpath"][0]) for link in links]
    assert {path.split("/")[0] for path in paths} == {"lab", "voila", "files"}
    subprocess.run(["bash", "-n", BINDER / "postBuild"], check=True)
    copied = re.findall(r"^cp \S+ (\S+)$", (BINDER / "postBuild").read_text(), re.MULTILINE)
    for path in paths:
        name = path.removeprefix("lab/tree/").removeprefix("voila/render/").removeprefix("files/")
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
