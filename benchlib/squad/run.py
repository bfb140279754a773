"""The SQuAD benchmark from the data to the result, as each rank executes it."""

import hashlib
import importlib
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import transformers

from benchlib import devices, features, models, paths, peaks, scoring, spans, squad_data
from benchlib.clock import Moment
from benchlib.config import BaseConfig
from benchlib.errors import RunBroken, UserError
from benchlib.events import EventWriter, read_events, restarts
from benchlib.files import sha256, write_json
from benchlib.metrics import Metric, derived, measured, not_available
from benchlib.process_group import World, all_gather_objects, barrier, world
from benchlib.results import Result, save_result
from benchlib.squad import evaluate, outcome
from benchlib.squad.config import EMBEDDED_MODEL, SquadConfig
from benchlib.squad.training import Task, Trained
from benchlib.timing import Bandwidth, all_reduce_bandwidth

# ``module:function`` of (Task) -> Trained, imported when used: the Trainer alone takes two seconds to import.
ENGINES = {"native": "benchlib.squad.native:train", "trainer": "benchlib.squad.trainer:train"}

T = TypeVar("T")

_FROM_THE_START = "after a failure the training begins anew, since only engine=native with checkpoint_every=STEPS leaves checkpoints on its way"


def run(config: BaseConfig, run_dir: Path, events: EventWriter) -> None:
    """Train, evaluate and measure; rank 0 leaves ``result.json``, ``samples.parquet`` and ``predictions.json``."""
    if not isinstance(config, SquadConfig):
        raise UserError(f"benchmark = {config.benchmark}: this is the squad benchmark")
    events.emit("phase", name="init")
    with world(config, run_dir) as here:
        _run(config, run_dir, events, here)


def _run(config: SquadConfig, run_dir: Path, events: EventWriter, here: World) -> None:
    launched = _launched(run_dir)
    restarted = max(all_gather_objects(restarts(run_dir)))  # a node that took another's place was not there before
    result = Result.of(config, started_at=launched.wall)
    if here.main:
        save_result(run_dir, result)

    events.emit("phase", name="data")
    # What may come from the hub is fetched by one rank; the others then find it in the cache.
    split = _main_first(here, config.data == "squad", lambda: squad_data.load(config))
    events.emit("phase", name="model")
    loaded = _main_first(
        here, config.model != EMBEDDED_MODEL and not Path(config.model).exists(), lambda: models.load(config)
    )
    events.emit("phase", name="features")
    began = Moment.now()

    def build(training: bool) -> features.Features:
        def told(done: int, total: int) -> None:
            events.emit("progress", phase="features", done=done, total=total, unit="contexts")

        examples = split.train if training else split.eval
        return features.build(
            examples, loaded.tokenizer, config.max_length, config.doc_stride, training, paths.cache(), told
        )

    train_features, eval_features = build(True), build(False)
    features_s = began.since()
    if not len(train_features) or not len(eval_features):
        raise UserError("the data gave no features to train or to evaluate on: give more questions")

    task = Task(
        config=config, world=here, loaded=loaded, examples=split.train, features=train_features, events=events, run_dir=run_dir,
        deadline=launched.monotonic + config.budget_s, eval_tokens=len(eval_features.input_ids),
    )  # fmt: skip
    before = _matmul_peak(config, here)
    trained = _engine(config.engine)(task)
    memory, memory_reason = devices.peak_memory_bytes(here.device)

    events.emit("phase", name="evaluate")
    began = Moment.now()
    start_logits, end_logits = evaluate.predict(loaded, eval_features, here, events, config.precision)
    predictions: dict[str, str] = {}
    scores: dict[str, Any] = {}
    if here.main:
        predictions = spans.best_answers(
            split.eval, eval_features, start_logits, end_logits, config.n_best, config.max_answer_tokens
        )
        scores = scoring.score(predictions, split.eval)
    evaluate_s = began.since()

    bandwidth = _bandwidth(trained, here, config.planted_slowdown)
    # Twice, since a busy neighbour lowers a peak and nothing raises it.
    peak, peak_reason = max(before, _matmul_peak(config, here), key=lambda found: found[0] or 0.0)
    resident = all_gather_objects(devices.peak_resident_bytes())
    device_memory = all_gather_objects(memory)
    if not here.main:
        return

    events.emit("phase", name="write")
    scope, quality = config.scope(), config.quality_scope(trained.plan.epoch_share)
    result.metrics = [
        *outcome.quality_metrics(trained, quality),
        measured(f"f1{quality}", scores["f1"], "", "higher", reason="official rules, percent"),
        measured(f"exact_match{quality}", scores["exact_match"], "", "higher", reason="official rules, percent"),
        *outcome.speed_metrics(trained, scope, here.size, peak, peak_reason),
        *outcome.bandwidth_metrics(bandwidth),
        _device_memory(device_memory, memory_reason),
        measured("resident_memory_gb", max(resident) / 1e9, "GB", "lower", reason="peak of the largest rank"),
        *outcome.sensor_metrics(
            read_events(run_dir, {"sensor", "sensors"}),
            trained.began.wall,
            trained.began.wall + trained.train_s,
            config,
        ),
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
        measured("total_s", launched.since(), "s", "lower", reason="from the launch to the result"),
    ]
    result.facts = _facts(config, trained, loaded, split, train_features, eval_features) | {"restarts": restarted}
    result.tables = {
        "misses": evaluate.misses(split.eval, predictions, scores["per_question"]),
        "ranks": outcome.rank_rows(trained, resident),
    }
    result.notes = [split.description, trained.plan.reason, *_of_restarts(config, restarted, trained), *trained.notes]
    result.status, result.ended_at = "complete", launched.wall + launched.since()
    write_json(run_dir / "predictions.json", predictions)
    save_result(run_dir, result)


