"""What the ranks record of each training step, and what they tell each other meanwhile.

Notation: K steps, W ranks, C columns.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from benchlib.core.events import EventWriter, Moment, read_events
from benchlib.runtime.group import World, all_gather_objects, weight_checksum

COLUMNS = (
    "loss", "samples", "tokens", "padded_tokens", "flops",
    "step_s", "data_s", "forward_s", "backward_s", "exchange_s", "exchange_exposed_s", "optimizer_s",
)  # fmt: skip
_COUNTS, _TIMES = COLUMNS[1:5], COLUMNS[5:]

REPORT_EVERY_S = 0.5  # the ranks exchange their rows, and rank 0 tells of them, about this often
_MAX_STEPS = 50


def launched_at(run_dir: Path) -> Moment:
    """Return when the run was launched: as the supervisor wrote it, else when this process began."""
    launched = read_events(run_dir, {"launched"})
    if not launched:
        return Moment.at(psutil.Process().create_time())
    last = launched[-1]
    # Another machine has another monotonic clock.
    return Moment(last["t"], last["monotonic"]) if last["host"] == platform.node() else Moment.at(last["t"])


def comm_device(world: World) -> torch.device:
    """Return where a tensor must live to be exchanged: gloo and its kin take those of the CPU."""
    return world.device if world.collective in ("nccl", "xccl") else torch.device("cpu")


def compare_ranks(model: torch.nn.Module, world: World, events: EventWriter, epoch: int) -> list[str]:
    """Gather the checksum of every rank's weights, tell whether they are equal, and return them by rank."""
    checksums = all_gather_objects(weight_checksum(model))
    if world.main:
        events.emit("epoch", epoch=epoch, checksums=checksums, equal=len(set(checksums)) == 1)
    return checksums


def agree(value: float, world: World) -> float:
    """Return the largest of the ranks' values, on every rank."""
    tensor = torch.tensor([value], dtype=torch.float64, device=comm_device(world))
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def wall_s(step_s: np.ndarray) -> np.ndarray:
    """Return the seconds of each step of all ranks together, (K,), from each rank's own, (K, W).

    A step ends with the rank that ends it last, and the next one begins there: the steps add up to the wall time. The largest of the
    ranks' own times add up to more, since another rank is late at the end of each step.
    """
    return np.diff(step_s.cumsum(axis=0).max(axis=1), prepend=0.0)


@dataclass(frozen=True)
class Step:
    """One step of this rank. ``loss`` is the rank's part of the mean over the global batch: the ranks' parts add up."""

    step: int
    epoch: int
    learning_rate: float
    loss: torch.Tensor | float
    samples: int
    tokens: int
    padded_tokens: int
    flops: float


class StepLog:
    """Collects the steps of all ranks; ``table`` is float64 (K, W, C), the same on every rank.

    ``step_s`` is the expected time of a step and must be the same on all ranks: it sets how often they meet.
    """

    def __init__(self, world: World, events: EventWriter, step_s: float, table: np.ndarray | None = None) -> None:
        self.world = world
        self.events = events
        self.every = max(1, min(_MAX_STEPS, int(REPORT_EVERY_S / max(step_s, 1e-6))))
        self._blocks: list[np.ndarray] = [] if table is None else [table]
        self._waiting: list[Step] = []

    @property
    def table(self) -> np.ndarray:
        return np.concatenate(self._blocks) if self._blocks else np.zeros((0, self.world.size, len(COLUMNS)))

    def add(self, step: Step) -> bool:
        """Keep a step; True when it is time to ``gather``, on all ranks alike."""
        self._waiting.append(step)
        return len(self._waiting) >= self.every

    def gather(self, times: Sequence[Mapping[str, float]]) -> None:
        """Exchange the waiting steps with their ``times`` (one row each; a missing key is unknown). All ranks call it."""
        if not self._waiting:
            return
        rows = [
            [float(step.loss), *(getattr(step, name) for name in _COUNTS), *(row.get(name, nan) for name in _TIMES)]
            for step, row in zip(self._waiting, times, strict=True)
        ]
        mine = torch.tensor(rows, dtype=torch.float64).to(comm_device(self.world))
        parts = [torch.empty_like(mine) for _ in range(self.world.size)]
        dist.all_gather(parts, mine)
        block = torch.stack(parts, dim=1).cpu().numpy()
        self._blocks.append(block)
        if self.world.main:
            for step, row, step_s in zip(self._waiting, block, wall_s(Columns(block)["step_s"]), strict=True):
                self._emit(step, row, float(step_s))
        else:
            self.events.emit("heartbeat", step=self._waiting[-1].step)  # the supervisor ends a rank that stays silent
        self._waiting = []

    def _emit(self, step: Step, row: np.ndarray, step_s: float) -> None:
        by_name = dict(zip(COLUMNS, row.T, strict=True))  # each (W,)
        fields: dict[str, Any] = {name: int(by_name[name].sum()) for name in ("samples", "tokens", "padded_tokens")}
        # The time of a step is that of all ranks; the split is that of rank 0, so that its parts add up.
        fields |= {name: float(by_name[name][0]) for name in _TIMES if not np.isnan(by_name[name][0])}
        fields["step_s"] = step_s
        self.events.emit(
            "step", step=step.step, epoch=step.epoch, loss=float(by_name["loss"].sum()), lr=step.learning_rate, **fields
        )


class Columns:
    """A step table (K, W, C) by column: ``columns["tokens"]`` is float (K, W)."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = table

    def __getitem__(self, name: str) -> np.ndarray:
        return self.table[:, :, COLUMNS.index(name)]  # type: ignore[no-any-return]
