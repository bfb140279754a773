"""The same training by transformers' Trainer, as its question answering example does it.

The usual recipe, to stand beside the kit's own loop: windows padded to ``max_length`` (or to the longest of a batch), in
random order, gradients averaged by DDP.
"""

import contextlib
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers

from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.benchmarks.squad.train import Task, buckets, learning_rates, make_plan, measured_step_s, qa_loss
from benchlib.core.errors import RunBroken
from benchlib.core.events import Moment
from benchlib.runtime.group import World
from benchlib.runtime.steps import Step, StepLog, compare_ranks
from benchlib.runtime.timing import StepTimer
from benchlib.workloads.features import MicroBatch
from benchlib.workloads.training import Plan, Trained, begin

TOKENS = "tokens"  # of a micro-batch without padding, beside its inputs
PAD_MULTIPLE = 8  # of batches padded to their longest, as the example does for fp16 and bf16


def train(task: Task) -> Trained:
    """Fine-tune ``task.loaded.model`` in place with ``transformers.Trainer``. Called by all ranks."""
    config, rank = task.config, task.rank
    model = task.loaded.model.to(rank.world.device).train()
    plan = _plan(task, model)
    begin(rank, plan)
    recorder = Recorder(task, plan)
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    with placed(rank.world), tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # Its hints (pinned memory without a GPU and the like) are about the recipe, which is not ours to change.
        warnings.simplefilter("ignore")
        windows: Any = range(len(task.features))
        args = arguments(config, folder, plan)
        check_place(args, rank.world)
        trainer = CountingTrainer(model, args, lambda part: _inputs(task, part), windows, callbacks=[recorder])
        trainer.recorder = recorder
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        trained = Trained(plan, recorder.rates, recorder.began, recorder.log.table).end(rank.world)
        trainer.accelerator.free_memory()
    recorder.gather()
    trained.table = recorder.log.table
    groups = buckets(model.parameters(), config.bucket_cap_mb)
    trained.bucket_bytes = [sum(parameter.nbytes for parameter in group) for group in groups]
    trained.checksums = [compare_ranks(model, rank.world, rank.events, math.ceil(config.epochs))]
    return trained


@contextlib.contextmanager
def placed(world: World) -> Iterator[None]:
    """Name this rank's place as torchrun does, which is all that accelerate reads: srun, mpirun and a bare worker have other names.

    Without these each rank would train alone, on the first device or on all of them. LOCAL_RANK is the number of the device.
    """
    number = world.local_rank if world.device.index is None else world.device.index
    names = {"RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": world.local_size}
    own = {name: str(value) for name, value in names.items()}
    own |= {"MASTER_ADDR": os.environ.get("MASTER_ADDR", "joined"), "MASTER_PORT": os.environ.get("MASTER_PORT", "0")}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ |= {name: value} if value is not None else {}


def check_place(args: transformers.TrainingArguments, world: World) -> None:
    """Raise ``RunBroken`` if the Trainer would not train with the other ranks, or on another device than this rank's, or on several."""
    # accelerate numbers a CPU, too.
    other = args.device.type != world.device.type or world.device.index not in (None, args.device.index)
    if args.world_size != world.size or args.n_gpu > 1 or other:
        raise RunBroken(
            f"the Trainer takes {args.device} of {args.n_gpu} devices in a world of {args.world_size}, and this rank has {world.device} "
            f"in a world of {world.size}: start it by launcher=local or torchrun, or set engine=native"
        )


def _padded(task: Task, windows: Any) -> MicroBatch:
    full = task.config.trainer_padding == "max_length"
    return task.collate(np.array(windows), task.config.max_length if full else PAD_MULTIPLE)


def _inputs(task: Task, windows: list[int]) -> dict[str, Any]:
    batch = _padded(task, windows)
    inputs = {**batch.inputs, "start_positions": batch.start, "end_positions": batch.end}
    # Counted here: once a batch lies on a device, each number that is read of it waits for the whole queue.
    return inputs | {TOKENS: int(batch.inputs["attention_mask"].sum())}


