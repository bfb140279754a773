"""What a run of strategies states: each one's proof against one device, steps and their parts, memory, scaling."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from operator import attrgetter, mul, truediv
from statistics import harmonic_mean
from typing import Any

from benchlib.benchmarks.parallel import analysis
from benchlib.benchmarks.parallel.analysis import INJECTED, MAX_ERROR, PARTS
from benchlib.benchmarks.parallel.estimate import bubble_share
from benchlib.benchmarks.parallel.shapes import MODELS, STRATEGY_WORDS
from benchlib.core.stats import summary
from benchlib.core.text import listing, quantity
from benchlib.judge.checks import Check as Judged
from benchlib.spec.charts import Chart, Line, bars, lines, stacked
from benchlib.spec.checks import Check, above, below, listed, near, rule, zero
from benchlib.spec.spec import Bound, Metric, Show, Spec, each, run_metrics, run_table
from benchlib.spec.tables import Col, Row, Rows, Table, cols
from benchlib.workloads.same_check import same
from benchlib.workloads.training_spec import waits

LOSS_FP64, WEIGHT_FP64, FP32 = 1e-12, 1e-9, 1e-5  # how far from one device; rounding alone is 1e-15, 1e-11 and 5e-7
# Losses of the measured model, as a share: sums in another order over some steps. Measured: below 1e-6, in bf16 2e-3.
LOSSES = {"fp32": 1e-4, "tf32": 3e-3, "bf16": 2e-2}
MEMORY = [f"estimated_{part}_gb" for part in ("parameters", "gradients", "optimizer", "activations", "buffers")]
STEP_PARTS = [f"{part}_part_s" for part in PARTS]
RESULTS = (
    "configuration model way hardware samples_per_s tokens_per_s forward_ms backward_ms "
    "memory_efficiency performance_score efficiency_score"
)
SUMMARY, ROOFLINE = "key steps_s peak_gb mfu bottleneck", "intensity flops_per_s roof roof_share"
STATE_BYTES = 16  # of a parameter: weight, gradient and two moments of AdamW, each in fp32
SCALED = "of {world} times one device, all of whose steps count"
NAMED = "Is the injected slow-down named as the bottleneck?"
PICTURES = f"{__package__}.pictures"
ALL, PEAK = "all samples over all time, {world} ranks", "{precision}, all ranks"
TYPICAL = "median step, which ends when the last of {world} ranks ends it"
RATE, NONE = "samples/s", "No strategy was measured."


def _setup(batch: int, seq: int, precision: str, checkpointing: bool, compiled: bool, micro: int) -> str:
    words = ["checkpointing"] * checkpointing + ["compile"] * compiled + [f"{micro} micro-batches"] * (micro > 1)
    return ", ".join([f"{batch} x {seq} tokens", precision, *words])


def _ms(value: float) -> float:
    return 1e3 * value


def _with_best(run: Rows, rows: list[Row]) -> list[Row]:
    """Add the best samples/s of all strategies, and the best per rank: what the scores refer to."""
    rates = [strategies["samples_per_s"].finite(row, run) or 0.0 for row in rows]
    best = max(rates, default=0.0)
    best_rank = max((rate / row["world"] for rate, row in zip(rates, rows, strict=True)), default=0.0)
    return [{**row, "best_per_s": best, "best_rank_per_s": best_rank} for row in rows]


def _predicted(run: Rows, rows: list[Row]) -> list[Row]:
    return list(analysis.beyond(run, main.whole(run)))


def _end(name: str, rates: list[float]) -> float | None:
    """Return an end of a rate's interval; None where so few steps have none."""
    end: float | None = getattr(summary(rates, "harmonic"), name)
    return end


def _most_efficient(run: Rows, rows: list[Row]) -> list[Row]:
    """Keep the four curves with the highest ends: names of more would lie on each other."""
    ends = sorted((row for row in rows if row["world"] == run.world), key=lambda row: -row["efficiency"])[:4]
    names = [(row["key"], row["kind"]) for row in ends]
    return [row for row in rows if (row["key"], row["kind"]) in names]


def _claim(row: Row, run: Rows) -> dict[str, Any]:
    # A batch is stated for all ranks together: in tensor and pipeline parallelism no rank has a share of its own.
    stated = {"speed.ranks": 1, "speed.batches_full": True, "compute.peak_kind": "measured"}
    return stated | {"compute.peak_precision": row["precision"]}


