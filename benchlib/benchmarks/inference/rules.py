"""MLPerf's rules for Llama-3.1-8B: what they ask for, what a run reduces, and what a test takes. No torch.

The values are those of the mlperf.conf inside LoadGen 6.0.17 and of mlcommons/inference, tools/submission (v5.1 to v6.1).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchlib.judge.impossible.early_stopping import queries_needed

SET = 13_368  # articles of the validation set of CNN/DailyMail
MODEL, INTERACTIVE = "llama3_1-8b", "llama3_1-8b-interactive"
# Accuracy of the datacenter division on the full set, in percent, and generated characters (share that may be missing or more)
ROUGE = {"rouge1": 38.7792, "rouge2": 15.9075, "rougeL": 24.4957, "rougeLsum": 35.793}
ROUGE_SHARE, GEN_LEN, GEN_LEN_SHARE = 0.99, 8_167_644, 0.10
STREAMS = 8  # samples of a MultiStream query


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

    @property
    def limits_s(self) -> dict[str, float]:
        limits = {"ttft": self.ttft_s, "tpot": self.tpot_s}
        return {name: value for name, value in limits.items() if value is not None}


RULES = {
    "Offline": Rule(SET, 600, SET, 99),
    "Server": Rule(100, 600, SET, 99, 2.0, 0.1),
    "Interactive": Rule(100, 600, SET, 99, 0.5, 0.03),
    "SingleStream": Rule(100, 600, 5_000, 90),
    "MultiStream": Rule(662, 600, SET, 99, of_model=False),
}


def lg_scenario(scenario: str) -> str:
    """Return LoadGen's name: Interactive is Server with another model key."""
    return "Server" if scenario == "Interactive" else scenario


def model_key(scenario: str) -> str:
    """Return the key of LoadGen's configuration."""
    return INTERACTIVE if scenario == "Interactive" else "llama3_1-8b-edge" if scenario == "SingleStream" else MODEL


@dataclass(frozen=True)
class Conf:
    """What LoadGen is told: its scenario and model key, the text of user.conf, and what must be read back of its settings."""

    scenario: str
    model_key: str
    text: str
    expected: dict[str, float]


