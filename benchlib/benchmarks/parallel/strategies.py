"""From a job to a step: torch's own data, tensor, context and pipeline parallelism, and their mixtures.

A mesh has the dimensions data, pipeline, tensor (or context), the last one the innermost: its ranks talk most. The loop that
drives a ``Way`` knows nothing of how the model lies.
"""

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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
from benchlib.workloads.collectives.exchange import use_direct
from benchlib.workloads.transformer_stack import Stack, loss

DIMENSIONS = ("data", "pipeline", "tensor", "context")
Mark = Callable[[str], None]
Step = Callable[[torch.Tensor, torch.Tensor, Mark], torch.Tensor]


@dataclass
class Way:
    """A model spread over ranks, at work on one of them.

    ``step(tokens, targets, mark)`` takes this rank's samples, leaves gradients and returns the mean loss of them on ranks with
    ``has_loss``; ``mark`` ends the phases of a timer. ``parts`` are the layers that the rank holds.
    """

    parts: list[Stack]
    layout: Layout
    data_rank: int
    has_loss: bool
    step: Step
    optimizer: torch.optim.Optimizer
    stages: list[PipelineStage] = field(default_factory=list)

    def share(self, batch: torch.Tensor) -> torch.Tensor:
        """Return this rank's samples of a global batch."""
        return batch.chunk(self.layout.data)[self.data_rank]

    def update(self) -> None:
        """Take the step of the optimizer and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def named(self, gradients: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole weights, or their gradients, by name. A collective: all ranks of the mesh call it alike."""
        for part in self.parts:
            for name, parameter in part.named_parameters():
                tensor = parameter.grad if gradients else parameter.detach()
                if tensor is None:
                    continue
                yield name.replace("_orig_mod.", ""), tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@functools.cache
