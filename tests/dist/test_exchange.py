"""Exchanges of the kit's own against a computation in one place and against the library's; FSDP2 exchanges by them."""

import itertools

import pytest
import torch
import torch.distributed as dist
from library_cases import DTYPES, TOGETHER, number, same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from worlds import in_world

from benchlib.workloads.collectives import exchange
from benchlib.workloads.collectives.exchange import ALGORITHMS, all_gather, reduce_scatter, use_direct

Op = dist.ReduceOp
SEGMENT_BYTES = 200  # so that short tensors too go in several segments
LONG = 2 * SEGMENT_BYTES // 4 + 3  # three segments of fp32, the last one of three elements


def reduces(rank, size, group):
    """All-reduces by every algorithm, and reduce-scatters out of place and in place; three ranks have every type."""
    dtypes = DTYPES if size == 3 else (torch.float32,)
    lengths = [(Op.SUM, torch.uint8, length) for length in (0, 1, 2, 3, 7)]
    for op, dtype, length in [*itertools.product(TOGETHER, dtypes, (LONG,)), *lengths]:
        if op == Op.AVG and not dtype.is_floating_point:
            continue
        own = number(rank, size * length).to(dtype)
        expected = TOGETHER[op](torch.stack([number(other, size * length) for other in range(size)])).to(dtype)
        for algorithm in ALGORITHMS.values():
            tensor = own.clone()
            algorithm(tensor, op, group)
            same((tensor, expected))
        whole, output = own.clone(), torch.full((length,), 9, dtype=dtype)
        assert reduce_scatter(output, whole, op, group) is None
        same((output, expected.chunk(size)[rank]), (whole, own))
        reduce_scatter(whole.chunk(size)[rank], whole, op, group)  # in place
        own.chunk(size)[rank].copy_(output)
        same((whole, own))


def gathers(rank, size, group):
    for dtype, length in itertools.product(DTYPES if size == 3 else (torch.float32,), (0, 1, 5, 301)):
        own = number(rank, length).to(dtype)
        expected = torch.cat([number(other, length) for other in range(size)]).to(dtype)
        output, in_place = torch.full_like(expected, 9), torch.full_like(expected, 9)
        all_gather(output, own, group)
        mine = in_place.chunk(size)[rank]
        mine.copy_(own)
        all_gather(in_place, mine, group)
        same((output, expected), (in_place, expected))


def same_on_all(tensor, size, group):
    copies = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(copies, tensor, group=group)
    return len({bytes(copy.numpy()) for copy in copies}) == 1


def fractions(rank, size, group):
    """Sums differ from the exact ones by rounding alone, and not between ranks."""
    own = torch.randn(size * 503, generator=torch.Generator().manual_seed(rank))
    parts = [torch.randn(size * 503, generator=torch.Generator().manual_seed(other)).double() for other in range(size)]
    for algorithm, op in itertools.product(ALGORITHMS.values(), (Op.SUM, Op.AVG)):
        tensor = own.clone()
        algorithm(tensor, op, group)
        exactly = sum(parts) / (size if op == Op.AVG else 1)
        torch.testing.assert_close(tensor.double(), exactly, rtol=1e-6, atol=2e-6)
        assert same_on_all(tensor, size, group)
    for op, dtype in itertools.product((Op.SUM, Op.AVG, Op.MAX), (torch.float32, torch.bfloat16)):
        mine, theirs = torch.empty(503, dtype=dtype), torch.empty(503, dtype=dtype)
        reduce_scatter(mine, own.to(dtype), op, group)
        dist.reduce_scatter(theirs, list(own.to(dtype).split(503)), op, group)
        # Two contributions have one order, so the bits are the library's; more: a few steps of the type below 8.
        near = 0 if size <= 2 or op == Op.MAX else {torch.float32: 2e-6, torch.bfloat16: 0.1}[dtype]
        torch.testing.assert_close(mine, theirs, rtol=0, atol=near)


def rank_order(rank, size, group):
    """What no order but that of the ranks gives: 1e8 + 1 loses the 1 in fp32; bf16 keeps its sums in fp32."""
    output, value = torch.empty(3), [1e8, -1e8, 1.0, 1.0, 1.0, 1.0][rank]
    reduce_scatter(output, torch.full((3 * size,), value), Op.SUM, group)
    assert output.tolist() == [size - 2.0 if size > 1 else 1e8] * 3
    bf16 = torch.empty(3, dtype=torch.bfloat16)
    reduce_scatter(bf16, torch.full((3 * size,), 256.0 if rank == 0 else 1.0).bfloat16(), Op.SUM, group)
    assert bf16.tolist() == torch.full((3,), 255.0 + size).bfloat16().tolist()  # in bf16 alone: 256


