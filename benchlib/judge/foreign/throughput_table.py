"""Tables as published: one row per machine, as in ``8x H200`` or ``2 nodes``, one column per model or figure. CSV, TSV or Markdown.

The rows of several devices, or of several nodes, are compared with the row of one. Columns named features, epochs, samples and
time (in s, or as ``time (h)``, ``hours``, ``minutes``) say what was processed; with them, the one column of throughput is
recomputed. The number of samples may stand in the column's name (``hours for 13,368 samples``). Columns ``speed-up`` and
``efficiency`` are compared with the throughput of the row and that of one device; MFU, percentiles of latencies, lengths of
sequences, scores, prices and costs with what bounds them. A table with the machines side by side is turned. Where a column
names what it counts per second, nothing else is throughput. ``not_read`` names the rest.
"""

import csv
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchlib.core.errors import UserError
from benchlib.judge.impossible.claim import Claim, Compute, Cost, Latency, Quantity, Speed, SpeedUp
from benchlib.judge.impossible.statements import RANGES

MOST_COLUMNS, MOST_ROWS, MOST_CHARACTERS = 100, 1_000, 10_000  # of a line
LONGEST_NUMBER = 40
COUNT = re.compile(r"(?<![\w.])(\d{1,5})\s?[x×]\s?(?=[A-Za-z])", re.IGNORECASE)
WORDS = {"single": 1, "one": 1, "two": 2, "dual": 2, "three": 3, "four": 4, "eight": 8}
NODES = re.compile(
    rf"\b(\d{{1,5}}|{'|'.join(WORDS)})[- ]?(?:[x×] ?)?(?:nodes?|workers?|servers?|machines?|replicas?|instances?|GPUs?)\b",
    re.IGNORECASE,
)
INSIDE = re.compile(r"(\d{1,5})(?:\s?[x×]\s?(?=[A-Za-z])|\s?GPUs?\b)", re.IGNORECASE)  # devices of so many nodes
NUMBER = re.compile(r"^([-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)(?:[eE]([-+]?\d+))?\s*([a-zA-Zµμ/%×]*)$")
INFINITE = re.compile(r"^[-+]?(inf|infinity|∞)$", re.IGNORECASE)
EMPTY = {"", "-", "–", "—", "n/a", "na", "nan", "none", "null"}
THOUSANDS = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
SECONDS = {
    **dict.fromkeys(("d", "day", "days"), 86400.0), **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600.0),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), 60.0), **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6,
}  # fmt: skip
ITEMS = "samples?|queries|req(?:uest)?s?|articles?|documents?|prompts?|seq(?:uence)?s?|images?"
RATE = re.compile(
    rf"(?:\b|_)({ITEMS}|tok(?:en)?s?)[_ ]?(?:/|per)[_ ]?s(?:ec(?:onds?)?)?(?:\b|_)|throughput|\bqps\b", re.IGNORECASE
)
COUNTS = re.compile(
    rf"(?:\b(?:for|over|on|of|to process)\s+)?(?:the\s+)?(?<![\d.,])(\d[\d,]*)\s+(?:{ITEMS})\b", re.IGNORECASE
)
ABOUT = {"watt", "watts", "price", "power", "tdp", "year", "memory", "batch", "batch size", "bs", "host", "run"}
PER_DEVICE = re.compile(r"(?:/|per)[ _]?(?:gpu|device|node|chip|accelerator|rank|worker)\b", re.IGNORECASE)
SCALED = re.compile(r"\b(?:[kKM]|thousands?|millions?|10\^?[36])\b|/ ?(?:min|h|hour|day)\b|\bper (?:min|h|day)")
UNPADDED = re.compile(r"pad|real|effective", re.IGNORECASE)
SIDES = re.compile(r"input|prompt|output|generated", re.IGNORECASE)
# Columns by their whole name, in lower case, without what stands in parentheses.
KINDS = {
    "ranks": r"(?:num |n )(?:gpus?|nodes)|gpus|nodes|devices|ranks|workers|servers|machines|replicas|instances|world size",
    "features": r"features",
    "epochs": r"epochs",
    "samples_counted": r"samples(?: counted)?",
    "wall_s": rf"(?:(?:total |wall |run ?)?(?:time|duration)|wall|(?:total |projected )?hours?)(?: (?:{'|'.join(SECONDS)}))?|h|minutes|seconds",
    "speed-up": r"speed[- ]?up.*|scaling",
    "efficiency": r"(?:scaling |parallel )?efficiency.*",
    "mfu": r"mfu|model flops? utili[sz]ation",
    "sequence_length": r"(?:(?:input|prompt|output) )?(?:seq(?:uence)?[- ]?)?len(?:gth)?|tokens ?(?:/|per) ?(?:sample|sequence|request)",
    "longest_sequence": r"(?:max(?:imum)?|longest) (?:seq(?:uence)?[- ]?)?(?:len(?:gth)?)?",
}  # fmt: skip
HOST = re.compile(r"node|worker|server|machine|replica|instance", re.IGNORECASE)
PERCENTILE = re.compile(
    r"\bp ?([5-9]\d(?:\.\d+)?)\b|\b([5-9]\d(?:\.\d+)?)(?:th|st|nd|rd)? ?(?:percentile|%ile)\b|\b(median)\b"
)
END = re.compile(r"\b(?:(mean|avg|average)|(min|minimum)|(max|maximum))\b")
TIMED = re.compile(r"latency|ttft|tpot|itl|e2el?|first token|per (?:output )?token|response")
MONEY = re.compile(r"cost|price|[$€£]|\b(?:usd|eur)\b")
COSTS = {
    "per_hour": re.compile(r"(?:/|per) ?(?:gpu|device|node|instance)?[ -]?h(?:(?:ou)?r)?\b|hourly"),
    "per_million_tokens": re.compile(r"(?:/|per) ?1? ?(?:m|million|,?000,?000) ?tok"),
    "per_thousand_samples": re.compile(rf"(?:/|per) ?1? ?(?:k|,?000|thousand) ?(?:{ITEMS})\b"),
    "total": re.compile(r"^(?:total |run |training )?cost(?: (?:usd|eur|[$€£]))?$"),
}  # fmt: skip
NEVER_NEGATIVE = {"rate", "wall_s", "samples_counted", "features", "epochs", "ranks", "mfu", "sequence_length", *COSTS}
EXACT = 0.03  # of a time: written with fewer digits, its ratio to another one says nothing


