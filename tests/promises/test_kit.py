"""The kit: notebooks, packages, layout."""

import copy
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import evaluate
import nbconvert
import nbformat
import pytest
import seaborn
from pages import Page, assert_self_contained_and_accessible
from promised import promise

from benchlib import session
from benchlib.benchmarks import BENCHMARKS
from benchlib.core.files import home
from benchlib.results.run import Run
from benchlib.show import explorer

NOTEBOOKS = sorted((home() / "notebooks").glob("*.ipynb"))
OF_RUNS = {"70_cost", "90_history", "95_machine_page"}  # notebooks about stored runs: they choose runs and no tier


def _code(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def _make(*words):
    """Return the commands that make would run in the root of the checkout."""
    done = subprocess.run(["make", "-n", *words], cwd=home(), capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def whole(ran):
    """Return a whole run, with its executed notebook and its report."""
    sizes = ("matmul_sizes=256", "precisions=fp32", "seconds=0.05", "allreduce_mib=0.001", "copy_mib=8")
    return ran("machine", *sizes)


@promise(
    "P001", "open every notebook in JupyterLab, set tier and backend in its first cell, and run it by hand", "make lab"
)
def test_p001_notebooks_by_hand():
    assert importlib.metadata.version("jupyterlab")
    assert "jupyter lab " in _make("lab") and "notebooks/*.ipynb" in _make("lab")
    assert len(NOTEBOOKS) >= 13
    for path in NOTEBOOKS:
        first = _code(path)[0]
        assert "parameters" in first.metadata.tags, path
        if path.stem not in OF_RUNS:
            assert {"tier: str", "backend: str"} <= set(re.findall(r"^\w+: \w+", first.source, re.MULTILINE)), path
    parameters, setup, *_ = _code(home() / "notebooks" / "10_squad.ipynb")
    names = {}
    exec(parameters.source.replace('tier: str = "smoke"', 'tier: str = "quick"'), names)
    exec(setup.source, names)
    assert (names["run"].config.tier, names["run"].config.train_questions) == ("quick", 4000)


@promise(
    "P002",
    "run every benchmark's notebook headless through papermill, by tier and backend",
    "benchlib run nightly --dry-run",
)
def test_p002_headless_notebooks(program, whole):
    table = program("run", "nightly", "--dry-run")
    assert all(f"\n{name} " in table for name in BENCHMARKS)
    notebook = nbformat.read(whole.path / "notebook.ipynb", as_version=4)
    assert notebook.metadata.papermill.parameters.tier == "smoke"
    injected = next(cell.source for cell in notebook.cells if "injected-parameters" in cell.metadata.get("tags", []))
    assert 'tier = "smoke"' in injected and 'backend = "cpu"' in injected
    source = nbformat.read(home() / "notebooks" / "00_machine.ipynb", as_version=4)
    executed = [cell.source for cell in notebook.cells if "injected-parameters" not in cell.metadata.get("tags", [])]
    assert executed == [cell.source for cell in source.cells]


@promise("P003", "send one HTML report that opens without network and without scripts", "benchlib report RUN")
def test_p003_report_of_one_file(whole):
    page = Page(whole.path / "report.html")
    assert_self_contained_and_accessible(page)
    assert page.all("img") and "Peak of matrix products" in page.text


@promise(
    "P004", "convert an executed notebook to HTML with nbconvert", "jupyter nbconvert --to benchlib RUN/notebook.ipynb"
)
def test_p004_nbconvert(whole, tmp_path):
    command = [
        "jupyter",
        "nbconvert",
        "--to",
        "benchlib",
        str(whole.path / "notebook.ipynb"),
        "--output-dir",
        str(tmp_path),
    ]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = Page(tmp_path / "notebook.html")
    assert_self_contained_and_accessible(page)
    assert "Peak of matrix products" in page.text
    assert "html" in nbconvert.get_export_names(), "nbconvert's own exporters stay usable"


@promise("P005", "have the outputs of the committed notebooks checked by nbval", "make pytest")
def test_p005_nbval(tmp_path):
    assert re.search(r"pytest .*--nbval ", _make("pytest"))
    assert (
        "notebooks"
        in tomllib.loads((home() / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"]
    )
    notebook = nbformat.read(home() / "notebooks" / "00_machine.ipynb", as_version=4)
    notebook.cells = notebook.cells[:5]
    wrong = copy.deepcopy(notebook.cells[-1])
    wrong.id = "wrong"
    wrong.outputs[0].data["text/plain"] = wrong.outputs[0].data["text/plain"].replace("machine", "other")
    notebook.cells.append(wrong)
    nbformat.write(notebook, tmp_path / "start.ipynb")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval", "--nbval-current-env"]
    done = subprocess.run([*command, "start.ipynb"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr


@promise("P006", "try the kit in a browser through Binder, without a GPU", "binder/README.md")
def test_p006_binder():
    folder = home() / "binder"
    pinned = dict(line.split("==") for line in (home() / "constraints.txt").read_text().splitlines() if "==" in line)
    asked = (folder / "requirements.txt").read_text().splitlines()
    versions = dict(line.split("==") for line in asked if "==" in line)
    assert versions["torch"].endswith("+cpu") and "-e .[voila]" in asked
    assert {name: version.removesuffix("+cpu") for name, version in versions.items()}.items() <= pinned.items()
    assert (folder / "runtime.txt").read_text().startswith("python-3.")
    build = folder / "postBuild"
    assert build.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(build)], check=True)
    linked = re.findall(r"notebooks%2F(\w+\.ipynb)", (folder / "README.md").read_text())
    assert linked and all((home() / "notebooks" / name).exists() for name in linked)


@promise("P007", "explore runs with widgets, and read the same page with widgets that are static", "make explorer")
def test_p007_explorer(monkeypatch):
    import ipywidgets

    *_, static = (cell for cell in _code(home() / "notebooks" / "90_history.ipynb") if "explore(" in cell.source)
    kinds = [set(output.get("data", {})) for output in static.outputs]
    assert any("image/png" in each or "text/html" in each for each in kinds)
    assert not any("application/vnd.jupyter.widget-view+json" in each for each in kinds)
    shown = []
    monkeypatch.delenv("BENCHLIB_HEADLESS")
    monkeypatch.setattr("IPython.display.display", lambda item, raw=False: shown.append(item))
    past = session.open_history(str(home() / "notebooks" / "demo-runs"))
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=True))
    explorer.explore(past)
    model = shown[-1]["application/vnd.jupyter.widget-view+json"]["model_id"]
    box = ipywidgets.widget_serialization["from_json"](f"IPY_MODEL_{model}", None)
    widgets = _below(box)
    pane = next(item for item in widgets if isinstance(item, ipywidgets.HTML) and "<img" in item.value)
    assert pane.value in shown[-1]["text/html"], "the static form is the first state"
    picked = next(item for item in widgets if isinstance(item, ipywidgets.SelectMultiple))
    before = pane.value
    picked.value = (picked.options[0][1] if isinstance(picked.options[0], tuple) else picked.options[0],)
    assert pane.value != before


def _below(widget):
    return [widget, *(item for child in getattr(widget, "children", ()) for item in _below(child))]


@promise(
    "P008",
    "see a useful machine page in the committed notebook, without runs of one's own",
    "notebooks/95_machine_page.ipynb",
)
def test_p008_machine_page():
    cells = [cell for cell in _code(home() / "notebooks" / "95_machine_page.ipynb") if "session.table(" in cell.source]
    texts = {cell.source.split('"')[1]: str([output.get("data", {}) for output in cell.outputs]) for cell in cells}
    assert re.search(r"\d ± \d|exactly \d", texts["right"]), "values of other machines"
    assert re.search(r"\d%", texts["fast"]), "a share of a measured bound"
    assert re.search(r"\d USD", texts["worth"]), "a price"


@promise(
    "P009", "install the packages with the kit, and get from a clean checkout to a report by one command", "make quick"
)
def test_p009_one_command():
    project = tomllib.loads((home() / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = {
        re.split(r"[\[>=<;]", text)[0] for text in [*project["dependencies"], *extras["notebooks"], *extras["test"]]
    }
    named = {
        "torch",
        "transformers",
        "datasets",
        "pandas",
        "jupyterlab",
        "papermill",
        "ipywidgets",
        "pytest",
        "nbval",
        "seaborn",
        "evaluate",
    }
    assert named <= asked
    assert all(importlib.metadata.version(name) for name in named)
    done = subprocess.run(
        ["make", "-n", "-W", "pyproject.toml", "quick"], cwd=home(), capture_output=True, text=True, check=True
    )
    steps = [line for line in done.stdout.splitlines() if not line.startswith("echo")]
    assert "-m venv" in steps[0] and "--editable" in steps[1] and steps[-1].strip().endswith("benchlib run quick")


@promise("P011", "score with the package evaluate", 'evaluate.load("benchlib/metrics/squad_v1")')
def test_p011_evaluate(tmp_path):
    folder = str(home() / "benchlib" / "metrics" / "squad_v1")
    metric = evaluate.load(folder, cache_dir=str(tmp_path), keep_in_memory=True)
    assert isinstance(metric, evaluate.Metric)
    predictions = [{"id": "a", "prediction_text": "the Eiffel Tower"}, {"id": "b", "prediction_text": "1843"}]
    gold = {"a": ["Eiffel Tower"], "b": ["in 1843"]}  # b: precision 1, recall 1/2, F1 2/3
    references = [{"id": name, "answers": {"text": texts, "answer_start": [0]}} for name, texts in gold.items()]
    result = metric.compute(predictions=predictions, references=references)
    assert result == {"exact_match": 50.0, "f1": pytest.approx((100 + 200 / 3) / 2)}


@promise(
    "P012",
    "find the project in pyproject.toml, notebooks, benchlib, params, baselines, tests and binder, its runs in outputs",
    "benchlib run machine --dry-run",
)
def test_p012_layout(program, monkeypatch):
    names = ("pyproject.toml", "notebooks", "benchlib", "params", "baselines", "tests", "binder", "outputs")
    assert [name for name in names if not (home() / name).exists()] == []
    monkeypatch.delenv("BENCHLIB_OUTPUTS")
    plan = "".join(program("run", "machine", "--backend", "cpu", "--dry-run").split())
    assert f"{home()}/outputs/" in plan


@promise("P013", "read the same number in notebook, JSON and report, each with its origin", "benchlib run machine")
def test_p013_one_number(program, whole, recorded):
    page = re.sub(r"\s+", " ", Page(whole.path / "report.html").text)
    notebook = "".join(
        output.data["text/html"]
        for cell in _code(whole.path / "notebook.ipynb")
        for output in cell.outputs
        if "text/html" in output.get("data", {})
    )
    stored = {row["name"]: row for row in json.loads((whole.path / "result.json").read_text())["metrics"]}
    table = session.metrics_table(whole)
    assert set(stored) == set(table.index)
    for name, row in table.iterrows():
        assert row["provenance"] == stored[name]["provenance"]
        assert f"<td>{row['value']}</td>" in notebook, name
        assert row["value"] in page or row["provenance"] == "not_available", name
    seconds = float(table.loc["total_s", "value"].removesuffix(" s"))
    assert seconds == pytest.approx(stored["total_s"]["value"], rel=0.006), "three digits of it"
    assert all(word in page for word in ("Measured", "Derived"))
    origins = {metric.provenance for name in BENCHMARKS for metric in Run(recorded(name)).result.metrics}
    assert {"measured", "derived", "not_available"} <= origins
    assert "claimed by their sources; none was measured here" in program("references", "--metric", "f1")


@promise("P010", "draw with seaborn, from tidy tables that can be drawn again", 'session.frame(run, "loss-curve")')
def test_p010_seaborn(recorded):
    run = Run(recorded("squad"))
    frame = session.frame(run, "loss-curve")
    numbers = frame.select_dtypes("number")
    loss = next(name for name in numbers if set(run.samples["loss"]) <= set(numbers[name]))
    step = next(name for name in numbers if name != loss)
    axes = seaborn.lineplot(frame, x=step, y=loss, errorbar=None)
    assert len(axes.lines[0].get_xdata()) >= len(run.samples["loss"]), "a row for each step"
