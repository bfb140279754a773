"""The SQuAD benchmark from the data to its rows, as each rank executes it.

Notation: T tokens of all windows.
"""

import hashlib
import importlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchlib import metrics
from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.benchmarks.squad.train import Questions, Task, load_data, load_model
from benchlib.config.schema import EMBEDDED_MODEL
from benchlib.core.events import Moment
from benchlib.core.files import sha256, write_json
from benchlib.runtime import devices
from benchlib.runtime.measurement import Rank, Tables
from benchlib.runtime.steps import comm_device
from benchlib.workloads import answers, features, model_files, training
from benchlib.workloads.collective_timing import Pace, Series, time_all_reduce
from benchlib.workloads.encoders import Loaded
from benchlib.workloads.features import Features, collate
from benchlib.workloads.squad_data import Example
from benchlib.workloads.stablehlo import mlir
from benchlib.workloads.training import Row, Trained

EXCHANGE_S = 0.75  # of all-reduces of the gradient buckets, twice; with restoring and comparing up to three times that
MISSES = 20
TOKENS_PER_BATCH = 8192  # without gradients a batch needs little memory; larger ones are no faster on a CPU
WARMUP_STEPS = 5  # not counted, at most a quarter of all: caches fill, DDP orders its buckets, kernels are chosen


def measure(rank: Rank) -> Tables:
    """Train, evaluate and measure; rank 0 leaves ``predictions.json``, too."""
    config, world, events = rank.config, rank.world, rank.events
    if config.engine == "compiled":
        mlir.jax()  # BackendUnavailable says what to install before any work is done
    events.emit("phase", name="data")
    split = load_data(config)  # what comes from the hub is fetched once: its libraries lock their caches
    events.emit("phase", name="model")
    loaded = load_model(config)
    if world.main and (note := model_files.attention_note(loaded.model, config.attention)):
        events.emit("log", message=note)
    events.emit("phase", name="features")
    began = Moment.now()
    progress = partial(events.emit, "progress", phase="features", unit="questions")
    train_features, eval_features = (
        features.build(part, loaded.tokenizer, config.max_length, config.doc_stride, labelled, progress)
        for part, labelled in ((split.train, True), (split.eval, False))
    )
    features_s = began.since()

    devices.require_precision(config.precision, world.device)
    task = Task(rank, loaded, train_features, len(eval_features.input_ids))
    precision = devices.products_in(config.precision, world.device)
    first = training.peak(rank, precision)
    events.emit("phase", name="warmup")
    trained = engine(config.engine)(task)
    exchange = _exchange(rank, trained.bucket_bytes) if world.size > 1 else None
    events.emit("phase", name="evaluate")
    began = Moment.now()
    logits = predict(loaded, eval_features, rank)
    predictions = dict[str, str]()
    if world.main:
        predictions = answers.best_answers(split.eval, eval_features, *logits, config.n_best, config.max_answer_tokens)
        write_json(rank.run_dir / "predictions.json", predictions)
    evaluate_s = began.since()
    # Again: it varies more from one moment of a run to another than from round to round.
    if exchange:
        exchange = exchange.followed_by(_exchange(rank, trained.bucket_bytes))
    warm = min(WARMUP_STEPS, (len(trained.table) - trained.first) // 4)
    tables = training.rows(trained, rank, precision, first, warm)
    if not world.main:
        return tables
    if loaded.flops.reason:
        tables["steps"][0]["why"] |= dict.fromkeys(("flops", "mfu"), loaded.flops.reason)
    # Last, and loaded before the clock starts: the import of evaluate counts neither as memory of the training nor as time.
    metric = metrics.load("squad_v1")
    began = Moment.now()
    scores = answers.score(predictions, split.eval, metric)
    worst = misses(split.eval, predictions, scores.pop("per_question"))
    evaluate_s += began.since()
    (row,) = tables["run"]
    row |= {
        "speed_scope": config.scope(),
        "quality": config.quality_scope() + "_cut" * (trained.plan.epoch_share < 1),
        "data": split.description,
        "global_batch": config.global_batch,
        "epoch_items": len(train_features),
        "parameters": loaded.parameters,
        "matmul_parameters": loaded.matmul_parameters,
        "train_questions": len(split.train),
        "eval_questions": len(split.eval),
        "shared_questions": split.shared,
        "bucket_bytes": trained.bucket_bytes,
        "checkpoint_faults": trained.passed_over,
        "identity": _identity(config, split, trained),
        **scores,
        "features_s": features_s,
        "evaluate_s": evaluate_s,
        "exchange_us": exchange and exchange.times_us,
        "message_bytes": exchange and exchange.bytes,
        "wrong_elements": exchange and exchange.wrong,
    }
    if not exchange:
        row["why"] |= dict.fromkeys(("exchange_us", "message_bytes", "wrong_elements"), "one rank exchanges nothing")
    if row["epoch_share"] < 1:
        short = f"after {row['epoch_share']:.0%} of the training; the target is for the whole training"
        row["why"] |= dict.fromkeys(("whole_f1", "whole_loss", "whole_minutes"), short)
    none: Tables = {"shares": [], "splits": [], "balance": []}
    return {**none, **tables, "misses": worst}


def engine(name: str) -> Callable[[Task], Trained]:
    """Return what trains, imported when used: the Trainer alone takes two seconds to import."""
    module = importlib.import_module(f"benchlib.benchmarks.squad.{'train' if name == 'native' else name}")
    return module.train  # type: ignore[no-any-return]


def _exchange(rank: Rank, bucket_bytes: Sequence[int]) -> Series:
    # At least 10 rounds: few leave an interval too wide to tell a regression from noise.
    pace = Pace(EXCHANGE_S, rank.config.planted_slowdown, least=10, most=300)
    return time_all_reduce(bucket_bytes, rank.world.device, pace)


def _identity(config: SquadConfig, split: Questions, trained: Trained) -> Row:
    """Return what stands for fields of the config in the fingerprint, by name of the field.

    The same content at another path is the same work; a training that was cut is another work than the whole one.
    """
    identity: Row = {}
    if trained.plan.epoch_share < 1:
        identity["max_steps"] = trained.plan.planned_steps
    folder = Path(config.model)
    if config.model != EMBEDDED_MODEL and folder.is_dir():
        files = (path for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".json", ".txt"))
        identity["model"] = f"folder:{hashlib.sha256(''.join(map(sha256, files)).encode()).hexdigest()[:16]}"
    if config.data == "files":
        identity |= dict.fromkeys(("train_file", "eval_file"), f"data:{split.sha256[:16]}")
    return identity


