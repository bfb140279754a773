"""The engine ``http``: sends queries to one or more OpenAI-compatible servers, and loses none with a server that is lost.

An event loop in a thread of its own holds a queue. Each query goes to the worker with a free slot that would be done with it
first: tokens that it may still have to give over the tokens per second that it gave so far. Whatever goes wrong with an attempt (its connection breaks, its stream ends early or stands still, the answer makes no sense) is one case: the
query comes back to the front of the queue, for another worker where there is one, and its worker gets nothing until it answers the
next question for its ``/health``. A query fails, and is counted, at its deadline, when its server refuses it, after
``MAX_ATTEMPTS``, or when no worker was there for ``gone_s``.

A server that gives no token ids is asked in texts: then the tokens of an answer are those that the tokenizer of ``Settings.model``
finds in its text. Which of both a worker takes is seen by the first query.
"""

import asyncio
import contextlib
import importlib
import json
import math
import os
import re
import socket
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

from benchlib.config.addresses import DNS, PORTS, REDIRECTED, REDIRECTS, checked
from benchlib.core.errors import UserError
from benchlib.workloads.llm.engines import MEMORY, OnDone, OnFirst, OnMore, Settings

MAX_ATTEMPTS = 8  # of a query: one that ends every worker it meets must not end them all
WARM_UP = [7, 11, 13]  # a prompt that is in no data set
TEXTS = "benchlib.workloads.llm.texts"  # imported where a worker is asked in texts: it needs transformers
# Of Prometheus' text format: a name with its labels, a number.
METRIC = re.compile(r"^(?!#)(\S.*) (\S+)$", re.MULTILINE)

# The dispatcher looks after all queries at once, and an answer is read when it is whole.
SKIPPED_HEADERS = ("Accept", "Accept-Encoding", "User-Agent")  # that no worker needs: they cost both sides
NO_TIMER, BUFFER = aiohttp.ClientTimeout(total=None, sock_connect=5), 2**22
MAX_BYTES = 2**20  # of any other answer
TOKEN_CHARACTERS = 256  # that one token stands for at most: a longer text is not counted, which would take seconds
MAX_ID = 2**31  # above any token id: LoadGen takes 32 bits
START_S, LATE_S = 120.0, 3.0  # for all workers to be there, and where not all have to be
POINTS = 121  # in time at which the requests in flight are counted

Row = dict[str, Any]


@dataclass(frozen=True)
class Policy:
    """How queries are sent; times in seconds."""

    cap: int = 16  # queries that a worker has at once
    deadline_s: float = 60.0  # of a query, from its first sending on
    stall_s: float = 20.0  # without a byte from the worker: the attempt is lost
    gone_s: float = 3.0  # without any worker: what is left fails
    probe_s: float = 0.5  # between two questions for the health of a worker
    probe_limit_s: float = 2.0  # for the answer
    start_s: float = START_S  # for all workers to be ready at the start
    partial: bool = False  # start with the workers that are there
    model: str = ""  # '': the first that the worker names


@dataclass
class Query:
    """One query and what became of it so far."""

    rid: int
    ids: Sequence[int]
    max_new: int
    on_first: OnFirst
    on_done: OnDone
    attempt: int = 0
    deadline: float = math.inf
    has_first: bool = False
    last_error: str = ""
    lost_at: set[int] = field(default_factory=set)  # workers that lost it: others take it, where there are others
    task: "asyncio.Task[list[int]] | None" = None  # of the attempt under way
    content: aiohttp.StreamReader | None = None  # of its answer
    came: int = 0  # bytes of it, when that was looked at last
    moved: float = 0.0  # when there were more
    given_up: tuple[str, bool] | None = None  # why the attempt was ended, and whether another one may do


@dataclass
class Worker:
    """A server. ``text``: it gives no token ids. ``engine`` is what a worker of the kit says that it runs."""

    index: int
    url: str
    ready: bool = False
    met: bool = False  # it answered a first query
    reason: str = "not asked yet"  # why it is not ready
    model: str = ""
    engine: str = ""
    text: bool = False
    open: dict[int, Query] = field(default_factory=dict)
    work: int = 0  # tokens that it may still have to give
    tokens: int = 0  # that it gave, in the time in which it had work
    busy_s: float = 0.0
    since: float = 0.0
    missed: int = 0  # health questions in a row
    heard: float = 0.0


