"""Output of nccl-tests and rccl-tests, as text or JSON.

Source of both formats: NVIDIA/nccl-tests, src/util.cu (older versions: src/common.cu); the JSON (``-J FILE``) is version 2
of that file. The text may have been collected by mpirun and srun; its columns are known by the header line. Times are in us,
GB/s are 1e9.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import AliasPath, BaseModel, Field

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
PLACEMENTS = ("out of place", "in place")
PREFIX = re.compile(r"^\s*(?:\[[\d, ]+\]\s*<std(?:out|err)>:|\[[\d, ]+\]:|\d+:\s)", re.M)  # of mpirun and srun --label
HEADER = re.compile(r"^#\s+(size\s+count\s+type\b.*)$", re.MULTILINE)
ROW = re.compile(r"^\s*\d+\s+\d+\s+[a-z][a-z0-9_]*\s")
RANK = re.compile(
    r"^#\s+Rank\s+\d+\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+\S+\s+device\s+\S+\s+\[[^\]]*\]\s*(.*)$", re.M
)
PROGRAM = re.compile(r"(?:^|[\s/])(\w+)_perf\b")
ALGORITHM = re.compile(r'NCCL_ALGO(?:=| set by environment to )"?([a-z]+)(?![\w,;:])|\bAlgo ([a-z]+) proto', re.I)
WRONG = re.compile(r"^#\s*Out of bounds values\s*:\s*(\d+)", re.MULTILINE)


def _claims(
    path: Path,
    programs: Collection[str],
    ranks: int,
    groups: Collection[Any],
    devices: Collection[str],
    log: str,
    rows: list[tuple[int, str, list[float | None]]],
    wrong: float | None,
) -> list[Claim]:
    """Return a claim for each size and placement (us, the two bandwidths in GB/s, wrong elements), and one for the footer.

    Several groups are several communicators. The limit is what the links of the fastest device carry one way, unless a
    device or its links are unknown.
    """
    if not rows:
        raise UserError(f"{path}: output of nccl-tests without a row of results; the test failed or the file is cut")
    program = next(iter(programs)) if len(programs) == 1 else ""
    algorithms = {(forced or used).upper() for forced, used in ALGORITHM.findall(log)}
    common: dict[str, Any] = {
        "operation": PROGRAMS.get(program, program),
        "ranks": ranks // len(groups) if ranks and ranks % len(groups) == 0 else None,
        "algorithm": algorithms.pop() if len(algorithms) == 1 else "",
    }
    peaks = [vendor_peak(device) for device in devices]
    links = [(peak.link_gbytes_per_s, peak.name) for peak in peaks if peak and peak.link_gbytes_per_s]
    if links and len(links) == len(peaks):
        rate, name = max(links)
        common |= {"bound_gbytes_per_s": rate, "bound_source": f"claimed for a rank's links, NVLink of the {name}"}
    claims = []
    for size, placement, (time_us, algbw, busbw, count) in rows:
        numbers = {"algbw_gbytes_per_s": algbw, "busbw_gbytes_per_s": busbw, "wrong_elements": count}
        seconds = None if time_us is None else 1e-6 * time_us
        collective = Collective(size_bytes=size, seconds=seconds, **numbers, **common)
        claims.append(
            Claim(subject=f"{common['operation'] or 'row'} {size_text(size)}, {placement}", collective=collective)
        )
    footer = [Claim(subject="footer", collective=Collective(wrong_elements=wrong))]
    return claims + footer * (wrong is not None)


class _Cells(BaseModel):
    time: float | None = None
    alg_bw: float | None = None
    bus_bw: float | None = None
    nwrong: float | None = None


class _Row(BaseModel):
    size: int = Field(ge=0)
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
    wrong: float | None = Field(None, validation_alias=AliasPath("out_of_bounds", "count"))


def read_json(path: Path, file: File) -> list[Claim]:
    rows = [
        (row.size, placement, list(vars(cells).values()))
        for row in file.results
        for placement, cells in zip(PLACEMENTS, (row.out_of_place, row.in_place), strict=True)
        if cells
    ]
    # There is one entry per process, whatever its devices are.
    ranks, groups = len(file.devices) * file.threads * file.gpus, {device.group for device in file.devices}
    devices, programs = (
        {device.device_info.strip() for device in file.devices} - {""},
        set(PROGRAM.findall("".join(file.args[:1]))),
    )
    return _claims(path, programs, ranks, groups, devices, "\n".join(file.env), rows, file.wrong)


def sniff(_: Path, text: str) -> bool:
    return "# nThread " in text or bool(HEADER.search(PREFIX.sub("", text)))


def read_text(path: Path, text: str) -> list[Claim]:
    """Return the claims of every test of a log; each test begins with its program's name or, in older versions, with its threads.

    A row that is cut is a ``UserError``.
    """
    text = PREFIX.sub("", text)
    begin = "# Collective test starting" if "# Collective test starting" in text else "# nThread "
    first, *tests = re.split(f"(?m)^(?={begin})", text)
    claims = list[Claim]()
    for test in tests or [first]:
        devices, wrong = RANK.findall(test), WRONG.search(test)
        # The list of devices is cut where it is long ("...").
        ranks = 0 if re.search(r"(?m)^\W*\.\.\.\W*$", test) else len(devices)
        programs = set(PROGRAM.findall(test if "starting" in begin else text))
        groups, names = {group for group, _ in devices}, {name.strip() for _, name in devices}
        rows = _rows(path, test)
        claims += _claims(path, programs, ranks, groups, names, text, rows, float(wrong[1]) if wrong else None)
    return claims


def _rows(path: Path, test: str) -> list[tuple[int, str, list[float | None]]]:
    header = HEADER.search(test)
    heads = header[1].split() if header else []
    starts = [place for place, head in enumerate(heads) if head in ("time", "cputime")]
    rows = []
    for cells in [line.split() for line in test.splitlines() if starts and ROW.match(line)]:
        if len(cells) < len(heads):
            raise UserError(f"{path}: a row of {len(cells)} columns under {len(heads)} headings; the file may be cut")
        for placement, start in zip(PLACEMENTS[-len(starts) :], starts, strict=True):
            stated = dict(zip(heads[start:][: len(heads[starts[-1] :])], cells[start:], strict=False))
            # The bandwidths were not computed from a column "cputime".
            numbers = [stated.get(name, "N/A") for name in ("time", "algbw", "busbw", "#wrong")]
            rows.append((int(cells[0]), placement, [None if cell == "N/A" else float(cell) for cell in numbers]))
    return rows
