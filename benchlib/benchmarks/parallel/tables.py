"""The tables of a run: its summary with scores (``bottleneck.SCORES`` defines them), where steps go, memory, and scaling."""

import statistics
from collections.abc import Callable
from typing import Any

import pandas as pd

from benchlib.benchmarks.parallel import bottleneck, scaling
from benchlib.benchmarks.parallel.estimate import Memory, bubble_share, memory, of_row
from benchlib.benchmarks.parallel.shapes import Shape
from benchlib.results.frames import Records

STATE_BYTES = 16  # fp32: weight, gradient, two moments of AdamW
GB = 1e9
Row = dict[str, Any]


def shapes(run: Any) -> dict[str, Shape]:
    """Return the shapes of a run's models by name."""
    return {shape.name: shape for shape in run.config.shapes}


def modelled(run: Any, row: Row) -> Memory | None:
    """Return the memory that the model expects of a row's fullest rank; None for a model that is not known."""
    shape = shapes(run).get(row["model"])
    return memory(of_row(row, shape, run.config.shard or 2)) if shape else None


def hardware(run: Any) -> str:
    """Return what a rank of a run is, in a few words; the processor's name stands on top of the report."""
    backend = run.config.backend
    names = (run.machine or {}).get("devices", {}).get("backends", {}).get(backend, {}).get("names", [])
    return "CPU" if backend == "cpu" else " and ".join(dict.fromkeys(names)) or backend


def summary(run: Any) -> list[Row]:
    """Return one row for each strategy that ran, and why others did not."""
    device, rows = hardware(run), []
    for own in bottleneck.models(bottleneck.main_rows(run)).values():
        best = max(row["samples_per_s"] for row in own)
        best_each = max(row["samples_per_s"] / row["world"] for row in own)
        for row in own:
            held, forward = sum(row.get("peak_bytes") or []), row.get("forward_s")
            rows.append({
                "configuration": _configuration(dict(row)), "model": row["model"], "strategy": bottleneck.name(row),
                "hardware": f"{row['world']} x {device}", "samples/s": row["samples_per_s"], "tokens/s": row["tokens_per_s"],
                "forward ms": None if forward is None else 1e3 * forward, "backward ms": 1e3 * row["backward_s"],
                "memory GB": held / GB if held else None,
                "memory efficiency": STATE_BYTES * row["parameters"] / held if held else None,
                "performance score": 100 * row["samples_per_s"] / best,
                "efficiency score": 100 * row["samples_per_s"] / row["world"] / best_each,
            })  # fmt: skip
    return rows


def _configuration(row: Row) -> str:
    extras = [word for word in ("checkpointing", "compile") if row.get(word)]
    if row.get("schedule"):
        extras.append(f"{row['micro_batches']} micro-batches")
    return ", ".join([f"{row['batch_size']} x {row['seq_len']} tokens", row["precision"], *extras])


def not_run(run: Any) -> list[Row]:
    """Return the strategies that did not run, with the reasons."""
    rows = run.result.tables.get("strategies", []) if run.result else []
    return [
        {"model": row["model"], "strategy": bottleneck.name(row), "why": row["reason"]}
        for row in rows
        if row.get("status") != "ok"
    ]


def steps(run: Any) -> list[Row]:
    """Return the waterfall of each strategy in ms, beside the step that the model predicted before it ran, and its bottleneck.

    ``faster without`` is how many times faster a step would be at most without the bottleneck.
    """
    rows, shown = [], bool(run.result) and scaling.predicts(run.result.tables)
    for row in bottleneck.main_rows(run):
        parts = bottleneck.waterfall(row, bottleneck.kernels_of(run, row["key"]))
        worst, predicted = bottleneck.bottleneck(parts), row.get("predicted_step_s") if shown else None
        rows.append(
            {"strategy": row["key"], "step (ms)": 1e3 * row["step_s"], "predicted": predicted and 1e3 * predicted}
            | {name: 1e3 * value for name, value in parts.items()}
            | {"bottleneck": worst.part, "faster without": worst.bound}
        )
    return rows


def memories(run: Any) -> list[Row]:
    """Return the measured memory of the fullest rank beside the model of it, in GB, with the share explained."""
    rows = []
    for row in bottleneck.main_rows(run):
        model, measured = modelled(run, row), max(row.get("peak_bytes") or [], default=0.0)
        if model is None:
            continue
        explained = {"measured": measured / GB, "explained": model.total / measured} if measured else {}
        rows.append(
            {"strategy": row["key"]}
            | {("parameters (GB)" if name == "parameters" else name): value / GB for name, value in vars(model).items()}
            | {"estimate": model.total / GB, "measured": None, "explained": None, **explained}
        )
    return rows


