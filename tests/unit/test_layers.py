"""Who may import whom: eleven rows of packages and one rule of file names. A new file needs no entry here."""

import ast
import graphlib
import subprocess
import sys

import grimp
import pytest

from benchlib.benchmarks import NAMES
from benchlib.core.files import PACKAGE

# The rooms in the order of the imports, with those that each may import beside itself. ``benchlib.benchmarks`` itself, the
# registry, stands under all of them but core: it imports core and loads the rest lazily.
ROOMS = {
    "core": "",
    "config": "core",
    "results": "core config",
    "launch": "core config results",
    "runtime": "core config results launch",
    "metrics": "",
    "workloads": "core config results launch runtime metrics judge show spec",
    "judge": "core config results launch",
    "show": "core config results launch judge",
    "spec": "core config results launch judge show",
    "commands": "core config results launch judge show session",
    "benchmarks": "core config results launch runtime metrics workloads judge show spec",
}
# Of a benchmark's files these are read where no torch is: by the front, before a run and after it.
FRONT = {"__init__", "config", "command", "spec"}
WITH_TORCH = {"runtime", "metrics", "workloads"}
DOORS = {"__main__", "cli", "session"}
HEAVY = {"torch", "transformers", "datasets", "evaluate", "tokenizers", "accelerate"}
JUPYTER = {"IPython", "ipywidgets", "ipykernel", "jupyter_client", "nbclient", "nbformat", "papermill"}


@pytest.fixture(scope="module")
def graph():
    return grimp.build_graph("benchlib", include_external_packages=True, cache_dir=None)


def own(graph):
    return sorted(name for name in graph.modules if name.startswith("benchlib."))


def place(name):
    """Return room, benchmark and file of a module; '' for what it has none of."""
    _, room, *rest = name.split(".")
    return room, *((rest[0], rest[1] if rest[1:] else "__init__") if room == "benchmarks" and rest else ("", ""))


def in_front(name):
    room, benchmark, file = place(name)
    return room not in WITH_TORCH and (not benchmark or file.split("_")[0] in FRONT)


def allowed(name, other):
    (room, benchmark, file), (to, of, _) = place(name), place(other)
    if to == "benchmarks":
        # A benchmark knows no other one, and nobody else knows any: they are loaded by name.
        return of == benchmark if benchmark and of else not of and room != "core"
    if room == "benchmarks" and not benchmark:
        return to == "core"
    if room in DOORS:
        return to not in WITH_TORCH
    if file.split("_")[0] == "command":
        return True  # but torch, see below
    return to == room or to in ROOMS[room].split()


def test_imports_go_one_way(graph):
    assert {place(name)[0] for name in own(graph)} == set(ROOMS) | DOORS
    wrong = [
        f"{name} imports {other}"
        for name in own(graph)
        for other in sorted(graph.find_modules_directly_imported_by(name))
        if other.startswith("benchlib.") and not allowed(name, other)
    ]
    assert wrong == []


def test_the_front_imports_no_torch_and_what_ranks_execute_no_jupyter(graph):
    """Of what a rank executes nothing needs Jupyter; of the front nothing needs torch, also not through a third module."""
    wrong = {
        name: sorted(others)
        for name in own(graph)
        if (others := graph.find_upstream_modules(name) & (HEAVY if in_front(name) else set()))
        or (not in_front(name) and (others := graph.find_modules_directly_imported_by(name) & JUPYTER))
    }
    assert wrong == {}


def test_no_shared_file_names_a_benchmark():
    """A benchmark is loaded by name, and what only one has stands in its own folder."""
    shared = [path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(PACKAGE / "benchmarks")]
    named = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.value}"
        for path in shared
        if path.relative_to(PACKAGE).parts[0] not in WITH_TORCH
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and node.value in set(NAMES) - {"machine", "inference"}  # also words of their own
    ]
    assert len(shared) > 50
    assert named == []


def test_there_are_no_cycles(graph):
    graphlib.TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in own(graph)}).prepare()


SLOW = {"torch._dynamo", "torch.distributed.fsdp", "transformers", "datasets", "pandas"}


@pytest.mark.parametrize(
    ("modules", "without"),
    [
        # The help, whose time is that of its imports.
        ("benchlib.cli", {"torch", "numpy", "matplotlib", "IPython", "aiohttp", "psutil", "yaml", *SLOW}),
        ("benchlib.cli, benchlib.commands.run, benchlib.session, benchlib.launch.supervise", {"torch", *SLOW}),
        # Each rank of a run imports these. An optimizer, DDP or transformers brings Dynamo; they need none of them to begin.
        ("benchlib.benchmarks.machine.run, benchlib.benchmarks.collectives.run", SLOW),
    ],
)
def test_what_is_started_often_loads_nothing_slow(modules, without):
    code = f"import {modules}; import sys; print(sorted({without} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"
