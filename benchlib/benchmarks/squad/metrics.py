"""The metrics of a SQuAD run, computed from what each rank measured in each step.

Letters: K steps, W ranks. A step's time is the slowest rank's; speed counts the steps after the warm-up only.
"""

from benchlib.benchmarks.squad.steps import Trained
from benchlib.core.definitions import algbw_gbps, busbw_gbps
from benchlib.core.stats import drift_text, smoothed, smoothing_window
from benchlib.results.metrics import Metric, derived, measured, not_available
from benchlib.runtime.step_metrics import ONE_RANK, flops_metrics, overlap, part, skew
from benchlib.runtime.steps import Columns
from benchlib.workloads.collective_timing import AllReduce

WARMUP_STEPS = 5  # not counted, at most a quarter of all: caches fill, DDP orders its buckets, kernels are chosen

_FORMULA = "3 L [2S(4h² + 2hf) + 4S²h] on the padded shapes"
_NO_SIZES = "the model's config does not name layers, hidden and intermediate size"


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
        part("time_data_s", steady["data_s"]),
        part("time_forward_s", steady["forward_s"]),
        part("time_backward_s", steady["backward_s"], "mean over the ranks, without waiting for other ranks"),
        part("time_exchange_s", steady["exchange_s"]),
        part("time_optimizer_s", steady["optimizer_s"]),
        part("exchange_exposed_s", steady["exchange_exposed_s"], exposed),
        overlap(steady, world_size),
        skew(steady, world_size),
        *flops_metrics(steady["flops"].sum(axis=1) / step_s, scope, _FORMULA, peak, peak_reason, _NO_SIZES),
    ]


def exchange_metrics(exchange: AllReduce | None) -> list[Metric]:
    """Return the speed of the all-reduce at the sizes of the gradient buckets; none with one rank."""
    names = ("allreduce_gbps", "allreduce_algbw_gbps")
    if exchange is None:
        return [not_available(name, "Gbps", "higher", ONE_RANK) for name in names]
    sizes, size = ", ".join(f"{size / 1e6:.1f}" for size in exchange.sizes), sum(exchange.sizes)
    reason = f"at the gradient buckets of {sizes} MB, every sum checked"
    busbw = [busbw_gbps("all_reduce", size, time, exchange.ranks) for time in exchange.seconds]
    algbw = [algbw_gbps(size, time) for time in exchange.seconds]
    return [
        derived(names[0], busbw, "Gbps", "higher", f"bus bandwidth, algbw x 2(n-1)/n, {reason}"),
        derived(names[1], algbw, "Gbps", "higher", f"algorithm bandwidth S/t, {reason}"),
    ]
