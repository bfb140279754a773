"""The engine ``http``: sends queries to one or more OpenAI-compatible servers, and loses none with a server that is lost.

An event loop in a thread of its own holds a queue. Each query goes to the worker with a free slot that would be done with it
first: least outstanding tokens over measured tokens per second; the last ones wait for a full worker that is that much faster.
A query comes back to the front of the queue when its
connection breaks, its stream ends early or stands still, or its answer makes no sense; the worker is asked for its ``/health``
until it answers again. A query fails, and is counted, at its deadline, when its servers refuse it, after ``MOST_ATTEMPTS``,
or when no worker was left for ``gone_s``. A worker that gave nonsense three times in a row gets nothing more.

Workers say at the start which model they serve, and by ``/tokenize`` how they cut a text; those that differ are refused, and one that
comes back with another model gets nothing. ``Settings.text``: the server knows no token ids. Then prompts are sent as texts, and
the tokens of an answer are those that the kit's tokenizer finds in its text.
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
from benchlib.workloads.llm.engines import CANCELLED, MEMORY, OnDone, OnFirst, OnMore, Settings

MOST_ATTEMPTS = 8  # of a query: one that ends every worker it meets must not end them all
NONSENSE = 3  # wrong answers in a row, after which a worker is trusted no more
MEMORY_S = 10.0  # time constant of the measured speed
WARM_UP = [7, 11, 13]  # a prompt that is in no data set
TEXTS = "benchlib.workloads.llm.texts"  # imported in text mode alone: it needs transformers
# Cut by each worker's tokenizer at the start, where it has one to ask.
EXAMPLE = "A tokenizer of another model cuts this sentence, 12.5% of it or more, at other places."

PEAKS = ("bytes_per_s", "flop_per_s")  # of an answer of /peaks
# Of Prometheus' text format: a name with its labels, a number.
METRIC = re.compile(r"^(?!#)(\S.*) (\S+)$", re.MULTILINE)

# Of a query: the dispatcher looks after all of them at once, and an answer is read when it is whole.
UNASKED = ("Accept", "Accept-Encoding", "User-Agent")  # headers that no worker needs: they cost both sides
NO_TIMER, BUFFER = aiohttp.ClientTimeout(total=None, sock_connect=5), 2**22
MOST_BYTES = 2**20  # of any other answer
TOKEN_CHARACTERS = 256  # that one token stands for at most: a longer text is not counted, which would take seconds
MOST_ID = 2**31  # above any token id: LoadGen takes 32 bits

Row = dict[str, Any]


@dataclass(frozen=True)
class Policy:
    """How queries are sent, in seconds where a field ends on ``_s``. ``weighted`` false: each worker gets as many queries."""

    cap: int = 16  # queries that a worker has at once
    weighted: bool = True
    deadline_s: float = 60.0  # of a query, from its first sending on
    stall_s: float = 20.0  # without a byte from the worker: the attempt is lost
    gone_s: float = 3.0  # without any worker: what is left fails
    probe_s: float = 0.5  # between two questions for the health of a worker
    probe_limit_s: float = 2.0  # for the answer
    start_s: float = 120.0  # for all workers to be ready at the start
    late_s: float = 3.0  # for each of them where not all have to be
    model: str = ""  # '': the first that the worker names
    partial: bool = False  # start with the workers that are there


@dataclass
class Query:
    """One query and what became of it so far."""

    rid: int
    body: bytes
    max_new: int
    on_first: OnFirst
    on_done: OnDone
    attempt: int = 0
    deadline: float = math.inf
    has_first: bool = False
    last_error: str = ""
    avoid: int = -1  # the worker that lost it last: another one takes it, where there is another
    task: "asyncio.Task[list[int]] | None" = None  # of the attempt under way
    content: aiohttp.StreamReader | None = None  # of its answer
    came: int = 0  # bytes of it, when that was looked at last
    moved: float = 0.0  # when there were more
    # Why the attempt was ended: outcome, words, whether another one may do.
    given_up: tuple[str, str, bool] | None = None


@dataclass
class Worker:
    """A server. ``work`` are the tokens that it may still have to give; ``lost`` attempts were given to others."""

    index: int
    url: str
    ready: bool = False
    refused: str = ""  # why it gets nothing more
    reason: str = "not asked yet"  # why it is not ready
    model: str = ""
    says: Row = field(default_factory=dict)  # of itself: model, engine, vocabulary ...; empty until it was greeted
    open: dict[int, Query] = field(default_factory=dict)
    work: int = 0
    done: int = 0
    lost: int = 0
    nonsense: int = 0
    missed: int = 0  # health questions in a row
    heard: float = 0.0
    pause_until: float = 0.0
    idle_slot_s: float = 0.0  # from the end of a query to the next in its slot, while others waited
    freed: list[float] = field(default_factory=list)
    _busy_s: float = 0.0
    _recent: float = 0.0
    _since: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens per second of the last seconds in which it had work; 0 where it has not answered yet."""
        return self._recent / self._busy_s if self._busy_s > 0 else 0.0

    def begin(self, now: float, work: int) -> None:
        """Note that it got a query."""
        if not self.open:
            self._since = now
        self.work += work

    def end(self, now: float, work: int, tokens: int) -> None:
        """Note that a query ended, with so many tokens."""
        self.work -= work
        passed = now - self._since
        forget = math.exp(-passed / MEMORY_S)
        self._busy_s, self._recent, self._since = self._busy_s * forget + passed, self._recent * forget + tokens, now


