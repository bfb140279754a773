"""Output of nccl-tests and rccl-tests: judged, read to stand beside the series of a run, and written as nccl-tests prints it.

Format: NVIDIA/nccl-tests, src/util.cu (older versions: src/common.cu); ROCm/rccl-tests, src/common.cu, for its CSV. Times are us,
bandwidths GB/s (1e9). What is read may have been collected by mpirun and srun; its columns are known by the header line. What is
written has more digits than nccl-tests prints: a slow fabric would show as 0.00. Its times are those of single operations, and the
file says so. Barriers and the kit's own algorithms have no program of nccl-tests and are left out.
"""

import csv
import math
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchlib.benchmarks.collectives.config import PLACEMENTS
from benchlib.core.definitions import algbw_gbps, busbw_gbps, size_text
from benchlib.core.errors import UserError
from benchlib.core.text import counted
from benchlib.judge.foreign.readers import Reader, read_claims
from benchlib.judge.impossible.claim import Claim, Collective, Mean, Quantity, Verdict
from benchlib.judge.published import device_name
from benchlib.judge.references import vendor_peak
from benchlib.results.record import Record
from benchlib.show.exports import put
from benchlib.workloads.operations import OPS, TYPES

FORMAT = "nccl-tests"
# The programs (without _perf) and the operation they time; others have no factor that is agreed on.
SPELLED = {"all_to_all": "alltoall", "send_recv": "sendrecv"}
PROGRAM_OF = {name: SPELLED.get(name, name) for name in OPS if name != "barrier"}
PROGRAMS = {program: operation for operation, program in PROGRAM_OF.items()}
# A log collector may put its own words before each line (mpirun, srun --label, kubectl logs, pdsh, docker compose).
HEADS = re.compile(r"#\s+(size\s+count\s+type\b.*)$", re.MULTILINE)
ROW = re.compile(r"(?:^|[\s>:|])(\d+\s+\d+\s+[a-z][a-z0-9_]*\s.*)$")
RANK = re.compile(
    r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+\S+\s+device\s+\S+\s+\[[^\]]*\]\s*(.*)$", re.M
)
STEPS = re.compile(r"minBytes (\d+) maxBytes (\d+) step: (\d+)\((factor|bytes)\)")
TIMES = ("time", "cputime")  # of which the second is that of the launch, and no bandwidth follows from it
KNOWN = {"size", "count", "type", "redop", "root", "algbw", "busbw", "#wrong", "error", "time"}
PROGRAM = re.compile(r"(?:^|[\s/])(\w+)_perf\b")
ALGORITHM = re.compile(r'NCCL_ALGO(?:=| set by environment to )"?([a-z]+)(?![\w,;:])|\bAlgo ([a-z]+) proto', re.I)
WRONG = re.compile(r"#\s*Out of bounds values\s*:\s*(\d+)")
AVERAGE = re.compile(r"#\s*Avg bus bandwidth\s*:\s*(\S+)[ \t]*(FAILED)?")
FAILURE = re.compile(r"\bTest (?:NCCL|CUDA|HIP) failure\b.*")
CSV = re.compile(r"^\W*collective\W.*\bbusbw\b", re.IGNORECASE)  # of rccl-tests, --output_format csv
NAMES = {"fp32": "float", "fp16": "half", "bf16": "bfloat16", "": "none", "product": "prod"}  # others are the same
HEADER = (
    f"#{'':60}{'out-of-place':^48}{'in-place':^48}\n"
    f"#{'size':>12}{'count':>14}{'type':>10}{'redop':>8}{'root':>8}" + f"{'time':>12}{'algbw':>12}{'busbw':>12}{'#wrong':>12}" * 2 + "\n"
    f"#{'(B)':>12}{'(elements)':>14}{'':>26}" + f"{'(us)':>12}{'(GB/s)':>12}{'(GB/s)':>12}{'':>12}" * 2
)  # fmt: skip
BITS = 8


def claims(path: Path, text: str) -> list[Claim]:
    """Return a claim for each size and placement of every test of a log, and one for each footer.

    A test begins with its program's name or, in older versions, with its threads. A row that is cut is a ``UserError``.
    """
    if CSV.match(text):
        return list(_of_csv(path, text))
    begin = "# Collective test starting" if "# Collective test starting" in text else "# nThread "
    first, *tests = re.split(f"(?m)^(?=.*{begin})", text)
    algorithms = {(forced or used).upper() for forced, used in ALGORITHM.findall(text)}
    algorithm, stated = algorithms.pop() if len(algorithms) == 1 else "", list[Claim]()
    for test in tests:
        _refuse_mixed(path, test)
    for test in tests or [first]:
        programs = set(PROGRAM.findall(test if "starting" in begin else text))
        program = programs.pop() if len(programs) == 1 else ""
        common = {"operation": PROGRAMS.get(program, program), "algorithm": algorithm} | _devices(test)
        rows = list(_rows(path, test))
        if not rows:
            raise UserError(
                f"{path}: output of nccl-tests without a row of results; the test failed or the file is cut"
            )
        stated += [_claim(f"{common['operation'] or 'row'} {place}", numbers | common) for place, numbers in rows]
        stated += _footer(test, [numbers for _, numbers in rows])
    return stated


