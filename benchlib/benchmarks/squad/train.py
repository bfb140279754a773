"""The kit's own training of an encoder: the micro-batches of each rank and the passes over them by autograd, the plan, the start
from the beginning or from a checkpoint, and the checkpoints.

The loop is that of ``benchlib.workloads.training``. Notation: G samples of a global batch, K steps, W ranks, C columns.
"""

import contextlib
import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchlib.benchmarks.squad.balance import IDLE_TOKENS, WINDOW, Balance, Member, Split
from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.config.schema import load_config
from benchlib.core.errors import UserError
from benchlib.core.events import keep_alive
from benchlib.runtime import checkpoint, devices
from benchlib.runtime.checkpoint import Checkpoint
from benchlib.runtime.group import all_gather_objects
from benchlib.runtime.measurement import Rank
from benchlib.runtime.steps import agree, comm_device
from benchlib.workloads import encoders, minisquad, squad_data, training
from benchlib.workloads.answer_loss import answer_losses
from benchlib.workloads.features import (
    Features,
    MicroBatch,
    collate,
    cut,
    epoch_batches,
    samples_of,
    share,
    steps_per_epoch,
)
from benchlib.workloads.squad_data import Example
from benchlib.workloads.training import Cost, Plan, Trained, Work, data_parallel, prefetched

# Samples of a micro-batch, weight of their summed loss, whether it is a step's last.
Part = tuple[np.ndarray, float, bool]
TRIALS = (1 / 6, 1 / 2, 5 / 6)  # places in the order of length: the mean of steps there is close to that of all
MIN_STEPS = 2  # of a cut training: one step shows no falling loss


@dataclass(frozen=True)
class Task:
    """What an engine is given. ``eval_tokens`` are those that the evaluation will process after the training."""

    rank: Rank
    loaded: encoders.Loaded
    features: Features
    eval_tokens: int

    @property
    def config(self) -> SquadConfig:
        return self.rank.config  # type: ignore[no-any-return]

    @property
    def per_epoch(self) -> int:
        return steps_per_epoch(len(self.features), self.config.global_batch)

    def collate(self, windows: np.ndarray, multiple: int, pin: bool = False) -> MicroBatch:
        return collate(self.features, windows, self.loaded.tokenizer.pad_token_id, multiple, pin)


@dataclass(frozen=True)
class Questions:
    """What is trained and evaluated on. ``shared`` counts ids of both, which measure no generalisation; ``sha256`` is of the content."""

    train: list[Example]
    eval: list[Example]
    description: str
    shared: int
    sha256: str


def load_data(config: SquadConfig) -> Questions:
    """Load the questions; ``UserError`` where a source cannot be reached or its content breaks the format."""
    asked, files = (config.train_questions, config.eval_questions), (config.train_file, config.eval_file)
    if config.data == "minisquad":
        source, parts = "minisquad, the embedded generator", zip(asked, ("train", "eval"), strict=True)
        whole = [minisquad.generate(count, config.seed, part) for count, part in parts]
    elif config.data == "squad":
        source, whole = squad_data.HUB_NAME, list(squad_data.load_hub())
    else:
        source, whole = ", ".join(files), [squad_data.read_squad(file) for file in files]
    pairs = list(zip(whole, asked, strict=True))
    train, evaluation = (squad_data.take(examples, count, config.seed) for examples, count in pairs)
    counts = [
        f"{count} of {len(examples)}" if 0 < count < len(examples) else len(examples) for examples, count in pairs
    ]
    description = "{}: {} questions to train on, {} questions to evaluate on".format(source, *counts)
    shared = {example.id for example in train} & {example.id for example in evaluation}
    content = json.dumps([(one.id, one.question, one.context, one.answers) for one in [*train, *evaluation]])
    return Questions(train, evaluation, description, len(shared), hashlib.sha256(content.encode()).hexdigest())


def load_model(config: SquadConfig) -> encoders.Loaded:
    """Return the model that ``config`` names, on the CPU in fp32, with its tokenizer."""
    names = ("seed", "init", "attention", "max_length", "attention_dropout", "hidden_dropout")
    return encoders.load(config.model, **{name: getattr(config, name) for name in names})


def qa_loss(model: Any, batch: MicroBatch, precision: str) -> torch.Tensor:
    """Return the sum over the micro-batch of (start loss + end loss) / 2, a scalar in fp32."""
    with devices.autocast(precision, batch.inputs["input_ids"].device):
        output = model(**batch.inputs)
    mask = batch.inputs["attention_mask"]
    return answer_losses(output.start_logits, output.end_logits, mask, batch.start, batch.end).sum()