class _Lost(Exception):
    """An attempt that another worker can make again."""


class _Nonsense(_Lost):
    """A worker's answer that is no answer."""


class _Refused(Exception):
    """A query that every worker would refuse."""


class Dispatcher:
    """See the module. ``attempts`` and ``events`` are the record; times are those of ``time.monotonic()``."""

    def __init__(self, settings: Settings, policy: Policy | None = None) -> None:
        if not settings.urls:
            raise UserError("engine http needs addresses of servers: workers=http://HOST:PORT, separated by commas")
        # Twice what a worker works on: its next query waits there, and not for a way back and forth.
        self.policy = policy or Policy(
            2 * settings.slots, deadline_s=settings.deadline_s, model=settings.served_model, partial=settings.partial
        )
        self._codec: Any = importlib.import_module(TEXTS).Codec(settings.text) if settings.text else None
        self.stated, self.counted = 0, 0  # text mode: tokens that servers state, tokens that the tokenizer counts
        self.facts: dict[str, Any] = {}
        self.failure = ""  # one worker that is gone is not the end; queries fail on their own where all are
        self.workers: list[Worker] = []
        self.attempts: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.on_send: Callable[[int, int, int], None] | None = None  # query, worker, attempt
        self._urls, self._token = settings.urls, settings.token
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
        """Find the workers, wait until each is ready, and send each a query to see that it gives token ids.

        Raises ``UserError`` for one that does not get ready in time, refuses the token, answers without ids or serves
        another model than the others; with ``Policy.partial`` only where none is left, and others may come later.
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
        body = json.dumps(self._codec.decode(ids) if self._codec else list(map(int, ids))).encode()
        self._inbox.append(Query(rid, body, max_new, on_first, on_done))
        if not self._called:  # one call for all that come until the loop looks
            self._called = True
            self._loop.call_soon_threadsafe(self._take)

    def cancel(self, rid: int) -> None:
        """See ``Engine``: the connection to its worker is closed, which frees the slot there."""

        def end() -> None:
            for query in [query for query in self._queue if query.rid == rid]:
                self._queue.remove(query)
                query.on_done(rid, [], CANCELLED)
            for worker in self.workers:
                if asked := worker.open.get(rid):
                    self._give_up(asked, "cancelled", CANCELLED, False)

        self._loop.call_soon_threadsafe(end)

    def record(self, began_s: float = 0.0) -> Row:
        """Return what became of each worker, what it holds, and what was lost when, in seconds from ``began_s``: plain values."""
        mine = [row for row in self.attempts if row["sent_s"] >= began_s]
        sent = Counter(row["worker"] for row in mine)
        answered = Counter(row["worker"] for row in mine if row["outcome"] == "ok")
        workers = [
            {
                "worker": worker.index, "url": worker.url, "sent": sent[worker.index], "answered": answered[worker.index],
                "sent_again": worker.lost,
                "state": "up" if worker.ready else "refused" if worker.refused else "down",
                "why": "" if worker.ready else worker.refused or worker.reason,
                **{name: says.get(theirs) for name, theirs in MEMORY.items()},
            }
            for worker, says in zip(self.workers, self.counters(), strict=True)
        ]  # fmt: skip
        counted = {"counted": {"stated": self.stated, "counted": self.counted}} if self._codec else {}
        lost = losses(self.events, self.attempts, began_s)
        return {"workers": workers, "losses": lost, "inflight": in_flight(mine, len(workers), began_s), **counted}

    def device_memory(self) -> tuple[float | None, str]:
        """See ``Engine``: nothing is held here."""
        return None, "the workers hold it: see the record"

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

    def peaks(self) -> list[Row]:
        """Return what each worker measures of the machine under it, all at the same time: those that share it share that, too.

        ``bytes_per_s`` and ``flop_per_s``; nothing of one that does not know ``/peaks``.
        """
        read = lambda text: {name: float(json.loads(text)[name]) for name in PEAKS}  # noqa: E731
        return self._each("/peaks", self.policy.start_s, read)

    def counters(self) -> list[Row]:
        """Return the numbers of each worker's ``/metrics`` by name; empty where it has none."""
        read = lambda text: {name: float(value) for name, value in METRIC.findall(text)}  # noqa: E731
        return self._each("/metrics", self.policy.probe_limit_s, read)

    def _each(self, path: str, limit_s: float, read: Callable[[str], Row]) -> list[Row]:
        """Ask all workers at once, and return what is read in each answer; nothing where there is none."""
        limit = aiohttp.ClientTimeout(total=limit_s)

        async def ask(worker: Worker) -> Row:
            with contextlib.suppress(Exception):  # whatever it sends, it is no number of a run
                async with self._ask("GET", worker.url + path, timeout=limit) as response:
                    return read(await _body(response)) if response.status == 200 else {}
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
        headers |= {"Authorization": f"Bearer {self._token}"} if self._token else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=self.policy.stall_s)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
        jar = aiohttp.DummyCookieJar()
        self._session = aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=timeout, cookie_jar=jar, skip_auto_headers=UNASKED,
            auto_decompress=False,
        )  # fmt: skip
        urls = [url for given in self._urls for url in await _addresses(given)]
        self.workers = [Worker(index, url) for index, url in enumerate(dict.fromkeys(urls))]
        end = time.monotonic() + self._patience_s
        absent = await asyncio.gather(*(self._greet(worker, end) for worker in self.workers), return_exceptions=True)
        for worker, error in zip(self.workers, absent, strict=True):
            if error is None:
                continue
            if not isinstance(error, UserError) or not self.policy.partial:
                raise error
            worker.reason = str(error)
            self._note(worker, "down", str(error))
        if not any(worker.ready for worker in self.workers):
            raise UserError(f"no worker is left: {'; '.join(worker.reason for worker in self.workers)}")
        self._agree()
        self.facts = {
            "workers": [worker.url for worker in self.workers],
            "models": [worker.model for worker in self.workers],
            "says": [{name: value for name, value in worker.says.items() if name != "cut"} for worker in self.workers],
        }
        work = [self._count_out(), *(self._watch(worker) for worker in self.workers)]
        self._tasks = [self._loop.create_task(each) for each in work]

    @property
    def _patience_s(self) -> float:
        return self.policy.late_s if self.policy.partial else self.policy.start_s

    async def _greet(self, worker: Worker, end: float) -> None:
        """Wait for a worker, and meet it. Raises ``UserError`` for one that is not there in time."""
        while (status := await self._health(worker)) != 200:
            if status in REDIRECTS:
                raise UserError(f"worker {worker.url} answers {status}: {REDIRECTED}")
            if time.monotonic() > end:
                late = f"was not ready within {self._patience_s:g} s ({worker.reason})"
                raise UserError(f"worker {worker.url} {late}: start it, or correct workers=")
            await asyncio.sleep(0.05)
        await self._meet(worker)

    async def _meet(self, worker: Worker) -> None:
        """See by a query of two tokens that a worker speaks with token ids and takes our token.

        Raises ``UserError``, and nothing else, for one that does not, within ``stall_s``, whatever it sends.
        """
        what = "a query in words" if self._codec else "a query of 3 token ids"
        prompt = json.dumps("News: " if self._codec else WARM_UP).encode()
        try:
            async with asyncio.timeout(self.policy.stall_s):
                says = await self._identity(worker)
                worker.model = says["model"]
                await self._exchange(worker, Query(-1, prompt, 2, lambda *_: None, lambda *_: None))
        except Exception as error:
            raise UserError(f"worker {worker.url} does not answer {what}: {self._words(error)}") from None
        worker.ready, worker.reason, worker.says = True, "", says

    async def _identity(self, worker: Worker) -> Row:
        """Return what a worker says of itself: ``model``, ``root`` where it lies, what a worker of the kit adds, and how it cuts a text.

        The model is the one that is asked for, or the first that it names; servers refuse other names than theirs.
        """
        async with self._ask("GET", f"{worker.url}/v1/models") as response:
            if response.status in (401, 403):
                remedy = "set the environment variable BENCHLIB_TOKEN to the worker's"
                raise _Refused(f"{response.status}: it refuses the bearer token; {remedy}")
            if response.status in REDIRECTS:
                raise _Refused(f"{response.status}: {REDIRECTED}")
            try:
                named = {_clean(row["id"]): row for row in json.loads(await _body(response))["data"]}
            except (ValueError, KeyError, TypeError):
                named = {}
        if self.policy.model and named and self.policy.model not in named:
            raise _Refused(f"it serves {', '.join(named)} and not {self.policy.model}: correct served_model")
        name = self.policy.model or next(iter(named), "")
        row = named.get(name, {})
        says: Row = {
            "model": name,
            "root": _clean(row.get("root") or ""),
            "owned_by": _clean(row.get("owned_by") or ""),
        }
        return says | _said(row.get("benchlib")) | {"cut": await self._cut(worker, name)}

    async def _cut(self, worker: Worker, model: str) -> list[int] | None:
        """Return the tokens that a worker cuts the example into (vLLM, SGLang and the kit answer ``/tokenize``), or None."""
        limit = aiohttp.ClientTimeout(total=self.policy.probe_limit_s)
        asked = json.dumps({"model": model, "prompt": EXAMPLE})
        try:
            async with self._ask("POST", f"{worker.url}/tokenize", data=asked, timeout=limit) as response:
                tokens = json.loads(await _body(response))["tokens"] if response.status == 200 else None
        except (aiohttp.ClientError, OSError, _Nonsense, ValueError, KeyError, TypeError):
            return None
        return tokens if _are_ids(tokens) else None

    def _agree(self) -> None:
        """Raise ``UserError`` where two workers that are there differ in the model or the tokenizer."""
        there = [worker for worker in self.workers if worker.ready]
        for worker in there[1:]:
            if why := unlike(there[0].says, worker.says):
                differ = f"{there[0].url} and {worker.url} differ, {why}"
                raise UserError(f"workers: {differ}; a result of both would be of neither: leave one out")

    async def _returned(self, worker: Worker) -> None:
        """Take a worker back that is healthy again, if it is what it was: what others say counts for one that was never there."""
        agreed = worker.says or next((other.says for other in self.workers if other.says), {})
        try:
            await self._meet(worker)
        except UserError as error:
            worker.reason = str(error)
            return
        if why := unlike(agreed, worker.says):
            worker.says, worker.ready = agreed, False
            self._distrust(worker, f"{worker.url} came back as another: {why}", NONSENSE)

    async def _end(self) -> None:
        self._stopping = True
        self._drop("the dispatcher was stopped")  # before slots get free for what is queued
        tasks: list[asyncio.Task[Any]] = [
            *self._tasks,
            *(query.task for worker in self.workers for query in worker.open.values() if query.task),
        ]
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
        cap = self.policy.cap
        while self._queue:
            now = time.monotonic()
            if now > self._queue[0].deadline:
                query = self._queue.popleft()
                query.on_done(query.rid, [], f"not answered within {self.policy.deadline_s:g} s; {query.last_error}")
                continue
            # Most often all are full: then there is nothing to choose.
            full = all(len(worker.open) >= cap for worker in self.workers)
            if full or not (worker := self._choose(self._queue[0], now)):
                return
            self._send(worker, self._queue.popleft(), now)

    def _choose(self, query: Query, now: float) -> Worker | None:
        ready = [worker for worker in self.workers if worker.ready and now >= worker.pause_until]
        ready = [worker for worker in ready if worker.index != query.avoid] or ready
        if not self.policy.weighted:  # as many for each: who has fewest is next, and is waited for
            worker = min(ready, key=lambda worker: worker.done + len(worker.open), default=None)
            return worker if worker and len(worker.open) < self.policy.cap else None
        room = [worker for worker in ready if len(worker.open) < self.policy.cap]
        usual = sum(speeds) / len(speeds) if (speeds := [worker.speed for worker in ready if worker.speed]) else 1.0

        def end_s(worker: Worker) -> float:
            return (worker.work + query.max_new) / (worker.speed or usual)

        chosen = min(room, key=end_s, default=None)
        # One of the last queries waits for a worker that is full, where it ends sooner there than with who has room.
        last = len(room) < len(ready) and len(self._queue) <= self.policy.cap
        if chosen and last and chosen.open and end_s(chosen) > min(map(end_s, ready)):
            return None
        return chosen

    def _send(self, worker: Worker, query: Query, now: float) -> None:
        query.attempt += 1
        query.deadline = min(query.deadline, now + self.policy.deadline_s)
        if worker.freed:
            worker.idle_slot_s += now - worker.freed.pop()
        if self.on_send:
            self.on_send(query.rid, worker.index, query.attempt)
        worker.begin(now, query.max_new)
        query.content, query.came, query.moved = None, 0, now
        query.task = self._loop.create_task(self._exchange(worker, query))
        # However the task ends, also before its first step, this is called.
        query.task.add_done_callback(lambda task: self._ended(worker, query, now, task))
        worker.open[query.rid] = query

    def _ended(self, worker: Worker, query: Query, sent: float, task: "asyncio.Task[list[int]]") -> None:
        """Complete a query whose attempt has ended, queue it again or let it fail."""
        ids: list[int] = []
        outcome, error, again = "ok", "", True
        if task.cancelled():
            outcome, error, again = query.given_up or ("lost", f"{worker.url}: {worker.reason or 'stopped'}", True)
            query.given_up = None
            if outcome == "stalled":
                self._lose(worker, error)
        elif reason := task.exception():
            error = f"{worker.url}: {self._words(reason)}"
            if isinstance(reason, _Refused):
                outcome, again = "failed", False
            elif isinstance(reason, (_Lost, aiohttp.ClientError, OSError)) and not isinstance(reason, _Nonsense):
                outcome = "lost"
                if not isinstance(reason, _Lost):
                    self._lose(worker, error)
            else:
                outcome = "nonsense"
        else:
            ids, worker.nonsense = task.result(), 0
        if outcome == "nonsense":
            self._distrust(worker, error)
        now = time.monotonic()
        worker.open.pop(query.rid, None)
        worker.end(now, query.max_new, len(ids))
        self.attempts.append({
            "query": query.rid, "worker": worker.index, "attempt": query.attempt, "sent_s": sent, "ended_s": now,
            "tokens": len(ids), "outcome": outcome, "error": error,
        })  # fmt: skip
        if outcome == "ok":
            worker.done += 1
            query.on_done(query.rid, ids, "")
        elif again and query.attempt < MOST_ATTEMPTS and not self._stopping and not self._gone:
            worker.lost += 1
            query.last_error, query.avoid = error, worker.index
            self._queue.appendleft(query)
        else:
            why = self._gone or error
            query.on_done(query.rid, [], f"{why} (after {query.attempt} attempts)" if again else why)
        if self._queue:
            worker.freed.append(now)
            self._pump()

    async def _exchange(self, worker: Worker, query: Query) -> list[int]:
        """Return the answer of a worker, complete and checked.

        The first token is reported at once. Of those after it only the end has a time: they lie in the stream's buffer until then
        and are read together. To wake this task for each would take more than all else that a query costs.
        """
        # Servers of text may refuse a field that they do not know.
        more = b"" if self._codec else b'"return_token_ids":true,"stream_options":{"include_usage":true},'
        body = b'{"model":%b,"prompt":%b,"max_tokens":%d,%b"temperature":0,"stream":true}' % (
            json.dumps(worker.model).encode(), query.body, query.max_new, more,
        )  # fmt: skip
        ids, words, reason, stated, ended, rest = list[int](), "", "", None, False, b""
        url = f"{worker.url}/v1/completions"
        async with self._ask("POST", url, data=body, timeout=NO_TIMER, read_bufsize=BUFFER) as response:
            if response.status != 200:
                await self._refused(worker, response)
            query.content = content = response.content
            while not content.at_eof():
                if query.has_first and not content.is_eof() and content.exception() is None:
                    await content.wait_eof()
                *lines, rest = (rest + await content.readany()).split(b"\n")
                events = [line[5:].strip() for line in lines if line.startswith(b"data:")] if not ended else []
                if b"[DONE]" in events:
                    ended, events = True, events[: events.index(b"[DONE]")]
                read = _read(events, bool(self._codec))
                ids, words, reason = ids + read.ids, words + read.words, read.reason or reason
                stated = read.stated if read.stated is not None else stated
                if self._codec and len(words) > TOKEN_CHARACTERS * query.max_new:
                    raise _Nonsense(f"a text of {len(words)} characters, {query.max_new} tokens were asked for")
                if not query.has_first:
                    new = self._codec.count(words, False) if self._codec and words else ids
                    if new:
                        query.has_first = True
                        query.on_first(query.rid, time.monotonic(), new[0])
                if len(ids) > query.max_new:
                    raise _Nonsense(f"{len(ids)} tokens, {query.max_new} were asked for")
        if not ended:
            raise aiohttp.ClientPayloadError("the stream ended before its end")
        if self._codec:
            ids = self._codec.count(words, reason == "stop")
            if len(ids) > 2 * query.max_new + 8:
                raise _Nonsense(f"a text of {len(ids)} tokens, {query.max_new} were asked for")
            if stated is not None:
                if query.rid >= 0:  # a greeting does not count
                    self.stated, self.counted = self.stated + stated, self.counted + len(ids)
                stated = len(ids)
        if not ids or (stated is not None and stated != len(ids)):
            least = "at least 1" if stated is None else stated
            raise _Nonsense(f"{len(ids)} token ids where {least} tokens are stated")
        return ids

    async def _refused(self, worker: Worker, response: aiohttp.ClientResponse) -> None:
        """Raise what a status other than 200 means."""
        if response.status in REDIRECTS:
            raise _Nonsense(f"{response.status}: {REDIRECTED}")
        words = self._plain(
            f"{response.status} {(await response.content.read(9_000)).decode(errors='replace').strip()}"
        )
        if response.status == 429:  # it is there, and full
            worker.pause_until = time.monotonic() + 0.1
            self._loop.call_at(worker.pause_until + 0.001, self._pump)
            raise _Lost(words)
        if response.status == 503:
            self._lose(worker, words)
            raise _Lost(words)
        if response.status >= 500:
            raise _Nonsense(words)
        if response.status in (401, 403):
            self._distrust(worker, f"it refuses the bearer token ({words})", NONSENSE)
            raise _Lost(words)
        raise _Refused(words)

    def _words(self, error: BaseException, limit_s: float | None = None) -> str:
        """Return why there was no answer: aiohttp says ``ssl:default`` of an http address, and nothing of a time that was over."""
        if isinstance(error, aiohttp.ClientPayloadError):
            return "the stream ended before its end"
        if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
            number = error.os_error.errno or 0
            return os.strerror(number).lower() if number > 0 else error.os_error.strerror or str(error)
        if isinstance(error, TimeoutError):
            return str(error) or f"no answer within {limit_s or self.policy.stall_s:g} s"
        if not isinstance(error, (_Lost, _Refused, aiohttp.ClientError, OSError)):
            return self._plain(f"an answer that cannot be read ({type(error).__name__}: {error})")
        return self._plain(str(error) or type(error).__name__)

    def _plain(self, words: str) -> str:
        """Return what a worker says as it can be stored: without halves of characters, and without our token."""
        return _clean(words.replace(self._token, "...") if self._token else words)

    # Workers that are lost, and come back

    def _lose(self, worker: Worker, why: str) -> None:
        """Send nothing more to a worker until it is healthy again."""
        if worker.ready:
            worker.ready, worker.reason = False, why
            worker.freed.clear()
            self._note(worker, "down", why)

    def _distrust(self, worker: Worker, why: str, times: int = 1) -> None:
        worker.nonsense += times
        if worker.nonsense >= NONSENSE and not worker.refused:
            worker.refused = why
            self._lose(worker, why)

    def _note(self, worker: Worker, what: str, why: str = "") -> None:
        self.events.append({"t_s": time.monotonic(), "worker": worker.index, "event": what, "reason": why})

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
        while not worker.refused:
            await asyncio.sleep(self.policy.probe_s)
            asked = time.monotonic()
            if await self._health(worker) == 200:
                worker.missed = 0
                if not worker.ready and not worker.refused:
                    await self._returned(worker)
                    if not worker.ready:
                        continue
                    self._note(worker, "up", "its /health answers, and it serves the same model")
                    self._none_since, self._gone = math.inf, ""
                    self._pump()
                continue
            worker.missed += worker.heard < asked  # one that streams is busy, not dead
            if worker.missed >= 2:
                self._lose(worker, worker.reason)
                for query in worker.open.values():  # it hangs: their connections may never break
                    self._give_up(query, "lost", f"{worker.url}: {worker.reason}", True)

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
                reasons = "; ".join(worker.refused or f"{worker.url}: {worker.reason}" for worker in self.workers)
                self._gone = f"no worker was left for {self.policy.gone_s:g} s ({reasons})"
                self._drop(self._gone)
            if self._queue:
                self._pump()

    def _look(self, worker: Worker, query: Query, now: float) -> None:
        """See whether something came of a query since the last time."""
        came = query.content.total_bytes if query.content else 0
        if came != query.came:
            query.came, query.moved = came, now
            worker.heard = now
        if now > query.deadline:
            why = f"not answered within {self.policy.deadline_s:g} s, at last by {worker.url}"
            self._give_up(query, "failed", why, False)
        elif came > 2 * BUFFER:  # more than that is not taken from the wire
            self._give_up(query, "nonsense", f"{worker.url}: an answer of more than {came / 1e6:.0f} MB", True)
        elif now - query.moved > self.policy.stall_s:
            self._give_up(query, "stalled", f"{worker.url}: nothing came for {self.policy.stall_s:g} s", True)

    def _give_up(self, query: Query, outcome: str, why: str, again: bool) -> None:
        assert query.task
        query.given_up = outcome, why, again
        query.task.cancel()


