"""MLPerf's rules for Llama-3.1-8B: what they ask for. No torch.

The values are those of the mlperf.conf inside LoadGen 6.0.17 and of mlcommons/inference, tools/submission (v5.1 to v6.1).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

SET = 13_368  # articles of the validation set of CNN/DailyMail
MODEL = "llama3_1-8b"
# Accuracy of the datacenter division on the full set, in percent, and generated characters (share that may be missing or more)
ROUGE = {"rouge1": 38.7792, "rouge2": 15.9075, "rougeL": 24.4957, "rougeLsum": 35.793}
ROUGE_SHARE, GEN_LEN, GEN_LEN_SHARE = 0.99, 8_167_644, 0.10
STREAMS = 8  # samples of a MultiStream query


@dataclass(frozen=True)
class Rule:
    """What a scenario asks for. ``percentile`` from 0 to 100; limits of ``ttft`` and ``tpot`` in s, where it has some."""

    min_queries: int
    min_duration_s: float
    samples: int
    percentile: float
    limits_s: Mapping[str, float] = field(default_factory=dict)
    of_model: bool = True  # whether MLPerf has this scenario for this model


RULES = {
    "Offline": Rule(SET, 600, SET, 99),
    "Server": Rule(100, 600, SET, 99, {"ttft": 2.0, "tpot": 0.1}),
    "Interactive": Rule(100, 600, SET, 99, {"ttft": 0.5, "tpot": 0.03}),
    "SingleStream": Rule(100, 600, 5_000, 90),
    "MultiStream": Rule(662, 600, SET, 99, of_model=False),
}


def lg_scenario(scenario: str) -> str:
    """Return LoadGen's name: Interactive is Server with another model key."""
    return "Server" if scenario == "Interactive" else scenario


def model_key(scenario: str) -> str:
    """Return the key of LoadGen's configuration."""
    return MODEL + {"Interactive": "-interactive", "SingleStream": "-edge"}.get(scenario, "")