class LostAttempt(Exception):
    """An attempt that another worker can make again."""


class RefusedQuery(Exception):
    """A query that every worker would refuse."""


class Dispatcher:
    """See the module. ``attempts`` and ``events`` are the record; times are those of ``time.monotonic()``."""

    def __init__(self, settings: Settings, policy: Policy | None = None) -> None:
        if not settings.urls:
            raise UserError("engine http needs addresses of servers: workers=http://HOST:PORT, separated by commas")
        # Twice what a worker works on: its next query waits there, and not for a way back and forth.
        self.policy = policy or Policy(
            2 * settings.slots,
            deadline_s=settings.deadline_s,
            model=settings.served_model,
            partial=settings.partial,
            start_s=LATE_S if settings.partial else START_S,
        )
        self.settings = settings
        self.stated, self.counted = (
            0,
            0,
        )  # of answers in text: tokens that servers state, tokens that the tokenizer finds
        self.facts: dict[str, Any] = {}
        self.failure = ""  # one worker that is gone is not the end; queries fail on their own where all are
        self.workers: list[Worker] = []
        self.attempts: list[Row] = []
        self.events: list[Row] = []
        self.on_send: Callable[[int, int, int], None] | None = None  # query, worker, attempt
        self._codec: Any = None
        self._queue: deque[Query] = deque()
        self._inbox: deque[Query] = deque()
        self._called = False
        self._gone = ""
        self._none_since = math.inf
        self._stopping = False
        self._loop = asyncio.new_event_loop()
        self._session: aiohttp.ClientSession
        self._tasks: list[asyncio.Task[None]] = []  # that end with the dispatcher
        self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)

    # From other threads

    def start(self) -> None:
        """Find the workers, wait until each is ready, and send each a query to see how it answers.

        Raises ``UserError`` for one that does not get ready in time, refuses the token or gives no answer; with
        ``Policy.partial`` only where none is left, and others may come later.
        """
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._begin(), self._loop).result()
        except BaseException:
            self.stop()
            raise

    def submit(
        self, rid: int, ids: Sequence[int], max_new: int, on_first: OnFirst, on_done: OnDone, on_more: OnMore = None
    ) -> None:
        """Take a query; only notes it."""
        self._inbox.append(Query(rid, ids, max_new, on_first, on_done))
        if not self._called:  # one call for all that come until the loop looks
            self._called = True
            self._loop.call_soon_threadsafe(self._take)

    def record(self, began_s: float = 0.0) -> Row:
        """Return rows of the workers, of what was lost when, and of the requests in flight; in seconds from ``began_s``."""
        own = [row for row in self.attempts if row["sent_s"] >= began_s]
        sent, answered = (
            Counter(row["worker"] for row in rows) for rows in (own, [row for row in own if not row["error"]])
        )
        workers = []
        for worker, says in zip(self.workers, self.counters(), strict=True):
            row = {
                "worker": worker.index,
                "url": worker.url,
                "model": worker.model,
                "asked_in": "text" if worker.text else "ids",
            }
            row |= {"sent": sent[worker.index], "answered": answered[worker.index]}
            row |= {"state": "up" if worker.ready else "down", "down_by": "" if worker.ready else worker.reason}
            row |= {name: says.get(theirs) for name, theirs in MEMORY.items()}
            lacking = [name for name in MEMORY if row[name] is None]
            workers.append(row | {"why": dict.fromkeys(lacking, "the worker does not state it in its /metrics")})
        inflight = in_flight(own, len(workers), began_s)
        lost = losses(self.events, self.attempts, began_s)
        return {
            "workers": workers,
            "losses": lost,
            "inflight": inflight,
            "stated": self.stated,
            "counted": self.counted,
        }

    def stop(self) -> None:
        """End the thread; what is left fails."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def cpu_s(self) -> float:
        """Return the processor time of the dispatcher's thread so far."""
        assert self._thread.ident
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def counters(self) -> list[Row]:
        """Return the numbers of each worker's ``/metrics`` by name; empty where it has none."""
        limit = aiohttp.ClientTimeout(total=self.policy.probe_limit_s)

        async def ask(worker: Worker) -> Row:
            with contextlib.suppress(Exception):  # whatever it sends, it is no number of a run
                async with self._ask("GET", f"{worker.url}/metrics", timeout=limit) as response:
                    read = METRIC.findall(await _body(response)) if response.status == 200 else []
                    return {name: number for name, value in read if math.isfinite(number := float(value))}
            return {}

        async def ask_all() -> list[Row]:
            return await asyncio.gather(*map(ask, self.workers))

        return asyncio.run_coroutine_threadsafe(ask_all(), self._loop).result()

    # In the loop

    def _ask(self, method: str, url: str, **more: Any) -> Any:
        """Send a request, with the token; a redirect is not followed, since it would carry the token elsewhere."""
        return self._session.request(method, url, allow_redirects=False, **more)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _begin(self) -> None:
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self.settings.token}"} if self.settings.token else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=self.policy.stall_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=SKIPPED_HEADERS,
            auto_decompress=False,
        )
        urls = [url for given in self.settings.urls for url in await _addresses(given)]
        self.workers = [Worker(index, url) for index, url in enumerate(dict.fromkeys(urls))]
        end = time.monotonic() + self.policy.start_s
        for error in await asyncio.gather(
            *(self._greet(worker, end) for worker in self.workers), return_exceptions=True
        ):
            if error is not None and not (isinstance(error, UserError) and self.policy.partial):
                raise error
        if not any(worker.ready for worker in self.workers):
            raise UserError(f"no worker is left: {'; '.join(worker.reason for worker in self.workers)}")
        self.facts = {"workers": [worker.url for worker in self.workers]}
        work = [self._count_out(), *(self._watch(worker) for worker in self.workers)]
        self._tasks = [self._loop.create_task(each) for each in work]

    async def _greet(self, worker: Worker, end: float) -> None:
        """Wait for a worker, and meet it. Raises ``UserError`` for one that is not there in time."""
        try:
            while (status := await self._health(worker)) != 200:
                if status in REDIRECTS:
                    raise UserError(f"worker {worker.url} answers {status}: {REDIRECTED}")
                if time.monotonic() > end:
                    late = f"was not ready within {self.policy.start_s:g} s ({worker.reason})"
                    raise UserError(f"worker {worker.url} {late}: start it, or correct workers=")
                await asyncio.sleep(0.05)
            await self._meet(worker)
        except UserError as error:
            worker.reason = str(error)
            self._note(worker, "down", str(error))
            raise

    async def _meet(self, worker: Worker) -> None:
        """See by queries of two tokens how a worker is asked: by ids or in texts, and by which name.

        Raises ``UserError``, and nothing else, for one that gives no answer within ``stall_s``, whatever it sends.
        """
        # A server that is pinned to a model of another name than it lists takes queries without a name.
        ways = [(False, True), (True, True), *([(True, False)] if not self.policy.model else [])]
        errors = dict[str, None]()
        for worker.text, named in ways:
            try:
                if worker.text and self._codec is None:
                    self._codec = await asyncio.to_thread(self._make_codec)
                async with asyncio.timeout(self.policy.stall_s):
                    worker.model, worker.engine = await self._named(worker) if named else ("", worker.engine)
                    await self._exchange(worker, Query(-1, WARM_UP, 2, lambda *_: None, lambda *_: None))
            except Exception as error:
                errors[self._words(error)] = None
                if isinstance(error, (RefusedQuery, WithoutIds)):
                    continue
                break
            worker.ready = worker.met = True
            worker.reason = ""
            return
        raise UserError(f"worker {worker.url} does not answer a query: {'; '.join(errors)}")

    def _make_codec(self) -> Any:
        if not self.settings.model:
            raise RefusedQuery("a tokenizer counts its tokens: set model to the one that it serves")
        try:
            return importlib.import_module(TEXTS).Codec(self.settings.model)
        except ImportError as error:
            raise RefusedQuery(f"a tokenizer counts its tokens, which needs transformers ({error})") from None

    async def _named(self, worker: Worker) -> tuple[str, str]:
        """Return what a worker calls its model: what is asked for, or the first that it names; and the engine of one of the kit."""
        async with self._ask("GET", f"{worker.url}/v1/models") as response:
            if response.status in (401, 403):
                remedy = "set the environment variable BENCHLIB_TOKEN to the worker's"
                raise LostAttempt(f"{response.status}: it refuses the bearer token; {remedy}")
            if response.status in REDIRECTS:
                raise LostAttempt(f"{response.status}: {REDIRECTED}")
            try:
                rows = {_clean(row["id"]): row for row in json.loads(await _body(response))["data"]}
            except (ValueError, KeyError, TypeError):
                rows = {}
        if self.policy.model and rows and self.policy.model not in rows:
            raise LostAttempt(f"it serves {', '.join(rows)} and not {self.policy.model}: correct served_model")
        name = self.policy.model or next(iter(rows), "")
        own = rows.get(name, {}).get("benchlib")
        return name, _clean(own.get("engine", "")) if isinstance(own, dict) else ""

    async def _end(self) -> None:
        self._stopping = True
        self._drop("the dispatcher was stopped")  # before slots get free for what is queued
        open_tasks = [query.task for worker in self.workers for query in worker.open.values() if query.task]
        tasks: list[asyncio.Task[Any]] = [*self._tasks, *open_tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if hasattr(self, "_session"):
            await self._session.close()

    def _take(self) -> None:
        """Move what was submitted to the queue."""
        self._called = False
        while self._inbox:
            self._queue.append(self._inbox.popleft())
        if self._gone or self._stopping:
            self._drop(self._gone or "the dispatcher was stopped")
        self._pump()

    def _drop(self, why: str) -> None:
        while self._inbox:
            self._queue.append(self._inbox.popleft())
        while self._queue:
            query = self._queue.popleft()
            query.on_done(query.rid, [], f"{why}; before: {query.last_error}" if query.last_error else why)

    def _pump(self) -> None:
        """Send what is queued as long as a worker has room for it."""
        while self._queue:
            now, query = time.monotonic(), self._queue[0]
            if now > query.deadline:
                self._queue.popleft()
                query.on_done(query.rid, [], f"not answered within {self.policy.deadline_s:g} s; {query.last_error}")
                continue
            # Most often all are full: then there is nothing to choose.
            full = all(len(worker.open) >= self.policy.cap for worker in self.workers)
            if full or not (worker := self._choose(query)):
                return
            self._send(worker, self._queue.popleft(), now)

    def _choose(self, query: Query) -> Worker | None:
        ready = [worker for worker in self.workers if worker.ready]
        ready = [worker for worker in ready if worker.index not in query.lost_at] or ready
        room = [worker for worker in ready if len(worker.open) < self.policy.cap]
        speeds = {worker.index: worker.tokens / worker.busy_s for worker in ready if worker.tokens}
        usual = sum(speeds.values()) / len(speeds) if speeds else 1.0

        def end_s(worker: Worker) -> float:
            return (worker.work + query.max_new) / speeds.get(worker.index, usual)

        chosen = min(room, key=end_s, default=None)
        # One of the last queries waits for a worker that is full, where it ends sooner there than with who has room.
        last = len(room) < len(ready) and len(self._queue) <= self.policy.cap
        return None if chosen and chosen.open and last and end_s(chosen) > min(map(end_s, ready)) else chosen

    def _send(self, worker: Worker, query: Query, now: float) -> None:
        query.attempt += 1
        query.deadline = min(query.deadline, now + self.policy.deadline_s)
        if self.on_send:
            self.on_send(query.rid, worker.index, query.attempt)
        query.content, query.came, query.moved = None, 0, now
        query.task = self._loop.create_task(self._exchange(worker, query))
        # However the task ends, also before its first step, this is called.
        query.task.add_done_callback(lambda task: self._ended(worker, query, now, task))
        if not worker.open:
            worker.since = now
        worker.open[query.rid] = query
        worker.work += query.max_new

    def _ended(self, worker: Worker, query: Query, sent: float, task: "asyncio.Task[list[int]]") -> None:
        """Complete a query whose attempt has ended, queue it again or let it fail."""
        ids, error, again = list[int](), "", True
        if task.cancelled():
            error, again = query.given_up or (f"{worker.url}: {worker.reason or 'stopped'}", True)
            query.given_up = None
        elif reason := task.exception():
            error, again = f"{worker.url}: {self._words(reason)}", not isinstance(reason, RefusedQuery)
        else:
            ids = task.result()
        if error and again:
            self._lose(worker, error)
        now = time.monotonic()
        worker.open.pop(query.rid, None)
        worker.work -= query.max_new
        worker.tokens, worker.busy_s, worker.since = worker.tokens + len(ids), worker.busy_s + now - worker.since, now
        times = {"sent_s": sent, "ended_s": now}
        self.attempts.append({"query": query.rid, "worker": worker.index, **times, "error": error, "again": again})
        if not error:
            query.on_done(query.rid, ids, "")
        elif again and query.attempt < MAX_ATTEMPTS and not self._stopping and not self._gone:
            query.last_error = error
            query.lost_at.add(worker.index)
            self._queue.appendleft(query)
        else:
            why = self._gone or error
            query.on_done(query.rid, [], f"{why} (after {query.attempt} attempts)" if again else why)
        self._pump()

    async def _exchange(self, worker: Worker, query: Query) -> list[int]:
        """Return the answer of a worker, complete and checked.

        The first token is reported at once. Of those after it only the end has a time: they lie in the stream's buffer until then
        and are read together. To wake this task for each would take more than all else that a query costs.
        """
        asked: Row = {"model": worker.model} if worker.model else {}
        asked |= {"prompt": self._codec.decode(query.ids) if worker.text else [*map(int, query.ids)]}
        asked |= {"max_tokens": query.max_new, "temperature": 0, "stream": True}
        if not worker.text:  # servers of text may refuse a field that they do not know
            asked |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
        ids, words, reason, stated, ended, rest = list[int](), "", "", None, False, b""
        url, body = f"{worker.url}/v1/completions", json.dumps(asked).encode()
        async with self._ask("POST", url, data=body, timeout=NO_TIMER, read_bufsize=BUFFER) as response:
            if response.status != 200:
                await self._refused(response)
            query.content = content = response.content
            while not content.at_eof():
                if query.has_first and not content.is_eof() and content.exception() is None:
                    await content.wait_eof()
                *lines, rest = (rest + await content.readany()).split(b"\n")
                events = [line[5:].strip() for line in lines if line.startswith(b"data:")] if not ended else []
                if b"[DONE]" in events:
                    ended, events = True, events[: events.index(b"[DONE]")]
                read = _read(events, worker.text)
                ids, words, reason = ids + read.ids, words + read.words, read.reason or reason
                stated = read.stated if read.stated is not None else stated
                if worker.text and len(words) > TOKEN_CHARACTERS * query.max_new:
                    raise LostAttempt(f"a text of {len(words)} characters, {query.max_new} tokens were asked for")
                if not query.has_first and (new := self._codec.count(words, False) if worker.text and words else ids):
                    query.has_first = True
                    query.on_first(query.rid, time.monotonic(), new[0])
                if len(ids) > query.max_new:
                    raise LostAttempt(f"{len(ids)} tokens, {query.max_new} were asked for")
        if not ended and not reason:
            raise aiohttp.ClientPayloadError("the stream ended before its end")
        if worker.text:
            ids = self._codec.count(words, reason == "stop")
            if stated is not None and query.rid >= 0:  # a greeting does not count
                self.stated, self.counted = self.stated + stated, self.counted + len(ids)
            stated = None
        if not ids or (stated is not None and stated != len(ids)):
            least = "at least 1" if stated is None else stated
            raise LostAttempt(f"{len(ids)} token ids where {least} tokens are stated")
        return ids

    async def _refused(self, response: aiohttp.ClientResponse) -> None:
        """Raise what a status other than 200 means: what is no fault of the query another worker may answer."""
        if response.status in REDIRECTS:
            raise LostAttempt(f"{response.status}: {REDIRECTED}")
        words = f"{response.status} {(await response.content.read(9_000)).decode(errors='replace').strip()}"
        if response.status in (401, 403):
            raise LostAttempt(f"it refuses the bearer token ({words})")
        raise LostAttempt(words) if response.status in (408, 429) or response.status >= 500 else RefusedQuery(words)

    def _words(self, error: BaseException, limit_s: float | None = None) -> str:
        """Return why there was no answer, as it can be stored: without halves of characters, and without our token.

        aiohttp says ``ssl:default`` of an http address, and nothing of a time that was over.
        """
        words = str(error) or type(error).__name__
        if isinstance(error, aiohttp.ClientPayloadError):
            words = "the stream ended before its end"
        elif isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
            number = error.os_error.errno or 0
            words = os.strerror(number).lower() if number > 0 else error.os_error.strerror or words
        elif isinstance(error, TimeoutError):
            words = str(error) or f"no answer within {limit_s or self.policy.stall_s:g} s"
        elif not isinstance(error, (LostAttempt, RefusedQuery, UserError, aiohttp.ClientError, OSError)):
            words = f"an answer that cannot be read ({type(error).__name__}: {error})"
        return _clean(words.replace(self.settings.token, "...") if self.settings.token else words)

    # Workers that are lost, and come back

    def _lose(self, worker: Worker, why: str) -> None:
        """Send nothing more to a worker until it is healthy again."""
        if worker.ready:
            worker.ready, worker.reason = False, why
            self._note(worker, "down", why)

    def _note(self, worker: Worker, what: str, why: str = "") -> None:
        self.events.append({"t_s": time.monotonic(), "worker": worker.index, "event": what, "because": why, "times": 1})

    async def _health(self, worker: Worker) -> int:
        """Return the status of a worker's answer to the question for its health, 0 where there is none."""
        limit = aiohttp.ClientTimeout(total=self.policy.probe_limit_s)
        try:
            async with self._ask("GET", f"{worker.url}/health", timeout=limit) as response:
                worker.reason = "" if response.status == 200 else f"/health answers {response.status}"
                return int(response.status)
        except Exception as error:
            worker.reason = f"/health: {self._words(error, self.policy.probe_limit_s)}"
            return 0

    async def _watch(self, worker: Worker) -> None:
        """Ask for a worker's health; lose it after two questions without an answer, take it back when it answers."""
        while True:
            await asyncio.sleep(self.policy.probe_s)
            asked = time.monotonic()
            if await self._health(worker) != 200:
                worker.missed += worker.heard < asked  # one that streams is busy, not dead
                if worker.missed >= 2:
                    self._lose(worker, worker.reason)
                    for query in worker.open.values():  # it hangs: their connections may never break
                        self._give_up(query, f"{worker.url}: {worker.reason}", True)
                continue
            worker.missed = 0
            if not worker.met:
                try:
                    await self._meet(worker)
                except UserError as error:
                    worker.reason = str(error)
            elif not worker.ready:
                worker.ready = True
            else:
                continue
            if worker.ready:
                self._note(worker, "up", "its /health answers")
                self._none_since, self._gone = math.inf, ""
                self._pump()

    async def _count_out(self) -> None:
        """Let everything fail when no worker was ready for ``gone_s``; end queries that stand still or have no time left.

        A timer for each query would be set again for each of its bytes, which takes as long as to read them.
        """
        while True:
            await asyncio.sleep(min(0.1, self.policy.gone_s / 4))
            now = time.monotonic()
            for worker in self.workers:
                for query in worker.open.values():
                    self._look(worker, query, now)
            self._none_since = math.inf if any(worker.ready for worker in self.workers) else min(self._none_since, now)
            if now - self._none_since >= self.policy.gone_s and not self._gone:
                reasons = "; ".join(f"{worker.url}: {worker.reason}" for worker in self.workers)
                self._gone = f"no worker was left for {self.policy.gone_s:g} s ({reasons})"
                self._drop(self._gone)
            self._pump()

    def _look(self, worker: Worker, query: Query, now: float) -> None:
        """See whether something came of a query since the last time."""
        came = query.content.total_bytes if query.content else 0
        if came != query.came:
            query.came, query.moved = came, now
            worker.heard = now
        if now > query.deadline:
            self._give_up(query, f"not answered within {self.policy.deadline_s:g} s, at last by {worker.url}", False)
        elif came > 2 * BUFFER:  # more than that is not taken from the wire
            self._give_up(query, f"{worker.url}: an answer of more than {came / 1e6:.0f} MB", True)
        elif now - query.moved > self.policy.stall_s:
            self._give_up(query, f"{worker.url}: nothing came for {self.policy.stall_s:g} s", True)

    def _give_up(self, query: Query, why: str, again: bool) -> None:
        assert query.task
        query.given_up = why, again
        query.task.cancel()


class WithoutIds(LostAttempt):
    """An answer in text alone."""


async def _body(response: aiohttp.ClientResponse) -> str:
    """Return the text of an answer. Raises ``LostAttempt`` for more than ``MAX_BYTES``."""
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) > MAX_BYTES:
            raise LostAttempt(f"an answer of more than {MAX_BYTES:,} bytes")
    return data.decode(errors="replace")


