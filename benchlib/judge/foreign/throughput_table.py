"""Throughput tables as published: one row per machine, as in ``8x H200``, one column per model. CSV, TSV or Markdown.

The rows of several devices are compared with the row of one. Columns named features, epochs, samples and time (in s, or as
``time (h)``, ``hours``, ``minutes``) say what was processed; with them, the one column of throughput is recomputed. A column
``speed-up`` is compared with the throughput of the row and that of one device.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchlib.core.errors import UserError
from benchlib.judge.impossible.claim import Claim, Speed, SpeedUp

COUNT = re.compile(r"(?<![\w.])(\d{1,5})\s?[x×]\s?(?=[A-Za-z])", re.IGNORECASE)
NUMBER = re.compile(r"^[-+]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?([eE][-+]?\d+)?$")
RANKS = {"num_gpu", "num_gpus", "gpus", "n_gpu", "n_gpus", "devices", "ranks", "world_size"}
ABOUT = {"watt", "watts", "price", "power", "tdp", "year", "memory", "batch", "batch_size", "bs", "host", "run"}
COUNTED = {
    "features": "features",
    "epochs": "epochs",
    "samples": "samples_counted",
    "samples_counted": "samples_counted",
    "time": "wall_s",
    "time_s": "wall_s",
    "seconds": "wall_s",
    "wall_s": "wall_s",
    "duration": "wall_s",
    "hours": "wall_s",
    "minutes": "wall_s",
}
SECONDS = {"h": 3600, "hours": 3600, "hour": 3600, "min": 60, "minutes": 60}
SPEED_UP = {"speed-up", "speedup", "speed_up", "scaling"}


@dataclass(frozen=True)
class _Row:
    name: str
    ranks: int
    device: str  # the name without the count
    cells: Mapping[str, float]


def sniff(path: Path, text: str) -> bool:
    """A table whose rows name a number of devices."""
    try:
        return bool(_rows(path, text))
    except UserError:
        return path.suffix.lower() in (".csv", ".tsv", ".md")


def read(path: Path, text: str) -> list[Claim]:
    """Return a claim for each row and column of throughput. A row that does not fit the header is a ``UserError``."""
    rows = _rows(path, text)
    rates = [name for name in rows[0].cells if _plain(name) not in ABOUT | RANKS | SPEED_UP | set(COUNTED)]
    if not rates:
        raise UserError(f"{path}: a table without a column of throughput")
    alone = {row.device: row for row in rows if row.ranks == 1}
    claims = [
        _claim(row, rate, _alone(row, alone, rate), counted=len(rates) == 1)
        for row in rows
        for rate in rates
        if row.cells.get(rate, 0.0) > 0  # 0 is the sign of a benchmark that was not run
    ]
    negative = next((row for row in rows for rate in rates if row.cells.get(rate, 0.0) < 0), None)
    if negative:
        raise UserError(f"{path}: {negative.name} has a throughput below zero")
    return claims


def _claim(row: _Row, rate: str, alone: _Row | None, counted: bool) -> Claim:
    fields: dict[str, float | int] = {}
    if counted:
        given = {
            COUNTED[_plain(name)]: value * _seconds(name)
            for name, value in row.cells.items()
            if _plain(name) in COUNTED
        }
        fields = {name: value for name, value in given.items() if value > 0}
        fields |= {name: int(fields[name]) for name in ("features", "samples_counted") if name in fields}
    item = alone.cells.get(rate, 0.0) if alone and row.ranks > 1 else 0.0
    speed = Speed(
        samples_per_s=row.cells[rate],
        unit=_unit(rate),
        ranks=row.ranks,
        one_device_samples_per_s=item if item > 0 else None,
        one_device=alone.name if alone and item > 0 else "",
        **fields,  # type: ignore[arg-type]
    )
    stated = next((value for name, value in row.cells.items() if _plain(name) in SPEED_UP and value > 0), None)
    ratios = (
        [SpeedUp(stated=stated, new=row.cells[rate], old=item, unit=_unit(rate))]
        if counted and stated and item > 0
        else []
    )
    return Claim(subject=f"{row.name}, {rate}", speed=speed, speedups=ratios)


def _seconds(name: str) -> int:
    """Return the seconds of a column's unit: ``time (h)``, ``hours``; 1 where it names none."""
    match = re.search(r"\(([^)]*)\)", name)
    return SECONDS.get(match[1].strip().lower() if match else _plain(name), 1)


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
    ranks_at = next((index for index, name in enumerate(header) if _plain(name) in RANKS), None)
    machines = []
    for number, cells in enumerate(lines, 2):
        if len(cells) != len(header):
            raise UserError(
                f"{path}, row {number}: {len(cells)} columns where the header has {len(header)}; the file may be cut"
            )
        name = cells[0]
        match = COUNT.search(name)
        stated = _number(cells[ranks_at]) if ranks_at is not None else None
        ranks = int(stated) if stated and stated >= 1 else int(match[1]) if match and int(match[1]) > 0 else 1
        device = " ".join(COUNT.sub("", name).split())
        values = {
            head: value
            for head, cell in zip(header[1:], cells[1:], strict=True)
            if (value := _number(cell.rstrip("x× ") if _plain(head) in SPEED_UP else cell)) is not None
        }
        machines.append(_Row(name, min(ranks, 10_000_000), device, values))
    if ranks_at is None and not any(COUNT.search(row.name) for row in machines):
        raise UserError(f"{path}: no row names its number of devices, as in 8x H100, and no column num_gpu does")
    return machines


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
    return re.sub(r"\s*\(.*\)", "", name).strip().lower().replace(" ", "_")


def _number(cell: str) -> float | None:
    return float(cell.replace(",", "")) if NUMBER.match(cell) else None