async def _body(response: aiohttp.ClientResponse) -> str:
    """Return the text of an answer. Raises ``_Nonsense`` for more than ``MOST_BYTES``."""
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) > MOST_BYTES:
            raise _Nonsense(f"an answer of more than {MOST_BYTES:,} bytes")
    return data.decode(errors="replace")


def _clean(value: Any) -> str:
    """Return a name that a worker states, as it can be stored: JSON may hold halves of characters."""
    return str(value).encode(errors="replace").decode()[:300]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0 and max(value) < MOST_ID


def _said(more: Any) -> Row:
    """Return what a worker of the kit adds to its model: words, numbers and lists of token ids; anything else is left out."""
    rows = more.items() if isinstance(more, dict) else ()
    return {
        name: value
        for name, value in rows
        if name.isprintable()
        and (
            (isinstance(value, str) and value.isprintable())
            or (isinstance(value, (int, float)) and abs(value) < 2**63)
            or _are_ids(value)
        )
    }


def unlike(one: Row, other: Row) -> str:
    """Return in what two workers differ by what they say of themselves, '' where nothing is known to differ.

    Models are compared by the last part of name and folder: one worker may have it by hub name, another from a disk.
    """
    if not one or not other:
        return ""
    names = [{str(says.get(key) or "").rstrip("/").rpartition("/")[2].lower() for key in ("model", "root")} - {""} for says in (one, other)]  # fmt: skip
    if all(names) and not names[0] & names[1]:
        return f"models {one['model']} and {other['model']}"
    for key, words in (("vocabulary", "vocabularies of {} and {} tokens"), ("ends", "end tokens {} and {}")):
        if key in one and key in other and one[key] != other[key]:
            return words.format(one[key], other[key])
    if one.get("cut") and other.get("cut") and one["cut"] != other["cut"]:
        return "tokenizers, which cut the same sentence differently"
    return ""


