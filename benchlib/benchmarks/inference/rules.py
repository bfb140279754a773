"""MLPerf's rules for Llama-3.1-8B: what they ask for, what a run reduces, and what a test takes. No torch.

The values are those of the mlperf.conf inside LoadGen 6.0.17 and of mlcommons/inference, tools/submission (v5.1 to v6.1).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchlib.core.early_stopping import queries_needed
from benchlib.core.text import duration
from benchlib.workloads.llm import mininews

SET = 13_368  # articles of the validation set of CNN/DailyMail
MODEL, INTERACTIVE = "llama3_1-8b", "llama3_1-8b-interactive"
# Accuracy of the datacenter division on the full set, in percent, and generated characters (share that may be missing or more)
ROUGE = {"rouge1": 38.7792, "rouge2": 15.9075, "rougeL": 24.4957, "rougeLsum": 35.793}
ROUGE_SHARE, GEN_LEN, GEN_LEN_SHARE = 0.99, 8_167_644, 0.10


Asked = Any  # an InferenceConfig, whose file reads this one


@dataclass(frozen=True)
class Rule:
    """What a scenario asks for. ``percentile`` from 0 to 100; limits in s, None where the scenario has none."""

    min_queries: int
    min_duration_s: float
    samples: int
    percentile: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    of_model: bool = True  # whether MLPerf has this scenario for this model


RULES = {
    "Offline": Rule(SET, 600, SET, 99),
    "Server": Rule(100, 600, SET, 99, 2.0, 0.1),
    "Interactive": Rule(100, 600, SET, 99, 0.5, 0.03),
    "SingleStream": Rule(100, 600, 5_000, 90),
    "MultiStream": Rule(662, 600, SET, 99, of_model=False),
}
INVALID = "invalid_"  # before the names of metrics of a test that is not valid
STREAMS = 8  # samples of a MultiStream query


def lg_scenario(scenario: str) -> str:
    """Return LoadGen's name: Interactive is Server with another model key."""
    return "Server" if scenario == "Interactive" else scenario


def model_key(scenario: str) -> str:
    """Return the key of LoadGen's configuration."""
    return INTERACTIVE if scenario == "Interactive" else "llama3_1-8b-edge" if scenario == "SingleStream" else MODEL


def applied(config: Asked, scenario: str) -> Rule:
    """Return the rule as a run applies it. Interactive keeps the ratio of its limits to those of Server."""
    full = RULES[scenario]
    if config.rules == "mlperf":
        return full
    ratios = (RULES[scenario].ttft_s or 0) / 2.0, (RULES[scenario].tpot_s or 0) / 0.1
    ttft_s = config.ttft_limit_s * ratios[0] if full.ttft_s else None
    tpot_s = config.tpot_limit_s * ratios[1] if full.tpot_s else None
    least = config.min_queries, config.min_duration_s, config.samples or SET
    return Rule(*least, config.percentile, ttft_s, tpot_s, full.of_model)


Line = tuple[str, float, str, float]


def _lines(config: Asked, scenario: str, samples: int, server_qps: float | None) -> Iterator[Line]:
    """Yield what user.conf says, the target first: its key and value, and LoadGen's attribute with the value that it has to get."""
    name, rule = lg_scenario(scenario), applied(config, scenario)
    kind = {"SingleStream": "single_stream", "MultiStream": "multi_stream"}.get(name, name.lower())
    if name == "Server":
        rate = server_qps or config.server_qps
        yield "*.Server.target_qps", rate, "server_target_qps", rate
    elif name == "Offline":
        yield "*.Offline.target_qps", config.expected_qps, "offline_expected_qps", config.expected_qps
    else:
        latency = config.expected_latency_s
        yield f"*.{name}.target_latency", 1e3 * latency, f"{kind}_expected_latency_ns", 1e9 * latency
    duration_ms, used = round(1e3 * rule.min_duration_s), samples if config.rules == "reduced" else rule.samples
    yield f"*.{name}.min_duration", duration_ms, "min_duration_ms", duration_ms
    yield f"*.{name}.min_query_count", rule.min_queries, "min_query_count", rule.min_queries
    yield "*.*.performance_sample_count_override", used, "performance_sample_count_override", used
    if name != "Offline":
        share = rule.percentile / 100
        yield f"*.{name}.target_latency_percentile", rule.percentile, f"{kind}_target_latency_percentile", share
    for limit, limit_s in (("ttft_latency", rule.ttft_s), ("tpot_latency", rule.tpot_s)):
        if limit_s is not None:  # by the model's own key: wildcards stand below it within one file
            yield f"{model_key(scenario)}.{name}.{limit}", round(1e3 * limit_s), limit, round(1e3 * limit_s) * 10**6


@dataclass(frozen=True)
class Conf:
    """What LoadGen is told: its scenario and model key, the text of user.conf, and what must be read back of its settings."""

    scenario: str
    model_key: str
    text: str
    expected: dict[str, float]

    @classmethod
    def of(cls, config: Asked, scenario: str, samples: int, server_qps: float | None = None) -> "Conf":
        """Return the conf of a test: the target, and with reduced rules all that they replace.

        LoadGen takes ``key = value`` only with blanks around the sign, and ignores what it does not know.
        """
        lines = list(_lines(config, scenario, samples, server_qps))
        written = lines if config.rules == "reduced" else lines[:1]
        text = "".join(f"{key} = {value:.12g}\n" for key, value, _, _ in written)
        expected = {"use_token_latencies": 1.0, **{name: value for _, _, name, value in lines}}
        return cls(lg_scenario(scenario), model_key(scenario), text, expected)


