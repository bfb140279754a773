"""The twelve packages that benchlib is built on: each is declared in pyproject.toml and used, by an import, a command or a plugin."""

import ast
import re
import tomllib

import pytest

from benchlib.core.files import PACKAGE, home

# The part of pyproject.toml that names a package: "" for ``dependencies``, else the extra.
DECLARED = {
    "torch": "",
    "transformers": "",
    "datasets": "",
    "evaluate": "",
    "pandas": "",
    "jupyterlab": "notebooks",
    "papermill": "notebooks",
    "nbconvert": "notebooks",
    "seaborn": "notebooks",
    "ipywidgets": "notebooks",
    "pytest": "test",
    "nbval": "test",
}
IMPORTED = sorted(set(DECLARED) - {"jupyterlab", "pytest", "nbval"})


def imports_of(*folders):
    """Return the top-level packages that the Python files of folders import, with the first file of each."""
    found = {}
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for name in names:
                found.setdefault(name.partition(".")[0], path)
    return found


@pytest.fixture(scope="module")
def imported():
    return imports_of(PACKAGE)


def recipes():
    """Return the commands of the Makefile, without comments."""
    return re.findall(r"^\t(.*)$", (home() / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", DECLARED)
def test_a_package_is_declared_where_it_belongs(name):
    project = tomllib.loads((home() / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    parts = {"": project["dependencies"]} | project["optional-dependencies"]
    plain = {part: [row for row in rows if "[" not in row] for part, rows in parts.items()}  # extras add to a package
    declared = [part for part, rows in plain.items() for row in rows if re.match(r"[\w.-]+", row)[0] == name]
    assert declared == [DECLARED[name]]


@pytest.mark.parametrize("name", IMPORTED)
def test_a_package_is_imported(imported, name):
    assert name in imported, f"no file of benchlib/ imports {name}: use it or drop it from pyproject.toml"


def test_jupyterlab_is_run_by_make():
    assert any(re.search(r"\bjupyter lab\b", line) for line in recipes())


def test_pytest_and_nbval_run_the_tests():
    lines = [line.split() for line in recipes() if "-m pytest" in line]
    assert any({"--nbval", "--nbval-current-env"} <= set(words) for words in lines)
    assert "pytest" in imports_of(home() / "tests")


def test_a_package_that_is_no_longer_used_is_found(tmp_path):
    """A name in a text, a comment or a relative import is no use."""
    (tmp_path / "a.py").write_text(
        '"""import seaborn"""\n# import pandas\nfrom .torch import evaluate\nimport numpy.linalg\n'
    )
    assert set(imports_of(tmp_path)) == {"numpy"}
