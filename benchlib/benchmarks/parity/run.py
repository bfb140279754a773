"""The parity benchmark: weights and inputs are prepared once, each member computes in a process of its own, and is compared.

The rank itself opens no device, so that a crash counts as the member's and the next one has the device to itself. A
member that the budget has no time for is skipped.
"""

import hashlib
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from benchlib.benchmarks.parity import golden, inputs, member, recording, weights
from benchlib.benchmarks.parity.compare import HEADS, Reference, compare, from_truth
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
from benchlib.workloads.executors import Member

LARGE = (recording.GRADIENTS, recording.LAYERS)  # of a recording, gigabytes for BERT-base
RESERVE_S = 3.0  # of the budget, for the results
Row = dict[str, Any]


@dataclass
class Bench:
    """What a run has so far. ``fields`` are those of the golden folder's manifest, ``f1`` the scores of the dev set."""

    rank: Rank
    fields: dict[str, Any] = field(default_factory=dict)
    f1: dict[str, float | None] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    no_truth: str = "there is no recording in double precision"

    @property
    def config(self) -> ParityConfig:
        return self.rank.config  # type: ignore[no-any-return]

    @property
    def folder(self) -> Path:
        """The golden folder: the given one, which is only read, or the run's own."""
        return golden.place(self.rank.run_dir, self.config.golden)

    def left_s(self) -> float:
        """Return what is left of the budget."""
        return self.config.budget_s - RESERVE_S - self.rank.began.since()

    def computed(self, name: str, timeout_s: float) -> Ended:
        """Let a process compute ``name``; its progress becomes events of this rank."""
        last = {"done": 0, "total": 1, "what": "starting"}

        def tell(progress: Any) -> None:
            last.update(progress or {})
            about = {"done": last["done"], "total": last["total"], "unit": last["what"]}
            self.rank.events.emit("progress", phase="measure", member=name, **about)

        run_dir, log = self.rank.run_dir, self.rank.run_dir / "logs" / f"member-{name}"
        work = (member.record, run_dir, name, "")
        try:
            return child.run(*work, timeout_s=timeout_s, tell=tell, log=log, variables=member.variables(name))
        finally:
            clear(run_dir)


def clear(run_dir: Path) -> None:
    """Remove the hidden folders of members that were ended: what they worked in, and recordings that were not whole."""
    folders = (run_dir, run_dir / "members", golden.place(run_dir, ""))
    for path in [path for folder in folders for path in folder.glob(".*") if path.is_dir()]:
        shutil.rmtree(path, ignore_errors=True)


def measure(rank: Rank) -> Tables:
    """Compare all members with the reference; leaves the recordings.

    Raises ``BackendUnavailable`` where the backend or that of the reference is not there, ``UserError`` for a golden
    folder that is damaged, ``RunBroken`` where the reference itself could not be computed.
    """
    bench, config = Bench(rank), rank.config
    clear(rank.run_dir)  # what an attempt before left, whose processes were killed
    _require(config)
    reference = _prepared(bench)
    tables: Tables = {"members": [], "differences": []}
    rank.events.emit("phase", name="members", text="computing and comparing members")
    for way in sorted([] if config.record else chosen(config), key=lambda way: way.slow):
        row, differences = _member(bench, way, reference)
        tables["members"].append(row)
        tables["differences"] += differences
    if not config.golden:
        _close_golden(bench, reference)
    there, own = reference.recording.meta["environment"], bench.environment
    names = {name: (str(there.get(name, "")), str(own.get(name, ""))) for name in [*there, *own]}
    tables["environment"] = [{"fact": name, "reference": a, "members": b} for name, (a, b) in names.items()]
    return tables | {"run": [_run(bench, reference)]}


def _require(config: ParityConfig) -> None:
    """Raise ``BackendUnavailable`` where a backend is not there, before anything is prepared for it.

    Asked in another process: to ask some devices is to take them, and the members need them.
    """
    wanted = {config.reference} if config.record else {config.backend, *([] if config.golden else [config.reference])}
    backends = probe_devices()["backends"] if wanted != {"cpu"} else {}
    for name in sorted(wanted & set(backends)):
        if not backends[name]["available"]:
            raise BackendUnavailable(f"backend {name} is not available: {backends[name]['reason']}")


