"""Tables of throughput as published: one row per machine, one column per model or figure. CSV, TSV or Markdown.

A column (``num_gpu``, ``nodes``) says how many devices a row is of, else a count before the row's name (``8x H200``). Rows of
several devices are compared with the row of one such device. A heading says what its column holds: rates, times, counts,
ratios, MFU; ``not_read`` names the others. Where no heading names a rate, every column of numbers that are not below zero is
one, as in tables with a column per model.
"""

import csv
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchlib.core.errors import UserError
from benchlib.judge.impossible.claim import Claim, Compute, Quantity, Speed, SpeedUp

MAX_COLUMNS, MAX_ROWS, MAX_CHARACTERS, MAX_DIGITS = 100, 1_000, 10_000, 40  # characters of a line, of a number
COUNT = re.compile(r"(?<![\w.])(\d{1,5})\s?[x×]\s?(?=[A-Za-z])", re.IGNORECASE)
NUMBER = re.compile(
    r"([-+]?)(?:(inf|∞)|((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.(\d+))?)(?:e([-+]?\d{1,3}))?)\s*([a-z%×]*)$", re.I
)
EMPTY = {"", "-", "–", "—", "n/a", "na", "nan", "none", "null"}
THOUSANDS = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
UNITS = {86400.0: "d day days", 3600.0: "h hr hrs hour hours", 60.0: "min mins minute minutes"}
UNITS |= {1.0: "s sec secs second seconds", 1e-3: "ms"}
SECONDS = {unit: size for size, units in UNITS.items() for unit in units.split()}
ITEMS = r"(samples?|queries|req(uest)?s?|articles?|documents?|prompts?|seq(uence)?s?|images?|tok(en)?s?)"
# What a column with this heading holds: the first that fits. Columns of kind '' are never rates.
KINDS = {
    "": r"cost|price|[$€£]|\b(usd|eur)\b|latency|ttft|tpot|\bp ?\d\d\b|length|^(watts?|power|tdp|year|memory|batch( size)?|bs|host)$",
    "rate": rf"\b{ITEMS} ?(/|per) ?s(ec(onds?)?)?\b|throughput|\bqps\b",
    "ranks": r"^(num |n )gpu$|^(num |n )?(gpus|nodes|devices|ranks|workers|servers|machines|replicas|instances|world size)$",
    "features": r"^features$",
    "epochs": r"^epochs$",
    "samples_counted": r"^samples( counted)?$",
    "wall_s": r"^(total |wall |run ?)?(time|duration|wall|hours?|minutes|seconds|h)( \w+)?$",
    "speed-up": r"^(speed[- ]?up|scaling\b)(?! efficiency)",
    "efficiency": r"^(scaling |parallel )?efficiency",
    "mfu": r"^(mfu|model flops? utili[sz]ation)\b",
}
NEVER_NEGATIVE = ("rate", "wall_s", "samples_counted", "features", "epochs", "ranks", "mfu")
PER_DEVICE = re.compile(r"(/|per )(gpu|device|node|chip|accelerator|rank|worker)\b")
SCALED = re.compile(r"\b([km]|thousands?|millions?)\b|/ ?(min|h|hour|day)\b|\bper (min|h|day)")


class _TooLarge(UserError):
    """A table with more rows or columns than are read."""


@dataclass(frozen=True)
class _Cell:
    value: float
    half: float  # of the last digit as it was written
    unit: str  # behind the number, else that of the column


@dataclass(frozen=True)
class _Column:
    head: str
    words: str
    kind: str | None  # None: not known
    unit: str

    @classmethod
    def of(cls, head: str) -> "_Column":
        words = " ".join(re.sub(r"[()\[\],:_]", " ", head.lower()).split())
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, words)), None)
        inside, times = re.search(r"\(([^()]*)\)", head), [word for word in words.split() if word in SECONDS]
        unit = inside[1].strip().lower() if inside else ""
        return cls(head, words, kind, (times[-1] if times else unit or "s") if kind == "wall_s" else unit)

    @property
    def of_tokens(self) -> bool:
        return "tok" in self.words


@dataclass(frozen=True)
class _Row:
    name: str
    ranks: int
    device: str  # the name without the count
    cells: Mapping[str, _Cell]

    def value(self, column: _Column) -> float:
        """Return a cell's finite number, 0 where there is none."""
        value = self.cells[column.head].value if column.head in self.cells else 0.0
        return value if math.isfinite(value) else 0.0