def buckets(parameters: Iterable[torch.nn.Parameter], cap_mb: float) -> list[list[torch.nn.Parameter]]:
    """Return what is exchanged together, as DDP does it: the last layers first, a new bucket when the cap is reached."""
    groups: list[list[torch.nn.Parameter]] = [[]]
    for parameter in reversed(list(parameters)):
        if sum(member.nbytes for member in groups[-1]) >= cap_mb * 2**20:
            groups.append([])
        groups[-1].append(parameter)
    return groups


class Native(Work):
    """Passes by torch over the micro-batches of this rank; DDP adds the gradients during the last one of a step.

    A step's batch depends on seed, epoch and global batch size only. The splits of ``balance`` say how the ranks share it, in
    the order of their first steps; before the first one they share evenly. One micro-batch is always made ahead: a split that
    is added after a step may begin with the step after the next one.
    """

    multiple = 8  # that lengths are padded to a multiple of

    def __init__(self, task: Task) -> None:
        super().__init__(task.rank)
        config, device = task.config, task.rank.world.device
        self.task, self.model, self.save_every = task, task.loaded.model.to(device).train(), config.checkpoint_every
        self.balance = Balance(self)
        self.lengths = task.features.lengths
        self._epoch = functools.lru_cache(1)(
            functools.partial(epoch_batches, self.lengths, config.global_batch, config.seed)
        )
        if device.type == "cpu":
            devices.keep_freed_memory()
        self.scaler = devices.grad_scaler(config.precision, device)
        self.prepare()
        # Biases and the weights of norms, which are vectors, are not decayed.
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        groups = [
            {
                "params": [one for one in trained if (one.ndim >= 2) is matrix],
                "weight_decay": config.weight_decay * matrix,
            }
            for matrix in (True, False)
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, fused=config.fused_optimizer or None)

    def prepare(self) -> None:
        config = self.task.config
        # dynamic: every batch has another length. The plain model stays for the evaluation, which would compile it again.
        form: Any = torch.compile(self.model, dynamic=True) if config.compile else self.model
        self.ddp = data_parallel(form, self.timer, bucket_cap_mb=config.bucket_cap_mb)

    def indices(self, step: int) -> np.ndarray:
        """Return the samples of the global batch of a step, int64 (G,)."""
        epoch, place = divmod(step, self.task.per_epoch)
        return self._epoch(epoch)[place]

    def split(self, step: int) -> Split | None:
        return next((split for split in reversed(self.balance.splits) if split.from_step <= step), None)

    def parts(self, step: int) -> list[Part]:
        """Return the micro-batches of this rank."""
        world, batch, split = self.task.rank.world, self.indices(step), self.split(step)
        shares = split.of(len(batch)) if split else [len(part) for part in np.array_split(batch, world.size)]
        own = shares[world.rank]
        parts = split.members[world.rank].micro_batches(own) if split else self.task.config.accumulation
        cuts = cut(share(batch, self.lengths, shares, world.rank), parts)
        if not cuts:
            # A rank without work still has to take part in the exchange, with a gradient of zero.
            return [(batch[:1], 0.0, True)]
        return [(part, 1 / len(batch), number == len(cuts)) for number, part in enumerate(cuts, 1)]

    def batches(self, epoch: int, steps: Iterable[int]) -> Iterator[tuple[MicroBatch, float, bool]]:
        """See ``Work``; ``steps`` are counted over all epochs."""
        device = self.task.rank.world.device
        pin = devices.has_events(device)  # page-locked memory is copied in the background

        def make(part: Part) -> tuple[MicroBatch, float, bool]:
            batch = self.task.collate(part[0], self.multiple, pin)
            return batch if part[1] else batch.idle(IDLE_TOKENS), part[1], part[2]

        for batch, weight, last in prefetched(make, (part for step in steps for part in self.parts(step))):
            yield batch.to(device), weight, last

    def typical(self) -> list[int]:
        """Return steps of the first epoch whose batches have the places ``TRIALS`` in the order of tokens."""
        order = np.argsort([self.lengths[self.indices(s)].sum() for s in range(self.task.per_epoch)], kind="stable")
        return [int(order[int(place * len(order))]) for place in TRIALS]

    def differentiate(self, batch: MicroBatch, weight: float, last: bool, step: int) -> torch.Tensor:
        """See ``Work``. With injected work it is repeated, and the last time counts."""
        for counts in [False] * (self.task.config.work_of(self.task.rank.world.rank, step) - 1) + [True]:
            # Only the last micro-batch of a step exchanges gradients: their sum over the ranks is needed once.
            with contextlib.nullcontext() if last and counts else self.ddp.no_sync():
                part = self.loss(batch) * (weight if counts else 0.0)
                self.timer.mark("forward")
                self.scaler.scale(part).backward()  # type: ignore[no-untyped-call]
                self.timer.mark("backward")
        return part.detach()

    def loss(self, batch: MicroBatch) -> torch.Tensor:
        return qa_loss(self.ddp, batch, self.task.config.precision)

    def update(self) -> None:
        """See ``Work``. Gradients are views into DDP's buckets and stay there."""
        self.scaler.unscale_(self.optimizer)
        if self.task.config.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.config.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=False)

    def cost(self, batch: MicroBatch, weight: float) -> Cost:
        rows, length = batch.shape
        counts = (rows, batch.tokens, rows * length) if weight else (0, 0, 0)
        return *counts, self.task.loaded.flops.of(rows, length)

    def trial(self, number: int) -> None:
        """Do the forward and backward pass of the step ``typical()[number]`` and leave the weights alone."""
        for batch, weight, last in self.batches(0, [self.typical()[number]]):
            self.timer.mark("data")
            self.differentiate(batch, weight, last, 0)
        self.optimizer.zero_grad(set_to_none=False)

    def follow(self, table: np.ndarray, next_open: int) -> None:
        self.balance.follow(table, next_open)

    def save(self, plan: Plan, step: int, table: np.ndarray) -> None:
        """See ``Work``: rank 0 writes, the other ranks give their random states.

        Where ranks may be started again on several nodes one rank of each writes: any node may be the one that is lost.
        """
        task, world = self.task, self.task.rank.world
        by_rank = all_gather_objects(checkpoint.rng_state(world.device))
        random_states = {
            f"rank{rank}.{name}": own for rank, states in enumerate(by_rank) for name, own in states.items()
        }
        if world.main or (task.config.max_restarts and world.local_rank == 0):

            def model_files(folder: Path) -> None:
                # With these the folder is a model that can be loaded by its path.
                task.loaded.model.config.save_pretrained(folder)
                task.loaded.tokenizer.save_pretrained(folder)

            tensors = {
                "model": self.model.state_dict(),
                "optimizer": checkpoint.optimizer_tensors(self.optimizer),
                "rng": random_states,
                "steps": {"table": torch.from_numpy(table)},
            }
            state = {
                "step": step,
                "plan": asdict(plan),
                "scaler": self.scaler.state_dict(),
                "work": identity(task),
                "splits": [asdict(split) for split in self.balance.splits],
            }
            checkpoint.save(task.rank.run_dir / "checkpoints", step, tensors, state, model_files)
        dist.barrier()


