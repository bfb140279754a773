"""A layout of many ranks, checked in one process: torch's fake process group, whose exchanges carry nothing.

Of each rank that is named (else those at the corners of the mesh) torch builds the mesh and spreads a narrow model of the same
kind over it, as in a run. What the rank then holds is counted and compared with the arithmetic of the estimates.
"""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchlib.benchmarks.parallel import strategies
from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.estimate import Work, held_share, rank_parameters
from benchlib.benchmarks.parallel.shapes import MODELS, STAGES_PER_RANK, Layout


@contextmanager
def _as_rank(rank: int, world: int) -> Iterator[None]:
    """Be one rank of ``world`` while the block runs."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    strategies.mesh.cache_clear()
    try:
        yield
    finally:
        strategies.mesh.cache_clear()
        dist.destroy_process_group()


def corners(layout: Layout) -> list[int]:
    """Return the ranks that are first or last along every axis of the mesh."""
    degrees = [getattr(layout, axis) for axis in strategies.DIMENSIONS]
    places = itertools.product(*({0, degree - 1} for degree in degrees))
    return sorted(int(np.ravel_multi_index(place, degrees)) for place in places)


def check(model: str, strategy: str, schedule: str, layout: Layout, ranks: Iterable[int] = ()) -> list[dict[str, Any]]:
    """Return a row for each rank: its place in the mesh, the parameters that it holds, and those that the estimate gives.

    The estimate is of the fullest rank, so the largest of ``held`` has to be ``estimate``. FSDP2 cuts by rows, and of a narrow
    model some matrices have fewer rows than ranks: there ``held`` may be more, and never less.
    """
    whole = MODELS[model]
    shape = ParallelConfig.proof_shape(whole, layout)
    stages = layout.pipeline * STAGES_PER_RANK.get(schedule, 1)
    if stages > shape.layers:
        raise ValueError(f"{stages} stages for {shape.layers} layers")
    batch = layout.data * 4
    work = Work(shape, strategy, layout, batch, shape.positions, 4, schedule)
    rows = []
    for rank in ranks or corners(layout):
        with _as_rank(rank, layout.world):
            job = strategies.Job(shape, shape.positions, batch, 4, torch.device("cpu"))
            way = strategies.prepare(strategy, layout, schedule, job)
            assert way is not None
            mesh = strategies.mesh("cpu", layout, job.shard if work.copies == "hybrid" else 0)
            local = sum(_here(parameter) for part in way.parts for parameter in part.parameters())
            place = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=False))
            rows.append(
                {"rank": rank, "place": place, "held": local, "estimate": rank_parameters(work) * held_share(work)}
            )
    return rows


def _here(parameter: torch.Tensor) -> int:
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()
