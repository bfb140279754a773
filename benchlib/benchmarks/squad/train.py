"""The kit's own training loop: data parallel over any number of ranks, with the same result for each number.

What computes loss and gradients is given to it (``Passes``): torch's autograd with DDP here, XLA in ``squad.compiled``.

Each rank trains on its share of a global batch of G samples and differentiates ``sum(loss) / G``; the gradients are
added, not averaged. So neither the number of ranks nor the size of their shares changes what is computed.
"""

import contextlib
import gc
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.benchmarks.squad.shares import IDLE_TOKENS, WINDOW
from benchlib.benchmarks.squad.shares import Plan as SplitPlan
from benchlib.benchmarks.squad.steps import (
    More,
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
from benchlib.benchmarks.squad.unlike import Balance, curves
from benchlib.core.errors import UserError
from benchlib.core.events import Moment, keep_alive
from benchlib.runtime import checkpoint, devices
from benchlib.runtime.checkpoint import Checkpoint
from benchlib.runtime.steps import Step, StepLog, comm_device, compare_ranks
from benchlib.runtime.timing import Clock, GradientExchange, StepTimer, sum_hook
from benchlib.workloads import encoders
from benchlib.workloads.batches import MicroBatch, collate, cut, epoch_batches, even, prefetched, share, steps_per_epoch

_TRIAL_QUANTILES = (1 / 6, 1 / 2, 5 / 6)  # the mean of steps of these lengths is close to that of all


class Passes(Protocol):
    """Forward and backward pass of micro-batches.

    ``exchange`` records the messages between the ranks, ``multiple`` is what lengths are padded to a multiple of, ``unknown`` names
    the columns of a step's time that these passes cannot tell, ``notes`` are for the reader of the report.
    """

    exchange: GradientExchange
    multiple: int
    unknown: tuple[str, ...]
    notes: list[str]

    def __call__(
        self, batch: MicroBatch, weight: float, last: bool, step: int, mark: Callable[[str], None]
    ) -> torch.Tensor:
        """Add the gradients of ``weight`` times the micro-batch's summed loss to ``.grad``; return that product, a scalar.

        After the step's last micro-batch ``.grad`` is the sum over the ranks. ``mark`` is told where a phase ends.
        """


class Autograd:
    """Passes by torch; DDP adds the gradients during the backward pass of a step's last micro-batch."""

    multiple = 8
    unknown: tuple[str, ...] = ()

    def __init__(self, task: Task, model: Any, scaler: Any) -> None:
        config, device = task.config, task.world.device
        if device.type == "cpu" and config.fast_dropout and not config.compile:
            encoders.speed_up(model)
        # dynamic: every batch has another length. The plain model stays for the evaluation, which would compile it again.
        trained_form = torch.compile(model, dynamic=True) if config.compile else model
        self.exchange, self.notes = GradientExchange(Clock(device)), list[str]()
        self._config, self._rank = config, task.world.rank
        self._scaler, self.precision = scaler, config.precision_of(task.world.rank)
        self._ddp = DistributedDataParallel(
            trained_form,
            device_ids=[device] if devices.has_events(device) else None,
            bucket_cap_mb=config.bucket_cap_mb,
            gradient_as_bucket_view=True,
        )
        # Encoders have constant buffers only; without this every forward pass would begin with an exchange of them. (Set
        # here because the argument's name differs between versions of torch.)
        self._ddp.broadcast_buffers = False
        self._ddp.register_comm_hook(self.exchange, sum_hook)

    def __call__(
        self, batch: MicroBatch, weight: float, last: bool, step: int, mark: Callable[[str], None]
    ) -> torch.Tensor:
        """See ``Passes``. All of it is done as often as is planted, of which the last time counts."""
        for counts in [False] * (self._config.work_of(self._rank, step) - 1) + [True]:
            # Only the last micro-batch of a step exchanges gradients: their sum over the ranks is needed once.
            with contextlib.nullcontext() if last and counts else self._ddp.no_sync():
                part = qa_loss(self._ddp, batch, self.precision) * (weight if counts else 0.0)
                mark("forward")
                (self._scaler.scale(part) if self._scaler else part).backward()
                mark("backward")
        return part.detach()


def train(task: Task, make: Callable[[Task, Any, Any], Passes] = Autograd) -> Trained:
    """Fine-tune ``task.loaded.model`` in place and return what was measured. Called by all ranks.

    ``make`` returns the passes of (task, model, scaler of fp16 gradients or None).
    """
    config, world = task.config, task.world
    devices.require_precision(config.precision_of(world.rank), world.device)
    model = task.loaded.model.to(world.device).train()
    if world.device.type == "cpu":
        devices.keep_freed_memory()
    scaler = devices.grad_scaler(config.precision, world.device)
    passes = make(task, model, scaler)
    exchange = passes.exchange
    optimizer = make_optimizer(model, config)
    # The model was drawn from the same seed on all ranks; dropout must differ between them.
    torch.manual_seed(config.seed + 1 + world.rank)

    batches = Batches(task, passes.multiple)
    timer = StepTimer(exchange.clock, exchange, config.planted_slowdown)
    balance = Balance(task) if config.balance != "off" else None
    batches.plans = balance.plans if balance else []
    curve: list[dict[str, float]] = []
    start, passed_over = to_continue(task)
    notes = [f"checkpoint passed over: {fault}" for fault in passed_over]
    if start:
        # As a new training does: DDP orders its buckets after the first pass, and with their order sums of four and more
        # ranks change their last bits.
        _untouched(task, _trial(passes, model, batches, batches.typical(_TRIAL_QUANTILES[:1])))
        plan, first_step, table = put_back(task, start, model, optimizer, scaler)
        if balance:
            balance.restore(start.state["balance"], first_step)
    else:
        task.events.emit("phase", name="warmup")
        if balance or config.bf16_ranks:
            curve = _of_unlike_ranks(task, passes, model, batches, balance, optimizer, timer)
        plan, first_step, table = _plan(task, passes, model, batches), 0, None
    exchange.take()
    if world.main:
        task.events.emit("plan", **plan.as_dict())
    task.events.emit("phase", name="train")
    devices.reset_peak_memory(world.device)

    log = StepLog(world, task.events, plan.step_s, table)
    if balance:
        log.every = min(log.every, WINDOW)  # what the ranks tell each other late is answered late
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
        loss: torch.Tensor | float = 0.0
        samples = tokens = padded = 0
        spent = 0.0
        last = False
        while not last:
            batch, weight, last = next(stream)
            timer.mark("data")
            loss = loss + passes(batch, weight, last, step, timer.mark)
            if weight:
                samples, tokens, padded = samples + batch.samples, tokens + batch.tokens, padded + batch.padded_tokens
            spent += flops(*batch.shape)
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
        due = log.add(Step(done, epoch, rates[step], loss, samples, tokens, padded, spent))
        epoch_ends = done % batches.per_epoch == 0 or done == plan.planned_steps
        save_now = config.checkpoint_every > 0 and done % config.checkpoint_every == 0
        save_now |= config.checkpoint_every >= 0 and done == plan.planned_steps
        if due or epoch_ends or save_now:
            log.gather([{name: row[name] for name in row if name not in passes.unknown} for row in timer.take()])
            timer.mark("report")  # where ranks wait for each other: no rank's own work
            if balance:
                balance.follow(log.table, done + 1)  # the first micro-batch of the next step is made already
        if epoch_ends:
            checksums.append(compare_ranks(model, world, task.events, epoch + 1))
        if save_now:
            save(task, model, optimizer, scaler, plan, done, log.table, balance)
        if epoch_ends or save_now:
            timer.begin()  # neither is part of a step's time
    train_s = began.since()

    if scaler is not None:
        notes.append(f"fp16: the loss scale ended at {scaler.get_scale():g}")
    notes += passes.notes
    # DDP's reducer must go before the process group does: dropped after it, the two can wait for each other for ever.
    del passes, optimizer
    gc.collect()
    return Trained(
        plan=plan, table=log.table, learning_rates=rates, samples_seen=log.table[:, :, 1].sum(axis=0).astype(int).tolist(),
        bucket_bytes=bucket_bytes, began=began, train_s=train_s, checksums=checksums, resumed_step=first_step, notes=notes, passed_over=passed_over,
        more=_more(balance, log.table, curve),
    )  # fmt: skip


def _more(balance: Balance | None, table: np.ndarray, curve: list[dict[str, float]]) -> More:
    more = balance.outcome(table) if balance else More()
    if curve:
        more.tables["mixed_precision"] = curve
    return more


def make_optimizer(model: torch.nn.Module, config: SquadConfig) -> torch.optim.AdamW:
    """Return AdamW; biases and the weights of norms, which are vectors, are not decayed."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for _, parameter in named if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for _, parameter in named if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=config.fused_optimizer or None)


class Batches:
    """The micro-batches of this rank, by step. A step's batch depends on seed, epoch and global batch size only.

    ``plans`` say how the ranks share it, in the order of their first steps; before the first one they share evenly. One
    micro-batch is always made ahead: a plan that is added after a step may begin with the step after the next one.
    """

    def __init__(self, task: Task, multiple: int = 8) -> None:
        self.plans: list[SplitPlan] = []
        self.task, self.multiple = task, multiple
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
        rank, batch = self.task.world.rank, self.indices(step)
        plan = self.plan(step)
        shares = plan.split(len(batch)) if plan else even(len(batch), self.task.world.size)
        parts = plan.ranks[rank].micro_batches(shares[rank]) if plan else self.task.config.accumulation
        mine = cut(share(batch, self.lengths, shares, rank), parts)
        if not mine:
            # A rank without work still has to take part in the exchange, with a gradient of zero.
            return [(batch[:1], 0.0, True)]
        return [(part, 1 / len(batch), number == len(mine)) for number, part in enumerate(mine, 1)]

    def plan(self, step: int) -> SplitPlan | None:
        """Return the plan of a step; None where the ranks share evenly."""
        return next((plan for plan in reversed(self.plans) if plan.from_step <= step), None)

    def stream(self, steps: Iterable[int]) -> Iterator[tuple[MicroBatch, float, bool]]:
        """Yield (micro-batch on the device, weight, whether it is the step's last) of all ``steps``."""

        def make(part: tuple[np.ndarray, float, bool]) -> tuple[MicroBatch, float, bool]:
            batch = collate(self.task.features, part[0], self.pad_id, self.multiple, self.pin)
            return batch if part[1] else batch.idle(IDLE_TOKENS), part[1], part[2]

        for batch, weight, last in prefetched(make, (part for step in steps for part in self.parts(step))):
            yield batch.to(self.task.world.device), weight, last

    def typical(self, quantiles: tuple[float, ...]) -> list[int]:
        """Return steps of the first epoch whose batches have these places in the order of tokens."""
        costs = [int(self.lengths[self.indices(step)].sum()) for step in range(self.per_epoch)]
        order = np.argsort(costs, kind="stable")
        return [int(order[min(int(quantile * len(order)), len(order) - 1)]) for quantile in quantiles]


def _plan(task: Task, passes: Passes, model: torch.nn.Module, batches: Batches) -> Plan:
    """Measure the speed with passes that leave the weights and the random state alone, and cut to the budget."""
    steps = batches.typical(_TRIAL_QUANTILES)
    step_s = measured_step_s(_trial(passes, model, batches, steps), len(steps), task)
    tokens = float(np.mean([batches.lengths[batches.indices(step)].sum() for step in steps]))
    return make_plan(task.config, len(task.features), step_s, time_left(task, step_s, tokens))


def _of_unlike_ranks(
    task: Task,
    passes: Passes,
    model: torch.nn.Module,
    batches: Batches,
    balance: Balance | None,
    optimizer: torch.optim.Optimizer,
    timer: StepTimer,
) -> list[dict[str, float]]:
    """Measure the ranks and make the first plan; return the loss curves of mixed precision. Nothing of the training changes."""
    assert isinstance(passes, Autograd)  # the config refuses the others
    config, world = task.config, task.world
    steps, kept = batches.typical(_TRIAL_QUANTILES), checkpoint.rng_state(world.device)
    trial = _trial(passes, model, batches, steps)
    with keep_alive(task.events, config.startup_timeout_s):
        trial(0)  # libraries load, and DDP orders its buckets
    if balance:
        longest = [int(batches.lengths[batches.indices(step)].max()) for step in steps]
        balance.measure(
            lambda batch: passes(batch, 0.0, False, 0, lambda phase: None), batches.pad_id, optimizer, float(np.mean(longest)),
            lambda: trial(1, timer.mark), timer,
        )  # fmt: skip

    def arm(step: int, precision: str) -> float:
        own, passes.precision = passes.precision, precision
        stream = batches.stream([step % batches.per_epoch])
        loss = sum(float(passes(batch, weight, last, 0, lambda phase: None)) for batch, weight, last in stream)
        passes.precision = own
        return loss

    curve = curves(task, lambda: make_optimizer(model, config), arm, model) if config.bf16_ranks else []
    checkpoint.set_rng_state(kept, world.device)
    return curve


def _trial(passes: Passes, model: torch.nn.Module, batches: Batches, steps: list[int]) -> Callable[..., None]:
    """Return the function that does the forward and backward pass of ``steps[number]`` and leaves the weights alone."""

    def trial(number: int, mark: Callable[[str], None] = lambda phase: None) -> None:
        for batch, weight, last in batches.stream([steps[number]]):
            mark("data")
            passes(batch, weight, last, 0, mark)
        for parameter in model.parameters():
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
    task: Task,
    model: Any,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    plan: Plan,
    step: int,
    table: np.ndarray,
    balance: Balance | None,
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
            "balance": balance.state() if balance else [],
        }
        checkpoint.save(task.run_dir / "checkpoints", step, tensors, state, model_files)
    dist.barrier()


def _identity(task: Task) -> dict[str, Any]:
    """Return what must be equal for a run to continue another one bit for bit."""
    config = task.config
    names = (
        "seed", "init", "engine", "attention", "attention_dropout", "hidden_dropout", "max_length", "doc_stride", "epochs", "max_steps", "batch_size",
        "accumulation", "learning_rate", "weight_decay", "warmup_ratio", "max_grad_norm", "precision", "compile", "fused_optimizer", "fast_dropout", "bucket_cap_mb",
        "balance", "bf16_ranks", "planted_work", "planted_drift", "planted_drift_step",
    )  # fmt: skip
    work: dict[str, Any] = {name: getattr(config, name) for name in names}
    return work | {"world_size": config.world_size, "features": len(task.features), "threads": torch.get_num_threads()}


def to_continue(task: Task) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint that this training goes on from, and what is wrong with newer ones; None for a new training.

    After a failure it is the run's own newest one on any of its nodes, else the newest of the run ``config.resume``.
    """
    config, world, start = task.config, task.world, None
    faults: list[str] = []

    def unfinished(candidate: Checkpoint) -> bool:
        """Whether there is anything left to train, and so to measure."""
        return bool(candidate.step < candidate.state["plan"]["planned_steps"])

    if config.max_restarts:
        start, faults = checkpoint.newest_shared(
            task.run_dir / "checkpoints", world.local_rank == 0, comm_device(world), unfinished,
            lambda: task.events.emit("heartbeat"),
        )  # fmt: skip
    if start is None and config.resume:
        folder = Path(config.resume)
        if not folder.is_dir():
            raise UserError(f"resume = {folder}: no such run folder; give the folder of the interrupted run")
        start = checkpoint.newest(folder / "checkpoints", unfinished)
        faults += start.passed_over
    return start, faults


def put_back(
    task: Task, start: Checkpoint, model: Any, optimizer: torch.optim.Optimizer, scaler: Any
) -> tuple[Plan, int, np.ndarray]:
    """Put back what a checkpoint holds; return its plan, step and step table."""
    now, then = _identity(task), start.state["work"]
    fields = SquadConfig.model_fields
    then = {name: fields[name].default for name in now if name in fields} | then  # older ones lack what came later
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
