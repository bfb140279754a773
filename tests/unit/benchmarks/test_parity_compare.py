"""Planted differences, just within and just beyond each limit, and what must never pass: recordings of made-up numbers."""

import itertools
import math

import numpy as np
import pytest

from benchlib.benchmarks.parity import recording
from benchlib.benchmarks.parity.compare import Reference, best_span, compare
from benchlib.workloads.executors import MEMBERS
from benchlib.workloads.numerics import (
    BATCH,
    COSINE,
    CURVE,
    FINITE,
    GRADIENTS,
    LAYERS,
    LOGITS,
    LOSS,
    OFFSET,
    PADDING,
    QUANTITIES,
    SCALE,
    SPANS,
)

EAGER, BF16 = MEMBERS["eager"], MEMBERS["bf16"]
ROWS, LENGTH, WIDTH, DEPTH = 4, 8, 16, 4
AT = (1, 4)  # row and position that hold text in len8-batch4
RAGGED = (np.arange(LENGTH) < np.array([[8], [6], [5], [3]])).astype(np.int64)
INPUTS = {
    "len8-batch4/attention_mask": RAGGED,
    "len8-batch1/attention_mask": RAGGED[:1],
    "edge-one-token/attention_mask": (np.arange(LENGTH) < 1)[None].astype(np.int64),
    "edge-masked-row/attention_mask": (np.arange(LENGTH) < np.array([[8], [0]])).astype(np.int64),
    "layer/attention_mask": RAGGED,
}
FACTS = {
    "member": "own", "backend": "cpu", "precision": "fp32", "model_sha256": "m" * 64, "inputs_sha256": "i" * 64,
    "repeats_max_abs": 0.0, "batch_max_abs": 1e-7, "padding_max_abs": 2e-7, "loss": 1.5, "curve": [1.5, 1.25, 1.0],
}  # fmt: skip


def outputs(seed=0, dtype=np.float64):
    """Logits between -1 and 1 for each case and for 11 positions of a dev set."""
    draw = np.random.default_rng(seed)
    shapes = {name.rpartition("/")[0]: mask.shape for name, mask in INPUTS.items()} | {"dev": (11,)}
    names = [(f"{case}/{head}", shape) for case, shape in shapes.items() for head in ("start", "end")]
    return {name: draw.uniform(-1, 1, shape).astype(np.float32).astype(dtype) for name, shape in names}


def layers():
    """Hidden states (B, S, width) of embeddings and encoder layers."""
    draw = np.random.default_rng(1)
    return {f"{number:03d}": draw.standard_normal((ROWS, LENGTH, WIDTH)) for number in range(DEPTH + 1)}


def gradients():
    """Gradients, among them a key's bias that is nothing but rounding."""
    draw = np.random.default_rng(2)
    weights = {f"layer.{number}.weight": draw.standard_normal((WIDTH, WIDTH)) for number in range(DEPTH)}
    return weights | {"layer.0.key.bias": 1e-9 * draw.standard_normal(WIDTH)}


def write(folder, facts=None, **arrays):
    whole = {"outputs": outputs(), "gradients": gradients(), "layers": layers()} | arrays
    return recording.write(folder, FACTS | (facts or {}), **whole)


@pytest.fixture
def judged(tmp_path):
    """Compare a reference with a candidate that has the changes given; return rows by (quantity, place)."""
    numbers = itertools.count()

    def run(member=EAGER, facts=None, reference=None, fp64=None, f1=(None, None), questions=0, **arrays):
        place = tmp_path / str(next(numbers))
        own, other = write(place / "own", facts, **arrays), write(place / "other", **(reference or {}))
        exact = write(place / "fp64_reference", outputs=fp64) if fp64 else None
        rows = compare(Reference(other, exact, INPUTS), own, member, f1, questions)
        return {(row["quantity"], row.get("at", "")): row for row in rows}

    return run


def beyond(rows):
    """The quantities that are not within their limits."""
    return {name for (name, _), row in rows.items() if "value" in row and not row["value"] <= row["limit"]}


def test_a_copy_is_within_every_limit_and_everything_was_compared(judged):
    rows = judged(f1=(80.0, 80.0), questions=32)
    assert beyond(rows) == set() and {name for name, _ in rows} == set(QUANTITIES)
    assert {at for name, at in rows if name == LOGITS} == {name.rpartition("/")[0] for name in outputs()}
    assert (COSINE, "edge-one-token") not in rows, "of one position the cosine is but a sign"
    assert [at for name, at in rows if name == LAYERS] == ["the embeddings", "layer 0", "layer 1", "layer 2", "layer 3"]


