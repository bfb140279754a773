"""What a report of the strategies shows first, its words, its rate for prices, and what limits its results."""

from typing import Any

from benchlib.benchmarks import View
from benchlib.benchmarks.parallel.planning import listing


def warnings(config: Any, result: Any) -> list[str]:
    """Return what limits the meaning of the result: a stand-in model, planted faults, ranks that share one host's cores."""
    sentences = []
    if "tiny" in (config.suite or [config.model]):
        sentences.append(
            "Model tiny is a stand-in: its steps are short, so launching and exchanges weigh more than in a real model."
        )
    if config.source == "synthetic":
        sentences.append("The tokens are random: rates hold for any text, losses say nothing about language.")
    if config.planted:
        what = {"data": "data", "rank": "the last rank", "communication": "the exchange of DDP"}[config.planted]
        sentences.append(f"The slow-down was planted in {what}.")
    if config.backend == "cpu" and config.world_size > 1:
        sentences.append("Ranks are processes of CPUs: their exchanges take the same cores as their compute.")
    return sentences


def tables(run: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of the report."""
    from benchlib.benchmarks.parallel import tables as own  # brings pandas

    return own.tables(run)


VIEW = View(
    headlines=("samples_per_s_best", "matmul_peak_flops", "total_s"),
    labels={
        "samples_per_s_best": "Fastest strategy",
        "samples_per_s": "Training throughput",
        "step_s": "Step time",
        "mfu": "Model FLOP utilisation",
        "peak_memory_gb": "Memory of the fullest rank",
        "strong_scaling": "Strong scaling efficiency",
        "weak_scaling": "Weak scaling efficiency",
        "matmul_peak_flops": "Peak of matrix products",
    },
    tables=tables,
    warnings=warnings,
    listing=listing,
    rate="samples_per_s_best",
    batch=("batch_size",),
    ways=(
        "strategies", "coverage", "schedules", "data", "tensor", "pipeline", "shard", "scaling", "micro_batches", "checkpointing", "compile",
        "warmup", "steps", "prove", "find_max_batch", "memory_gb",
    ),
)  # fmt: skip
