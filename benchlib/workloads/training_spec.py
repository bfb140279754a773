"""What every training states, by the rows that ``benchlib.workloads.training`` leaves: learning, speed, parts of a
step, memory.

A benchmark adds its own columns to the table of the run. ``speed_scope`` and ``quality`` are the ends of the names of
its metrics of speed and of learning: '' for the real thing, else what stands in for it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import truediv
from statistics import fmean
from typing import Any

from benchlib.core.events import Event
from benchlib.core.stats import smoothed, smoothing_window, windows
from benchlib.core.text import counted
from benchlib.judge.checks import Check as Judged
from benchlib.judge.numbers import why
from benchlib.results.run import Tables
from benchlib.spec.charts import Chart, cumulative, stacked, steps
from benchlib.spec.checks import Check, rule
from benchlib.spec.spec import Bound, Metric, Show, each, run_table
from benchlib.spec.tables import Col, Row, Rows, Table, cols, write

PARTS = {
    name: name.removesuffix("_exposed") for name in ("data", "forward", "backward", "exchange_exposed", "optimizer")
}
LESS = {"max_steps": "planned_steps", "samples": "samples_per_epoch"}  # fields of the config that ask for less work
RATE, THROUGHPUT = "samples/s", "Training throughput"
LARGEST, HELD = "allocated by tensors of the largest rank during the training", "largest rank"
PARTS_S = " ".join(f"{name}_s" for name in PARTS)
LOSS = 1e-3  # the same training differs by less on other hardware, and by more with other data
series = partial(Col, samples=True)
rates = partial(Col, samples=True, average="harmonic")  # of windows of equal work: all work over all time
means = partial(Col, samples=True, average="mean")  # parts of a step, which add up to its mean
higher, lower = partial(Metric, better="higher"), partial(Metric, better="lower")


def _useful(flops: list[float], tokens: list[float], padded: list[float]) -> list[float]:
    """Return the FLOPs of each step without its share of padding."""
    return [all_flops * own / whole for all_flops, own, whole in zip(flops, tokens, padded, strict=True)]


def _shares(flops: list[float], step_s: list[float], peak: float) -> list[float]:
    """Return what FLOPs over time are of a peak, by windows."""
    return [rate / peak for rate in windows(flops, step_s)]


def _pace(step_s: list[float], drift: str) -> str:
    """Say what the rate is of, and how it moved if it was no steady one."""
    text = f"all work over all time of {counted(len(step_s), 'step')}"
    return f"{text}; no steady state, it {drift}" if drift else text


def _largest(*parts: Any) -> str:
    sizes = [fmean(part) if isinstance(part, list) else part for part in parts]
    return list(PARTS.values())[sizes.index(max(sizes))]


def _of_steps(row: Row, run: Rows) -> Row:
    """Return what no column of the counted steps states: ranks, and whether the batches were full."""
    batch = run.run.get("global_batch")
    return {
        "speed.ranks": run.world,
        "speed.batches_full": set(counted_steps["samples"].numbers(row, run)) == {batch},
        "speed.batch_per_rank": batch // run.world if batch else None,
        "compute.ranks": run.world,
        "compute.peak_kind": "measured",
    }


of_steps = [
    Col("scope", of=str, needs="speed_scope"),
    series("step_s", "s", "step", role="speed.step_s"),
    *(means(f"{name}_s", "s", words) for name, words in PARTS.items()),
    *cols("exchange_s data_wait_s", "s", samples=True, average="mean"),
    *cols("samples tokens padded_tokens flops", "count", samples=True),
    series("exchange_overlap", "ratio", derived=True, signed=True),
    series("rank_skew", "ratio", derived=True),
    Col("drift"),
    rates("samples_per_s", RATE, RATE, windows, "samples step_s", role="speed.samples_per_s"),
    rates("tokens_per_s", "tokens/s", "", windows, "tokens step_s", role="speed.tokens_per_s"),
    rates("flops_per_s", "FLOP/s", "", windows, "flops step_s", role="compute.flops_per_s"),
    Col("peak", "FLOP/s", of=float, needs="peak_flops", role="compute.peak_flops"),
    # The device works on padding, too; of the model's own work it is none (PaLM, appendix B).
    rates("hfu", "ratio", "hardware FLOP utilisation", _shares, "flops step_s peak", role="compute.mfu"),
    series("useful_flops", "count", "", _useful, "flops tokens padded_tokens"),
    rates("mfu", "ratio", "MFU", _shares, "useful_flops step_s peak"),
    Col("kind", of=str, needs="precision", role="compute.precision"),
    Col("peak_kind", of=str, needs="precision", role="compute.peak_precision"),
    Col("data_wait_share", "ratio", "", lambda waits, times: sum(waits) / sum(times), "data_wait_s step_s"),
    Col("pace", "", "", _pace, "step_s drift"),
    Col("largest", "", "", _largest, PARTS_S),
    Col("ranks", "", "", lambda world: counted(world, "rank"), "world"),
]
counted_steps = Table("steps", "counted steps", of_steps, _of_steps)
of_rank = [
    Col("rank", "number"),
    Col("step_s", "s", "mean step"),
    *(Col(f"{name}_s", "s", words) for name, words in PARTS.items()),
    *cols("exchange_s", "s"),
    *cols("samples", "count"),
    *cols("resident_gb device_gb", "GB"),
    series("memory_gb", "GB", "memory"),
    Col("largest", "", "", _largest, PARTS_S),
]
by_rank = Table("ranks", "rank {rank}", of_rank)
TABLES = [counted_steps, by_rank]


def _loss_at(place: int, losses: list[float]) -> float:
    """Return the smoothed loss of the last step, or of the first one with a whole window (``place`` 0)."""
    return float(smoothed(losses)[place or smoothing_window(len(losses)) - 1])


def _of_run(row: Row, run: Rows) -> Row:
    """Return what no column of the run states: its ranks, and the first and last loss."""
    losses, learning = row.get("loss"), dict[str, float]()
    if losses and isinstance(losses, list) and all(map(math.isfinite, losses)):  # not the median alone
        learning = {"learning.loss_first": _loss_at(0, losses), "learning.loss_last": _loss_at(-1, losses)}
    return learning | {"speed.ranks": run.world, "collective.operation": "all_reduce", "collective.ranks": run.world}


def run_of_training(*more: Col) -> Table:
    """Return the table ``run`` of a training, with columns of the benchmark's own."""
    table = run_table(
        *cols("speed_scope quality precision cut_by peak_of checksums identity"),
        *cols("planned_steps total_steps samples_expected trained_samples samples_seen resumed_step restarts", "count"),
        *cols("parameters epoch_items global_batch", "count"),
        Col("counted", "count", "", sum, "samples_seen", role="speed.samples_counted"),
        Col("planned", "count", "", int, "samples_expected", role="speed.samples_planned"),
        Col("epoch_share", "ratio", "share of the training"),
        *cols("expected_step_s left_s train_s", "s"),
        Col("learning_rate_min", "error", "smallest learning rate", role="learning.learning_rate_min"),
        series("loss", "number"),
        Col("loss_first", "number", "first loss", partial(_loss_at, 0), "loss", quality=LOSS),
        Col("loss_final", "number", "final loss", partial(_loss_at, -1), "loss", quality=LOSS),
        Col("window", "count", "", lambda losses: smoothing_window(len(losses)), "loss"),
        Col("end_to_end", RATE, "", truediv, "trained_samples train_s"),
        Col("peak_flops", "FLOP/s", "peak of matrix products"),
        Col("padding_share", "ratio", derived=True),
        *cols("device_memory_gb resident_memory_gb", "GB"),
        Col("energy_j", "J"),
        Col("power_w", "W"),
        Col("energy_per_sample_j", "J", "", lambda w, s, n: w * s / n, "power_w train_s trained_samples"),
        series("temperature_c", "°C", signed=True),
        means("utilization", "%"),
        *more,
    )
    return replace(table, claim=_of_run)