def _claim(subject: str, numbers: dict[str, Any]) -> Claim:
    """Return the claim of a row; what is below zero or not finite stands as such."""
    rates = ("seconds", "algbw_gbytes_per_s", "busbw_gbytes_per_s")
    wrong = {name: numbers[name] for name in rates if numbers[name] is not None and not 0 <= numbers[name] < math.inf}
    quantities = [Quantity(name=name, value=value if math.isfinite(value) else None) for name, value in wrong.items()]
    return Claim(subject=subject, collective=Collective(**numbers | dict.fromkeys(wrong)), quantities=quantities)


def _footer(test: str, rows: list[dict[str, Any]]) -> Iterator[Claim]:
    """Yield what a test says of itself: its wrong elements, its average, and whether it FAILED."""
    if wrong := WRONG.search(test):
        yield Claim(subject="footer", collective=Collective(wrong_elements=float(wrong[1])))
    average, failure = AVERAGE.search(test), FAILURE.search(test)
    rates = [row["busbw_gbytes_per_s"] for row in rows if row["busbw_gbytes_per_s"] is not None]
    # Of a part of the rows no average follows.
    whole = average and rates and len({row["size_bytes"] for row in rows}) == _sizes(test)
    if average and whole and all(map(math.isfinite, [float(average[1]), *rates])):
        mean = Mean(name="busbw of all rows", stated=float(average[1]), values=rates, unit="GB/s")
        yield Claim(subject="footer", averages=[mean])
    if failure or (average and average[2]):
        unmet = failure[0].strip() if failure else "average bus bandwidth of NCCL_TESTS_MIN_BW"
        yield Claim(subject="the test, FAILED", verdict=Verdict(valid=False, unmet=[unmet]))


def _sizes(test: str) -> int:
    """Return how many sizes the first line of a test announces; 0 where it does not."""
    if not (match := STEPS.search(test)):
        return 0
    size, most, step = map(int, match.groups()[:3])
    if match[4] == "bytes":
        return (most - size) // max(step, 1) + 1
    count = 0
    while 0 < size <= most and step > 1:
        size, count = size * step, count + 1
    return count


def _refuse_mixed(path: Path, test: str) -> None:
    """Raise ``UserError`` for lines of several processes that ran a test each, at once."""
    ranks = [(rank, group) for rank, group, _ in RANK.findall(test)]
    if len(HEADS.findall(test)) > 1 or len(set(ranks)) < len(ranks):
        raise UserError(
            f"{path}: the lines of several tests are mixed: each process ran a test of its own, as programs without MPI do "
            "under mpirun or srun. Build nccl-tests with MPI=1, or keep the lines of one process"
        )


def _of_csv(path: Path, text: str) -> Iterator[Claim]:
    """Yield a claim for each row of rccl-tests' CSV, by its last columns: with MPI a row has one more than the header names."""
    header, *lines = csv.reader(text.splitlines(), skipinitialspace=True)
    heads = [head.strip().lower() for head in header]
    operations = {name.replace("_", ""): name for name in PROGRAM_OF}
    if lacking := [name for name in ("size", "time", "algbw", "busbw") if name not in heads]:
        raise UserError(f"{path}: CSV of rccl-tests without a column {', '.join(lacking)}")
    for cells in filter(None, lines):
        if not 0 <= len(cells) - len(heads) <= 1:
            raise UserError(f"{path}: a row of {len(cells)} columns under {len(heads)} headings; the file may be cut")
        row = dict(zip(heads[::-1], [cell.strip() for cell in cells[::-1]], strict=False))
        # With several devices a rank, what is counted as ranks depends on the version.
        ranks = row.get("gpus") or (row.get("ranks") if row.get("gpusperrank") == "1" else None)
        operation = operations.get(cells[0].lower(), cells[0].lower())
        numbers = _numbers(
            int(row["size"]), row["time"], row["algbw"], row["busbw"], row.get("#wrong", row.get("wrong", "N/A"))
        )
        place = PLACEMENTS[row.get("inplace") == "1"]
        subject = f"{operation} {size_text(int(row['size']))}, {place}"
        yield _claim(subject, numbers | {"operation": operation, "ranks": int(ranks) if ranks else None})


