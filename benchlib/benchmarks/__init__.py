"""The benchmarks of the kit. A benchmark is four places: a folder, a name, a section in the tiers, a notebook.

The folder holds, by convention:

    __init__.py   the question, as its docstring
    config.py     <Name>Config: the parameters, a subclass of BaseConfig
    run.py        run(config, run_dir, events): what every rank executes
    judge.py      checks(run, comparison), limits(run), reading(run); where it has them published(run), claims(numbers), refuse(config),
                  missed(run), lacks(table, row, column) (where a null has its reason, see benchlib.judge.numbers), SIGNED
    view.py       VIEW: its key numbers and the words for what it shows (optional)
    figures.py    FIGURES: its pictures by name, in the order of the report (optional)
    tables.py     TABLES: its tables by heading, MORE: of its notebook alone (optional; else the notebook has those of VIEW)
    export.py     read(content, name): a run from a file that an export of its own wrote (optional)
    command.py    command: a verb of its own for the command line (optional)

and whatever else it needs. The name stands in ``NAMES``; a benchmark outside this package joins by an entry point of the
group ``benchlib.benchmarks`` whose name is its own and whose value is its package. The tiers are ``params/tiers/*.yaml``, the
notebook is ``notebooks/NN_<name>.ipynb`` (of one from outside: in its own folder). Parts are imported when they are used: the front never loads torch.
One from outside that cannot be imported costs only the commands that need it.
"""

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from benchlib.core.errors import UserError
from benchlib.core.files import home

NAMES = ("machine", "squad", "collectives", "parity", "inference", "serving", "seq2seq", "compiled", "parallel")
LABELS = {"total_s": "Whole run"}  # of metrics that every benchmark has


def _nothing(*_: Any) -> list[Any]:
    return []


def _lacks_nothing(*_: Any) -> bool:
    return False


