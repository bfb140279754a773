"""The parity benchmark: one process that prepares weights and inputs, starts one process for each member, and compares.

It opens no device: members do, each in a process of its own, so that a crash counts as that member's and the next one
has the device to itself. A member that does not fit the rest of the time limit is skipped with that reason.
"""

import contextlib
import dataclasses
import functools
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from safetensors.numpy import load_file

from benchlib.benchmarks.parity import compare, golden, inputs, logits, metrics, processes, recording, weights
from benchlib.benchmarks.parity.config import Member, ParityConfig, chosen
from benchlib.benchmarks.parity.metrics import Turn
from benchlib.benchmarks.parity.recording import Recording
from benchlib.config.schema import BaseConfig
from benchlib.core.errors import BackendUnavailable, RunBroken, UserError
from benchlib.core.events import EventWriter, Moment
from benchlib.core.files import read_object, sha256
from benchlib.core.machine import probe_devices
from benchlib.results.metrics import Metric, measured
from benchlib.results.run import Result, save_result

LARGE = (recording.GRADIENTS, recording.LAYERS)  # of a recording, gigabytes for BERT-base
ATTENTION = "attention"
RESERVE_S = 3.0  # of the budget, for the results
COMPILING_S = 20.0  # that a compiling or exporting member takes beyond the others, until one was measured
FAIR = 3.0  # times the expected time: a member that had as much and is not done hangs, or is far too slow

Row = dict[str, Any]


@dataclass
class Pace:
    """The time of a run and what its processes took, in seconds: which members still fit, by those before them."""

    began: Moment
    budget_s: float
    longest_s: dict[str, float] = field(default_factory=dict)  # by kind of process

    def left_s(self) -> float:
        """Return what is left of the budget."""
        return self.budget_s - RESERVE_S - self.began.since()

    def took(self, seconds: float, kind: str = "usual") -> None:
        """Learn from a process that ended."""
        self.longest_s[kind] = max(seconds, self.longest_s.get(kind, 0.0))

    def expected_s(self, kind: str = "usual") -> float:
        """Return what a process will take: as long as the longest of its kind; 0 where nothing is known."""
        usual = self.longest_s.get("usual", 0.0)
        return self.longest_s.get(kind, usual + COMPILING_S * (kind == "slow"))

    def lacking(self, member: Member) -> str:
        """Return why a member does not fit the time that is left; '' where it does."""
        expected, left = self.expected_s(_kind(member)), self.left_s()
        if left > 0 and expected <= left:
            return ""
        return f"no time in the budget of {self.budget_s:g} s: {max(left, 0):.0f} s left, {expected:.0f} s needed"

    def was_fair(self, seconds: float, member: Member) -> bool:
        """Tell whether a member that was ended had so much time that it is its own fault."""
        expected = self.expected_s(_kind(member))
        return expected > 0 and seconds >= FAIR * expected


def _kind(member: Member) -> str:
    return "fp64" if member.precision == "fp64" else "slow" if member.slow else "usual"


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

    @functools.cached_property
    def reference_sha256(self) -> str:
        """The SHA-256 of the recorded logits of the reference; '' where there are none."""
        return sha256(self.reference.folder / recording.OUTPUTS) if self.reference else ""

    @property
    def folder(self) -> Path:
        """The golden folder: the given one, which is only read, or the run's own."""
        return golden.place(self.run_dir, self.config.golden)


def run(config: BaseConfig, run_dir: Path, events: EventWriter) -> None:
    """Compare all members with the reference; leaves ``result.json``, ``samples.parquet`` and the recordings.

    Raises ``BackendUnavailable`` where the backend or that of the reference is not there, ``UserError`` for a golden
    folder that is damaged, ``RunBroken`` where the reference itself could not be computed.
    """
    assert isinstance(config, ParityConfig)
    began = Moment.at(psutil.Process().create_time())  # the import of torch is part of the start-up
    bench = Bench(config, run_dir, events, Pace(began, config.budget_s))
    events.emit("phase", name="init")
    processes.clear(run_dir)  # of an attempt before, whose processes were killed
    try:
        _require(config)
        startup_s = began.since()
        _prepare(bench)
        _compare_all(bench)
        events.emit("phase", name="write")
        if not config.golden:
            _close_golden(bench)
        _write(bench, "complete", startup_s=startup_s)
    except BackendUnavailable:
        raise
    except BaseException as error:  # what was compared until then is not lost
        with contextlib.suppress(Exception):
            _write(bench, "partial", reason=f"{type(error).__name__}: {error}")
        raise
    finally:
        processes.clear(run_dir)


