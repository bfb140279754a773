"""What a curve of times by size says: start-up time and bandwidth, and where two curves cross."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from benchlib.core.definitions import BUS_FACTORS
from benchlib.workloads.alpha_beta import fit_alpha_beta
from benchlib.workloads.operations import VARIANTS

Row = dict[str, Any]
Curves = dict[tuple[str, str], dict[int, float]]  # median seconds by size, of an operation and a variant


def curves(series: Sequence[Row]) -> Curves:
    lines: Curves = {}
    for row in sorted((row for row in series if row["curve"]), key=lambda row: row["bytes"]):
        lines.setdefault((row["operation"], row["variant"]), {})[row["bytes"]] = 1e-6 * median(row["times_us"])
    return lines


def fit_rows(lines: Curves, ranks: int) -> list[Row]:
    rows = []
    for (operation, variant), line in lines.items():
        if operation == "barrier" or variant == "async" or ranks < 2:  # no size, two sizes, nobody to send to
            continue
        fit = fit_alpha_beta(list(line), list(line.values()))
        numbers = {"alpha_us": 1e6 * fit.alpha_s, "half_bytes": fit.half_bytes, "residual": fit.residual}
        numbers["bandwidth_gbps"] = 8e-9 * BUS_FACTORS[operation](ranks) / fit.beta_s_per_byte
        row = {"operation": operation, "variant": variant, "points": fit.points}
        known = {name: value for name, value in numbers.items() if not math.isnan(value)}
        rows.append(row | known | {"why": {name: fit.reason for name in numbers if name not in known}})
    return rows


def ratio_rows(lines: Curves, ranks: int) -> list[Row]:
    """Return the times of every all-reduce over the library's, by size; nothing where there is no other one."""
    library = lines.get(("all_reduce", "library"), {}) if ranks > 1 else {}
    rows = [
        {"variant": name, "bytes": size, "ratio": seconds / library[size]}
        for (operation, name), line in lines.items()
        for size, seconds in line.items()
        if operation == "all_reduce" and (VARIANTS[name].own or name == "library") and size in library
    ]
    return rows if len(rows) > len(library) else []


def crossover_rows(ratios: Sequence[Row]) -> list[Row]:
    """Return from which size on, or up to which, each other all-reduce beats the library's."""
    rows = []
    for name in dict.fromkeys(row["variant"] for row in ratios if row["variant"] != "library"):
        line = [row for row in ratios if row["variant"] == name]
        faster, at = crossing([row["bytes"] for row in line], [row["ratio"] for row in line])
        row = {"variant": name, "faster": faster, "points": len(line)}
        rows.append(row | ({"bytes": at} if at else {"why": {"bytes": "the curves do not cross once"}}))
    return rows


def crossing(sizes: Sequence[float], ratios: Sequence[float]) -> tuple[str, float | None]:
    """Return where ratios of times by rising size are below 1, and the size at which they cross it.

    ``mixed``: they cross several times, by noise or not. Between two sizes they are taken as straight lines of logarithms.
    """
    if len(sizes) < 2:
        return "unknown", None
    x, gap = np.log(np.asarray(sizes, dtype=float)), np.log(np.asarray(ratios, dtype=float))
    changes = np.flatnonzero((gap[1:] < 0) != (gap[:-1] < 0))
    if len(changes) != 1:
        return ("mixed" if len(changes) else "always" if gap[0] < 0 else "never"), None
    (last,) = changes
    at = math.exp(x[last] + (x[last + 1] - x[last]) * gap[last] / (gap[last] - gap[last + 1]))
    return "above" if gap[-1] < 0 else "below", at
