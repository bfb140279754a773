"""What a run means: its checks and limits, the claims that the rules of impossible numbers test, and the reading."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchlib.benchmarks.seq2seq.config import Seq2seqConfig
from benchlib.core.stats import drift_text, smoothed, smoothing_window
from benchlib.core.text import counted, quantity, seconds
from benchlib.judge.baselines import Comparison, regression_checks
from benchlib.judge.checks import (
    Ask,
    Check,
    agreement_check,
    asks,
    budget_check,
    finite_check,
    rule_check,
)
from benchlib.judge.impossible.claim import Claim, Compute, Learning, Speed
from benchlib.judge.impossible.own import Numbers, OwnClaims, steps_claim, too_few_steps
from benchlib.judge.numbers import count, number, within
from benchlib.judge.regression import RegressionLimit
from benchlib.results.metrics import Metric
from benchlib.results.run import Result, Run

SHOWN = ("sample count", "learning rate", "loss falls", "below the peak")
# How far losses of the two engines may lie apart after some steps, as a share: sums in another order, and with mixed precision
# roundings at other places. Measured: 1e-6 and 2e-5.
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3, "fp16": 5e-3}
# Nats: of the density 1 / (2 sqrt(x)) the logarithm has the standard deviation of ln u for a uniform u, which is 1.
TOKEN_DEVIATION, DEVIATIONS = 1.0, 5.0
NOTICED = 0.05  # share of a step spent waiting for data above which the device is said to be held back


def lacks(table: str, row: Mapping[str, Any], column: str) -> bool:
    """Say whether a null has a reason: samples in memory, a fixed batch, a backend or sensor that tells nothing, few steps."""
    if table == "ranks":
        return column == "device_memory_gb" or too_few_steps(row, column)
    if table == "batches":  # of a trial that did not end
        return column in ("peak_gb", "samples_per_s") and bool(row.get("reason"))
    if table == "facts":
        identity = row.get("identity") or {}
        return (
            (column == "page_cache" and not identity.get("data_dir"))
            or (column == "data_limit" and bool(row.get("data_limit_reason")))
            or (column in ("memory_limit_gb", "batch_limited_by") and "batch_size" not in identity)
            # A search that was complete has nothing below its batch; not every system tells what its page cache holds.
            or column in ("batch_below", "page_cache.cached_before_each_epoch")
        )
    return table == "devices" and column != "device"


def limits(run: Run) -> list[RegressionLimit]:
    """Return how much worse each metric of a run may get than the baseline."""
    scope = _scope(run)
    return [
        RegressionLimit(metric=f"loss_final{scope}", share=0.05),
        RegressionLimit(metric=f"train_samples_per_s{scope}", share=0.20),
        RegressionLimit(metric=f"epoch_s{scope}", share=0.25),
        RegressionLimit(metric=f"tuned_over_plain{scope}", share=0.15),
        RegressionLimit(metric="device_memory_gb", share=0.25),
        RegressionLimit(metric="resident_memory_gb", share=0.25),
    ]


def _parts(run: Run) -> tuple[Seq2seqConfig, Result]:
    assert isinstance(run.config, Seq2seqConfig) and run.result is not None
    return run.config, run.result


def _scope(run: Run) -> str:
    config, result = _parts(run)
    return config.scope(count(result.facts["samples_per_epoch"], "samples_per_epoch"))


def checks(run: Run, comparison: Comparison) -> list[Check]:
    """Judge a run that has a result."""
    (config, result), stated = _parts(run), OwnClaims(Numbers.of_run(run))
    return [
        rule_check(
            "loss decreases",
            "Is the smoothed loss lower at the end than at the start?",
            "loss falls",
            stated,
            needed=True,
        ),
        _loss_above_entropy(result, run.samples),
        _engines_agree(config, result),
        _ranks_equal(config, result),
        rule_check("sample count", "Did every epoch train on every sample once?", "sample count", stated, needed=True),
        rule_check(
            "learning rate", "Was the learning rate above zero in every step?", "learning rate", stated, needed=True
        ),
        finite_check(stated),
        rule_check(
            "possible speed",
            "Is the achieved FLOP rate below the measured peak?",
            "below the peak",
            stated,
            missing=f"not measured: {_reason(result, 'matmul_peak_flops')}",
        ),
        agreement_check(stated, SHOWN),
        _whole_set(config, result),
        _page_cache(config, result),
        budget_check(run),
        *regression_checks(run, limits(run), comparison),
    ]


def _reason(result: Result, name: str) -> str:
    metric = result.metric(name)
    return metric.reason if metric else "the run has no such metric"


@asks("loss above entropy", "Is the loss never below the entropy of the data (no label leakage)?")
def _loss_above_entropy(ask: Ask, result: Result, samples: Mapping[str, Sequence[float]]) -> Check:
    """Check that no step of the first epoch, where every sample is new, is better than knowing the distribution allows.

    A decoder that sees what it has to predict gets below it. Later epochs may: samples can be memorised.
    """
    steps, tokens = (count(result.facts[name], name) for name in ("steps_per_epoch", "epoch_tokens"))
    floor, losses = number(result.facts["token_entropy"], "token_entropy"), samples["loss"]
    least = min(losses[:steps])
    noise = DEVIATIONS * TOKEN_DEVIATION / math.sqrt(max(1.0, tokens / max(1, steps)))
    reason = (
        f"lowest loss of the first epoch {least:.3f}, entropy of a token {floor:.3f} nats, noise of a step {noise:.3f}"
    )
    return ask.fact(within(least, least=floor - noise), reason, limit=f">= {floor - noise:.3f}", value=least)


@asks("engines agree", "Do the plain and the tuned engine compute the same losses?")
def _engines_agree(ask: Ask, config: Seq2seqConfig, result: Result) -> Check:
    """Compare the recorded losses of the engines, step by step."""
    if config.engine != "both":
        return ask.skipped(f"engine = {config.engine}: only one ran")
    rows = result.tables["engines"]
    if len(rows) != config.compare_steps:
        return ask.fact(False, f"losses of {len(rows)} steps instead of {config.compare_steps}")
    precision = str(result.facts["precision"])
    limit = LOSS_TOLERANCE[precision]
    worst = max(abs(row["tuned"] - row["plain"]) / abs(row["plain"]) for row in rows)
    reason = f"apart by at most {worst:.1e} of the loss in {counted(len(rows), 'step')} ({precision})"
    return ask.fact(within(worst, limit), reason, limit=f"<= {limit:g}", value=worst)


@asks("ranks equal", "Did all ranks hold the same weights at the end of each epoch?")
def _ranks_equal(ask: Ask, config: Seq2seqConfig, result: Result) -> Check:
    rows = result.facts["checksums"]
    same = len(rows) == config.epochs + 1 and all(len(row) == config.world_size and len(set(row)) == 1 for row in rows)
    ranks = counted(config.world_size, "rank")
    reason = f"{counted(len(rows), 'comparison')} of weight checksums over {ranks}" + ("" if same else ": they differ")
    return ask.fact(same, reason)


@asks("whole set", "Did the samples that were asked for fit the budget?")
def _whole_set(ask: Ask, config: Seq2seqConfig, result: Result) -> Check:
    """Check that the samples that were asked for fit the budget."""
    used = count(result.facts["samples_per_epoch"], "samples_per_epoch")
    if used == config.epoch_samples:
        return ask.fact(True, f"{used:,} samples an epoch, all of them")
    if not 0 < used < config.epoch_samples:
        return ask.fact(False, f"{used:,} samples an epoch of {config.epoch_samples:,} that were asked for")
    return ask.skipped(str(result.facts["plan_reason"]), gates=True)


@asks("page cache", "Were the shards in the page cache, or not, as asked for before each epoch?")
def _page_cache(ask: Ask, config: Seq2seqConfig, result: Result) -> Check:
    """Compare the page cache with what was asked for: rates of a disk that was not read are none."""
    if not config.data_dir or config.read == "direct":
        return ask.skipped("direct reads pass it by" if config.data_dir else "samples were generated in memory")
    shares = result.facts["page_cache"]["cached_before_each_epoch"]
    if shares is None:
        return ask.skipped("this system does not tell")
    cold = config.page_cache == "cold"
    inside = all(within(share, most=0.05) if cold else within(share, least=0.95) for share in shares)
    reason = (
        f"asked for {config.page_cache}; before the epochs {', '.join(f'{share:.0%}' for share in shares)} was in it"
    )
    return ask.fact(len(shares) == config.epochs + 1 and inside, reason, limit="<= 5%" if cold else ">= 95%")


def claims(numbers: Numbers) -> Iterator[Claim]:
    """Yield what a training states: its counted epochs, what it learnt, its operations."""
    value, ranks = numbers.value, numbers.world_size
    batch, seen = numbers.count("global_batch"), numbers.count("samples_seen")
    epochs, samples = getattr(numbers.config, "epochs", None), numbers.count("samples_per_epoch")
    sequence = getattr(numbers.config, "sequence", None)
    if seen is not None:
        yield Claim(
            subject="all epochs",
            speed=Speed(ranks=ranks, samples_counted=seen, samples_planned=numbers.count("samples_expected")),
        )
    walls = numbers.raw("epoch_s")
    if epochs and samples and walls:
        all_epochs = Speed(
            samples_per_s=value("end_to_end_samples_per_s"),
            ranks=ranks,
            features=samples,
            epochs=epochs,
            wall_s=sum(walls),
        )
        yield Claim(subject="counted epochs", speed=all_epochs)
    full = bool(batch and samples and samples % batch == 0)
    if (rate := value("train_samples_per_s")) is not None and batch and batch % ranks == 0:
        yield Claim(
            subject="counted steps",
            speed=Speed(
                samples_per_s=rate, tokens_per_s=value("train_tokens_per_s"), ranks=ranks, batch_per_rank=batch // ranks,
                step_s=numbers.raw("step_s") if full else [], batches_full=full,
                sequence_length=2 * sequence if sequence else None,
            ),
        )  # fmt: skip
    losses, rates = numbers.raw("loss"), numbers.facts.get("learning_rates")
    curve = smoothed(losses) if len(losses) > 1 else None
    learning = Learning(
        learning_rate_min=number(rates["min"], "learning_rates.min") if rates else None,
        loss_first=float(curve[smoothing_window(len(losses)) - 1]) if curve is not None else None,
        loss_last=float(curve[-1]) if curve is not None else None,
        shares={name: share for name in ("data_wait_share", "exchange_overlap") if (share := value(name)) is not None},
    )
    compute = Compute(
        flops_per_s=value("flops_per_s"),
        mfu=value("mfu"),
        ranks=ranks,
        precision=str(numbers.facts.get("precision") or ""),
        peak_precision=str(numbers.facts.get("precision") or ""),
        peak_flops=numbers.positive("matmul_peak_flops"),
        peak_kind="measured",
    )
    yield Claim(subject="training", learning=learning, compute=compute)
    yield steps_claim(numbers)


def reading(run: Run) -> list[str]:
    """Return sentences about speed, engines, learning, data and what the set was."""
    config, result = _parts(run)
    scope = _scope(run)
    drift = drift_text(run.samples.get(f"train_samples_per_s{scope}", []))
    sentences = [
        _speed(config, result, scope, drift),
        _engines(result, scope, run.samples.get(f"tuned_over_plain{scope}", [])),
        _learning(config, result, scope),
        data_sentence(result.facts, result.value(f"data_wait_share{scope}")),
        _batch(config, result),
        _validity(config, result, scope),
    ]
    return [sentence for sentence in sentences if sentence]


def _speed(config: Seq2seqConfig, result: Result, scope: str, drift: str) -> str:
    rate, epoch, mfu = (result.value(f"{name}{scope}") for name in ("train_samples_per_s", "epoch_s", "mfu"))
    if rate is None or epoch is None:
        return ""
    text = (
        f"{config.parameters:,} parameters train at {quantity(rate)} samples/s on "
        f"{counted(config.world_size, 'rank')} in {result.facts.get('precision')}, {result.facts.get('global_batch'):,} samples "
        f"a step; an epoch of {result.facts.get('samples_per_epoch'):,} samples takes {seconds(epoch)}"
    )
    if drift:
        text += f". The rate {drift} samples/s by quarter: no steady state"
    peak = result.metric("matmul_peak_flops")
    if mfu is not None and peak:
        text += f". That is {mfu:.1%} of the measured matrix-product peak ({peak.text}, {peak.reason.split(',')[0]})"
    return text + "."


def _engines(result: Result, scope: str, ratios: Sequence[float]) -> str:
    ratio = result.metric(f"tuned_over_plain{scope}")
    plain, tuned = (result.value(f"{name}_samples_per_s{scope}") for name in ("plain", "tuned"))
    if ratio is None or ratio.value is None or plain is None or tuned is None:
        return ""
    text = f"The tuned engine does {ratio.value:.2f} × the work of the usual loop ({quantity(tuned)} beside {quantity(plain)} samples/s"
    between = f", range {min(ratios):.2f} to {max(ratios):.2f} of n = {len(ratios)}" if len(ratios) > 1 else ""
    if ratio.ci_low is not None:
        between = f", 95% interval {ratio.ci_low:.2f} to {ratio.ci_high:.2f}"
    compiled = result.value("compile_s")
    text = f"{text}, in turns{between})" + (f", after {seconds(compiled)} of compiling" if compiled else "")
    return f"{text}{': undecided which is faster' if undecided(ratio, ratios) else ''}."


def undecided(ratio: Metric, ratios: Sequence[float]) -> bool:
    """Tell whether the interval of a ratio, or its range where the samples are too few for one, holds 1."""
    low, high = ratio.ci_low, ratio.ci_high
    if low is None or high is None:
        low, high = min(ratios, default=ratio.value or 1.0), max(ratios, default=ratio.value or 1.0)
    return len(ratios) > 1 and low <= 1 <= high


def _learning(config: Seq2seqConfig, result: Result, scope: str) -> str:
    first, last = (result.value(f"{name}{scope}") for name in ("loss_first", "loss_final"))
    floor = result.facts.get("token_entropy")
    if first is None or last is None or not isinstance(floor, int | float):
        return ""
    guess = math.log(config.vocabulary)
    place = (
        "between the two"
        if floor <= last <= guess
        else "above guessing: too few steps"
        if last > guess
        else "below entropy: learnt by heart"
    )
    return (
        f"The loss went from {first:.3f} to {last:.3f}. Guessing evenly gives ln {config.vocabulary:,} = {guess:.3f}, knowing how "
        f"often each token comes {floor:.3f}: the end is {place}."
    )


def data_sentence(facts: dict[str, Any], waited: float | None) -> str:
    """Say whether data hold the device back, and at which model that turns."""
    if waited is None:
        return ""
    text = f"The device waits for data for {waited:.1%} of a step"
    limit = facts.get("data_limit")
    if not isinstance(limit, dict) and isinstance(facts.get("page_cache"), dict):
        return f"{text}. Whether the disk would limit it is not known: {facts.get('data_limit_reason')}."
    if not isinstance(limit, dict):
        return text + (
            ": the making of samples in memory keeps up." if waited < NOTICED else ": making the samples holds it back."
        )
    asked, given = limit["asked_bytes_per_s"] / 1e6, limit["given_bytes_per_s"] / 1e6
    batch = (
        f"a batch of {limit['turn_batch']:,} or fewer samples in all"
        if limit["limit"]
        else f"a batch of more than {limit['turn_batch']:,} samples in all"
    )
    what = f"the {limit['limit']} limits this model" if limit["limit"] else "the disk does not limit this model"
    return (
        f"{text}; {what}: it asks for {quantity(asked)} MB/s, and {quantity(given)} MB/s come. That turns at "
        f"{quantity(limit['turn_samples_per_s'])} samples/s: a model of {limit['turn_flops_per_sample'] / 1e9:.3g} GFLOP per sample "
        f"at this speed, or {batch}."
    )


def _batch(config: Seq2seqConfig, result: Result) -> str:
    limit = result.facts.get("memory_limit_gb")
    if config.batch != "auto" or not isinstance(limit, int | float):
        return ""
    tried = len(result.tables.get("batches", []))
    batch, below = result.facts.get("batch_per_rank"), result.facts.get("batch_below")
    if below is not None:
        return (
            f"{batch:,} samples fit a device within {limit:.3g} GB; the search ended with its share of the budget after "
            f"{counted(tried, 'trial')}, and the largest batch is below {below:,}: a larger budget_s would find it."
        )
    if result.facts.get("batch_limited_by") == "samples":
        return (
            f"The largest batch is not known: {batch:,} samples, all that a step of a device can have here, fit within "
            f"{limit:.3g} GB ({counted(tried, 'trial')}). More samples would find it."
        )
    return f"{batch:,} samples are the largest batch of a device within {limit:.3g} GB ({counted(tried, 'trial')})."


def _validity(config: Seq2seqConfig, result: Result, scope: str) -> str:
    if not scope:
        return ""
    used = result.facts.get("samples_per_epoch", 0)
    return (
        f"An epoch has {used:,} samples where the full size has 3,750,000: rates per sample can be compared with other runs of this "
        "model, times of epochs and losses only with those of as many samples."
    )
