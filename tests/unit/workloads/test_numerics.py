"""Distances against exact fractions and known angles; limits against the requirement."""

import math

import numpy as np
import pytest

from benchlib.workloads import numerics
from benchlib.workloads.numerics import limit, max_abs, one_minus_cosine, relative_l2

f32 = np.float32


@pytest.mark.parametrize("angle", [1.0, 1e-3, 1e-6, 1.5e-6, 1e-8])
def test_one_minus_cosine_near_one(angle):
    """1 - cos of a known angle, from 0.46 down to 5e-17, where 1 - dot has no digit left."""
    draw = np.random.default_rng(1)
    u, v = np.linalg.qr(draw.standard_normal((300, 2)))[0].T
    turned = 7.0 * (math.cos(angle) * u + math.sin(angle) * v)
    exact = 2 * math.sin(angle / 2) ** 2
    assert one_minus_cosine(turned, u) == pytest.approx(exact, rel=1e-6 if angle > 1e-7 else 1e-3)


def test_cosine_sees_directions_only():
    a = np.array([3.0, -4.0])
    assert one_minus_cosine(1e-30 * a, 1e30 * a) == pytest.approx(0.0, abs=1e-31)
    assert one_minus_cosine(a, -a) == pytest.approx(2.0)
    assert one_minus_cosine(a, np.array([4.0, 3.0])) == pytest.approx(1.0)
    assert one_minus_cosine(np.zeros(2), np.zeros(2)) == 0.0
    assert one_minus_cosine(np.zeros(2), a) == 1.0


def test_distances():
    a, b = np.array([[1.0, -2.0], [0.0, 4.0]]), np.array([[1.0, 2.0], [0.0, 5.0]])
    assert max_abs(a, b) == 4.0
    assert relative_l2(a, b) == pytest.approx(math.sqrt(17 / 30))
    assert relative_l2(a, b, floor=100.0) == pytest.approx(math.sqrt(17) / 100)
    assert relative_l2(a, np.zeros((2, 2))) == math.inf
    assert relative_l2(np.zeros(2), np.zeros(2)) == 0.0


def test_the_line_is_that_of_least_squares():
    draw = np.random.default_rng(2)
    b = draw.standard_normal(200) - 3
    a = 1.02 * b + 0.5 + 0.01 * draw.standard_normal(200)
    assert numerics.line(a, b) == pytest.approx(np.polyfit(b, a, 1), rel=1e-9)
    assert all(map(math.isnan, numerics.line(b[:3], np.ones(3))))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("measure", [max_abs, relative_l2, one_minus_cosine])
def test_what_is_no_number_is_no_small_difference(measure, bad):
    good, broken = np.ones(3, f32), np.array([1.0, bad, 1.0], f32)
    for pair in ((good, broken), (broken, good), (broken, broken)):
        assert math.isnan(measure(*pair))


def test_other_shapes_are_not_stretched():
    with pytest.raises(ValueError, match="shapes"):
        max_abs(np.ones(3), np.ones((1, 3)))


def test_limits_of_logits_are_those_of_the_requirement():
    cosine = {"cpu": 1e-10, "cuda": 1e-4, "mps": 1e-4, "xpu": 1e-4, "rocm": 1e-3, "tpu": 1e-3}
    for backend, apart in cosine.items():
        largest = 1e-5 if backend == "cpu" else apart
        for precision, limits in (("fp32", (largest, apart)), ("fp64", (largest, apart)), ("bf16", (3e-2, 2e-4))):
            actual = (limit(backend, precision, name).value for name in (numerics.LOGITS, numerics.COSINE))
            assert tuple(actual) == limits, (backend, precision)
    assert limit("cpu", "fp32", numerics.LOGITS, "cuda").value == 1e-4, "a reference may differ as its backend may"


@pytest.mark.parametrize("quantity", [numerics.BATCH, numerics.PADDING])
@pytest.mark.parametrize("backend", ["cpu", "cuda", "rocm"])
def test_another_shape_may_move_logits_as_far_as_another_device(backend, quantity):
    """Both are another kernel that adds in another order: a device may do one where it may do the other."""
    assert limit(backend, "fp32", quantity).value == limit(backend, "fp32", numerics.LOGITS).value
