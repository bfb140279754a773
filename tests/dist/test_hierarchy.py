"""The exchange between groups of ranks: against sums in one place, against gloo alone, and in DDP."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from library_cases import TOGETHER, number, same
from torch.nn.parallel import DistributedDataParallel
from worlds import in_world

from benchlib.core.errors import BackendUnavailable, UserError
from benchlib.runtime.timing import Clock, GradientExchange, sum_hook
from benchlib.workloads.collectives import hierarchy
from benchlib.workloads.collectives.exchange import ALGORITHMS
from benchlib.workloads.collectives.hierarchy import Member, agree, layout

# Groups by rank, and whether gloo's all-reduce by recursive doubling adds in the same order.
LAYOUTS = {"aabb": True, "abab": False, "aab": True, "aba": False, "aaab": False, "abcd": False, "aaaa": False}


def noise(rank, length=1003):
    return torch.randn(length, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def in_order(groups):
    """Add up each group by itself, then the groups; exact where no group and not their number exceeds two."""
    sums = [sum((noise(rank) for rank in ranks[1:]), noise(ranks[0])) for ranks in groups]
    return sum(sums[1:], sums[0]), max(len(groups), *map(len, groups)) <= 2


def sums(group, rank, doubling):
    own = noise(rank)
    works = []
    for _ in range(3):  # several at once, as buckets of gradients are
        tensor = own.clone()
        works.append((tensor, dist.all_reduce(tensor, group=group, async_op=True)))
    for tensor, work in reversed(works):
        (future,) = work.get_future().wait()
        assert future is tensor and torch.equal(tensor, works[0][0])
    total, over_gloo = works[0][0], own.clone()
    expected, exact = in_order(group.groups)
    group.flat_allreduce(over_gloo).wait()
    torch.testing.assert_close(total, expected, rtol=0, atol=0 if exact else 1e-12)
    torch.testing.assert_close(total, over_gloo, rtol=0, atol=1e-12)
    if doubling:
        ALGORITHMS["tree"](own, group=group)
        assert torch.equal(own, total)
    copies = [torch.empty_like(total) for _ in range(group.size())]
    dist.all_gather(copies, total, group=group)
    assert all(torch.equal(copy, total) for copy in copies)


def reductions(group, rank, size):
    """The types and reductions that library_cases asks of a library, and objects, which go over gloo."""
    for (op, together), dtype in itertools.product(TOGETHER.items(), (torch.float32, torch.bfloat16, torch.int64)):
        tensor = number(rank, 501).to(dtype)
        if op == dist.ReduceOp.AVG and dtype == torch.int64:
            with pytest.raises(ValueError, match="an average of"):
                dist.all_reduce(tensor, op, group=group)
            continue
        dist.all_reduce(tensor, op, group=group)
        same((tensor, together(torch.stack([number(other, 501) for other in range(size)])).to(dtype)))
    dist.all_reduce(torch.empty(0), group=group)
    with pytest.raises(ValueError, match="not contiguous"):
        dist.all_reduce(torch.ones(4, 4)[:, ::2], group=group)
    objects = [None] * size
    dist.all_gather_object(objects, rank, group=group)
    assert objects == list(range(size))


def gradients(rank, size):
    """DDP's buckets through the hook of the training: the gradient is that of one process on all samples."""

    def model():
        torch.manual_seed(5)
        return torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 7)).double()

    samples = torch.randn(3 * size, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exchange = GradientExchange(Clock(torch.device("cpu")))
    ddp, alone = DistributedDataParallel(model(), bucket_cap_mb=0.001), model()
    ddp.register_comm_hook(exchange, sum_hook)
    for _ in range(2):  # after its first pass DDP cuts the buckets anew
        exchange.take()
        ddp.zero_grad()
        ddp(samples[3 * rank : 3 * rank + 3]).square().sum().backward()
    assert len(exchange.intervals) > 1 and all(end >= begin for begin, end, _ in exchange.intervals)
    alone(samples).square().sum().backward()
    for mine, theirs in zip(ddp.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def every_layout(folder, rank, size):
    hierarchy.load()
    hierarchy.SEGMENT_BYTES = 1000  # 125 elements of fp64
    for names, doubling in LAYOUTS.items():
        ranks = list(range(len(names)))
        mine = Member(names[rank], "gloo") if rank in ranks else None
        group = dist.new_group(ranks, backend=hierarchy.BACKEND, pg_options=mine)
        if mine is not None:
            assert group.groups == [[r for r in ranks if names[r] == each] for each in dict.fromkeys(names)]
            sums(group, rank, doubling)
            reductions(group, rank, len(names))
        dist.barrier()
    with pytest.raises(UserError, match="start the run with collective=hierarchical"):
        dist.new_group(backend=hierarchy.BACKEND)
    dist.destroy_process_group()
    options = {"rank": rank, "world_size": size, "pg_options": Member("abab"[rank], "gloo")}
    dist.init_process_group(hierarchy.BACKEND, init_method=f"file://{folder}/groups", **options)
    gradients(rank, size)
    some = dist.new_group([1, 2, 3])  # of the default group's members
    assert rank == 0 or some.groups == [[0, 2], [1]]


def test_every_layout_of_groups(tmp_path):
    in_world(4, tmp_path, partial(every_layout, tmp_path))


def test_a_rank_without_a_group_is_named_on_every_rank():
    reason = "collective library nccl is not available: this torch is built without nccl"
    cases = {
        BackendUnavailable: ([Member("gloo", "gloo"), Member("cuda nccl", "cuda nccl", reason)], f"rank 1 has no group .*{reason}"),
        UserError: ([Member("a", "gloo"), Member("a", "cuda nccl 2.27.3")], "group a has rank 0 with gloo and rank 1 with cuda nccl"),
    }  # fmt: skip
    for kind, (members, words) in cases.items():
        store = dist.HashStore()

        with ThreadPoolExecutor(2) as threads:
            ends = [threads.submit(agree, store, rank, 2, mine) for rank, mine in enumerate(members)]
        for end in ends:
            with pytest.raises(kind, match=words):
                end.result()


def test_ranks_are_grouped_by_what_they_can_talk_with():
    assert hierarchy.member("cpu") == Member("gloo", "gloo")
    assert hierarchy.member("cpu", "b") == Member("b", "gloo")
    assert "it takes those of cpu and cuda" in hierarchy.member("xpu").missing
    vendors = [Member(name, name) for name in ("cuda nccl 2.27.3", "rocm nccl 2.22.3", "cuda nccl 2.27.3", "gloo")]
    assert layout(vendors) == "cuda nccl 2.27.3: ranks 0, 2; rocm nccl 2.22.3: rank 1; gloo: rank 3"
