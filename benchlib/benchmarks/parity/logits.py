"""How far two arrays of numbers are apart, and start and end logits compared, case by case.

All arithmetic is in float64; arrays are of one shape. ``a`` is the candidate, ``b`` the reference. Measures of numbers that
are not finite are NaN, and never a small number. Only positions that the input's attention mask counts as text are
compared; what a model answers for padding does not matter as long as it is finite.

Letters: B rows, S positions, T positions of the dev set in a line.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchlib.core.errors import UserError

HEADS = ("start", "end")
KINDS = ("edge", "layer", "train", "dev")  # what a case's name begins with; the others are data
BINS_PER_DECADE = 3

Arrays = Mapping[str, np.ndarray]


def max_abs(a: np.ndarray, b: np.ndarray) -> float:
    """Return max |a - b|; 0 of nothing."""
    return _largest(np.abs(_difference(a, b)))


def max_relative(a: np.ndarray, b: np.ndarray) -> float:
    """Return max |a - b| / max(|a|, |b|), element by element: from 0 to 2 (other signs), 0 where both are 0."""
    scale = np.maximum(np.abs(_wide(a)), np.abs(_wide(b)))
    with np.errstate(invalid="ignore"):
        return _largest(np.abs(_difference(a, b)) / np.where(scale == 0, 1.0, scale))


def relative_l2(a: np.ndarray, b: np.ndarray, floor: float = 0.0) -> float:
    """Return ||a - b|| / max(||b||, floor); 0 where both are equal, infinity where only ``b`` and ``floor`` are 0."""
    difference = norm(_difference(a, b))
    scale = max(norm(b), floor)
    if math.isnan(difference) or math.isnan(scale):
        return math.nan
    if difference == 0.0:
        return 0.0
    return difference / scale if scale else math.inf


def norm(a: np.ndarray) -> float:
    """Return the Euclidean norm over all elements, without overflow or underflow on the way."""
    flat = np.abs(_wide(a)).ravel()
    largest = _largest(flat)
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    return float(largest * math.sqrt(float(np.sum(np.square(flat / largest)))))


def one_minus_cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Return 1 - cos of the angle between ``a`` and ``b`` as vectors, from 0 to 2, accurate to its last digits near 0.

    1 - dot / (|a| |b|) would have an error of 1e-16 beside results of 1e-14. With unit vectors u and v it is
    ||u - v||^2 / 2, in which nothing cancels but the components, which are known to 1e-16 each: an angle of 1e-8 (1 - cos of
    5e-17) is still distinguishable from 0. Two zero vectors agree (0); one of them alone has no direction (1).
    """
    length_a, length_b = norm(a), norm(b)
    if not (math.isfinite(length_a) and math.isfinite(length_b)):
        return math.nan
    if length_a == 0.0 or length_b == 0.0:
        return 0.0 if length_a == length_b else 1.0
    u, v = _wide(a).ravel() / length_a, _wide(b).ravel() / length_b
    return float(np.sum(np.square(u - v)) / 2)


