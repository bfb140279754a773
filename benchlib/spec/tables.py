"""Rows, columns and tables: what a measurement returns, and how a spec names a part of it.

A measurement returns rows by table: numbers, texts that identify something, and lists of raw samples. The table ``run`` has
one row, what there is one of. Four keys have a meaning in every row:

    why      {"column": "reason"}: a number that is missing for a reason
    status   "ok", "skipped" or "failed": of the whole row
    reason   why a row was skipped or failed
    gates    False: the row informs, and a wrong number in it fails no run

A number that is missing without a reason, or not finite, FAILS every check that reads it.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import Formatter
from typing import Any

from benchlib.core.definitions import share_text, size_text
from benchlib.core.stats import AVERAGES, Average, average
from benchlib.core.text import quantity, seconds
from benchlib.judge.numbers import fault_of, why
from benchlib.results.metrics import Metric as Stated
from benchlib.results.run import NOT_COLUMNS, Result, Run, Tables

Row = Mapping[str, Any]
MISSING = "–"


class ColumnFault(RuntimeError):
    """The function of a column raised on sound values: a mistake in the benchmark. No check takes it for a number that is missing."""


@dataclass(frozen=True)
class Rows:
    """All that the functions of a spec see of a run. ``config`` is None where a result lies outside of its run's folder.

    ``comparison`` is the baseline that checks compare with, or why there is none.
    """

    config: Any
    world: int
    tables: Tables
    metrics: Mapping[str, Stated] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    comparison: Any = None

    @property
    def run(self) -> Row:
        return next(iter(self.tables.get("run", ())), {})

    @classmethod
    def of(cls, run: Run) -> "Rows":
        """Return those of a run that has a result, with the raw samples in their rows."""
        assert run.result is not None
        rows = cls.bare(run.config, run.result)
        return replace(rows, tables=with_samples(rows.tables, run.row_samples), machine=run.machine)

    @classmethod
    def bare(cls, config: Any, result: Result) -> "Rows":
        """Return those of a result, without its raw samples."""
        metrics = {metric.name: metric for metric in result.metrics}
        return cls(config, result.world_size, {**result.tables, "run": [result.facts]}, metrics)


# How the numbers of a unit are written; others by ``quantity``, with their unit.
WRITE: dict[str, Callable[[float], str]] = {
    "B": lambda value: size_text(value) if value else "no data",
    "us": lambda value: seconds(1e-6 * value),
    "s": seconds,
    "ratio": share_text,
    "count": lambda value: f"{value:,.0f}",
    "number": lambda value: f"{value:.3g}" if value % 1 else f"{value:,.0f}",
    "error": lambda value: f"{value:.2g}",
}


def write(value: float, unit: str) -> str:
    return WRITE.get(unit, lambda value: quantity(value, unit))(value) if math.isfinite(value) else str(value)


@dataclass(frozen=True)
class Col:
    """A column. ``unit`` says how its numbers are written; ``""`` holds texts, and what is not shown.

    ``of`` computes it from the columns ``needs`` of the row, else of the run: if one is missing so is this one, for the same
    reason; if one is no number for it, or zero, it is NaN. ``samples``: a list is several measurements of one number, whose
    ``average`` counts. ``role`` is the field of a ``Claim`` that the numbers are, as in ``collective.wrong_elements``. ``words`` are
    readers' words for texts. ``quality``: its numbers are the same on any hardware, but for so much at least
    (``benchlib.judge.reference_values``).
    """

    name: str
    unit: str = ""
    label: str = ""
    of: Callable[..., Any] | None = None
    needs: str = ""
    samples: bool = False
    average: Average = "median"
    signed: bool = False
    derived: bool | None = None  # whether it follows from what was measured; None: where ``of`` computes it
    role: str = ""
    words: Mapping[str, str] = field(default_factory=dict)
    quality: float | None = None

    @property
    def stated_unit(self) -> str:
        return "" if self.unit in ("number", "error") else self.unit

    @property
    def heading(self) -> str:
        suffix = "_bytes" if self.unit == "B" else f"_{self.unit.lower()}"  # every cell is written with its unit
        return self.label or self.name.removesuffix(suffix).replace("_", " ")


def cols(names: str, unit: str = "", **more: Any) -> list[Col]:
    """Return columns of one unit, named and headed by the words of ``names``."""
    return [Col(name, unit, **more) for name in names.split()]


@dataclass(frozen=True)
class Table:
    """Rows of one kind, or a selection of them. ``title`` names a row for a reader, ``note`` adds to one that is wrong.

    ``claim`` returns what no column holds, by role. A ``later`` one came after runs that are stored and do not have it.
    """

    name: str
    title: str
    cols: Sequence[Col]
    claim: Callable[[Row, Rows], Mapping[str, Any]] | None = None
    note: str = ""
    picks: tuple[Callable[[Rows, list[Row]], list[Row]], ...] = ()
    later: bool = False

    @functools.cached_property
    def refs(self) -> dict[str, "Ref"]:
        """Its columns by name, and those that any row may have."""
        return {col.name: Ref(self, col) for col in (*map(Col, NOT_COLUMNS), *self.cols)}

    def __getitem__(self, name: str) -> "Ref":
        """Return a column; ``KeyError`` for one that is not declared."""
        return self.refs[name]

    def pick(self, choose: Callable[[Rows, list[Row]], list[Row]]) -> "Table":
        """Return the same table with the rows that ``choose`` leaves of it."""
        return replace(self, picks=(*self.picks, choose))

    def _chosen(self, values: Mapping[str, Any], keep: bool) -> "Table":
        refs = [(self[name], value) for name, value in values.items()]

        def choose(run: Rows, rows: list[Row]) -> list[Row]:
            return [row for row in rows if all(_is(ref.raw(row, run), value) for ref, value in refs) is keep]

        return self.pick(choose)

    def where(self, **wanted: Any) -> "Table":
        """Keep rows with these values; a tuple stands for any of its values, a function for those that it holds for."""
        return self._chosen(wanted, True)

    def unless(self, **refused: Any) -> "Table":
        """Leave out rows with all of these values."""
        return self._chosen(refused, False)

    def ran(self) -> "Table":
        """Keep rows that were neither skipped nor failed."""
        return self.pick(lambda run, rows: [row for row in rows if row.get("status", "ok") == "ok"])

    def most(self, column: str, per: str = "", least: bool = False) -> "Table":
        """Keep the first row with the largest (``least``: smallest) value of a column, of each group of ``per``."""
        ref, sign = self[column], -1 if least else 1

        def choose(run: Rows, rows: list[Row]) -> list[Row]:
            best: dict[tuple[Any, ...], tuple[float, Row]] = {}
            for row in rows:
                group, value = tuple(map(row.get, per.split())), ref.number(row, run)
                if value is not None and (group not in best or sign * value > sign * best[group][0]):
                    best[group] = (value, row)
            return [row for _, row in best.values()]

        return self.pick(choose)

    def rows(self, run: Rows) -> list[Row]:
        """Return the rows of the selection, in their order."""
        rows = list(run.tables.get(self.name, ()))
        for choose in self.picks:
            rows = choose(run, rows)
        return rows

    def whole(self, run: Rows) -> list[dict[str, Any]]:
        """Return the rows of the selection with their computed columns: for functions that compare several."""
        computed = [self[col.name] for col in self.cols if col.of]
        return [{**row, **{ref.col.name: ref.raw(row, run) for ref in computed}} for row in self.rows(run)]

    def text(self, form: str, row: Row, run: Rows) -> str:
        """Write a format string over the columns of a row, each number with its unit."""
        return tidy(form.format_map({name: self[name].text(row, run) for name in fields(form)}))

    def name_of(self, row: Row, run: Rows) -> str:
        return self.text(self.title, row, run)


def _is(value: Any, wanted: Any) -> bool:
    if callable(wanted):
        return value is not None and bool(wanted(value))
    return value in wanted if isinstance(wanted, tuple) else value == wanted


@functools.cache
def fields(form: str) -> list[str]:
    """Return the names in braces of a format string."""
    return [name for _, name, _, _ in Formatter().parse(form) if name]


def tidy(text: str) -> str:
    """Return a text without the gaps that empty cells left."""
    return re.sub(r" +([,:;])", r"\1", " ".join(text.split()))


@dataclass(frozen=True)
class Ref:
    """A column of a selection of rows: what metrics, checks and pictures take."""

    table: Table
    col: Col

    def of(self, rows: list[Row]) -> "Ref":
        """Return the same column of these rows."""
        return replace(self, table=replace(self.table, picks=(lambda *_: rows,)))

    @property
    def titled(self) -> str:
        """The heading with its unit: a column of a frame, what stands at an axis."""
        unit = {"us": "µs", "ratio": "", "number": "", "count": "", "error": ""}.get(self.col.unit, self.col.unit)
        return f"{self.col.heading} ({unit})" if unit and unit != self.col.heading else self.col.heading

    def raw(self, row: Row, run: Rows) -> Any:
        """Return what the cell holds, or what is computed of others; None where it is missing."""
        if self.col.of is None:
            value = row.get(self.col.name)
            return [value] if self.col.samples and isinstance(value, (int, float)) else value
        inputs = [self._needed(name, row, run) for name in self.col.needs.split()]
        if any(value is None or value == [] for value in inputs):
            return None
        try:
            return self.col.of(*inputs)
        except ArithmeticError:  # a time of zero
            return math.nan
        except (ValueError, TypeError, AttributeError) as error:
            if self._explained(error, inputs):
                return math.nan
            what = f"the column {self.col.name} of {self.table.name} cannot be computed of {str(inputs)[:200]}"
            raise ColumnFault(f"{what}: {type(error).__name__}: {error}") from error

    def _explained(self, error: Exception, inputs: Sequence[Any]) -> bool:
        """Tell whether a value explains the error of a column's function: one that is at fault, or a text in place of a number.
        Of a fact of the run the table does not say which it should be."""
        lists = [value if isinstance(value, (list, tuple)) else [value] for value in inputs]
        for name, value, items in zip(self.col.needs.split(), inputs, lists, strict=True):
            col = self.table.refs[name].col if name in self.table.refs else None
            texts = any(isinstance(item, (str, bool, dict)) for item in items)
            if fault_of(value, col.signed if col else False) or (texts and (col is None or col.unit)):
                return True
        zero, lengths = any(0 in items for items in lists), {len(value) for value in inputs if isinstance(value, list)}
        return isinstance(error, ValueError) and (zero or len(lengths) > 1)  # a logarithm of 0, pairs that are none

    def _needed(self, name: str, row: Row, run: Rows) -> Any:
        if name == "world" and name not in row:
            return run.world
        if name in self.table.refs:
            return self.table[name].raw(row, run)
        return row[name] if name in row else run.run.get(name)

    def numbers(self, row: Row, run: Rows) -> list[float]:
        """Return the numbers of a cell; empty where it is missing. What is no number among several is not finite."""
        value = self.raw(row, run)
        items = [_number(item) for item in (value if isinstance(value, (list, tuple)) else [value])]
        return [] if items == [None] else [math.nan if item is None else item for item in items]

    def number(self, row: Row, run: Rows) -> float | None:
        """Return the number of a cell, of samples their average; one that is not finite stands for all."""
        numbers = self.numbers(row, run)
        wrong = [value for value in numbers if not math.isfinite(value)]
        return None if not numbers else wrong[0] if wrong else average(numbers, self.col.average)

    def finite(self, row: Row, run: Rows) -> float | None:
        """Return the number of a cell where it is finite: what can be drawn."""
        value = self.number(row, run)
        return value if value is not None and math.isfinite(value) else None

    def value(self, row: Row, run: Rows) -> Any:
        """Return the cell for a program: a text, a switch, or a finite number, of samples their average; else None."""
        value = self.raw(row, run)
        return value if isinstance(value, (str, bool)) else self.finite(row, run)

    def why(self, row: Row) -> str:
        """Return why the row has no such number; '' where it does not say."""
        return why(row, self.col.name, *self.col.needs.split())

    def text(self, row: Row, run: Rows) -> str:
        value = self.raw(row, run)
        if isinstance(value, (str, bool)):
            return self.col.words.get(str(value), str(value))
        number = self.number(row, run)
        return (MISSING if value is None else str(value)) if number is None else write(number, self.col.unit)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def with_samples(tables: Tables, samples: Mapping[str, Sequence[float]]) -> Tables:
    """Return tables with the samples that :func:`split_samples` took out, where the row still has their average."""
    whole = {name: [dict(row) for row in rows] for name, rows in tables.items()}
    for name, rows in whole.items():
        for index, row in enumerate(rows):
            for column, value in row.items():
                values = samples.get(f"{name}[{index}].{column}")
                # Another number was altered: it is judged as it stands.
                if values and value in [average(values, kind) for kind in AVERAGES]:
                    row[column] = list(values)
    return whole


def split_samples(declared: Iterable[Table], tables: Tables) -> tuple[Tables, dict[str, list[float]]]:
    """Return tables with the averages of the columns of raw samples, and those as lists by ``table[row].column``.

    Raises ``KeyError`` for a table or a column that is not ``declared``.
    """
    by_name, samples = {table.name: table for table in declared}, dict[str, list[float]]()
    thin = {name: [dict(row) for row in rows] for name, rows in tables.items()}
    for name, rows in thin.items():
        for index, row in enumerate(rows):
            for column, values in row.items():
                col = by_name[name][column].col
                if col.samples and values:
                    samples[f"{name}[{index}].{column}"] = list(values)
                    row[column] = average(values, col.average)
    return thin, samples
