"""What a curve of times by size says: start-up time and bandwidth (t = alpha + S * beta), and where two curves cross.

The model is Hockney's (R. W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel
Computing 20, 1994). Its half-performance size n1/2 = alpha / beta is the message of which half the time is start-up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_POINTS = 4
LEAST_SPAN = 64.0  # largest size / smallest
MOST_RESIDUAL = 0.5  # a line that misses its points by half of their times describes none of them


@dataclass(frozen=True)
class Fit:
    """t = alpha_s + S * beta_s_per_byte; ``residual`` is the relative root mean square. ``reason`` says why there is none."""

    alpha_s: float = math.nan
    beta_s_per_byte: float = math.nan
    residual: float = math.nan
    points: int = 0
    reason: str = ""

    @property
    def half_bytes(self) -> float:
        """The size at which half of the bandwidth is reached, in bytes."""
        return self.alpha_s / self.beta_s_per_byte


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Fit start-up time and bandwidth to times by size, all sizes alike: relative deviations count, outliers less.

    Both are kept at or above zero. Too few sizes, sizes of one order, and times that are on no line are refused with the
    reason.
    """
    x, y = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    good = np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)
    x, y = x[good], y[good]
    if len(set(x)) < LEAST_POINTS:
        return Fit(points=len(set(x)), reason=f"{len(set(x))} sizes: a line by size needs {LEAST_POINTS}")
    if x.max() / x.min() < LEAST_SPAN:
        return Fit(
            points=len(x), reason=f"sizes from {x.min():.0f} to {x.max():.0f} bytes: the largest must be {LEAST_SPAN:.0f} times the smallest"
        )  # fmt: skip
    from scipy.optimize import least_squares  # takes a while to import: only who fits pays

    # In units of the data, so that both parameters are near one.
    scale = np.array([y.min(), max((y / x).min(), 1e-30)])
    solved = least_squares(
        lambda p: (p[0] * scale[0] + p[1] * scale[1] * x) / y - 1,
        x0=[1.0, 1.0],
        bounds=([0.0, 1e-12], [np.inf, np.inf]),
        loss="soft_l1",
        f_scale=0.1,
        x_scale=[1.0, 1.0],
    )
    alpha, beta = solved.x * scale
    residual = float(np.sqrt(np.mean(((alpha + beta * x) / y - 1) ** 2)))
    if residual > MOST_RESIDUAL:
        told = f"the times of {len(x)} sizes are on no line: the best one misses them by {residual:.0%}, more than {MOST_RESIDUAL:.0%}"
        return Fit(residual=residual, points=len(x), reason=told)
    return Fit(float(alpha), float(beta), residual, len(x))


def crossover(sizes: Sequence[float], own: Sequence[float], other: Sequence[float]) -> tuple[float | None, str]:
    """Return the size from which on ``own`` is faster than ``other``, or None, and a sentence.

    Between two sizes the times are taken as straight lines of logarithms. Curves that cross several times, by noise or
    not, have no size from which on one of them is faster: None.
    """
    order = np.argsort(np.asarray(sizes, dtype=float))
    x = np.log(np.asarray(sizes, dtype=float)[order])
    gap = np.log(np.asarray(own, dtype=float)[order]) - np.log(np.asarray(other, dtype=float)[order])
    if len(x) < 2:
        return None, "fewer than two sizes"
    if (gap < 0).all():
        return None, "faster at every size"
    if (gap >= 0).all():
        return None, "slower at every size"
    changes = [index for index in range(len(gap) - 1) if (gap[index] < 0) != (gap[index + 1] < 0)]
    if len(changes) > 1:
        return None, f"now faster, now slower: the curves cross {len(changes)} times"
    (last,) = changes
    at = float(np.exp(x[last] + (x[last + 1] - x[last]) * gap[last] / (gap[last] - gap[last + 1])))
    return at, "faster from there on" if gap[last + 1] < 0 else "faster up to there"
