"""Heterogeneous ranks: what each can do, which split follows from it, when that has to change, and what came of it.

The compute time of a rank in a step with n samples of S tokens each, in m micro-batches, is taken to be

    t_r(n) = step_s + batch_s m + sample_s n + token_s n S        (without work a short pass remains)

and a step lasts as long as its slowest rank. ``optimum`` is the split of whole samples and whole micro-batches that fit each
rank's memory whose slowest rank is soonest done.

Calibration: an even step tells how many samples each rank may get, and passes of a few shapes up to that many are timed, on
all ranks at the same time and with the threads of their work: so little is extrapolated, and no rank is done long before the
others. The fit in seconds per micro-batch, sample and token holds for other lengths, too. Memory on an accelerator is the peak
of such a pass; on a CPU it is what the backward pass keeps, and temporary tensors are not in it. ``Balance`` follows the
training: from the table that all ranks share anyway each rank comes to the same new split.

Notation: G samples of a global batch, W ranks, K steps, C columns; n samples of a rank, B of a micro-batch, S tokens of each
after padding.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from benchlib.core.errors import UserError
from benchlib.core.events import keep_alive
from benchlib.core.machine import cpu_model
from benchlib.runtime import devices
from benchlib.runtime.group import all_gather_objects, barrier
from benchlib.runtime.measurement import Tables
from benchlib.runtime.steps import Columns, wall_s
from benchlib.workloads.features import MicroBatch
from benchlib.workloads.training import Row, Trained, compute_time

IDLE_TOKENS = 8  # of the pass of a rank without work, which still has to take part in the exchange
WINDOW = 8  # steps whose median tells a drift from noise
MIN_GAIN = 0.1  # of a step's time that another split has to promise: of 2 equal ranks one became 22% slower
# Shapes that are timed: part of the samples that a rank may get, and place of the samples in the order of length.
SHAPES = ((0.25, 0.9), (0.5, 0.1), (1.0, 0.5))
MAX_BATCHES = 2  # of the config's batch size in a timed pass: a share of many batches would cost as many steps
CALIBRATION_S = 0.3  # of rounds over the shapes; at least MIN_ROUNDS
MIN_ROUNDS = 2  # of which the fastest counts: the first one finds no memory and no kernels at hand
CONTINUED = "the training was continued"
USABLE = 0.8  # of the memory that is free: other programs and fragments need some, too


@dataclass(frozen=True)
class Member:
    """What a rank can do. ``most`` is how many samples of the longest window fit one micro-batch in its memory."""

    device: str = ""
    threads: int = 1
    step_s: float = 0.0
    batch_s: float = 0.0
    sample_s: float = 0.0
    token_s: float = 0.0
    most: int = 0

    def micro_batches(self, samples: Any) -> Any:
        """Return into how many micro-batches ``samples`` are cut; a number or an array."""
        return -(-samples // max(1, self.most))

    def seconds(self, samples: Any, tokens: Any) -> np.ndarray:
        """Return the compute time of a step with ``samples`` samples of ``tokens`` tokens in all; numbers or arrays."""
        busy = self.batch_s * self.micro_batches(samples) + self.sample_s * samples + self.token_s * tokens
        idle = self.batch_s + self.sample_s + self.token_s * IDLE_TOKENS
        return self.step_s + np.where(samples > 0, busy, idle)

    def slower(self, factor: float) -> "Member":
        times = ("step_s", "batch_s", "sample_s", "token_s")
        return replace(self, **{name: getattr(self, name) * factor for name in times})


@dataclass(frozen=True)
class Split:
    """The ``shares`` of each whole global batch from step ``from_step`` on (counted from 0). ``tokens`` is S, a mean.

    A split that answers a drift names the rank that changed most, and by which ``factor``.
    """

    members: tuple[Member, ...]
    shares: list[int]
    tokens: float
    from_step: int = 0
    drifted: int | None = None
    factor: float | None = None

    @property
    def step_s(self) -> float:
        """Return the expected seconds of a step: the compute time of the slowest rank."""
        shares = np.array([self.shares])
        return float(self.expected(shares, shares * self.tokens).max())

    def of(self, samples: int) -> list[int]:
        """Return the shares of a batch, which may be the smaller last one of an epoch."""
        return self.shares if samples == sum(self.shares) else optimum(self.members, samples, self.tokens)

    def expected(self, samples: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the expected compute time of each rank, (K, W) seconds, from (K, W) samples and tokens."""
        columns = [member.seconds(samples[:, place], tokens[:, place]) for place, member in enumerate(self.members)]
        return np.stack(columns, axis=1)

    def wait_parts(
        self, samples: np.ndarray, tokens: np.ndarray, own: np.ndarray, step_s: np.ndarray
    ) -> dict[str, float]:
        """Return what the time of a step consists of, seconds by part; they add up. ``best_s`` is the optimum of whole samples at
        the speeds that these steps showed.

        ``samples``, ``tokens`` and ``own`` work are (K, W), ``step_s`` (K,): steps under this split.
        """
        mean, expected = own.mean(axis=0), self.expected(samples, tokens).mean(axis=0)
        speeds = zip(self.members, mean / np.maximum(expected, 1e-12), strict=True)
        shown = [member.slower(float(factor)) for member, factor in speeds]
        whole, each = round(float(samples.sum(axis=1).mean())), float(tokens.sum() / samples.sum())
        best = best_split(shown, whole, each).step_s
        return {
            "best_s": best,
            "other_split_s": float(mean.max()) - best,
            "differing_steps_s": float(own.max(axis=1).mean() - mean.max()),
            "exchange_s": float(step_s.mean() - own.max(axis=1).mean()),
        }