def _require(config: ParityConfig) -> None:
    """Raise ``BackendUnavailable`` where a backend is not there, before anything is prepared for it.

    Asked in another process: to ask some devices is to take them, and the members need them.
    """
    wanted = {config.reference} if config.record else {config.backend, *([] if config.golden else [config.reference])}
    backends = probe_devices()["backends"] if wanted != {"cpu"} else {}
    for name in sorted(wanted & set(backends)):
        if not backends[name]["available"]:
            raise BackendUnavailable(f"backend {name} is not available: {backends[name]['reason']}")


def _prepare(bench: Bench) -> None:
    """Make the golden folder, or hold the given one against its seal."""
    config = bench.config
    if config.golden:
        bench.events.emit("phase", name="data")
        bench.fields = golden.read(config.golden)
        weights.require_layer(bench.folder, config.planted_layer)
        weights.require_left_out(config, bench.folder)  # once, and not by every member
        bench.reference = _recorded(bench, golden.REFERENCE)
        if (bench.folder / golden.TRUTH).is_dir():
            bench.truth = _recorded(bench, golden.TRUTH)
        return
    bench.events.emit("phase", name="model")
    before_s = bench.pace.began.since()
    bench.fields = inputs.prepare(config, bench.folder)
    bench.seconds["prepare"] = bench.pace.began.since() - before_s
    bench.events.emit("phase", name="reference", text="computing the reference")
    # The run is nothing without the reference: it may take the time of all others.
    ended = processes.run(bench.run_dir, golden.REFERENCE, bench.events, _most_s(config))
    if ended.status == "unavailable":
        raise BackendUnavailable(f"the reference on {config.reference}: {ended.reason}")
    if ended.status != "done":
        raise RunBroken(f"the reference on {config.reference} was not computed ({ended.status}): {ended.reason}")
    bench.reference = Recording.open(bench.folder / golden.REFERENCE)
    bench.seconds[golden.REFERENCE] = ended.seconds
    bench.pace.took(ended.seconds)
    _compute_truth(bench)


def _recorded(bench: Bench, name: str) -> Recording:
    """Open a recording of the given folder. ``UserError`` without the logits of a case: nothing of it could be compared."""
    made = Recording.open(bench.folder / name)
    there = made.outputs()
    cases = [case["id"] for case in bench.fields["cases"] if case["kind"] in ("data", "edge", "layer")]
    missing = [f"{case}/{head}" for case in cases for head in logits.HEADS if f"{case}/{head}" not in there]
    if missing:
        raise UserError(
            f"{made.folder / recording.OUTPUTS}: the logits {missing[0]} are missing, so there is nothing to compare with; "
            "copy the golden folder again from where it was recorded, or record it again: `benchlib parity record`"
        )
    return made


def _most_s(config: ParityConfig) -> float:
    return max(config.member_timeout_s, config.budget_s)


def _compute_truth(bench: Bench) -> None:
    """Compute the same in double precision; a run without it cannot tell "different" from "worse", and says so."""
    left_s, expected_s = bench.pace.left_s(), bench.pace.expected_s()
    if not bench.config.record and expected_s > left_s:
        bench.cut.append(f"double precision: {max(left_s, 0):.0f} s were left, {expected_s:.0f} s needed")
        return
    seconds = _most_s(bench.config) if bench.config.record else min(bench.config.member_timeout_s, left_s)
    ended = processes.run(bench.run_dir, golden.TRUTH, bench.events, seconds)
    bench.seconds[golden.TRUTH] = ended.seconds
    if ended.status == "done":
        bench.truth = Recording.open(bench.folder / golden.TRUTH)
        bench.pace.took(ended.seconds, "fp64")
    else:
        bench.cut.append(f"double precision ({ended.status}): {ended.reason}")


