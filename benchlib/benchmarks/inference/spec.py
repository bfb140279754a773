"""What a run of LoadGen states: what each test measured, whether it is valid and by which rules, and whether the answers are right."""

from collections.abc import Iterator
from functools import partial
from operator import attrgetter, sub, truediv
from typing import Any, get_args

from benchlib.benchmarks.inference.config import RULES, InferenceConfig, Scenario
from benchlib.core.stats import loadgen_percentile
from benchlib.spec.charts import cumulative, steps
from benchlib.spec.checks import above, above_zero, below, reached, zero
from benchlib.spec.spec import Bound, Metric, Show, Spec, each, run_metrics, run_table
from benchlib.spec.tables import Col, Ref, Row, Rows, Table, cols
from benchlib.workloads.llm import served

# Open loops and closed ones answer different questions and are in no common picture.
OPEN, CLOSED = ("Server", "Interactive"), ("SingleStream", "MultiStream")
KINDS = {"ttft": "first token", "tpot": "time per token", "latency": "latency", "lateness": "lateness of the client"}
LATE = "give the driver a core of its own, or lower server_qps"
# The rules of a valid test: what is measured, and what to do where it is beyond its limit.
VALID = {
    "ended": ("tests that did not end", ""),
    "loadgen": ("INVALID by LoadGen", ""),
    "min_duration": ("least duration, not reached", "raise expected_qps or min_queries, so that LoadGen sends more"),
    "min_queries": ("least queries, not reached", "raise min_queries or the duration"),
    "perf_constraints": ("latency limits, not met", "lower server_qps or speed the engine up"),
    "ttft_limit": ("seconds to the first token at the percentile", "lower server_qps or speed the engine up"),
    "tpot_limit": ("seconds per token at the percentile", "lower server_qps or speed the engine up"),
    "early_stopping": (
        "queries needed to prove the percentile",
        "raise min_queries; lower server_qps if many are late",
    ),
    "errors": ("errors in LoadGen's log", "fix the engine; LoadGen may say VALID all the same"),
    "failed": ("failed queries", "LoadGen counts them as answered, in its rate and its percentiles"),
    "repeated": ("first tokens and completions that came twice", "fix the engine, which has to complete a query once"),
    "miscounted": ("samples that LoadGen and the client count differently", "run it again"),
    "short_answers": ("answers of fewer than two tokens", "they have no time per output token"),
    "no_first_token": ("queries without a first token", "LoadGen counts their TTFT as zero; fix the engine"),
    "impossible_first_token": ("first tokens before their query or after its end", "clocks or events were mixed up"),
    "all_at_once": ("answers that came all at once", "the engine has to report its first token"),
    "late_client": ("seconds by which the client sent late, p99", LATE),
    "client_rate": ("share by which the client missed its schedule", LATE),
    "busy_client": ("cores that the client used", "it may have been late: use a faster machine"),
    "stated_rate": ("LoadGen's rate over that of the raw samples", "it ends with the last issue: use a longer run"),
}
# How much worse than the baseline, as a share, by scenario.
MAY_LOSE = {
    "Offline": {"samples_per_s": 0.20, "tokens_per_s": 0.20},
    **{scenario: {"ttft_s": 0.30, "tpot_s": 0.30} for scenario in OPEN},
    "SingleStream": {"latency_s": 0.25},
}
HELD = dict.fromkeys(("resident_memory_gb", "worker_memory_gb", "device_memory_gb"), 0.25)
HEADLINES = {
    "Offline": ("samples_per_s", "tokens_per_s"),
    "Server": ("ttft_p99_s", "tpot_p99_s", "goodput_per_s"),
    "SingleStream": ("latency_estimate_s", "latency_p90_s"),
}
# Accuracy of the datacenter division on the full set, in percent: 99% of it are asked for. Generated characters: 90% to 110%.
ROUGE = {"rouge1": 38.7792, "rouge2": 15.9075, "rougeL": 24.4957, "rougeLsum": 35.793}
GEN_LEN = 8_167_644


def _words(broken: list[str]) -> str:
    return "; ".join(VALID[rule][0] for rule in broken)


def _invalid(row: Row, run: Rows) -> str:
    """Return why the test of a row is not valid."""
    for test in tests.where(test=row["test"]).unless(valid=True).rows(run):
        return f"the test is not valid: {test.get('reason') or _words(test['broken'])}"
    return ""