def reduced(config: Asked, scenario: str, samples: int) -> list[dict[str, str]]:
    """Return each rule that a test does not keep: rule, what MLPerf asks for, what this run asks for."""
    full, mine, rows = RULES[scenario], applied(config, scenario), []

    def compare(rule: str, asked: object, used: object, kept: bool) -> None:
        if not kept:
            rows.append({"scenario": scenario, "rule": rule, "MLPerf": str(asked), "this run": str(used)})

    kept = mine.min_duration_s >= full.min_duration_s
    compare("least duration", f"{full.min_duration_s:g} s", f"{mine.min_duration_s:g} s", kept)
    compare("least queries", f"{full.min_queries:,}", f"{mine.min_queries:,}", mine.min_queries >= full.min_queries)
    compare("data set", f"{full.samples:,} samples", f"{samples:,} samples", samples >= full.samples)
    if scenario != "Offline":
        compare("percentile", f"p{full.percentile:g}", f"p{mine.percentile:g}", mine.percentile >= full.percentile)
    for name, asked, used in (("TTFT", full.ttft_s, mine.ttft_s), ("TPOT", full.tpot_s, mine.tpot_s)):
        if asked is not None and used is not None:
            compare(f"{name} limit", f"{1e3 * asked:g} ms", f"{1e3 * used:g} ms", used <= asked)
    if not full.of_model:
        compare("scenario", "not one of this model", scenario, False)
    return rows


def queries_issued(config: Asked, scenario: str, samples: int, server_qps: float | None = None) -> int:
    """Return how many samples LoadGen will issue: what its least numbers ask for, in whole sets (equal issue)."""
    rule = applied(config, scenario)
    if scenario == "Offline":
        asked = max(rule.min_queries, 1.1 * rule.min_duration_s * config.expected_qps)
    elif lg_scenario(scenario) == "Server":
        asked = max(rule.min_queries, rule.min_duration_s * (server_qps or config.server_qps))
    else:
        if scenario == "MultiStream":  # it ends when the least time and number are reached
            return math.ceil(max(rule.min_queries, rule.min_duration_s / config.expected_latency_s)) * STREAMS
        # LoadGen prepares twice the queries that the expected latency gives, and one more, and sends all of them.
        asked = max(rule.min_queries, 2 * rule.min_duration_s / config.expected_latency_s) + 1
        samples = min(samples, rule.samples)
    return math.ceil(asked / samples) * samples


def length_of(config: Asked) -> int:
    """Return how many samples the data set has, as far as it is known before it is read: a file is taken to be the real set."""
    return config.samples or (mininews.WHOLE if config.data == "mininews" else SET)


def least_s(config: Asked) -> float:
    """Return the seconds that the tests take at least, however fast the system is: their least time, and Server at its rate."""
    total = 0.0
    for scenario in config.scenarios:
        issued = queries_issued(config, scenario, length_of(config))
        paced = issued / config.server_qps if lg_scenario(scenario) == "Server" else 0.0
        total += max(applied(config, scenario).min_duration_s, paced)
    return total


def expected_s(config: Asked) -> float:
    """Return the seconds that the tests take by the rates that are expected, with accuracy."""
    samples = length_of(config)
    total = sum(float(str(plan(config, scenario, samples)["expected_s"])) for scenario in config.scenarios)
    return total + (samples / config.expected_qps if config.accuracy and not config.random else 0.0)


def words(config: Asked) -> str:
    """Return the plan of each test in words: queries and time."""
    rows = [plan(config, scenario, length_of(config)) for scenario in config.scenarios]
    return ", ".join(
        f"{row['scenario']} {row['queries issued']:,} queries in {duration(float(str(row['expected_s'])))}"
        + ("" if row["enough"] == "yes" else f" ({row['queries needed']:,} are needed)")
        for row in rows
    )


def plan(config: Asked, scenario: str, samples: int, server_qps: float | None = None) -> dict[str, object]:
    """Return what a test takes, before it runs: queries that the percentile needs, queries issued, expected seconds."""
    rule, issued = applied(config, scenario), queries_issued(config, scenario, samples, server_qps)
    rate = config.expected_qps if scenario == "Offline" else server_qps or config.server_qps
    queries = issued // (STREAMS if scenario == "MultiStream" else 1)
    seconds = issued / rate if lg_scenario(scenario) in ("Offline", "Server") else queries * config.expected_latency_s
    offline, share, late = scenario == "Offline", rule.percentile / 100, lg_scenario(scenario) != "Server"
    needed = 1 if offline else queries_needed(share, int(late))
    return {
        "scenario": scenario, "engine": config.engine_of(scenario), "percentile": "" if offline else f"p{rule.percentile:g}",
        "queries needed": needed, "with one late query": "" if offline else queries_needed(share, 1), "queries issued": queries,
        "enough": "yes" if queries >= needed else f"no: raise min_queries to {needed}",
        "expected_s": round(max(seconds, rule.min_duration_s), 1),
        "queries sent": "", "took_s": "",  # once it ran
    }  # fmt: skip
