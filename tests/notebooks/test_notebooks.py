"""The shape of a notebook, and that what is committed is what the recorder writes. nbval executes them beside this."""

import ast
import copy
import re
import sys

import nbformat
import pytest
from make_smoke import unpack

from benchlib.benchmarks import BENCHMARKS
from benchlib.core.files import home

sys.path.insert(0, str(home() / "scripts"))
import record_notebooks

SECTIONS = [
    "Parameters", "Setup", "Method", "Expectation", "Run", "Checks", "Results", "Reading", "Verdict", "Provenance",
]  # fmt: skip
# A page to look at: what it shows first, then how it was made.
LOOKING = [*SECTIONS[:2], "Run", "Results", "Reading", "Checks", "Verdict", "Method", "Expectation", "Provenance"]
NOTEBOOKS = sorted((home() / "notebooks").glob("*.ipynb"))
# Notebooks that run no benchmark: their parameters are not fields of a config.
ABOUT_RUNS = {"70_cost.ipynb", "90_history.ipynb", "95_machine_page.ipynb"}
# Further ones of a benchmark, which ask another question of it.
FURTHER = {"31_unlike_nodes.ipynb": BENCHMARKS["squad"]}
OF_BENCHMARKS = {benchmark.notebook.name: benchmark for benchmark in BENCHMARKS.values()} | FURTHER
MEASURING = [path for path in NOTEBOOKS if path.name not in ABOUT_RUNS]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_every_benchmark_has_its_notebook():
    assert OF_BENCHMARKS.keys() | ABOUT_RUNS == {path.name for path in NOTEBOOKS}


def test_sections_come_in_order(path, notebook):
    lines = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown").splitlines()
    assert lines[0].startswith("# ") and lines[0].endswith("?")  # the question in one sentence
    sections = LOOKING if path.name in ABOUT_RUNS else SECTIONS
    assert [line[3:] for line in lines if line.startswith("## ")] == sections


def test_notebooks_are_thin_and_import_no_torch(notebook):
    cells = code(notebook)
    assert max(len(cell.source.splitlines()) for cell in cells) <= 15
    assert sum(len(cell.source.splitlines()) for cell in cells) <= 120
    for cell in cells:
        tree = ast.parse(cell.source)  # also refuses `!` and magics
        assert not any(isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Try)) for node in ast.walk(tree))
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {name.partition(".")[0] for name in imported} <= {"benchlib", "seaborn"}


def test_what_nbval_compares_is_for_readers_and_names_the_checks(notebook, path):
    compared = [cell for cell in code(notebook) if "nbval-ignore-output" not in cell.metadata.get("tags", [])]
    kinds = {kind for cell in compared for output in cell.outputs for kind in output.get("data", {})}
    # Some show what is stored: under a test other runs than the recorded ones.
    stored = path.stem in ("90_history", "95_machine_page")
    assert kinds == {"text/html", "text/plain"} | (set() if stored else {"text/markdown"})
    folded = [cell.source for cell in notebook.cells if cell.metadata.keys() - {"tags"}]
    assert folded == [], "a folded cell shows its output once it runs"


def test_parameters_say_their_unit_or_meaning(notebook):
    cell = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    for line in cell.source.splitlines():
        _, sign, comment = line.partition("  # ")
        assert sign, f"{line}: no comment with unit or meaning"
        assert comment.strip()
        assert "=" not in comment, f"{line}: papermill cannot read a second ="


def test_committed_notebooks_are_normalised(path, notebook):
    assert record_notebooks.problems(notebook, path.stat().st_size) == []
    again = copy.deepcopy(notebook)
    record_notebooks.normalise(again)
    assert nbformat.writes(again) + "\n" == path.read_text()


@pytest.mark.parametrize("name", OF_BENCHMARKS)
def test_pictures_tables_and_words_of_what_is_compared_are_there(name, tmp_path):
    benchmark, source = OF_BENCHMARKS[name], (home() / "notebooks" / name).read_text(encoding="utf-8")
    figures, tables = (set(re.findall(rf'session\.{kind}\(run, \\"([^"\\]+)', source)) for kind in ("figure", "table"))
    assert figures and figures <= set(benchmark.spec.figures())
    assert tables <= set(benchmark.spec.frames(unpack(benchmark.name, tmp_path / "run")))
    metrics = set(re.findall(r"<th>(\w+) vs baseline", source))
    assert metrics
    assert [metric for metric in metrics if benchmark.spec.label(metric) == metric.replace("_", " ")] == []
