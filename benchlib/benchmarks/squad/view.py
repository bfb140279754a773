"""What a report of the SQuAD training shows first, its words, and what limits its results."""

from typing import Any

from benchlib.core.text import stand_ins
from benchlib.spec.unported import View


def warnings(config: Any, result: Any) -> list[str]:
    """Return what limits the meaning of the result: stand-ins, unlike ranks on purpose, a training that was cut, a drift."""
    facts = result.facts if result else {}
    share = facts.get("epoch_share", 1.0)
    share = float(share) if isinstance(share, (int, float)) else 1.0
    sentences = stand_ins(config.quality_scope(share), facts.get("model")) + config.on_purpose()
    if share < 1:
        counts = [facts.get(name) for name in ("planned_steps", "total_steps")]
        steps = f", {counts[0]:,} of {counts[1]:,} steps" if all(isinstance(count, int) for count in counts) else ""
        reason = f": {facts['plan_reason']}" if facts.get("plan_reason") else ""
        sentences.append(f"The run covered {share:.1%} of the whole training{steps}{reason}.")
    if facts.get("throughput_drift"):
        sentences.append(f"Training throughput {facts['throughput_drift']} samples/s by quarter: no steady state.")
    return sentences


def tables(run: Any) -> dict[str, list[dict[Any, Any]]]:
    """Return the tables of the report: those of unlike ranks with their units, without the steps, which pictures show."""
    from benchlib.benchmarks.squad import tables as unlike  # pandas takes a while to import

    rest = {name: rows for name, rows in run.result.tables.items() if name not in (*unlike.COLUMNS, "unlike_steps")}
    laid_out = ("misses", "ranks")  # by the report itself
    return {name if name in laid_out else VIEW.heading(name): rows for name, rows in rest.items()} | unlike.report(run)


VIEW = View(
    headlines=(
        "f1",
        "exact_match",
        "loss_final",
        "train_samples_per_s",
        "step_s",
        "allreduce_gbps",
        "resident_memory_gb",
        "total_s",
    ),
    labels={
        "f1": "F1",
        "exact_match": "Exact match",
        "loss_final": "Final loss",
        "train_samples_per_s": "Training throughput",
        "step_s": "Step time",
        "allreduce_gbps": "All-reduce (bus)",
        "resident_memory_gb": "Resident memory",
        "device_memory_gb": "Device memory",
        "mfu": "Model FLOP utilisation",
        "balance_distance": "Split, times the best",
        "balance_wait_share": "Waiting for slower ranks",
    },
    tables=tables,
    warnings=warnings,
    rate="train_samples_per_s",
    batch=("batch_size", "accumulation"),
    ways=(
        "engine",
        "attention",
        "compile",
        "fused_optimizer",
        "fast_dropout",
        "bucket_cap_mb",
        "balance",
        "bf16_ranks",
    ),
)
