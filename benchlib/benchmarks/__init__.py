"""The benchmarks of the kit. A benchmark is four places: a folder, a name, a section in the tiers, a notebook.

The folder holds, by convention:

    __init__.py   the question, as its docstring
    config.py     <Name>Config: the parameters, a subclass of BaseConfig; PRELOAD: modules that its child processes load (optional)
    spec.py       SPEC: what it states, each thing once, see benchlib.spec.spec.Spec
    run.py        measure(rank): what every rank executes; rows by table
    command.py    command: a verb of its own for the command line (optional)
    foreign.py    READERS: files of other programs that `benchlib judge` reads, by format (optional)
    export.py     READERS: files that it exports and `benchlib compare` reads as runs, by their ``format`` (optional)

and what measures. One whose rank forms no process group has ``run(config, run_dir, events)`` in place of ``measure``. A benchmark
from outside joins by an entry point of the group ``benchlib.benchmarks``: its name and its package. Parts are imported when they
are used, so that the front never loads torch, and one from outside that cannot be imported costs only the commands that need it.
"""

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from benchlib.core.errors import UserError
from benchlib.core.files import home

NAMES = ("machine", "squad", "collectives", "parity", "inference", "serving", "seq2seq", "compiled", "parallel")
REQUIRED: Any = object()


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: its name and its package, which is ``external`` where it is not of this kit."""

    name: str
    package: str
    external: bool = False

    def part(self, file: str, name: str, default: Any = REQUIRED) -> Any:
        """Return ``name`` of the module ``file``, '' for the package itself; ``default`` where one is given and it has none.

        Raises ``UserError`` for whatever the code of a benchmark from outside raises; errors of the kit's own stay what they are.
        """
        module = f"{self.package}.{file}" if file else self.package
        try:
            if default is not REQUIRED and not importlib.util.find_spec(module):
                return default
            return getattr(importlib.import_module(module), name, *([] if default is REQUIRED else [default]))
        except Exception as error:
            if not self.external or isinstance(error, UserError):
                raise
            reason = f"{module}: {type(error).__name__}: {error}; fix or uninstall its package"
            raise UserError(f"benchmark {self.name} cannot be loaded, {reason}") from error

    @functools.cached_property
    def fault(self) -> str:
        """Why a benchmark from outside cannot be loaded, '' where it can: one sentence. Imports what the front needs of it."""
        try:
            _ = self.external and (self.config, self.spec, self.command)
        except UserError as error:
            return str(error)
        return ""

    @property
    def question(self) -> str:
        return (self.part("", "__doc__") or self.name).strip().splitlines()[0]  # type: ignore[no-any-return]

    @property
    def notebook(self) -> Path:
        """Its notebook: among those of the checkout, else in its own folder. Raises ``UserError`` where it has none."""
        folders = (home() / "notebooks", *map(Path, self.part("", "__path__")))
        paths = (path for folder in folders for path in sorted(folder.glob(f"[0-9]*_{self.name}.ipynb")))
        if (path := next(paths, None)) is None:
            raise UserError(f"{self.name} has no notebook: {folders[0]} needs a file NN_{self.name}.ipynb")
        return path

    @property
    def config(self) -> Any:
        return self.part("config", f"{self.name.capitalize()}Config")

    @functools.cached_property
    def spec(self) -> Any:
        return self.part("spec", "SPEC")

    @property
    def command(self) -> Any:
        """Its own verb of the command line, a click command; None where it has none."""
        return self.part("command", "command", None)


_PACKAGES = {entry.name: entry.value for entry in entry_points(group=__name__)}
_PACKAGES |= {name: f"{__name__}.{name}" for name in NAMES}
BENCHMARKS = {name: Benchmark(name, package, name not in NAMES) for name, package in _PACKAGES.items()}


def loadable() -> list[Benchmark]:
    """Return the benchmarks that can be loaded, for what takes something from each."""
    return [benchmark for benchmark in BENCHMARKS.values() if not benchmark.fault]


def of_run(name: str) -> Benchmark | None:
    """Return the benchmark of a stored run; None where this kit does not have it or cannot load it."""
    benchmark = BENCHMARKS.get(name)
    return benchmark if benchmark and not benchmark.fault else None


def spec_of(name: str) -> Any:
    """Return the spec of a benchmark by name; of one that this kit does not have an empty one."""
    benchmark = of_run(name)
    return benchmark.spec if benchmark else importlib.import_module("benchlib.spec.spec").Spec([], [], [])
