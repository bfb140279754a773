"""What a training of the encoder-decoder states: engines side by side, epochs, the disk, the batch."""

import math
from operator import truediv
from statistics import median

from benchlib.core.stats import summary
from benchlib.core.text import stand_ins
from benchlib.spec.charts import bars
from benchlib.spec.checks import below
from benchlib.spec.spec import Bound, Metric, Show, Spec, each
from benchlib.spec.tables import Col, Row, Rows, Table, cols
from benchlib.workloads import training_spec as training
from benchlib.workloads.same_check import same
from benchlib.workloads.training_spec import RATE, counted_steps, higher, lower, means, rates, series

# How far the losses of the two engines may differ, as a share: sums in another order, and with mixed precision roundings at
# other places. Measured on a CPU as the largest of 20 steps of 512 tokens: 2.5e-6 in fp32 and 8e-5 in bf16, here times 4. fp16
# rounds finer than bf16 and has its limit. Roundings even out over the tokens: fewer than 512 differ by more. A dropout of 0.1
# differs by 6e-4 or more in three steps, other weights by 2e-3.
LOSS_TOLERANCE, TOLERANCE_TOKENS = {"fp32": 1e-5, "bf16": 3e-4, "fp16": 3e-4}, 512
# Nats: of the density 1 / (2 sqrt(x)) the logarithm has the standard deviation of ln u for a uniform u, which is 1.
TOKEN_DEVIATION, DEVIATIONS = 1.0, 5.0
ASTRAY = 0.05  # share of the shards that may be in the page cache, or out of it, against what was asked for
FORMULA = "3 (L_e [2S(4h² + 2hf) + 4S²h] + L_d [2S(4h² + 2hf) + 4S²h + 8Sh² + 4S²h] + 2ShV) per sample"


def _floor(entropy: float, tokens: int, samples: int, batch: int) -> float:
    """Return the entropy of a token less the noise of the mean of an epoch's smallest step, its last: who beats it sees what he predicts."""
    smallest = samples % batch or batch
    return entropy - DEVIATIONS * TOKEN_DEVIATION / math.sqrt(smallest * tokens / samples)


def _tolerance(precision: str, batch: int, tokens: int, samples: int) -> float:
    step_tokens = min(batch, samples) * tokens / samples
    return LOSS_TOLERANCE[precision] * max(1.0, math.sqrt(TOLERANCE_TOKENS / step_tokens))


def _astray(share: float, asked: str) -> float:
    return share if asked == "cold" else 1 - share


def _limit(asked: float, loader: list[float], raw: list[float]) -> str:
    if asked <= median(loader):
        return "nothing"
    return "the disk" if asked > median(raw) else "the loader"


def _undecided(ratios: list[float]) -> str:
    """Say where the interval of a ratio, or its range where the samples are too few for one, holds 1."""
    stats = summary(ratios)
    low = min(ratios) if stats.ci_low is None else stats.ci_low
    high = max(ratios) if stats.ci_high is None else stats.ci_high
    return f", undecided which is faster ({low:.2f} to {high:.2f})" if len(ratios) > 1 and low <= 1 <= high else ""


