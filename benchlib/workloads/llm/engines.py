"""What answers queries: the interface of an engine, the table of engines, and ``sim``, which computes nothing. No torch.

    engine = make("sim", Settings(step_s=0.01))
    engine.start()
    engine.submit(7, ids, 128, on_first, on_done)
    engine.stop()

``submit`` returns at once. For every query the engine calls, from threads of its own,

    on_first(rid, time_s, token)   once, when the first token is there (``time.monotonic()``)
    on_done(rid, ids, error)       once, with all new tokens (EOS included); ``error`` is '' or why the query failed
    on_more(rid, ids)              where it is given and the engine sees single tokens: those after the first, as they come

``cancel(rid)`` frees the slot of a query that nobody waits for; it ends with ``CANCELLED``. A callback may be called before ``submit`` returns. An engine answers as if each query were alone: no cache is shared across
queries, decoding is greedy.
"""

import heapq
import importlib
import itertools
import threading
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchlib.core.errors import UserError, nearest

OnFirst = Callable[[int, float, int], None]
OnDone = Callable[[int, Sequence[int], str], None]
OnMore = Callable[[int, Sequence[int]], None] | None
CANCELLED = "the query was cancelled"
# What /metrics of a worker says of its memory, by our names: the first is Prometheus' own, which other servers have, too.
MEMORY = {"resident_bytes": "process_resident_memory_bytes", "device_bytes": "benchlib_device_memory_peak_bytes"}


@dataclass(frozen=True)
class Policy:
    """How the engine http sends queries; times in seconds."""

    cap: int = 16  # queries that a worker has at once
    deadline_s: float = 60.0  # of a query, from its first sending on
    stall_s: float = 20.0  # without a byte from the worker: the attempt is lost
    gone_s: float = 3.0  # without any worker: what is left fails
    probe_s: float = 0.5  # between two questions for the health of a worker
    probe_limit_s: float = 2.0  # for the answer
    start_s: float = 120.0  # for all workers to be ready at the start
    partial: bool = False  # start with the workers that are there by then


@dataclass(frozen=True)
class Settings:
    """What engines are made of; each takes what it needs.

    ``slots`` are the queries that are worked on at once. ``fixed_length``: the end-of-sequence token is ignored, and every
    answer has the most tokens that its query asks for.
    """

    model: str = ""  # http: whose tokenizer reads and writes texts, for servers without token ids
    device: str = "cpu"
    precision: str = "fp32"
    slots: int = 8
    threads: int = 0  # of the processor, for the whole process; 0: as they are
    wait_s: float = 0.005  # static: how long a batch waits for its next query
    positions: int = 0  # most tokens of a prompt with its answer; 0: what the model has
    shrink: int = 1  # random weights: layers, widths and vocabulary are divided by this
    fixed_length: bool = False
    step_s: float = 0.01  # sim: one token
    each_token: bool = False  # sim: hand every token on as it comes; else those after the first come at the end
    urls: tuple[str, ...] = ()  # http
    token: str = ""  # http: bearer token
    served_model: str = ""  # http: the model to ask for; '': the first that each worker names
    policy: Policy = Policy()  # http


class Engine(Protocol):
    """See the module. ``facts`` are plain values for the record: parameters, bytes of weights, versions.

    ``vocabulary`` among them says which token ids it takes: 0 to one below it; an engine without it takes all. ``start`` returns
    when queries can be answered; ``stop`` ends all threads, and with an error what is still worked on.
    """

    facts: dict[str, Any]

    @property
    def failure(self) -> str:
        """Why it answers nothing any more; '' while it works."""
        ...

    def start(self) -> None: ...

    def submit(
        self, rid: int, ids: Sequence[int], max_new: int, on_first: OnFirst, on_done: OnDone, on_more: OnMore = None
    ) -> None: ...

    def stop(self) -> None: ...


class Computing(Engine, Protocol):
    """An engine that answers in this process. ``cancel`` ends a query early, if it has not ended yet."""

    def cancel(self, rid: int) -> None: ...

    def device_memory(self) -> tuple[float | None, str]:
        """Return the most bytes that its tensors held on its device, or None and why that is not known."""
        ...


@dataclass(frozen=True)
class Kind:
    """A row of the table: ``module:class``, what it is in words, and whether it computes with torch."""

    reference: str
    words: str
    torch: bool = True


