"""How strategies scale: efficiency with its interval, the model's prediction beside it, and what the model says of more devices.

Efficiency of n devices is X_n / (n X_1) with X in samples/s: with one global batch (strong) this is T_1 / (n T_n), with one batch
per device (weak) T_1 / T_n. The interval takes the worse ends of both intervals, so it is wider than one of 95%.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from benchlib.benchmarks.parallel import estimate
from benchlib.benchmarks.parallel.estimate import of_row, step_time
from benchlib.benchmarks.parallel.shapes import STRATEGIES, Shape

WORLDS = (8, 64, 1024)  # what is extrapolated to
MOST_OFF = 0.5  # of measured over predicted steps, less one: a model that misses half of its strategies by more predicts nothing
Row = Mapping[str, Any]


# Of a row of ``strategies``, kept as it is.
_KEPT = ("model", "world", "batch_size", "samples_per_s", "step_s", "n", "predicted_step_s", "unpredicted")


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the table ``scaling``: strong and weak scaling of each strategy, from one rank (the single device) to all."""
    made = []
    for kind in ("strong", "weak"):
        own = [row for row in rows if row["scaling"] == kind and "step_s" in row]
        for last in (row for row in rows if not row["scaling"] and "step_s" in row and row["world"] > 1):
            alike = {("single", ""), (last["strategy"], last["schedule"])}
            same = [row for row in own if row["model"] == last["model"] and (row["strategy"], row["schedule"]) in alike]
            if not any(row["strategy"] == "single" for row in same):
                continue
            of_curve = {"key": last["key"], "strategy": last["strategy"], "schedule": last["schedule"], "kind": kind}
            for row in sorted([*same, last], key=lambda item: item["world"]):
                low, high = (
                    row["batch_size"] / row[end] if row[end] else None for end in ("step_ci_high", "step_ci_low")
                )
                ends = {"samples_per_s_low": low, "samples_per_s_high": high}
                made.append(of_curve | ends | {name: row.get(name) for name in _KEPT})
    return made


def off(tables: Mapping[str, Sequence[Row]]) -> tuple[float, int] | None:
    """Return how far measured steps are from the predicted ones, as a share of these (the median), and of how many strategies."""
    rows = [row for row in tables.get("strategies", []) if not row["scaling"] and row.get("predicted_step_s")]
    errors = [abs(row["step_s"] / row["predicted_step_s"] - 1) for row in rows]
    return (statistics.median(errors), len(errors)) if errors else None


def predicts(tables: Mapping[str, Sequence[Row]]) -> bool:
    """Whether the model came near enough to what was measured to be shown, and to say something of more devices."""
    here = off(tables)
    return here is not None and here[0] <= MOST_OFF


def forecast(tables: Mapping[str, Sequence[Row]]) -> str:
    """Say how good the model's predictions were, and that there are none where they were not; '' where nothing was predicted."""
    if (here := off(tables)) is None:
        return ""
    share, count = here
    of = f"(median of {count} strateg{'y' if count == 1 else 'ies'})"
    if share > MOST_OFF:
        return f"No prediction: measured steps are {share:.0%} off the model's {of}, more than {MOST_OFF:.0%}."
    return f"The model predicted the steps to {share:.0%} {of}."


def points(tables: Mapping[str, Sequence[Row]]) -> list[Any]:
    """Return the points of the table ``scaling``, its columns as attributes; a curve without a single device has none.

    With them ``efficiency``, its interval ``low`` to ``high``, what the model ``predicted``, and ``error``: measured over predicted
    step less one, above zero where the machine is slower than the model; both are None where the model ``predicts`` nothing.
    """
    rows, shown, result = tables.get("scaling", []), predicts(tables), list[Any]()
    for row in rows:
        same = [item for item in rows if item["key"] == row["key"] and item["kind"] == row["kind"]]
        base = next((item for item in same if item["world"] == 1), None)
        if base is None or not base.get("samples_per_s"):
            continue
        n, x1, xn = row["world"], base["samples_per_s"], row["samples_per_s"]
        low, high = (row.get(f"samples_per_s_{end}") or xn for end in ("low", "high"))
        low1, high1 = (base.get(f"samples_per_s_{end}") or x1 for end in ("low", "high"))
        step = row.get("predicted_step_s") if shown else None
        found = {
            "efficiency": xn / (n * x1), "low": low / (n * high1) if n > 1 else 1.0, "high": high / (n * low1) if n > 1 else 1.0,
            "predicted": row["batch_size"] / step / (n * x1) if step else None, "error": row["step_s"] / step - 1 if step else None,
        }  # fmt: skip
        result.append(SimpleNamespace(**{**row, **found}))
    return result


def extrapolated(
    row: Row, single: Row, shape: Shape, peaks: Mapping[str, Any], alpha_beta: Sequence[Row], kind: str
) -> list[tuple[int, float]]:
    """Return (devices, efficiency) that the model gives a strategy on 8, 64 and 1,024 devices: a model, never a measurement.

    Degrees of tensor and pipeline parallelism stay and copies are added, over links like the measured ones. A strong curve ends
    where each copy has one sample. Empty for strategies that have no copies to add, and where nothing was measured to build on.
    """
    here = estimate.calibrated(row, peaks, alpha_beta, shape)
    if here is None or "data" not in STRATEGIES[row["strategy"]].axes:
        return []
    rates, scale = here
    base, work = of_row(single, shape), of_row(row, shape)
    inner = work.layout.world // work.layout.data
    result = []
    for world in WORLDS:
        data = world // inner
        batch = base.batch * world if kind == "weak" else base.batch
        if world % inner or data > batch:
            continue
        there = replace(work, layout=replace(work.layout, data=data), batch=batch)
        step = step_time(there, rates, scale).step_s
        result.append((world, batch / step / (world * base.batch / float(single["step_s"]))))
    return result
