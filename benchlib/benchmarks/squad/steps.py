"""What both engines share: the task, the plan of the steps and their learning rates.

Letters: K steps, W ranks, C columns.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.core.definitions import encoder_train_flops
from benchlib.core.events import EventWriter, Moment, keep_alive
from benchlib.results.metrics import Metric
from benchlib.runtime import devices
from benchlib.runtime.checkpoint import rng_state, set_rng_state
from benchlib.runtime.group import World
from benchlib.runtime.steps import agree
from benchlib.workloads import encoders, squad_data
from benchlib.workloads.batches import MicroBatch, samples_of, steps_per_epoch
from benchlib.workloads.features import Features
from benchlib.workloads.squad_text import Example

# Share of the time that is left which a cut training plans to use: a neighbour on the machine may slow it down.
CUT_MARGIN = 0.9
LEAST_STEPS = 2  # of a cut training: one step shows no falling loss


@dataclass(frozen=True)
class Plan:
    """``total_steps`` is what the config's epochs ask for, ``planned_steps`` what this run does.

    ``epoch_share`` is the share of the samples of ``total_steps`` that ``planned_steps`` see, ``samples`` those samples,
    ``step_s`` the seconds per step that were measured before the decision (0: not measured).
    """

    total_steps: int
    planned_steps: int
    epoch_share: float
    samples: int
    step_s: float
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def total_steps(config: SquadConfig, features: int) -> int:
    """Return the optimizer steps of the whole training."""
    return max(1, math.ceil(config.epochs * steps_per_epoch(features, config.global_batch)))


def make_plan(config: SquadConfig, features: int, step_s: float, left_s: float) -> Plan:
    """Decide how many steps fit into ``left_s`` seconds at ``step_s`` seconds a step, within ``max_steps``.

    The schedule of the learning rate is built on what is decided here, so that a cut training still warms up and decays.
    """
    total = total_steps(config, features)
    planned, reason = total, "the whole training fits the budget"
    if config.max_steps and config.max_steps < planned:
        planned, reason = config.max_steps, f"max_steps = {config.max_steps} ends the training early"
    if step_s * planned > left_s:
        fitting = max(LEAST_STEPS, int(CUT_MARGIN * left_s / step_s))
        if fitting < planned:
            reason = f"{planned:,} steps of {step_s:.3g} s need {step_s * planned:,.0f} s, but {max(left_s, 0):,.0f} s of the budget are left for them: cut to {fitting:,}"
            planned = fitting
    samples = samples_of(planned, features, config.global_batch)
    return Plan(total, planned, samples / samples_of(total, features, config.global_batch), samples, step_s, reason)


def learning_rate(step: int, planned_steps: int, peak: float, warmup_ratio: float) -> float:
    """Return the rate of step 0 to ``planned_steps - 1``: a linear rise, then a linear fall; above 0 in every step.

    The usual formula gives the first step of a warm-up the rate 0, and a step more than planned as well; here both
    ends of the slopes lie outside of the training.
    """
    warmup = int(planned_steps * warmup_ratio)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    return peak * max(0, planned_steps - step) / (planned_steps - warmup)


@dataclass(frozen=True)
class Task:
    """What an engine is given. ``deadline`` is the moment (``time.monotonic``) by which the run should have ended.

    ``eval_tokens`` are the tokens that the evaluation will process after the training.
    """

    config: SquadConfig
    world: World
    loaded: encoders.Loaded
    examples: Sequence[Example]
    features: Features
    events: EventWriter
    run_dir: Path
    deadline: float
    eval_tokens: int


@dataclass
class More:
    """What an engine adds to the result: tables, metrics, facts and sentences of its own."""

    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    metrics: list[Metric] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Trained:
    """What an engine leaves. ``table`` is ``StepLog.table``; ``checksums`` has a list with one text per rank for each
    comparison; ``bucket_bytes`` are the sizes of the gradient messages of a step; ``passed_over`` says what was
    wrong with newer checkpoints than the one that it went on from; ``resumed_step`` counts the steps of
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
    passed_over: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    more: More = field(default_factory=More)


def load_data(config: SquadConfig) -> squad_data.Split:
    """Return the questions that ``config`` names."""
    return squad_data.load(
        config.data,
        config.train_questions,
        config.eval_questions,
        config.seed,
        train_file=config.train_file,
        eval_file=config.eval_file,
    )


def load_model(config: SquadConfig) -> encoders.Loaded:
    """Return the model that ``config`` names, on the CPU in fp32, with its tokenizer."""
    return encoders.load(
        config.model,
        seed=config.seed,
        init=config.init,
        attention=config.attention,
        max_length=config.max_length,
        attention_dropout=None if config.attention_dropout < 0 else config.attention_dropout,
        hidden_dropout=None if config.hidden_dropout < 0 else config.hidden_dropout,
    )


def qa_loss(model: Any, batch: MicroBatch, precision: str) -> torch.Tensor:
    """Return the sum over the micro-batch of (start loss + end loss) / 2, a scalar in fp32."""
    with devices.autocast(precision, batch.inputs["input_ids"].device):
        output = model(**batch.inputs)
    assert batch.start is not None and batch.end is not None
    # Padding must not take part in the softmax: how much there is depends on the neighbours in the micro-batch, and with
    # it the loss would depend on the number of ranks. fp32 at least: bf16 loses the digits that a loss is made of.
    padding = batch.inputs["attention_mask"] == 0
    exact = torch.promote_types(output.start_logits.dtype, torch.float32)
    losses = [
        torch.nn.functional.cross_entropy(
            logits.to(exact).masked_fill(padding, torch.finfo(exact).min), target, reduction="sum"
        )
        for logits, target in ((output.start_logits, batch.start), (output.end_logits, batch.end))
    ]
    return (losses[0] + losses[1]) / 2


def flops_of(loaded: encoders.Loaded) -> Callable[[int, int], float]:
    """Return the function of (samples, padded length) that gives the FLOPs of training on them; NaN where unknown."""
    layers, hidden, intermediate = loaded.layers, loaded.hidden, loaded.intermediate
    if layers is None or hidden is None or intermediate is None:
        return lambda samples, length: float("nan")
    return lambda samples, length: encoder_train_flops(layers, hidden, intermediate, [(samples, length)])


def measured_step_s(trial: Callable[[int], None], trials: int, task: Task) -> float:
    """Return the mean seconds of ``trial(0..trials-1)`` on the slowest rank, after a warm-up; the random state is put back.

    ``trial`` does one forward and backward pass of a step and must leave the weights alone.
    """
    device = task.world.device
    kept = rng_state(device)
    with keep_alive(task.events, task.config.startup_timeout_s):
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


def time_left(task: Task, step_s: float, tokens_per_step: float) -> float:
    """Return the seconds that the training may take, the same on all ranks: what is left, less the evaluation.

    A forward pass is a third of a step's work; what comes after the training (scores, sums, files) gets five seconds
    or a twentieth of the budget, whichever is less.
    """
    evaluation = 1.2 * step_s / 3 * task.eval_tokens / max(tokens_per_step, 1.0)
    after = min(5.0, 0.05 * task.config.budget_s)
    return -agree(-(task.deadline - time.monotonic() - evaluation - after), task.world)
