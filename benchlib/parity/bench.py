"""What a parity run has so far, and what of it is told: facts and notes of its result."""

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchlib.clock import Moment
from benchlib.events import EventWriter
from benchlib.files import sha256
from benchlib.parity import golden, outcome, recording
from benchlib.parity.config import ParityConfig
from benchlib.parity.outcome import Turn
from benchlib.parity.pace import Pace
from benchlib.parity.recording import Recording

DAY_S = 86400.0
Row = dict[str, Any]


@dataclass
class Bench:
    """What a run has so far. ``fields`` are those of the golden folder's manifest."""

    config: ParityConfig
    run_dir: Path
    events: EventWriter
    pace: Pace
    fields: dict[str, Any] = field(default_factory=dict)
    reference: Recording | None = None
    truth: Recording | None = None
    turns: list[Turn] = field(default_factory=list)
    attention: list[Row] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    scores: dict[str, Mapping[str, float]] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """The golden folder: the given one, which is only read, or the run's own."""
        return golden.place(self.run_dir, self.config.golden)

    @property
    def began(self) -> Moment:
        """When the run began."""
        return self.pace.began


def latencies(bench: Bench) -> list[Row]:
    """Return the table ``latency``: the reference first, then every member that was timed.

    The reference of a recording is left out: it was timed in another run, in general on another machine.
    """
    reference = [(golden.REFERENCE, bench.reference.meta)] if bench.reference and not bench.config.golden else []
    timed = [*reference, *((turn.member.name, turn.meta) for turn in bench.turns if turn.meta)]
    rows = [outcome.latency_row(name, meta.get("latency")) for name, meta in timed]
    return [row for row in rows if row is not None]


def facts(bench: Bench) -> dict[str, Any]:
    """Return what is no number of a member: model, reference, environments, what was cut."""
    meta = bench.reference.meta if bench.reference is not None else {}
    candidate: Mapping[str, Any] = next((turn.meta for turn in bench.turns if turn.meta), meta)
    model, created_at = bench.fields.get("model", {}), bench.fields.get("created_at")
    return {
        "model": model,
        "model_sha256": model.get("sha256", ""),
        "inputs_sha256": bench.fields.get("inputs_sha256", ""),
        "reference": {
            name: meta.get(name, "")
            for name in ("member", "backend", "device", "precision", "created_at", "environment")
        },
        "reference_outputs_sha256": _outputs_sha256(bench),
        "truth": bench.truth is not None,
        "truth_nonfinite": _truth_nonfinite(bench),
        "environment": candidate.get("environment", {}),
        "executors": {turn.member.name: turn.meta.get("executor", {}) for turn in bench.turns if turn.meta},
        "cases": len(bench.fields.get("cases", [])),
        "golden": {
            "given": bool(bench.config.golden),
            "digest": bench.fields.get("digest", ""),
            "created_at": created_at,
            "age_s": max(0.0, time.time() - created_at) if created_at and bench.config.golden else 0.0,
        },
        "scores": {name: dict(scores) for name, scores in bench.scores.items()},
        "process_seconds": bench.seconds,
        "cut": bench.cut,
        "identity": _identity(bench),
    }


def _truth_nonfinite(bench: Bench) -> int:
    """Return how many numbers of the truth are none."""
    return sum((bench.truth.meta.get("nonfinite") or {}).values()) if bench.truth is not None else 0


def _outputs_sha256(bench: Bench) -> str:
    path = bench.folder / golden.REFERENCE / recording.OUTPUTS
    return sha256(path) if path.exists() else ""


def _identity(bench: Bench) -> dict[str, Any]:
    """Return by content what the config names by path, so that a baseline holds on another machine too."""
    model, config = bench.fields.get("model", {}), bench.config
    found: dict[str, Any] = {}
    if Path(config.model).is_absolute():
        found["model"] = model.get("sha256", "")
    if config.dev_file:
        found["dev_file"] = bench.fields.get("inputs_sha256", "")
    if config.golden:  # its date of recording is not what it holds
        parts = (model.get("sha256", ""), bench.fields.get("inputs_sha256", ""), _outputs_sha256(bench))
        found["golden"] = hashlib.sha256(" ".join(parts).encode()).hexdigest()
    return found


def notes(bench: Bench) -> list[str]:
    """Return sentences for the reader: which model, how old the reference is, what the time did not hold."""
    model = bench.fields.get("model", {})
    found = [f"Model: {model['description']}."] if model.get("description") else []
    if bench.config.golden:
        age_days = (time.time() - bench.fields.get("created_at", time.time())) / DAY_S
        found.append(
            f"Reference and inputs: the golden folder {Path(bench.config.golden).name}, {age_days:.1f} days old."
        )
    if broken := _truth_nonfinite(bench):
        found.append(
            f"Double precision: {broken} of its numbers are NaN or infinite; distances to it are those of its other numbers."
        )
    return [*found, *(f"Cut: {text}." for text in bench.cut)]
