"""Tables of throughput as published: a row for each machine, in CSV, TSV or Markdown.

A column (``num_gpu``, ``nodes``) says how many devices a row is of, else a count before the row's name (``8x H200``). Rows of
several devices are compared with the row of one such device. A heading says what its column holds and in which unit; where none
names a rate, every column of numbers is one that no heading explains, as in tables with a column per model.
"""

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchlib.core.errors import UserError
from benchlib.judge.foreign.readers import Reader
from benchlib.judge.impossible.claim import Claim, Compute, Speed, SpeedUp
from benchlib.judge.impossible.findings import span

COUNT = re.compile(r"(?<![\w.])(\d{1,5})\s?[x×]\s?(?=[A-Za-z])", re.I)
NUMBER = re.compile(r"~?((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)\s*(\S*)")
EMPTY = {"", "-", "–", "—", "n/a", "none"}
SECONDS = {"h": 3600.0, "hours": 3600.0, "min": 60.0, "minutes": 60.0, "s": 1.0, "seconds": 1.0, "ms": 1e-3}
TIMES = "|".join(SECONDS)
ITEMS = r"(sample|quer(y|ie)|req(uest)?|article|document|prompt|seq(uence)?|image|tok(en)?)s?"
# What a column with this heading holds, the first that fits, and the units that may stand behind its numbers.
KINDS = {
    "unread": (r"price|cost|[$€£]|latency|ttft|tpot|\bp ?\d\d\b|length|watt|power|memory|batch|host", ""),
    "rate": (rf"\b{ITEMS} ?(/|per) ?s(ec(ond)?)?\b|throughput|\bqps\b", ".*/s"),
    "ranks": (r"^(num |n )?(gpus?|nodes|devices|ranks|workers|servers|machines)$", ""),
    "samples_counted": (r"^samples( counted)?$", ""),
    "wall_s": (rf"^(total |wall |run )?((time|duration)( ({TIMES}))?|hours|minutes|seconds)$", ""),
    "speed-up": (r"^speed[- ]?up$|^scaling$", "x|×"),
    "efficiency": (r"^(scaling |parallel )?efficiency", "%"),
    "mfu": (r"^(mfu|model flops? utili[sz]ation)\b", "%"),
}
PER_DEVICE = re.compile(r"(/|per )(gpu|device|node|chip|accelerator|rank|worker)\b")


class _Column(NamedTuple):
    """What stands below a heading: a number a row in the unit ``scale``, 0 where there is none: of a benchmark that was not run."""

    head: str
    kind: str
    numbers: list[float]
    scale: float
    whole: bool  # every cell was read, or is empty
    of_tokens: bool
    per_device: bool


class _Row(NamedTuple):
    name: str
    device: str  # the name without the count
    ranks: int
    place: int


class _Table(NamedTuple):
    rows: Sequence[_Row]
    columns: Sequence[_Column]

    def of(self, kind: str, row: _Row) -> list[tuple[_Column, float]]:
        """Return the columns of a kind with the number that a row has of each, none where it has no number."""
        columns = [column for column in self.columns if column.kind == kind and column.numbers[row.place] > 0]
        return [(column, column.scale * column.numbers[row.place]) for column in columns]


def not_read(path: Path, text: str) -> list[str]:
    """Return the columns that no rule sees, and those of which a cell is no number."""
    return [column.head for column in _table(path, text).columns if column.kind == "unread" or not column.whole]


def read(path: Path, text: str) -> list[Claim]:
    """Return a claim for each row and column of throughput, and for the MFU of a row.

    ``UserError`` for a row that does not fit the header.
    """
    table, claims = _table(path, text), list[Claim]()
    for row in table.rows:
        claims += [_claim(table, row, *rate) for rate in table.of("rate", row)]
        shares = [Compute(mfu=share, ranks=row.ranks) for _, share in table.of("mfu", row)]
        claims += [Claim(subject=row.name, compute=share) for share in shares]
    if not claims:
        raise UserError(f"{path}: a table without a column of throughput or MFU")
    return claims


