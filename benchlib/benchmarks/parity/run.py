"""The parity benchmark: weights and inputs are prepared once, each member computes in a process of its own, and is compared.

The rank itself opens no device, so that a crash counts as the member's and the next one has the device to itself. A
member that the budget has no time for is skipped.
"""

import hashlib
import tempfile
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from benchlib.benchmarks.parity import exercise, golden, inputs, recording, weights
from benchlib.benchmarks.parity.compare import Reference, compare, others
from benchlib.benchmarks.parity.config import ParityConfig, chosen
from benchlib.benchmarks.parity.exercise import LATENCY
from benchlib.benchmarks.parity.recording import Recording
from benchlib.config.schema import EMBEDDED_MODEL
from benchlib.core.errors import BackendUnavailable, RunBroken, UserError
from benchlib.core.files import sha256
from benchlib.core.machine import probe_devices
from benchlib.runtime import child
from benchlib.runtime.child import Ended
from benchlib.runtime.measurement import Rank, Tables
from benchlib.workloads import numerics
from benchlib.workloads.executors import MEMBERS, Member

LARGE = (recording.GRADIENTS, recording.LAYERS)  # of a recording, gigabytes for BERT-base
STAND_INS = ("minisquad", "files", EMBEDDED_MODEL, "random")
RESERVE_S = 3.0  # of the budget, for the results
Row = dict[str, Any]


@dataclass
class Bench:
    """What a run has so far. ``fields`` are those of the golden folder's manifest, ``no_fp64`` says why there is no fp64."""

    rank: Rank
    config: ParityConfig
    folder: Path  # the golden one: the given one, which is only read, or the run's own
    fields: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    no_fp64: str = "there is no recording in double precision"

    @cached_property
    def reference(self) -> Reference:
        fp64 = Recording.open(self.folder / golden.FP64) if (self.folder / golden.FP64).is_dir() else None
        return Reference(Recording.open(self.folder / golden.REFERENCE), fp64, load_file(self.folder / golden.INPUTS))

    @cached_property
    def f1(self) -> float | None:
        """The F1 of the reference on the dev set, None without one."""
        return inputs.dev_f1(self.folder, self.reference.recording.outputs)

    @property
    def used_up(self) -> str:
        budget_s = self.config.budget_s
        return f"the budget of {budget_s:g} s was used up: --set budget_s={4 * budget_s:g} gives more time"

    def left_s(self) -> float:
        """Return what is left of the budget."""
        return self.rank.left_s() - RESERVE_S

    def computed(self, name: str, timeout_s: float) -> Ended:
        """Let a process compute ``name``; its progress becomes signs of life of this rank."""
        last = {"done": 0, "total": 1, "unit": "starting"}

        def tell(progress: Any) -> None:
            last.update(progress or {})
            # No progress: what is left of a part of one member says nothing about the phase.
            self.rank.events.emit("heartbeat", phase="measure", member=name, **last)

        run_dir = self.rank.run_dir
        log = run_dir / "logs" / f"member-{name}"
        with tempfile.TemporaryDirectory(prefix=f".member-{name}-", dir=run_dir) as work:
            return child.run(exercise.record, run_dir, name, Path(work), timeout_s=timeout_s, tell=tell, log=log)


def measure(rank: Rank) -> Tables:
    """Compare all members with the reference; leaves the recordings.

    Raises ``BackendUnavailable`` where the backend or that of the reference is not there, ``UserError`` for a golden
    folder that is damaged, ``RunBroken`` where the reference itself could not be computed.
    """
    config = rank.config
    bench = Bench(rank, config, golden.place(rank.run_dir, config.golden))
    _require(config)
    _prepare(bench)
    tables: Tables = {"members": [], "differences": []}
    for way in sorted([] if config.record else chosen(config), key=lambda way: way.slow):
        rank.events.emit("phase", name="members", text=f"computing and comparing {way.name}")
        row, differences = _member(bench, way)
        tables["members"].append(row)
        tables["differences"] += differences
    tables["recorded"] = [] if config.record or config.golden else _recorded(bench)
    there, here = bench.reference.recording.meta["environment"], bench.environment
    if not config.golden:  # without what takes gigabytes, unless that is kept
        large = [f"{name}/{file}" for name in (golden.REFERENCE, golden.FP64) for file in LARGE]
        for name in [] if config.keep else [golden.WEIGHTS, *large]:
            (bench.folder / name).unlink(missing_ok=True)
        sealed = bench.fields | {"work": golden.work(config), "environment": there}
        bench.fields = golden.write(bench.folder, sealed)
    tables["environment"] = [
        {"fact": name, "reference": str(there.get(name, "")), "members": str(here.get(name, ""))}
        for name in dict.fromkeys([*there, *here])
    ]
    return tables | {"run": [_run(bench)]}


