"""Commands, files and make targets that the texts name exist."""

import re
import shlex

import click
import pytest

from benchlib.cli import main
from benchlib.core.files import home

TEXTS = [
    *("README.md", "CONTRIBUTING.md", "binder/README.md", "deploy/README.md"),
    *(f"docs/{path.name}" for path in sorted((home() / "docs").glob("*.md"))),
]
COMMAND = re.compile(r"(?:^\$ |&& |do |\bbin/|`)benchlib ([a-z][^`#|&;\n]*)", re.MULTILINE)
FOLDERS = "benchlib|tests|scripts|params|notebooks|docs|deploy"


def check_command(line):
    words, command = shlex.split(line), main
    while isinstance(command, click.Group) and words:
        name = words.pop(0)
        command = command.get_command(click.Context(command), name)
        assert command, f"benchlib {line}: no command {name}"
    options = {text for option in command.params if isinstance(option, click.Option) for text in option.opts}
    unknown = [word for word in words if re.fullmatch(r"--?[a-z][a-z-]*", word) and word not in options]
    assert not unknown, f"benchlib {line}"


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_text_names_exists(name):
    page, makefile = home() / name, (home() / "Makefile").read_text(encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    for line in COMMAND.findall(text):
        check_command(line.strip())
    paths = [page.parent / target for target in re.findall(r"\]\(((?!https?:|#|\.\./\.\./)[^)#]+)", text)]
    paths += [home() / path for path in re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", text)]
    assert [str(path) for path in paths if not path.exists()] == []
    for target in re.findall(r"(?:`|\$ )make ([a-z]+)", text):
        assert re.search(rf"^(?:[a-z ]+ )?{target}(?: [a-z ]+)?:", makefile, re.MULTILINE), target
