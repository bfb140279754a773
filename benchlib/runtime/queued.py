"""Process groups in Python: their collectives queue up for one thread of the group, which runs them in order.

What the groups of MPI and of the hierarchical exchange share. torch sees an ordinary ``Work`` with a future, on which
DDP's reducer waits.
"""

import contextlib
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Tensors = list[torch.Tensor]


class Collective(dist.Work):
    """A collective in the queue of its group. An error is raised by ``wait`` and by the future, on every path.

    With a ``stream`` of an accelerator it runs there, behind what the caller's own stream has queued so far; whoever
    waits goes on behind it.
    """

    def __init__(
        self, name: str, run: Callable[[], Any], tensors: Tensors, timeout_s: float, stream: Any = None
    ) -> None:
        super().__init__()
        self._name, self._run, self._tensors, self._timeout_s, self._stream = name, run, tensors, timeout_s, stream
        self._ready = None if stream is None else _module(stream).current_stream(stream.device).record_event()
        self._done = threading.Event()
        self._error: BaseException | None = None
        devices = [] if stream is None else [stream.device]
        self._ended: torch.futures.Future[Tensors] = torch.futures.Future(devices=devices)
        # Through ``then``: an exception set by hand is an ordinary value to whoever waits in C++, as DDP's reducer does.
        self._future = self._ended.then(lambda _: self.result())

    def execute(self) -> None:
        """Run the operation; for the thread of the group."""
        on_stream = self._stream is not None
        with _module(self._stream).stream(self._stream) if on_stream else contextlib.nullcontext():
            try:
                if on_stream:
                    self._stream.wait_event(self._ready)
                self._run()
            except BaseException as error:
                self._error = error
            del self._run  # with the buffers that it holds
            self._done.set()
            self._ended.set_result([] if self._error else self._tensors)  # marks the place on the stream, too

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end. Raises ``RuntimeError`` after the time limit, and what the operation raised."""
        limit_s = timeout.total_seconds() or self._timeout_s  # torch says 0 for "as the group"
        if not self._done.wait(limit_s):
            raise RuntimeError(f"{self._name} timed out after {limit_s:g} s: a rank of the group did not take part")
        if self._error:
            raise RuntimeError(f"{self._name} failed: {self._error}") from self._error
        if self._stream is not None:
            self._ended.wait()  # lets the caller's stream go on behind this one
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def result(self) -> Tensors:
        self.wait()
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


def _module(stream: Any) -> Any:
    return torch.get_device_module(stream.device)


_ProcessGroup: Any = dist.ProcessGroup  # torch's stubs list more forms of each method than a subclass is ever called by


class QueuedGroup(_ProcessGroup):  # type: ignore[misc]
    """A group of ranks with a thread for its collectives. ``library`` is what messages call it."""

    def __init__(self, library: str, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._library, self._timeout_s = library, timeout.total_seconds()
        self._queue: queue.SimpleQueue[Collective | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"{library} collectives", daemon=True)
        self._thread.start()

    def setGroupName(self, name: str) -> None:
        """Keep the name that torch gives the group, and asks for when it unregisters it."""
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def shutdown(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while work := self._queue.get():
            work.execute()
            del work  # else the last operation's tensors live until the next one

    def _begin(self, name: str, opts: Any, run: Callable[[], Any], tensors: Tensors, stream: Any = None) -> dist.Work:
        timeout = getattr(opts, "timeout", None)
        limit_s = timeout.total_seconds() if timeout and timeout > timedelta(0) else self._timeout_s
        work = Collective(f"{self._library} {name}", run, tensors, limit_s, stream)
        self._queue.put(work)
        return work