def ulp_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return for each element how many float32 numbers lie from ``a`` to ``b`` (int64): 0 equal, 1 neighbours.

    The bits of a float32, read as sign and magnitude, count the representable numbers from zero in order, subnormals
    included; +0 and -0 are one number. ``ValueError`` for numbers that are not finite and for other types.
    """
    places = []
    for array in (a, b):
        if array.dtype != np.float32:
            raise ValueError(f"ULP distance is between float32, found {array.dtype}")
        if not np.isfinite(array).all():
            raise ValueError("ULP distance is between finite numbers")
        bits = np.asarray(array, order="C").view(np.int32).astype(np.int64)
        places.append(np.where(bits < 0, -(bits & 0x7FFFFFFF), bits))
    return np.abs(places[0] - places[1])


def _wide(a: np.ndarray) -> np.ndarray:
    return np.asarray(a, dtype=np.float64)


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if np.shape(a) != np.shape(b):  # numpy would stretch one over the other
        raise ValueError(f"shapes {np.shape(a)} and {np.shape(b)} are not the same")
    with np.errstate(invalid="ignore"):  # infinity - infinity is NaN, and that is the answer
        return _wide(a) - _wide(b)


def _largest(a: np.ndarray) -> float:
    value = float(np.max(a, initial=0.0))
    return value if math.isfinite(value) else math.nan


@dataclass(frozen=True)
class Case:
    """The logits of one case at its compared positions, by head: of the candidate, of the reference, of the truth."""

    name: str
    shape: tuple[int, ...]
    candidate: dict[str, np.ndarray]
    reference: dict[str, np.ndarray]
    truth: dict[str, np.ndarray] | None

    @property
    def largest(self) -> float:
        """The size of the reference's largest logit."""
        return max(max_abs(side, np.zeros_like(side)) for side in self.reference.values())

    @property
    def reference_error(self) -> float | None:
        """How far the reference is from the truth where that is a number; None without one."""
        return _from_truth(self.reference, self.truth)

    @property
    def kind(self) -> str:
        """The kind of the case, by its name."""
        kind = self.name.partition("-")[0]
        return kind if kind in KINDS else "data"

    @property
    def finite(self) -> bool:
        """Whether both sides are numbers at all compared positions."""
        return all(np.isfinite(side[head]).all() for side in (self.candidate, self.reference) for head in HEADS)

    @property
    def directed(self) -> bool:
        """Whether there is a direction to compare: of a single position the cosine is but a sign."""
        return all(side.size > 1 for side in self.reference.values())

    def worst(self, measure: Any) -> float:
        """Return the larger of a measure of the two heads: one good head does not hide the other."""
        return max(float(measure(self.candidate[head], self.reference[head])) for head in HEADS)

    def row(self) -> dict[str, Any]:
        """Return the case as a row of the table; measures of numbers that are not finite are None."""
        batch, length = self.shape if len(self.shape) == 2 else (1, self.shape[0])
        finite = self.finite
        return {
            "case": self.name,
            "kind": self.kind,
            "batch": batch,
            "length": length,
            "max_abs": self.worst(max_abs) if finite else None,
            "max_relative": self.worst(max_relative) if finite else None,
            "max_ulp": int(self.worst(_max_ulp)) if finite else None,
            "one_minus_cosine": self.worst(one_minus_cosine) if finite and self.directed else None,
            "truth_max_abs": _from_truth(self.candidate, self.truth) if finite else None,
            "reference_truth_max_abs": self.reference_error,
        }


def _max_ulp(a: np.ndarray, b: np.ndarray) -> int:
    return int(np.max(ulp_distance(a.astype(np.float32), b.astype(np.float32)), initial=0))


def _from_truth(side: dict[str, np.ndarray], truth: dict[str, np.ndarray] | None) -> float | None:
    if truth is None:
        return None
    finite = {head: np.isfinite(truth[head]) for head in HEADS}
    if not any(where.any() for where in finite.values()):
        return None
    distance = max(max_abs(side[head][finite[head]], truth[head][finite[head]]) for head in HEADS)
    return distance if math.isfinite(distance) else None


def names(outputs: Arrays) -> list[str]:
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


def fault(case: str, candidate: Arrays, reference: Arrays) -> str:
    """Return why a case of the reference cannot be compared; '' where it can."""
    for head in HEADS:
        key = f"{case}/{head}"
        if key not in candidate:
            return f"{key} was not computed, and no reason given"
        if candidate[key].shape != reference[key].shape:
            return f"{key} has shape {candidate[key].shape}, the reference {reference[key].shape}"
    return ""


def case(name: str, candidate: Arrays, reference: Arrays, truth: Arrays, inputs: Arrays) -> Case:
    """Return one case of both sides at its compared positions."""
    shape = reference[f"{name}/start"].shape
    mask = attended(inputs, name, shape)

    def heads(outputs: Arrays) -> dict[str, np.ndarray]:
        return {head: outputs[f"{name}/{head}"][mask] for head in HEADS}

    has_truth = all(f"{name}/{head}" in truth and truth[f"{name}/{head}"].shape == shape for head in HEADS)
    return Case(name, shape, heads(candidate), heads(reference), heads(truth) if has_truth else None)


def place(name: str, candidate: Arrays, reference: Arrays, inputs: Arrays) -> str:
    """Return where in a case the largest difference is: ``len8-batch2, end logits, row 1, position 5``."""
    largest = []
    for head in HEADS:
        a, b = (side[f"{name}/{head}"].astype(np.float64) for side in (candidate, reference))
        difference = np.where(attended(inputs, name, b.shape), np.abs(a - b), -1.0)
        at = np.unravel_index(int(np.argmax(difference)), difference.shape)
        largest.append((float(difference[at]), head, at))
    _, head, at = max(largest, key=lambda item: item[0])
    where = f"row {at[0]}, position {at[1]}" if len(at) == 2 else f"position {at[0]}"
    return f"{name}, {head} logits, {where}"


