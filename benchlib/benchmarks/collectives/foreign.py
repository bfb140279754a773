"""Output of nccl-tests and rccl-tests: judged, read to stand beside the series of a run, and written as nccl-tests prints it.

Format: NVIDIA/nccl-tests, src/util.cu (older versions: src/common.cu). Times are us, bandwidths GB/s (1e9). What is read may have been
collected by mpirun and srun; its columns are known by the header line. What is written has more digits than nccl-tests prints:
a slow fabric would show as 0.00. Barriers and the kit's own algorithms have no program of nccl-tests and are left out.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchlib.core.definitions import algbw_gbps, busbw_gbps, size_text
from benchlib.core.errors import UserError
from benchlib.core.text import counted
from benchlib.judge.foreign.readers import Reader, read_claims
from benchlib.judge.impossible.claim import Claim, Collective
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
PLACEMENTS = ("out of place", "in place")
# Of mpirun, srun --label, and kubectl logs with --prefix or --timestamps.
PREFIX = re.compile(
    r"^\s*(?:\[[\d, ]+\]\s*<std(?:out|err)>:|\[[\d, ]+\]:|\d+:\s|\[pod/\S+\]\s|\d{4}-\d\d-\d\dT\S+\s)", re.M
)
HEADS = re.compile(r"^#\s+(size\s+count\s+type\b.*)$", re.MULTILINE)
ROW = re.compile(r"^\s*\d+\s+\d+\s+[a-z][a-z0-9_]*\s")
RANK = re.compile(
    r"^#\s+Rank\s+\d+\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+\S+\s+device\s+\S+\s+\[[^\]]*\]\s*(.*)$", re.M
)
PROGRAM = re.compile(r"(?:^|[\s/])(\w+)_perf\b")
ALGORITHM = re.compile(r'NCCL_ALGO(?:=| set by environment to )"?([a-z]+)(?![\w,;:])|\bAlgo ([a-z]+) proto', re.I)
WRONG = re.compile(r"^#\s*Out of bounds values\s*:\s*(\d+)", re.MULTILINE)
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
    text = PREFIX.sub("", text)
    begin = "# Collective test starting" if "# Collective test starting" in text else "# nThread "
    first, *tests = re.split(f"(?m)^(?={begin})", text)
    algorithms = {(forced or used).upper() for forced, used in ALGORITHM.findall(text)}
    algorithm, stated = algorithms.pop() if len(algorithms) == 1 else "", list[Claim]()
    for test in tests or [first]:
        programs = set(PROGRAM.findall(test if "starting" in begin else text))
        program = programs.pop() if len(programs) == 1 else ""
        common = {"operation": PROGRAMS.get(program, program), "algorithm": algorithm} | _devices(test)
        rows = list(_rows(path, test))
        if not rows:
            raise UserError(
                f"{path}: output of nccl-tests without a row of results; the test failed or the file is cut"
            )
        for place, numbers in rows:
            subject = f"{common['operation'] or 'row'} {place}"
            stated.append(Claim(subject=subject, collective=Collective(**numbers, **common)))
        if wrong := WRONG.search(test):
            stated.append(Claim(subject="footer", collective=Collective(wrong_elements=float(wrong[1]))))
    return stated


def _devices(test: str) -> dict[str, Any]:
    """Return the ranks, and what the links of the fastest device carry one way unless a device or its links are unknown."""
    devices, stated = RANK.findall(test), dict[str, Any]()
    cut = re.search(r"(?m)^\W*\.\.\.\W*$", test)  # the list is cut where it is long
    if devices and not cut and len({group for group, _ in devices}) == 1:  # several groups are several communicators
        stated["ranks"] = len(devices)
    peaks = [vendor_peak(name.strip()) for _, name in devices]
    links = [(peak.link_gbytes_per_s, peak.name) for peak in peaks if peak and peak.link_gbytes_per_s]
    if links and len(links) == len(peaks):
        rate, name = max(links)
        stated |= {"bound_gbytes_per_s": rate, "bound_source": f"claimed for a rank's links, NVLink of the {name}"}
    return stated


def _rows(path: Path, test: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield size and placement of each row in words, and its numbers by the fields of a claim."""
    header = HEADS.search(test)
    heads = header[1].split() if header else []
    starts = [place for place, head in enumerate(heads) if head == "time"]
    for cells in [line.split() for line in test.splitlines() if starts and ROW.match(line)]:
        if len(cells) < len(heads):
            raise UserError(f"{path}: a row of {len(cells)} columns under {len(heads)} headings; the file may be cut")
        for placement, start in zip(PLACEMENTS[-len(starts) :], starts, strict=True):
            named = zip(heads[start : start + 4], cells[start : start + 4], strict=True)
            row = {head: None if cell == "N/A" else float(cell) for head, cell in named}
            yield (
                f"{size_text(int(cells[0]))}, {placement}",
                {
                    "size_bytes": int(cells[0]),
                    "seconds": None if row["time"] is None else 1e-6 * row["time"],
                    "algbw_gbytes_per_s": row["algbw"],
                    "busbw_gbytes_per_s": row["busbw"],
                    "wrong_elements": row.get("#wrong"),
                },
            )


READERS = {
    FORMAT: Reader(
        "output of nccl-tests or rccl-tests",
        claims,
        sniff=lambda _, text: "# nThread " in text or bool(HEADS.search(PREFIX.sub("", text))),
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
        f"# written by benchlib from {run.run}",
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