def _clean(value: Any) -> str:
    """Return words of a worker as they can be stored: JSON may hold halves of characters."""
    return str(value).encode(errors="replace").decode()[:300]


def losses(events: Sequence[Row], attempts: Sequence[Row], began_s: float = 0.0) -> list[Row]:
    """Return when workers were lost and came back, and when their queries were sent again, by worker and reason; in s from ``began_s``."""
    rows = [row | {"t_s": max(0.0, row["t_s"] - began_s)} for row in events]  # before it: not there at the start
    lost: dict[tuple[int, str], list[float]] = {}
    for row in attempts:
        if row["error"] and row["again"]:
            lost.setdefault((row["worker"], row["error"].partition(": ")[2] or row["error"]), []).append(row["ended_s"])
    for (worker, because), ends in lost.items():
        row = {"t_s": max(0.0, min(ends) - began_s), "worker": worker, "event": "requeued", "because": because}
        rows.append(row | {"times": len(ends)})
    return sorted(rows, key=lambda row: row["t_s"])


def in_flight(attempts: Sequence[Row], workers: int, began_s: float = 0.0, points: int = POINTS) -> list[Row]:
    """Return how many requests each worker had at equal distances in time, from ``began_s`` to the end of the last."""
    rows: list[Row] = []
    end = max((row["ended_s"] for row in attempts), default=began_s)
    moments = [began_s + (end - began_s) * number / (points - 1) for number in range(points)]
    for worker in range(workers if attempts else 0):
        own = [row for row in attempts if row["worker"] == worker]
        sent, ended = (sorted(row[name] for row in own) for name in ("sent_s", "ended_s"))
        counts = [bisect_right(sent, moment) - bisect_right(ended, moment) for moment in moments]
        rows.append({"worker": worker, "open": counts})
    return rows