def _prepared(bench: Bench) -> Reference:
    """Make the golden folder, or hold the given one against its seal."""
    config, folder = bench.config, bench.folder
    if config.golden:
        bench.rank.events.emit("phase", name="data")
        bench.fields = golden.read(config.golden)
        weights.require_layer(folder, config.planted_layer)
        weights.require_left_out(config, folder)  # once, and not by every member
    else:
        bench.rank.events.emit("phase", name="model")
        bench.fields = inputs.prepare(config, folder)
        bench.rank.events.emit("phase", name="reference", text="computing the reference")
        _compute_reference(bench)
    truth = _recorded(bench, golden.TRUTH) if (folder / golden.TRUTH).is_dir() else None
    return Reference.of(_recorded(bench, golden.REFERENCE), truth, load_file(folder / golden.INPUTS))


def _compute_reference(bench: Bench) -> None:
    """Compute the reference, which the run is nothing without, and the same in double precision where there is time."""
    config = bench.config
    # The reference may take the time of all others.
    ended = bench.computed(golden.REFERENCE, max(config.member_timeout_s, config.budget_s))
    if ended.status == "unavailable":
        raise BackendUnavailable(f"the reference on {config.reference}: {ended.reason}")
    if ended.status != "done":
        raise RunBroken(f"the reference on {config.reference} was not computed ({ended.status}): {ended.reason}")
    left_s = config.budget_s if config.record else min(config.member_timeout_s, bench.left_s())
    if left_s <= 0:
        bench.no_truth = f"no time for double precision in the budget of {config.budget_s:g} s"
    elif (ended := bench.computed(golden.TRUTH, left_s)).status != "done":
        bench.no_truth = f"double precision was not computed ({ended.status}): {ended.reason}"


def _recorded(bench: Bench, name: str) -> Recording:
    """Open a recording of the golden folder. ``UserError`` without the logits of a case: nothing could be compared."""
    record = Recording.open(bench.folder / name)
    cases = [case["id"] for case in bench.fields["cases"] if case["kind"] in ("data", "edge", "layer")]
    for key in (f"{case}/{head}" for case in cases for head in HEADS):
        if key not in record.outputs:
            raise UserError(
                f"{record.folder / recording.OUTPUTS}: the logits {key} are missing, so there is nothing to compare "
                f"with; {golden.REMEDY}"
            )
    return record


def _member(bench: Bench, way: Member, reference: Reference) -> tuple[Row, list[Row]]:
    """Compute and compare one member, whatever becomes of it."""
    config, left_s = bench.config, bench.left_s()
    row: Row = {name: getattr(way, name) for name in ("what", "precision", "mode", "gates")}
    row = {"member": way.name, "backend": config.backend, **row, "status": "ok", "reason": ""}
    if left_s <= 0:
        return row | {"status": "skipped", "reason": f"no time is left in the budget of {config.budget_s:g} s"}, []
    limit_s = min(config.member_timeout_s, left_s)
    ended = bench.computed(way.name, limit_s)
    row["seconds"] = ended.seconds
    if ended.status == "unavailable":
        return row | {"status": "skipped", "reason": ended.reason}, []
    if ended.status == "timeout" and limit_s < config.member_timeout_s:
        reason = f"ended after {limit_s:.0f} s, when the budget of {config.budget_s:g} s was used up"
        return row | {"status": "skipped", "reason": reason}, []
    if ended.status != "done":
        return row | {"status": "failed", "reason": ended.reason}, []
    folder = bench.rank.run_dir / "members" / way.name
    try:
        candidate = Recording.open(folder)
        differences = compare(
            reference, candidate, way, config.ease, _f1(bench, reference, candidate), config.dev_questions
        )
        row |= _columns(bench, reference, candidate)
    except (UserError, KeyError, ValueError, TypeError, ArithmeticError) as error:
        reason = f"its recording cannot be compared: {type(error).__name__}: {error}"
        return row | {"status": "failed", "reason": reason}, []
    if not config.keep:
        _drop(folder)
    return row, differences


