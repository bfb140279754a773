"""What answers queries: the interface of an engine, the table of engines, and ``sim``, which computes nothing. No torch.

    engine = make("sim", Settings(step_s=0.01))
    engine.start()
    engine.submit(Query(7, ids, 128, on_first, on_done))
    engine.stop()

``start`` returns when queries can be answered, ``submit`` at once; ``stop`` ends all threads, and with an error what is still
worked on. For every query the engine calls, from threads of its own and maybe before ``submit`` returns,

    on_first(rid, time_s, token)   once, when the first token is there (``time.monotonic()``)
    on_done(rid, ids, error)       once, with all new tokens (EOS included); ``error`` is '' or why the query failed
    on_more(rid, ids)              where it is given and the engine sees single tokens: those after the first, as they come

and ``engine.on_send(rid, worker, attempt)``, where it sends queries elsewhere and that is set.

An engine answers as if each query were alone: no cache is shared across queries, decoding is greedy.
"""

import math
import pkgutil
import queue
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchlib.core.errors import UserError

CANCELLED, STOPPED = "the query was cancelled", "the engine was stopped"
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
    positions: int = 0  # most tokens of a prompt with its answer; 0: what the model has
    shrink: int = 1  # random weights: layers, widths and vocabulary are divided by this
    fixed_length: bool = False
    step_s: float = 0.01  # sim: one token
    urls: tuple[str, ...] = ()  # http
    token: str = ""  # http: bearer token
    served_model: str = ""  # http: the model to ask for; '': the first that each worker names
    policy: Policy = Policy()  # http


@dataclass(eq=False)
class Query:
    """A query with its callbacks (see the module), and the tokens that an engine in this process has so far."""

    rid: int
    ids: Sequence[int]
    max_new: int
    on_first: Callable[[int, float, int], Any]
    on_done: Callable[[int, Sequence[int], str], Any]
    on_more: Callable[[int, Sequence[int]], None] | None = None
    tokens: list[int] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def take(self, new: Sequence[int]) -> None:
        """Hand new tokens on."""
        first, more = ([], new) if self.tokens else (new[:1], new[1:])
        self.tokens += new
        for token in first:
            self.on_first(self.rid, time.monotonic(), token)
        if more and self.on_more:
            self.on_more(self.rid, more)


HERE = __name__.rpartition(".")[0]
ENGINES = {
    "sim": f"{__name__}:Sim",
    "http": f"{HERE}.dispatch:Dispatcher",
    "static": f"{HERE}.decoders:Static",
    "continuous": f"{HERE}.decoders:Continuous",
}
COMPUTING = ("static", "continuous")  # with torch, in the process that asks them


def make(name: str, settings: Settings) -> Any:
    """Make the engine of this name; it is not started."""
    return pkgutil.resolve_name(ENGINES[name])(settings)


def codec(model: str) -> Any:
    """Return a model's ``decoders.Codec``, whose module needs torch and transformers."""
    return pkgutil.resolve_name(f"{HERE}.decoders:Codec")(model)


class Local:
    """An engine that answers in this process. Whoever takes a query out of ``_open`` hands its answer on: so that is done once."""

    failure = ""  # why it answers nothing any more
    note = ""  # what a reader of its speed has to know
    on_send = None
    positions: float = math.inf  # tokens that a prompt and its answer may have
    vocabulary = 2**31  # it takes token ids below it

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._open: dict[int, Query] = {}
        self._queue: queue.SimpleQueue[Query | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()

    def start(self) -> None:
        """Load what answers."""

    def submit(self, query: Query) -> None:
        """Take a query. Raises ``UserError`` for one that is longer than the model takes."""
        if self._over.is_set():
            raise UserError(STOPPED)
        prompt, new, most = len(query.ids), query.max_new, self.positions
        if prompt + new > most:
            raise UserError(f"a prompt of {prompt:,} tokens and {new:,} new ones: the engine takes {most:,}")
        self._open[query.rid] = query
        self._take_in(query)

    def _take_in(self, query: Query) -> None:
        self._queue.put(query)

    def _thread(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()

    def _end(self, rid: int, ids: Sequence[int], error: str = "") -> None:
        if query := self._open.pop(rid, None):
            query.over.set()
            query.on_done(rid, ids, error)

    def cancel(self, rid: int) -> None:
        """Free the slot of a query that nobody waits for, if it has not ended yet. In a static batch its row stops."""
        self._end(rid, [], CANCELLED)

    def device_memory(self) -> tuple[float | None, str]:
        """Return the most bytes that its tensors held on its device, or None and why that is not known."""
        return None, "the engine is simulated and holds nothing"

    def stop(self) -> None:
        """End the threads; what is left fails."""
        self._over.set()
        for rid in [*self._open]:
            self._end(rid, [], STOPPED)
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()


def sim_answer(ids: Sequence[int], max_new: int, fixed_length: bool = False) -> list[int]:
    """Return the tokens that ``sim`` answers a prompt with: always the same, lengths vary from prompt to prompt."""
    seed = zlib.crc32(array("i", ids).tobytes())
    least = min(2, max_new)
    length = max_new if fixed_length else least + seed % (max_new - least + 1)
    return [3 + (seed + 7919 * place) % 500 for place in range(length)]


class Sim(Local):
    """Answers with made-up tokens after a fixed time per token. A slot is a thread that waits; it sees the first token alone."""

    def _take_in(self, query: Query) -> None:
        super()._take_in(query)
        if len(self._threads) < min(self.settings.slots, len(self._open)):
            self._thread(self._serve)

    def _serve(self) -> None:
        while query := self._queue.get():
            began, step_s = time.monotonic(), self.settings.step_s
            answer = sim_answer(query.ids, query.max_new, self.settings.fixed_length)
            if query.rid in self._open and not query.over.wait(step_s):
                query.take(answer[:1])
                query.over.wait(began + len(answer) * step_s - time.monotonic())
            self._end(query.rid, answer)