def _compare_all(bench: Bench) -> None:
    """Take the members in the order of their table, those that compile last, and the attention kernels before these."""
    config = bench.config
    if config.record:
        return
    bench.events.emit("phase", name="members", text="computing and comparing members")
    tensors = load_file(bench.folder / golden.INPUTS)
    for slow in (False, True):
        for member in (member for member in chosen(config) if member.slow == slow):
            _take(bench, member, tensors)
        if config.attention_kernels and not slow:
            _take_attention(bench)


def _take(bench: Bench, member: Member, tensors: Mapping[str, np.ndarray]) -> None:
    """Compute and compare one member, whatever becomes of it."""
    backend = bench.config.backend
    lacking = bench.pace.lacking(member)
    if lacking:
        bench.turns.append(Turn(member, backend, "no time", lacking))
        bench.cut.append(f"{member.name}: {lacking}")
        return
    began = Moment.now()
    limit_s = min(bench.config.member_timeout_s, bench.pace.left_s())
    ended = processes.run(bench.run_dir, member.name, bench.events, limit_s)
    if ended.status == "done":
        turn = _compare(bench, member, tensors)
        bench.pace.took(began.since(), _kind(member))
    elif ended.status == "unavailable":
        turn = Turn(member, backend, "unavailable", ended.reason)
    elif (
        ended.status == "timeout"
        and limit_s < bench.config.member_timeout_s
        and not bench.pace.was_fair(limit_s, member)
    ):
        reason = f"ended after {limit_s:.0f} s, when the budget of {bench.config.budget_s:g} s was used up"
        turn = Turn(member, backend, "no time", reason)
        bench.cut.append(f"{member.name}: {reason}")
    else:
        turn = Turn(member, backend, "failed", ended.reason)
    bench.turns.append(dataclasses.replace(turn, seconds=ended.seconds))


def _compare(bench: Bench, member: Member, tensors: Mapping[str, np.ndarray]) -> Turn:
    """Compare a member's recording with the reference's. What cannot be compared is the member's failure."""
    backend, folder = bench.config.backend, bench.run_dir / "members" / member.name
    try:
        candidate = Recording.open(folder)
        comparison = compare.compare(
            bench.reference, candidate, bench.truth, tensors, member, ease=bench.config.ease, **_f1(bench, candidate)
        )
    except (UserError, KeyError, ValueError, TypeError, ArithmeticError) as error:
        reason = f"its recording cannot be compared: {type(error).__name__}: {error}"
        return Turn(member, backend, "failed", reason)
    if not bench.config.keep:
        _drop(folder)
    return Turn(member, backend, "compared", meta=candidate.meta, comparison=comparison)


def _f1(bench: Bench, candidate: Recording) -> dict[str, Any]:
    """Return what the dev set says of a candidate: F1 of the reference and of its own, and of how many questions."""
    assert bench.reference is not None
    if any(name.startswith("outputs dev/") for name in candidate.meta.get("nonfinite", {})):
        return {}  # no span is the best of logits that are no numbers, and these fail the member anyway
    scores = []
    for name, recorded in ((golden.REFERENCE, bench.reference), (str(candidate.meta["member"]), candidate)):
        if name not in bench.scores and (score := inputs.dev_scores(bench.folder, recorded.outputs())):
            bench.scores[name] = score
        if name not in bench.scores:
            return {}
        scores.append(bench.scores[name]["f1"])
    return {"f1": tuple(scores), "questions": bench.config.dev_questions}


def _take_attention(bench: Bench) -> None:
    left_s = bench.pace.left_s()
    if left_s < bench.pace.expected_s():
        bench.cut.append(f"attention kernels: no time in the budget of {bench.config.budget_s:g} s")
        return
    limit_s = min(bench.config.member_timeout_s, left_s)
    ended = processes.run(bench.run_dir, ATTENTION, bench.events, limit_s)
    bench.seconds[ATTENTION] = ended.seconds
    if ended.status == "done":
        rows = read_object(bench.run_dir / f"{ATTENTION}.json", {"rows": list})["rows"]
        bench.attention = rows
    else:
        bench.cut.append(f"attention kernels ({ended.status}): {ended.reason}")


def _drop(folder: Path) -> None:
    for name in LARGE:
        (folder / name).unlink(missing_ok=True)


