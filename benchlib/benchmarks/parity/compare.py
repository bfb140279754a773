"""Two recordings compared: a row for each difference, with its limit and where it sits.

It reads files and computes no model, so a recording from another machine is compared as one from this one. Logits count
only at positions that the input's attention mask counts as text; what a model answers for padding does not matter as
long as it is finite. Activations and gradients are measured by the L2 norm of the difference, relative to the
reference's: a single number of a tensor that is neither blind to scale, as a cosine is, nor ruled by its one worst element.

Notation: B rows, S positions, T positions of the dev set in a line.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from benchlib.benchmarks.parity.recording import Arrays, Recording
from benchlib.core.text import shortened
from benchlib.workloads import numerics
from benchlib.workloads.executors import Member
from benchlib.workloads.numerics import (
    BATCH,
    COSINE,
    CURVE,
    GRADIENTS,
    LAYERS,
    LOGITS,
    LOSS,
    OFFSET,
    PADDING,
    REPEATS,
    SCALE,
    SPANS,
)

HEADS = ("start", "end")
HASHES = {"model_sha256": "weights", "inputs_sha256": "inputs"}
# A parameter's difference is measured against its gradient's norm, but never against less than this share of the norm of
# all gradients, about that of a small tensor: a key's bias has none (softmax does not see what it adds to a whole row),
# only what rounding left of sums whose terms are of that size.
GRADIENT_FLOOR = 1e-2
SCALARS = {"repeats_max_abs": REPEATS, "batch_max_abs": BATCH, "padding_max_abs": PADDING}
Row = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """What members are compared with: the reference, the fp64 reference where there is one, the masks of the golden inputs."""

    recording: Recording
    fp64: Recording | None
    inputs: Arrays

    @cached_property
    def errors(self) -> dict[str, float]:
        """How far the reference is from the fp64 reference by case, where that is a number."""
        return self.from_fp64(self.recording.outputs)

    def from_fp64(self, outputs: Arrays) -> dict[str, float]:
        """Return by case how far outputs are from the fp64 reference, over the positions where that is finite."""
        distances = dict[str, float]()
        for key, exact in (self.fp64.outputs if self.fp64 else {}).items():
            case, values = key.rpartition("/")[0], outputs.get(key)
            where = np.isfinite(exact) & self.attended(case, exact.shape)
            if values is not None and values.shape == exact.shape and where.any():
                distances[case] = max(distances.get(case, 0.0), numerics.max_abs(values[where], exact[where]))
        return distances

    def attended(self, case: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return which positions of a case are compared (bool, of ``shape``); all of what is stored without padding."""
        return self.inputs.get(f"{case}/attention_mask", np.ones(shape)) == 1