class _Read(NamedTuple):
    """What events bring: token ids, text, why the answer ended ('': it goes on), the count of tokens that they state."""

    ids: list[int]
    words: str
    reason: str
    stated: int | None


def _read(events: Sequence[bytes], text: bool) -> _Read:
    """Read events, all by one call of the parser. Raises ``LostAttempt`` for a malformed one, and without ids but for ``text``."""
    ids, words, reason, stated = list[int](), "", "", None
    data = b"[%b]" % b",".join(events)
    try:
        for values in json.loads(data):
            if "error" in values:
                raise LostAttempt(str(values["error"])[:9_000])  # cut to 300 once the token is out of it
            if usage := values.get("usage"):
                stated = usage["completion_tokens"]
                if type(stated) is not int or not 0 <= stated < MAX_ID:
                    raise TypeError
            for choice in values["choices"]:
                new, piece = choice.get("token_ids"), choice.get("text") or ""
                if new is None and piece and not text:
                    raise WithoutIds("text without token ids: the server does not know return_token_ids")
                ids += new or []
                words += piece
                reason = choice.get("finish_reason") or reason
    except LostAttempt:
        raise
    except Exception as error:
        raise LostAttempt(f"a malformed event ({type(error).__name__}): {data[1:81]!r}") from None
    if ids and not (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < MAX_ID):
        raise LostAttempt(f"token ids are not integers: {str(ids)[:80]}")
    return _Read(ids, words, str(reason), stated)


async def _addresses(given: str) -> list[str]:
    """Return the URLs of a worker: itself, or one for each address of its name where it begins with ``dns+``."""
    try:
        parts = checked(given)
    except ValueError as error:
        raise UserError(f"workers: {error}") from None
    if not given.startswith(DNS):
        return [given.rstrip("/")]
    port = parts.port or PORTS[parts.scheme]
    try:
        rows = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"workers: {parts.hostname} has no address: {error}") from None
    hosts = sorted({str(row[4][0]) for row in rows})
    return [f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}" for host in hosts]
