"""Parameters of the inference benchmark, with the defaults of the smoke tier, and MLPerf's rules for Llama-3.1-8B.

The rules are those of the mlperf.conf inside LoadGen 6.0.17 and of mlcommons/inference, tools/submission (v5.1 to v6.1).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from benchlib.config import addresses
from benchlib.config.schema import EMBEDDED_MODEL, BaseConfig, Seconds
from benchlib.core.errors import UserError
from benchlib.core.stats import queries_needed
from benchlib.core.text import duration
from benchlib.workloads.llm import mininews

Scenario = Literal["Offline", "Server", "Interactive", "SingleStream", "MultiStream"]
PRELOAD = (
    "benchlib.benchmarks.inference.loadgen",
    "benchlib.workloads.llm.decoders",
    "benchlib.workloads.llm.dispatch",
)
RANDOM_MODEL = "llama3-8b-random"
SET = 13_368  # articles of the validation set of CNN/DailyMail


@dataclass(frozen=True)
class Rule:
    """What a scenario asks for, and LoadGen's name of it: Interactive is Server with another ``model`` key.

    ``percentile`` from 0 to 100; limits of ``ttft`` and ``tpot`` in s, where it has some. ``streams`` are the samples of a query,
    ``slack`` how often LoadGen sends what the expected rate gives in the least time.
    """

    lg: str
    min_queries: int
    percentile: float = 99
    limits_s: Mapping[str, float] = field(default_factory=dict)
    samples: int = SET
    min_duration_s: float = 600
    model: str = "llama3_1-8b"
    streams: int = 1
    slack: float = 1
    of_model: bool = True  # whether MLPerf has this scenario for this model


RULES = {
    "Offline": Rule("Offline", SET, slack=1.1),
    "Server": Rule("Server", 100, limits_s={"ttft": 2.0, "tpot": 0.1}),
    "Interactive": Rule("Server", 100, limits_s={"ttft": 0.5, "tpot": 0.03}, model="llama3_1-8b-interactive"),
    "SingleStream": Rule("SingleStream", 100, 90, samples=5_000, model="llama3_1-8b-edge", slack=2),
    "MultiStream": Rule("MultiStream", 662, streams=8, of_model=False),
}


class InferenceConfig(BaseConfig):
    """MLPerf LoadGen against one engine. ``rules=mlperf`` sets all that the real rules fix; ``reduced`` lists what it reduces."""

    PATHS: ClassVar[dict[str, bool]] = {"data_file": True, "model": False}
    ASIDE: ClassVar[tuple[str, ...]] = ("served_model", "deadline_s", "test_limit_s", "price_per_hour_usd")
    ONE_PROCESS: ClassVar[bool] = True
    FOLLOWS: ClassVar[dict[str, str]] = {
        **BaseConfig.FOLLOWS,
        "data": "data_file",
        "engine": "workers",
        "expected_latency_s": "model",
    }
    GONE: ClassVar[dict[str, str]] = {
        "audit": "MLPerf's own TEST06 checks a submission: leave it out",
        "find_peak": "benchlib run serving finds the highest rate within the limits",
        "peak_seconds": "no roofline is guessed any more: leave it out",
        "tokens": "a server that gives no token ids is asked in texts by itself: leave it out",
    }

    benchmark: Literal["inference"] = "inference"

    scenarios: list[Scenario] = Field(["Offline", "Server"], min_length=1, description="of LoadGen, one test each")
    rules: Literal["reduced", "mlperf"] = Field("reduced", description="the real rules, or shorter ones, each listed")
    accuracy: bool = Field(True, description="answer the whole set once and score it with ROUGE")

    model: str = Field(
        EMBEDDED_MODEL, min_length=1, description="hub name, folder, tiny (embedded) or llama3-8b-random (speed alone)"
    )
    shrink: int = Field(1, ge=1, le=128, description="llama3-8b-random: divides layers, widths and vocabulary")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="of weights and matrix products")
    data: Literal["mininews", "cnn_dailymail", "file"] = Field(
        "mininews", description="embedded, abisee/cnn_dailymail, or data_file"
    )
    data_file: str = Field("", description="cnn_eval.json of the MLPerf reference; sets data=file")
    samples: int = Field(32, ge=0, description="of the data set; 0: all (mininews: 1,000)")
    max_new: int = Field(128, ge=2, le=8192, description="most tokens of an answer")

    engine: Literal["auto", "static", "continuous", "http", "sim"] = Field(
        "auto", description="auto: static for Offline, else continuous"
    )
    slots: int = Field(8, ge=1, le=4096, description="queries that the engine works on at once")
    step_s: Seconds = Field(0.005, gt=0, le=10, description="engine=sim: seconds for each token")
    workers: Annotated[list[str], AfterValidator(addresses.workers)] = Field(
        [],
        description="OpenAI-compatible servers, http://HOST:PORT; dns+http://NAME:PORT: each address of the name; sets engine=http",
    )
    served_model: str = Field("", description="what the workers call the model; empty: the first that each names")

    server_qps: float = Field(10.0, gt=0, le=1e6, description="queries per second of Server")
    expected_qps: float = Field(20.0, gt=0, le=1e6, description="guess of the Offline rate, for its size")
    expected_latency_s: Seconds = Field(
        0.05, gt=0, le=600, description="guess for SingleStream and MultiStream; 0.5 for other models than the embedded"
    )
    min_duration_s: Seconds = Field(1.0, ge=0, le=1e5, description="rules=reduced: least time of a test")
    min_queries: int = Field(64, ge=1, le=10**7, description="rules=reduced: least queries of a test")
    percentile: float = Field(90.0, ge=50, le=99.9, description="rules=reduced: of the latency limits")
    ttft_limit_s: Seconds = Field(2.0, gt=0, le=600, description="rules=reduced: time to the first token, Server")
    tpot_limit_s: Seconds = Field(0.1, gt=0, le=60, description="rules=reduced: time per output token, Server")
    target_rouge_l: float | None = Field(
        None, gt=0, lt=1, description="ROUGE-L (F1, 0 to 1) to exceed; the document of this benchmark asks for 0.23"
    )
    price_per_hour_usd: float | None = Field(None, gt=0, description="of the whole system; for the cost of tokens")
    deadline_s: Seconds = Field(60.0, gt=0, le=3600, description="after which a query counts as failed")
    test_limit_s: Seconds = Field(0.0, ge=0, description="after which a test is ended; 0: from its expected length")

    @model_validator(mode="before")
    @classmethod
    def _what_follows(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        slow = {"expected_latency_s": 0.5} if values.get("model", EMBEDDED_MODEL) != EMBEDDED_MODEL else {}
        data = {"data": "file"} if values.get("data_file") else {}
        return slow | values | data | ({"engine": "http"} if values.get("workers") else {})

    @model_validator(mode="after")
    def _parts_fit(self) -> "InferenceConfig":
        if self.data == "file" and not self.data_file:
            raise ValueError("data = file needs data_file=FILE, the cnn_eval.json of the MLPerf reference")
        if self.engine == "http" and not self.workers:
            raise ValueError("engine = http needs workers=URL,URL")
        if self.shrink > 1 and self.model != RANDOM_MODEL:
            raise ValueError(f"shrink = {self.shrink} divides the shape of model={RANDOM_MODEL} alone: leave it at 1")
        if self.rules == "mlperf" and (self.samples or self.data == "mininews" or self.max_new != 128):
            raise ValueError(
                "rules = mlperf: the whole of cnn_dailymail (samples=0) and 128 new tokens; other data are rules=reduced"
            )
        return self

    def check_whole(self) -> None:
        """Raise ``UserError`` also for a precision that the backend does not have."""
        super().check_whole()
        if self.backend == "cpu" and self.precision == "fp16":
            raise UserError("precision = 'fp16': a CPU has no fast fp16; use bf16 or fp32")
        if self.least_s > self.budget_s:
            raise UserError(
                f"budget_s = {self.budget_s:g}: the tests alone take {duration(self.least_s)} or longer with rules={self.rules} "
                f"({self._plans}); set budget_s={math.ceil(1.5 * self.least_s / 60) * 60}, or "
                + ("rules=reduced" if self.rules == "mlperf" else "lower min_queries and min_duration_s")
            )

    @property
    def size(self) -> int:
        """The samples of the data set, before it is read those that were asked for. A file is taken to be the real set."""
        return self.samples or (mininews.WHOLE if self.data == "mininews" else SET)

    def rule(self, scenario: str) -> Rule:
        """Return the rule as the run applies it. Interactive keeps the ratio of its limits to those of Server."""
        full, server = RULES[scenario], RULES["Server"].limits_s
        if self.rules == "mlperf":
            return full
        shares = {kind: limit_s / server[kind] for kind, limit_s in full.limits_s.items()}
        limits_s = {kind: getattr(self, f"{kind}_limit_s") * share for kind, share in shares.items()}
        used = replace(full, min_queries=self.min_queries, min_duration_s=self.min_duration_s, samples=self.size)
        percentile = full.percentile if scenario == "Offline" else self.percentile  # that has no limit of time
        return replace(used, percentile=percentile, limits_s=limits_s)

    def per_s(self, scenario: str) -> float:
        """Return the queries per s that LoadGen is to expect."""
        rates = {"Offline": self.expected_qps, "Server": self.server_qps}
        return rates.get(RULES[scenario].lg, 1 / self.expected_latency_s)

    def conf(self, scenario: str) -> tuple[str, dict[str, float]]:
        """Return the text of user.conf, and what must be read back of LoadGen's settings.

        It has the target, and with reduced rules all that they replace. LoadGen takes ``key = value`` only with blanks around
        the sign, and ignores what it does not know.
        """
        lines = list(self._lines(scenario))
        written = lines if self.rules == "reduced" else lines[:1]
        text = "".join(f"{key} = {value:.12g}\n" for key, value, _, _ in written)
        return text, {"use_token_latencies": 1.0, **{name: value for _, _, name, value in lines}}

    def _lines(self, scenario: str) -> Iterator[tuple[str, float, str, float]]:
        """Yield what user.conf says, the target first: key and value, and LoadGen's attribute with the value that it has to get."""
        rule, rate, latency = self.rule(scenario), self.per_s(scenario), self.expected_latency_s
        name, kind = rule.lg, rule.lg.lower().replace("stream", "_stream")
        if name in ("Server", "Offline"):
            yield f"*.{name}.target_qps", rate, f"{kind}_{'target' if name == 'Server' else 'expected'}_qps", rate
        else:
            yield f"*.{name}.target_latency", 1e3 * latency, f"{kind}_expected_latency_ns", 1e9 * latency
        duration_ms = round(1e3 * rule.min_duration_s)
        yield f"*.{name}.min_duration", duration_ms, "min_duration_ms", duration_ms
        yield f"*.{name}.min_query_count", rule.min_queries, "min_query_count", rule.min_queries
        yield "*.*.performance_sample_count_override", rule.samples, "performance_sample_count_override", rule.samples
        if name != "Offline":
            share = rule.percentile / 100
            yield f"*.{name}.target_latency_percentile", rule.percentile, f"{kind}_target_latency_percentile", share
        for limit, limit_s in rule.limits_s.items():  # by the model's own key: wildcards stand below it within one file
            limit_ms = round(1e3 * limit_s)
            yield f"{rule.model}.{name}.{limit}_latency", limit_ms, f"{limit}_latency", limit_ms * 10**6

    def reduced(self, scenario: str) -> list[dict[str, Any]]:
        """Return a row for each rule that a test does not keep: what MLPerf asks for, and what this run does."""
        full, used = RULES[scenario], self.rule(scenario)
        rows: list[tuple[str, float, float]] = [
            ("least duration, s", full.min_duration_s, used.min_duration_s),
            ("least queries", full.min_queries, used.min_queries),
            ("samples of the data set", full.samples, self.size),
            ("percentile", full.percentile, used.percentile),
        ]
        rows = [(name, least, own) for name, least, own in rows if own < least]
        limits = [(f"limit of {kind.upper()}, s", most, used.limits_s[kind]) for kind, most in full.limits_s.items()]
        rows += [(name, most, own) for name, most, own in limits if own > most]
        rows += [] if full.of_model else [("scenario of this model", 0, 1)]
        return [{"scenario": scenario, "rule": name, "mlperf": mlperf, "used": own} for name, mlperf, own in rows]

    def issued(self, scenario: str) -> int:
        """Return how many samples LoadGen will issue: what its least numbers ask for, in whole sets (equal issue)."""
        rule = self.rule(scenario)
        asked = max(rule.min_queries, round(rule.slack * rule.min_duration_s * self.per_s(scenario), 6))
        if scenario == "MultiStream":  # it ends when the least time and number are reached
            return math.ceil(asked) * rule.streams
        samples = min(self.size, rule.samples)
        return math.ceil((asked + (scenario == "SingleStream")) / samples) * samples

    def plan(self, scenario: str) -> dict[str, Any]:
        """Return what a test takes, before it runs: queries that the percentile needs, queries issued, expected seconds."""
        rule, queries = self.rule(scenario), self.issued(scenario) // RULES[scenario].streams
        seconds = max(queries / self.per_s(scenario), rule.min_duration_s)
        row = {"scenario": scenario, "queries_planned": queries, "expected_s": seconds}
        if scenario == "Offline":
            why = dict.fromkeys(("percentile", "needed_if_late"), "no limit of time")
            return row | {"queries_needed": 1, "why": why}
        needed, if_late = (queries_needed(rule.percentile / 100, late) for late in (0, 1))
        row |= {"percentile": rule.percentile, "needed_if_late": if_late}
        return row | {"queries_needed": needed if rule.lg == "Server" else if_late}

    @property
    def least_s(self) -> float:
        """The seconds that the tests take at least, however fast the system is: their least times, and Server at its rate."""
        plans = {name: self.plan(name)["expected_s"] for name in self.scenarios if RULES[name].lg == "Server"}
        return sum(plans.get(name, self.rule(name).min_duration_s) for name in self.scenarios)

    @property
    def _plans(self) -> str:
        return ", ".join(
            f"{plan['scenario']} {plan['queries_planned']:,} queries in {duration(plan['expected_s'])}"
            + f" ({plan['queries_needed']:,} are needed)" * (plan["queries_planned"] < plan["queries_needed"])
            for plan in map(self.plan, self.scenarios)
        )

    def engine_of(self, scenario: str) -> str:
        """Return the engine that a scenario runs on."""
        if self.engine != "auto":
            return self.engine
        return "static" if scenario == "Offline" else "continuous"

    @property
    def random(self) -> bool:
        """Whether the weights are random: then answers have a fixed length and no accuracy."""
        return self.model == RANDOM_MODEL

    @property
    def vocabulary(self) -> int:
        """The tokens that random weights have after ``shrink``, into which those of prompts are mapped; 0: as they are."""
        return 128256 // self.shrink if self.shrink > 1 else 0

    def scope(self, served: str = "", simulated: bool = False, text: bool = False) -> str:
        """Return the suffix of metrics' names: '' for Llama-3.1-8B-Instruct on all of cnn_dailymail by the real rules.

        What stands in for the model, the data, the engine or the rules is in the name, and that queries went over a network.
        ``served`` is what workers call their model, ``simulated`` and ``text`` whether they compute nothing or give no token ids.
        """
        sim = simulated or self.engine == "sim"
        name = Path(self.model if sim or self.served_model else served or self.model).name.lower()
        model = "" if "llama-3.1-8b-instruct" in name else f"_{name.replace('-', '_').replace('.', '_')}"
        shrunk = f"_shrunk{self.shrink}" if self.shrink > 1 else ""
        data = {"mininews": "_mininews", "file": "_file", "cnn_dailymail": "_subset" if self.samples else ""}[self.data]
        how = "_sim" * sim + "_network" * (self.engine == "http") + "_text" * text
        return model + shrunk + data + how + "_reduced" * (self.rules == "reduced")

    def expected_work(self) -> str:
        """Say what will be measured."""
        tests = [*self.scenarios, *["accuracy"] * (self.accuracy and not self.random)]
        samples = f"{self.samples:,} samples" if self.samples else "all samples"
        where = f" at {', '.join(self.workers)}" if self.workers else ""
        return (
            f"MLPerf LoadGen with {self.rules} rules: {', '.join(tests)}; {self.model} ({self.precision}){where} on {samples} of "
            f"{self.data}, engine {self.engine} with {self.slots} slots, Server at {self.server_qps:g} queries/s; "
            f"{duration(self.least_s)} at least: {self._plans}"
        )