key = Col("key", label="strategy")
strategies = Table(
    "strategies",
    "{key}",
    claim=_claim,
    cols=[
        key,
        *cols("model strategy schedule scaling obstacle checkpointing compile losses"),
        *cols("data shard pipeline tensor context micro_batches", "number"),
        Col("precision", role="compute.precision"),
        Col("world", "number", "ranks", role="compute.ranks"),
        Col("batch_size", "number", role="speed.batch_per_rank"),
        Col("seq_len", "number", role="speed.sequence_length"),
        *cols("parameters counted_parameters padding", "count"),
        Col("steps_s", "s", "typical step", samples=True, role="speed.step_s"),
        *cols("forward_s backward_s optimizer_s data_s", "s"),
        *cols("rank_own_s exposed_s compute_s predicted_step_s", "s"),
        *cols("loss_error weight_error loss_error_fp32 gradient_error", "error"),
        Col("bubble_share", "ratio", "bubble"),
        Col("explained_shares", "ratio", "explained by its parts"),
        Col("flops", "FLOP"),
        Col("peak_flops", "FLOP/s", role="compute.peak_flops"),
        Col("peak_bytes", "B"),
        *(Col(name, "GB", name.split("_")[1]) for name in MEMORY),
        *(Col(f"{part}_part_s", "s", words.removeprefix("the ")) for part, words in PARTS.items()),
        Col("bottleneck", words=PARTS),
        Col("faster_without", "number", "times as fast without"),
        Col("final_loss", "number", "", lambda losses: losses[-1], "losses", quality=1e-4),
        Col("losses_apart", "error", "", LOSSES.get, "precision"),
        Col("because", "", "why", str, "reason"),
        Col("way", "", "strategy", lambda *names: " ".join(filter(None, names)), "strategy schedule"),
        Col("hardware", "", "", "{} x {}".format, "world device"),
        Col("configuration", "", "", _setup, "batch_size seq_len precision checkpointing compile micro_batches"),
        Col("rates", RATE, RATE, analysis.rates, "batch_size steps_s", samples=True, average="harmonic"),
        Col("low", RATE, "", partial(_end, "ci_low"), "rates"),
        Col("high", RATE, "", partial(_end, "ci_high"), "rates"),
        Col("samples_per_s", RATE, RATE, harmonic_mean, "rates", role="speed.samples_per_s"),
        Col("tokens_per_s", "tokens/s", "tokens/s", mul, "samples_per_s seq_len", role="speed.tokens_per_s"),
        Col(
            "flops_per_s",
            "FLOP/s",
            "",
            lambda flops, rate, batch: flops * rate / batch,
            "flops samples_per_s batch_size",
            role="compute.flops_per_s",
        ),
        Col("mfu", "ratio", "MFU", truediv, "flops_per_s peak_flops", role="compute.mfu"),
        Col("peak_gb", "GB", "memory of the fullest rank", lambda held: max(held) / 1e9, "peak_bytes", derived=False),
        Col("estimated_gb", "GB", "estimate", lambda *parts: sum(parts), " ".join(MEMORY)),
        Col("explained", "ratio", "", truediv, "estimated_gb peak_gb"),
        Col(
            "expected_s",
            "s",
            "predicted",
            lambda s, off: s if off <= MAX_ERROR else None,
            "predicted_step_s model_error",
        ),
        Col("ideal_bubble", "ratio", "of equal stages", bubble_share, "pipeline micro_batches schedule"),
    ],
)
traced = [*cols("scaling class"), *cols("time_s", "s"), *cols("bytes", "B"), *cols("calls", "number")]
kernels = Table("kernels", "{class} of {key}", [key, *traced, *cols("flops", "FLOP")])
operations = Table(
    "operations",
    "{operation} of {key}",
    [
        key,
        Col("operation"),
        *traced,
        Col("flops", "FLOP"),
        Col("intensity", "FLOP/B", "FLOP per byte", truediv, "flops bytes"),
        Col("flops_per_s", "FLOP/s", "reached", truediv, "flops time_s"),
        Col("roof", "FLOP/s", "", lambda peak, *way: min(peak, mul(*way)), "rank_flops intensity copy_bytes_per_s"),
        Col("roof_share", "ratio", "share of the roof", truediv, "flops_per_s roof"),
    ],
)
passes = [key, *cols("scaling phase"), *cols("stage micro_batch rank", "number"), *cols("start_s end_s", "s")]
stages = Table("stages", "{key}, stage {stage}, micro-batch {micro_batch}", passes)
wrong = Col("wrong_elements", "count", role="collective.wrong_elements")
fitted = [*cols("op"), *cols("world", "number"), *cols("alpha_s beta_s_per_byte", "s"), wrong]
links = Table("alpha_beta", "{op}", fitted)
place = [key, Col("kind", label="scaling"), Col("world", "number", "devices"), Col("samples_per_s", RATE, RATE)]
efficiency = [Col("efficiency", "ratio", derived=True), *cols("low high", "ratio"), Col("predicted", "ratio", "model")]
error = Col("error", "ratio", "measured over model, less 1", signed=True)
points = Table("scaling", "{key}, {kind}, {world}", [*place, *efficiency, error])
trial = [
    key,
    *cols("batch", "number"),
    *cols("fits largest"),
    Col("complete", label="search", words={"True": "to a sixteenth", "False": "ended with its share of the time"}),
    Col("peak_gb", "GB", "memory of the fullest rank"),
]
batches = Table("batches", "{batch} samples by {key}", [*trial, Col("samples_per_s", RATE, RATE)])
largest = batches.ran().where(largest=True)
run = run_table(
    Col("precision"),
    *cols("rank_flops alone_flops", "FLOP/s"),
    *cols("copy_bytes_per_s", "B/s"),
    *cols("memory_bytes", "B"),
    Col("learning_rate_min", "number", role="learning.learning_rate_min"),
    Col("model_error", "ratio"),
    Col("peak", "FLOP/s", "", mul, "rank_flops world", derived=False),
)
asked = strategies.where(scaling="")
main = asked.ran()
# The rows with their scores, each by the formula in its ``of``.
results = replace(
    main,
    cols=[
        *main.cols,
        Col("forward_ms", "ms", "forward", _ms, "forward_s"),
        Col("backward_ms", "ms", "backward", _ms, "backward_s"),
        Col(
            "memory_efficiency",
            "ratio",
            of=lambda parameters, held: STATE_BYTES * parameters / sum(held),
            needs="parameters peak_bytes",
        ),
        Col("performance_score", "number", of=lambda rate, best: 100 * rate / best, needs="samples_per_s best_per_s"),
        Col(
            "efficiency_score",
            "number",
            of=lambda rate, world, best: 100 * rate / world / best,
            needs="samples_per_s world best_rank_per_s",
        ),
    ],
    picks=(*main.picks, _with_best),
)
more_ranks = [key, Col("kind", label="scaling"), Col("world", "number", "devices, predicted")]
more_ranks += [Col("samples_per_s", RATE, "samples/s, predicted"), Col("efficiency", "ratio", "efficiency, predicted")]
predictions = Table(
    "strategies", "{key}, {kind}, {world}", [*more_ranks, replace(error, label="error of the model here")]
)
predictions = predictions.pick(_predicted)
fastest = main.most("samples_per_s")
spread = main.pick(lambda run, rows: [row for row in rows if row["world"] > 1] or rows).most("samples_per_s")
last = points.pick(lambda run, rows: [row for row in rows if row["world"] == run.world])
best = last.most("efficiency")
drawn = points.pick(_most_efficient)
# What checks compare, with its limit.
fp64 = ((main["loss_error"], LOSS_FP64), (main["weight_error"], WEIGHT_FP64))
fp32 = ((main["loss_error_fp32"], FP32), (main["gradient_error"], FP32))
losses, apart = main["losses"], main["losses_apart"]
counted = (main["counted_parameters"], main["parameters"])
explained = (main["explained_shares"], lambda config: 0.9 / (1 + config.planted_slowdown))  # which is in no part
memory = [main[name] for name in MEMORY]


