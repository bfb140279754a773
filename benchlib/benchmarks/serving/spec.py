"""What a run on servers states: rates of each worker and of all, load against latency up to the knee, and that no query is lost."""

from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from typing import Any

from benchlib.benchmarks.serving.config import ServingConfig
from benchlib.config.schema import BaseConfig
from benchlib.core import splits
from benchlib.core.stats import percentile, queries_needed
from benchlib.judge.checks import Check as Judged
from benchlib.spec.charts import Line, lines
from benchlib.spec.checks import Check, below, reached, zero
from benchlib.spec.spec import Bound, Metric, Show, Spec, each, run_metrics
from benchlib.spec.tables import Col, Rows, Table, cols
from benchlib.workloads.llm import served
from benchlib.workloads.llm.load import CONFIRMED

MAX_EFFICIENCY = 1.05  # above it the workers did not do the same work alone as together
OUTCOMES = {
    "proven": "met with 99% confidence",
    "met": "met in the sample",
    "unproven": "met in the sample, with too many late for 99% confidence",
    "missed": "missed",
    "late": "the client was late",
}
QUERY = {"mode", "model", "precision", "prompt_tokens", "max_new", "concurrency"}  # fields that say what a query is
WAYS = [name for name in ServingConfig.model_fields if name not in BaseConfig.model_fields and name not in QUERY]
rate = partial(Col, unit="queries/s", samples=True, average="harmonic")  # rounds of equal work: all work over all time
in_gb = partial(Col, unit="GB", of=lambda held: held / 1e9, derived=False)


def _efficiency(together: list[float], alone: list[float]) -> list[float]:
    return [joint / single for joint, single in zip(together, alone, strict=True)]


def _hours(samples: int, rates: list[float]) -> list[float]:
    return [samples / value / splits.HOUR_S for value in rates]


def _at(times_ms: list[float], percent: float) -> float:
    return percentile(times_ms, percent / 100)


STAND_INS = {"sim": "simulated", "random_prompts": "random prompts"}  # for the work of a real user
scope = Col("work", of=str, needs="scope", words=STAND_INS)  # of the run
workers = Table(
    "workers",
    "worker {worker}",
    [
        scope,
        Col("worker", "number"),
        *cols("url model asked_in"),
        rate("alone_per_s", label="alone"),
        Col("answered", "count", "answered in joint runs"),
        Col("cpu_share", "ratio", "CPU of its process"),
        *cols("resident_bytes device_bytes", "B"),
        in_gb("resident_gb", label="memory", needs="resident_bytes"),
        in_gb("device_gb", label="device memory", needs="device_bytes"),
    ],
)
scaling = Table(
    "scaling",
    "workers: {size}",
    [
        scope,
        Col("size", "number", "workers"),
        Col("all"),
        rate("samples_per_s", label="together", derived=True),
        Col("tokens_per_s", "tokens/s", samples=True, average="harmonic", derived=True),
        rate("sum_per_s", label="sum of each alone", derived=True),
        Col("efficiency", "ratio", "", _efficiency, "samples_per_s sum_per_s", samples=True, average="harmonic"),
        Col("least_efficiency", "number", "least share of the sum of each alone", min, "efficiency"),
        Col("full_set", "count", "", int, "project_samples"),
        Col("projected_hours", "h", "", _hours, "project_samples samples_per_s", samples=True, average="mean"),
    ],
)

