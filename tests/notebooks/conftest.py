"""A benchmark of another package, which is light enough to be run and killed many times."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

JOINED = Path(__file__).parents[1] / "fixtures" / "joined"
PARAMETERS = 'tier: str = "smoke"\nbackend: str = "auto"\noverrides: dict = {}\nrun_dir: str = ""'
CELLS = [
    'from benchlib import session\n\nrun = session.open_run("tally", run_dir, tier, backend, overrides)',
    "run = session.execute(run)",
    "verdict = session.judge(run)\nsession.checks_table(verdict)",
    "session.reading(run)",
]


@pytest.fixture(scope="session")
def joined(tmp_path_factory):
    """The environment in which the benchmark tally is installed, and the store of its runs."""
    folder = shutil.copytree(JOINED, tmp_path_factory.mktemp("site") / "joined")
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    notebook.cells = [nbformat.v4.new_code_cell(text) for text in [PARAMETERS, *CELLS]]
    notebook.cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(notebook, folder / "tally" / "95_tally.ipynb")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    outputs = folder / "outputs"
    return SimpleNamespace(
        outputs=outputs, env=os.environ | {"PYTHONPATH": path, "BENCHLIB_OUTPUTS": str(outputs), "COLUMNS": "200"}
    )
