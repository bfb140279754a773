"""How far two computations of the same are apart, and how far they may be.

Measures: all arithmetic is in float64; arrays are of one shape. ``a`` is the candidate, ``b`` the reference. A measure of
numbers that are not finite is NaN, and never a small number.

Limits: ``LIMITS``, each with its reason: *set* by the benchmark's requirement, *derived* from another limit, *measured* with
the sizes that were seen, or *not measured*. A value on its limit passes.

Sizes to think in: fp32 keeps 24 bits (a rounding is at most 2^-24 = 6e-8 of the value), TF32 11 (2^-11 = 5e-4), bf16 8
(2^-8 = 4e-3 to the nearest). A cosine is blind to scale and quadratic in the rest: 1 - cos is about half the square of
the relative difference, so 1 - 1e-10 stands for 1.4e-5 and 0.9999 for 1.4e-2. It is never judged without the largest
difference beside it. Limits of logits are absolute, and hold as they are for logits near 1: see ``eased``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


def max_abs(a: np.ndarray, b: np.ndarray) -> float:
    """Return max |a - b|; 0 of nothing."""
    largest = float(np.max(np.abs(_difference(a, b)), initial=0.0))
    return largest if math.isfinite(largest) else math.nan


def relative_l2(a: np.ndarray, b: np.ndarray, floor: float = 0.0) -> float:
    """Return ||a - b|| / max(||b||, floor); 0 where both are equal, infinity where only ``b`` and ``floor`` are 0."""
    difference, scale = norm(_difference(a, b)), max(norm(b), floor)
    if difference == 0.0:
        return 0.0
    return difference / scale if scale else difference * math.inf


def norm(a: np.ndarray) -> float:
    """Return the Euclidean norm over all elements."""
    length = float(np.linalg.norm(_wide(a)))
    return length if math.isfinite(length) else math.nan


def one_minus_cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Return 1 - cos of the angle between ``a`` and ``b`` as vectors, from 0 to 2, accurate to its last digits near 0.

    1 - dot / (|a| |b|) would have an error of 1e-16 beside results of 1e-14. With unit vectors u and v it is
    ||u - v||^2 / 2, in which nothing cancels but the components, which are known to 1e-16 each: an angle of 1e-8 (1 - cos
    of 5e-17) is still distinguishable from 0. Two zero vectors agree (0); one of them alone has no direction (1).
    """
    length_a, length_b = norm(a), norm(b)
    if 0.0 in (length_a, length_b):
        return 0.0 if length_a == length_b else 1.0
    u, v = _wide(a).ravel() / length_a, _wide(b).ravel() / length_b
    return float(np.sum(np.square(u - v)) / 2)


