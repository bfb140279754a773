"""Where the time of a step goes, what holds a strategy back, and which strategy to take: by the rows of a result alone.

The waterfall is that of a typical rank: the seconds of its parts add up to the step. What a rank waits for a slower one shows
as communication; it is told apart by the ranks' own work, which is a step less its exposed communication.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchlib.benchmarks.parallel.shapes import STRATEGIES, Layout
from benchlib.core.stats import summary
from benchlib.core.text import quantity, seconds

Row = Mapping[str, Any]
# The parts in the order of the picture. ``WASTE`` does no work; what is left is the work itself.
PARTS = {
    "compute": "matrix products and attention",
    "elementwise": "memory-bound kernels",
    "optimizer": "the optimizer",
    "launch": "launching kernels, Python and gaps",
    "data": "waiting for data",
    "communication": "exposed communication",
    "waiting": "waiting for the slowest rank",
    "bubble": "the bubble of the pipeline",
}
WASTE = ("launch", "data", "communication", "waiting", "bubble")
NOTICED = 0.2  # share of a step from which on waste is the bottleneck, however long the work takes
PLANTED = {"data": "data", "rank": "waiting", "communication": "communication"}
COMPUTE, MEMORY_BOUND = ("matmul", "attention"), ("elementwise", "copy", "other")
TIED = 0.03  # share within which two rates are the same where an interval is missing


def waterfall(row: Row, kernels: Sequence[Row]) -> dict[str, float]:
    """Return the seconds of each part of a step of ``row``; they add up to the median step.

    ``kernels`` are the rows of the same key: their shares divide the forward and backward pass. What they leave of it is
    ``launch``; where the profiler stretched them beyond it, they are scaled down to it.
    """
    step, own, exposed = statistics.median(row["steps_s"]), row["rank_own_s"], row["exposed_s"]
    waiting = waited = 0.0
    if len(own) > 1:
        # A typical rank waits for the slowest one by the difference of their work; ranks together wait less on average. Both and
        # the communication are of traced steps, which take longer.
        scale = min(1.0, step / max(statistics.fmean(own) + exposed, 1e-12))
        exposed, waited = scale * exposed, scale * (max(own) - statistics.fmean(own))
        waiting = scale * (max(own) - statistics.median_low(own))
    bubble = max(0.0, (row.get("bubble_share") or 0.0) * step - waited) if row["pipeline"] > 1 else 0.0
    communication = max(0.0, exposed - waited - bubble)
    waste = {"data": row["data_s"], "optimizer": row["optimizer_s"]}
    waste |= {"communication": communication, "waiting": waiting, "bubble": bubble}
    total = sum(waste.values())
    if total > step:  # parts were measured in other steps than the whole
        waste = {name: value * step / total for name, value in waste.items()}
    passes = max(0.0, step - sum(waste.values()))
    times = {item["class"]: item["time_s"] for item in kernels}
    compute, elementwise = (sum(times.get(name, 0.0) for name in group) for group in (COMPUTE, MEMORY_BOUND))
    scale = min(1.0, passes / (compute + elementwise)) if compute + elementwise else 0.0
    parts = waste | {"compute": compute * scale, "elementwise": elementwise * scale}
    rest = step - sum(parts.values())
    parts["launch"] = rest if rest > 1e-9 * step else 0.0  # less is rounding
    if not compute + elementwise:  # nothing was traced: the passes are work of a kind that is not known
        parts["compute"], parts["launch"] = parts["launch"], 0.0
    return {name: parts[name] for name in PARTS}


def bottleneck(parts: Mapping[str, float]) -> str:
    """Return the bottleneck of a waterfall: the largest waste where it is noticed, else the largest part."""
    waste = max(WASTE, key=lambda name: parts[name])
    return waste if parts[waste] >= NOTICED * sum(parts.values()) else max(parts, key=lambda name: parts[name])


def columns(row: Row, kernels: Sequence[Row]) -> dict[str, Any]:
    """Return the parts of a step as columns of its row, with the bottleneck and how many times faster a step is at most without it."""
    parts = waterfall(row, kernels)
    worst, step = bottleneck(parts), sum(parts.values())
    stated = {f"{name}_part_s": value for name, value in parts.items()}
    return stated | {"bottleneck": worst, "faster_without": step / max(step - parts[worst], 1e-12)}


def sentence(row: Row, rank_flops: float) -> str:
    """Say in one sentence what holds a row's strategy back, with the upper bound of removing it."""
    step, part = statistics.median(row["steps_s"]), row["bottleneck"]
    largest = row[f"{part}_part_s"]
    start = f"{row['model']} by {name(row)}: {largest / step:.0%} of a step ({seconds(largest)} of {seconds(step)}) is {PARTS[part]}"
    if part != "compute":
        return f"{start}; without it a step would be {row['faster_without']:.2f} × as fast at most."
    least = row["flops"] / row["world"] / rank_flops
    if least >= largest:
        return f"{start}: the device is busy with the work itself, and only more or faster devices help."
    faster = step / (step - largest + least)
    return f"{start}, which take {seconds(least)} at the measured peak: with all of them at the peak a step would be {faster:.2f} × as fast at most."


