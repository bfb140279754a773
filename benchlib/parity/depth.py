"""Where two recordings part: activations layer by layer, and the gradient of each parameter.

Both are measured by the L2 norm of the difference, relative to the reference's: a single number of a tensor that is
neither blind to scale, as a cosine is, nor ruled by its one worst element.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchlib.parity import numbers
from benchlib.parity.tolerances import GRADIENT_FLOOR

Arrays = Mapping[str, np.ndarray]


def layers(
    candidate: Arrays, reference: Arrays, mask: np.ndarray | None, kinds: Mapping[str, str], limit: float
) -> list[dict[str, Any]]:
    """Return a row for each activation that both have, in the order of the reference's forward pass.

    Where the first two axes are those of ``mask`` (B, S), only its true positions are compared. ``kinds`` gives the class
    of a module by its name.
    """
    own = {key.partition("|")[2]: key for key in candidate}
    keys = [key for key in sorted(reference) if key.partition("|")[2] in own]
    rows = []
    for place, key in enumerate(keys):
        number, _, name = key.partition("|")
        a, b = candidate[own[name]], reference[key]
        if mask is not None and a.shape == b.shape and b.shape[:2] == mask.shape:
            a, b = a[mask], b[mask]
        rows.append(
            {
                "index": int(number),
                "layer": name,
                "kind": kinds.get(name, ""),
                "depth": place / max(1, len(keys) - 1),
                **_measures(a, b, 0.0, limit),
            }
        )
    return rows


def gradients(candidate: Arrays, reference: Arrays, limit: float) -> list[dict[str, Any]]:
    """Return a row for each parameter of the reference; its difference counts relative to at least the floor.

    The floor is GRADIENT_FLOOR of the norm of all gradients together. A gradient that is not larger than what it may differ
    by is what rounding left of zero: its direction says nothing and is None.
    """
    norms = {name: numbers.norm(reference[name]) for name in reference}
    total = numbers.norm(np.array(list(norms.values())))
    floor = GRADIENT_FLOOR * total
    rows = []
    for name in sorted(name for name in reference if name in candidate):
        found = _measures(candidate[name], reference[name], floor, limit)
        if norms[name] <= limit * floor:
            found["one_minus_cosine"] = None
        elements = int(reference[name].size)
        norm = norms[name] if math.isfinite(norms[name]) else None
        rows.append({"parameter": name, "elements": elements, "norm": norm, **found})
    return rows


def _measures(a: np.ndarray, b: np.ndarray, floor: float, limit: float) -> dict[str, Any]:
    """Measure two tensors; another shape, and numbers that are not finite, are beyond every limit and None."""
    same = a.shape == b.shape
    found = {
        "max_abs": numbers.max_abs(a, b) if same else math.nan,
        "relative_l2": numbers.relative_l2(a, b, floor) if same else math.nan,
        "one_minus_cosine": numbers.one_minus_cosine(a, b) if same else math.nan,
    }
    beyond = not found["relative_l2"] <= limit
    plain = {name: value if math.isfinite(value) else None for name, value in found.items()}
    return {**plain, "limit": limit, "beyond": beyond}
