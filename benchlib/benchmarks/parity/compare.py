"""Two recordings compared: a row for each difference, with its limit and where it sits.

It reads files and computes no model, so a recording from another machine is compared as one from this one. Logits count
only at positions that the input's attention mask counts as text; what a model answers for padding does not matter as
long as it is finite. Activations and gradients are measured by the L2 norm of the difference, relative to the
reference's: a single number of a tensor that is neither blind to scale, as a cosine is, nor ruled by its one worst element.

Letters: B rows, S positions, T positions of the dev set in a line.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchlib.benchmarks.parity import recording
from benchlib.benchmarks.parity.recording import Arrays, Recording
from benchlib.core.errors import UserError
from benchlib.workloads import numerics
from benchlib.workloads.executors import Member
from benchlib.workloads.numerics import Limit, max_abs, one_minus_cosine, relative_l2

HEADS = ("start", "end")
# A parameter's difference is measured against its gradient's norm, but never against less than this share of the norm of
# all gradients, about that of a small tensor: a key's bias has none (softmax does not see what it adds to a whole row),
# only what rounding left of sums whose terms are of that size.
GRADIENT_FLOOR = 1e-2
Row = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """What members are compared with: the reference, the fp64 reference where there is one, the masks of the golden inputs.

    ``errors`` is how far the reference is from the fp64 reference by case, where that is a number.
    """

    recording: Recording
    truth: Recording | None
    inputs: Arrays
    errors: Mapping[str, float]

    @classmethod
    def of(cls, recording: Recording, truth: Recording | None, inputs: Arrays) -> "Reference":
        return cls(recording, truth, inputs, from_truth(recording.outputs, truth, inputs))


def cases(outputs: Arrays) -> list[str]:
    """Return the cases that outputs hold."""
    return sorted({key.rpartition("/")[0] for key in outputs})


def attended(inputs: Arrays, case: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return which positions of a case are compared (bool, of ``shape``); all of what is stored without padding.

    Raises ``UserError`` where inputs and outputs of a golden folder are of different shapes.
    """
    mask = inputs.get(f"{case}/attention_mask")
    if mask is None:
        return np.ones(shape, dtype=bool)
    if mask.shape != shape:
        raise UserError(f"{case}: logits of shape {shape}, inputs of {mask.shape}: not of one golden folder")
    return mask == 1


def from_truth(outputs: Arrays, truth: Recording | None, inputs: Arrays) -> dict[str, float]:
    """Return by case how far outputs are from the fp64 reference, over the positions where that is finite."""
    distances = dict[str, float]()
    for case in cases(truth.outputs) if truth else ():
        assert truth is not None
        for head in HEADS:
            key = f"{case}/{head}"
            exact, own = truth.outputs[key], outputs.get(key)
            where = np.isfinite(exact) & attended(inputs, case, exact.shape)
            if own is not None and own.shape == exact.shape and where.any():
                distances[case] = max(distances.get(case, 0.0), max_abs(own[where], exact[where]))
    return distances


@dataclass
class Differences:
    """The rows of one member on ``backend``, compared with a reference that ran on ``other``; ``rows`` fills up."""

    member: Member
    backend: str
    other: str
    absent: Mapping[str, str]
    rows: list[Row] = field(default_factory=list)

    def limit(self, quantity: str) -> Limit:
        return numerics.limit(self.backend, self.member.precision, quantity, self.other)

    def add(
        self, quantity: str, value: float, at: str = "", note: str = "", limit: Limit | None = None, index: int = 0
    ) -> None:
        """Add a difference; one that should be there and is not is NaN."""
        limit = limit or self.limit(quantity)
        # Where a difference sits is not whether it matters: a layer beyond its limit is named, and the outputs judged.
        gates = self.member.gates and quantity != numerics.LAYERS
        row = {"member": self.member.name, "precision": self.member.precision, "quantity": quantity, "gates": gates}
        row |= {"at": at, "index": index, "value": value, "limit": limit.value, "eased": limit.eased, "note": note}
        self.rows.append(row)

    def lacks(self, quantity: str, reason: str = "") -> None:
        """Add a quantity without a number; a missing value without a stated reason fails."""
        if reason := reason or self.absent.get(quantity, ""):
            row = {"member": self.member.name, "quantity": quantity, "status": "skipped", "reason": reason}
            self.rows.append(row | {"gates": self.member.gates and quantity != numerics.LAYERS})
        else:
            self.add(quantity, math.nan, note="not computed, and no reason was stated")

    def have(self, quantity: str, own: object, other: object) -> bool:
        """Return whether member and reference have what is compared; what is missing becomes a row."""
        if not own or not other:
            self.lacks(quantity, "" if other else "the reference has none")
        return bool(own and other)


