"""Collectives made of sends and receives: for gloo, whose own are slow, and to set beside any library's own.

- ``all_gather`` and ``reduce_scatter`` exchange straight out of and into the slices of the tensors. Every rank exchanges
  with every other one at once, so (n-1)/n of the larger tensor crosses each way: the least there is (pairwise exchange;
  Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005).
  It pays over gloo, whose reduce-scatter is an all-reduce of the whole input and whose all-gather makes further copies;
  nccl and its like have better ones of their own.
- ``ALGORITHMS`` are all-reduces: ``ring``, ``tree``, ``rs_ag``.
- ``use_direct`` lets FSDP2 exchange by the first two.

Ranks are those within the group. A tag of its own keeps the traffic apart from other sends and receives of a program;
calls on one group keep apart because every rank makes them in the same order, as with any collective.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Group = dist.ProcessGroup | None  # None is the default group
Op = dist.ReduceOp | dist.ReduceOp.RedOpType
Combine = Callable[..., torch.Tensor]  # (a, b, *, out)
Part = tuple[torch.Tensor, int]  # a contiguous tensor and the peer that it goes to or comes from

REDUCTIONS: tuple[tuple[Op, str, Combine], ...] = (
    (dist.ReduceOp.SUM, "sum", torch.add),
    (dist.ReduceOp.AVG, "avg", torch.add),
    (dist.ReduceOp.MIN, "min", torch.minimum),
    (dist.ReduceOp.MAX, "max", torch.maximum),
    (dist.ReduceOp.PRODUCT, "product", torch.mul),
)
# Of what goes to a lower rank, and + 1 of what goes to a higher one. Others send with 0 by default, and every MPI has tags
# up to 32767. A gloo group with two interfaces (GLOO_SOCKET_IFNAME=lo,lo on every rank: the same one twice) has two
# connections and two threads, and takes one for odd and one for even tags: so each direction has its own.
TAG = 23156


@dataclass(frozen=True)
class Peers:
    """The ranks of a group as one call sees them: ``rank`` is the own one of ``size``, within the group."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @property
    def others(self) -> list[int]:
        """The other ranks, the next one first, so that not all ranks begin with the same one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def start(self, receives: Iterable[Part], sends: Iterable[Part]) -> list[dist.Work]:
        """Begin to receive and to send; the tensors must stay as they are until the works are waited for.

        What goes to one peer arrives in the order in which it was begun. Empty tensors are left out on both sides.
        """
        into = [part for part in receives if part[0].numel()]
        out = [part for part in sends if part[0].numel()]
        if any(tensor.device.type != "cpu" for tensor, _ in (into + out)[:1]):
            # As one operation, without which an accelerator's library would send before it receives.
            both = [(dist.irecv, *part) for part in into] + [(dist.isend, *part) for part in out]
            return dist.batch_isend_irecv(
                [dist.P2POp(begin, tensor, group=self.group, group_peer=peer) for begin, tensor, peer in both]
            )
        group, rank = self.group, self.rank
        works = [dist.irecv(tensor, group=group, tag=TAG + (peer < rank), group_src=peer) for tensor, peer in into]
        works += [dist.isend(tensor, group=group, tag=TAG + (rank < peer), group_dst=peer) for tensor, peer in out]
        return [work for work in works if work is not None]  # None is for those outside the group


def peers(group: Group) -> Peers:
    """Return the peers of a call. All ranks of a group make their calls on it in the same order."""
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("this rank is not in the group: only its members may call a collective on it")
    return Peers(group, dist.get_rank(group), dist.get_world_size(group))


def wait_all(works: Iterable[dist.Work]) -> None:
    for work in works:
        work.wait()


def flat(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor as a line (elements,) over the same memory; refuse one that has gaps or another order."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} with shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous, and a library "
            f"may silently corrupt it; pass {name}.contiguous() and copy the result back"
        )
    return tensor.detach().view(-1)


def combination(op: Op, dtype: torch.dtype) -> Combine:
    """Return how two parts are combined; an average is a sum that is divided at the end.

    Raises ``ValueError`` where the type has no such reduction, as the libraries refuse it.
    """
    name, combine = next(((name, combine) for supported, name, combine in REDUCTIONS if op == supported), ("", None))
    if combine is None:
        raise ValueError(
            f"the reduction {op} is not supported; use one of {', '.join(name for _, name, _ in REDUCTIONS)}"
        )
    if name == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        whole = f"an average of {dtype} need not be a whole number"
        raise ValueError(f"{whole}; use sum and divide, or a floating-point type")
    return combine


# All-gather and reduce-scatter. The contributions of the ranks are combined in the order of ranks, so that the same inputs
# give the same bits in every call and for any way to cut them. Sums of fp16 and bf16 over more than two ranks are kept in
# fp32 and rounded once.

SEGMENT_BYTES = 4 << 20  # received at once: smaller ones cost more wake-ups than the overlap gains (measured)
SCRATCH_BYTES = 16 << 20  # for what is under way from more than one peer: more is slower, for its pages are new


class Pending(dist.Work):
    """A collective that has begun; ``wait`` brings it to its end."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end, as long as the group's own timeout lets its sends and receives take."""
        if self._finish is not None:
            self._finish()  # after an error it is not complete
            self._finish = None
        return True

    def is_completed(self) -> bool:
        """Return whether it has been waited for: the last additions are made by ``wait``."""
        return self._finish is None


