"""Tables of throughput as published: a row for each machine, in CSV, TSV or Markdown.

A column (``num_gpu``, ``nodes``) says how many devices a row is of, else a count before the row's name (``8x H200``). Rows of
several devices are compared with the row of one such device. A heading says what its column holds, and heading or cell in which
unit; if no heading names a rate, every column of numbers is one that no heading explains, as in tables with a column per model.
A speed-up is compared with the row of one such device, or with the row that the table marks as its baseline.
"""

import csv
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchlib.core.errors import UserError
from benchlib.judge.foreign.readers import Reader
from benchlib.judge.impossible.claim import Claim, Compute, Speed, SpeedUp
from benchlib.judge.impossible.findings import span
from benchlib.judge.impossible.rules import RULES

COUNT = re.compile(r"(?<![\w.])(\d{1,5})\s?[x×]\s?(?=[A-Za-z])", re.I)
NUMBER = re.compile(r"~?((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)\s*(.*)")
EMPTY = {"", "-", "–", "—", "n/a", "none"}
ONE = r"(\(?1(\.0+)? ?[x×]?\)?)?"
BASELINE = re.compile(rf"{ONE} ?\(?(base(line)?|ref(erence)?)\)? ?{ONE}", re.I)
UNITS = {3600.0: "h hr hrs hour hours", 60.0: "min mins minute minutes", 1.0: "s sec secs second seconds", 1e-3: "ms"}
SECONDS = {name: seconds for seconds, names in UNITS.items() for name in names.split()}
TIMES = "|".join(SECONDS)
ITEMS = r"(sample|quer(y|ie)|req(uest)?|article|document|prompt|seq(uence)?|image|img|item|tok(en)?)s?"
PER_SECOND = r"(/|per) ?s(ec(ond)?)?"
# What a column with this heading holds, the first that fits, and the units that may stand behind its numbers.
RATIO = r"(x|×|times)( faster| speed-?up)?"
PRICES = r"price|cost|[$€£]|watt|power"
OTHERS = r"memory|batch|host|seed|\bsteps?\b(?! ?(/|per))|\bparam|epoch|\blen(gth)?\b|loss|accura|\bf1\b|score|rouge"
TIME = rf"((full |whole )?(data ?set )?(time|duration)( ({TIMES}))?|hours|minutes|seconds)"
KINDS = {
    "mfu": (r"^(mfu|model flops? utili[sz]ation)\b", "%"),
    "length": (r"^((seq(uence)?|sample) ?)?len(gth)?( tokens)?$|^tokens ?(/|per) ?(sample|seq(uence)?)$", "tok(en)?s?"),
    "unread": (rf"{PRICES}|{OTHERS}", ""),
    "latency": (r"latency|ttft|tpot|\bp ?\d\d\b", TIMES),
    "rate": (rf"\b{ITEMS} ?{PER_SECOND}\b|throughput|\bqps\b", rf"({ITEMS} ?)?{PER_SECOND}|qps"),
    "ranks": (r"^(num |n )?(gpus?|nodes|devices|ranks|workers|servers|machines)$", ""),
    "samples_counted": (r"^samples( counted)?$", "samples"),
    "wall_s": (rf"^(total |wall |run |projected )?{TIME}$", TIMES),
    "speed-up": (r"^speed ?-?ups?( (x|factor|(vs|over) (the )?(baseline|single|one|1)\b.*))?$|^scaling$", RATIO),
    "improvement": (r"^(relative )?(improvement|gain)s?( x| factor)?$", RATIO),
    "efficiency": (r"^(scaling |parallel )?efficiency", "%"),
}
PER_DEVICE = re.compile(r"(/|per )(gpu|device|node|chip|accelerator|rank|worker)\b")


class _Column(NamedTuple):
    """What stands below a heading: a number a row in the unit of its scale, 0 if there is none: of a benchmark that was not run."""

    head: str
    kind: str
    numbers: list[float]
    scales: list[float]
    words: str  # of the heading, and the unit of the cells
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
        return [(column, column.scales[row.place] * column.numbers[row.place]) for column in columns]

    def baselines(self, row: _Row) -> list[_Row]:
        """Return the other rows that are marked as baseline, the nearest above first."""
        marked = {row for row in self.rows for _, ratio in self.of("speed-up", row) if ratio == 1} - {row}
        return sorted(marked, key=lambda other: (other.place > row.place, -other.place))