@dataclass
class _Comparison:
    """A member beside the reference; ``rows`` fills up.

    ``largest`` is the largest logit of what was compared, ``error`` the reference's distance to the fp64 reference there.
    """

    reference: Reference
    candidate: Recording
    member: Member
    rows: list[Row] = field(default_factory=list)
    largest: float = 0.0
    error: float | None = None

    def limit(self, quantity: str, *of: Any) -> numerics.Limit:
        """Return the limit of a quantity; one that follows the logits is eased by size and error ``of`` some, else of all."""
        precision = self.member.precision
        backends = self.candidate.meta["backend"], self.reference.recording.meta["backend"]
        entry = numerics.limit(backends[0], precision, quantity, backends[1])
        if quantity in (LOGITS, OFFSET, BATCH, PADDING):
            return numerics.eased(entry, precision, *(of or (self.largest, self.error)))
        if quantity in (LOSS, CURVE):
            return numerics.eased_loss(entry, precision, self.largest, self.limit(LOGITS).value)
        return entry

    def _row(self, quantity: str, **cells: Any) -> None:
        # Where a difference sits is not whether it matters: a layer beyond its limit is named, and the outputs judged.
        gates = self.member.gates and quantity != LAYERS
        self.rows.append({"member": self.member.name, "quantity": quantity, "gates": gates, **cells})

    def add(
        self,
        quantity: str,
        value: float,
        at: str = "",
        note: str = "",
        limit: numerics.Limit | None = None,
        index: int = 0,
    ) -> None:
        """Add a difference; one that should be there and is not is NaN."""
        limit = limit or self.limit(quantity)
        cells = {"at": at, "index": index, "value": value, "limit": limit.value, "eased": limit.eased, "note": note}
        self._row(quantity, precision=self.member.precision, **cells)

    def lacks(self, quantity: str, reason: str = "") -> None:
        """Add a quantity without a number; a missing value without a stated reason fails."""
        if reason := reason or (self.candidate.meta.get("absent") or {}).get(quantity, ""):
            self._row(quantity, status="skipped", reason=reason)
        else:
            self.add(quantity, math.nan, note="not computed, and no reason was stated")

    def have(self, quantity: str, values: object, reference: object) -> bool:
        """Return whether member and reference have what is compared; what is missing becomes a row."""
        if not values or not reference:
            self.lacks(quantity, "" if reference else "the reference has none")
        return bool(values and reference)

    def tensors(self, quantity: str, own: Arrays, reference: Arrays, floor: float = 0.0) -> None:
        """Add the distance of each tensor, relative to the reference's norm; of hidden states where there is text."""
        if not self.have(quantity, own, reference):
            return
        for number, (name, b) in enumerate(reference.items()):
            a, at = own.get(name), name
            where: Any = ...
            if quantity == LAYERS:
                at = f"layer {number - 1}" if number else "the embeddings"
                where = self.reference.attended("layer", b.shape[:2])
            value, note = math.nan, unlike(a, b)
            if a is not None and not note:
                value = numerics.relative_l2(a[where], b[where], floor)
            self.add(quantity, value, at, note, index=number + 1)

    def finite(self) -> None:
        """Count the numbers that are NaN or infinite, of outputs also where nothing is compared."""
        own = self.candidate
        parts = ("outputs", "gradients", "layers")
        arrays = {f"{part} {name}": array for part in parts for name, array in getattr(own, part).items()}
        arrays |= {name: np.array(own.meta.get(name, 0.0)) for name in ("loss", "curve", *SCALARS)}
        wrong = {name: count for name, array in arrays.items() if (count := int((~np.isfinite(array)).sum()))}
        worst = max(wrong, key=lambda name: wrong[name], default="")
        self.add(numerics.FINITE, sum(wrong.values()), worst, f"in {len(wrong)} places" if wrong else "")

    def logits(self) -> None:
        """Add logits, cosines and spans by case."""
        outputs, base = self.candidate.outputs, self.reference.recording.outputs
        decided, differing, pairs = 0, list[str](), list[tuple[np.ndarray, np.ndarray]]()
        if left := self.candidate.meta.get("left_out", []):
            self.lacks(LOGITS, f"not for this kernel, which takes no attention mask: {shortened(left)}")
        for case in sorted({key.rpartition("/")[0] for key in [*outputs, *base]}.difference(left)):
            keys = [f"{case}/{head}" for head in HEADS]
            wrong = [f"{key}: {note}" for key in keys if (note := unlike(outputs.get(key), base.get(key)))]
            if wrong:
                self.add(LOGITS, math.nan, case, "; ".join(wrong))
                continue
            a, b = (np.stack([arrays[key] for key in keys]) for arrays in (outputs, base))  # (2, B, S) or (2, T)
            mask = self.reference.attended(case, b[0].shape)
            size, error = float(np.max(np.abs(b[:, mask]), initial=0.0)), self.reference.errors.get(case)
            limit, apart = self.limit(LOGITS, size, error), numerics.max_abs(a[:, mask], b[:, mask])
            self.add(LOGITS, apart, case, _place(a, b, mask) if apart else "", limit)
            if mask.sum() > 1:  # of a single position the cosine is but a sign
                cosines = map(numerics.one_minus_cosine, a[:, mask], b[:, mask])
                self.add(COSINE, float(np.max([*cosines])), case)  # one good head does not hide the other; of NaN: NaN
            if not math.isfinite(apart):
                continue
            pairs.append((a[:, mask], b[:, mask]))
            self.largest = max(self.largest, size)
            if error is not None:
                self.error = max(error, self.error or 0.0)
            # Where two spans are closer than two limits of each logit rounding may choose.
            for row in np.flatnonzero(mask.sum(1) > 1) if mask.ndim == 2 else ():
                span, lead = best_span(*b[:, row, mask[row]])
                if lead > 4 * limit.value:
                    decided += 1
                    differing += [case] * (best_span(*a[:, row, mask[row]])[0] != span)
        self.fitted(pairs)
        if decided:
            share, first = len(differing) / decided, next(iter(differing), "")
            self.add(SPANS, share, first, f"{decided} rows are decided")
        else:
            self.lacks(SPANS, "the reference's best span leads clearly in no row")

    def fitted(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Add scale and offset of each head's logits by the line that fits those of all cases, pairs of (2, positions)."""
        for place, head in enumerate(HEADS if pairs else ()):
            a, b = (numerics.together([pair[side][place] for pair in pairs]) for side in (0, 1))
            if b.min() == b.max():
                self.lacks(SCALE, f"no line fits the {head} logits: the reference's are all {b.min():.3g}")
                continue
            scale, offset = numerics.line(a, b)
            limit = numerics.eased_scale(self.limit(SCALE), self.limit(LOGITS).value, float(np.std(b)), b.size)
            note = f"{scale:.7g} times the reference's, over {b.size:,} logits"
            self.add(SCALE, abs(scale - 1), f"{head} logits", note, limit)
            self.add(OFFSET, abs(offset), f"{head} logits", f"{offset:+.3g}")


def unlike(own: np.ndarray | None, reference: np.ndarray | None) -> str:
    """Return why a tensor cannot be compared with the reference's: missing, or of another shape; '' if it can."""
    if own is None or reference is None:
        return f"missing in the {'member' if own is None else 'reference'}"
    return "" if own.shape == reference.shape else f"shape {own.shape}, the reference's is {reference.shape}"


def others(reference: Reference, candidate: Recording) -> list[str]:
    """Return of which other weights and inputs a recording is than the reference; what is of other inputs is not compared."""
    own, base = candidate.meta, reference.recording.meta
    wrong = [(name, what) for name, what in HASHES.items() if own[name] != base[name]]
    return [f"other {what}: {own[name][:12]}, the reference has {base[name][:12]}" for name, what in wrong]


def compare(
    reference: Reference,
    candidate: Recording,
    member: Member,
    f1: tuple[float | None, float | None] = (None, None),
    questions: int = 0,
) -> list[Row]:
    """Compare what ``member`` recorded with the reference.

    ``f1`` are the reference's and the candidate's F1 on the dev set of ``questions`` questions; in bf16 one answer of a
    small set may change. The recording has to be of the same inputs, see ``others``.
    """
    meta, recorded, base = candidate.meta, reference.recording, reference.recording.meta
    rows = _Comparison(reference, candidate, member)
    rows.finite()
    rows.logits()
    if rows.have(LOSS, "loss" in meta, "loss" in base):
        rows.add(LOSS, abs(meta["loss"] - base["loss"]))
    if rows.have(CURVE, meta.get("curve"), base.get("curve")):
        losses = itertools.zip_longest(meta["curve"], base["curve"], fillvalue=math.nan)
        for step, (loss, other) in enumerate(losses, 1):
            rows.add(CURVE, abs(loss - other), f"step {step}", index=step)
    floor = GRADIENT_FLOOR * numerics.norm(np.array([numerics.norm(array) for array in recorded.gradients.values()]))
    rows.tensors(GRADIENTS, candidate.gradients, recorded.gradients, floor)
    rows.tensors(LAYERS, candidate.layers, recorded.layers)
    for name, quantity in SCALARS.items():
        if rows.have(quantity, name in meta, True):
            rows.add(quantity, meta[name])
    score, own = f1
    if score is None or own is None:
        rows.lacks(numerics.F1, "there is no dev set, or its logits are not finite")
        return rows.rows
    limit = rows.limit(numerics.F1)
    if member.precision == "bf16" and 100 / max(questions, 1) > limit.value:
        limit = numerics.Limit(100 / questions, limit.why, "one question of the set")
    rows.add(numerics.F1, abs(own - score), note=f"{own:.2f}, the reference {score:.2f}", limit=limit)
    return rows.rows


def _place(a: np.ndarray, b: np.ndarray, mask: np.ndarray) -> str:
    """Return where the largest difference is: ``end logits, row 1, position 5``."""
    apart = np.where(mask, np.abs(a.astype(np.float64) - b), -1.0)
    head, *row, position = np.unravel_index(int(np.argmax(apart)), apart.shape)
    return ", ".join([f"{HEADS[head]} logits", *(f"row {number}" for number in row), f"position {position}"])


def best_span(start: np.ndarray, end: np.ndarray) -> tuple[tuple[int, int], float]:
    """Return the span (first, last), first <= last, of the largest start[first] + end[last], and its lead over the next."""
    size = len(start)
    scores = start.astype(np.float64)[:, None] + end.astype(np.float64)
    scores[np.tri(size, k=-1, dtype=bool)] = -math.inf
    second, best = np.partition(np.append(scores, -math.inf), -2)[-2:]
    first, last = divmod(int(scores.argmax()), size)
    return (first, last), float(best - second)
