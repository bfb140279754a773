"""Metrics that every training has, from the table of its steps and the readings of the sensors.

Letters: K steps, W ranks. A step's time is the slowest rank's.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchlib.core.events import Event
from benchlib.core.stats import LEAST_FOR_P95
from benchlib.results.metrics import Direction, Metric, derived, measured, most_memory, not_available
from benchlib.runtime.steps import Columns

ONE_RANK = "one rank exchanges nothing"
_NO_SPLIT = "this engine does not tell how a step's time is divided"


def part(name: str, seconds: np.ndarray, reason: str = "mean over the ranks") -> Metric:
    """Return the metric of a part of each step, from (K, W) seconds; not available where the engine does not tell it."""
    if np.isnan(seconds).any():
        return not_available(name, "s", "lower", _NO_SPLIT)
    return measured(name, seconds.mean(axis=1).tolist(), "s", "lower", reason=reason)


def overlap(steady: Columns, world_size: int) -> Metric:
    """Return the share of the exchange that the backward pass hides."""
    busy, exposed = steady["exchange_s"], steady["exchange_exposed_s"]
    if np.isnan(busy).any() or world_size == 1:
        return not_available("exchange_overlap", "ratio", "higher", ONE_RANK if world_size == 1 else _NO_SPLIT)
    share = 1 - np.minimum(exposed, busy).sum(axis=1) / np.maximum(busy.sum(axis=1), 1e-12)
    reason = "1 - exposed / busy: the share of the exchange that the backward pass hides"
    return derived("exchange_overlap", share.tolist(), "ratio", "higher", reason)


def own_work(columns: Columns) -> np.ndarray:
    """Return the seconds that each rank worked in each step without waiting for others, (K, W); NaN where unknown."""
    return sum((columns[f"{part}_s"] for part in ("data", "forward", "backward", "optimizer")), np.zeros(()))  # type: ignore[no-any-return]


def skew(steady: Columns, world_size: int) -> Metric:
    """Return the own work of the slowest rank over the mean of all."""
    work = own_work(steady)
    if world_size == 1 or np.isnan(work).any():
        why = "one rank has nobody to wait for" if world_size == 1 else _NO_SPLIT
        return not_available("rank_skew", "ratio", "lower", why)
    share = (work.max(axis=1) / work.mean(axis=1)).tolist()
    return derived(
        "rank_skew", share, "ratio", "lower", "own work of the slowest rank over the mean of all, without waiting"
    )


def flops_metrics(
    rates: np.ndarray, scope: str, formula: str, peak: float | None, peak_reason: str, no_rate: str = ""
) -> list[Metric]:
    """Return achieved FLOP/s (one of ``rates`` per step), their share of the measured peak, and that peak.

    ``no_rate`` says why no rate is known, where one is NaN.
    """
    achieved, mfu, top = f"flops_per_s{scope}", f"mfu{scope}", "matmul_peak_flops"
    share = "FLOP/s over matmul_peak_flops"
    unknown = np.isnan(rates).any()
    no_share = no_rate if unknown else "" if peak else peak_reason
    return [
        not_available(achieved, "FLOP/s", "higher", no_rate)
        if unknown
        else derived(achieved, rates.tolist(), "FLOP/s", "higher", formula),
        not_available(mfu, "ratio", "higher", no_share)
        if no_share or not peak
        else derived(mfu, (rates / peak).tolist(), "ratio", "higher", share),
        measured(top, peak, "FLOP/s", "higher", reason=peak_reason)
        if peak
        else not_available(top, "FLOP/s", "higher", peak_reason),
    ]


def sensor_metrics(events: Sequence[Event], began: float, ended: float, backend: str) -> list[Metric]:
    """Return power, energy, temperature and utilisation over the training, or why they are not there."""
    reasons: dict[str, str] = next(
        (event["availability"] for event in reversed(events) if event["kind"] == "sensors"), {}
    )
    readings = [event for event in events if event["kind"] == "sensor" and began <= event["t"] <= ended]
    if not any(event["kind"] == "sensor" for event in events):
        default = "no supervisor sampled the sensors of this run"
    else:
        default = "no reading fell into the training" if not readings else "the sensor gave no value"

    def values(key: str) -> list[float]:
        return [float(event[key]) for event in readings if isinstance(event.get(key), (int, float))]

    def sampled(name: str, key: str, unit: str, direction: Direction) -> Metric:
        if samples := values(key):
            return measured(name, samples, unit, direction, reason="every second of the training")
        return not_available(name, unit, direction, str(reasons.get(key, default)))

    energy = not_available("energy_j", "J", "lower", str(reasons.get("energy_j", default)))
    if len(counter := values("energy_j")) > 1:
        counted = "the hardware's own counter, over the training"
        energy = measured("energy_j", counter[-1] - counter[0], "J", "lower", reason=counted)
    utilization = sampled("utilization", "utilization_percent", "%", "higher")
    if backend == "cpu" and (shares := values("cpu_percent")):
        of_cores = "processor time of the ranks, 100% is one core"
        utilization = measured("utilization", shares, "%", "none", reason=of_cores)
    return [
        energy,
        sampled("power_w", "power_w", "W", "lower"),
        sampled("temperature_c", "temperature_c", "°C", "lower"),
        utilization,
    ]


def device_rows(events: Sequence[Event], began: float, ended: float) -> list[dict[str, Any]]:
    """Return the table of devices over the training: power and utilisation (means), energy by the device's own counter,
    highest temperature, most memory in use by whomever. None where a device gives no value; no row where no source
    tells devices apart, as for the processor."""
    readings: list[list[dict[str, float | None]]] = [
        event["devices"]
        for event in events
        if event["kind"] == "sensor" and began <= event["t"] <= ended and event.get("devices")
    ]
    rows: list[dict[str, Any]] = []
    for device in range(min(map(len, readings), default=0)):
        values = {
            name: [value for reading in readings if (value := reading[device].get(name)) is not None]
            for name in readings[0][device]
        }
        counter, memory = values["energy_j"], values["device_memory_bytes"]
        rows.append(
            {
                "device": device,
                "power_w": _or_none(np.mean, values["power_w"]),
                "energy_j": counter[-1] - counter[0] if len(counter) > 1 else None,
                "temperature_c": _or_none(max, values["temperature_c"]),
                "utilization_percent": _or_none(np.mean, values["utilization_percent"]),
                "memory_in_use_gb": max(memory) / 1e9 if memory else None,
            }
        )
    return rows


def _or_none(combine: Callable[[list[float]], Any], values: list[float]) -> float | None:
    return float(combine(values)) if values else None


def rank_rows(
    steady: Columns,
    samples_seen: Sequence[int],
    resident_bytes: Sequence[float],
    device_bytes: Sequence[float | None],
) -> list[dict[str, Any]]:
    """Return the table of ranks: step times, own work, samples and peak memory of each."""
    work = own_work(steady)
    rows: list[dict[str, Any]] = []
    for rank, (resident, held) in enumerate(zip(resident_bytes, device_bytes, strict=True)):
        times = steady["step_s"][:, rank]
        own = float(np.median(work[:, rank]))
        p05, p95 = np.percentile(times, [5, 95]).tolist() if len(times) >= LEAST_FOR_P95 else (None, None)
        rows.append(
            {
                "rank": rank,
                "step_s_median": float(np.median(times)),
                "step_s_p05": p05,
                "step_s_p95": p95,
                "own_work_s_median": own if math.isfinite(own) else None,
                "samples": samples_seen[rank],
                "resident_memory_gb": resident / 1e9,
                "device_memory_gb": None if held is None else held / 1e9,
            }
        )
    return rows


def device_memory(peaks_bytes: Sequence[float | None], reason: str) -> Metric:
    """Return the peak memory of the largest device, from one value per rank; ``reason`` says why none is known."""
    of = "peak of the tensors of the largest rank during the training"
    return most_memory("device_memory_gb", peaks_bytes, of, reason)
