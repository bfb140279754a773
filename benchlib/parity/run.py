"""The parity benchmark: one process that prepares weights and inputs, starts one process for each member, and compares.

It opens no device: members do, each in a process of its own, so that a crash is told as that member's and the next one
finds the device free. What no longer fits the tier's time is skipped with that reason.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from safetensors.numpy import load_file

from benchlib.clock import Moment
from benchlib.config import BaseConfig
from benchlib.errors import BackendUnavailable, RunBroken, UserError
from benchlib.events import EventWriter
from benchlib.files import read_object
from benchlib.machine import probe_devices
from benchlib.metrics import measured
from benchlib.parity import cases, compare, golden, isolated, members, outcome, prepare, recorded, recording, weights
from benchlib.parity.bench import Bench, facts, latencies, notes
from benchlib.parity.config import ParityConfig
from benchlib.parity.members import Member
from benchlib.parity.outcome import Turn
from benchlib.parity.pace import Pace
from benchlib.parity.recording import Recording
from benchlib.results import Result, save_result

LARGE = (recording.GRADIENTS, recording.LAYERS)  # of a recording, gigabytes for BERT-base
ATTENTION = "attention"


def run(config: BaseConfig, run_dir: Path, events: EventWriter) -> None:
    """Compare all members with the reference; leaves ``result.json``, ``samples.parquet`` and the recordings.

    Raises ``BackendUnavailable`` where the backend or that of the reference is not there, ``UserError`` for a golden
    folder that is damaged, ``RunBroken`` where the reference itself could not be computed.
    """
    if not isinstance(config, ParityConfig):
        raise UserError(f"benchmark = {config.benchmark}: this is the parity benchmark")
    began = Moment.at(psutil.Process().create_time())  # the import of torch is part of the start-up
    bench = Bench(config, run_dir, events, Pace(began, config.budget_s))
    events.emit("phase", name="init")
    isolated.clear(run_dir)  # of an attempt before, whose processes were killed
    try:
        _require(config)
        if "cpu" in _backends(config):
            isolated.warm_up(run_dir)  # it loads its libraries while weights and inputs are made
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
        isolated.stop()
        isolated.clear(run_dir)


def _backends(config: ParityConfig) -> set[str]:
    """Return the backends that members of this run compute on, the reference's only where it is computed."""
    return {config.reference} if config.record else {config.backend, *([] if config.golden else [config.reference])}


def _require(config: ParityConfig) -> None:
    """Raise ``BackendUnavailable`` where a backend is not there, before anything is prepared for it.

    Asked in another process: to ask some devices is to take them, and the members need them.
    """
    wanted = _backends(config)
    if wanted == {"cpu"}:
        return
    found = probe_devices()["backends"]
    for name in sorted(wanted):
        if not found[name]["available"]:
            raise BackendUnavailable(f"backend {name} is not available: {found[name]['reason']}")


def _prepare(bench: Bench) -> None:
    """Make the golden folder, or hold the given one against its seal."""
    config = bench.config
    if config.golden:
        bench.events.emit("phase", name="data")
        bench.fields = golden.read(config.golden)
        weights.require_layer(bench.folder, config.planted_layer)
        weights.require_left_out(config, bench.folder)  # once, and not by every member
        bench.reference = Recording.open(bench.folder / golden.REFERENCE)
        _require_outputs(bench, bench.reference)
        if (bench.folder / golden.TRUTH).is_dir():
            bench.truth = Recording.open(bench.folder / golden.TRUTH)
            _require_outputs(bench, bench.truth)
        return
    bench.events.emit("phase", name="model")
    before_s = bench.began.since()
    bench.fields = prepare.prepare(config, bench.folder)
    bench.seconds["prepare"] = bench.began.since() - before_s
    bench.events.emit("phase", name="reference")
    # The run is nothing without the reference: it may take the time of all others.
    ended = isolated.run(bench.run_dir, golden.REFERENCE, bench.events, _most_s(config))
    if ended.status == "unavailable":
        raise BackendUnavailable(f"the reference on {config.reference}: {ended.reason}")
    if ended.status != "done":
        raise RunBroken(f"the reference on {config.reference} was not computed ({ended.status}): {ended.reason}")
    bench.reference = Recording.open(bench.folder / golden.REFERENCE)
    bench.seconds[golden.REFERENCE] = ended.seconds
    bench.pace.took(ended.seconds)
    _compute_truth(bench)


def _require_outputs(bench: Bench, made: Recording) -> None:
    """Raise ``UserError`` for a recording without the logits of a case: nothing of it could be compared."""
    names = made.outputs()
    for case in bench.fields["cases"]:
        wanted = (f"{case['id']}/start", f"{case['id']}/end") if case["kind"] in ("data", "edge", "layer") else ()
        for name in wanted:
            if name not in names:
                raise UserError(
                    f"{made.folder / recording.OUTPUTS}: the logits {name} are missing, so there is nothing to compare with; "
                    "copy the golden folder again from where it was recorded, or record it anew: `benchlib parity record`"
                )


def _most_s(config: ParityConfig) -> float:
    return max(config.member_timeout_s, config.budget_s)