def _columns(bench: Bench, reference: Reference, candidate: Recording) -> Row:
    """Return what a member's row has of its recording."""
    meta, absent = candidate.meta, candidate.meta.get("absent") or {}
    bench.environment = meta["environment"]
    row: Row = {name: meta[name] for name in ("device", "model_sha256", "inputs_sha256", "executor")}
    row[LATENCY] = meta.get(LATENCY)
    own = from_truth(candidate.outputs, reference.truth, reference.inputs)
    row["truth_max_abs"] = max(own.values(), default=None)
    row["reference_max_abs"] = max((reference.errors[case] for case in own), default=None)
    row["why"] = dict.fromkeys(("truth_max_abs", "reference_max_abs"), bench.no_truth) if not own else {}
    row["why"] |= {LATENCY: absent[LATENCY]} if LATENCY in absent else {}
    return row


def _f1(bench: Bench, reference: Reference, candidate: Recording) -> tuple[float, float] | None:
    """Return the F1 of the reference and of a candidate on the dev set; None where one has none."""
    scores = []
    for name, record in ((golden.REFERENCE, reference.recording), (candidate.meta["member"], candidate)):
        if name not in bench.f1:
            bench.f1[name] = inputs.dev_f1(bench.folder, record.outputs)
        scores.append(bench.f1[name])
    first, second = scores
    return None if first is None or second is None else (first, second)


def _drop(folder: Path) -> None:
    for name in LARGE:
        (folder / name).unlink(missing_ok=True)


def _close_golden(bench: Bench, reference: Reference) -> None:
    """Remove what takes gigabytes from the run's own golden folder unless it is kept, and seal the rest."""
    if not bench.config.keep:
        (bench.folder / golden.WEIGHTS).unlink(missing_ok=True)
        for name in (golden.REFERENCE, golden.TRUTH):
            _drop(bench.folder / name)
    more = {"work": golden.work(bench.config), "environment": reference.recording.meta["environment"]}
    bench.fields = golden.write(bench.folder, bench.fields | more)


def _run(bench: Bench, reference: Reference) -> Row:
    """Return what there is one of: the model, the reference and how far it is from the fp64 reference."""
    config, fields, meta = bench.config, bench.fields, reference.recording.meta
    model, outputs = fields["model"], sha256(reference.recording.folder / recording.OUTPUTS)
    row: Row = {name: model[name] for name in ("init", "description", "parameters")}
    row |= {"model": model["name"], "weights_sha256": model["sha256"], "cases_sha256": fields["inputs_sha256"]}
    row |= {"stand_in": _stand_in(config, model), "cases": len(fields["cases"]), "device": meta["device"]}
    row |= {"reference_backend": meta["backend"], "reference_torch": meta["environment"]["torch"]}
    row |= {"outputs_sha256": outputs, "identity": _identity(bench, outputs), "dev_f1": bench.f1.get(golden.REFERENCE)}
    worst = max(reference.errors, key=lambda case: reference.errors[case], default="")
    limit = numerics.limit(config.backend, "fp32", numerics.LOGITS, meta["backend"])
    row |= {"reference_error": reference.errors.get(worst), "reference_case": worst}
    row["reference_limit"] = numerics.MAX_EASED * limit.value
    row["golden"] = Path(config.golden).name
    row["golden_age_s"] = max(0.0, time.time() - fields["created_at"]) if config.golden else None
    reasons = {"reference_error": bench.no_truth, "golden_age_s": "it was computed in this run"}
    row["why"] = {name: why for name, why in reasons.items() if row[name] is None}
    row["why"] |= {"dev_f1": "there is no dev set"} if row["dev_f1"] is None else {}
    return row


def _stand_in(config: ParityConfig, model: Row) -> str:
    """Return the end of the names of metrics: what stands in for a real model on real text; '' for neither."""
    data = {"minisquad": "_minisquad", "files": "_files", "squad": ""}[config.data]
    tiny = "_tiny" if model["name"] == EMBEDDED_MODEL else ""
    return data + tiny + ("_random" if model["init"] == "random" else "")


def _identity(bench: Bench, outputs_sha256: str) -> Row:
    """Return by content what the config names by path, so that a baseline holds on another machine too."""
    config, fields = bench.config, bench.fields
    identity: Row = {"model": fields["model"]["sha256"]} if Path(config.model).is_absolute() else {}
    identity |= {"dev_file": fields["inputs_sha256"]} if config.dev_file else {}
    if config.golden:  # its date of recording is not what it holds
        parts = (fields["model"]["sha256"], fields["inputs_sha256"], outputs_sha256)
        identity["golden"] = hashlib.sha256(" ".join(parts).encode()).hexdigest()
    return identity