def losses(events: Sequence[Row], attempts: Sequence[Row], began_s: float = 0.0) -> list[Row]:
    """Return when workers were lost and came back, and when their queries were sent again, by worker and reason; in s from ``began_s``."""
    rows = [
        row | {"t_s": max(0.0, row["t_s"] - began_s), "times": 1} for row in events
    ]  # before it: not there at the start
    lost: dict[tuple[int, str], list[float]] = {}
    for row in attempts:
        if row["outcome"] not in ("ok", "cancelled"):
            lost.setdefault((row["worker"], row["error"].partition(": ")[2] or row["error"]), []).append(row["ended_s"])
    for (worker, reason), ends in lost.items():
        row = {"t_s": min(ends) - began_s, "worker": worker, "event": "requeued"}
        rows.append(row | {"times": len(ends), "reason": reason})
    return sorted(rows, key=lambda row: row["t_s"])


def in_flight(attempts: Sequence[Row], workers: int, began_s: float = 0.0, points: int = 121) -> list[Row]:
    """Return how many requests each worker had at equal distances in time, from ``began_s`` to the end of the last, in s from it."""
    if not attempts:
        return []
    end = max(row["ended_s"] for row in attempts) - began_s
    rows = []
    for worker in range(workers):
        mine = [row for row in attempts if row["worker"] == worker]
        sent, ended = (sorted(row[name] - began_s for row in mine) for name in ("sent_s", "ended_s"))
        for number in range(points):
            moment = end * number / (points - 1)
            count = bisect_right(sent, moment) - bisect_right(ended, moment)
            rows.append({"t_s": round(moment, 4), "worker": worker, "open": count})
    return rows


