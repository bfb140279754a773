"""Does training give the same gradients whichever library exchanges them?

A small model is trained once per library, data-parallel (DDP) over a group of that library alone, in fp64. Every gradient
of every step and the weights at the end are compared with the same training by a single process on the whole batch. In fp64 only the order of the sums differs, some 1e-16 of each value; a contribution that is lost,
doubled or divided by the wrong count shows in the first digits.
"""

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchlib.core.machine import MOVES
from benchlib.runtime.group import World, all_gather_objects
from benchlib.runtime.libraries import LIBRARIES
from benchlib.workloads.collective_timing import first_of
from benchlib.workloads.numerics import max_abs, together

TOLERANCE = 1e-12
STEPS = 3
SAMPLES = 4  # of each rank and step
BUCKET_MB = 0.001  # so small that the model's gradients travel in several all-reduces


def compare(world: World, names: Iterable[str]) -> list[dict[str, Any]]:
    """Train over each library; returns a row for each, the same on every rank. A collective."""
    reference = _train(None, range(world.size), torch.device("cpu"))
    rows = []
    for name in names:
        row: dict[str, Any] = {"collective": name, "tolerance": TOLERANCE, "status": "ok", "reason": ""}
        unavailable = LIBRARIES[name].unavailable()
        if reason := first_of(unavailable and f"rank {world.rank}: {unavailable}"):
            row |= {"status": "skipped", "reason": reason}
        else:
            device = world.device if world.device.type in MOVES[name] else torch.device(MOVES[name][0])
            group = dist.new_group(backend=LIBRARIES[name].register())
            try:
                trace = _train(group, [world.rank], device)
            finally:
                gc.collect()  # the reducer goes before the group that it talks through
                dist.destroy_process_group(group)
            row["max_difference"] = float(np.max(all_gather_objects(max_abs(trace, reference))))  # nan stays one
        rows.append(row)
    return rows


def _train(group: dist.ProcessGroup | None, parts: Sequence[int], device: torch.device) -> np.ndarray:
    """Train on the given parts of each step's batch; return all gradients and the last weights, one after the other, in fp64."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 33), torch.nn.Tanh(), torch.nn.LayerNorm(33), torch.nn.Linear(33, 5)
    ).to(device=device, dtype=torch.float64)
    wrapped: torch.nn.Module = model
    if group is not None:
        wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trace = list[np.ndarray]()
    for step in range(STEPS):
        inputs, targets = (torch.cat(side).to(device) for side in zip(*(_batch(step, at) for at in parts), strict=True))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(wrapped(inputs), targets).backward()
        trace += [item.grad.detach().cpu().numpy().copy() for item in model.parameters() if item.grad is not None]
        optimizer.step()
    return together([*trace, *(item.detach().cpu().numpy() for item in model.parameters())])


def _batch(step: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one rank's part of a step's batch: inputs (SAMPLES, 12) and targets (SAMPLES, 5)."""
    source = torch.Generator().manual_seed(1000 * step + part)
    inputs, targets = (torch.randn(SAMPLES, n, generator=source, dtype=torch.float64) for n in (12, 5))
    return inputs, targets