LIMITED = ("ttft", "tpot")
TIMES = {"ttft": "first token", "tpot": "further tokens", "latency": "end to end", "late": "lateness of the client"}
load = Table(
    "load",
    "{phase} {rate} {concurrency}",
    claim=lambda row, run: {"latencies.of_tokens": True},
    cols=[
        scope,
        *cols("phase"),
        Col("outcome", label="limits", words=OUTCOMES),
        Col("rate", "queries/s", "sent", derived=True),
        Col("concurrency", "number", "at once"),
        *cols("queries failed repeated", "count"),
        Col("percentile", "number"),
        Col("needed", "count", "queries needed", lambda percent: queries_needed(percent / 100, 0), "percentile"),
        Col("samples_per_s", "queries/s", "answered"),
        Col("tokens_per_s", "tokens/s"),
        Col("goodput_per_s", "queries/s", "goodput", derived=True),
        *(
            Col(f"{kind}_ms", "ms", words, samples=True, role="latencies.samples_s" if kind == "ttft" else "")
            for kind, words in TIMES.items()
        ),
        *(
            Col(f"{kind}_p{part}_ms", "ms", f"{words}, p{part}", partial(percentile, share=part / 100), f"{kind}_ms")
            for kind, words in TIMES.items()
            for part in (50, 90, 99)
        ),
        *(Col(f"{kind}_limit_ms", "ms", f"limit of the {TIMES[kind]}") for kind in LIMITED),
        *(Col(f"{kind}_at_ms", "ms", TIMES[kind], _at, f"{kind}_ms percentile") for kind in LIMITED),
    ],
)
recovery = Table(
    "recovery",
    "{queries} queries, {requeued} sent again, killed after {killed_s}, back after {back_s} with {after_return} after it",
    [
        *cols("queries failed repeated requeued answers same_answers after_return", "count"),
        Col("exact"),
        *cols("killed_s back_s", "s"),
        Col(
            "other_answers",
            "count",
            of=lambda answers, same, exact: (answers - same) * exact,
            needs="answers same_answers exact",
        ),
    ],
)
losses = served.losses()
lost = losses.where(event="down").most("t_s", per="worker", least=True)
inflight, in_flight = served.in_flight(
    title="Requests in flight of each worker while one is killed and comes back", empty="No worker was killed."
)
run = Table(
    "run",
    "{issued} queries",
    note="{errors}",
    cols=[
        Col("startup_s", "s"),
        Col("total_s", "s"),
        scope,
        *cols("scope errors"),
        *cols("issued failed repeated stated counted paid_devices project_samples", "count"),
        served.ratio,
        Col("dispatcher_cpu_ms", "ms", samples=True, average="mean"),
        Col("worker_startup_s", "s", samples=True),
    ],
)

joint = scaling.where(all=True)
scaled = joint.unless(size=1)
opened, closed = load.unless(phase="closed"), load.where(phase="closed")
knee = opened.where(phase="confirmation", outcome=CONFIRMED)


def _alone(run: Rows) -> str:
    if len(workers.rows(run)) == 1:
        return "one worker: there is nothing to scale"
    return "" if run.config.mode == "both" else "mode = both measures it"


def _recovers(config: ServingConfig) -> bool:
    return config.recovery and config.worker_count > 1 and config.mode != "single"


def _knee(check: Check, run: Rows) -> Judged:
    """Pass for a confirmed knee; where the client was late no rate says anything about the workers."""
    rows, text = opened.rows(run), partial(opened.text, run=run)
    for row in knee.rows(run):
        shown = "{rate}: both limits {outcome} at p{percentile} by {queries} queries"
        more = "; {needed} with none late would show it with 99% confidence: set point_s higher"
        return check.answer("PASS", text(shown + more * (row["outcome"] == "met"), row))
    if late := [row for row in rows if row["outcome"] == "late"]:
        why = text("undecided: at {rate} the client sent {late_p99_ms} late (p99) or at another rate", late[-1])
        return check.answer("SKIPPED", f"{why}; a quieter machine for the client decides it", gates=True)
    parts = [f"{TIMES[kind]} {{{kind}_at_ms}} (p{{percentile}}), limit {{{kind}_limit_ms}}" for kind in LIMITED]
    missed = f"at {{rate}}, {{outcome}}: {{failed}} of {{queries}} failed; {'; '.join(parts)}"
    return check.answer("FAIL", text(missed, rows[-1]) if rows else f"no rate was tried: {run.run['errors']}")


def _splits(run: Rows) -> list[dict[str, str]]:
    """Return the rates that the workers' single rates predict for two ways to split the samples, then the measured one."""
    rates = [workers["alone_per_s"].finite(row, run) or 0.0 for row in workers.rows(run)]
    samples = run.run.get("project_samples")
    if len(rates) < 2 or not all(rates) or not samples:
        return []
    measured = filter(None, (joint["samples_per_s"].finite(row, run) for row in joint.rows(run)))
    lines = [splits.row("as dispatched (measured)", [rate], sum(rates), samples) for rate in measured]
    return splits.rows(rates, samples) + lines


