"""What LoadGen leaves in a folder: its detail log, the trace of its issues, the answers of an accuracy run. No torch."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchlib.core.errors import RunBroken

_MARK = ":::MLLOG "


def detail(folder: Path) -> dict[str, Any]:
    """Return the values of ``mlperf_log_detail.txt`` by key, the last of each; ``errors`` are the messages of errors.

    ``began`` and ``ended`` are the wall times of power_begin and power_end, up to the last completion. Raises ``RunBroken``
    where the log is missing or has no end.
    """
    path = folder / "mlperf_log_detail.txt"
    values: dict[str, Any] = {"errors": []}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        if not line.startswith(_MARK):
            continue
        try:
            record = json.loads(line.removeprefix(_MARK))
        except ValueError:
            continue
        key, value = record.get("key", ""), record.get("value")
        if record.get("metadata", {}).get("is_error") and key != "num_errors":
            values["errors"].append(f"{key}: {value}")
        values[key] = value
    values.setdefault("num_errors", len(values["errors"]))  # an accuracy run does not count them
    if "power_end" not in values:
        raise RunBroken(f"{path}: LoadGen left no end of its log: the test did not end")
    for key, name in (("power_begin", "began"), ("power_end", "ended")):
        if isinstance(values.get(key), str):
            moment = datetime.strptime(values[key], "%m-%d-%Y %H:%M:%S.%f").replace(tzinfo=UTC)
            values[name] = moment.timestamp()
    return values


def schedule(folder: Path) -> np.ndarray:
    """Return (n, 3) of the trace, in the order of issue: sample index, scheduled s, s that the issue was late.

    Scheduled times count from an origin of LoadGen's own. The trace is not valid JSON: it is read line by line.
    """
    path, rows = folder / "mlperf_log_trace.json", []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        if '"name":"Sample",' not in line or '"ph":"b"' not in line:
            continue
        try:
            record = json.loads(line.strip().rstrip(","))
            more = record["args"]
            rows.append((more["sample_seq"], more["sample_idx"], record["ts"] * 1e-6, more["issue_start_ns"] * 1e-9))
        except (ValueError, KeyError):
            continue
    return np.array(sorted(rows), float).reshape(-1, 4)[:, 1:]  # type: ignore[no-any-return]


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
    """Return the tokens of ``mlperf_log_accuracy.json`` by row of the data set, each once."""
    path, by_row = folder / "mlperf_log_accuracy.json", dict[int, list[int]]()
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunBroken(f"{path}: not readable as LoadGen's accuracy log ({error})") from None
    for record in records:
        by_row.setdefault(int(record["qsl_idx"]), np.frombuffer(bytes.fromhex(record["data"]), np.int32).tolist())
    return by_row
