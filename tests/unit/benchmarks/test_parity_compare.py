"""Planted differences, just within and just beyond each limit, and what must never pass."""

import dataclasses
import itertools
import math

import make_recordings
import numpy as np
import pytest

from benchlib.benchmarks.parity import logits, tolerances
from benchlib.benchmarks.parity.compare import compare
from benchlib.benchmarks.parity.config import MEMBERS
from benchlib.benchmarks.parity.judge import lacks
from benchlib.judge.numbers import fault_of

INPUTS = make_recordings.inputs()
EAGER = MEMBERS["eager"]
BF16 = MEMBERS["bf16"]
AT = (1, 4)  # row and position that hold text in len8-batch4


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_recordings.write(tmp_path_factory.mktemp("reference") / "reference")


@pytest.fixture
def judged(tmp_path, plain):
    """Return a comparison of a reference with a candidate that has the changes given."""
    numbers = itertools.count()

    def run(member=EAGER, facts=None, reference=None, truth=None, f1=None, questions=0, ease=True, **arrays):
        place = tmp_path / str(next(numbers))
        own = make_recordings.write(place / "own", facts, **arrays)
        other = make_recordings.write(place / "other", **reference) if reference else plain
        known = make_recordings.write(place / "truth", outputs=truth) if truth else None
        return compare(other, own, known, INPUTS, member, f1, questions, ease)

    return run


def row(found, quantity):
    return next(row for row in found.rows if row.quantity == quantity)


def statuses(found):
    return {row.quantity: row.status for row in found.rows}


def facts(**changes):
    return make_recordings.meta("eager", **changes)


def noisy(delta, key="len8-batch4/start", at=AT):
    """Return the reference's logits in float64 with one of them off by exactly ``delta``."""
    found = {name: array.astype(np.float64) for name, array in make_recordings.outputs().items()}
    found[key][at] = delta
    return found


def zeroed(key="len8-batch4/start", at=AT):
    found = make_recordings.outputs()
    found[key][at] = 0.0
    return {"outputs": found}


def turned(angle, size):
    """Return two sets of logits of one small size with this angle between the heads of len8-batch4, and none elsewhere."""
    mask = INPUTS["len8-batch4/attention_mask"] == 1
    flat = {name: size * array.astype(np.float64) for name, array in make_recordings.outputs().items()}
    own = {name: array.copy() for name, array in flat.items()}
    u = flat["len8-batch4/end"][mask]
    other = np.random.default_rng(7).standard_normal(u.shape)
    known = np.stack([u, np.ones_like(u)], axis=1)
    v = other - known @ np.linalg.lstsq(known, other, rcond=None)[0]  # neither a scale nor an offset
    v *= np.linalg.norm(u) / np.linalg.norm(v)
    own["len8-batch4/end"][mask] = u + math.tan(angle) * v
    return flat, own


def test_a_copy_passes_and_everything_was_judged(judged):
    found = judged(facts=facts(), f1=(80.0, 80.0), questions=32)
    assert found.outcome == "PASS" and found.reason == ""
    assert [row.quantity for row in found.rows] == list(tolerances.QUANTITIES)
    assert set(statuses(found).values()) == {"PASS"}
    assert row(found, "logits max difference").value == row(found, "logits cosine").value == 0.0
    assert all(row.why and row.limit_text for row in found.rows)


@pytest.mark.parametrize(
    ("backend", "member", "limit"),
    [
        ("cpu", EAGER, 1e-5), ("cuda", EAGER, 1e-4), ("rocm", EAGER, 1e-3), ("tpu", BF16, 3e-2),
    ],
)  # fmt: skip
def test_noise_around_the_limit_of_logits(judged, backend, member, limit):
    """One logit of 0 becomes ``delta``: within, on and beyond the limit."""
    outcomes = []
    for delta in (0.999 * limit, limit, -limit, 1.001 * limit, -1.001 * limit):
        found = judged(member, facts(backend=backend), zeroed(), outputs=noisy(delta))
        status = row(found, "logits max difference")
        assert status.value == pytest.approx(abs(delta), rel=1e-12)
        assert status.worst == "len8-batch4" and "start logits, row 1, position 4" in status.reason
        assert row(found, "logits cosine").status == "PASS" or limit == 3e-2
        outcomes.append(status.status)
        assert found.outcome == status.status
    assert outcomes == ["PASS", "PASS", "PASS", "FAIL", "FAIL"]


