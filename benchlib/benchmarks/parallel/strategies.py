"""From a model and a mesh of ranks to a step: torch's own data, tensor, context and pipeline parallelism, and their mixtures.

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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.shapes import STAGES_PER_RANK, STRATEGIES, Layout, Shape
from benchlib.core.errors import BackendUnavailable
from benchlib.runtime import devices
from benchlib.runtime.exchange import use_direct
from benchlib.workloads.transformer_stack import Stack, loss

SCHEDULES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
}
DIMENSIONS = ("data", "pipeline", "tensor", "context")
Mark = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """What is built, by plain values. ``dtype`` is that of the weights; ``repeats`` of DDP's exchange are planted."""

    form: Any
    length: int
    batch: int
    micro_batches: int
    device: torch.device
    seed: int = 0
    dtype: torch.dtype = torch.float32
    precision: str = "fp32"
    dropout: float = 0.0
    checkpointing: bool = False
    compile: bool = False
    learning_rate: float = 1e-3
    shard: int = 2
    repeats: int = 0

    @classmethod
    def of(cls, config: ParallelConfig, form: Shape, batch: int, device: torch.device, repeats: int = 0) -> "Job":
        """Return what a config asks for."""
        return cls(
            form, config.length(form), batch, config.micro_batches, device, config.seed, torch.float32, config.precision, config.dropout,
            config.checkpointing, config.compile, config.learning_rate, config.shard or 2, repeats,
        )  # fmt: skip

    def model(self) -> Stack:
        """Return the whole model, the same on every rank."""
        model = self.empty()
        for _ in self.fill(model):
            pass
        return model

    def empty(self) -> Stack:
        """Return the model without weights, on the device "meta"."""
        with torch.device("meta"):
            model = Stack(self.form, self.length, self.dropout, self.checkpointing)
        model.places = torch.arange(self.length, device=self.device)
        return model.train()

    def fill(self, model: Stack) -> Iterator[tuple[str, nn.Module]]:
        """Give an empty model its weights, see ``Stack.fill``."""
        torch.manual_seed(self.seed)
        return model.fill(self.device, self.dtype)


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
    step: Callable[[torch.Tensor, torch.Tensor, Mark], torch.Tensor]
    optimizer: torch.optim.Optimizer
    stages: list[PipelineStage] = field(default_factory=list)

    def share(self, batch: torch.Tensor) -> torch.Tensor:
        """Return this rank's samples of a global batch."""
        return batch.chunk(self.layout.data)[self.data_rank]

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


def prepare(name: str, layout: Layout, schedule: str, job: Job) -> Way | None:
    """Spread ``job``'s model over the first ``layout.world`` ranks; None on the others. A collective of the whole world.

    Raises ``BackendUnavailable`` on all ranks where torch does not have the strategy for the device.
    """
    strategy = STRATEGIES[name]
    if layout.context > 1 and job.device.type == "cpu":
        raise BackendUnavailable(
            "torch has ring attention for CUDA's kernels alone, none for a CPU: context parallel needs a GPU"
        )
    here = mesh(job.device.type, layout, job.shard if strategy.copies == "hybrid" else 0) if layout.world > 1 else None
    if dist.get_rank() >= layout.world:
        return None
    model, stages = job.empty(), _stages(layout, schedule, here)
    parts = (
        [model.part(*_cut(job.form.layers, index, _count(layout, schedule))) for index in stages] if stages else [model]
    )
    _spread(model, parts, name, layout, here, job)
    module = _copies(parts, strategy.copies, layout, here, job)
    tensors = [parameter for part in parts for parameter in part.parameters()]
    mixed = len({isinstance(parameter, DTensor) for parameter in tensors}) > 1
    # The fused kernels take one kind of tensor at once.
    optimizer = torch.optim.AdamW(
        tensors, lr=job.learning_rate, foreach=False if mixed else None, fused=None if mixed else True
    )
    data_rank = 0
    if here is not None:
        data_rank = here.get_local_rank("data")
        if strategy.copies == "hybrid":
            data_rank += job.shard * here.get_local_rank("copies")
    if stages:
        assert here is not None
        step, made = _flow(parts, stages, _count(layout, schedule), schedule, here, job)
        last = _count(layout, schedule) - 1
        return Way(parts, layout, data_rank, last in stages, step, optimizer, made)
    around = functools.partial(_ring, here, model) if here is not None and layout.context > 1 else _nothing
    return Way(parts, layout, data_rank, True, functools.partial(_direct, module, job, around), optimizer)


