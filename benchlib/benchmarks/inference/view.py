"""What an inference run shows first, and its words."""

from typing import Any, get_args

from benchlib.benchmarks.inference.config import InferenceConfig, Scenario
from benchlib.benchmarks.inference.workers import sentences
from benchlib.results.run import Result
from benchlib.spec.unported import View


def warnings(config: InferenceConfig, result: Result | None) -> list[str]:
    """Return what limits the meaning of a result."""
    words = []
    if config.rules == "reduced":
        words.append("Reduced rules: these are no MLPerf results. The table of reduced rules lists each.")
    if config.model == "tiny":
        words.append(
            "The model is the embedded stand-in of 0.6 million parameters on generated news: its scores say nothing about others."
        )
    if config.random:
        words.append("Random weights: speed alone, with answers of a fixed length.")
    if config.engine == "sim":
        words.append("The engine is simulated: it computes nothing.")
    says = result.facts.get("says", {}) if result else {}
    if says.get("engine") == "sim":
        words.append("The workers simulate: they compute nothing.")
    if config.tokens == "text":
        words.append(
            "Text mode: the servers give no token ids. Tokens are counted by the tokenizer in their texts, and first tokens are first texts."
        )
    if result and (lost := sentences(result.tables)):
        words.append(f"Workers were lost, and rates are of those that were left. {' '.join(lost)}")
    return words


def tables(run: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of the report."""
    stored = run.result.tables
    shown = "test engine valid loadgen queries failed server_qps samples_per_s loadgen_per_s seconds why"
    scores = [{name: value for name, value in row.items() if name != "splitter"} for row in stored.get("rouge", [])]
    made = {
        "Tests": [{name: row[name] for name in shown.split()} for row in stored.get("tests", [])],
        "Before the run: how many queries a percentile takes": stored.get("plan", []),
        "Reduced rules": stored.get("reduced", []),
        "ROUGE and its controls": scores,
        "Timeline of single queries": stored.get("timeline", []),
    }
    some = {"Workers": "workers", "Lost and sent again": "losses", "Runs from LoadGen's peak downwards": "peak"}
    return made | {heading: [*map(_in_gb, stored[name])] for heading, name in some.items() if stored.get(name)}


def _in_gb(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose bytes are written in GB."""
    return {
        name.replace("_bytes", ", GB"): f"{value / 1e9:.3f}" if value and name.endswith("_bytes") else value
        for name, value in row.items()
    }


# Of each scenario, beside the percentiles that MLPerf limits.
OF_SCENARIO = {
    "ttft_s": "First token", "tpot_s": "Time per token", "latency_s": "Latency", "resident_memory_gb": "Resident memory",
}  # fmt: skip

VIEW = View(
    headlines=(
        "tokens_per_s_offline", "samples_per_s_offline", "ttft_p99_s_server", "tpot_p99_s_server", "goodput_per_s_server",
        "latency_p90_s_singlestream", "peak_qps_server", "rouge1", "roofline_share_offline", "total_s",
    ),
    labels={
        **{f"{name}_{test.lower()}": f"{words}, {test}" for name, words in OF_SCENARIO.items() for test in get_args(Scenario)},
        "tokens_per_s_offline": "Tokens/s, Offline",
        "samples_per_s_offline": "Samples/s, Offline",
        "ttft_p99_s_server": "First token, p99, Server",
        "tpot_p99_s_server": "Time per token, p99, Server",
        "goodput_per_s_server": "Goodput, Server",
        "latency_p90_s_singlestream": "Latency, p90, SingleStream",
        "peak_qps_server": "Peak rate, Server",
        "control_rouge1_shuffled": "ROUGE-1, control: other references",
        "control_rouge1_lead": "ROUGE-1, control: lead",
        "rouge1": "ROUGE-1",
        "roofline_share_offline": "Share of the roofline, Offline",
        "decode_share_server": "Share of the decode bound, one query, Server",
        "decode_share_singlestream": "Share of the decode bound, SingleStream",
        "prefill_share_static": "Share of the prefill bound, static",
        "prefill_share_continuous": "Share of the prefill bound, continuous",
        "usd_per_million_tokens_offline": "USD per million tokens, Offline",
        "energy_per_token_j_offline": "Energy per token, Offline",
        "device_utilization_offline": "Device busy, Offline",
        "device_memory_gb_offline": "Device memory, Offline",
        "worker_memory_gb_offline": "Memory of the fullest worker, Offline",
    },
    tables=tables,
    warnings=warnings,
    rate="tokens_per_s_offline",
)  # fmt: skip
