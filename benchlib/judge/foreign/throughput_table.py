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
from benchlib.judge.impossible.findings import span

MAX_COLUMNS, MAX_ROWS, MAX_CHARACTERS, MAX_DIGITS = 100, 1_000, 10_000, 40  # characters of a line, of a number
COUNT = re.compile(
    r"(?<![\w.])(\d{1,5})\s?[x×]\s?(?=[A-Za-z])|^(\d{1,5})\s(?=(gpu|node|device|rank|worker|machine)s?$)", re.I
)
BOTH = re.compile(r"\bboth\b", re.IGNORECASE)  # of the two single rows above it, or twice the one
NUMBER = re.compile(r"([-+]?(?:inf|(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d{1,3})?))\s*([a-z%×/]*)$", re.I)
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
    "wall_s": r"^(total |wall |run ?|(full )?dataset )?(time|duration|wall|hours?|minutes|seconds|h)( \w+)?$",
    "speed-up": r"^(speed[- ]?up|improvement|scaling\b)(?! efficiency)",
    "efficiency": r"^(scaling |parallel )?efficiency",
    "mfu": r"^(mfu|model flops? utili[sz]ation)\b",
}
NEVER_NEGATIVE = ("rate", "wall_s", "samples_counted", "features", "epochs", "ranks", "mfu")
PER_DEVICE = re.compile(r"(/|per )(gpu|device|node|chip|accelerator|rank|worker)\b")
SCALED = re.compile(r"\b([km]|thousands?|millions?)\b|/ ?(min|h|hour|day)\b|\bper (min|h|day)")


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
    cells: Mapping[str, tuple[float, str]]  # by heading: the number, and the unit behind it, else that of the column
    singles: Sequence["_Row"] = ()  # the two rows whose machines work together in this one

    def value(self, column: _Column) -> float:
        """Return a cell's finite number, 0 where there is none: the sign of a benchmark that was not run."""
        value = self.cells[column.head][0] if column.head in self.cells else 0.0
        return value if math.isfinite(value) else 0.0


@dataclass(frozen=True)
class _Table:
    rows: Sequence[_Row]
    columns: Sequence[_Column]
    unread: Sequence[str]

    def above_zero(self, row: _Row, *kinds: str) -> list[tuple[_Column, float]]:
        values = [(column, row.value(column)) for column in self.columns if column.kind in kinds]
        return [(column, value) for column, value in values if value > 0]

    def shares(self, row: _Row, kind: str) -> list[float]:
        """Return shares as fractions: per cent where a unit says so, or where the column has values that no fraction has."""
        large = [max(other.value(column) for other in self.rows) > 2 for column, _ in self.above_zero(row, kind)]
        cells = [row.cells[column.head] for column, _ in self.above_zero(row, kind)]
        return [value / (100 if many or unit == "%" else 1) for (value, unit), many in zip(cells, large, strict=True)]


def sniff(path: Path, text: str) -> bool:
    """A table whose rows name a number of devices, or whose columns can be judged without."""
    try:
        return bool(_table(path, text))
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
    share, rates = PER_DEVICE.search(rate.words), [column for column in table.columns if column.kind == "rate"]
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
        new, singles = row.value(rate), [single.value(rate) for single in row.singles or [alone]]
        for ratio in stated:
            # Of two different machines the publisher may mean either.
            old, *others = sorted(singles, key=lambda value: abs(new - ratio * value))
            ratios.append(SpeedUp(stated=ratio, new=new, old=old, others=others, unit="items/s"))
    return Claim(subject=f"{row.name}, {rate.head}", speed=speed, speedups=ratios)


def _counts(row: _Row, table: _Table) -> dict[str, Any]:
    counts = table.above_zero(row, "features", "epochs", "samples_counted")
    fields: dict[str, Any] = {}
    for column, value in counts:
        fields[str(column.kind)] = value if column.kind == "epochs" else int(value)
    for column, value in table.above_zero(row, "wall_s")[:1]:
        unit_s = SECONDS[row.cells[column.head][1]]
        low, high = span(value, 0.99)  # 0.03 hours may be 0.025
        fields |= {"wall_s": value * unit_s, "wall_s_span": [low * unit_s, high * unit_s]}
    return fields