def _spread(model: Stack, parts: list[Stack], name: str, layout: Layout, here: DeviceMesh | None, job: Job) -> None:
    """Draw the weights piece by piece, and cut or drop each piece before the next one.

    With FSDP2 and tensor parallelism a rank holds no more than its share, one whole layer, and embedding and head until these are
    cut, too; of a pipeline it holds its own stages.
    """
    _drop_compiled(job)
    shards = _shards(STRATEGIES[name].copies, layout, here)
    for key, piece in job.fill(model):
        part = next((part for part in parts if any(module is piece for module in part.modules())), None)
        if part is None:  # of another stage
            piece.to("meta")
            continue
        if here is not None and layout.tensor > 1:
            plan = tensor_plan(part, name == "sequence")
            own = {path: style for path, style in plan.items() if path == key or path.startswith(f"{key}.")}
            parallelize_module(part, here["tensor"], own)
        if key.startswith("blocks."):
            if job.compile:
                piece.compile(dynamic=False)
            if shards is not None:
                fully_shard(piece, mesh=shards)


def _shards(how: str, layout: Layout, here: DeviceMesh | None) -> DeviceMesh | None:
    """Return the mesh over which FSDP2 cuts a copy of the model; None where nothing is cut."""
    if here is None or how not in ("shard", "direct", "hybrid"):
        return None
    if how == "hybrid":
        return here["copies", "data"]
    return here["data"] if here["data"].size() > 1 else None


def alone(job: Job) -> Way:
    """Return the model on this device, whatever other ranks do: the strategy ``single`` on every rank."""
    model = job.model()
    _drop_compiled(job)
    if job.compile:
        for block in model.blocks.values():
            block.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate, fused=True)
    return Way([model], Layout(), 0, True, functools.partial(_direct, model, job, _nothing), optimizer)


def _drop_compiled(job: Job) -> None:
    """Drop the code of earlier strategies: layers are compiled for the shapes of one alone.

    Shapes that changed would become symbolic, and after some variants of one function torch runs it call by call without a word.
    """
    if job.compile:
        torch.compiler.reset()


def _nothing(*_: Any) -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


def _direct(
    module: nn.Module, job: Job, around: Any, tokens: torch.Tensor, targets: torch.Tensor, mark: Mark
) -> torch.Tensor:
    with around(tokens, targets):
        with devices.autocast(job.precision, job.device):
            mean = loss(module(tokens), targets)
        mark("forward")
        mean.backward()
        mark("backward")
    return mean.detach()


def _ring(here: DeviceMesh, model: Stack, tokens: torch.Tensor, targets: torch.Tensor) -> AbstractContextManager[Any]:
    """Cut the sequences over the ranks of ``context`` while a step runs; attention passes keys and values round."""
    from torch.distributed.tensor.experimental import context_parallel

    buffers, dims = [tokens, targets, model.places], [1, 1, 0]
    return context_parallel(
        here["context"], buffers=buffers, buffer_seq_dims=dims, no_restore_buffers={tokens, targets}
    )


# Copies of the model, or shards of a copy.


def _copies(parts: list[Stack], how: str, layout: Layout, here: DeviceMesh | None, job: Job) -> nn.Module:
    """Let the ranks of ``data`` average gradients, by the strategy's way; return what a step calls."""
    module: nn.Module = parts[0]
    axis = "context" if layout.context > 1 else "data"
    if here is None or not how or (how != "hybrid" and here[axis].size() == 1):
        return module
    if how == "ddp":
        ids = [job.device] if devices.has_events(job.device) else None
        ddp = DistributedDataParallel(
            module, device_ids=ids, process_group=here.get_group("data"), gradient_as_bucket_view=True
        )
        ddp.broadcast_buffers = False  # the places are the same everywhere
        if job.repeats:
            ddp.register_comm_hook(job.repeats, _repeated)
        return ddp
    # Of a model whose head is tensor-parallel; the loss writes nothing in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
    if how == "replicate":
        # DDP's reducer breaks within a pipeline.
        from torch.distributed._composable.replicate_with_fsdp import replicate

        for part in parts:
            replicate(part, mesh=here[axis])
        return module
    for part in parts:
        fully_shard(part, mesh=_shards(how, layout, here))
        if how == "direct":
            use_direct(part)
    return module