def _claim(table: _Table, row: _Row, rate: _Column, new: float) -> Claim:
    stated, speedups = dict[str, Any](), list[SpeedUp]()
    alike = [other for other in table.rows if (other.ranks, other.device) == (1, row.device) and row.ranks > 1]
    best = max(alike, key=lambda other: rate.numbers[other.place], default=None)
    old = rate.numbers[best.place] if best else 0.0
    if best and old:
        stated |= {"one_device_samples_per_s": old, "one_device": best.name}
    # Counts, times and ratios are those of the one column of throughput, or the one of samples beside those of tokens.
    rates = [column for column, _ in table.of("rate", row) if not column.per_device]
    if [rate] in (rates, [column for column in rates if not column.of_tokens]):
        if not rate.of_tokens:
            stated |= {column.kind: value for column, value in table.of("samples_counted", row)}
        for column, seconds in table.of("wall_s", row):
            ends = span(column.numbers[row.place], 0.99)  # 0.03 hours may be 0.025
            stated |= {"wall_s": seconds, "wall_s_span": [column.scale * end for end in ends]}
        ratios = [ratio for _, ratio in table.of("speed-up", row)]
        ratios += [row.ranks * share for _, share in table.of("efficiency", row)]
        speedups = [SpeedUp(stated=ratio, new=new, old=old, unit="items/s") for ratio in ratios if old]
    unit, of = "tokens/s" if rate.of_tokens else "samples/s", "one rank" if rate.per_device else "all ranks"
    speed = Speed(samples_per_s=new, unit=unit, ranks=row.ranks, stands_for=of, **stated)
    return Claim(subject=f"{row.name}, {rate.head}", speed=speed, speedups=speedups)


def _table(path: Path, text: str) -> _Table:
    header, *lines = _cells(text) or [[]]
    if len(header) < 2 or not lines:
        raise UserError(f"{path}: not a throughput table; expected a header and rows of machines")
    for number, cells in enumerate(lines, 2):
        if len(cells) != len(header):
            size = f"{len(cells)} columns where the header has {len(header)}"
            raise UserError(f"{path}, row {number}: {size}; the file may be cut, or holds a second table")
    words = [" ".join(re.sub(r"[()\[\],:_]", " ", head.lower()).split()) for head in header]
    kinds = [next((kind for kind, (form, _) in KINDS.items() if re.search(form, each)), "") for each in words]
    other = "unread" if {"rate", "mfu"} & set(kinds) else "rate"
    columns = [
        _column(head, each, kind or other, list(cells))
        for head, each, kind, cells in zip(header, words, kinds, zip(*lines, strict=True), strict=True)
    ]
    counts = next((column for column in columns if column.kind == "ranks" and all(column.numbers)), None)
    rows = list[_Row]()
    for place, (name, *_) in enumerate(lines):
        count, device = COUNT.search(name), " ".join(COUNT.sub("", name).split())
        ranks = int(counts.numbers[place]) if counts else int(count[1]) if count else 1
        # Where the rows are named by their number of devices, all are of one machine.
        rows.append(_Row(name, "" if counts is columns[0] else device, max(1, ranks), place))
    return _Table(rows, [column for column in columns[1:] if column is not counts])


def _column(head: str, words: str, kind: str, cells: list[str]) -> _Column:
    numbers, whole, units, scale = list[float](), True, KINDS[kind][1], 1.0
    for cell in cells:
        match = NUMBER.fullmatch(cell.partition("±")[0].strip())
        good = match and re.fullmatch(f"({units})?", match[2], re.IGNORECASE)
        numbers.append(float(match[1].replace(",", "")) if match and good else 0.0)
        whole &= bool(good) or cell.lower() in EMPTY
    if kind == "wall_s":
        scale = next((SECONDS[word] for word in words.split() if word in SECONDS), 1.0)
    elif kind in ("efficiency", "mfu") and (any("%" in text for text in (head, *cells)) or max(numbers) > 2):
        scale = 0.01
    return _Column(head, kind, numbers, scale, whole, "tok" in words, bool(PER_DEVICE.search(words)))


def _cells(text: str) -> list[list[str]]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(line.startswith("|") for line in lines):
        parts = [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        return [cells for cells in parts if not all(re.fullmatch(r":?-+:?", cell) for cell in cells)]
    lines = [line for line in lines if not line.startswith("#")]
    delimiter = "\t" if lines and "\t" in lines[0] else ","
    return [[cell.strip() for cell in cells] for cells in csv.reader(lines, delimiter=delimiter)]


def _sniff(path: Path, text: str) -> bool:
    return path.suffix.lower() in (".csv", ".tsv", ".md") or text.lstrip().startswith("|")


READERS = {"table": Reader("a throughput table (CSV, TSV or Markdown)", read, sniff=_sniff, unread=not_read)}
