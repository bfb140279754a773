"""Times of collective operations: a case with its data, and how it is run on all ranks, timed and verified.

A barrier comes before each run, the slowest rank counts, and every result is compared bit by bit. Before every run the
output is filled with the opposite of every expected bit, so that nothing stale can pass. ``take``, ``take_in_turns`` and
``time_all_reduce`` are collective: every rank calls them with the same arguments and gets the same answer.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from benchlib.core.definitions import algbw_gbps, busbw_gbps
from benchlib.runtime import devices, exchange
from benchlib.runtime.exchange import ALGORITHMS
from benchlib.runtime.hierarchy import Hierarchy
from benchlib.runtime.timing import hold
from benchlib.workloads import collective_ops
from benchlib.workloads.collective_ops import OPS, REDUCTIONS, Data, Op, Place, require_contiguous

# An operation by other means than the library's: (give, get, reduction, place).
Way = Callable[[torch.Tensor, torch.Tensor, str, Place], Any]


# Which operations can be done in which ways. ``async`` is started and waited for at once.
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "library": tuple(OPS),
    "async": tuple(OPS),
    "direct": ("all_gather", "reduce_scatter"),
    "ring": ("all_reduce",),
    "tree": ("all_reduce",),
    "rs_ag": ("all_reduce",),
    "flat": ("all_reduce",),
}
Kind = tuple[str, str, str, str, bool]  # operation, variant, type, reduction, in place


@dataclass(frozen=True)
class Case:
    """What to measure: an operation, a variant of it, the type, the reduction ('' for none), where, and how many bytes."""

    operation: str
    variant: str
    dtype: str
    reduction: str
    in_place: bool
    bytes: int
    share: float = 1.0  # of the time of a series

    @property
    def kind(self) -> Kind:
        """All but the size: what a library either has or has not."""
        return self.operation, self.variant, self.dtype, self.reduction, self.in_place

    def label(self) -> str:
        """Name the case in a sentence: ``all-reduce sum fp32 in place``."""
        words = [self.operation.replace("_", "-"), self.variant if self.variant != "library" else "", self.reduction]
        words += [self.dtype if self.operation != "barrier" else "", "in place" if self.in_place else ""]
        return " ".join(word for word in words if word)


class Timed(Protocol):
    """What ``take`` can time. ``bytes`` is S."""

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
        return self.elements * collective_ops.DTYPES[self.case.dtype].itemsize

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the operation reads and what it writes; in place they share memory."""
        op, at, part = self.op, self.place, self.elements // self.place.ranks
        given = part if op.parts_got and not op.parts_given else self.elements
        got = part if op.parts_given and not op.parts_got else self.elements

        def empty(elements: int) -> torch.Tensor:
            return torch.zeros(elements, dtype=collective_ops.DTYPES[self.case.dtype], device=at.device)

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
            collective_ops.bits(self._get).copy_(collective_ops.bits(self._data.get)).bitwise_not_()
        else:
            collective_ops.bits(self._get).fill_(90)
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
            collective_ops.bits(self._get)[-1:].bitwise_xor_(1)
        places = collective_ops.wrong_places(self._get, expected)
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


def _flat(give: torch.Tensor, get: torch.Tensor, reduction: str, at: Place) -> None:
    """Reduce over gloo alone, beside a hierarchy."""
    group = dist.group.WORLD if at.group is None else at.group
    if not isinstance(group, Hierarchy):
        raise ValueError("there are no groups to leave out: set collective=hierarchical to compare both")
    if give.data_ptr() != get.data_ptr():
        get.copy_(give)
    group.flat_allreduce(get, REDUCTIONS[reduction]).wait()


WAYS: dict[tuple[str, str], Way] = {
    ("flat", "all_reduce"): _flat,
    ("direct", "all_gather"): lambda give, get, reduction, at: exchange.all_gather(get, give, at.group),
    ("direct", "reduce_scatter"): lambda give, get, reduction, at: exchange.reduce_scatter(
        get, give, REDUCTIONS[reduction], at.group
    ),
    **{(name, "all_reduce"): _algorithm(name) for name in ALGORITHMS},
}


# Times of an operation on all ranks: a barrier before each run, the slowest rank counts, every result is compared.
#
# All functions here are collective: every rank calls them with the same arguments and gets the same answer.


WARMUP = 2
LEAST_ROUNDS = 5
MOST_ROUNDS = 200
MOST_WALL = 3  # times the seconds asked for, with restoring and comparing


@dataclass(frozen=True)
class Series:
    """Runs of one thing on all ranks. ``times_s`` is (rounds, ranks); wrong elements are of all ranks and runs."""

    bytes: int
    times_s: np.ndarray
    wrong: int
    checked: int

    @property
    def seconds(self) -> np.ndarray:
        """The time of each run, (rounds,): that of its slowest rank."""
        return self.times_s.max(axis=1)  # type: ignore[no-any-return]

    @property
    def skew_s(self) -> float:
        """The median over the runs of the time between the first and the last rank."""
        return float(np.median(np.ptp(self.times_s, axis=1)))

    @property
    def slowest_shares(self) -> np.ndarray:
        """How often each rank was the slowest, (ranks,), from 0 to 1."""
        slowest = self.times_s.argmax(axis=1)
        return np.bincount(slowest, minlength=self.times_s.shape[1]) / len(slowest)


