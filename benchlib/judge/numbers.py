"""The numbers of a run as its checks read them: one that is missing or not finite fails every check that reads it.

A check gets rows that raise :class:`InvalidNumber` where it reads a number that is null, NaN, infinite or negative, or that is not
there. ``checks.Ask.by`` turns that into the FAIL of the check that asked, with the number's name and value as the reason, and
"finite" lists all faults of the run. So the code of a check computes with numbers and never asks whether they are there.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from benchlib.core.errors import UserError

NAMING = 3  # texts at the beginning of a row that tell which one it is


class InvalidNumber(UserError):
    """A check read a number that is missing, not finite or below zero; the text names it and its value."""


def within(value: Any, most: float = math.inf, least: float = -math.inf) -> bool:
    """Whether a number lies within limits, boundaries included. What is missing, not finite or no number never does."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return number and least <= value <= most


def fault_of(value: Any, signed: bool = False) -> str:
    """Return what is wrong with a stored value, or with the first wrong item of a list; '' for texts and flags."""
    if value is None:
        return "missing"
    if isinstance(value, (Mapping, list, tuple)):
        named = value.items() if isinstance(value, Mapping) else enumerate(value)
        absent = isinstance(value, Mapping)  # by name one may be missing
        faults = ((name, fault_of(item, signed)) for name, item in named if not (absent and item is None))
        return next((f"{fault} at {name}" for name, fault in faults if fault), "")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            return str(value)
        return f"{value:g}, below zero" if value < 0 and not signed else ""
    return ""


class Cells(dict[str, Any]):
    """A row, the facts or the samples of a run; reading what is at fault, or by ``[]`` what is not there, raises ``InvalidNumber``."""

    def __init__(self, values: Mapping[str, Any], place: str, faults: Mapping[str, str]) -> None:
        super().__init__(values)
        self.place, self.faults = place, faults

    def __missing__(self, name: str) -> Any:
        raise InvalidNumber(f"{name} is missing in {self.place}")

    def __getitem__(self, name: str) -> Any:
        if name in self.faults:
            raise InvalidNumber(f"{name} is {self.faults[name]} in {self.place}")
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a name, the default where the name is not there."""
        return self[name] if name in self else default  # noqa: SIM401


def place_of(table: str, index: int, row: Mapping[str, Any]) -> str:
    """Say which row it is, by the first texts in it."""
    texts = [value for value in row.values() if isinstance(value, str) and value][:NAMING]
    return f"row {index + 1} of {table}" + (f" ({', '.join(texts)[:60]})" if texts else "")


def why(row: Mapping[str, Any], *columns: str) -> str:
    """Return why a row lacks one of its columns; '' where it does not say."""
    reasons = row.get("why") or {}
    reason = next((str(reasons[name]) for name in columns if reasons.get(name)), "")
    return reason or (str(row.get("reason") or "") if row.get("status") in ("skipped", "failed") else "")


def judged(declared: Iterable[Any], run: Any) -> tuple[Any, list[str]]:
    """Return the rows as checks read them, and every fault in words: reading one raises ``InvalidNumber`` with its name."""
    faults, seen, gone = list[str](), dict[str, list[Cells]](), dict[str, str]()
    for table in declared:
        if table.name not in run.tables and not table.later:
            gone[table.name] = "missing"
            faults.append(f"the table {table.name} is missing")
        seen[table.name] = []
        for index, row in enumerate(run.tables.get(table.name, ())):
            wrong = {col.name: fault for col in table.cols if row.get("gates", True) and (fault := _fault(col, row))}
            place = "the facts" if table.name == "run" else place_of(table.name, index, row)
            faults += [f"{name} is {fault} in {place}" for name, fault in wrong.items()]
            seen[table.name].append(Cells(dict.fromkeys(wrong) | dict(row), place, wrong))
    return replace(run, tables=Cells(seen, "the result", gone)), faults


def _fault(col: Any, row: Mapping[str, Any]) -> str:
    value = row.get(col.name)
    if col.of is not None or ((value is None or value == []) and why(row, col.name)):
        return ""
    if value is None or (value == [] and col.samples):
        return "missing"
    if col.unit and isinstance(value, (str, bool)):
        return f"{value!r}, which is no number,"
    if col.unit == "count" and not col.samples and isinstance(value, float) and value % 1 > 0:  # nan is no number
        return f"{value!r}, which is no count,"
    return fault_of(value, col.signed)
