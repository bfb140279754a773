"""Start and end logits compared, case by case.

Only positions that the input's attention mask counts as text are compared; what a model answers for padding does not matter
as long as it is finite.

Letters: B rows, S positions, T positions of the dev set in a line.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchlib.core.errors import UserError
from benchlib.workloads.distances import max_abs, max_relative, one_minus_cosine, ulp_distance

HEADS = ("start", "end")
KINDS = ("edge", "layer", "train", "dev")  # what a case's name begins with; the others are data
BINS_PER_DECADE = 3

Arrays = Mapping[str, np.ndarray]


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
        """Return the case, whose numbers are finite, as a row of the table; None: an angle of one position, no truth."""
        batch, length = self.shape if len(self.shape) == 2 else (1, self.shape[0])
        return {
            "case": self.name,
            "kind": self.kind,
            "batch": batch,
            "length": length,
            "max_abs": self.worst(max_abs),
            "max_relative": self.worst(max_relative),
            "max_ulp": int(self.worst(_max_ulp)),
            "one_minus_cosine": self.worst(one_minus_cosine) if self.directed else None,
            "truth_max_abs": _from_truth(self.candidate, self.truth),
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
    return max(max_abs(side[head][finite[head]], truth[head][finite[head]]) for head in HEADS)


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
