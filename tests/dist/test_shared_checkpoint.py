"""Two nodes without a common disk agree on the newest checkpoint; what is damaged on its way is not used."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import flip
from worlds import in_world

from benchlib.core.errors import RunBroken
from benchlib.runtime import checkpoint

CPU = torch.device("cpu")


def nodes(root: Path, rank: int, size: int) -> None:
    """Each rank is a node. Rank 0 has checkpoints 4 and 12, the latter damaged; rank 1 has 8."""
    folder = root / f"node{rank}"

    def newest(below: int = 99) -> tuple[checkpoint.Checkpoint | None, list[str]]:
        return checkpoint.newest_shared(folder, True, CPU, lambda candidate: candidate.step < below)

    def steps() -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())

    assert newest() == (None, [])
    for step in ((4, 12), (8,))[rank]:
        checkpoint.save(folder, step, {"model": {"weight": torch.full((70_001,), float(step))}}, {"step": step})
    if rank == 0:
        flip(folder / "step-00000012/model.safetensors")
    start, faults = newest()
    assert start is not None and (start.step, start.tensors("model")["weight"].unique().tolist()) == (8, [8.0])
    altered = "model.safetensors was altered (its SHA-256 is not the one in manifest.json)"
    assert faults == [f"step-00000012: {altered}"]
    assert checkpoint.damage(folder / "step-00000008") == "", "verified again where it arrived"
    usable, _ = newest(below=8)
    assert usable is not None and usable.step == 4
    assert steps() == [[4, 8, 12], [4, 8]][rank]

    if rank == 0:
        shutil.rmtree(folder / "step-00000008")
    broadcast, checkpoint.CHUNK_BYTES = dist.broadcast, 100_000  # in several parts

    def tampered(data: torch.Tensor, src: int) -> None:
        broadcast(data, src=src)
        if rank == 0 and len(data) == 100_000:
            data[1000] ^= 1

    dist.broadcast = tampered
    with pytest.raises(RunBroken, match=r"was damaged on its way between the nodes: model\.safetensors was altered"):
        newest()
    dist.broadcast = broadcast
    assert steps() == [[4, 12], [4, 8]][rank], "what arrived damaged was not kept"


def test_two_nodes_and_their_checkpoints(tmp_path: Path) -> None:
    in_world(2, tmp_path, partial(nodes, tmp_path))