# Of the run: the end of metrics' names, which says what stands in for the real thing.
scope = Col("end", of=str, needs="scope")
name = Col("test")
tests = Table(
    "tests",
    "{test}",
    [
        name,
        scope,
        *cols("engine broken"),
        Col("because", "", "not valid by", _words, "broken"),
        Col("valid", words={"True": "VALID", "False": "INVALID"}),
        Col("loadgen", label="LoadGen says"),
        *cols("queries tokens", "count"),
        Col("invalid", "count", "tests that are not valid", lambda valid: int(not valid), "valid"),
        Col("seconds", "s", "time"),
        *cols("samples_per_s samples_low samples_high", "samples/s", label="samples/s"),
        *cols("tokens_per_s tokens_low tokens_high", "tokens/s", label="tokens/s"),
        Col("loadgen_per_s", "samples/s", "LoadGen's samples/s"),
        Col("server_qps", "queries/s"),
        Col("goodput_per_s", "queries/s", "goodput", derived=True),
        Col("driver_cores", "cores"),
        *cols("resident_memory_gb worker_memory_gb device_memory_gb", "GB"),
        Col("energy_j", "J"),
        Col("price_per_hour_usd", "USD"),
        Col("energy_per_token_j", "J", "", truediv, "energy_j tokens"),
        Col(
            "usd_per_million_tokens",
            "USD",
            "",
            lambda usd, rate: 1e6 * usd / 3600 / rate,
            "price_per_hour_usd tokens_per_s",
        ),
    ],
)
times = Table(
    "times",
    "{kind}, {test}",
    claim=lambda row, run: {"latencies.of_tokens": row["kind"] in ("ttft", "tpot")},
    cols=[
        name,
        scope,
        Col("kind", words=KINDS),
        Col("seconds", "s", "time", samples=True, role="latencies.samples_s"),
        Col("limit_s", "s", "limit"),
        Col("estimate_s", "s", "early-stopping estimate"),
        *(
            Col(f"p{part}_s", "s", f"p{part}", partial(loadgen_percentile, share=part / 100), "seconds")
            for part in (90, 99)
        ),
    ],
)
validity = Table(
    "validity",
    "{rule}",
    note="{detail} {remedy}",
    cols=[
        name,
        Col("rule", words={rule: words for rule, (words, _) in VALID.items()}),
        *cols("measured limit", "number"),
        Col("broken", of=lambda measured, limit: not measured <= limit, needs="measured limit"),
        Col("detail"),
        Col("remedy", of=lambda rule: VALID[rule][1], needs="rule"),
    ],
)
scored = ("rouge1", "rouge2", "rougeL", "rougeLsum", "rouge1_shuffled", "rouge1_lead")
accuracy = Table(
    "accuracy",
    "{answered} of {samples} samples answered",
    note="{first}",
    cols=[
        scope,
        *cols("splitter first"),
        *cols("samples answered failed errors", "count"),
        *cols(" ".join(scored), "%", derived=True, quality=0.5),
        Col("gen_len", "characters", "generated", derived=True, quality=20),
        Col("answer_tokens", "count", "tokens of the answers", quality=0.0),
        Col("unanswered", "count", "", sub, "samples answered"),
        Col("rouge_l", "number", "ROUGE-L, 0 to 1", lambda percent: percent / 100, "rougeL"),
        Col("margin", "number", "ROUGE-1 above that with other references", sub, "rouge1 rouge1_shuffled"),
    ],
)
plan = Table(
    "plan",
    "{scenario}",
    [
        *cols("scenario"),
        Col("percentile", "number"),
        *cols("queries_needed needed_if_late queries_planned queries_sent", "count"),
        Col("expected_s", "s"),
        Col("took_s", "s", "took"),
    ],
)
reduced = Table(
    "reduced",
    "{scenario}, {rule}",
    [*cols("scenario rule"), Col("mlperf", "number", "MLPerf"), Col("used", "number", "this run")],
)
workers = Table(
    "workers",
    "{url}",
    [
        name,
        Col("worker", "number"),
        *cols("url model asked_in down_by"),
        *cols("sent answered", "count"),
        Col("resident_bytes", "B", "memory"),
        Col("device_bytes", "B", "device memory"),
    ],
)
USED = {"processor": "processor, all cores", "device": "device", "memory": "memory of the test's process"}
usage = Table(
    "usage",
    "{what}",
    [scope, Col("what", words=USED), Col("used", "%", samples=True, average="mean"), Col("peak", "%", "", max, "used")],
)
losses = served.losses(name)
inflight, in_flight = served.in_flight(
    name, title="Requests in flight of each worker over the test", empty="No worker was asked over a network."
)
run = run_table(
    *cols("scope simulated transformers loadgen"), *cols("samples stated counted paid_devices", "count"), served.ratio
)


