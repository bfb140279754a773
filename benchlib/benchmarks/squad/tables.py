"""Tables of a training on unlike ranks, as a reader wants them; without such ranks they are empty."""

from typing import Any

from benchlib.results import frames
from benchlib.results.frames import Column

# Of each table its heading and the columns to show.
COLUMNS: dict[str, tuple[str, dict[str, Column]]] = {
    "unlike_ranks": ("Unlike ranks", {
        "rank": ("rank", "{:.0f}"), "device": ("device", ""), "precision": ("precision", ""), "work": ("does its work", "{:.0f} ×"),
        "samples": ("samples", "{:.0f}"), "accumulation": ("micro-batches", "{:.0f}"), "micro_batch": ("of at most", "{:.0f}"),
        "most": ("memory allows", "{:.0f}"), "expected_s": ("predicted, ms", "{:.1f}", 1e3), "own_s": ("measured, ms", "{:.1f}", 1e3),
        "idle_s": ("exchange and waiting, ms", "{:.1f}", 1e3), "batch_s": ("ms per micro-batch", "{:.2f}", 1e3),
        "sample_s": ("ms per sample", "{:.2f}", 1e3), "token_s": ("µs per token", "{:.2f}", 1e6),
    }),
    "unlike_plans": ("Plans of the split", {
        "from_step": ("steps before", "{:.0f}"), "shares": ("samples by rank", ""), "expected_s": ("own work expected, ms", "{:.1f}", 1e3), "why": ("why", ""),
    }),
    "unlike_wait": ("Where a step's time goes", {"part": ("part", ""), "seconds": ("ms", "{:.2f}", 1e3)}),
    "mixed_precision": ("Loss of mixed precision", {
        "step": ("step", "{:.0f}"), "mixed": ("mixed ranks", "{:.5f}"), "fp32": ("fp32 alone", "{:.5f}"),
    }),
}  # fmt: skip

TABLES = frames.tables(COLUMNS)


def report(run: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of the report, by heading; empty ones are left out."""
    return frames.report(run, TABLES)
