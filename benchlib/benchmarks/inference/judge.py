"""What an inference run means: which tests are valid, whether its answers are right, and what the numbers say."""

import math
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from benchlib.benchmarks.inference.config import InferenceConfig
from benchlib.benchmarks.inference.rules import GEN_LEN, GEN_LEN_SHARE, INVALID, ROUGE, ROUGE_SHARE, lg_scenario
from benchlib.benchmarks.inference.workers import SUT
from benchlib.config import addresses
from benchlib.config.cluster import ELSEWHERE
from benchlib.core import model_files
from benchlib.core.text import quantity
from benchlib.judge.baselines import Comparison, regression_checks
from benchlib.judge.checks import Ask, Check, agreement_check, asks, budget_check, finite_check
from benchlib.judge.impossible.claim import Claim, Latency, LoadGen, Requests
from benchlib.judge.impossible.own import Numbers, OwnClaims
from benchlib.judge.numbers import count, known, within
from benchlib.judge.regression import RegressionLimit
from benchlib.results.metrics import Metric
from benchlib.results.run import Result, Run
from benchlib.workloads.llm.engines import MEMORY

CACHED = 0.65  # of a fresh prompt's time to the first token: a repeated one below it was not computed again
# The rules that a check of its own shows; "numbers agree" stands for all others.
SHOWN = ("LoadGen verdict", "LoadGen errors", "possible values")
# How much worse than the baseline, as a share; by the beginnings of names.
LIMITS = {
    "samples_per_s_offline": 0.20, "tokens_per_s_offline": 0.20, "ttft_s_server": 0.30, "tpot_s_server": 0.30,
    "ttft_s_interactive": 0.30, "tpot_s_interactive": 0.30, "latency_s_singlestream": 0.25, "resident_memory_gb": 0.25,
    "worker_memory_gb": 0.25, "device_memory_gb": 0.25,
}  # fmt: skip
COUNT_SHARE = 0.05  # by which the tokens counted in texts may differ from those that servers state
ROUGE_POINTS = 1.0  # that ROUGE-1 may fall below the baseline
SIGNED = ("issued_s",)  # LoadGen's clock and ours differ by a constant that rounds


def lacks(table: str, row: Mapping[str, Any], column: str) -> bool:
    """Say whether a null has a reason: not every worker states its memory, and not every scenario has limits and rates."""
    if table != "tests":
        return table == "workers" and column in MEMORY
    scenario, ended = lg_scenario(str(row.get("scenario"))), bool(row.get("loadgen"))
    if column in ("ttft_limit_s", "tpot_limit_s", "server_qps") and scenario != "Server":
        return True
    if column == "loadgen_per_s" and scenario in ("SingleStream", "MultiStream"):
        return True
    return not ended and column in ("samples_per_s", "loadgen_per_s", "server_qps", "seconds", "began", "ended")


def _parts(run: Run) -> tuple[InferenceConfig, Result]:
    assert isinstance(run.config, InferenceConfig) and run.result is not None
    return run.config, run.result


def _scope(config: InferenceConfig, result: Result) -> str:
    return config.scope(result.facts.get("says"))


def refuse(config: Any) -> None:
    """Raise ``UserError`` for a model folder that is not whole (weights of an engine here, tokenizer), and for workers that refuse our token."""
    if config.launcher not in ELSEWHERE:
        addresses.check_token(config.workers)
    model_files.check(config.model, weights=config.engine not in ("http", "sim"))


def limits(run: Run) -> list[RegressionLimit]:
    """Return how much worse each metric of a run may get than the baseline."""
    config, result = _parts(run)
    shares = [
        RegressionLimit(metric=metric.name, share=share)
        for metric in result.metrics
        for start, share in LIMITS.items()
        if metric.name.startswith(start)
    ]
    scored = [RegressionLimit(metric=f"rouge1{_scope(config, result)}", amount=ROUGE_POINTS)]
    return [*shares, *(scored if result.metric(scored[0].metric) else [])]


def checks(run: Run, comparison: Comparison) -> list[Check]:
    """Judge a run that has a result."""
    config, result = _parts(run)
    stated = OwnClaims(Numbers.of_run(run))
    tests = result.tables.get("tests", [])
    absent = [{"test": name} for name in config.scenarios if name not in [row["test"] for row in tests]]
    return [
        *map(_valid, [*tests, *absent]),
        *map(_prefix_cache, result.tables.get("prefix_cache", [])),
        *([_audited(result)] if config.audit else []),
        *_accurate(config, result),
        *_counted(config, result),
        finite_check(stated),
        agreement_check(stated, SHOWN),
        budget_check(run),
        *regression_checks(run, limits(run), comparison),
    ]