def line(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Return the scale and the offset of the least-squares fit a = scale * b + offset; NaN if all of ``b`` is one number.

    With x = b - mean(b): scale = 1 + sum(x (a - b)) / sum(x^2), offset = mean(a) - scale * mean(b).
    """
    apart, x = _difference(a, b).ravel(), _wide(b).ravel() - np.mean(_wide(b))
    if not (square := float(np.dot(x, x))):
        return math.nan, math.nan
    lead = float(np.dot(x, apart)) / square
    return 1 + lead, float(np.mean(apart)) - lead * float(np.mean(_wide(b)))


def together(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return all numbers of several arrays in a line, float64."""
    return np.concatenate([_wide(part).ravel() for part in parts])


def _wide(a: np.ndarray) -> np.ndarray:
    return np.asarray(a, dtype=np.float64)


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if np.shape(a) != np.shape(b):  # numpy would stretch one over the other
        raise ValueError(f"shapes {np.shape(a)} and {np.shape(b)} are not the same")
    with np.errstate(invalid="ignore"):  # infinity - infinity is NaN, and that is the answer
        return _wide(a) - _wide(b)


FINITE, LOGITS, COSINE, SPANS = "finite", "logits", "logits cosine", "spans"
SCALE, OFFSET = "logits scale", "logits offset"
LOSS, CURVE, GRADIENTS, LAYERS = "loss", "loss curve", "gradients", "layers"
REPEATS, BATCH, PADDING, F1 = "repeats", "batch invariance", "padding invariance", "F1"
QUANTITIES = {
    FINITE: "numbers that are NaN or infinite",
    LOGITS: "largest difference",
    COSINE: "1 - cosine",
    SCALE: "|scale - 1| of the line fitted to the logits by head",
    OFFSET: "size of the offset of that line",
    SPANS: "share of decided rows with another span",
    LOSS: "difference",
    GRADIENTS: "relative L2 norm by parameter",
    CURVE: "difference by step",
    LAYERS: "relative L2 norm by layer",
    REPEATS: "largest difference between repetitions",
    BATCH: "largest difference between a row alone and in a batch",
    PADDING: "largest difference between a row and itself padded further",
    F1: "difference in points",
}
CPU, NEAR, FAR, BF16 = range(4)  # the places of LIMITS
KINDS = {"cpu": CPU, "cuda": NEAR, "mps": NEAR, "xpu": NEAR, "rocm": FAR, "tpu": FAR}  # of devices


@dataclass(frozen=True)
class Limit:
    """How far a quantity may be from the reference's, and why; ``eased`` says what it follows beyond the table's."""

    value: float
    why: str
    eased: str = ""


TEN = "not measured; ten times the other accelerators', as for the logits"
TILES = "set, not measured; other tilings, fused multiply-add and another exp; TF32 would leave 1e-3 to 3e-3"
PASSES = "set, not measured; ROCm takes kernels by version and shape, a TPU makes fp32 of passes in bf16"
ORDER = "set; additions in another order: 1e-6 was measured on BERT-base, where logits are near 1"
RELATIVE = "derived; with it a logit of 1 is off by the limit of the logits"
SHIFT = "derived; the limit of the logits, since the offset is what all of them have in common"
ONE_WAY = "derived; one rounding to 8 bits, as if all went one way, which they do not: 8e-4 measured on BERT-base"
MEAN = "set; a third of the logits' limit, since roundings partly cancel: 4e-3 measured where logits are near 1"
BITS = "set; 8 bits: 4e-3 a rounding, in every layer; up to 2e-2 and 6e-5 measured where logits are near 1"
ENTROPY = "derived; a log-sum-exp less one logit, and each moves at most as far as the logits"
GROWN = "measured; 2e-6 grew to 2e-5 in 20 steps: AdamW makes full steps of noise in gradients near zero"
KERNEL = "derived; another shape may take another kernel, which adds in another order: as for the logits"
ANGLE = "set by the requirement; blind to TF32, which leaves 5e-7: the largest difference of the logits shows it"
ROUNDED = "derived; another kernel may round its sums to another bf16: as for the logits"
# By quantity the limits in fp32 of CPU, NEAR and FAR, then that of bf16, which is judged alike on every device.
LIMITS = {
    FINITE: [(0.0, "set; a NaN or an infinity is a fault of its own, wherever it is")] * 4,
    LOGITS: [(1e-5, ORDER), (1e-4, TILES), (1e-3, PASSES), (3e-2, BITS)],
    COSINE: [(1e-10, ORDER), (1e-4, ANGLE), (1e-3, ANGLE), (2e-4, BITS)],
    SCALE: [(1e-5, RELATIVE), (1e-4, RELATIVE), (1e-3, RELATIVE), (4e-3, ONE_WAY)],
    OFFSET: [(1e-5, SHIFT), (1e-4, SHIFT), (1e-3, SHIFT), (1e-2, MEAN)],
    SPANS: [(0.0, "derived; a decided row leads by more than 4 limits of the logits, two a span: none may change")] * 4,
    LOSS: [(2e-5, ENTROPY), (2e-4, ENTROPY), (2e-3, ENTROPY), (6e-2, ENTROPY)],
    CURVE: [
        *[(1e-4, GROWN), (1e-3, GROWN), (1e-2, GROWN)],
        (0.1, "measured; 6e-3 on BERT-base, where logits are near 1, up to 0.05 where they reach 14"),
    ],
    GRADIENTS: [
        (1e-4, "measured; up to 9e-6 in one parameter, 2e-6 over all; bf16 would be 2e-2"),
        (5e-4, "not measured; above the CPU's, and below the 3e-3 that TF32 would leave"),
        (5e-3, TEN),
        (0.1, "measured; up to 3e-2 in one parameter, 1e-2 over all; a turned sign is 2"),
    ],
    LAYERS: [
        (1e-5, "measured; up to 8e-7, a few roundings: layer norm keeps relative errors from growing"),
        (1e-4, "not measured; ten times the CPU's, as for the logits; TF32 would be 1e-3"),
        (1e-3, TEN),
        (3e-2, "measured; up to 8e-3: each matrix product rounds its result by up to 4e-3"),
    ],
    REPEATS: [(0.0, "set; the same kernels on the same numbers in the same order give the same bits")] * 4,
    BATCH: [(1e-5, KERNEL), (1e-4, KERNEL), (1e-3, KERNEL), (3e-2, ROUNDED)],
    PADDING: [(1e-5, KERNEL), (1e-4, KERNEL), (1e-3, KERNEL), (3e-2, ROUNDED)],
    F1: [(0.1, "set; as MLPerf's 99.9% of the fp32 quality; no answer of under 1000 questions may change by more")] * 3
    + [(1.0, "set; as MLPerf's 99% of the fp32 quality; one question of a set of fewer than 100")],
}

# Two fp32 results within twice the reference's error of the fp64 values are at most three times that error apart.
ERROR_FACTOR = 3
# A reference farther from the fp64 reference than this many times the limit fails the run, and eases no limit further.
MAX_EASED = 10
# Of the largest logit, by which losses may differ in bf16: a sixth of what two logits at their limit would allow.
LOSS_SHARE = 0.01


def limit(backend: str, precision: str, quantity: str, other: str = "cpu") -> Limit:
    """Return how far a result of ``backend`` may be from one in fp32 of ``other``: the looser of the limits of both.

    fp64 is judged as fp32 is: the reference's own error is what separates them.
    """
    kinds = [BF16] if precision == "bf16" else [KINDS[backend], KINDS[other]]
    return max((Limit(*LIMITS[quantity][kind]) for kind in kinds), key=lambda entry: entry.value)


def eased(entry: Limit, precision: str, largest: float, reference_error: float | None) -> Limit:
    """Return a limit of logits for inputs whose logits in the reference reach ``largest`` in size.

    ``reference_error`` is the reference's own distance to the fp64 reference, None where that is unknown.
    In fp32 the limit is at least ERROR_FACTOR times that error, at most MAX_EASED times the table's: a difference
    below the reference's own error does not show that a member is worse. In bf16 it grows with logits
    larger than 1, since a bf16 number keeps 8 bits whatever its size.
    """
    if precision == "bf16":
        return _grown(entry, entry.value * largest, f"times the largest logit, {largest:.3g}")
    times = min(ERROR_FACTOR * (reference_error or 0.0), MAX_EASED * entry.value)
    error = f"the reference's distance to double precision in the same inputs, {reference_error or 0.0:.3g}"
    return _grown(entry, times, f"{ERROR_FACTOR} times {error}")


def eased_scale(entry: Limit, logits: float, deviation: float, count: int) -> Limit:
    """Return a limit of the scale that ``count`` logits have, which deviate by ``deviation`` from their mean (root mean square).

    If a third of ``logits``, their own limit, is the standard deviation of independent roundings, that of the fitted scale
    is logits / (3 deviation sqrt(count)), by the variance of a least-squares slope. Three of these are allowed.
    """
    noise = logits / (deviation * math.sqrt(count))
    return _grown(entry, noise, f"three standard deviations of the scale that {count:,} logits show")


def eased_loss(entry: Limit, precision: str, largest: float, logits: float) -> Limit:
    """Return a limit of losses for logits that reach ``largest`` and may differ by ``logits``, their own eased limit.

    In fp32 it is at least twice that, as the table's is of the table's; in bf16 at least LOSS_SHARE of the largest.
    """
    if precision == "bf16":
        return _grown(entry, LOSS_SHARE * largest, f"{LOSS_SHARE:g} times the largest logit, {largest:.3g}")
    return _grown(entry, 2 * logits, f"twice what the logits may differ by, {logits:.3g}")


def _grown(entry: Limit, value: float, why: str) -> Limit:
    return replace(entry, value=value, eased=why) if value > entry.value else entry
