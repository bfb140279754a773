"""What a run of the strategies states: each one's proof against one device, its steps and their parts, memory and scaling."""

from collections.abc import Iterator
from functools import partial
from operator import mul, truediv
from statistics import median
from typing import Any

from benchlib.benchmarks.parallel import bottleneck, pictures
from benchlib.benchmarks.parallel.bottleneck import PARTS, PLANTED
from benchlib.benchmarks.parallel.estimate import bubble_share
from benchlib.benchmarks.parallel.scaling import MOST_OFF
from benchlib.core.stats import summary
from benchlib.core.text import listing, quantity
from benchlib.judge.checks import Check as Judged
from benchlib.spec.charts import Chart, Line, bars, lines, stacked
from benchlib.spec.checks import Check, below, near, ran, rule, same, within, zero
from benchlib.spec.spec import Metric, Show, Spec, each, run_metrics, run_table
from benchlib.spec.tables import Col, Row, Rows, Table, cols

LOSS_FP64, WEIGHT_FP64, FP32 = 1e-12, 1e-9, 1e-5  # how far from one device; rounding alone is 1e-15, 1e-11 and 5e-7
RECOMPUTED = 1e-12
# Losses of the measured model, as a share: sums in another order over some steps. Measured: below 1e-6, in bf16 2e-3.
LOSSES = {"fp32": 1e-4, "bf16": 2e-2}
MEMORY = [f"estimated_{part}_gb" for part in ("parameters", "gradients", "optimizer", "activations", "buffers")]
STEP_PARTS = [f"{part}_part_s" for part in PARTS]
SLOWEST = "slowest of {world} ranks"
STEPS, RATE, NONE = "batch_size steps_s", "samples/s", "No strategy was measured."
LARGEST = "{largest_batch} samples are the largest batch of one device that was found ({search_complete})"
PEAK = "Peak of matrix products"
SLOWED = {"data": "data", "rank": "the last rank", "communication": "the exchange of DDP"}


def _setup(batch: int, seq: int, precision: str, checkpointing: bool, compiled: bool, micro: int) -> str:
    words = ["checkpointing"] * checkpointing + ["compile"] * compiled + [f"{micro} micro-batches"] * (micro > 1)
    return ", ".join([f"{batch} x {seq} tokens", precision, *words])


