"""Nodes that share checkpoints, each rank a node of its own; ``--benchmark checkpoint_cases:run``."""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchlib.config.schema import BaseConfig
from benchlib.core import files
from benchlib.core.errors import RunBroken
from benchlib.core.events import EventWriter
from benchlib.runtime import checkpoint, group
from benchlib.runtime import checkpoint as shared_checkpoint

Config = BaseConfig
CPU = torch.device("cpu")


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _save(folder: Path, step: int) -> Path:
    return checkpoint.save(folder, step, {"model": {"weight": torch.full((70_001,), float(step))}}, {"step": step})


def _newest(folder: Path, below: int = 99) -> tuple[Any, list[str]]:
    found, faults = shared_checkpoint.newest_shared(folder, True, CPU, lambda known: known.step < below)
    return found and [found.step, float(found.tensors("model")["weight"].mean())], faults


def run(config: Any, run_dir: Path, events: EventWriter) -> None:
    """Rank 0 has checkpoints 4 and 12, the latter damaged; rank 1 has 8."""
    events.emit("phase", name="init")
    with group.world(config, run_dir) as world:
        folder = run_dir / f"node{world.rank}"
        told: dict[str, Any] = {"nothing": _newest(folder)[0]}
        for step in ((4, 12), (8,))[world.rank]:
            _save(folder, step)
        if world.rank == 0:
            flip(folder / "step-00000012/model.safetensors")
        told["newest"], told["fault"] = _newest(folder)
        told["usable"], _ = _newest(folder, below=8)
        told["whole"] = checkpoint.damage(folder / "step-00000008")
        told["folders"] = sorted(path.name for path in folder.iterdir())
        if world.rank == 0:
            shutil.rmtree(folder / "step-00000008")
        shared_checkpoint.CHUNK_BYTES = 100_000  # in several parts
        broadcast = dist.broadcast

        def tampered(data: torch.Tensor, src: int) -> None:
            broadcast(data, src=src)
            if world.rank == 0 and len(data) == 100_000:
                data[1000] ^= 1

        dist.broadcast = tampered
        try:
            _newest(folder)
        except RunBroken as error:
            told["tampered"] = str(error)
        dist.broadcast = broadcast
        told["after"] = sorted(path.name for path in folder.iterdir())
        files.write_json(run_dir / f"seen{world.rank}.json", told)