@pytest.mark.parametrize(
    ("backend", "member", "limit"),
    [("cpu", EAGER, 1e-10), ("rocm", EAGER, 1e-3), ("cpu", BF16, 2e-4)],
)
def test_the_cosine_alone_gates(judged, backend, member, limit):
    """Logits so small that no difference is beyond its limit; only their direction is."""
    for share, status in ((0.999, "PASS"), (1.001, "FAIL")):
        reference, own = turned(math.acos(1 - share * limit) if limit > 1e-9 else math.sqrt(2 * share * limit), 1e-3)
        found = judged(member, facts(backend=backend), {"outputs": reference}, outputs=own)
        assert row(found, "logits cosine").value == pytest.approx(share * limit, rel=1e-4)
        assert row(found, "logits max difference").status == "PASS"
        assert found.outcome == row(found, "logits cosine").status == status


@pytest.mark.parametrize("backend", ["cpu", "cuda", "rocm"])
def test_a_scale_of_1_01_is_not_seen_by_the_cosine(judged, backend):
    larger = {name: np.float32(1.01) * array for name, array in make_recordings.outputs().items()}
    found = judged(facts=facts(backend=backend), outputs=larger)
    assert row(found, "logits cosine").status == "PASS" and row(found, "logits cosine").value < 1e-13
    assert row(found, "logits max difference").status == row(found, "logits scale").status == found.outcome == "FAIL"


IN_COMMON = [
    ("cpu", EAGER, 1e-6),
    ("cuda", EAGER, 1e-5),
    ("rocm", EAGER, 1e-4),
    ("tpu", BF16, 2.0**-8),
]


def data_logits(outputs, head):
    return np.concatenate(
        [outputs[f"{case}/{head}"][INPUTS[f"{case}/attention_mask"] == 1] for case in ("len8-batch4", "len8-batch1")]
    )


@pytest.mark.parametrize(("backend", "member", "limit"), IN_COMMON)
def test_noise_around_the_limit_of_scale(judged, backend, member, limit):
    for factor, status in ((1 + 0.99 * limit, "PASS"), (1 - 1.01 * limit, "FAIL"), (1 + 1.01 * limit, "FAIL")):
        scaled_ = {name: factor * array.astype(np.float64) for name, array in make_recordings.outputs().items()}
        found = row(judged(member, facts(backend=backend), outputs=scaled_), "logits scale")
        assert found.value == pytest.approx(abs(factor - 1), rel=1e-6) and found.status == status and found.gates


@pytest.mark.parametrize(("backend", "member", "limit"), IN_COMMON)
def test_noise_around_the_limit_of_an_offset(judged, backend, member, limit):
    """Both heads in opposite directions, and logits outside of the data cases untouched: neither hides it."""
    largest = max(float(np.abs(data_logits(make_recordings.outputs(), head)).max()) for head in ("start", "end"))
    for share, status in ((0.99, "PASS"), (1.01, "FAIL")):
        off = {name: array.astype(np.float64) for name, array in make_recordings.outputs().items()}
        for name in off:
            if name.startswith("len8"):
                off[name] += share * limit * largest * (1 if name.endswith("start") else -1)
        found = row(judged(member, facts(backend=backend), outputs=off), "logits offset")
        assert found.value == pytest.approx(share * limit, rel=1e-6) and found.status == status and found.gates


def test_scale_is_the_slope_of_a_line_through_zero(judged):
    own = make_recordings.outputs(seed=5)
    c, r = (
        np.concatenate([data_logits(side, head) for head in ("start", "end")])
        for side in (own, make_recordings.outputs())
    )
    slope = np.linalg.lstsq(r[:, None].astype(np.float64), c.astype(np.float64), rcond=None)[0][0]
    assert row(judged(facts=facts(), outputs=own), "logits scale").value == pytest.approx(abs(slope - 1), rel=1e-9)