def _ran(check: Check, run: Rows) -> Judged:
    """FAIL where a strategy broke, or none ran; one that was skipped says why."""
    words: dict[str, list[str]] = {"failed": [], "skipped": []}
    for row in asked.unless(status="ok").rows(run):
        known = row.get("status") == "skipped" and row.get("reason")
        words["skipped" if known else "failed"].append(
            f"{asked.name_of(row, run)}: {row.get('reason') or 'no reason is given'}"
        )
    good = len(main.rows(run))
    reason = f"{good} ran" + "".join(f"; {word}: {listed(rows)}" for word, rows in words.items() if rows)
    return check.answer("FAIL" if words["failed"] or not good else "PASS", reason)


def _injected(check: Check, run: Rows) -> Judged:
    """Look for the injected slow-down, in DDP alone where the exchange was slowed down."""
    injected = run.config.planted
    hit = [row for row in main.rows(run) if row["world"] > 1]
    seen = {row["key"]: row["bottleneck"] for row in hit if injected != "communication" or row["strategy"] == "data"}
    missed = [f"{key}: {PARTS[part]}" for key, part in seen.items() if part != INJECTED[injected]]
    reason = "; ".join(missed) or f"{PARTS[INJECTED[injected]]} in {len(seen)} strategies"
    return check.answer("PASS" if seen and not missed else "FAIL", reason)


