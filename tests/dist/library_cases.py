"""Every operation of a collective library held against a computation in one place, for ranks of a run (see faulty.py).

Reductions are of whole numbers that are exact in every type; what is moved are random bytes, so that any bit counts.
"""

import itertools
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchlib.benchmarks.collectives import gradients
from benchlib.config.schema import BaseConfig
from benchlib.core import files
from benchlib.core.events import EventWriter
from benchlib.runtime import group as process_group

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8,
)  # fmt: skip
Op = dist.ReduceOp
TOGETHER = {
    Op.SUM: lambda parts: parts.sum(0),
    Op.AVG: lambda parts: parts.sum(0) / len(parts),
    Op.MIN: lambda parts: parts.amin(0),
    Op.MAX: lambda parts: parts.amax(0),
    Op.PRODUCT: lambda parts: parts.prod(0),
}
LENGTHS = (1, 3, 1001)


class Config(BaseConfig):
    """``names``: libraries whose gradients are compared."""

    names: str = "gloo"


def number(rank: int, length: int) -> torch.Tensor:
    """Whole numbers from 1 to 3 that differ by rank and place."""
    return ((torch.arange(length, dtype=torch.float64) * (rank + 2) + rank) % 3) + 1


def pattern(seed: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bytes as ``length`` elements of a type."""
    width = torch.empty(0, dtype=dtype).element_size()
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length * width,), generator=source, dtype=torch.uint8).view(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    """Assert equality of every bit."""
    assert one.dtype == other.dtype
    assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), (one, other)


def reductions(rank: int, size: int, group: Any = None) -> int:
    """All-reduce, reduce and reduce-scatter of every type, reduction and length; return how many were checked."""
    checked = 0
    for (op, together), dtype, length in itertools.product(TOGETHER.items(), DTYPES, LENGTHS):
        parts = torch.stack([number(other, length * size) for other in range(size)])
        whole = together(parts).to(dtype)  # averages of whole numbers are cut, of floats rounded
        mine = number(rank, length * size).to(dtype)
        reduced = mine.clone()
        work = dist.all_reduce(reduced, op, group=group, async_op=True)
        (future,) = work.get_future().wait()
        same(future, whole)
        same(reduced, whole)
        root = mine.clone()
        dist.reduce(root, group_dst=size - 1, op=op, group=group)
        if rank == size - 1:
            same(root, whole)
        block = torch.empty(length, dtype=dtype)
        dist.reduce_scatter_single(block, mine, op, group=group)
        same(block, whole.chunk(size)[rank])
        buffer = mine.clone()  # the result into the rank's own part of the input
        dist.reduce_scatter_single(buffer.chunk(size)[rank], buffer, op, group=group)
        same(buffer.chunk(size)[rank], whole.chunk(size)[rank])
        block.zero_()
        dist.reduce_scatter(block, [part.clone() for part in mine.chunk(size)], op, group=group)
        same(block, whole.chunk(size)[rank])
        checked += 5
    return checked


def moves(rank: int, size: int, group: Any = None) -> int:
    """Every operation that moves data, with random bytes of every type and length."""
    checked = 0
    for dtype, length in itertools.product(DTYPES, LENGTHS):
        data = [pattern(other, length, dtype) for other in range(size)]
        whole, mine = torch.cat(data), data[rank]
        output = torch.empty_like(whole)
        dist.all_gather_single(output, mine, group=group)
        same(output, whole)
        output = torch.zeros_like(whole)
        output.chunk(size)[rank].copy_(mine)
        dist.all_gather_single(output, output.chunk(size)[rank], group=group)  # in place
        same(output, whole)
        apart = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(apart, mine, group=group)
        same(torch.cat(apart), whole)
        sent = mine.clone() if rank else data[0].clone()
        dist.broadcast(sent, group_src=size - 1, group=group)
        same(sent, data[-1])
        into = [torch.empty_like(mine) for _ in range(size)] if rank == 0 else None
        dist.gather(mine, into, group_dst=0, group=group)
        if into:
            same(torch.cat(into), whole)
        block = torch.empty_like(mine)
        dist.scatter(
            block, [one.clone() for one in data] if rank == size - 1 else None, group_src=size - 1, group=group
        )
        same(block, mine)
        parts = [[pattern(100 * one + other, length, dtype) for other in range(size)] for one in range(size)]
        expected = torch.cat([parts[other][rank] for other in range(size)])
        swapped = torch.empty_like(expected)
        dist.all_to_all_single(swapped, torch.cat(parts[rank]), group=group)
        same(swapped, expected)
        rows = [[(one + other) % 3 for other in range(size)] for one in range(size)]  # of rank one for rank other
        outgoing = torch.cat([part.repeat(count) for part, count in zip(parts[rank], rows[rank], strict=True)])
        expected = torch.cat([parts[other][rank].repeat(rows[other][rank]) for other in range(size)])
        swapped = torch.empty_like(expected)
        dist.all_to_all_single(
            swapped.view(-1, length), outgoing.view(-1, length), [row[rank] for row in rows], rows[rank], group=group
        )
        same(swapped, expected)
        checked += 8
    return checked


def messages(rank: int, size: int) -> None:
    """Messages around the ring: all at once, told apart by their tags, and larger than a socket takes unread."""
    after, before = (rank + 1) % size, (rank - 1) % size
    first, second = torch.empty(3), torch.empty(500_000)
    works = [
        dist.isend(torch.full((3,), float(rank)), after, tag=1),
        dist.isend(torch.full((500_000,), float(rank + 10)), after, tag=2),
        dist.irecv(second, before, tag=2),
        dist.irecv(first, before, tag=1),
    ]
    for work in works:
        work.wait()
    assert first.tolist() == [before] * 3
    assert second.unique().tolist() == [before + 10]
    swap = [
        dist.P2POp(dist.isend, torch.full((5,), float(rank)), after),
        dist.P2POp(dist.irecv, first := torch.empty(5), before),
    ]
    for work in dist.batch_isend_irecv(swap):
        work.wait()
    assert first.tolist() == [before] * 5


def from_anybody() -> None:
    """Receive what any rank sent, and learn who."""
    if dist.get_rank() == 1:
        dist.send(torch.tensor([7]), 0, tag=5)
    elif dist.get_rank() == 0:
        into = torch.zeros(1, dtype=torch.int64)
        assert dist.recv(into, tag=5) == 1
        assert into.item() == 7


def objects(rank: int, size: int) -> None:
    """Collectives of Python objects, as torch makes them of those of tensors."""
    assert process_group.all_gather_objects({"rank": rank, "text": "x" * rank}) == [
        {"rank": other, "text": "x" * other} for other in range(size)
    ]
    shared = [{"a": 1}] if rank == 0 else [None]
    dist.broadcast_object_list(shared, 0)
    assert shared == [{"a": 1}]


def refusals(size: int) -> list[str]:
    """Return the texts of what is refused, on every rank alike and before anything is sent."""
    calls = (
        lambda: dist.all_reduce(torch.ones(4, 4)[:, ::2]),
        lambda: dist.all_gather_single(torch.empty(3 * size + 1), torch.empty(3)),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool)),
    )
    texts = []
    for call in calls:
        try:
            call()
        except ValueError as error:
            texts.append(str(error))
    return texts


def sharded(rank: int, size: int) -> float:
    """Return the largest difference of FSDP2's gradients from those of one process, in fp64."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    def model() -> torch.nn.Module:
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(9, 17), torch.nn.Tanh(), torch.nn.Linear(17, 5)).double()

    batch = torch.randn(4 * size, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    alone, split = model(), model()
    alone(batch).square().mean().backward()
    mesh = init_device_mesh("cpu", (size,))
    for layer in (split[0], split[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(split, mesh=mesh)
    split(batch.chunk(size)[rank]).square().mean().backward()
    partial = DTensor.from_local(number(rank, 4 * size), mesh, [Partial()])  # through torch's functional collectives
    total = sum(number(other, 4 * size) for other in range(size))
    same(partial.redistribute(placements=[Replicate()]).to_local(), total)
    same(partial.redistribute(placements=[Shard(0)]).to_local(), total.chunk(size)[rank])
    pairs = zip(alone.parameters(), split.parameters(), strict=True)
    return max(float((one.grad - other.grad.full_tensor()).abs().max()) for one, other in pairs)


def late(rank: int) -> str:
    """Rank 1 comes to an all-reduce after the time of the group is over; return what the others were told."""
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    told = ""
    if rank != 1:
        try:
            dist.all_reduce(torch.ones(2), group=group)
        except RuntimeError as error:
            told = str(error)
    dist.barrier()
    if rank == 1:
        dist.all_reduce(torch.ones(2), group=group)
    return told


def run(config: Config, run_dir: Path, events: EventWriter) -> None:
    """Do all of it over the default group, then what else a library and a number of ranks offer; write down what was seen."""
    events.emit("phase", name="init")
    with process_group.world(config, run_dir) as world:
        events.emit("phase", name="check")
        rank, size = world.rank, world.size
        checked = reductions(rank, size) + moves(rank, size)
        messages(rank, size)
        objects(rank, size)
        seen: dict[str, Any] = {"refused": refusals(size), "place": [rank, size, world.collective]}
        seen["rows"] = gradients.compare(world, config.names.split(","))
        if size == 4:
            # Two groups at work at the same time.
            halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
            checked += reductions(rank // 2, 2, halves[rank % 2]) + moves(rank // 2, 2, halves[rank % 2])
        else:
            seen["sharded"] = sharded(rank, size)
        if size == 2 and world.collective == "mpi":
            from benchlib.workloads.collectives import mpi

            from_anybody()
            seen["late"] = late(rank)
            mpi.LIMIT = 700  # bytes or elements in one count: buffers go in pieces, or as one long item
            checked += reductions(rank, size) + moves(rank, size)
        files.write_json(run_dir / f"seen{rank}.json", seen | {"checked": checked})