def _undecided(run: Rows) -> dict[str, list[str]]:
    """Name the limits that could not be judged: one worker alone, a client that was late."""
    late = any(row["outcome"] == "late" for row in opened.rows(run)) and not knee.rows(run)
    lost = ("ttft_ms", "tpot_ms") if run.config.mode == "single" or late else ()
    return {name: [f"= {getattr(run.config, name):g}"] for name in lost}


def _warnings(run: Rows) -> list[str]:
    simulated = run.run.get("scope") == "sim"
    words = [
        "The engine `sim` computes nothing: rates and times are those of clients, network and dispatcher."
        if simulated
        else "Prompts are random tokens of a chosen length: speed only, no quality."
    ]
    if run.config and not run.config.workers and run.config.worker_count > 1 and not simulated:
        words.append("All workers share this machine: what one of them gains, another may lose.")
    words += served.in_texts(workers, run)
    if run.config and run.config.workers:
        words += each(lost, "Worker {worker} was lost; later numbers are those of the other workers: {because}")(run)
    few = min((row["queries"] for row in opened.rows(run)), default=101)
    if few <= 100:
        between = "its p99 lies between its two largest times"
        words.append(f"The shortest run of the sweep has {few} queries: {between}. Set point_s higher.")
    return words


def _refuse(config: ServingConfig) -> None:
    if config.workers or config.engine != "sim":
        served.refuse(config, tokenizer=False, weights=not config.workers)


def _up_to(run: Rows) -> str:
    texts = each(knee, "Both limits are {outcome} up to {rate}")(run)
    return texts[0] if texts else "No rate met both limits in the longer run"


def _raised(kind: str) -> Any:
    """Return the picture of one time by the rate that was sent, with its limit and the confirmed rate."""
    fair = opened.unless(outcome="late")
    swept = fair.unless(phase="confirmation")
    return lines(
        f"load-{kind}",
        *(Line(swept[f"{kind}_p{part}_ms"], "") for part in (50, 99)),
        Line(knee[f"{kind}_p99_ms"], "", "claim", words="confirmed"),
        Line(fair[f"{kind}_limit_ms"], "", "limit"),
        x="rate",
        y=f"{TIMES[kind]} (ms)",
        title=_up_to,
        empty="No rate was measured with a client on time.",
    )


higher, lower = partial(Metric, better="higher"), partial(Metric, better="lower")
first = partial(higher, headline=True)
LIMITS = "sent by the schedule, both limits {outcome} at p{percentile} by {queries} queries; {samples_per_s} with the drain at the end"
SWEPT = "phase rate queries samples_per_s goodput_per_s ttft_p99_ms tpot_p99_ms late_p99_ms outcome"
OPEN = "of {queries} queries; open loop, from the schedule on"
ALL = "{size} workers together at equal concurrency, all queries over the time of all rounds"
SHARE = "all together over the sum of each alone, in the same round"
FULL = "{full_set} such samples / rate; start-up is apart"


def _at_knee(kind: str, lose: float) -> Iterator[Metric]:
    of, words = knee[f"{kind}_ms"], TIMES[kind].capitalize()
    yield lower(f"{kind}_at_knee_ms_{{work}}", of, f"{words}, median", OPEN, may_lose=lose)
    for part in (90, 99):
        more: dict[str, Any] = {"percentile": part / 100, "headline": part == 99}
        yield lower(f"{kind}_p{part}_at_knee_ms_{{work}}", of, f"{words}, p{part}", OPEN, **more)


