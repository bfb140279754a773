"""Metrics of a run, from its rows: rates, parts of a step, errors. A step's time is the slowest rank's."""

from typing import Any

from benchlib.benchmarks.parallel import scaling
from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.core.text import counted
from benchlib.results.metrics import Metric, derived, measured

Row = dict[str, Any]


def slug(key: str) -> str:
    """Return the name of a row as part of a metric's name."""
    return "".join(sign if sign.isalnum() else "_" for sign in key)


def complete(row: Row, top: dict[str, Any]) -> None:
    """Add what follows from other columns: tokens/s and the use of the peak of as many ranks. Rows that did not run stay as they are."""
    if "step_s" not in row:
        return
    row["tokens_per_s"] = row["samples_per_s"] * row["seq_len"]
    rate = top["matmul_flops"][row["precision"]]
    if row["world"] == 1:
        rate = max(rate, top["matmul_flops_alone"])  # a rank alone has caches and turbo to itself
    row["mfu"] = row["flops"] / row["step_s"] / (row["world"] * rate)


def of(
    config: ParallelConfig, tables: dict[str, list[Row]], top: dict[str, Any], startup_s: float, total_s: float
) -> list[Metric]:
    """Return the metrics of a run."""
    main = [row for row in tables["strategies"] if "step_s" in row and not row["scaling"]]
    metrics: list[Metric] = []
    for row in main:
        name, what = slug(row["key"]), f"{row['key']}, slowest of {counted(row['world'], 'rank')}"
        metrics += [
            measured(f"step_s_{name}", row["steps_s"], "s", "lower", reason=what),
            derived(f"samples_per_s_{name}", _rates(row), "samples/s", "higher", what),
            derived(f"mfu_{name}", row["mfu"], "ratio", "higher", "FLOP/s over the measured peak of as many ranks"),
        ]
        if row["peak_bytes"]:  # none where nobody counts them
            peak_gb = max(row["peak_bytes"]) / 1e9
            metrics.append(
                measured(f"peak_memory_gb_{name}", peak_gb, "GB", "lower", reason="the rank that holds most")
            )
    reason = "rate over n times the rate of one rank"
    metrics += [
        derived(f"{point.kind}_scaling_{slug(point.key)}", point.efficiency, "ratio", "higher", reason)
        for point in scaling.points(tables)
        if point.world == config.world_size
    ]
    if best := max(main, key=lambda row: float(row["samples_per_s"]), default=None):
        metrics.append(derived("samples_per_s_best", _rates(best), "samples/s", "higher", f"by {best['key']}"))
    rate = top["matmul_flops"][config.precision]
    peak_of = f"{config.precision} products, all {config.world_size} ranks at once, the best of this run"
    return [
        *metrics,
        measured("matmul_peak_flops", rate * config.world_size, "FLOP/s", "higher", reason=peak_of),
        measured("startup_s", startup_s, "s", "lower", reason="until the first strategy"),
        measured("total_s", total_s, "s", "lower", reason="from the launch to the result"),
    ]


def _rates(row: Row) -> list[float]:
    return [row["batch_size"] / step for step in row["steps_s"]]