def _require(config: ParityConfig) -> None:
    """Raise ``BackendUnavailable`` where a backend is not there, before anything is prepared for it.

    Asked in another process: to ask some devices is to take them, and the members need them.
    """
    wanted = {config.backend, config.backend if config.golden else config.reference_backend}
    backends = probe_devices()["backends"] if wanted != {"cpu"} else {}
    for name in sorted(wanted & set(backends)):
        if not backends[name]["available"]:
            raise BackendUnavailable(f"backend {name} is not available: {backends[name]['reason']}")


def _prepare(bench: Bench) -> None:
    """Make the golden folder, or compare the given one with its seal."""
    config, folder, tell = bench.config, bench.folder, bench.rank.events.emit
    if config.golden:
        tell("phase", name="data")
        bench.fields = golden.read(folder)
        if config.planted_layer >= 0:  # once, not by each member
            weights.require_layer(weights.loaded(folder, "eager")[0], config.planted_layer)
        return
    tell("phase", name="model")
    bench.fields = inputs.prepare(config, folder)
    tell("phase", name="reference", text="computing the reference")
    # The run is nothing without the reference: it may take the time of all others.
    ended = bench.computed(golden.REFERENCE, max(config.member_timeout_s, config.budget_s))
    if ended.status == "unavailable":
        raise BackendUnavailable(f"the reference on {config.reference_backend}: {ended.reason}")
    if ended.status != "done":
        raise RunBroken(
            f"the reference on {config.reference_backend} was not computed ({ended.status}): {ended.reason}"
        )
    left_s = config.budget_s if config.record else min(config.member_timeout_s, bench.left_s())
    if left_s <= 0:
        bench.no_fp64 = bench.used_up
    elif (ended := bench.computed(golden.FP64, left_s)).status != "done":
        bench.no_fp64 = f"double precision was not computed ({ended.status}): {ended.reason}"


def _member(bench: Bench, way: Member) -> tuple[Row, list[Row]]:
    """Compute and compare one member, whatever becomes of it."""
    config, left_s = bench.config, bench.left_s()
    row: Row = {name: getattr(way, name) for name in ("what", "precision", "mode", "gates")}
    row |= {"member": way.name, "backend": config.backend}

    def without(status: str, reason: str) -> tuple[Row, list[Row]]:
        return row | {"status": status, "reason": reason}, []

    if left_s <= 0:
        return without("skipped", bench.used_up)
    limit_s = min(config.member_timeout_s, left_s)
    ended = bench.computed(way.name, limit_s)
    row["seconds"] = ended.seconds
    if ended.status == "timeout" and limit_s < config.member_timeout_s:
        return without("skipped", f"ended after {limit_s:.0f} s: {bench.used_up}")
    if ended.status != "done":
        return without("skipped" if ended.status == "unavailable" else "failed", ended.reason)
    try:
        candidate = Recording.open(bench.rank.run_dir / "members" / way.name)
        for what in others(bench.reference, candidate):
            raise UserError(what)
        scores = bench.f1, inputs.dev_f1(bench.folder, candidate.outputs)
        differences = compare(bench.reference, candidate, way, scores, config.dev_questions)
        row |= _columns(bench, candidate)
    except (UserError, LookupError, ValueError, TypeError, ArithmeticError) as error:
        return without("failed", f"its recording cannot be compared: {type(error).__name__}: {error}")
    for name in () if config.keep else LARGE:
        (candidate.folder / name).unlink(missing_ok=True)
    return row | {"status": "ok", "reason": ""}, differences