def all_gather(
    output: torch.Tensor, input: torch.Tensor, group: Group = None, async_op: bool = False
) -> dist.Work | None:
    """Write the ``input`` of every rank, in the order of ranks, to ``output`` (ranks x elements of input).

    ``input`` may be this rank's own slice of ``output``. Raises ``ValueError`` before anything is sent where tensors
    are not contiguous, differ in type or do not fit each other.
    """
    ranks = peers(group)
    whole, own = _checked("output", output, "input", input, ranks)
    slices = whole.tensor_split(ranks.size)
    works = ranks.start([(slices[peer], peer) for peer in ranks.others], [(own, peer) for peer in ranks.others])
    if own.data_ptr() != slices[ranks.rank].data_ptr():
        slices[ranks.rank].copy_(own)
    return _end(Pending(lambda: wait_all(works)), async_op)


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Op = dist.ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Combine slice r of the ``input`` of all ranks (ranks x elements of output) into the ``output`` of rank r.

    ``output`` may be this rank's own slice of ``input``. The additions of an asynchronous call are made when it is
    waited for; until then it holds ranks - 1 times the memory of ``output`` (none for two ranks). Raises ``ValueError``
    as ``all_gather`` does, and for a reduction that the type does not have.
    """
    ranks = peers(group)
    whole, own = _checked("input", input, "output", output, ranks)
    return _end(Pending(begin_scatter(ranks, whole.tensor_split(ranks.size), own, op, async_op)), async_op)


def begin_scatter(
    ranks: Peers, slices: Sequence[torch.Tensor], output: torch.Tensor, op: Op, at_once: bool = False
) -> Callable[[], None]:
    """Begin a reduce-scatter in segments and return what ends it: while one is combined, the next ones are under way.

    ``slices`` are what this rank has for each rank, lines whose lengths are the same on all ranks; the result goes to
    ``output``, which may be the own slice. As many segments begin as ``SCRATCH_BYTES`` hold, or all of them ``at_once``. A
    call that is waited for later needs all: ranks that wait for several calls in different orders would wait for each
    other's next segments.
    """
    combine, average = combination(op, output.dtype), op == dist.ReduceOp.AVG
    # From a single peer it is received right where it is combined.
    direct = ranks.size == 2 and output.data_ptr() != slices[ranks.rank].data_ptr()
    step = max(1, SEGMENT_BYTES // output.element_size())
    longest = max(line.numel() for line in slices)
    segments = [[line[at : at + step] for line in slices] for at in range(0, longest, step)]
    targets = [output[at : at + step] for at in range(0, longest, step)]
    length = min(step, output.numel())
    count = len(segments)
    if not (at_once or direct):
        count = min(count, max(2, SCRATCH_BYTES // max(1, (ranks.size - 1) * length * output.element_size())))
    # One by one: an allocator hands blocks of this size out again, and a large one fresh from the system.
    free = [] if direct else [output.new_empty(ranks.size - 1, length) for _ in range(count)]
    under_way: deque[tuple[torch.Tensor, list[dist.Work]]] = deque()

    def post(index: int) -> None:
        segment = segments[index]
        scratch = targets[index].view(1, -1) if direct else free.pop()
        size = segment[ranks.rank].numel()
        receives = [(line[:size], peer) for line, peer in zip(scratch, ranks.others, strict=True)]
        under_way.append((scratch, ranks.start(receives, [(segment[peer], peer) for peer in ranks.others])))

    def finish() -> None:
        for index, (segment, target) in enumerate(zip(segments, targets, strict=True)):
            scratch, works = under_way.popleft()
            wait_all(works)
            own = segment[ranks.rank]
            parts = dict(zip(ranks.others, (line[: own.numel()] for line in scratch), strict=True)) | {ranks.rank: own}
            _combine([parts[rank] for rank in range(ranks.size)], ranks.rank, target, combine, average)
            if not direct:
                free.append(scratch)
            if index + count < len(segments):
                post(index + count)

    for index in range(count):
        post(index)
    return finish


def _combine(parts: list[torch.Tensor], rank: int, target: torch.Tensor, combine: Combine, average: bool) -> None:
    """Combine the parts in the order of ranks; that of ``rank`` may be the target, the others are not needed again."""
    if len(parts) > 2 and combine is torch.add and target.dtype in (torch.float16, torch.bfloat16):
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        target.copy_(total.div_(len(parts)) if average else total)
        return
    if len(parts) == 1:
        target.copy_(parts[0])
        return
    total, spare = parts[0], parts[1 if rank == 0 else 0]
    for part in parts[1:-1]:
        total = combine(total, part, out=spare)
    combine(total, parts[-1], out=target)
    if average:
        target.div_(len(parts))


def _end(work: Pending, async_op: bool) -> dist.Work | None:
    if async_op:
        return work
    work.wait()
    return None


def _checked(
    large_name: str, large: torch.Tensor, small_name: str, small: torch.Tensor, ranks: Peers
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors as lines; ``small`` is one of the slices of ``large`` in size."""
    whole, own = flat(large, large_name), flat(small, small_name)
    if whole.dtype != own.dtype or whole.device != own.device:
        kinds = f"{large_name} is {whole.dtype} on {whole.device}, {small_name} {own.dtype} on {own.device}"
        raise ValueError(f"{kinds}; make them alike")
    if whole.numel() != ranks.size * own.numel():
        sizes = f"{large_name} has {whole.numel()} elements, {small_name} {own.numel()}"
        raise ValueError(f"{sizes}; over {ranks.size} ranks {large_name} takes {ranks.size * own.numel()}")
    return whole, own