def not_read(path: Path, text: str) -> list[str]:
    """Return the columns that no rule sees, and those of which a cell is no number."""
    table = _table(path, text)
    columns, marked = table.columns, any(table.baselines(row) for row in table.rows)
    kinds = {column.kind for column in columns} | {"tokens" for column in columns if column.of_tokens}
    needs = {"wall_s": "samples_counted", "samples_counted": "wall_s", "length": "tokens"}
    unread = {"unread", "latency", *(kind for kind, other in needs.items() if other not in kinds)}
    unread_set = [column for column in columns if column.kind in unread and not (marked and _whole_set(column))]
    return [column.head for column in columns if column in unread_set or not column.whole]


def read(path: Path, text: str) -> list[Claim]:
    """Return a claim for each row and column of throughput, and for the MFU of a row.

    ``UserError`` for a row that does not fit the header.
    """
    table, claims = _table(path, text), list[Claim]()
    for row in table.rows:
        if speedups := list(_speedups(table, row)):
            claims.append(Claim(subject=row.name, speedups=speedups))
        claims += [_claim(table, row, *rate) for rate in table.of("rate", row)]
        shares = [Compute(mfu=share, ranks=row.ranks) for _, share in table.of("mfu", row)]
        claims += [Claim(subject=row.name, compute=share) for share in shares]
    if not any(claim.speed or claim.compute for claim in claims):
        raise UserError(f"{path}: a table without a column of throughput or MFU")
    return claims


def _one_device(table: _Table, row: _Row, rate: _Column) -> _Row | None:
    """Return the fastest row of one device as those of this row, None if there is none with a rate."""
    alike = [other for other in table.rows if (other.ranks, other.device) == (1, row.device) and row.ranks > 1]
    best = max(alike, key=lambda other: rate.numbers[other.place], default=None)
    return best if best and rate.numbers[best.place] else None


def _sole(table: _Table, row: _Row) -> _Column | None:
    """Return the column of throughput whose counts, times and ratios a row states: the only one, or that of samples beside tokens."""
    rates = [column for column, _ in table.of("rate", row) if not column.per_device]
    samples = [column for column in rates if not column.of_tokens]
    return next((columns[0] for columns in (rates, samples) if len(columns) == 1), None)


def _claim(table: _Table, row: _Row, rate: _Column, new: float) -> Claim:
    stated = dict[str, Any]()
    if best := _one_device(table, row, rate):
        stated |= {"one_device_samples_per_s": rate.numbers[best.place], "one_device": best.name}
    if rate is _sole(table, row):
        if not rate.of_tokens:
            stated |= {column.kind: value for column, value in table.of("samples_counted", row)}
        for column, seconds in table.of("wall_s", row):
            ends = span(column.numbers[row.place], 0.99)  # 0.03 hours may be 0.025
            stated |= {"wall_s": seconds, "wall_s_span": [column.scales[row.place] * end for end in ends]}
            for base in table.baselines(row)[:1] if _whole_set(column) and not rate.of_tokens else []:
                count = rate.numbers[base.place] * column.scales[base.place] * column.numbers[base.place]
                if count and "samples_counted" not in stated:
                    stated |= {"samples_counted": round(count), "samples_source": f"as in {base.name}"}
    unit, of = _unit(rate), "one rank" if rate.per_device else "all ranks"
    lengths = [length for _, length in table.of("length", row) if length % 1 == 0]
    tokens = [each for each, _ in table.of("rate", row) if each.of_tokens and each.per_device == rate.per_device]
    if len(lengths) == len(tokens) == 1 and re.search("sample|seq", rate.words):
        stated |= {"tokens_per_s": tokens[0].numbers[row.place], "sequence_length": lengths[0], "tokens_padded": False}
    speed = Speed(samples_per_s=new, unit=unit, ranks=row.ranks, stands_for=of, **stated)
    return Claim(subject=f"{row.name}, {rate.head}", speed=speed)


def _unit(rate: _Column) -> str:
    return "tokens/s" if rate.of_tokens else "samples/s"


def _whole_set(column: _Column) -> bool:
    return column.kind == "wall_s" and bool(re.search("data ?set", column.words))