def _metrics(scenario: Scenario) -> Iterator[Metric]:
    """Yield the metrics of a scenario; the end of their names says what stands in for the real thing."""
    of, lose, first = tests.where(test=scenario), HELD | MAY_LOSE.get(scenario, {}), HEADLINES.get(scenario, ())

    def metric(name: str, label: str, basis: str, better: Any = "lower", ref: Ref | None = None, **more: Any) -> Metric:
        more |= {"may_lose": lose.get(name), "headline": name in first}
        named, words = f"{name}_{scenario.lower()}{{end}}", f"{label}, {scenario}"
        return Metric(named, ref or of[name], words, basis, better, unless=_invalid, **more)

    completed = "completed / (last completion - first start); interval of 10 windows"
    for what in ("samples", "tokens"):
        ends = (of[f"{what}_low"], of[f"{what}_high"])
        yield metric(f"{what}_per_s", f"{what.capitalize()}/s", completed, "higher", ends=ends)
    for kind, words in KINDS.items():
        seconds, label = times.where(test=scenario, kind=kind)["seconds"], words.capitalize()
        if kind != "lateness":
            yield metric(f"{kind}_s", label, "median", ref=seconds)
        for part in (90, 99) if kind != "lateness" else (99,):
            basis = "sorted[int(n p)] of the completed queries; of fewer than 101 p99 is the largest"
            how = {"percentile": part / 100, "definition": loadgen_percentile}
            yield metric(f"{kind}_p{part}_s", f"{label}, p{part}", basis, ref=seconds, **how)
        if scenario == "SingleStream" and kind != "lateness":
            estimate = times.where(test=scenario, kind=kind)["estimate_s"]
            yield metric(f"{kind}_estimate_s", f"{label}, early-stopping estimate", ESTIMATE, ref=estimate)
    if RULES[scenario].limits_s:
        yield metric("goodput_per_s", "Goodput", "queries that meet every limit, over the time", "higher")
    yield metric("driver_cores", "Cores of the test's process", "engine included, where it computes there", "none")
    yield metric("resident_memory_gb", "Resident memory", "the test's process, at the end")
    stated = of.where(engine="http")["worker_memory_gb"]
    yield metric("worker_memory_gb", "Memory of the fullest worker", "its process, by its /metrics", ref=stated)
    yield metric("device_memory_gb", "Device memory", "most that tensors held on the device")
    yield metric("energy_per_token_j", "Energy per token", "counter of the device, between begin and end")
    yield metric("usd_per_million_tokens", "USD per million tokens", "at {price_per_hour_usd} per hour")


TINY = "The model is the embedded stand-in of 0.6 million parameters on generated news: its scores say nothing about others."
STYLE = "MLPerf-style, measured with MLPerf's LoadGen: this is not an official MLPerf result, which MLCommons verifies."
ESTIMATE = "LoadGen's early stopping: a sample that bounds the percentile of the scenario with 99% confidence"
USED_BY = "mean, by the tests and the processes that they start, a reading every second"
SCORED = "rouge_score with stemmer, mean of {answered} texts; sentences by {splitter}"
SOURCE = "mlcommons/inference, submission checker, v5.1 to v6.1, datacenter"


def _reduced(run: Rows) -> str:
    if run.config.rules == "mlperf":
        return ""
    words = [accuracy.text("{rouge1} ROUGE-1, {gen_len}", row, run) for row in accuracy.ran().rows(run)]
    return "; ".join(["only on the full validation set of CNN/DailyMail by rules=mlperf", *words])


def _warnings(run: Rows) -> list[str]:
    config, words = run.config, list[str]()
    if config is None:
        return words
    words.append(STYLE)
    if config.rules == "reduced":
        words.append("Reduced rules: MLPerf asks for more. The table of reduced rules lists each.")
    if any(not RULES[scenario].of_model for scenario in config.scenarios):
        words.append("MultiStream is no MLPerf scenario of this model.")
    if config.model == "tiny":
        words.append(TINY)
    if config.random:
        words.append("Random weights: speed alone, with answers of a fixed length.")
    words += served.in_texts(workers, run)
    if run.run.get("simulated"):
        words.append("What answers is simulated: it computes nothing.")
    lost = "{test}: worker {worker} was lost after {t_s}: {because}."
    return words + each(losses.where(event="down"), lost)(run)


def _refuse(config: InferenceConfig) -> None:
    served.refuse(config, weights=config.engine not in ("http", "sim"))


def _latencies(name: str, kind: str, of: tuple[str, ...]) -> Any:
    """Return the picture of one kind of time: the share of queries by time, with the limit."""
    rows = times.where(kind=kind, test=of)
    title = f"{KINDS[kind]} of {{test}}: p90 {{p90_s}}, p99 {{p99_s}}"
    limit = rows["limit_s"] if kind != "latency" else None
    return cumulative(name, rows["seconds"], title=title, empty=f"No {KINDS[kind]} was recorded.", limit=limit)