@pytest.mark.parametrize(
    ("backend", "member", "limit"),
    [("cpu", EAGER, 1e-5), ("rocm", EAGER, 1e-3), ("tpu", BF16, 3e-2)],
)
def test_noise_around_the_limit_of_logits(judged, backend, member, limit):
    """One logit of 0 becomes ``delta``: within, on and beyond the limit."""
    for delta, within in ((0.999 * limit, True), (limit, True), (-limit, True), (-1.001 * limit, False)):
        plain, own = outputs(), outputs()
        plain["len8-batch4/start"][AT], own["len8-batch4/start"][AT] = 0.0, delta
        rows = judged(member, {"backend": backend}, {"outputs": plain}, outputs=own)
        row = rows[LOGITS, "len8-batch4"]
        assert row["value"] == pytest.approx(abs(delta), rel=1e-12) and row["note"] == "start logits, row 1, position 4"
        assert (row["value"] <= row["limit"]) == within == (LOGITS not in beyond(rows))


def test_the_cosine_alone_gates(judged):
    """Logits so small that no difference is beyond its limit; only their direction is."""
    plain, own = ({name: 1e-6 * array for name, array in outputs(seed).items()} for seed in (0, 1))
    assert beyond(judged(reference={"outputs": plain}, outputs=own)) == {COSINE}


@pytest.mark.parametrize("member", [EAGER, BF16])
def test_a_scale_of_one_head_is_found_in_every_precision(judged, member):
    """All logits of the end head are off by a factor within and beyond the limit; so few logits ease that of bf16."""
    limit = judged(member)[SCALE, "end logits"]["limit"]
    for share, found in ((0.99, False), (1.01, True)):
        own = {name: array * (1 + share * limit * name.endswith("/end")) for name, array in outputs().items()}
        rows = judged(member, outputs=own)
        assert (
            rows[SCALE, "end logits"]["value"] == pytest.approx(share * limit)
            and rows[SCALE, "start logits"]["value"] == 0
        )
        assert (SCALE in beyond(rows)) == found
    shifted = judged(member, outputs={name: array + 0.02 for name, array in outputs().items()})
    assert shifted[OFFSET, "start logits"]["value"] == pytest.approx(0.02) and OFFSET in beyond(shifted)


def test_rounding_to_bf16_is_no_scale_and_cutting_off_bits_is(judged):
    """Cut off, each logit loses up to 2^-7 of its size, 2^-8 on average; rounded, it loses nothing on average."""
    draw = np.random.default_rng(5)
    plain = {name: draw.uniform(-1, 1, (4000,)).astype(np.float32) for name in ("dev/start", "dev/end")}
    half = {True: np.uint32(0x8000), False: np.uint32(0)}
    values = {}
    for rounded in (True, False):
        bits = {name: (array.view(np.uint32) + half[rounded]) & np.uint32(0xFFFF0000) for name, array in plain.items()}
        own = {name: array.view(np.float32) for name, array in bits.items()}
        row = judged(BF16, reference={"outputs": plain}, outputs=own)[SCALE, "start logits"]
        values[rounded] = row["value"]
        assert row["limit"] == 4e-3
    assert values[True] < 1e-4 < 2e-3 < values[False]


def test_logits_that_are_all_one_number_have_no_scale(judged):
    flat = {name: np.ones_like(array) for name, array in outputs().items()}
    row = judged(reference={"outputs": flat}, outputs=flat)[SCALE, ""]
    assert row["status"] == "skipped" and "the reference's are all 1" in row["reason"]


@pytest.mark.parametrize(("error", "limit"), [(1e-6, 1e-5), (1e-5, 3e-5), (1.0, 1e-4)])
def test_limits_follow_the_references_own_error(judged, error, limit):
    """An fp64 reference that is everywhere ``error`` away: three times that, at most ten times the table's."""
    rows = judged(fp64={name: array + error for name, array in outputs().items()})
    assert rows[LOGITS, "dev"]["limit"] == pytest.approx(limit)
    assert bool(rows[LOGITS, "dev"]["eased"]) == (limit > 1e-5) == ("logits" in rows[LOSS, ""]["eased"])
    assert rows[BATCH, ""]["limit"] == pytest.approx(limit) and rows[LOSS, ""]["limit"] == pytest.approx(2 * limit)


def test_in_bf16_limits_follow_the_largest_logit(judged):
    large = {name: 20 * array / np.abs(array).max() for name, array in outputs().items()}
    rows = judged(BF16, reference={"outputs": large}, outputs=large)
    limits = [rows[name, at]["limit"] for name, at in ((LOGITS, "dev"), (LOSS, ""), (CURVE, "step 3"), (PADDING, ""))]
    assert limits == pytest.approx([0.6, 0.2, 0.2, 0.6])


