"""What collectives made of send and receive share: the peers of a group, the checks of tensors, how two parts combine.

Ranks are those within the group. A tag of its own keeps the traffic apart from other sends and receives of a program;
calls on one group keep apart because every rank makes them in the same order, as with any collective.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

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
# Of what goes to a lower rank, and + 1 of what goes to a higher one. Others send with 0 unless told otherwise, and all of
# MPI have tags to 32767. A gloo group with two interfaces (GLOO_SOCKET_IFNAME=lo,lo: the same one twice) has two
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
            return self._grouped(into, out)
        works = [
            dist.irecv(tensor, group=self.group, tag=TAG + (peer < self.rank), group_src=peer) for tensor, peer in into
        ]
        works += [
            dist.isend(tensor, group=self.group, tag=TAG + (self.rank < peer), group_dst=peer) for tensor, peer in out
        ]
        return [work for work in works if work is not None]  # None is for those outside the group

    def _grouped(self, into: list[Part], out: list[Part]) -> list[dist.Work]:
        """Begin all as one operation, without which an accelerator's library would send before it receives."""
        parts = [(dist.irecv, *part) for part in into] + [(dist.isend, *part) for part in out]
        return dist.batch_isend_irecv(
            [dist.P2POp(begin, tensor, group=self.group, group_peer=peer) for begin, tensor, peer in parts]
        )


def peers(group: Group) -> Peers:
    """Return the peers of a call. All ranks of a group make their calls on it in the same order."""
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("this rank is not in the group: only its members may call a collective on it")
    return Peers(group, dist.get_rank(group), dist.get_world_size(group))


def wait(works: Iterable[dist.Work]) -> None:
    """Wait for the end of what ``Peers.start`` began."""
    for work in works:
        work.wait()


def flat(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor as a line (elements,) over the same memory; refuse one that has gaps or another order."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} with shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous, which a library "
            f"may corrupt without a word; give {name}.contiguous() and copy the result back"
        )
    return tensor.detach().view(-1)


def combination(op: Op, dtype: torch.dtype) -> Combine:
    """Return how two parts are combined; an average is a sum that is divided at the end.

    Raises ``ValueError`` where the type has no such reduction, as the libraries refuse it.
    """
    name, combine = next(((name, combine) for known, name, combine in REDUCTIONS if op == known), ("", None))
    if combine is None:
        known = ", ".join(name for _, name, _ in REDUCTIONS)
        raise ValueError(f"the reduction {op} is not known here; take one of {known}")
    if name == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"an average of {dtype} is no whole number; take sum and divide, or a floating-point type")
    if dtype.is_complex and name in ("min", "max", "product"):
        raise ValueError(f"{name} of {dtype} is refused, as the libraries do; take sum or avg")
    return combine


def bounds(length: int, parts: int) -> list[tuple[int, int]]:
    """Return where each of ``parts`` pieces of a line begins and ends; their lengths differ by one at most."""
    return [(length * i // parts, length * (i + 1) // parts) for i in range(parts)]


def pieces(line: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Return a line as ``parts`` consecutive pieces (views), some of them empty where it is short."""
    return [line[begin:end] for begin, end in bounds(line.numel(), parts)]