def mesh(kind: str, layout: Layout, split: int = 0) -> DeviceMesh:
    """Return the mesh of the first ranks. A collective of the whole world. ``split`` cuts data into copies and shards of so many."""
    shape = tuple(getattr(layout, name) for name in DIMENSIONS)
    names: tuple[str, ...] = DIMENSIONS
    if split:
        shape, names = (shape[0] // split, split, *shape[1:]), ("copies", "data", *DIMENSIONS[1:])
    return DeviceMesh(kind, torch.arange(layout.world).view(shape), mesh_dim_names=names)


def prepare(job: Job, device: torch.device) -> Way | None:
    """Spread a job's model over the first ``layout.world`` ranks; None on the others. A collective of the whole world.

    Raises ``BackendUnavailable`` on all ranks where torch does not have the strategy for the device.
    """
    if job.layout.context > 1 and device.type == "cpu":
        raise BackendUnavailable("torch has ring attention for CUDA alone: context parallel needs a GPU")
    here = mesh(device.type, job.layout, job.shard if job.copies == "hybrid" else 0) if job.layout.world > 1 else None
    return alone(job, device, here) if dist.get_rank() < job.layout.world else None


def alone(job: Job, device: torch.device, here: DeviceMesh | None = None) -> Way:
    """Return a job of one device on this rank, whatever other ranks do; ``here`` makes it a part of that mesh."""
    with torch.device("meta"):
        model = Stack(job.shape, job.seq, job.dropout, job.checkpointing)
    model.places = torch.arange(job.seq, device=device)
    model.train()
    numbers, parts = list[int](), [model]
    if here is not None and job.layout.pipeline > 1:
        # Several stages of a rank are every p-th from its own on.
        numbers = list(range(here.get_local_rank("pipeline"), job.stages, job.layout.pipeline))
        parts = [model.part(*_cut(job.shape.layers, number, job.stages)) for number in numbers]
    shards = None
    if here is not None and job.cut:
        shards = here["copies", "data"] if job.copies == "hybrid" else here["data"]
    _spread(model, parts, job, device, here, shards)
    module = _copies(parts, job, device, here, shards)
    tensors = [parameter for part in parts for parameter in part.parameters()]
    mixed = len({isinstance(parameter, DTensor) for parameter in tensors}) > 1
    # The fused kernels take one kind of tensor at once.
    how: dict[str, bool] = {"foreach": False} if mixed else {"fused": True}
    optimizer = torch.optim.AdamW(tensors, lr=job.learning_rate, **how)  # type: ignore[arg-type]
    data_rank = here.get_local_rank("data") if here is not None else 0
    if here is not None and job.copies == "hybrid":
        data_rank += job.shard * here.get_local_rank("copies")
    if numbers:
        assert here is not None
        step, stages = _flow(parts, numbers, here, job, device)
        return Way(parts, job.layout, data_rank, job.stages - 1 in numbers, step, optimizer, stages)
    around: Callable[..., Any] = lambda *_: contextlib.nullcontext()  # noqa: E731
    if here is not None and job.layout.context > 1:
        around = functools.partial(_ring, here, model)
    return Way(parts, job.layout, data_rank, True, _whole(module, job, device, around), optimizer)


def _spread(
    model: Stack, parts: list[Stack], job: Job, device: torch.device, here: DeviceMesh | None, shards: DeviceMesh | None
) -> None:
    """Draw the weights piece by piece, and cut or drop each piece before the next one.

    With FSDP2 and tensor parallelism a rank holds no more than its share, one whole layer, and embedding and head until these are
    cut, too; of a pipeline it holds its own stages.
    """
    if job.compile:
        # Layers are compiled for the shapes of one job alone: shapes that changed would become symbolic, and after some variants
        # of one function torch runs it call by call without a word.
        torch.compiler.reset()
    torch.manual_seed(job.seed)
    for key, piece in model.fill(device, torch.float64 if job.weights == "fp64" else torch.float32):
        part = next((part for part in parts if any(module is piece for module in part.modules())), None)
        if part is None:  # of another stage
            piece.to("meta")
            continue
        if here is not None and job.layout.tensor > 1:
            plan = tensor_plan(part, job.strategy == "sequence")
            own = {path: style for path, style in plan.items() if path == key or path.startswith(f"{key}.")}
            tp.parallelize_module(part, here["tensor"], own)
        if key.startswith("blocks."):
            if job.compile:
                piece.compile(dynamic=False)
            if shards is not None:
                fully_shard(piece, mesh=shards)


def _whole(module: nn.Module, job: Job, device: torch.device, around: Callable[..., Any]) -> Step:
    """Return the step of a model that is no pipeline, within the context ``around(tokens, targets)``."""

    def step(tokens: torch.Tensor, targets: torch.Tensor, mark: Mark) -> torch.Tensor:
        with around(tokens, targets):
            with devices.autocast(job.precision, device):
                mean = loss(module(tokens), targets)
            mark("forward")
            mean.backward()
            mark("backward")
        return mean.detach()

    return step


def _ring(here: DeviceMesh, model: Stack, tokens: torch.Tensor, targets: torch.Tensor) -> AbstractContextManager[Any]:
    """Cut the sequences over the ranks of ``context`` while a step runs; attention passes keys and values round."""
    from torch.distributed.tensor.experimental import context_parallel

    buffers, dims = [tokens, targets, model.places], [1, 1, 0]
    return context_parallel(
        here["context"], buffers=buffers, buffer_seq_dims=dims, no_restore_buffers={tokens, targets}
    )


# Copies of the model, or shards of a copy.


def _copies(
    parts: list[Stack], job: Job, device: torch.device, here: DeviceMesh | None, shards: DeviceMesh | None
) -> nn.Module:
    """Let the ranks of ``data`` average gradients, by the strategy's way; return what a step calls."""
    module: nn.Module = parts[0]
    if here is None or not job.copies:
        return module
    if job.copies == "ddp":
        ids = [device] if devices.has_events(device) else None
        ddp = DistributedDataParallel(
            module, device_ids=ids, process_group=here.get_group("data"), gradient_as_bucket_view=True
        )
        ddp.broadcast_buffers = False  # the places are the same everywhere
        if job.repeats:
            ddp.register_comm_hook(job.repeats, _repeated)
        return ddp
    # Of a model whose head is tensor-parallel; the loss writes nothing in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
    for part in parts:
        if shards is None:  # DDP's reducer breaks within a pipeline
            replicate(part, mesh=here["context" if job.layout.context > 1 else "data"])
        else:
            fully_shard(part, mesh=shards)
        if job.copies == "direct":
            use_direct(part)
    return module


def _repeated(repeats: int, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP hook of a planted slow exchange: average a copy of the bucket some times more than needed."""
    for _ in range(repeats):
        dist.all_reduce(bucket.buffer().clone())
    average = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(average, async_op=True).get_future().then(lambda done: done.value()[0])


# Tensor parallel.


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


# Pipelines.


def _cut(layers: int, stage: int, stages: int) -> tuple[int, int]:
    return layers * stage // stages, layers * (stage + 1) // stages


def _flow(
    parts: list[Stack], numbers: list[int], here: DeviceMesh, job: Job, device: torch.device
) -> tuple[Step, list[PipelineStage]]:
    group, last = here.get_group("pipeline"), job.stages - 1
    stages = [
        PipelineStage(part, number, job.stages, device, group=group)
        for part, number in zip(parts, numbers, strict=True)
    ]
    runs = getattr(schedules, SCHEDULES[job.schedule][1])
    plan = runs(stages if job.rank_stages > 1 else stages[0], n_microbatches=job.micro_batches, loss_fn=loss)

    def step(tokens: torch.Tensor, targets: torch.Tensor, mark: Mark) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        ends = {"target": targets, "losses": losses} if last in numbers else {}
        with devices.autocast(job.precision, device):
            plan.step(*([tokens] if 0 in numbers else []), **ends)
        mark("backward")
        return torch.stack(losses).mean().detach() if losses else torch.zeros((), device=device)

    return step, stages


_CHUNKS = {"forward_one_chunk": "forward", "backward_one_chunk": "backward", "backward_weight_one_chunk": "weight"}


@contextlib.contextmanager
def timeline(way: Way, rows: list[dict[str, Any]]) -> Iterator[None]:
    """Record when each micro-batch passes each stage of this rank: rows of stage, micro_batch, phase, start_s, end_s.

    Times are those of the host's monotonic clock, which ranks of one host share; a device is waited for.
    """

    def timed(stage: PipelineStage, inner: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def call(number: int, *args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = inner(number, *args, **named)
            devices.synchronize(stage.device)
            kind = "input" if phase == "backward" and named.get("full_backward") is False else phase
            row = {"stage": stage.stage_index, "micro_batch": number, "phase": kind}
            rows.append(row | {"start_s": began, "end_s": time.perf_counter()})
            return result

        return call

    calls = [(stage, method) for stage in way.stages for method in _CHUNKS]
    for stage, method in calls:
        setattr(stage, method, timed(stage, getattr(stage, method), _CHUNKS[method]))
    try:
        yield
    finally:
        for stage, method in calls:
            delattr(stage, method)
