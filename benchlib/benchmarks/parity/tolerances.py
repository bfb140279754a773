"""How large a difference may be, by backend, precision and quantity, each limit with its reason; and what it judges.

A value on its limit passes. Each reason says where the number comes from: *set* by the benchmark's requirement, *derived*
from another limit, or *measured*, with the sizes that were seen. For accelerators that nothing here was measured on the
reason says so.

Sizes to think in: fp32 keeps 24 bits (a rounding is at most 2^-24 = 6e-8 of the value), TF32 11 (2^-11 = 5e-4), bf16 8
(2^-8 = 4e-3 to the nearest, with 7 stored). A cosine is blind to scale and quadratic in the rest: 1 - cos is about half
the square of the relative difference, so 1 - 1e-10 stands for 1.4e-5 and 0.9999 for 1.4e-2. It is therefore never judged
without the maximal difference beside it.

The limits of logits are absolute, and hold as they are for logits near 1. Those of a trained model reach 10, where a
reference in fp32 is itself 1e-5 from the truth and bf16 numbers are 0.06 apart: see ``eased``.
"""

import math
from dataclasses import dataclass, replace

from benchlib.benchmarks.parity.config import Member
from benchlib.core.errors import UserError, nearest

PASS, FAIL, SKIPPED, NOT_COMPARED = "PASS", "FAIL", "SKIPPED", "NOT COMPARED"

FINITE = "finite"
LOGITS = "logits max difference"
COSINE = "logits cosine"
SCALE = "logits scale"
OFFSET = "logits offset"
SPANS = "span agreement"
LOSS = "loss"
GRADIENTS = "gradients"
CURVE = "loss curve"
LAYERS = "layers"
REPEATS = "repeats"
BATCH = "batch invariance"
PADDING = "padding invariance"
F1 = "f1 difference"

UNITS = {
    FINITE: "numbers that are NaN or infinite",
    LOGITS: "absolute",
    COSINE: "1 - cosine",
    SCALE: "relative",
    OFFSET: "relative to the largest logit, worst head",
    SPANS: "share of decided rows",
    LOSS: "absolute",
    GRADIENTS: "relative L2 norm, worst parameter",
    CURVE: "absolute, worst step",
    LAYERS: "relative L2 norm, first layer beyond, else the worst",
    REPEATS: "absolute",
    BATCH: "absolute",
    PADDING: "absolute",
    F1: "F1 points",
}
QUANTITIES = tuple(UNITS)
# Where a difference sits is not whether it matters: a layer beyond its limit is named, and the outputs are judged.
LOCATES = (LAYERS,)
PRECISIONS = ("fp32", "bf16", "fp64")
BACKENDS = ("cpu", "cuda", "rocm", "mps", "xpu", "tpu")

# Two fp32 results within twice the reference's error of the truth are at most three times that error apart.
TRUTH_FACTOR = 3
# A reference farther from the truth than this many times the limit fails the run, and eases no limit further.
MOST_EASED = 10

# In bf16 limits grow with the largest logit; those of trained models reach some tens.
LARGEST_LOGIT = 100

# Of the largest logit, by which losses may differ in bf16: a sixth of what two logits at their limit would allow.
LOSS_SHARE = 0.01

# A parameter's difference is measured against its gradient's norm, but never against less than this share of the norm of
# all gradients, about that of a small tensor: a key's bias has none (softmax does not see what it adds to a whole row), only
# what rounding left of sums whose terms are of that size.
GRADIENT_FLOOR = 1e-2


@dataclass(frozen=True)
class Tolerance:
    """A limit with its reason. ``at_least`` is for shares, of which more is better."""

    value: float
    why: str
    unit: str
    at_least: bool = False

    @property
    def text(self) -> str:
        """The limit as it stands in a table."""
        return f"{'>=' if self.at_least else '<='} {self.value:.3g}"

    def holds(self, value: float) -> bool:
        """Whether a value is within the limit. The limit itself is; NaN never is."""
        return value >= self.value if self.at_least else value <= self.value

    def looser(self, other: "Tolerance") -> "Tolerance":
        """Return the one of two that lets more through."""
        return other if (other.value < self.value) == self.at_least and other.value != self.value else self