@pytest.mark.parametrize("change", [lambda x: 1.01 * x, lambda x: 1.02 * x, lambda x: x + 0.1])
def test_a_small_scale_or_offset_fails_in_bf16_too(judged, change):
    """Differences that bf16 allows each single logit, where all of them differ alike."""
    off = {name: change(array.astype(np.float64)) for name, array in make_recordings.outputs().items()}
    ten = {name: 10 * array.astype(np.float64) for name, array in make_recordings.outputs().items()}
    off = {name: change(array) for name, array in ten.items()}
    found = judged(BF16, facts(), {"outputs": ten}, outputs=off)
    assert found.outcome == "FAIL" and row(found, "logits max difference").status == "PASS"
    assert {one.quantity for one in found.rows if one.status == "FAIL"} <= {"logits scale", "logits offset"}


def test_limits_of_losses_follow_the_logits(judged):
    """With logits up to 20 a loss in bf16 may be off by 0.2, in fp32 by twice what the reference's error eases logits to."""
    twenty = {name: array.astype(np.float64) for name, array in make_recordings.outputs().items()}
    for array in twenty.values():
        array.flat[0] = -20.0
    near = {name: array + 1e-5 for name, array in twenty.items()}  # of the truth: logits may be 3e-5 apart
    for member, truth, quantity, limit, table in (
        (BF16, None, "loss", 0.2, 0.06), (BF16, None, "loss curve", 0.2, 0.1),
        (EAGER, near, "loss", 6e-5, 2e-5), (EAGER, near, "loss curve", 1e-4, 1e-4),
    ):  # fmt: skip
        for size, ease, status in (
            (0.99 * limit, True, "PASS"),
            (1.01 * limit, True, "FAIL"),
            (1.01 * table, False, "FAIL"),
        ):
            found = judged(
                member,
                facts(loss=1.5 + size, curve=[1.5 + size, 1.25, 1.0]),
                {"outputs": twenty},
                truth,
                outputs=twenty,
                ease=ease,
            )
            assert row(found, quantity).status == status, (quantity, size, ease)
        assert (
            "logit" in row(judged(member, facts(), {"outputs": twenty}, truth, outputs=twenty), quantity).why
            or limit == table
        )


def test_a_truth_with_a_nan_still_tells_how_far_the_reference_is(judged):
    broken = shifted(1e-5)
    broken["len8-batch4/start"][AT] = np.nan
    found = judged(facts=facts(), truth=broken, outputs=make_recordings.outputs())
    assert "double precision in the same inputs, 1e-05" in row(found, "logits max difference").why
    assert found.tables["truth"][0]["verdict"] == "as close" and found.outcome == "PASS"
    nothing = {name: np.full_like(array, np.nan) for name, array in broken.items()}
    found = judged(facts=facts(), truth=nothing, outputs=make_recordings.outputs())
    assert found.tables["truth"] == [] and found.outcome == "PASS"


@pytest.mark.parametrize("member", [EAGER, BF16])
def test_swapped_heads_fail(judged, member):
    right = make_recordings.outputs()
    swap = {"start": "end", "end": "start"}
    swapped = {f"{name.rpartition('/')[0]}/{swap[name.rpartition('/')[2]]}": array for name, array in right.items()}
    found = judged(member, facts(), outputs=swapped)
    assert row(found, "logits max difference").status == row(found, "logits cosine").status == "FAIL"
    assert row(found, "span agreement").status == found.outcome == "FAIL"


@pytest.mark.parametrize("k", range(make_recordings.DEPTH))
def test_a_perturbed_layer_is_found_where_it_is(judged, k):
    """Layer k is off by 1.001 of the limit and all later ones by much more, the earlier ones by just less than it."""
    layers, limit = make_recordings.layers(), 1e-5
    for number, key in enumerate(sorted(layers)):
        size = 0.9 if number < k + 1 else 1.001 if number == k + 1 else 50
        layers[key] = layers[key].astype(np.float64) * (1 + size * limit)
    found = judged(facts=facts(), layers=layers)
    assert row(found, "layers").worst == f"bert.encoder.layer.{k}" and row(found, "layers").status == "FAIL"
    assert [entry["layer"] for entry in found.tables["layers"] if entry["beyond"]][0] == f"bert.encoder.layer.{k}"  # noqa: RUF015
    assert [entry["depth"] for entry in found.tables["layers"]] == pytest.approx(np.linspace(0, 1, 6))
    assert found.outcome == "PASS"  # it says where; whether it matters is for the outputs to say


