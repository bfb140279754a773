"""How strategies scale: efficiency with its interval, the model's prediction beside it, and what the model says of more devices.

Efficiency of n devices is X_n / (n X_1) with X in samples/s: with one global batch (strong) this is T_1 / (n T_n), with one batch
per device (weak) T_1 / T_n. The interval takes the worse ends of both intervals, so it is wider than one of 95 %.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchlib.benchmarks.parallel.estimate import Rates, of_row, step_time
from benchlib.benchmarks.parallel.shapes import STRATEGIES, Shape

WORLDS = (8, 64, 1024)  # what is extrapolated to
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Point:
    """A world size of one curve. ``low`` and ``high`` are the interval of ``efficiency``; ``predicted`` is the model's efficiency."""

    key: str
    model: str
    strategy: str
    kind: str
    world: int
    samples_per_s: float
    efficiency: float
    low: float
    high: float
    step_s: float
    predicted_step_s: float | None
    predicted: float | None

    @property
    def error(self) -> float | None:
        """Measured over predicted step, less one: above zero the machine is slower than the model."""
        return None if not self.predicted_step_s else self.step_s / self.predicted_step_s - 1


def points(rows: Sequence[Row]) -> list[Point]:
    """Return the points of the table ``scaling``; a curve without a single device has none."""
    found = []
    for row in rows:
        same = [one for one in rows if one["key"] == row["key"] and one["kind"] == row["kind"]]
        base = next((one for one in same if one["world"] == 1), None)
        if base is None or not base.get("samples_per_s"):
            continue
        n, x1, xn = int(row["world"]), float(base["samples_per_s"]), float(row["samples_per_s"])
        low, high = (float(row.get(f"samples_per_s_{end}") or xn) for end in ("low", "high"))
        low1, high1 = (float(base.get(f"samples_per_s_{end}") or x1) for end in ("low", "high"))
        step = row.get("predicted_step_s")
        found.append(
            Point(
                row["key"],
                row["model"],
                row["strategy"],
                row["kind"],
                n,
                xn,
                xn / (n * x1),
                1.0 if n == 1 else low / (n * high1),
                1.0 if n == 1 else high / (n * low1),
                float(row["step_s"]),
                float(step) if step and n > 1 else None,
                row["batch_size"] / step / (n * x1) if step and n > 1 else None,
            )
        )
    return found


def extrapolated(
    row: Row, single: Row, shape: Shape, peaks: Mapping[str, Any], alpha_beta: Sequence[Row], kind: str
) -> list[tuple[int, float]]:
    """Return (devices, efficiency) that the model gives a strategy on 8, 64 and 1,024 devices: a model, never a measurement.

    Degrees of tensor and pipeline parallelism stay and copies are added, over links like the measured ones. A strong curve ends
    where each copy has one sample. Empty for strategies that have no copies to add, and where nothing was measured to build on.
    """
    rates = Rates.of_run(peaks, alpha_beta, row["precision"])
    if rates is None or "data" not in STRATEGIES[row["strategy"]].axes:
        return []
    base, work = of_row(single, shape), of_row(row, shape)
    alone = replace(rates, flops=float(peaks.get("matmul_flops_alone") or rates.flops))
    scale = float(single["step_s"]) / step_time(base, alone).step_s
    inner = work.layout.world // work.layout.data
    found = []
    for world in WORLDS:
        data = world // inner
        batch = base.batch * world if kind == "weak" else base.batch
        if world % inner or data > batch:
            continue
        there = replace(work, layout=replace(work.layout, data=data), batch=batch)
        step = step_time(there, rates, scale).step_s
        found.append((world, batch / step / (world * base.batch / float(single["step_s"]))))
    return found
