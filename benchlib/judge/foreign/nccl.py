"""Output of nccl-tests and rccl-tests, as text or JSON.

Source of both formats: NVIDIA/nccl-tests, src/util.cu (older versions: src/common.cu); the JSON (``-J FILE``) is version 2
of that file. The text may have been collected by mpirun and srun; its columns are known by the header line. Times are in us,
GB/s are 1e9.
"""

import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasPath, BaseModel, BeforeValidator, Field, FiniteFloat

from benchlib.core.definitions import size_text
from benchlib.core.errors import UserError
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
NO_ROWS = "output of nccl-tests without a row of results; the test failed or the file is cut"
PLACEMENTS = ("out of place", "in place")
PREFIX = re.compile(r"^\s*(?:\[[\d, ]+\]\s*<std(?:out|err)>:|\[[\d, ]+\]:|\d+:\s)")  # of mpirun and srun --label
ROW = re.compile(r"^\s*\d+\s+\d+\s+[a-z][a-z0-9_]*\s")
HEADER = re.compile(r"^#\s+size\s+count\s+type\b(.*)$")
RANK = re.compile(r"^#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+\S+\s+device\s+\S+\s+\[[^\]]*\]\s*(.*)$")
PROGRAM = re.compile(r"Collective test (?:starting|concluded):\s*(\S+)")
COMMAND = re.compile(r"(?:^|[\s/])(\w+_perf)\b")
NVLS_READY = re.compile(r"NCCL INFO (?:Connected NVLS tree|NVLS comm 0x|NVLS multicast support is available)")
STEPS = re.compile(r"minBytes (\d+) maxBytes (\d+) step: (\d+)\((factor|bytes)\)")
MEASURES = ("time", "cputime", "algbw", "busbw", "#wrong", "error", "i_min", "i_max", "i_p99", "i_cv%")
# Columns before those of a placement (size, count, type, redop, root), and its own.
TODAY = (5, ["time", "algbw", "busbw", "#wrong"])


def operation_of(program: str) -> str:
    """Return the operation of a program's name or path: ``./build/all_reduce_perf`` -> ``all_reduce``."""
    name = program.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".exe").removesuffix("_perf")
    return PROGRAMS.get(name, name)


def forced_algorithm(value: str) -> str:
    """Return what NCCL_ALGO leaves; ``^NVLS,NVLSTree`` forbids, ``Ring,Tree`` allows, '' where several kinds are left."""
    value = value.strip().strip('"')
    if value.startswith("^"):
        return WITHOUT_SWITCH if {"NVLS", "NVLSTREE"} <= set(value[1:].upper().split(",")) else ""
    return value


def setting(
    operation: str, ranks: int, groups: Collection[Any], devices: Collection[str], algorithm: str
) -> dict[str, Any]:
    """Return the fields of a ``Collective`` that hold for all rows of a test; '' and None for what it does not state.

    Several groups are several communicators. The limit is what the links of the fastest device carry one way, unless a
    device or its links are unknown.
    """
    each = ranks // len(groups) if ranks > 0 and ranks % len(groups) == 0 else None
    fields: dict[str, Any] = {"operation": operation, "ranks": each, "algorithm": algorithm}
    peaks = [vendor_peak(device) for device in devices]
    links = [(peak.link_gbytes_per_s, peak.name) for peak in peaks if peak and peak.link_gbytes_per_s]
    if links and len(links) == len(peaks):
        rate, name = max(links)
        fields["bound_source"] = f"claimed for a rank's links, NVLink of the {name}"
        fields["bound_gbytes_per_s"] = rate
    return fields


def row_claim(common: dict[str, Any], placement: str, size_bytes: int, *numbers: float | None) -> Claim:
    """Return one row and placement as a claim; ``numbers`` are us, the two bandwidths in GB/s and the wrong elements."""
    time_us, algbw, busbw, wrong = numbers
    collective = Collective(
        size_bytes=size_bytes,
        seconds=1e-6 * time_us if time_us is not None else None,
        algbw_gbytes_per_s=algbw,
        busbw_gbytes_per_s=busbw,
        wrong_elements=wrong,
        **common,
    )
    return Claim(subject=f"{common['operation'] or 'row'} {size_text(size_bytes)}, {placement}", collective=collective)


