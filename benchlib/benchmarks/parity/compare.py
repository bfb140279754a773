"""Two recordings compared: what each quantity differs by, whether that is within its tolerance, and where it sits.

It reads files and computes no model, so a recording from another machine is compared as one from this one. Activations
and gradients are measured by the L2 norm of the difference, relative to the reference's: a single number of a tensor that
is neither blind to scale, as a cosine is, nor ruled by its one worst element.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchlib.benchmarks.parity import logits, tolerances
from benchlib.benchmarks.parity.config import Member
from benchlib.benchmarks.parity.logits import Case
from benchlib.benchmarks.parity.recording import Recording, count_nonfinite
from benchlib.benchmarks.parity.tolerances import FAIL, GRADIENT_FLOOR, NOT_COMPARED, PASS, Judge, Row, Tolerance
from benchlib.workloads import distances

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Comparison:
    """What came of one member: its outcome with the reason, its quantities, and the tables behind them by name."""

    member: str
    outcome: str
    reason: str
    rows: tuple[Row, ...] = ()
    tables: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)


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
        return Comparison(
            member.name, NOT_COMPARED, f"there is no recording of the {'reference' if reference is None else 'member'}"
        )
    fault = _not_of_one_kind(reference, candidate)
    if fault:
        return Comparison(member.name, NOT_COMPARED, fault)
    judge = Judge(member, candidate.meta["backend"], reference.meta["backend"], ease)
    sides = Sides(reference, candidate, truth, inputs, judge)
    rows = (
        _finite(sides),
        *_logits(sides),
        _loss(sides),
        _gradients(sides),
        _curve(sides),
        _layers(sides),
        _repeats(sides),
        _invariance(sides, tolerances.BATCH, "batch_max_abs"),
        _invariance(sides, tolerances.PADDING, "padding_max_abs"),
        _f1(sides, f1, questions),
    )
    outcome, reason = _outcome(rows)
    return Comparison(member.name, outcome, reason, rows, sides.tables)


def _not_of_one_kind(reference: Recording, candidate: Recording) -> str:
    if reference.folder.resolve() == candidate.folder.resolve():
        return "this is the reference itself: there is nothing to compare it with"
    for name, what in (("model_sha256", "weights"), ("inputs_sha256", "inputs")):
        if reference.meta[name] != candidate.meta[name]:
            return (
                f"other {what}: {candidate.meta[name][:12]}, the reference has {reference.meta[name][:12]}; "
                "the results are not comparable"
            )
    return ""


def _outcome(rows: tuple[Row, ...]) -> tuple[str, str]:
    """Return the outcome of a member: FAIL if one quantity that decides fails, PASS only if its logits were compared."""
    deciding = [row for row in rows if row.quantity not in tolerances.LOCATES]
    failed = [row for row in deciding if row.status == FAIL]
    if failed:
        return FAIL, "; ".join(_sentence(row) for row in failed)
    skipped = [row for row in deciding if row.quantity in (tolerances.LOGITS, tolerances.COSINE) and row.status != PASS]
    if skipped:
        return NOT_COMPARED, skipped[0].reason
    return PASS, ""


def _sentence(row: Row) -> str:
    value = "" if row.value is None else f" {row.value:.3g} instead of {row.limit_text}"
    where = f" ({row.worst})" if row.worst and row.worst not in row.reason else ""
    return f"{row.quantity}{value}{where}" + (f": {row.reason}" if row.reason else "")


@dataclass
class Sides:
    """Both sides and what is known so far: ``cases`` and ``tables`` are filled as the quantities are judged."""

    reference: Recording
    candidate: Recording
    truth: Recording | None
    inputs: Mapping[str, np.ndarray]
    judge: Judge
    cases: list[Case] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def nonfinite(self) -> dict[str, int]:
        """How many values of the candidate are NaN or infinite, by place: as its writer counted, and as stored."""
        made, counted = self.candidate, dict(self.candidate.meta.get("nonfinite") or {})
        for where, arrays in (("outputs", made.outputs()), ("gradients", made.gradients()), ("layers", made.layers())):
            counted |= count_nonfinite(arrays, where)
        return counted

    def lacking(self, quantity: str, place: str) -> Row:
        """Return the row of a quantity that the candidate has no value of: a reason is accepted, silence is not."""
        reason = (self.candidate.meta.get("absent") or {}).get(quantity)
        if reason:
            return self.judge.skip(quantity, reason)
        lost = place in (self.candidate.meta.get("nonfinite") or {})
        return self.judge.fail(quantity, "not finite" if lost else "not computed, and no reason given")

    def eased(self, quantity: str) -> Tolerance:
        """Return the limit of a difference between logits, by the logits of all cases: see ``tolerances.eased``."""
        errors = [case.reference_error for case in self.cases]
        error = max((error for error in errors if error is not None), default=None)
        return self.judge.eased(quantity, self._largest, error)

    def eased_loss(self, quantity: str) -> Tolerance:
        """Return the limit of a difference between losses, by the same logits: see ``tolerances.eased_loss``."""
        limit = self.judge.tolerance(quantity)
        if not self.judge.ease:
            return limit
        return tolerances.eased_loss(
            limit, self.judge.member.precision, self._largest, self.eased(tolerances.LOGITS).value
        )

    @property
    def _largest(self) -> float:
        return max((case.largest for case in self.cases), default=0.0)


def _finite(sides: Sides) -> Row:
    counts = sides.nonfinite
    worst = max(counts, key=lambda place: counts[place], default="")
    reason = ", ".join(f"{count} in {place}" for place, count in sorted(counts.items())[:5])
    more = f" and {len(counts) - 5} more places" if len(counts) > 5 else ""
    return sides.judge.judge(tolerances.FINITE, float(sum(counts.values())), worst, reason + more)


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
    limits = {case.name: _limit(judge, case) for case in sides.cases}
    # A case with NaN or infinity has no row: the quantities fail by its name.
    table = [case.row() | {"limit": limits[case.name].value} for case in sides.cases]
    nearness = logits.truth(sides.cases) if len(sides.cases) == len(cases) else None
    sides.tables |= {
        "logits": table,
        "histogram": list(logits.histogram(cases)),
        "truth": [nearness] if nearness else [],
    }
    names = (tolerances.LOGITS, tolerances.COSINE, tolerances.SCALE, tolerances.OFFSET, tolerances.SPANS)
    broken = next(iter(faults.values()), "") or next((_not_finite(case) for case in cases if not case.finite), "")
    if broken:
        return tuple(judge.fail(name, broken) for name in names)
    if not cases:
        why = next(iter(skipped.values()), "the reference has no outputs")
        return tuple(judge.skip(name, f"no case was compared: {why}") for name in names)
    left_out = [f"without {name}: {why}" for name, why in skipped.items()]
    # Limits differ from case to case: report the largest difference, of the cases beyond their limit if there are any.
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
        return judge.skip(
            tolerances.COSINE, "no case has two positions to compare, and the cosine of a single one is only a sign"
        )
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
        return judge.skip(tolerances.SPANS, f"the reference's best span leads clearly in none of {rows} rows")
    return judge.judge(tolerances.SPANS, agreeing / decided, differing, f"{decided} of {rows} rows are decided")


def _loss(sides: Sides) -> Row:
    """Judge the loss of the first training batch."""
    other, own = sides.reference.meta.get("loss"), sides.candidate.meta.get("loss")
    if other is None:
        return sides.judge.skip(tolerances.LOSS, "the reference has none")
    if own is None:
        return sides.lacking(tolerances.LOSS, "loss")
    return sides.judge.judge(tolerances.LOSS, abs(own - other), limit=sides.eased_loss(tolerances.LOSS))


def _curve(sides: Sides) -> Row:
    """Judge the loss of every training step, and fill the table ``curves``."""
    own, other = (list(side.meta.get("curve") or []) for side in (sides.candidate, sides.reference))
    truth = list((sides.truth.meta.get("curve") if sides.truth else None) or [])
    if not other:
        return sides.judge.skip(tolerances.CURVE, "the reference has none")
    if not own:
        return sides.lacking(tolerances.CURVE, "curve")
    sides.tables["curves"] = [
        {"step": step, "loss": loss, "reference_loss": reference}
        | ({"truth_loss": truth[step]} if step < len(truth) and truth[step] is not None else {})
        for step, (loss, reference) in enumerate(zip(own, other, strict=False))
        if None not in (loss, reference)  # not finite: the quantity fails by its step
    ]
    if len(own) != len(other):
        return sides.judge.fail(tolerances.CURVE, f"{len(own)} steps, the reference has {len(other)}")
    differences = [math.nan if None in pair else abs(pair[0] - pair[1]) for pair in zip(own, other, strict=True)]
    broken = next((step for step, value in enumerate(differences) if math.isnan(value)), None)
    if broken is not None:
        return sides.judge.fail(tolerances.CURVE, "a loss is not finite", f"step {broken}")
    value = max(differences)
    limit = sides.eased_loss(tolerances.CURVE)
    return sides.judge.judge(tolerances.CURVE, value, f"step {differences.index(value)}", limit=limit)


def _repeats(sides: Sides) -> Row:
    """Judge whether the member gives the same bits again."""
    repeats = sides.candidate.meta.get("repeats")
    if not repeats:
        return sides.lacking(tolerances.REPEATS, "repeats")
    if repeats.get("max_abs") is None:
        return sides.judge.fail(tolerances.REPEATS, "not finite")
    value = float(repeats["max_abs"])
    if not repeats.get("identical") and value == 0.0:
        return sides.judge.fail(
            tolerances.REPEATS, f"{repeats['runs']} runs differ in bits, if only in the sign of zero"
        )
    return sides.judge.judge(tolerances.REPEATS, value, "", f"{repeats['runs']} runs of one input")


def _invariance(sides: Sides, quantity: str, name: str) -> Row:
    """Judge whether a row's logits depend on its neighbours, or on how far it is padded."""
    invariance = sides.candidate.meta.get("invariance") or {}
    if invariance.get(name) is None:
        return sides.lacking(quantity, "invariance")
    return sides.judge.judge(quantity, float(invariance[name]), limit=sides.eased(quantity))


