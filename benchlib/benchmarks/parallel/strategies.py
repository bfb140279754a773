"""From a job to a step: torch's own data, tensor, context and pipeline parallelism, and their mixtures.

A mesh has the dimensions of a layout, the last one the innermost: its ranks talk most. The loop that drives a ``ShardedModel``
knows nothing of how the model lies.

``prove`` tells whether a strategy computes what one device does: losses, weights and gradients of a narrow model of the
same kind. Every rank trains the model alone, too, and compares what it holds of the spread one. A wrong plan, an exchange
that averages twice or not at all, and stages in another order make a percent and more; rounding in fp64 is below 1e-12.
"""

import contextlib
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.nn.parallel import DistributedDataParallel

from benchlib.benchmarks.parallel.shapes import SCHEDULES, Job, Layout
from benchlib.core.errors import BackendUnavailable
from benchlib.runtime import devices
from benchlib.runtime.group import all_gather_objects
from benchlib.workloads import fused_loss
from benchlib.workloads.collectives.exchange import use_direct
from benchlib.workloads.transformer_stack import Stack, loss

PROOF_STEPS = 6  # of AdamW in fp64, after which losses and weights are compared with one device


@functools.cache
def mesh(kind: str, layout: Layout) -> DeviceMesh:
    """Return the mesh of the first ranks. A collective of the whole world."""
    degrees = vars(layout)
    return DeviceMesh(kind, torch.arange(layout.world).view(*degrees.values()), mesh_dim_names=tuple(degrees))


def prepare(job: Job, device: torch.device) -> "ShardedModel | None":
    """Spread a job's model over the first ``layout.world`` ranks; None on the others. A collective of the whole world.

    Raises ``BackendUnavailable`` on all ranks where torch does not have the strategy for the device.
    """
    if job.layout.context > 1 and device.type == "cpu":
        raise BackendUnavailable("torch has ring attention for CUDA alone: context parallel needs a GPU")
    here = mesh(device.type, job.layout) if job.layout.world > 1 else None
    return ShardedModel(job, device, here) if dist.get_rank() < job.layout.world else None