def predict(loaded: Loaded, features: Features, rank: Rank) -> tuple[np.ndarray, np.ndarray]:
    """Return (start logits, end logits), float32 (T,) each, whole on rank 0. Called by all ranks.

    Windows are sorted by length and dealt round-robin, so that the ranks have equal work and pad little.
    """
    model, world = loaded.model.eval(), rank.world
    order = np.argsort(-features.lengths, kind="stable")[world.rank :: world.size]
    logits = np.zeros((2, len(features.input_ids)), np.float32)
    done = 0
    with torch.inference_mode():
        while done < len(order):
            count = max(1, TOKENS_PER_BATCH // int(features.lengths[order[done]]))
            part = order[done : done + count]
            batch = collate(features, part, loaded.tokenizer.pad_token_id).to(world.device)
            with devices.autocast(rank.config.precision, world.device):
                output = model(**batch.inputs)
            real = np.arange(batch.shape[1]) < features.lengths[part][:, None]
            places = (features.starts[part][:, None] + np.arange(batch.shape[1]))[real]
            for row, part_logits in enumerate((output.start_logits, output.end_logits)):
                logits[row, places] = part_logits.float().cpu().numpy()[real]
            done += len(part)
            rank.events.emit("progress", phase="evaluate", done=done, total=len(order), unit="windows")
    # Each rank filled its own places and left the others zero: the sum puts them together.
    total = torch.from_numpy(logits).to(comm_device(world))
    dist.reduce(total, dst=0)
    joined = total.cpu().numpy()
    return joined[0], joined[1]


def misses(examples: Sequence[Example], predictions: dict[str, str], scores: Row) -> list[Row]:
    """Return the questions with the lowest F1 below 100, the worst first; ``scores`` are (exact match, F1) by question."""
    wrong = sorted((example for example in examples if scores[example.id][1] < 100), key=lambda one: scores[one.id][1])
    return [
        {"id": example.id, "question": example.question, "prediction": predictions[example.id]}
        | {"answers": " | ".join(dict.fromkeys(text for text, _ in example.answers)), "f1": scores[example.id][1]}
        for example in wrong[:MISSES]
    ]
