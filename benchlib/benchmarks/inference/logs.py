"""What LoadGen leaves in a folder: its detail log, the trace of its issues, the answers of an accuracy run. No torch."""

import contextlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchlib.core.errors import RunBroken


def _records(path: Path, *marks: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of the lines with all ``marks``; LoadGen does not escape what it quotes in a message."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        if all(mark in line for mark in marks):
            with contextlib.suppress(ValueError):
                yield json.loads(line[line.index("{") :].rstrip(", "))


def detail(folder: Path) -> dict[str, Any]:
    """Return the values of ``mlperf_log_detail.txt`` by key, the last of each; ``errors`` are the messages of errors.

    ``began`` and ``ended`` are the wall times of power_begin and power_end, up to the last completion. Raises ``RunBroken``
    where the log is missing or has no end.
    """
    path = folder / "mlperf_log_detail.txt"
    records = list(_records(path, ":::MLLOG "))
    values: dict[str, Any] = {record["key"]: record["value"] for record in records}
    if "power_end" not in values:
        raise RunBroken(f"{path}: LoadGen left no end of its log: the test did not end")
    wrong = [record for record in records if record["metadata"].get("is_error") and record["key"] != "num_errors"]
    errors = [f"{record['key']}: {record['value']}" for record in wrong]
    began, ended = (
        datetime.strptime(values[key], "%m-%d-%Y %H:%M:%S.%f").replace(tzinfo=UTC).timestamp()
        for key in ("power_begin", "power_end")
    )
    # An accuracy run does not count its errors.
    return {"num_errors": len(errors), **values, "errors": errors, "began": began, "ended": ended}


def schedule(folder: Path) -> np.ndarray:
    """Return (n, 3) of the trace, in the order of issue: sample index, scheduled s, s that the issue was late.

    Scheduled times count from an origin of LoadGen's own. The trace is not valid JSON: it is read line by line. Only Server has one.
    """
    records = _records(folder / "mlperf_log_trace.json", '"name":"Sample",', '"ph":"b"')
    keys = ("sample_seq", "sample_idx", "issue_start_ns")
    rows = [(*(record["args"][key] for key in keys), record["ts"]) for record in records]
    _, sample, issue_ns, ts_us = np.array(sorted(rows), float).reshape(-1, 4).T
    return np.stack([sample, ts_us * 1e-6, issue_ns * 1e-9], axis=1)


def add_schedule(table: np.ndarray, trace: np.ndarray) -> np.ndarray:
    """Return queries with the scheduled times of the trace, on our clock; unchanged where the two do not match.

    The clocks differ by a constant: the least time that any query took from LoadGen's issue to our note of it counts as zero.
    """
    if len(trace) != len(table) or not np.array_equal(trace[:, 0], table["sample"]):
        return table
    with_times = table.copy()
    with_times["scheduled_s"] = trace[:, 1] + np.min(table["issued_s"] - trace[:, 1] - trace[:, 2])
    return with_times


def answers(folder: Path) -> dict[int, list[int]]:
    """Return the tokens of ``mlperf_log_accuracy.json`` by row of the data set."""
    records = json.loads((folder / "mlperf_log_accuracy.json").read_text(encoding="utf-8"))
    return {int(row["qsl_idx"]): np.frombuffer(bytes.fromhex(row["data"]), np.int32).tolist() for row in records}