def _impossible(row: _Row, table: _Table) -> Iterator[Quantity]:
    for column in table.columns:
        value, unit = row.cells.get(column.head, (0.0, ""))
        if column.kind in NEVER_NEGATIVE and not 0 <= value < math.inf:
            yield Quantity(name=column.head, value=value if value < 0 else None, unit=unit)


def _alone(row: _Row, rows: Sequence[_Row], rate: _Column) -> _Row | None:
    """Return the row of one such device: that of the same name, else the fastest of the same device by any maker.

    A maker's or a cloud's name stands before that of the device. A slow machine would make an honest row look too fast.
    """
    if row.singles:
        return max(row.singles, key=lambda other: other.value(rate))
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
        raise UserError(f"{path}: a table too large (rows: {len(lines):,}, columns: {len(header):,}); {most}")
    if twice := [head for head in header[1:] if head and header[1:].count(head) > 1]:
        raise UserError(f"{path}: the column {twice[0]!r} stands twice; give each a name of its own")
    if cut := [number for number, cells in enumerate(lines, 2) if len(cells) != len(header)]:
        size = f"{len(lines[cut[0] - 2])} columns where the header has {len(header)}"
        raise UserError(f"{path}, row {cut[0]}: {size}; the file may be cut")
    first, *columns = map(_Column.of, header)
    ranks_at = next((place for place, column in enumerate((first, *columns)) if column.kind == "ranks"), None)
    rows, unread = list[_Row](), list[str]()
    for cells in lines:
        count, values = COUNT.search(cells[0]), {}
        stated, _ = (_number(cells[ranks_at], "") if ranks_at is not None else None) or (0.0, "")
        ranks = stated if 1 <= stated <= 10_000_000 else float(count[1] or count[2]) if count else 1
        for column, words in zip(columns, cells[1:], strict=True):
            cell = _number(words, column.unit)
            if (
                cell
                and (cell[1] in SECONDS) == (column.kind == "wall_s")
                and (column.kind, cell[1]) != ("speed-up", "%")
                and (column.words != "improvement" or cell[1] in ("x", "×"))
            ):
                values[column.head] = cell
            elif words.lower() not in EMPTY:
                unread.append(column.head)
        name, device = (f"{header[0]} = {cells[0]}", "") if ranks_at == 0 else (cells[0], COUNT.sub("", cells[0]))
        device = device.removesuffix("s") if count and count[2] else device
        singles = rows[:] if BOTH.search(name) and [other.ranks for other in rows] in ([1], [1, 1]) else ()
        rows.append(_Row(name, 2 if singles else max(1, int(ranks)), " ".join(device.split()), values, singles))
    if not any(column.kind == "rate" for column in columns):
        columns = [replace(column, kind="rate") if _may_be_rate(column, rows) else column for column in columns]
    if (
        ranks_at is None
        and not any(COUNT.search(row.name) or row.singles for row in rows)
        and "mfu" not in [c.kind for c in columns]
    ):
        how = "no row names its number of devices, as in 8x H100 or 2 GPUs, and no column num_gpu or nodes does"
        raise UserError(f"{path}: {how}")
    if not {column.kind for column in columns} & {"features", "epochs", "samples_counted"}:
        unread += [column.head for column in columns if column.kind == "wall_s"]  # of how many samples nobody knows
    unread += [column.head for column in columns if not column.kind and any(column.head in row.cells for row in rows)]
    return _Table(rows, columns, [column.head for column in columns if column.head in unread])


def _may_be_rate(column: _Column, rows: Sequence[_Row]) -> bool:
    cells = [row.cells[column.head] for row in rows if column.head in row.cells]
    return bool(cells) and column.kind is None and all(0 <= value < math.inf and unit != "%" for value, unit in cells)


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


def _number(text: str, unit: str) -> tuple[float, str] | None:
    """Return a cell's number and the unit behind it, else that of the column; None for other text."""
    match = NUMBER.match(text.partition("±")[0].strip(" ~≈")) if len(text) <= MAX_DIGITS else None
    if not match:
        return None
    value, behind = float(match[1].replace(",", "")), match[2]
    factor = THOUSANDS.get(behind, 1.0)
    return value * factor, unit if factor > 1 or not behind else behind.lower()
