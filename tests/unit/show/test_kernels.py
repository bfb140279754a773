"""Kernels that are forked: each is the notebook's own, knows its run, and ends with the program that started it."""

import subprocess
import sys
from multiprocessing import forkserver

import nbformat
import psutil
import pytest

from benchlib.show.headless import execute

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kernels are forked on Linux only")
CELL = """
import os, sys
loaded = "pandas" in sys.modules, "own" in globals()
own = 1
os.write(2, b"to the log")
print(os.getpid(), os.getppid(), os.getsid(0), *loaded, os.environ["OF_THE_RUN"], os.environ.get("OPENBLAS_NUM_THREADS"), os.getcwd(), sys.stdin.read() == "",
    sys.modules["pandas"].get_option("display.max_columns"))
"""


def test_kernels_are_forked_from_one_process(tmp_path, monkeypatch, capfd):
    forkserver._forkserver._stop()  # other tests started one, with their modules
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)]), tmp_path / "book.ipynb")
    said = []
    for number in ("1", "2"):
        monkeypatch.setenv("OF_THE_RUN", number)
        execute(tmp_path / "book.ipynb", tmp_path / "executed.ipynb", {}, 300.0)
        said.append(nbformat.read(tmp_path / "executed.ipynb", 4).cells[0].outputs[0].text.split())
    (own, parent, *_), (other, same, *_) = said
    assert own != other and parent == same, "each is a process of its own, of one parent"
    for number, words in zip(("1", "2"), said, strict=True):
        # Its own session; libraries are there before the first cell, names of another kernel are not; the run's environment.
        # And pandas writes as many columns as in a kernel, not in a terminal.
        assert words[2:] == [words[0], "True", "False", number, "None", str(tmp_path), "True", "20"]
        assert not psutil.pid_exists(int(words[0])), "it has ended"
    assert (tmp_path / "logs/kernel.err").read_text().count("to the log") == 2
    assert capfd.readouterr().out == ""


def test_a_kernel_and_the_fork_server_end_with_the_program_that_started_them(tmp_path):
    words = (
        "import asyncio, os; from benchlib.show.kernels import kernel_manager; manager = kernel_manager()(); "
        "asyncio.run(manager.start_kernel()); os.write(1, b'begun'); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "begun", "and its output is closed, so that both have ended"
