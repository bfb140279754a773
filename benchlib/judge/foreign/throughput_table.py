"""Tables of throughput as published: one row per machine, one column per model or figure. CSV, TSV or Markdown.

A column (``num_gpu``, ``nodes``) says how many devices a row is of, else a count before the row's name (``8x H200``). Rows of
several devices are compared with the row of one such device. A heading says what its column holds: rates, times, counts,
ratios, MFU; ``not_read`` names the others. Where no heading names a rate, every column of numbers is one, as in tables with a column per model.
"""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchlib.core.errors import UserError
from benchlib.judge.impossible.claim import Claim, Compute, Speed, SpeedUp
from benchlib.judge.impossible.findings import span

COUNT = re.compile(
    r"(?<![\w.])(\d{1,5})\s?[x×]\s?(?=[A-Za-z])|^(\d{1,5})\s(?=(gpu|node|device|rank|worker|machine)s?$)", re.I
)
BOTH = re.compile(r"\bboth\b", re.IGNORECASE)  # of the two single rows above it, or twice the one
NUMBER = re.compile(r"((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d{1,2})?)\s*([a-z%×/]*)$", re.I)
EMPTY = {"", "-", "–", "—", "n/a", "na", "nan", "none", "null"}
THOUSANDS = {"k": 1e3, "K": 1e3, "M": 1e6}
UNITS = {
    86400.0: "d day days",
    3600.0: "h hr hrs hour hours",
    60.0: "min mins minute minutes",
    1.0: "s sec second seconds",
    1e-3: "ms",
}
SECONDS = {unit: size for size, units in UNITS.items() for unit in units.split()}
ITEMS = r"(samples?|queries|req(uest)?s?|articles?|documents?|prompts?|seq(uence)?s?|images?|tok(en)?s?)"
# What a column with this heading holds: the first that fits. Columns of kind '' are never rates.
KINDS = {
    "": r"\b([km]|thousands?|millions?)\b|(/|per) ?(min|h|hour|day)\b|cost|price|[$€£]|\b(usd|eur)\b|latency|ttft|tpot|\bp ?\d\d\b|length|^(watts?|power|tdp|year|memory|batch( size)?|bs|host)$",
    "rate": rf"\b{ITEMS} ?(/|per) ?s(ec(onds?)?)?\b|throughput|\bqps\b",
    "ranks": r"^(num |n )?(gpus?|nodes|devices|ranks|workers|servers|machines|replicas|instances|world size)$",
    "features": r"^features$",
    "epochs": r"^epochs$",
    "samples_counted": r"^samples( counted)?$",
    "wall_s": r"^(total |wall |run ?|(full )?dataset )?(time|duration|wall|hours?|minutes|seconds|h)( \w+)?$",
    "speed-up": r"^(speed[- ]?up|improvement|scaling\b)(?! efficiency)",
    "efficiency": r"^(scaling |parallel )?efficiency",
    "mfu": r"^(mfu|model flops? utili[sz]ation)\b",
}
COUNTS = ("features", "epochs", "samples_counted")
PER_DEVICE = re.compile(r"(/|per )(gpu|device|node|chip|accelerator|rank|worker)\b")


@dataclass(eq=False)
class _Column:
    head: str
    words: str
    kind: str | None  # None: not known
    unit: str
    read: bool = True

    @property
    def of_tokens(self) -> bool:
        return "tok" in self.words

    def number(self, text: str) -> tuple[float, str] | None:
        """Return a cell's number and the unit behind it, else that of the column; None for what is no number of this kind."""
        if not (match := NUMBER.match(text.partition("±")[0].strip(" ~≈"))):
            return None
        factor = THOUSANDS.get(match[2], 1.0)
        unit = self.unit if factor > 1 or not match[2] else match[2].lower()
        if self.kind == "speed-up" and not (unit in ("x", "×") or (not unit and self.words != "improvement")):
            return None
        return (
            (float(match[1].replace(",", "")) * factor, unit) if (unit in SECONDS) == (self.kind == "wall_s") else None
        )