def _ends(batch: int, steps: list[float]) -> tuple[float | None, float | None]:
    """Return the interval of a rate; None where so few steps have none."""
    found = summary(steps)
    return (batch / found.ci_high, batch / found.ci_low) if found.ci_low and found.ci_high else (None, None)


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
        *cols("model strategy schedule scaling obstacle checkpointing compile"),
        *cols("data tensor pipeline context micro_batches", "number"),
        Col("precision", role="compute.precision"),
        Col("world", "number", "ranks", role="compute.ranks"),
        Col("batch_size", "number", role="speed.batch_per_rank"),
        Col("seq_len", "number", role="speed.sequence_length"),
        *cols("parameters counted_parameters", "count"),
        Col("losses"),
        Col("steps_s", "s", "step", samples=True, role="speed.step_s"),
        *(Col(f"{phase}_s", "s", phase) for phase in ("forward", "backward", "optimizer", "data")),
        *cols("rank_own_s comm_s exposed_s compute_s predicted_step_s", "s"),
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
        Col("because", "", "why", str, "reason"),
        Col("way", "", "", "{} {}".format, "strategy schedule"),
        Col("hardware", "", "", "{} x {}".format, "world device"),
        Col("configuration", "", "", _setup, "batch_size seq_len precision checkpointing compile micro_batches"),
        Col("rates", RATE, "", lambda batch, steps: [batch / step for step in steps], STEPS, samples=True),
        Col("low", RATE, "", lambda batch, steps: _ends(batch, steps)[0], STEPS),
        Col("high", RATE, "", lambda batch, steps: _ends(batch, steps)[1], STEPS),
        Col("samples_per_s", RATE, RATE, lambda n, steps: n / median(steps), STEPS, role="speed.samples_per_s"),
        Col("tokens_per_s", "tokens/s", "tokens/s", mul, "samples_per_s seq_len", role="speed.tokens_per_s"),
        Col(
            "flops_per_s", "FLOP/s", "", lambda n, steps: n / median(steps), "flops steps_s", role="compute.flops_per_s"
        ),
        Col("mfu", "ratio", "MFU", truediv, "flops_per_s peak_flops", role="compute.mfu"),
        Col("peak_gb", "GB", "memory of the fullest rank", lambda held: max(held) / 1e9, "peak_bytes", derived=False),
        Col("estimated_gb", "GB", "estimate", lambda *parts: sum(parts), " ".join(MEMORY)),
        Col("explained", "ratio", "", truediv, "estimated_gb peak_gb"),
        Col(
            "expected_s",
            "s",
            "predicted",
            lambda s, off: s if off <= MOST_OFF else None,
            "predicted_step_s model_error",
        ),
        Col("ideal_bubble", "ratio", "of equal stages", bubble_share, "pipeline micro_batches schedule"),
    ],
)
traced = [key, *cols("scaling"), *cols("time_s", "s"), *cols("bytes", "B"), *cols("calls", "number")]
kernels = Table("kernels", "{class} of {key}", [*traced, *cols("class"), *cols("flops", "FLOP")])
exchanges = Table("communication", "{kind} of {key}", [*traced, *cols("kind"), *cols("exposed_s", "s")])
stages = Table(
    "stages",
    "{key}, stage {stage}, micro-batch {micro_batch}",
    [key, *cols("scaling phase"), *cols("stage micro_batch rank", "number"), *cols("start_s end_s", "s")],
)
wrong = Col("wrong_elements", "count", role="collective.wrong_elements")
links = Table(
    "alpha_beta", "{op}", [*cols("op"), *cols("world", "number"), *cols("alpha_s beta_s_per_byte", "s"), wrong]
)
points = Table(
    "scaling",
    "{key}, {kind}, {world}",
    [
        key,
        Col("kind", label="scaling"),
        Col("source", label="from"),
        Col("world", "number", "devices"),
        Col("samples_per_s", RATE, RATE),
        Col("efficiency", "ratio", derived=True),
        *cols("low high", "ratio"),
        Col("predicted", "ratio", "model"),
        Col("error", "ratio", "measured over model, less 1", signed=True),
    ],
)
batches = Table(
    "batches",
    "{batch}",
    [*cols("batch", "number"), *cols("fits"), *cols("peak_gb", "GB"), *cols("samples_per_s", RATE)],
)
run = run_table(
    Col("precision"),
    Col("search_complete", words={"True": "the search was whole", "False": "it ended with its share of the budget"}),
    *cols("rank_flops rank_flops_fp32 alone_flops", "FLOP/s"),
    *cols("copy_bytes_per_s", "B/s"),
    *cols("memory_bytes", "B"),
    *cols("parameters proof_steps largest_batch too_large_batch", "count"),
    Col("learning_rate_min", "number", role="learning.learning_rate_min"),
    Col("checkpointing_error", "error", "gradients apart by"),
    Col("model_error", "ratio"),
    Col("peak", "FLOP/s", "", mul, "rank_flops world", derived=False),
)
asked = strategies.where(scaling="")
main = asked.ran()
fastest = main.most("samples_per_s")
spread = main.pick(lambda run, rows: [row for row in rows if row["world"] > 1] or rows).most("samples_per_s")
measured = points.where(source="measured")
last = measured.pick(lambda run, rows: [row for row in rows if row["world"] == run.world])


def _planted(check: Check, run: Rows) -> Judged:
    """Look for what was planted, in DDP alone where the exchange was slowed down."""
    planted = run.config.planted
    hit = [row for row in main.rows(run) if row["world"] > 1]
    seen = {row["key"]: row["bottleneck"] for row in hit if planted != "communication" or row["strategy"] == "data"}
    missed = [f"{key}: {PARTS[part]}" for key, part in seen.items() if part != PLANTED[planted]]
    reason = "; ".join(missed) or f"{PARTS[PLANTED[planted]]} in {len(seen)} strategies"
    return check.answer("PASS" if seen and not missed else "FAIL", reason)