def arguments(config: SquadConfig, folder: str, plan: Plan) -> transformers.TrainingArguments:
    on_cpu = config.backend == "cpu"
    return transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulation,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        max_steps=plan.planned_steps,
        seed=config.seed,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu else None,
        bf16=config.precision == "bf16",
        fp16=config.precision == "fp16",
        optim="adamw_torch_fused" if config.fused_optimizer else "adamw_torch",
        torch_compile=config.compile,
        ddp_bucket_cap_mb=math.ceil(config.bucket_cap_mb),
        ddp_find_unused_parameters=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=not on_cpu,
        remove_unused_columns=False,
    )


class Recorder(transformers.TrainerCallback):
    """Keeps the time of each step and what it trained on, and gives each step its learning rate: the Trainer's own
    schedule begins at 0. A step ends where the next one begins.
    """

    def __init__(self, task: Task, plan: Plan) -> None:
        self.task = task
        self.rates = learning_rates(task.config, plan.planned_steps)
        self.log = StepLog(task.rank.world, task.rank.events, plan.step_s)
        self.began = Moment.now()
        self._timer = StepTimer(task.rank.world.device, task.config.planted_slowdown, alike=True)
        self._loss: torch.Tensor | float = 0.0
        self._counts: Any = np.zeros(4)  # samples, tokens, tokens with padding, FLOPs

    def count(self, inputs: dict[str, torch.Tensor], tokens: int, loss: torch.Tensor) -> None:
        """Add a micro-batch of so many ``tokens``; its ``loss`` is the rank's mean, already divided by the accumulation."""
        rows, length = inputs["input_ids"].shape
        self._loss = self._loss + loss.detach() / self.task.rank.world.size
        flops = self.task.loaded.flops.of(rows, length)
        self._counts += (rows, tokens, rows * length, flops)

    def gather(self) -> None:
        """Share the steps that were not gathered yet; of their times only the whole step's is known."""
        self.log.gather([{"step_s": row["step_s"]} for row in self._timer.take()])

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.began = Moment.now()
        self._timer.begin()

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        for group in more["optimizer"].param_groups:
            group["lr"] = self.rates[state.global_step]

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Close a step: ``state.global_step`` counts it already."""
        self._timer.end_step()
        done = int(state.global_step)
        epoch = (done - 1) // self.task.per_epoch
        due = self.log.add(Step(done, epoch, self.rates[done - 1], self._loss, *self._counts.tolist()))
        self._loss, self._counts = 0.0, np.zeros(4)
        if due:
            self.gather()


class CountingTrainer(transformers.Trainer):
    """The Trainer, with its micro-batches counted."""

    recorder: Recorder

    def training_step(self, model: Any, inputs: Any, *more: Any, **named: Any) -> torch.Tensor:
        tokens = inputs.pop(TOKENS)
        loss = super().training_step(model, inputs, *more, **named)
        self.recorder.count(inputs, tokens, loss)
        return loss


def _plan(task: Task, model: Any) -> Plan:
    config, windows, device = task.config, task.features, task.rank.world.device
    draw = np.random.Generator(np.random.PCG64(config.seed))

    def trial(number: int) -> None:
        for _ in range(config.accumulation):
            batch = _padded(task, draw.integers(0, len(windows), config.batch_size))
            qa_loss(model, batch.to(device), config.precision).backward()
        model.zero_grad()

    step_s = measured_step_s(task, trial)
    length = config.max_length if config.trainer_padding == "max_length" else float(windows.lengths.mean())
    # With several ranks the Trainer fills the last micro-batches of an epoch with samples from its start.
    together = config.batch_size * config.world_size if config.world_size > 1 else 1
    samples = math.ceil(len(windows) / together) * together
    return make_plan(task, samples, step_s, config.global_batch * length)