def test_layers_are_compared_where_there_is_text(judged):
    layers = make_recordings.layers()
    layers["002|bert.encoder.layer.1"][3, 3:] += 100.0  # row 3 has three tokens
    assert row(judged(facts=facts(), layers=layers), "layers").value == 0.0
    layers["002|bert.encoder.layer.1"][3, 2] += 1.0
    assert row(judged(facts=facts(), layers=layers), "layers").worst == "bert.encoder.layer.1"


def test_nan_fails_wherever_it_is(judged):
    def with_nan(arrays, key, at):
        arrays[key][at] = np.nan
        return arrays

    outputs, layers, gradients = make_recordings.outputs, make_recordings.layers, make_recordings.gradients
    broken = {
        "logits max difference": {"outputs": with_nan(outputs(), "len8-batch4/end", AT)},
        "finite": {"outputs": with_nan(outputs(), "edge-masked-row/start", (1, 0))},  # nothing is compared there
        "gradients": {"gradients": with_nan(gradients(), "layer.2.weight", (0, 0))},
        "layers": {"layers": with_nan(layers(), "002|bert.encoder.layer.1", (0, 0, 0))},
        "loss": {"facts": facts(loss=math.nan)},
        "loss curve": {"facts": facts(curve=[1.5, math.inf, 1.0])},
        "repeats": {"facts": facts(repeats={"runs": 5, "identical": False, "max_abs": math.nan})},
        "batch invariance": {"facts": facts(invariance={"batch_max_abs": math.nan, "padding_max_abs": 0.0})},
    }
    for quantity, changes in broken.items():
        found = judged(**({"facts": facts()} | changes))
        assert row(found, quantity).status == row(found, "finite").status == found.outcome == "FAIL", quantity
        for table, rows in {**found.tables, "quantities": list(map(dataclasses.asdict, found.rows))}.items():
            faults = [(name, line) for line in rows for name, value in line.items() if fault_of(value) and not (
                value is None and lacks(table, line, name))]  # fmt: skip
            assert not faults, (quantity, table)
        assert row(found, "finite").value == 1.0, quantity
    found = judged(facts=facts(), outputs=broken["finite"]["outputs"])
    assert row(found, "logits max difference").value == 0.0  # the row has no text: judged for being numbers only


def test_nothing_passes_without_two_sides(judged, tmp_path):
    one = make_recordings.write(tmp_path / "one", facts())
    for found in (
        compare(None, one, None, INPUTS, EAGER),
        compare(one, None, None, INPUTS, EAGER),
        compare(one, one, one, INPUTS, EAGER),  # the reference itself
        judged(facts=facts(model_sha256="0" * 64)),
        judged(facts=facts(inputs_sha256="0" * 64)),
        judged(facts=facts(absent=dict.fromkeys(logits.names(make_recordings.outputs()), "too long")), outputs={}),
    ):
        assert found.outcome == "NOT COMPARED" and found.reason
        assert "PASS" not in {
            row.status for row in found.rows if row.quantity in ("logits max difference", "logits cosine")
        }


def test_what_was_left_out_needs_a_reason(judged):
    without = {name: array for name, array in make_recordings.outputs().items() if not name.startswith("edge-one")}
    found = judged(facts=facts(), outputs=without)
    assert found.outcome == "FAIL" and "edge-one-token/start was not computed" in found.reason
    found = judged(facts=facts(absent={"edge-one-token": "no such shape"}), outputs=without)
    assert found.outcome == "PASS" and "no such shape" in row(found, "logits max difference").reason
    found = judged(facts=facts(loss=None, curve=None), gradients={}, layers={})
    assert {row.quantity for row in found.rows if row.status == "FAIL"} == {"loss", "gradients", "loss curve", "layers"}
    graph = "a compiled graph"
    named = dict.fromkeys(("loss", "gradients", "loss curve", "layers"), graph)
    found = judged(facts=facts(loss=None, curve=None, absent=named), gradients={}, layers={})
    assert found.outcome == "PASS"
    assert {row.quantity for row in found.rows if row.reason == graph and row.status == "SKIPPED"} == set(named)


