"""The kit's own training loop: data parallel over any number of ranks, with the same result for each number.

Each rank trains on its share of a global batch of G samples and differentiates ``sum(loss) / G``; the gradients are
added, not averaged. So neither the number of ranks nor the size of their shares changes what is computed.
"""

import contextlib
import gc
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.benchmarks.squad.steps import (
    Plan,
    Task,
    Trained,
    flops_of,
    learning_rate,
    make_plan,
    measured_step_s,
    qa_loss,
    time_left,
)
from benchlib.core.errors import UserError
from benchlib.core.events import Moment
from benchlib.runtime import checkpoint, devices
from benchlib.runtime.checkpoint import Checkpoint
from benchlib.runtime.steps import Step, StepLog, comm_device, compare_ranks
from benchlib.runtime.timing import Clock, GradientExchange, StepTimer, sum_hook
from benchlib.workloads import encoders
from benchlib.workloads.batches import MicroBatch, collate, epoch_batches, prefetched, share, steps_per_epoch

_TRIAL_QUANTILES = (1 / 6, 1 / 2, 5 / 6)  # the mean of steps of these lengths is close to that of all


def train(task: Task) -> Trained:
    """Fine-tune ``task.loaded.model`` in place and return what was measured. Called by all ranks."""
    config, world = task.config, task.world
    devices.require_precision(config.precision, world.device)
    model = task.loaded.model.to(world.device).train()
    if world.device.type == "cpu":
        devices.keep_freed_memory()
        if config.fast_dropout and not config.compile:
            encoders.speed_up(model)
    # dynamic: every batch has another length. The plain model stays for the evaluation, which would compile it again.
    trained_form = torch.compile(model, dynamic=True) if config.compile else model
    exchange = GradientExchange(Clock(world.device))
    ddp = DistributedDataParallel(
        trained_form,
        device_ids=[world.device] if devices.has_events(world.device) else None,
        bucket_cap_mb=config.bucket_cap_mb,
        gradient_as_bucket_view=True,
    )
    # Encoders have constant buffers only; without this every forward pass would begin with an exchange of them. (Set
    # here because the argument's name differs between versions of torch.)
    ddp.broadcast_buffers = False
    ddp.register_comm_hook(exchange, sum_hook)
    optimizer = make_optimizer(model, config)
    scaler = devices.grad_scaler(config.precision, world.device)
    # The model was drawn from the same seed on all ranks; dropout must differ between them.
    torch.manual_seed(config.seed + 1 + world.rank)

    batches = Batches(task)
    start, notes = to_continue(task)
    if start:
        # As a new training does: DDP orders its buckets after the first pass, and with their order sums of four and more
        # ranks change their last bits.
        _untouched(task, _trial(task, ddp, batches, batches.typical(_TRIAL_QUANTILES[:1])))
        plan, first_step, table = put_back(task, start, model, optimizer, scaler)
    else:
        task.events.emit("phase", name="warmup")
        plan, first_step, table = _plan(task, ddp, batches), 0, None
    exchange.take()
    if world.main:
        task.events.emit("plan", **plan.as_dict())
    task.events.emit("phase", name="train")
    devices.reset_peak_memory(world.device)

    log = StepLog(world, task.events, plan.step_s, table)
    timer = StepTimer(exchange.clock, exchange, config.planted_slowdown)
    flops = flops_of(task.loaded)
    rates = [
        learning_rate(step, plan.planned_steps, config.learning_rate, config.warmup_ratio)
        for step in range(plan.planned_steps)
    ]
    bucket_bytes: list[int] = []
    checksums: list[list[str]] = []
    stream = batches.stream(range(first_step, plan.planned_steps))
    began = Moment.now()
    timer.begin()
    for step in range(first_step, plan.planned_steps):
        epoch = step // batches.per_epoch
        for group in optimizer.param_groups:
            group["lr"] = rates[step]
        loss = torch.zeros((), device=world.device)
        samples = tokens = padded = 0
        work = 0.0
        last = False
        while not last:
            batch, weight, last = next(stream)
            timer.mark("data")
            # Only the last micro-batch exchanges gradients: the sum over the ranks is needed once a step.
            with contextlib.nullcontext() if last else ddp.no_sync():
                part = qa_loss(ddp, batch, config.precision) * weight
                timer.mark("forward")
                (scaler.scale(part) if scaler else part).backward()
                timer.mark("backward")
            loss += part.detach()
            if weight:
                samples, tokens, padded = samples + batch.samples, tokens + batch.tokens, padded + batch.padded_tokens
            work += flops(*batch.shape)
        bucket_bytes = bucket_bytes or [size for _, _, size in exchange.intervals]
        if scaler:
            scaler.unscale_(optimizer)
        if config.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # the gradients are views into DDP's buckets and stay there
        timer.mark("optimizer")
        timer.end_step()

        done = step + 1
        due = log.add(Step(done, epoch, rates[step], loss, samples, tokens, padded, work))
        epoch_ends = done % batches.per_epoch == 0 or done == plan.planned_steps
        save_now = config.checkpoint_every > 0 and done % config.checkpoint_every == 0
        save_now |= config.checkpoint_every >= 0 and done == plan.planned_steps
        if due or epoch_ends or save_now:
            log.gather(timer.take())
        if epoch_ends:
            checksums.append(compare_ranks(model, world, task.events, epoch + 1))
        if save_now:
            save(task, model, optimizer, scaler, plan, done, log.table)
        if epoch_ends or save_now:
            timer.begin()  # neither is part of a step's time
    train_s = began.since()

    if scaler is not None:
        notes.append(f"fp16: the loss scale ended at {scaler.get_scale():g}")
    # The reducer must go before the process group does: dropped after it, the two can wait for each other for ever.
    del ddp, trained_form, optimizer
    gc.collect()
    return Trained(
        plan=plan, table=log.table, learning_rates=rates, samples_seen=log.table[:, :, 1].sum(axis=0).astype(int).tolist(),
        bucket_bytes=bucket_bytes, began=began, train_s=train_s, checksums=checksums, resumed_step=first_step, notes=notes,
    )  # fmt: skip


