"""Throughput tables as published: one row per machine, as in ``8x H200`` or ``2 nodes``, one column per model. CSV, TSV or Markdown.

The rows of several devices, or of several nodes, are compared with the row of one. Columns named features, epochs, samples and
time (in s, or as ``time (h)``, ``hours``, ``minutes``) say what was processed; with them, the one column of throughput is
recomputed. The number of samples may stand in the column's name (``hours for 13,368 samples``) or once in the text around. Columns
``speed-up`` and ``efficiency`` are compared with the throughput of the row and that of one device. A table with the machines side
by side is turned. Where a column names what it counts per second, times of tokens and the like are no throughput.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchlib.core.errors import UserError
from benchlib.judge.impossible.claim import Claim, Speed, SpeedUp

COUNT = re.compile(r"(?<![\w.])(\d{1,5})\s?[x×]\s?(?=[A-Za-z])", re.IGNORECASE)
WORDS = {"single": 1, "one": 1, "two": 2, "dual": 2, "three": 3, "four": 4, "eight": 8}
NODES = re.compile(
    rf"\b(\d{{1,5}}|{'|'.join(WORDS)})[- ]?(?:[x×] ?)?(?:nodes?|workers?|servers?|machines?|replicas?|instances?|GPUs?)\b",
    re.IGNORECASE,
)
INSIDE = re.compile(r"(\d{1,5})(?:\s?[x×]\s?(?=[A-Za-z])|\s?GPUs?\b)", re.IGNORECASE)  # devices of so many nodes
NUMBER = re.compile(r"^([-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*([a-zA-Z/%×]*)$")
RANKS = {"num_gpu", "num_gpus", "gpus", "n_gpu", "n_gpus", "devices", "ranks", "world_size"}
RANKS |= {"nodes", "num_nodes", "n_nodes", "workers", "servers", "machines", "replicas", "instances"}
ABOUT = {"watt", "watts", "price", "power", "tdp", "year", "memory", "batch", "batch_size", "bs", "host", "run"}
ITEMS = "samples?|queries|requests?|articles?|documents?|prompts?"
RATE = re.compile(
    rf"(?:\b|_)({ITEMS}|tokens?)[_ ]?(?:/|per)[_ ]?s(?:ec(?:onds?)?)?(?:\b|_)|throughput|\bqps\b", re.IGNORECASE
)
COUNTS = re.compile(
    rf"(?:\b(?:for|over|on|of|to process)\s+)?(?:the\s+)?(?<![\d.,])(\d[\d,]*)\s+(?:{ITEMS})\b", re.IGNORECASE
)
COUNTED = {
    "features": "features", "epochs": "epochs", "samples": "samples_counted", "samples_counted": "samples_counted",
    **dict.fromkeys(
        ("time", "time_s", "time_h", "total_time", "wall_time", "run_time", "runtime", "seconds", "wall_s", "duration", "duration_s",
         "duration_h", "hour", "hours", "h", "total_hours", "projected_hours", "minutes"), "wall_s",
    ),
}  # fmt: skip
SECONDS = {"h": 3600, "hours": 3600, "hour": 3600, "min": 60, "minutes": 60}
SPEED_UP = re.compile(r"^(speed[-_]?up|scaling$)")
EFFICIENCY = re.compile(r"^(scaling_|parallel_)?efficiency(_|$)")
EXACT = 0.03  # of a time: written with fewer digits, its ratio to another one says nothing


@dataclass(frozen=True)
class _Row:
    name: str
    ranks: int
    device: str  # the name without the count
    cells: Mapping[str, float]
    halves: Mapping[str, float]  # of the last digit of each as it was written


def sniff(path: Path, text: str) -> bool:
    """A table whose rows name a number of devices."""
    try:
        return bool(_rows(path, text))
    except UserError:
        return path.suffix.lower() in (".csv", ".tsv", ".md")


def read(path: Path, text: str) -> list[Claim]:
    """Return a claim for each row and column of throughput. A row that does not fit the header is a ``UserError``."""
    rows = _rows(path, text)
    rates = [name for row in rows for name in row.cells if _is_rate(name)]
    named = [name for name in rates if RATE.search(name)]
    rates = list(dict.fromkeys(named or rates))
    if not rates:
        raise UserError(f"{path}: a table without a column of throughput")
    of_samples = [name for name in rates if "token" not in name.lower()]
    around = {
        found.replace(",", "")
        for line in text.splitlines()
        if not line.strip().startswith("|")
        for found in COUNTS.findall(line)
    }
    count = int(around.pop()) if len(around) == 1 else None
    alone = {row.device: row for row in rows if row.ranks == 1}
    claims = [
        _claim(row, rate, _alone(row, alone, rate), [rate] in (rates, of_samples), count)
        for row in rows
        for rate in rates
        if row.cells.get(rate, 0.0) > 0  # 0 is the sign of a benchmark that was not run
    ]
    negative = next((row for row in rows for rate in rates if row.cells.get(rate, 0.0) < 0), None)
    if negative:
        raise UserError(f"{path}: {negative.name} has a throughput below zero")
    return claims


def _is_rate(name: str) -> bool:
    plain = _plain(name)
    return plain not in ABOUT | RANKS | set(COUNTED) and not SPEED_UP.match(plain) and not EFFICIENCY.match(plain)


def _claim(row: _Row, rate: str, alone: _Row | None, counted: bool, count: int | None) -> Claim:
    fields: dict[str, Any] = {}
    time = next((name for name, value in row.cells.items() if COUNTED.get(_plain(name)) == "wall_s" and value > 0), "")
    if counted:
        given = {COUNTED[_plain(name)]: value for name, value in row.cells.items() if _plain(name) in COUNTED}
        fields = {name: value for name, value in given.items() if value > 0 and name != "wall_s"}
        fields |= {name: int(fields[name]) for name in ("features", "samples_counted") if name in fields}
        if found := COUNTS.search(time):
            count = int(found[1].replace(",", ""))
        if count and "features" not in fields:
            fields.setdefault("samples_counted", count)
        if time:
            ends = [(row.cells[time] + side * row.halves[time]) * _seconds(time) for side in (-1, 1)]
            fields |= {"wall_s": row.cells[time] * _seconds(time), "wall_s_span": ends if ends[0] > 0 else []}
    item = alone.cells.get(rate, 0.0) if alone and row.ranks > 1 else 0.0
    speed = Speed(
        samples_per_s=row.cells[rate],
        unit=_unit(rate),
        ranks=row.ranks,
        one_device_samples_per_s=item if item > 0 else None,
        one_device=alone.name if alone and item > 0 else "",
        **fields,
    )
    ratios = list(_ratios(row, rate, alone, time)) if counted and alone and item > 0 else []
    return Claim(subject=f"{row.name}, {rate}", speed=speed, speedups=ratios)


def _ratios(row: _Row, rate: str, alone: _Row, time: str) -> Iterator[SpeedUp]:
    """Yield what is stated of a row and that of one device: by throughput and, where both are written exactly enough, by time."""
    new, old = row.cells[rate], alone.cells[rate]
    stated = [value for name, value in row.cells.items() if SPEED_UP.match(_plain(name)) and value > 0]
    for name, value in row.cells.items():
        if EFFICIENCY.match(_plain(name)) and value > 0:
            stated.append(row.ranks * value / (100 if value > 2 else 1))
    for ratio in stated:
        yield SpeedUp(stated=ratio, new=new, old=old, unit=_unit(rate))
    times = [(each.cells.get(time, 0.0), each.halves.get(time, 0.0)) for each in (alone, row)]
    if all(value > 0 and half <= EXACT * value for value, half in times):
        by_rate = stated[0] if stated else float(f"{new / old:.2g}")
        yield SpeedUp(
            stated=by_rate, new=times[0][0], old=times[1][0], unit="h" if _seconds(time) == SECONDS["h"] else ""
        )


def _seconds(name: str) -> int:
    """Return the seconds of a column's unit: ``time (h)``, ``hours``, ``time_h``; 1 where it names none."""
    match = re.search(r"\(([^)]*)\)", COUNTS.sub("", name))
    unit = match[1].strip().lower() if match and match[1].strip() else _plain(name).rpartition("_")[2]
    return SECONDS.get(unit, 1)