def test_another_shape_fails(judged):
    outputs = make_recordings.outputs() | {"len8-batch4/start": np.zeros((4, 7), np.float32)}
    found = judged(facts=facts(), outputs=outputs)
    assert found.outcome == "FAIL" and "len8-batch4/start has shape (4, 7)" in found.reason


@pytest.mark.parametrize(
    ("quantity", "limit", "changes"),
    [
        ("loss", 2e-5, lambda size: {"facts": facts(loss=1.5 + size)}),
        ("loss curve", 1e-4, lambda size: {"facts": facts(curve=[1.5, 1.25 - size, 1.0])}),
        ("batch invariance", 1e-5, lambda size: {"facts": facts(invariance={"batch_max_abs": size, "padding_max_abs": 0.0})}),
        ("padding invariance", 1e-5, lambda size: {"facts": facts(invariance={"batch_max_abs": 0.0, "padding_max_abs": size})}),
        ("f1 difference", 0.1, lambda size: {"facts": facts(), "f1": (80.0, 80.0 - size)}),
        ("gradients", 1e-4, lambda size: {"facts": facts(), "gradients": scaled("layer.2.weight", 1 + size)}),
    ],
)  # fmt: skip
def test_noise_around_every_other_limit(judged, quantity, limit, changes):
    for share, status in ((0.99, "PASS"), (1.01, "FAIL")):
        found = judged(**changes(share * limit))
        assert row(found, quantity).value == pytest.approx(share * limit, rel=1e-6)
        assert found.outcome == row(found, quantity).status == status
        assert {one.quantity for one in found.rows if one.status == "FAIL"} == (
            {quantity} if status == "FAIL" else set()
        )


def scaled(name, factor):
    found = make_recordings.gradients()
    found[name] = found[name].astype(np.float64) * factor
    return found


def test_gradients_of_nothing_are_judged_beside_all_of_them(judged):
    """The key's bias has a norm of 4e-9 beside 32 of all: its sign may turn, but it must not grow beyond the floor."""
    turned = judged(facts=facts(), gradients=scaled("layer.0.key.bias", -1))
    assert turned.outcome == "PASS"
    grown = judged(facts=facts(), gradients=scaled("layer.0.key.bias", 1e5))
    total = math.sqrt(sum(float((array.astype(float) ** 2).sum()) for array in make_recordings.gradients().values()))
    bias = np.linalg.norm(make_recordings.gradients()["layer.0.key.bias"].astype(float)) * (1e5 - 1)
    assert row(grown, "gradients").value == pytest.approx(bias / (1e-2 * total), rel=1e-6)
    assert grown.outcome == "FAIL" and row(grown, "gradients").worst == "layer.0.key.bias"
    missing = {name: array for name, array in make_recordings.gradients().items() if name != "layer.1.weight"}
    assert "layer.1.weight" in judged(facts=facts(), gradients=missing).reason


def test_repeats_have_to_be_the_same_bits(judged):
    for repeats in (
        {"runs": 5, "identical": False, "max_abs": 1e-9},
        {"runs": 5, "identical": False, "max_abs": 0.0},  # -0 for 0
    ):
        found = judged(facts=facts(repeats=repeats))
        assert row(found, "repeats").status == found.outcome == "FAIL"


def test_a_shorter_curve_fails(judged):
    found = judged(facts=facts(curve=[1.5, 1.25]))
    assert row(found, "loss curve").status == "FAIL" and "2 steps, the reference has 3" in found.reason


def test_a_member_in_native_mode_fails_without_gating(judged):
    found = judged(MEMBERS["native"], facts(), zeroed(), outputs=noisy(1e-3))
    assert found.outcome == "FAIL" and not any(row.gates for row in found.rows)