def _valid(row: Mapping[str, Any]) -> Check:
    def answer(ask: Ask) -> Check:
        if "valid" not in row:
            return ask.fact(False, "the result has no such test")
        queries, *wrong = (count(row[name], name) for name in ("queries", "failed", "num_errors", "repeated"))
        good = f"LoadGen says {row['loadgen']}; {queries:,} queries, no error, possible times, client in time"
        passed = row["valid"] == row["loadgen"] == "VALID" and queries > 0 and not any(wrong)
        bad = "{} failed, {} errors in LoadGen's log, {} first tokens or completions came twice".format(*wrong)
        return ask.fact(passed, row["why"] or (good if passed else f"{row['valid']}: {queries:,} queries, {bad}"))

    return Ask(f"valid {row['test']}", f"Is the test {row['test']} valid, by LoadGen and by its raw samples?").by(
        answer
    )


def _prefix_cache(row: Mapping[str, Any]) -> Check:
    """Take the median of what each turn shows: a neighbour slows the two times of a turn alike, or is one of few."""

    def answer(ask: Ask) -> Check:
        share = median(again / fresh for again, fresh in zip(row["repeated_s"], row["fresh_s"], strict=True))
        repeated, fresh = median(row["repeated_s"]), median(row["fresh_s"])
        reason = (
            f"first token of a repeated prompt of {row['tokens']} tokens after {quantity(repeated, 's')}, of fresh ones {quantity(fresh, 's')}: "
            f"{share:.2f}, at least {CACHED:g}; MLPerf forbids a cache across queries"
        )
        return ask.fact(share >= CACHED, reason, value=share, limit=f">= {CACHED:g}")

    question = "Does a repeated prompt take as long as a fresh one?"
    return Ask(f"no prefix cache ({row['engine']})", question).by(answer)


@asks("TEST06", "TEST06: do answers begin with their first token, end once, and have the tokens that were reported?")
def _audited(ask: Ask, result: Result) -> Check:
    audit = result.facts["audit"]
    wrong, answers = (count(audit[name], f"audit.{name}") for name in ("wrong_count", "answers"))
    reason = f"{answers} answers" + (f", {wrong} wrong: {audit['wrong'][0]}" if wrong else ", all consistent")
    return ask.fact(not wrong and answers > 0, reason)


def _counted(config: InferenceConfig, result: Result) -> Iterator[Check]:
    """Text mode: tokens are those that our tokenizer finds; where servers state how many they made, both have to be close."""

    def answer(ask: Ask) -> Check:
        stated, counted = (count(result.facts["counted"][name], f"counted.{name}") for name in ("stated", "counted"))
        if not stated:
            return ask.skipped("the servers state no counts")
        share = counted / stated
        reason = f"{counted:,} tokens counted in the texts, {stated:,} stated: {share:.3f}"
        limit = f"{1 - COUNT_SHARE:g} to {1 + COUNT_SHARE:g}"
        return ask.fact(within(share, 1 + COUNT_SHARE, 1 - COUNT_SHARE), reason, value=share, limit=limit)

    if config.tokens == "text":
        question = "Does the tokenizer of model find as many tokens as the servers state?"
        yield Ask("tokens counted", question).by(answer)


def _accurate(config: InferenceConfig, result: Result) -> Iterator[Check]:
    right = Ask("accuracy", "Are the answers right?")
    if not config.accuracy:
        return
    if config.random:
        yield right.skipped("random weights have no accuracy")
    elif config.engine == "sim" or result.facts.get("says", {}).get("engine") == "sim":
        yield right.skipped("what is simulated computes nothing")
    else:
        scope = _scope(config, result)
        yield _complete(result)
        yield _better_than_chance(result, scope)
        least, most = (1 - GEN_LEN_SHARE) * GEN_LEN, (1 + GEN_LEN_SHARE) * GEN_LEN
        full = config.rules == "mlperf"
        for kind, limit in ROUGE.items():
            yield _reference(f"reference {kind}", result.metric(f"{kind}{scope}"), ROUGE_SHARE * limit, math.inf, full)
        yield _reference("reference length", result.metric(f"gen_len{scope}"), least, most, full)


@asks("accuracy complete", "Was every sample answered once, without an error?")
def _complete(ask: Ask, result: Result) -> Check:
    facts = result.facts["accuracy"]
    names = ("answered", "samples", "failed", "num_errors")
    answered, samples, failed, errors = (count(facts[name], f"accuracy.{name}") for name in names)
    reason = f"{answered:,} of {samples:,} samples answered, {failed} failed, {errors} errors in LoadGen's log"
    return ask.fact(answered == samples > 0 and not failed and not errors, reason)


@asks("better than chance", "Do the answers fit their own articles?")
def _better_than_chance(ask: Ask, result: Result, scope: str) -> Check:
    own, others = (result.value(f"{name}{scope}") for name in ("rouge1", "control_rouge1_shuffled"))
    if own is None or others is None:
        return ask.fact(False, f"rouge1{scope} or control_rouge1_shuffled{scope} was not measured")
    return ask.fact(own > others, f"ROUGE-1 {own:.2f} with their own references, {others:.2f} with others'")


