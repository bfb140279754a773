"""Tables of throughput as published: a row for each machine, in CSV, TSV or Markdown.

A column (``num_gpu``, ``nodes``) says how many devices a row is of, else a count before the row's name (``8x H200``). Rows of
several devices are compared with the row of one such device. A heading says what its column holds and in which unit; where none
names a rate, every column of numbers is one that no heading explains, as in tables with a column per model.
"""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchlib.core.errors import UserError
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
    "features": (r"^features$", ""),
    "epochs": (r"^epochs$", ""),
    "samples_counted": (r"^samples( counted)?$", ""),
    "wall_s": (rf"^(total |wall |run )?((time|duration)( ({TIMES}))?|hours|minutes|seconds)$", TIMES),
    "speed-up": (r"^speed[- ]?up$|^scaling$", "x|×"),
    "efficiency": (r"^(scaling |parallel )?efficiency", "%"),
    "mfu": (r"^(mfu|model flops? utili[sz]ation)\b", "%"),
}
PER_DEVICE = re.compile(r"(/|per )(gpu|device|node|chip|accelerator|rank|worker)\b")


@dataclass
class _Column:
    """What stands below a heading: a number a row, None where there is none, and what each is multiplied by."""

    head: str
    words: str
    kind: str
    numbers: list[float | None]
    scales: list[float]
    whole: bool  # every cell was read, or is empty

    def value(self, place: int) -> float:
        """Return a cell's number, 0 where there is none: the sign of a benchmark that was not run."""
        return (self.numbers[place] or 0.0) * self.scales[place]


class _Row(NamedTuple):
    name: str
    device: str  # the name without the count
    ranks: int


class _Table(NamedTuple):
    rows: Sequence[_Row]
    columns: Sequence[_Column]

    def of(self, kind: str, place: int) -> list[_Column]:
        return [column for column in self.columns if column.kind == kind and column.value(place) > 0]


def sniff(path: Path, text: str) -> bool:
    return path.suffix.lower() in (".csv", ".tsv", ".md") or text.lstrip().startswith("|")


def not_read(path: Path, text: str) -> list[str]:
    """Return the columns that no rule sees, and those of which a cell is no number."""
    return [column.head for column in _table(path, text).columns if column.kind == "unread" or not column.whole]


def read(path: Path, text: str) -> list[Claim]:
    """Return a claim for each row and column of throughput, and for the MFU of a row.

    ``UserError`` for a row that does not fit the header.
    """
    table, claims = _table(path, text), list[Claim]()
    for place, row in enumerate(table.rows):
        claims += [_claim(table, place, rate) for rate in table.of("rate", place)]
        for share in table.of("mfu", place)[:1]:
            claims.append(Claim(subject=row.name, compute=Compute(mfu=share.value(place), ranks=row.ranks)))
    if not claims:
        raise UserError(f"{path}: a table without a column of throughput or MFU")
    return claims


def _claim(table: _Table, place: int, rate: _Column) -> Claim:
    row, new, stated = table.rows[place], rate.value(place), dict[str, Any]()
    share, of_tokens = PER_DEVICE.search(rate.words), "tok" in rate.words
    if row.ranks > 1:
        singles = [at for at, other in enumerate(table.rows) if (other.ranks, other.device) == (1, row.device)]
        best = max(singles, key=rate.value, default=place)
        if best != place and rate.value(best) > 0:
            stated |= {"one_device_samples_per_s": rate.value(best), "one_device": table.rows[best].name}
    speedups = list[SpeedUp]()
    # Counts and times are those of the one column of throughput, or the one of samples beside those of tokens.
    rates = table.of("rate", place)
    if not share and [rate] in (rates, [column for column in rates if "tok" not in column.words]):
        for kind in ("features", "epochs", "samples_counted") if not of_tokens else ():
            for column in table.of(kind, place):
                stated[kind] = column.value(place)
        for column in table.of("wall_s", place)[:1]:
            ends = span(column.numbers[place] or 0.0, 0.99)  # 0.03 hours may be 0.025
            stated |= {"wall_s": column.value(place), "wall_s_span": [end * column.scales[place] for end in ends]}
        if alone := stated.get("one_device_samples_per_s"):
            ratios = [column.value(place) for column in table.of("speed-up", place)]
            ratios += [row.ranks * column.value(place) for column in table.of("efficiency", place)]
            speedups = [SpeedUp(stated=ratio, new=new, old=alone, unit="items/s") for ratio in ratios]
    unit, of = "tokens/s" if of_tokens else "samples/s", "one rank" if share else "all ranks"
    speed = Speed(samples_per_s=new, unit=unit, ranks=row.ranks, stands_for=of, **stated)
    return Claim(subject=f"{row.name}, {rate.head}", speed=speed, speedups=speedups)