def best_split(members: Sequence[Member], samples: int, tokens: float, **more: Any) -> Split:
    """Return the split of ``samples`` samples whose slowest rank is soonest done; raises as :func:`optimum`."""
    return Split(tuple(members), optimum(members, samples, tokens), tokens, **more)


def optimum(members: Sequence[Member], samples: int, tokens: float) -> list[int]:
    """Return the shares of ``samples`` samples whose slowest rank is soonest done; whole samples, whole micro-batches.

    Each sample in turn goes to the rank that is soonest done with it. Raises ``UserError`` where no rank has memory for one.
    """
    able = [place for place, member in enumerate(members) if member.most]
    if not able:
        raise UserError(
            "no rank has memory for one sample beside weights, gradients and optimizer state: raise memory_limits_gb, or take a "
            "smaller model or max_length"
        )
    counts, owners = (
        np.arange(1, samples + 1),
        np.repeat(able[::-1], samples),
    )  # of equal ends the last rank's comes first
    # Never falling: a rank that could do more in less time may as well do less.
    ends = [np.maximum.accumulate(members[place].seconds(counts, counts * tokens)) for place in able[::-1]]
    soonest = np.argsort(np.concatenate(ends), kind="stable")[:samples]
    return np.bincount(owners[soonest], minlength=len(members)).tolist()  # type: ignore[no-any-return]


def replanned(split: Split, ratios: np.ndarray, from_step: int) -> Split | None:
    """Return the split that fits the speeds of the last steps, or None where the present one is good enough.

    ``ratios`` (K, W) are measured over expected compute time of the steps under ``split``, of which the last ``WINDOW`` count.
    """
    if len(ratios) < WINDOW:
        return None
    factors = np.median(ratios[-WINDOW:], axis=0)
    members = [member.slower(float(factor)) for member, factor in zip(split.members, factors, strict=True)]
    drifted = int(np.abs(np.log(factors)).argmax())
    best = best_split(
        members, sum(split.shares), split.tokens, from_step=from_step, drifted=drifted, factor=float(factors[drifted])
    )
    gained = replace(split, members=best.members).step_s >= (1 + MIN_GAIN) * best.step_s
    return best if gained else None


def fit(shapes: list[tuple[int, int]], times: list[float]) -> tuple[float, float, float]:
    """Return seconds per micro-batch, sample and token, none below zero, that fit the times of shapes (B, S) in ratio."""
    from scipy.optimize import nnls  # takes most of a second to import: only who balances pays

    rows = np.array([[1.0, samples, samples * tokens] for samples, tokens in shapes])
    goal = np.array(times)
    # Columns of like size: nnls compares gradients with one tolerance.
    scale = (rows / goal[:, None]).max(axis=0)
    solution, _ = nnls(rows / goal[:, None] / scale, np.ones(len(goal)))
    batch_s, sample_s, token_s = (solution / scale).tolist()
    return batch_s, sample_s, token_s


