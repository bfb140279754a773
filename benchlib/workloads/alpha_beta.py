"""Start-up time and bandwidth from times by size: Hockney's t = alpha + S beta.

R. W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20, 1994.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_POINTS = 4
MIN_SPAN = 64  # largest size / smallest
MAX_RESIDUAL = 0.5  # a line that misses its points by half of their times describes none of them


@dataclass(frozen=True)
class AlphaBeta:
    """t = alpha_s + S * beta_s_per_byte, all NaN where there is no fit; ``reason`` says why. ``residual`` is the relative RMS."""

    alpha_s: float = math.nan
    beta_s_per_byte: float = math.nan
    residual: float = math.nan
    points: int = 0
    reason: str = ""

    @property
    def half_bytes(self) -> float:
        """Hockney's n1/2: the size at which half of the bandwidth is reached, in bytes."""
        return self.alpha_s / self.beta_s_per_byte


def fit_alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta:
    """Fit a line to times in seconds by size in bytes; both parameters are bounded to 0 and above.

    Relative deviations count, outliers less. Too few sizes, too small a span of sizes, and times that do not fit a line give
    NaN and the reason.
    """
    x, y = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    good = np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)
    x, y = x[good], y[good]
    if (points := len(set(x))) < MIN_POINTS:
        return AlphaBeta(points=points, reason=f"{points} sizes: a line by size needs {MIN_POINTS}")
    if x.max() / x.min() < MIN_SPAN:
        span = f"sizes from {x.min():.0f} to {x.max():.0f} bytes"
        return AlphaBeta(points=points, reason=f"{span}: the largest must be {MIN_SPAN} times the smallest")
    from scipy.optimize import curve_fit  # takes a while to import: only who fits pays

    start = np.array([y.min(), max((y / x).min(), 1e-30)])
    bounds = ([0, 1e-12 * start[1]], np.inf)
    robust = {"loss": "soft_l1", "f_scale": 0.1, "x_scale": start}
    (alpha, beta), _ = curve_fit(lambda size, a, b: a + b * size, x, y, p0=start, sigma=y, bounds=bounds, **robust)
    residual = float(np.sqrt(np.mean(((alpha + beta * x) / y - 1) ** 2)))
    if residual > MAX_RESIDUAL:
        misses = f"the best one misses them by {residual:.0%}, more than {MAX_RESIDUAL:.0%}"
        reason = f"the times of {points} sizes do not fit a line: {misses}"
        return AlphaBeta(residual=residual, points=points, reason=reason)
    return AlphaBeta(float(alpha), float(beta), residual, points)