def _f1(sides: Sides, scores: tuple[float, float] | None, questions: int) -> Row:
    """Judge the F1 of the reference and of the candidate, in points; in bf16 one answer of a small set may change."""
    judge, limit = sides.judge, sides.judge.tolerance(tolerances.F1)
    if scores is None:
        reason = (sides.candidate.meta.get("absent") or {}).get(tolerances.F1)
        return judge.skip(tolerances.F1, reason or "there is no dev set")
    if judge.member.precision == "bf16" and questions:
        limit = replace(limit, value=max(limit.value, 100 / questions))
    count = f", {questions} questions" if questions else ""
    reason = f"{scores[1]:.2f}, the reference {scores[0]:.2f}{count}"
    return judge.judge(tolerances.F1, abs(scores[1] - scores[0]), "", reason, limit)


def _gradients(sides: Sides) -> Row:
    own, other = sides.candidate.gradients(), sides.reference.gradients()
    if not other:
        return sides.judge.skip(tolerances.GRADIENTS, "the reference has none")
    if not own:
        return sides.lacking(tolerances.GRADIENTS, "gradients")
    missing = [name for name in other if name not in own]
    if missing:
        return sides.judge.fail(tolerances.GRADIENTS, f"{len(missing)} parameters have none", missing[0])
    table = gradients(own, other, sides.judge.tolerance(tolerances.GRADIENTS).value)
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
    table = layers(own, other, None if mask is None else mask == 1, kinds, limit)
    sides.tables["layers"] = table
    if not table:
        return sides.judge.fail(tolerances.LAYERS, "no module name matches the reference")
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
    return sides.judge.skip(tolerances.LAYERS, "the tensors were not kept, and digests do not measure a distance")


