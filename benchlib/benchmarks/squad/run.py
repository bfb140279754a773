"""The SQuAD benchmark from the data to the result, as each rank executes it.

Letters: T tokens of all windows.
"""

import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import transformers

from benchlib.benchmarks.squad import metrics
from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.benchmarks.squad.judge import ANSWERS, PREDICTIONS
from benchlib.benchmarks.squad.steps import Task, Trained, load_data, load_model
from benchlib.config.schema import EMBEDDED_MODEL, BaseConfig
from benchlib.core import files, mlir
from benchlib.core.errors import UserError
from benchlib.core.events import EventWriter, Moment, read_events, restarts
from benchlib.core.files import sha256, write_json
from benchlib.core.stats import drift_text
from benchlib.results import peaks as recorded_peaks
from benchlib.results.metrics import measured
from benchlib.results.run import Result, save_result
from benchlib.runtime import devices, peaks
from benchlib.runtime.group import World, all_gather_objects, barrier, world
from benchlib.runtime.step_metrics import device_memory, device_rows, rank_rows, sensor_metrics
from benchlib.runtime.steps import Columns, comm_device, launched_at
from benchlib.workloads import answers, encoders, features, squad_data
from benchlib.workloads.batches import collate
from benchlib.workloads.collective_timing import AllReduce, Pace, time_all_reduce
from benchlib.workloads.encoders import Loaded
from benchlib.workloads.features import Features
from benchlib.workloads.squad_text import Example

# ``module:function`` of (Task) -> Trained, imported when used: the Trainer alone takes two seconds to import.
ENGINES = {
    "native": "benchlib.benchmarks.squad.train:train",
    "compiled": "benchlib.benchmarks.squad.compiled:train",
    "trainer": "benchlib.benchmarks.squad.trainer:train",
}

EXCHANGE_S = 0.75  # of all-reduces of the gradient buckets, twice; with restoring and comparing up to three times that
PEAK_S = 0.3  # of matrix products of each size
TOKENS_PER_BATCH = 8192  # without gradients a batch needs little memory; larger ones are no faster on a CPU
MISSES = 20
_AROUND = 120  # characters of context on each side of the gold answer in the table of misses

Part = TypeVar("Part")

_FROM_THE_START = "after a failure the training begins anew, since only checkpoint_every=STEPS, and not with engine=trainer, leaves checkpoints on its way"


def run(config: BaseConfig, run_dir: Path, events: EventWriter) -> None:
    """Train, evaluate and measure; rank 0 leaves ``result.json``, ``samples.parquet``, ``predictions.json`` and ``answers.json``."""
    if not isinstance(config, SquadConfig):
        raise UserError(f"benchmark = {config.benchmark}: this is the squad benchmark")
    events.emit("phase", name="init")
    if config.engine == "compiled":
        mlir.jax()  # BackendUnavailable says what to install before any work is done
    with world(config, run_dir) as here:
        _run(config, run_dir, events, here)