_CLASS = {"cpu": "cpu", "cuda": "near", "mps": "near", "xpu": "near", "rocm": "far", "tpu": "far"}

# Logits (max difference, cosine) per class of backend; set by the requirement of the benchmark.
_OUTPUTS: dict[tuple[str, str], tuple[float, float, str]] = {
    ("cpu", "fp32"): (
        1e-5,
        1e-10,
        "set; the same operations with their additions in another order: 1e-6 was measured on BERT-base with random "
        "weights, where logits are near 1",
    ),
    ("near", "fp32"): (
        1e-4,
        1e-4,
        "set, not measured here; other tilings, fused multiply-add and another exp, all in fp32; TF32 (2^-11 a rounding) "
        "is off in exact mode and would leave 1e-3 to 3e-3 (1/8 of what bf16 leaves)",
    ),
    ("far", "fp32"): (
        1e-3,
        1e-3,
        "set, not measured here; ROCm takes its kernels for matrix products and attention by version and shape, and a "
        "TPU composes fp32 products from several passes in bf16",
    ),
}
_BF16 = (
    3e-2,
    2e-4,
    "set; a bf16 number has 8 significant bits, so each rounding is up to 2^-8 = 4e-3 of a number, and those of every "
    "layer add up; up to 2e-2 and 6e-5 were measured on BERT-base with random weights, where logits are near 1",
)
# What all logits of the data cases have in common: a factor, an addend relative to the largest logit. Errors without a
# direction cancel over thousands of logits, so these limits are far below those of one logit, and a scale that bf16 hides in
# each single logit shows.
_IN_COMMON = {
    "cpu": (
        1e-6,
        "measured up to 2e-8 in both, on the embedded model and on BERT-base: roundings of 6e-8 without a common direction",
    ),
    "near": (
        1e-5,
        "not measured here; ten times the CPU's, as for the logits; TF32 that cuts digits off would be 5e-4",
    ),
    "far": (1e-4, "not measured here; ten times the other accelerators', as for the logits"),
    "bf16": (
        2.0**-8,
        "measured up to 9.2e-4 in both (scale 2.6e-4 on the embedded model, 9.2e-4 on BERT-base); one rounding, 2^-8, that "
        "all logits had in common; a scale of 1.01 is beyond",
    ),
}
# Relative L2 norms: of a parameter's gradient, of a layer's activations.
_GRADIENTS = {
    "cpu": (1e-4, "measured up to 9e-6 in one parameter, 2e-6 over all; bf16 would be 2e-2"),
    "near": (
        5e-4,
        "not measured here; above the CPU's for other kernels, and below the 3e-3 that TF32 would leave (1/8 of bf16's)",
    ),
    "far": (5e-3, "not measured here; ten times the other accelerators', as for the logits"),
    "bf16": (1e-1, "measured up to 3e-2 in one parameter and 1e-2 over all, with weights in fp32; a turned sign is 2"),
}
_LAYERS = {
    "cpu": (1e-5, "measured up to 8e-7: a few roundings of 6e-8; layer norm keeps relative errors from growing"),
    "near": (1e-4, "not measured here; ten times the CPU's, as for the logits; TF32 would be 1e-3 (1/8 of bf16's)"),
    "far": (1e-3, "not measured here; ten times the other accelerators', as for the logits"),
    "bf16": (3e-2, "measured up to 8e-3: each matrix product rounds its result to 8 bits, by up to 2^-8 = 4e-3"),
}