def test_bf16_fails_the_tolerance_of_fp32(judged):
    rounded = {name: array + 2.0**-9 * np.sign(array) for name, array in make_recordings.outputs().items()}
    assert judged(BF16, facts(), outputs=rounded).outcome == "PASS"
    assert judged(dataclasses.replace(BF16, precision="fp32"), facts(), outputs=rounded).outcome == "FAIL"


def test_one_answer_of_a_small_set_may_change_in_bf16(judged):
    assert row(judged(BF16, facts(), f1=(80.0, 76.9), questions=32), "f1 difference").status == "PASS"
    assert row(judged(BF16, facts(), f1=(80.0, 76.8), questions=32), "f1 difference").status == "FAIL"
    assert row(judged(BF16, facts(), f1=(80.0, 78.9), questions=1000), "f1 difference").status == "FAIL"
    assert row(judged(EAGER, facts(), f1=(80.0, 78.9), questions=32), "f1 difference").status == "FAIL"


def shifted(size):
    return {name: array + np.float64(size) for name, array in make_recordings.outputs().items()}


@pytest.mark.parametrize(
    ("own", "verdict"),
    [(0.0, "closer"), (0.9e-6, "closer"), (2e-6, "as close"), (4e-6, "as close"), (4.1e-6, "farther")],
)
def test_different_and_worse_are_told_apart(judged, own, verdict):
    """The reference is 2e-6 below the truth, the candidate ``own`` above it."""
    found = judged(facts=facts(), truth=shifted(2e-6), outputs=shifted(2e-6 + own))
    (told,) = found.tables["truth"]
    assert told["reference_max_abs"] == pytest.approx(2e-6, rel=1e-6) and told["verdict"] == verdict
    assert row(found, "logits max difference").status == "PASS"


def test_a_reference_that_is_off_itself_eases_the_limit_but_not_for_long(judged):
    """With a reference 1e-5 from the truth the limit is 3e-5; one that is 1e-3 off eases it no further than to 1e-4."""
    for error, size, status in (
        (1e-5, 2.9e-5, "PASS"),
        (1e-5, 3.1e-5, "FAIL"),
        (1e-3, 0.9e-4, "PASS"),
        (1e-3, 1.1e-4, "FAIL"),
    ):
        found = judged(facts=facts(), truth=shifted(error), outputs=shifted(size))
        assert row(found, "logits max difference").status == status, (error, size)
        assert "double precision" in row(found, "logits max difference").why
    assert "double precision" not in row(judged(facts=facts(), truth=shifted(1e-7)), "logits max difference").why
    held = judged(facts=facts(), truth=shifted(1e-5), outputs=shifted(2.9e-5), ease=False)
    assert row(held, "logits max difference").status == "FAIL" and row(held, "logits max difference").limit == 1e-5


def test_bf16_keeps_its_digits_at_any_size(judged):
    """Logits up to 10 may be off by 0.3 in bf16; in fp32, with an exact reference, they may not be off by more than at 1."""
    ten = {name: array.astype(np.float64) for name, array in make_recordings.outputs().items()}
    for array in ten.values():
        array.flat[0] = -10.0
    for member, size, status in ((BF16, 0.29, "PASS"), (BF16, 0.31, "FAIL"), (EAGER, 1.1e-5, "FAIL")):
        off = {name: array + size for name, array in ten.items()}
        found = judged(member, facts(), {"outputs": ten}, truth=ten, outputs=off)
        assert row(found, "logits max difference").status == status


def test_spans_are_those_of_a_search_over_all_pairs():
    draw = np.random.default_rng(3)
    for size in (1, 2, 3, 9, 30):
        start, end = draw.integers(-4, 5, (2, size)).astype(np.float32)
        scores = sorted((float(start[i] + end[j]) for i in range(size) for j in range(i, size)), reverse=True)
        (first, last), lead = logits.best_span(start, end)
        assert first <= last and start[first] + end[last] == scores[0]
        assert lead == (scores[0] - scores[1] if size > 1 else math.inf)


