"""From recordings and comparisons to what a run leaves: the outcome of each member, rows of tables, metrics."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from benchlib.benchmarks.parity import tolerances
from benchlib.benchmarks.parity.compare import Comparison
from benchlib.benchmarks.parity.config import Member, ParityConfig
from benchlib.config.schema import EMBEDDED_MODEL
from benchlib.core.stats import summary
from benchlib.results.metrics import Metric, derived, measured, not_available

Row = dict[str, Any]
TABLES = ("logits", "histogram", "layers", "gradients", "curves", "truth")  # of a comparison, besides its quantities
REFERENCE = "reference"


@dataclass(frozen=True)
class Turn:
    """What became of one member: how its process ended and, where it left a recording, what the comparison says.

    ``status`` is ``compared``, ``unavailable`` and ``no time`` (nothing was computed), ``failed`` (the process crashed,
    was ended or left nothing that can be read). ``meta`` is its ``recording.json``.
    """

    member: Member
    backend: str
    status: Literal["compared", "unavailable", "no time", "failed"]
    reason: str = ""
    seconds: float = 0.0
    meta: Mapping[str, Any] | None = None
    comparison: Comparison | None = None


def scope(config: ParityConfig, model: Mapping[str, Any]) -> str:
    """Return the suffix of the names of metrics: what stands in for a real model on real text; '' for neither.

    ``model`` are the facts of the golden folder: its name, and whether its weights are pretrained or random.
    """
    data = {"minisquad": "_minisquad", "files": "_files", "squad": ""}[config.data]
    tiny = "_tiny" if model["name"] == EMBEDDED_MODEL else ""
    return data + tiny + ("_random" if model["init"] == "random" else "")


def member_row(turn: Turn) -> Row:
    """Return the row of a member for the table ``members``. A crash is a FAIL, what is not there is SKIPPED."""
    outcome, reason = _outcome(turn)
    meta, member = turn.meta or {}, turn.member
    return {
        "member": member.name,
        "backend": turn.backend,
        "device": str(meta.get("device", "")),
        "precision": member.precision,
        "mode": member.mode,
        "gates": member.gates,
        "outcome": outcome,
        "reason": reason,
        "seconds": turn.seconds,
        "what": member.what,
        "model_sha256": meta.get("model_sha256", ""),
        "inputs_sha256": meta.get("inputs_sha256", ""),
    }


def _outcome(turn: Turn) -> tuple[str, str]:
    if turn.status in ("unavailable", "no time"):
        return "SKIPPED", turn.reason
    if turn.comparison is None:
        return "FAIL", turn.reason
    return turn.comparison.outcome, turn.comparison.reason


def quantity_rows(turn: Turn) -> list[Row]:
    """Return the rows of a member for the table ``quantities``."""
    return [asdict(row) for row in turn.comparison.rows] if turn.comparison else []


def comparison_rows(turns: Sequence[Turn]) -> dict[str, list[Row]]:
    """Return the tables of all comparisons, each row under its member's name."""
    compared = [(turn.member.name, turn.comparison.tables) for turn in turns if turn.comparison is not None]
    return {
        name: [{"member": member} | row for member, tables in compared for row in tables.get(name, [])]
        for name in TABLES
    }


def latency_row(name: str, latency: Mapping[str, Any] | None) -> Row | None:
    """Return the row of a recording's times for the table ``latency``; None where nothing was timed."""
    if not latency:
        return None
    stats = summary(latency["samples_ms"])
    return {
        "member": name,
        "batch": int(latency["batch"]),
        "length": int(latency["length"]),
        "n": stats.n,
        "mean_ms": stats.mean,
        "p50_ms": stats.median,
        "p95_ms": stats.p95,
        "p99_ms": stats.p99,
        "qps": int(latency["batch"]) * 1e3 / stats.mean,
    }


def metrics(turns: Sequence[Turn], suffix: str) -> list[Metric]:
    """Return of each member that was compared how far it is from the reference and how long an input takes."""
    metrics: list[Metric] = []
    for turn in turns:
        if turn.comparison is not None:
            metrics += _distances(turn, suffix)
            metrics += latency_metrics(turn.member.name, (turn.meta or {}).get("latency"), suffix)
    return metrics


def _distances(turn: Turn, suffix: str) -> list[Metric]:
    rows, name = {row["quantity"]: row for row in quantity_rows(turn)}, turn.member.name
    return [
        _distance(f"{name}_logits_max_difference{suffix}", rows.get(tolerances.LOGITS), turn),
        _distance(f"{name}_one_minus_cosine{suffix}", rows.get(tolerances.COSINE), turn),
    ]


def _distance(name: str, row: Row | None, turn: Turn) -> Metric:
    if row is None or row["status"] == "SKIPPED":
        return not_available(name, "", "lower", row["reason"] if row else "it was not compared")
    if row["value"] is None and not turn.member.gates:  # its row says so; what does not gate must not fail the run
        return not_available(name, "", "lower", f"not finite: {row['reason'] or row['worst']}")
    value = math.nan if row["value"] is None else row["value"]
    return derived(name, value, "", "lower", f"the worst case, {row['worst']}" if row["worst"] else "the worst case")


def latency_metrics(name: str, latency: Mapping[str, Any] | None, suffix: str) -> list[Metric]:
    """Return the time of one input with all samples, and how many of them fit a second; nothing where none was timed."""
    row = latency_row(name, latency)
    if row is None or latency is None:
        return []
    reason = f"one input of {row['length']} tokens, synchronised, after {latency['warmup']} warm-ups"
    return [
        measured(f"{name}_latency_ms{suffix}", latency["samples_ms"], "ms", "lower", reason=reason),
        derived(f"{name}_queries_per_s{suffix}", row["qps"], "queries/s", "higher", "1 / mean latency at batch 1"),
    ]