def metrics(run: Table, formula: str, loss_may_lose: float, tokens: str = "without padding") -> list[Metric]:
    """Return the metrics of a training; ``formula`` is that of the FLOPs, ``tokens`` says which ones are counted."""
    own = counted_steps
    mean, each_s = "steps in the mean: {window}", "every second of the training"
    after = "mean; after the last gradient was ready; waiting for slower ranks is part of it"
    over = "mean over steps and ranks, without waiting for other ranks"
    under_way = "mean; partly behind the backward pass; waiting for slower ranks is part of it"
    of_all, typical = "over the training, all nodes", "median step, which ends when the last rank ends it"
    no_padding = "FLOP/s without padding, over matmul_peak_flops"
    return [
        Metric("loss", run["loss"], "Loss", "mean over the global batch, each step; the value is their median"),
        Metric("loss_first{quality}", run["loss_first"], "First loss", mean),
        lower("loss_final{quality}", run["loss_final"], "Final loss", mean, may_lose=loss_may_lose, headline=True),
        higher("train_samples_per_s{scope}", own["samples_per_s"], THROUGHPUT, "{pace}", may_lose=0.2, headline=True),
        higher("train_tokens_per_s{scope}", own["tokens_per_s"], "Tokens", f"{tokens}, {{pace}}"),
        lower("step_s{scope}", own["step_s"], "Typical step", typical, headline=True),
        *(lower(f"time_{name}_s", own[f"{name}_s"], "", over) for name in PARTS if name != "exchange_exposed"),
        lower("time_exchange_s", own["exchange_s"], "", under_way),
        lower("exchange_exposed_s", own["exchange_exposed_s"], "", after),
        higher("exchange_overlap", own["exchange_overlap"], "", "1 - exposed / busy: what the backward pass hides"),
        lower(
            "rank_skew", own["rank_skew"], "", "compute time of the slowest rank over the mean of all, without waiting"
        ),
        higher("flops_per_s{scope}", own["flops_per_s"], "", formula),
        higher("mfu{scope}", own["mfu"], "Model FLOP utilisation", no_padding, headline=True),
        higher("matmul_peak_flops", run["peak_flops"], "Peak of matrix products", "{peak_of}"),
        lower("device_memory_gb", run["device_memory_gb"], "Device memory", LARGEST, may_lose=0.25),
        lower("resident_memory_gb", run["resident_memory_gb"], "Resident memory", HELD, may_lose=0.25, headline=True),
        lower("energy_j", run["energy_j"], "Energy", f"the hardware's own counter, {of_all}"),
        lower("power_w", run["power_w"], "Mean power", of_all),
        lower("energy_per_sample_j", run["energy_per_sample_j"], "Energy per sample", "mean power × time / samples"),
        lower("temperature_c", run["temperature_c"], "Temperature", each_s),
        Metric("utilization", run["utilization"], "Utilisation", "of a CPU the time of the ranks: 100% is one core"),
        lower("train_s", run["train_s"], "Training"),
        lower("startup_s", run["startup_s"], "Start-up", "from the launch to the first step"),
        lower("total_s", run["total_s"], "Whole run", "from the launch to the result", headline=True),
    ]


