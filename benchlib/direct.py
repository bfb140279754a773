"""All-gather and reduce-scatter made of sends and receives straight out of and into the slices of the tensors.

Every rank exchanges with every other one at once, so (n-1)/n of the larger tensor crosses each way: the least there is
(pairwise exchange; Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
IJHPCA 19(1), 2005). It pays over gloo, whose own reduce-scatter is an all-reduce of the whole input and whose all-gather
makes further copies; nccl and its like have better ones of their own. Where gloo is given the same interface twice
(``GLOO_SOCKET_IFNAME=lo,lo``, on every rank), each direction has a connection and a thread of its own.

The contributions of the ranks are combined in the order of ranks, so that the same inputs give the same bits in every
call and for any way to cut them. Sums of fp16 and bf16 over more than two ranks are kept in fp32 and rounded once.
"""

from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from benchlib import p2p

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
    output: torch.Tensor, input: torch.Tensor, group: p2p.Group = None, async_op: bool = False
) -> dist.Work | None:
    """Write the ``input`` of every rank, in the order of ranks, to ``output`` (ranks x elements of input).

    ``input`` may be this rank's own slice of ``output``. Raises ``ValueError`` before anything is sent where tensors
    are not contiguous, differ in type, do not fit each other or overlap otherwise.
    """
    ranks = p2p.peers(group)
    whole, own = _checked("output", output, "input", input, ranks)
    slices = p2p.pieces(whole, ranks.size)
    works = ranks.start([(slices[peer], peer) for peer in ranks.others], [(own, peer) for peer in ranks.others])
    if own.data_ptr() != slices[ranks.rank].data_ptr():
        slices[ranks.rank].copy_(own)
    return _end(Pending(lambda: p2p.wait(works)), async_op)


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    op: p2p.Op = dist.ReduceOp.SUM,
    group: p2p.Group = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Combine slice r of the ``input`` of all ranks (ranks x elements of output) into the ``output`` of rank r.

    ``output`` may be this rank's own slice of ``input``. The additions of an asynchronous call are made when it is
    waited for; until then it holds ranks - 1 times the memory of ``output`` (none for two ranks). Raises ``ValueError`` as ``all_gather`` does, and for a reduction that the type does not have.
    """
    combine = p2p.combination(op, input.dtype)
    ranks = p2p.peers(group)
    whole, own = _checked("input", input, "output", output, ranks)
    exchange = Exchange(ranks, p2p.pieces(whole, ranks.size), own, combine, op == dist.ReduceOp.AVG)
    exchange.begin(at_once=async_op)
    return _end(Pending(exchange.finish), async_op)


class Exchange:
    """A reduce-scatter in segments: while one is combined, the next ones are under way.

    ``slices`` are what this rank has for each rank, lines whose lengths are the same on all ranks; the result goes to
    ``output``, which may be the own slice. From a single peer it is received right there.
    """

    def __init__(
        self, ranks: p2p.Peers, slices: list[torch.Tensor], output: torch.Tensor, combine: p2p.Combine, average: bool
    ) -> None:
        self.ranks, self.output, self.combine, self.average = ranks, output, combine, average
        self.wide = ranks.size > 2 and combine is torch.add and output.dtype in (torch.float16, torch.bfloat16)
        self.there = ranks.size == 2 and output.data_ptr() != slices[ranks.rank].data_ptr()
        self.step = max(1, SEGMENT_BYTES // output.element_size())
        longest = max(line.numel() for line in slices)
        self.segments = [[line[at : at + self.step] for line in slices] for at in range(0, longest, self.step)]
        self._begun = 0
        self._free: list[torch.Tensor] = []
        self._under_way: deque[tuple[torch.Tensor, list[dist.Work]]] = deque()

    def begin(self, at_once: bool = False) -> None:
        """Put the first segments under way: as many as ``SCRATCH_BYTES`` hold, or all of them ``at_once``.

        A call that is waited for later needs all: ranks that wait for several calls in different orders would wait
        for each other's next segments.
        """
        length = min(self.step, self.output.numel())
        size = (self.ranks.size - 1) * length * self.output.element_size()
        count = len(self.segments)
        if not (at_once or self.there):
            count = min(count, max(2, SCRATCH_BYTES // max(1, size)))
        if not self.there:
            # One by one: an allocator hands blocks of this size out again, and a large one fresh from the system.
            self._free = [self.output.new_empty(self.ranks.size - 1, length) for _ in range(count)]
        for _ in range(count):
            self._post()

    def finish(self) -> None:
        """Combine every segment as it arrives, and put the following ones under way."""
        for index, segment in enumerate(self.segments):
            scratch, works = self._under_way.popleft()
            p2p.wait(works)
            self._combine(segment[self.ranks.rank], scratch, self._target(index))
            if not self.there:
                self._free.append(scratch)
            if self._begun < len(self.segments):
                self._post()

    def _target(self, index: int) -> torch.Tensor:
        return self.output[index * self.step : (index + 1) * self.step]

    def _post(self) -> None:
        segment = self.segments[self._begun]
        scratch = self._target(self._begun).view(1, -1) if self.there else self._free.pop()
        length = segment[self.ranks.rank].numel()
        receives = [(line[:length], peer) for line, peer in zip(scratch, self.ranks.others, strict=True)]
        works = self.ranks.start(receives, [(segment[peer], peer) for peer in self.ranks.others])
        self._under_way.append((scratch, works))
        self._begun += 1

    def _combine(self, own: torch.Tensor, scratch: torch.Tensor, target: torch.Tensor) -> None:
        """Combine the own part and those received in the order of ranks; the own one, too, may be the target."""
        received = [line[: own.numel()] for line in scratch]
        by_rank = dict(zip(self.ranks.others, received, strict=True)) | {self.ranks.rank: own}
        parts = [by_rank[rank] for rank in range(self.ranks.size)]
        if self.wide:
            total = parts[0].float()
            for part in parts[1:]:
                total.add_(part)
            target.copy_(total.div_(len(parts)) if self.average else total)
            return
        if len(parts) == 1:
            target.copy_(parts[0])
            return
        total, spare = parts[0], parts[1 if self.ranks.rank == 0 else 0]  # received, and not needed again
        for part in parts[1:-1]:
            total = self.combine(total, part, out=spare)
        self.combine(total, parts[-1], out=target)
        if self.average:
            target.div_(len(parts))


def _end(work: Pending, async_op: bool) -> dist.Work | None:
    if async_op:
        return work
    work.wait()
    return None


def _checked(
    large_name: str, large: torch.Tensor, small_name: str, small: torch.Tensor, ranks: p2p.Peers
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors as lines; ``small`` is one of the slices of ``large`` in size."""
    whole, own = p2p.flat(large, large_name), p2p.flat(small, small_name)
    if whole.dtype != own.dtype or whole.device != own.device:
        raise ValueError(
            f"{large_name} is {whole.dtype} on {whole.device}, {small_name} {own.dtype} on {own.device}; make them alike"
        )
    if whole.numel() != ranks.size * own.numel():
        raise ValueError(
            f"{large_name} has {whole.numel()} elements, {small_name} {own.numel()}; over {ranks.size} ranks "
            f"{large_name} takes {ranks.size * own.numel()}"
        )
    offset = own.data_ptr() - whole.data_ptr()
    size = own.numel() * own.element_size()
    if -size < offset < ranks.size * size and offset != ranks.rank * size:
        raise ValueError(
            f"{small_name} overlaps {large_name} but is not slice {ranks.rank} of it; give that slice or other memory"
        )
    return whole, own
