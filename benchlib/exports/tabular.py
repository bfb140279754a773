"""Tables of many runs for notebooks, spreadsheets and databases: long format, a row a metric or a row a sample."""

import datetime
from collections.abc import Sequence
from typing import Any

import pandas as pd

from benchlib.errors import UserError
from benchlib.exports.place import counted, file_at, put
from benchlib.files import atomic_path
from benchlib.results import fingerprint_key
from benchlib.snapshot import Snapshot

RUN_COLUMNS = {
    "run": "string", "benchmark": "string", "tier": "string", "backend": "string", "world_size": "Int64", "host": "string",
    "started_at": "datetime64[ms, UTC]", "verdict": "string", "fingerprint": "string",
}  # fmt: skip
METRIC_COLUMNS = RUN_COLUMNS | {
    "metric": "string", "value": "Float64", "unit": "string", "direction": "string", "provenance": "string", "n": "Int64",
    "ci_low": "Float64", "ci_high": "Float64", "reason": "string",
}  # fmt: skip
SAMPLE_COLUMNS = RUN_COLUMNS | {"metric": "string", "index": "Int64", "value": "Float64"}


def write_csv(runs: Sequence[Snapshot], output: str, samples: bool = False) -> str:
    """Write a CSV file with a header; times are UTC, empty cells are unknown."""
    frame = sample_frame(runs) if samples else metric_frame(runs)
    return put(frame.to_csv(index=False), output, f"{counted(len(frame), 'row')} of {counted(len(runs), 'run')}")


def write_parquet(runs: Sequence[Snapshot], output: str, samples: bool = False) -> str:
    """Write a Parquet file with the same columns."""
    if output in ("", "-"):
        raise UserError("parquet is no text: name a file with --output FILE.parquet")
    frame, path = sample_frame(runs) if samples else metric_frame(runs), file_at(output)
    with atomic_path(path) as temporary:
        frame.to_parquet(temporary, index=False)
    return f"{counted(len(frame), 'row')} of {counted(len(runs), 'run')} written to {path}"


def metric_frame(runs: Sequence[Snapshot]) -> pd.DataFrame:
    """Return a row for each metric of each run; a run without metrics has one row that says in ``reason`` why."""
    rows: list[dict[str, Any]] = []
    for run in runs:
        common = _common(run)
        metrics = run.result.metrics if run.result else []
        rows += [common | metric.model_dump() | {"metric": metric.name} for metric in metrics]
        if not metrics:
            rows.append(common | {"reason": " ".join([run.sentence, *run.problems])})
    return _frame(rows, METRIC_COLUMNS)


def sample_frame(runs: Sequence[Snapshot]) -> pd.DataFrame:
    """Return a row for each raw sample of each run, in the order they were taken."""
    rows = [
        _common(run) | {"metric": name, "index": index, "value": value}
        for run in runs
        for name, values in run.samples.items()
        for index, value in enumerate(values)
    ]
    return _frame(rows, SAMPLE_COLUMNS)


def _common(run: Snapshot) -> dict[str, Any]:
    started = run.started_at
    return {
        "run": run.run,
        "benchmark": run.benchmark,
        "tier": run.tier,
        "backend": run.backend,
        "world_size": run.result.world_size if run.result else None,
        "host": str(run.machine.get("host") or "") or None,
        "started_at": datetime.datetime.fromtimestamp(started, datetime.UTC) if started is not None else None,
        "verdict": run.word,
        "fingerprint": fingerprint_key(run.fingerprint) if run.fingerprint else None,
    }


def _frame(rows: list[dict[str, Any]], columns: dict[str, str]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=pd.Index(list(columns))).astype(columns)
