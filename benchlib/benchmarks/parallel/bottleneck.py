"""Where the time of a step goes, what holds a strategy back, and which strategy to take: by the rows of a result alone.

The waterfall is that of a typical rank: the seconds of its parts add up to the step. What a rank waits for a slower one shows
as communication; it is told apart by the ranks' own work, which is a step less its exposed communication.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchlib.benchmarks.parallel.shapes import STRATEGIES, Layout
from benchlib.core.text import quantity, seconds
from benchlib.judge.checks import Ask, Check, asks
from benchlib.judge.numbers import within
from benchlib.results.run import Run

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
SCORES = (
    "Scores, from the columns of the summary. Memory efficiency: 16 bytes of weight, gradient and two moments for each parameter, "
    "over the peak memory of all ranks together. Performance score: samples/s over the best of the same model, times 100. Efficiency "
    "score: samples/s of one device over the best of the same model, times 100."
)
TIED = 0.03  # share within which two rates are the same where an interval is missing


def waterfall(row: Row, kernels: Sequence[Row]) -> dict[str, float]:
    """Return the seconds of each part of a step of ``row``; they add up to ``step_s``.

    ``kernels`` are the rows of the same key: their shares divide the forward and backward pass. What they leave of it is
    ``launch``; where the profiler stretched them beyond it, they are scaled down to it.
    """
    step, own, data, optimizer = row["step_s"], row["rank_own_s"], row["data_s"], row["optimizer_s"]
    exposed = row["comm_s"] * (1 - row["comm_hidden_share"]) if row["comm_s"] else 0.0
    waiting = waited = 0.0
    if len(own) > 1:
        # A typical rank waits for the slowest one by the difference of their work; ranks together wait less on average. Both and
        # the communication are of traced steps, which take longer.
        scale = min(1.0, step / max(statistics.fmean(own) + exposed, 1e-12))
        exposed, waited = scale * exposed, scale * (max(own) - statistics.fmean(own))
        waiting = scale * (max(own) - statistics.median_low(own))
    bubble = max(0.0, row["bubble_share"] * step - waited) if row["schedule"] and row["pipeline"] > 1 else 0.0
    communication = max(0.0, exposed - waited - bubble)
    waste = {"data": data, "optimizer": optimizer, "communication": communication, "waiting": waiting, "bubble": bubble}
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


@dataclass(frozen=True)
class Bottleneck:
    """What holds a strategy back: a part of its step, and how much faster it would be at most without that."""

    part: str
    seconds: float
    step_s: float

    @property
    def share(self) -> float:
        """Share of the step."""
        return self.seconds / self.step_s

    @property
    def bound(self) -> float:
        """How many times faster the step would be at most."""
        return self.step_s / max(self.step_s - self.seconds, 1e-12)


def bottleneck(parts: Mapping[str, float]) -> Bottleneck:
    """Return the bottleneck of a waterfall: the largest waste where it is noticed, else the largest part."""
    step = sum(parts.values())
    waste = max(WASTE, key=lambda name: parts[name])
    part = waste if parts[waste] >= NOTICED * step else max(parts, key=lambda name: parts[name])
    return Bottleneck(part, parts[part], step)


def sentence(row: Row, kernels: Sequence[Row], peaks: Mapping[str, Any]) -> str:
    """Say in one sentence what holds a row's strategy back, with the upper bound of removing it."""
    largest = bottleneck(waterfall(row, kernels))
    start = f"{row['model']} by {name(row)}: {largest.share:.0%} of a step ({seconds(largest.seconds)} of {seconds(largest.step_s)}) is {PARTS[largest.part]}"
    if largest.part != "compute":
        return f"{start}; without it a step would be {largest.bound:.2f} × as fast at most."
    rate = (peaks.get("matmul_flops") or {}).get(row["precision"])
    least = row["flops"] / row["world"] / rate if rate else None
    if not least or least >= largest.seconds:
        return f"{start}: the device is busy with the work itself, and only more or faster devices help."
    faster = largest.step_s / (largest.step_s - largest.seconds + least)
    return f"{start}, which take {seconds(least)} at the measured peak: with all of them at the peak a step would be {faster:.2f} × as fast at most."


def name(row: Row) -> str:
    """Return the strategy of a row with its schedule."""
    return f"{row['strategy']} {row.get('schedule') or ''}".strip()


# Of a run


def main_rows(run: Run) -> list[dict[str, Any]]:
    """Return the rows of ``strategies`` that ran, without the points of scaling."""
    rows = run.result.tables.get("strategies", []) if run.result else []
    return [row for row in rows if row["status"] == "ok" and not row["scaling"]]


def kernels_of(run: Run, key: str) -> list[dict[str, Any]]:
    """Return the rows of ``kernels`` of a strategy's row."""
    rows = run.result.tables.get("kernels", []) if run.result else []
    return [row for row in rows if row.get("key") == key]


def _fastest(rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: float(row["samples_per_s"]))


