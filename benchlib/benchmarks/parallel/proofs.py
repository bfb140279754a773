"""Whether a strategy computes what one device does: losses, weights and gradients of a narrow model of the same kind.

Every rank trains the model alone, too, and compares what it holds of the spread one. A wrong plan, an exchange that averages twice
or not at all, and stages in another order are differences of a percent and more; rounding in fp64 is below 1e-12.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from benchlib.benchmarks.parallel.config import PROOF_STEPS, ParallelConfig
from benchlib.benchmarks.parallel.shapes import Layout, Shape
from benchlib.benchmarks.parallel.strategies import Job, alone, prepare
from benchlib.runtime.group import World, all_gather_objects


@dataclass(frozen=True)
class Proof:
    """Largest differences over ranks: losses relative (fp64, fp32), weights after ``PROOF_STEPS`` of AdamW (fp64, absolute), gradients of
    the first step over the largest one (fp32). A device without fp64 (``fp64`` is False) has no ``loss_error`` and no ``weight_error``."""

    fp64: bool
    loss_error: float | None
    weight_error: float | None
    gradient_error: float
    loss_error_fp32: float


def tokens(form: Shape, length: int, batch: int, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the random tokens of a step and what follows them, int64 (B, S) each; of an encoder places (B, 2) to find."""
    drawn = torch.Generator().manual_seed(seed * 1_000_003 + step)
    text = torch.randint(form.vocabulary, (batch, length + 1), generator=drawn)
    if form.kind == "encoder":
        return text[:, :-1], torch.randint(length, (batch, 2), generator=drawn)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def prove(config: ParallelConfig, shape: Shape, name: str, layout: Layout, schedule: str, here: World) -> Proof:
    """Compare a strategy with one device in fp64 and fp32. All ranks call it and get the same.

    Raises ``BackendUnavailable`` as ``strategies.prepare`` does. A device without fp64 is compared in fp32 alone.
    """
    form = config.proof_shape(shape, layout)
    batch = layout.data * config.micro_batches
    job = dataclasses.replace(
        Job.of(config, form, batch, here.device),
        length=form.positions,
        dtype=torch.float64,
        precision="fp32",
        dropout=0.0,
    )
    loss_error = weight_error = None
    fp64 = here.device.type != "mps"
    if fp64:
        loss_error, weight_error, _ = _differences(job, name, layout, schedule, PROOF_STEPS)
    loss_fp32, _, gradients = _differences(dataclasses.replace(job, dtype=torch.float32), name, layout, schedule, 2)
    return Proof(fp64, loss_error, weight_error, gradients, loss_fp32)


def checkpointing_error(config: ParallelConfig, shape: Shape, device: torch.device) -> float:
    """Return the largest difference of a gradient between a model that keeps its activations and one that computes them again.

    Both drop a tenth of the activations: who computes again with other random numbers gets other gradients.
    """
    form = config.proof_shape(shape, Layout())
    kind = torch.float32 if device.type == "mps" else torch.float64
    job = Job(form, form.positions, 4, 1, device, config.seed, kind, dropout=0.1)
    gradients_of = []
    for again in (False, True):
        way = alone(dataclasses.replace(job, checkpointing=again))
        torch.manual_seed(config.seed + 1)
        way.step(*_batch(job, 0), lambda phase: None)
        gradients_of.append(dict(way.named(gradients=True)))
    kept, computed = gradients_of
    return _apart(computed.items(), kept)


def _batch(job: Job, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = tokens(job.form, job.length, job.batch, job.seed, step)
    return inputs.to(job.device), targets.to(job.device)


def _apart(found: Iterable[tuple[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, infinite where it is not a number."""
    differences = [float((value - expected[name]).abs().max()) for name, value in found]
    # Of several values max() does not see a NaN that comes after the first.
    return max(differences, default=0.0) if all(map(math.isfinite, differences)) else math.inf


def _differences(job: Job, name: str, layout: Layout, schedule: str, steps: int) -> tuple[float, float, float]:
    """Return the largest differences of losses (relative), weights and gradients of the first step (over the largest)."""
    way = prepare(name, layout, schedule, job)
    single = alone(dataclasses.replace(job, compile=False))
    expected, losses, gradients, weights = [], [], 0.0, 0.0
    for step in range(steps):
        inputs, targets = _batch(job, step)
        expected.append(float(single.step(inputs, targets, lambda phase: None)))
        if way is not None:
            mine = way.step(way.share(inputs).clone(), way.share(targets).clone(), lambda phase: None)
            losses.append(float(mine) if way.has_loss else None)
            if step == 0:
                first = dict(single.named(gradients=True))
                gradients = _apart(way.named(gradients=True), first) / max(
                    float(value.abs().max()) for value in first.values()
                )
            way.optimizer.step()
            way.optimizer.zero_grad(set_to_none=True)
        single.optimizer.step()
        single.optimizer.zero_grad(set_to_none=True)
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
