"""The formats that runs are exported to, and the tables among them. A format is a row in ``EXPORTS`` and a writer."""

import datetime
import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchlib.benchmarks import BENCHMARKS, loadable, spec_of
from benchlib.config.schema import nearest
from benchlib.core.errors import UserError
from benchlib.core.files import atomic_path, write_text
from benchlib.core.stats import description
from benchlib.core.text import counted
from benchlib.results.record import Record
from benchlib.results.run import Run, fingerprint_key

if TYPE_CHECKING:
    import pandas

HERE = __name__


class Export(NamedTuple):
    """One format. ``write`` is ``module:name``, imported when used; ``needs`` are the modules that it imports.

    The writer takes runs and the place to write to ('' is the format's own, ``-`` the standard output), with
    ``has_samples`` also whether raw samples are wanted. It returns a sentence that says what was written where, '' after
    printing to the standard output.
    """

    what: str
    write: str
    needs: tuple[str, ...] = ()
    has_samples: bool = False


EXPORTS = {
    "junit": Export("JUnit XML: one suite per run, one test per check", f"{HERE}.junit:write"),
    "openmetrics": Export(
        "OpenMetrics text of the newest runs", f"{HERE}.openmetrics:write_openmetrics", ("prometheus_client",)
    ),
    "prometheus": Export(
        "Prometheus text (*.prom) for node exporter's textfile collector",
        f"{HERE}.openmetrics:write_prometheus",
        ("prometheus_client",),
    ),
    "csv": Export("one row per metric, or with --samples one row per sample", f"{HERE}:write_csv", has_samples=True),
    "parquet": Export("the same as a Parquet file", f"{HERE}:write_parquet", ("pyarrow",), has_samples=True),
    "pictures": Export("PNG files: --output FOLDER, else pictures/ in each run folder", f"{HERE}.pictures:write"),
    "results": Export(
        "JSON: of each run its settings, its verdict and the first table of its report", f"{HERE}:write_results"
    ),
    "mlflow": Export(
        "an MLflow store: --output FILE.db, a tracking URI, or $MLFLOW_TRACKING_URI",
        f"{HERE}.mlflow_store:write",
        ("mlflow", "sqlalchemy", "alembic"),
    ),
    **{name: Export(*row) for benchmark in loadable() for name, *row in benchmark.spec.exports},
}


def export(runs: Sequence[Record], name: str, output: str = "", samples: bool = False) -> str:
    """Write ``runs`` in the format ``name`` and return a sentence of what went where.

    Raises ``UserError`` for an unknown format, a package that is missing and a place that cannot be written.
    """
    if name not in EXPORTS:
        raise UserError(f"unknown format {name!r}: {nearest(name, EXPORTS)}")
    chosen = EXPORTS[name]
    if samples and not chosen.has_samples:
        tables = " and ".join(other for other, item in EXPORTS.items() if item.has_samples)
        raise UserError(f"--samples is for {tables}, not {name}")
    if missing := [module for module in chosen.needs if importlib.util.find_spec(module) is None]:
        raise UserError(f"{name} needs {', '.join(missing)}: pip install -e '.[export]' in the checkout")
    module, _, function = chosen.write.partition(":")
    write = getattr(importlib.import_module(module), function)
    return str(write(runs, output, samples) if chosen.has_samples else write(runs, output))


def put(text: str, output: str, what: str) -> str:
    """Write text to the standard output (``output`` is '' or ``-``) or to a whole file; return the sentence that says so."""
    if output in ("", "-"):
        sys.stdout.write(text.encode(errors="replace").decode())
        return ""
    path = _file_at(output)
    write_text(path, text)
    return f"{what} written to {output}"


def _file_at(output: str) -> Path:
    path = Path(output).expanduser().resolve()  # a link stays one
    if path.exists() and not path.is_file():
        raise UserError(f"--output {output} is a folder, a pipe or a device: name a file, or - for the standard output")
    return path