def _equal(check: Check, run: Rows) -> Judged:
    rows = run.run["checksums"]
    same = bool(rows) and all(len(row) == run.world and len(set(map(str, row))) == 1 for row in rows)
    compared = f"{counted(len(rows), 'comparison')} of weight checksums over {counted(run.world, 'rank')}"
    return check.answer("PASS" if same else "FAIL", compared + ("" if same else ": they differ"))


def plan_text(row: Row) -> str:
    """Say how much of the training ran, and what cut it."""
    text = f"{row['planned_steps']:,} of {row['total_steps']:,} steps, {row['epoch_share']:.1%} of the training"
    if row["cut_by"] != "budget":
        return text + (f": {row['cut_by']} ends it early" if row["cut_by"] else "")
    left, step = write(row["left_s"], "s"), write(row["expected_step_s"], "s")
    return f"{text}: {left} of the budget were left, a step takes {step}"


def _whole(check: Check, run: Rows) -> Judged:
    """Judge whether all of the training ran. Runs that the budget cut did other work than the rest, so none can be compared."""
    row = run.run
    if row["epoch_share"] < 1 and row["cut_by"] == "budget":
        less = next((f"{name}={row[fact]}" for name, fact in LESS.items() if hasattr(run.config, name)), "")
        remedy = f"`--set {less}` asks for this much, `--set budget_s=N` for more time"
        reason = f"too slow for this tier: {plan_text(row)}; {remedy}"
        return check.answer("FAIL", reason, value=row["epoch_share"])
    if row["epoch_share"] < 1 and row["cut_by"]:
        return check.answer("SKIPPED", plan_text(row), value=row["epoch_share"])
    whole = row["epoch_share"] == 1 and row["planned_steps"] == row["total_steps"]
    return check.answer("PASS" if whole else "FAIL", plan_text(row))


