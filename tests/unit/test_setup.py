"""What `make` sets up and starts: runs get what runs need, and Jupyter starts where root is the only user."""

import os
import re
import subprocess
from importlib.metadata import PackageNotFoundError, requires

import pytest
from packaging.requirements import Requirement

from benchlib.core.files import home


def closure(name, extras, seen):
    """Return the distributions that an installation brings along, by the metadata of what is installed here."""
    try:
        needed = [Requirement(text) for text in requires(name) or []]
    except PackageNotFoundError:
        return seen
    for item in needed:
        if item.marker and not any(item.marker.evaluate({"extra": extra}) for extra in ["", *extras]):
            continue
        key = (item.name.lower(), *sorted(item.extras))
        if key not in seen:
            seen.add(key)
            closure(item.name, item.extras, seen)
    return seen


def shown(*words):
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    done = subprocess.run(
        ["make", "-n", "--no-print-directory", *words], cwd=home(), env=env, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_a_run_needs_no_linter_no_types_and_no_second_runtime():
    extras = re.search(r"^EXTRAS \?= ([\w,]+)$", (home() / "Makefile").read_text(), re.MULTILINE)[1]
    names = {key[0] for key in closure("benchlib", extras.split(","), set())}
    assert names >= {"torch", "jupyterlab", "papermill", "matplotlib"}
    assert not names & {"mypy", "ruff", "openvino", "onnxruntime", "pytest", "nbval"}
    tests = {key[0] for key in closure("benchlib", ["test"], set())}
    assert tests >= {"mypy", "ruff", "openvino", "pytest"}


def test_quick_sets_up_runs_only_and_test_both():
    assert "'.[test]'" not in shown("-W", "pyproject.toml", "quick")
    text = shown("-W", "pyproject.toml", "test")
    assert text.index("'.[notebooks,nvidia,inference,xla]'") < text.index("'.[test]'") < text.index("pytest")


@pytest.mark.parametrize("words", [["--port", "9999"], ["--no-browser"]])
def test_jupyter_takes_arguments_and_starts_for_root(words):
    command = shown("lab", f"ARGS={' '.join(words)}").splitlines()[-1].split()
    assert command[-len(words) :] == words
    assert ("--allow-root" in command) == (os.geteuid() == 0)
    assert "--ServerApp.root_dir=." in command, "links from notebooks/ to outputs/ must be below the root"
