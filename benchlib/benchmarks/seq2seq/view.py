"""What a report of the encoder-decoder training shows first, its words, its rate for prices, and what limits its results."""

from typing import Any

from benchlib.core.text import stand_ins
from benchlib.spec.unported import View


def warnings(config: Any, result: Any) -> list[str]:
    """Return what limits the meaning of the result: a shortened set, a planted disk, a speed that drifted."""
    facts = result.facts if result else {}
    used = facts.get("samples_per_epoch", config.epoch_samples)
    sentences = stand_ins(config.scope(used).strip("_"), None)
    if config.planted_disk_mb_per_s:
        sentences.append(f"Reads of shards were held to {config.planted_disk_mb_per_s:g} MB/s on purpose.")
    if facts.get("throughput_drift"):
        sentences.append(f"Training throughput {facts['throughput_drift']} samples/s by quarter: no steady state.")
    return sentences


VIEW = View(
    headlines=(
        "train_samples_per_s",
        "epoch_s",
        "tuned_over_plain",
        "mfu",
        "data_wait_share",
        "loss_final",
        "resident_memory_gb",
        "total_s",
    ),
    labels={
        "train_samples_per_s": "Training throughput",
        "epoch_s": "Time per epoch",
        "tuned_over_plain": "Tuned over plain",
        "mfu": "Model FLOP utilisation",
        "data_wait_share": "Waiting for data",
        "loss_final": "Final loss",
        "resident_memory_gb": "Resident memory",
        "device_memory_gb": "Device memory",
        "disk_raw_mb_per_s": "Disk, raw sequential",
        "loader_mb_per_s": "Loader alone",
        "data_asked_mb_per_s": "Data asked for",
        "loader_over_raw": "Loader over raw",
        "step_s": "Step time",
    },
    headings={
        "devices": "Devices, over the training",
        "engines": "Losses of the engines, in turns",
        "epochs": "Epochs",
        "batches": "Batches tried",
        "sizes": "What each size asks of the disk",
    },
    warnings=warnings,
    exports=(
        (
            "bench",
            "one JSON file per run of seq2seq: metadata, config, epochs, summary",
            "benchlib.benchmarks.seq2seq.export:write",
        ),
    ),
    rate="train_samples_per_s",
    batch=("batch_size",),
    ways=(
        "samples",  # an epoch's items are compared, which a cut to the budget leaves as they are
        "full",
        "engine",
        "compile",
        "compare_steps",
        "single",
        "data_dir",
        "num_shards",
        "token_bytes",
        "page_cache",
        "read",
        "read_ahead",
        "verify",
        "memory_share",
        "memory_gb",
        "batch",
    ),
)