class _TooLarge(UserError):
    """A table with more rows or columns than are read."""


@dataclass(frozen=True)
class _Cell:
    value: float
    half: float  # of the last digit as it was written
    unit: str  # behind the number, else that of the column


@dataclass(frozen=True)
class _Row:
    name: str
    ranks: int
    device: str  # the name without the count
    cells: Mapping[str, _Cell]

    def value(self, head: str) -> float:
        """Return a cell's finite number, 0 where there is none."""
        value = self.cells[head].value if head in self.cells else 0.0
        return value if math.isfinite(value) else 0.0


@dataclass(frozen=True)
class _Table:
    rows: Sequence[_Row]
    kinds: Mapping[str, str]  # of the columns that are read
    unread: Sequence[str]

    @functools.cached_property
    def rates(self) -> list[str]:
        """The columns of throughput."""
        return [head for head, kind in self.kinds.items() if kind == "rate"]

    @functools.cached_property
    def single(self) -> str:
        """The one column of throughput, or the one of samples beside those of tokens; '' where several are."""
        of_samples = [head for head in self.rates if not _is_of_tokens(head)]
        return next((heads[0] for heads in (self.rates, of_samples) if len(heads) == 1), "")


def sniff(path: Path, text: str) -> bool:
    """A table whose rows name a number of devices, or whose columns can be judged without."""
    try:
        return bool(_table(path, text))
    except _TooLarge:
        return True
    except UserError:
        return path.suffix.lower() in (".csv", ".tsv", ".md")


def not_read(path: Path, text: str) -> Sequence[str]:
    """Return the columns that no rule sees, and cells of the others that are no number."""
    return _table(path, text).unread


def read(path: Path, text: str) -> list[Claim]:
    """Return a claim for each row and column of throughput, and for what else of a row can be judged.

    A row that does not fit the header is a ``UserError``, and so is a table that is too large.
    """
    table = _table(path, text)
    alone = {row.device: row for row in table.rows if row.ranks == 1}
    claims = list[Claim]()
    for row in table.rows:
        # 0 is the sign of a benchmark that was not run.
        claims += [_claim(row, rate, _alone(row, alone, rate), table) for rate in table.rates if row.value(rate) > 0]
        others = Claim(
            subject=row.name, compute=_compute(row, table), latencies=_latencies(row, table), cost=_cost(row, table),
            quantities=list(_quantities(row, table)),
        )  # fmt: skip
        if others != Claim(subject=row.name):
            claims.append(others)
    if not claims:
        unread = f"; not read: {', '.join(table.unread)}" if table.unread else ""
        raise UserError(f"{path}: a table without a column of throughput, MFU, latency or cost{unread}")
    return claims


