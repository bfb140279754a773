"""Results of parity by machine, backend and member, from run folders and from files that other machines left, as files again.

A file is ``<folder>/<backend>/test_results.json``: a row for each result of one backend, on any number of machines, fit to
be committed; beside it are the backend's validation and report, above it those of all backends. Of each machine, backend and member the newest row counts. The same results give the same bytes, in an
order that does not depend on who merged them when, so that a change in a repository shows what changed.
"""

import itertools
import json
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchlib.benchmarks.parity.config import MEMBERS
from benchlib.benchmarks.parity.spec import answered, worst
from benchlib.core.errors import UserError
from benchlib.core.files import read_object, write_text
from benchlib.core.machine import BACKENDS
from benchlib.core.text import counted
from benchlib.judge.baselines import injected
from benchlib.results.record import load
from benchlib.results.run import Run
from benchlib.results.shared import run_folders
from benchlib.show.markup import escaped
from benchlib.spec.tables import Rows

KIND, SCHEMA = "benchlib.parity.results", 3
FILE, CROSS, PAGE = "test_results.json", "cross_backend_validation.json", "PARITY.md"
REPORT = "BERT_SQUAD_BACKEND_REPORT.md"
WHOLE = "all"  # stands for a member where a run as a whole has an outcome and no member has one
NOT_COMPARED = "NOT COMPARED"
TEXTS = (
    *("machine", "backend", "member", "outcome", "reason", "ended_at", "run", "tier", "model", "model_sha256"),
    *("inputs_sha256", "reference", "reference_sha256", "device", "precision", "accuracy"),
)
SETUP = (
    "system",
    "python",
    "torch",
    "transformers",
    "benchlib",
)  # what of a machine's software is shown, beside drivers
ADDED = ("latency_p95_ms", "latency_p99_ms", "queries_per_s")  # columns that a file of schema 2 does not have
NUMBERS = ("max_difference", "limit", "one_minus_cosine", "latency_ms", *ADDED)
Row = dict[str, Any]
# A row in which nothing is stated.
EMPTY: Row = {**dict.fromkeys(TEXTS, ""), "gates": True, **dict.fromkeys(NUMBERS), "environment": {}, "quantities": {}}


class PlantedRun(UserError):
    """A run whose results were changed on purpose."""


class Merged(NamedTuple):
    """The newest rows in the order of backends, machines and members.

    ``left_out`` are sentences on what is damaged, ``planted`` on runs with an injected fault, whose results do not count.
    """

    rows: list[Row]
    left_out: list[str]
    planted: Sequence[str] = ()


def read_file(path: Path) -> list[Row]:
    """Read a file of results; ``UserError`` where it is missing, cut or of another kind."""
    values = read_object(path, {"kind": str, "results": list}, SCHEMA)
    same = values["kind"] == KIND and values.get("schema_version") in (2, SCHEMA)
    if not same or any((row.keys() ^ EMPTY.keys()).difference(ADDED) for row in values["results"]):
        raise UserError(f"{path}: not results of parity of this version: restore the file, or merge its runs again")
    return [EMPTY | row for row in values["results"]]


def read_run(folder: Path, machine: str = "") -> list[Row]:
    """Return a row for each member of a run, whole or broken; ``machine`` replaces its host name.

    None of a run that says nothing: of another benchmark, stopped by its user, or without an end. Raises ``PlantedRun`` for one
    with an injected fault, ``UserError`` for a damaged one.
    """
    record = load(folder, whole=False)
    result, status = record.result, record.status or {}
    if record.problems:
        raise UserError(f"{folder}: {record.sentence}")
    if record.benchmark != "parity" or record.word == "STOPPED" or record.ended_at is None:
        return []
    if planted := injected(Run(folder)):
        settings = ", ".join(f"{name}={record.config[name]}" for name in planted)
        raise PlantedRun(f"{folder}: {settings} changed this run on purpose, so its results do not count: leave it out")
    facts = result.facts if result else {}
    torch = facts.get("reference_torch")
    common = EMPTY | {
        "machine": machine or record.host or "this machine",
        "backend": record.backend,
        "run": record.run,
        "tier": record.tier,
        "ended_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(round(record.ended_at))),
        "model": facts.get("model", "") + (", random weights" if facts.get("init") == "random" else ""),
        "model_sha256": facts.get("weights_sha256", ""),
        "inputs_sha256": facts.get("cases_sha256", ""),
        "reference": f"eager on {facts['reference_backend']}, torch {torch}" if torch else "",
        "reference_sha256": facts.get("outputs_sha256", ""),
        "environment": {
            "hardware": record.hardware,
            **{name: text for name, text in record.setup.items() if name in SETUP or name.startswith("driver ")},
        },
    }
    ends = result.status if result else "", status.get("outcome", "complete")
    if ends[0] == "complete" and (rows := _members(Rows.of(Run(folder)))):
        return [common | row for row in rows]
    if "skipped" in ends:
        outcome, reason = "SKIPPED", (result and result.reason) or str(status["reason"])
    elif ends == ("complete", "complete"):
        outcome, reason = NOT_COMPARED, "only the reference was recorded"
    else:
        outcome, reason = "FAIL", f"the run broke: {status.get('reason') or 'it left no complete result'}"
    return [common | {"member": WHOLE, "outcome": outcome, "reason": reason}]


