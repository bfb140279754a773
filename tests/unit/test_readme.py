"""The README's commands are commands: each exists and knows the options that the text gives it."""

import re
import shlex
from pathlib import Path

import click
import pytest

from benchlib.cli import main
from benchlib.core.files import home

TEXTS = [
    "README.md",
    "CONTRIBUTING.md",
    "binder/README.md",
    "deploy/README.md",
    *(f"docs/{path.name}" for path in sorted((home() / "docs").glob("*.md"))),
]
LINE = re.compile(r"(?:^\$ |&& |do |\bbin/|`)benchlib ([a-z][^`#|&;\n]*)", re.MULTILINE)


def commands():
    for name in TEXTS:
        for found in LINE.finditer((home() / name).read_text(encoding="utf-8")):
            yield pytest.param(found[1].strip(), id=f"{name}: {found[1].strip()[:60]}")


@pytest.mark.parametrize("line", list(commands()))
def test_a_command_of_the_text_is_understood(line):
    words = shlex.split(line)
    command = main
    while isinstance(command, click.Group) and words:
        name = words.pop(0)
        found = command.get_command(click.Context(command), name)
        assert found, f"no command {name}"
        command = found
    options = {text: option for option in command.params if isinstance(option, click.Option) for text in option.opts}
    for word in (word for word in words if re.fullmatch(r"--?[a-z][a-z-]*", word)):
        assert word in options, f"benchlib {line}: unknown option {word}"


@pytest.mark.parametrize("name", TEXTS)
def test_links_to_files_lead_somewhere(name):
    page = home() / name
    for target in re.findall(r"\]\(((?!https?:|#|\.\./\.\./)[^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / Path(target)).exists(), f"{name}: {target}"


@pytest.mark.parametrize("name", TEXTS)
def test_files_of_the_kit_that_a_text_names_exist(name):
    text = (home() / name).read_text(encoding="utf-8")
    paths = re.findall(r"`((?:benchlib|tests|scripts|params|notebooks|docs|deploy)/[\w./-]+)`", text)
    assert [path for path in paths if not (home() / path).exists()] == []


def test_percentages_have_no_space_before_their_sign():
    pages = [
        home() / "README.md",
        *home().glob("docs/*.md"),
        *home().glob("notebooks/*.ipynb"),
        *home().glob("benchlib/**/*.j2"),
    ]
    texts = {path.name: path.read_text(encoding="utf-8") for path in pages}
    assert not {name: found for name, text in texts.items() if (found := re.findall(r".{20}[0-9}] %(?![}\w])", text))}


def test_the_make_targets_of_the_text_exist():
    makefile = (home() / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|\$ )make ([a-z]+)", (home() / "README.md").read_text(encoding="utf-8")))
    assert {"quick", "test"} <= named
    assert not [
        target for target in named if not re.search(rf"^(?:[a-z ]+ )?{target}(?: [a-z ]+)?:", makefile, re.MULTILINE)
    ]
