"""All-gather and reduce-scatter made of sends and receives: against the library's, and as what FSDP2 exchanges by."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from worlds import in_world

from benchlib.workloads.collectives import exchange
from benchlib.workloads.collectives.exchange import use_direct

Op = dist.ReduceOp
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
OPS = (Op.SUM, Op.AVG, Op.MIN, Op.MAX, Op.PRODUCT)
SEGMENT_BYTES = 1000  # so that short tensors too go in several segments
LONG = 2 * SEGMENT_BYTES // 4 + 3  # three segments of fp32, the last one of three elements


def whole_numbers(rank, length, dtype):
    """From 1 to 3, different by rank and place: every reduction of four of them is exact in all types."""
    return ((torch.arange(length) * (rank + 2) + rank) % 3 + 1).to(dtype)


def gathers(rank, size, group):
    for dtype, length in itertools.product(DTYPES if size == 3 else (torch.float32,), (0, 1, 5, 301)):
        own = whole_numbers(rank, length, dtype)
        expected = torch.cat([whole_numbers(other, length, dtype) for other in range(size)])
        output = torch.full_like(expected, 9)
        assert exchange.all_gather(output, own, group) is None
        assert torch.equal(output, expected)
        inplace = torch.full_like(expected, 9)
        mine = inplace[rank * length : (rank + 1) * length]
        mine.copy_(own)
        exchange.all_gather(inplace, mine, group)
        assert torch.equal(inplace, expected)


def reduces(rank, size, group):
    def check(op, dtype, length):
        inputs = [whole_numbers(other, size * length, dtype) for other in range(size)]
        mine = slice(rank * length, (rank + 1) * length)
        parts = torch.stack([each[mine] for each in inputs])
        expected = {
            Op.SUM: lambda: parts.sum(0, dtype=dtype),
            Op.AVG: lambda: parts.sum(0, dtype=dtype) / size,
            Op.MIN: lambda: parts.amin(0),
            Op.MAX: lambda: parts.amax(0),
            Op.PRODUCT: lambda: parts.prod(0, dtype=dtype),
        }[op]()
        given, output = inputs[rank].clone(), torch.full((length,), 9, dtype=dtype)
        assert exchange.reduce_scatter(output, given, op, group) is None
        assert torch.equal(output, expected), (op, dtype, length, size)
        assert torch.equal(given, inputs[rank])
        exchange.reduce_scatter(given[mine], given, op, group)  # in place
        assert torch.equal(given[mine], expected), (op, dtype, length, size)
        rest = torch.ones(size * length, dtype=torch.bool)
        rest[mine] = False
        assert torch.equal(given[rest], inputs[rank][rest])

    for op, dtype, length in itertools.product(OPS, DTYPES if size == 3 else (torch.float32,), (0, 1, 301)):
        if op != Op.AVG or dtype.is_floating_point:
            check(op, dtype, length)
    check(Op.SUM, torch.float32, LONG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "SCRATCH_BYTES", 1)  # two segments under way, the third one waits for memory
        check(Op.MAX, torch.float32, LONG)
        check(Op.AVG, torch.bfloat16, 2 * LONG)


def rank_order(rank, size, group):
    """What no order but that of the ranks gives: 1e8 + 1 loses the 1 in fp32; bf16 keeps its sums in fp32."""
    values = [1e8, -1e8, 1.0, 1.0][:size]
    output = torch.empty(3)
    exchange.reduce_scatter(output, torch.full((3 * size,), values[rank]), Op.SUM, group)
    assert output.tolist() == [max(0, size - 2) if size > 1 else 1e8] * 3
    bf16 = torch.empty(3, dtype=torch.bfloat16)
    exchange.reduce_scatter(bf16, torch.full((3 * size,), 256.0 if rank == 0 else 1.0).bfloat16(), Op.SUM, group)
    assert bf16.tolist() == [{1: 256.0, 2: 256.0, 3: 258.0, 4: 260.0}[size]] * 3  # in bf16 alone: 256


def as_the_library(rank, size, group):
    """Fractions: two contributions have one order, so the bits are the library's; more differ by rounding."""
    given = torch.randn(size * 503, generator=torch.Generator().manual_seed(rank))
    for op, dtype in itertools.product((Op.SUM, Op.AVG, Op.MAX), (torch.float32, torch.bfloat16)):
        own, theirs = torch.empty(503, dtype=dtype), torch.empty(503, dtype=dtype)
        exchange.reduce_scatter(own, given.to(dtype), op, group)
        dist.reduce_scatter(theirs, list(given.to(dtype).split(503)), op, group)
        bits = size <= 2 or op == Op.MAX
        near = {torch.float32: 1e-6, torch.bfloat16: 4e-2}[dtype]  # a few steps of the type at values below 8
        torch.testing.assert_close(own, theirs, rtol=0, atol=0 if bits else near)