def _advice(run: Rows) -> Iterator[str]:
    """Say what holds the fastest strategy over the ranks back, which to take, and how good the predictions were."""
    for row in spread.whole(run):
        yield "Bottleneck: " + analysis.sentence(row, run.run["rank_flops"])
        lacks = bool(asked.where(strategy="single", obstacle="memory").rows(run))
        yield "Advice: " + analysis.advice(main.whole(run), run.run["memory_bytes"] / 1e9, lacks)
    if (off := run.run.get("model_error")) is not None:
        missed = f"No prediction: measured steps are {off:.0%} off the model's (median), more than {MAX_ERROR:.0%}."
        yield missed if off > MAX_ERROR else f"The model predicted the steps to {off:.0%} (median)."


def _side_by_side(run: Rows) -> str:
    """Name the fastest strategy, and those that the noise does not tell from it."""
    best, *others = sorted(main.whole(run), key=lambda row: -row["samples_per_s"])
    rate = f"{quantity(best['samples_per_s'])} samples/s"
    if alike := [row["way"] for row in others if analysis.same(row, best)]:
        return f"{listing([best['way'], *alike])}: equal within the noise, up to {rate}"
    return f"{best['way']}{' is fastest' if others else ''}: {rate}"


def _explained(run: Rows) -> str:
    shares = [share for row in main.rows(run) if (share := main["explained"].finite(row, run))]
    ends = dict.fromkeys(f"{share:.0%}" for share in (min(shares, default=0), max(shares, default=0)))
    return f"The model explains {' to '.join(ends)} of the measured memory" if shares else "Estimated memory"


def _efficient(run: Rows) -> str:
    best = max((row["efficiency"] for row in last.rows(run)), default=0.0)
    title = f"{best:.0%} efficiency on {run.world} devices at best"
    if (off := run.run.get("model_error")) is not None:
        title += f"; {'no prediction, ' if off > MAX_ERROR else ''}the model's step is off by {off:.0%} (median)"
    return title


def _warnings(run: Rows) -> Iterator[str]:
    yield "The tokens are random: rates hold for any text, losses say nothing about language."
    if run.config.model == "tiny":
        yield "Model tiny is a stand-in: in its short steps launching and exchanges weigh more than in a real one."
    if run.config.planted:
        yield f"A slow-down was injected on purpose: {run.config.planted}."
    yield from waits(run)
    if run.config.backend == "cpu" and run.world > 1:
        yield "Ranks are processes of CPUs: their exchanges take the same cores as their compute."


def _no_proof(run: Rows) -> str:
    return "" if run.config.prove else "prove = false"