def make_optimizer(model: torch.nn.Module, config: SquadConfig) -> torch.optim.AdamW:
    """Return AdamW; biases and the weights of norms, which are vectors, are not decayed."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for _, parameter in named if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for _, parameter in named if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=config.fused_optimizer or None)


class Batches:
    """The micro-batches of this rank, by step. A step's batch depends on seed, epoch and global batch size only."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.lengths = task.features.lengths
        self.per_epoch = steps_per_epoch(len(task.features), task.config.global_batch)
        self.pad_id = task.loaded.tokenizer.pad_token_id
        self.pin = task.world.device.type == "cuda"  # page-locked memory is copied in the background
        self._epoch = -1
        self._batches: list[np.ndarray] = []

    def indices(self, step: int) -> np.ndarray:
        """Return the samples of the global batch of a step, int64 (G,)."""
        epoch, place = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._batches = epoch_batches(self.lengths, self.task.config.global_batch, self.task.config.seed, epoch)
        return self._batches[place]

    def parts(self, step: int) -> list[tuple[np.ndarray, float, bool]]:
        """Return (samples of a micro-batch, weight of their summed loss, whether it is the last) of this rank."""
        config, world = self.task.config, self.task.world
        batch = self.indices(step)
        mine = share(batch, self.lengths, world.rank, world.size, config.accumulation)
        weight = 1 / len(batch)
        if not mine:
            # Fewer samples than ranks: this rank still has to take part in the exchange, with a gradient of zero.
            mine, weight = [batch[:1]], 0.0
        return [(part, weight, number == len(mine)) for number, part in enumerate(mine, 1)]

    def stream(self, steps: Iterable[int]) -> Iterator[tuple[MicroBatch, float, bool]]:
        """Yield (micro-batch on the device, weight, whether it is the step's last) of all ``steps``."""

        def make(part: tuple[np.ndarray, float, bool]) -> tuple[MicroBatch, float, bool]:
            return collate(self.task.features, part[0], self.pad_id, pin=self.pin), part[1], part[2]

        for batch, weight, last in prefetched(make, (part for step in steps for part in self.parts(step))):
            yield batch.to(self.task.world.device), weight, last

    def typical(self, quantiles: tuple[float, ...]) -> list[int]:
        """Return steps of the first epoch whose batches have these places in the order of tokens."""
        costs = [int(self.lengths[self.indices(step)].sum()) for step in range(self.per_epoch)]
        order = np.argsort(costs, kind="stable")
        return [int(order[min(int(quantile * len(order)), len(order) - 1)]) for quantile in quantiles]


def _plan(task: Task, ddp: DistributedDataParallel, batches: Batches) -> Plan:
    """Measure the speed with passes that leave the weights and the random state alone, and cut to the budget."""
    steps = batches.typical(_TRIAL_QUANTILES)
    step_s = measured_step_s(_trial(task, ddp, batches, steps), len(steps), task)
    tokens = float(np.mean([batches.lengths[batches.indices(step)].sum() for step in steps]))
    return make_plan(task.config, len(task.features), step_s, time_left(task, step_s, tokens))


def _trial(task: Task, ddp: DistributedDataParallel, batches: Batches, steps: list[int]) -> Callable[[int], None]:
    """Return the function that does the forward and backward pass of ``steps[number]`` and leaves the weights alone."""

    def trial(number: int) -> None:
        for batch, weight, last in batches.stream([steps[number]]):
            with contextlib.nullcontext() if last else ddp.no_sync():
                (qa_loss(ddp, batch, task.config.precision) * weight).backward()
        for parameter in ddp.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    return trial