@pytest.mark.parametrize("k", [0, DEPTH - 1])
def test_a_perturbed_layer_is_found_where_it_is_and_decides_nothing(judged, k):
    """Layer k is off by 1.001 of the limit and all later ones by much more, the earlier ones by just less than it; padding by all."""
    states = layers()
    states["000"][3, 3:] += 100.0  # row 3 has three tokens
    for number, name in enumerate(sorted(states)):
        states[name] *= 1 + (0.9 if number < k + 1 else 1.001 if number == k + 1 else 50) * 1e-5
    rows = judged(layers=states)
    first = next(row for (name, _), row in rows.items() if name == LAYERS and row["value"] > row["limit"])
    assert (first["at"], first["index"], first["gates"]) == (f"layer {k}", k + 2, False)
    assert beyond(rows) == {LAYERS}


def with_nan(arrays, key, at):
    arrays[key][at] = math.nan
    return arrays


NANS = {
    LOGITS: {"outputs": with_nan(outputs(), "len8-batch4/end", AT)},
    FINITE: {"outputs": with_nan(outputs(), "edge-masked-row/start", (1, 0))},  # nothing is compared there
    GRADIENTS: {"gradients": with_nan(gradients(), "layer.2.weight", (0, 0))},
    CURVE: {"facts": {"curve": [1.5, math.inf, 1.0]}},
}


@pytest.mark.parametrize("quantity", NANS)
def test_nan_fails_wherever_it_is(judged, quantity):
    rows = judged(**NANS[quantity])
    assert {quantity, FINITE} <= beyond(rows)
    (finite,) = (row for (name, _), row in rows.items() if name == FINITE)
    assert finite["value"] == 1 and finite["at"]


FEWER = {name: array for name, array in outputs().items() if "batch1" not in name}
MISSING = [
    ({"outputs": FEWER}, LOGITS),
    ({"reference": {"outputs": FEWER}}, LOGITS),
    ({"gradients": {name: array for name, array in gradients().items() if "0.key" not in name}}, GRADIENTS),
    ({"layers": layers() | {"001": np.zeros((1, 1))}}, LAYERS),
    ({"facts": {"curve": [1.5, 1.25]}}, CURVE),
    ({"facts": {"curve": []}}, CURVE),
]


@pytest.mark.parametrize(("change", "quantity"), MISSING)
def test_what_is_missing_or_of_another_shape_is_beyond(judged, change, quantity):
    assert quantity in beyond(judged(**change))


def test_what_a_kernel_leaves_out_is_said_and_not_judged(judged):
    left = sorted({name.rpartition("/")[0] for name in outputs()} - {"len8-batch1"})
    own = {name: array for name, array in outputs().items() if name.startswith("len8-batch1/")}
    rows = judged(member=MEMBERS["flash"], outputs=own, facts={"left_out": left})
    assert beyond(rows) == set() and (LOGITS, "len8-batch1") in rows
    assert "takes no attention mask: dev, edge-masked-row, edge-one-token and 2 more" in rows[LOGITS, ""]["reason"]
    assert LOGITS in beyond(judged(member=MEMBERS["flash"], outputs=own, facts={"left_out": left[1:]}))


def test_a_gradient_of_nothing_is_measured_by_the_others(judged):
    off = gradients() | {"layer.0.key.bias": 2 * gradients()["layer.0.key.bias"]}
    assert beyond(judged(gradients=off)) == set()


def test_the_best_span_is_that_of_all_pairs(judged):
    draw = np.random.default_rng(3)
    for size in (2, 3, 7, 20):
        start, end = draw.standard_normal((2, size))
        scores = sorted(((start[a] + end[b], (a, b)) for a in range(size) for b in range(a, size)), reverse=True)
        (best, span), (second, _) = scores[:2]
        actual, lead = best_span(start, end)
        assert actual == span and lead == pytest.approx(best - second)


def test_only_rows_whose_best_span_leads_clearly_are_compared(judged):
    """One row is decided, another is not: rounding may choose there."""
    plain = {name: np.zeros_like(array) for name, array in outputs().items()}
    plain["len8-batch4/start"][0, 2] = plain["len8-batch4/end"][0, 3] = 1.0
    own = {name: array.copy() for name, array in plain.items()}
    own["len8-batch4/start"][1, 0] = 1e-6
    assert judged(reference={"outputs": plain}, outputs=own)[SPANS, ""]["note"] == "1 rows are decided"
    own["len8-batch4/start"][0] = 0.0
    own["len8-batch4/start"][0, 1] = 1.0
    assert judged(reference={"outputs": plain}, outputs=own)[SPANS, "len8-batch4"]["value"] == 1.0
    nothing = {name: np.zeros_like(array) for name, array in outputs().items()}
    assert judged(reference={"outputs": nothing}, outputs=nothing)[SPANS, ""]["status"] == "skipped"