def under_way_at_once(rank, size, group):
    """Asynchronous calls keep apart from each other and from other sends, in whatever order a rank waits for them."""

    def others():
        receive = dist.P2POp(dist.irecv, heard, group=group, group_peer=(rank - 1) % size)
        send = dist.P2POp(dist.isend, torch.full((7,), 7.0 + rank), group=group, group_peer=(rank + 1) % size)
        return dist.batch_isend_irecv([receive, send])

    heard = torch.empty(7)
    before = others() if rank % 2 else []
    inputs = [torch.full((size * LONG,), float(rank + step)) for step in range(3)]
    outputs = [torch.empty(LONG) for _ in inputs]
    gathered = torch.empty(size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "SCRATCH_BYTES", 1)
        works = [
            exchange.reduce_scatter(o, i, Op.SUM, group, async_op=True) for o, i in zip(outputs, inputs, strict=True)
        ]
    works.append(exchange.all_gather(gathered, torch.tensor([float(rank)]), group, async_op=True))
    assert not works[0].is_completed()
    for work in [*(before or others()), *(works if rank % 2 else reversed(works))]:
        assert work.wait()
    assert works[0].is_completed()
    assert gathered.tolist() == list(range(size))
    assert heard.tolist() == [7.0 + (rank - 1) % size] * 7
    for step, output in enumerate(outputs):
        assert output.unique().tolist() == [sum(range(size)) + size * step]


def refused(rank, size, group):
    whole, own = torch.zeros(4 * size), torch.zeros(4)
    gap = torch.zeros(8 * size)[::2]
    for output, given, reason in (
        (gap, own, r"output.*not contiguous.*output\.contiguous\(\)"),
        (whole, torch.zeros(8)[::2], "input.*not contiguous"),
        (torch.zeros(4 * size + 1), own, rf"output has {4 * size + 1} elements, input 4; .*takes {4 * size}$"),
        (whole.double(), own, "float64.*float32"),
        (whole, whole[1:5], rf"overlaps output but is not slice {rank}"),
    ):
        with pytest.raises(ValueError, match=reason):
            exchange.all_gather(output, given, group)
    for output, given, op, reason in (
        (own, gap, Op.SUM, "input.*not contiguous"),
        (own, torch.zeros(4 * size - 1), Op.SUM, f"input has {4 * size - 1} elements, output 4"),
        (own, whole.half(), Op.SUM, "float16.*float32"),
        (whole[2:6], whole, Op.SUM, "overlaps input"),
        (own.long(), whole.long(), Op.AVG, "an average of"),
        (own, whole, Op.BAND, "use one of sum, avg, min, max, product"),
    ):
        with pytest.raises(ValueError, match=reason):
            exchange.reduce_scatter(output, given, op, group)


def every_group(rank, size):
    exchange.SEGMENT_BYTES = SEGMENT_BYTES
    for count in range(1, size + 1):
        members = list(range(size - count, size))  # whose global ranks are not those in the group
        group = dist.new_group(members)
        if rank in members:
            place = members.index(rank)
            gathers(place, count, group)
            reduces(place, count, group)
            rank_order(place, count, group)
            as_the_library(place, count, group)
            if count > 1:
                under_way_at_once(place, count, group)
                refused(place, count, group)
        dist.barrier()


def gradients(mesh, kind, policy, use):
    """Three steps of a model whose layers do not divide by the number of ranks; the gradients of all steps."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(13, 17), nn.Tanh(), nn.Sequential(nn.Linear(17, 5, bias=False), nn.Tanh(), nn.Linear(5, 3))
    )
    fully_shard(model[2], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if use:
        assert use_direct(model) == 2
    if kind == "async":
        model.set_reshard_after_forward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(3):
        x = torch.randn(6, 13, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        if kind == "async":
            model.unshard(async_op=True)
        model(x).square().sum().backward()
        seen += [parameter.grad.to_local().clone() for parameter in model.parameters()]
        optimizer.step()
    return seen


def fsdp(rank, size):
    plain, bf16 = MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fp16 = MixedPrecisionPolicy(torch.bfloat16, torch.float16)
    pairs = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    cases = [(init_device_mesh("cpu", (size,)), kind, policy) for kind in ("sync", "async") for policy in (plain, bf16)]
    cases += [(pairs, "sync", plain), (pairs["shard"], "sync", plain), (pairs["shard"], "sync", fp16)]
    for mesh, kind, policy in cases:
        stock, own = (gradients(mesh, kind, policy, use) for use in (False, True))
        shards = mesh.size(-1)
        assert any(grad.numel() and grad.abs().max() > 0.01 for grad in stock)
        for one, other in zip(stock, own, strict=True):
            # two ranks: the same bits. More are summed in another order: a few roundings of sums below 100
            torch.testing.assert_close(other, one, rtol=0, atol=0 if shards == 2 else 1e-4)
    with pytest.raises(ValueError, match="no FSDP2 module"):
        use_direct(nn.Linear(2, 2))


@pytest.mark.parametrize("interfaces", ["lo", "lo,lo"])
def test_every_case_on_every_count_of_ranks(tmp_path, interfaces):
    in_world(4, tmp_path, every_group, interfaces)


def test_fsdp2_gets_the_same_gradients(tmp_path):
    in_world(4, tmp_path, fsdp)
