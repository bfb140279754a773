"""Output of nccl-tests and rccl-tests, as text or JSON.

Source of both formats: NVIDIA/nccl-tests, src/util.cu (older versions: src/common.cu); the JSON (``-J FILE``) is version 2
of that file. The text may have been collected by mpirun and srun. Its columns are known by the header line; without one,
thirteen columns are those of today and twelve those without a root. Times are in us, GB/s are 1e9.
"""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchlib.core.definitions import size_text
from benchlib.core.errors import UserError
from benchlib.judge.foreign.kit import number, parse, rows
from benchlib.judge.impossible.claim import Claim, Collective
from benchlib.judge.references import vendor_peak

# The programs of nccl-tests (without _perf) and the operation they time; others have no factor that is agreed on.
PROGRAMS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "sendrecv": "send_recv",
}
# NCCL's own numbers of its algorithms (NCCL_ALGO_* in nccl's src/include/nccl_common.h), as older logs print them.
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
WITHOUT_SWITCH = "ring or tree"
PLACEMENTS = ("out of place", "in place")


def operation_of(program: str) -> str:
    """Return the operation of a program's name or path: ``./build/all_reduce_perf`` -> ``all_reduce``."""
    name = program.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".exe").removesuffix("_perf")
    return PROGRAMS.get(name, name)


def algorithm_of(name: str) -> str:
    """Return the algorithm by its name or number in a log of NCCL: ``4`` -> ``NVLS``."""
    return ALGORITHMS[int(name)] if name.isdecimal() and int(name) < len(ALGORITHMS) else name


def forced_algorithm(value: str) -> str:
    """Return what NCCL_ALGO leaves; ``^NVLS,NVLSTree`` forbids, ``Ring,Tree`` allows, '' where several kinds are left."""
    value = value.strip().strip('"')
    if value.startswith("^"):
        forbidden = value[1:].upper().split(",")
        return WITHOUT_SWITCH if {"NVLS", "NVLSTREE"} <= set(forbidden) else ""
    return value


def setting(operation: str, ranks: int | None, devices: Collection[str], algorithm: str) -> dict[str, Any]:
    """Return the fields of a ``Collective`` that hold for all rows of a test; '' and None for what it does not state.

    Its limit is what the links of the fastest device carry one way, unless a device or its links are unknown.
    """
    peaks = [vendor_peak(device) for device in devices]
    links = [(peak.link_gbytes_per_s, peak.name) for peak in peaks if peak and peak.link_gbytes_per_s]
    fields = {"operation": operation, "ranks": ranks, "algorithm": algorithm}
    if not links or len(links) < len(peaks):
        return fields
    rate, name = max(links)
    source = f"claimed for a rank's links, NVLink of the {name}"
    return fields | {"bound_gbytes_per_s": rate, "bound_source": source}


def row_claim(
    common: dict[str, Any],
    placement: str,
    size_bytes: int,
    time_us: float | None,
    algbw: float | None,
    busbw: float | None,
    wrong: float | None,
) -> Claim:
    """Return one row and placement ("out of place", "in place") as a claim; bandwidths in GB/s."""
    collective = Collective(
        size_bytes=size_bytes,
        seconds=1e-6 * time_us if time_us is not None else None,
        algbw_gbytes_per_s=algbw,
        busbw_gbytes_per_s=busbw,
        wrong_elements=wrong,
        **common,
    )
    return Claim(subject=f"{common['operation'] or 'row'} {size_text(size_bytes)}, {placement}", collective=collective)


def average_claim(average: float | None, rows: Sequence[float], wrong: float | None) -> Claim:
    """Return the footer of a file as a claim; ``rows`` are all bus bandwidths, none where rows may be missing."""
    collective = Collective(average_busbw_gbytes_per_s=average, all_busbw_gbytes_per_s=list(rows), wrong_elements=wrong)
    return Claim(subject="footer", collective=collective)


# --- JSON ----------------------------------------------------------------------------------------------------------------