def footer(claims: list[Claim], average: float | None, wrong: float | None, complete: bool = True) -> list[Claim]:
    """Return the claims of the rows with one of the footer, whose mean cannot be checked where rows may be missing."""
    if not claims or (average is None and wrong is None):
        return claims
    rates = [claim.collective.busbw_gbytes_per_s or 0.0 for claim in claims if claim.collective] if complete else []
    average = average if complete else None
    collective = Collective(average_busbw_gbytes_per_s=average, all_busbw_gbytes_per_s=rates, wrong_elements=wrong)
    return [*claims, Claim(subject="footer", collective=collective)]


# JSON


def _finite(value: Any) -> float | None:
    return value if type(value) in (int, float) and math.isfinite(value) else None


Maybe = Annotated[float | None, BeforeValidator(_finite)]


class _Cells(BaseModel):
    time: Maybe = None
    alg_bw: FiniteFloat
    bus_bw: FiniteFloat
    nwrong: Maybe = None


class _Row(BaseModel):
    size: int = Field(ge=0, strict=True)
    out_of_place: _Cells | None = None
    in_place: _Cells | None = None


class _Device(BaseModel):
    group: int = 0
    device_info: str = ""


class File(BaseModel):
    """What is read of the JSON."""

    args: list[str] = []
    env: list[str] = []
    devices: list[_Device] = Field([], validation_alias=AliasPath("config", "devices"))
    threads: int = Field(0, validation_alias=AliasPath("config", "nthreads"))
    gpus: int = Field(0, validation_alias=AliasPath("config", "ngpus"))
    results: list[_Row] = []
    average_busbw: Maybe = Field(None, validation_alias=AliasPath("average_bus_bandwidth", "bandwidth"))
    wrong: Maybe = Field(None, validation_alias=AliasPath("out_of_bounds", "count"))


def read_json(path: Path, file: File) -> list[Claim]:
    # There is one entry per process, whatever its devices are.
    ranks, groups = len(file.devices) * file.threads * file.gpus, {device.group for device in file.devices}
    env = dict(item.partition("=")[::2] for item in file.env)
    algorithm = forced_algorithm(env.get("NCCL_ALGO", ""))
    if not env.get("NCCL_ALGO") and env.get("NCCL_NVLS_ENABLE") == "0":
        algorithm = WITHOUT_SWITCH
    names = {device.device_info.strip() for device in file.devices} - {""}
    common = setting(operation_of(file.args[0]) if file.args else "", ranks, groups, names, algorithm)
    claims = [
        row_claim(common, placement, row.size, *vars(cells).values())
        for row in file.results
        for placement, cells in zip(PLACEMENTS, (row.out_of_place, row.in_place), strict=True)
        if cells
    ]
    if not claims:
        raise UserError(f"{path}: {NO_ROWS}")
    return footer(claims, file.average_busbw, file.wrong)


# Text


def sniff(_: Path, text: str) -> bool:
    return "# nThread " in text or any(HEADER.match(_bare(line)) for line in text.splitlines())


def read_text(path: Path, text: str) -> list[Claim]:
    """Return a claim for each row and placement, and one for each footer. A row that is cut is a ``UserError``."""
    claims, first = list[Claim](), 1
    for lines in _tests([_bare(line) for line in text.splitlines()]):
        claims += _test(path, first, lines)
        first += len(lines)
    if not claims:
        raise UserError(f"{path}: {NO_ROWS}")
    return claims


def _bare(line: str) -> str:
    return PREFIX.sub("", line).rstrip()


def _tests(lines: list[str]) -> list[list[str]]:
    """Split a log of several tests: each begins with its program's name or, in older versions, with its threads."""
    tests, started = [list[str]()], False
    for line in lines:
        threads = line.startswith("# nThread ")
        if "Collective test starting" in line or (threads and started):
            tests.append([])
            started = False
        started |= threads
        tests[-1].append(line)
    return tests


def _test(path: Path, first: int, lines: list[str]) -> list[Claim]:
    common, columns, claims, count = _setting(lines), TODAY, list[Claim](), 0
    average = wrong = None
    for place, line in enumerate(lines, first):
        if header := HEADER.match(line):
            columns = _columns(header[1].split())
        elif ROW.match(line):
            claims += _row(path, place, line.split(), columns, common)
            count += 1
        elif line.startswith("#") and "bus bandwidth" in line:
            average = _value(line.partition(":")[2])
        elif line.startswith("#") and "Out of bounds values" in line:
            wrong = _value(line.partition(":")[2])
    return footer(claims, average, wrong, complete=count == _expected_rows(lines))


