"""The output of nccl-tests and rccl-tests, as printed or collected by mpirun and srun.

Source of the format: NVIDIA/nccl-tests, src/util.cu (older versions: src/common.cu). Columns are found by the header
line; without one, thirteen columns are those of today and twelve those without a root. Times are in us, GB/s are 1e9.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchlib.core.errors import UserError
from benchlib.judge.foreign import nccl
from benchlib.judge.foreign.nccl import Setting
from benchlib.judge.impossible.claim import Claim

PREFIX = re.compile(r"^\s*(?:\[[\d, ]+\]\s*<std(?:out|err)>:|\[[\d, ]+\]:|\d+:\s)")  # of mpirun and srun --label
ROW = re.compile(r"^\s*\d+\s+\d+\s+[a-z][a-z0-9_]*\s")
HEADER = re.compile(r"^#\s+size\s+count\s+type\b(.*)$")
RANK = re.compile(r"^#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+\S+\s+device\s+\S+\s+\[[^\]]*\]\s*(.*)$")
PROGRAM = re.compile(r"Collective test (?:starting|concluded):\s*(\S+)")
COMMAND = re.compile(r"(?:^|[\s/])(\w+_perf)\b")
NVLS_READY = re.compile(r"NCCL INFO (?:Connected NVLS tree|NVLS comm 0x|NVLS multicast support is available)")
STEPS = re.compile(r"minBytes (\d+) maxBytes (\d+) step: (\d+)\((factor|bytes)\)")
MEASURES = ("time", "cputime", "algbw", "busbw", "#wrong", "error", "i_min", "i_max", "i_p99", "i_cv%")
WIDE_AS_TODAY, WITHOUT_ROOT = 13, 12
PLACEMENTS = ("out of place", "in place")


@dataclass
class _Columns:
    """``names`` of a placement's columns; ``lead`` are the columns before them (size, count, type, redop, root)."""

    lead: int = 5
    names: list[str] = field(default_factory=lambda: ["time", "algbw", "busbw", "#wrong"])


def sniff(path: Path, text: str) -> bool:
    """A header of nccl-tests, or rows of its form with a footer."""
    lines = [_bare(line) for line in text.splitlines()]
    if any(HEADER.match(line) for line in lines) or "# nThread " in text:
        return True
    return "bus bandwidth" in text and any(ROW.match(line) for line in lines)


def read(path: Path, text: str) -> list[Claim]:
    """Return a claim for each row and placement, and one for each footer. A row that is cut is a ``UserError``."""
    claims, first = list[Claim](), 1
    for lines in _tests([_bare(line) for line in text.splitlines()]):
        claims += _test(path, first, lines)
        first += len(lines)
    if not claims:
        raise UserError(f"{path}: output of nccl-tests without a row of results; the test failed or the file is cut")
    return claims


def _tests(lines: list[str]) -> list[list[str]]:
    """Split a log of several tests: each begins with its program's name or, in older versions, with its threads."""
    tests, started = [list[str]()], False
    for line in lines:
        if "Collective test starting" in line or (line.startswith("# nThread ") and started):
            tests, started = [*tests, []], False
        started = started or line.startswith("# nThread ")
        tests[-1].append(line)
    return tests


def _test(path: Path, first: int, lines: list[str]) -> list[Claim]:
    setting = _setting(lines)
    columns, claims, busbws = _Columns(), list[Claim](), list[float]()
    average: float | None = None
    wrong: float | None = None
    rows = 0
    for number, line in enumerate(lines, first):
        header = HEADER.match(line)
        if header:
            columns = _columns(header[1].split())
        elif ROW.match(line):
            found = _row(path, number, line.split(), columns, setting)
            claims += found
            rows += 1
            busbws += [c.collective.busbw_gbytes_per_s or 0.0 for c in found if c.collective]
        elif line.startswith("#") and "bus bandwidth" in line:
            average = _value(line.partition(":")[2].split()[:1])
        elif line.startswith("#") and "Out of bounds values" in line:
            wrong = _value(line.partition(":")[2].split()[:1])
    whole = rows == _expected_rows(lines)
    if rows and (average is not None or wrong is not None):
        claims.append(nccl.average_claim(average if whole else None, busbws if whole else [], wrong))
    return claims


def _bare(line: str) -> str:
    return PREFIX.sub("", line).rstrip()


