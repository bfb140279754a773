"""Two recordings compared: what each quantity differs by, whether that is within its tolerance, and where it sits.

It reads files and computes no model, so a recording from another machine is compared as one from this one.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchlib.parity import depth, logits, scalars, tolerances
from benchlib.parity.members import Member
from benchlib.parity.recording import Recording
from benchlib.parity.rows import FAIL, NOT_COMPARED, PASS, Judge, Row
from benchlib.parity.sides import Sides
from benchlib.parity.tolerances import Tolerance

Table = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Comparison:
    """What came of one member: its outcome with the reason, its quantities, and the tables behind them."""

    member: str
    outcome: str
    reason: str
    rows: tuple[Row, ...] = ()
    logits: Table = ()
    histogram: Table = ()
    layers: Table = ()
    gradients: Table = ()
    curves: Table = ()
    truth: Table = ()

    def quantities(self) -> list[dict[str, Any]]:
        """Return the rows as the table of the result."""
        return [asdict(row) for row in self.rows]


def not_compared(member: Member, reason: str) -> Comparison:
    """Return the comparison of a member that has nothing to be compared with. It never passes."""
    return Comparison(member.name, NOT_COMPARED, reason)


def compare(
    reference: Recording | None,
    candidate: Recording | None,
    truth: Recording | None,
    inputs: Mapping[str, np.ndarray],
    member: Member,
    f1: tuple[float, float] | None = None,
    questions: int = 0,
    ease: bool = True,
) -> Comparison:
    """Compare ``candidate``, recorded by ``member``, with ``reference``; without one of them nothing is compared.

    ``inputs`` are the golden inputs: their attention masks say which positions count. ``f1`` are the reference's and the
    candidate's F1 on the dev set of ``questions`` questions. ``truth`` says how far both are from it. Without ``ease`` the
    limits of logits are those of the table, whatever their size.
    """
    if reference is None or candidate is None:
        return not_compared(member, f"there is no recording of the {'reference' if reference is None else 'member'}")
    fault = _not_of_one_kind(reference, candidate)
    if fault:
        return not_compared(member, fault)
    judge = Judge(member, candidate.meta["backend"], reference.meta["backend"], ease)
    sides = Sides(reference, candidate, truth, inputs, judge)
    rows = (
        _finite(sides),
        *_logits(sides),
        scalars.loss(sides),
        _gradients(sides),
        scalars.curve(sides),
        _layers(sides),
        scalars.repeats(sides),
        scalars.invariance(sides, tolerances.BATCH, "batch_max_abs"),
        scalars.invariance(sides, tolerances.PADDING, "padding_max_abs"),
        scalars.f1(sides, f1, questions),
    )
    outcome, reason = _outcome(rows)
    tables = {name: tuple({"member": member.name} | row for row in found) for name, found in sides.tables.items()}
    return Comparison(member.name, outcome, reason, rows, **tables)


def _not_of_one_kind(reference: Recording, candidate: Recording) -> str:
    if reference.folder.resolve() == candidate.folder.resolve():
        return "the reference itself: there is nothing to compare it with"
    for name, what in (("model_sha256", "weights"), ("inputs_sha256", "inputs")):
        if reference.meta[name] != candidate.meta[name]:
            return (
                f"other {what}: {candidate.meta[name][:12]}, the reference's are {reference.meta[name][:12]}; "
                "a difference of results would say nothing"
            )
    return ""


def _outcome(rows: tuple[Row, ...]) -> tuple[str, str]:
    """Return the outcome of a member: FAIL if one quantity that decides fails, PASS only if its logits were compared."""
    deciding = [row for row in rows if row.quantity not in tolerances.LOCATES]
    failed = [row for row in deciding if row.status == FAIL]
    if failed:
        return FAIL, "; ".join(_told(row) for row in failed)
    skipped = [row for row in deciding if row.quantity in (tolerances.LOGITS, tolerances.COSINE) and row.status != PASS]
    if skipped:
        return NOT_COMPARED, skipped[0].reason
    return PASS, ""


def _told(row: Row) -> str:
    value = "" if row.value is None else f" {row.value:.3g} instead of {row.limit_text}"
    where = f" ({row.worst})" if row.worst and row.worst not in row.reason else ""
    return f"{row.quantity}{value}{where}" + (f": {row.reason}" if row.reason else "")


def _finite(sides: Sides) -> Row:
    found = sides.nonfinite
    worst = max(found, key=lambda place: found[place], default="")
    reason = ", ".join(f"{count} in {place}" for place, count in sorted(found.items())[:5])
    more = f" and {len(found) - 5} more places" if len(found) > 5 else ""
    return sides.judge.judge(tolerances.FINITE, float(sum(found.values())), worst, reason + more)


def _logits(sides: Sides) -> tuple[Row, ...]:
    judge, inputs = sides.judge, sides.inputs
    # Read once: a safetensors mapping copies a tensor each time it is asked for.
    candidate, reference = dict(sides.candidate.outputs()), dict(sides.reference.outputs())
    truth = dict(sides.truth.outputs()) if sides.truth else {}
    absent = sides.candidate.meta.get("absent") or {}
    wanted = logits.names(reference)
    skipped = {name: absent[name] for name in wanted if name in absent and f"{name}/start" not in candidate}
    there = [name for name in wanted if name not in skipped]
    faults = {name: fault for name in there if (fault := logits.fault(name, candidate, reference))}
    cases = [logits.case(name, candidate, reference, truth, inputs) for name in there if name not in faults]
    sides.cases = [case for case in cases if case.finite]
    limits = {case.name: _limit(judge, case) for case in cases}
    table = [case.row() | {"limit": limits[case.name].value} for case in cases]
    found = logits.truth(cases)
    sides.tables |= {"logits": table, "histogram": list(logits.histogram(cases)), "truth": [found] if found else []}
    names = (tolerances.LOGITS, tolerances.COSINE, tolerances.SCALE, tolerances.OFFSET, tolerances.SPANS)
    broken = next(iter(faults.values()), "") or next((_not_finite(case) for case in cases if not case.finite), "")
    if broken:
        return tuple(judge.fail(name, broken) for name in names)
    if not cases:
        why = next(iter(skipped.values()), "the reference has no outputs")
        return tuple(judge.skip(name, f"no case was compared: {why}") for name in names)
    left_out = [f"without {name}: {why}" for name, why in skipped.items()]
    # Limits may differ from case to case: told is the largest difference, of the cases beyond their limit where one is.
    far = max([row for row in table if row["max_abs"] > row["limit"]] or table, key=lambda row: row["max_abs"])
    at = [logits.place(far["case"], candidate, reference, inputs)] if far["max_abs"] else []
    return (
        judge.judge(tolerances.LOGITS, far["max_abs"], far["case"], "; ".join(at + left_out), limits[far["case"]]),
        _cosine(judge, table, "; ".join(left_out)),
        *_in_common(judge, cases),
        _spans(judge, candidate, reference, inputs, limits),
    )


def _cosine(judge: Judge, table: list[dict[str, Any]], left_out: str) -> Row:
    directed = [row for row in table if row["one_minus_cosine"] is not None]
    if not directed:
        return judge.skip(tolerances.COSINE, "no case has two positions to compare: of one the cosine is but a sign")
    apart = max(directed, key=lambda row: row["one_minus_cosine"])
    return judge.judge(tolerances.COSINE, apart["one_minus_cosine"], apart["case"], left_out)


def _in_common(judge: Judge, cases: list[logits.Case]) -> tuple[Row, Row]:
    """Judge what all logits of the data cases differ by alike: a factor, and an addend."""
    data = [case for case in cases if case.kind == "data"]
    if not data:
        why = "no case of data was compared"
        return judge.skip(tolerances.SCALE, why), judge.skip(tolerances.OFFSET, why)
    off, head = logits.offset(data)
    return judge.judge(tolerances.SCALE, logits.scale(data)), judge.judge(
        tolerances.OFFSET, off, head and f"{head} logits"
    )


def _limit(judge: Judge, case: logits.Case) -> Tolerance:
    return judge.eased(tolerances.LOGITS, case.largest, case.reference_error)


def _not_finite(case: logits.Case) -> str:
    whole = all(np.isfinite(case.reference[head]).all() for head in logits.HEADS)
    return f"{case.name}: {'' if whole else 'the reference has '}logits that are NaN or infinite"


def _spans(
    judge: Judge,
    candidate: logits.Arrays,
    reference: logits.Arrays,
    inputs: logits.Arrays,
    limits: dict[str, Tolerance],
) -> Row:
    margins = {name: 4 * limit.value for name, limit in limits.items()}
    decided, agreeing, rows, differing = logits.span_agreement(candidate, reference, inputs, margins)
    if not decided:
        return judge.skip(tolerances.SPANS, f"in none of {rows} rows the reference's best span leads clearly")
    return judge.judge(tolerances.SPANS, agreeing / decided, differing, f"{decided} of {rows} rows are decided")


def _gradients(sides: Sides) -> Row:
    own, other = sides.candidate.gradients(), sides.reference.gradients()
    if not other:
        return sides.judge.skip(tolerances.GRADIENTS, "the reference has none")
    if not own:
        return sides.lacking(tolerances.GRADIENTS, "gradients")
    missing = [name for name in other if name not in own]
    if missing:
        return sides.judge.fail(tolerances.GRADIENTS, f"{len(missing)} parameters have none", missing[0])
    table = depth.gradients(own, other, sides.judge.tolerance(tolerances.GRADIENTS).value)
    sides.tables["gradients"] = table
    broken = next((row["parameter"] for row in table if row["relative_l2"] is None), None)
    if broken is not None:
        return sides.judge.fail(tolerances.GRADIENTS, "not finite, or of another shape", broken)
    worst = max(table, key=lambda row: row["relative_l2"])
    beyond = sum(row["beyond"] for row in table)
    reason = f"{beyond} of {len(table)} parameters are beyond" if beyond else ""
    return sides.judge.judge(tolerances.GRADIENTS, worst["relative_l2"], worst["parameter"], reason)


def _layers(sides: Sides) -> Row:
    own, other = sides.candidate.layers(), sides.reference.layers()
    if not other or not own:
        return _layers_by_digest(sides, bool(other))
    digests = sides.reference.meta.get("layers") or []
    kinds = {str(row["name"]): str(row["kind"]) for row in digests}
    mask = sides.inputs.get("layer/attention_mask")
    limit = sides.judge.tolerance(tolerances.LAYERS).value
    table = depth.layers(own, other, None if mask is None else mask == 1, kinds, limit)
    sides.tables["layers"] = table
    if not table:
        return sides.judge.fail(tolerances.LAYERS, "no module's name is the reference's")
    first = next((row for row in table if row["beyond"]), None)
    if first is None:
        worst = max(table, key=lambda row: row["relative_l2"])
        return sides.judge.judge(tolerances.LAYERS, worst["relative_l2"], worst["layer"])
    count = sum(row["beyond"] for row in table)
    reason = f"the first of {count} beyond, of {len(table)} in the order of the forward pass"
    value = math.nan if first["relative_l2"] is None else first["relative_l2"]
    return sides.judge.judge(tolerances.LAYERS, value, first["layer"], reason)


def _layers_by_digest(sides: Sides, kept: bool) -> Row:
    """Judge activations whose tensors were not kept: digests tell whether they are the same, not how far apart."""
    own, other = (
        {str(row["name"]): row["sha256"] for row in side.meta.get("layers") or []}
        for side in (sides.candidate, sides.reference)
    )
    if not other and not kept:
        return sides.judge.skip(tolerances.LAYERS, "the reference has none")
    if not own:
        return sides.lacking(tolerances.LAYERS, "layers")
    if own == other:
        return sides.judge.judge(tolerances.LAYERS, 0.0, "", f"the digests of all {len(own)} layers are equal")
    return sides.judge.skip(
        tolerances.LAYERS, "the tensors were not kept, and digests do not say how far apart they are"
    )
