"""What a run of the serving benchmark is judged by: no query lost, a client that was on time, a knee that a longer run confirms."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchlib.benchmarks.serving.config import ServingConfig
from benchlib.benchmarks.serving.view import scope_of
from benchlib.config import addresses
from benchlib.config.cluster import ELSEWHERE
from benchlib.core import model_files
from benchlib.core.text import duration, quantity
from benchlib.judge.baselines import Comparison, regression_checks
from benchlib.judge.checks import Ask, Check, agreement_check, asks, budget_check, finite_check, limit_check
from benchlib.judge.impossible.claim import Claim, Latency, Requests, Speed
from benchlib.judge.impossible.own import Numbers, OwnClaims
from benchlib.judge.numbers import InvalidNumber, count, known
from benchlib.judge.regression import RegressionLimit
from benchlib.results.run import Result, Run
from benchlib.workloads.llm.engines import MEMORY

PREDICTED = 0.25  # by which a joint run may differ from its prediction: its last queries are uneven
MOST_EFFICIENCY = 1.05  # above it the workers did not do the same work alone as together
SHARES = {
    "samples_per_s_all": 0.25, "tokens_per_s_all": 0.25, "knee_per_s": 0.35, "ttft_at_knee_ms": 1.0, "tpot_at_knee_ms": 0.5,
}  # fmt: skip


SIGNED = ("seconds", "share")  # of the cost of a joint run: workers may be faster together
# Where a null has its reason: only an open loop has a schedule, and not every worker states its memory.
LACKS = {"closed": ("late_p99_ms",), "workers": tuple(MEMORY)}


def lacks(table: str, _row: Mapping[str, Any], column: str) -> bool:
    """Say whether a null has a reason."""
    return column in LACKS.get(table, ())


def refuse(config: ServingConfig) -> None:
    """Raise ``UserError`` for workers that refuse our token, and for a model folder that is not whole."""
    if config.launcher not in ELSEWHERE:
        addresses.check_token(config.workers)
    if not config.workers and config.engine != "sim":
        model_files.check(config.model, tokenizer=False)


def missed(run: Run) -> dict[str, list[str]]:
    """Return the limits and the target that could not be judged, by parameter: a client that was late, one worker alone."""
    config = run.config
    if run.result is None or not isinstance(config, ServingConfig):
        return {}
    names = (
        ["ttft_ms", "tpot_ms"]
        if config.mode == "single" or _knee(run.result.tables.get("load", [])).status == "SKIPPED"
        else []
    )
    names += ["target_efficiency" for check in _target(run, config) if check.status == "SKIPPED"]
    return {name: [f"= {getattr(config, name):g}"] for name in names}


def limits(run: Run) -> list[RegressionLimit]:
    """Return how much worse rates and times may get; the knee is found in steps, so it may move by one."""
    config = run.config
    assert isinstance(config, ServingConfig)
    scope = scope_of(config, run.result)
    return [RegressionLimit(metric=f"{name}_{scope}", share=share) for name, share in SHARES.items()]


def claims(numbers: Numbers) -> Iterator[Claim]:
    """Yield what the run states of speed, requests and times."""
    rows = numbers.rows("workers")
    alone = [row["alone_per_s"] for row in rows if row.get("alone_per_s")]
    together = numbers.positive("samples_per_s_all")
    if together and len(alone) == len(rows) > 1:  # one worker, measured twice, scales nothing
        one = {"one_device_samples_per_s": max(alone), "one_device": "the fastest worker alone"}
        yield Claim(subject="all workers", speed=Speed(samples_per_s=together, ranks=len(rows), **one))
    issued, failed = numbers.count("issued"), numbers.count("failed")
    if issued is not None and failed is not None:
        yield Claim(subject="all runs", requests=Requests(issued=issued, failed=failed, completed=issued - failed))
    for name in ("ttft", "tpot"):
        values = numbers.raw(f"{name}_at_knee_ms")
        if values:
            parts = {part: numbers.value(f"{name}_p{part:g}_at_knee_ms") for part in (90.0, 99.0)}
            stated = {part: value / 1e3 for part, value in parts.items() if value is not None}
            raw = [value / 1e3 for value in values]
            times = Latency(name=f"{name} at the knee", samples_s=raw, percentiles_s=stated)
            yield Claim(subject="open loop", latencies=[times])


def checks(run: Run, comparison: Comparison) -> list[Check]:
    """Judge a run that has a result."""
    config, result = run.config, run.result
    assert isinstance(config, ServingConfig) and result is not None
    stated = OwnClaims(Numbers.of_run(run))
    scaling = f"scaling_efficiency_{scope_of(config, result)}"
    made = [_answered(result.facts), _efficiency(run, result, scaling)]
    made += map(_predicted, result.tables.get("splits", []))
    if config.mode != "single":
        made.append(_knee(result.tables.get("load", [])))
        recovery = result.facts.get("recovery", {})
        if recovery or (config.recovery and not config.workers and config.worker_count > 1):
            made.append(_recovered(config, recovery))
    return [
        *made,
        *_target(run, config),
        finite_check(stated),
        agreement_check(stated, ("possible values",)),
        budget_check(run),
        *regression_checks(run, limits(run), comparison),
    ]


def _target(run: Run, config: ServingConfig) -> list[Check]:
    if config.target_efficiency is None or run.result is None:
        return []
    metric = run.result.metric(f"scaling_efficiency_{scope_of(config, run.result)}")
    question = "Does a further worker add what it can do alone?"
    return [limit_check("target efficiency", question, metric, config.target_efficiency, source="target_efficiency")]


@asks("every query answered", "Did every query get one answer, with exactly the tokens that its server counted?")
def _answered(ask: Ask, facts: Mapping[str, Any]) -> Check:
    issued, failed, repeated = (count(facts[name], name) for name in ("issued", "failed", "repeated"))
    reason = f"{issued:,} queries, {failed} failed, {repeated} answered twice"
    reason += "".join(f"; {why}" for why in facts["errors"][:2])
    return ask.fact(issued > 0 and not failed and not repeated, reason)


@asks("possible scaling", "Are all workers together at most as fast as the sum of each alone?")
def _efficiency(ask: Ask, run: Run, result: Result, name: str) -> Check:
    """Fail where every round scales better than the sum of its workers: then alone and together were not the same work."""
    metric = result.metric(name)
    if metric is None:
        raise InvalidNumber(f"{name} is missing in the metrics")
    value = known(metric)
    if value is None:
        return ask.skipped(metric.reason)
    rounds = run.samples.get(name, [value])
    reason = f"{value:.2f} of the sum, {min(rounds):.2f} to {max(rounds):.2f} by round"
    return ask.fact(min(rounds) <= MOST_EFFICIENCY, reason, limit=f"<= {MOST_EFFICIENCY}", value=value)


def _predicted(row: Mapping[str, Any]) -> Check:
    """Compare a split with what was predicted before it; it gates nothing, since workers may share a machine."""
    question = f"Did the {row['split']} split take as long as the rates of its workers predicted before it?"

    def answer(ask: Ask) -> Check:
        ratio, least, most = (float(row[name]) for name in ("measured_over_predicted", "least", "most"))
        reason = f"{row['measured_s']:.2f} s, {row['predicted_s']:.2f} s predicted: {ratio:.2f} times ({least:.2f} to {most:.2f} by round)"
        check = ask.fact(abs(ratio - 1) <= PREDICTED, reason, value=ratio, limit=f"1 ± {PREDICTED:g}")
        return check.model_copy(update={"gates": False})

    return Ask(f"prediction of the {row['split']} split", question, "reference").by(answer)


@asks("limits met", "Is there a rate at which both limits were met, also in a run three times as long?", kind="target")
def _knee(ask: Ask, rows: Sequence[Mapping[str, Any]]) -> Check:
    """Pass for a confirmed knee; where the client was late no rate says anything about the workers."""
    confirmed = [row for row in rows if row["phase"] == "confirmation" and not row["why"]]
    if confirmed:
        rate, queries = confirmed[-1]["rate"], count(confirmed[-1]["queries"], "queries")
        return ask.fact(True, f"{rate:.3g} queries/s, confirmed by {queries:,} queries")
    refused = [row for row in rows if row["client"]]
    if refused:
        why = f"undecided: {refused[-1]['client']}; a quieter machine for the client decides it"
        return ask.skipped(why, gates=True)
    return ask.fact(False, f"{rows[-1]['rate']:.3g} queries/s: {rows[-1]['why']}" if rows else "no rate was tried")


@asks("recovery", "Is no query lost when a worker is killed, and are the answers the same?")
def _recovered(ask: Ask, config: ServingConfig, recovery: Mapping[str, Any]) -> Check:
    """A killed worker costs no query; answers are the same where arithmetic does not depend on the batch (fp32 on a CPU)."""
    names = ("queries", "failed", "repeated", "requeued", "answers", "same_answers", "after_return")
    counts = {name: count(recovery[name], f"recovery.{name}") for name in names}
    good = counts["queries"] > 0 and not counts["failed"] and not counts["repeated"]
    if config.precision == "fp32" and config.backend == "cpu":
        good &= counts["same_answers"] == counts["answers"] > 0
    reason = (
        f"{counts['queries']} queries, {counts['failed']} lost, {counts['requeued']} sent again; "
        f"{counts['same_answers']} of {counts['answers']} answers as in the undisturbed run; "
        f"killed at {recovery['killed_s']:.1f} s, back at {recovery['back_s']:.1f} s with {counts['after_return']} queries after it"
    )
    return ask.fact(good, reason)


def reading(run: Run) -> list[str]:
    """Return what the numbers say: rates, efficiency and where the rest went, the knee, the projection."""
    config, result = run.config, run.result
    assert isinstance(config, ServingConfig) and result is not None
    scope = scope_of(config, result)
    names = ("samples_per_s_all", "scaling_efficiency", "knee_per_s", "projected_hours")
    metric = {name: result.metric(f"{name}_{scope}") for name in names}
    value = {name: item.value if item else None for name, item in metric.items()}
    sentences = []
    if joint := value["samples_per_s_all"]:
        sentences.append(f"Together the {result.facts['workers']} workers answer {quantity(joint, 'queries/s')}.")
    if value["scaling_efficiency"]:
        parts = {row["part"]: row["share"] for row in result.tables.get("cost", [])}
        words = ", ".join(f"{name} {share:.1%}" for name, share in parts.items())
        sentences.append(
            f"That is {value['scaling_efficiency']:.0%} of the sum of each alone; of the joint run's time: {words}."
        )
    for row in result.tables.get("splits", []):
        sentences.append(
            f"The {row['split']} split was predicted to take {row['predicted_s']:.2f} s and took {row['measured_s']:.2f} s "
            f"({row['measured_over_predicted']:.2f} times)."
        )
    if knee := value["knee_per_s"]:
        share = f", {knee / joint:.0%} of the joint rate" if joint else ""
        missed = next((row for row in result.tables.get("load", []) if row["why"]), None)
        end = f"at {missed['rate']:.3g}/s: {missed['why']}" if missed else "no rate missed them: the knee is higher"
        sentences.append(f"Both limits hold up to {quantity(knee, 'queries/s')}{share}; {end}.")
    if (item := metric["projected_hours"]) and item.value:
        low_s, high_s = (duration(3600 * end) if end is not None else "" for end in (item.ci_low, item.ci_high))
        span = f" ({low_s} to {high_s})" if low_s else ""
        took = f"{duration(3600 * item.value)}{span}"
        sentences.append(f"{config.project_samples:,} such queries would take {took} at that rate, after the start-up.")
    what = "`sim` computes nothing" if scope == "sim" else "the prompts are random tokens"
    sentences.append(f"These figures are of the path and not of a model that answers users: {what}.")
    return sentences
