"""What rows tell: where the time of a step goes, what holds a strategy back, which one to take, and how they scale.

The waterfall is that of a typical rank: the seconds of its parts add up to the step. What a rank waits for a slower one
shows as communication; the ranks' compute time, which is a step less its exposed communication, tells it apart. Rows that
are compared have the computed columns of the spec.

Efficiency of n devices is X_n / (n X_1), X in samples/s: with one global batch (strong) T_1 / (n T_n), with one batch a
device (weak) T_1 / T_n. T is the mean step. The single device may be measured twice, among the strategies and for the scaling: all its
steps count. The interval takes the worse ends of both intervals: it is wider than one of 95%.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median, median_low
from typing import Any

from benchlib.benchmarks.parallel.estimate import Rates, step_time
from benchlib.benchmarks.parallel.shapes import STRATEGIES, Layout
from benchlib.core.errors import UserError
from benchlib.core.stats import summary, windows
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
INJECTED = {"data": "data", "rank": "waiting", "communication": "communication"}
COMPUTE, MEMORY_BOUND = ("matmul", "attention"), ("elementwise", "copy", "other")
WORLDS = (8, 64, 1024)  # devices that scaling is predicted for
TIED = 0.03  # share within which two rates are the same where an interval is missing
MAX_ERROR = 0.5  # of steps over predicted ones, less 1: a model that misses half of them by more predicts nothing


def waterfall(row: Row, kernels: Sequence[Row]) -> dict[str, float]:
    """Return the seconds of each part of a step of ``row``; they add up to the median step.

    ``kernels`` are the rows of the same key: their shares divide the forward and backward pass. What they leave is
    ``launch``; where the profiler stretched them beyond it, they are scaled down to it.
    """
    step, own = median(row["steps_s"]), row["rank_own_s"]
    # A typical rank waits for the slowest one by the difference of their work; ranks together wait less on average.
    # Both and the communication are of traced steps, which take longer.
    scale = min(1.0, step / max(fmean(own) + row["exposed_s"], 1e-12))
    waited = scale * (max(own) - fmean(own))
    bubble = max(0.0, (row.get("bubble_share") or 0.0) * step - waited)
    waste = {"data": row["data_s"], "optimizer": row["optimizer_s"], "bubble": bubble}
    waste["waiting"] = scale * (max(own) - median_low(own))
    waste["communication"] = max(0.0, scale * row["exposed_s"] - waited - bubble)
    if (total := sum(waste.values())) > step:  # parts were measured in other steps than the whole
        waste = {name: value * step / total for name, value in waste.items()}
    passes = max(0.0, step - sum(waste.values()))
    times = {item["class"]: item["time_s"] for item in kernels}
    compute, elementwise = (sum(times.get(name, 0.0) for name in group) for group in (COMPUTE, MEMORY_BOUND))
    scale = min(1.0, passes / max(compute + elementwise, 1e-12))
    parts = waste | {"compute": compute * scale, "elementwise": elementwise * scale}
    parts["launch"] = max(0.0, step - sum(parts.values()))
    return {name: parts[name] for name in PARTS}


def columns(row: Row, kernels: Sequence[Row]) -> dict[str, Any]:
    """Return the parts of a step as columns of its row, with the bottleneck and the most that a step gains without it.

    The bottleneck is the largest waste where it is noticed, else the largest part.
    """
    parts = waterfall(row, kernels)
    step, worst = sum(parts.values()), max(WASTE, key=parts.__getitem__)
    if parts[worst] < NOTICED * step:
        worst = max(parts, key=parts.__getitem__)
    stated = {f"{name}_part_s": value for name, value in parts.items()}
    return stated | {"bottleneck": worst, "faster_without": step / max(step - parts[worst], 1e-12)}


def sentence(row: Row, rank_flops: float) -> str:
    """Say in one sentence what holds a row's strategy back, with the upper bound of removing it."""
    step, part = median(row["steps_s"]), row["bottleneck"]
    largest = row[f"{part}_part_s"]
    share = f"{largest / step:.0%} of a step ({seconds(largest)} of {seconds(step)})"
    start = f"{row['model']} by {row['way']}: {share} is {PARTS[part]}"
    if part != "compute":
        return f"{start}; without it a step would be {row['faster_without']:.2f} × as fast at most."
    least = row["flops"] / row["world"] / rank_flops
    if least >= largest:
        return f"{start}: the device is busy with the work itself, and only more or faster devices help."
    start += f", which take {seconds(least)} at the measured peak: with all of them at the peak"
    return f"{start} a step would be {step / (step - largest + least):.2f} × as fast at most."


def same(row: Row, best: Row) -> bool:
    """Tell whether the noise of the steps is larger than what the best row is ahead."""
    if row["high"] and best["low"]:
        return bool(row["high"] >= best["low"])
    return bool(row["samples_per_s"] >= (1 - TIED) * best["samples_per_s"])


def advice(rows: Sequence[Row], memory_gb: float, one_device_lacks_memory: bool = False) -> str:
    """Say which strategy to take: the fastest that fits ``memory_gb``; of equals the one that needs least memory."""
    model, fits = rows[0]["model"], [row for row in rows if _peak_gb(row) <= memory_gb]
    if not fits:
        return f"{model}: no strategy fits the memory of a device: take more devices, checkpointing or fewer samples."
    best, *others = sorted(fits, key=lambda row: -row["samples_per_s"])
    least = min([best, *(row for row in others if row["world"] >= best["world"] and same(row, best))], key=_peak_gb)
    words, rate = f"{model}: take {_name(least)}", f"{quantity(best['samples_per_s'])} samples/s"
    if least is not best:
        share = _peak_gb(least) / _peak_gb(best)
        words += f", as fast as {_name(best)} within the noise and with {share:.0%} of its memory"
    elif others:
        ahead = best["samples_per_s"] / others[0]["samples_per_s"]
        clear = ", within the noise" if same(others[0], best) else ""
        words += f", the fastest: {rate}, {ahead:.2f} × the next one ({_name(others[0])}){clear}"
    else:
        words += f", the only one that ran and fits: {rate}"
    lacks = one_device_lacks_memory or any(row["strategy"] == "single" and _peak_gb(row) > memory_gb for row in rows)
    return words + ("; the model does not fit one device." if lacks else ".")