def read_json(path: Path, text: str) -> list[Claim]:
    """Return a claim for each row and placement, and one for the footer."""
    content = parse(path, text)
    common = _json_setting(content)
    claims, busbws = list[Claim](), list[float]()
    for row in rows(content.get("results")):
        size = row.get("size")
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise UserError(f"{path}: a row of results has the size {size!r}; expected bytes")
        for placement in PLACEMENTS:
            cells = row.get(placement.replace(" ", "_"))
            if isinstance(cells, dict):
                claims.append(_json_claim(path, common, placement, size, cells))
                busbws.append(number(cells.get("bus_bw")) or 0.0)
    if not claims:
        raise UserError(f"{path}: JSON of nccl-tests without a row of results; the test failed or the file is cut")
    average = _json_part(content, "average_bus_bandwidth", "bandwidth")
    wrong = _json_part(content, "out_of_bounds", "count")
    if average is not None or wrong is not None:
        claims.append(average_claim(average, busbws, wrong))
    return claims


def _json_claim(path: Path, common: dict[str, Any], placement: str, size: int, cells: dict[str, Any]) -> Claim:
    for name in ("alg_bw", "bus_bw"):
        if number(cells.get(name)) is None:
            raise UserError(f"{path}: {name} of {size:,} bytes is {cells.get(name)!r}; expected GB/s")
    values = (number(cells.get(name)) for name in ("time", "alg_bw", "bus_bw", "nwrong"))
    return row_claim(common, placement, size, *values)


def _json_part(content: dict[str, Any], name: str, field: str) -> float | None:
    part = content.get(name)
    return number(part.get(field)) if isinstance(part, dict) else None


def _json_setting(content: dict[str, Any]) -> dict[str, Any]:
    config = content.get("config")
    config = config if isinstance(config, dict) else {}
    devices = rows(config.get("devices"))
    threads, gpus = config.get("nthreads"), config.get("ngpus")
    # There is one entry per process, whatever its devices are; several groups are several communicators.
    groups = {device.get("group") for device in devices}
    ranks = None
    if devices and isinstance(threads, int) and isinstance(gpus, int) and threads * gpus > 0:
        total = len(devices) * threads * gpus
        ranks = total // len(groups) if total % len(groups) == 0 else None
    args = content.get("args")
    program = str(args[0]) if isinstance(args, list) and args else ""
    names = {str(device["device_info"]).strip() for device in devices if device.get("device_info")}
    return setting(operation_of(program) if program else "", ranks, names, _json_algorithm(content))


def _json_algorithm(content: dict[str, Any]) -> str:
    env = content.get("env")
    values = dict(str(item).partition("=")[::2] for item in env) if isinstance(env, list) else {}
    if values.get("NCCL_ALGO"):
        return forced_algorithm(values["NCCL_ALGO"])
    return WITHOUT_SWITCH if values.get("NCCL_NVLS_ENABLE") == "0" else ""


# --- text ----------------------------------------------------------------------------------------------------------------

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


@dataclass
class _Columns:
    """``names`` of a placement's columns; ``lead`` are the columns before them (size, count, type, redop, root)."""

    lead: int = 5
    names: list[str] = field(default_factory=lambda: ["time", "algbw", "busbw", "#wrong"])


def is_text(text: str) -> bool:
    """A header of nccl-tests, or rows of its form with a footer."""
    lines = [_bare(line) for line in text.splitlines()]
    if any(HEADER.match(line) for line in lines) or "# nThread " in text:
        return True
    return "bus bandwidth" in text and any(ROW.match(line) for line in lines)


def read_text(path: Path, text: str) -> list[Claim]:
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
            tests.append([])
            started = False
        started = started or line.startswith("# nThread ")
        tests[-1].append(line)
    return tests


def _test(path: Path, first: int, lines: list[str]) -> list[Claim]:
    common = _setting(lines)
    columns, claims, busbws = _Columns(), list[Claim](), list[float]()
    average: float | None = None
    wrong: float | None = None
    count = 0
    for line_number, line in enumerate(lines, first):
        header = HEADER.match(line)
        if header:
            columns = _columns(header[1].split())
        elif ROW.match(line):
            row = _row(path, line_number, line.split(), columns, common)
            claims += row
            count += 1
            busbws += [claim.collective.busbw_gbytes_per_s or 0.0 for claim in row if claim.collective]
        elif line.startswith("#") and "bus bandwidth" in line:
            average = _value(line.partition(":")[2].split()[:1])
        elif line.startswith("#") and "Out of bounds values" in line:
            wrong = _value(line.partition(":")[2].split()[:1])
    complete = count == _expected_rows(lines)
    if count and (average is not None or wrong is not None):
        claims.append(average_claim(average if complete else None, busbws if complete else [], wrong))
    return claims