def _run(config: SquadConfig, run_dir: Path, events: EventWriter, here: World) -> None:
    launched = launched_at(run_dir)
    restarted = max(all_gather_objects(restarts(run_dir)))  # a node that took another's place was not there before
    result = Result.of(config, started_at=launched.wall)
    if here.main:
        save_result(run_dir, result)

    events.emit("phase", name="data")
    # What may come from the hub is fetched by one rank; the others then find it in the cache.
    split = _main_first(here, config.data == "squad", lambda: load_data(config))
    events.emit("phase", name="model")
    loaded = _main_first(
        here, config.model != EMBEDDED_MODEL and not Path(config.model).exists(), lambda: load_model(config)
    )
    events.emit("phase", name="features")
    began = Moment.now()

    def build(training: bool) -> features.Features:
        def progress(done: int, total: int) -> None:
            events.emit("progress", phase="features", done=done, total=total, unit="questions")

        examples = split.train if training else split.eval
        return features.build(
            examples, loaded.tokenizer, config.max_length, config.doc_stride, training, files.cache(), progress
        )

    train_features, eval_features = build(True), build(False)
    features_s = began.since()
    if not len(train_features) or not len(eval_features):
        raise UserError("the data gave no features to train or to evaluate on: give more questions")

    task = Task(
        config=config, world=here, loaded=loaded, examples=split.train, features=train_features, events=events, run_dir=run_dir,
        deadline=launched.monotonic + config.budget_s, eval_tokens=len(eval_features.input_ids),
    )  # fmt: skip
    precision = config.precision_of(here.rank)
    before = peaks.all_ranks_peak(here, precision, PEAK_S)
    trained = engine(config.engine)(task)
    memory, memory_reason = devices.peak_memory_bytes(here.device)
    exchange = _exchange(trained, here, config.planted_slowdown)
    trained.notes += [f"groups of the gradient exchange: {here.layout}"] * bool(here.layout)

    events.emit("phase", name="evaluate")
    began = Moment.now()
    start_logits, end_logits = predict(loaded, eval_features, here, events, config.precision)
    predictions: dict[str, str] = {}
    scores: dict[str, Any] = {}
    if here.main:
        predictions = answers.best_answers(
            split.eval, eval_features, start_logits, end_logits, config.n_best, config.max_answer_tokens
        )
        scores = answers.score(predictions, split.eval)
    evaluate_s = began.since()

    # Again: it varies more from one moment of a run to another than from round to round.
    exchange = _exchange(trained, here, config.planted_slowdown, exchange)
    after = peaks.all_ranks_peak(here, precision, PEAK_S)
    resident = all_gather_objects(devices.peak_resident_bytes())
    by_rank = all_gather_objects(memory)
    if not here.main:
        return

    events.emit("phase", name="write")
    # Twice, since a busy neighbour lowers a peak and nothing raises it.
    peak, peak_reason = max(
        (before, after, recorded_peaks.highest(run_dir, _precision(config), here.size)),
        key=lambda measurement: measurement[0] or 0.0,
    )
    sensed = read_events(run_dir, {"sensor", "sensors"})
    window = trained.began.wall, trained.began.wall + trained.train_s
    scope, quality = config.scope(), config.quality_scope(trained.plan.epoch_share)
    result.metrics = [
        *metrics.quality_metrics(trained, quality),
        measured(f"f1{quality}", scores["f1"], "", "higher", reason="official rules, percent"),
        measured(f"exact_match{quality}", scores["exact_match"], "", "higher", reason="official rules, percent"),
        *metrics.speed_metrics(trained, scope, here.size, peak, peak_reason),
        *metrics.exchange_metrics(exchange),
        device_memory(by_rank, memory_reason),
        measured(
            "resident_memory_gb",
            max(resident) / 1e9,
            "GB",
            "lower",
            reason="peak of the largest rank until the results are written",
        ),
        *sensor_metrics(sensed, *window, config.backend),
        measured(
            "startup_s",
            trained.began.monotonic - launched.monotonic,
            "s",
            "lower",
            reason="from the launch to the first step",
        ),
        measured(
            "features_s",
            features_s,
            "s",
            "lower",
            reason="read from the cache" if train_features.from_cache else "made and cached",
        ),
        measured("train_s", trained.train_s, "s", "lower"),
        measured("evaluate_s", evaluate_s, "s", "lower", reason="prediction, spans and scores"),
        *trained.more.metrics,
        measured("total_s", launched.since(), "s", "lower", reason="from the launch to the result"),
    ]
    throughput = result.metric(f"train_samples_per_s{scope}")
    result.facts = _facts(config, trained, loaded, split, train_features, eval_features) | {
        "restarts": restarted,
        **({"allreduce_wrong_elements": exchange.wrong} if exchange else {}),
        "answers_sha256": _gold_answers(run_dir, split),
        "throughput_drift": drift_text(throughput.samples if throughput else []),
        **trained.more.facts,
    }
    result.tables = {
        "misses": misses(split.eval, predictions, scores["per_question"]),
        "ranks": rank_rows(
            Columns(trained.table[metrics.steady_from(trained) :]), trained.samples_seen, resident, by_rank
        ),
        "devices": device_rows(sensed, *window),
        **trained.more.tables,
    }
    result.notes = [
        split.description,
        trained.plan.reason,
        *_of_restarts(config, restarted, trained),
        *trained.notes,
        *trained.more.notes,
    ]
    result.status, result.ended_at = "complete", launched.wall + launched.since()
    write_json(run_dir / PREDICTIONS, predictions)
    save_result(run_dir, result)