def _column(head: str) -> _Column:
    words = " ".join(re.sub(r"[()\[\],:_]", " ", head.lower()).split())
    kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, words)), None)
    inside, times = re.search(r"\(([^()]*)\)", head), [word for word in words.split() if word in SECONDS]
    unit = inside[1].strip().lower() if inside else ""
    return _Column(head, words, kind, (times[-1] if times else unit or "s") if kind == "wall_s" else unit)


@dataclass(frozen=True)
class _Row:
    name: str
    ranks: int
    device: str  # the name without the count
    cells: dict[_Column, tuple[float, str]]  # the numbers, each with its unit
    singles: Sequence["_Row"] = ()  # the two rows whose machines work together in this one

    def value(self, column: _Column) -> float:
        """Return a cell's number, 0 where there is none: the sign of a benchmark that was not run."""
        return self.cells.get(column, (0.0, ""))[0]


@dataclass(frozen=True)
class _Table:
    rows: Sequence[_Row]
    columns: Sequence[_Column]

    def above_zero(self, row: _Row, *kinds: str) -> list[tuple[_Column, float]]:
        return [
            (column, row.value(column)) for column in self.columns if column.kind in kinds and row.value(column) > 0
        ]

    def shares(self, row: _Row, kind: str) -> list[float]:
        """Return shares as fractions: per cent where a unit says so, or where the column has values that no fraction has."""
        rates = [(row.cells[column], column) for column, _ in self.above_zero(row, kind)]
        many = [unit == "%" or max(other.value(column) for other in self.rows) > 2 for (_, unit), column in rates]
        return [value / (100 if large else 1) for ((value, _), _), large in zip(rates, many, strict=True)]

    def alone(self, row: _Row, rate: _Column) -> _Row | None:
        """Return the row of one such device."""
        singles = row.singles or [other for other in self.rows if (other.ranks, other.device) == (1, row.device)]
        best = max(singles, key=lambda other: other.value(rate), default=None)
        return best if best and row.ranks > 1 and best.value(rate) > 0 else None


def sniff(path: Path, text: str) -> bool:
    """A table whose rows name a number of devices, or whose columns can be judged without."""
    try:
        return bool(_table(path, text))
    except UserError:
        return path.suffix.lower() in (".csv", ".tsv", ".md")


def not_read(path: Path, text: str) -> list[str]:
    """Return the columns that no rule sees, and those of which a cell is no number."""
    return [column.head for column in _table(path, text).columns if not column.read]


def read(path: Path, text: str) -> list[Claim]:
    """Return a claim for each row and column of throughput, and for what else of a row can be judged.

    ``UserError`` for a row that does not fit the header.
    """
    table, claims = _table(path, text), list[Claim]()
    for row in table.rows:
        claims += [_claim(row, rate, table) for rate, _ in table.above_zero(row, "rate")]
        shares = table.shares(row, "mfu")
        claims += [Claim(subject=row.name, compute=Compute(mfu=shares[0], ranks=row.ranks))] if shares else []
    if not claims:
        unread = ", ".join(not_read(path, text))
        raise UserError(f"{path}: a table without a column of throughput or MFU{unread and f'; not read: {unread}'}")
    return claims