def scale(cases: list[Case]) -> float:
    """Return |<c, r> / <r, r> - 1| of candidate and reference over the compared logits of these cases, both heads.

    The factor is that of the least squares of c on r. Differences without a direction cancel in it: it sees what all
    logits have in common, far below the largest difference of one.
    """
    own, other = _flat(cases)
    square = float(other @ other)
    if square == 0.0:
        return math.inf if own.any() else 0.0
    return abs(float((own - other) @ other) / square)


def offset(cases: list[Case]) -> tuple[float, str]:
    """Return the larger |mean(c - r)| of the two heads, relative to the largest |r|, and which head that is."""
    means = {head: abs(float(np.mean(np.subtract(*_flat(cases, (head,)))))) for head in HEADS}
    worst = max(means, key=lambda head: means[head])
    largest = max(case.largest for case in cases)
    if means[worst] == 0.0:
        return 0.0, ""
    return (means[worst] / largest if largest else math.inf), worst


def _flat(cases: list[Case], heads: tuple[str, ...] = HEADS) -> tuple[np.ndarray, np.ndarray]:
    """Return the candidate's and the reference's logits of some cases in a line, float64 each."""
    own, other = (
        [getattr(case, side)[head] for case in cases for head in heads] for side in ("candidate", "reference")
    )
    return np.concatenate(own).astype(np.float64), np.concatenate(other).astype(np.float64)


def histogram(cases: list[Case]) -> Iterator[dict[str, Any]]:
    """Yield how many logits differ by how much: bins of a third of a decade, and one of those that do not differ."""
    both = [(case.candidate[head], case.reference[head]) for case in cases for head in HEADS]
    if not both:
        return
    differences = np.concatenate([np.abs(a.astype(np.float64) - b.astype(np.float64)) for a, b in both])
    differences = differences[np.isfinite(differences)]
    zeros = int((differences == 0).sum())
    if zeros:
        yield {"low": 0.0, "high": 0.0, "count": zeros}
    exponents = np.floor(np.log10(differences[differences > 0]) * BINS_PER_DECADE).astype(int)
    for exponent, count in zip(*np.unique(exponents, return_counts=True), strict=True):
        low, high = (float(10.0 ** (place / BINS_PER_DECADE)) for place in (exponent, exponent + 1))
        yield {"low": low, "high": high, "count": int(count)}


def span_agreement(
    candidate: Arrays, reference: Arrays, inputs: Arrays, margins: Mapping[str, float]
) -> tuple[int, int, int, str]:
    """Return over the rows of padded cases: how many are decided, of these how many agree, all rows, and a case that does not.

    A row's span is the pair start <= end of the largest sum of logits. It is decided where the reference's best span
    leads the next by more than the margin of its case; where two spans are closer, rounding may choose.
    """
    decided = agreeing = rows = 0
    differing = ""
    for name, margin in margins.items():
        shape = reference[f"{name}/start"].shape
        if len(shape) != 2:
            continue
        for row, mask in enumerate(attended(inputs, name, shape)):
            if mask.sum() < 2:
                continue
            rows += 1
            span, lead = best_span(*(reference[f"{name}/{head}"][row][mask] for head in HEADS))
            if not lead > margin:
                continue
            decided += 1
            own, _ = best_span(*(candidate[f"{name}/{head}"][row][mask] for head in HEADS))
            agreeing += own == span
            if own != span and not differing:
                differing = name
    return decided, agreeing, rows, differing


def best_span(start: np.ndarray, end: np.ndarray) -> tuple[tuple[int, int], float]:
    """Return the span (first, last) with first <= last of the largest start[first] + end[last], and its lead over the next."""
    size = len(start)
    scores = start.astype(np.float64)[:, None] + end.astype(np.float64)
    scores[np.tri(size, k=-1, dtype=bool)] = -math.inf
    second, best = np.partition(np.append(scores, -math.inf), -2)[-2:]
    first, last = divmod(int(scores.argmax()), size)
    return (first, last), float(best - second)


def truth(cases: list[Case]) -> dict[str, Any] | None:
    """Return how far candidate and reference are from the truth, and what that says; None without one.

    Within a factor of 2 both are as close: two roundings of one sum differ as much by chance.
    """
    finite = [
        case for case in cases if case.truth is not None and any(np.isfinite(case.truth[head]).any() for head in HEADS)
    ]
    rows = [case.row() for case in finite]
    own, other = ([row[name] for row in rows] for name in ("truth_max_abs", "reference_truth_max_abs"))
    if not rows or None in own or None in other:
        return None
    distance, reference = max(own), max(other)
    verdict = "closer" if distance < reference / 2 else "farther" if distance > 2 * reference else "as close"
    return {"max_abs": distance, "reference_max_abs": reference, "verdict": verdict}