@dataclass(frozen=True)
class _Table:
    rows: Sequence[_Row]
    columns: Sequence[_Column]
    unread: Sequence[str]

    def of(self, *kinds: str) -> list[_Column]:
        return [column for column in self.columns if column.kind in kinds]

    def above_zero(self, row: _Row, *kinds: str) -> list[tuple[_Column, float]]:
        return [(column, value) for column in self.of(*kinds) if (value := row.value(column)) > 0]

    def shares(self, row: _Row, kind: str) -> list[float]:
        """Return shares as fractions: per cent where a unit says so, or where the column has values that no fraction has."""
        percent = {column.head for column in self.of(kind) if max(other.value(column) for other in self.rows) > 2}
        cells = [(row.cells[column.head], column.head in percent) for column, _ in self.above_zero(row, kind)]
        return [cell.value / (100 if large or cell.unit == "%" else 1) for cell, large in cells]


def sniff(path: Path, text: str) -> bool:
    """A table whose rows name a number of devices, or whose columns can be judged without."""
    try:
        return bool(_table(path, text))
    except _TooLarge:
        return True
    except UserError:
        return path.suffix.lower() in (".csv", ".tsv", ".md")


def not_read(path: Path, text: str) -> Sequence[str]:
    """Return the columns that no rule sees, and those of which a cell is no number."""
    return _table(path, text).unread


def read(path: Path, text: str) -> list[Claim]:
    """Return a claim for each row and column of throughput, and for what else of a row can be judged.

    ``UserError`` for a row that does not fit the header, and for a table that is too large.
    """
    table, claims = _table(path, text), list[Claim]()
    for row in table.rows:
        # 0 is the sign of a benchmark that was not run.
        claims += [_claim(row, rate, table) for rate, _ in table.above_zero(row, "rate")]
        shares = table.shares(row, "mfu")
        compute = Compute(mfu=shares[0], ranks=row.ranks) if shares else None
        others = Claim(subject=row.name, compute=compute, quantities=list(_impossible(row, table)))
        claims += [others] if others.compute or others.quantities else []
    if not claims:
        unread = f"; not read: {', '.join(table.unread)}" if table.unread else ""
        raise UserError(f"{path}: a table without a column of throughput or MFU{unread}")
    return claims


def _claim(row: _Row, rate: _Column, table: _Table) -> Claim:
    share, rates = PER_DEVICE.search(rate.words), table.of("rate")
    # Counts and times are those of the one column of throughput, or the one of samples beside those of tokens.
    single = not share and [rate] in (rates, [column for column in rates if not column.of_tokens])
    alone = _alone(row, table.rows, rate) if row.ranks > 1 else None
    speed = Speed(
        samples_per_s=row.value(rate),
        unit=rate.unit if "/s" in rate.unit else "tokens/s" if rate.of_tokens else "samples/s",
        ranks=row.ranks,
        stands_for="one rank" if share else "all ranks",
        one_device_samples_per_s=alone.value(rate) if alone else None,
        one_device=alone.name if alone else "",
        **(_counts(row, table) if single and not rate.of_tokens and not SCALED.search(rate.words) else {}),
    )
    ratios = list[SpeedUp]()
    if single and alone:
        stated = [value for _, value in table.above_zero(row, "speed-up")]
        stated += [row.ranks * share for share in table.shares(row, "efficiency")]
        ratios = [SpeedUp(stated=value, new=row.value(rate), old=alone.value(rate), unit="items/s") for value in stated]
    return Claim(subject=f"{row.name}, {rate.head}", speed=speed, speedups=ratios)


def _counts(row: _Row, table: _Table) -> dict[str, Any]:
    counts = table.above_zero(row, "features", "epochs", "samples_counted")
    fields: dict[str, Any] = {
        str(column.kind): value if column.kind == "epochs" else int(value) for column, value in counts
    }
    for column, value in table.above_zero(row, "wall_s")[:1]:
        cell = row.cells[column.head]
        low, seconds, high = ((value + side * cell.half) * SECONDS[cell.unit] for side in (-1, 0, 1))
        fields |= {"wall_s": seconds, "wall_s_span": [low, high] if low > 0 else []}
    return fields


def _impossible(row: _Row, table: _Table) -> Iterator[Quantity]:
    for column in table.of(*NEVER_NEGATIVE):
        cell = row.cells.get(column.head)
        if cell and not 0 <= cell.value < math.inf:
            yield Quantity(name=column.head, value=cell.value if cell.value < 0 else None, unit=cell.unit)


def _alone(row: _Row, rows: Sequence[_Row], rate: _Column) -> _Row | None:
    """Return the row of one such device: that of the same name, else the fastest of the same device by any maker.

    A maker's or a cloud's name stands before that of the device. A slow machine would make an honest row look too fast.
    """
    single = {other.device: other for other in rows if other.ranks == 1}
    near = [name for name in single if row.device.endswith(f" {name}") or name.endswith(f" {row.device}")]
    device = min([*near, row.device], key=len)
    same = [other for name, other in single.items() if near and (name == device or name.endswith(f" {device}"))]
    alone = single.get(row.device) or max(same, key=lambda other: other.value(rate), default=None)
    return alone if alone and alone.value(rate) > 0 else None


