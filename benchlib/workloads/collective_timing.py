"""Times of collective operations: a case with its data, and how it is run on all ranks, timed and verified.

A barrier comes before each run, the slowest rank counts, and every result is compared bit by bit. Before every run the
output is filled with the opposite of every expected bit, so that nothing stale can pass.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from benchlib.runtime import devices, group
from benchlib.runtime.timing import hold
from benchlib.workloads import collective_ops
from benchlib.workloads.collective_ops import DTYPES, REDUCE, Place, bits, copied
from benchlib.workloads.collectives import exchange
from benchlib.workloads.operations import OPS

Kind = tuple[str, str, str, str, bool]  # operation, variant, type, reduction, in place


class Case(NamedTuple):
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
        return self[:5]


class Timed(Protocol):
    """What ``interleaved`` can time; an injected slow-down spares what ``is_limit``. Only ``run`` is timed."""

    bytes: int
    is_limit: bool
    first_wrong: str

    def restore(self) -> None: ...
    def run(self) -> None: ...
    def check(self) -> tuple[int, int]: ...


def _flat(tensor: torch.Tensor, reduction: Any, group: dist.ProcessGroup | None) -> None:
    """Reduce over gloo alone, beside a hierarchy."""
    whole: Any = group or dist.group.WORLD
    if not hasattr(whole, "flat_allreduce"):
        raise ValueError("there are no groups to leave out: set collective=hierarchical to compare both")
    whole.flat_allreduce(tensor, reduction).wait()


ALL_REDUCES = {**exchange.ALGORITHMS, "flat": _flat}


class Exercise:
    """A case on this rank, with its tensors. ``fault`` alters one element of every result, to test that it is found.

    An asynchronous one is waited for after what is computed ``beside`` it.
    """

    is_limit = False

    def __init__(self, case: Case, place: Place, fault: bool = False) -> None:
        self.case, self.place, self.fault, self.first_wrong = case, place, fault, ""
        self.beside: Callable[[], object] = lambda: None
        self.elements = OPS[case.operation].elements(case.bytes, case.dtype, place.ranks)
        self.bytes = self.elements * DTYPES[case.dtype].itemsize
        self._data = collective_ops.data(case.operation, case.dtype, case.reduction, self.elements, place)
        self._give, self._get = self._buffers()

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the operation reads and what it writes; in place they share memory."""
        op, at, part = OPS[self.case.operation], self.place, self.elements // self.place.ranks
        to_read = part if op.parts_got and not op.parts_given else self.elements
        to_write = part if op.parts_given and not op.parts_got else self.elements

        def empty(elements: int) -> torch.Tensor:
            return torch.zeros(elements, dtype=DTYPES[self.case.dtype], device=at.device)

        if not self.case.in_place:
            get = empty(to_write)
            # Whoever gives nothing (not the root of a broadcast) has nothing to copy either.
            return (empty(to_read) if self._data.give is not None or to_read != to_write else get), get
        whole = empty(self.elements)
        own = whole[at.rank * part : (at.rank + 1) * part]
        return (own if to_read < self.elements else whole), (own if to_write < self.elements else whole)

    def restore(self) -> None:
        """Fill the output with what it must not be, then the input with the data."""
        if self._data.get is not None:
            bits(self._get).copy_(bits(self._data.get)).bitwise_not_()
        else:
            bits(self._get).fill_(90)
        if self._data.give is not None:
            self._give.copy_(self._data.give)

    def run(self) -> None:
        """Do the operation once and wait for its end on this rank's queue."""
        case, give, get, group = self.case, self._give, self._get, self.place.group
        match case.variant, case.operation:
            case "library", _:
                self.start(later=False)
            case "async", _:
                work = self.start()
                self.beside()
                work.wait()
            case "direct", "all_gather":
                exchange.all_gather(get, give, group)
            case "direct", "reduce_scatter":
                exchange.reduce_scatter(get, give, REDUCE[case.reduction], group)
            case variant, _:
                ALL_REDUCES[variant](copied(give, get), REDUCE[case.reduction], group)

    def start(self, later: bool = True) -> Any:
        """Ask the library for the operation; returns what to wait for."""
        case = self.case
        return collective_ops.start(case.operation, self._give, self._get, case.reduction, self.place, later)

    def check(self) -> tuple[int, int]:
        """Compare the whole output, bit by bit; the first wrong element is kept in ``first_wrong``."""
        expected = self._data.get
        if expected is None:
            return 0, 0
        if self.fault and expected.numel():
            bits(self._get)[-1:].bitwise_xor_(1)
        places = collective_ops.wrong_places(self._get, expected)
        if len(places) and not self.first_wrong:
            at = int(places[0])
            self.first_wrong = (
                f"element {at:,} of {expected.numel():,} on rank {self.place.rank} "
                f"is {self._get[at].item()} and should be {expected[at].item()}"
            )
        return len(places), expected.numel()


