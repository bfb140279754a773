"""The metrics of a run: the counted epochs, the two engines side by side, the data beside the disk.

Speed counts all steps of the counted epochs; the warm-up epoch has been left out already. A step's time is the slowest rank's.
A rate is the median step's, unless steps come in bursts: then it is that of all counted steps together.
"""

import statistics

import numpy as np

from benchlib.benchmarks.seq2seq.config import Seq2seqConfig
from benchlib.benchmarks.seq2seq.train import Compared, Trained
from benchlib.core.disk import DataLimit
from benchlib.core.stats import drift_text, smoothed, smoothing_window
from benchlib.results.metrics import Metric, derived, measured, not_available
from benchlib.runtime.step_metrics import flops_metrics, overlap, part, skew
from benchlib.runtime.steps import Columns
from benchlib.workloads.shards import DiskRates

BURSTY = 1.5  # of the median step's rate over that of all steps together, or the other way: neither a hiccup nor noise does that

FORMULA = "3 (L_e [2S(4h² + 2hf) + 4S²h] + L_d [2S(4h² + 2hf) + 4S²h + 8Sh² + 4S²h] + 2ShV) per sample"


def loss_metrics(trained: Trained, scope: str) -> list[Metric]:
    """Return the loss of each step, and its smoothed first and last value."""
    losses = Columns(trained.table)["loss"].sum(axis=1)
    width = smoothing_window(len(losses))
    curve, mean = smoothed(losses, width), f"mean over {width} step{'s' * (width != 1)}, in nats per token"
    return [
        measured(
            "loss", losses.tolist(), "", reason="mean over the global batch, each step; the value is their median"
        ),
        derived(f"loss_first{scope}", float(curve[width - 1]), "", "none", mean),
        derived(f"loss_final{scope}", float(curve[-1]), "", "lower", mean),
    ]


def speed_metrics(trained: Trained, scope: str, world_size: int, peak: float | None, peak_reason: str) -> list[Metric]:
    """Return epochs, rates, the parts of a step, waiting for data, skew and the use of the peak (FLOP/s)."""
    steady = Columns(trained.counted)
    step_s, epoch_s = steady["step_s"].max(axis=1), trained.epoch_s[1:]
    rates = {name: steady[name].sum(axis=1) / step_s for name in ("samples", "tokens", "flops")}
    epochs = f"{len(epoch_s)} counted epochs of {trained.samples:,} samples"
    moved = drift_text(rates["samples"].tolist())
    window = f"median step of {epochs}" + (f"; {moved} by quarter: no steady state" if moved else "")
    whole = {name: np.array([steady[name].sum() / step_s.sum()]) for name in rates}
    if not 1 / BURSTY < np.median(rates["samples"]) / whole["samples"][0] < BURSTY:
        rates, window = (
            whole,
            f"all steps together of {epochs}: they come in bursts, so that no step stands for the others",
        )
    samples, tokens = rates["samples"].tolist(), rates["tokens"].tolist()
    spread = (max(epoch_s) - min(epoch_s)) / statistics.median(epoch_s)
    waited = float(steady["data_s"].max(axis=1).sum() / step_s.sum())  # a median step would hide the few that wait long
    return [
        measured(f"epoch_s{scope}", epoch_s, "s", "lower", reason=f"wall time, {epochs}, after one to warm up"),
        derived(f"epoch_spread{scope}", spread, "ratio", "lower", "slowest less fastest epoch over the median")
        if len(epoch_s) > 1
        else not_available(f"epoch_spread{scope}", "ratio", "lower", "one epoch does not vary"),
        derived(f"train_samples_per_s{scope}", samples, "samples/s", "higher", f"all devices, {window}"),
        derived(
            f"end_to_end_samples_per_s{scope}", trained.samples * len(epoch_s) / sum(epoch_s), "samples/s", "higher",
            "all samples over the wall time of the counted epochs",
        ),
        derived(f"train_tokens_per_s{scope}", tokens, "tokens/s", "higher", f"source and target tokens, {window}"),
        measured(f"step_s{scope}", step_s.tolist(), "s", "lower", reason=f"slowest rank, {epochs}"),
        derived(
            f"data_wait_share{scope}", waited, "ratio", "lower",
            "share of the counted steps' time in which the device waits for its samples, worst rank",
        ),
        part("time_data_s", steady["data_s"]),
        part("time_forward_s", steady["forward_s"], "mean over the ranks; the tuned loss makes its gradients here"),
        part("time_backward_s", steady["backward_s"], "mean over the ranks, without waiting for other ranks"),
        part("time_exchange_s", steady["exchange_s"]),
        part("time_optimizer_s", steady["optimizer_s"]),
        part("exchange_exposed_s", steady["exchange_exposed_s"], "after the last gradient was ready; waiting included"),
        overlap(steady, world_size),
        skew(steady, world_size),
        *flops_metrics(rates["flops"], scope, FORMULA, peak, peak_reason),
    ]  # fmt: skip


def engine_metrics(config: Seq2seqConfig, compared: Compared, global_batch: int, scope: str) -> list[Metric]:
    """Return the rates of the engines that took turns, and how many times the plain one's the tuned one's is."""
    rates = {name: [global_batch / seconds for seconds in times] for name, times in compared.step_s.items()}
    of = f"{config.compare_steps} steps in turns on the same batches"
    metrics = [
        derived(f"{name}_samples_per_s{scope}", rates[name], "samples/s", "higher", of)
        if name in rates
        else not_available(f"{name}_samples_per_s{scope}", "samples/s", "higher", f"engine = {config.engine}")
        for name in ("plain", "tuned")
    ]
    if len(rates) == 2:
        pairs = [
            plain / tuned for plain, tuned in zip(*(compared.step_s[name] for name in ("plain", "tuned")), strict=True)
        ]
        metrics.append(derived(f"tuned_over_plain{scope}", pairs, "×", "higher", f"ratio of step times, {of}"))
    else:
        metrics.append(not_available(f"tuned_over_plain{scope}", "×", "higher", f"engine = {config.engine}"))
    if config.compile and "tuned" in rates:
        reason = "first pass of the tuned engine beyond a later one"
        metrics.append(measured("compile_s", compared.compile_s, "s", "lower", reason=reason))
    else:
        metrics.append(not_available("compile_s", "s", "lower", "nothing was compiled"))
    return metrics


def disk_metrics(rates: DiskRates | None, limit: DataLimit | None, unmeasured: str) -> list[Metric]:
    """Return what disk and loader deliver and what the training asks of them, in MB/s (1e6 bytes), or why nothing is known."""
    names = ("disk_raw_mb_per_s", "loader_mb_per_s", "data_asked_mb_per_s", "loader_over_raw")
    units = ("MB/s", "MB/s", "MB/s", "ratio")
    if rates is None or limit is None:
        return [not_available(name, unit, "higher", unmeasured) for name, unit in zip(names, units, strict=True)]
    raw, loader = (np.array(values) / 1e6 for values in (rates.raw_bytes_per_s, rates.loader_bytes_per_s))
    return [
        measured(names[0], raw.tolist(), "MB/s", "higher", reason=f"sequential, the same shards, by {rates.tool}"),
        measured(names[1], loader.tolist(), "MB/s", "higher", reason="the loader alone, in turns with the raw reads"),
        derived(
            names[2], limit.asked_bytes_per_s / 1e6, "MB/s", "none", "bytes of a sample × samples/s without waiting"
        ),
        derived(names[3], (loader / raw).tolist(), "ratio", "higher", "loader over raw sequential rate, by round"),
    ]