def _claim(row: _Row, rate: str, alone: _Row | None, table: _Table) -> Claim:
    single, share = rate == table.single, bool(PER_DEVICE.search(rate))
    time = _time(row, table) if single else ""
    fields: dict[str, Any] = {}
    if single and not SCALED.search(rate) and not share and not _is_of_tokens(rate):
        fields = _counts(row, table, time) | _tokens(row, table)
    item = alone.value(rate) if alone and row.ranks > 1 else 0.0
    speed = Speed(
        samples_per_s=row.value(rate),
        unit=_rate_unit(rate),
        ranks=row.ranks,
        stands_for="one rank" if share else "all ranks",
        one_device_samples_per_s=item if item > 0 else None,
        one_device=alone.name if alone and item > 0 else "",
        **fields,
    )
    ratios = list(_ratios(row, rate, alone, time, table)) if single and not share and alone and item > 0 else []
    return Claim(subject=f"{row.name}, {rate}", speed=speed, speedups=ratios)


def _time(row: _Row, table: _Table) -> str:
    return next((head for head in row.cells if table.kinds.get(head) == "wall_s" and row.value(head) > 0), "")


def _is_of_tokens(head: str) -> bool:
    return "tok" in head.lower()


def _counts(row: _Row, table: _Table, time: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        kind: row.value(head)
        for head, kind in table.kinds.items()
        if kind in ("features", "epochs", "samples_counted") and row.value(head) > 0
    }
    fields |= {name: int(fields[name]) for name in ("features", "samples_counted") if name in fields}
    if (match := COUNTS.search(time)) and "features" not in fields:
        fields["samples_counted"] = int(match[1].replace(",", ""))
    if time:
        seconds, cell = SECONDS[row.cells[time].unit], row.cells[time]
        ends = [(cell.value + side * cell.half) * seconds for side in (-1, 1)]
        fields |= {"wall_s": cell.value * seconds, "wall_s_span": ends if ends[0] > 0 else []}
    return fields


def _tokens(row: _Row, table: _Table) -> dict[str, Any]:
    """Return the row's rate of tokens and the length that it belongs to: one rate, one length, of the same side of a model."""
    rates = [head for head in table.rates if _is_of_tokens(head)]
    lengths = [head for head, kind in table.kinds.items() if kind in ("sequence_length", "longest_sequence")]
    if len(rates) != 1 or len(lengths) != 1:
        return {}
    [rate], [length] = rates, lengths
    if PER_DEVICE.search(rate) or SCALED.search(rate) or _sides(rate) != _sides(length):
        return {}
    if row.value(length) < 1 or row.value(length) % 1 or row.value(rate) <= 0:
        return {}
    exact = table.kinds[length] == "sequence_length" and not UNPADDED.search(rate)
    name = "sequence_length" if exact else "longest_sequence"
    return {"tokens_per_s": row.value(rate), name: int(row.value(length))}


def _sides(head: str) -> set[str]:
    """Return which tokens of a model a column is of: those that go in, those that come out, or all."""
    return {side.lower() for side in SIDES.findall(head)}


def _ratios(row: _Row, rate: str, alone: _Row, time: str, table: _Table) -> Iterator[SpeedUp]:
    """Yield what is stated of a row and that of one device: by throughput and, where both are written exactly enough, by time."""
    new, old = row.value(rate), alone.value(rate)
    stated = []
    for head in row.cells:
        if table.kinds.get(head) == "speed-up" and row.value(head) > 0:
            stated.append(row.value(head))
        elif table.kinds.get(head) == "efficiency" and row.value(head) > 0:
            stated.append(row.ranks * _share(row, head, table))
    for ratio in stated:
        yield SpeedUp(stated=ratio, new=new, old=old, unit=_rate_unit(rate))
    times = [each.cells[time] for each in (alone, row) if time in each.cells]
    if len(times) == 2 and all(cell.value > 0 and cell.half <= EXACT * cell.value for cell in times):
        by_rate = stated[0] if stated else float(f"{new / old:.2g}")
        yield SpeedUp(stated=by_rate, new=_seconds(times[0]), old=_seconds(times[1]), unit="s")