class ShardedModel:
    """A model spread over ranks, at work on one of them; without a mesh on this one alone, whatever others do.

    ``parts`` are the stages that the rank holds, ``numbers`` which they are; ``feed`` tells whose samples it takes.
    """

    def __init__(self, job: Job, device: torch.device, here: Any = None) -> None:
        self.job, self.device, self.here, layout = job, device, here, job.layout
        self.loss = fused_loss.loss if job.fused_loss else loss
        with torch.device("meta"):
            self.model = Stack(job.shape, job.seq, job.checkpointing)
        self.model.places = torch.arange(job.seq, device=device)
        self.numbers, self.parts, self.stages = [0], [self.model], list[PipelineStage]()
        if layout.pipeline > 1:  # several stages of a rank are every p-th from its own on
            self.numbers = list(range(here.get_local_rank("pipeline"), job.stages, layout.pipeline))
            self.parts = [self.model.part(number, job.stages) for number in self.numbers]
        # FSDP2 takes a mesh of copies and shards, or of shards alone.
        self.shards = (here["data", "shard"] if layout.data > 1 else here["shard"]) if layout.shard > 1 else None
        self.has_loss = job.stages - 1 in self.numbers
        self.feed = here.get_local_rank("data") * layout.shard + here.get_local_rank("shard") if here else 0
        self._draw()
        self.module = self._averaged()
        if layout.pipeline > 1:
            group, pairs = here.get_group("pipeline"), zip(self.parts, self.numbers, strict=True)
            self.stages = [PipelineStage(part, number, job.stages, device, group=group) for part, number in pairs]
            stages = self.stages if job.rank_stages > 1 else self.stages[0]
            self.schedule = getattr(schedules, SCHEDULES[job.schedule][1])(stages, job.micro_batches, loss_fn=self.loss)
        tensors = [parameter for part in self.parts for parameter in part.parameters()]
        mixed = len({isinstance(parameter, DTensor) for parameter in tensors}) > 1
        # The fused kernels take one kind of tensor at once.
        how: dict[str, bool] = {"foreach": False} if mixed else {"fused": True}
        self.optimizer = torch.optim.AdamW(tensors, lr=job.learning_rate, **how)  # type: ignore[arg-type]

    def meet(self) -> None:
        """Wait until all ranks of the mesh have called it."""
        for axis in self.here.mesh_dim_names if self.here else ():
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.here.get_group(axis))
        devices.synchronize(self.device)

    def share(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.chunk(self.job.layout.feeds)[self.feed]

    def step(
        self, tokens: torch.Tensor, targets: torch.Tensor, mark: Callable[[str], None] = lambda phase: None
    ) -> torch.Tensor:
        """Leave the gradients of a rank's samples; return their mean loss, if it ``has_loss``. ``mark`` ends phases."""
        if self.stages:
            losses: list[torch.Tensor] = []
            ends = {"target": targets, "losses": losses} if self.has_loss else {}
            with devices.autocast(self.job.precision, self.device):
                self.schedule.step(*([tokens] if 0 in self.numbers else []), **ends)
            mark("backward")
            return torch.stack(losses).mean().detach() if losses else torch.zeros((), device=self.device)
        with self._ring(tokens, targets) if self.job.layout.context > 1 else contextlib.nullcontext():
            with devices.autocast(self.job.precision, self.device):
                mean = self.loss(self.module(tokens), targets)
            mark("forward")
            mean.backward()
            mark("backward")
        return mean.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def named(self, gradients: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole weights, or their gradients, by name, without rows that pad the vocabulary.

        A collective: all ranks of the mesh call it alike.
        """
        for part in self.parts:
            for name, parameter in part.named_parameters():
                tensor = parameter.grad if gradients else parameter.detach()
                if tensor is not None:
                    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                    vocabulary = name in ("embed.tokens.weight", "head.weight")
                    yield name.replace("_orig_mod.", ""), whole[: self.job.shape.vocabulary] if vocabulary else whole

    def _draw(self) -> None:
        """Draw the weights piece by piece, and cut or drop each before the next: a rank never holds the whole model."""
        job = self.job
        if job.compile:
            # Layers are compiled for the shapes of one job alone: shapes that changed would become symbolic, and after
            # some variants of one function torch runs it call by call without a word.
            torch.compiler.reset()
        torch.manual_seed(job.seed)
        held = {module for part in self.parts for module in part.modules()}
        plan = tensor_plan(self.model, job.strategy == "sequence") if job.layout.tensor > 1 else {}
        for key, piece in self.model.fill(self.device, torch.float64 if job.weights == "fp64" else torch.float32):
            if piece not in held:  # of another stage
                piece.to("meta")
                continue
            if own := {path: style for path, style in plan.items() if path == key or path.startswith(f"{key}.")}:
                tp.parallelize_module(self.model, self.here["tensor"], own)
            if key.startswith("blocks."):
                if job.compile:
                    piece.compile(dynamic=False)
                if self.shards is not None:
                    fully_shard(piece, mesh=self.shards)

    def _averaged(self) -> nn.Module:
        """Let copies average their gradients, and cut those that are shared; return what a step calls."""
        job, here, module = self.job, self.here, self.parts[0]
        if job.strategy == "data":
            ddp = DistributedDataParallel(module, process_group=here.get_group("data"), gradient_as_bucket_view=True)
            ddp.broadcast_buffers = False  # the places are the same everywhere
            if job.repeats:
                ddp.register_comm_hook(job.repeats, _repeated)
            return ddp
        # Of a model whose head is tensor-parallel; the loss writes nothing in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
        axis = "context" if job.layout.context > 1 else "data"
        for part in self.parts:
            if self.shards is not None:
                fully_shard(part, mesh=self.shards)
            elif getattr(job.layout, axis) > 1:  # DDP's reducer breaks within a pipeline
                replicate(part, mesh=here[axis])
            if job.strategy == "sharded_direct":
                use_direct(part)
        return module

    def _ring(self, *batch: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
        """Cut the sequences over the ranks of ``context`` while a step runs; attention passes keys and values round."""
        from torch.distributed.tensor.experimental import context_parallel

        more: dict[str, Any] = {"buffer_seq_dims": [1, 1, 0], "no_restore_buffers": set(batch)}
        return context_parallel(self.here["context"], buffers=[*batch, self.model.places], **more)


def _repeated(repeats: int, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP hook of an injected slow exchange: average a copy of the bucket some times more than needed."""
    for _ in range(repeats):
        dist.all_reduce(bucket.buffer().clone())
    average = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(average, async_op=True).get_future().then(lambda done: done.value()[0])


def tensor_plan(part: Stack, sequence: bool) -> dict[str, tp.ParallelStyle]:
    """Return how each matrix is cut: into attention and feed-forward by columns, out of them by rows (Megatron-LM).

    With ``sequence`` the states between them are cut by tokens, and norms work on the cut ones.
    """
    states, whole = (Shard(1) if sequence else Replicate()), Replicate()
    plan: dict[str, tp.ParallelStyle] = {"embed.tokens": tp.RowwiseParallel(input_layouts=whole)}
    if part.kind == "decoder":
        plan["head"] = tp.ColwiseParallel(input_layouts=states, output_layouts=whole)
    for block in (f"blocks.{layer}." for layer in part.blocks):
        for name in ("attention.query", "attention.key", "attention.value", "ffn.up", "ffn.gate"):
            plan[block + name] = tp.ColwiseParallel()
        for name in ("attention.output", "ffn.down"):
            plan[block + name] = tp.RowwiseParallel(output_layouts=states)
        if sequence:
            plan |= {block + name: tp.SequenceParallel(use_local_output=True) for name in ("norm1", "norm2")}
            plan[block + "attention"] = tp.PrepareModuleInput(
                input_layouts=(states, None), desired_input_layouts=(whole, None)
            )
            plan[block + "ffn"] = tp.PrepareModuleInput(input_layouts=(states,), desired_input_layouts=(whole,))
    if sequence:
        plan["embed"] = tp.PrepareModuleOutput(output_layouts=whole, desired_output_layouts=states)
        plan["norm"] = tp.SequenceParallel(use_local_output=True)
        if part.kind == "encoder":
            plan["head"] = tp.PrepareModuleInput(
                input_layouts=(states,), desired_input_layouts=(whole,), use_local_output=True
            )
    present = {name for name, _ in part.named_modules()}
    return {name: style for name, style in plan.items() if name in present}


_CHUNKS = {"forward_one_chunk": "forward", "backward_one_chunk": "backward", "backward_weight_one_chunk": "weight"}


def record(way: ShardedModel) -> list[dict[str, Any]]:
    """Return a list that gets a row of each pass of a micro-batch through a stage of this rank; a device is waited for.

    Times are those of the host's monotonic clock, which ranks of one host share.
    """
    rows = list[dict[str, Any]]()

    def timed(stage: PipelineStage, inner: Callable[..., Any], phase: str, number: int, *args: Any, **more: Any) -> Any:
        # A device waits for what a neighbour sends within its stream: that is idle time, and lies before the work.
        devices.synchronize_stream(stage.device)
        began = time.perf_counter()
        result = inner(number, *args, **more)
        devices.synchronize_stream(stage.device)
        kind = "input" if phase == "backward" and more.get("full_backward") is False else phase
        row = {"stage": stage.stage_index, "micro_batch": number, "phase": kind}
        rows.append(row | {"start_s": began, "end_s": time.perf_counter()})
        return result

    for stage in way.stages:
        for method, phase in _CHUNKS.items():
            setattr(stage, method, functools.partial(timed, stage, getattr(stage, method), phase))
    return rows


def tokens(job: Job, step: int, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return a step's random tokens and what follows them, int64 (B, S) each; of an encoder places (B, 2) to find."""
    drawn = torch.Generator().manual_seed(job.seed * 1_000_003 + step)
    text = torch.randint(job.shape.vocabulary, (job.batch, job.seq + 1), generator=drawn)
    inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    if job.shape.kind == "encoder":
        targets = torch.randint(job.seq, (job.batch, 2), generator=drawn)
    return inputs.to(device), targets.to(device)


def prove(job: Job, device: torch.device) -> dict[str, Any]:
    """Compare a strategy with one device that keeps its activations; all ranks call it and get the same columns. Raises as ``prepare`` does.

    They are the largest differences over ranks: in fp64, after ``PROOF_STEPS`` of AdamW, of losses (relative) and
    weights; in fp32 of losses, and of the gradients of the first step over the largest one.
    """
    job = replace(job.narrow(), precision="fp32")
    lacks = "the device has no fp64" if device.type == "mps" else ""
    # torch's ring goes round kernels of attention that compute in fp32 at most.
    lacks = "ring attention has no fp64" if job.layout.context > 1 else lacks
    if lacks:
        proof: dict[str, Any] = {"why": dict.fromkeys(("loss_error", "weight_error"), lacks)}
    else:
        loss, weight, _ = _differences(replace(job, weights="fp64"), device, PROOF_STEPS)
        proof = {"loss_error": loss, "weight_error": weight, "why": {}}
    with devices.products_held("fp32", device):
        loss, _, gradient = _differences(job, device, 2)
    return proof | {"loss_error_fp32": loss, "gradient_error": gradient}


def _apart(tensors: Iterable[tuple[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, infinite where it is not a number."""
    return _largest(float((value - expected[name]).abs().max()) for name, value in tensors)


def _largest(errors: Iterable[float]) -> float:
    # Of several values max() does not see a NaN that comes after the first.
    return max((error if math.isfinite(error) else math.inf for error in errors), default=0.0)


def _differences(job: Job, device: torch.device, steps: int) -> tuple[float, float, float]:
    """Return the largest differences of losses (relative), weights and first gradients (over the largest one)."""
    way, single = (
        prepare(job, device),
        ShardedModel(job.alone(compile=False, checkpointing=False, fused_loss=False), device),
    )
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