def _close_golden(bench: Bench) -> None:
    """Remove what takes gigabytes from the run's own golden folder unless it is kept, and seal the rest."""
    if not bench.config.keep:
        (bench.folder / golden.WEIGHTS).unlink(missing_ok=True)
        for name in (golden.REFERENCE, golden.TRUTH):
            _drop(bench.folder / name)
    assert bench.reference is not None
    fields = {name: bench.fields[name] for name in ("model", "inputs_sha256", "cases")}
    bench.fields = golden.write(
        bench.folder, **fields, work=golden.work(bench.config), environment=bench.reference.meta["environment"]
    )


def _write(bench: Bench, status: Any, reason: str = "", startup_s: float | None = None) -> None:
    """Write the result with what there is."""
    tables = {
        "members": [metrics.member_row(turn) for turn in bench.turns],
        "quantities": [row for turn in bench.turns for row in metrics.quantity_rows(turn)],
        **metrics.comparison_rows(bench.turns),
        "latency": latencies(bench),
        ATTENTION: bench.attention,
    }
    values: list[Metric] = []
    if "model" in bench.fields:
        suffix = metrics.scope(bench.config, bench.fields["model"])
        values = metrics.metrics(bench.turns, suffix)
        if bench.reference is not None and not bench.config.golden:
            values += metrics.latency_metrics(golden.REFERENCE, bench.reference.meta.get("latency"), suffix)
    if startup_s is not None:
        values.append(measured("startup_s", startup_s, "s", "lower"))
    total_s = bench.pace.began.since()
    values.append(measured("total_s", total_s, "s", "lower"))
    known = facts(bench)
    result = Result.of(
        bench.config, status=status, reason=reason, started_at=bench.pace.began.wall, ended_at=bench.pace.began.wall + total_s,
        metrics=values, facts=known, tables=tables, notes=notes(known),
    )  # fmt: skip
    save_result(bench.run_dir, result)


def latencies(bench: Bench) -> list[Row]:
    """Return the table ``latency``: the reference first, then every member that was timed.

    The reference of a recording is left out: it was timed in another run, in general on another machine.
    """
    timed = [(turn.member.name, turn.meta) for turn in bench.turns if turn.meta]
    if bench.reference and not bench.config.golden:
        timed.insert(0, (golden.REFERENCE, bench.reference.meta))
    rows = [metrics.latency_row(name, meta.get("latency")) for name, meta in timed]
    return [row for row in rows if row is not None]


def facts(bench: Bench) -> dict[str, Any]:
    """Return what is not a number of a member: model, reference, environments, what was cut."""
    meta = bench.reference.meta if bench.reference is not None else {}
    candidate: Mapping[str, Any] = next((turn.meta for turn in bench.turns if turn.meta), meta)
    model, created_at = bench.fields.get("model", {}), bench.fields.get("created_at")
    return {
        "model": model,
        "model_sha256": model.get("sha256", ""),
        "inputs_sha256": bench.fields.get("inputs_sha256", ""),
        "reference": {
            **{
                name: meta.get(name, "")
                for name in ("member", "backend", "device", "precision", "created_at", "environment")
            },
            "outputs_sha256": bench.reference_sha256,
        },
        "truth": bench.truth is not None,
        "truth_nonfinite": sum((bench.truth.meta.get("nonfinite") or {}).values()) if bench.truth else 0,
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


def _identity(bench: Bench) -> dict[str, Any]:
    """Return by content what the config names by path, so that a baseline holds on another machine too."""
    model, config = bench.fields.get("model", {}), bench.config
    identity: dict[str, Any] = {}
    if Path(config.model).is_absolute():
        identity["model"] = model.get("sha256", "")
    if config.dev_file:
        identity["dev_file"] = bench.fields.get("inputs_sha256", "")
    if config.golden:  # its date of recording is not what it holds
        parts = (model.get("sha256", ""), bench.fields.get("inputs_sha256", ""), bench.reference_sha256)
        identity["golden"] = hashlib.sha256(" ".join(parts).encode()).hexdigest()
    return identity


def notes(known: Mapping[str, Any]) -> list[str]:
    """Return sentences for the reader that no table holds, from the facts: which model, and what the truth lacks."""
    description, broken = known["model"].get("description"), known["truth_nonfinite"]
    lacks = f"{broken} of its numbers are NaN or infinite; distances to it are those of its other numbers"
    return [f"Model: {description}."] * bool(description) + [f"Double precision: {lacks}."] * bool(broken)
