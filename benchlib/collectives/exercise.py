"""One thing that is timed: an operation in one of its variants, with its data, ready to be run and checked again and again.

Before every run the output is filled with the opposite of every expected bit, so that nothing stale can pass.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from benchlib import direct
from benchlib.algorithms import ALGORITHMS
from benchlib.collectives import patterns
from benchlib.collectives.cases import Case
from benchlib.collectives.ops import OPS, REDUCTIONS, Data, Op, Place, require_contiguous

# An operation by other means than the library's: (give, get, reduction, place).
Way = Callable[[torch.Tensor, torch.Tensor, str, Place], Any]


class Timed(Protocol):
    """What ``measure.take`` can time. ``bytes`` is S."""

    @property
    def bytes(self) -> int:
        """S: the bytes of the larger side."""

    @property
    def is_limit(self) -> bool:
        """Whether it is what operations are held against: a planted slow-down is not of it."""

    def restore(self) -> None:
        """Make everything ready for the next run; not timed."""

    def run(self) -> None:
        """Do the work, to its end on this rank."""

    def check(self) -> tuple[int, int]:
        """Return the wrong and the checked elements of the last run on this rank."""


@dataclass
class Exercise:
    """A case on this rank, with its tensors. ``fault`` alters one element of every result, to test that it is found."""

    case: Case
    place: Place
    fault: bool = False
    operation: Op | None = None  # None: the one of the case's name
    first_wrong: str = field(default="", init=False)
    is_limit: bool = field(default=False, init=False)
    _give: torch.Tensor = field(init=False)
    _get: torch.Tensor = field(init=False)
    _data: Data = field(init=False)

    def __post_init__(self) -> None:
        case, at = self.case, self.place
        self.op = self.operation or OPS[case.operation]
        self.elements = self.op.elements(case.bytes, case.dtype, at.ranks) if case.operation != "barrier" else 0
        self._data = self.op.data(case.dtype, case.reduction, self.elements, at)
        self._give, self._get = self._buffers()

    @property
    def bytes(self) -> int:
        """S: the bytes that the larger side really has."""
        return self.elements * patterns.DTYPES[self.case.dtype].itemsize

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the operation reads and what it writes; in place they share memory."""
        op, at, part = self.op, self.place, self.elements // self.place.ranks
        given = part if op.parts_got and not op.parts_given else self.elements
        got = part if op.parts_given and not op.parts_got else self.elements

        def empty(elements: int) -> torch.Tensor:
            return torch.zeros(elements, dtype=patterns.DTYPES[self.case.dtype], device=at.device)

        if not self.case.in_place:
            get = empty(got)
            # Whoever gives nothing (not the root of a broadcast) has nothing to copy either.
            return (empty(given) if self._data.give is not None else get if given == got else empty(given)), get
        whole = empty(self.elements)
        own = whole[at.rank * part : (at.rank + 1) * part]
        return (own if given < self.elements else whole), (own if got < self.elements else whole)

    def restore(self) -> None:
        """Fill the output with what it must not be, then the input with the data."""
        if self._data.get is not None:
            patterns.bits(self._get).copy_(patterns.bits(self._data.get)).bitwise_not_()
        else:
            patterns.bits(self._get).fill_(90)
        if self._data.give is not None:
            self._give.copy_(self._data.give)

    def run(self) -> None:
        """Do the operation once and wait for its end on this rank's queue."""
        if self.case.variant == "library":
            self.op.start(self._give, self._get, self.case.reduction, self.place, False)
        elif self.case.variant == "async":
            self.start().wait()
        else:
            require_contiguous(self._give, self._get)
            WAYS[self.case.variant, self.case.operation](self._give, self._get, self.case.reduction, self.place)

    def start(self) -> Any:
        """Begin the operation; returns what to wait for."""
        return self.op.start(self._give, self._get, self.case.reduction, self.place, True)

    def check(self) -> tuple[int, int]:
        """Compare the whole output, bit by bit; the first wrong element is kept in ``first_wrong``."""
        expected = self._data.get
        if expected is None:
            return 0, 0
        if self.fault and expected.numel():
            patterns.bits(self._get)[-1:].bitwise_xor_(1)
        places = patterns.wrong_places(self._get, expected)
        if len(places) and not self.first_wrong:
            first = int(places[0])
            self.first_wrong = (
                f"element {first:,} of {expected.numel():,} on rank {self.place.rank} "
                f"is {self._get[first].item()} and should be {expected[first].item()}"
            )
        return len(places), expected.numel()


def _algorithm(name: str) -> Way:
    """Make the way of an all-reduce of ours, which works in place: given another output, the input is copied first."""

    def way(give: torch.Tensor, get: torch.Tensor, reduction: str, at: Place) -> None:
        if give.data_ptr() != get.data_ptr():
            get.copy_(give)
        ALGORITHMS[name](get, REDUCTIONS[reduction], at.group)

    return way


WAYS: dict[tuple[str, str], Way] = {
    ("direct", "all_gather"): lambda give, get, reduction, at: direct.all_gather(get, give, at.group),
    ("direct", "reduce_scatter"): lambda give, get, reduction, at: direct.reduce_scatter(
        get, give, REDUCTIONS[reduction], at.group
    ),
    **{(name, "all_reduce"): _algorithm(name) for name in ALGORITHMS},
}
