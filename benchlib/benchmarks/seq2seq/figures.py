"""The pictures of a run: those of every training, the two engines side by side, and the batches that were tried."""

from collections.abc import Callable

import pandas as pd
from matplotlib.axes import Axes

from benchlib.benchmarks.seq2seq.judge import undecided
from benchlib.results import frames
from benchlib.results.frames import Records
from benchlib.show import training
from benchlib.show.figures import LIGHT, Picture, Theme, blank, finish, label_rows, leave_empty, note, styled

_ENGINES = ("plain", "tuned")


def _bars(axes: Axes, theme: Theme, groups: dict[str, list[float]]) -> dict[str, float]:
    """Draw the median of each group as a bar with its values as ticks; return the medians."""
    medians = {name: float(pd.Series(values).median()) for name, values in groups.items()}
    for row, (name, values) in enumerate(groups.items()):
        axes.barh(row, medians[name], height=0.5, color=theme.series[row], alpha=0.55)
        axes.plot(values, [row] * len(values), "|", color=theme.text, markersize=12, markeredgewidth=1.2)
        note(axes, f"{medians[name]:.3g}", (max(values), row), (8, 0), fontweight="bold")
    label_rows(axes, list(groups))
    return medians


@styled
def engines(run: Records, theme: Theme = LIGHT) -> Picture:
    """Samples per second of each step that the engines took in turns, and their medians."""
    figure, axes = blank("engines", theme)
    samples = frames.readable(run, "samples") or {}
    rates: dict[str, list[float]] = {
        engine: next((values for name, values in samples.items() if name.startswith(f"{engine}_samples_per_s")), [])
        for engine in _ENGINES
    }
    if not all(rates.values()):
        return leave_empty(figure, axes, theme, "One engine ran: there is nothing to compare.")
    medians = _bars(axes, theme, rates)
    axes.set_xlim(0, 1.2 * max(map(max, rates.values())))
    ratios = samples.get(next((name for name in samples if name.startswith("tuned_over_plain")), ""), [])
    ratio = float(pd.Series(ratios).median()) if ratios else medians["tuned"] / medians["plain"]
    title = f"Tuned does {ratio:.2f} × the work of the usual loop"
    result = frames.readable(run, "result")
    stated = [metric for metric in result.metrics if metric.name.startswith("tuned_over_plain")] if result else []
    if any(undecided(metric, ratios) for metric in stated):
        title = f"Undecided which is faster: {min(ratios):.2f} to {max(ratios):.2f} × by turn"
    alt = "Bars: medians of steps on the same batches in turns; ticks: each step."
    return finish(figure, axes, theme, title, "samples per second, all devices", "", alt)


@styled
def batches(run: Records, theme: Theme = LIGHT) -> Picture:
    """Rate and memory of the batches that were tried, and where memory ends."""
    figure, axes = blank("batches", theme)
    frame = frames.table(run, "batches")
    if frame.empty or not frame["fits"].any():
        return leave_empty(figure, axes, theme, "No batches were tried: batch=auto does.")
    fitting = frame[frame["fits"]].sort_values("batch")
    axes.plot(fitting["batch"], fitting["peak_gb"], marker="o")
    failed = frame[~frame["fits"].astype(bool)]
    for batch in failed["batch"]:
        axes.axvline(batch, color=theme.series[1], alpha=0.5, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    best = int(fitting["batch"].max())
    title = f"{best:,} samples are the largest batch seen to fit"
    alt = f"Line: peak memory by batch; {len(failed)} vertical lines: batches that ran out of memory."
    return finish(
        figure, axes, theme, title, "samples per device and step (lines: out of memory)", "peak memory (GB)", alt
    )


@styled
def epochs(run: Records, theme: Theme = LIGHT) -> Picture:
    """Wall time of each epoch, the one to warm up in grey."""
    figure, axes = blank("epochs", theme)
    frame = frames.table(run, "epochs")
    if frame.empty:
        return leave_empty(figure, axes, theme, "No epoch was finished.")
    for epoch, counted, seconds in zip(frame["epoch"], frame["counted"], frame["seconds"], strict=True):
        axes.bar(epoch, seconds, width=0.62, color=theme.series[0] if counted else theme.muted, alpha=0.8)
        note(axes, f"{seconds:.3g} s", (epoch, seconds), (0, 5), ha="center")
    axes.set_xticks(frame["epoch"], ["warm-up" if not epoch else str(epoch) for epoch in frame["epoch"]])
    axes.margins(y=0.15)
    times = frame[frame["counted"].astype(bool)]["seconds"]
    title = f"An epoch takes {times.median():.3g} s"
    if len(times) > 1:
        title += f"; they differ by {(times.max() - times.min()) / times.median():.1%}"
    return finish(figure, axes, theme, title, "epoch (the first one is not counted)", "wall time (s)", "Bars: epochs.")


@styled
def disk(run: Records, theme: Theme = LIGHT) -> Picture:
    """What the disk gives raw, what the loader delivers, and what the training asks for."""
    figure, axes = blank("disk", theme)
    samples = frames.readable(run, "samples") or {}
    names = {"disk_raw_mb_per_s": "raw sequential", "loader_mb_per_s": "loader", "data_asked_mb_per_s": "asked for"}
    rates = {label: samples.get(name, []) for name, label in names.items()}
    if not all(rates.values()):
        return leave_empty(figure, axes, theme, "No disk was measured: data_dir and a whole shard of samples do.")
    medians = _bars(axes, theme, rates)
    every = [value for values in rates.values() for value in values]
    axes.set_xscale("log")
    axes.set_xlim(min(every) / 3, max(every) * 4)
    share = medians["asked for"] / medians["loader"]
    title = f"The training asks for {share:.2g} × what the loader delivers"
    alt = "Bars: medians on a logarithmic axis; ticks: rounds in turns."
    return finish(figure, axes, theme, title, "MB/s, all ranks (logarithmic)", "", alt)


FIGURES: dict[str, Callable[..., Picture]] = {
    "engines": engines,
    "epochs": epochs,
    "loss-curve": training.loss_curve,
    "throughput": training.throughput,
    "time-split": training.time_split,
    "memory": training.memory,
    "batches": batches,
    "disk": disk,
}
MORE: dict[str, Callable[..., Picture]] = {"rank-skew": training.rank_skew}