def checks(whole: str) -> list[Check]:
    """Return the checks of a training; ``whole`` is the name of the one that asks whether all of it ran."""
    fast = "Is the achieved FLOP rate below the measured peak?"
    return [
        rule("loss decreases", "Is the smoothed loss lower at the end than at the start?", "loss falls", needed=True),
        Check("ranks equal", "Did all ranks hold the same weights at the end of each epoch?", judge=_equal),
        rule("sample count", "Does the number of trained samples match the plan?", "sample count", needed=True),
        rule("learning rate", "Was the learning rate above zero in every step?", "learning rate", needed=True),
        Check(whole, "Did all of the training that was asked for fit the budget?", judge=_whole),
        rule(
            "possible speed",
            fast,
            "below the peak",
            needed=True,
            unless=lambda run: why(next(iter(run.tables["steps"]), {}), "mfu"),
        ),
    ]


SPEED = [
    each(
        counted_steps,
        "Training runs at {samples_per_s} on {ranks} ({pace}), an MFU of {mfu} of the measured {kind} peak of {peak}.",
    ),
    each(counted_steps.where(largest=bool), "The largest timed part of a step is {largest}."),
]


def whole(run: Rows) -> bool:
    """Return whether the work was what the config says, and not what the budget left of it."""
    return run.run.get("cut_by") != "budget"


def bound(work: str) -> Bound:
    """Return how near a training comes to the peak of its ranks' matrix products."""
    own, of = counted_steps, "of the measured peak of matrix products"
    return Bound(work, own["samples_per_s"], own["mfu"], of, "the largest timed part of a step is {largest}")


def waits(run: Rows) -> list[str]:
    """Return a sentence if timing slows this device down: without timed events ``runtime.timing`` waits for it at each mark."""
    sentence = "Timing waits for the device at each mark of a step: untimed steps are faster."
    return [sentence] if run.run.get("device") in ("mps", "xla") else []


def warnings(run: Rows) -> list[str]:
    """Return what limits the meaning of a training: it was cut, its speed was no steady one, or timing slowed it down."""
    cut = isinstance(share := run.run.get("epoch_share"), float) and share < 1
    sentences = [f"The run is not the whole training: {plan_text(run.run)}."] if cut else []
    drifts = [row["drift"] for row in counted_steps.rows(run) if row.get("drift")]
    sentences += [f"Training throughput {drift} samples/s by quarter: no steady state." for drift in drifts]
    return sentences + waits(run)


def resident_gb(events: Sequence[Event]) -> dict[int, list[float]]:
    """Return the resident memory of each rank in GB from the events of a run: one reading a second."""
    pids = next((list(map(str, event["ranks"])) for event in reversed(events) if event["kind"] == "launched"), [])
    read: dict[int, list[float]] = {}
    for event in events:
        for pid, size in event["rss_bytes_per_pid"].items() if event["kind"] == "sensor" else ():
            if pid in pids:
                read.setdefault(pids.index(pid), []).append(size / 1e9)
    return read


def recorded(events: Sequence[Event]) -> Tables:
    done = {event["step"]: event for event in events if event["kind"] == "step" and event.get("step")}
    recorded_steps = [done[step] for step in sorted(done)]
    memory = resident_gb(events).items()
    return {
        "run": [{"loss": [event.get("loss") for event in recorded_steps]}],
        "steps": [
            {name: [event.get(name) for event in recorded_steps] for name in ("step_s", "samples")} | {"drift": ""}
        ],
        "ranks": [{"rank": rank, "memory_gb": read, "resident_gb": max(read)} for rank, read in memory],
    }


def charts(run: Table) -> list[Chart]:
    fell = "The smoothed loss goes from {loss_first} to {loss_final}"
    held = "Rank {rank} holds {resident_gb} at most by the end of the training"
    no_step, no_parts = "No training step was recorded.", "No parts of a step were recorded."
    seconds, none = "seconds since the launch", "No memory reading was recorded."
    rate, parts = counted_steps["samples_per_s"], [by_rank[name] for name in PARTS_S.split()]
    longest, split = "The largest timed part of a step is {largest}", "seconds of a step, means"
    window = "window of equal work"
    return [
        steps("loss-curve", run["loss"], title=fell, empty=no_step, smooth=smoothed),
        steps("throughput", rate, title="{samples_per_s}, {pace}", empty=no_step, x=window, smooth=smoothed),
        cumulative("step-times", counted_steps["step_s"], title="Half of the steps take up to {step_s}", empty=no_step),
        stacked("time-split", *parts, title=longest, x=split, mark=by_rank["step_s"], empty=no_parts),
        steps("memory", by_rank["memory_gb"], title=held, about=by_rank.most("resident_gb"), empty=none, x=seconds),
    ]


SHOWS = [Show("Ranks", by_rank, f"rank step_s {PARTS_S} samples resident_gb device_gb")]
