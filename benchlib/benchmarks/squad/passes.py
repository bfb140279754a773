"""What an engine of the training is given, the micro-batches of each rank, and the passes of the kit's own one by autograd.

Notation: G samples of a global batch, W ranks.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.benchmarks.squad.shares import IDLE_TOKENS, Split
from benchlib.core.definitions import encoder_train_flops
from benchlib.runtime import devices
from benchlib.runtime.measurement import Rank
from benchlib.runtime.timing import Clock, GradientExchange
from benchlib.workloads import encoders, squad_data
from benchlib.workloads.answer_loss import answer_losses
from benchlib.workloads.batches import MicroBatch, collate, cut, epoch_batches, even, share, steps_per_epoch
from benchlib.workloads.features import Features
from benchlib.workloads.training import data_parallel, prefetched

TRIALS = (1 / 6, 1 / 2, 5 / 6)  # places in the order of length: the mean of steps there is close to that of all


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


def load_data(config: SquadConfig) -> squad_data.Split:
    counts, files = (config.train_questions, config.eval_questions), (config.train_file, config.eval_file)
    return squad_data.load(config.data, *counts, config.seed, *files)


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


def flops_of(loaded: encoders.Loaded) -> Callable[[int, int], float]:
    """Return the function of (samples, padded length) that gives the FLOPs of training on them; NaN where unknown."""
    layers, hidden, intermediate = loaded.layers, loaded.hidden, loaded.intermediate
    if layers is None or hidden is None or intermediate is None:
        return lambda samples, length: math.nan
    return lambda samples, length: encoder_train_flops(layers, hidden, intermediate, [(samples, length)])


class Batches:
    """The micro-batches of this rank, by step. A step's batch depends on seed, epoch and global batch size only.

    ``splits`` say how the ranks share it, in the order of their first steps; before the first one they share evenly. One
    micro-batch is always made ahead: a split that is added after a step may begin with the step after the next one.
    """

    def __init__(self, task: Task, multiple: int) -> None:
        self.splits: list[Split] = []
        self.task, self.multiple = task, multiple
        self.lengths = task.features.lengths
        self.pad_id = task.loaded.tokenizer.pad_token_id
        self._epoch = -1
        self._batches: list[np.ndarray] = []

    def indices(self, step: int) -> np.ndarray:
        """Return the samples of the global batch of a step, int64 (G,)."""
        epoch, place = divmod(step, self.task.per_epoch)
        if epoch != self._epoch:
            self._epoch, config = epoch, self.task.config
            self._batches = epoch_batches(self.lengths, config.global_batch, config.seed, epoch)
        return self._batches[place]

    def parts(self, step: int) -> list[tuple[np.ndarray, float, bool]]:
        """Return (samples of a micro-batch, weight of their summed loss, whether it is the last) of this rank."""
        world, batch, split = self.task.rank.world, self.indices(step), self.split(step)
        shares = split.of(len(batch)) if split else even(len(batch), world.size)
        own = shares[world.rank]
        parts = split.members[world.rank].micro_batches(own) if split else self.task.config.accumulation
        cuts = cut(share(batch, self.lengths, shares, world.rank), parts)
        if not cuts:
            # A rank without work still has to take part in the exchange, with a gradient of zero.
            return [(batch[:1], 0.0, True)]
        return [(part, 1 / len(batch), number == len(cuts)) for number, part in enumerate(cuts, 1)]

    def split(self, step: int) -> Split | None:
        return next((split for split in reversed(self.splits) if split.from_step <= step), None)

    def stream(self, steps: Iterable[int]) -> Iterator[tuple[MicroBatch, float, bool]]:
        """Yield (micro-batch on the device, weight, whether it is the step's last) of all ``steps``."""
        device = self.task.rank.world.device
        pin = device.type == "cuda"  # page-locked memory is copied in the background

        def make(part: tuple[np.ndarray, float, bool]) -> tuple[MicroBatch, float, bool]:
            batch = collate(self.task.features, part[0], self.pad_id, self.multiple, pin)
            return batch if part[1] else batch.idle(IDLE_TOKENS), part[1], part[2]

        for batch, weight, last in prefetched(make, (part for step in steps for part in self.parts(step))):
            yield batch.to(device), weight, last

    def typical(self) -> list[int]:
        """Return steps of the first epoch whose batches have the places ``TRIALS`` in the order of tokens."""
        order = np.argsort([self.lengths[self.indices(s)].sum() for s in range(self.task.per_epoch)], kind="stable")
        return [int(order[min(int(place * len(order)), len(order) - 1)]) for place in TRIALS]


class Native:
    """Passes by torch, a ``Work`` of the shared loop; DDP adds the gradients while a step's last micro-batch is differentiated."""

    multiple = 8  # that lengths are padded to a multiple of
    unknown: tuple[str, ...] = ()

    def __init__(self, task: Task) -> None:
        config, device = task.config, task.rank.world.device
        self.task, self.model = task, task.loaded.model.to(device).train()
        if device.type == "cpu":
            devices.keep_freed_memory()
        self.scaler = devices.grad_scaler(config.precision, device)
        self.exchange = GradientExchange(Clock(device))
        self.prepare()
        # Biases and the weights of norms, which are vectors, are not decayed.
        kinds = {True: list[Any](), False: list[Any]()}
        for parameter in self.model.parameters():
            kinds[parameter.ndim >= 2] += [parameter] if parameter.requires_grad else []
        decay = {True: config.weight_decay, False: 0.0}
        groups = [{"params": kinds[matrix], "weight_decay": decay[matrix]} for matrix in (True, False)]
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, fused=config.fused_optimizer or None)
        self.data, self.flops = Batches(task, self.multiple), flops_of(task.loaded)

    def prepare(self) -> None:
        config = self.task.config
        # dynamic: every batch has another length. The plain model stays for the evaluation, which would compile it again.
        form: Any = torch.compile(self.model, dynamic=True) if config.compile else self.model
        self.ddp = data_parallel(form, self.exchange, bucket_cap_mb=config.bucket_cap_mb)

    def batches(self, epoch: int, steps: range) -> Iterator[tuple[MicroBatch, float, bool]]:
        return self.data.stream(steps)

    def differentiate(
        self, batch: MicroBatch, weight: float, last: bool, step: int, mark: Callable[[str], None]
    ) -> torch.Tensor:
        """See ``Work``. With injected work it is repeated, and the last time counts."""
        for counts in [False] * (self.task.config.work_of(self.task.rank.world.rank, step) - 1) + [True]:
            # Only the last micro-batch of a step exchanges gradients: their sum over the ranks is needed once.
            with contextlib.nullcontext() if last and counts else self.ddp.no_sync():
                part = self.loss(batch) * (weight if counts else 0.0)
                mark("forward")
                self.scaler.scale(part).backward()  # type: ignore[no-untyped-call]
                mark("backward")
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

    def cost(self, batch: MicroBatch, weight: float) -> tuple[int, int, int, float]:
        rows, length = batch.shape
        counts = (rows, batch.tokens, rows * length) if weight else (0, 0, 0)
        return *counts, self.flops(rows, length)

    def trial(self, number: int, mark: Callable[[str], None] = lambda phase: None) -> None:
        """Do the forward and backward pass of the step ``typical()[number]`` and leave the weights alone."""
        for batch, weight, last in self.data.stream([self.data.typical()[number]]):
            mark("data")
            self.differentiate(batch, weight, last, 0, mark)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