def _gold_answers(run_dir: Path, split: squad_data.Split) -> str:
    """Write the gold answers by question, for whoever judges the predictions again, and return the file's SHA-256."""
    answers = {example.id: list(dict.fromkeys(text for text, _ in example.answers)) for example in split.eval}
    write_json(run_dir / ANSWERS, answers)
    return sha256(run_dir / ANSWERS)


def _of_restarts(config: SquadConfig, count: int, trained: Trained) -> list[str]:
    if not count:
        without = config.engine == "trainer" or config.checkpoint_every <= 0
        return [f"max_restarts = {config.max_restarts}: {_FROM_THE_START}"] if config.max_restarts and without else []
    start = f"continued after step {trained.resumed_step:,}" if trained.resumed_step else "begun anew"
    return [
        f"the ranks were started again {count} time{'s' * (count != 1)}, the training was {start}: loss and scores are those of the whole training, speed is that of the steps after it, and total_s has the failures in it"
    ]


def engine(name: str) -> Callable[[Task], Trained]:
    """Return what trains, by its name in ``ENGINES``."""
    module, _, function = ENGINES[name].partition(":")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


def _main_first(here: World, alone: bool, load: Callable[[], Part]) -> Part:
    """Return ``load()``; with ``alone`` rank 0 does it before the others."""
    if not alone:
        return load()
    loaded = load() if here.main else None
    barrier()
    return loaded if loaded is not None else load()


def _exchange(trained: Trained, here: World, slowdown: float, earlier: AllReduce | None = None) -> AllReduce | None:
    if here.size == 1:
        return None
    # At least 10 rounds: few leave an interval too wide to tell a regression from noise.
    exchange = time_all_reduce(trained.bucket_bytes, here.device, Pace(EXCHANGE_S, slowdown, least=10, most=300))
    return earlier + exchange if earlier else exchange


def _facts(
    config: SquadConfig,
    trained: Trained,
    loaded: encoders.Loaded,
    split: squad_data.Split,
    train: features.Features,
    evaluation: features.Features,
) -> dict[str, Any]:
    rates = trained.learning_rates
    return {
        "planned_steps": trained.plan.planned_steps,
        "total_steps": trained.plan.total_steps,
        "epoch_share": trained.plan.epoch_share,
        "epoch_items": len(train),
        "plan_reason": trained.plan.reason,
        "steady_from_step": metrics.steady_from(trained) + 1,
        "samples_expected": trained.plan.samples,
        "samples_seen": trained.samples_seen,
        "learning_rates": {"min": min(rates), "max": max(rates), "last": rates[-1]},
        "checksums_equal": all(len(set(ranks)) == 1 for ranks in trained.checksums),
        "checksums": trained.checksums,
        "parameters": loaded.parameters,
        "matmul_parameters": loaded.matmul_parameters,
        "fresh_weights": loaded.fresh,
        "features": {
            "train": len(train),
            "eval": len(evaluation),
            "questions_cut": train.questions_cut + evaluation.questions_cut,
        },
        "questions": {"train": len(split.train), "eval": len(split.eval)},
        "bucket_bytes": trained.bucket_bytes,
        "resumed_step": trained.resumed_step,
        "checkpoints_passed_over": trained.passed_over,
        "precision": _precision(config),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "data_sha256": split.sha256,
        "identity": _identity(config, split, trained),
    }


