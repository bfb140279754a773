"""Where the time of a training step goes, the gradient exchange included. All times are seconds.

``hold`` plants a slow-down on purpose: timed work is really made longer, so that a gate can be tested for finding it.
"""

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist

from benchlib.core.errors import RunBroken
from benchlib.runtime import devices

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
        return first.elapsed_time(last) / 1000 if self._events else last - first


def sum_hook(state: "StepTimer", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: add the gradients of all ranks, without dividing by their number; a timer keeps when.

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
    ``slowdown`` makes each step longer by this share of the rank's compute time. (Of its whole time would feed on itself: what
    what one rank waits, the others count as theirs.) Where all ranks are slowed ``alike`` they end a step together.

    ``intervals`` holds [launched, done, bytes] of each gradient bucket of the step: when it was ready, and its sum was there.
    """

    def __init__(self, device: torch.device, slowdown: float = 0.0, alike: bool = False) -> None:
        self.clock = Clock(device)
        self.intervals: list[list[Any]] = []
        self.slowdown, self.alike = slowdown, alike
        self._least_s = float("inf")
        self._steps: list[tuple[list[tuple[str, Any]], list[list[Any]]]] = []
        self._marks: list[tuple[str, Any]] = []

    def begin(self) -> None:
        """Start a step now; also after a pause that belongs to no step."""
        self.intervals = []
        self._marks = [("", self.clock.stamp())]

    def mark(self, phase: str) -> None:
        """State that ``phase`` ended now; it began at the mark before. A phase may come several times in a step."""
        self._marks.append((phase, self.clock.stamp()))

    def end_step(self) -> None:
        """End the step and begin the next one."""
        if self.slowdown:
            hold(self.slowdown * self._compute_time())
            if self.alike and dist.is_initialized():
                dist.barrier()  # else the next step of a rank that held less counts the difference again
        self.mark("end")
        self._steps.append((self._marks, self.intervals))
        self._marks, self.intervals = [("", self._marks[-1][1])], []

    def _compute_time(self) -> float:
        """Return the seconds that the rank itself worked in this step; without phases the least of any step so far."""
        now = self.clock.stamp()
        self.clock.settle()
        row = self._row([*self._marks, ("end", now)], self.intervals)
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


def hold(seconds: float) -> None:
    """Wait for ``seconds`` and keep the core busy, as slower work would: a core that sleeps speeds up its neighbours.

    What was queued on a device must have been waited for before.
    """
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