of_engine = [
    *cols("engine"),
    Col("scope", of=str, needs="speed_scope"),
    series("step_s", "s", "step"),
    Col("loss", "number", "losses"),
    series("ratios", "×", "times the plain rate", derived=True),
    Col("compile_s", "s", "compiling"),
    rates("rates", RATE, RATE, lambda batch, times: [batch / t for t in times], "global_batch step_s"),
    Col("tolerance", "error", "", _tolerance, "precision global_batch epoch_tokens samples_per_epoch"),
    Col("undecided", "", "", _undecided, "ratios"),
]
engines = Table("engines", "{engine}", of_engine)
of_epoch = [
    Col("epoch", "number"),
    Col("counted"),
    Col("seconds", "s", "wall time"),
    Col("loss", "number"),
    Col("cached", "ratio", "in the page cache before"),
    Col("astray", "ratio", "pages not where they should be", _astray, "cached page_cache"),
]
epochs = Table("epochs", "epoch {epoch}", of_epoch)
of_batch = [*cols("batch", "number"), *cols("fits"), *cols("peak_gb", "GB"), *cols("samples_per_s", RATE)]
batches = Table("batches", "{batch} samples", of_batch)
TURNING = "sample_flops asked_mb_per_s loader_mb_per_s"
ASKED, RATES = "sample_bytes global_batch compute_s", "loader_mb_per_s raw_mb_per_s"
of_disk = [
    series("raw_mb_per_s", "MB/s", "raw sequential"),
    series("checked_mb_per_s", "MB/s", "raw with checksums"),
    series("loader_mb_per_s", "MB/s", "loader"),
    Col("sample_bytes", "B"),
    Col("compute_s", "s", "step without waiting for data"),
    Col("asked_mb_per_s", "MB/s", "asked for", lambda size, batch, s: size * batch / s / 1e6, ASKED),
    series("over_raw", "ratio", "loader over raw", lambda own, raw: list(map(truediv, own, raw)), RATES),
    Col("limit", "", "limit", _limit, f"asked_mb_per_s {RATES}"),
    Col("turn_samples_per_s", RATE, "", lambda size, own: 1e6 * median(own) / size, "sample_bytes loader_mb_per_s"),
    Col("turn_batch", "count", "", lambda turn, s: int(turn * s), "turn_samples_per_s compute_s"),
    Col("turn_gflop", "number", "", lambda flops, asked, own: flops * asked / median(own) / 1e9, TURNING),
]
disk = Table("disk", "disk", of_disk)
FLOOR = "token_entropy epoch_tokens samples_per_epoch global_batch"
run = training.run_of_training(
    *cols("page_cache batch_limited_by"),
    *cols("batch_per_rank samples_per_epoch steps_per_epoch epoch_tokens vocabulary batch_below", "count"),
    Col("sample_flops", "FLOP"),
    *cols("token_entropy lowest_loss", "number"),
    Col("floor", "number", "entropy less noise", _floor, FLOOR),
    Col("guess", "number", "", math.log, "vocabulary"),
    means("epoch_s", "s", "mean epoch"),
    Col("epoch_spread", "ratio", "", lambda walls: (max(walls) - min(walls)) / median(walls), "epoch_s"),
    Col("epochs_end_to_end", RATE, "", lambda n, walls: n * len(walls) / sum(walls), "samples_per_epoch epoch_s"),
    *cols("memory_limit_gb", "GB"),
    *cols("data_s", "s"),
)
tuned = engines.where(engine="tuned")


def _warnings(rows: Rows) -> list[str]:
    return stand_ins(str(rows.run.get("speed_scope")).split("_")) + training.warnings(rows)


def _one_epoch(row: Row, rows: Rows) -> str:
    return "one epoch does not vary" if len(run["epoch_s"].numbers(row, rows)) == 1 else ""


