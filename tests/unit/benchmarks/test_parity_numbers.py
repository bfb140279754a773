"""Distances between numbers, held against numpy's spacing, exact fractions and cases counted by hand."""

import math
from fractions import Fraction

import numpy as np
import pytest

from benchlib.workloads.distances import max_abs, max_relative, norm, one_minus_cosine, relative_l2, ulp_distance

f32 = np.float32
TINIEST = f32(2.0**-149)  # the smallest subnormal


def ulps(a, b):
    return int(ulp_distance(np.array([a], f32), np.array([b], f32))[0])


@pytest.mark.parametrize(
    ("a", "b", "steps"),
    [
        (0.0, -0.0, 0),
        (0.0, TINIEST, 1),
        (-TINIEST, TINIEST, 2),  # across zero: -tiny, 0, +tiny
        (-TINIEST, 0.0, 1),
        (1.0, 1.0 + 2.0**-23, 1),
        (1.0, 1.0 - 2.0**-24, 1),  # below a power of two they lie twice as dense
        (-1.0, -1.0 - 2.0**-23, 1),
        (1.0, 2.0, 2**23),
        (2.0**-126, 2.0**-126 - 2.0**-149, 1),  # from normal to subnormal
        (-1.0, 1.0, 2 * (127 << 23)),
        (np.finfo(f32).max, -np.finfo(f32).max, 2 * 0x7F7FFFFF),  # beyond what int32 can count
    ],
)
def test_ulp_distances_counted_by_hand(a, b, steps):
    assert ulps(a, b) == ulps(b, a) == steps


def test_ulp_distance_is_numpys_spacing_and_nextafter():
    draw = np.random.default_rng(0)
    values = (draw.standard_normal(2000) * 10.0 ** draw.integers(-40, 30, 2000)).astype(f32)
    stepped = values
    for steps in range(1, 6):
        stepped = np.nextafter(stepped, f32(np.inf))
        assert (ulp_distance(values, stepped) == steps).all()
    far = values + 3 * np.spacing(values)  # away from zero; a power of two may lie between
    assert set(ulp_distance(values, far.astype(f32))) <= {2, 3}


def test_ulp_distance_refuses_what_has_no_place_among_the_numbers():
    with pytest.raises(ValueError, match="finite"):
        ulps(math.nan, 1.0)
    with pytest.raises(ValueError, match="float64"):
        ulp_distance(np.ones(1), np.ones(1, f32))


@pytest.mark.parametrize("angle", [1.0, 1e-3, 1e-6, 1.5e-6, 1e-8])
def test_one_minus_cosine_near_one(angle):
    """1 - cos of a known angle, from 0.46 down to 5e-17, where 1 - dot has no digit left."""
    draw = np.random.default_rng(1)
    u, v = np.linalg.qr(draw.standard_normal((300, 2)))[0].T
    turned = 7.0 * (math.cos(angle) * u + math.sin(angle) * v)
    assert one_minus_cosine(turned, u) == pytest.approx(
        2 * math.sin(angle / 2) ** 2, rel=1e-6 if angle > 1e-7 else 1e-3
    )


def test_one_minus_cosine_of_exact_fractions():
    a, b = np.array([1.0, 2.0, 2.0]), np.array([1.0, 2.0, 2.0 + 3e-6])
    dot = sum(Fraction(x) * Fraction(y) for x, y in zip(a, b, strict=True))
    square = sum(Fraction(y) ** 2 for y in b) * 9
    exact = float((1 - dot**2 / square) / 2)  # 1 - cos = (1 - cos^2) / (1 + cos), and 1 + cos is 2 to 12 digits
    assert exact == pytest.approx(2.8e-13, rel=0.02)
    assert one_minus_cosine(a, b) == pytest.approx(exact, rel=1e-6)


def test_cosine_sees_directions_only():
    a = np.array([3.0, -4.0])
    assert one_minus_cosine(1e-200 * a, 1e200 * a) == pytest.approx(0.0, abs=1e-31)
    assert one_minus_cosine(a, -a) == pytest.approx(2.0)
    assert one_minus_cosine(a, np.array([4.0, 3.0])) == pytest.approx(1.0)
    assert one_minus_cosine(np.zeros(2), np.zeros(2)) == 0.0
    assert one_minus_cosine(np.zeros(2), a) == 1.0


def test_distances():
    a, b = np.array([[1.0, -2.0], [0.0, 4.0]]), np.array([[1.0, 2.0], [0.0, 5.0]])
    assert max_abs(a, b) == 4.0
    assert max_relative(a, b) == 2.0
    assert relative_l2(a, b) == pytest.approx(math.sqrt(17 / 30))
    assert relative_l2(a, b, floor=100.0) == pytest.approx(math.sqrt(17) / 100)
    assert relative_l2(a, np.zeros((2, 2))) == math.inf
    assert relative_l2(np.zeros(2), np.zeros(2)) == 0.0
    assert norm(np.array([3e-300, 4e-300])) == pytest.approx(5e-300)
    assert norm(np.array([3e300, 4e300])) == pytest.approx(5e300)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("measure", [max_abs, max_relative, relative_l2, one_minus_cosine])
def test_what_is_no_number_is_no_small_difference(measure, bad):
    good, broken = np.ones(3, f32), np.array([1.0, bad, 1.0], f32)
    for pair in ((good, broken), (broken, good), (broken, broken)):
        assert math.isnan(measure(*pair))


def test_other_shapes_are_not_stretched():
    with pytest.raises(ValueError, match="shapes"):
        max_abs(np.ones(3), np.ones((1, 3)))