def compare(
    reference: Reference,
    candidate: Recording,
    member: Member,
    ease: bool = True,
    f1: tuple[float, float] | None = None,
    questions: int = 0,
) -> list[Row]:
    """Compare what ``member`` recorded with the reference.

    ``f1`` are the reference's and the candidate's numerics.F1 on the dev set of ``questions`` questions. Without ``ease`` the
    limits of logits are those of the table, whatever their size. Raises ``UserError`` where the recording is of other
    weights or inputs.
    """
    for name, what in (("model_sha256", "weights"), ("inputs_sha256", "inputs")):
        own, other = candidate.meta[name], reference.recording.meta[name]
        if own != other:
            raise UserError(f"other {what}: {own[:12]}, the reference has {other[:12]}")
    backend, of = candidate.meta["backend"], reference.recording.meta["backend"]
    rows = Differences(member, backend, of, candidate.meta.get("absent") or {})
    _finite(rows, candidate)
    largest, error = _logits(rows, reference, candidate, ease)

    def eased(quantity: str) -> Limit:
        table = rows.limit(quantity)
        return numerics.eased(table, member.precision, largest, error) if ease else table

    def eased_loss(quantity: str) -> Limit:
        table = rows.limit(quantity)
        return numerics.eased_loss(table, member.precision, largest, eased(numerics.LOGITS).value) if ease else table

    own, other = candidate.meta, reference.recording.meta
    _loss(rows, own, other, eased_loss(numerics.LOSS))
    _curve(rows, own, other, eased_loss(numerics.CURVE))
    _gradients(rows, candidate.tensors(recording.GRADIENTS), reference.recording.tensors(recording.GRADIENTS))
    _layers(rows, candidate, reference)
    scalars = (
        ("repeats_max_abs", numerics.REPEATS, rows.limit(numerics.REPEATS)),
        ("batch_max_abs", numerics.BATCH, eased(numerics.BATCH)),
        ("padding_max_abs", numerics.PADDING, eased(numerics.PADDING)),
    )
    for name, quantity, limit in scalars:
        if rows.have(quantity, name in own, True):
            rows.add(quantity, own[name], limit=limit)
    _f1(rows, f1, questions)
    return rows.rows


def _finite(rows: Differences, candidate: Recording) -> None:
    """Count the numbers that are NaN or infinite, of outputs also where nothing is compared."""
    counts = {f"outputs {name}": int((~np.isfinite(array)).sum()) for name, array in candidate.outputs.items()}
    for file in (recording.GRADIENTS, recording.LAYERS):
        for name, read in candidate.tensors(file).items():
            counts[f"{file.partition('.')[0]} {name}"] = int((~np.isfinite(read())).sum())
    for name in ("loss", "curve", "repeats_max_abs", "batch_max_abs", "padding_max_abs"):
        values = np.ravel(candidate.meta.get(name, 0.0))
        counts[name] = int((~np.isfinite(values)).sum())
    wrong = {name: count for name, count in counts.items() if count}
    worst = max(wrong, key=lambda name: wrong[name], default="")
    rows.add(numerics.FINITE, sum(wrong.values()), worst, f"in {len(wrong)} places" if wrong else "")


def _logits(rows: Differences, reference: Reference, candidate: Recording, ease: bool) -> tuple[float, float | None]:
    """Add logits, cosines and spans by case; return the largest logit, and the reference's error, of what was compared."""
    own, other, inputs = candidate.outputs, reference.recording.outputs, reference.inputs
    precision, largest, errors, margins = rows.member.precision, 0.0, list[float](), dict[str, float]()
    for case in cases(other):
        shape = other[f"{case}/start"].shape
        sides = [(own.get(f"{case}/{head}"), other[f"{case}/{head}"]) for head in HEADS]
        if any(side is None or side.shape != shape for side, _ in sides):
            rows.add(numerics.LOGITS, math.nan, case, "not computed, or of another shape")
            continue
        mask = attended(inputs, case, shape)
        heads = [(side[mask], base[mask]) for side, base in sides]  # type: ignore[index]
        size, error = max(float(np.max(np.abs(base), initial=0.0)) for _, base in heads), reference.errors.get(case)
        limit = rows.limit(numerics.LOGITS)
        limit = numerics.eased(limit, precision, size, error) if ease else limit
        apart = float(np.max([max_abs(*head) for head in heads]))  # one good head does not hide the other; of NaN: NaN
        rows.add(numerics.LOGITS, apart, case, _place(sides, mask) if apart else "", limit)
        if mask.sum() > 1:  # of a single position the cosine is but a sign
            rows.add(numerics.COSINE, float(np.max([one_minus_cosine(*head) for head in heads])), case)
        if math.isfinite(apart):
            largest, margins[case] = max(largest, size), 4 * limit.value
            errors += [error] if error is not None else []
    _spans(rows, own, other, inputs, margins)
    return largest, max(errors, default=None)


def _place(sides: list[Any], mask: np.ndarray) -> str:
    """Return where the largest difference is: ``end logits, row 1, position 5``."""
    apart = [np.where(mask, np.abs(side.astype(np.float64) - base), -1.0) for side, base in sides]
    head = int(np.argmax([np.max(part) for part in apart]))
    at = np.unravel_index(int(np.argmax(apart[head])), mask.shape)
    return f"{HEADS[head]} logits, " + (f"row {at[0]}, position {at[1]}" if len(at) == 2 else f"position {at[0]}")


