"""Where the time of a training step goes, the gradient exchange included, and how fast the exchange is by itself.

All times are seconds. S bytes of a message, n ranks, t seconds; algbw = S / t, busbw = algbw * 2(n - 1) / n
(all-reduce, the definition of nccl-tests).
"""

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchlib.core.definitions import algbw_gbps, busbw_gbps
from benchlib.core.errors import RunBroken
from benchlib.runtime import devices
from benchlib.workloads import collective_ops

PHASES = ("data", "forward", "backward", "optimizer")


class Clock:
    """Takes time where the work happens: by the processor's clock on a CPU, by events in the queue of an accelerator.

    A device that has no timed events is waited for at each stamp.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._events = devices.has_events(device)

    def stamp(self) -> Any:
        """Return a moment, to be given to ``seconds``; does not wait where the device has events."""
        if self._events:
            event = torch.Event(device=self.device, enable_timing=True)
            event.record()
            return event
        devices.synchronize(self.device)
        return time.perf_counter()

    def settle(self) -> None:
        """Wait until all stamps so far have happened, so that ``seconds`` can be asked."""
        devices.synchronize(self.device)

    def seconds(self, first: Any, last: Any) -> float:
        """Return the seconds from one stamp to another."""
        return first.elapsed_time(last) / 1000 if self._events else last - first


@dataclass
class Exchange:
    """State of ``sum_hook``: when each gradient bucket was ready and when its sum was there.

    ``intervals`` holds [launched, done, bytes] per bucket since the last ``take``.
    """

    clock: Clock
    intervals: list[list[Any]] = field(default_factory=list)

    def take(self) -> list[list[Any]]:
        """Return the intervals so far and start a new list."""
        taken, self.intervals = self.intervals, []
        return taken


def sum_hook(state: Exchange, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: add the gradients of all ranks, without dividing by their number.

    Each rank's loss is already its share of the global mean, so the sum is the gradient of the global batch whatever
    the sizes of the shares are. (DDP asks for the parameter names ``state`` and ``bucket``.)
    """
    gradients = bucket.buffer()
    if not gradients.is_contiguous():
        # gloo silently corrupts a strided tensor instead of refusing it.
        raise RunBroken("a gradient bucket is not contiguous: its sum over the ranks would be wrong")
    record = [state.clock.stamp(), None, gradients.numel() * gradients.element_size()]
    state.intervals.append(record)

    def done(future: torch.futures.Future[Any]) -> torch.Tensor:
        record[1] = state.clock.stamp()
        return future.value()[0]  # type: ignore[no-any-return]

    return dist.all_reduce(gradients, async_op=True).get_future().then(done)


class StepTimer:
    """Splits steps into phases. A step ends where the next one begins, so that nothing between them is lost.

    Use: ``begin()``; per step ``mark(phase)`` at the end of each phase, then ``end_step()``; now and then ``take()``.
    ``slowdown`` makes each step longer by this share of the rank's own work. (Of its whole time would feed on itself: what
    one rank waits, the others count as theirs.)
    """

    def __init__(self, clock: Clock, exchange: Exchange, slowdown: float = 0.0) -> None:
        self.clock = clock
        self.exchange = exchange
        self.slowdown = slowdown
        self._least_s = float("inf")
        self._steps: list[tuple[list[tuple[str, Any]], list[list[Any]]]] = []
        self._marks: list[tuple[str, Any]] = []

    def begin(self) -> None:
        """Start a step now; also after a pause that belongs to no step."""
        self.exchange.take()
        self._marks = [("", self.clock.stamp())]

    def mark(self, phase: str) -> None:
        """State that ``phase`` ended now; it began at the mark before. A phase may come several times in a step."""
        self._marks.append((phase, self.clock.stamp()))

    def end_step(self) -> None:
        """End the step and begin the next one."""
        if self.slowdown:
            hold(self.slowdown * self._own_work())
        self.mark("end")
        self._steps.append((self._marks, self.exchange.take()))
        self._marks = [("", self._marks[-1][1])]

    def _own_work(self) -> float:
        """Return the seconds that the rank itself worked in this step; without phases the least of any step so far."""
        now = self.clock.stamp()
        self.clock.settle()
        row = self._row([*self._marks, ("end", now)], self.exchange.intervals)
        self._least_s = min(self._least_s, row["step_s"])
        return sum(row[f"{phase}_s"] for phase in PHASES) or self._least_s

    def take(self) -> list[dict[str, float]]:
        """Return one row for each step since the last call, after waiting for the device.

        Keys: ``step_s``, ``data_s``, ``forward_s``, ``backward_s`` (without the exposed exchange), ``optimizer_s``,
        ``exchange_s`` (at least one bucket was under way), ``exchange_exposed_s`` (of it, after the last gradient of
        the rank was ready: what the backward pass did not hide).
        """
        self.clock.settle()
        rows = [self._row(marks, intervals) for marks, intervals in self._steps]
        self._steps = []
        return rows

    def _row(self, marks: list[tuple[str, Any]], intervals: list[list[Any]]) -> dict[str, float]:
        first = marks[0][1]
        times = [(phase, self.clock.seconds(first, stamp)) for phase, stamp in marks]
        row = {f"{phase}_s": 0.0 for phase in PHASES} | {"step_s": times[-1][1]}
        backward_end = 0.0
        for (_, before), (phase, now) in itertools.pairwise(times):
            if phase in PHASES:
                row[f"{phase}_s"] += now - before
            if phase == "backward":
                backward_end = now
        spans = [
            (self.clock.seconds(first, begin), self.clock.seconds(first, end))
            for begin, end, _ in intervals
            if end is not None
        ]
        row["exchange_s"] = union(spans)
        exposed = max(0.0, backward_end - max(begin for begin, _ in spans)) if spans else 0.0
        row["exchange_exposed_s"] = min(exposed, row["backward_s"])
        row["backward_s"] -= row["exchange_exposed_s"]
        return row


