"""Tables of the serving benchmark, as a reader wants them; whatever a run left out gives an empty table."""

from typing import Any

from benchlib.results import frames
from benchlib.results.frames import Column

# Of each table its heading and the columns to show.
COLUMNS: dict[str, tuple[str, dict[str, Column]]] = {
    "workers": ("Workers", {
        "worker": ("worker", "{:.0f}"), "url": ("address", ""), "alone_per_s": ("alone, queries/s", "{:.1f}"), "predicted_share": ("share predicted", "{:.1%}"),
        "share": ("share answered", "{:.1%}"), "cpu_share": ("CPU of its process", "{:.0%}"), "resident_bytes": ("its memory, GB", "{:.2f}", 1e-9),
        "device_bytes": ("device memory, GB", "{:.2f}", 1e-9),
    }),
    "scaling": ("Scaling", {
        "workers": ("workers", "{:.0f}"), "samples_per_s": ("together, queries/s", "{:.1f}"), "sum_of_alone_per_s": ("sum of each alone", "{:.1f}"),
        "efficiency": ("efficiency", "{:.1%}"),
    }),
    "splits": ("Splits, predicted and measured", {
        "split": ("split", ""), "queries": ("queries", "{:.0f}"), "predicted_s": ("predicted, s", "{:.2f}"), "measured_s": ("measured, s", "{:.2f}"),
        "measured_over_predicted": ("measured / predicted", "{:.2f}"),
    }),
    "cost": ("Where the time of the joint run went", {
        "part": ("part", ""), "seconds": ("s", "{:.3f}"), "share": ("share", "{:+.1%}"), "what": ("what", ""),
    }),
    "load": ("Open loops", {
        "phase": ("phase", ""), "rate": ("sent/s", "{:.1f}"), "queries": ("queries", "{:.0f}"), "samples_per_s": ("answered/s", "{:.1f}"),
        "goodput_per_s": ("goodput/s", "{:.1f}"), "ttft_p99_ms": ("TTFT p99, ms", "{:.0f}"), "tpot_p99_ms": ("TPOT p99, ms", "{:.1f}"),
        "late_p99_ms": ("client late", "{:.1f}"), "why": ("limits", ""),
    }),
    "closed": ("Closed loops", {
        "concurrency": ("at once", "{:.0f}"), "queries": ("queries", "{:.0f}"), "samples_per_s": ("queries/s", "{:.1f}"), "tokens_per_s": ("tokens/s", "{:.0f}"),
        "ttft_p50_ms": ("TTFT p50, ms", "{:.0f}"), "tpot_p50_ms": ("TPOT p50, ms", "{:.1f}"), "latency_p50_ms": ("end to end p50, ms", "{:.0f}"),
    }),
    "losses": ("Lost and taken back", {
        "t_s": ("s", "{:.2f}"), "worker": ("worker", "{:.0f}"), "event": ("event", ""), "times": ("times", "{:.0f}"), "reason": ("reason", ""),
    }),
}  # fmt: skip


def _open_loops(run: Any) -> Any:
    """Return the open loops; one that no limit ended says so, and the confirmed one that it is the knee."""
    frame = frames.written(COLUMNS["load"][1], "load", run)
    met = frame["phase"].map(lambda phase: "met: the knee" if phase == "confirmation" else "met")
    return frame.assign(limits=frame["limits"].where(frame["limits"] != "", met))


TABLES = frames.tables(COLUMNS) | {"Open loops": _open_loops}


def report(run: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of the report, by heading; empty ones are left out."""
    return frames.report(run, TABLES)
