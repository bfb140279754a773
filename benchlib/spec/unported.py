"""The benchmarks that have no spec yet, as if they had one: what follows from a spec, from judge.py, view.py, tables.py and figures.py."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchlib.judge.checks import FINITE, fact_check
from benchlib.judge.numbers import InvalidNumber, faults_text, judged_view

LABELS = {"total_s": "Whole run"}  # of metrics that every benchmark has


def _nothing(*_: Any) -> list[Any]:
    return []


@dataclass(frozen=True)
class View:
    """What a benchmark shows first, and its words: key metrics and labels by the beginnings of their names, headings of tables.

    The other fields are those of ``benchlib.spec.spec.Spec``.
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

    def heading(self, table: str) -> str:
        """Return the heading of a table."""
        return self.headings.get(table, table.replace("_", " ").capitalize())


class Unported:
    """See the methods of the same names of ``benchlib.spec.spec.Spec``."""

    def __init__(self, part: Callable[..., Any]) -> None:
        self.part, self.view = part, part("view", "VIEW", View())
        self.listing, self.exports = self.view.listing, self.view.exports
        self.rate, self.batch, self.ways = self.view.rate, self.view.batch, self.view.ways
        self.warned = self.view.warnings

        def late(name: str, *default: Any) -> Callable[..., Any]:  # a judge.py may need what loads the views
            return lambda *given: part("judge", name, *default)(*given)

        self.limits, self.reading, self.refuse = late("limits"), late("reading"), late("refuse", _nothing)
        self.claims, self.placed, self.undone = (late(name, _nothing) for name in ("claims", "published", "missed"))

    def judge(self, run: Any, comparison: Any) -> list[Any]:
        """Judge a run; "finite" lists every number that is missing or impossible, whoever reads it."""
        lacks, signed = self.part("judge", "lacks", lambda *_: False), self.part("judge", "SIGNED", ())
        judged, faults = judged_view(run, lacks, signed)
        try:
            checks = self.part("judge", "checks")(judged, comparison)
        except InvalidNumber as error:  # outside of any check: what to compare could not be told
            checks, faults = [], [*(faults or [str(error)]), "no other check could be evaluated"]
        if not faults:
            return checks  # type: ignore[no-any-return]
        finite = next((check for check in checks if check.name == FINITE), None)
        question = finite.question if finite else "Are all values finite and non-negative?"
        failed = fact_check(FINITE, question, False, faults_text(faults))
        return [failed if check is finite else check for check in checks] + ([] if finite else [failed])

    def first(self, names: Iterable[str]) -> dict[str, str]:
        """Return the words for the key metrics among ``names``, in their order."""
        names, starts = list(names), self.view.headlines
        found = [(start, name) for start in starts for name in names if f"{name}_".startswith(f"{start}_")]
        return {
            name: self.label(start) for start, name in (found if starts else zip(names[:6], names[:6], strict=True))
        }

    def label(self, name: str) -> str:
        """Return the words for a metric: those of the longest beginning of its name that has some."""
        words = {**LABELS, **self.view.labels}
        start = max((start for start in words if f"{name}_".startswith(f"{start}_")), key=len, default=None)
        return words[start] if start else name.replace("_", " ")

    def report(self, run: Any) -> dict[str, list[dict[str, Any]]]:
        """Return the tables of the report; the template lays out ``misses`` and ``ranks`` by itself."""
        if self.view.tables:
            return self.view.tables(run)  # type: ignore[no-any-return]
        kept, tables = ("misses", "ranks"), run.result.tables if run.result else {}
        return {name if name in kept else self.view.heading(name): rows for name, rows in tables.items()}

    def frames(self, run: Any) -> dict[str, Callable[[], Any]]:
        """Return the tables of the notebook; one whose tables are rows has them in its view alone."""
        import pandas as pd

        made = {**self.part("tables", "TABLES", {}), **self.part("tables", "MORE", {})}
        if made or not self.view.tables:
            return {name: lambda make=make: make(run) for name, make in made.items()}  # type: ignore[misc]
        rows = self.view.tables(run) if run.result else {}
        return {name: lambda lines=lines: pd.DataFrame(lines) for name, lines in rows.items()}  # type: ignore[misc]

    def figures(self, report: bool | None = None) -> Mapping[str, Callable[..., Any]]:
        """Return the pictures."""
        own, more = self.part("figures", "FIGURES", {}), self.part("figures", "MORE", {})
        return {**({} if report is False else own), **({} if report else more)}


NONE = Unported(lambda file, name, default=None: default or _nothing)  # of a benchmark that this kit does not have