def _speedups(table: _Table, row: _Row) -> Iterator[SpeedUp]:
    """Yield the ratios that a row states, each with the two rates or times that it is of; without them if the table does not say.

    A ratio holds if a row that it may be compared with gives it: one such device, one that is marked as baseline, by ``1x`` or
    a word, or the row before. If the row is not faster than the baseline, the ratio is one of something else.
    """
    sole = _sole(table, row)
    rates = [sole] if sole else []
    alone = [best] if sole and (best := _one_device(table, row, sole)) else []
    shares = [row.ranks * share for _, share in table.of("efficiency", row) if row.ranks > 1]
    yield from (next(_ratios(stated, rates, row, alone), SpeedUp(stated=stated)) for stated in shares)
    for column, stated in table.of("speed-up", row):
        marked = table.baselines(row) if stated != 1 else []
        near = marked + list(table.rows[max(0, row.place - 1) : row.place]) if marked else []
        ratios = list(_ratios(stated, rates, row, [each for each in alone if column.numbers[each.place] in (0, 1)]))
        others = _ratios(stated, rates, row, near)
        ratios += [each for each in others if each.new and each.old and (each.new > each.old) == (stated > 1)]
        if ratios:
            # An improvement may be that of anything in the table, a speed-up that of a time.
            kinds = ("wall_s", "latency", *["unread"] * bool(re.search("improve|gain", column.words)))
            ratios += _ratios(stated, [each for each in table.columns if each.kind in kinds], row, [*alone, *marked])
        elif stated != 1:
            ratios = [SpeedUp(stated=stated)]
        judged = RULES["speed-up"].findings(Claim(speedups=ratios))
        held = [ratio for ratio, found in zip(ratios, judged, strict=True) if found.status == "PASS"]
        yield from held[:1] or ratios[:1]


def _ratios(stated: float, columns: Sequence[_Column], row: _Row, bases: Sequence[_Row]) -> Iterator[SpeedUp]:
    """Yield a stated ratio with the numbers of a row and of those that it may be compared with; those of times are inverse."""
    for base, column in itertools.product(bases, columns):
        here, there = (column.scales[each.place] * column.numbers[each.place] for each in (row, base))
        if here and there:
            unit = _unit(column) if column.kind == "rate" else "s" * (column.kind != "unread")
            common = {"stated": stated, "base": base.name, "unit": unit}
            if column.kind in ("rate", "unread"):
                yield SpeedUp(new=here, old=there, **common)
            if column.kind != "rate":
                yield SpeedUp(new=there, old=here, **common)


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
    # Beside a price an improvement may be that of the rate for it.
    kind = "unread" if any(any(each.numbers) and re.search(PRICES, each.words) for each in columns[1:]) else "speed-up"
    columns = [each._replace(kind=kind) if each.kind == "improvement" else each for each in columns]
    counts = next((column for column in columns if column.kind == "ranks" and all(column.numbers)), None)
    rows = list[_Row]()
    for place, (name, *_) in enumerate(lines):
        count, device = COUNT.search(name), " ".join(COUNT.sub("", name).split())
        ranks = int(counts.numbers[place]) if counts else int(count[1]) if count else 1
        # Where the rows are named by their number of devices, all are of one machine.
        rows.append(_Row(name, "" if counts is columns[0] else device, max(1, ranks), place))
    return _Table(rows, [column for column in columns[1:] if column is not counts])


def _column(head: str, words: str, kind: str, cells: list[str]) -> _Column:
    numbers, units, whole = list[float](), list[str](), True
    ratio = kind in ("speed-up", "improvement")
    for place, cell in enumerate(cells):
        match = NUMBER.fullmatch(cell.partition("±")[0].strip())
        unit = match[2].strip().lower() if match else ""
        good = match and re.fullmatch(f"({KINDS[kind][1]})?", unit) and (unit or kind != "improvement")
        # The first row is the baseline of the others if it has no ratio.
        marked = ratio and (BASELINE.fullmatch(cell) or (not place and cell.lower() in EMPTY))
        numbers.append(1.0 if marked else float(match[1].replace(",", "")) if match and good else 0.0)
        units.append(unit if good else "")
        whole &= bool(good or marked) or cell.lower() in EMPTY
    if len({"tok" in unit for unit in units if unit}) > 1:  # tokens in one row, samples in another
        numbers, whole = [0.0 for _ in cells], False
    scale = 1.0
    if kind in ("wall_s", "latency"):
        scale = next((SECONDS[word] for word in words.split() if word in SECONDS), 1.0)
    elif kind in ("efficiency", "mfu") and (any("%" in text for text in (head, *cells)) or max(numbers) > 2):
        scale = 0.01
    words = " ".join([words, *dict.fromkeys(filter(None, units))])
    of_tokens = kind == "rate" and "tok" in words
    scales = [SECONDS.get(unit, scale) for unit in units]
    return _Column(head, kind, numbers, scales, words, whole, of_tokens, bool(PER_DEVICE.search(words)))


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
