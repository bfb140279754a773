"""The values of a SQuAD run under the names and conditions of the published figures."""

from pathlib import PurePath
from typing import Any

from benchlib.placing import Measured, device_name
from benchlib.results import Run
from benchlib.squad.config import EMBEDDED_MODEL, SquadConfig

# Hub names and the parameters of the matrix products of their layers, L (4 h² + 2 h f): a folder's name alone proves nothing.
MODELS = {
    "bert-base-uncased": ("BERT-base uncased", 12 * (4 * 768**2 + 2 * 768 * 3072)),
    "bert-large-uncased": ("BERT-large uncased", 24 * (4 * 1024**2 + 2 * 1024 * 4096)),
}
DATA = {"squad": "SQuAD v1.1", "minisquad": "generated questions", "files": "the user's files"}
PARAMETERS_SLACK = 0.02  # the head and the pooler are counted by some and not by others


def measured(run: Run) -> list[Measured]:
    """Return quality, throughput, the exchange of gradients and the counts of the data, each with its conditions."""
    config, result = run.config, run.result
    assert isinstance(config, SquadConfig) and result is not None
    facts, common = result.facts, _common(config, result.facts)
    share = float(facts.get("epoch_share", 1.0))
    quality, speed = config.quality_scope(share), config.scope()
    whole = share >= 1 and config.epochs >= 1 and not _shortened(config)
    # Of a score the batch that counts is the one of a step, over all devices.
    trained = common | {"training": "whole" if whole else "cut", "batch": config.global_batch}
    padded = config.engine == "trainer" and config.trainer_padding == "max_length"
    padding = "to the full length" if padded else "to the longest of a batch"
    places = {"devices": config.world_size, "nodes": config.nnodes}
    exchange = places | {"definition": "bus bandwidth", "message_bytes": max(facts.get("bucket_bytes") or [0])}
    device = device_name(run.machine, config.backend, config.nproc)
    found = (
        ("f1", "F1", f"f1{quality}", trained),
        ("exact_match", "exact match", f"exact_match{quality}", trained),
        (
            "end_to_end_samples_per_s",
            "throughput",
            f"end_to_end_samples_per_s{speed}",
            common | places | {"padding": padding, "window": "whole training"},
        ),
        ("allreduce_gbps", "all-reduce", "allreduce_gbps", exchange),
    )
    values = [
        Measured(quantity, label, value, device, conditions)
        for quantity, label, name, conditions in found
        if (value := result.value(name)) is not None
    ]
    return values + _counts(config, facts, common)


def _common(config: SquadConfig, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": _model(config, facts),
        "data": DATA[config.data],
        "sequence_length": config.max_length,
        "doc_stride": config.doc_stride,
        "precision": config.precision,
        "batch": config.batch_size * config.accumulation,
        "epochs": config.epochs,
        "learning_rate": config.learning_rate,
    }


def _shortened(config: SquadConfig) -> bool:
    return bool(config.train_questions or config.eval_questions)


def _counts(config: SquadConfig, facts: dict[str, Any], common: dict[str, Any]) -> list[Measured]:
    """Return how many questions and features the data gave: a wrong version or tokenizer shows here first."""
    if config.data != "squad" or _shortened(config):
        return []
    conditions = {name: common[name] for name in ("data", "sequence_length", "doc_stride")}
    if common["model"] in dict(MODELS.values()):
        conditions["tokenizer"] = "BERT uncased"
    labels = {"train": "to train on", "eval": "to evaluate on"}
    return [
        Measured(f"{part}_{kind}", f"{kind} {label}", float(facts[kind][part]), "", conditions)
        for kind in ("questions", "features")
        for part, label in labels.items()
        if part in facts.get(kind, {})
    ]


def _model(config: SquadConfig, facts: dict[str, Any]) -> str:
    if config.model == EMBEDDED_MODEL:
        return "the embedded stand-in"
    name, parameters = MODELS.get(PurePath(config.model).name, (config.model, None))
    counted = facts.get("matmul_parameters")
    if parameters and counted and abs(counted / parameters - 1) > PARAMETERS_SLACK:
        return f"{config.model} with {counted:,} parameters"
    return f"{name}, random weights" if config.init == "random" else name