def _repeated(repeats: int, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP hook of a planted slow exchange: average a copy of the bucket some times more than needed."""
    for _ in range(repeats):
        dist.all_reduce(bucket.buffer().clone())
    average = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(average, async_op=True).get_future().then(lambda done: done.value()[0])


# Tensor parallel.


def tensor_plan(part: Stack, sequence: bool) -> dict[str, ParallelStyle]:
    """Return how each matrix is cut: into attention and feed-forward by columns, out of them by rows (Megatron-LM).

    With ``sequence`` the states between them are cut by tokens, and norms work on the cut ones.
    """
    inner: dict[str, ParallelStyle] = {}
    states = Shard(1) if sequence else Replicate()
    for layer in part.blocks:
        block = f"blocks.{layer}."
        for name in ("attention.query", "attention.key", "attention.value", "ffn.up", "ffn.gate"):
            inner[block + name] = ColwiseParallel()
        for name in ("attention.output", "ffn.down"):
            inner[block + name] = RowwiseParallel(output_layouts=states)
        if sequence:
            for name in ("norm1", "norm2"):
                inner[block + name] = SequenceParallel(use_local_output=True)
            inner[block + "attention"] = PrepareModuleInput(
                input_layouts=(states, None), desired_input_layouts=(Replicate(), None)
            )
            inner[block + "ffn"] = PrepareModuleInput(input_layouts=(states,), desired_input_layouts=(Replicate(),))
    if part.embed is not None:
        inner["embed.tokens"] = RowwiseParallel(input_layouts=Replicate())
        if sequence:
            inner["embed"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=states)
    if part.norm is not None and sequence:
        inner["norm"] = SequenceParallel(use_local_output=True)
    if part.head is not None:
        if part.kind == "decoder":
            inner["head"] = ColwiseParallel(input_layouts=states, output_layouts=Replicate())
        elif sequence:
            inner["head"] = PrepareModuleInput(
                input_layouts=(states,), desired_input_layouts=(Replicate(),), use_local_output=True
            )
    present = {name for name, _ in part.named_modules()}
    return {name: style for name, style in inner.items() if name in present}


# Pipelines.


def _count(layout: Layout, schedule: str) -> int:
    return layout.pipeline * STAGES_PER_RANK.get(schedule, 1)


def _stages(layout: Layout, schedule: str, here: DeviceMesh | None) -> list[int]:
    """Return the stages of this rank: its own, and with several on a rank every p-th from there on."""
    if here is None or layout.pipeline == 1:
        return []
    return list(range(here.get_local_rank("pipeline"), _count(layout, schedule), layout.pipeline))


def _cut(layers: int, stage: int, stages: int) -> tuple[int, int]:
    return layers * stage // stages, layers * (stage + 1) // stages


def _flow(
    parts: list[Stack], indices: list[int], count: int, schedule: str, here: DeviceMesh, job: Job
) -> tuple[Callable[[torch.Tensor, torch.Tensor, Mark], torch.Tensor], list[PipelineStage]]:
    group = here.get_group("pipeline")
    stages = [
        PipelineStage(part, index, count, job.device, group=group) for part, index in zip(parts, indices, strict=True)
    ]
    many = STAGES_PER_RANK[schedule] > 1
    plan = SCHEDULES[schedule](stages if many else stages[0], n_microbatches=job.micro_batches, loss_fn=loss)
    first, last = 0 in indices, count - 1 in indices

    def step(tokens: torch.Tensor, targets: torch.Tensor, mark: Mark) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        with devices.autocast(job.precision, job.device):
            plan.step(*([tokens] if first else []), target=targets if last else None, losses=losses if last else None)
        mark("backward")
        return torch.stack(losses).mean().detach() if losses else torch.zeros((), device=job.device)

    return step, stages


_CHUNKS = {"forward_one_chunk": "forward", "backward_one_chunk": "backward", "backward_weight_one_chunk": "weight"}


@contextlib.contextmanager
def timeline(way: Way, rows: list[dict[str, Any]]) -> Iterator[None]:
    """Record when each micro-batch passes each stage of this rank: rows of stage, micro_batch, phase, start_s, end_s.

    Times are those of the host's monotonic clock, which ranks of one host share; a device is waited for.
    """

    def timed(stage: PipelineStage, method: str, phase: str) -> Callable[..., Any]:
        inner = getattr(stage, method)

        def call(number: int, *args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = inner(number, *args, **named)
            devices.synchronize(stage.device)
            kind = "input" if phase == "backward" and named.get("full_backward") is False else phase
            row = {"stage": stage.stage_index, "micro_batch": number, "phase": kind}
            rows.append(row | {"start_s": began, "end_s": time.perf_counter()})
            return result

        return call

    for stage in way.stages:
        for method, phase in _CHUNKS.items():
            setattr(stage, method, timed(stage, method, phase))
    try:
        yield
    finally:
        for stage in way.stages:
            for method in _CHUNKS:
                delattr(stage, method)
