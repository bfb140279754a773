"""What an engine of the training is given, the micro-batches of each rank, and the passes of the kit's own one by autograd.

Notation: G samples of a global batch, W ranks.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.benchmarks.squad.shares import IDLE_TOKENS, Split
from benchlib.runtime import devices
from benchlib.runtime.measurement import Rank
from benchlib.runtime.timing import Clock, GradientExchange
from benchlib.workloads import encoders, squad_data
from benchlib.workloads.answer_loss import answer_losses
from benchlib.workloads.features import Features, MicroBatch, collate, cut, epoch_batches, even, share, steps_per_epoch
from benchlib.workloads.training import Cost, Mark, data_parallel, prefetched

# Samples of a micro-batch, weight of their summed loss, whether it is a step's last.
Part = tuple[np.ndarray, float, bool]
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

    def collate(self, windows: np.ndarray, multiple: int, pin: bool = False) -> MicroBatch:
        return collate(self.features, windows, self.loaded.tokenizer.pad_token_id, multiple, pin)


def load_data(config: SquadConfig) -> squad_data.Split:
    names = ("data", "train_questions", "eval_questions", "seed", "train_file", "eval_file")
    return squad_data.load(*(getattr(config, name) for name in names))


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


class Native:
    """Passes by torch over the micro-batches of this rank, a ``Work`` of the shared loop; DDP adds the gradients while a step's
    last micro-batch is differentiated.

    A step's batch depends on seed, epoch and global batch size only. ``splits`` say how the ranks share it, in the order of
    their first steps; before the first one they share evenly. One micro-batch is always made ahead: a split that is added
    after a step may begin with the step after the next one.
    """

    multiple = 8  # that lengths are padded to a multiple of
    unknown: tuple[str, ...] = ()

    def __init__(self, task: Task) -> None:
        config, device = task.config, task.rank.world.device
        self.task, self.model = task, task.loaded.model.to(device).train()
        self.splits: list[Split] = []
        self.lengths = task.features.lengths
        self._epoch = functools.lru_cache(1)(
            functools.partial(epoch_batches, self.lengths, config.global_batch, config.seed)
        )
        if device.type == "cpu":
            devices.keep_freed_memory()
        self.scaler = devices.grad_scaler(config.precision, device)
        self.exchange = GradientExchange(Clock(device))
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
        self.ddp = data_parallel(form, self.exchange, bucket_cap_mb=config.bucket_cap_mb)

    def indices(self, step: int) -> np.ndarray:
        """Return the samples of the global batch of a step, int64 (G,)."""
        epoch, place = divmod(step, self.task.per_epoch)
        return self._epoch(epoch)[place]

    def split(self, step: int) -> Split | None:
        return next((split for split in reversed(self.splits) if split.from_step <= step), None)

    def parts(self, step: int) -> list[Part]:
        """Return the micro-batches of this rank."""
        world, batch, split = self.task.rank.world, self.indices(step), self.split(step)
        shares = split.of(len(batch)) if split else even(len(batch), world.size)
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
        pin = device.type == "cuda"  # page-locked memory is copied in the background

        def make(part: Part) -> tuple[MicroBatch, float, bool]:
            batch = self.task.collate(part[0], self.multiple, pin)
            return batch if part[1] else batch.idle(IDLE_TOKENS), part[1], part[2]

        for batch, weight, last in prefetched(make, (part for step in steps for part in self.parts(step))):
            yield batch.to(device), weight, last

    def typical(self) -> list[int]:
        """Return steps of the first epoch whose batches have the places ``TRIALS`` in the order of tokens."""
        order = np.argsort([self.lengths[self.indices(s)].sum() for s in range(self.task.per_epoch)], kind="stable")
        return [int(order[min(int(place * len(order)), len(order) - 1)]) for place in TRIALS]

    def differentiate(self, batch: MicroBatch, weight: float, last: bool, step: int, mark: Mark) -> torch.Tensor:
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

    def cost(self, batch: MicroBatch, weight: float) -> Cost:
        rows, length = batch.shape
        counts = (rows, batch.tokens, rows * length) if weight else (0, 0, 0)
        return *counts, self.task.loaded.train_flops(rows, length)

    def trial(self, number: int, mark: Mark = lambda phase: None) -> None:
        """Do the forward and backward pass of the step ``typical()[number]`` and leave the weights alone."""
        for batch, weight, last in self.batches(0, [self.typical()[number]]):
            mark("data")
            self.differentiate(batch, weight, last, 0, mark)
        self.optimizer.zero_grad(set_to_none=False)