def _spans(rows: Differences, own: Arrays, other: Arrays, inputs: Arrays, margins: Mapping[str, float]) -> None:
    """Add the share of decided rows whose best span is another one.

    A row is decided where the reference's best span leads the next by more than the margin of its case; where two spans
    are closer, rounding may choose.
    """
    decided, differing = 0, list[str]()
    for case, mask, row in _padded_rows(inputs, other, margins):
        span, lead = best_span(*(other[f"{case}/{head}"][row][mask] for head in HEADS))
        if lead > margins[case]:
            decided += 1
            own_span, _ = best_span(*(own[f"{case}/{head}"][row][mask] for head in HEADS))
            differing += [case] if own_span != span else []
    if decided:
        rows.add(numerics.SPANS, len(differing) / decided, next(iter(differing), ""), f"{decided} rows are decided")
    else:
        rows.lacks(numerics.SPANS, "the reference's best span leads clearly in no row")


def _padded_rows(inputs: Arrays, outputs: Arrays, names: Mapping[str, float]) -> Iterator[tuple[str, np.ndarray, int]]:
    for case in names:
        shape = outputs[f"{case}/start"].shape
        for row, mask in enumerate(attended(inputs, case, shape) if len(shape) == 2 else ()):
            if mask.sum() > 1:
                yield case, mask, row


def best_span(start: np.ndarray, end: np.ndarray) -> tuple[tuple[int, int], float]:
    """Return the span (first, last), first <= last, of the largest start[first] + end[last], and its lead over the next."""
    size = len(start)
    scores = start.astype(np.float64)[:, None] + end.astype(np.float64)
    scores[np.tri(size, k=-1, dtype=bool)] = -math.inf
    second, best = np.partition(np.append(scores, -math.inf), -2)[-2:]
    first, last = divmod(int(scores.argmax()), size)
    return (first, last), float(best - second)


def _loss(rows: Differences, own: Row, other: Row, limit: Limit) -> None:
    """Add the loss of the first training batch."""
    if rows.have(numerics.LOSS, "loss" in own, "loss" in other):
        rows.add(numerics.LOSS, abs(own["loss"] - other["loss"]), limit=limit)


def _curve(rows: Differences, own: Row, other: Row, limit: Limit) -> None:
    """Add the loss of every training step, from 1."""
    losses, others = own.get("curve") or [], other.get("curve") or []
    if rows.have(numerics.CURVE, losses, others):
        for step, base in enumerate(others, 1):
            loss = losses[step - 1] if step <= len(losses) else math.nan
            rows.add(numerics.CURVE, abs(loss - base), f"step {step}", limit=limit, index=step)


def _gradients(rows: Differences, own: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Add a row for each parameter of the reference."""
    if rows.have(numerics.GRADIENTS, own, other):
        floor = GRADIENT_FLOOR * numerics.norm(np.array([numerics.norm(read()) for read in other.values()]))
        for name, read in other.items():
            _tensor(rows, numerics.GRADIENTS, name, own[name]() if name in own else None, read(), floor)


def _layers(rows: Differences, candidate: Recording, reference: Reference) -> None:
    """Add a row for the embeddings and each layer, in the order of the forward pass."""
    own, other = candidate.tensors(recording.LAYERS), reference.recording.tensors(recording.LAYERS)
    mask = reference.inputs.get("layer/attention_mask")
    if rows.have(numerics.LAYERS, own, other):
        for number, (name, read) in enumerate(other.items()):
            a, b = own[name]() if name in own else None, read()
            if a is not None and mask is not None and a.shape == b.shape and b.shape[:2] == mask.shape:
                a, b = a[mask == 1], b[mask == 1]
            _tensor(
                rows, numerics.LAYERS, f"layer {number - 1}" if number else "the embeddings", a, b, index=number + 1
            )


def _tensor(
    rows: Differences, quantity: str, at: str, a: np.ndarray | None, b: np.ndarray, floor: float = 0.0, index: int = 0
) -> None:
    if a is None or a.shape != b.shape:
        rows.add(quantity, math.nan, at, "missing, or of another shape", index=index)
    else:
        rows.add(quantity, relative_l2(a, b, floor), at, index=index)


def _f1(rows: Differences, scores: tuple[float, float] | None, questions: int) -> None:
    """Add the difference of the numerics.F1 of reference and candidate; in bf16 one answer of a small set may change."""
    if scores is None:
        rows.lacks(numerics.F1, "there is no dev set, or its logits are not finite")
        return
    limit = rows.limit(numerics.F1)
    if rows.member.precision == "bf16" and 100 / max(questions, 1) > limit.value:
        limit = Limit(100 / questions, limit.why, "one question of the set")
    rows.add(
        numerics.F1, abs(scores[1] - scores[0]), note=f"{scores[1]:.2f}, the reference {scores[0]:.2f}", limit=limit
    )