def _setting(lines: Sequence[str]) -> Setting:
    matches = [match for line in lines if (match := RANK.match(line))]
    ranks = {int(match[1]) for match in matches}
    groups = {match[2] for match in matches}
    # The list of devices is cut where it is long ("..."); several groups are several communicators.
    complete = bool(ranks) and ranks == set(range(len(ranks))) and not any(line.strip() == "..." for line in lines)
    count = len(ranks) // len(groups) if complete and len(ranks) % len(groups) == 0 else None
    named = [match[1] for line in lines if (match := PROGRAM.search(line))]
    named += [match[1] for line in lines if not ROW.match(line) and (match := COMMAND.search(line))]
    operations = {nccl.operation_of(name) for name in named}
    return Setting(
        operation=operations.pop() if len(operations) == 1 else "",
        ranks=count,
        devices=tuple(sorted({match[3].strip() for match in matches})),
        algorithm=_algorithm(lines),
    )


def _algorithm(lines: Sequence[str]) -> str:
    """Return the algorithm that the log of NCCL tells or the environment enforces, '' where neither does.

    A connected NVLS tree may be used and need not be: it stands for the algorithm that asks least of the links.
    """
    text = "\n".join(lines)
    forced = re.search(r"NCCL_ALGO[=: ]+(?:set by environment to )?\"?([\w^,:]+)", text)
    if forced:
        return nccl.forced_algorithm(forced[1])
    used = {nccl.algorithm_of(told) for told in re.findall(r"\bAlgo (\w+) proto", text, re.IGNORECASE)}
    if used:
        return used.pop() if len(used) == 1 else ""
    if re.search(r"NCCL_NVLS_ENABLE\s*(?:=|set by environment to)\s*0", text):
        return nccl.WITHOUT_SWITCH
    return "NVLS" if NVLS_READY.search(text) else ""


def _columns(names: Sequence[str]) -> _Columns:
    first = next((index for index, name in enumerate(names) if name in MEASURES), 0)
    measures = [name for name in names[first:] if name in MEASURES]
    half = len(measures) // 2
    if half and measures[:half] == measures[half:]:
        measures = measures[:half]
    return _Columns(3 + first, measures) if measures else _Columns()


def _row(path: Path, number: int, cells: list[str], columns: _Columns, setting: Setting) -> list[Claim]:
    wide, lead = len(columns.names), columns.lead
    if len(cells) == WITHOUT_ROOT and columns.lead + 2 * wide == WIDE_AS_TODAY:
        lead = 4
    values = cells[lead:]
    if len(values) < wide or (wide < len(values) < 2 * wide and not _is_date(values[wide:])):
        raise UserError(
            f"{path}, line {number}: {len(cells)} columns where {lead + 2 * wide} were expected; the file may be cut"
        )
    blocks = [values[:wide], values[wide : 2 * wide]] if len(values) >= 2 * wide else [values[:wide]]
    placements = PLACEMENTS if len(blocks) == 2 else PLACEMENTS[1:]
    return [
        _claim(path, number, int(cells[0]), dict(zip(columns.names, block, strict=True)), placement, setting)
        for placement, block in zip(placements, blocks, strict=True)
    ]


def _is_date(cells: Sequence[str]) -> bool:
    return bool(cells) and bool(re.match(r"\d{4}-\d\d-\d\d$", cells[0]))


def _claim(path: Path, number: int, size: int, cells: dict[str, str], placement: str, setting: Setting) -> Claim:
    values = {name: _value([cell]) for name, cell in cells.items()}
    broken = [cell for name, cell in cells.items() if values[name] is None and cell != "N/A"]
    if broken:
        raise UserError(f"{path}, line {number}: {broken[0]!r} is not a number; the file may be cut")
    time_us = values.get("time")  # a column "cputime" is not what the bandwidths were computed from
    wrong = values.get("#wrong")
    seconds = 1e-6 * time_us if time_us is not None else None
    return nccl.row_claim(setting, placement, size, seconds, values.get("algbw"), values.get("busbw"), wrong)


def _value(cells: Sequence[str]) -> float | None:
    try:
        value = float(cells[0]) if cells else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _expected_rows(lines: Sequence[str]) -> int:
    """Return how many sizes the header announces; -1 where it does not, or the steps are not a factor."""
    match = next((match for line in lines if (match := STEPS.search(line))), None)
    if match is None:
        return -1
    size, most, step = (int(match[index]) for index in (1, 2, 3))
    if match[4] == "bytes":
        return (most - size) // step + 1 if step else -1
    if size <= 0 or step < 2:
        return -1
    count = 0
    while size <= most:
        size, count = size * step, count + 1
    return count