def _members(run: Rows) -> list[Row]:
    rows = []
    for row in answered.rows(run):
        largest = {
            item["quantity"]: [worst[name].finite(item, run) for name in ("value", "limit")]
            for item in worst.where(member=row["member"]).rows(run)
        }
        own = {name: row[name] for name in ("member", "precision", "gates", "outcome", "reason")}
        own |= {name: answered[name].raw(row, run) or "" for name in ("device", "accuracy")}
        own |= {name: answered[name].finite(row, run) for name in NUMBERS}
        rows.append(own | {"quantities": largest})
    return rows


def collect(sources: Iterable[Path], machine: str = "", stored: Iterable[Row] = ()) -> Merged:
    """Read ``sources`` into the newest results beside the rows ``stored``: runs, folders of runs, files of results, folders of those.

    ``machine`` replaces the host names of runs. Raises ``UserError`` for a source that is not there at all.
    """
    rows, left_out, planted = list(stored), list[str](), list[str]()
    for path in [path for source in sources for path in of_source(source)]:
        short = "/".join(path.parts[-2:])
        try:
            rows += read_run(path, machine) if path.is_dir() else read_file(path)
        except PlantedRun as error:
            planted.append(str(error).replace(str(path), short))
        except UserError as error:
            left_out.append(str(error).replace(str(path), short))
        except (LookupError, TypeError, ValueError, AttributeError, OSError, ArithmeticError) as error:
            left_out.append(f"{short}: not a result of parity of this version ({type(error).__name__}: {error})")
    return Merged(newest(rows), sorted(left_out), sorted(planted))


