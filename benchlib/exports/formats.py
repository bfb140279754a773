"""The formats that runs are exported to. Adding one is a row here and a writer ``write(runs, output, samples) -> str``."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchlib.config import nearest
from benchlib.errors import StorageError, UserError
from benchlib.snapshot import Snapshot


@dataclass(frozen=True)
class Export:
    """One format. ``write`` is ``module:name``, imported when used; ``needs`` are the modules that it imports.

    The writer takes snapshots, the place to write to ('' is the format's own, ``-`` the standard output) and whether raw
    samples are wanted, and returns a sentence that says what went where; '' after printing to the standard output.
    """

    name: str
    what: str
    write: str
    needs: tuple[str, ...] = ()
    has_samples: bool = False


EXPORTS: dict[str, Export] = {
    export.name: export
    for export in (
        Export("junit", "JUnit XML: a test suite a run, a test a check", "benchlib.exports.junit:write"),
        Export("github", "Markdown for the summary of a GitHub job", "benchlib.exports.github:write"),
        Export(
            "openmetrics",
            "OpenMetrics text of the newest runs",
            "benchlib.exports.openmetrics:write_openmetrics",
            ("prometheus_client",),
        ),
        Export(
            "prometheus",
            "Prometheus text (*.prom) for node exporter's textfile collector",
            "benchlib.exports.openmetrics:write_prometheus",
            ("prometheus_client",),
        ),
        Export(
            "csv", "a row a metric, or with --samples a row a sample", "benchlib.exports.tabular:write_csv", (), True
        ),
        Export("parquet", "the same as a Parquet file", "benchlib.exports.tabular:write_parquet", ("pyarrow",), True),
        Export(
            "nccl-tests",
            "collectives as nccl-tests prints them, to lie beside all_reduce_perf",
            "benchlib.exports.nccl_tests:write",
        ),
        Export(
            "mlflow",
            "runs with parameters, metrics and the report in an MLflow store",
            "benchlib.exports.mlflow_store:write",
            ("mlflow", "sqlalchemy", "alembic"),
        ),
        Export(
            "tensorboard",
            "event files: loss curve, samples, metrics, verdict",
            "benchlib.exports.tensorboard_log:write",
            ("tensorboard",),
        ),
    )
}


def export(runs: Sequence[Snapshot], name: str, output: str = "", samples: bool = False) -> str:
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
    try:
        return str(getattr(importlib.import_module(module), function)(runs, output, samples))
    except StorageError:
        raise
    except OSError as error:
        raise UserError(f"cannot write {error.filename or output}: {error.strerror or error}") from None


def _installed(module: str) -> bool:
    return sys.modules.get(module) is not None or (
        module not in sys.modules and importlib.util.find_spec(module) is not None
    )