class Balance:
    """The splits of a training, the newest last, and the steps that they are compared with."""

    def __init__(self, work: Any) -> None:  # of ``benchlib.benchmarks.squad.train.Native``
        self.task, self.work, self.world = work.task, work, work.task.rank.world
        self.splits: list[Split] = []
        self.calibration_s: float | None = None
        self.even_s: list[float] = []  # compute time of each rank in the even step before the training

    def measure(self) -> None:
        """Take an even step, calibrate all ranks, and make the first split. Nothing of the training changes."""
        work, config, began = self.work, self.task.config, time.perf_counter()
        with keep_alive(self.task.rank.events, config.startup_timeout_s):
            work.trial(0)  # libraries load, and DDP orders its buckets
        work.timer.begin()
        work.trial(1)
        work.timer.end_step()
        self.even_s = [float(compute_time(row)) for (row,) in all_gather_objects(work.timer.take())]
        speeds = 1 / np.array(self.even_s)
        promised = config.global_batch * float(speeds[self.world.rank] / speeds.sum())
        members = all_gather_objects(self._calibrated(promised))
        self.calibration_s = time.perf_counter() - began
        tokens = float(np.mean([work.lengths[work.indices(step)].max() for step in work.typical()]))
        self._add(best_split(members, config.global_batch, tokens))

    def _calibrated(self, promised: float) -> Member:
        """Return what this rank can do; ``promised`` is how many samples it may get. Weights and optimizer stay as they are."""
        config, device = self.task.config, self.world.device
        order = np.argsort(self.task.features.lengths, kind="stable")

        def batch(samples: int, place: float) -> MicroBatch:
            first = min(int(place * len(order)), max(0, len(order) - samples))
            part = order[first : first + samples]
            return self.task.collate(part, self.work.multiple).to(device)

        # AdamW keeps two moments beside weights and gradients.
        held = 4.0 * sum(parameter.nbytes for parameter in self.work.model.parameters())
        longest = batch(min(2, config.batch_size), 1.0)
        limit = math.inf  # of what tensors may fill, those that are held included
        if config.memory_limits_gb:
            limit = 1e9 * config.memory_limits_gb[self.world.rank]
        elif devices.has_events(device):
            limit = USABLE * float(torch.get_device_module(device).get_device_properties(device).total_memory)
        elif device.type == "cpu":
            limit = USABLE * (psutil.virtual_memory().available / self.world.local_size) + held
        sample_bytes = max(1.0, self._kept_bytes(longest) / longest.shape[0])
        most = int(min(config.global_batch, max(0.0, limit - held) / sample_bytes))
        # At least 2, for else nothing tells samples from micro-batches.
        top = min(max(2, math.ceil(promised)), MAX_BATCHES * config.batch_size, most, len(order))
        # A rank without memory for a sample still takes part in every exchange.
        batches = [batch(math.ceil(part * top), at) for part, at in SHAPES] if most else [longest.idle(IDLE_TOKENS)]
        times: list[list[float]] = [[] for _ in batches]
        barrier()
        end, others = time.perf_counter() + CALIBRATION_S, None
        # A rank that is done goes on until all are: in the training, too, none of them has the machine for itself.
        while others is None or not others.is_completed():
            for passed, samples in zip(batches, times, strict=True):
                samples.append(self._timed(self._pass, passed))
            self.task.rank.events.emit("heartbeat")
            if others is None and len(times[0]) >= MIN_ROUNDS and time.perf_counter() >= end:
                others = dist.barrier(async_op=True)
        others.wait()
        named = devices.has_events(device)
        name = torch.get_device_module(device).get_device_name(device) if named else f"{device.type}, {cpu_model()}"
        return Member(
            name,
            torch.get_num_threads(),
            self._optimizer_s(),
            *fit([item.shape for item in batches], [min(item) for item in times]),
            most=most,
        )

    def _pass(self, batch: MicroBatch) -> Any:
        """Forward and backward pass of no weight, without exchange."""
        return self.work.differentiate(batch, 0.0, False, 0)

    def _timed(self, work: Callable[..., Any], *batches: MicroBatch) -> float:
        devices.synchronize(self.world.device)
        began = time.perf_counter()
        work(*batches)
        devices.synchronize(self.world.device)
        return time.perf_counter() - began

    def _optimizer_s(self) -> float:
        """Return the seconds of an optimizer's step: of another one, that at a rate of 0 changes no weight."""
        optimizer = self.work.optimizer
        self.work.optimizer = torch.optim.AdamW([{**group, "lr": 0.0} for group in optimizer.param_groups])
        optimizer.zero_grad(set_to_none=False)
        self.work.update()
        seconds = self._timed(self.work.update)
        self.work.optimizer = optimizer
        return seconds

    def _kept_bytes(self, batch: MicroBatch) -> float:
        """Return the bytes that a pass over a micro-batch needs beside weights, gradients and optimizer state."""
        device = self.world.device
        if devices.has_events(device):
            self._pass(batch)
            before = torch.get_device_module(device).memory_allocated(device)
            devices.reset_peak_memory(device)
            self._pass(batch)
            return float((devices.peak_memory_bytes(device)[0] or 0.0) - before)
        weights = {parameter.untyped_storage().data_ptr() for parameter in self.work.model.parameters()}
        held: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                held[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.work.loss(batch)
        del loss
        return float(sum(held.values()))

    def _add(self, split: Split) -> None:
        self.splits.append(split)
        if self.world.main:
            counts = "+".join(map(str, split.shares))
            words = f"from step {split.from_step + 1} on the ranks get {counts} samples of a step"
            self.task.rank.events.emit("log", message=words)

    def follow(self, table: np.ndarray, next_open: int) -> None:
        """Add a split from ``next_open`` on if the last steps of ``table`` (K, W, C) took other times than expected."""
        if not self.splits:
            return  # the ranks share evenly
        split = self.splits[-1]
        steps = Columns(table[max(split.from_step, len(table) - WINDOW) :])
        ratios = compute_time(steps) / split.expected(steps["samples"], steps["padded_tokens"])
        if better := replanned(split, ratios, next_open):
            self._add(better)

    def rows(self, trained: Trained) -> Tables:
        """Return the tables shares, splits and balance: what each rank got and took, the splits, what the last one gained."""
        split, columns = self.splits[-1], Columns(trained.table)
        own, samples, tokens = compute_time(columns), columns["samples"], columns["padded_tokens"]
        step_s, expected = wall_s(columns["step_s"]), split.expected(samples, tokens)
        last = samples.sum(axis=1) == self.task.config.global_batch
        last[: max(split.from_step, trained.first)] = False
        few = f"{int(last.sum())} whole steps under the last split, {WINDOW} are needed"
        why = dict.fromkeys(("expected_s", "own_s", "idle_s", "trained"), few)
        why["even_s"] = CONTINUED
        times = {"expected_s": expected, "own_s": own, "idle_s": step_s[:, None] - own} if last.any() else {}
        rows: list[Row] = [
            {
                **asdict(member),
                **{name: float(np.median(values[last, rank])) for name, values in times.items()},
                "rank": rank,
                "samples": split.shares[rank],
                "work": self.task.config.work_of(rank, len(trained.table) - 1),  # as the split, at the end
                "micro_batches": member.micro_batches(split.shares[rank]),
                "even_s": self.even_s[rank] if self.even_s else None,
                "trained": np.unique(samples[last, rank]).astype(int).tolist(),
                "why": why,
            }
            for rank, member in enumerate(split.members)
        ]
        gained: Row = {"status": "skipped", "reason": few}
        if last.sum() >= WINDOW:
            gained = split.wait_parts(samples[last], tokens[last], own[last], step_s[last])
        waits = (1 - own / own.max(axis=1, keepdims=True)).mean(axis=1).tolist()
        gained |= {"wait_shares": waits, "calibration_s": self.calibration_s, "why": {"calibration_s": CONTINUED}}
        first = dict.fromkeys(("drifted", "factor"), "the first split follows from calibration")
        splits: list[Row] = [
            {name: getattr(part, name) for name in ("from_step", "shares", "drifted", "factor")}
            | {"expected_s": part.step_s, "why": first}
            for part in self.splits
        ]
        return {"shares": rows, "splits": splits, "balance": [gained]}