def of_source(path: Path) -> list[Path]:
    """Return the runs and files that a source stands for."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{path}: no such run, folder or file of results")
    runs = [folder for folder in run_folders(path) if folder == path or folder.name.startswith("parity-")]
    return [*runs, *path.glob(FILE), *path.glob(f"*/{FILE}")]


def newest(rows: Iterable[Row]) -> list[Row]:
    """Return of each machine, backend and member the newest row, in the order of backends, machines and members.

    A run as a whole (skipped, broken) counts where nothing newer is there of its machine and backend, one that only
    recorded the reference where no run of these compared anything.
    """
    last = {
        (row["machine"], row["backend"], row["member"]): row
        for row in sorted(rows, key=lambda row: (row["ended_at"], row["run"]))
    }
    order = {name: place for place, name in enumerate([*BACKENDS, *MEMBERS])}

    def place(row: Row) -> tuple[Any, ...]:
        return order[row["backend"]], row["machine"], order.get(row["member"], len(order)), row["member"]

    latest = list[Row]()
    for _, group in itertools.groupby(sorted(last.values(), key=place), key=lambda row: place(row)[:2]):
        of_one = list(group)
        of_one = [row for row in of_one if row["outcome"] != NOT_COMPARED] or of_one
        ended_at = max(row["ended_at"] for row in of_one)
        latest += [row for row in of_one if row["member"] != WHOLE or row["ended_at"] == ended_at]
    return latest


def standing(merged: Merged, backend: str) -> tuple[str, str, list[str]]:
    """Return the outcome of a backend over all machines, why, and the machines: FAIL before PASS.

    PASS only where something was compared. Members that do not gate cannot fail it, and cannot make it pass.
    """
    rows = [row for row in merged.rows if row["backend"] == backend]
    if not rows:
        return NOT_COMPARED, "no result from any machine", []
    machines, gated = list(dict.fromkeys(row["machine"] for row in rows)), [row for row in rows if row["gates"]]
    failed, passed = ([row for row in gated if row["outcome"] == word] for word in ("FAIL", "PASS"))

    def named(rows: Iterable[Row]) -> str:
        return ", ".join(f"{row['member']} on {row['machine']}" for row in rows)

    if failed:
        return "FAIL", f"{named(failed)}: {failed[0]['reason']}", machines
    if passed:
        reason = f"{len(passed)} of {len(gated)} gated results are within their limits"
        left = named(row for row in gated if row["outcome"] != "PASS")
        return "PASS", reason + (f"; not compared: {left}" if left else ""), machines
    outcome = "SKIPPED" if all(row["outcome"] == "SKIPPED" for row in gated or rows) else NOT_COMPARED
    return outcome, next((row["reason"] for row in gated if row["reason"]), "no gated member was compared"), machines


def agreement(merged: Merged) -> list[Row]:
    """Return for each pair of backends how far their fp32 results can be apart at most.

    Both were compared with the same recorded logits; by the triangle inequality their distance is at most the sum of both
    distances to them. Two references are no common point, not even by the same software: rounding differs by processor.
    """
    shared = ("model_sha256", "inputs_sha256", "reference", "reference_sha256")
    far: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in merged.rows:
        comparable = row["reference_sha256"] and row["max_difference"] is not None
        if comparable and row["gates"] and row["precision"] == "fp32":
            group = far.setdefault(tuple(row[name] for name in shared), {})
            group[row["backend"]] = max(group.get(row["backend"], row), row, key=lambda item: item["max_difference"])
    return [
        {"backends": [a, b], "members": [group[a]["member"], group[b]["member"]], **dict(zip(shared, key, strict=True))}
        | {"at_most": group[a]["max_difference"] + group[b]["max_difference"]}
        for key, group in sorted(far.items())
        for a, b in itertools.combinations(group, 2)
    ]


def write(merged: Merged, folder: Path) -> list[Path]:
    """Write the files of merged results and return them."""
    texts = {
        folder / backend / FILE: _json(KIND, backend=backend, results=list(rows))
        for backend, rows in itertools.groupby(merged.rows, key=lambda row: row["backend"])
    }
    texts |= {folder / CROSS: _validation(merged, BACKENDS), folder / PAGE: page(merged)}
    for backend in dict.fromkeys(row["backend"] for row in merged.rows):
        texts[folder / backend / CROSS] = _validation(merged, [backend])
        texts[folder / backend / REPORT] = page(merged, backend)
    for path, text in texts.items():
        write_text(path, text)
    return list(texts)


def _validation(merged: Merged, backends: Collection[str]) -> str:
    fields = ("outcome", "reason", "machines")
    rows = [row for row in merged.rows if row["backend"] in backends]
    return _json(
        "benchlib.parity.cross_backend_validation",
        backends={name: dict(zip(fields, standing(merged, name), strict=True)) for name in backends},
        matrix=[{name: row[name] for name in ("backend", "machine", "member", "outcome")} for row in rows],
        agreement=[pair for pair in agreement(merged) if not set(backends).isdisjoint(pair["backends"])],
        left_out=merged.left_out,
        planted=merged.planted,
    )


def _json(kind: str, **fields: Any) -> str:
    whole = {"schema_version": SCHEMA, "kind": kind, **fields}
    return json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


RESULTS = ("backend", "machine", "member", "outcome", *NUMBERS, "accuracy", "reason")
SUM = "Derived: at most the sum of their fp32 differences from the same recorded reference."
MACHINES = ("backend", "machine", "environment", "model", "reference", "inputs_sha256", "tier", "ended_at")


def page(merged: Merged, backend: str = "") -> str:
    """Return the Markdown page of all backends or of one: outcomes, every result, the machines, what lies between backends."""
    rows = [row for row in merged.rows if backend in ("", row["backend"])]
    standings = [(name, *standing(merged, name)) for name in BACKENDS if backend in ("", name)]
    parts = [f"# BERT on SQuAD: parity of {backend}" if backend else "# Parity across backends", _summary(rows)]
    parts += [table(("backend", "outcome", "why", "machines"), [(*words, ", ".join(on)) for *words, on in standings])]
    if rows:
        about = {(row["backend"], row["machine"]): row for row in rows}.values()
        parts += ["## Results", table(RESULTS, ([_cell(row, name) for name in RESULTS] for row in rows))]
        parts += ["## Machines", table(MACHINES, ([_cell(row, name) for name in MACHINES] for row in about))]
    if pairs := [pair for pair in agreement(merged) if backend in ("", *pair["backends"])]:
        cells = [(" and ".join(pair["backends"]), f"{pair['at_most']:.2g}") for pair in pairs]
        parts += ["## Between backends", SUM, table(("backends", "differ by at most"), cells)]
    for heading, sentences in (("Left out", merged.left_out), ("Changed on purpose", merged.planted)):
        if sentences:
            parts += [f"## {heading}", "\n".join(f"- {escaped(sentence)}" for sentence in sentences)]
    parts += [f"Written by `benchlib parity merge`, which reads each backend's `{FILE}`: do not edit."]
    return "\n\n".join(parts) + "\n"


def _summary(rows: list[Row]) -> str:
    if not rows:
        return "No results yet: run `benchlib run parity`, then `benchlib parity merge`."
    count = [len({row[name] for row in rows}) for name in ("backend", "machine")]
    return (
        f"{counted(len(rows), 'result')} of {counted(count[0], 'backend')} on {counted(count[1], 'machine')}, the newest of "
        f"{max(row['ended_at'] for row in rows)[:10]}. Each is the newest of its machine, backend and member. DIFFERS "
        "is a difference beyond a limit in a member that does not gate; NOT COMPARED is never a pass."
    )


def _cell(row: Row, name: str) -> str:
    value = row[name]
    if name == "outcome" and value == "FAIL" and not row["gates"]:
        return "DIFFERS"
    if isinstance(value, dict):
        return ", ".join(f"{key} {text}" for key, text in value.items())
    text = f"{value:.2g}" if isinstance(value, float) else str(value or "")
    return text[:8] if name == "inputs_sha256" else text


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    names = [name.replace("_", " ") for name in columns]
    lines = ["| " + " | ".join(map(escaped, row)) + " |" for row in (names, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(names), *lines[1:]])