def _reference(name: str, metric: Metric | None, least: float, most: float, full: bool) -> Check:
    limit = f">= {least:,.4f}" if most == math.inf else f"{least:,.0f} to {most:,.0f}"
    common: dict[str, Any] = {
        "limit": limit,
        "source": "mlcommons/inference, submission checker, v5.1 to v6.1, datacenter",
    }

    def answer(ask: Ask) -> Check:
        value = known(metric)
        if not full:
            here = metric.text if metric else "not measured"
            why = f"only on the full validation set of CNN/DailyMail by rules=mlperf; here {here}"
            return ask.skipped(why).model_copy(update=common)
        if metric is None or value is None:
            return ask.fact(False, "not measured").model_copy(update=common)
        reached = ask.fact(within(value, most, least), f"{metric.text}, limit {limit}", value=value, unit=metric.unit)
        return reached.model_copy(update=common)

    return Ask(name, "Does the full set reach what MLPerf's checker asks for?", "target").by(answer)


def claims(numbers: Numbers) -> Iterator[Claim]:
    """Yield what each test states: requests, latencies, and LoadGen's rate beside the one from raw samples."""
    for row in numbers.rows("tests"):
        name = str(row.get("test", ""))
        if not row.get("loadgen"):  # it did not end, and states nothing
            continue
        issued, failed = (count(row[name], name) for name in ("queries", "failed"))
        scenario, mark = name.lower(), INVALID * (row.get("valid") == "INVALID")
        latencies = []
        for kind in ("ttft", "tpot", "latency"):
            raw = numbers.raw(f"{mark}{kind}_s_{scenario}")
            tails = {share: numbers.value(f"{mark}{kind}_p{share}_s_{scenario}") for share in (90, 99)}
            percentiles = {float(share): value for share, value in tails.items() if value is not None}
            if raw or percentiles:
                of, tokens = f"{kind} of {name}", kind != "latency"
                latencies.append(Latency(name=of, samples_s=raw, percentiles_s=percentiles, of_tokens=tokens))
        requests = Requests(issued=issued, completed=issued - failed, failed=failed)
        stated = LoadGen(
            scenario=lg_scenario(str(row.get("scenario", ""))), valid=row.get("loadgen") == "VALID", errors=count(row["num_errors"], "num_errors"),
            samples_per_s=row.get("loadgen_per_s"),
            raw_samples_per_s=None if failed else row.get("samples_per_s"),  # LoadGen takes a failed query for answered
        )  # fmt: skip
        yield Claim(subject=name, latencies=latencies, requests=requests, loadgen=stated)


def reading(run: Run) -> list[str]:
    """Return what the run says, in sentences."""
    config, result = _parts(run)
    sentences, scope = [], _scope(config, result)
    for row in result.tables.get("tests", []):
        end = f"_{str(row['test']).lower()}{scope}"
        text, mark = f"{row['test']} is {row['valid']}", INVALID * (row["valid"] == "INVALID")
        rate, tokens, first, gap = (
            result.metric(f"{mark}{name}{end}")
            for name in ("samples_per_s", "tokens_per_s", "ttft_p99_s", "tpot_p99_s")
        )
        if rate and tokens:
            text += f": {rate.text} and {tokens.text} on {row['engine']}"
        if first and gap and first.value is not None and gap.value is not None:
            largest = ", the largest of them" if first.n <= 100 else ""
            text += f"; p99 of {first.n:,} queries{largest}: first token after {first.text}, then {gap.text} a token"
        sentences.append(text + (f". It would be valid if this were mended: {row['why']}." if row["why"] else "."))
    for row in result.tables.get("peak", [])[-1:]:
        peak, tries = result.facts["peak_qps_loadgen"], len(result.tables["peak"])
        sentences.append(
            f"LoadGen's search found {peak:g} queries/s for Server; of {tries} whole runs from there down "
            + (f"the one at {row['rate']:g} is VALID." if row["valid"] == "VALID" else "none is VALID.")
        )
    if (counted := result.facts.get("counted")) and config.tokens == "text":
        stated = f"; the servers state {counted['stated']:,}" if counted["stated"] else ", the servers state no number"
        sentences.append(
            f"The servers gave no token ids: the tokenizer of {config.model} found {counted['counted']:,} tokens in their texts{stated}."
            if counted["counted"]
            else "The servers gave no token ids: tokens are those that the tokenizer of "
            f"{config.model} finds in their texts{stated}."
        )
    sut = next((row["sut"] for row in result.tables.get("tests", []) if row.get("sut")), "")
    if SUT in sut:
        sentences.append(f"The system was reached over HTTP, as {sut}: a result of the network division at most.")
    share = result.metric(f"roofline_share_offline{scope}")
    if share and share.value is not None:
        reached = f"{100 * share.value:.3g}% of what memory and matrix products allow"
        sentences.append(f"Offline reaches {reached} ({share.reason}).")
    rows = result.tables.get("rouge", [])
    if len(rows) == 3:
        own, others, lead = (f"{row['rouge1']:.1f}" for row in rows)
        sentences.append(f"ROUGE-1 is {own}; with references of other articles {others}, of the lead {lead}.")
    if count := len(result.tables.get("reduced", [])):
        sentences.append(f"{count} rules of MLPerf are reduced, so no number of this run is an MLPerf result.")
    return sentences