def learning_rates(config: SquadConfig, steps: int) -> list[float]:
    """Return the rate of each step: a linear rise, then a linear fall; above 0 in every step.

    The usual formula gives the first step of a warm-up the rate 0, and a step more than planned as well; here both
    ends of the slopes lie outside of the training.
    """
    peak, warmup = config.learning_rate, int(steps * config.warmup_ratio)
    rising = [peak * (step + 1) / (warmup + 1) for step in range(warmup)]
    return rising + [peak * (steps - step) / (steps - warmup) for step in range(warmup, steps)]


def make_plan(task: Task, count: int, step_s: float, tokens_per_step: float) -> Plan:
    """Decide how many steps of ``step_s`` seconds on ``count`` windows fit into the budget, within ``max_steps``. All ranks call it.

    The evaluation, forward passes alone, takes a third of a training on as many tokens. Learning rates follow from what is
    decided here, so that a cut training still warms up and decays.
    """
    config = task.config
    left_s = training.time_left(task.rank, 1.2 * step_s / 3 * task.eval_tokens / tokens_per_step)
    total = math.ceil(config.epochs * steps_per_epoch(count, config.global_batch))
    asked = min(total, config.max_steps or total)
    steps = training.fitting(asked, step_s, left_s, MIN_STEPS)
    cut_by = "budget" if steps < asked else "max_steps" if asked < total else ""
    totals = (samples_of(number, count, config.global_batch) for number in (total, steps))
    return Plan(total, next(totals), steps, next(totals), step_s, left_s, cut_by)