WARMUP = 2
MIN_ROUNDS = 5
MAX_ROUNDS = 200
MAX_WALL = 3  # times the seconds asked for, with restoring and comparing


class Pace(NamedTuple):
    """How a series is taken: seconds of timed work, the injected slow-down, how many rounds, and how many before that."""

    seconds: float
    slowdown: float = 0.0
    least: int = MIN_ROUNDS
    most: int = MAX_ROUNDS
    warmup: int = WARMUP


class Series(NamedTuple):
    """The slowest rank's seconds of each run, (rounds,); wrong elements are of all ranks, ``first`` describes one."""

    bytes: int
    seconds: np.ndarray
    wrong: int
    checked: int
    first: str = ""

    @property
    def times_us(self) -> list[float]:
        return (1e6 * self.seconds).tolist()  # type: ignore[no-any-return]

    def followed_by(self, later: "Series") -> "Series":
        """Return one series of the same messages: this one's runs, then the later ones."""
        return Series(self.bytes, np.concatenate([self.seconds, later.seconds]), *self.counts(later).values())

    def counts(self, *others: "Series") -> dict[str, Any]:
        """Return the columns of what was compared, in this series and in others."""
        every = (self, *others)
        wrong, checked = sum(series.wrong for series in every), sum(series.checked for series in every)
        first = next((series.first for series in every if series.first), "")
        return {"wrong_elements": wrong, "checked_elements": checked, "first": first}


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


def interleaved(things: Sequence[Timed], device: torch.device, pace: Pace) -> list[Series]:
    """Time things round by round, so that a noisy neighbour hits all of them, for about ``pace.seconds`` each."""
    dist.barrier()  # a rank that is late counts in no time below: they decide on the number of rounds
    began = time.perf_counter()
    warm = [[once(thing, device, pace.slowdown) for thing in things] for _ in range(pace.warmup)]
    timed = sum(statistics.median(run[0] for run in runs) for runs in zip(*warm, strict=True)) / len(things)
    whole = (time.perf_counter() - began) / pace.warmup / len(things)
    timed, whole = slowest([timed, whole], device)
    wanted = min(pace.seconds / max(timed, 1e-6), MAX_WALL * pace.seconds / max(whole, 1e-6))
    rounds = min(pace.most, max(pace.least, math.ceil(wanted)))
    runs = [[once(thing, device, pace.slowdown) for thing in things] for _ in range(rounds)]
    # The runs that warm up are not timed, but what they give has to be right as well.
    return [over_ranks(thing, [turn[i] for turn in warm + runs], device, len(warm)) for i, thing in enumerate(things)]


def over_ranks(thing: Timed, runs: Sequence[tuple[float, int, int]], device: torch.device, warm: int = 0) -> Series:
    """Return this rank's runs (seconds, wrong, checked) with those of the others; the first ``warm`` count in no time."""
    counts = [sum(run[index] for run in runs) for index in (1, 2)]
    mine = torch.tensor([*counts, *(round(1e9 * run[0]) for run in runs[warm:])], dtype=torch.int64, device=device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    ranks = torch.stack(parts).cpu().numpy()
    wrong, checked = ranks[:, :2].sum(axis=0).tolist()
    first = first_of(thing.first_wrong) if wrong else ""  # the counts are the same on every rank, so all of them ask
    return Series(thing.bytes, 1e-9 * ranks[:, 2:].max(axis=0), wrong, checked, first)


def first_of(text: str) -> str:
    """Return the text of the first rank that has one. A collective."""
    return next(filter(None, group.all_gather_objects(text)), "")


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the maximum over ranks of each value. Ranks agree on it, and so on the number of rounds."""
    tensor = torch.tensor(values, device=device, dtype=torch.float32)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()  # type: ignore[no-any-return]


def time_all_reduce(sizes: Sequence[int], device: torch.device, pace: Pace, fault: bool = False) -> Series:
    """Time fp32 sums in place over the default process group, for about ``pace.seconds`` of all messages together.

    ``sizes`` are the bytes of messages that are sent one after the other, rounded down to whole elements, at least one;
    the series has the sum over the messages of each round. ``fault`` is that of an ``Exercise``.
    """
    place = Place(dist.get_rank(), dist.get_world_size(), device)
    exercises = [Exercise(Case("all_reduce", "library", "fp32", "sum", True, size), place, fault) for size in sizes]
    messages = interleaved(exercises, device, pace._replace(seconds=pace.seconds / len(sizes)))
    seconds = np.sum([series.seconds for series in messages], axis=0)
    return Series(sum(series.bytes for series in messages), seconds, *messages[0].counts(*messages[1:]).values())