def _seconds(cell: _Cell) -> float:
    return cell.value * SECONDS.get(cell.unit, 1.0)


def _share(row: _Row, head: str, table: _Table) -> float:
    """Return a share as a fraction: per cent where a unit says so, or where the column has values that no fraction has."""
    cell = row.cells[head]
    return cell.value / 100 if cell.unit == "%" or max(other.value(head) for other in table.rows) > 2 else cell.value


def _compute(row: _Row, table: _Table) -> Compute | None:
    heads = [head for head in row.cells if table.kinds.get(head) == "mfu" and row.value(head) > 0]
    return Compute(mfu=_share(row, heads[0], table), ranks=row.ranks) if heads else None


def _latencies(row: _Row, table: _Table) -> list[Latency]:
    """Return the latencies of a row by what was timed."""
    fields: dict[str, dict[str, Any]] = {}
    for head, cell in row.cells.items():
        if table.kinds.get(head) != "latency" or not math.isfinite(cell.value):
            continue
        name, end = _latency(head)
        group = fields.setdefault(name, {"percentiles_s": {}})
        if isinstance(end, float):
            group["percentiles_s"][end] = _seconds(cell)
        else:
            group[end] = _seconds(cell)
    return [Latency(name=name, **group) for name, group in fields.items()]


def _latency(head: str) -> tuple[str, float | str]:
    """Return what a column of latencies times, and which percentile (or ``mean_s``, ``min_s``, ``max_s``) it has."""
    words = _words(head)
    match, end = PERCENTILE.search(words), END.search(words)
    which: float | str = 50.0  # the median
    if match and not match[3]:
        which = float(match[1] or match[2])
    elif end and not match:
        which = "mean_s" if end[1] else "min_s" if end[2] else "max_s"
    rest = END.sub(" ", PERCENTILE.sub(" ", words)).split()
    return " ".join(word for word in rest if word not in SECONDS) or "latency", which


def _cost(row: _Row, table: _Table) -> Cost | None:
    costs = {kind: head for head, kind in table.kinds.items() if kind in COSTS and row.value(head) > 0}
    each = re.search(r"gpu|device", costs.get("per_hour", ""), re.IGNORECASE)
    counted = [row.name, *(head for head, kind in table.kinds.items() if kind == "ranks")]
    if each and any(HOST.search(name) for name in counted):
        del costs["per_hour"]  # of one device, where hosts are counted
    fields = {kind: row.value(head) for kind, head in costs.items()}
    if not fields:
        return None
    rates: dict[str, float] = {}
    for name, of_tokens in (("tokens_per_s", True), ("samples_per_s", False)):
        heads = [head for head in table.rates if _is_of_tokens(head) == of_tokens]
        if len(heads) != 1 or row.value(heads[0]) <= 0 or PER_DEVICE.search(heads[0]) or SCALED.search(heads[0]):
            continue
        if not of_tokens or _sides(heads[0]) == _sides(costs.get("per_million_tokens", "")):
            rates[name] = row.value(heads[0])
    counts = {
        name: value for name, value in _counts(row, table, _time(row, table)).items() if name in Cost.model_fields
    }
    return Cost(ranks=row.ranks, per_hour_of="one rank" if each else "", **fields, **rates, **counts)


def _quantities(row: _Row, table: _Table) -> Iterator[Quantity]:
    """Yield values that have a range of their own, and those that are infinite or below zero and cannot be."""
    for head, cell in row.cells.items():
        kind = table.kinds.get(head, "")
        finite = math.isfinite(cell.value)
        if kind == "range" or (kind and not finite) or (kind in NEVER_NEGATIVE and cell.value < 0):
            name = _plain(head).replace(" ", "_") if kind == "range" else head
            yield Quantity(name=name, value=cell.value if finite else None, unit=cell.unit)


def _rate_unit(name: str) -> str:
    match = re.search(r"\(([^()]*/s[^()]*)\)", name)
    return match[1] if match else "tokens/s" if _is_of_tokens(name) else "samples/s"