def _numbers(size: int, time: str, algbw: str, busbw: str, wrong: str) -> dict[str, Any]:
    """Return the numbers of a row by the fields of a claim; of a placement that was not run there are none."""
    seconds, *rates, elements = (None if cell == "N/A" else float(cell) for cell in (time, algbw, busbw, wrong))
    names = ("size_bytes", "seconds", "algbw_gbytes_per_s", "busbw_gbytes_per_s", "wrong_elements")
    return dict(zip(names, (size, seconds and 1e-6 * seconds, *rates, elements), strict=True))


def _devices(test: str) -> dict[str, Any]:
    """Return the ranks, and what the links of the fastest device carry one way unless a device or its links are unknown."""
    devices, stated = RANK.findall(test), dict[str, Any]()
    cut = re.search(r"(?m)^\W*\.\.\.\W*$", test)  # the list is cut where it is long
    if devices and not cut and len({group for _, group, _ in devices}) == 1:  # several groups are several communicators
        stated["ranks"] = len(devices)
    peaks = [vendor_peak(name.strip()) for *_, name in devices]
    links = [(peak.link_gbytes_per_s, peak.name) for peak in peaks if peak and peak.link_gbytes_per_s]
    if links and len(links) == len(peaks):
        rate, name = max(links)
        stated |= {"bound_gbytes_per_s": rate, "bound_source": f"claimed for a rank's links, NVLink of the {name}"}
    return stated