def _of_restarts(config: SquadConfig, count: int, trained: Trained) -> list[str]:
    if not count:
        without = config.engine != "native" or config.checkpoint_every <= 0
        return [f"max_restarts = {config.max_restarts}: {_FROM_THE_START}"] if config.max_restarts and without else []
    start = f"continued after step {trained.resumed_step:,}" if trained.resumed_step else "begun anew"
    return [
        f"the ranks were started again {count} time{'s' * (count != 1)}, the training was {start}: loss and scores are those of the whole training, speed is that of the steps after it, and total_s has the failures in it"
    ]


def _engine(name: str) -> Callable[[Task], Trained]:
    module, _, function = ENGINES[name].partition(":")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


def _launched(run_dir: Path) -> Moment:
    """Return when the run was launched: as the supervisor wrote it, else when this process began."""
    launched = read_events(run_dir, {"launched"})
    if not launched:
        return Moment.at(psutil.Process().create_time())
    last = launched[-1]
    # Another machine has another monotonic clock.
    return Moment(last["t"], last["monotonic"]) if last["host"] == platform.node() else Moment.at(last["t"])


def _main_first(here: World, alone: bool, load: Callable[[], T]) -> T:
    """Return ``load()``; with ``alone`` rank 0 does it before the others."""
    if not alone:
        return load()
    found = load() if here.main else None
    barrier()
    return found if found is not None else load()


def _bandwidth(trained: Trained, here: World, slowdown: float) -> Bandwidth | None:
    if here.size == 1:
        return None
    found = all_reduce_bandwidth(trained.bucket_bytes, here.device, slowdown=slowdown)
    wrong = sum(all_gather_objects(found.wrong))
    if wrong:
        raise RunBroken(f"all-reduce ({here.collective}) gave {wrong:,} wrong sums: the gradients cannot be trusted")
    return found


def _matmul_peak(config: SquadConfig, here: World) -> tuple[float | None, str]:
    """Measure all ranks at the same time, with the threads and the precision of the training; return their sum."""
    barrier()
    found = peaks.matmul_peak(here.device, config.precision, threads=torch.get_num_threads())
    best = all_gather_objects(found.best)
    if any(value is None for value in best):
        return None, found.reason or "a rank could not measure it"
    threads = f", {torch.get_num_threads()} threads each" if here.device.type == "cpu" else ""
    return (
        sum(value for value in best if value is not None),
        f"{config.precision} products of size {found.size}, {here.size} ranks at the same time{threads}, the better of two measurements",
    )


def _device_memory(found: list[float | None], reason: str) -> Metric:
    known = [value for value in found if value is not None]
    if not known:
        return not_available("device_memory_gb", "GB", "lower", reason)
    return derived(
        "device_memory_gb",
        max(known) / 1e9,
        "GB",
        "lower",
        "peak of the tensors of the largest rank during the training",
    )


def _facts(
    config: SquadConfig,
    trained: Trained,
    loaded: models.Loaded,
    split: squad_data.Split,
    train: features.Features,
    evaluation: features.Features,
) -> dict[str, Any]:
    rates = trained.learning_rates
    return {
        "planned_steps": trained.plan.planned_steps,
        "total_steps": trained.plan.total_steps,
        "epoch_share": trained.plan.epoch_share,
        "plan_reason": trained.plan.reason,
        "steady_from_step": outcome.steady_from(trained) + 1,
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
        "precision": config.precision,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "data_sha256": split.sha256,
        "identity": _identity(config, split, trained),
    }


def _identity(config: SquadConfig, split: squad_data.Split, trained: Trained) -> dict[str, Any]:
    """Return what stands for fields of the config in the fingerprint, by name of the field.

    The same content at another path is the same work; a training that was cut is another work than the whole one.
    """
    found: dict[str, Any] = {}
    if trained.plan.epoch_share < 1:
        found["max_steps"] = trained.plan.planned_steps
    folder = Path(config.model)
    if config.model != EMBEDDED_MODEL and folder.is_dir():
        digest = hashlib.sha256(
            "".join(
                sha256(path) for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".json", ".txt")
            ).encode()
        )
        found["model"] = f"folder:{digest.hexdigest()[:16]}"
    if config.data == "files":
        found |= {"train_file": f"data:{split.sha256[:16]}", "eval_file": f"data:{split.sha256[:16]}"}
    return found
