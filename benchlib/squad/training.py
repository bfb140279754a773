"""What both engines share: what they are given, what they leave, the proof that all ranks hold the same weights."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchlib import devices
from benchlib.batches import MicroBatch
from benchlib.checkpoint import rng_state, set_rng_state
from benchlib.clock import Moment
from benchlib.events import EventWriter
from benchlib.example import Example
from benchlib.features import Features
from benchlib.flops import encoder_train_flops
from benchlib.models import Loaded
from benchlib.process_group import World, barrier, checksums_equal
from benchlib.squad.config import SquadConfig
from benchlib.squad.plan import Plan
from benchlib.squad.steplog import comm_device


@dataclass(frozen=True)
class Task:
    """What an engine is given. ``deadline`` is the moment (``time.monotonic``) by which the run should have ended.

    ``eval_tokens`` are the tokens that the evaluation will process after the training.
    """

    config: SquadConfig
    world: World
    loaded: Loaded
    examples: Sequence[Example]
    features: Features
    events: EventWriter
    run_dir: Path
    deadline: float
    eval_tokens: int


@dataclass
class Trained:
    """What an engine leaves. ``table`` is ``StepLog.table``; ``checksums`` has a list with one text per rank for each
    comparison; ``bucket_bytes`` are the sizes of the gradient messages of a step; ``resumed_step`` counts the steps of
    an earlier run that this one continued.
    """

    plan: Plan
    table: np.ndarray
    learning_rates: list[float]
    samples_seen: list[int]
    bucket_bytes: list[int]
    began: Moment
    train_s: float
    checksums: list[list[str]] = field(default_factory=list)
    resumed_step: int = 0
    notes: list[str] = field(default_factory=list)


def qa_loss(model: Any, batch: MicroBatch, precision: str) -> torch.Tensor:
    """Return the sum over the micro-batch of (start loss + end loss) / 2, a scalar in fp32."""
    with devices.autocast(precision, batch.inputs["input_ids"].device):
        output = model(**batch.inputs)
    assert batch.start is not None and batch.end is not None
    # Padding must not take part in the softmax: how much there is depends on the neighbours in the micro-batch, and with
    # it the loss would depend on the number of ranks. fp32: bf16 loses the digits that a loss is made of.
    padding = batch.inputs["attention_mask"] == 0
    losses = [
        torch.nn.functional.cross_entropy(
            logits.float().masked_fill(padding, torch.finfo(torch.float32).min), target, reduction="sum"
        )
        for logits, target in ((output.start_logits, batch.start), (output.end_logits, batch.end))
    ]
    return (losses[0] + losses[1]) / 2


def flops_of(loaded: Loaded) -> Callable[[int, int], float]:
    """Return the function of (samples, padded length) that gives the FLOPs of training on them; NaN where unknown."""
    layers, hidden, intermediate = loaded.layers, loaded.hidden, loaded.intermediate
    if layers is None or hidden is None or intermediate is None:
        return lambda samples, length: float("nan")
    return lambda samples, length: encoder_train_flops(layers, hidden, intermediate, [(samples, length)])


def compare_ranks(model: torch.nn.Module, world: World, events: EventWriter, epoch: int) -> list[str]:
    """Gather the checksum of every rank's weights, tell whether they are equal, and return them by rank."""
    barrier()
    checksums, equal = checksums_equal(world, model)
    if world.main:
        events.emit("epoch", epoch=epoch, checksums=checksums, equal=equal)
    return checksums


def agree(value: float, world: World) -> float:
    """Return the largest of the ranks' values, on every rank."""
    tensor = torch.tensor([value], dtype=torch.float64, device=comm_device(world))
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def measured_step_s(trial: Callable[[int], None], trials: int, task: Task) -> float:
    """Return the mean seconds of ``trial(0..trials-1)`` on the slowest rank, after a warm-up; the random state is put back.

    ``trial`` does one forward and backward pass of a step and must leave the weights alone.
    """
    device = task.world.device
    kept = rng_state(device)
    with _alive(task):
        trial(0)
        devices.synchronize(device)
    times = []
    for number in range(trials):
        task.events.emit("progress", phase="warmup", done=number, total=trials, unit="steps")
        begin = time.perf_counter()
        trial(number)
        devices.synchronize(device)
        times.append(agree(time.perf_counter() - begin, task.world))
    set_rng_state(kept, device)
    return sum(times) / len(times)


@contextlib.contextmanager
def _alive(task: Task) -> Iterator[None]:
    """Tell every few seconds that the first pass is under way: a compilation takes longer than the stall limit.

    Only for as long as the start-up may take, so that a hang is still found.
    """
    done = threading.Event()

    def tell() -> None:
        end = time.monotonic() + task.config.startup_timeout_s
        while not done.wait(5) and time.monotonic() < end:
            task.events.emit("progress", phase="warmup", done=0, total=1, unit="steps")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def time_left(task: Task, step_s: float, tokens_per_step: float) -> float:
    """Return the seconds that the training may take, the same on all ranks: what is left, less the evaluation.

    A forward pass is a third of a step's work; what comes after the training (scores, sums, files) gets five seconds
    or a twentieth of the budget, whichever is less.
    """
    evaluation = 1.2 * step_s / 3 * task.eval_tokens / max(tokens_per_step, 1.0)
    after = min(5.0, 0.05 * task.config.budget_s)
    return -agree(-(task.deadline - time.monotonic() - evaluation - after), task.world)