def layers(
    candidate: Arrays, reference: Arrays, mask: np.ndarray | None, kinds: Mapping[str, str], limit: float
) -> list[dict[str, Any]]:
    """Return a row for each activation that both have, in the order of the reference's forward pass.

    Where the first two axes are those of ``mask`` (B, S), only its true positions are compared. ``kinds`` gives the class
    of a module by its name.
    """
    own = {key.partition("|")[2]: key for key in candidate}
    keys = [key for key in sorted(reference) if key.partition("|")[2] in own]
    rows = []
    for place, key in enumerate(keys):
        number, _, name = key.partition("|")
        a, b = candidate[own[name]], reference[key]
        if mask is not None and a.shape == b.shape and b.shape[:2] == mask.shape:
            a, b = a[mask], b[mask]
        rows.append(
            {
                "index": int(number),
                "layer": name,
                "kind": kinds.get(name, ""),
                "depth": place / max(1, len(keys) - 1),
                **_apart(a, b, 0.0, limit),
            }
        )
    return rows


def gradients(candidate: Arrays, reference: Arrays, limit: float) -> list[dict[str, Any]]:
    """Return a row for each parameter of the reference; its difference counts relative to at least the floor.

    The floor is GRADIENT_FLOOR of the norm of all gradients together.
    """
    floor = GRADIENT_FLOOR * distances.norm(np.array([distances.norm(array) for array in reference.values()]))
    return [
        {"parameter": name, **_apart(candidate[name], reference[name], floor, limit)}
        for name in sorted(reference)
        if name in candidate
    ]


def _apart(a: np.ndarray, b: np.ndarray, floor: float, limit: float) -> dict[str, Any]:
    """Return how far two tensors are apart; None, and beyond every limit: another shape, or numbers that are not finite."""
    value = distances.relative_l2(a, b, floor) if a.shape == b.shape else math.nan
    return {"relative_l2": value if math.isfinite(value) else None, "limit": limit, "beyond": not value <= limit}