def limit(backend: str, precision: str, quantity: str) -> Tolerance:
    """Return the tolerance of a quantity of a member in ``precision`` on ``backend``, against a reference in fp32.

    fp64 is judged as fp32 is: the reference's own error is what separates them. ``UserError`` for an unknown name.
    """
    for name, available in ((backend, BACKENDS), (precision, PRECISIONS), (quantity, QUANTITIES)):
        if name not in available:
            raise UserError(f"no tolerance of {name!r}: {nearest(name, available)}")
    group, kept = _CLASS[backend], "bf16" if precision == "bf16" else "fp32"
    value, why = _entry(group, kept, quantity)
    return Tolerance(value, why, UNITS[quantity], at_least=quantity == SPANS)


def between(item: str, other: str, precision: str, quantity: str) -> Tolerance:
    """Return the looser of two backends' tolerances: a CPU judged by a GPU's reference may differ as the GPU may."""
    return limit(item, precision, quantity).looser(limit(other, precision, quantity))


def loosest(item: str, other: str, precision: str, quantity: str) -> Tolerance:
    """Return the loosest limit that a result can have been judged by: that of ``between``, as far as it can be eased.

    ``UserError`` for an unknown name.
    """
    limit = between(item, other, precision, quantity)
    times = LARGEST_LOGIT if precision == "bf16" else MOST_EASED
    # A share of rows and what is set to zero are never eased; rounding must not count.
    return limit if limit.at_least else replace(limit, value=limit.value * times * (1 + 1e-6))


def eased(limit: Tolerance, precision: str, largest: float, reference_error: float | None) -> Tolerance:
    """Return a limit of logits for inputs whose logits in the reference reach ``largest`` in size.

    ``reference_error`` is the reference's own distance to the truth in double precision, None where that is unknown.
    In fp32 the limit is at least TRUTH_FACTOR times that error, at most MOST_EASED times the table's: a difference
    below the reference's own error does not show that a member is worse. In bf16 it grows with logits
    larger than 1, since a bf16 number keeps 8 bits whatever its size.
    """
    if precision == "bf16":
        grown, why = limit.value * largest, f"times the largest logit, {largest:.3g}"
    else:
        grown = min(TRUTH_FACTOR * (reference_error or 0.0), MOST_EASED * limit.value)
        why = f"here {TRUTH_FACTOR} times the reference's distance to double precision in the same inputs, {reference_error or 0.0:.3g}"
    return replace(limit, value=grown, why=f"{limit.why}; {why}") if grown > limit.value else limit


def eased_loss(limit: Tolerance, precision: str, largest: float, logits: float) -> Tolerance:
    """Return a limit of losses for logits that reach ``largest`` and may differ by ``logits``, their own eased limit.

    In fp32 it is at least twice that, as the table's is of the table's; in bf16 at least LOSS_SHARE of the largest logit.
    """
    if precision == "bf16":
        grown, why = LOSS_SHARE * largest, f"here {LOSS_SHARE:g} times the largest logit, {largest:.3g}"
    else:
        grown, why = 2 * logits, f"here twice what the logits may differ by, {logits:.3g}"
    return replace(limit, value=grown, why=f"{limit.why}; {why}") if grown > limit.value else limit


def _entry(group: str, precision: str, quantity: str) -> tuple[float, str]:
    logits, cosine, why = _BF16 if precision == "bf16" else _OUTPUTS[group, precision]
    by_precision = "bf16" if precision == "bf16" else group
    entries = {
        FINITE: (0.0, "set; a NaN or an infinity in an output, a loss, a gradient or an activation is a fault of its own"),
        LOGITS: (logits, why),
        COSINE: (cosine, why),
        SCALE: _IN_COMMON[by_precision],
        OFFSET: _IN_COMMON[by_precision],
        SPANS: (
            1.0,
            "derived; a row is decided where the reference's best span leads the next by more than 4 times the logits' "
            "limit, two logits a span: within that limit no such row can choose another span",
        ),
        LOSS: (2 * logits, "derived; cross-entropy is a log-sum-exp less one logit, and each moves at most as far as the logits"),
        GRADIENTS: _GRADIENTS[by_precision],
        CURVE: _curve(precision, logits),
        LAYERS: _LAYERS[by_precision],
        REPEATS: (0.0, "set; the same kernels on the same numbers in the same order give the same bits"),
        BATCH: _invariance(precision, logits),
        PADDING: _invariance(precision, logits),
        F1: (
            (1.0, "set; as MLPerf's 99% of the fp32 quality; one question of a set of fewer than 100")
            if precision == "bf16"
            else (0.1, "set; as MLPerf's 99.9% of the fp32 quality; no answer of a set of fewer than 1000 may change by more")
        ),
    }  # fmt: skip
    return entries[quantity]