def _untouched(task: Task, trial: Callable[[int], None]) -> None:
    """Do one trial pass and put the random state back."""
    task.events.emit("phase", name="warmup")
    kept = checkpoint.rng_state(task.world.device)
    trial(0)
    checkpoint.set_rng_state(kept, task.world.device)


def save(
    task: Task, model: Any, optimizer: torch.optim.Optimizer, scaler: Any, plan: Plan, step: int, table: np.ndarray
) -> None:
    """Write a checkpoint: rank 0 writes, the other ranks give their random states.

    Where ranks may be started again on several nodes one rank of each writes: any node may be the one that is lost.
    """
    world = task.world
    random_states: dict[str, torch.Tensor] = {}
    for name, own in checkpoint.rng_state(world.device).items():
        own = own.to(comm_device(world))
        parts = [torch.empty_like(own) for _ in range(world.size)]
        dist.all_gather(parts, own)
        random_states |= {f"rank{rank}.{name}": part for rank, part in enumerate(parts)}
    if world.main or (task.config.max_restarts and world.local_rank == 0):

        def model_files(folder: Path) -> None:
            # With these the folder is a model that can be loaded by its path.
            model.config.save_pretrained(folder)
            task.loaded.tokenizer.save_pretrained(folder)

        tensors = {
            "model": model.state_dict(),
            "optimizer": checkpoint.optimizer_tensors(optimizer),
            "rng": random_states,
            "steps": {"table": torch.from_numpy(table)},
        }
        state = {
            "step": step,
            "plan": plan.as_dict(),
            "scaler": scaler.state_dict() if scaler else None,
            "work": _identity(task),
        }
        checkpoint.save(task.run_dir / "checkpoints", step, tensors, state, model_files)
    dist.barrier()


def _identity(task: Task) -> dict[str, Any]:
    """Return what must be equal for a run to continue another one bit for bit."""
    config = task.config
    names = (
        "seed", "init", "engine", "attention", "attention_dropout", "hidden_dropout", "max_length", "doc_stride", "epochs", "max_steps", "batch_size",
        "accumulation", "learning_rate", "weight_decay", "warmup_ratio", "max_grad_norm", "precision", "compile", "fused_optimizer", "fast_dropout", "bucket_cap_mb",
    )  # fmt: skip
    work: dict[str, Any] = {name: getattr(config, name) for name in names}
    return work | {"world_size": config.world_size, "features": len(task.features), "threads": torch.get_num_threads()}


def to_continue(task: Task) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint that this training goes on from, and notes for the reader; None for a new training.

    After a failure it is the run's own newest one on any of its nodes, else the newest of the run ``config.resume``.
    """
    config, world, start = task.config, task.world, None
    notes: list[str] = []
    if config.max_restarts:
        start, faults = checkpoint.newest_shared(
            task.run_dir / "checkpoints", world.local_rank == 0, comm_device(world),
            # One at the end has nothing left to train, and so nothing to measure.
            lambda candidate: candidate.step < candidate.state["plan"]["planned_steps"],
            lambda: task.events.emit("heartbeat"),
        )  # fmt: skip
        notes = [f"checkpoint passed over after a failure: {fault}" for fault in faults]
    if start is None and config.resume:
        folder = Path(config.resume)
        if not folder.is_dir():
            raise UserError(f"resume = {folder}: no such run folder; give the folder of the interrupted run")
        start = checkpoint.newest(folder / "checkpoints")
    return start, notes


def put_back(
    task: Task, start: Checkpoint, model: Any, optimizer: torch.optim.Optimizer, scaler: Any
) -> tuple[Plan, int, np.ndarray]:
    """Put back what a checkpoint holds; return its plan, step and step table."""
    now, then = _identity(task), start.state["work"]
    differing = [name for name in now if now[name] != then.get(name)]
    if differing:
        name = differing[0]
        raise UserError(
            f"resume = {start.path.parents[1]}: that run had {name} = {then.get(name)}, this one has {now[name]}: give the same values to continue it"
        )
    model.load_state_dict(start.tensors("model"))
    checkpoint.load_optimizer(optimizer, start.tensors("optimizer"))
    if scaler and start.state["scaler"]:
        scaler.load_state_dict(start.state["scaler"])
    prefix = f"rank{task.world.rank}."
    states = {
        name.removeprefix(prefix): value for name, value in start.tensors("rng").items() if name.startswith(prefix)
    }
    checkpoint.set_rng_state(states, task.world.device)
    if task.world.main:
        task.events.emit("log", message=f"continued from {start.path} at step {start.step:,}")
    plan = Plan(**start.state["plan"])
    if not math.isfinite(plan.epoch_share) or start.step > plan.planned_steps:
        raise UserError(f"{start.path}: step {start.step} lies behind its plan of {plan.planned_steps} steps")
    return plan, start.step, start.tensors("steps")["table"].numpy()
