"""The program as a process: pipes whose reader goes."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("word", "code"), [("list", 0), ("nonsense", 2)])
def test_a_closed_pipe_changes_no_exit_code(word, code):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "benchlib", word]
    done = subprocess.run(command, stdout=write, stderr=write, timeout=60, check=False)
    os.close(write)
    assert done.returncode == code