METRICS = [
    first("samples_per_s_all_{work}", joint["samples_per_s"], "All workers together", ALL, may_lose=0.25),
    higher("tokens_per_s_all_{work}", joint["tokens_per_s"], "New tokens", ALL, may_lose=0.25),
    higher("samples_per_s_sum_{work}", joint["sum_per_s"], "Sum of each alone", "by round"),
    first(
        "scaling_efficiency_{work}", joint["efficiency"], "Scaling efficiency", SHARE, unless=lambda _, run: _alone(run)
    ),
    first("knee_per_s_{work}", knee["rate"], "Highest rate sent within the limits", LIMITS, may_lose=0.35),
    higher("goodput_at_knee_per_s_{work}", knee["goodput_per_s"], "Goodput at it", "queries within both limits"),
    *(metric for kind, lose in (("ttft", 1.0), ("tpot", 0.5)) for metric in _at_knee(kind, lose)),
    lower("worker_memory_gb_{work}", workers.most("resident_bytes")["resident_gb"], "Memory of the fullest worker"),
    lower("device_memory_gb_{work}", workers.most("device_bytes")["device_gb"], "Device memory"),
    lower("dispatcher_cpu_ms_{work}", run["dispatcher_cpu_ms"], "Dispatcher, CPU per query", headline=True),
    lower("client_late_p99_ms_{work}", opened.most("late_p99_ms")["late_p99_ms"], "Lateness of the client, p99"),
    lower("projected_hours_{work}", joint["projected_hours"], "Projection, full set", FULL, headline=True),
    lower("worker_startup_s", run["worker_startup_s"], "Start of a worker"),
    *run_metrics(run),
]
ANSWERED = "Did every query get one answer, with exactly the tokens that its server counted?"
SCALES = "Are all workers together at most as fast as the sum of each alone?"
WITHIN = "Is there a rate at which both limits were met, also in a run three times as long?"
LOST = ("failed", "repeated", "other_answers")
RECOVERED = "Is no query lost when a worker is killed, and are the answers the same?"
TARGET = "Does throughput scale with the number of workers?"
CHECKS = [
    zero("every query answered", ANSWERED, run["failed"], run["repeated"]),
    below("possible scaling", SCALES, (scaled["least_efficiency"], MAX_EFFICIENCY), unless=_alone),
    Check("limits met", WITHIN, judge=_knee, when=lambda config: config.mode != "single", kind="target"),
    zero("recovery", RECOVERED, *(recovery[name] for name in LOST), when=_recovers),
    reached(
        "target efficiency", TARGET, scaled["efficiency"], "target_efficiency", when=attrgetter("target_efficiency")
    ),
    served.tokens_counted(run),
]
SPEC = Spec(
    tables=[workers, scaling, load, recovery, losses, inflight, run],
    metrics=METRICS,
    checks=CHECKS,
    says=[
        each(scaled, "Together the {size} workers answer {samples_per_s}: {efficiency} of the sum of each alone."),
        each(
            knee, "Both limits are {outcome} up to {rate} sent; with the drain at the end {samples_per_s} are answered."
        ),
        each(joint, "{full_set} such queries would take {projected_hours} at the rate of all, after the start-up."),
    ],
    shows=[
        Show("Workers", workers, "worker url model asked_in alone_per_s answered cpu_share resident_gb device_gb"),
        Show("Scaling", scaling, "size samples_per_s sum_per_s efficiency"),
        Show("Predicted from each alone", workers, make=_splits),
        Show("Open loops", opened, SWEPT),
        Show(
            "Closed loops",
            closed,
            "concurrency queries samples_per_s tokens_per_s ttft_p50_ms tpot_p50_ms latency_p50_ms",
        ),
        Show("Lost and taken back", losses),
        Show("Recovery", recovery, "queries failed requeued answers same_answers killed_s back_s after_return"),
    ],
    charts=[
        _raised("ttft"),
        _raised("tpot"),
        lines(
            "concurrency",
            Line(closed["samples_per_s"], ""),
            x="concurrency",
            y="queries/s",
            title="{concurrency} queries at once give {samples_per_s}, {latency_p50_ms} each",
            empty="No closed loop was run.",
            log=False,
        ),
        lines(
            "scaling",
            Line(scaling["samples_per_s"], ""),
            Line(scaling["sum_per_s"], "", "limit"),
            x="size",
            y="queries/s at equal concurrency per worker",
            title="{size} workers reach {efficiency} of the sum of each alone",
            about=scaled,
            empty="No worker was measured.",
            log=False,
        ),
        in_flight,
    ],
    verified=each(run, "every query answered once, by the token counts of the servers"),
    bounds=[
        Bound(
            "All {size} workers together, {work}",
            scaled["samples_per_s"],
            scaled["efficiency"],
            "of the sum of each alone",
        ),
        Bound(
            "One service, {work}", knee["rate"], None, "no bound was measured", "both limits {outcome} at p{percentile}"
        ),
    ],
    warnings=_warnings,
    refuse=_refuse,
    missed=_undecided,
    rate="tokens_per_s_all_random_prompts",  # what a simulated engine says is worth nothing
    ways=WAYS,
)