def _unit(name: str) -> str:
    match = re.search(r"\(([^)]*/s[^)]*)\)", name)
    return match[1] if match else "samples/s"


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
    return max(same, key=lambda other: other.cells.get(rate, 0.0))


def _rows(path: Path, text: str) -> list[_Row]:
    header, *lines = _cells(text) or [[]]
    if len(header) < 2 or not lines:
        raise UserError(f"{path}: not a throughput table; expected a header and rows of machines")
    if all(map(_devices, header[1:])) and not any(_devices(cells[0]) for cells in lines if cells):
        header, *lines = map(list, zip_longest(header, *lines, fillvalue=""))  # the machines stand side by side
    ranks_at = next((index for index, name in enumerate(header) if _plain(name) in RANKS), None)
    by_node = ranks_at is None and all(NODES.search(cells[0]) for cells in lines if cells)
    machines = []
    for number, cells in enumerate(lines, 2):
        if len(cells) != len(header):
            raise UserError(
                f"{path}, row {number}: {len(cells)} columns where the header has {len(header)}; the file may be cut"
            )
        name = f"{header[0]} = {cells[0]}" if ranks_at == 0 else cells[0]
        stated = _number(cells[ranks_at])[0] if ranks_at is not None else None
        ranks = int(stated) if stated and stated >= 1 else _devices(name, by_node) or 1
        values, halves = dict[str, float](), dict[str, float]()
        for head, cell in zip(header[1:], cells[1:], strict=True):
            value, half, unit = _number(cell)
            if value is not None:
                head += f" ({unit})" if unit in SECONDS and _seconds(head) == 1 else ""
                values[head], halves[head] = value, half
        machines.append(
            _Row(name, min(ranks, 10_000_000), _device(cells[0], ranks, by_node, ranks_at == 0), values, halves)
        )
    if ranks_at is None and not any(_devices(row.name) for row in machines):
        raise UserError(
            f"{path}: no row names its number of devices, as in 8x H100 or 2 nodes, and no column num_gpu or nodes does"
        )
    return machines


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


def _cells(text: str) -> list[list[str]]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(line.startswith("|") for line in lines):
        parts = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        return [cells for cells in parts if not all(re.fullmatch(r":?-+:?", cell) for cell in cells)]
    lines = [line for line in lines if not line.startswith("#")]
    delimiter = "\t" if lines and "\t" in lines[0] else ","
    try:
        return [[cell.strip() for cell in cells] for cells in csv.reader(lines, delimiter=delimiter)]
    except csv.Error:
        return []


def _plain(name: str) -> str:
    return re.sub(r"\s*\(.*\)", "", COUNTS.sub("", name)).strip(" ,:").lower().replace(" ", "_")


def _number(cell: str) -> tuple[float | None, float, str]:
    """Return a cell's number, half of its last digit, and the unit behind it."""
    match = NUMBER.match(cell)
    if not match:
        return None, 0.0, ""
    text = match[1].replace(",", "")
    exponent = Decimal(text).as_tuple().exponent
    return float(text), 0.5 * 10.0**exponent if isinstance(exponent, int) else 0.0, match[2].lower()
