"""Whether a strategy computes what one device does: losses, weights and gradients of a narrow model of the same kind.

Every rank trains the model alone, too, and compares what it holds of the spread one. A wrong plan, an exchange that
averages twice or not at all, and stages in another order make a percent and more; rounding in fp64 is below 1e-12.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from benchlib.benchmarks.parallel.shapes import Job
from benchlib.benchmarks.parallel.strategies import Way, prepare
from benchlib.runtime.group import all_gather_objects

PROOF_STEPS = 6  # of AdamW in fp64, after which losses and weights are compared with one device


def tokens(job: Job, step: int, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return a step's random tokens and what follows them, int64 (B, S) each; of an encoder places (B, 2) to find."""
    drawn = torch.Generator().manual_seed(job.seed * 1_000_003 + step)
    text = torch.randint(job.shape.vocabulary, (job.batch, job.seq + 1), generator=drawn)
    inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    if job.shape.kind == "encoder":
        targets = torch.randint(job.seq, (job.batch, 2), generator=drawn)
    return inputs.to(device), targets.to(device)


def prove(job: Job, device: torch.device) -> dict[str, Any]:
    """Compare a strategy with one device; all ranks call it and get the same columns. Raises as ``prepare`` does.

    They are the largest differences over ranks: in fp64, after ``PROOF_STEPS`` of AdamW, of losses (relative) and
    weights; in fp32 of losses, and of the gradients of the first step over the largest one.
    """
    job = replace(job.narrow(), precision="fp32", dropout=0.0)
    if device.type == "mps":
        proof: dict[str, Any] = {"why": dict.fromkeys(("loss_error", "weight_error"), "the device has no fp64")}
    else:
        loss, weight, _ = _differences(replace(job, weights="fp64"), device, PROOF_STEPS)
        proof = {"loss_error": loss, "weight_error": weight, "why": {}}
    loss, _, gradient = _differences(job, device, 2)
    return proof | {"loss_error_fp32": loss, "gradient_error": gradient}


def checkpointing_error(job: Job, device: torch.device) -> float:
    """Return the largest difference of a gradient where activations are kept and where they are computed again.

    Both drop a tenth of the activations: who computes again with other random numbers gets other gradients.
    """
    weights = "fp32" if device.type == "mps" else "fp64"
    job = job.alone(precision="fp32", compile=False, dropout=0.1, weights=weights).narrow()
    gradients = []
    for again in (False, True):
        way = Way(replace(job, checkpointing=again), device)
        torch.manual_seed(job.seed + 1)
        way.step(*tokens(job, 0, device))
        gradients.append(dict(way.named(gradients=True)))
    return _apart(gradients[1].items(), gradients[0])


def _apart(tensors: Iterable[tuple[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, infinite where it is not a number."""
    return _largest(float((value - expected[name]).abs().max()) for name, value in tensors)


def _largest(errors: Iterable[float]) -> float:
    # Of several values max() does not see a NaN that comes after the first.
    return max((error if math.isfinite(error) else math.inf for error in errors), default=0.0)


def _differences(job: Job, device: torch.device, steps: int) -> tuple[float, float, float]:
    """Return the largest differences of losses (relative), weights and first gradients (over the largest one)."""
    way, single = prepare(job, device), Way(job.alone(compile=False), device)
    expected, losses, gradient = list[float](), list[float | None](), 0.0
    for step in range(steps):
        inputs, targets = tokens(job, step, device)
        expected.append(float(single.step(inputs, targets)))
        if way is not None:
            mean = way.step(way.share(inputs).clone(), way.share(targets).clone())
            losses.append(float(mean) if way.has_loss else None)
            if step == 0:
                first = dict(single.named(gradients=True))
                scale = max(float(value.abs().max()) for value in first.values())
                gradient = _apart(way.named(gradients=True), first) / scale
            way.update()
        single.update()
    weights, held = dict(single.named()), dict(way.named()) if way else {}
    ranks = all_gather_objects((losses, _apart(held.items(), weights), gradient, set(held)))
    errors = []
    for step, right in enumerate(expected):
        stated = [loss for row in ranks for loss in row[0][step : step + 1] if loss is not None]
        errors.append(abs(fmean(stated) / right - 1) if stated else math.inf)
    if set().union(*(row[3] for row in ranks)) != set(weights):
        errors.append(math.inf)  # some weights are nowhere
    return _largest(errors), max(row[1] for row in ranks), max(row[2] for row in ranks)
