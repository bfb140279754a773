"""What a training keeps on its way, and what it goes on from: after a failure, or from an interrupted run."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchlib import checkpoint, shared_checkpoint
from benchlib.checkpoint import Checkpoint
from benchlib.errors import UserError
from benchlib.squad.plan import Plan
from benchlib.squad.steplog import comm_device
from benchlib.squad.training import Task


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
    found: dict[str, Any] = {name: getattr(config, name) for name in names}
    return found | {"world_size": config.world_size, "features": len(task.features), "threads": torch.get_num_threads()}


def to_continue(task: Task) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint that this training goes on from, and notes for the reader; None for a new training.

    After a failure it is the run's own newest one on any of its nodes, else the newest of the run ``config.resume``.
    """
    config, world, found = task.config, task.world, None
    notes: list[str] = []
    if config.max_restarts:
        found, faults = shared_checkpoint.newest(
            task.run_dir / "checkpoints", world.local_rank == 0, comm_device(world),
            # One at the end has nothing left to train, and so nothing to measure.
            lambda known: known.step < known.state["plan"]["planned_steps"],
            lambda: task.events.emit("heartbeat"),
        )  # fmt: skip
        notes = [f"checkpoint passed over after a failure: {fault}" for fault in faults]
    if found is None and config.resume:
        folder = Path(config.resume)
        if not folder.is_dir():
            raise UserError(f"resume = {folder}: no such run folder; give the folder of the interrupted run")
        found = checkpoint.newest(folder / "checkpoints")
    return found, notes


def put_back(
    task: Task, found: Checkpoint, model: Any, optimizer: torch.optim.Optimizer, scaler: Any
) -> tuple[Plan, int, np.ndarray]:
    """Put back what a checkpoint holds; return its plan, step and step table."""
    now, then = _identity(task), found.state["work"]
    differing = [name for name in now if now[name] != then.get(name)]
    if differing:
        name = differing[0]
        raise UserError(
            f"resume = {found.path.parents[1]}: that run had {name} = {then.get(name)}, this one has {now[name]}: give the same values to continue it"
        )
    model.load_state_dict(found.tensors("model"))
    checkpoint.load_optimizer(optimizer, found.tensors("optimizer"))
    if scaler and found.state["scaler"]:
        scaler.load_state_dict(found.state["scaler"])
    prefix = f"rank{task.world.rank}."
    states = {
        name.removeprefix(prefix): value for name, value in found.tensors("rng").items() if name.startswith(prefix)
    }
    checkpoint.set_rng_state(states, task.world.device)
    if task.world.main:
        task.events.emit("log", message=f"continued from {found.path} at step {found.step:,}")
    plan = Plan(**found.state["plan"])
    if not math.isfinite(plan.epoch_share) or found.step > plan.planned_steps:
        raise UserError(f"{found.path}: step {found.step} lies behind its plan of {plan.planned_steps} steps")
    return plan, found.step, found.tensors("steps")["table"].numpy()