def _compute_truth(bench: Bench) -> None:
    """Compute the same in double precision; a run without it cannot tell "different" from "worse", and says so."""
    left_s, expected_s = bench.pace.left_s(), bench.pace.expected_s()
    if not bench.config.record and expected_s > left_s:
        bench.cut.append(f"double precision: {max(left_s, 0):.0f} s were left, {expected_s:.0f} s needed")
        return
    seconds = _most_s(bench.config) if bench.config.record else min(bench.config.member_timeout_s, left_s)
    ended = isolated.run(bench.run_dir, golden.TRUTH, bench.events, seconds)
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
    bench.events.emit("phase", name="members")
    inputs = load_file(bench.folder / golden.INPUTS)
    chosen = members.chosen(config)
    for member in (one for one in chosen if not one.slow):
        _take(bench, member, inputs)
    if config.attention_kernels:
        _take_attention(bench)
    for member in (one for one in chosen if one.slow):
        _take(bench, member, inputs)


def _take(bench: Bench, member: Member, inputs: Mapping[str, np.ndarray]) -> None:
    """Compute and compare one member, whatever becomes of it."""
    backend = bench.config.backend
    lacking = bench.pace.lacking(member)
    if lacking:
        bench.turns.append(Turn(member, backend, "no time", lacking))
        bench.cut.append(f"{member.name}: {lacking}")
        return
    began = Moment.now()
    limit_s = min(bench.config.member_timeout_s, bench.pace.left_s())
    ended = isolated.run(bench.run_dir, member.name, bench.events, limit_s)
    if ended.status == "done":
        turn = _compare(bench, member, inputs)
        bench.pace.took(began.since(), member.precision, member.slow)
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


def _compare(bench: Bench, member: Member, inputs: Mapping[str, np.ndarray]) -> Turn:
    """Compare a member's recording with the reference's. What cannot be compared is the member's failure."""
    backend, folder = bench.config.backend, bench.run_dir / "members" / member.name
    try:
        candidate = Recording.open(folder)
        found = compare.compare(
            bench.reference, candidate, bench.truth, inputs, member, ease=bench.config.ease, **_f1(bench, candidate)
        )
    except (UserError, KeyError, ValueError, TypeError, ArithmeticError) as error:
        reason = f"its recording cannot be compared: {type(error).__name__}: {error}"
        return Turn(member, backend, "failed", reason)
    if not bench.config.keep:
        _drop(folder)
    return Turn(member, backend, "compared", meta=candidate.meta, comparison=found)


def _f1(bench: Bench, candidate: Recording) -> dict[str, Any]:
    """Return what the dev set says of a candidate: F1 of the reference and of its own, and of how many questions."""
    assert bench.reference is not None
    if any(name.startswith("outputs dev/") for name in candidate.meta.get("nonfinite", {})):
        return {}  # no span is the best of logits that are no numbers, and these fail the member anyway
    for name, recorded_ in ((golden.REFERENCE, bench.reference), (str(candidate.meta["member"]), candidate)):
        if name not in bench.scores:
            scores = cases.dev_scores(bench.folder, recorded_.outputs())
            if scores is None:
                return {}
            bench.scores[name] = scores
    pair = bench.scores[golden.REFERENCE], bench.scores[str(candidate.meta["member"])]
    return {"f1": (pair[0]["f1"], pair[1]["f1"]), "questions": bench.config.dev_questions}


def _take_attention(bench: Bench) -> None:
    left_s = bench.pace.left_s()
    if left_s < bench.pace.expected_s():
        bench.cut.append(f"attention kernels: no time in the budget of {bench.config.budget_s:g} s")
        return
    limit_s = min(bench.config.member_timeout_s, left_s)
    ended = isolated.run(bench.run_dir, ATTENTION, bench.events, limit_s)
    bench.seconds[ATTENTION] = ended.seconds
    if ended.status == "done":
        rows = read_object(bench.run_dir / f"{ATTENTION}.json", {"rows": list})["rows"]
        bench.attention = [outcome.plain(row) for row in rows]
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
        bench.folder, **fields, work=recorded.work(bench.config), environment=bench.reference.meta["environment"]
    )


def _write(bench: Bench, status: Any, reason: str = "", startup_s: float | None = None) -> None:
    """Write the result with what there is."""
    tables = {
        "members": [outcome.member_row(turn) for turn in bench.turns],
        "quantities": [row for turn in bench.turns for row in outcome.quantity_rows(turn)],
        **outcome.comparison_rows(bench.turns),
        "latency": latencies(bench),
        ATTENTION: bench.attention,
    }
    found = []
    if "model" in bench.fields:
        suffix = outcome.scope(bench.config, bench.fields["model"])
        found = outcome.metrics(bench.turns, suffix)
        if bench.reference is not None and not bench.config.golden:
            found += outcome.latency_metrics(golden.REFERENCE, bench.reference.meta.get("latency"), suffix)
    if startup_s is not None:
        found.append(measured("startup_s", startup_s, "s", "lower"))
    total_s = bench.began.since()
    found.append(measured("total_s", total_s, "s", "lower"))
    result = Result.of(
        bench.config,
        status=status,
        reason=reason,
        started_at=bench.began.wall,
        ended_at=bench.began.wall + total_s,
        metrics=found,
        facts=facts(bench),
        tables=tables,
        notes=notes(bench),
    )
    save_result(bench.run_dir, result)