def _alone(row: _Row, alone: Mapping[str, _Row], rate: str) -> _Row | None:
    """Return the row of one such device: that of the same name, else the fastest of the same device by any maker.

    A maker's or a cloud's name stands before that of the device. Of other machines the fastest counts: a slow one
    among them would make an honest row look faster than it can be.
    """
    if row.device in alone:
        return alone[row.device]
    near = [name for name in alone if row.device.endswith(f" {name}") or name.endswith(f" {row.device}")]
    if not near:
        return None
    device = min([*near, row.device], key=len)
    same = [other for name, other in alone.items() if name == device or name.endswith(f" {device}")]
    return max(same, key=lambda other: other.value(rate))


@functools.lru_cache(maxsize=1)  # sniffed, read and asked for what was not read
def _table(path: Path, text: str) -> _Table:
    header, *lines = _cells(path, text) or [[]]
    if len(header) < 2 or not lines:
        raise UserError(f"{path}: not a throughput table; expected a header and rows of machines")
    if all(map(_devices, header[1:])) and not any(_devices(cells[0]) for cells in lines if cells):
        header, *lines = map(list, zip_longest(header, *lines, fillvalue=""))  # the machines stand side by side
    if len(header) > MOST_COLUMNS or len(lines) > MOST_ROWS:
        size = f"rows: {len(lines):,}, columns: {len(header):,}"
        raise _TooLarge(
            f"{path}: a table too large ({size}); at most {MOST_ROWS:,} rows of {MOST_COLUMNS} columns are read"
        )
    twice = [head for head in header[1:] if head and header[1:].count(head) > 1]
    if twice:
        raise UserError(f"{path}: the column {twice[0]!r} stands twice; give each a name of its own")
    for number, cells in enumerate(lines, 2):
        if len(cells) != len(header):
            raise UserError(
                f"{path}, row {number}: {len(cells)} columns where the header has {len(header)}; the file may be cut"
            )
    kinds = {head: kind for head in header[1:] if (kind := _kind(head))}
    ranks_at = next((index for index, head in enumerate(header) if _kind(head) == "ranks"), None)
    by_node = ranks_at is None and all(NODES.search(cells[0]) for cells in lines)
    rows, unread = [], dict[str, str]()
    for cells in lines:
        name = f"{header[0]} = {cells[0]}" if ranks_at == 0 else cells[0]
        stated = _number(cells[ranks_at], "") if ranks_at is not None else None
        ranks = int(stated.value) if stated and 1 <= stated.value < math.inf else _devices(name, by_node) or 1
        values = {}
        for head, text_of_cell in zip(header[1:], cells[1:], strict=True):
            cell = _number(text_of_cell, _unit(head, kinds.get(head, "")))
            if cell and _fits(cell, kinds.get(head, "")):
                values[head] = cell
            elif text_of_cell.lower() not in EMPTY:
                unread.setdefault(head, text_of_cell)
        rows.append(_Row(name, min(ranks, 10_000_000), _device(cells[0], ranks, by_node, ranks_at == 0), values))
    if "rate" not in kinds.values():
        kinds |= {head: "rate" for head in header[1:] if _may_be_rate(head, kinds, rows)}
    if (
        ranks_at is None
        and not any(_devices(row.name) for row in rows)
        and not {"mfu", "latency", *COSTS} & {*kinds.values()}
    ):
        raise UserError(
            f"{path}: no row names its number of devices, as in 8x H100 or 2 nodes, and no column num_gpu or nodes does"
        )
    columns = [
        head for head in header[1:] if head not in kinds and (head in unread or any(head in row.cells for row in rows))
    ]
    cells_left = [f"{text_of_cell[:30]!r} of {head}" for head, text_of_cell in unread.items() if head in kinds]
    return _Table(rows, kinds, [*columns, *cells_left])


@functools.lru_cache(maxsize=1024)
def _kind(head: str) -> str:
    """Return what a column has, '' where it is not known."""
    plain, words = _plain(head), _words(head)
    if MONEY.search(words):
        return next((kind for kind, pattern in COSTS.items() if pattern.search(words)), "")
    if RATE.search(head):
        return "rate"
    if PERCENTILE.search(words) or (END.search(words) and TIMED.search(words)):
        return "latency"
    if any(pattern.search(plain.replace(" ", "_")) for pattern, _ in RANGES):
        return "range"
    return next((kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, plain)), "")