_HERE = __name__.rpartition(".")[0]
ENGINES: dict[str, Kind] = {
    "sim": Kind(f"{__name__}:Sim", "fixed time per token, computes nothing", torch=False),
    "http": Kind(f"{_HERE}.dispatch:Dispatcher", "OpenAI-compatible servers", torch=False),
    "static": Kind(f"{_HERE}.batches:Static", "transformers generate on static batches"),
    "continuous": Kind(f"{_HERE}.batches:Continuous", "transformers continuous batching"),
}


def make(name: str, settings: Settings, available: Collection[str] = ENGINES.keys()) -> Any:
    """Make the engine of this name; it is not started. Raises ``UserError`` for a name that is not ``available``."""
    if name not in available:
        raise UserError(f"engine {name!r}: no such engine; {nearest(name, available)}")
    module, _, cls = ENGINES[name].reference.partition(":")
    return getattr(importlib.import_module(module), cls)(settings)


def sim_answer(ids: Sequence[int], max_new: int, fixed_length: bool = False) -> list[int]:
    """Return the tokens that ``sim`` answers a prompt with: always the same, lengths vary from prompt to prompt."""
    seed = zlib.crc32(array("i", ids).tobytes())
    least = min(2, max_new)
    length = max_new if fixed_length else least + seed % (max_new - least + 1)
    return [3 + (seed + 7919 * place) % 500 for place in range(length)]


@dataclass
class _Query:
    rid: int
    ids: list[int]
    on_first: OnFirst
    on_done: OnDone
    on_more: OnMore


class Sim:
    """Answers with made-up tokens after a fixed time per token, ``slots`` queries at once. Uses next to no processor time."""

    failure = ""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.facts: dict[str, Any] = {"step_s": settings.step_s}
        self._waiting: deque[_Query] = deque()
        self._due: list[tuple[float, int, int, _Query]] = []  # time, order, number of the token (-1: the end), query
        self._order = itertools.count()
        self._busy = 0
        self._change = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._serve, name="sim", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(
        self, rid: int, ids: Sequence[int], max_new: int, on_first: OnFirst, on_done: OnDone, on_more: OnMore = None
    ) -> None:
        """Take a query. An event for each token would take processor time: only ``each_token`` has them."""
        answer = sim_answer(ids, max_new, self.settings.fixed_length)
        with self._change:
            if self._over:
                raise UserError("the engine was stopped")
            more = on_more if self.settings.each_token else None
            self._waiting.append(_Query(rid, answer, on_first, on_done, more))
            self._change.notify()

    def cancel(self, rid: int) -> None:
        """See ``Engine``."""
        with self._change:
            at_work = [query for _, _, place, query in self._due if place < 0 and query.rid == rid]
            ended = at_work + [query for query in self._waiting if query.rid == rid]
            self._waiting = deque(query for query in self._waiting if query.rid != rid)
            self._due = sorted(event for event in self._due if event[3].rid != rid)  # a sorted list is a heap
            self._busy -= len(at_work)
            self._change.notify()
        for query in ended:
            query.on_done(rid, [], CANCELLED)

    def device_memory(self) -> tuple[float | None, str]:
        """See ``Engine``."""
        return None, "the engine is simulated and holds nothing"

    def stop(self) -> None:
        """End the thread; what is left fails."""
        with self._change:
            self._over = True
            self._change.notify()
        self._thread.join()
        left = [*self._waiting, *(query for _, _, place, query in self._due if place < 0)]
        self._waiting.clear()
        self._due.clear()
        for query in left:
            query.on_done(query.rid, [], "the engine was stopped")

    def _serve(self) -> None:
        while True:
            with self._change:
                self._admit()
                now = time.monotonic()
                if self._over:
                    return
                if not self._due or self._due[0][0] > now:
                    self._change.wait(self._due[0][0] - now if self._due else None)
                    continue
                due, _, place, query = heapq.heappop(self._due)
                self._busy -= place < 0
                if query.on_more and 0 <= place < len(query.ids) - 2:
                    heapq.heappush(self._due, (due + self.settings.step_s, next(self._order), place + 1, query))
            if place < 0:
                query.on_done(query.rid, query.ids, "")
            elif place == 0:
                query.on_first(query.rid, now, query.ids[0])
            elif query.on_more:
                query.on_more(query.rid, query.ids[place : place + 1])

    def _admit(self) -> None:
        """Give free slots to those who wait, in their order."""
        while self._waiting and self._busy < self.settings.slots:
            query = self._waiting.popleft()
            self._busy += 1
            first = time.monotonic() + self.settings.step_s
            last = first + (len(query.ids) - 1) * self.settings.step_s
            heapq.heappush(self._due, (first, next(self._order), 0, query))
            heapq.heappush(self._due, (last, next(self._order), -1, query))
