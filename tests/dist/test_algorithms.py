"""All-reduces of our own against a computation in one place: every count of ranks, odd lengths, subgroups."""

import itertools

import pytest
import torch
import torch.distributed as dist
from worlds import in_world

from benchlib.workloads.collectives import exchange
from benchlib.workloads.collectives.exchange import ALGORITHMS

Op = dist.ReduceOp
TOGETHER = {
    Op.SUM: lambda parts: sum(parts[1:], parts[0]),
    Op.AVG: lambda parts: sum(parts[1:], parts[0]) / len(parts),
    Op.MIN: lambda parts: torch.stack(parts).amin(0),
    Op.MAX: lambda parts: torch.stack(parts).amax(0),
    Op.PRODUCT: lambda parts: torch.stack(parts).prod(0, dtype=parts[0].dtype),
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
LENGTHS = (0, 1, 2, 3, 7, 1001)
SEGMENT_BYTES = 200  # so that short tensors too go in several segments


def contribution(rank, length, dtype):
    """Whole numbers from 1 to 3 that differ by rank and place: every reduction of four of them is exact in all types."""
    return ((torch.arange(length) * (rank + 2) + rank) % 3 + 1).to(dtype)


def cases(whole):
    """Every algorithm with every reduction and every length; the ``whole`` set has every type of every reduction."""
    dtypes = DTYPES if whole else (torch.float32,)
    yield from (
        (name, op, dtype, 1001)
        for name, op, dtype in itertools.product(ALGORITHMS, TOGETHER, dtypes)
        if op != Op.AVG or dtype.is_floating_point
    )
    yield from ((name, Op.SUM, torch.uint8, length) for name in ALGORITHMS for length in LENGTHS)


def every_case(group, rank, size):
    for name, op, dtype, length in cases(size == 3):
        tensor = contribution(rank, length, dtype)
        ALGORITHMS[name](tensor, op, group)
        expected = TOGETHER[op]([contribution(other, length, dtype) for other in range(size)])
        assert torch.equal(tensor, expected), (name, op, dtype, length, size)


def same_bits(group, rank, size):
    """Sums of fractions differ from the library's by rounding alone, and not between ranks."""
    own = torch.randn(1_007, generator=torch.Generator().manual_seed(rank), dtype=torch.float32)
    exactly = sum(torch.randn(1_007, generator=torch.Generator().manual_seed(r)).double() for r in range(size))
    for algorithm in ALGORITHMS.values():
        for op in (Op.SUM, Op.AVG):
            tensor = own.clone()
            algorithm(tensor, op, group)
            torch.testing.assert_close(tensor.double(), exactly / (size if op == Op.AVG else 1), rtol=1e-6, atol=2e-6)
            copies = [torch.empty_like(tensor) for _ in range(size)]
            dist.all_gather(copies, tensor, group=group)
            assert all(torch.equal(copy, tensor) for copy in copies)


def same_zeros(group, rank, size):
    """Of 0 and -0, which are equal, all ranks take the same one."""
    for name, op in itertools.product(ALGORITHMS, (Op.MIN, Op.MAX)):
        tensor = torch.full((31,), -0.0 if rank % 2 else 0.0)
        ALGORITHMS[name](tensor, op, group)
        copies = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(copies, tensor, group=group)
        assert len({bytes(copy.numpy()) for copy in copies}) == 1, name


def refused(group):
    for algorithm in ALGORITHMS.values():
        with pytest.raises(ValueError, match="not contiguous"):
            algorithm(torch.zeros(8)[::2], Op.SUM, group)
        with pytest.raises(ValueError, match="an average of"):
            algorithm(torch.zeros(8, dtype=torch.int64), Op.AVG, group)
        with pytest.raises(ValueError, match="use one of sum, avg, min, max, product"):
            algorithm(torch.zeros(8, dtype=torch.int64), Op.BAND, group)


def shape_is_kept(group, rank, size):
    for algorithm in ALGORITHMS.values():
        tensor = torch.full((3, 5), float(rank), requires_grad=True)
        algorithm(tensor, Op.MAX, group)
        assert tensor.tolist() == [[size - 1.0] * 5] * 3


def subgroup(rank, size):
    """Members by global ranks, in a group whose own ranks are others; it works beside the whole one."""
    members = list(range(1, size))
    group = dist.new_group(members)
    for algorithm in ALGORITHMS.values():
        tensor = torch.full((5,), 1.0 + rank)
        if rank in members:
            algorithm(tensor, Op.SUM, group)
            assert tensor.tolist() == [sum(1.0 + member for member in members)] * 5
        else:
            with pytest.raises(ValueError, match="not in the group"):
                algorithm(tensor, Op.SUM, group)
        algorithm(tensor, Op.MIN, None)


def every_group(rank, size):
    """One world holds a group of every size. What follows a group is a barrier of all."""
    exchange.SEGMENT_BYTES = SEGMENT_BYTES
    for count in range(1, size + 1):
        group = dist.new_group(list(range(count)))
        if rank < count:
            every_case(group, rank, count)
            same_bits(group, rank, count)
            same_zeros(group, rank, count)
        dist.barrier()
    refused(None)
    shape_is_kept(None, rank, size)
    subgroup(rank, size)


def test_every_algorithm_on_every_count_of_ranks(tmp_path):
    in_world(6, tmp_path, every_group)