def _advice(run: Rows) -> Iterator[str]:
    """Say what holds the fastest strategy over the ranks back, which one to take, and how good the model's predictions were."""
    for row in spread.rows(run):
        yield "Bottleneck: " + bottleneck.sentence(row, run.run["rank_flops"])
        lacks = bool(asked.where(strategy="single", obstacle="memory").rows(run))
        yield "Advice: " + bottleneck.advice(main.rows(run), run.run["memory_bytes"], lacks)
    if (off := run.run.get("model_error")) is not None:
        missed = f"No prediction: measured steps are {off:.0%} off the model's (median), more than {MOST_OFF:.0%}."
        yield missed if off > MOST_OFF else f"The model predicted the steps to {off:.0%} (median)."


def _side_by_side(run: Rows) -> str:
    """Name the fastest strategy, and those that the noise does not tell from it."""
    best, *others = bottleneck.fastest(main.rows(run))
    rate = f"{quantity(bottleneck.rate(best))} samples/s"
    if alike := [bottleneck.name(row) for row in others if bottleneck.same(row, best)]:
        return f"{listing([bottleneck.name(best), *alike])}: equal within the noise, up to {rate}"
    return f"{bottleneck.name(best)}{' is fastest' if others else ''}: {rate}"


def _explained(run: Rows) -> str:
    shares = [share for row in main.rows(run) if (share := main["explained"].finite(row, run))]
    if not shares:
        return "Estimated memory; nothing was measured"
    ends = dict.fromkeys(f"{share:.0%}" for share in (min(shares), max(shares)))
    return f"The model explains {' to '.join(ends)} of the measured memory"


def _efficient(run: Rows) -> str:
    best = max((row["efficiency"] for row in last.rows(run)), default=0.0)
    title = f"{best:.0%} efficiency on {run.world} devices at best"
    if (off := run.run.get("model_error")) is not None:
        title += f"; {'no prediction, ' if off > MOST_OFF else ''}the model's step is off by {off:.0%} (median)"
    return title


def _warnings(run: Rows) -> list[str]:
    """Return what limits the meaning of the result."""
    config, said = run.config, ["The tokens are random: rates hold for any text, losses say nothing about language."]
    if config.model == "tiny":
        said.append(
            "Model tiny is a stand-in: in its short steps launching and exchanges weigh more than in a real one."
        )
    if config.planted:
        said.append(f"The slow-down was planted in {SLOWED[config.planted]}.")
    if config.backend == "cpu" and run.world > 1:
        said.append("Ranks are processes of CPUs: their exchanges take the same cores as their compute.")
    return said


def _no_proof(run: Rows) -> str:
    return "" if run.config.prove else "prove = false"


