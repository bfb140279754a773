"""Results of nccl-tests: read to stand beside those of a run, and written as nccl-tests prints them.

Rows that are read are ``claimed``: operation, placement ("out of place", "in place"), bytes (S: the larger side), ranks (None
where the file does not state them), time_us, algbw_gbps, busbw_gbps, wrong_elements (None where not checked), provenance,
source (the file's name).

Format: NVIDIA/nccl-tests, src/util.cu. Times are us, bandwidths GB/s (1e9), written with more digits than nccl-tests prints:
a slow fabric would show as 0.00. One test is written for each operation, type and reduction of the collective library's
own operations; barriers and the kit's own algorithms have no program of nccl-tests and are left out.
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchlib.core.errors import UserError
from benchlib.core.text import counted
from benchlib.judge.foreign.nccl import PROGRAMS
from benchlib.judge.foreign.readers import READERS, UnknownFormat, read_claims
from benchlib.judge.impossible.claim import Collective
from benchlib.judge.published import device_name
from benchlib.judge.snapshot import Snapshot
from benchlib.show.exports import put

PROGRAM_OF = {operation: program for program, operation in PROGRAMS.items()}
# Name in nccl-tests, bytes.
TYPES = {
    "fp32": ("float", 4),
    "fp16": ("half", 2),
    "bf16": ("bfloat16", 2),
    "int32": ("int32", 4),
    "int64": ("int64", 8),
    "uint8": ("uint8", 1),
}
REDUCTIONS = {"": "none", "product": "prod"}
# nccl-tests counts the elements of one rank's part where S is the sum of all parts.
PARTS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
HEADER = (
    f"#{'':60}{'out-of-place':^48}{'in-place':^48}\n"
    f"#{'size':>12}{'count':>14}{'type':>10}{'redop':>8}{'root':>8}" + f"{'time':>12}{'algbw':>12}{'busbw':>12}{'#wrong':>12}" * 2 + "\n"
    f"#{'(B)':>12}{'(elements)':>14}{'':>26}" + f"{'(us)':>12}{'(GB/s)':>12}{'(GB/s)':>12}{'':>12}" * 2
)  # fmt: skip
BITS = 8


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of nccl-tests or rccl-tests; ``UserError`` for any other file and one that is cut."""
    expected = "expected the text or JSON output of nccl-tests"
    try:
        name, claims = read_claims(path)
    except UnknownFormat as error:
        raise UserError(f"nccl_tests = {error}; {expected}") from None
    except UserError as error:
        raise UserError(f"nccl_tests = {error}") from None
    if name not in ("nccl-tests", "nccl-tests JSON"):
        what = READERS[name].what if name in READERS else "a run of the kit"
        raise UserError(f"nccl_tests = {path}: this is {what}; {expected}")
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
        rows.append(_claimed(item, claim.subject.rpartition(", ")[2], path.name))
    if not rows:
        raise UserError(f"nccl_tests = {path}: no row with a bandwidth; the test failed or the file is cut")
    return rows


def _claimed(item: Collective, placement: str, source: str) -> dict[str, Any]:
    algbw, busbw = item.algbw_gbytes_per_s, item.busbw_gbytes_per_s
    return {
        "operation": item.operation,
        "placement": placement,
        "bytes": item.size_bytes,
        "ranks": item.ranks,
        "time_us": 1e6 * item.seconds if item.seconds is not None else None,
        "algbw_gbps": BITS * algbw if algbw is not None else None,
        "busbw_gbps": BITS * busbw if busbw is not None else None,
        "wrong_elements": item.wrong_elements,
        "provenance": "claimed",
        "source": source,
    }


def write(runs: Sequence[Snapshot], output: str) -> str:
    """Write the series of each run as tests of nccl-tests; runs of other benchmarks are left out, none is a ``UserError``."""
    readable = [(run, groups) for run in runs if (groups := _groups(run))]
    if not readable:
        raise UserError("nccl-tests: no run measured a collective between ranks; name a run of collectives")
    texts = [_test(run, rows) for run, groups in readable for rows in groups]
    return put("\n".join(texts), output, f"{counted(len(texts), 'test')} of {counted(len(readable), 'run')}")


def _groups(run: Snapshot) -> list[list[dict[str, Any]]]:
    rows = run.result.tables.get("series", []) if run.result else []
    rows = [
        row
        for row in rows
        if row.get("variant") == "library" and row.get("operation") in PROGRAM_OF and row.get("dtype") in TYPES
        and isinstance(row.get("busbw_gbps"), (int, float))
    ]  # fmt: skip
    order = list(PROGRAM_OF)

    def kind(row: dict[str, Any]) -> tuple[int, str, str]:
        return order.index(row["operation"]), str(row["dtype"]), str(row.get("reduction") or "")

    return [list(group) for _, group in groupby(sorted(rows, key=kind), kind)]


def _test(run: Snapshot, rows: list[dict[str, Any]]) -> str:
    assert run.result is not None
    ranks, host = run.result.world_size, str(run.machine.get("host") or "host").replace(" ", "_")
    first = rows[0]
    device = device_name(run.machine, run.backend, ranks) or run.backend
    kind, width = TYPES[first["dtype"]]
    reduction = str(first.get("reduction") or "")
    lines = [
        f"# Collective test starting: {PROGRAM_OF[first['operation']]}_perf",
        f"# written by benchlib from {run.run}",
        "# Using devices",
        *(f"#  Rank {rank:3d} Group  0 Pid      0 on {host} device {rank:3d} [0x00] {device}" for rank in range(ranks)),
        "#",
        HEADER,
    ]
    count = ranks * width if first["operation"] in PARTS else width
    root = 0 if first["operation"] in ROOTED else -1
    for size in sorted({row["bytes"] for row in rows}):
        placements = {bool(row.get("in_place")): row for row in rows if row["bytes"] == size}
        cells = "".join(_cells(placements.get(in_place)) for in_place in (False, True))
        head = f"{size:>13}{size // count:>14}{kind:>10}{REDUCTIONS.get(reduction, reduction):>8}{root:>8}"
        lines.append(head + cells)
    wrong = sum(int(row.get("wrong_elements") or 0) for row in rows)
    mean = sum(row["busbw_gbps"] for row in rows) / len(rows) / BITS
    lines += [
        f"# Out of bounds values : {wrong} {'OK' if wrong == 0 else 'FAILED'}",
        f"# Avg bus bandwidth    : {mean:.6g}",
        f"# Collective test concluded: {PROGRAM_OF[first['operation']]}_perf",
        "",
    ]
    return "\n".join(lines)


def _cells(row: dict[str, Any] | None) -> str:
    # Five digits of a slow fabric take ten places (0.00093431): columns are wider, so that numbers stay apart.
    if row is None:
        return f"{'N/A':>12}{'N/A':>12}{'N/A':>12}{'N/A':>12}"
    rates = (row["algbw_gbps"] / BITS, row["busbw_gbps"] / BITS)
    return (
        f"{row['median_us']:>12.6g}"
        + "".join(f"{rate:>12.5g}" for rate in rates)
        + f"{int(row.get('wrong_elements') or 0):>12}"
    )
