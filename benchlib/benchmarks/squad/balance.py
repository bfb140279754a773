"""Heterogeneous ranks: what each can do, which split follows from it, and what came of it.

Calibration: an even step tells how many samples each rank may get, and passes of a few shapes up to that many are timed, on
all ranks at the same time and with the threads of their work: so little is extrapolated, and no rank is done long before the
others. The fit in seconds per micro-batch, sample and token holds for other lengths, too. Memory on an accelerator is the peak
of such a pass; on a CPU it is what the backward pass keeps, and temporary tensors are not in it. ``Balance`` follows the
training: from the table that all ranks share anyway each rank comes to the same new split.

Notation: K steps, W ranks, C columns; B samples of a micro-batch, S tokens of each after padding.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from scipy.optimize import nnls

from benchlib.benchmarks.squad.passes import Native
from benchlib.benchmarks.squad.shares import (
    IDLE_TOKENS,
    WINDOW,
    Member,
    Split,
    best_split,
    fitting,
    replanned,
    wait_parts,
)
from benchlib.core.events import keep_alive
from benchlib.core.machine import cpu_model
from benchlib.runtime import devices
from benchlib.runtime.group import all_gather_objects, barrier
from benchlib.runtime.measurement import Tables
from benchlib.runtime.steps import Columns
from benchlib.runtime.timing import StepTimer
from benchlib.workloads.features import MicroBatch
from benchlib.workloads.training import Row, Trained, own_work

# Shapes that are timed: part of the samples that a rank may get, and place of the samples in the order of length.
SHAPES = ((0.25, 0.9), (0.5, 0.1), (1.0, 0.5))
MAX_BATCHES = 2  # of the config's batch size in a timed pass: a share of many batches would cost as many steps
CALIBRATION_S = 0.3  # of rounds over the shapes; at least MIN_ROUNDS
MIN_ROUNDS = 2  # of which the fastest counts: the first one finds no memory and no kernels at hand
CONTINUED = "the training was continued"
USABLE = 0.8  # of the memory that is free: other programs and fragments need some, too


def fit(shapes: list[tuple[int, int]], times: list[float]) -> tuple[float, float, float]:
    """Return seconds per micro-batch, sample and token, none below zero, that fit the times of shapes (B, S) in ratio."""
    rows = np.array([[1.0, samples, samples * tokens] for samples, tokens in shapes])
    goal = np.array(times)
    # Columns of like size: nnls compares gradients with one tolerance.
    scale = (rows / goal[:, None]).max(axis=0)
    solution, _ = nnls(rows / goal[:, None] / scale, np.ones(len(goal)))
    batch_s, sample_s, token_s = (solution / scale).tolist()
    return batch_s, sample_s, token_s


class Balance:
    """The splits of a training, the newest last, and the steps that they are held against."""

    def __init__(self, work: Native) -> None:
        self.task, self.work, self.world, self.splits = work.task, work, work.task.rank.world, work.splits
        self.calibration_s: float | None = None
        self.even_s: list[float] = []  # own work of each rank in the even step before the training

    def measure(self) -> None:
        """Take an even step, calibrate all ranks, and make the first split. Nothing of the training changes."""
        work, config, began = self.work, self.task.config, time.perf_counter()
        timer = StepTimer(work.exchange.clock, work.exchange, config.planted_slowdown)
        with keep_alive(self.task.rank.events, config.startup_timeout_s):
            work.trial(0)  # libraries load, and DDP orders its buckets
        timer.begin()
        work.trial(1, timer.mark)
        timer.end_step()
        self.even_s = [float(own_work(row)) for (row,) in all_gather_objects(timer.take())]
        speeds = 1 / np.array(self.even_s)
        promised = config.global_batch * float(speeds[self.world.rank] / speeds.sum())
        members = all_gather_objects(self._calibrated(promised))
        self.calibration_s = time.perf_counter() - began
        tokens = float(np.mean([work.lengths[work.indices(step)].max() for step in work.typical()]))
        self._add(best_split(members, config.global_batch, tokens))

    def _calibrated(self, promised: float) -> Member:
        """Return what this rank can do; ``promised`` is how many samples it may get. Weights and optimizer stay as they are."""
        config, order = self.task.config, np.argsort(self.task.features.lengths, kind="stable")

        def batch(samples: int, place: float) -> MicroBatch:
            first = min(int(place * len(order)), max(0, len(order) - samples))
            part = order[first : first + samples]
            return self.task.collate(part, self.work.multiple).to(self.world.device)

        # AdamW keeps two moments beside weights and gradients.
        held = 4.0 * sum(parameter.nbytes for parameter in self.work.model.parameters())
        longest = batch(min(2, config.batch_size), 1.0)
        token_bytes = self._kept_bytes(longest) / math.prod(longest.shape)
        limit = 1e9 * config.memory_limits_gb[self.world.rank] if config.memory_limits_gb else self._free_bytes(held)
        most = fitting(limit, held, token_bytes, longest.shape[1], config.global_batch)
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
        device = self.world.device
        named = devices.has_events(device)
        name = torch.get_device_module(device).get_device_name(device) if named else f"{device.type}, {cpu_model()}"
        return Member(
            name,
            torch.get_num_threads(),
            self._optimizer_s(),
            *fit([item.shape for item in batches], [min(item) for item in times]),
            held_bytes=held,
            token_bytes=token_bytes,
            limit_bytes=limit,
            most=most,
        )

    def _pass(self, batch: MicroBatch) -> Any:
        """Forward and backward pass of no weight, without exchange."""
        return self.work.differentiate(batch, 0.0, False, 0, lambda phase: None)

    def _timed(self, work: Callable[..., Any], *given: MicroBatch) -> float:
        devices.synchronize(self.world.device)
        began = time.perf_counter()
        work(*given)
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

    def _free_bytes(self, held: float) -> float | None:
        """Return what tensors of this rank may fill, of which ``held`` are there already; None where nothing tells."""
        device = self.world.device
        if devices.has_events(device):
            return USABLE * float(torch.get_device_module(device).get_device_properties(device).total_memory)
        if device.type == "cpu":
            return USABLE * (psutil.virtual_memory().available / self.world.local_size) + held
        return None

    def _add(self, split: Split) -> None:
        self.splits.append(split)
        if self.world.main:
            counts = "+".join(map(str, split.shares))
            words = f"from step {split.from_step + 1} on the ranks get {counts} samples of a step"
            self.task.rank.events.emit("log", message=words)

    def follow(self, table: np.ndarray, next_open: int) -> None:
        """Add a split from ``next_open`` on if the last steps of ``table`` (K, W, C) took other times than expected."""
        split = self.splits[-1]
        steps = Columns(table[max(split.from_step, len(table) - WINDOW) :])
        ratios = own_work(steps) / split.expected(steps["samples"], steps["padded_tokens"])
        if better := replanned(split, ratios, next_open):
            self._add(better)

    def rows(self, trained: Trained) -> Tables:
        """Return the tables shares, splits and balance: what each rank got and took, the splits, what the last one gained."""
        split, columns = self.splits[-1], Columns(trained.table)
        own, samples, tokens = own_work(columns), columns["samples"], columns["padded_tokens"]
        step_s, expected = columns["step_s"].max(axis=1), split.expected(samples, tokens)
        last = samples.sum(axis=1) == self.task.config.global_batch
        last[: max(split.from_step, trained.first)] = False
        few = f"{int(last.sum())} whole steps under the last split, {WINDOW} are needed"
        why = dict.fromkeys(("expected_s", "own_s", "idle_s", "trained"), few)
        why["even_s"] = CONTINUED
        times = {"expected_s": expected, "own_s": own, "idle_s": step_s[:, None] - own} if last.any() else {}
        rows: list[Row] = [
            {
                **{name: value for name, value in asdict(member).items() if not name.endswith("_bytes")},
                **{name: float(np.median(values[last, rank])) for name, values in times.items()},
                "rank": rank,
                "samples": split.shares[rank],
                "work": self.task.config.work_of(rank),
                "micro_batches": member.micro_batches(split.shares[rank]),
                "even_s": self.even_s[rank] if self.even_s else None,
                "trained": np.unique(samples[last, rank]).astype(int).tolist(),
                "why": why,
            }
            for rank, member in enumerate(split.members)
        ]
        gained: Row = {"status": "skipped", "reason": few}
        if last.sum() >= WINDOW:
            gained = wait_parts(split.members, samples[last], tokens[last], own[last], step_s[last])
            gained["slowest_s"] = float(own[last].mean(axis=0).max())
        waits = (1 - own / own.max(axis=1, keepdims=True)).mean(axis=1).tolist()
        gained |= {"wait_shares": waits, "calibration_s": self.calibration_s, "why": {"calibration_s": CONTINUED}}
        first = dict.fromkeys(("drifted", "factor"), "the first split follows from calibration")
        splits: list[Row] = [
            {name: getattr(part, name) for name in ("from_step", "shares", "drifted", "factor")}
            | {"expected_s": part.step_s, "why": first}
            for part in self.splits
        ]
        return {"shares": rows, "splits": splits, "balance": [gained]}