def test_a_span_that_changes_without_a_clear_lead_is_no_disagreement(judged):
    start, end = np.full((4, 8), -1.0, np.float32), np.full((4, 8), -1.0, np.float32)
    start[:, 0], end[:, 2] = 1.0, 1.0
    end[0, 3] = 1.0 - 1e-5  # row 0 is open: the next span is 1e-5 behind
    reference = make_recordings.outputs() | {"len8-batch4/start": start, "len8-batch4/end": end}
    own = reference | {
        "len8-batch4/end": end + np.float32(2e-5) * (np.arange(8) == 3) * np.eye(4)[:, :1].astype(np.float32)
    }
    assert logits.best_span(own["len8-batch4/start"][0], own["len8-batch4/end"][0])[0] == (0, 3)
    found = judged(facts=facts(), reference={"outputs": reference}, outputs=own)
    assert row(found, "span agreement").value == 1.0
    own["len8-batch4/start"] = start.copy()
    own["len8-batch4/start"][2, 1] = 1.5
    found = judged(facts=facts(), reference={"outputs": reference}, outputs=own)
    assert row(found, "span agreement").status == "FAIL" and row(found, "span agreement").worst == "len8-batch4"


def test_the_histogram_counts_every_compared_logit(judged):
    found = judged(facts=facts(), reference=zeroed(), outputs=noisy(3e-6))
    compared = 2 * (sum(int(mask.sum()) for name, mask in INPUTS.items() if not name.startswith("layer")) + 22 + 11)
    assert sum(entry["count"] for entry in found.tables["histogram"]) == compared
    zero, one = found.tables["histogram"]
    assert (zero["low"], zero["high"], zero["count"]) == (0.0, 0.0, compared - 1)
    assert one["count"] == 1 and one["low"] <= 3e-6 < one["high"] == pytest.approx(one["low"] * 10 ** (1 / 3))


def test_a_gpu_that_is_the_reference_may_differ_as_a_gpu_may():
    assert tolerances.between("cpu", "cuda", "fp32", tolerances.LOGITS).value == 1e-4
    assert tolerances.between("rocm", "cuda", "fp32", tolerances.COSINE).value == 1e-3
    assert tolerances.between("cpu", "cpu", "fp64", tolerances.COSINE).value == 1e-10
    assert tolerances.between("cpu", "tpu", "fp32", tolerances.SPANS).value == 1.0


def test_limits_of_logits_are_those_of_the_requirement():
    cosine = {"cpu": 1e-10, "cuda": 1e-4, "mps": 1e-4, "xpu": 1e-4, "rocm": 1e-3, "tpu": 1e-3}
    for backend, apart in cosine.items():
        largest = 1e-5 if backend == "cpu" else apart
        for precision, limits in (("fp32", (largest, apart)), ("fp64", (largest, apart)), ("bf16", (3e-2, 2e-4))):
            found = (
                tolerances.limit(backend, precision, name).value for name in (tolerances.LOGITS, tolerances.COSINE)
            )
            assert tuple(found) == limits, (backend, precision)


def test_every_tolerance_has_a_reason():
    for entry in itertools.product(tolerances.BACKENDS, tolerances.PRECISIONS, tolerances.QUANTITIES):
        assert tolerances.limit(*entry).why.startswith(("set", "derived", "measured", "not measured")), entry
    with pytest.raises(ValueError, match="did you mean loss"):
        tolerances.limit("cpu", "fp32", "los")


def test_of_one_position_the_cosine_is_but_a_sign(judged):
    """Logits of 1e-6 whose sign rounding turns are 2e-6 apart, which the largest difference judges, and no direction."""
    own, other = make_recordings.outputs(), make_recordings.outputs()
    for head in ("start", "end"):
        own[f"edge-one-token/{head}"][0, 0], other[f"edge-one-token/{head}"][0, 0] = 1e-6, -1e-6
    found = judged(facts=facts(), reference={"outputs": other}, outputs=own)
    assert row(found, "logits cosine").status == row(found, "logits max difference").status == "PASS"
    one = next(line for line in found.tables["logits"] if line["case"] == "edge-one-token")
    assert one["one_minus_cosine"] is None and one["max_abs"] == pytest.approx(2e-6)
