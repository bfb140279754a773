"""Whether a strategy computes what one device does: losses, weights and gradients of a narrow model of the same kind.

Every rank trains the model alone, too, and compares what it holds of the spread one. A wrong plan, an exchange that averages twice
or not at all, and stages in another order are differences of a percent and more; rounding in fp64 is below 1e-12.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from benchlib.benchmarks.parallel.shapes import Job
from benchlib.benchmarks.parallel.strategies import alone, prepare
from benchlib.runtime.group import all_gather_objects

PROOF_STEPS = 6  # of AdamW in fp64, after which losses and weights are compared with one device


def tokens(job: Job, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the random tokens of a step and what follows them, int64 (B, S) each; of an encoder places (B, 2) to find."""
    drawn = torch.Generator().manual_seed(job.seed * 1_000_003 + step)
    text = torch.randint(job.shape.vocabulary, (job.batch, job.seq + 1), generator=drawn)
    if job.shape.kind == "encoder":
        return text[:, :-1], torch.randint(job.seq, (job.batch, 2), generator=drawn)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def prove(job: Job, device: torch.device) -> dict[str, Any]:
    """Compare a strategy with one device in fp64 and fp32. All ranks call it and get the same columns of its row.

    They are the largest differences over ranks: ``loss_error`` and ``weight_error`` in fp64 after ``PROOF_STEPS`` of AdamW
    (the losses relative, the weights absolute), ``loss_error_fp32`` and ``gradient_error`` in fp32, of the gradients of the first
    step over the largest one. Raises ``BackendUnavailable`` as ``strategies.prepare`` does.
    """
    job = replace(job.narrow(), precision="fp32", dropout=0.0)
    if device.type == "mps":
        found: dict[str, Any] = {"why": dict.fromkeys(("loss_error", "weight_error"), "the device has no fp64")}
    else:
        loss, weight, _ = _differences(replace(job, weights="fp64"), device, PROOF_STEPS)
        found = {"loss_error": loss, "weight_error": weight}
    loss, _, gradient = _differences(job, device, 2)
    return found | {"loss_error_fp32": loss, "gradient_error": gradient}


def checkpointing_error(job: Job, device: torch.device) -> float:
    """Return the largest difference of a gradient between a model that keeps its activations and one that computes them again.

    Both drop a tenth of the activations: who computes again with other random numbers gets other gradients.
    """
    weights = "fp32" if device.type == "mps" else "fp64"
    job = job.alone(precision="fp32", compile=False, dropout=0.1, weights=weights).narrow()
    gradients = []
    for again in (False, True):
        way = alone(replace(job, checkpointing=again), device)
        torch.manual_seed(job.seed + 1)
        inputs, targets = (each.to(device) for each in tokens(job, 0))
        way.step(inputs, targets, lambda phase: None)
        gradients.append(dict(way.named(gradients=True)))
    return _apart(gradients[1].items(), gradients[0])


def _apart(found: Iterable[tuple[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, infinite where it is not a number."""
    differences = [float((value - expected[name]).abs().max()) for name, value in found]
    # Of several values max() does not see a NaN that comes after the first.
    return max(differences, default=0.0) if all(map(math.isfinite, differences)) else math.inf


def _differences(job: Job, device: torch.device, steps: int) -> tuple[float, float, float]:
    """Return the largest differences of losses (relative), weights and gradients of the first step (over the largest)."""
    way, single = prepare(job, device), alone(job.alone(compile=False), device)
    expected, losses, gradients, weights = [], [], 0.0, 0.0
    for step in range(steps):
        inputs, targets = (each.to(device) for each in tokens(job, step))
        expected.append(float(single.step(inputs, targets, lambda phase: None)))
        if way is not None:
            mine = way.step(way.share(inputs).clone(), way.share(targets).clone(), lambda phase: None)
            losses.append(float(mine) if way.has_loss else None)
            if step == 0:
                first = dict(single.named(gradients=True))
                largest = max(float(value.abs().max()) for value in first.values())
                gradients = _apart(way.named(gradients=True), first) / largest
            way.update()
        single.update()
    names: set[str] = set()
    if way is not None:
        held = dict(way.named())
        weights, names = _apart(held.items(), dict(single.named())), set(held)
    of_ranks = all_gather_objects((losses, weights, gradients, names))
    worst = 0.0
    for step, right in enumerate(expected):
        stated = [loss for row in of_ranks for loss in row[0][step : step + 1] if loss is not None]
        error = abs(statistics.fmean(stated) - right) / abs(right) if stated else math.inf
        worst = max(worst, error if math.isfinite(error) else math.inf)
    if set().union(*(row[3] for row in of_ranks)) != {name for name, _ in single.named()}:
        worst = math.inf  # some weights are nowhere
    return worst, max(row[1] for row in of_ranks), max(row[2] for row in of_ranks)