def measured_step_s(task: Task, trial: Callable[[int], None]) -> float:
    """Return the mean seconds of ``trial(0)`` and the following on the slowest rank, after a warm-up.

    ``trial`` does the forward and backward pass of a step and must leave the weights alone.
    """
    world, times = task.rank.world, []
    with keep_alive(task.rank.events, task.config.startup_timeout_s):
        trial(0)
        devices.synchronize(world.device)
    for number in range(len(TRIALS)):
        task.rank.events.emit("progress", phase="warmup", done=number, total=len(TRIALS), unit="steps")
        began = time.perf_counter()
        trial(number)
        devices.synchronize(world.device)
        times.append(agree(time.perf_counter() - began, world))
    return sum(times) / len(times)


def train(task: Task, make: Callable[[Task], Native] = Native) -> Trained:
    """Fine-tune ``task.loaded.model`` in place by the passes of ``make``. Called by all ranks."""
    config, rank = task.config, task.rank
    work = make(task)
    start, passed_over = to_continue(task)
    if start:
        # As a new training does: DDP orders its buckets after the first pass, and with their order sums of four and more
        # ranks change their last bits.
        work.trial(0)
        plan, table = put_back(work, start)
    else:
        if config.balance == "auto":
            work.balance.measure()
        step_s = measured_step_s(task, work.trial)
        tokens = len(task.features.input_ids) / task.per_epoch
        plan, table = make_plan(task, len(task.features), step_s, tokens), None
        # The model was drawn from the same seed on all ranks; dropout must differ between them.
        torch.manual_seed(config.seed + 1 + rank.world.rank)
    splits = work.balance.splits
    work.every = WINDOW if splits else 0  # what the ranks tell each other late is answered late
    trained = training.train(rank, work, plan, learning_rates(config, plan.planned_steps), task.per_epoch, table)
    trained.passed_over = passed_over
    trained.tables = work.balance.rows(trained) if splits else {}
    return trained


def identity(task: Task) -> str:
    """Return a hash of what must be equal for a run to continue another one bit for bit."""
    parts = [task.config.work(), task.config.world_size, len(task.features), torch.get_num_threads()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def to_continue(task: Task) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint that this training goes on from, and what is wrong with newer ones; None for a new training.

    After a failure it is the run's own newest one on any of its nodes, else the newest of the run ``config.resume``.
    """
    config, rank = task.config, task.rank
    start, faults = None, list[str]()

    def unfinished(candidate: Checkpoint) -> bool:
        return bool(candidate.step < candidate.state["plan"]["planned_steps"])

    if config.max_restarts:
        own, leads = rank.run_dir / "checkpoints", rank.world.local_rank == 0
        with keep_alive(rank.events, config.startup_timeout_s):  # while files travel
            start, faults = checkpoint.newest_shared(own, leads, comm_device(rank.world), unfinished)
    if start is None and config.resume:
        folder = Path(config.resume)
        if not folder.is_dir():
            raise UserError(f"resume = {folder}: no such run folder; give the folder of the interrupted run")
        start, damaged = checkpoint.newest(folder / "checkpoints", unfinished)
        faults += damaged
    return start, faults


def put_back(work: Native, start: Checkpoint) -> tuple[Plan, np.ndarray]:
    """Put back what a checkpoint holds; return its plan and step table."""
    task, folder, plan = work.task, start.path.parents[1], Plan(**start.state["plan"])
    if start.state["work"] != identity(task):
        now, then = task.config.work(), load_config(folder).work()
        pairs = ((name, then[name], now[name]) for name in now if now[name] != then[name])
        words = ("{} = {}, this one has {}".format(*pair) for pair in pairs)
        differing = next(words, "other data or another number of threads")
        raise UserError(f"resume = {folder}: that run had {differing}: give the same values to continue it")
    work.model.load_state_dict(start.tensors("model"))
    checkpoint.load_optimizer(work.optimizer, start.tensors("optimizer"))
    work.scaler.load_state_dict(start.state["scaler"])
    prefix, states = f"rank{task.rank.world.rank}.", start.tensors("rng")
    own = {name.removeprefix(prefix): value for name, value in states.items() if name.startswith(prefix)}
    checkpoint.set_rng_state(own, task.rank.world.device)
    for split in start.state["splits"]:
        members = tuple(Member(**member) for member in split["members"])
        work.balance.splits.append(Split(**split | {"members": members}))
    if task.rank.world.main:
        task.rank.events.emit("log", message=f"continued from {start.path} at step {start.step:,}")
    return plan, start.tensors("steps")["table"].numpy()