def _precision(config: SquadConfig) -> str:
    """Return the precision of matrix products in words: of ranks of two kinds, whose peaks no other run has, both."""
    return config.precision + (f", bf16 on ranks {','.join(map(str, config.bf16_ranks))}" if config.bf16_ranks else "")


def _identity(config: SquadConfig, split: squad_data.Split, trained: Trained) -> dict[str, Any]:
    """Return what stands for fields of the config in the fingerprint, by name of the field.

    The same content at another path is the same work; a training that was cut is another work than the whole one.
    """
    identity: dict[str, Any] = {}
    if trained.plan.epoch_share < 1:
        identity["max_steps"] = trained.plan.planned_steps
    folder = Path(config.model)
    if config.model != EMBEDDED_MODEL and folder.is_dir():
        digest = hashlib.sha256(
            "".join(
                sha256(path) for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".json", ".txt")
            ).encode()
        )
        identity["model"] = f"folder:{digest.hexdigest()[:16]}"
    if config.data == "files":
        identity |= {"train_file": f"data:{split.sha256[:16]}", "eval_file": f"data:{split.sha256[:16]}"}
    if "balance" in trained.more.facts and config.balance != "auto":
        identity["balance"] = trained.more.facts["balance"]["shares"]
    return identity


def predict(
    loaded: Loaded, features: Features, world: World, events: EventWriter, precision: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return (start logits, end logits), float32 (T,) each, whole on rank 0. Called by all ranks.

    Windows are sorted by length and dealt in turns, so that the ranks have equal work and pad little.
    """
    model = loaded.model.eval()
    order = np.argsort(-features.lengths, kind="stable")[world.rank :: world.size]
    logits = np.zeros((2, len(features.input_ids)), np.float32)
    done = 0
    with torch.inference_mode():
        while done < len(order):
            count = max(1, TOKENS_PER_BATCH // int(features.lengths[order[done]]))
            part = order[done : done + count]
            batch = collate(features, part, loaded.tokenizer.pad_token_id).to(world.device)
            with devices.autocast(precision, world.device):
                output = model(**batch.inputs)
            real = np.arange(batch.shape[1]) < features.lengths[part][:, None]
            places = (features.starts[part][:, None] + np.arange(batch.shape[1]))[real]
            for row, part_logits in enumerate((output.start_logits, output.end_logits)):
                logits[row, places] = part_logits.float().cpu().numpy()[real]
            done += len(part)
            events.emit("progress", phase="evaluate", done=done, total=len(order), unit="windows")
    # Each rank filled its own places and left the others zero: the sum puts them together.
    total = torch.from_numpy(logits).to(comm_device(world))
    dist.reduce(total, dst=0)
    joined = total.cpu().numpy()
    return joined[0], joined[1]


def misses(
    examples: Sequence[Example],
    predictions: Mapping[str, str],
    per_question: Sequence[Mapping[str, Any]],
    limit: int = MISSES,
) -> list[dict[str, Any]]:
    """Return the questions with the lowest F1 below 100, the worst first, with an excerpt around the gold answer."""
    wrong = sorted((row for row in per_question if row["f1"] < 100), key=lambda row: row["f1"])[:limit]
    by_id = {example.id: example for example in examples}
    rows = []
    for row in wrong:
        example = by_id[row["id"]]
        texts = list(dict.fromkeys(text for text, _ in example.answers))
        first, size = example.answers[0][1], len(example.answers[0][0])
        low, high = max(0, first - _AROUND), min(len(example.context), first + size + _AROUND)
        excerpt = ("…" if low else "") + example.context[low:high] + ("…" if high < len(example.context) else "")
        rows.append(
            {
                "id": example.id,
                "question": example.question,
                "prediction": predictions.get(example.id, ""),
                "answers": texts,
                "f1": row["f1"],
                "context": excerpt,
            }
        )
    return rows
