"""The metrics of a SQuAD run, computed from what each rank measured in each step.

Letters: K steps, W ranks. A step's time is the slowest rank's; speed counts the steps after the warm-up only.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.benchmarks.squad.steps import COLUMNS, Trained
from benchlib.core.events import Event
from benchlib.core.stats import LEAST_FOR_P95, drift_text, smoothed, smoothing_window
from benchlib.results.metrics import Direction, Metric, derived, measured, not_available
from benchlib.workloads.collective_timing import AllReduce

WARMUP_STEPS = 5  # not counted, at most a quarter of all: caches fill, DDP orders its buckets, kernels are chosen

_NO_SPLIT = "transformers' Trainer does not tell how a step's time is divided"
_ONE_RANK = "one rank exchanges nothing"
_NO_SIZES = "the model's config does not name layers, hidden and intermediate size"


class Columns:
    """The step table by column: ``columns["tokens"]`` is float (K, W)."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = table

    def __getitem__(self, name: str) -> np.ndarray:
        return self.table[:, :, COLUMNS.index(name)]  # type: ignore[no-any-return]


def steady_from(trained: Trained) -> int:
    """Return the first step (from 0) whose speed counts."""
    steps = len(trained.table) - trained.resumed_step
    return trained.resumed_step + min(WARMUP_STEPS, steps // 4)


def quality_metrics(trained: Trained, quality: str) -> list[Metric]:
    """Return the loss of each step and its smoothed first and last value."""
    losses = Columns(trained.table)["loss"].sum(axis=1)
    width = smoothing_window(len(losses))
    curve = smoothed(losses, width)
    mean = f"mean over {width} step{'s' * (width != 1)}"
    each = "mean over the global batch, each step; the value is their median"
    return [
        measured("loss", losses.tolist(), "", reason=each),
        derived(f"loss_first{quality}", float(curve[width - 1]), "", "none", mean),
        derived(f"loss_final{quality}", float(curve[-1]), "", "lower", mean),
    ]


def speed_metrics(trained: Trained, scope: str, world_size: int, peak: float | None, peak_reason: str) -> list[Metric]:
    """Return throughput, step time, its parts, the exchange of gradients, skew and the use of the peak (FLOP/s)."""
    first = steady_from(trained)
    everything, steady = Columns(trained.table[trained.resumed_step :]), Columns(trained.table[first:])
    step_s = steady["step_s"].max(axis=1)
    samples, tokens = ((steady[name].sum(axis=1) / step_s).tolist() for name in ("samples", "tokens"))
    end_to_end = float(everything["samples"].sum()) / trained.train_s
    padding = float(1 - everything["tokens"].sum() / everything["padded_tokens"].sum())
    window = f"steps {first + 1} to {len(trained.table)}"
    moved = drift_text(samples)
    slowest = f"global batch over the time of the slowest rank, median step, {window}"
    slowest += f"; {moved} by quarter: no steady state" if moved else ""
    whole = "all samples over the whole training, with its checkpoints and slow steps"
    exposed = "after the last gradient was ready, mean over the ranks; waiting for slower ranks is part of it"
    return [
        derived(f"train_samples_per_s{scope}", samples, "samples/s", "higher", slowest),
        derived(f"end_to_end_samples_per_s{scope}", end_to_end, "samples/s", "higher", whole),
        derived(f"train_tokens_per_s{scope}", tokens, "tokens/s", "higher", f"without padding, {window}"),
        measured(f"step_s{scope}", step_s.tolist(), "s", "lower", reason=f"slowest rank, {window}"),
        derived("padding_share", padding, "ratio", "lower", "padding over processed tokens, all steps"),
        _part("time_data_s", steady["data_s"]),
        _part("time_forward_s", steady["forward_s"]),
        _part("time_backward_s", steady["backward_s"], "mean over the ranks, without waiting for other ranks"),
        _part("time_exchange_s", steady["exchange_s"]),
        _part("time_optimizer_s", steady["optimizer_s"]),
        _part("exchange_exposed_s", steady["exchange_exposed_s"], exposed),
        _overlap(steady, world_size),
        _skew(steady, world_size),
        *_flops(steady["flops"].sum(axis=1) / step_s, scope, peak, peak_reason),
    ]


def _part(name: str, seconds: np.ndarray, reason: str = "mean over the ranks") -> Metric:
    if np.isnan(seconds).any():
        return not_available(name, "s", "lower", _NO_SPLIT)
    return measured(name, seconds.mean(axis=1).tolist(), "s", "lower", reason=reason)


def _overlap(steady: Columns, world_size: int) -> Metric:
    busy, exposed = steady["exchange_s"], steady["exchange_exposed_s"]
    if np.isnan(busy).any() or world_size == 1:
        return not_available("exchange_overlap", "ratio", "higher", _ONE_RANK if world_size == 1 else _NO_SPLIT)
    share = 1 - np.minimum(exposed, busy).sum(axis=1) / np.maximum(busy.sum(axis=1), 1e-12)
    reason = "1 - exposed / busy: the share of the exchange that the backward pass hides"
    return derived("exchange_overlap", share.tolist(), "ratio", "higher", reason)


def own_work(columns: Columns) -> np.ndarray:
    """Return the seconds that each rank worked in each step without waiting for others, (K, W); NaN where unknown."""
    return sum((columns[f"{part}_s"] for part in ("data", "forward", "backward", "optimizer")), np.zeros(()))  # type: ignore[no-any-return]


def _skew(steady: Columns, world_size: int) -> Metric:
    work = own_work(steady)
    if world_size == 1 or np.isnan(work).any():
        why = "one rank has nobody to wait for" if world_size == 1 else _NO_SPLIT
        return not_available("rank_skew", "ratio", "lower", why)
    share = (work.max(axis=1) / work.mean(axis=1)).tolist()
    return derived(
        "rank_skew", share, "ratio", "lower", "own work of the slowest rank over the mean of all, without waiting"
    )


def _flops(rates: np.ndarray, scope: str, peak: float | None, peak_reason: str) -> list[Metric]:
    achieved, mfu, top = f"flops_per_s{scope}", f"mfu{scope}", "matmul_peak_flops"
    formula = "3 L [2S(4h² + 2hf) + 4S²h] on the padded shapes"
    share = "FLOP/s over the measured peak of matrix products"
    unknown = np.isnan(rates).any()
    no_share = _NO_SIZES if unknown else "" if peak else peak_reason
    return [
        not_available(achieved, "FLOP/s", "higher", _NO_SIZES)
        if unknown
        else derived(achieved, rates.tolist(), "FLOP/s", "higher", formula),
        not_available(mfu, "ratio", "higher", no_share)
        if no_share or not peak
        else derived(mfu, (rates / peak).tolist(), "ratio", "higher", share),
        measured(top, peak, "FLOP/s", "higher", reason=peak_reason)
        if peak
        else not_available(top, "FLOP/s", "higher", peak_reason),
    ]


def exchange_metrics(exchange: AllReduce | None) -> list[Metric]:
    """Return the speed of the all-reduce at the sizes of the gradient buckets; none with one rank."""
    names = ("allreduce_gbps", "allreduce_algbw_gbps")
    if exchange is None:
        return [not_available(name, "Gbps", "higher", _ONE_RANK) for name in names]
    sizes = ", ".join(f"{size / 1e6:.1f}" for size in exchange.sizes)
    reason = f"at the gradient buckets of {sizes} MB, every sum checked"
    return [
        derived(names[0], exchange.busbw_gbps, "Gbps", "higher", f"bus bandwidth, algbw x 2(n-1)/n, {reason}"),
        derived(names[1], exchange.algbw_gbps, "Gbps", "higher", f"algorithm bandwidth S/t, {reason}"),
    ]


def sensor_metrics(events: Sequence[Event], began: float, ended: float, config: SquadConfig) -> list[Metric]:
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
    if config.backend == "cpu" and (shares := values("cpu_percent")):
        of_cores = "processor time of the ranks, 100 % is one core"
        utilization = measured("utilization", shares, "%", "none", reason=of_cores)
    return [
        energy,
        sampled("power_w", "power_w", "W", "lower"),
        sampled("temperature_c", "temperature_c", "°C", "lower"),
        utilization,
    ]


def rank_rows(trained: Trained, resident_bytes: Sequence[float]) -> list[dict[str, Any]]:
    """Return the table of ranks: step times, own work and samples of each."""
    steady = Columns(trained.table[steady_from(trained) :])
    work = own_work(steady)
    rows: list[dict[str, Any]] = []
    for rank, resident in enumerate(resident_bytes):
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
                "samples": trained.samples_seen[rank],
                "resident_memory_gb": resident / 1e9,
            }
        )
    return rows