asked: dict[str, Any] = {"when": lambda config: config.accuracy}
target: dict[str, Any] = asked | {"kind": "target", "unless": _reduced, "source": SOURCE}
IS_FULL = "Does the full set reach what MLPerf's checker asks for?"
VALIDITY = "Is the test valid, by LoadGen and by its raw samples?"
AIM = "Is ROUGE-L above the target that was set?"
DOCUMENT = "the document of this benchmark asks for 0.23; MLCommons' checker for 24.2507% on the full set"
has_target = attrgetter("target_rouge_l")
COMPLETE = "Was every sample answered once, without an error?"
top = partial(Metric, basis=SCORED, better="higher")
used_of = {what: usage.where(what=what) for what in USED}
METRICS = [
    *(metric for scenario in get_args(Scenario) for metric in _metrics(scenario)),
    top("rouge1{end}", accuracy["rouge1"], "ROUGE-1", amount=1.0, headline=True),
    *(top(f"{kind}{{end}}", accuracy[kind], f"ROUGE-{kind[5:]}") for kind in ROUGE if kind != "rouge1"),
    Metric("control_rouge1_shuffled{end}", accuracy["rouge1_shuffled"], "ROUGE-1, control: other references"),
    Metric("control_rouge1_lead{end}", accuracy["rouge1_lead"], "ROUGE-1, control: lead"),
    Metric("gen_len{end}", accuracy["gen_len"], "Generated", "of all answers, after splitting"),
    *(
        Metric(f"utilization_{what}{{end}}", one["used"], f"Utilisation, {what}", USED_BY)
        for what, one in used_of.items()
    ),
    *run_metrics(run),
]
CHECKS = [
    below("valid {test}", VALIDITY, (validity["measured"], validity["limit"]), (tests["invalid"], 0.0)),
    zero("accuracy complete", COMPLETE, *(accuracy[name] for name in ("unanswered", "failed", "errors")), **asked),
    above_zero("better than chance", "Do the answers fit their own articles?", accuracy["margin"], **asked),
    *(above(f"reference {kind}", IS_FULL, (accuracy[kind], 0.99 * score), **target) for kind, score in ROUGE.items()),
    reached("target ROUGE-L", AIM, accuracy["rouge_l"], "target_rouge_l", ">", source=DOCUMENT, when=has_target),
    above("reference length", IS_FULL, (accuracy["gen_len"], 0.9 * GEN_LEN), most=1.1 * GEN_LEN, **target),
    served.tokens_counted(run),
]
RATES = "test engine valid loadgen because queries server_qps samples_per_s loadgen_per_s seconds"
SAYS = "ROUGE-1 is {rouge1}; with references of other articles {rouge1_shuffled}, of the lead {rouge1_lead}."
SPEC = Spec(
    tables=[tests, times, validity, accuracy, plan, reduced, workers, usage, losses, inflight, run],
    metrics=METRICS,
    checks=CHECKS,
    says=[
        each(tests.where(valid=True), "{test}: {samples_per_s} and {tokens_per_s} on {engine}."),
        each(times.where(limit_s=bool), "{test}: {kind} p99 {p99_s}, limit {limit_s}."),
        each(accuracy.ran(), SAYS),
    ],
    shows=[
        Show("Tests", tests, RATES),
        Show("Latency", times, "test kind seconds p90_s p99_s limit_s estimate_s"),
        Show("Broken rules", validity.where(broken=True), "test rule measured limit detail remedy"),
        Show("Valid, rule by rule", validity, "test rule measured limit"),
        Show("Before the run: how many queries a percentile takes", plan),
        Show("Reduced rules", reduced),
        Show("ROUGE and its controls", accuracy.ran(), " ".join([*scored, "gen_len", "answered"])),
        Show("Workers", workers),
        Show("Utilisation", usage, "what used peak"),
        Show("Lost and sent again", losses),
    ],
    charts=[
        _latencies("first-token", "ttft", OPEN),
        _latencies("time-per-token", "tpot", OPEN),
        _latencies("latency", "latency", OPEN),
        _latencies("latency-closed-loop", "latency", CLOSED),
        steps(
            "utilisation",
            usage["used"],
            title="Utilisation: {what} {used} on average, {peak} at its peak",
            empty="No reading fell into the tests.",
            x="reading, one every second",
        ),
        in_flight,
    ],
    verified=each(accuracy.ran(), "{answered} of {samples} answers scored by ROUGE, validity by LoadGen"),
    bounds=[
        Bound(
            "LLM inference, {test}", tests.where(valid=True)["tokens_per_s"], None, "no bound was measured", "{engine}"
        )
    ],
    warnings=_warnings,
    refuse=_refuse,
    rate="tokens_per_s_offline",
    energy="energy_per_token_j_offline",
)