@dataclass(frozen=True)
class View:
    """What a benchmark shows first, and its words. All of it may be left out.

    ``headlines`` are the key numbers, by the beginnings of metrics' names (none: the first six metrics), ``labels`` the
    words for them, ``headings`` those for the result's tables. ``tables(run)`` gives the report other tables than the raw
    ones, as rows by heading. ``warnings(config, result)`` says what limits the meaning of a result; ``result`` is None
    where the run left none. ``listing()`` gives tables of what it can run, as rows of texts by heading, for `benchlib list`. ``exports`` are formats of the benchmark alone: name, what it is, ``module:function``; see
    ``benchlib.show.exports.Export``.

    ``rate`` makes its runs comparable by price (``benchlib.judge.cost``): the beginning of the name of the metric that counts
    items per second over all devices, its unit ``samples/s``, ``tokens/s`` ... Beside it the metrics ``flops_per_s`` and
    ``power_w`` are read, and two facts: ``epoch_items``, how many items an epoch of the whole work has, and ``paid_devices``,
    how many are paid for where that is not one for each rank (or node of a CPU backend). ``batch`` are the fields of its config
    whose product with the ranks is the effective batch, ``ways`` those that change how the work is done and not
    what is done.
    """

    headlines: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    headings: Mapping[str, str] = field(default_factory=dict)
    tables: Callable[[Any], dict[str, list[dict[str, Any]]]] | None = None
    warnings: Callable[[Any, Any], list[str]] = _nothing
    listing: Callable[[], dict[str, list[dict[str, str]]]] | None = None
    exports: tuple[tuple[str, str, str], ...] = ()
    rate: str = ""
    batch: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()

    def label(self, metric: str) -> str:
        """Return the words for a metric: those of the longest beginning of its name that has some."""
        words = {**LABELS, **self.labels}
        prefix = max((name for name in words if metric == name or metric.startswith(name + "_")), key=len, default=None)
        return words[prefix] if prefix else metric.replace("_", " ")

    def heading(self, table: str) -> str:
        """Return the heading of a table."""
        return self.headings.get(table, table.replace("_", " ").capitalize())


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. Each property imports the part that it returns."""

    name: str
    package: str
    joined: bool = False

    @functools.cached_property
    def fault(self) -> str:
        """Why a benchmark from outside cannot be loaded, '' where it can: one sentence. Imports what the front needs of it."""
        try:
            if self.joined:
                _ = self.config, self.checks, self.view, self.command
        except UserError as error:
            return str(error)
        return ""

    def _import(self, file: str = "") -> ModuleType:
        with self._guarded(file):
            return importlib.import_module(f"{self.package}.{file}" if file else self.package)

    @contextlib.contextmanager
    def _guarded(self, file: str) -> Iterator[None]:
        """Raise ``UserError`` for whatever the code of a benchmark from outside raises; errors of the kit's own stay what they are."""
        try:
            yield
        except Exception as error:
            if not self.joined or isinstance(error, UserError):
                raise
            where = f"{self.package}.{file}" if file else self.package
            raise UserError(
                f"benchmark {self.name} cannot be loaded, {where}: {type(error).__name__}: {error}; mend or uninstall its package"
            ) from error

    def has(self, file: str) -> bool:
        """Whether the benchmark has such a file. Imports its package only."""
        with self._guarded(file):
            return importlib.util.find_spec(f"{self.package}.{file}") is not None

    def part(self, file: str, name: str, default: Any = None) -> Any:
        """Return ``name`` of the benchmark's ``file``; ``default``, where one is given, where it has none."""
        if default is not None and not self.has(file):
            return default
        module = self._import(file)
        with self._guarded(file):
            return getattr(module, name) if default is None else getattr(module, name, default)

    @property
    def question(self) -> str:
        """The question that the benchmark answers."""
        return (self._import().__doc__ or self.name).strip().splitlines()[0]

    @property
    def notebook(self) -> Path:
        """Its notebook: among those of the checkout, else in its own folder. Raises ``UserError`` where it has none."""
        folders = (home() / "notebooks", *map(Path, self._import().__path__))
        for folder in folders:
            for path in sorted(folder.glob(f"[0-9]*_{self.name}.ipynb")):
                return path
        raise UserError(f"{self.name} has no notebook: {folders[0]} needs a file NN_{self.name}.ipynb")

    @property
    def config(self) -> Any:
        """The pydantic model of its parameters."""
        return self.part("config", f"{self.name.capitalize()}Config")

    @property
    def run(self) -> Callable[..., None]:
        """What every rank executes: ``run(config, run_dir, events)``. Imports torch: for workers only."""
        return self.part("run", "run")  # type: ignore[no-any-return]

    @property
    def ahead(self) -> Callable[[Any], Any]:
        """``begin(config)``: starts what may load its libraries while a rank imports ``run``."""
        return self.part("ahead", "begin", _nothing)  # type: ignore[no-any-return]

    @property
    def checks(self) -> Callable[..., list[Any]]:
        """``checks(run, comparison)``: its own checks."""
        return self.part("judge", "checks")  # type: ignore[no-any-return]

    @property
    def limits(self) -> Callable[..., list[Any]]:
        """``limits(run)``: how much worse than the baseline its metrics may get."""
        return self.part("judge", "limits")  # type: ignore[no-any-return]

    @property
    def reading(self) -> Callable[..., list[str]]:
        """``reading(run)``: what its numbers say, in sentences."""
        return self.part("judge", "reading")  # type: ignore[no-any-return]

    @property
    def published(self) -> Callable[..., list[Any]]:
        """``published(run)``: which of its values can be placed beside published figures."""
        return self.part("judge", "published", _nothing)  # type: ignore[no-any-return]

    @property
    def claims(self) -> Callable[..., Iterable[Any]]:
        """``claims(numbers)``: its numbers as claims, which the rules of impossible numbers are asked about."""
        return self.part("judge", "claims", _nothing)  # type: ignore[no-any-return]

    @property
    def lacks(self) -> Callable[[str, Mapping[str, Any], str], bool]:
        """``lacks(table, row, column)``: whether a null there has a reason."""
        return self.part("judge", "lacks", _lacks_nothing)  # type: ignore[no-any-return]

    @property
    def signed(self) -> Collection[str]:
        """The columns that may be below zero."""
        return self.part("judge", "SIGNED", ())  # type: ignore[no-any-return]

    @property
    def refuse(self) -> Callable[[Any], Any]:
        """``refuse(config)``: raises ``UserError`` for files that a valid config names and that cannot be used."""
        return self.part("judge", "refuse", _nothing)  # type: ignore[no-any-return]

    @property
    def missed(self) -> Callable[[Any], Mapping[str, list[str]] | list[Any]]:
        """``missed(run)``: by parameter, the values that a run did not do; where the user named them, the exit code says so."""
        return self.part("judge", "missed", _nothing)  # type: ignore[no-any-return]

    @property
    def view(self) -> View:
        """What it shows first, and its words."""
        return self.part("view", "VIEW", View())  # type: ignore[no-any-return]

    @property
    def figures(self) -> Mapping[str, Callable[..., Any]]:
        """The pictures of its report by name: ``draw(run, theme) -> Picture``."""
        return self.part("figures", "FIGURES", {})  # type: ignore[no-any-return]

    @property
    def more_figures(self) -> Mapping[str, Callable[..., Any]]:
        """Those of its notebook alone."""
        return self.part("figures", "MORE", {})  # type: ignore[no-any-return]

    @property
    def tables(self) -> Mapping[str, Callable[..., Any]]:
        """The tables of its report and its notebook, by heading: ``make(run) -> pandas.DataFrame``."""
        return {**self.part("tables", "TABLES", {}), **self.part("tables", "MORE", {})}

    @property
    def command(self) -> Any:
        """Its own verb of the command line, a click command; None where it has none."""
        return self.part("command", "command", False) or None


def _all() -> dict[str, Benchmark]:
    own = {name: f"{__name__}.{name}" for name in NAMES}
    joined = {entry.name: entry.value for entry in entry_points(group=__name__)}
    return {name: Benchmark(name, package, joined=name not in own) for name, package in {**joined, **own}.items()}


BENCHMARKS: dict[str, Benchmark] = _all()


def loadable() -> list[Benchmark]:
    """Return the benchmarks that can be loaded, for what takes something from each."""
    return [benchmark for benchmark in BENCHMARKS.values() if not benchmark.fault]


def of_run(name: str) -> Benchmark | None:
    """Return the benchmark of a stored run; None where this kit does not have it or cannot load it."""
    benchmark = BENCHMARKS.get(name)
    return benchmark if benchmark and not benchmark.fault else None


def view(benchmark: str) -> View:
    """Return the view of a benchmark by name; of one that this kit does not have an empty one."""
    own = of_run(benchmark)
    return own.view if own else View()
