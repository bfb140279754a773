"""The kit's own training of an encoder: its plan, its start anew or from a checkpoint, and its checkpoints.

The loop is that of ``benchlib.workloads.training``. Notation: K steps, W ranks, C columns.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchlib.benchmarks.squad.balance import Balance
from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.benchmarks.squad.passes import TRIALS, Native, Task
from benchlib.benchmarks.squad.shares import WINDOW, Member, Split
from benchlib.config.schema import load_config
from benchlib.core.errors import UserError
from benchlib.core.events import keep_alive
from benchlib.runtime import checkpoint, devices
from benchlib.runtime.checkpoint import Checkpoint
from benchlib.runtime.group import all_gather_objects
from benchlib.runtime.steps import agree, comm_device
from benchlib.workloads import training
from benchlib.workloads.features import samples_of, steps_per_epoch
from benchlib.workloads.training import Plan, Trained

MIN_STEPS = 2  # of a cut training: one step shows no falling loss


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
    left_s = training.time_left(task.rank, 1.2 * step_s / 3 * task.eval_tokens / max(tokens_per_step, 1.0))
    total = max(1, math.ceil(config.epochs * steps_per_epoch(count, config.global_batch)))
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
    balance = Balance(work) if config.balance != "off" else None
    start, passed_over = to_continue(task)
    if start:
        # As a new training does: DDP orders its buckets after the first pass, and with their order sums of four and more
        # ranks change their last bits.
        work.trial(0)
        plan, table = put_back(work, start)
    else:
        if balance:
            balance.measure()
        step_s = measured_step_s(task, work.trial)
        tokens = len(task.features.input_ids) / task.per_epoch
        plan, table = make_plan(task, len(task.features), step_s, tokens), None
        # The model was drawn from the same seed on all ranks; dropout must differ between them.
        torch.manual_seed(config.seed + 1 + rank.world.rank)
    work.exchange.take()
    trained = training.train(
        rank,
        work,
        plan,
        learning_rates(config, plan.planned_steps),
        task.per_epoch,
        table,
        every=WINDOW if balance else 0,  # what the ranks tell each other late is answered late
        follow=balance.follow if balance else lambda table, next_open: None,
        save_every=config.checkpoint_every,
        save=lambda step, table: save(work, plan, step, table),
    )
    trained.passed_over = passed_over
    trained.tables = balance.rows(trained) if balance else {}
    return trained


def identity(task: Task) -> str:
    """Return a hash of what must be equal for a run to continue another one bit for bit."""
    parts = [task.config.work(), task.config.world_size, len(task.features), torch.get_num_threads()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def save(work: Native, plan: Plan, step: int, table: np.ndarray) -> None:
    """Write a checkpoint: rank 0 writes, the other ranks give their random states.

    Where ranks may be started again on several nodes one rank of each writes: any node may be the one that is lost.
    """
    task, world = work.task, work.task.rank.world
    by_rank = all_gather_objects(checkpoint.rng_state(world.device))
    random_states = {f"rank{rank}.{name}": own for rank, states in enumerate(by_rank) for name, own in states.items()}
    if world.main or (task.config.max_restarts and world.local_rank == 0):

        def model_files(folder: Path) -> None:
            # With these the folder is a model that can be loaded by its path.
            task.loaded.model.config.save_pretrained(folder)
            task.loaded.tokenizer.save_pretrained(folder)

        tensors = {
            "model": work.model.state_dict(),
            "optimizer": checkpoint.optimizer_tensors(work.optimizer),
            "rng": random_states,
            "steps": {"table": torch.from_numpy(table)},
        }
        state = {
            "step": step,
            "plan": asdict(plan),
            "scaler": work.scaler.state_dict(),
            "work": identity(task),
            "splits": [asdict(split) for split in work.splits],
        }
        checkpoint.save(task.rank.run_dir / "checkpoints", step, tensors, state, model_files)
    dist.barrier()


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
        work.splits.append(Split(**split | {"members": members}))
    if task.rank.world.main:
        task.rank.events.emit("log", message=f"continued from {start.path} at step {start.step:,}")
    return plan, start.tensors("steps")["table"].numpy()
