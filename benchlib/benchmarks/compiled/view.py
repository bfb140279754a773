"""What a report of the compiled path shows first, its words and its tables."""

from typing import Any

from benchlib.core.text import stand_ins
from benchlib.spec.unported import View


def warnings(config: Any, result: Any) -> list[str]:
    """Return what limits the meaning of the result."""
    name = "tiny" if config.timed_model == "tiny" else "random"
    return stand_ins("", {"name": name, "init": name})


def _columns(rows: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [{name: row.get(name) for name in names} for row in rows]


def tables(run: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of the report."""
    stored = run.result.tables
    executors = _columns(stored.get("executors", []), "executor", "batch", "length", "wall_ms", "cpu_ms", "ready_s", "max_abs", "peak_share", "status", "reason")  # fmt: skip
    counted = [row | {"dot_gflop": row["dot_flops"] / 1e9} for row in stored.get("programs", [])]
    programs = _columns(counted, "program", "operations", "arguments", "text_bytes", "dot_gflop", "temporary_bytes", "export_s", "convert_s", "compile_s", "max_abs")  # fmt: skip
    return {
        "Programs": programs,
        "Gradients": _columns(stored.get("gradients", []), "gradients", "parameters", "relative", "reference_error"),
        "Executors": executors,
        "One file, several runtimes": stored.get("runtimes", []),
        "Compiled for hardware that is not here": stored.get("targets", []),
    }


VIEW = View(
    headlines=(
        "cpu_over_eager_xla",
        "latency_ms_xla",
        "latency_ms_eager",
        "convert_s_bert",
        "gradient_relative",
        "total_s",
    ),
    labels={
        "cpu_over_eager": "CPU time over eager's",
        "cpu_over_eager_xla": "XLA's CPU time over eager's",
        "latency_ms": "Latency",
        "latency_ms_xla": "Latency of XLA",
        "latency_ms_eager": "Latency of eager",
        "convert_s": "Conversion",
        "max_abs": "Largest difference",
        "gradient_relative": "Gradients, relative difference",
        "ddp_gradient_relative": "Gradients against DDP",
        "curve_max_abs": "Loss curve, largest difference",
    },
    tables=tables,
    warnings=warnings,
    ways=("executors", "runtimes", "targets", "rounds"),
)
