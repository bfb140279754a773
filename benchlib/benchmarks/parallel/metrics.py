"""Metrics of a run, from its rows: rates, parts of a step, errors; and the rows of scaling. A step's time is the slowest rank's."""

import math
from typing import Any

from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.results.metrics import Metric, derived, measured, not_available

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
    row["mfu"] = row["flops"] / row["step_s"] / (row["world"] * rate) if rate and math.isfinite(rate) else None


def scaling(rows: list[Row]) -> list[Row]:
    """Return the points of strong and weak scaling of each strategy, from one rank (the single device) to all."""
    points = []
    for kind in ("strong", "weak"):
        own = [row for row in rows if row["scaling"] == kind and "step_s" in row]
        for last in (row for row in rows if not row["scaling"] and "step_s" in row and row["world"] > 1):
            same = [
                row for row in own if row["model"] == last["model"] and row["strategy"] in ("single", last["strategy"])
            ]
            same = [row for row in same if row["strategy"] == "single" or row["schedule"] == last["schedule"]]
            if not any(row["strategy"] == "single" for row in same):
                continue
            for row in sorted([*same, last], key=lambda one: one["world"]):
                high, low = row["step_ci_high"], row["step_ci_low"]
                points.append(
                    {
                        "key": last["key"], "model": row["model"], "strategy": last["strategy"], "schedule": last["schedule"],
                        "kind": kind, "world": row["world"], "batch_size": row["batch_size"],
                        "samples_per_s": row["samples_per_s"],
                        "samples_per_s_low": row["batch_size"] / high if high else None,
                        "samples_per_s_high": row["batch_size"] / low if low else None,
                        "step_s": row["step_s"], "predicted_step_s": row.get("predicted_step_s"),
                    }
                )  # fmt: skip
    return points


def of(
    config: ParallelConfig, tables: dict[str, list[Row]], top: dict[str, Any], startup_s: float, total_s: float
) -> list[Metric]:
    """Return the metrics of a run."""
    rows = [row for row in tables["strategies"] if "step_s" in row]
    main = [row for row in rows if not row["scaling"]]
    found: list[Metric] = []
    for row in main:
        name, what = slug(row["key"]), f"{row['key']}, slowest of {row['world']} rank{'s' * (row['world'] > 1)}"
        found += [
            measured(f"step_s_{name}", row["steps_s"], "s", "lower", reason=what),
            derived(
                f"samples_per_s_{name}",
                [row["batch_size"] / step for step in row["steps_s"]],
                "samples/s",
                "higher",
                what,
            ),
            derived(f"mfu_{name}", row["mfu"], "ratio", "higher", "FLOP/s over the measured peak of as many ranks")
            if row["mfu"] is not None
            else not_available(f"mfu_{name}", "ratio", "higher", f"no peak in {row['precision']} was measured"),
        ]
        if peak := max(row["peak_bytes"]):
            found.append(
                measured(f"peak_memory_gb_{name}", peak / 1e9, "GB", "lower", reason="the rank that holds most")
            )
    for point in (one for one in scaling(rows) if one["world"] == config.world_size):
        first = next(
            one
            for one in scaling(rows)
            if one["world"] == 1 and one["kind"] == point["kind"] and one["model"] == point["model"]
        )
        value = point["samples_per_s"] / first["samples_per_s"] / point["world"]
        found.append(
            derived(
                f"{point['kind']}_scaling_{slug(point['key'])}",
                value,
                "ratio",
                "higher",
                "rate over n times the rate of one rank",
            )
        )
    best = max(main, key=lambda row: float(row["samples_per_s"]), default=None)
    if best:
        found.append(
            derived(
                "samples_per_s_best",
                [best["batch_size"] / step for step in best["steps_s"]],
                "samples/s",
                "higher",
                f"by {best['key']}",
            )
        )
    rate = top["matmul_flops"][config.precision]
    peak_of = f"{config.precision} products, all {config.world_size} ranks at once, the best of this run"
    return [
        *found,
        measured("matmul_peak_flops", rate * config.world_size, "FLOP/s", "higher", reason=peak_of)
        if math.isfinite(rate) and rate
        else not_available("matmul_peak_flops", "FLOP/s", "higher", "the device has no such products"),
        measured("startup_s", startup_s, "s", "lower", reason="until the first strategy"),
        measured("total_s", total_s, "s", "lower", reason="from the launch to the result"),
    ]