def _rows(path: Path, test: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield size and placement of each row in words, and its numbers by the fields of a claim."""
    header = HEADS.search(test)
    heads = header[1].split() if header else []
    starts = [place for place, head in enumerate(heads) if head in TIMES]
    if starts and starts[-1] + 4 > len(heads):
        raise UserError(f"{path}: the headings of nccl-tests end after {heads[-1]}; the file may be cut")
    for match in filter(None, map(ROW.search, test.splitlines() if starts else [])):
        cells = match[1].split()
        # Operations that reduce nothing leave that column blank.
        if "redop" in heads and 3 < len(cells) < len(heads) and re.match(r"-?\d", cells[heads.index("redop")]):
            cells.insert(heads.index("redop"), "")
        if len(cells) < len(heads):
            raise UserError(f"{path}: a row of {len(cells)} columns under {len(heads)} headings; the file may be cut")
        for placement, start in zip(PLACEMENTS[-len(starts) :], starts, strict=True):
            time, *others = cells[start : start + 4]
            numbers = _numbers(int(cells[0]), time if heads[start] == "time" else "N/A", *others)
            if heads[start + 3] != "#wrong":  # older versions print a difference there
                numbers["wrong_elements"] = None
            yield f"{size_text(int(cells[0]))}, {placement}", numbers


def not_read(path: Path, text: str) -> list[str]:
    """Return the columns that no rule sees, and which operations have no factor that the bus bandwidth could be held against."""
    heads = [] if CSV.match(text) else [head for line in HEADS.findall(text) for head in line.split()]
    read = claims(path, text)
    operations = {claim.collective.operation for claim in read if claim.collective and claim.collective.size_bytes}
    named = [f"the bus bandwidth of {name} (no factor is agreed on)" for name in sorted(operations - {"", *PROGRAM_OF})]
    unnamed = ["the bus bandwidth: the file does not name its program (all_reduce_perf or the like)"] * (
        "" in operations
    )
    return [*dict.fromkeys(head for head in heads if head not in KNOWN), *named, *unnamed]


READERS = {
    FORMAT: Reader(
        "output of nccl-tests or rccl-tests",
        claims,
        sniff=lambda _, text: "# nThread " in text or bool(HEADS.search(text)) or bool(CSV.match(text)),
        unread=not_read,
    )
}


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of nccl-tests or rccl-tests; ``UserError`` for any other file and one that is cut."""
    expected = "expected the output of nccl-tests"
    try:
        name, claims = read_claims(path)
    except UserError as error:
        raise UserError(f"nccl_tests = {error}; {expected}") from None
    if name != FORMAT:
        raise UserError(f"nccl_tests = {path}: this is a {name}; {expected}")
    rows = []
    for claim in claims:
        item = claim.collective
        if item is None or item.size_bytes is None or item.busbw_gbytes_per_s is None:
            continue  # a footer, or a placement that was not run
        if not item.operation:
            raise UserError(
                f"nccl_tests = {path}: the file does not name its program (all_reduce_perf or the like): keep the lines "
                "before the table, or the command that made it"
            )
        numbers = {"ranks": (1, item.ranks), "wrong_elements": (1, item.wrong_elements), "time_us": (1e6, item.seconds)}
        numbers |= {"algbw_gbps": (BITS, item.algbw_gbytes_per_s), "busbw_gbps": (BITS, item.busbw_gbytes_per_s)}
        cells = {name: by * value for name, (by, value) in numbers.items() if value is not None}
        why = dict.fromkeys(numbers.keys() - cells.keys(), "the file does not state it")
        place = {"operation": item.operation, "placement": claim.subject.rpartition(", ")[2], "bytes": item.size_bytes}
        rows.append(place | cells | {"source": path.name, "why": why})
    if not rows:
        raise UserError(f"nccl_tests = {path}: no row with a bandwidth; the test failed or the file is cut")
    return rows


def write(runs: Sequence[Record], output: str) -> str:
    """Write the series of each run as tests of nccl-tests; runs of other benchmarks are left out, none is a ``UserError``."""
    readable = [(run, groups) for run in runs if (groups := _groups(run))]
    if not readable:
        raise UserError("nccl-tests: no run measured a collective between ranks; name a run of collectives")
    texts = [_test(run, rows) for run, groups in readable for rows in groups]
    return put("\n".join(texts), output, f"{counted(len(texts), 'test')} of {counted(len(readable), 'run')}")


def _groups(run: Record) -> list[list[dict[str, Any]]]:
    rows = run.result.tables.get("series", []) if run.result and run.result.world_size > 1 else []
    order = list(PROGRAM_OF)

    def kind(row: dict[str, Any]) -> tuple[int, str, str]:
        return order.index(row["operation"]), row["dtype"], row["reduction"]

    rows = [row for row in rows if row.get("variant") == "library" and row.get("operation") in order]
    return [list(group) for _, group in groupby(sorted(rows, key=kind), kind)]


def _test(run: Record, rows: list[dict[str, Any]]) -> str:
    assert run.result is not None
    ranks, host = run.result.world_size, str(run.machine.get("host") or "host").replace(" ", "_")
    device, op = device_name(run.machine, run.backend, ranks) or run.backend, OPS[rows[0]["operation"]]
    dtype, reduction = (NAMES.get(rows[0][name], rows[0][name]) for name in ("dtype", "reduction"))
    lines = [
        f"# Collective test starting: {PROGRAM_OF[op.name]}_perf",
        f"# written by benchlib from {run.run}; a time is the median of single operations, from the host, of the slowest rank",
        "# (nccl-tests: 20 operations that are enqueued together, over 20, averaged over the ranks)",
        "# Using devices",
        *(f"#  Rank {rank:3d} Group  0 Pid      0 on {host} device {rank:3d} [0x00] {device}" for rank in range(ranks)),
        "#",
        HEADER,
    ]
    # nccl-tests counts the elements of one rank's part where S is the sum of all parts.
    count = TYPES[rows[0]["dtype"]][1] * (ranks if op.parts_given or op.parts_got else 1)
    root = 0 if op.ends == "root" else -1
    for size in sorted({row["bytes"] for row in rows}):
        placements = {row["in_place"]: row for row in rows if row["bytes"] == size}
        cells = "".join(_cells(placements.get(in_place), ranks) for in_place in (False, True))
        lines.append(f"{size:>13}{size // count:>14}{dtype:>10}{reduction:>8}{root:>8}" + cells)
    wrong = sum(row["wrong_elements"] for row in rows)
    mean = sum(_busbw(row, ranks) for row in rows) / len(rows)
    lines += [
        f"# Out of bounds values : {wrong} {'OK' if wrong == 0 else 'FAILED'}",
        f"# Avg bus bandwidth    : {mean:.6g}",
        f"# Collective test concluded: {PROGRAM_OF[op.name]}_perf",
        "",
    ]
    return "\n".join(lines)


def _busbw(row: dict[str, Any], ranks: int) -> float:
    return busbw_gbps(row["operation"], row["bytes"], 1e-6 * row["times_us"], ranks) / BITS


def _cells(row: dict[str, Any] | None, ranks: int) -> str:
    # Five digits of a slow fabric take ten places (0.00093431): columns are wider, so that numbers stay apart.
    if row is None:
        return f"{'N/A':>12}" * 4
    algbw = algbw_gbps(row["bytes"], 1e-6 * row["times_us"]) / BITS
    return f"{row['times_us']:>12.6g}{algbw:>12.5g}{_busbw(row, ranks):>12.5g}{row['wrong_elements']:>12}"
