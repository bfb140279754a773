"""Results of parity as files that are committed: ``<backend>/test_results.json``, ``cross_backend_validation.json``, ``PARITY.md``.

The same results give the same bytes, in an order that does not depend on who merged them when, so that a change in a
repository shows what changed. Ages count from the newest result, not from the day of merging.
"""

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from benchlib.benchmarks.parity.config import MEMBERS
from benchlib.benchmarks.parity.matrix import (
    FILE,
    SCHEMA,
    WHOLE,
    MemberResult,
    Merged,
    ResultFile,
    RunResult,
    signed,
    standing,
    versions,
    word,
)
from benchlib.core.files import write_text
from benchlib.core.machine import BACKENDS
from benchlib.core.text import counted
from benchlib.show.markup import escaped

CROSS = "cross_backend_validation.json"
PAGE = "PARITY.md"
_RUN = re.compile(r"[^/]+-\d{8}/[^/]+(?:/[^/]+)?$")  # as benchlib.results.run names the folders of runs
OLD_DAYS = 30  # behind the newest result: then the page says so
WORDS = {
    "PASS": "within every gating tolerance",
    "FAIL": "beyond a tolerance, or crashed",
    "DIFFERS": "beyond a tolerance, in a member that does not gate",
    "SKIPPED": "did not run, with the reason",
    "NOT COMPARED": "nothing to compare with; never a PASS",
}


def write(merged: Merged, folder: Path, untouched: Iterable[str] = ()) -> list[Path]:
    """Write the files of merged results and return them. Files of the backends ``untouched`` stay as they are."""
    paths = []
    for backend in BACKENDS:
        results = tuple(run for run in merged.results if run.backend == backend)
        if results and backend not in untouched:
            paths.append(folder / backend / FILE)
            write_text(paths[-1], _json(ResultFile(backend=backend, results=results).model_dump(mode="json")))
    for name, text in ((CROSS, cross_text(merged)), (PAGE, page(merged))):
        paths.append(folder / name)
        write_text(paths[-1], text)
    return paths


def cross_text(merged: Merged) -> str:
    """Return the content of ``cross_backend_validation.json``: outcome by backend, the matrix, what agrees with what."""
    standings = [standing(merged, backend) for backend in BACKENDS]
    return _json(
        {
            "schema_version": SCHEMA,
            "kind": "benchlib.parity.cross_backend_validation",
            "newest_result": _moment(merged),
            "backends": {
                item.backend: {"outcome": item.outcome, "reason": item.reason, "machines": list(item.machines)}
                for item in standings
            },
            "matrix": [
                {"backend": run.backend, "machine": run.machine, "member": row.member, "outcome": row.outcome}
                for run, row in merged.rows
            ],
            "agreement": agreement(merged),
            "left_out": _left_out(merged),
        }
    )


def agreement(merged: Merged) -> list[dict[str, Any]]:
    """Return for each pair of backends how far their fp32 results can be apart at most.

    Both were compared with the same recorded logits; by the triangle inequality their distance is at most the sum of both
    distances to them. Two references are no common point, not even by the same software: rounding differs by processor.
    """
    worst: dict[tuple[str, str, str, str], dict[str, tuple[float, str]]] = {}
    for run, row in merged.rows:
        if row.gates and row.precision == "fp32" and row.max_difference is not None and run.reference_sha256:
            key = run.model_sha256, run.inputs_sha256, run.reference, run.reference_sha256
            group = worst.setdefault(key, {})
            group[run.backend] = max(group.get(run.backend, (0.0, "")), (row.max_difference, row.member))
    return [
        {
            "backends": [a, b],
            "model_sha256": key[0],
            "inputs_sha256": key[1],
            "reference": key[2],
            "reference_sha256": key[3],
            "members": [group[a][1], group[b][1]],
            "at_most": group[a][0] + group[b][0],
        }
        for key, group in sorted(worst.items())
        for a, b in itertools.combinations(group, 2)
    ]


def page(merged: Merged) -> str:
    """Return the Markdown page: outcome by backend, the matrix, every result, the reasons, the machines."""
    lines = [
        "# Parity across backends",
        "",
        _summary(merged),
        "",
        *table(("Backend", "Outcome", "Machines", "Why"), _standings(merged)),
    ]
    if merged.results:
        lines += ["## Matrix", "", *_matrix(merged), *_legend(merged)]
        lines += ["## Results", "", *table(COLUMNS, (_row(run, row) for run, row in merged.rows)), *_reasons(merged)]
        lines += ["## Machines", "", *table(PLACES, (_place(run, merged) for run in merged.results))]
        lines += _agreements(merged)
    if merged.left_out:
        lines += ["## Left out", "", *(f"- {escaped(sentence)}" for sentence in _left_out(merged)), ""]
    lines += ["Written by `benchlib parity merge`, which reads the `test_results.json` beside this page: do not edit."]
    return "\n".join(lines) + "\n"


def _summary(merged: Merged) -> str:
    if not merged.results:
        return "No results yet: run `benchlib run parity`, then `benchlib parity merge`."
    machines = counted(len({run.machine for run in merged.results}), "machine")
    backends = counted(len({run.backend for run in merged.results}), "backend")
    return (
        f"{counted(len(merged.rows), 'result')} of {backends} on {machines}, the newest of {_moment(merged)[:10]}. "
        "Each is the newest of its machine, backend and member, compared with a reference of the same weights and inputs; "
        "results of other inputs (column Inputs) replace each other too. Limits are those applied: above the table's "
        "where the reference itself is farther from double precision, and in bf16 where logits are large."
    )