@dataclass(frozen=True)
class Load:
    """What is asked of LoadGen: fields of the config, with the ``samples`` that the data set has."""

    rules: str
    samples: int
    server_qps: float
    expected_qps: float
    expected_latency_s: float
    min_duration_s: float
    min_queries: int
    percentile: float
    ttft_limit_s: float
    tpot_limit_s: float

    def rule(self, scenario: str) -> Rule:
        """Return the rule as the run applies it. Interactive keeps the ratio of its limits to those of Server."""
        full, server = RULES[scenario], RULES["Server"]
        if self.rules == "mlperf":
            return full
        assert server.ttft_s and server.tpot_s
        ttft_s = full.ttft_s and self.ttft_limit_s * (full.ttft_s / server.ttft_s)
        tpot_s = full.tpot_s and self.tpot_limit_s * (full.tpot_s / server.tpot_s)
        least = self.min_queries, self.min_duration_s, self.samples
        return Rule(*least, self.percentile, ttft_s, tpot_s, full.of_model)

    def conf(self, scenario: str) -> Conf:
        """Return the conf of a test: the target, and with reduced rules all that they replace.

        LoadGen takes ``key = value`` only with blanks around the sign, and ignores what it does not know.
        """
        lines = list(self._lines(scenario))
        written = lines if self.rules == "reduced" else lines[:1]
        text = "".join(f"{key} = {value:.12g}\n" for key, value, _, _ in written)
        expected = {"use_token_latencies": 1.0, **{name: value for _, _, name, value in lines}}
        return Conf(lg_scenario(scenario), model_key(scenario), text, expected)

    def _lines(self, scenario: str) -> Iterator[tuple[str, float, str, float]]:
        """Yield what user.conf says, the target first: key and value, and LoadGen's attribute with the value that it has to get."""
        name, rule = lg_scenario(scenario), self.rule(scenario)
        kind = {"SingleStream": "single_stream", "MultiStream": "multi_stream"}.get(name, name.lower())
        if name == "Server":
            yield "*.Server.target_qps", self.server_qps, "server_target_qps", self.server_qps
        elif name == "Offline":
            yield "*.Offline.target_qps", self.expected_qps, "offline_expected_qps", self.expected_qps
        else:
            latency = self.expected_latency_s
            yield f"*.{name}.target_latency", 1e3 * latency, f"{kind}_expected_latency_ns", 1e9 * latency
        duration_ms, used = round(1e3 * rule.min_duration_s), self.samples if self.rules == "reduced" else rule.samples
        yield f"*.{name}.min_duration", duration_ms, "min_duration_ms", duration_ms
        yield f"*.{name}.min_query_count", rule.min_queries, "min_query_count", rule.min_queries
        yield "*.*.performance_sample_count_override", used, "performance_sample_count_override", used
        if name != "Offline":
            share = rule.percentile / 100
            yield f"*.{name}.target_latency_percentile", rule.percentile, f"{kind}_target_latency_percentile", share
        for limit, limit_s in rule.limits_s.items():  # by the model's own key: wildcards stand below it within one file
            limit_ms = round(1e3 * limit_s)
            yield f"{model_key(scenario)}.{name}.{limit}_latency", limit_ms, f"{limit}_latency", limit_ms * 10**6

    def reduced(self, scenario: str) -> list[dict[str, Any]]:
        """Return a row for each rule that a test does not keep: what MLPerf asks for, and what this run does."""
        full, used = RULES[scenario], self.rule(scenario)
        rows = [
            ("least duration, s", full.min_duration_s, used.min_duration_s, used.min_duration_s >= full.min_duration_s),
            ("least queries", full.min_queries, used.min_queries, used.min_queries >= full.min_queries),
            ("samples of the data set", full.samples, self.samples, self.samples >= full.samples),
        ]
        if scenario != "Offline":
            rows.append(("percentile", full.percentile, used.percentile, used.percentile >= full.percentile))
        for name, asked_s in full.limits_s.items():
            rows.append((f"limit of {name.upper()}, s", asked_s, used.limits_s[name], used.limits_s[name] <= asked_s))
        rows.append(("scenario of this model", 0, 1, full.of_model))
        names = ("rule", "mlperf", "used")
        return [{"scenario": scenario, **dict(zip(names, row, strict=False))} for row in rows if not row[3]]

    def issued(self, scenario: str) -> int:
        """Return how many samples LoadGen will issue: what its least numbers ask for, in whole sets (equal issue)."""
        rule, samples = self.rule(scenario), self.samples
        if scenario == "Offline":
            asked = max(rule.min_queries, 1.1 * rule.min_duration_s * self.expected_qps)
        elif lg_scenario(scenario) == "Server":
            asked = max(rule.min_queries, rule.min_duration_s * self.server_qps)
        elif scenario == "MultiStream":  # it ends when the least time and number are reached
            return math.ceil(max(rule.min_queries, rule.min_duration_s / self.expected_latency_s)) * STREAMS
        else:
            # LoadGen prepares twice the queries that the expected latency gives, and one more, and sends all of them.
            asked = max(rule.min_queries, 2 * rule.min_duration_s / self.expected_latency_s) + 1
            samples = min(samples, rule.samples)
        return math.ceil(asked / samples) * samples

    def least_s(self, scenario: str) -> float:
        """Return the seconds that a test takes at least, however fast the system is: its least time, and Server at its rate."""
        paced = self.issued(scenario) / self.server_qps if lg_scenario(scenario) == "Server" else 0.0
        return max(self.rule(scenario).min_duration_s, paced)

    def plan(self, scenario: str) -> dict[str, Any]:
        """Return what a test takes, before it runs: queries that the percentile needs, queries issued, expected seconds."""
        rule, issued = self.rule(scenario), self.issued(scenario)
        queries, name = issued // (STREAMS if scenario == "MultiStream" else 1), lg_scenario(scenario)
        rates = {"Offline": self.expected_qps, "Server": self.server_qps}
        seconds = issued / rates[name] if name in rates else queries * self.expected_latency_s
        row = {"scenario": scenario, "queries_planned": queries, "expected_s": max(seconds, rule.min_duration_s)}
        if name == "Offline":
            why = dict.fromkeys(("percentile", "needed_if_late"), "no limit of time")
            return row | {"queries_needed": 1, "why": why}
        share = rule.percentile / 100
        row |= {"queries_needed": queries_needed(share, int(name != "Server"))}
        return row | {"needed_if_late": queries_needed(share, 1), "percentile": rule.percentile}