def models(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return rows by model, in their order."""
    return {name: [row for row in rows if row["model"] == name] for name in dict.fromkeys(row["model"] for row in rows)}


def advice(rows: Sequence[Row], lacking: Sequence[Row] = (), memory_bytes: float | None = None) -> str:
    """Say which of the measured strategies of one model to take, and why. ``lacking`` are rows that did not run.

    The fastest one; of those that the intervals do not tell from it, the one that needs least memory. ``memory_bytes`` is
    what a device has: strategies above it do not count.
    """
    fits = [row for row in rows if not memory_bytes or _peak(row) <= memory_bytes]
    if not fits:
        return f"{rows[0]['model']}: no strategy fits the memory of a device; more devices, checkpointing or fewer samples may."
    best = _fastest(fits)
    equal = [row for row in fits if row is not best and row["world"] >= best["world"] and same(row, best)]
    least = min([best, *equal], key=_peak)
    words = f"{best['model']}: take {_full_name(least)}"
    if least is not best:
        words += f", as fast as {_full_name(best)} within the noise and with {_peak(least) / max(_peak(best), 1):.0%} of its memory"
    else:
        others = [row for row in fits if row is not best]
        second = _fastest(others) if others else None
        ratio = best["samples_per_s"] / second["samples_per_s"] if second else 0
        words += f", the {'fastest' if second else 'only one that ran and fits'}: {quantity(best['samples_per_s'])} samples/s"
        if second:
            clear = "" if not same(second, best) else ", within the noise"
            words += f", {ratio:.2f} × the next one ({_full_name(second)}){clear}"
    alone = next((row for row in [*lacking, *rows] if row["strategy"] == "single"), None)
    if alone is not None and (alone in lacking or (memory_bytes is not None and _peak(alone) > memory_bytes)):
        words += "; the model does not fit one device"
    return words + "."


def _full_name(row: Row) -> str:
    layout = " x ".join(f"{axis} {row[axis]}" for axis in vars(Layout()) if (row.get(axis) or 1) > 1)
    return f"{name(row)} ({layout})" if layout and len(STRATEGIES[row["strategy"]].axes) > 1 else name(row)


def _peak(row: Row) -> float:
    return float(max(row.get("peak_bytes") or [0.0]))


def same(row: Row, best: Row) -> bool:
    """Tell whether the noise of the steps is larger than what the best row is ahead."""
    low, high = row.get("step_ci_low"), best.get("step_ci_high")
    if low and high:
        return bool(low * best["batch_size"] <= high * row["batch_size"])
    return bool(row["samples_per_s"] >= (1 - TIED) * best["samples_per_s"])


def sentences(run: Run) -> list[str]:
    """Return the bottleneck of each model's fastest strategy over the ranks, and the advice."""
    if not run.result:
        return []
    peaks, limit = run.result.facts.get("machine_peaks") or {}, run.result.facts.get("memory_bytes")
    lacking = [row for row in run.result.tables.get("strategies", []) if row.get("status") not in ("ok", None)]
    lines = []
    for model, rows in models(main_rows(run)).items():
        spread = [row for row in rows if row["world"] > 1] or rows
        key = _fastest(spread)
        lines.append("Bottleneck: " + sentence(key, kernels_of(run, key["key"]), peaks))
        out = [row for row in lacking if row.get("model") == model and "memory" in str(row.get("reason"))]
        lines.append("Advice: " + advice(rows, out, limit))
    return lines


def checks(run: Any) -> list[Check]:
    """Check that the parts of every step add up, and that an injected slow-down is named as the bottleneck."""
    return [_explained(run)] + ([_injected(run)] if run.config.planted else [])


@asks("parts of a step", "Do data, forward, backward and optimizer explain every step of every rank?")
def _explained(ask: Ask, run: Any) -> Check:
    rows = main_rows(run)
    least, most = 0.9 / (1 + run.config.planted_slowdown), 1.01  # the slow-down of a rank is in none of the parts
    shares = {row["key"]: row["explained_shares"] for row in rows}
    wrong = [
        f"{key}: {low:.0%} to {high:.0%}"
        for key, (low, high) in shares.items()
        if not (within(low, least=least) and within(high, most))
    ]
    reason = "; ".join(wrong) or f"{len(rows)} strategies"
    return ask.fact(bool(rows) and not wrong, reason, limit=f"{100 * least:.0f}% to {100 * most:.0f}%")


@asks("planted bottleneck", "Is the fault that was planted the bottleneck that the waterfall names?")
def _injected(ask: Ask, run: Any) -> Check:
    planted = run.config.planted
    hit = [
        row for row in main_rows(run) if row["world"] > 1 and (planted != "communication" or row["strategy"] == "data")
    ]
    seen = {row["key"]: bottleneck(waterfall(row, kernels_of(run, row["key"]))).part for row in hit}
    missed = [f"{key}: {PARTS[part]}" for key, part in seen.items() if part != PLANTED[planted]]
    reason = "; ".join(missed) or f"{PARTS[PLANTED[planted]]} in {len(seen)} strategies"
    return ask.fact(bool(seen) and not missed, reason)