@dataclass(frozen=True)
class Pace:
    """How a series is taken: seconds of timed work, the planted slow-down, and how many rounds at least and at most.

    ``warmup`` rounds come before and are not timed.
    """

    seconds: float
    slowdown: float = 0.0
    least: int = LEAST_ROUNDS
    most: int = MOST_ROUNDS
    warmup: int = WARMUP


def once(thing: Timed, device: torch.device, slowdown: float = 0.0) -> tuple[float, int, int]:
    """Run a thing once on all ranks; returns this rank's seconds, wrong and checked elements."""
    thing.restore()
    devices.synchronize(device)
    dist.barrier()  # else a rank that comes late adds its delay to the time of the others
    began = time.perf_counter()
    thing.run()
    devices.synchronize(device)
    if slowdown and not thing.is_limit:
        hold(slowdown * (time.perf_counter() - began))
    return (time.perf_counter() - began, *thing.check())


def take(thing: Timed, device: torch.device, pace: Pace) -> Series:
    """Time a thing for about ``pace.seconds``."""
    return take_in_turns([thing], device, pace)[0]


def take_in_turns(things: Sequence[Timed], device: torch.device, pace: Pace) -> list[Series]:
    """Time several things round by round, so that a noisy neighbour hits all of them; ``pace.seconds`` for each."""
    dist.barrier()  # a rank that is late counts in no time below: they decide on the number of rounds
    began = time.perf_counter()
    warm = [[once(thing, device, pace.slowdown) for thing in things] for _ in range(pace.warmup)]
    taken = sum(statistics.median(run[0] for run in runs) for runs in zip(*warm, strict=True)) / len(things)
    whole = (time.perf_counter() - began) / pace.warmup / len(things)
    taken, whole = slowest([taken, whole], device)
    wanted = min(pace.seconds / max(taken, 1e-6), MOST_WALL * pace.seconds / max(whole, 1e-6))
    rounds = min(pace.most, max(pace.least, math.ceil(wanted)))
    runs = [[once(thing, device, pace.slowdown) for thing in things] for _ in range(rounds)]
    return [
        _gathered(thing, [turn[index] for turn in runs], [turn[index] for turn in warm], device)
        for index, thing in enumerate(things)
    ]


def _gathered(
    thing: Timed, runs: list[tuple[float, int, int]], warm: list[tuple[float, int, int]], device: torch.device
) -> Series:
    # The runs that warm up are not timed, but what they give has to be right as well.
    counts = [sum(run[index] for run in [*warm, *runs]) for index in (1, 2)]
    mine = torch.tensor([*counts, *(round(1e9 * run[0]) for run in runs)], dtype=torch.int64, device=device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    columns = torch.stack(parts, dim=1).cpu().numpy()
    wrong, checked = columns[:2].sum(axis=1).tolist()
    return Series(thing.bytes, 1e-9 * columns[2:], wrong, checked)


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the maximum over ranks of each value. Ranks agree on it, and so on the number of rounds."""
    tensor = torch.tensor(values, device=device, dtype=torch.float32)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class AllReduce:
    """All-reduces of messages of ``sizes`` bytes, one after the other, over ``ranks``; the same on every rank.

    ``seconds`` has one value for each round: the sum over the messages, the slowest rank's time of each. ``wrong`` and
    ``checked`` count elements over all ranks and rounds.
    """

    sizes: tuple[int, ...]
    ranks: int
    seconds: tuple[float, ...]
    wrong: int
    checked: int

    @property
    def algbw_gbps(self) -> list[float]:
        """Algorithm bandwidth of each round in Gbps: the bytes of all messages over the time of all."""
        return [algbw_gbps(sum(self.sizes), value) for value in self.seconds]

    @property
    def busbw_gbps(self) -> list[float]:
        """Bus bandwidth of each round in Gbps."""
        return [busbw_gbps("all_reduce", sum(self.sizes), value, self.ranks) for value in self.seconds]

    def __add__(self, later: "AllReduce") -> "AllReduce":
        """Join the rounds of two moments of a run with the same messages."""
        seconds, wrong = self.seconds + later.seconds, self.wrong + later.wrong
        return replace(self, seconds=seconds, wrong=wrong, checked=self.checked + later.checked)


def time_all_reduce(sizes: Sequence[int], device: torch.device, pace: Pace, fault: bool = False) -> AllReduce:
    """Time fp32 sums in place over the default process group, for about ``pace.seconds`` of all messages together.

    ``sizes`` are bytes; each is rounded down to whole elements, at least one. Every sum is compared bit by bit.
    ``fault`` alters one element of every sum of this rank, to test that it is found.
    """
    place = Place(dist.get_rank(), dist.get_world_size(), device)
    cases = [Case("all_reduce", "library", "fp32", "sum", in_place=True, bytes=size) for size in sizes]
    exercises = [Exercise(case, place, fault) for case in cases]
    messages = take_in_turns(exercises, device, replace(pace, seconds=pace.seconds / len(sizes)))
    return AllReduce(
        tuple(series.bytes for series in messages),
        place.ranks,
        tuple(np.sum([series.seconds for series in messages], axis=0).tolist()),
        sum(series.wrong for series in messages),
        sum(series.checked for series in messages),
    )