SPREAD, RAW = "slowest less fastest epoch over the median", "the same shards, interleaved with the loader"
WAIT = counted_steps["data_wait_share"]
NO_LEAK = "Is the loss never below the entropy of the data (no label leakage)?"
ALIKE = "Do the plain and the tuned engine compute the same losses?"
CACHED = "Were the shards in the page cache, or not, as asked for before each epoch?"
TURNS, PAIRS = "interleaved steps on the same batches", "median over pairs of interleaved steps on the same batches"
WALL = "mean wall time of the counted epochs, after those to warm up"
FITS = "{batch_per_rank} samples of a device fit within {memory_limit_gb}"
SEARCHED = {
    "memory": f"{FITS}, {{batch_below}} do not.",
    "samples": f"{FITS}, and there are no more to try.",
    "time": f"{FITS}; the search took its share of the budget.",
}
FASTER, SLOWEST = "Tuned does {ratios} the work of the usual loop{undecided}", "Epoch {epoch} takes longest: {seconds}"
MUTE: Row = {"mute": lambda row: not row["counted"], "empty": "No epoch was finished."}
FIT, UNTRIED = "{batch} samples fit in {peak_gb}", "No batches were tried: batch=auto does."
ASKS = "The training asks for {asked_mb_per_s}, the loader gives {loader_mb_per_s}"
NO_DISK = "No disk was measured: data_dir and a whole shard of samples do."
DISK = "raw_mb_per_s checked_mb_per_s loader_mb_per_s asked_mb_per_s limit turn_samples_per_s turn_batch"
FILE = "one JSON file per run of seq2seq: metadata, config, epochs, summary"
SPEC = Spec(
    tables=[*training.TABLES, engines, epochs, batches, disk, run],
    metrics=[
        *training.metrics(run, FORMULA, loss_may_lose=0.05, tokens="of source and target together"),
        lower("epoch_s{speed_scope}", run["epoch_s"], "Time per epoch", WALL, may_lose=0.25, headline=True),
        lower("epoch_spread{speed_scope}", run["epoch_spread"], "", SPREAD, unless=_one_epoch),
        higher("end_to_end_samples_per_s{speed_scope}", run["epochs_end_to_end"], "", "over the counted epochs"),
        lower("data_wait_share{scope}", WAIT, "Waiting for data", "worst rank", headline=True),
        higher("{engine}_samples_per_s{scope}", engines["rates"], "Rate, {engine}", TURNS),
        higher("tuned_over_plain{scope}", tuned["ratios"], "Tuned over plain", PAIRS, may_lose=0.15, headline=True),
        lower("compile_s", tuned["compile_s"], "Compiling", "first pass of the tuned engine beyond a later one"),
        higher("disk_raw_mb_per_s", disk["raw_mb_per_s"], "Disk, raw sequential", RAW),
        higher("loader_mb_per_s", disk["loader_mb_per_s"], "Loader alone", "all ranks at once"),
        Metric("data_asked_mb_per_s", disk["asked_mb_per_s"], "Data asked for", "of a training that never waits"),
        higher("loader_over_raw", disk["over_raw"], "Loader over raw", "by round"),
        lower("data_s", run["data_s"], "Opening the samples"),
    ],
    checks=[
        *training.checks("whole set"),
        # Of the first epoch, where every sample is new: later ones can be learnt by heart.
        below("loss above entropy", NO_LEAK, (run["floor"], run["lowest_loss"])),
        same("engines agree", ALIKE, engines["loss"], per="", share=engines["tolerance"]),
        below("page cache", CACHED, (epochs["astray"], ASTRAY)),
    ],
    says=[
        *training.SPEED,
        each(
            tuned.where(ratios=bool), "The tuned engine does {ratios} the work of the usual loop, {rates}{undecided}."
        ),
        each(
            run,
            "The smoothed loss goes from {loss_first} to {loss_final}: guessing evenly gives {guess}, knowing how often each "
            "token comes {token_entropy}.",
        ),
        each(
            disk.ran(),
            "The training asks for {asked_mb_per_s} and the loader gives {loader_mb_per_s}: {limit} holds it back. "
            "That turns at {turn_samples_per_s}: a model of {turn_gflop} GFLOP per sample at this speed, or a batch of "
            "{turn_batch} samples in all.",
        ),
        *(each(run.where(batch_limited_by=limit), words) for limit, words in SEARCHED.items()),
    ],
    shows=[
        Show("Epochs", epochs, "epoch seconds loss cached"),
        Show("Engines, interleaved", engines.ran(), "engine step_s rates ratios"),
        Show("Disk", disk.ran(), DISK),
        Show("Batches tried", batches),
        *training.SHOWS,
    ],
    charts=[
        bars("engines", engines["rates"], title=FASTER, about=tuned, empty="No engine ran."),
        bars("epochs", epochs["seconds"], title=SLOWEST, **MUTE),
        *training.charts(run),
        bars("batches", batches["peak_gb"], title=FIT, empty=UNTRIED),
        bars("disk", *(disk[f"{name}_mb_per_s"] for name in ("raw", "loader", "asked")), title=ASKS, empty=NO_DISK),
    ],
    verified=each(run, "{trained_samples} samples, the loss between entropy and guessing, equal weights on all ranks"),
    bounds=[
        training.bound("Encoder-decoder training"),
        Bound(
            "Loading samples",
            disk.ran()["loader_mb_per_s"],
            disk["over_raw"],
            "of reading the same shards raw",
            "{limit} holds it back",
        ),
    ],
    whole=training.whole,
    warnings=_warnings,
    recorded=training.recorded,
    exports=[("bench", FILE, "benchlib.benchmarks.seq2seq.export:write")],
    rate="train_samples_per_s",
    energy="energy_per_sample_j",
    batch=["batch_size"],
    # ``samples``: an epoch's items are compared, which a cut to the budget leaves as they are.
    ways=[
        *("samples", "engine", "compile", "compare_steps", "data_dir", "token_bytes", "page_cache", "read_ahead"),
        *("read", "memory_share", "memory_gb", "batch", "num_shards", "warmup_epochs"),
    ],
)
