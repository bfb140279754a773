"""Does training give the same gradients whichever library exchanges them?

    rows = compare(world, ["gloo", "mpi", "ucc"])

Within one set of processes a small model is trained once per library, data-parallel (DDP) over a group of that library
alone, in fp64. Every gradient of every step and the weights at the end are held against the same training by a single
process on the whole batch, which each rank computes for itself, and against what gloo gave. In fp64 only the order of
the sums differs, some 1e-16 of each value; a contribution that is lost, doubled or divided by the wrong count shows in
the first digits.
"""

import gc
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchlib import process_group
from benchlib.backends import MOVES
from benchlib.collective_libraries import LIBRARIES, Library
from benchlib.process_group import World

TOLERANCE = 1e-12
STEPS = 3
SAMPLES = 4  # of each rank and step
BUCKET_MB = 0.001  # so small that the model's gradients travel in several all-reduces

Trace = list[torch.Tensor]


def compare(world: World, names: Sequence[str]) -> list[dict[str, Any]]:
    """Train over each library and return a row for each, in the order of ``names``, the same on every rank.

    Rows: {collective, max_difference (to the single process; None where skipped), gloo_difference (to gloo's run; None
    for gloo and where gloo was not asked for), tolerance, status: "compared" or "skipped", reason}. A collective: every
    rank of the default group calls it with the same names, and asks for gloo first so that others can be held to it.
    """
    reference = _train(None, range(world.size), torch.device("cpu"))
    rows, by_gloo = [], None
    for name in names:
        row: dict[str, Any] = {
            "collective": name, "max_difference": None, "gloo_difference": None, "tolerance": TOLERANCE,
            "status": "skipped", "reason": _lacking(name),
        }  # fmt: skip
        if not row["reason"]:
            trace = _train_over(LIBRARIES[name], world)
            mine = [difference(trace, reference), difference(trace, by_gloo) if by_gloo else 0.0]
            worst = [max(values) for values in zip(*process_group.all_gather_objects(mine), strict=True)]
            row |= {"status": "compared", "max_difference": worst[0], "gloo_difference": worst[1] if by_gloo else None}
            by_gloo = trace if name == "gloo" else by_gloo
        rows.append(row)
    return rows


def difference(one: Trace, other: Trace) -> float:
    """Return the largest absolute difference between two runs; infinite where either has a number that is not finite."""
    worst = float(torch.stack([(a - b).abs().max() for a, b in zip(one, other, strict=True)]).max())
    return worst if math.isfinite(worst) else math.inf


def _lacking(name: str) -> str:
    """Return why the library cannot be used on some rank, the same text on all; '' where it can on all of them."""
    reasons = process_group.all_gather_objects(LIBRARIES[name].lacking())
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), "")


def _train_over(library: Library, world: World) -> Trace:
    kinds = MOVES[library.name]
    device = world.device if world.device.type in kinds else torch.device(kinds[0])
    group = dist.new_group(backend=library.register())
    try:
        return _train(group, [world.rank], device)
    finally:
        gc.collect()  # the reducer goes before the group that it talks through
        dist.destroy_process_group(group)


def _train(group: dist.ProcessGroup | None, parts: Sequence[int], device: torch.device) -> Trace:
    """Train on the given parts of each step's batch; return all gradients and the last weights as fp64 on the CPU."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 33), torch.nn.Tanh(), torch.nn.LayerNorm(33), torch.nn.Linear(33, 5)
    ).to(device=device, dtype=torch.float64)
    wrapped: torch.nn.Module = model
    if group is not None:
        wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trace: Trace = []
    for step in range(STEPS):
        pairs = [_batch(step, part) for part in parts]
        inputs, targets = (torch.cat(tensors).to(device) for tensors in zip(*pairs, strict=True))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(wrapped(inputs), targets).backward()
        trace += [one.grad.detach().cpu().clone() for one in model.parameters() if one.grad is not None]
        optimizer.step()
    return trace + [one.detach().cpu().clone() for one in model.parameters()]


def _batch(step: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one rank's part of a step's batch: inputs (SAMPLES, 12) and targets (SAMPLES, 5)."""
    source = torch.Generator().manual_seed(1000 * step + part)
    return (
        torch.randn(SAMPLES, 12, generator=source, dtype=torch.float64),
        torch.randn(SAMPLES, 5, generator=source, dtype=torch.float64),
    )