def _name(row: Row) -> str:
    layout = Layout(**{axis: row[axis] for axis in vars(Layout())})
    return f"{row['way']} ({layout})" if len(STRATEGIES[row["strategy"]]) > 1 else str(row["way"])


def _peak_gb(row: Row) -> float:
    return float(row["peak_gb"] or 0.0)  # 0 where nobody counts it


def off(rows: Sequence[Row]) -> float | None:
    """Return how far measured steps are from the predicted ones, as a share of these: the median over strategies."""
    own = [row for row in rows if row["status"] == "ok" and not row["scaling"] and row.get("predicted_step_s")]
    return median(abs(median(row["steps_s"]) / row["predicted_step_s"] - 1) for row in own) if own else None


def rates(batch_size: float, steps_s: Sequence[float]) -> list[float]:
    """Return the samples/s of windows of steps, whose harmonic mean is all samples over all time."""
    return windows([batch_size] * len(steps_s), steps_s)


def points(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield strong and weak scaling of each strategy, from one rank (the single device) to all.

    ``low`` to ``high`` is the interval of ``efficiency``, ``predicted`` the model's, ``error`` the measured over the
    predicted step less one: above zero the machine is slower. A model that is ``off`` predicts nothing.
    """
    error = off(rows)
    trusted = error is not None and error <= MAX_ERROR
    ran = [row for row in rows if row["status"] == "ok"]
    for kind in ("strong", "weak"):
        for last in (row for row in ran if not row["scaling"] and row["world"] > 1):
            alike = {("single", ""), (last["strategy"], last["schedule"])}
            curve = [row for row in ran if row["scaling"] == kind and (row["strategy"], row["schedule"]) in alike]
            first, *others = sorted([*curve, last], key=lambda row: int(row["world"]))
            own = ("single", first["batch_size"])
            alone = [row["steps_s"] for row in ran if (row["strategy"], row["batch_size"]) == own]
            base = {**first, "steps_s": list(itertools.chain(*alone))}
            for row in [base, *others] if first["world"] == 1 else ():
                yield {"key": last["key"], "kind": kind} | _point(row, base, trusted)


def beyond(run: Any, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield what the model predicts for ``WORLDS`` devices from measured ``rows``, over links like the measured ones.

    Degrees of tensor and pipeline parallelism stay, copies and shards are added: with the same batch in all (strong), and the
    same batch per device (weak). The compute time of a rank follows its share of the FLOPs. ``error`` is the measured over the
    predicted step on the ranks at hand, less one. Nothing if no single device ran, or if the model is ``off`` by too much.
    """
    facts, single = run.run, next((row for row in rows if row["strategy"] == "single"), None)
    rates = (
        Rates.of_run(facts["rank_flops"], facts["copy_bytes_per_s"], run.tables.get("alpha_beta", ()))
        if facts
        else None
    )
    if single is None or rates is None or run.config is None or (facts.get("model_error") or 0.0) > MAX_ERROR:
        return
    for row in (row for row in rows if row.get("predicted_step_s")):
        world, error = row["world"], median(row["steps_s"]) / row["predicted_step_s"] - 1
        for kind, devices in itertools.product(("strong", "weak"), (count for count in WORLDS if count > world)):
            batch = row["batch_size"] if kind == "strong" else row["batch_size"] // world * devices
            with contextlib.suppress(UserError):  # degrees or samples that do not fit so many devices
                job = run.config.job(row["strategy"], row["schedule"], devices, batch)
                compute_s = row["compute_s"] * (job.flops / devices) / (row["flops"] / world)
                rate = batch / step_time(job, rates, compute_s).step_s
                point = {"key": row["key"], "kind": kind, "world": devices, "samples_per_s": rate, "error": error}
                yield point | {"efficiency": rate / devices / single["samples_per_s"]}


def _point(row: Row, base: Row, trusted: bool) -> dict[str, Any]:
    own, one = (summary(rates(item["batch_size"], item["steps_s"]), "harmonic") for item in (row, base))
    ideal = row["world"] * one.value
    point: dict[str, Any] = {
        "world": row["world"],
        "samples_per_s": own.value,
        "efficiency": own.value / ideal,
        "why": {},
    }
    if row is base:
        point |= {"low": 1.0, "high": 1.0}
    elif own.ci_low and own.ci_high and one.ci_low and one.ci_high:
        point |= {"low": own.ci_low / one.ci_high / row["world"], "high": own.ci_high / one.ci_low / row["world"]}
    else:
        point["why"] |= dict.fromkeys(("low", "high"), f"{len(row['steps_s'])} steps have no interval")
    if (predicted := row.get("predicted_step_s")) and trusted:
        error = median(row["steps_s"]) / predicted - 1
        return point | {"predicted": row["batch_size"] / predicted / ideal, "error": error}
    point["why"] |= dict.fromkeys(("predicted", "error"), "no prediction, or one of a model that is too far off")
    return point
