"""Operations of an MPI group that are under way: what torch waits for."""

import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI


def _limit_s(timeout: timedelta, default_s: float) -> float:
    return timeout.total_seconds() or default_s  # torch says 0 for "as the group"


class Collective(dist.Work):
    """A collective in the queue of its group. An error is raised by ``wait`` and by the future, on every path."""

    def __init__(self, what: str, run: Callable[[], Any], tensors: list[torch.Tensor], timeout_s: float) -> None:
        super().__init__()
        self._what, self._run, self._tensors, self._timeout_s = what, run, tensors, timeout_s
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._ended: torch.futures.Future[None] = torch.futures.Future()
        # Through ``then``: an exception set by hand is an ordinary value to whoever waits in C++, as DDP's reducer does.
        self._future = self._ended.then(lambda _: self.result())

    def execute(self) -> None:
        """Run the operation; for the thread of the group."""
        try:
            self._run()
        except BaseException as error:
            self._error = error
        del self._run  # with the buffers that it holds
        self._done.set()
        self._ended.set_result(None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end. Raises ``RuntimeError`` after the time limit, and what the operation raised."""
        limit_s = _limit_s(timeout, self._timeout_s)
        if not self._done.wait(limit_s):
            raise RuntimeError(f"mpi {self._what} timed out after {limit_s:g} s: a rank of the group did not take part")
        if self._error:
            raise RuntimeError(f"mpi {self._what} failed: {self._error}") from self._error
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._done.is_set() and self._error is None

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that it wrote, when it has ended."""
        self.wait()
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future of ``result()``."""
        return self._future


class Message(dist.Work):
    """A message that is being sent or received, in one piece or several. MPI moves it on while somebody waits."""

    def __init__(self, what: str, requests: list[MPI.Request], tensors: list[torch.Tensor], timeout_s: float) -> None:
        super().__init__()
        self._what, self._requests, self._tensors, self._timeout_s = what, requests, tensors, timeout_s
        self._statuses = [MPI.Status() for _ in requests]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the message is through. Raises ``RuntimeError`` after the time limit."""
        limit_s = _limit_s(timeout, self._timeout_s)
        end = time.monotonic() + limit_s
        while not self.is_completed():
            if time.monotonic() > end:
                raise RuntimeError(f"mpi {self._what} timed out after {limit_s:g} s: the other rank did not answer")
            os.sched_yield()  # the other rank may need this core to answer
        return True

    def is_completed(self) -> bool:
        """Whether the message is through."""
        return MPI.Request.Testall(self._requests, self._statuses)  # type: ignore[no-any-return]

    def result(self) -> list[torch.Tensor]:
        """Return the tensor that was sent or received, when it is through."""
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """Return who sent the message, for a receiver that took it from anybody."""
        return self._statuses[0].Get_source()  # type: ignore[no-any-return]

    _source_rank = source_rank  # what torch.distributed.recv asks

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future of ``result()``; a thread of its own waits for it."""
        ended: torch.futures.Future[None] = torch.futures.Future()
        future = ended.then(lambda _: self.result())
        threading.Thread(target=ended.set_result, args=(None,), daemon=True).start()
        return future


class Line:
    """The thread that runs the collectives of one group, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Collective | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="mpi collectives", daemon=True)
        self._thread.start()

    def add(self, work: Collective) -> Collective:
        """Put an operation at the end of the line."""
        self._queue.put(work)
        return work

    def close(self) -> None:
        """End the thread after what is in the line."""
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while work := self._queue.get():
            work.execute()
            del work  # else the last operation's tensors live until the next one