@functools.lru_cache(maxsize=1)  # sniffed, read and asked for what was not read
def _table(path: Path, text: str) -> _Table:
    header, *lines = _cells(path, text) or [[]]
    if len(header) < 2 or not lines:
        raise UserError(f"{path}: not a throughput table; expected a header and rows of machines")
    if len(header) > MAX_COLUMNS or len(lines) > MAX_ROWS:
        most = f"at most {MAX_ROWS:,} rows of {MAX_COLUMNS} columns are read"
        raise _TooLarge(f"{path}: a table too large (rows: {len(lines):,}, columns: {len(header):,}); {most}")
    if twice := [head for head in header[1:] if head and header[1:].count(head) > 1]:
        raise UserError(f"{path}: the column {twice[0]!r} stands twice; give each a name of its own")
    for number, cells in enumerate(lines, 2):
        if len(cells) != len(header):
            size = f"{len(cells)} columns where the header has {len(header)}"
            raise UserError(f"{path}, row {number}: {size}; the file may be cut")
    first, *columns = map(_Column.of, header)
    ranks_at = next((place for place, column in enumerate((first, *columns)) if column.kind == "ranks"), None)
    rows, unread = [], list[str]()
    for cells in lines:
        count = COUNT.search(cells[0])
        stated = _number(cells[ranks_at], "") if ranks_at is not None else None
        ranks = stated.value if stated and 1 <= stated.value < math.inf else float(count[1]) if count else 1
        values = {}
        for column, words in zip(columns, cells[1:], strict=True):
            cell = _number(words, column.unit)
            if cell and _fits(column.kind, cell.unit):
                values[column.head] = cell
            elif words.lower() not in EMPTY:
                unread.append(column.head)
        name, device = (f"{header[0]} = {cells[0]}", "") if ranks_at == 0 else (cells[0], COUNT.sub("", cells[0]))
        rows.append(_Row(name, max(1, min(int(ranks), 10_000_000)), " ".join(device.split()), values))
    if not any(column.kind == "rate" for column in columns):
        columns = [replace(column, kind="rate") if _may_be_rate(column, rows) else column for column in columns]
    if ranks_at is None and not any(
        COUNT.search(row.name) or column.kind == "mfu" for row in rows for column in columns
    ):
        how = "no row names its number of devices, as in 8x H100, and no column num_gpu or nodes does"
        raise UserError(f"{path}: {how}")
    unread += [column.head for column in columns if not column.kind and any(column.head in row.cells for row in rows)]
    return _Table(rows, columns, [column.head for column in columns if column.head in unread])


def _fits(kind: str | None, unit: str) -> bool:
    return (unit in SECONDS) == (kind == "wall_s") and (kind, unit) != ("speed-up", "%")


def _may_be_rate(column: _Column, rows: Sequence[_Row]) -> bool:
    cells = [row.cells[column.head] for row in rows if column.head in row.cells]
    good = bool(cells) and all(0 <= cell.value < math.inf and cell.unit != "%" for cell in cells)
    return column.kind is None and good


def _cells(path: Path, text: str) -> list[list[str]]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    longest = max(map(len, lines), default=0)
    if longest > MAX_CHARACTERS:
        raise UserError(f"{path}: a line of {longest:,} characters; a table's line has at most {MAX_CHARACTERS:,}")
    if any(line.startswith("|") for line in lines):
        parts = [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        return [cells for cells in parts if not all(re.fullmatch(r":?-+:?", cell) for cell in cells)]
    lines = [line for line in lines if not line.startswith("#")]
    delimiter = "\t" if lines and "\t" in lines[0] else ","
    try:
        return [[cell.strip() for cell in cells] for cells in csv.reader(lines, delimiter=delimiter)]
    except csv.Error:
        return []


def _number(text: str, unit: str) -> _Cell | None:
    """Return a cell's number, half of its last digit, and the unit behind it, else that of the column; None for other text."""
    match = NUMBER.match(text.partition("±")[0].strip()) if len(text) <= MAX_DIGITS else None
    if not match:
        return None
    sign, infinite, digits, decimals, power, behind = match.groups()
    if infinite:
        return _Cell(math.inf, 0.0, unit)
    value, factor = float(f"{sign}{digits.replace(',', '')}e{power or 0}"), THOUSANDS.get(behind, 1.0)
    if not math.isfinite(value):
        return None
    half = 0.5 * 10.0 ** (int(power or 0) - len(decimals or ""))
    return _Cell(value * factor, half * factor, unit if factor > 1 or not behind else behind.lower())