def _claim(row: _Row, rate: _Column, table: _Table) -> Claim:
    share, rates = PER_DEVICE.search(rate.words), [column for column in table.columns if column.kind == "rate"]
    # Counts and times are those of the one column of throughput, or the one of samples beside those of tokens.
    single = not share and [rate] in (rates, [column for column in rates if not column.of_tokens])
    alone, new, counts, ratios = table.alone(row, rate), row.value(rate), dict[str, Any](), list[SpeedUp]()
    if single and not rate.of_tokens:
        for column, value in table.above_zero(row, *COUNTS):
            counts[str(column.kind)] = value if column.kind == "epochs" else int(value)
        for column, value in table.above_zero(row, "wall_s")[:1]:
            unit_s, ends = SECONDS[row.cells[column][1]], span(value, 0.99)  # 0.03 hours may be 0.025
            counts |= {"wall_s": value * unit_s, "wall_s_span": [end * unit_s for end in ends]}
    if single and alone:
        stated = [value for _, value in table.above_zero(row, "speed-up")]
        for ratio in stated + [row.ranks * share for share in table.shares(row, "efficiency")]:
            # Of two different machines the publisher may mean either.
            singles = [other.value(rate) for other in row.singles or [alone]]
            old, *others = sorted(singles, key=lambda value: abs(new - ratio * value))
            ratios.append(SpeedUp(stated=ratio, new=new, old=old, others=others, unit="items/s"))
    speed = Speed(
        samples_per_s=new,
        unit=rate.unit if "/s" in rate.unit else "tokens/s" if rate.of_tokens else "samples/s",
        ranks=row.ranks,
        stands_for="one rank" if share else "all ranks",
        one_device_samples_per_s=alone.value(rate) if alone else None,
        one_device=alone.name if alone else "",
        **counts,
    )
    return Claim(subject=f"{row.name}, {rate.head}", speed=speed, speedups=ratios)


def _table(path: Path, text: str) -> _Table:
    header, *lines = _cells(text) or [[]]
    if len(header) < 2 or not lines:
        raise UserError(f"{path}: not a throughput table; expected a header and rows of machines")
    if cut := [number for number, cells in enumerate(lines, 2) if len(cells) != len(header)]:
        size = f"{len(lines[cut[0] - 2])} columns where the header has {len(header)}"
        raise UserError(f"{path}, row {cut[0]}: {size}; the file may be cut")
    first, *columns = map(_column, header)
    ranks_at = next((place for place, column in enumerate((first, *columns)) if column.kind == "ranks"), None)
    rows = list[_Row]()
    for cells in lines:
        count, numbers = COUNT.search(cells[0]), dict[_Column, tuple[float, str]]()
        stated, _ = (first.number(cells[ranks_at]) if ranks_at is not None else None) or (0.0, "")
        ranks = stated if 1 <= stated <= 10_000_000 else float(count[1] or count[2]) if count else 1
        for column, words in zip(columns, cells[1:], strict=True):
            if number := column.number(words):
                numbers[column] = number
                column.read &= column.kind != ""
            else:
                column.read &= words.lower() in EMPTY
        name, device = (f"{header[0]} = {cells[0]}", "") if ranks_at == 0 else (cells[0], COUNT.sub("", cells[0]))
        device = device.removesuffix("s") if count and count[2] else device
        singles = rows[:] if BOTH.search(name) and [other.ranks for other in rows] in ([1], [1, 1]) else ()
        rows.append(_Row(name, 2 if singles else max(1, int(ranks)), " ".join(device.split()), numbers, singles))
    kinds = {column.kind for column in columns}
    for column in columns:
        values = [row.cells[column] for row in rows if column in row.cells]
        if column.kind is None and values:
            may_be = "rate" not in kinds and all(unit != "%" for _, unit in values)
            column.kind, column.read = ("rate", column.read) if may_be else (None, False)
        if column.kind == "wall_s" and not kinds & set(COUNTS):
            column.read = False  # of how many samples nobody knows
    if ranks_at is None and "mfu" not in kinds and not any(COUNT.search(row.name) or row.singles for row in rows):
        how = "no row names its number of devices, as in 8x H100 or 2 GPUs, and no column num_gpu or nodes does"
        raise UserError(f"{path}: {how}")
    return _Table(rows, columns)


def _cells(text: str) -> list[list[str]]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(line.startswith("|") for line in lines):
        parts = [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        return [cells for cells in parts if not all(re.fullmatch(r":?-+:?", cell) for cell in cells)]
    lines = [line for line in lines if not line.startswith("#")]
    delimiter = "\t" if lines and "\t" in lines[0] else ","
    try:
        return [[cell.strip() for cell in cells] for cells in csv.reader(lines, delimiter=delimiter)]
    except csv.Error:  # no table
        return []