SPEC = Spec(
    tables=[strategies, kernels, exchanges, stages, links, points, batches, run],
    metrics=[
        Metric("step_s_{key}", main["steps_s"], "Step time, {key}", SLOWEST, "lower"),
        Metric("samples_per_s_{key}", main["rates"], "Training throughput, {key}", SLOWEST, "higher", 0.20),
        Metric(
            "mfu_{key}", main["mfu"], "Model FLOP utilisation, {key}", "of the measured peak of its ranks", "higher"
        ),
        Metric("peak_memory_gb_{key}", main["peak_gb"], "Memory, {key}", "the rank that holds most", "lower", 0.25),
        Metric(
            "{kind}_scaling_{key}", last["efficiency"], "{kind} scaling, {key}", "of {world} times one rank", "higher"
        ),
        Metric("samples_per_s_best", fastest["rates"], "Fastest strategy", "by {key}", "higher", 0.20, headline=True),
        Metric("matmul_peak_flops", run["peak"], PEAK, "{precision}, all ranks", "higher", headline=True),
        *run_metrics(run),
    ],
    checks=[
        ran("strategies ran", "Did the strategies run that fit this machine?", asked),
        below(
            "equal to one device in fp64",
            "Are losses and weights those of a single device after 6 steps, up to the rounding of fp64?",
            (main["loss_error"], LOSS_FP64),
            (main["weight_error"], WEIGHT_FP64),
            unless=_no_proof,
        ),
        below(
            "equal to one device in fp32",
            "Are losses and gradients those of a single device, up to the rounding of fp32?",
            (main["loss_error_fp32"], FP32),
            (main["gradient_error"], FP32),
            unless=_no_proof,
        ),
        same(
            "same losses",
            "Do all strategies compute the same losses in the measured steps?",
            main["losses"],
            per="model",
            share=lambda config: LOSSES[config.precision],
            unless=lambda run: "dropout draws other random numbers in each strategy" if run.config.dropout else "",
        ),
        near(
            "parameter count",
            "Do the ranks together hold as many parameters as the shape has?",
            (main["counted_parameters"], main["parameters"]),
        ),
        below(
            "recomputed activations",
            "Are activations that are computed again the same ones, dropout included?",
            (run["checkpointing_error"], RECOMPUTED),
        ),
        zero(
            "collectives right",
            "Is every element of every timed exchange correct?",
            links["wrong_elements"],
            rule="right results",
        ),
        rule("learning rate", "Was the learning rate above zero in every step?", "learning rate"),
        rule("possible speed", "Is every strategy's FLOP rate below the measured peak?", "below the peak"),
        within(
            "parts of a step",
            "Do data, forward, backward and optimizer explain every step of every rank?",
            # The slow-down of a rank is in none of the parts.
            (main["explained_shares"], lambda config: 0.9 / (1 + config.planted_slowdown)),
            most=1.01,
        ),
        Check(
            "planted bottleneck",
            "Is the fault that was planted the bottleneck that the waterfall names?",
            judge=_planted,
            when=lambda config: bool(config.planted),
        ),
    ],
    says=[
        "{samples_per_s_best[model]} ({samples_per_s_best[parameters]} parameters) trains fastest by {samples_per_s_best[way]}: "
        "{samples_per_s_best}, {samples_per_s_best[tokens_per_s]} on {samples_per_s_best[hardware]}.",
        each(
            run.where(largest_batch=lambda batch: batch > 0),
            f"{LARGEST}, {{too_large_batch}} are too many or were not tried.",
        ),
        each(run.where(largest_batch=0), "Not even one sample fits one device, as far as was searched."),
        _advice,
    ],
    shows=[
        Show(
            "Summary",
            main,
            "key configuration hardware samples_per_s tokens_per_s steps_s forward_s backward_s peak_gb mfu bottleneck",
        ),
        Show("Not run", asked.unless(obstacle=""), "key because"),
        Show("Where a step goes", main, " ".join(["key steps_s expected_s", *STEP_PARTS, "bottleneck faster_without"])),
        Show("Memory of the fullest rank", main, " ".join(["key", *MEMORY, "estimated_gb peak_gb explained"])),
        Show("Communication by kind", exchanges.where(scaling=""), "key kind calls bytes time_s exposed_s"),
        Show("Bubble", main.unless(schedule=""), "key bubble_share ideal_bubble"),
        Show("Scaling", points, "key kind world source samples_per_s efficiency low high predicted error"),
        Show("Largest batch", batches, "batch fits peak_gb samples_per_s"),
    ],
    charts=[
        bars(
            "strategies",
            main["samples_per_s"],
            title=_side_by_side,
            ends=(main["low"], main["high"]),
            mute=lambda row: bool(row["strategy"] == "single"),
            empty=NONE,
        ),
        Chart("waterfall", NONE, partial(pictures.waterfall, spread)),
        Chart("roofline", NONE, partial(pictures.roofline, spread, kernels)),
        stacked(
            "memory",
            *(main[name] for name in MEMORY),
            title=_explained,
            x="GB of the fullest rank",
            mark=main["peak_gb"],
            empty=NONE,
        ),
        lines(
            "scaling",
            Line(measured["efficiency"], "key kind"),
            Line(points["predicted"], "key kind", "claim", words="model"),
            x="world",
            y="efficiency",
            title=_efficient,
            empty="Scaling was not measured: scaling=both does.",
            log=False,
        ),
        Chart("stages", "No pipeline was measured.", partial(pictures.stages, main, stages)),
    ],
    warnings=_warnings,
    missed=lambda run: {"strategies": [row["strategy"] for row in asked.unless(obstacle="").rows(run)]},
    rate="samples_per_s_best",
    batch=("batch_size",),
    ways=(
        *("strategies", "coverage", "schedules", "data", "tensor", "pipeline", "shard", "scaling", "micro_batches"),
        *("checkpointing", "compile", "warmup", "steps", "prove", "find_max_batch", "memory_gb"),
    ),
)