def _bare(line: str) -> str:
    return PREFIX.sub("", line).rstrip()


def _setting(lines: Sequence[str]) -> dict[str, Any]:
    matches = [match for line in lines if (match := RANK.match(line))]
    ranks = {int(match[1]) for match in matches}
    groups = {match[2] for match in matches}
    # The list of devices is cut where it is long ("..."); several groups are several communicators.
    complete = bool(ranks) and ranks == set(range(len(ranks))) and not any(line.strip() == "..." for line in lines)
    count = len(ranks) // len(groups) if complete and len(ranks) % len(groups) == 0 else None
    named = [match[1] for line in lines if (match := PROGRAM.search(line))]
    named += [match[1] for line in lines if not ROW.match(line) and (match := COMMAND.search(line))]
    operations = {operation_of(name) for name in named}
    operation = operations.pop() if len(operations) == 1 else ""
    return setting(operation, count, {match[3].strip() for match in matches}, _algorithm(lines))


def _algorithm(lines: Sequence[str]) -> str:
    """Return the algorithm that the log of NCCL tells or the environment enforces, '' where neither does.

    A connected NVLS tree may be used and need not be: it stands for the algorithm that asks least of the links.
    """
    text = "\n".join(lines)
    forced = re.search(r"NCCL_ALGO[=: ]+(?:set by environment to )?\"?([\w^,:]+)", text)
    if forced:
        return forced_algorithm(forced[1])
    used = {algorithm_of(name) for name in re.findall(r"\bAlgo (\w+) proto", text, re.IGNORECASE)}
    if used:
        return used.pop() if len(used) == 1 else ""
    if re.search(r"NCCL_NVLS_ENABLE\s*(?:=|set by environment to)\s*0", text):
        return WITHOUT_SWITCH
    return "NVLS" if NVLS_READY.search(text) else ""


def _columns(names: Sequence[str]) -> _Columns:
    first = next((index for index, name in enumerate(names) if name in MEASURES), 0)
    measures = [name for name in names[first:] if name in MEASURES]
    half = len(measures) // 2
    if half and measures[:half] == measures[half:]:
        measures = measures[:half]
    return _Columns(3 + first, measures) if measures else _Columns()


def _row(path: Path, line: int, cells: list[str], columns: _Columns, common: dict[str, Any]) -> list[Claim]:
    wide, lead = len(columns.names), columns.lead
    if len(cells) == WITHOUT_ROOT and columns.lead + 2 * wide == WIDE_AS_TODAY:
        lead = 4
    values = cells[lead:]
    dated = bool(values[wide:]) and re.match(r"\d{4}-\d\d-\d\d$", values[wide])
    if len(values) < wide or (wide < len(values) < 2 * wide and not dated):
        raise UserError(
            f"{path}, line {line}: {len(cells)} columns where {lead + 2 * wide} were expected; the file may be cut"
        )
    blocks = [values[:wide], values[wide : 2 * wide]] if len(values) >= 2 * wide else [values[:wide]]
    claims = []
    for placement, block in zip(PLACEMENTS[-len(blocks) :], blocks, strict=True):
        numbers = {name: _value([cell]) for name, cell in zip(columns.names, block, strict=True)}
        broken = [cell for cell, value in zip(block, numbers.values(), strict=True) if value is None and cell != "N/A"]
        if broken:
            raise UserError(f"{path}, line {line}: {broken[0]!r} is not a number; the file may be cut")
        # The bandwidths were not computed from a column "cputime".
        stated = (numbers.get(name) for name in ("time", "algbw", "busbw", "#wrong"))
        claims.append(row_claim(common, placement, int(cells[0]), *stated))
    return claims


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