def _unit(head: str, kind: str) -> str:
    """Return the unit that a column's name states: ``time (h)``, ``p99_ms``, ``hours``; s for a time without one."""
    inside = re.search(r"\(([^()]*)\)", COUNTS.sub("", head))
    unit = inside[1].strip().lower() if inside else ""
    if kind not in ("wall_s", "latency"):
        return unit
    minimum = "min" if kind == "latency" else ""
    units = [word for word in _words(COUNTS.sub("", head)).split() if word in SECONDS and word != minimum]
    return units[-1] if units else unit if unit and not PERCENTILE.search(unit) and not END.search(unit) else "s"


def _fits(cell: _Cell, kind: str) -> bool:
    """Return whether a cell has a unit that its column may have."""
    if kind in ("wall_s", "latency"):
        return cell.unit in SECONDS
    if kind == "speed-up":
        return cell.unit != "%"
    return cell.unit not in SECONDS and cell.unit != "m"


def _may_be_rate(head: str, kinds: Mapping[str, str], rows: Sequence[_Row]) -> bool:
    """Return whether a column may be throughput, in a table that names none: nothing else, and never below zero."""
    if head in kinds or _plain(head) in ABOUT or MONEY.search(head.lower()) or SCALED.search(head):
        return False
    values = [row.cells[head] for row in rows if head in row.cells]
    return bool(values) and all(0 <= cell.value < math.inf and cell.unit != "%" for cell in values)


def _devices(name: str, by_node: bool = True) -> int:
    """Return the devices or nodes that a row names, 0 where it names none."""
    match = (NODES.search(name) if by_node else None) or COUNT.search(name)
    return WORDS.get(match[1].lower()) or int(match[1]) if match else 0


def _device(name: str, ranks: int, by_node: bool, by_count: bool) -> str:
    """Return what a row's devices are: those of a node where nodes are counted, of which a row may state all or each."""
    if by_count:
        return ""
    if not by_node:
        return " ".join(COUNT.sub("", name).split())

    def of_node(match: re.Match[str]) -> str:
        total = int(match[1])
        return f"{total // ranks if total % ranks == 0 and not re.search('each|per', name) else total}x "

    return " ".join(
        re.sub(r"\beach\b|\bper node\b|[(),]", " ", INSIDE.sub(of_node, NODES.sub("", name, count=1))).split()
    )


def _cells(path: Path, text: str) -> list[list[str]]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    longest = max(map(len, lines), default=0)
    if longest > MOST_CHARACTERS:
        raise UserError(f"{path}: a line of {longest:,} characters; a table's line has at most {MOST_CHARACTERS:,}")
    if any(line.startswith("|") for line in lines):
        parts = [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        return [cells for cells in parts if not all(re.fullmatch(r":?-+:?", cell) for cell in cells)]
    lines = [line for line in lines if not line.startswith("#")]
    delimiter = "\t" if lines and "\t" in lines[0] else ","
    try:
        return [[cell.strip() for cell in cells] for cells in csv.reader(lines, delimiter=delimiter)]
    except csv.Error:
        return []


def _words(head: str) -> str:
    return " ".join(re.sub(r"[()\[\],_]", " ", head.lower()).split())


@functools.lru_cache(maxsize=1024)
def _plain(head: str) -> str:
    return " ".join(re.sub(r"\([^()]*\)", "", COUNTS.sub("", head)).strip(" ,:").lower().replace("_", " ").split())


def _number(text: str, unit: str) -> _Cell | None:
    """Return a cell's number, half of its last digit, and the unit behind it, else that of the column; None for other text."""
    text = text.partition("±")[0].strip().lstrip("$€£").strip()
    if INFINITE.match(text):
        return _Cell(math.inf, 0.0, unit)
    match = NUMBER.match(text) if len(text) <= LONGEST_NUMBER else None
    if not match:
        return None
    mantissa, power = match[1].replace(",", ""), int(match[2] or 0)
    value = float(f"{mantissa}e{power}")
    if not math.isfinite(value):
        return None
    half = 0.5 * 10.0 ** (power - len(mantissa.partition(".")[2]))
    factor = THOUSANDS.get(match[3], 1.0)
    return _Cell(value * factor, half * factor, unit if factor > 1 or not match[3] else match[3].lower())
