"""A kernel that was started ahead: it is the notebook's, knows its run, and ends where it is not needed."""

import subprocess
import sys

import nbformat
import pytest

from benchlib.show import kernels
from benchlib.show.headless import execute


@pytest.fixture
def spare(monkeypatch):
    monkeypatch.setattr(kernels, "SPARE", kernels._Spare())
    yield kernels.SPARE
    kernels.SPARE.discard()


def test_a_spare_interpreter_becomes_the_kernel(spare, tmp_path, monkeypatch, capfd):
    cell = (
        "import os, sys; loaded = 'pandas' in sys.modules\n"
        "print(os.getpid(), loaded, os.environ['OF_THE_RUN'], os.getcwd(), sys.stdin.read() == '')\n"
        "os.write(2, b'to the log')"
    )
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)]), tmp_path / "book.ipynb")
    spare.start()
    waiting = spare._process
    spare.start()
    assert spare._process is waiting, "one is enough"
    monkeypatch.setenv("OF_THE_RUN", "set later")
    execute(tmp_path / "book.ipynb", tmp_path / "executed.ipynb", {}, 60.0)
    output = nbformat.read(tmp_path / "executed.ipynb", 4).cells[0].outputs[0].text
    assert output.split() == [str(waiting.pid), "True", "set", "later", str(tmp_path), "True"]
    assert "to the log" in (tmp_path / "logs/kernel.err").read_text()
    assert waiting.poll() is not None and capfd.readouterr().out == ""


def test_it_ends_with_the_program_that_started_it():
    words = "from benchlib.show.kernels import SPARE; SPARE.start(); print(SPARE._process.pid, flush=True); import os; os._exit(0)"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip().isdigit() and done.stderr == "", "its output is closed, so that it has ended"