def curves(run: Any) -> list[Row]:
    """Return the points of scaling with prediction and error, and what the model says of more devices, marked as such."""
    if not run.result:
        return []
    rows = [
        {
            "strategy": point.key, "scaling": point.kind, "devices": point.world, "from": "measured",
            "samples/s": point.samples_per_s, "efficiency": point.efficiency, "low": point.low, "high": point.high,
            "model": point.predicted, "measured over model": None if point.error is None else 1 + point.error,
        }
        for point in scaling.points(run.result.tables)
    ]  # fmt: skip
    for (key, kind), line in lines(run).items():
        rows += [
            {"strategy": key, "scaling": kind, "devices": n, "from": "the model alone", "model": value}
            for n, value in line
        ]
    columns = list(rows[0]) if rows else []
    return [{name: row.get(name) for name in columns} for row in rows]


def lines(run: Any) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Return the extrapolations by (key, kind of scaling); none where the model ``predicts`` nothing."""
    facts, tables, sizes = run.result.facts, run.result.tables, shapes(run)
    result: dict[tuple[str, str], list[tuple[int, float]]] = {}
    if not scaling.predicts(tables):
        return result
    every = [row for row in tables.get("strategies", []) if row.get("status") == "ok" and row.get("step_s")]
    for key, kind in dict.fromkeys((row["key"], row["kind"]) for row in tables.get("scaling", [])):
        row = next((row for row in every if row["key"] == key), None)
        singles = [item for item in every if row and item["strategy"] == "single" and item["model"] == row["model"]]
        single = next((item for item in singles if item.get("scaling") == kind), singles[0] if singles else None)
        if row and single and row["model"] in sizes:
            peaks, links = facts.get("machine_peaks") or {}, tables.get("alpha_beta", [])
            line = scaling.extrapolated(row, single, sizes[row["model"]], peaks, links, kind)
            if line:
                result[key, kind] = line
    return result


def bubbles(run: Any) -> list[Row]:
    """Return the idle share of pipelines beside that of equal stages."""
    rows = []
    for row in bottleneck.main_rows(run):
        if row.get("schedule") and row.get("bubble_share") is not None:
            work = of_row(row, shapes(run)[row["model"]])
            ideal = bubble_share(work.layout, work.micro_batches, work.schedule)
            bubble = {"measured bubble": row["bubble_share"], "model of equal stages": ideal}
            rows.append({"strategy": row["key"], **bubble})
    return rows


def exchanges(run: Any) -> list[Row]:
    """Return communication by kind, per step of one rank."""
    rows = run.result.tables.get("communication", []) if run.result else []
    return [
        {
            "strategy": row["key"], "kind": row["kind"], "calls": int(row["calls"]) if row["calls"] % 1 == 0 else row["calls"], "MB": row["bytes"] / 1e6, "ms": 1e3 * row["time_s"],
            "exposed ms": 1e3 * row["exposed_s"], "hidden": max(0.0, round(1 - row["exposed_s"] / row["time_s"], 4)) if row["time_s"] else None,
        }
        for row in rows
        if not row.get("scaling")
    ]  # fmt: skip


def of_suite(run: Any) -> list[Row]:
    """Return one row for each model of a suite, with its fastest strategy; none for a single model."""
    rows = []
    for model, own in bottleneck.models(bottleneck.main_rows(run)).items():
        best = max(own, key=lambda row: float(row["samples_per_s"]))
        median = statistics.median(row["samples_per_s"] for row in own)
        rows.append({
            "model": model, "parameters": best["parameters"], "strategies": len(own), "best": best["key"], "samples/s": best["samples_per_s"],
            "tokens/s": best["tokens_per_s"], "MFU": best.get("mfu"), "over the median strategy": best["samples_per_s"] / median,
        })  # fmt: skip
    return rows if len(rows) > 1 else []


ALL: dict[str, Callable[[Any], list[Row]]] = {
    "Summary": summary, "Suite": of_suite, "Not run": not_run, "Where a step goes": steps, "Memory of the fullest rank": memories,
    "Communication by kind": exchanges, "Bubble": bubbles, "Scaling": curves,
}  # fmt: skip


def tables(run: Any) -> dict[str, list[Row]]:
    """Return the tables of the report; those without rows are left out."""
    return {heading: rows for heading, make in ALL.items() if (rows := make(run))}


def _frame(make: Callable[[Any], list[Row]]) -> Callable[[Records], pd.DataFrame]:
    return lambda run: pd.DataFrame(make(run)) if run.result else pd.DataFrame()


TABLES: dict[str, Callable[[Records], pd.DataFrame]] = {heading: _frame(make) for heading, make in ALL.items()}