def union(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals (begin, end)."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


@dataclass(frozen=True)
class Bandwidth:
    """Samples of the all-reduce of one set of buckets, bits per second / 1e9; ``wrong`` counts elements with a wrong sum."""

    algbw_gbps: list[float]
    busbw_gbps: list[float]
    bucket_bytes: list[int]
    wrong: int


def all_reduce_bandwidth(
    bucket_bytes: list[int],
    device: torch.device,
    seconds: float = 3.0,
    most: int = 300,
    least: int = 10,
    slowdown: float = 0.0,
    fault: bool = False,
) -> Bandwidth:
    """Time the all-reduce of buckets of these sizes (fp32), one after the other, for about ``seconds`` seconds.

    Sizes are bytes; each is rounded down to whole elements, at least one, and those are what is counted.

    From ``least`` to ``most`` samples: few leave an interval too wide to tell a regression from noise. ``slowdown`` makes
    each operation longer by this share of its time.

    A sample is the bytes of all buckets over the sum of their times, the slowest rank's each. Every sum is checked
    against the true one, bit by bit, on the data of the collectives benchmark. ``fault`` alters the last element of every
    sum of this rank, to test that it is found.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    clock = Clock(device)
    sources, sums = [], []
    for size in bucket_bytes:
        elements = max(1, size // 4)
        sources.append(collective_ops.contribution("sum", "fp32", elements, rank, world, device))
        sums.append(collective_ops.reduced("sum", "fp32", elements, world, device))
    buffers = [source.clone() for source in sources]
    times: list[float] = []
    wrong = 0
    warmup, repeat, began = 2, 0, time.perf_counter()
    while repeat < warmup + least or (repeat < warmup + most and _any_rank_has_time(began, seconds, device)):
        repeat += 1
        total = torch.zeros(len(buffers), dtype=torch.float32, device=device)
        for index, (buffer, source) in enumerate(zip(buffers, sources, strict=True)):
            buffer.copy_(source)
            devices.synchronize(device)
            dist.barrier()
            begin = clock.stamp()
            dist.all_reduce(buffer)
            end = clock.stamp()
            clock.settle()
            if slowdown:
                hold(slowdown * clock.seconds(begin, end))
                end = clock.stamp()
                clock.settle()
            total[index] = clock.seconds(begin, end)
            if fault:
                buffer[-1] += 1
            wrong += int((buffer != sums[index]).sum())
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        if repeat > warmup:
            times.append(float(total.sum()))
    sizes = [4 * buffer.numel() for buffer in buffers]
    total_bytes = sum(sizes)
    algbw = [algbw_gbps(total_bytes, value) for value in times]
    return Bandwidth(algbw, [busbw_gbps("all_reduce", total_bytes, value, world) for value in times], sizes, wrong)


def _any_rank_has_time(began: float, seconds: float, device: torch.device) -> bool:
    """Return the same answer on all ranks: whether ``seconds`` have not passed on one of them."""
    flag = torch.tensor(float(time.perf_counter() - began < seconds), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


# A slow-down that is planted on purpose: timed work is really made longer, so that a gate can be tested for finding it.


def hold(seconds: float) -> None:
    """Wait for ``seconds`` and keep the core busy, as slower work would: a core that sleeps speeds up its neighbours.

    What was queued on a device must have been waited for before.
    """
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