def name(row: Row) -> str:
    """Return the strategy of a row with its schedule."""
    return f"{row['strategy']} {row.get('schedule') or ''}".strip()


def rate(row: Row) -> float:
    """Return the samples per second of a row."""
    return float(row["batch_size"] / statistics.median(row["steps_s"]))


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Return rows of strategies, the fastest first."""
    return sorted(rows, key=rate, reverse=True)


def advice(rows: Sequence[Row], memory_bytes: float | None, one_device_lacks_memory: bool = False) -> str:
    """Say which of the measured strategies to take, and why.

    The fastest one; of those that the intervals do not tell from it, the one that needs least memory. ``memory_bytes`` is
    what a device has: strategies above it do not count.
    """
    fits = fastest([row for row in rows if not memory_bytes or peak(row) <= memory_bytes])
    if not fits:
        return f"{rows[0]['model']}: no strategy fits the memory of a device; more devices, checkpointing or fewer samples may."
    best, *others = fits
    least = min([best, *(row for row in others if row["world"] >= best["world"] and same(row, best))], key=peak)
    words = f"{best['model']}: take {_full_name(least)}"
    if least is not best:
        words += f", as fast as {_full_name(best)} within the noise and with {peak(least) / max(peak(best), 1):.0%} of its memory"
    elif others:
        clear = ", within the noise" if same(others[0], best) else ""
        words += f", the fastest: {quantity(rate(best))} samples/s, {rate(best) / rate(others[0]):.2f} × the next one ({_full_name(others[0])}){clear}"
    else:
        words += f", the only one that ran and fits: {quantity(rate(best))} samples/s"
    lacks = any(row["strategy"] == "single" and memory_bytes and peak(row) > memory_bytes for row in rows)
    return words + ("; the model does not fit one device." if lacks or one_device_lacks_memory else ".")


def _full_name(row: Row) -> str:
    layout = " x ".join(f"{axis} {row[axis]}" for axis in vars(Layout()) if row[axis] > 1)
    return f"{name(row)} ({layout})" if len(STRATEGIES[row["strategy"]].axes) > 1 else name(row)


def peak(row: Row) -> float:
    """Return the bytes of the fullest rank; 0 where nobody counts them."""
    return float(max(row["peak_bytes"] or [0.0]))


def same(row: Row, best: Row) -> bool:
    """Tell whether the noise of the steps is larger than what the best row is ahead."""
    low, high = summary(row["steps_s"]).ci_low, summary(best["steps_s"]).ci_high
    if low and high:
        return bool(low * best["batch_size"] <= high * row["batch_size"])
    return rate(row) >= (1 - TIED) * rate(best)