# Tables of many runs for notebooks, spreadsheets and databases: one row per metric or per sample.

RUN_COLUMNS = {
    **dict.fromkeys(("run", "benchmark", "tier", "backend"), "string"),
    "world_size": "Int64",
    "host": "string",
    "started_at": "datetime64[ms, UTC]",
    **dict.fromkeys(("verdict", "fingerprint"), "string"),
}
METRIC_COLUMNS = {
    **RUN_COLUMNS,
    "metric": "string",
    "value": "Float64",
    **dict.fromkeys(("unit", "direction", "provenance"), "string"),
    "n": "Int64",
    "ci_low": "Float64",
    "ci_high": "Float64",
    **dict.fromkeys(("mean", "deviation", "minimum", "maximum", "p50", "p90", "p95", "p99"), "Float64"),
    "reason": "string",
}
SAMPLE_COLUMNS = {**RUN_COLUMNS, "metric": "string", "index": "Int64", "value": "Float64"}


def write_csv(runs: Sequence[Record], output: str, samples: bool = False) -> str:
    """Write a CSV file with a header; times are UTC, empty cells are unknown."""
    frame = table_of(runs, samples)
    return put(frame.to_csv(index=False), output, f"{counted(len(frame), 'row')} of {counted(len(runs), 'run')}")


def write_results(runs: Sequence[Record], output: str) -> str:
    """Write a JSON list: name, verdict, settings that are no defaults, and rows of results of each run.

    The rows are those of the first table of the benchmark's report, numbers in the unit that the column's name ends with.
    """
    content = list[dict[str, Any]]()
    for run in runs:
        fields = BENCHMARKS[run.benchmark].config.model_fields if run.benchmark in BENCHMARKS else {}
        settings = {
            name: value for name, value in run.config.items() if name in fields and value != fields[name].default
        }
        rows = spec_of(run.benchmark).results(Run(run.folder)) if run.folder and run.complete else []
        content.append({"run": run.run, "verdict": run.word, "settings": settings, "results": rows})
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    return put(text + "\n", output, f"results of {counted(len(runs), 'run')}")


def write_parquet(runs: Sequence[Record], output: str, samples: bool = False) -> str:
    if output in ("", "-"):
        raise UserError("Parquet is binary: name a file with --output FILE.parquet")
    frame = table_of(runs, samples)
    with atomic_path(_file_at(output)) as temporary:
        frame.to_parquet(temporary, index=False)
    return f"{counted(len(frame), 'row')} of {counted(len(runs), 'run')} written to {output}"


def table_of(runs: Sequence[Record], samples: bool = False) -> "pandas.DataFrame":
    """Return a row for each metric of each run, or for each raw sample in the order they were taken.

    A run without metrics has one row that says in ``reason`` why.
    """
    import pandas as pd  # takes a while to import: most formats, and the ranks that import one of them, do without

    rows = list[dict[str, Any]]()
    for run in runs:
        common = {name: getattr(run, name) for name in ("run", "benchmark", "tier", "backend")}
        common |= {"world_size": run.ranks or None, "host": run.host or None, "verdict": run.word}
        common["started_at"] = datetime.datetime.fromtimestamp(run.started_at, datetime.UTC)
        common["fingerprint"] = fingerprint_key(run.fingerprint) if run.fingerprint else None
        metrics = [
            metric.model_dump() | {"metric": metric.name} | description(run.samples.get(metric.name, ()))
            for metric in run.metrics
        ]
        sample_rows = [
            {"metric": name, "index": index, "value": value}
            for name, values in run.samples.items()
            for index, value in enumerate(values)
        ]
        rows += [common | row for row in (sample_rows if samples else metrics or [{"reason": run.sentence}])]
    columns = SAMPLE_COLUMNS if samples else METRIC_COLUMNS
    return pd.DataFrame(rows, columns=pd.Index(list(columns))).astype(columns)