def _standings(merged: Merged) -> Iterable[Sequence[str]]:
    for backend in BACKENDS:
        item = standing(merged, backend)
        yield backend, signed(item.outcome), ", ".join(item.machines), ", ".join(item.failed) or item.reason


def _matrix(merged: Merged) -> list[str]:
    """Return the table with a row a way to compute and a column a backend of a machine."""
    places = list(dict.fromkeys((run.backend, run.machine) for run in merged.results))
    cells = {(row.member, run.backend, run.machine): _word(row) for run, row in merged.rows}
    own = {name: place for place, name in enumerate(MEMBERS)}
    names = {row.member for _, row in merged.rows}
    ordered = sorted(names, key=lambda name: (name == WHOLE, own.get(name, len(own)), name))
    rows = [
        (
            "the run as a whole" if name == WHOLE else name,
            *(signed(cells[name, *place]) if (name, *place) in cells else "·" for place in places),
        )
        for name in ordered
    ]
    return table(("Member", *(f"{backend} on {machine}" for backend, machine in places)), rows)


def _legend(merged: Merged) -> list[str]:
    seen = {_word(row) for _, row in merged.rows}
    return ["; ".join(f"{signed(name)}: {what}" for name, what in WORDS.items() if name in seen) + ".", ""]


COLUMNS = (
    "Backend", "Machine", "Member", "Outcome", "Max difference", "Limit", "1 - cosine", "Against fp64", "Inputs", "Measured",
)  # fmt: skip


def _row(run: RunResult, row: MemberResult) -> Sequence[str]:
    return (
        run.backend,
        run.machine,
        row.member,
        signed(_word(row)),
        _number(row.max_difference),
        _number(row.limit),
        _number(row.one_minus_cosine),
        row.truth,
        run.inputs_sha256[:8],
        run.ended_at.strftime("%Y-%m-%d"),
    )


def _reasons(merged: Merged) -> list[str]:
    """Return what is said of results that are no PASS, one line for those that share it."""
    statements: dict[tuple[str, str, str], list[str]] = {}
    for run, row in merged.rows:
        if row.outcome != "PASS" and row.reason:
            statements.setdefault((_word(row), row.reason, f"{run.backend} on {run.machine}"), []).append(row.member)
    return [
        *(
            f"- {signed(outcome)} {_plain(place)}, {_plain(', '.join(names))}: {_plain(reason)}"
            for (outcome, reason, place), names in statements.items()
        ),
        *([""] if statements else []),
    ]


PLACES = ("Machine", "Backend", "Device", "Processor", "System", "Versions", "Model", "Reference", "Tier", "Measured")


def _place(run: RunResult, merged: Merged) -> Sequence[str]:
    behind = (max(other.ended_at for other in merged.results) - run.ended_at).days
    measured = run.ended_at.strftime("%Y-%m-%d %H:%M UTC")
    return (
        run.machine,
        run.backend,
        run.environment.get("devices", "") or next((row.device for row in run.members if row.device), ""),
        run.environment.get("processor", ""),
        run.environment.get("system", ""),
        versions(run),
        run.model + (" (stand-in)" if run.stand_in else ""),
        run.reference,
        run.tier,
        measured + (f", {behind} days older than the newest" if behind >= OLD_DAYS else ""),
    )


def _agreements(merged: Merged) -> list[str]:
    rows = [(" and ".join(item["backends"]), _number(item["at_most"]), item["reference"]) for item in agreement(merged)]
    if not rows:
        return []
    return [
        "## Between backends",
        "",
        "Derived, not measured: two backends differ by at most the sum of their fp32 differences from the same recorded reference.",
        "",
        *table(("Backends", "Differ by at most", "Reference"), rows),
    ]


def _word(row: MemberResult) -> str:
    return word(row.outcome, row.gates)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _moment(merged: Merged) -> str:
    last = max((run.ended_at for run in merged.results), default=None)
    return last.strftime("%Y-%m-%dT%H:%M:%SZ") if last else ""


def _left_out(merged: Merged) -> list[str]:
    """Return the sentences on what could not be read, with names instead of one machine's paths."""
    return sorted(dict.fromkeys(_named(sentence) for sentence in merged.left_out))


def _named(sentence: str) -> str:
    """Return the sentence with its path cut to day and run, or to the folder and file of results."""
    path, colon, rest = sentence.partition(": ")
    if "/" not in path:
        return sentence
    run = _RUN.search(path)
    return f"{run[0] if run else '/'.join(Path(path).parts[-2:])}{colon}{rest}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table whose columns are aligned as text, so that a terminal shows it as well; '' at its end."""
    cells = [[_plain(text) for text in row] for row in (columns, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(text + " " * (width - cell_len(text)) for text, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:], ""]


def _plain(text: str) -> str:
    """Return text that Markdown shows as it is; a comparison stays readable in a terminal, since it begins no tag."""
    return escaped(text).replace("&lt;= ", "<= ").replace("&gt;= ", ">= ")


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