class _Read(NamedTuple):
    """What events bring: token ids, text, why the answer ended ('': it goes on), the count of tokens that they state."""

    ids: list[int]
    words: str
    reason: str
    stated: int | None


def _read(events: Sequence[bytes], text: bool) -> _Read:
    """Read events, all by one call of the parser. Raises ``_Nonsense`` for one that is none, and without ids but for ``text``."""
    ids, words, reason, stated = list[int](), "", "", None
    data = b"[%b]" % b",".join(events)
    try:
        for values in json.loads(data):
            if "error" in values:
                raise _Nonsense(str(values["error"])[:9_000])  # cut to 300 once the token is out of it
            if usage := values.get("usage"):
                stated = usage["completion_tokens"]
                if type(stated) is not int or not 0 <= stated < MOST_ID:
                    raise TypeError
            for choice in values["choices"]:
                new, piece = choice.get("token_ids"), choice.get("text") or ""
                if new is None and piece and not text:
                    raise _Nonsense(
                        "text without token ids: the server has to know return_token_ids (vLLM, SGLang of 2026-07); without "
                        "it only `benchlib run inference --set tokens=text` measures it"
                    )
                ids += new or []
                words += piece
                reason = choice.get("finish_reason") or reason
    except _Nonsense:
        raise
    except Exception as error:
        raise _Nonsense(f"an event that is none ({type(error).__name__}): {data[1:81]!r}") from None
    if ids and not _are_ids(ids):
        raise _Nonsense(f"token ids that are none: {str(ids)[:80]}")
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
