"""All-reduces made of sends and receives, to set beside the library's own.

``ring`` sends 2(n-1)/n of the data per rank, the least there is, in 2(n-1) hops (Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009). ``tree`` is recursive doubling: log2(n) hops of
all the data, the fewest there are; other counts than powers of two fold the extra ranks onto their neighbours first.
``rs_ag`` is a reduce-scatter and an all-gather by pairwise exchange: as many bytes as the ring in two hops, any number
of ranks without folding, at the price of n-1 messages at once (both: Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH", IJHPCA 19(1), 2005, which has recursive halving and doubling in its
place for powers of two).

All ranks get the same bits. Which order the contributions are combined in is the algorithm's own, so that sums of
fractions differ from the library's by rounding; sums of 16-bit types are kept in the type (``rs_ag``: in fp32).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from benchlib import p2p
from benchlib.direct import SEGMENT_BYTES, Exchange

Algorithm = Callable[[torch.Tensor, p2p.Op, p2p.Group], None]


def ring(tensor: torch.Tensor, op: p2p.Op = dist.ReduceOp.SUM, group: p2p.Group = None) -> None:
    """Reduce ``tensor`` in place over the group, around the ring, in segments that go on as soon as they are combined.

    Raises ``ValueError`` for a tensor that is not contiguous and for a reduction that its type does not have.
    """
    line, combine, ranks = _begin(tensor, op, group)
    before, after = (ranks.rank - 1) % ranks.size, (ranks.rank + 1) % ranks.size
    count = max(1, -(-line.numel() * line.element_size() // (ranks.size * SEGMENT_BYTES)))
    chunks = [p2p.pieces(chunk, count) for chunk in p2p.pieces(line, ranks.size)]
    scratch = [torch.empty_like(max(column, key=torch.numel)) for column in zip(*chunks, strict=True)]

    def start(hop: int, index: int) -> list[dist.Work]:
        send, target = chunks[(ranks.rank - hop) % ranks.size][index], incoming(hop, index)
        return ranks.start([(target, before)], [(send, after)])

    def incoming(hop: int, index: int) -> torch.Tensor:
        target = chunks[(ranks.rank - hop - 1) % ranks.size][index]
        return scratch[index][: target.numel()] if hop < ranks.size - 1 else target

    hops = 2 * (ranks.size - 1)
    works = [start(0, index) for index in range(count)] if hops else []
    for hop in range(hops):
        for index in range(count):
            p2p.wait(works[index])
            if hop < ranks.size - 1:
                target = chunks[(ranks.rank - hop - 1) % ranks.size][index]
                combine(incoming(hop, index), target, out=target)
            if hop + 1 < hops:
                works[index] = start(hop + 1, index)
    _average(line, op, ranks)


def tree(tensor: torch.Tensor, op: p2p.Op = dist.ReduceOp.SUM, group: p2p.Group = None) -> None:
    """Reduce ``tensor`` in place over the group by recursive doubling. Raises as ``ring`` does."""
    line, combine, ranks = _begin(tensor, op, group)
    power = 1 << (ranks.size.bit_length() - 1)
    extra = ranks.size - power  # the first 2 x extra ranks work in pairs: the even one folds onto the odd one
    folded = ranks.rank < 2 * extra
    if folded and ranks.rank % 2 == 0:
        p2p.wait(ranks.start([], [(line, ranks.rank + 1)]))
        p2p.wait(ranks.start([(line, ranks.rank + 1)], []))
    else:
        scratch = torch.empty_like(line) if ranks.size > 1 else line
        if folded:
            p2p.wait(ranks.start([(scratch, ranks.rank - 1)], []))
            combine(scratch, line, out=line)
        place, distance = ranks.rank // 2 if folded else ranks.rank - extra, 1
        while distance < power:
            partner = place ^ distance
            _swap(line, scratch, 2 * partner + 1 if partner < extra else partner + extra, combine, ranks)
            distance *= 2
        if folded:
            p2p.wait(ranks.start([], [(line, ranks.rank - 1)]))
    _average(line, op, ranks)


def rs_ag(tensor: torch.Tensor, op: p2p.Op = dist.ReduceOp.SUM, group: p2p.Group = None) -> None:
    """Reduce ``tensor`` in place over the group by reduce-scatter and all-gather. Raises as ``ring`` does."""
    line, combine, ranks = _begin(tensor, op, group)
    chunks = p2p.pieces(line, ranks.size)
    own = chunks[ranks.rank]
    exchange = Exchange(ranks, chunks, own, combine, op == dist.ReduceOp.AVG)
    exchange.begin()
    exchange.finish()
    p2p.wait(ranks.start([(chunks[peer], peer) for peer in ranks.others], [(own, peer) for peer in ranks.others]))


ALGORITHMS: dict[str, Algorithm] = {"ring": ring, "tree": tree, "rs_ag": rs_ag}


def _begin(tensor: torch.Tensor, op: p2p.Op, group: p2p.Group) -> tuple[torch.Tensor, p2p.Combine, p2p.Peers]:
    return p2p.flat(tensor, "tensor"), p2p.combination(op, tensor.dtype), p2p.peers(group)


def _average(line: torch.Tensor, op: p2p.Op, ranks: p2p.Peers) -> None:
    if op == dist.ReduceOp.AVG:
        line.div_(ranks.size)


def _swap(line: torch.Tensor, scratch: torch.Tensor, peer: int, combine: p2p.Combine, ranks: p2p.Peers) -> None:
    """Exchange ``line`` with a peer and combine it with what comes, the part of the lower rank first on both sides."""
    step = max(1, SEGMENT_BYTES // line.element_size())
    own, theirs = line.split(step), scratch.split(step)
    works = [ranks.start([(there, peer)], [(here, peer)]) for here, there in zip(own, theirs, strict=True)]
    for here, there, work in zip(own, theirs, works, strict=True):
        p2p.wait(work)  # the own part has been sent too, and may be written to
        combine(*((here, there) if ranks.rank < peer else (there, here)), out=here)