SPEC = Spec(
    tables=[strategies, kernels, operations, stages, links, points, batches, run],
    metrics=[
        Metric("step_s_{key}", main["steps_s"], "Typical step, {key}", TYPICAL, "lower"),
        Metric("samples_per_s_{key}", main["rates"], "Training throughput, {key}", ALL, "higher", 0.20),
        Metric("mfu_{key}", main["mfu"], "Model FLOP utilisation, {key}", "of its ranks' measured peak", "higher"),
        Metric("peak_memory_gb_{key}", main["peak_gb"], "Memory, {key}", "the rank that holds most", "lower", 0.25),
        Metric("{kind}_scaling_{key}", last["efficiency"], "{kind} scaling, {key}", SCALED, "higher"),
        Metric("samples_per_s_best", fastest["rates"], "Fastest strategy", "by {key}", "higher", 0.20, headline=True),
        Metric("matmul_peak_flops", run["peak"], "Peak of matrix products", PEAK, "higher", headline=True),
        *run_metrics(run),
    ],
    checks=[
        Check("strategies ran", "Did the strategies run that fit this machine?", judge=_ran),
        below("equal to one device in fp64", "Are losses and weights those of one device?", *fp64, unless=_no_proof),
        below("equal to one device in fp32", "Are losses and gradients those of one device?", *fp32, unless=_no_proof),
        same("same losses", "Do all strategies compute the same losses?", losses, "model", apart),
        near("parameter count", "Do the ranks together hold as many parameters as the shape has?", counted),
        zero("collectives right", "Is every timed exchange correct?", links["wrong_elements"], rule="right results"),
        rule("learning rate", "Was the learning rate above zero in every step?", "learning rate"),
        rule("possible speed", "Is every strategy's FLOP rate below the measured peak?", "below the peak"),
        above("parts of a step", "Do its timed parts explain every step of every rank?", explained, most=1.01),
        Check("injected bottleneck", NAMED, judge=_injected, when=attrgetter("planted")),
    ],
    says=[
        each(
            fastest, "{model} ({parameters} parameters) trains fastest by {way}: {rates}, {tokens_per_s} on {hardware}."
        ),
        each(
            main.where(padding=bool),
            "{strategy} pads the vocabulary by {padding} rows, so that its ranks can share it; their outputs are in no loss.",
        ),
        each(largest, "{key} takes batches of up to {batch} samples, which need {peak_gb} per rank."),
        _advice,
    ],
    shows=[
        Show("Results", results, RESULTS),
        Show("Summary", main, SUMMARY),
        Show("Not run", asked.unless(obstacle=""), "key because"),
        Show("Where a step goes", main, " ".join(["key steps_s expected_s", *STEP_PARTS, "bottleneck faster_without"])),
        Show("Operations under the roofline", operations, f"key operation class time_s calls {ROOFLINE}"),
        Show("Memory of the fullest rank", main, " ".join(["key", *MEMORY, "estimated_gb peak_gb explained"])),
        Show("Largest batch", largest, "key batch peak_gb samples_per_s complete"),
        Show("Batches tried", batches, "key batch fits peak_gb samples_per_s"),
        Show("Bubble", main.unless(schedule=""), "key bubble_share ideal_bubble"),
        Show("Scaling", points, "key kind world samples_per_s efficiency low high predicted error"),
        Show("Predicted for more devices", predictions, "key kind world samples_per_s efficiency error"),
    ],
    charts=[
        bars(
            "strategies", main["rates"], title=_side_by_side, mute=lambda row: row["strategy"] == "single", empty=NONE
        ),
        Chart(f"{PICTURES}:waterfall", "waterfall", spread, empty=NONE),
        Chart(f"{PICTURES}:roofline", "roofline", spread, kernels, empty=NONE),
        stacked("memory", *memory, title=_explained, x="GB of the fullest rank", mark=main["peak_gb"], empty=NONE),
        lines(
            "scaling",
            Line(drawn["efficiency"], "key kind"),
            Line(drawn["predicted"], "key kind", "claim", words="model"),
            x="world",
            y="efficiency",
            title=_efficient,
            empty="Scaling was not measured: scaling=both does.",
            log=False,
        ),
        Chart(f"{PICTURES}:stages", "stages", main, stages, empty="No pipeline was measured."),
    ],
    verified=each(fastest, "every strategy against one device in fp64, every timed exchange"),
    bounds=[
        Bound(
            "{way} over {world} ranks",
            spread["samples_per_s"],
            spread["mfu"],
            "of the ranks' measured peak",
            "most of the time goes to {bottleneck}",
        ),
        Bound("Scaling of {key} ({kind})", best["samples_per_s"], best["efficiency"], "of {world} times one rank"),
    ],
    warnings=_warnings,
    missed=lambda run: {"strategies": [row["strategy"] for row in asked.unless(obstacle="").rows(run)]},
    rate="samples_per_s_best",
    batch=("batch_size",),
    ways=(
        *("strategies", "coverage", "schedules", "data", "tensor", "pipeline", "shard", "scaling", "micro_batches"),
        *("checkpointing", "compile", "fused_loss", "warmup", "steps", "prove", "memory_gb", "find_max_batch"),
    ),
    choices={
        "model": {
            name: f"{shape.kind}, {shape.parameters:,} parameters in {shape.layers} layers"
            for name, shape in MODELS.items()
        },
        "strategy": STRATEGY_WORDS,
    },
)