def under_way_at_once(rank, size, group):
    """Asynchronous calls keep apart from each other and from other sends, in whatever order a rank waits for them."""

    def others():
        receive = dist.P2POp(dist.irecv, heard, group=group, group_peer=(rank - 1) % size)
        send = dist.P2POp(dist.isend, torch.full((7,), 7.0 + rank), group=group, group_peer=(rank + 1) % size)
        return dist.batch_isend_irecv([receive, send])

    heard, gathered = torch.empty(7), torch.empty(size)
    before = others() if rank % 2 else []
    outputs = [torch.empty(LONG) for _ in range(3)]
    works = [
        reduce_scatter(output, torch.full((size * LONG,), float(rank + step)), Op.SUM, group, async_op=True)
        for step, output in enumerate(outputs)
    ]
    works.append(all_gather(gathered, torch.tensor([float(rank)]), group, async_op=True))
    assert not works[0].is_completed()
    for work in [*(before or others()), *(works if rank % 2 else reversed(works))]:
        assert work.wait()
    assert works[0].is_completed()
    assert gathered.tolist() == list(range(size))
    assert heard.tolist() == [7.0 + (rank - 1) % size] * 7
    for step, output in enumerate(outputs):
        assert output.unique().tolist() == [sum(range(size)) + size * step]


def refused(rank, size, group):
    whole, own, gap = torch.zeros(4 * size), torch.zeros(4), torch.zeros(8 * size)[::2]
    one_more = rf"output has {4 * size + 1} elements, input 4; .*takes {4 * size}$"
    calls = [
        (all_gather, (gap, own), r"output.*not contiguous.*output\.contiguous\(\)"),
        (all_gather, (torch.zeros(4 * size + 1), own), one_more),
        (reduce_scatter, (own.long(), whole.long(), Op.AVG), "an average of"),
        (ALGORITHMS["ring"], (whole, Op.BAND), "use one of sum, avg, min"),
    ]
    for function, arguments, reason in calls:
        with pytest.raises(ValueError, match=reason):
            function(*arguments, group=group)


def every_group(rank, size):
    exchange.SEGMENT_BYTES = SEGMENT_BYTES
    exchange.SCRATCH_BYTES = 1  # two segments under way, the third one waits for memory
    for count in range(1, size + 1):
        members = list(range(size - count, size))  # whose global ranks are not those in the group
        group = dist.new_group(members)
        if rank in members:
            place = members.index(rank)
            for case in (gathers, reduces, fractions, rank_order, *((under_way_at_once, refused) if count > 1 else ())):
                case(place, count, group)
        dist.barrier()


@pytest.mark.parametrize(("ranks", "interfaces"), [(6, "lo"), (3, "lo,lo")])
def test_every_case_on_every_count_of_ranks(tmp_path, ranks, interfaces):
    in_world(ranks, tmp_path, every_group, interfaces)


def gradients(mesh, ahead, policy, use):
    """Three steps of a model whose layers do not divide by the number of ranks; the gradients of all steps."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(17, 5, bias=False), nn.Tanh(), nn.Linear(5, 3))
    model = nn.Sequential(nn.Linear(13, 17), nn.Tanh(), inner)
    fully_shard(inner, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if use:
        assert use_direct(model) == 2
    if ahead:
        model.set_reshard_after_forward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads = []
    for step in range(3):
        x = torch.randn(6, 13, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        if ahead:
            model.unshard(async_op=True)
        model(x).square().sum().backward()
        grads += [parameter.grad.to_local().clone() for parameter in model.parameters()]
        optimizer.step()
    return grads


def fsdp(rank, size):
    plain, bf16 = MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fp16 = MixedPrecisionPolicy(torch.bfloat16, torch.float16)
    pairs = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    cases = [(init_device_mesh("cpu", (size,)), ahead, policy) for ahead in (False, True) for policy in (plain, bf16)]
    cases += [(pairs, False, plain), (pairs["shard"], False, plain), (pairs["shard"], False, fp16)]
    for mesh, ahead, policy in cases:
        stock, own = (gradients(mesh, ahead, policy, use) for use in (False, True))
        assert any(grad.numel() and grad.abs().max() > 0.01 for grad in stock)
        for theirs, ours in zip(stock, own, strict=True):
            # two ranks: the same bits. More are summed in another order: a few roundings of sums below 100
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if mesh.size(-1) == 2 else 1e-4)
    with pytest.raises(ValueError, match="no FSDP2 module"):
        use_direct(nn.Linear(2, 2))


def test_fsdp2_gets_the_same_gradients(tmp_path):
    in_world(4, tmp_path, fsdp)