def _recorded(bench: Bench) -> list[Row]:
    """Compare this run's reference with the recording of the same work that comes with the kit, also where its weights differ."""
    if (folder := golden.shipped(bench.config)) is None:
        return []
    golden.read(folder)
    inputs, own = load_file(folder / golden.INPUTS), bench.reference.recording
    shipped = Reference(Recording.open(folder / golden.REFERENCE), bench.reference.fp64, inputs)
    cells = {"member": "eager", "precision": "fp32", "at": "", "index": 0, "eased": "", "value": 1.0, "limit": 0.0}
    rows: list[Row] = [cells | {"quantity": "weights and inputs", "note": what} for what in others(shipped, own)]
    if own.meta["inputs_sha256"] == shipped.recording.meta["inputs_sha256"]:
        rows += compare(shipped, own, MEMBERS["eager"])
    return [row for row in rows if row.get("status") != "skipped"]  # what it leaves out: gradients, the dev set


def _state(row: Row, **cells: tuple[Any, str | None]) -> Row:
    """Return a row with more cells, each given with why it is missing where it is None."""
    missing = {name: why for name, (value, why) in cells.items() if value is None}
    return row | {name: value for name, (value, _) in cells.items()} | {"why": missing}


def _columns(bench: Bench, candidate: Recording) -> Row:
    """Return what a member's row has of its recording."""
    meta, reference = candidate.meta, bench.reference
    bench.environment = meta["environment"]
    distances = reference.from_fp64(candidate.outputs)
    return _state(
        {name: meta[name] for name in ("device", "model_sha256", "inputs_sha256", "executor")},
        fp64_max_abs=(max(distances.values(), default=None), bench.no_fp64),
        reference_max_abs=(max((reference.errors[case] for case in distances), default=None), bench.no_fp64),
        latency_ms=(meta.get(LATENCY), meta["absent"].get(LATENCY)),
    )


def _run(bench: Bench) -> Row:
    """Return what there is one of: the model, the reference and how far it is from the fp64 reference."""
    config, fields, meta, errors = bench.config, bench.fields, bench.reference.recording.meta, bench.reference.errors
    model, outputs = fields["model"], sha256(bench.folder / golden.REFERENCE / recording.OUTPUTS)
    row = {"weights_sha256": model["sha256"], "cases_sha256": fields["inputs_sha256"], "outputs_sha256": outputs}
    # By content what the config names by path, so that a baseline holds on another machine too; a golden folder's date is none.
    by_path = {
        "model": (Path(config.model).is_absolute(), model["sha256"]),
        "golden": (config.golden, hashlib.sha256(" ".join(row.values()).encode()).hexdigest()),
        "dev_file": (config.dev_file, fields["inputs_sha256"]),
    }
    row["identity"] = {name: digest for name, (named, digest) in by_path.items() if named}
    row |= {name: model[name] for name in ("init", "description", "parameters")}
    # The end of the names of metrics: what stands in for a real model on real text.
    named = (f"_{name}" for name in (config.data, model["name"], model["init"]) if name in STAND_INS)
    limit = numerics.limit(config.backend, "fp32", numerics.LOGITS, meta["backend"])
    row |= {
        "model": model["name"],
        "stand_in": "".join(named),
        "cases": len(fields["cases"]),
        "device": meta["device"],
        "reference_backend": meta["backend"],
        "reference_torch": meta["environment"]["torch"],
        "reference_limit": numerics.MAX_EASED * limit.value,
        "golden": Path(config.golden).name,
    }
    age_s = max(0.0, time.time() - fields["created_at"]) if config.golden else None
    return _state(
        row,
        reference_error=(max(errors.values(), default=None), bench.no_fp64),
        golden_age_s=(age_s, "it was computed in this run"),
        last_loss=(next(iter(meta.get("curve", ())[-1:]), None), "nothing was trained: train_steps = 0"),
        dev_f1=(bench.f1, "there is no dev set"),
    )
