"""Every operation of a collective library held against a computation in one place, for ranks of a run (see faulty.py).

Reductions are of whole numbers that are exact in every type; what is moved are random bytes, so that any bit counts.
"""

import itertools
from datetime import timedelta

import torch
import torch.distributed as dist

from benchlib.benchmarks.collectives import gradients
from benchlib.config.schema import BaseConfig
from benchlib.core import files
from benchlib.runtime import group as process_group

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
Op = dist.ReduceOp
TOGETHER = {
    Op.SUM: lambda parts: parts.sum(0),
    Op.AVG: lambda parts: parts.sum(0) / len(parts),
    Op.MIN: lambda parts: parts.amin(0),
    Op.MAX: lambda parts: parts.amax(0),
    Op.PRODUCT: lambda parts: parts.prod(0),
}
KINDS = [*((dtype, 3) for dtype in DTYPES), (torch.float32, 1), (torch.bfloat16, 1001)]


class Config(BaseConfig):
    """``names``: libraries whose gradients are compared."""

    names: str = "gloo"


def number(rank, length):
    """Whole numbers from 1 to 3 that differ by rank and place."""
    return ((torch.arange(length, dtype=torch.float64) * (rank + 2) + rank) % 3) + 1


def pattern(seed, length, dtype):
    """Random bytes as ``length`` elements of a type."""
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length * dtype.itemsize,), generator=source, dtype=torch.uint8).view(dtype)


def same(*pairs):
    """Assert equality of every bit; return how many pairs there are."""
    for output, expected in pairs:
        assert output.dtype == expected.dtype
        bits = [tensor.contiguous().view(torch.uint8) for tensor in (output, expected)]
        assert torch.equal(*bits), (output, expected)
    return len(pairs)


def reductions(rank, size, group=None):
    """All-reduce, reduce and reduce-scatter of every reduction and kind; return how many were compared."""
    compared = 0
    for (op, together), (dtype, length) in itertools.product(TOGETHER.items(), KINDS):
        parts = torch.stack([number(other, length * size) for other in range(size)])
        whole = together(parts).to(dtype)  # averages of whole numbers are cut, of floats rounded
        mine = number(rank, length * size).to(dtype)
        reduced, root, buffer = mine.clone(), mine.clone(), mine.clone()
        (future,) = dist.all_reduce(reduced, op, group=group, async_op=True).get_future().wait()
        dist.reduce(root, group_dst=size - 1, op=op, group=group)
        block, listed = torch.empty(length, dtype=dtype), torch.empty(length, dtype=dtype)
        dist.reduce_scatter_single(block, mine, op, group=group)
        dist.reduce_scatter_single(buffer.chunk(size)[rank], buffer, op, group=group)  # into its own part of the input
        dist.reduce_scatter(listed, [part.clone() for part in mine.chunk(size)], op, group=group)
        expected, at_root = whole.chunk(size)[rank], root if rank == size - 1 else whole
        compared += same((future, whole), (reduced, whole), (at_root, whole))
        compared += same(*((output, expected) for output in (block, buffer.chunk(size)[rank], listed)))
    return compared


def moves(rank, size, group=None):
    """Every operation that moves data, with random bytes of every kind; return how many were compared."""
    compared = 0
    for dtype, length in KINDS:
        data = [pattern(other, length, dtype) for other in range(size)]
        whole, mine = torch.cat(data), data[rank]
        output, in_place = torch.empty_like(whole), torch.zeros_like(whole)
        dist.all_gather_single(output, mine, group=group)
        in_place.chunk(size)[rank].copy_(mine)
        dist.all_gather_single(in_place, in_place.chunk(size)[rank], group=group)
        shifted = torch.zeros_like(whole)
        elsewhere = shifted.chunk(size)[(rank + 1) % size]
        elsewhere.copy_(mine)
        dist.all_gather_single(shifted, elsewhere, group=group)  # out of another rank's part: it is copied
        apart = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(apart, mine, group=group)
        sent, block = mine.clone(), torch.empty_like(mine)
        dist.broadcast(sent, group_src=size - 1, group=group)
        into = [torch.empty_like(mine) for _ in range(size)] if rank == 0 else None
        dist.gather(mine, into, group_dst=0, group=group)
        source = [each.clone() for each in data] if rank == size - 1 else None
        dist.scatter(block, source, group_src=size - 1, group=group)
        parts = [[pattern(100 * here + there, length, dtype) for there in range(size)] for here in range(size)]
        swapped = torch.empty(size * length, dtype=dtype)
        dist.all_to_all_single(swapped, torch.cat(parts[rank]), group=group)
        rows = [[(here + there) % 3 for there in range(size)] for here in range(size)]  # of rank here for rank there
        outgoing = torch.cat([part.repeat(count) for part, count in zip(parts[rank], rows[rank], strict=True)])
        uneven = torch.cat([parts[other][rank].repeat(rows[other][rank]) for other in range(size)])
        received, counts = torch.empty_like(uneven), [row[rank] for row in rows]
        dist.all_to_all_single(received.view(-1, length), outgoing.view(-1, length), counts, rows[rank], group=group)
        compared += same(*((tensor, whole) for tensor in (output, in_place, torch.cat(apart), torch.cat(into or data))))
        compared += same((sent, data[-1]), (block, mine), (received, uneven))
        compared += same((shifted, whole), (swapped, torch.cat([parts[other][rank] for other in range(size)])))
    return compared


def messages(rank, size):
    """Messages around the ring: all at once, told apart by their tags, and larger than a socket takes unread."""
    after, before = (rank + 1) % size, (rank - 1) % size
    first, second, third = torch.empty(3), torch.empty(500_000), torch.empty(5)
    works = [
        dist.isend(torch.full((3,), float(rank)), after, tag=1),
        dist.isend(torch.full((500_000,), float(rank + 10)), after, tag=2),
        dist.irecv(second, before, tag=2),
        dist.irecv(first, before, tag=1),
    ]
    swap = [dist.P2POp(dist.isend, torch.full((5,), float(rank)), after), dist.P2POp(dist.irecv, third, before)]
    for work in works + dist.batch_isend_irecv(swap):
        work.wait()
    assert first.tolist() + third.tolist() == [before] * 8
    assert second.unique().tolist() == [before + 10]


def refusals(size):
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


def late(rank):
    """Rank 1 comes to an all-reduce after the time of the group is over; return the error of the others."""
    group, text = dist.new_group(timeout=timedelta(seconds=0.3)), ""
    if rank != 1:
        try:
            dist.all_reduce(torch.ones(2), group=group)
        except RuntimeError as error:
            text = str(error)
    dist.barrier()
    if rank == 1:
        dist.all_reduce(torch.ones(2), group=group)
    return text


def run(config, run_dir, events):
    """Do all of it over the default group of four and over two groups at the same time; write down what was seen."""
    events.emit("phase", name="init")
    with process_group.world(config, run_dir) as world:
        events.emit("phase", name="check")
        rank, size = world.rank, world.size
        halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        compared = reductions(rank, size) + moves(rank, size)
        compared += reductions(rank // 2, 2, halves[rank % 2]) + moves(rank // 2, 2, halves[rank % 2])
        messages(rank, size)
        rows = gradients.compare(world, config.names.split(","))
        seen = {"refused": refusals(size), "place": [rank, size, world.collective], "rows": rows, "compared": compared}
        files.write_json(run_dir / f"seen{rank}.json", seen | {"late": late(rank)})
