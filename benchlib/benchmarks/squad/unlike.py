"""Ranks of different speed, memory and precision: what each can do, which split follows from it, and what came of it.

Calibration: an even step tells how many samples each rank may get, and passes of a few shapes up to that many are timed, on
all ranks at the same time and with the threads of their work: so little is extrapolated, and no rank is done long before the
others. The fit in seconds per micro-batch, sample and token holds for other lengths, too.
Memory on an accelerator is the peak of such a pass; on a CPU it is what the backward pass keeps, and temporary tensors are
not in it. ``Balance`` follows the training: from the table that all ranks share anyway each rank comes to the same new plan.

Letters: K steps, W ranks, C columns; B samples of a micro-batch, S tokens of each after padding.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from scipy.optimize import nnls

from benchlib.benchmarks.squad import shares
from benchlib.benchmarks.squad.shares import IDLE_TOKENS, Plan, Rank
from benchlib.benchmarks.squad.steps import More, Task, qa_loss
from benchlib.core.errors import UserError
from benchlib.core.machine import cpu_model
from benchlib.results.metrics import derived, measured, not_available
from benchlib.runtime import devices
from benchlib.runtime.group import all_gather_objects, barrier
from benchlib.runtime.step_metrics import own_work
from benchlib.runtime.steps import Columns
from benchlib.runtime.timing import StepTimer
from benchlib.workloads.batches import MicroBatch, collate

# Shapes that are timed: part of the samples that a rank may get, and place of the samples in the order of length.
SHAPES = ((0.25, 0.9), (0.5, 0.1), (1.0, 0.5))
MOST_BATCHES = 2  # of the config's batch size in a timed pass: a share of many batches would cost as many steps
CALIBRATION_S = 0.3  # of rounds over the shapes; at least LEAST_ROUNDS
LEAST_ROUNDS = 2  # of which the fastest counts: the first one finds no memory and no kernels at hand
EVEN_STEPS = 1  # for the first look, and to show what the training would be without a plan
USABLE = 0.8  # of the memory that is free: other programs and fragments need some, too
MOST_ROWS = 400  # of the table of steps
CURVE_STEPS = 5

Differentiate = Callable[[MicroBatch], Any]  # forward and backward pass of no weight, without exchange


def calibrate(task: Task, differentiate: Differentiate, pad_id: int, optimizer: torch.optim.Optimizer, promised: float) -> Rank:  # fmt: skip
    """Return what this rank can do, its share still open. Weights and optimizer stay as they are; all ranks call it.

    ``promised`` is how many samples it may get.
    """
    config, world, lengths = task.config, task.world, task.features.lengths
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    held = (
        sum(parameter.numel() * parameter.element_size() for parameter in parameters) * 4.0
    )  # AdamW keeps two moments
    order = np.argsort(lengths, kind="stable")

    def batch(samples: int, place: float) -> MicroBatch:
        first = min(int(place * len(order)), max(0, len(order) - samples))
        return collate(task.features, order[first : first + samples], pad_id).to(world.device)

    longest = batch(min(2, config.batch_size), 1.0)
    token_bytes = _kept_bytes(task, longest, differentiate) / longest.padded_tokens
    limit = 1e9 * config.memory_limits_gb[world.rank] if config.memory_limits_gb else _free_bytes(task, held)
    most = shares.fitting(limit, held, token_bytes, longest.shape[1], config.global_batch)
    # At least 2, for else nothing tells samples from micro-batches.
    top = min(max(2, math.ceil(promised)), MOST_BATCHES * config.batch_size, most, len(order))
    batches = [batch(math.ceil(part * top), place) for part, place in SHAPES] if most else []
    if not most:  # it still takes part in every exchange
        batches = [longest.idle(IDLE_TOKENS)]
    times: list[list[float]] = [[] for _ in batches]
    barrier()
    end, others = time.perf_counter() + CALIBRATION_S, None
    # A rank that is done goes on until all are: in the training, too, none of them has the machine for itself.
    while others is None or not others.is_completed():
        for passed, samples in zip(batches, times, strict=True):
            samples.append(_timed(task, lambda passed=passed: differentiate(passed)))  # type: ignore[misc]
        task.events.emit("heartbeat")
        if others is None and len(times[0]) >= LEAST_ROUNDS and time.perf_counter() >= end:
            others = dist.barrier(async_op=True)
    others.wait()
    batch_s, sample_s, token_s = fit([item.shape for item in batches], [min(item) for item in times])
    return Rank(
        device=_device_name(world.device), threads=torch.get_num_threads(), precision=config.precision_of(world.rank),
        work=config.work_of(world.rank), step_s=_optimizer_s(task, optimizer), batch_s=batch_s, sample_s=sample_s, token_s=token_s,
        held_bytes=held, token_bytes=token_bytes, limit_bytes=limit, most=most,
    )  # fmt: skip


def fit(shapes: list[tuple[int, int]], times: list[float]) -> tuple[float, float, float]:
    """Return seconds per micro-batch, sample and token, none below zero, that fit the times of shapes (B, S) in ratio."""
    rows = np.array([[1.0, samples, samples * tokens] for samples, tokens in shapes])
    goal = np.array(times)
    # Columns of like size: nnls compares gradients with one tolerance.
    scale = (rows / goal[:, None]).max(axis=0)
    solution, _ = nnls(rows / goal[:, None] / scale, np.ones(len(goal)))
    batch_s, sample_s, token_s = (solution / scale).tolist()
    return batch_s, sample_s, token_s


def _timed(task: Task, work: Callable[[], Any]) -> float:
    devices.synchronize(task.world.device)
    begin = time.perf_counter()
    work()
    devices.synchronize(task.world.device)
    return time.perf_counter() - begin


def _optimizer_s(task: Task, optimizer: torch.optim.Optimizer) -> float:
    """Return the seconds of an optimizer's step. At a rate of 0 with gradients of 0 it changes no weight; its state goes again."""
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, task.config.max_grad_norm or 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.zero_grad(set_to_none=False)
    step()
    taken = _timed(task, step)
    optimizer.state.clear()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return taken