def _curve(precision: str, logits: float) -> tuple[float, str]:
    if precision == "bf16":
        return (
            0.1,
            "measured up to 6e-3 on BERT-base, where logits are near 1, and up to 0.05 on the embedded model, where they reach "
            "14; a step's loss moves as the logits do",
        )
    return (
        10 * logits,
        "measured; over 20 steps of AdamW differences of 2e-6 grew to 2e-5, so five times the loss' limit: m / sqrt(v) turns "
        "noise in gradients near zero into steps of full size, along which the loss is flat",
    )


def _invariance(precision: str, logits: float) -> tuple[float, str]:
    if precision == "bf16":
        return (
            logits,
            "derived; another shape may take another kernel, whose sums round to another bf16: as for the logits",
        )
    return 1e-5, "set; another shape may take another kernel, which adds in another order"


@dataclass(frozen=True)
class Row:
    """One quantity of one member. ``value`` is None where there is no number to judge; then ``reason`` says why.

    ``gates`` says whether a FAIL here fails the run. ``worst`` names the case, parameter, step or layer that the value
    comes from; ``why`` is where the limit comes from.
    """

    member: str
    quantity: str
    value: float | None
    limit: float | None
    limit_text: str
    unit: str
    status: str
    gates: bool
    worst: str = ""
    why: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Judge:
    """Makes the rows of one member on ``backend``, compared with a reference that ran on ``other``.

    ``ease`` says whether limits of logits follow their size and the reference's own error: see ``tolerances.eased``.
    """

    member: Member
    backend: str
    other: str
    ease: bool = True

    def tolerance(self, quantity: str) -> Tolerance:
        """Return the limit of a quantity: the looser one of the two backends."""
        return between(self.backend, self.other, self.member.precision, quantity)

    def eased(self, quantity: str, largest: float, reference_error: float | None) -> Tolerance:
        """Return the limit of a difference between logits that reach ``largest`` in the reference."""
        limit = self.tolerance(quantity)
        return eased(limit, self.member.precision, largest, reference_error) if self.ease else limit

    def judge(
        self, quantity: str, value: float, worst: str = "", reason: str = "", limit: Tolerance | None = None
    ) -> Row:
        """Return the row of a measured value; one that is no number fails. ``limit`` stands in for the table's."""
        limit = limit or self.tolerance(quantity)
        finite = math.isfinite(value)
        status = PASS if finite and limit.holds(value) else FAIL
        reason = reason or ("" if finite else "not finite")
        return self._row(quantity, value if finite else None, status, worst, reason, limit)

    def fail(self, quantity: str, reason: str, worst: str = "") -> Row:
        """Return the row of a quantity that should have a value and has none."""
        return self._row(quantity, None, FAIL, worst, reason)

    def skip(self, quantity: str, reason: str) -> Row:
        """Return the row of a quantity that there is nothing to judge of."""
        return self._row(quantity, None, SKIPPED, "", reason)

    def _row(
        self, quantity: str, value: float | None, status: str, worst: str, reason: str, limit: Tolerance | None = None
    ) -> Row:
        limit = limit or self.tolerance(quantity)
        gates = self.member.gates and quantity not in LOCATES
        return Row(
            self.member.name, quantity, value, limit.value, limit.text, limit.unit, status, gates, worst, limit.why, reason
        )  # fmt: skip