# All-reduces. All ranks get the same bits. Which order the contributions are combined in is the algorithm's own, so that
# sums of fractions differ from the library's by rounding; sums of 16-bit types are kept in the type (``rs_ag``: in fp32).


def ring(tensor: torch.Tensor, op: Op = dist.ReduceOp.SUM, group: Group = None) -> None:
    """Reduce ``tensor`` in place over the group, around the ring, in segments that go on as soon as they are combined.

    Sends 2(n-1)/n of the data per rank, the least there is, in 2(n-1) hops (Patarasuk and Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009). Raises ``ValueError`` for a tensor that is not contiguous and for a reduction that its type does not have.
    """
    line, combine, ranks = _begin(tensor, op, group)
    before, after = (ranks.rank - 1) % ranks.size, (ranks.rank + 1) % ranks.size
    count = max(1, -(-line.numel() * line.element_size() // (ranks.size * SEGMENT_BYTES)))
    chunks = [chunk.tensor_split(count) for chunk in line.tensor_split(ranks.size)]
    scratch = [torch.empty_like(max(column, key=torch.numel)) for column in zip(*chunks, strict=True)]
    hops, reducing = 2 * (ranks.size - 1), ranks.size - 1

    def target(hop: int, index: int) -> torch.Tensor:
        """Return the part that a hop is about; it comes from the rank before."""
        return chunks[(ranks.rank - hop - 1) % ranks.size][index]

    def incoming(hop: int, index: int) -> torch.Tensor:
        part = target(hop, index)
        return scratch[index][: part.numel()] if hop < reducing else part

    def start(hop: int, index: int) -> list[dist.Work]:
        return ranks.start([(incoming(hop, index), before)], [(target(hop - 1, index), after)])

    works = [start(0, index) for index in range(count)] if hops else []
    for hop in range(hops):
        for index in range(count):
            wait_all(works[index])
            if hop < reducing:
                part = target(hop, index)
                combine(incoming(hop, index), part, out=part)
            if hop + 1 < hops:
                works[index] = start(hop + 1, index)
    _average(line, op, ranks)


def tree(tensor: torch.Tensor, op: Op = dist.ReduceOp.SUM, group: Group = None) -> None:
    """Reduce ``tensor`` in place over the group by recursive doubling. Raises as ``ring`` does.

    log2(n) hops of all the data, the fewest there are; other counts than powers of two fold the extra ranks onto their
    neighbours first (Thakur, Rabenseifner and Gropp).
    """
    line, combine, ranks = _begin(tensor, op, group)
    power = 1 << (ranks.size.bit_length() - 1)
    extra = ranks.size - power  # the first 2 x extra ranks work in pairs: the even one folds onto the odd one
    folded = ranks.rank < 2 * extra
    if folded and ranks.rank % 2 == 0:
        wait_all(ranks.start([], [(line, ranks.rank + 1)]))
        wait_all(ranks.start([(line, ranks.rank + 1)], []))
    else:
        scratch = torch.empty_like(line) if ranks.size > 1 else line
        if folded:
            wait_all(ranks.start([(scratch, ranks.rank - 1)], []))
            combine(scratch, line, out=line)
        place, distance = ranks.rank // 2 if folded else ranks.rank - extra, 1
        while distance < power:
            partner = place ^ distance
            _swap(line, scratch, 2 * partner + 1 if partner < extra else partner + extra, combine, ranks)
            distance *= 2
        if folded:
            wait_all(ranks.start([], [(line, ranks.rank - 1)]))
    _average(line, op, ranks)


def rs_ag(tensor: torch.Tensor, op: Op = dist.ReduceOp.SUM, group: Group = None) -> None:
    """Reduce ``tensor`` in place over the group by reduce-scatter and all-gather. Raises as ``ring`` does.

    As many bytes as the ring in two hops, any number of ranks without folding, at the price of n-1 messages at once.
    Thakur, Rabenseifner and Gropp have recursive halving and doubling in its place for powers of two.
    """
    line, ranks = flat(tensor, "tensor"), peers(group)
    chunks = line.tensor_split(ranks.size)
    own = chunks[ranks.rank]
    begin_scatter(ranks, chunks, own, op)()
    wait_all(ranks.start([(chunks[peer], peer) for peer in ranks.others], [(own, peer) for peer in ranks.others]))


ALGORITHMS: dict[str, Callable[[torch.Tensor, Op, Group], None]] = {"ring": ring, "tree": tree, "rs_ag": rs_ag}


def _begin(tensor: torch.Tensor, op: Op, group: Group) -> tuple[torch.Tensor, Combine, Peers]:
    return flat(tensor, "tensor"), combination(op, tensor.dtype), peers(group)


def _average(line: torch.Tensor, op: Op, ranks: Peers) -> None:
    if op == dist.ReduceOp.AVG:
        line.div_(ranks.size)


def _swap(line: torch.Tensor, scratch: torch.Tensor, peer: int, combine: Combine, ranks: Peers) -> None:
    """Exchange ``line`` with a peer and combine it with what comes, the part of the lower rank first on both sides."""
    step = max(1, SEGMENT_BYTES // line.element_size())
    own, theirs = line.split(step), scratch.split(step)
    works = [ranks.start([(there, peer)], [(here, peer)]) for here, there in zip(own, theirs, strict=True)]
    for here, there, work in zip(own, theirs, works, strict=True):
        wait_all(work)  # the own part has been sent too, and may be written to
        combine(*((here, there) if ranks.rank < peer else (there, here)), out=here)


class Direct:
    """An exchange as FSDP2 takes it: ``torch.distributed.fsdp._fully_shard._fsdp_api`` names the interface, in a private module."""

    def __init__(self, exchange: Callable[..., dist.Work | None]) -> None:
        self.exchange = exchange

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor (the product of ``size``,), a new one: the gradients of a step are views of it."""
        return torch.empty(math.prod(size), dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any) -> dist.Work | None:
        """Exchange. FSDP2 passes its slice of what it gathers as the input, so nothing is copied."""
        return self.exchange(output_tensor, input_tensor, **options)


def use_direct(model: nn.Module) -> int:
    """Let all FSDP2 modules of ``model``, itself included, exchange by the functions above; return how many there are.

    Everything else stays FSDP2's: sharding, mixed precision, gradient accumulation, and with a mesh of two dimensions
    (HSDP) the all-reduce between replicas, which goes through the library as before. A gradient divide factor that is not
    the number of ranks needs ``set_force_sum_reduction_for_comms(True)``: the reduction that FSDP2 takes for it otherwise
    is nccl's alone, and is refused here as gloo refuses it.

    Raises ``ValueError`` where there is none, and torch's own for one whose parameters lie on several meshes.
    """
    # It brings DTensor and sympy, which ranks without FSDP2 need not wait for.
    from torch.distributed.fsdp import FSDPModule

    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError("the model has no FSDP2 module; shard it first (torch.distributed.fsdp.fully_shard)")
    for module in modules:
        module.set_custom_all_gather(Direct(all_gather))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(Direct(reduce_scatter))  # type: ignore[arg-type]
    return len(modules)