def _table(path: Path, text: str) -> _Table:
    header, *lines = _cells(text) or [[]]
    if len(header) < 2 or not lines:
        raise UserError(f"{path}: not a throughput table; expected a header and rows of machines")
    if cut := [number for number, cells in enumerate(lines, 2) if len(cells) != len(header)]:
        size = f"{len(lines[cut[0] - 2])} columns where the header has {len(header)}"
        raise UserError(f"{path}, row {cut[0]}: {size}; the file may be cut")
    words = [" ".join(re.sub(r"[()\[\],:_]", " ", head.lower()).split()) for head in header]
    kinds = [next((kind for kind, (form, _) in KINDS.items() if re.search(form, each)), "") for each in words]
    other = "unread" if {"rate", "mfu"} & set(kinds) else "rate"
    columns = [
        _column(head, each, kind or other, list(cells))
        for head, each, kind, cells in zip(header, words, kinds, zip(*lines, strict=True), strict=True)
    ]
    counts = next((column for column in columns if column.kind == "ranks" and None not in column.numbers), None)
    named = [COUNT.search(cells[0]) for cells in lines]
    if counts is None and "mfu" not in kinds and not any(named):
        how = "no row names its number of devices, as in 8x H100, and no column num_gpu or nodes does"
        raise UserError(f"{path}: {how}")
    rows = list[_Row]()
    for place, (cells, count) in enumerate(zip(lines, named, strict=True)):
        ranks = int(counts.value(place)) if counts else int(count[1]) if count else 1
        device = "" if counts is columns[0] else " ".join(COUNT.sub("", cells[0]).split())
        rows.append(_Row(cells[0] if device else f"{header[0]} = {cells[0]}", device, max(1, ranks)))
    return _Table(rows, [column for column in columns[1:] if column is not counts])


def _column(head: str, words: str, kind: str, cells: list[str]) -> _Column:
    matches = [NUMBER.fullmatch(cell.partition("±")[0].strip()) for cell in cells]
    units = KINDS[kind][1]
    good = [match if match and re.fullmatch(f"({units})?", match[2], re.I) else None for match in matches]
    whole = all(match or cell.lower() in EMPTY for match, cell in zip(good, cells, strict=True))
    numbers = [float(match[1].replace(",", "")) if match else None for match in good]
    scales = [1.0] * len(cells)
    if kind == "wall_s":
        of_head = next((unit for unit in reversed(words.split()) if unit in SECONDS), "s")
        scales = [SECONDS[(match and match[2].lower()) or of_head] for match in good]
    elif kind in ("efficiency", "mfu"):
        per_cent = any("%" in text for text in (head, *cells)) or max(number or 0.0 for number in numbers) > 2
        scales = [0.01 if per_cent else 1.0] * len(cells)
    return _Column(head, words, kind, numbers, scales, whole)


def _cells(text: str) -> list[list[str]]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(line.startswith("|") for line in lines):
        parts = [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        return [cells for cells in parts if not all(re.fullmatch(r":?-+:?", cell) for cell in cells)]
    lines = [line for line in lines if not line.startswith("#")]
    delimiter = "\t" if lines and "\t" in lines[0] else ","
    return [[cell.strip() for cell in cells] for cells in csv.reader(lines, delimiter=delimiter)]
