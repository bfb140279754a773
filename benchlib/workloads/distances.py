"""How far two arrays of numbers are apart.

All arithmetic is in float64; arrays are of one shape. ``a`` is the candidate, ``b`` the reference. Measures of numbers that
are not finite are NaN, and never a small number.
"""

import math

import numpy as np


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
