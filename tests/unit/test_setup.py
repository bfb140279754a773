"""What `make` sets up and starts: runs get what runs need, and Jupyter starts where root is the only user."""

import os
import subprocess

from benchlib.core.files import home


def shown(*words):
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    command = ["make", "-n", "--no-print-directory", *words]
    return subprocess.run(command, cwd=home(), env=env, capture_output=True, text=True, check=True).stdout


def test_quick_sets_up_runs_only_and_test_both():
    assert "'.[test]'" not in shown("-W", "pyproject.toml", "quick")
    text = shown("-W", "pyproject.toml", "test")
    assert text.index("'.[notebooks,nvidia,inference,xla]'") < text.index("'.[test]'") < text.index("pytest")


def test_jupyter_takes_arguments_and_starts_for_root():
    command = shown("lab", "ARGS=--port 9999").splitlines()[-1].split()
    assert command[-2:] == ["--port", "9999"]
    assert ("--allow-root" in command) == (os.geteuid() == 0)
    assert "--ServerApp.root_dir=." in command, "links from notebooks/ to outputs/ must be below the root"
