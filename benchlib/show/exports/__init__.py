"""The formats that runs are exported to, and the tables among them. A format is a row in ``EXPORTS`` and a writer."""

import datetime
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchlib.benchmarks import loadable
from benchlib.config.schema import nearest
from benchlib.core.errors import StorageError, UserError
from benchlib.core.files import output_path
from benchlib.core.text import counted
from benchlib.results.record import Record
from benchlib.results.run import fingerprint_key

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Export:
    """One format. ``write`` is ``module:name``, imported when used; ``needs`` are the modules that it imports.

    The writer takes runs and the place to write to ('' is the format's own, ``-`` the standard output), with
    ``has_samples`` also whether raw samples are wanted. It returns a sentence that says what was written where, '' after
    printing to the standard output.
    """

    name: str
    what: str
    write: str
    needs: tuple[str, ...] = ()
    has_samples: bool = False


EXPORTS: dict[str, Export] = {
    export.name: export
    for export in (
        Export("junit", "JUnit XML: one suite per run, one test per check", "benchlib.show.exports.junit:write"),
        Export(
            "openmetrics",
            "OpenMetrics text of the newest runs",
            "benchlib.show.exports.openmetrics:write_openmetrics",
            ("prometheus_client",),
        ),
        Export(
            "prometheus",
            "Prometheus text (*.prom) for node exporter's textfile collector",
            "benchlib.show.exports.openmetrics:write_prometheus",
            ("prometheus_client",),
        ),
        Export(
            "csv",
            "one row per metric, or with --samples one row per sample",
            "benchlib.show.exports:write_csv",
            (),
            True,
        ),
        Export("parquet", "the same as a Parquet file", "benchlib.show.exports:write_parquet", ("pyarrow",), True),
        Export(
            "mlflow",
            "an MLflow store: --output FILE.db, a tracking URI, or $MLFLOW_TRACKING_URI",
            "benchlib.show.exports.mlflow_store:write",
            ("mlflow", "sqlalchemy", "alembic"),
        ),
        *(Export(*row) for benchmark in loadable() for row in benchmark.spec.exports),
    )
}


def export(runs: Sequence[Record], name: str, output: str = "", samples: bool = False) -> str:
    """Write ``runs`` in the format ``name`` and return a sentence of what went where.

    Raises ``UserError`` for an unknown format, a package that is missing and a place that cannot be written.
    """
    if name not in EXPORTS:
        raise UserError(f"unknown format {name!r}: {nearest(name, EXPORTS)}")
    chosen = EXPORTS[name]
    if samples and not chosen.has_samples:
        raise UserError(
            f"--samples is for {' and '.join(e.name for e in EXPORTS.values() if e.has_samples)}, not {name}"
        )
    missing = [module for module in chosen.needs if not _installed(module)]
    if missing:
        raise UserError(f"{name} needs {', '.join(missing)}: pip install -e '.[export]' in the checkout")
    module, _, function = chosen.write.partition(":")
    write = getattr(importlib.import_module(module), function)
    try:
        return str(write(runs, output, samples) if chosen.has_samples else write(runs, output))
    except StorageError:
        raise
    except OSError as error:
        raise UserError(f"cannot write {error.filename or output}: {error.strerror or error}") from None


def _installed(module: str) -> bool:
    return sys.modules.get(module) is not None or (
        module not in sys.modules and importlib.util.find_spec(module) is not None
    )


def put(text: str, output: str, what: str) -> str:
    """Write text to the standard output (``output`` is '' or ``-``) or to a whole file; return the sentence that says so."""
    if output in ("", "-"):
        sys.stdout.write(text.encode(errors="replace").decode())
        return ""
    path = file_at(output)
    with output_path(path) as temporary:
        temporary.write_bytes(text.encode(errors="replace"))
    return f"{what} written to {path}"


def file_at(output: str) -> Path:
    """Return the file that ``output`` names; a folder is a ``UserError``."""
    path = Path(output).expanduser()
    if path.is_dir():
        raise UserError(f"--output {output} is a folder: name a file in it")
    return path


# Tables of many runs for notebooks, spreadsheets and databases: one row per metric or per sample.

RUN_COLUMNS = {
    "run": "string", "benchmark": "string", "tier": "string", "backend": "string", "world_size": "Int64", "host": "string",
    "started_at": "datetime64[ms, UTC]", "verdict": "string", "fingerprint": "string",
}  # fmt: skip
METRIC_COLUMNS = RUN_COLUMNS | {
    "metric": "string", "value": "Float64", "unit": "string", "direction": "string", "provenance": "string", "n": "Int64",
    "ci_low": "Float64", "ci_high": "Float64", "reason": "string",
}  # fmt: skip
SAMPLE_COLUMNS = RUN_COLUMNS | {"metric": "string", "index": "Int64", "value": "Float64"}


def write_csv(runs: Sequence[Record], output: str, samples: bool = False) -> str:
    """Write a CSV file with a header; times are UTC, empty cells are unknown."""
    frame = sample_frame(runs) if samples else metric_frame(runs)
    return put(frame.to_csv(index=False), output, f"{counted(len(frame), 'row')} of {counted(len(runs), 'run')}")


def write_parquet(runs: Sequence[Record], output: str, samples: bool = False) -> str:
    """Write a Parquet file with the same columns."""
    if output in ("", "-"):
        raise UserError("Parquet is binary: name a file with --output FILE.parquet")
    frame, path = sample_frame(runs) if samples else metric_frame(runs), file_at(output)
    with output_path(path) as temporary:
        frame.to_parquet(temporary, index=False)
    return f"{counted(len(frame), 'row')} of {counted(len(runs), 'run')} written to {path}"


def metric_frame(runs: Sequence[Record]) -> "pandas.DataFrame":
    """Return a row for each metric of each run; a run without metrics has one row that says in ``reason`` why."""
    rows: list[dict[str, Any]] = []
    for run in runs:
        common = _common(run)
        metrics = run.metrics
        rows += [common | metric.model_dump() | {"metric": metric.name} for metric in metrics]
        if not metrics:
            rows.append(common | {"reason": run.sentence})
    return _frame(rows, METRIC_COLUMNS)


def sample_frame(runs: Sequence[Record]) -> "pandas.DataFrame":
    """Return a row for each raw sample of each run, in the order they were taken."""
    rows = [
        _common(run) | {"metric": name, "index": index, "value": value}
        for run in runs
        for name, values in run.samples.items()
        for index, value in enumerate(values)
    ]
    return _frame(rows, SAMPLE_COLUMNS)


def _common(run: Record) -> dict[str, Any]:
    known = run.started_at < 9e9  # what a table holds: until 2255
    return {
        "run": run.run,
        "benchmark": run.benchmark,
        "tier": run.tier,
        "backend": run.backend,
        "world_size": run.result.world_size if run.result else None,
        "host": run.host or None,
        "started_at": datetime.datetime.fromtimestamp(run.started_at, datetime.UTC) if known else None,
        "verdict": run.word,
        "fingerprint": fingerprint_key(run.fingerprint) if run.fingerprint else None,
    }


def _frame(rows: list[dict[str, Any]], columns: dict[str, str]) -> "pandas.DataFrame":
    import pandas as pd  # takes a while to import: most formats, and the ranks that import one of them, do without

    return pd.DataFrame(rows, columns=pd.Index(list(columns))).astype(columns)