def _kept_bytes(task: Task, batch: MicroBatch, differentiate: Differentiate) -> float:
    """Return the bytes that a pass over a micro-batch needs beside weights, gradients and optimizer state."""
    device = task.world.device
    if devices.has_events(device):
        differentiate(batch)
        before = torch.get_device_module(device).memory_allocated(device)
        devices.reset_peak_memory(device)
        differentiate(batch)
        return float((devices.peak_memory_bytes(device)[0] or 0.0) - before)
    weights = {parameter.untyped_storage().data_ptr() for parameter in task.loaded.model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = qa_loss(task.loaded.model, batch, task.config.precision_of(task.world.rank))
    del loss
    return float(sum(kept.values()))


def _free_bytes(task: Task, held: float) -> float | None:
    """Return what tensors of this rank may fill, of which ``held`` are there already; None where nothing tells."""
    device = task.world.device
    if devices.has_events(device):
        module = torch.get_device_module(device)
        return USABLE * float(module.get_device_properties(device).total_memory)
    if device.type == "cpu":
        return USABLE * (psutil.virtual_memory().available / task.world.local_size) + held
    return None


def _own_work(row: dict[str, float]) -> float:
    """Return the seconds that a rank worked in a step of the timer."""
    return float(own_work({name: np.array(value) for name, value in row.items()}))  # type: ignore[arg-type]


def _device_name(device: torch.device) -> str:
    return torch.get_device_module(device).get_device_name(device) if devices.has_events(device) else f"{device.type}, {cpu_model()}"  # fmt: skip


class Balance:
    """The plans of a training, the newest last, and the steps that they are held against."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.plans: list[Plan] = []
        self.calibration_s = 0.0
        self.before: list[list[dict[str, float]]] = []  # of each rank, the even steps before the training
        self._seen = self._first = 0
        self._ratios: list[np.ndarray] = []
        self._complained = False

    def measure(
        self, differentiate: Differentiate, pad_id: int, optimizer: torch.optim.Optimizer, tokens: float,
        even_step: Callable[[], None], timer: StepTimer,
    ) -> None:  # fmt: skip
        """Take a few even steps, calibrate all ranks, and make the first plan or take the one of ``config.balance``.

        ``tokens`` are those of a sample after padding, ``even_step`` does a step of an even split.
        """
        task, config = self.task, self.task.config
        begin = time.perf_counter()
        timer.begin()
        for _ in range(EVEN_STEPS):
            even_step()
            timer.end_step()
        self.before = all_gather_objects(timer.take())
        speeds = 1 / np.array([sum(map(_own_work, rows)) for rows in self.before])
        promised = config.global_batch * float(speeds[task.world.rank] / speeds.sum())
        ranks = all_gather_objects(calibrate(task, differentiate, pad_id, optimizer, promised))
        self.calibration_s = time.perf_counter() - begin
        counts = shares.optimum(ranks, config.global_batch, tokens)
        made = Plan(
            model=config.model, max_length=config.max_length, global_batch=config.global_batch, tokens=tokens,
            reason="by calibration" + shares.without_work(ranks, counts, tokens),
            ranks=[rank.model_copy(update={"samples": count}) for rank, count in zip(ranks, counts, strict=True)],
        )  # fmt: skip
        if config.balance != "auto":
            given = shares.load(config.balance)
            if differs := shares.difference(given, made):
                raise UserError(
                    f"balance = {config.balance} is a plan for other work: {differs}; make one with balance=auto"
                )
            made = given.giving(given.shares, from_step=0, reason=f"from {config.balance}")
        self._add(made)

    def _add(self, plan: Plan) -> None:
        self.plans.append(plan)
        self._ratios = []
        if self.task.world.main:
            shares.save(self.task.run_dir, plan)
            self.task.events.emit(
                "balance", from_step=plan.from_step, shares=plan.shares, expected_s=plan.step_s, reason=plan.reason
            )
            self.task.events.emit("log", message=f"{shares.summary(plan)}, {plan.reason}")

    def restore(self, plans: list[dict[str, Any]], first_step: int) -> None:
        """Go on with the plans of a checkpoint, which was written after ``first_step`` steps."""
        self.plans += [Plan.model_validate(plan) for plan in plans]
        self._seen = self._first = first_step

    def state(self) -> list[dict[str, Any]]:
        """Return the plans for a checkpoint."""
        return [plan.model_dump(mode="json") for plan in self.plans]

    def follow(self, table: np.ndarray, next_open: int) -> None:
        """Compare the steps that ``table`` (K, W, C) has anew with what was expected; add a plan from ``next_open`` on if need be.

        A plan of a file is kept: then a drift is only named, once.
        """
        plan = self.plans[-1]
        for step in range(self._seen, len(table)):
            if step >= plan.from_step:
                row = Columns(table[step : step + 1])
                self._ratios.append((own_work(row) / plan.expected(row["samples"], row["padded_tokens"]))[0])
        self._seen = len(table)
        made = shares.replanned(plan, np.array(self._ratios), next_open)
        if made is None:
            return
        if self.task.config.balance == "auto":
            self._add(made)
        elif not self._complained:
            self._complained = True
            if self.task.world.main:
                self.task.events.emit("log", message=f"the plan of a file is kept, though {made.reason}")

    def outcome(self, table: np.ndarray) -> More:
        """Return what is reported: the ranks, the plans, the steps, and where the wait comes from."""
        plan, columns = self.plans[-1], Columns(table)
        own, samples, tokens = own_work(columns), columns["samples"], columns["padded_tokens"]
        step_s = columns["step_s"].max(axis=1)
        steps = np.arange(len(table))
        expected = np.full_like(own, np.nan)
        for member in self.plans:
            expected[member.from_step :] = member.expected(samples[member.from_step :], tokens[member.from_step :])
        last = (steps >= max(plan.from_step, self._first)) & (samples.sum(axis=1) == plan.global_batch)
        facts: dict[str, Any] = {"balance": {
            "shares": plan.shares, "kept": self.task.config.balance != "auto", "plans": len(self.plans),
            "drifted": self._complained, "steps_of_last_plan": int(last.sum()),
        }}  # fmt: skip
        metrics = [measured("calibration_s", self.calibration_s, "s", "lower", reason="all ranks at the same time")] * bool(self.calibration_s)  # fmt: skip
        reason = "own work of the slowest rank over that of the best split at the speeds of the same steps"
        wait: list[dict[str, Any]] = []
        if last.sum() >= shares.WINDOW:
            parts = shares.wait_parts(plan.ranks, samples[last], tokens[last], own[last], step_s[last])
            perfect, best = parts.pop("perfect"), parts.pop("best")
            slowest = float(own[last].mean(axis=0).max())
            metrics.append(derived("balance_distance", slowest / best, "ratio", "lower", reason))
            wait = [{"part": "the perfect split", "seconds": perfect}]
            wait += [{"part": name, "seconds": value} for name, value in parts.items()]
        else:
            few = f"{int(last.sum())} whole steps under the last plan, {shares.WINDOW} are needed"
            metrics.append(not_available("balance_distance", "ratio", "lower", few))
        metrics.append(
            derived(
                "balance_wait_share",
                (1 - own / own.max(axis=1, keepdims=True)).mean(axis=1).tolist(),
                "ratio",
                "lower",
                "own work of a rank below that of the slowest, mean over the ranks",
            )
        )
        tables = {
            "unlike_ranks": [
                {
                    "rank": place, "device": rank.device, "precision": rank.precision, "work": rank.work, "step_s": rank.step_s,
                    "batch_s": rank.batch_s, "sample_s": rank.sample_s, "token_s": rank.token_s, "samples": rank.samples,
                    "micro_batch": -(-rank.samples // max(1, rank.micro_batches(rank.samples))), "accumulation": rank.micro_batches(rank.samples),
                    "most": rank.most, "tokens": plan.tokens, "memory_gb": (rank.held_bytes + rank.token_bytes * plan.max_length * min(rank.most, max(1, rank.samples))) / 1e9,
                    "limit_gb": None if rank.limit_bytes is None else rank.limit_bytes / 1e9,
                    "expected_s": float(np.median(expected[last, place])) if last.any() else None,
                    "own_s": float(np.median(own[last, place])) if last.any() else None,
                    "idle_s": float(np.median(step_s[last] - own[last, place])) if last.any() else None,
                }
                for place, rank in enumerate(plan.ranks)
            ],
            "unlike_plans": [
                {"from_step": item.from_step, "shares": item.text, "expected_s": item.step_s, "why": item.reason} for item in self.plans
            ],
            "unlike_wait": wait,
            "unlike_steps": self._rows(steps, own, expected, step_s, samples),
        }  # fmt: skip
        return More(
            tables, metrics, facts, [f"from step {item.from_step + 1} on: {item.reason}" for item in self.plans[1:]]
        )

    def _rows(self, steps: np.ndarray, own: np.ndarray, expected: np.ndarray, step_s: np.ndarray, samples: np.ndarray) -> list[dict[str, Any]]:  # fmt: skip
        """Return the table of steps by rank: the even ones before the training count below 0; thinned where there are many."""
        rows: list[dict[str, Any]] = []
        for rank, times in enumerate(self.before):
            for number, row in enumerate(times):
                rows.append({"step": number - len(times), "rank": rank, "own_s": _own_work(row), "expected_s": None, "step_s": row["step_s"], "samples": None})  # fmt: skip
        each = max(1, -(-len(steps) * own.shape[1] // MOST_ROWS))
        for step in steps[self._first :: each]:
            for rank in range(own.shape[1]):
                rows.append({
                    "step": int(step), "rank": rank, "own_s": float(own[step, rank]), "expected_s": float(expected[step, rank]),
                    "step_s": float(step_s[step]), "samples": int(samples[step, rank]),
                })  # fmt: skip
        return rows


def curves(task: Task, optimizer: Callable[[], torch.optim.Optimizer], arm: Callable[[int, str], float], model: Any) -> list[dict[str, float]]:  # fmt: skip
    """Return the losses of a few steps on the same batches from the same weights: ranks of mixed precision, and all in fp32.

    ``arm(step, precision)`` does a step up to the gradients and returns this rank's part of the loss. Dropout is off. All
    ranks call it; the weights are put back.
    """
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    curve: dict[str, list[float]] = {}
    model.eval()
    for name, precision in (("mixed", task.config.precision_of(task.world.rank)), ("fp32", "fp32")):
        stepping = optimizer()
        losses = []
        for step in range(CURVE_STEPS):
            losses.append(arm(step, precision))
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.config.max_grad_norm or float("inf"))
            stepping.step()
            stepping.zero_grad(set_to_none=False)
        curve[name] = np.sum(all_gather_objects(losses), axis=0).tolist()
        model.load_state_dict(kept)
    model.train()
    return [
        {"step": step, "mixed": mixed, "fp32": alone}
        for step, (mixed, alone) in enumerate(zip(curve["mixed"], curve["fp32"], strict=True))
    ]