def _setting(lines: Sequence[str]) -> dict[str, Any]:
    matches = [match for line in lines if (match := RANK.match(line))]
    ranks, groups = {int(match[1]) for match in matches}, {match[2] for match in matches}
    # The list of devices is cut where it is long ("...").
    complete = ranks == set(range(len(ranks))) and not any(line.strip() == "..." for line in lines)
    named = [match[1] for line in lines if (match := PROGRAM.search(line))]
    named += [match[1] for line in lines if not ROW.match(line) and (match := COMMAND.search(line))]
    operations = {operation_of(name) for name in named}
    operation, devices = operations.pop() if len(operations) == 1 else "", {match[3].strip() for match in matches}
    return setting(operation, len(ranks) * complete, groups, devices, _algorithm("\n".join(lines)))


def _algorithm(text: str) -> str:
    """Return the algorithm that the log of NCCL tells or the environment enforces, '' where neither does.

    A connected NVLS tree may be used and need not be: it stands for the algorithm that asks least of the links.
    """
    if forced := re.search(r"NCCL_ALGO[=: ]+(?:set by environment to )?\"?([\w^,:]+)", text):
        return forced_algorithm(forced[1])
    if used := set(re.findall(r"\bAlgo (\w+) proto", text, re.IGNORECASE)):
        name = used.pop() if len(used) == 1 else ""
        return ALGORITHMS[int(name)] if name.isdecimal() and int(name) < len(ALGORITHMS) else name
    if re.search(r"NCCL_NVLS_ENABLE\s*(?:=|set by environment to)\s*0", text):
        return WITHOUT_SWITCH
    return "NVLS" if NVLS_READY.search(text) else ""


def _columns(names: Sequence[str]) -> tuple[int, list[str]]:
    first = next((index for index, name in enumerate(names) if name in MEASURES), 0)
    measures = [name for name in names[first:] if name in MEASURES]
    half = len(measures) // 2
    if half and measures[:half] == measures[half:]:
        measures = measures[:half]
    return (3 + first, measures) if measures else TODAY


def _row(
    path: Path, line: int, cells: list[str], columns: tuple[int, list[str]], common: dict[str, Any]
) -> list[Claim]:
    lead, names = columns
    values, wide = cells[lead:], len(names)
    dated = bool(values[wide:]) and re.match(r"\d{4}-\d\d-\d\d$", values[wide])
    if len(values) < wide or (wide < len(values) < 2 * wide and not dated):
        expected = f"{len(cells)} columns where {lead + 2 * wide} were expected"
        raise UserError(f"{path}, line {line}: {expected}; the file may be cut")
    blocks = [values[:wide], values[wide : 2 * wide]] if len(values) >= 2 * wide else [values[:wide]]
    claims = []
    for placement, block in zip(PLACEMENTS[-len(blocks) :], blocks, strict=True):
        numbers = dict(zip(names, map(_value, block), strict=True))
        if broken := [cell for cell in block if _value(cell) is None and cell != "N/A"]:
            raise UserError(f"{path}, line {line}: {broken[0]!r} is not a number; the file may be cut")
        # The bandwidths were not computed from a column "cputime".
        stated = (numbers.get(name) for name in ("time", "algbw", "busbw", "#wrong"))
        claims.append(row_claim(common, placement, int(cells[0]), *stated))
    return claims


def _value(text: str) -> float | None:
    """Return the finite number that a text begins with, None where it does not."""
    try:
        value = float(text.split()[0])
    except (ValueError, IndexError):
        return None
    return value if math.isfinite(value) else None


def _expected_rows(lines: Sequence[str]) -> int:
    """Return how many sizes the header announces; -1 where it does not, or no steps lead from one size to the other."""
    match = next(filter(None, map(STEPS.search, lines)), None)
    size, most, step = map(int, match.groups()[:3]) if match else (0, 0, 0)
    if match and match[4] == "bytes" and step:
        return (most - size) // step + 1
    return int(math.log(most / size, step) + 1e-9) + 1 if 0 < size <= most and step > 1 else -1
